"""prepare_data: if this failed, a stop, parts or more processes would change the corpus."""

import base64
import gzip
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_prepare_data import prepare, read
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import Split

from config.messages import UserError
from corpora.token_files import IndexedDataset
from scripts import documents, encode_documents, encoders, partial_pair, prepare_data, word_cache
from scripts.journal import Journal

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
        (documents, "LONG", 4000),
        (documents, "BLOCK", 700),
        (encode_documents, "CHUNK", 4000),
        (encode_documents, "PART", 300),
        (encode_documents, "BATCH", 900),
        (encoders, "CHECKED", 40),
        (partial_pair, "SECONDS_BETWEEN_ENTRIES", 0.0),
    ):
        monkeypatch.setattr(module, name, value)


def test_long_documents_in_parts_are_the_same_tokens(tmp_path, request, capsys):
    folder = write_texts(tmp_path / "texts")
    words = "--vocab-size", 400, "--skip-bad", 1, folder
    prepare(tmp_path / "whole", "--processes", 2, *words)
    request.getfixturevalue("small")
    prepare(tmp_path / "parts", *words)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    printed = capsys.readouterr().out
    assert printed.count("skipped 1 not in UTF-8, 1 empty, 1 bad") == 2
    assert "cuts of long documents" not in printed


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
    lines = Path(f"{tmp_path}/c.partial.journal").read_text().splitlines()
    done = [tuple(json.loads(line)["next"]) for line in lines if '"next"' in line]
    assert len(done) == chunks
    begun, encoded = [], encode_documents.Work.run
    monkeypatch.setattr(
        encode_documents.Work, "run", lambda work, c: begun.append(c.next) or encoded(work, c)
    )
    prepare(tmp_path / "c", *words)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")
    assert f"going on from {tmp_path}/c.partial.journal" in capsys.readouterr().out
    assert not list(tmp_path.glob("c.partial*"))
    assert min(begun) > done[-1]


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
    journal = Journal(f"{tmp_path}/d", {})
    with pytest.raises(UserError, match=r"another process writes .*/d now"):
        prepare(tmp_path / "d", *words)
    journal.remove()


# ------------------------------------------------------------------------------------------------
# Arrays of tokens, folders of `datasets`
# ------------------------------------------------------------------------------------------------


def test_arrays_of_tokens(tmp_path, small, monkeypatch):
    rows = np.arange(6000).reshape(3, 2000)
    flat = np.arange(5000, dtype=np.uint16)
    monkeypatch.chdir(tmp_path)
    with h5py.File("rows.h5", "w") as file:
        file["tokens"] = rows
    with h5py.File("flat.hdf5", "w") as file:
        file["ids"], file["lengths"], file["words"] = flat, [2000, 0, 3000], ["a"]
    Path("t.txt").write_text("a text")
    Path("noise.h5").write_bytes(b"noise")
    parts = [flat[:2000].tolist(), flat[2000:].tolist()]
    for words, expected in (("rows.h5", rows.tolist()), ("--hdf5-key ids flat.hdf5", parts)):
        prepare("c", "--vocab-size", 6000, *words.split())
        found = IndexedDataset("c")
        assert sorted(found.get(i).tolist() for i in range(len(found))) == expected
    assert not Path("c.tokenizer.json").exists()
    for words, message in (
        ("rows.h5", "give their --vocab-size or --tokenizer"),
        ("rows.h5 t.txt", "name their tokenizer with --tokenizer"),
        ("rows.h5 --vocab-size 5999", r"token id 5999 of an array is not in 0\.\.5998"),
        ("flat.hdf5 --vocab-size 9999", "has no array of integers 'tokens', but ids,"),
        ("noise.h5 --vocab-size 9999", r"noise\.h5 is damaged, or not what its name says"),
    ):
        with pytest.raises(UserError, match=message):
            prepare("d", *words.split())


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
def byte_levels() -> list[encoders.TokenizersEncoder]:
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
        made.append(encoders.TokenizersEncoder(tokenizer, "<|endoftext|>"))
    made[-1].tokenizer.normalizer = normalizers.NFC()
    return made


@settings(deadline=None)
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


def test_other_tokenizers_are_given_whole_texts(byte_levels):
    level, split = pre_tokenizers.ByteLevel, word_cache.splits_at_spaces
    bare = level(add_prefix_space=False, use_regex=False)
    over_spaces = pre_tokenizers.Sequence([Split(Regex(r"\S+ \S+|."), "isolated"), bare])
    for name, value in (
        ("pre_tokenizer", bare),
        ("pre_tokenizer", pre_tokenizers.Metaspace()),
        ("pre_tokenizer", over_spaces),
        ("normalizer", normalizers.Replace(" ", "_")),
        ("model", models.BPE(dropout=0.1)),
        ("", "a b"),  # an added token
    ):
        tokenizer = Tokenizer.from_str(byte_levels[0].tokenizer.to_str())
        assert split(encoders.TokenizersEncoder(tokenizer, "<|endoftext|>"))
        if name:
            setattr(tokenizer, name, value)
        else:
            tokenizer.add_tokens([value])
        assert not split(encoders.TokenizersEncoder(tokenizer, "<|endoftext|>"))
    assert not split(encoders.BytesEncoder())
    assert not split(None)


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
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON that describes"):
        prepare(tmp_path / "c", "--tokenizer", tmp_path / "hf", tmp_path / "a.txt")
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"holds neither tokenizer\.json nor tokenizer\.model"):
        prepare(tmp_path / "c", "--tokenizer", tmp_path / "none", tmp_path / "a.txt")


def test_tiktoken(tmp_path, small):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {b"wo": 256, b"rd": 257, b"word": 258, b" word": 259, b" i": 260}
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (tmp_path / "own.tiktoken").write_text("".join(lines))
    (tmp_path / "a.txt").write_text(TEXT)
    words = "--tokenizer", tmp_path / "own.tiktoken", tmp_path / "a.txt"
    prepare(tmp_path / "c", "--tiktoken-pattern", "gpt2", *words)
    oracle = tiktoken.Encoding(
        "own", pat_str=encoders.PATTERNS["gpt2"], mergeable_ranks=ranks, special_tokens={}
    )
    assert tokens_of(tmp_path / "c") == [*oracle.encode(TEXT), 261]
    assert (tmp_path / "c.tokenizer.tiktoken").read_text() == "".join(lines)
    with pytest.raises(UserError, match="needs --tiktoken-pattern, gpt2, cl100k or a pattern"):
        prepare(tmp_path / "d", *words)


def test_sentencepiece(tmp_path, small):
    """It puts a space before a text: a part begins after the space at which it was cut."""
    package = pytest.importorskip("sentencepiece")
    (tmp_path / "a.txt").write_text(TEXT)
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split(". ")),
        model_prefix=str(tmp_path / "own"),
        vocab_size=80,
        model_type="bpe",  # unigram sums 32-bit scores over a text, so equal ones depend on it
        minloglevel=2,
    )
    model = package.SentencePieceProcessor(model_file=str(tmp_path / "own.model"))
    prepare(tmp_path / "c", "--tokenizer", tmp_path / "own.model", tmp_path / "a.txt")
    assert tokens_of(tmp_path / "c") == [*model.encode(TEXT), model.eos_id()]
    assert (tmp_path / "c.tokenizer.model").read_bytes() == (tmp_path / "own.model").read_bytes()
    (tmp_path / "bad.model").write_bytes(b"noise")
    with pytest.raises(UserError, match=r"bad\.model is not of sentencepiece"):
        prepare(tmp_path / "d", "--tokenizer", tmp_path / "bad.model", tmp_path / "a.txt")
