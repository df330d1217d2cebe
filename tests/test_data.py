"""Samples and batches: if this failed, what a run trains on would depend on its layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from base.errors import UserError
from config.command_line import parse
from config.schema import Layout
from corpora.sample_order import GPTSamples
from corpora.token_files import IndexedDataset, IndexedDatasetWriter
from data import Synthetic, micro_batch

VOCAB = 1000


def write_corpus(prefix: str, lengths, seed: int = 0) -> IndexedDataset:
    """One document per length, of random tokens."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, VOCAB) as writer:
        for length in lengths:
            writer.add_document(random.integers(VOCAB, size=length))
    return IndexedDataset(prefix)


def samples_of(dataset, num_samples=None, seq_length=8, seed=1234, vocab_size=VOCAB):
    return GPTSamples(dataset, range(len(dataset)), num_samples, seq_length, seed, vocab_size)


def three(splits: data.Splits) -> list:
    """Train, validation and test."""
    return [splits.train, splits.validation, splits.test]


def config_of(data, **options):
    """A configuration as it comes from the command line, small."""
    options = {"seq_length": 8, "vocab_size": VOCAB, "global_batch_size": 8, "steps": 5} | options
    flags = ["--layers", "1", "--hidden", "8", "--heads", "1", "--data", *map(str, data)]
    for name, value in options.items():
        flags += ["--" + name.replace("_", "-"), str(value)]
    return parse(flags)


# ------------------------------------------------------------------------------------------------
# A user's mistakes
# ------------------------------------------------------------------------------------------------


def test_too_little_text(tmp_path):
    dataset = write_corpus(f"{tmp_path}/c", [4, 4, 0])
    assert len(samples_of(dataset, seq_length=7)) == 1
    with pytest.raises(UserError, match=r"0 to 3 of the 3 in .*/c hold 8 tokens.*length\(8\) \+ 1"):
        samples_of(dataset, seq_length=8)
    with pytest.raises(UserError, match=r"sequences 2 to 3 of the 3 in .*/c hold 0 tokens"):
        GPTSamples(dataset, range(2, 3), 5, 1, 0)
    with pytest.raises(UserError, match=r"seed\(4294967296\)"):
        samples_of(dataset, seq_length=7, seed=2**32)


def test_a_test_split_without_a_sample_is_a_note(tmp_path):
    """Evaluation on the validation split is asked for by --eval-samples, a share of a split not."""
    write_corpus(f"{tmp_path}/c", [30] * 9 + [4])
    splits = data.build(config_of([tmp_path / "c"], split="8,1,1", eval_samples=4))
    assert splits.test is None
    assert len(splits.validation) >= 4
    (note,) = splits.notes
    assert "no test loss: test samples (--split 8,1,1): sequences 9 to 10" in note
    assert "hold 4 tokens, but one sample takes seq-length(8) + 1" in note


@pytest.mark.parametrize(
    ("documents", "split", "advice"),
    [
        ([30] * 12, "969,30,1", "--split 95,5,0 would do"),  # 12 * 0.969 rounds to all of them
        ([30] * 8, "969,30,1", "--split 90,10,0 would do"),
        ([30] * 2, "969,30,1", "--split 50,50,0 would do"),
        ([30] * 8 + [2], "8,1,0", "--split 80,20,0 would do"),  # the last document is too short
        ([900], "969,30,1", "no split of the 1 documents of "),
        ([5, 5], "1,1", "no split of the 2 documents of "),
    ],
)
def test_a_split_that_is_too_small_names_one_that_would_do(tmp_path, documents, split, advice):
    write_corpus(f"{tmp_path}/c", documents)
    with pytest.raises(UserError) as refused:
        data.build(config_of([tmp_path / "c"], split=split, eval_samples=4, eval_every=1))
    assert advice in str(refused.value)
    if advice.endswith("would do"):
        other = advice.split()[1]
        data.build(config_of([tmp_path / "c"], split=other, eval_samples=4, eval_every=1))


@pytest.mark.parametrize("foreign", [VOCAB, -1])
def test_a_foreign_token_is_named_before_it_is_used(tmp_path, foreign):
    with IndexedDatasetWriter(f"{tmp_path}/c", 70000) as writer:
        writer.add_document([1] * 5, [2] * 5)
        writer.add_document([3] * 4 + [4] * 6)
    tokens = np.fromfile(tmp_path / "c.bin", np.int32)
    tokens[14] = foreign
    tokens.tofile(tmp_path / "c.bin")
    message = rf"c: token 4 of sequence 2 \(document 1\) has id {foreign}, but vocab-size is 1000"
    samples = samples_of(IndexedDataset(f"{tmp_path}/c"), seq_length=19)
    with pytest.raises(UserError, match=message):
        micro_batch(samples, 0, 0, Layout(dp=1), 0)


# ------------------------------------------------------------------------------------------------
# Batches
# ------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=60)
def test_a_global_batch_does_not_depend_on_the_layout(dp, size, count, step):
    batch = dp * size * count
    samples = Synthetic(VOCAB, 8, seed=5)
    layout = Layout(micro_batch_size=size, dp=dp)
    parts = [
        micro_batch(samples, step * batch, index, layout, rank)
        for index in range(count)
        for rank in range(dp)
    ]
    whole = np.stack([samples.sample(step * batch + i) for i in range(batch)])
    for place, expected in enumerate((whole[:, :-1], whole[:, 1:])):
        found = torch.cat([part[place] for part in parts])
        assert np.array_equal(found.numpy(), expected)
        assert found.dtype == torch.int64
    assert parts[0][0].shape == parts[0][1].shape == (size, 8)


def test_synthetic_samples_follow_from_their_position():
    sample = Synthetic(VOCAB, 64, seed=1).sample(7)
    assert sample.shape == (65,)
    assert sample.tolist() == Synthetic(VOCAB, 64, seed=1).sample(7).tolist()
    for seed, number in ((1, 8), (2, 7)):
        assert Synthetic(VOCAB, 64, seed).sample(number).tolist() != sample.tolist()
    tokens = np.concatenate([Synthetic(VOCAB, 64, seed=1).sample(k) for k in range(200)])
    assert (tokens.min(), tokens.max()) == (0, VOCAB - 1)


def test_build_reads_what_the_run_needs(tmp_path):
    write_corpus(f"{tmp_path}/c", [30] * 100)
    splits = data.build(config_of([tmp_path / "c"], split="8,1,1", steps=30, eval_samples=16))
    assert len(splits.train) >= 240
    assert len(splits.validation) >= 16
    assert len(splits.test) >= 16
    seen = [{p.sequence for k in range(len(s)) for p in s.spans(k)} for s in three(splits)]
    assert seen == [set(range(80)), set(range(80, 90)), set(range(90, 100))]
    splits = data.build(config_of([tmp_path / "c"]))
    assert splits.validation is None
    assert splits.test is None
    splits = data.build(config_of(["synthetic"], eval_samples=4))
    assert len({str(s.sample(0)) for s in three(splits)}) == 3
    assert data.build(config_of(["synthetic"])).validation is None
    assert data.build(config_of(["synthetic"], seed=7)).train.seed == 7
