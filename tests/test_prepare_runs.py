"""prepare_data: if this failed, a kill or more processes would change the corpus."""

import contextlib
import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ranks import ROOT
from test_prepare_data import prepare, read
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import Split

from base.errors import UserError
from corpora.token_files import IndexedDataset
from scripts import documents, encode_documents, encoders, prepare_data, progress, word_cache
from scripts.partial_job import PartialJob

NAMES = (".bin", ".idx", ".tokenizer.json", ".sha256")


def contents(prefix) -> list[bytes]:
    """The outputs; the names in the list of checksums are the prefix's own."""
    name = Path(prefix).name.encode()
    read = {end: Path(f"{prefix}{end}").read_bytes() for end in NAMES}
    return [*(read | {".sha256": read[".sha256"].replace(b"  " + name, b"  ")}).values()]


def write_texts(folder: Path, lines: int = 300) -> Path:
    """A long document, one that is compressed, one that is damaged, many lines, one of them bad."""
    folder.mkdir()
    words = " ".join(f"word{i % 97}  two, it's\n\n x{i} 'tis 你好。世界" for i in range(500))
    (folder / "long.txt").write_text(words)
    (folder / "packed.txt.gz").write_bytes(gzip.compress(words[::-1].encode()))
    (folder / "damaged.txt").write_bytes(words.encode() + b"\xff")
    (folder / "blank.txt").write_text(" " * 9000)
    texts = [json.dumps({"text": f"line {i} of text, {i * i}"}) for i in range(lines)]
    texts[lines // 2] = "{"
    (folder / "lines.jsonl").write_text("\n".join(texts))
    return folder


@pytest.fixture
def small(monkeypatch):
    """Parts and chunks of some hundred bytes."""
    for module, name, value in (
        (documents, "BLOCK", 700),
        (documents, "PART", 300),
        (documents, "SECONDS_BETWEEN_SAVES", 0.0),
        (encode_documents, "CHUNK", 900),
        (encoders, "CHECKED", 40),
    ):
        monkeypatch.setattr(module, name, value)


def test_long_documents_in_parts_are_the_same_tokens(tmp_path, request, capsys):
    folder = write_texts(tmp_path / "texts")
    words = "--vocab-size", 400, "--skip-bad", 1, folder
    prepare(tmp_path / "whole", *words)
    request.getfixturevalue("small")
    prepare(tmp_path / "parts", *words)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    printed = capsys.readouterr().out
    assert printed.count("skipped 1 not in UTF-8, 1 empty, 1 bad") == 2
    assert "cuts of long documents" not in printed


def test_a_text_without_places_to_cut_is_cut_and_counted(tmp_path, small, capsys):
    (tmp_path / "a.txt").write_text("x" * 5000)
    prepare(tmp_path / "c", "--vocab-size", 300, tmp_path / "a.txt")
    assert "cuts of long documents where a token may differ" in capsys.readouterr().out
    assert read(tmp_path / "c")[0] == ["x" * 5000]


def stop_after(monkeypatch, chunks: int) -> None:
    """Ctrl-C once so many chunks are written; later calls are not stopped."""
    own, written = prepare_data.PartialPair.add, []

    def add(pair, *values):
        own(pair, *values)
        written.append(1)
        if len(written) == chunks:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare_data.PartialPair, "add", add)


@pytest.mark.parametrize("chunks", [1, 7, 20])
def test_a_run_that_was_stopped_goes_on(tmp_path, small, monkeypatch, capsys, chunks):
    """In the middle of a long document, too; what was written is not encoded again."""
    folder = write_texts(tmp_path / "texts")
    words = "--vocab-size", 400, "--skip-bad", 1, folder
    prepare(tmp_path / "whole", *words)
    stop_after(monkeypatch, chunks)
    with pytest.raises(SystemExit) as stopped:
        prepare(tmp_path / "c", *words)
    assert stopped.value.code == 75
    state = json.loads(Path(f"{tmp_path}/c.partial.json").read_text())
    done = tuple(state["encoded"]["next"])
    begun = []
    encoded = encode_documents.encode_chunk

    def encode(source, chunk):
        begun.append(chunk.pieces[0].following)
        return encoded(source, chunk)

    monkeypatch.setattr(encode_documents, "encode_chunk", encode)
    prepare(tmp_path / "c", *words)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")
    assert f"going on from {tmp_path}/c.partial.json" in capsys.readouterr().out
    assert not list(tmp_path.glob("c.partial*"))
    assert min(begun) > done


def killed(prefix: Path, words: list, turn: int) -> int:
    """Kill a preparation after its state has changed; its status.

    Every second one has three processes, the last of five gets SIGTERM.
    """
    state = Path(f"{prefix}.partial.json")
    before = state.stat().st_mtime_ns if state.exists() else 0
    command = [sys.executable, "scripts/prepare_data.py", "--out", prefix, *words]
    command += ["--processes", 1 + 2 * (turn % 2)]
    program = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while program.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if state.stat().st_mtime_ns > before:
                break
        time.sleep(0.002)
    time.sleep(0.05 * turn)
    program.send_signal(signal.SIGTERM if turn == 4 else signal.SIGKILL)
    return program.wait(120)


