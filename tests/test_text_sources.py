"""Texts of every kind with every compression: if this failed, documents would be lost."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import random
import shutil
import subprocess
import sys

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from ranks import ROOT
from test_prepare_data import prepare, read

from base.errors import UserError
from config.run_options import TaskFile
from corpora import text_sources
from corpora.tasks import read_rows

DOCUMENTS = [f'Grüße {number},\n"x"' for number in range(20)]
COMPRESSIONS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: b"".join(map(zstandard.compress, (raw[:99], raw[99:]))),  # two frames
}


def lines_of_json(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def table_of_commas(texts: list[str]) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    return file.getvalue().encode()


def parquet(texts: list[str]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), sink, row_group_size=7)
    return sink.getvalue().to_pybytes()


def arrow_of(new_writer):
    def arrow(texts: list[str]) -> bytes:
        table, sink = pyarrow.table({"text": texts}), pyarrow.BufferOutputStream()
        with new_writer(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        return sink.getvalue().to_pybytes()

    return arrow


def whole(texts: list[str]) -> bytes:
    return "\n".join(texts).encode()


# The bytes of a file with these texts, by suffix; files of WHOLE hold one document.
KINDS = {
    **dict.fromkeys(text_sources.WHOLE, whole),
    **dict.fromkeys(text_sources.LINES, lines_of_json),
    ".csv": table_of_commas,
    ".parquet": parquet,
    ".arrow": arrow_of(pyarrow.ipc.new_stream),
    "-file.arrow": arrow_of(pyarrow.ipc.new_file),
}


def test_every_kind_is_in_the_table():
    without_tokens = set(text_sources.KNOWN) - set(text_sources.TOKENS)
    assert {kind.removeprefix("-file") for kind in KINDS} == without_tokens
    assert {*COMPRESSIONS} == {"", *text_sources.COMPRESSED}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_with_every_compression(kind, compression, tmp_path):
    raw = COMPRESSIONS[compression](KINDS[kind](DOCUMENTS))
    (tmp_path / f"a{kind}{compression}").write_bytes(raw)
    prepare(tmp_path / "c", "--vocab-size", 300, tmp_path / f"a{kind}{compression}")
    expected = ["\n".join(DOCUMENTS)] if KINDS[kind] is whole else DOCUMENTS
    assert sorted(read(tmp_path / "c")[0]) == sorted(expected)
    assert not list(tmp_path.glob("*partial*"))


@pytest.mark.parametrize("compression", [c for c in COMPRESSIONS if c])
def test_a_file_that_was_cut_short_loses_no_documents_in_silence(compression, tmp_path):
    """A compressed file whose first half can still be read."""
    draw = random.Random(0)
    texts = [draw.randbytes(500).hex() for _ in range(2000)]
    raw = COMPRESSIONS[compression](lines_of_json(texts))
    (tmp_path / f"a.jsonl{compression}").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(UserError, match=r"is damaged, or not what its name says: \S"):
        prepare(tmp_path / "c", "--tokenizer", "bytes", tmp_path / f"a.jsonl{compression}")


def test_a_line_that_is_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "LONGEST_LINE", 1000)
    long = lines_of_json(["short", "x" * 1001])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(long))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(table_of_commas(["short", "x" * 1001])))
    for name, line in (("a.jsonl.gz", 2), ("a.csv.gz", 3)):
        with pytest.raises(UserError, match=rf"{name}:{line} is a line of more than 1,000 bytes"):
            prepare(tmp_path / "c", "--vocab-size", 300, tmp_path / name)


READ = """
import re, sys
from pathlib import Path
from corpora.text_sources import BadTexts, texts_of
import pyarrow.parquet
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
size = sum(len(text) for text in texts_of(Path(sys.argv[1]), "text", BadTexts()))
print(size, peak() - before)
"""


@pytest.mark.parametrize("repeated", [True, False])
def test_a_table_is_read_in_batches_of_bytes(repeated, tmp_path):
    """200 texts of 1 MB: not all of them are in memory, whether a file repeats them or not."""
    texts = ["x" * 1_000_000 for _ in range(200)]
    if not repeated:
        texts = [f"{number:09}" * 111_111 for number in range(200)]
    table = pyarrow.table({"text": texts})
    # A page is read as a whole; as it is written here by default, it would have all rows.
    how = {"compression": "zstd", "write_batch_size": 1}
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", **how)
    assert (tmp_path / "a.parquet").stat().st_size < 1_000_000
    command = [sys.executable, "-c", READ, str(tmp_path / "a.parquet")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, kilobytes = map(int, done.stdout.split())
    assert size > 190_000_000
    assert kilobytes < 120_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.json", r"is one JSON value: make a line of each .* cat a\.json \| jq -c \. > a\.jsonl"),
        ("a.h5.gz", "unpack it first"),
        ("a.png", r"is not one of \.py, \.txt, .*\(or with \.gz, .* added, but for \.h5"),
    ],
)
def test_what_is_not_read_says_what_to_do(name, message, tmp_path):
    (tmp_path / name).write_bytes(b"1")
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "c", tmp_path / name)


# ------------------------------------------------------------------------------------------------
# Files called .json, other names, pipes and links
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my-corpus.json", "c4-train.00000-of-00001.json.gz"])
def test_lines_that_are_called_json_are_lines(name, tmp_path):
    """As Megatron's instructions and C4 call them; a folder has other .json files beside them."""
    raw = b"\n" + lines_of_json(DOCUMENTS)
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    (folder / "config.json").write_text('{"no": "text"}')
    (folder / "pretty.json").write_text(json.dumps({"text": "a"}, indent=2))
    for path in (folder, folder / name):
        prepare(tmp_path / "c", "--vocab-size", 300, path)
        assert sorted(read(tmp_path / "c")[0]) == sorted(DOCUMENTS)


