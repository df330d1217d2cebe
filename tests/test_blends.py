"""Blends: if this failed, corpora would be mixed otherwise than megatron-core mixes them."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_data import VOCAB, config_of, samples_of, three, write_corpus

import data
from benchmarks.megatron_data import Megatron
from config.messages import UserError
from corpora import blends, corpus_splits
from corpora.blends import blend_order
from corpora.mapped_files import ArrayCache


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
@settings(max_examples=100, deadline=None)
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


def test_parts_without_weights_are_an_epoch_of_each_as_often_as_needed(megatron, tmp_path):
    """Megatron's dataset ends with the first epoch; later ones have other orders of the parts."""
    prefixes = [f"{tmp_path}/{name}" for name in "ab"]
    for prefix, documents in zip(prefixes, (30, 10)):
        write_corpus(prefix, [24] * documents)
    train = data.build(config_of(prefixes, split="1", steps=50)).train
    epoch = 89 + 29  # samples
    settings = megatron.config(prefixes, None, "1", 8, 1234, None, VOCAB)
    oracle, _, _ = megatron.build([400, 0, 0], settings)
    assert (len(train), len(oracle)) == (400, epoch)
    for k in range(epoch):
        assert train.sample(k)[:-1].tolist() == oracle[k]["tokens"].tolist()
    for first in (0, epoch, 2 * epoch):
        read = [train.spans(k)[0].prefix for k in range(first, first + epoch)]
        assert [read.count(prefix) for prefix in prefixes] == [89, 29]
    orders = {str([train.spans(k) for k in range(e * epoch, (e + 1) * epoch)]) for e in range(3)}
    assert len(orders) == 3
    assert train.file_of(399) == train.spans(399)[0].prefix + ".bin"


def test_a_blend_asks_for_half_a_percent_more(tmp_path):
    """1,005 samples for 1,000: a part that has one less in an epoch starts a second."""
    for name, samples in (("a", 1004), ("b", 1005)):
        write_corpus(f"{tmp_path}/{name}", [8 * samples + 1])
    config = config_of([1, tmp_path / "a", 1, tmp_path / "b"], split="1", steps=250)
    assert [part.epochs for part in data.build(config).train.parts] == [2, 1]


def test_a_blend_asks_each_part_for_what_it_takes(tmp_path, monkeypatch):
    """Where the surplus is too small, Megatron raises IndexError; here the parts grow."""
    for name in "ab":
        write_corpus(f"{tmp_path}/{name}", [9] * 10)
    monkeypatch.setattr(corpus_splits, "SURPLUS", -0.9)
    train = data.build(config_of([0.5, tmp_path / "a", 0.5, tmp_path / "b"], split="1")).train
    assert [len(train.sample(k)) for k in range(len(train))] == [9] * 40


def test_a_blend_of_too_few_samples(tmp_path):
    parts = [samples_of(write_corpus(f"{tmp_path}/{name}", [9])) for name in "ab"]
    assert [len(part) for part in parts] == [1, 1]
    order = blends.find_blend_order([0.5, 0.5], 4, ArrayCache())
    with pytest.raises(UserError, match=r"takes 2 samples from .*/a, which has 1"):
        blends.Blend(parts, order, 4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["0.3", "a", "0.7", "b"], (["a", "b"], [0.3, 0.7])),
        ([3, "a"], (["a"], [3.0])),
        (["0.3", "a", "b"], None),
        (["0.3", "a", "b", "c"], None),
        (["a", "0.3"], None),
        (["a", "0.3", "b", "0.7"], None),
        (["0.3", "0.7"], None),
        (["1"], None),
        (["0", "a"], None),
        (["-1", "a", "2", "b"], None),
        (["nan", "a"], None),
        (["1", "synthetic"], None),
    ],
)
def test_parse_blend(words, expected):
    if expected:
        assert blends.parse_blend(tuple(words)) == expected
    else:
        with pytest.raises(UserError, match="--data"):
            blends.parse_blend(tuple(words))
