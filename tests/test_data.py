"""Samples and batches: if this failed, what a run trains on would depend on its layout."""

import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from config.command_line import parse
from config.messages import UserError
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


def test_an_empty_split_is_named(tmp_path):
    write_corpus(f"{tmp_path}/c", [30] * 10)
    with pytest.raises(
        UserError, match=r"validation samples \(--split 1,0,0\): sequences 10 to 10"
    ):
        data.build(config_of([tmp_path / "c"], split="1,0,0", eval_samples=4))
    with pytest.raises(UserError, match=r"train samples \(--split 0,1,0\): sequences 0 to 0 of"):
        data.build(config_of([tmp_path / "c"], split="0,1,0"))


@pytest.mark.parametrize("foreign", [VOCAB, -1])
def test_a_foreign_token_is_named_before_it_is_used(tmp_path, foreign):
    with IndexedDatasetWriter(f"{tmp_path}/c", 70000) as writer:
        writer.add_document([1] * 5, [2] * 5)
        writer.add_document([3] * 4 + [2 * VOCAB] + [4] * 5)
    raw = bytearray((tmp_path / "c.bin").read_bytes())
    raw[14 * 4 : 15 * 4] = foreign.to_bytes(4, "little", signed=True)
    (tmp_path / "c.bin").write_bytes(raw)
    message = rf"c: token 4 of sequence 2 \(document 1\) has id {foreign}, but vocab-size is 1000"
    samples = samples_of(IndexedDataset(f"{tmp_path}/c"), seq_length=19)
    with pytest.raises(UserError, match=message):
        micro_batch(samples, 0, 0, Layout(dp=1), 0)
    fine = samples_of(IndexedDataset(f"{tmp_path}/c"), seq_length=19, vocab_size=None)
    assert foreign in fine.sample(0)


def test_reading_past_the_end(tmp_path):
    samples = samples_of(write_corpus(f"{tmp_path}/c", [81]))  # ten samples
    layout = Layout(micro_batch_size=2, dp=2)
    micro_batch(samples, 4, 1, layout, 0)
    with pytest.raises(UserError, match="samples 10 to 12 are needed, but there are only 10"):
        micro_batch(samples, 4, 1, layout, 1)


# ------------------------------------------------------------------------------------------------
# Batches
# ------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_global_batch_does_not_depend_on_the_layout(dp, size, count, step, synthetic):
    batch = dp * size * count
    with tempfile.TemporaryDirectory() as folder:
        if synthetic:
            samples = Synthetic(VOCAB, 8, seed=5)
        else:
            samples = samples_of(write_corpus(f"{folder}/c", [7] * 50), 4 * batch)
        layout = Layout(micro_batch_size=size, dp=dp)
        parts = [
            micro_batch(samples, step * batch, index, layout, rank)
            for index in range(count)
            for rank in range(dp)
        ]
        whole = replace(layout, micro_batch_size=batch, dp=1)
        tokens, labels = micro_batch(samples, step * batch, 0, whole, 0)
        assert torch.equal(torch.cat([part[0] for part in parts]), tokens)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)
        expected = [samples.sample(step * batch + i) for i in range(batch)]
        assert np.array_equal(tokens.numpy(), np.stack(expected)[:, :-1])
        assert np.array_equal(labels.numpy(), np.stack(expected)[:, 1:])
        assert parts[0][0].shape == parts[0][1].shape == (size, 8)
        assert tokens.dtype == labels.dtype == torch.int64
        assert tokens.is_contiguous()
        assert labels.is_contiguous()


def test_synthetic_samples_follow_from_their_position():
    samples = Synthetic(VOCAB, 64, seed=1)
    assert samples.sample(7).tolist() == Synthetic(VOCAB, 64, seed=1).sample(7).tolist()
    assert samples.sample(0).shape == (65,)
    other = [
        samples.sample(8),
        Synthetic(VOCAB, 64, 2).sample(7),
        Synthetic(VOCAB, 64, 1, 1).sample(7),
    ]
    for sample in other:
        assert sample.tolist() != samples.sample(7).tolist()
    tokens = np.concatenate([samples.sample(k) for k in range(200)])
    assert (tokens.min(), tokens.max()) == (0, VOCAB - 1)
    assert len(np.unique(Synthetic(3, 64, seed=1).sample(2**40))) == 3
    assert samples.spans(0) == []


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


def test_an_order_that_no_memory_holds_is_a_sentence(tmp_path):
    write_corpus(f"{tmp_path}/c", [30] * 10)
    with pytest.raises(UserError, match=r"^no memory for the order of 8(,000){5} train samples$"):
        data.build(config_of([tmp_path / "c"], split="1", steps=10**15))
