"""Samples and batches: bit for bit those of megatron-core, and the same in every layout."""

import itertools
import sys
import tempfile
import warnings
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import data
from config.command_line import parse
from config.messages import UserError
from config.schema import Layout
from corpora import blends, sample_order
from corpora.blends import blend_order
from corpora.mapped_files import ArrayCache
from corpora.sample_order import GPTSamples, split_ranges
from corpora.token_files import IndexedDataset, IndexedDatasetWriter
from data import Synthetic, micro_batch

VOCAB = 1000


@pytest.fixture(scope="module")
def megatron():
    """What is needed of megatron-core, imported once: it takes some seconds."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine
        from megatron.core.datasets import (
            blended_megatron_dataset_builder,
            blended_megatron_dataset_config,
            gpt_dataset,
            helpers,
            indexed_dataset,
            utils,
        )
    return SimpleNamespace(
        ParamFactory=blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder,
        GPTDataset=gpt_dataset.GPTDataset,
        GPTDatasetConfig=gpt_dataset.GPTDatasetConfig,
        IndexedDataset=indexed_dataset.IndexedDataset,
        Split=utils.Split,
        build_blending_indices=helpers.build_blending_indices,
        parse_split=blended_megatron_dataset_config.parse_and_normalize_split,
        split_matrix=blended_megatron_dataset_config.convert_split_vector_to_split_matrix,
    )


def megatron_config(megatron, prefixes, weights, split: str, seq_length: int, seed: int, folder):
    tokenizer = SimpleNamespace(unique_identifiers=OrderedDict(), vocab_size=VOCAB, eod=0, pad=-1)
    return megatron.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=(prefixes, weights),
        split=split,
        path_to_cache=folder,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


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
# The order, against megatron-core
# ------------------------------------------------------------------------------------------------


def assert_same_order(megatron, lengths, first, num_samples, seq_length, seed, contents=20):
    """Both orders of the sequences from `first` on, and the tokens of some samples."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_corpus(f"{folder}/c", lengths)
        sequences = range(first, len(lengths))
        ours = GPTSamples(dataset, sequences, num_samples, seq_length, seed, VOCAB)
        theirs = megatron.GPTDataset(
            megatron.IndexedDataset(f"{folder}/c"),
            f"{folder}/c",
            np.array(sequences, np.int32),
            num_samples,
            megatron.Split.train,
            megatron_config(megatron, [f"{folder}/c"], None, "1", seq_length, seed, folder),
        )
        for name in ("document_index", "sample_index", "shuffle_index"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a.dtype == b.dtype
            assert np.array_equal(a, b), name
        assert len(ours) == len(theirs)
        for k in range(min(contents, len(ours))):
            expected, documents = theirs._query_document_sample_shuffle_indices(k)
            sample, spans = ours.sample(k), ours.spans(k)
            assert sample.dtype == np.int64
            assert sample.tolist() == expected.tolist()
            parts = [dataset.get(*span[1:4]) for span in spans]
            assert np.concatenate(parts).tolist() == sample.tolist()
            read = [span.sequence for span in spans]
            assert read == [d for d in documents if lengths[d]]  # no empty span is named
        return ours


@st.composite
def orders(draw):
    """Corpora, often with empty documents, with a split and a request of up to a few epochs."""
    lengths = draw(st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=1, max_size=30))
    first = draw(st.integers(0, len(lengths) - 1))
    tokens = sum(lengths[first:])
    if tokens < 3:
        lengths[-1] = tokens = 3
        tokens = sum(lengths[first:])
    seq_length = draw(st.integers(2, min(tokens - 1, 30)))
    most = 4 * tokens // seq_length
    num_samples = draw(st.one_of(st.none(), st.integers(1, most)))
    return lengths, first, num_samples, seq_length, draw(st.integers(0, 2**32 - 1))


@given(orders())
@settings(max_examples=150, deadline=None)
@example(([0, 0, 5, 0], 0, 7, 2, 1))  # starts, goes on and ends with empty documents
@example(([3, 3, 3], 0, 4, 2, 0))  # samples end where documents do
def test_order_is_megatrons(megatron, case):
    assert_same_order(megatron, *case, contents=5)


