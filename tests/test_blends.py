"""Blends: if this failed, corpora would be mixed otherwise than megatron-core mixes them."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_data import VOCAB, config_of, three, write_corpus

import data
from base.errors import UserError
from benchmarks.peers.megatron_data import Megatron
from corpora import blends
from corpora.blends import blend_order


@pytest.fixture(scope="module")
def megatron():
    """megatron-core, imported once."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    return Megatron()


@given(
    st.lists(
        st.one_of(st.sampled_from([1.0, 2.0, 3.0, 0.1, 0.3]), st.floats(1e-5, 1.0)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4000),
)
@settings(max_examples=100)
@example([0.5, 0.5], 1)
@example([1.0] * 7, 3000)  # every step is a tie
@example([1.0, 1e-4, 1e-4, 1e-3], 4000)  # guesses of the rare ones are often wrong
def test_blend_order_is_megatrons(megatron, weights, size):
    weights = blends.normalise(weights)
    which, number = megatron.blend(weights, size)
    ours = blend_order(weights, size)
    assert np.array_equal(ours[0], which)
    assert np.array_equal(ours[1], number)
    assert (ours[0].dtype, ours[1].dtype) == (which.dtype, np.int32)


@pytest.mark.parametrize("weights", [None, [0.3, 0.6, 0.1], [1, 5, 3]])
@pytest.mark.parametrize(
    ("split", "steps", "eval_samples"),
    [("8,1,1", 9, 20), ("1,1,0", 30, 5), ("1,1,0", 41, 324)],  # the last: nearly a whole epoch
)
def test_a_blend_is_megatrons(megatron, tmp_path, weights, split, steps, eval_samples):
    """From the flags to the tokens: requests, split, parts and order are all those of Megatron."""
    random = np.random.default_rng(steps)
    prefixes = [f"{tmp_path}/{name}" for name in "abc"]
    for i, prefix in enumerate(prefixes):
        write_corpus(prefix, random.integers(0, 60, size=60), seed=i)
    words = prefixes if weights is None else [w for pair in zip(weights, prefixes) for w in pair]
    config = config_of(words, split=split, steps=steps, eval_samples=eval_samples)
    splits = data.build(config)
    sizes = [steps * 8, eval_samples, eval_samples]
    settings = megatron.config(prefixes, weights, split, 8, 1234, None, VOCAB)
    theirs = megatron.build(sizes, settings)
    for ours, oracle, size in zip(three(splits), theirs, sizes, strict=True):
        assert (ours is None) == (oracle is None)
        if ours is None:
            continue
        assert len(ours) == size <= len(oracle)
        for k in range(size):
            assert ours.sample(k)[:-1].tolist() == oracle[k]["tokens"].tolist()
            assert ours.spans(k)[0].prefix == prefixes[oracle[k]["dataset_id"]]


def test_parts_without_weights_are_an_epoch_of_each_as_often_as_needed(tmp_path):
    """Megatron's dataset ends with the first epoch; later ones have other orders of the parts."""
    prefixes = [f"{tmp_path}/{name}" for name in "ab"]
    for prefix, documents in zip(prefixes, (30, 10)):
        write_corpus(prefix, [24] * documents)
    train = data.build(config_of(prefixes, split="1", steps=50)).train
    epoch = 89 + 29  # samples
    assert len(train) == 400
    orders = set()
    for first in (0, epoch, 2 * epoch):
        spans = [train.spans(k) for k in range(first, first + epoch)]
        read = [each[0].prefix for each in spans]
        assert [read.count(prefix) for prefix in prefixes] == [89, 29]
        orders.add(str(spans))
    assert len(orders) == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("a", "b"), (["a", "b"], None)),
        (("0.3", "a", "0.7", "b"), (["a", "b"], [0.3, 0.7])),
        ((3, "a"), (["a"], [3.0])),
    ],
)
def test_parse_blend(words, expected):
    assert blends.parse_blend(words) == expected


WRONG = "0.3 a b|0.3 a b c|a 0.3|a 0.3 b 0.7|0.3 0.7|1|0 a|-1 a 2 b|nan a|1 synthetic"


@pytest.mark.parametrize("words", WRONG.split("|"))
def test_words_that_are_no_blend(words):
    with pytest.raises(UserError, match="--data"):
        blends.parse_blend(tuple(words.split()))
