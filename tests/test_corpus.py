"""Token files: if this failed, damage would be trained on, or be read by no other."""

import os
import struct
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.errors import UserError
from corpora import token_files
from corpora.token_files import IndexedDataset, IndexedDatasetWriter


@pytest.fixture(scope="module")
def megatron():
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


@st.composite
def corpora(draw):
    """(vocab_size, documents): each a list of sequences, any of them possibly empty."""
    vocab_size = draw(st.sampled_from([2, 300, 65499, 65500, 250880]))
    token = st.integers(0, vocab_size - 1)
    document = st.lists(st.lists(token, max_size=6), max_size=3)
    return vocab_size, draw(st.lists(document, max_size=6))


def write(prefix: str, vocab_size: int, documents) -> None:
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_document(*document)


def write_megatron(megatron, prefix: str, vocab_size: int, documents, multimodal=False) -> None:
    dtype = megatron.DType.optimal_dtype(vocab_size)
    builder = megatron.IndexedDatasetBuilder(prefix + ".bin", dtype, multimodal)
    for document in documents:
        for sequence in document:
            builder.add_item(SimpleNamespace(numpy=lambda ids=sequence: ids))
        builder.end_document()
    builder.finalize(prefix + ".idx")


def contents(dataset) -> list[list[int]]:
    return [dataset.get(i).tolist() for i in range(len(dataset))]


def flat(documents) -> list[list[int]]:
    return [list(sequence) for document in documents for sequence in document]


# ------------------------------------------------------------------------------------------------
# What is written is read
# ------------------------------------------------------------------------------------------------


@given(corpora())
@settings(max_examples=60)
def test_same_bytes_as_megatron(megatron, case):
    vocab_size, documents = case
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/ours", vocab_size, documents)
        write_megatron(megatron, f"{folder}/theirs", vocab_size, documents)
        for suffix in (".bin", ".idx"):
            ours, theirs = (Path(folder, name + suffix) for name in ("ours", "theirs"))
            assert ours.read_bytes() == theirs.read_bytes()


@given(corpora(), st.booleans())
@settings(max_examples=40)
def test_each_reads_the_others_files(megatron, case, multimodal):
    vocab_size, documents = case
    documents = [*documents, [[0, 1]]]  # megatron cannot map an empty .bin
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/ours", vocab_size, documents)
        theirs = megatron.IndexedDataset(f"{folder}/ours")
        assert contents(theirs) == flat(documents)
        # With modes the index has an optional array at its end, which we do not need.
        write_megatron(megatron, f"{folder}/theirs", vocab_size, documents, multimodal)
        ours = IndexedDataset(f"{folder}/theirs")
        assert contents(ours) == flat(documents)
        assert ours.documents.tolist() == theirs.document_indices.tolist()


def test_get_reads_a_part_and_nothing_beyond(tmp_path):
    write(f"{tmp_path}/c", 300, [[[1, 2, 3, 4]], [[5, 6]]])
    dataset = IndexedDataset(f"{tmp_path}/c")
    parts = [dataset.get(*place).tolist() for place in ((0, 1, 2), (0, 2), (1, 2, 0))]
    assert parts == [[2, 3], [3, 4], []]
    for offset, length in ((0, 5), (3, 2), (-1, 1), (2, -1)):
        with pytest.raises(IndexError):
            dataset.get(0, offset, length)


# ------------------------------------------------------------------------------------------------
# The writer
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 300, 70000])
def test_writer_refuses_a_foreign_token(tmp_path, bad):
    message = f"document 1 has token id {bad}, but the vocabulary has 300"
    with pytest.raises(UserError, match=message):
        write(f"{tmp_path}/c", 300, [[[1, 2]], [[3, bad]]])
    assert os.listdir(tmp_path) == []


def test_a_failure_leaves_the_old_corpus(tmp_path):
    def failing():
        yield [[7, 8, 9]]
        raise RuntimeError("no more text")

    write(f"{tmp_path}/c", 300, [[[1, 2]]])
    with pytest.raises(RuntimeError):
        write(f"{tmp_path}/c", 300, failing())
    assert contents(IndexedDataset(f"{tmp_path}/c")) == [[1, 2]]
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx"]


@pytest.mark.parametrize("crash_at", [0, 1])
def test_a_crash_between_the_renames_leaves_no_half_corpus(tmp_path, monkeypatch, crash_at):
    write(f"{tmp_path}/c", 300, [[[1, 2]]])
    renames = []

    def replace(source, target):
        if len(renames) == crash_at:
            raise OSError("power is gone")
        renames.append(target)
        os.rename(source, target)

    monkeypatch.setattr(token_files.os, "replace", replace)
    with pytest.raises(OSError, match="power"):
        write(f"{tmp_path}/c", 300, [[[3, 4]]])  # its length is the old one's: sizes are equal
    with pytest.raises(UserError, match=r"c\.idx does not exist"):
        IndexedDataset(f"{tmp_path}/c")


