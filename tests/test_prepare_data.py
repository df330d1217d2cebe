"""prepare_data: if this failed, text would be lost or changed on its way into a corpus."""

import gzip
import io
import json
import os
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from config.messages import UserError
from corpora.token_files import IndexedDataset
from scripts import prepare_data
from scripts.text_sources import BadTexts, parse_line, parse_lines

END = "<|endoftext|>"


@pytest.fixture
def texts(tmp_path):
    """A folder with a document of each kind, and files that are none; the documents' texts."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    documents = {
        "a.py": "def f(x):\n\treturn x + 1\n",
        "deep/b.txt": "Grüße aus Zürich — 你好, мир! 🎲\r\n  two  spaces",
        "deep/c.md": f"# A text that spells {END} is one document\n",
    }
    for name, text in documents.items():
        (folder / name).write_bytes(text.encode())
    lines = [{"text": f"line {i}\nand more", "other": i} for i in range(5)]
    (folder / "d.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    (folder / "empty.py").write_text(" \n")
    (folder / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".git" / "hidden.txt").write_text("not part of the text")
    return folder, sorted([*documents.values(), *(line["text"] for line in lines)])


def prepare(out, *arguments) -> None:
    prepare_data.main(["--out", str(out), *map(str, arguments)])


def read(out) -> tuple[list[str], Tokenizer]:
    """The text of each document, without the end token that each must have, once."""
    tokenizer = Tokenizer.from_file(f"{out}.tokenizer.json")
    dataset, end = IndexedDataset(str(out)), tokenizer.token_to_id(END)
    texts = []
    for i in range(len(dataset)):
        ids = dataset.get(i).tolist()
        assert ids.index(end) == len(ids) - 1
        texts.append(tokenizer.decode(ids[:-1], skip_special_tokens=False))
    return texts, tokenizer


def test_every_document_comes_back(texts, tmp_path, capsys):
    folder, documents = texts
    prepare(tmp_path / "new" / "c", "--vocab-size", 300, folder)
    back, tokenizer = read(tmp_path / "new" / "c")
    assert sorted(back) == documents
    assert back != documents  # shuffled
    assert tokenizer.get_vocab_size() == 300
    assert sorted(os.listdir(tmp_path / "new")) == [
        "c.bin",
        "c.idx",
        "c.sha256",
        "c.tokenizer.json",
    ]
    printed = capsys.readouterr().out
    tokens = IndexedDataset(str(tmp_path / "new" / "c")).tokens
    per_token = sum(len(text.encode()) for text in documents) / tokens
    assert f"8 documents, {tokens:,} tokens, {per_token:.2f} bytes/token" in printed
    assert "skipped 1 not in UTF-8, 1 empty" in printed
    assert "--vocab-size 300" in printed


def test_the_seed_decides_the_order_and_nothing_else_does(texts, tmp_path):
    folder, _ = texts

    def files(name, *arguments):
        prepare(tmp_path / name, "--vocab-size", 300, *arguments)
        return [(tmp_path / f"{name}{end}").read_bytes() for end in (".bin", ".tokenizer.json")]

    first = files("first", folder)
    twice = folder / "deep" / ".." / "a.py"
    assert files("again", folder / "deep", twice, folder) == first  # each file once
    other = files("other", "--shuffle-seed", 5, folder)
    assert other[0] != first[0]
    assert sorted(read(tmp_path / "other")[0]) == sorted(read(tmp_path / "first")[0])


def test_a_tokenizers_own_processing_is_not_applied(texts, tmp_path):
    """Many published tokenizers add a special token first, truncate and pad."""
    folder, documents = texts
    prepare(tmp_path / "c", "--vocab-size", 300, folder)
    _, tokenizer = read(tmp_path / "c")
    tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "own.json"))
    prepare(tmp_path / "again", "--tokenizer", tmp_path / "own.json", folder)
    assert sorted(read(tmp_path / "again")[0]) == documents


LINES = (
    rb"""{"text": "a"}| {"text": "\u00fc", "b": [1]}|{"text": "a", "text": "b"}|"""
    rb"""{"text": "a"},{"text": "b"}|{"text": "a"|}|{"text": [1|2]}||{"text": "\ud800"}|"""
    rb"""{"text": "\ude00"}|"text"|[]|{"text": ""}|{"text": " "}|{"text": 1}|{"b": "a"}|"""
    rb"""{"text": "a"}] [|1, 2"""
).split(b"|")
LINES += [b'{"text": "\xc3', b'\xbc"}', b' {"text": "\xc3\xbc"}\n\n']


@settings(deadline=None)
@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=6))
@example(LINES[:3] * 2)
@example([b'{"text": "a"},{"text": "b"}', b'{"text": [1', b"2]}", b'{"text": "a"}'])
def test_lines_that_are_parsed_at_once_are_those_that_are_good_one_by_one(lines):
    """None begins in a line and ends in the next, and no two are in one."""
    single = []
    for line in lines:
        try:
            single.append(parse_line(line, "line", "text", BadTexts(limit=1)))
        except UnicodeDecodeError:
            single.append(None)
    good = all(text and not text.isspace() for text in single)
    assert parse_lines(lines, "text") == (single if good else None)


def test_standard_input_is_read_and_what_is_not_read_is_counted(tmp_path, monkeypatch, capsys):
    """Beside a folder, as one more file of lines."""
    folder, texts = tmp_path / "texts", [f'Grüße {i},\n"x"' for i in range(20)]
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "a.txt").write_text("one document\nof two lines")
    for name in ("picture.png", "notes.tar.gz", "LICENSE"):
        (folder / name).write_bytes(b"")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    prepare(tmp_path / "c", "--vocab-size", 300, folder, "-")
    assert sorted(read(tmp_path / "c")[0]) == sorted([*texts, "one document\nof two lines"])
    printed = capsys.readouterr().out
    assert "not read, because their kind is not known: 1 .png, 1 .tar.gz, 1 LICENSE" in printed


def test_bad_lines_are_skipped_and_listed(tmp_path, capsys):
    good = json.dumps({"text": "good"})
    bad = ['{"text": "cut', '{"body": 1}', '{"text": 7}', '{"text": "\\ud800"}', "[" * 100_000]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join([good, "", *bad, good]).encode()))
    prepare(tmp_path / "c", "--skip-bad", 5, path)
    assert read(tmp_path / "c")[0] == ["good"] * 2
    assert f"5 bad ({tmp_path}/c.bad.txt)" in capsys.readouterr().out
    listed = sorted((tmp_path / "c.bad.txt").read_text().splitlines())
    assert [line.split()[0] for line in listed] == [f"{path}:{n}" for n in range(3, 8)]
    problems = ("is not JSON", "has no key 'text'", "has a int as 'text', not a text")
    for line, problem in zip(listed, (*problems, "half of a character, U+D800, at place 0")):
        assert problem in line
    with pytest.raises(UserError, match=r"\(--skip-bad 4 skips that many\)"):
        prepare(tmp_path / "d", "--skip-bad", 4, path)
    assert not list(tmp_path.glob("d.*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("rows.parquet", r"rows\.parquet needs the package pyarrow: pip install pyarrow"),
        ("a.txt --tokenizer a.model", "a.model needs the package sentencepiece: pip install"),
        ("a.txt --tokenizer a.tiktoken", "a.tiktoken needs the package tiktoken: pip install"),
        ("a.txt.zst", r"a\.txt\.zst needs the package zstandard: pip install zstandard"),
        ("text.csv", r"text\.csv has no column 'text' in its first line"),
        ("latin.jsonl.gz", r"latin\.jsonl\.gz:1 is not UTF-8"),
        ("long.jsonl", r"long\.jsonl:1 is not JSON: Exceeds the limit"),
        ("text.csv --skip-bad -1", r"--skip-bad\(-1\) must be at least 0"),
        ("a.txt --tokenizer gpt2", "names of a hub are not fetched"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, content in (
        ("latin.jsonl.gz", gzip.compress(b'{"text": "\xfc"}')),
        ("long.jsonl", b'{"text": ' + 5000 * b"1" + b"}"),
        ("text.csv", b"body\n1\n"),
        ("rows.parquet", b""),
        ("a.txt", b"a text"),
        ("a.txt.zst", b""),
    ):
        (tmp_path / name).write_bytes(content)
    for package in ("pyarrow", "pyarrow.parquet", "zstandard", "sentencepiece", "tiktoken"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=message):
        prepare("c", *arguments.split())
    assert not list(tmp_path.glob("c.*"))