def test_kills_and_processes_do_not_change_a_byte(tmp_path):
    """While it copies, trains, encodes with 1 or 3 processes, or renames."""
    folder = write_texts(tmp_path / "texts", 20_000)
    words = ["--vocab-size", 400, "--skip-bad", 1, folder]
    prepare(tmp_path / "whole", *words)
    statuses = [killed(tmp_path / "c", words, turn) for turn in range(5)]
    prepare(tmp_path / "c", *words, "--processes", 2)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob("c.partial*"))
    assert set(statuses) <= {-signal.SIGKILL, -signal.SIGTERM, 75, 0}
    assert -signal.SIGKILL in statuses


def test_another_job_of_that_name_begins_anew_and_two_do_not_meet(
    tmp_path, small, monkeypatch, capsys
):
    folder = write_texts(tmp_path / "texts")
    words = "--vocab-size", 400, "--skip-bad", 1, folder
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(SystemExit):
            prepare(tmp_path / "c", *words)
    (folder / "lines.jsonl").write_text(json.dumps({"text": "other"}))
    prepare(tmp_path / "c", *words)
    assert "going on" not in capsys.readouterr().out
    assert "other" in read(tmp_path / "c")[0]
    job = PartialJob(f"{tmp_path}/d", {})
    with pytest.raises(UserError, match=r"another process writes .*/d now"):
        prepare(tmp_path / "d", *words)
    job.remove()


def test_progress_is_lines_in_a_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    (tmp_path / "a.txt").write_text("some text " * 1000)
    prepare(tmp_path / "c", tmp_path / "a.txt")
    assert "encoding: 100 % of 0 MB, " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# Arrays of tokens, folders of `datasets`
# ------------------------------------------------------------------------------------------------


def test_arrays_of_tokens(tmp_path, small):
    rows = np.arange(6000).reshape(3, 2000)
    flat, lengths = np.arange(5000, dtype=np.uint16), [2000, 0, 3000]
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["tokens"] = rows
    with h5py.File(tmp_path / "flat.hdf5", "w") as file:
        file["ids"], file["lengths"] = flat, lengths
        file["words"] = ["a"]
    prepare(tmp_path / "a", "--vocab-size", 6000, tmp_path / "rows.h5")
    prepare(tmp_path / "b", "--vocab-size", 6000, "--hdf5-key", "ids", tmp_path / "flat.hdf5")
    for name, expected in (
        ("a", rows.tolist()),
        ("b", [flat[:2000].tolist(), flat[2000:].tolist()]),
    ):
        found = IndexedDataset(f"{tmp_path}/{name}")
        assert sorted(found.get(i).tolist() for i in range(len(found))) == expected
    assert not (tmp_path / "a.tokenizer.json").exists()
    (tmp_path / "t.txt").write_text("a text")
    (tmp_path / "noise.h5").write_bytes(b"noise")
    for words, message in (
        (["rows.h5"], "give their --vocab-size or --tokenizer"),
        (["rows.h5", "t.txt"], "name their tokenizer with --tokenizer"),
        (["rows.h5", "--vocab-size", "5999"], r"token id 5999 of an array is not in 0\.\.5998"),
        (["flat.hdf5", "--vocab-size", "9999"], "has no array of integers 'tokens', but ids,"),
        (["noise.h5", "--vocab-size", "9999"], r"noise\.h5 is damaged, or not what its name says"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(
                tmp_path / "c",
                *(word if word[0] == "-" or word.isdigit() else tmp_path / word for word in words),
            )


def test_a_folder_of_datasets(tmp_path, capsys):
    """Only the files that state.json lists; others may be left of a cache."""
    arrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    for name in ("data-00000-of-00001.arrow", "cache-1f.arrow"):
        table = arrow.table({"text": [f"row of {name}"]})
        with arrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    prepare(tmp_path / "c", "--vocab-size", 300, tmp_path / "set")
    assert read(tmp_path / "c")[0] == ["row of data-00000-of-00001.arrow"]
    assert "1 .arrow" in capsys.readouterr().out
    state["_data_files"].append({"filename": "gone.arrow"})
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"state\.json lists gone\.arrow, which is not there"):
        prepare(tmp_path / "c", tmp_path / "set")


# ------------------------------------------------------------------------------------------------
# Words that have come before
# ------------------------------------------------------------------------------------------------

ALPHABET = "ab Zé9'.,:s\n\r\t  ()\u00a0\u0301\u200b\u3000世👍🏽\x1c"


@pytest.fixture(scope="module")
def byte_levels() -> list[encoders.Encoder]:
    """Tokenizers that split as GPT-2, Llama 3 and Qwen 2, and one that adds a space in front."""
    level = pre_tokenizers.ByteLevel
    whole = [level(add_prefix_space=False), level(add_prefix_space=True)]
    bare = level(add_prefix_space=False, use_regex=False)
    for pattern in word_cache.PATTERNS:
        whole.append(pre_tokenizers.Sequence([Split(Regex(pattern), "isolated"), bare]))
    made = []
    for splitter in whole:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = splitter
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=level.alphabet(),
            show_progress=False,
        )
        texts = ["a word's end. ab Zéa 99 (a b) ... \n\n  b's:\n" * 3, ALPHABET * 3]
        tokenizer.train_from_iterator(texts, trainer)
        made.append(encoders.Encoder(tokenizer))
    made[-1].tokenizer.normalizer = normalizers.NFC()
    return made