def test_writer_makes_the_folder_or_says_why_not(tmp_path):
    write(f"{tmp_path}/new/deep/c", 300, [[[1]]])
    assert contents(IndexedDataset(f"{tmp_path}/new/deep/c")) == [[1]]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        IndexedDatasetWriter(f"{tmp_path}/file/c", 300)


# ------------------------------------------------------------------------------------------------
# Damage
# ------------------------------------------------------------------------------------------------

DOCUMENTS = [[[1, 2, 3]], [[], [4, 5]], [], [[6]]]  # 4 sequences, 6 tokens, 5 boundaries
IDX_BYTES = 34 + 4 * 4 + 4 * 8 + 5 * 8
BIN_BYTES = 6 * 2


def edited(place: int, layout: str, value):
    """A change of the .idx: `value` packed as `layout` at byte `place`."""

    def change(folder: Path) -> None:
        index = bytearray((folder / "c.idx").read_bytes())
        struct.pack_into(layout, index, place, value)
        (folder / "c.idx").write_bytes(index)

    return change


def resized(name: str, by: int):
    """A change of a file's length: truncated, or extended with zeros."""

    def change(folder: Path) -> None:
        os.truncate(folder / name, (folder / name).stat().st_size + by)

    return change


LENGTHS, OFFSETS, BOUNDARIES = 34, 34 + 4 * 4, 34 + 4 * 4 + 4 * 8
DAMAGE = {
    "no bin": (lambda folder: (folder / "c.bin").unlink(), r"c\.bin does not exist"),
    "empty bin": (resized("c.bin", -BIN_BYTES), "has 0 bytes, but .* describes 12"),
    "header cut": (resized("c.idx", 33 - IDX_BYTES), "cut short: 33 bytes, the header has 34"),
    "idx cut": (resized("c.idx", -1), f"has {IDX_BYTES - 1} bytes, but .*needs {IDX_BYTES}"),
    "bin long": (resized("c.bin", 2), "has 14 bytes, but .* describes 12"),
    "magic": (edited(0, "9s", b"TNTIDX\0\0\0"), "is not a token index: it starts with b'TNTIDX"),
    "version": (edited(9, "<Q", 2), "has format version 2, only 1 is known"),
    "float tokens": (edited(17, "B", 7), r"dtype code 7; token ids are one of 1 \(uint8\)"),
    "wider type": (edited(17, "B", 4), "sequence 1 starts at byte 6 .* end at byte 12"),
    "huge count": (edited(18, "<Q", 2**63), f"has {IDX_BYTES} bytes, but its header"),
    "first boundary": (edited(BOUNDARIES, "<q", 1), "its 4 sequences, but boundary 0 of 5 is 1"),
    "falling": (edited(BOUNDARIES + 8, "<q", 9), "its 4 sequences, but boundary 2 of 5 is 3"),
    "negative length": (edited(LENGTHS + 8, "<i", -2), "sequence 2 has -2 tokens"),
    "last length": (edited(LENGTHS + 12, "<i", 2), "has 12 bytes, but .* describes 14"),
    "odd offset": (edited(OFFSETS + 24, "<q", 9), "sequence 3 starts at byte 9 .* end at byte 10"),
    "far offset": (edited(OFFSETS, "<q", 2**60), f"sequence 0 starts at byte {2**60} .* byte 0"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_clear_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setattr(token_files, "BLOCK", 2)  # places are right across blocks too
    write(f"{tmp_path}/c", 300, DOCUMENTS)
    IndexedDataset(f"{tmp_path}/c")  # sound before
    change, message = DAMAGE[name]
    change(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        IndexedDataset(f"{tmp_path}/c")
    assert "\n" not in str(caught.value)


@given(corpora(), st.data())
@settings(max_examples=120)
def test_a_scrambled_index_is_refused_or_stays_within_the_file(case, data):
    vocab_size, documents = case
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/c", vocab_size, documents)
        index = bytearray(Path(folder, "c.idx").read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            index[data.draw(st.integers(0, len(index) - 1))] = data.draw(st.integers(0, 255))
        Path(folder, "c.idx").write_bytes(index)
        try:
            dataset = IndexedDataset(f"{folder}/c")
        except UserError:
            return
        assert [len(ids) for ids in contents(dataset)] == dataset.lengths.tolist()