@pytest.mark.parametrize("form", ["list", "long list", "object", "with a key"])
def test_advice_for_one_json_value_works(form, tmp_path):
    records = [{"text": text} for text in DOCUMENTS]
    value = {"object": records[0], "with a key": {"rows": records}}.get(form, records)
    indent = None if form == "list" else 1
    (tmp_path / "a.json").write_text(json.dumps(value, indent=indent))
    with pytest.raises(UserError) as mistake:
        prepare(tmp_path / "c", "--tokenizer", "bytes", tmp_path / "a.json")
    command = str(mistake.value).partition("as by ")[2].partition(", or by")[0]
    assert command.startswith("cat a.json | jq -c ")
    if form == "with a key":
        assert "or by '.KEY[]' in place of . if KEY has them" in str(mistake.value)
        command = command.replace("-c .", "-c '.rows[]'")
    if shutil.which("jq") is None:
        pytest.skip("no jq")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    prepare(tmp_path / "c", "--vocab-size", 300, tmp_path / "a.jsonl")
    expected = DOCUMENTS[:1] if form == "object" else DOCUMENTS
    assert sorted(read(tmp_path / "c")[0]) == sorted(expected)


def test_files_of_other_names_as_text(tmp_path, capsys):
    folder = tmp_path / "set"
    folder.mkdir()
    texts = {"a.c": "int x;", "man.1.gz": "a page", "LICENSE": "MIT", "b.js": "no"}
    for name, text in texts.items():
        raw = text.encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    words = ["--as-text", ".c", "--as-text", ".1", "--as-text", "LICENSE"]
    prepare(tmp_path / "c", "--vocab-size", 300, *words, folder)
    assert sorted(read(tmp_path / "c")[0]) == sorted(["int x;", "a page", "MIT"])
    assert "not read, because their kind is not known: 1 .js" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"b\.js is not one of .*; --as-text \.js reads such files"):
        prepare(tmp_path / "d", folder / "b.js")