@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1])
@pytest.mark.parametrize(
    ("last_epoch", "separate"), [(None, None), (1.0, False), (0.8, False), (0.79, True), (0, True)]
)
def test_the_last_epoch_is_separate_below_80_percent(megatron, seed, last_epoch, separate):
    lengths = np.random.default_rng(seed).integers(0, 60, size=200)
    tokens, seq_length = int(lengths[7:].sum()), 16
    per_epoch, before = (tokens - 1) // seq_length, (2 * tokens - 1) // seq_length
    if last_epoch is None:
        ours = assert_same_order(megatron, lengths, 7, per_epoch, seq_length, seed)
        assert ours.epochs == 1
        return
    wanted = before + max(1, int(last_epoch * per_epoch))
    ours = assert_same_order(megatron, lengths, 7, wanted, seq_length, seed)
    assert ours.epochs == 3
    # If separate, no sample of the first two epochs is left for later.
    assert (set(ours.shuffle_index[:before].tolist()) == set(range(before))) == separate


def test_order_depends_on_every_one_of_its_inputs(tmp_path):
    lengths = [30] * 20
    dataset = write_corpus(f"{tmp_path}/c", lengths)

    def order(first=0, num_samples=None, seq_length=8, seed=1):
        samples = GPTSamples(dataset, range(first, 20), num_samples, seq_length, seed)
        return [samples.sample(k).tolist() for k in range(len(samples))]

    assert order() == order()
    variants = [order(), order(first=1), order(num_samples=100), order(seq_length=9), order(seed=2)]
    assert len({str(variant) for variant in variants}) == len(variants)


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 22])
def test_sample_starts_do_not_depend_on_the_block(monkeypatch, block):
    random = np.random.default_rng(block)
    lengths = random.integers(0, 9, size=50).astype(np.int32)
    lengths[random.integers(50, size=20)] = 0
    order = random.permutation(50).astype(np.int32)
    text = [(p, t) for p, d in enumerate(order) for t in range(lengths[d])]  # one entry per token
    num_samples = (len(text) - 1) // 5
    monkeypatch.setattr(sample_order, "BLOCK", block)
    starts = sample_order.sample_starts(lengths, order, 5, num_samples)
    expected = [(0, 0)] + [text[5 * i] for i in range(1, num_samples + 1)]
    assert [tuple(row) for row in starts.tolist()] == expected


def test_more_tokens_than_32_bits():
    lengths = np.full(9, 2**31 - 1, np.int32)
    order, seq_length = np.arange(9, dtype=np.int32), 2**30
    num_samples = (9 * (2**31 - 1) - 1) // seq_length
    starts = sample_order.sample_starts(lengths, order, seq_length, num_samples)
    expected = [list(divmod(i * seq_length, 2**31 - 1)) for i in range(num_samples + 1)]
    assert starts.tolist() == expected


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
    st.integers(0, 5000),
    st.sampled_from([1, 10, 7.3]),
)
@settings(max_examples=150, deadline=None)
@example([95, 5, 0], 10, 1)  # 9.5 rounds to even
@example([969, 30, 1], 50, 1)
def test_split_is_megatrons(megatron, shares, sequences, divisor):
    split = ",".join(str(share / divisor) for share in shares)
    shares = megatron.parse_split(split)
    matrix = megatron.split_matrix(shares)
    for ours, theirs in zip(split_ranges(split, sequences), matrix, strict=True):
        begin, end = theirs or (0, 0)
        expected = range(round(begin * float(sequences)), round(end * float(sequences)))
        assert ours == expected or (not ours and not expected)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2,3", "0,0,0", "nan,1", "inf,1"])
def test_bad_split(split):
    with pytest.raises(UserError, match="three shares such as 95,5,0, not"):
        split_ranges(split, 10)


