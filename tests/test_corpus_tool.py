"""scripts/corpus.py: if this failed, documents would be lost or a changed corpus not noticed."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from test_data import write_corpus

from config.messages import UserError
from corpora.token_files import IndexedDataset, IndexedDatasetWriter
from scripts import corpus, prepare_data


def run(capsys, *words) -> str:
    corpus.main([str(word) for word in words])
    return capsys.readouterr().out


def documents(prefix) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset.get(i).tolist() for i in range(len(dataset))]


def test_show(tmp_path, capsys):
    write_corpus(f"{tmp_path}/a", [5, 1, 10, 3])
    printed = run(capsys, "show", tmp_path / "a", "--seq-length", 6)
    assert "19 tokens of type uint16, 4 documents, 4 sequences" in printed
    assert "tokens in a document: 1 to 10, half have at most 4, nine of ten at most 8" in printed
    assert "samples of seq-length 6: 3 in an epoch" in printed
    with IndexedDatasetWriter(f"{tmp_path}/none", 10):
        pass
    assert "0 documents" in run(capsys, "show", tmp_path / "none")


def test_merge_and_split_keep_every_document(tmp_path, capsys):
    write_corpus(f"{tmp_path}/a", [5, 0, 10, 3])
    write_corpus(f"{tmp_path}/b", [7, 2], seed=1)
    run(capsys, "merge", "--out", tmp_path / "c", tmp_path / "a", tmp_path / "b")
    both = documents(tmp_path / "a") + documents(tmp_path / "b")
    assert documents(tmp_path / "c") == both
    run(capsys, "split", tmp_path / "c", "--out", tmp_path / "d", "--shares", "4,1,1")
    assert [documents(tmp_path / f"d.{i}") for i in range(3)] == [both[:4], both[4:5], both[5:]]
    assert "checksums equal" in run(capsys, "verify", tmp_path / "c", tmp_path / "d.2")
    with IndexedDatasetWriter(f"{tmp_path}/wide", 70000) as writer:
        writer.add_document([1])
    with pytest.raises(UserError, match=r"different types: .*a uint16, .*wide int32"):
        run(capsys, "merge", "--out", tmp_path / "e", tmp_path / "a", tmp_path / "wide")
    assert not list(tmp_path.glob("e*"))


def test_every_change_of_a_pair_is_seen(tmp_path, capsys):
    """200 single bytes, cuts and additions: a sentence, never a traceback."""
    prefix = tmp_path / "c"
    (tmp_path / "a.txt").write_text("some text of a document")
    prepare_data.main(["--out", str(prefix), "--vocab-size", "300", str(tmp_path / "a.txt")])
    assert "checksums equal" in run(capsys, "verify", prefix)
    words = ["sha256sum", "--check", "c.sha256"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True).returncode == 0
    draw = random.Random(1)
    for _ in range(200):
        path = Path(f"{prefix}{draw.choice(['.bin', '.idx'])}")
        whole = path.read_bytes()
        place = draw.randrange(len(whole))
        other = bytes([whole[place] ^ (1 << draw.randrange(8))])
        changed = [whole[:place], whole + other, whole[:place] + other + whole[place + 1 :]]
        path.write_bytes(draw.choice(changed))
        with pytest.raises(UserError):
            corpus.verify(str(prefix))
        path.write_bytes(whole)
    (tmp_path / "c.sha256").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match="has missing"):
        corpus.verify(str(prefix))
    (tmp_path / "c.sha256").unlink()
    assert "no c.sha256 to compare with" in run(capsys, "verify", prefix)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["merge", "c"], "merge needs --out PREFIX"),
        (["split", "c", "c", "--out", "d"], "split takes one PREFIX, not 2"),
        (["split", "c", "--out", "d", "--shares", "x"], "three shares"),
        (["show", "c", "--seq-length", "0"], r"--seq-length\(0\)"),
        (["verify", "missing"], "missing.idx does not exist"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    write_corpus("c", [5, 6])
    with pytest.raises(UserError, match=message):
        run(capsys, *words)


def test_as_typed(tmp_path):
    write_corpus(f"{tmp_path}/c", [5, 6])
    program = [sys.executable, corpus.__file__]
    good = subprocess.run([*program, "show", f"{tmp_path}/c"], capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "")
    bad = subprocess.run([*program, "shwo", f"{tmp_path}/c"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("error: argument command: invalid choice")


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