@given(st.lists(st.text(st.sampled_from(ALPHABET), max_size=40), min_size=1, max_size=4))
@example(
    ["a b", " a", "a  b", "\n a", "'s 's", "a\u00a0 b", " ", "a ", "é \u0301e", "<|endoftext|> a"]
)
def test_tokens_by_words_are_those_of_the_text(byte_levels, texts):
    for encoder in byte_levels:
        assert word_cache.splits_at_spaces(encoder)
        cache, whole = word_cache.WordCache(encoder), encoder.encode(texts)
        # Ten times: words are new in the first turn alone.
        found = [cache.encode(texts * 10), cache.encode(texts)]
        assert found == [[np.array(ids, "<i4").tobytes() for ids in whole * n] for n in (10, 1)]


def test_a_cache_of_words_is_bounded_and_texts_of_new_words_pass_by(byte_levels, monkeypatch):
    cache = word_cache.WordCache(byte_levels[0])
    cache.encode(["ab Zé 9"])
    assert not cache._known
    cache.encode(["ab Zé ab Zé ab Zé ab Zé"])
    assert set(cache._known) == {"ab", " Zé", " ab"}
    monkeypatch.setattr(word_cache, "MOST_COST", 10)
    cache.encode(["b b b b b b b"])
    assert not cache._known


def test_other_tokenizers_are_given_whole_texts(byte_levels):
    def changed(**values) -> encoders.Encoder:
        tokenizer = Tokenizer.from_str(byte_levels[0].tokenizer.to_str())
        for name, value in values.items():
            setattr(tokenizer, name, value)
        return encoders.Encoder(tokenizer)

    level, split = pre_tokenizers.ByteLevel, word_cache.splits_at_spaces
    assert split(changed())
    other = Split(Regex(r"\S+ \S+|."), "isolated")
    bare = level(add_prefix_space=False, use_regex=False)
    assert not split(changed(pre_tokenizer=bare))
    assert not split(changed(pre_tokenizer=pre_tokenizers.Metaspace()))
    assert not split(changed(pre_tokenizer=pre_tokenizers.Sequence([other, bare])))
    assert not split(changed(normalizer=normalizers.Replace(" ", "_")))
    assert not split(changed(model=models.BPE(dropout=0.1)))
    added = changed()
    added.tokenizer.add_tokens(["a b"])
    assert not split(added)


# ------------------------------------------------------------------------------------------------
# Tokenizers
# ------------------------------------------------------------------------------------------------

TEXT = " ".join(f"word{i % 97}, it's x{i} naïve 世界. " for i in range(3000))


def tokens_of(prefix) -> list[int]:
    (only,) = [dataset.get(0).tolist() for dataset in [IndexedDataset(str(prefix))]]
    return only


def test_bytes_and_a_folder_of_hugging_face(tmp_path, small):
    (tmp_path / "a.txt").write_text(TEXT)
    prepare(tmp_path / "b", "--tokenizer", "bytes", tmp_path / "a.txt")
    assert tokens_of(tmp_path / "b") == [*TEXT.encode(), 256]
    assert read(tmp_path / "b")[0] == [TEXT]
    prepare(tmp_path / "t", "--vocab-size", 400, "--end-token", "</s>", tmp_path / "a.txt")
    (tmp_path / "hf").mkdir()
    shutil.copy(tmp_path / "t.tokenizer.json", tmp_path / "hf" / "tokenizer.json")
    about = tmp_path / "hf" / "tokenizer_config.json"
    about.write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    prepare(tmp_path / "c", "--tokenizer", tmp_path / "hf", tmp_path / "a.txt")
    assert tokens_of(tmp_path / "c") == tokens_of(tmp_path / "t")
    about.write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config\.json holds a list, not an object"):
        prepare(tmp_path / "c", "--tokenizer", tmp_path / "hf", tmp_path / "a.txt")
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"holds no tokenizer\.json; transformers writes one"):
        prepare(tmp_path / "c", "--tokenizer", tmp_path / "none", tmp_path / "a.txt")