@pytest.mark.usefixtures("ends")
def test_pipes_and_links_out_of_a_folder_are_refused_at_once(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.txt").write_text("a text")
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(UserError, match=r"b\.jsonl is a pipe or a device, not a file: give - to"):
        prepare(tmp_path / "c", tmp_path / "b.jsonl")
    # What reads no standard input does not propose it: arrays, tables and --eval-tasks.
    os.mkfifo(tmp_path / "b.h5")
    with pytest.raises(UserError, match=r"b\.h5 is a pipe or a device, not a file$"):
        prepare(tmp_path / "c", "--tokenizer", "bytes", tmp_path / "b.h5")
    with pytest.raises(UserError, match=r"b\.jsonl is a pipe or a device, not a file$"):
        read_rows(TaskFile("b", str(tmp_path / "b.jsonl"), None))
    os.mkfifo(folder / "b.jsonl")
    (folder / "link.txt").symlink_to("a.txt")
    prepare(tmp_path / "c", "--vocab-size", 300, folder)
    assert read(tmp_path / "c")[0] == ["a text"], "once"
    (tmp_path / "secret.txt").write_text("a key")
    (folder / "out.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match=r"out\.txt is a link to .*secret\.txt, outside of"):
        prepare(tmp_path / "c", folder)


def test_the_cache_of_the_hub_is_links_to_blobs(tmp_path):
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0f"
    snapshot.mkdir(parents=True)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    (blobs / "77aa").write_bytes(lines_of_json(DOCUMENTS))
    (snapshot / "train.jsonl").symlink_to("../../blobs/77aa")
    for path in (snapshot, snapshot / "train.jsonl"):
        prepare(tmp_path / "c", "--vocab-size", 300, path)
        assert sorted(read(tmp_path / "c")[0]) == sorted(DOCUMENTS)


# ------------------------------------------------------------------------------------------------
# Files that are not what a reader takes them for
# ------------------------------------------------------------------------------------------------


def with_window(raw: bytes, log: int) -> bytes:
    """A frame of zstd with a window of 2^log bytes, as a stream of unknown length has it."""
    sizes = zstandard.ZstdCompressionParameters(window_log=log, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=sizes).compressobj()
    return stream.compress(raw) + stream.flush()


@pytest.mark.parametrize("name", ["a.jsonl.zst", "set/a.json.zst", "a.csv.zst", "a.txt.zst"])
def test_a_long_window_is_not_damage(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    raw = lines_of_json(DOCUMENTS)
    path.write_bytes(with_window(raw, 27) + with_window(raw, 28))
    with pytest.raises(UserError) as mistake:
        prepare(tmp_path / "c", "--tokenizer", "bytes", path.parent if "set/" in name else path)
    assert "a window of more than 128 MiB" in str(mistake.value)
    assert f"zstd -d --long=31 {path.name}" in str(mistake.value)
    assert "damaged" not in str(mistake.value)
    assert ("give - for the file" in str(mistake.value)) == ("json" in name)
    if "jsonl" in name:
        path.write_bytes(with_window(raw, 27))
        prepare(tmp_path / "c", "--vocab-size", 300, path)
        assert sorted(read(tmp_path / "c")[0]) == sorted(DOCUMENTS)


def test_a_dictionary_of_zstd_is_not_damage(tmp_path):
    known = zstandard.train_dictionary(
        2000, [b"sample %d of many %d" % (i, 7 * i) for i in range(5000)]
    )
    packed = zstandard.ZstdCompressor(dict_data=known).compress(lines_of_json(DOCUMENTS))
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    with pytest.raises(
        UserError, match=r"compressed with a dictionary.*zstd -d -D DICTIONARY a\.j"
    ):
        prepare(tmp_path / "c", "--tokenizer", "bytes", tmp_path / "a.jsonl.zst")


@pytest.mark.parametrize("name", ["a.txt", "a.md.gz", "a.py", "a.c"])
def test_a_byte_order_mark_is_not_of_the_text(name, tmp_path):
    raw = codecs.BOM_UTF8 + b"one\n"
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    prepare(tmp_path / "c", "--tokenizer", "bytes", "--as-text", ".c", tmp_path / name)
    assert read(tmp_path / "c")[0] == ["one\n"]


def test_hidden_files_are_left_out_of_a_folder(tmp_path, capsys):
    """macOS writes ._a.jsonl, which is no text, beside a.jsonl on other systems' disks."""
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines_of_json(DOCUMENTS))
    (folder / "._a.jsonl").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X")
    (folder / ".notes.txt").write_text("a note")
    prepare(tmp_path / "c", "--vocab-size", 300, folder)
    assert sorted(read(tmp_path / "c")[0]) == sorted(DOCUMENTS)
    assert "not read, because their names begin with a dot: 2 files" in capsys.readouterr().out
    prepare(tmp_path / "c", "--vocab-size", 300, folder / ".notes.txt")
    assert read(tmp_path / "c")[0] == ["a note"], "it was named"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('1,fine\n2,"open\n3,third\n4,fourth\n', r"a\.csv:3 has a quote that is not closed until"),
        ('1,a\n2,"open', r"a\.csv:3 has a quote that is not closed"),
        (
            '1,"open\n2,second\n3,"x"\n',
            r"a\.csv:2 begins a row that is not CSV: ',' expected after",
        ),
        ('1,"a"b\n', r"a\.csv:2 begins a row that is not CSV.*a quote is written twice"),
    ],
)
def test_a_quote_that_is_not_closed_is_named(rows, message, tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n" + rows)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "c", "--tokenizer", "bytes", "--skip-bad", "9", tmp_path / "a.csv")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("form", ["list", "fixed_size_list", "struct", "map"])
def test_a_column_with_columns_in_it_is_not_one_of_texts(form, suffix, tmp_path):
    pa = pyarrow
    text = pa.string()
    types = {"list": pa.list_(text), "fixed_size_list": pa.list_(text, 2)}
    types |= {"struct": pa.struct({"en": text}), "map": pa.map_(text, text)}
    value = {"struct": {"en": "a"}, "map": [("a", "b")]}.get(form, ["a", "b"])
    table = pa.table({"text": pa.array([value], types[form])})
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pa.parquet.write_table(table, path)
    else:
        write_arrow(path, table)
    with pytest.raises(UserError, match=rf"column 'text' is a {form}.*, and not of texts"):
        prepare(tmp_path / "c", "--tokenizer", "bytes", "--skip-bad", "9", path)


def write_arrow(path, table) -> None:
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)


@pytest.mark.parametrize("order", ["_indices_data_files", "_indices_files", "none", "null"])
def test_a_saved_data_set_with_an_order_of_rows_is_refused(order, tmp_path):
    """As `datasets` saves select() and shuffle(): the rows in one file, their order in another."""
    pa = pyarrow
    folder = tmp_path / "ds"
    folder.mkdir()
    write_arrow(folder / "data.arrow", pa.table({"text": DOCUMENTS}))
    write_arrow(folder / "indices.arrow", pa.table({"indices": pa.array([1], pa.uint64())}))
    state = {"_data_files": [{"filename": "data.arrow"}], "_split": None, "_fingerprint": "x"}
    if order != "none":
        name = "_indices_data_files" if order == "null" else order
        state[name] = None if order == "null" else [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    for path in (folder, tmp_path / "ds" / "data.arrow"):
        if order in ("none", "null"):
            prepare(tmp_path / "c", "--vocab-size", 300, path)
            assert sorted(read(tmp_path / "c")[0]) == sorted(DOCUMENTS)
            continue
        with pytest.raises(UserError, match=r"order of rows of its own.*flatten"):
            prepare(tmp_path / "c", "--tokenizer", "bytes", path)
