"""prepare_data: if this failed, text would be lost or changed on its way into a corpus."""

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from base.errors import UserError
from corpora.token_files import IndexedDataset
from scripts import prepare_data

SCRIPT = Path(prepare_data.__file__)
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
        "c.tokenizer_config.json",
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


def test_files_are_taken_in_one_order_on_every_machine(texts):
    folder, _ = texts
    names = [str(path.relative_to(folder)) for path in prepare_data.find_files([folder], False)]
    assert names == ["a.py", "d.jsonl", "deep/b.txt", "deep/c.md", "empty.py", "latin.txt"]


def test_a_tokenizer_is_used_again(texts, tmp_path):
    folder, _ = texts
    prepare(tmp_path / "first", "--vocab-size", 290, folder)
    (tmp_path / "new.txt").write_text("quite another text")
    tokenizer = tmp_path / "first.tokenizer.json"
    prepare(tmp_path / "second", "--tokenizer", tokenizer, tmp_path / "new.txt")
    back, second = read(tmp_path / "second")
    assert back == ["quite another text"]
    assert second.to_str() == Tokenizer.from_file(str(tokenizer)).to_str()
    with pytest.raises(UserError, match=r"has no token '</s>'"):
        prepare(tmp_path / "x", "--tokenizer", tokenizer, "--end-token", "</s>", folder)
    with pytest.raises(UserError, match="--tokenizer has its own"):
        prepare(tmp_path / "x", "--tokenizer", tokenizer, "--vocab-size", 300, folder)


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


def test_a_tokenizer_is_trained_on_the_first_bytes_only(tmp_path):
    lines = [json.dumps({"text": word * 100}) for word in ("ab", "cd", "ef", "gh")]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    merges = []
    for name, megabytes in (("all", 1), ("some", 0.00001)):
        prepare(tmp_path / name, "--tokenizer-mb", megabytes, tmp_path / "t.jsonl")
        merges.append(read(tmp_path / name)[1].get_vocab_size() - 257)
    assert merges[0] > 3 * merges[1] > 0


