"""The tuner's search: if this failed, it would measure too much or stop before the fastest."""

import math

import pytest

from benchmarks.planner import tune_replay
from tools.tuner.search import Search


def grid(slope: float) -> tuple[list[float], list[tuple], list[float]]:
    """Nearly equal predictions of 4 tp x 4 pp, their features, and real seconds, of which a
    doubling of tp costs `slope`.
    """
    predicted, positions, real = [], [], []
    for tp in range(4):
        for pp in range(4):
            predicted.append(1.0 + 0.01 * pp)
            positions.append((tp, pp))
            real.append(2.0 * math.exp(slope * tp))
    return predicted, positions, real


def drive(search: Search, real: list[float]) -> list[int]:
    order = []
    while (index := search.next()) is not None:
        search.add(index, real[index])
        order.append(index)
    return order


def test_the_first_is_the_one_predicted_fastest():
    search = Search([1.0, 0.5, 2.0], [(0,), (1,), (2,)])
    assert search.next() == 1
    assert search.best is None


def test_a_factor_common_to_all_is_no_reason_to_go_on():
    """A machine ten times slower than assumed, ratios as predicted: two or three runs decide."""
    predicted = [1.0 + 0.3 * number for number in range(10)]
    search = Search(predicted, [(number, 0) for number in range(10)])
    assert drive(search, [10 * seconds for seconds in predicted])[0] == 0
    assert len(search.measured) <= 3


def test_a_slope_is_learned_and_used():
    """Predicted: tp does not matter; measured: tp 8 is the fastest."""
    predicted, positions, real = grid(-0.1)
    search = Search(predicted, positions)
    order = drive(search, real)
    assert positions[search.best][0] == 3
    assert len(order) <= len(predicted) // 2
    mean, _ = search.posterior()
    assert mean[0] - mean[-4] == pytest.approx(0.3, abs=0.05), "also of those without a run"


def test_more_is_known_of_what_was_measured_than_of_the_rest():
    predicted, positions, real = grid(0.3)
    search = Search(predicted, positions)
    search.add(5, real[5])
    _, deviation = search.posterior()
    assert deviation[5] == min(deviation)
    assert deviation[0] > 2 * deviation[5]


def test_failures_are_results():
    predicted, positions, _ = grid(0.3)
    search = Search(predicted, positions)
    first = search.next()
    search.add(first, None)
    assert search.best is None
    assert search.next() not in (None, first)
    for index in range(len(predicted)):
        search.add(index, None)
    assert search.next() is None
    assert search.best is None


def test_a_repeated_layout_counts_by_its_mean():
    search = Search([1.0, 1.0], [(0,), (1,)], noise=0.1)
    search.add(0, 1.0)
    search.add(1, 1.05)
    assert search.best == 0
    search.add(0, 1.4)
    assert search.best == 1


# -- on measured choices ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["in-sample", "held out"])
def test_published_tables(kind):
    found = tune_replay.published(kind)
    assert len(found) == 12
    assert sum(one.found_at is not None and one.found_at <= 3 for one in found) >= 10
    assert max(one.regret_after[-1] for one in found) <= 0.01
    assert sum(len(one.order) for one in found) < sum(one.rows for one in found)


def test_the_space_measured_in_full():
    found, facts = tune_replay.measured_space()
    assert 40 <= found.rows <= 60
    assert found.within(tune_replay.GOAL) <= found.rows // 4
    assert found.regret_after[-1] <= tune_replay.GOAL
    assert facts["times"] > 3
    ends = [one.regret_after[-1] for one in tune_replay.measured_space_with_noise(0.03)]
    assert sum(ends) / len(ends) < 0.01
    assert all(
        len(one.order) <= found.rows // 4 for one in tune_replay.measured_space_with_noise(0.1)
    )