# ------------------------------------------------------------------------------------------------
# Blends
# ------------------------------------------------------------------------------------------------


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
    which, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
    megatron.build_blending_indices(which, number, weights, len(weights), size, False)
    for ours in (blend_order(weights, size), blends.one_by_one(weights, size, blends._fill)):
        assert np.array_equal(ours[0], which)
        assert np.array_equal(ours[1], number)
        assert (ours[0].dtype, ours[1].dtype) == (which.dtype, np.int32)


def test_a_long_blend_is_compiled_where_numba_is_installed(monkeypatch):
    """By a stand-in for numba, because the tests do not need it; without it numpy does the work."""
    shares, compiled = blends.normalise([1.0, 2.0, 1e-3]), []
    expected = blends.by_chunks(shares, 1000)
    stand_in = SimpleNamespace(njit=lambda function: compiled.append(function) or function)
    monkeypatch.setattr(blends, "WORTH_COMPILING", 3000)
    for numba, uses in ((stand_in, [blends._fill]), (None, [])):
        compiled.clear()
        monkeypatch.setitem(sys.modules, "numba", numba)
        for size in (999, 1000):
            ours = blend_order(shares, size)
            assert all(np.array_equal(a, b[:size]) for a, b in zip(ours, expected, strict=True))
            assert compiled == (uses if size == 1000 else [])


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
    theirs = megatron.ParamFactory(
        megatron.GPTDataset,
        sizes,
        lambda: True,
        megatron_config(megatron, prefixes, weights, split, 8, 1234, None),
    ).build()
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
    settings = megatron_config(megatron, prefixes, None, "1", 8, 1234, None)
    oracle, _, _ = megatron.ParamFactory(
        megatron.GPTDataset, [400, 0, 0], lambda: True, settings
    ).build()
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
    monkeypatch.setattr(data, "SURPLUS", -0.9)
    train = data.build(config_of([0.5, tmp_path / "a", 0.5, tmp_path / "b"], split="1")).train
    assert [len(train.sample(k)) for k in range(len(train))] == [9] * 40


def test_a_blend_of_too_few_samples(tmp_path):
    parts = [samples_of(write_corpus(f"{tmp_path}/{name}", [9])) for name in "ab"]
    assert [len(part) for part in parts] == [1, 1]
    order = blends.find_blend_order([0.5, 0.5], 4, ArrayCache())
    with pytest.raises(UserError, match=r"takes 2 samples from .*/a, which has 1"):
        blends.Blend(parts, order)


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


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=30),
    st.integers(2, 20),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_the_stable_order_of_a_longer_run_begins_with_that_of_a_shorter_one(
    lengths, seq_length, epochs, seed
):
    if sum(lengths) <= seq_length:
        lengths[0] += seq_length + 1
    tokens = sum(lengths)
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_corpus(f"{folder}/c", lengths)

        def order(samples, kind="stable"):
            about = range(len(lengths)), samples, seq_length, seed, VOCAB, kind
            return GPTSamples(dataset, *about)

        whole = order((epochs * tokens - 1) // seq_length)
        assert whole.epochs == epochs
        assert sorted(whole.shuffle_index.tolist()) == list(range(len(whole)))
        each = whole.document_index.reshape(epochs, -1)
        assert all(sorted(epoch) == list(range(len(lengths))) for epoch in each.tolist())
        for shorter in {1, len(whole) // 2 or 1, len(whole) - 1 or 1}:
            short = order(shorter)
            assert short.epochs <= epochs
            for k in range(len(short)):
                assert short.sample(k).tolist() == whole.sample(k).tolist()


def test_megatrons_order_is_not_stable_and_the_stable_one_is_shuffled(tmp_path):
    dataset = write_corpus(f"{tmp_path}/c", [9] * 200)

    def first(kind, count, seed=1):
        samples = GPTSamples(dataset, range(200), count, 8, seed, VOCAB, kind)
        return [samples.spans(k)[0].sequence for k in range(200)]

    assert first("megatron", 200) != first("megatron", 500)
    stable = first("stable", 200)
    assert stable == first("stable", 500)
    assert stable != first("stable", 200, seed=2)
    assert sum(a < b for a, b in itertools.pairwise(stable)) < 140  # not in the order of the file


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
