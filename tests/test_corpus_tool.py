"""scripts/corpus.py: if this failed, documents would be lost or a changed corpus not noticed."""

import os
import subprocess

import pytest
from test_data import write_corpus
from test_prepare_data import prepare

from base.errors import UserError
from config.corpus_record import CorpusRecord, read
from corpora.token_files import IndexedDataset, IndexedDatasetWriter
from scripts import corpus, prepare_chats, prepare_data


def run(capsys, *words) -> str:
    corpus.main([str(word) for word in words])
    return capsys.readouterr().out


def documents(prefix) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset.get(i).tolist() for i in range(len(dataset))]


def test_merge_and_split_keep_every_document(tmp_path, capsys):
    write_corpus(f"{tmp_path}/a", [5, 0, 10, 3])
    write_corpus(f"{tmp_path}/b", [7, 2], seed=1)
    run(capsys, "merge", "--out", tmp_path / "c", tmp_path / "a", tmp_path / "b")
    both = documents(tmp_path / "a") + documents(tmp_path / "b")
    assert documents(tmp_path / "c") == both
    run(capsys, "split", tmp_path / "c", "--out", tmp_path / "d", "--shares", "4,1,1")
    assert [documents(tmp_path / f"d.{i}") for i in range(3)] == [both[:4], both[4:5], both[5:]]


def test_who_writes_over_a_corpus_is_told_before(tmp_path, capsys):
    write_corpus(f"{tmp_path}/a", [5, 0, 10, 3])
    texts = tmp_path / "texts.txt"
    texts.write_text("one two three " * 40)
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", ')
    with chats.open("a") as file:
        file.write('"content": "b"}]}\n')
    merge = ["merge", "--out", tmp_path / "merge", tmp_path / "a"]
    split = ["split", tmp_path / "a", "--out", tmp_path / "split", "--shares", "1,0,1"]
    text = ["--out", tmp_path / "text", "--tokenizer", "bytes", texts]
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    chat = ["--out", tmp_path / "chat", "--tokenizer", "bytes", chats]
    chat += ["--chat-template", template]
    programs = {"merge": (corpus, merge), "split.2": (corpus, split)}
    programs |= {"text": (prepare_data, text), "chat": (prepare_chats, chat)}
    for name, (program, words) in programs.items():
        program.main([str(word) for word in words])
        assert "takes its place" not in capsys.readouterr().err
        program.main([str(word) for word in words])
        assert f"note: {tmp_path}/{name}.bin is there (" in capsys.readouterr().err


def test_a_changed_pair_is_seen(tmp_path, capsys):
    """benchmarks/peers/data_cases.py, of which test_sample_order.py runs some, has more changes."""
    write_corpus(f"{tmp_path}/a", [5, 0, 10, 3])
    run(capsys, "merge", "--out", tmp_path / "c", tmp_path / "a")
    assert "checksums equal" in run(capsys, "verify", tmp_path / "c")
    words = ["sha256sum", "--check", "c.sha256"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True).returncode == 0
    whole = (tmp_path / "c.bin").read_bytes()
    (tmp_path / "c.bin").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError):
        corpus.verify(f"{tmp_path}/c")
    (tmp_path / "c.bin").write_bytes(whole)
    (tmp_path / "c.sha256").unlink()
    assert "no c.sha256 to compare with" in run(capsys, "verify", tmp_path / "c")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("merge c", "merge needs --out PREFIX"),
        ("split c c --out d", "split takes one PREFIX, not 2"),
        ("split c --out d --shares x", "three shares"),
        ("show c --seq-length 0", r"--seq-length\(0\)"),
        ("verify missing", "missing.idx does not exist"),
        (
            "merge c --out e\udce9",
            r"--out has bytes that are not utf-8, 'e.udce9': write it in UTF-8",
        ),
        ("merge c wide --out e", r"different types: .*c uint16, .*wide int32"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    write_corpus("c", [5, 6])
    with IndexedDatasetWriter("wide", 70000) as writer:
        writer.add_document([1])
    with pytest.raises(UserError, match=message):
        run(capsys, *words.split())
    assert not list(tmp_path.glob("e*"))


@pytest.mark.parametrize("link", [None, "data/link", "symbolic"])
def test_a_tool_does_not_write_over_its_input(link, tmp_path, monkeypatch, capsys):
    """A slip of the order of words would else destroy a corpus."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_corpus(f"{tmp_path}/{name}", [3, 4])
    before = (tmp_path / "a.bin").read_bytes()
    out = "a"
    if link:
        out = "linked"
        for suffix in (".bin", ".idx"):
            if link == "symbolic":
                (tmp_path / f"linked{suffix}").symlink_to(tmp_path / f"a{suffix}")
            else:
                os.link(tmp_path / f"a{suffix}", tmp_path / f"linked{suffix}")
    with pytest.raises(UserError, match=f"--out {out} is the input a itself"):
        corpus.main(["merge", "--out", out, "a", "b"])
    assert (tmp_path / "a.bin").read_bytes() == before
    write_corpus(f"{tmp_path}/c.1", [3, 4, 5])
    before = (tmp_path / "c.1.bin").read_bytes()
    with pytest.raises(UserError, match=r"--out c\.1 is the input c\.1 itself"):
        corpus.main(["split", "--out", "c", "c.1", "--shares", "1,1"])
    assert (tmp_path / "c.1.bin").read_bytes() == before


def test_what_corpora_say_goes_with_their_documents(tmp_path, capsys):
    """A merged or split corpus has the tokenizer, the end and the largest id of its parts."""
    (tmp_path / "t.jsonl").write_text('{"text": "abc"}\n{"text": "xyz"}\n{"text": "zz"}\n')
    for name, end in (("a", "<|endoftext|>"), ("b", "<|endoftext|>"), ("c", "<end>")):
        words = ["--tokenizer", "bytes", "--end-token", end]
        prepare(tmp_path / name, *words, tmp_path / "t.jsonl")
    a, b, c = (str(tmp_path / name) for name in "abc")
    run(capsys, "merge", "--out", tmp_path / "ab", a, b)
    assert read(str(tmp_path / "ab")) == read(a)
    assert read(a).end_id == read(a).largest_id == 256
    copied = (tmp_path / "ab.tokenizer.json").read_bytes()
    assert copied == (tmp_path / "a.tokenizer.json").read_bytes()
    run(capsys, "split", "--out", tmp_path / "part", "--shares", "1,1", tmp_path / "ab")
    assert read(str(tmp_path / "part.0")) == read(str(tmp_path / "part.1")) == read(a)
    printed = run(capsys, "merge", "--out", tmp_path / "ab", a, c)
    assert "have different tokenizers: none is written" in printed
    assert read(str(tmp_path / "ab")) == CorpusRecord()
    assert not (tmp_path / "ab.tokenizer.json").exists(), "that of the corpus before"
