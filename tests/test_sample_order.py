"""The order of samples: if this failed, a run would not repeat one of megatron-core."""

import tempfile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks import ROOT
from test_data import VOCAB, write_corpus

from base.errors import UserError
from benchmarks.peers.data_cases import REASONS, compare_all
from benchmarks.peers.megatron_data import Megatron
from corpora import sample_order
from corpora.sample_order import GPTSamples, split_ranges


@pytest.fixture(scope="module")
def megatron():
    """megatron-core, imported once."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    return Megatron()


def assert_same_order(megatron, lengths, first, num_samples, seq_length, seed, contents=20):
    """Both orders of the sequences from `first` on, and the tokens of some samples."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_corpus(f"{folder}/c", lengths)
        sequences = range(first, len(lengths))
        ours = GPTSamples(dataset, sequences, num_samples, seq_length, seed, VOCAB)
        theirs = megatron.samples(
            f"{folder}/c", num_samples, folder, False, seq_length, seed, first
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


@given(orders(), st.sampled_from([1, 2, 7, 1 << 22]))
@settings(max_examples=150)
@example(([0, 0, 5, 0], 0, 7, 2, 1), 2)  # starts, goes on and ends with empty documents
@example(([3, 3, 3], 0, 4, 2, 0), 1)  # samples end where documents do
def test_order_is_megatrons(megatron, case, block):
    """With blocks of few samples, too, in which the starts of samples are looked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_order, "BLOCK", block)
        assert_same_order(megatron, *case, contents=5)


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
@settings(max_examples=150)
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


@given(orders(), st.integers(1, 5))
@settings(max_examples=60)
def test_the_stable_order_of_a_longer_run_begins_with_that_of_a_shorter_one(case, epochs):
    lengths, _, _, seq_length, seed = case
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_corpus(f"{folder}/c", lengths)

        def order(samples):
            every = range(len(lengths))
            return GPTSamples(dataset, every, samples, seq_length, seed, VOCAB, "stable")

        whole = order((epochs * sum(lengths) - 1) // seq_length)
        assert whole.epochs == epochs
        assert sorted(whole.shuffle_index.tolist()) == list(range(len(whole)))
        each = whole.document_index.reshape(epochs, -1)
        assert all(sorted(epoch) == list(range(len(lengths))) for epoch in each.tolist())
        for count in {1, len(whole) // 2 or 1, len(whole) - 1 or 1}:
            short = order(count)
            for k in range(len(short)):
                assert short.sample(k).tolist() == whole.sample(k).tolist()


# ------------------------------------------------------------------------------------------------
# Random runs; benchmarks/peers/data_cases.py has more of them
# ------------------------------------------------------------------------------------------------


def test_random_runs_are_megatrons_or_refused_for_a_reason_that_the_docs_name(megatron):
    outcomes = compare_all(megatron, range(40))
    assert [outcome for outcome in outcomes if "DIFFERS" in outcome] == []
    assert outcomes["equal"] >= 15
    page = " ".join((ROOT / "docs" / "data.md").read_text().split())
    assert [words for words in REASONS.values() if words not in page] == []
