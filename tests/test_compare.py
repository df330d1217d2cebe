"""The comparison of runs fails where it must: NaN at any place, other lengths, nothing at all."""

import math

import numpy as np
import pytest
import torch
from compare import assert_close, relative_difference

LOSSES = [4.0, 3.0, 2.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(len(LOSSES)))
def test_a_number_that_is_not_finite_fails_at_any_place(bad, place):
    wrong = [*LOSSES[:place], bad, *LOSSES[place + 1 :]]
    for values, others in ((wrong, LOSSES), (LOSSES, wrong), (wrong, wrong)):
        for form in (list, tuple, np.array, torch.tensor):
            assert relative_difference(form(values), form(others)) == math.inf
            with pytest.raises(AssertionError, match="step 3: inf > 1e"):
                assert_close(form(values), form(others), 1e300, "step 3")
            with pytest.raises(AssertionError):
                assert_close(form(values), form(others), 1e300, scale=1.0)


@pytest.mark.parametrize(
    ("values", "others"),
    [
        (LOSSES[:-1], LOSSES),
        (LOSSES, LOSSES[:-1]),
        ([], LOSSES),
        ([], []),
        ([LOSSES, []], [LOSSES, [1.0]]),
        ([[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0]]),
        (torch.ones(2, 3), torch.ones(3, 2)),
        ({"a": 1.0}, {"b": 1.0}),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}),
        ({"a": 1.0, "b": math.nan}, {"a": 1.0, "b": 1.0}),
    ],
)
def test_other_lengths_and_nothing_fail(values, others):
    assert relative_difference(values, others) == math.inf
    with pytest.raises(AssertionError):
        assert_close(values, others, 1e300)


def test_the_difference_is_the_largest_one():
    assert relative_difference(LOSSES, LOSSES) == 0.0
    assert relative_difference([4.0, 3.3, 2.0, 1.01], LOSSES) == pytest.approx(0.1)
    assert relative_difference([4.0, -3.0], [4.0, 3.0]) == 2.0
    assert relative_difference([[1.0, 0.0], 2.0], [[1.0, 0.0], 4.0]) == 0.5
    assert relative_difference({"a": 1.0, "b": 3.0}, {"b": 2.0, "a": 1.0}) == 0.5
    assert relative_difference(0.1, 0.0) == math.inf
    assert relative_difference(torch.tensor([0.1, 9.0]), torch.tensor([0.0, 10.0]), scale=10) == 0.1
    assert relative_difference([1.0], [0.0], scale=0.0) == math.inf


def test_a_difference_beyond_the_tolerance_fails():
    assert assert_close([1.0, 2.0], [1.0, 2.002], 1e-3) == pytest.approx(1e-3, rel=2e-3)
    with pytest.raises(AssertionError, match="weights"):
        assert_close([1.0, 2.0], [1.0, 2.003], 1e-3, "weights")