def test_stdlib_leaves_out_packages_and_tests(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name in ("a.py", "pack/b.py", "pack/test/c.py", "site-packages/d.py", "notes.txt"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(name)
    monkeypatch.setattr(prepare_data.sysconfig, "get_path", lambda name: str(library))
    prepare(tmp_path / "c", "--stdlib", "--vocab-size", 257)
    assert sorted(read(tmp_path / "c")[0]) == ["a.py", "pack/b.py"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"bad\.jsonl:4 is not JSON"),
        ('{"body": "b", "id": 1}', r"bad\.jsonl:4 has no key 'text', but 'body', 'id'"),
        ('["text"]', r"bad\.jsonl:4 has no key 'text'"),
        ('{"text": 7}', r"bad\.jsonl:4 has a number as 'text', not a text"),
        ('{"text": true}', r"bad\.jsonl:4 has true or false as 'text', not a text"),
        ('{"text": null}', r"bad\.jsonl:4 has null as 'text', not a text"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "out" / "c", tmp_path / "bad.jsonl")
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


def test_the_key_of_json_lines(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"body": "b", "text": 1}\n')
    prepare(tmp_path / "c", "--json-key", "body", tmp_path / "t.jsonl")
    assert read(tmp_path / "c")[0] == ["b"]


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
    for name, pack in (("a.jsonl", bytes), ("b.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack("\n".join([good, "", *bad, good]).encode()))
    both = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
    prepare(tmp_path / "c", "--skip-bad", 10, *both)
    assert read(tmp_path / "c")[0] == ["good"] * 4
    assert f"10 bad ({tmp_path}/c.bad.txt)" in capsys.readouterr().out
    listed = sorted((tmp_path / "c.bad.txt").read_text().splitlines())
    assert [line.split()[0] for line in listed] == [f"{p}:{n}" for p in both for n in range(3, 8)]
    assert "has half of a character, U+D800, at place 0" in listed[3]
    with pytest.raises(UserError, match=r"\(--skip-bad 9 skips that many\)"):
        prepare(tmp_path / "d", "--skip-bad", 9, *both)
    assert not list(tmp_path.glob("d.*"))
    (tmp_path / "e.txt").write_text("good")
    prepare(tmp_path / "c", tmp_path / "e.txt")
    assert not (tmp_path / "c.bad.txt").exists(), "of the run before"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to prepare"),
        (["a.txt", "--vocabsize", "300"], "unrecognized arguments: --vocabsize"),
        (["missing"], "missing does not exist"),
        (["picture.png"], r"picture\.png is not one of \.py"),
        (["nothing"], r"no \.py, .* file in nothing"),
        (["rows.parquet"], r"rows\.parquet needs the package pyarrow: pip install pyarrow"),
        (["a.txt.zst"], r"a\.txt\.zst needs the package pyarrow: pip install pyarrow"),
        (["cut.txt.gz"], r"cut\.txt\.gz is damaged, or not what its name says"),
        (["text.csv"], r"text\.csv has no column 'text' in its first line, but "),
        (["noise.jsonl.gz"], r"noise\.jsonl\.gz is damaged, or not what its name says"),
        (["noise.jsonl.bz2"], r"noise\.jsonl\.bz2 is damaged, or not what its name says"),
        (["noise.jsonl.xz"], r"noise\.jsonl\.xz is damaged, or not what its name says"),
        (["latin.jsonl.gz"], r"latin\.jsonl\.gz:1 is not UTF-8"),
        (["long.jsonl"], r"long\.jsonl:1 is not JSON: Exceeds the limit"),
        (["a.txt", "--skip-bad", "-1"], r"--skip-bad\(-1\) must be in 0\.\.1000000000"),
        (["latin.txt"], "none of the 1 documents has text in UTF-8"),
        (["utf16.txt"], "none of the 1 documents has text in UTF-8"),
        (["utf16_without_mark.txt"], "none of the 1 documents has text in UTF-8"),
        (["a.txt", "--vocab-size", "256"], r"--vocab-size\(256\) must be in 257\.\.4194304"),
        (["a.txt", "--shuffle-seed", "-1"], r"--shuffle-seed\(-1\) must be in"),
        (["a.txt", "--tokenizer", "missing.json"], r"cannot read --tokenizer missing\.json"),
        (["a.txt", "--tokenizer", "gpt2"], "names of a hub are not fetched"),
        (["a.txt", "--tokenizer", "a.txt"], r"--tokenizer a\.txt is not a tokenizer"),
        (["a.txt", "--out", "a.txt/c"], r"folder of --out, a\.txt: cannot write in"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "picture.png").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"\xfc")
    (tmp_path / "utf16.txt").write_bytes("a text".encode("utf-16"))
    (tmp_path / "utf16_without_mark.txt").write_bytes("a text".encode("utf-16-le"))
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"a text" * 100)[:-9])
    for suffix, magic in (("gz", b"\x1f\x8b\x08\0"), ("bz2", b"BZh9"), ("xz", b"\xfd7zXZ\0")):
        (tmp_path / f"noise.jsonl.{suffix}").write_bytes(magic + bytes(range(256)))
    (tmp_path / "latin.jsonl.gz").write_bytes(gzip.compress(b'{"text": "\xfc"}'))
    (tmp_path / "long.jsonl").write_text('{"text": ' + 5000 * "1" + "}")
    (tmp_path / "text.csv").write_text("body\n1\n")
    for package in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, package, None)
    for name in ("rows.parquet", "a.txt.zst"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=message):
        prepare("c", *arguments)
    assert not list(tmp_path.glob("c.*"))


def test_as_typed(tmp_path):
    """From another folder, without the repository on the path: status 0, or 2 and a sentence."""
    (tmp_path / "a.txt").write_text("a text")
    command = [sys.executable, str(SCRIPT), "--out", "c", "a.txt"]
    good = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("c: 1 documents, ")
    bad = subprocess.run([*command, "b.txt"], cwd=tmp_path, capture_output=True, text=True)
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", "error: b.txt does not exist\n")
