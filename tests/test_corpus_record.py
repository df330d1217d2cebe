"""What corpora and checkpoints say: if this failed, a loss would be that of other samples."""

import json
import shutil

import numpy as np
import pytest
from ranks import fork_one
from small_corpora import END, VOCAB, write_chats
from test_encoder import documents
from test_prepare_data import prepare
from test_special_tokens import folder, prepared  # noqa: F401 (a fixture)

import train
from base.errors import UserError
from config.command_line import parse_request
from config.corpus_record import IDS, TEXT, read
from config.validation import check
from corpora import text
from corpora.token_files import IndexedDataset, IndexedDatasetWriter

SHAPE = "--layers 1 --hidden 8 --heads 2 --seq-length 20 --steps 2 --global-batch-size 4"
SHAPE += " --device cpu --vocab-size "
MASKS = ["--reset-attention", "--reset-positions", "--mask-eod-loss"]


@pytest.fixture
def corpora(tmp_path):
    """Corpora of bytes: a and b end with 256; c has an end token of its own, 0."""
    (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "text {i}"}}\n' for i in range(40)))
    for name in "ab":
        prepare(tmp_path / name, "--tokenizer", "bytes", tmp_path / "t.jsonl")
    prepare(tmp_path / "c", "--vocab-size", 300, tmp_path / "t.jsonl")
    return tmp_path


def request(*words, size: int = 300):
    return parse_request([*SHAPE.split(), str(size), *map(str, words)])


# ---- The token that ends a document --------------------------------------------------------------


@pytest.mark.parametrize("older", [False, True])
def test_masks_take_the_end_of_the_corpus(older, corpora):
    """older: the corpus names the token, and not its id."""
    if older:
        forget(corpora / "a", "end_id", "largest_id", "special_tokens")
    for flag in MASKS:
        found = request("--data", corpora / "a", flag)
        assert found.config.data.eod_token == 256
        assert any("eod-token 256, with which documents of" in note for note in found.notes)
        check(found.config, 1)
    assert request("--data", corpora / "a").config.data.eod_token is None, "no mask needs it"
    words = ["--data", "synthetic", "--eval-data", f"x={corpora}/b", MASKS[0]]
    assert request(*words).config.data.eod_token == 256


def forget(prefix, *names: str) -> None:
    """Leave fields out of what a corpus says, as an earlier version did."""
    about = prefix.with_name(prefix.name + ".tokenizer_config.json")
    facts = json.loads(about.read_text())
    for name in names:
        del facts["documents"][name]
    about.write_text(json.dumps(facts))


def test_another_end_than_that_of_a_corpus_is_a_mistake(corpora, tmp_path):
    a, b, c = (str(corpora / name) for name in "abc")
    phases = tmp_path / "p.toml"
    phases.write_text(f'train_tokens = 640\n[[phase]]\nfrom_tokens = 0\ndata = ["{a}"]\n')
    for words in (
        ["--data", a],
        ["--data", a, *MASKS],
        ["--data", "1", b, "1", a],
        ["--data", "synthetic", "--eval-data", f"x={a}"],
    ):
        with pytest.raises(UserError, match=r"--eod-token 0, but documents of .* the token 256"):
            request(*words, "--eod-token", "0")
        request(*words, "--eod-token", "256")
    words = SHAPE.replace("--steps 2 ", "").split()
    with pytest.raises(UserError, match="--eod-token 0, but documents"):
        parse_request([*words, "300", "--phases", str(phases), "--eod-token", "0"])
    with pytest.raises(UserError, match=r"a end with the token 256, documents of .*c end with"):
        request("--data", a, c, MASKS[0])
    shutil.copy(f"{a}.bin", tmp_path / "plain.bin")
    shutil.copy(f"{a}.idx", tmp_path / "plain.idx")
    assert request("--data", tmp_path / "plain", "--eod-token", 5).config.data.eod_token == 5
    with pytest.raises(UserError, match="needs --eod-token"):
        check(request("--data", tmp_path / "plain", MASKS[0]).config, 1)


def test_a_run_with_another_end_is_resumed_as_it_was(corpora, tmp_path):
    """From before the comparison: a note says it."""
    command = f"train.py {SHAPE} 300 --data {corpora}/a --out {tmp_path}/run --save-every 2"
    forget(corpora / "a", "end", "end_id")
    done = fork_one(*command.split(), "--reset-attention", "--eod-token", "0")
    assert done.status == 0, done.err
    prepare(corpora / "a", "--tokenizer", "bytes", corpora / "t.jsonl")
    again = command.replace("--steps 2", "--steps 4").split()
    done = fork_one(*again, "--resume", "auto")
    assert done.status == 0, done.err
    assert "eod-token 0 as before, but documents of" in done.err
    with pytest.raises(UserError, match="--eod-token 0, but documents"):
        request("--data", corpora / "a", "--eod-token", "0")


# ---- The largest id ------------------------------------------------------------------------------


def write(prefix, ids, vocabulary: int = 70000) -> None:
    with IndexedDatasetWriter(str(prefix), vocabulary) as writer:
        writer.add_document(np.array(ids))
        assert writer.largest_id == max(ids)


def test_a_corpus_says_its_largest_id(corpora, tmp_path):
    for name in "abc":
        found = max(max(ids) for ids in documents(corpora / name))
        assert read(str(corpora / name)).largest_id == found
    np.save(tmp_path / "x.npy", 1)
    import h5py

    with h5py.File(tmp_path / "t.h5", "w") as file:
        file["tokens"] = [1, 7, 3]
    prepare(tmp_path / "d", "--vocab-size", 500, tmp_path / "t.h5")
    assert read(str(tmp_path / "d")).facts() == {"largest_id": 7}
    with pytest.raises(UserError, match=r"d has the token id 7 \(.*vocab-size is 7: give --v"):
        text.check_ids(str(tmp_path / "d"), 7)
    assert text.check_ids(str(tmp_path / "d"), 8) == []


@pytest.mark.parametrize("eval_only", [False, True])
def test_a_corpus_with_more_tokens_than_the_model_is_refused_at_the_start(eval_only, corpora):
    words = ["--data", str(corpora / "a")]
    if eval_only:
        words = ["--data", "synthetic", "--eval-data", f"x={corpora}/a"]
    for known in (True, False):
        train.check_data(request(*words, size=257).config)
        with pytest.raises(UserError, match=r"a has the token id 256.*, but vocab-size is 256:"):
            train.check_data(request(*words, size=256).config)
        if known:
            forget(corpora / "a", "largest_id")


def test_older_corpora_are_searched_or_a_line_says_so(tmp_path, monkeypatch):
    write(tmp_path / "a", [3, 60, 5])
    write(tmp_path / "short", [3, 60, 5], 300)
    for name in ("a", "short"):
        assert text.check_ids(str(tmp_path / name), 61) == []
        with pytest.raises(UserError, match="has the token id 60, but vocab-size is 60"):
            text.check_ids(str(tmp_path / name), 60)
    monkeypatch.setattr(text, "MOST_SEARCHED", 1)
    (note,) = text.check_ids(str(tmp_path / "a"), 60)
    assert "is not known: one above 59 would end the run" in note
    assert text.check_ids(str(tmp_path / "short"), 2**16) == [], "no type of 16 bits has more"


def test_a_corpus_that_says_nonsense_is_named(corpora):
    about = corpora / "a.tokenizer_config.json"
    good = json.loads(about.read_text())["documents"]
    for wrong in ({"end_id": -1}, {"largest_id": "7"}, {"end_id": True}, {"special_tokens": "x"}):
        about.write_text(json.dumps({"documents": good | wrong}))
        with pytest.raises(UserError, match=f"documents has {next(iter(wrong))} "):
            read(str(corpora / "a"))


# ---- Losses of a checkpoint ----------------------------------------------------------------------

RUNS = {
    "plain": "",
    "answers": "--answers-only --reset-attention --reset-positions --eod-token 3",
    "documents": "--reset-attention --mask-eod-loss --eod-token 3 --seed 7",
    "prefix": "--objective prefix --seed 5",
    "prefixes of documents": "--objective prefix --reset-attention --eod-token 3",
}


def losses(out: str) -> dict[str, float]:
    lines = [line.partition(": loss ") for line in out.splitlines()]
    return {name: float(rest.partition(",")[0]) for name, _, rest in lines}


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_of_a_checkpoint_is_that_of_its_run(name, tmp_path):
    write_chats(tmp_path)
    assert END == 3
    command = f"train.py {SHAPE} {VOCAB} --data {tmp_path}/chats --out {tmp_path}/run --lr 1e-2"
    command += f" --seq-length 32 --save-every 2 --eval-data x={tmp_path}/chats:9 {RUNS[name]}"
    done = fork_one(*command.split())
    assert done.status == 0, done.err
    said = "marks answers"
    assert (said in done.err) == (name != "answers")
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (loss,) = [row["x_loss"] for row in rows if "x_loss" in row]
    sampled = ["sample.py", f"{tmp_path}/run", "--device", "cpu", "--eval-data"]
    done = fork_one(*sampled, f"x={tmp_path}/chats:9")
    assert done.status == 0, done.err
    assert losses(done.out)["x"] == pytest.approx(loss, abs=2e-6)
    assert ("taken from" in done.err) == (name != "plain")
    if name == "answers":  # what is given replaces it, and is what an untuned model is compared by
        done = fork_one(*sampled, f"x={tmp_path}/chats:9", "--no-answers-only")
        assert abs(losses(done.out)["x"] - loss) > 1e-3
        write(tmp_path / "other", list(range(VOCAB)) * 9, VOCAB)
        done = fork_one(*sampled, f"y={tmp_path}/other")
        assert done.status == 2
        assert "--answers-only: " in done.err
        assert "taken from" in done.err
        done = fork_one(*sampled[:4], "--prompt", "5 6", "--no-answers-only")
        assert "--answers-only: goes with --eval-data" in done.err


def test_what_only_weights_leave_is_said(tmp_path):
    write_chats(tmp_path)
    command = f"train.py {SHAPE} {VOCAB} --data {tmp_path}/chats --save-every 2"
    command += f" --out {tmp_path}/run"
    done = fork_one(*command.split(), *RUNS["answers"].split())
    assert done.status == 0, done.err
    named = "answers-only, reset-attention, reset-positions, eod-token 3"
    again = ["--resume", f"{tmp_path}/run", "--out", f"{tmp_path}/new"]
    for more in (["--load-weights-only"], []):
        found = parse_request([*command.split()[1:], *again, *more])  # a program without a past
        assert any(f": {named}" in note and "not taken from" in note for note in found.notes)
    done = fork_one(*command.split(), *again, "--load-weights-only", "--no-answers-only")
    assert done.status == 0, done.err
    left = named.removeprefix("answers-only, ")
    assert f"not taken from {tmp_path}/run/checkpoints/step_00000002: {left}" in done.err
    for target, weights in (("merged", []), ("hf", ["--to", "hf"])):
        command = "merge" if target == "merged" else "export"
        sources = [f"{tmp_path}/run"] * (1 + (command == "merge"))
        if command == "merge":
            shutil.copytree(tmp_path / "run", tmp_path / "copy")
            sources[1] = f"{tmp_path}/copy"
        done = fork_one("checkpoint.py", command, *weights, *sources, f"{tmp_path}/{target}")
        assert done.status == 0, done.err
    sampled = ["--device", "cpu", "--eval-data", f"x={tmp_path}/chats:9"]
    found = [fork_one("sample.py", f"{tmp_path}/{name}", *sampled) for name in ("run", "merged")]
    assert losses(found[0].out) == losses(found[1].out)
    assert "taken from" in found[1].err


def test_an_export_says_what_transformers_does_otherwise(folder, tmp_path):  # noqa: F811
    prepared(folder, TEXT)
    command = f"train.py {SHAPE} 400 --data {folder}/text --out {tmp_path}/run --save-every 2"
    for more, expected in (("--objective prefix", 2), ("", 1)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
        done = fork_one(*command.split(), *more.split())
        assert done.status == 0, done.err
        done = fork_one(
            "checkpoint.py", "export", "--to", "hf", f"{tmp_path}/run", f"{tmp_path}/hf"
        )
        assert done.status == 0, done.err
        said = ("with --objective prefix", "names of special tokens are text")
        assert [words in done.out for words in said] == [expected == 2, True]
    done = fork_one("sample.py", f"{tmp_path}/run", "--prompt", "<|im_start|>", "--device", "cpu")
    assert done.status == 0, done.err
    assert "1 of 1 prompts name <|im_start|> (once): they are text, as in the corpus" in done.err
    assert IDS not in json.loads((tmp_path / "hf/tokenizer_config.json").read_text())["documents"]


def test_checksums_and_documents_stay(corpora):
    """The record is beside the corpus, whose files are those of Megatron."""
    assert IndexedDataset(str(corpora / "a")).tokens == IndexedDataset(str(corpora / "b")).tokens
    assert (corpora / "a.bin").read_bytes() == (corpora / "b.bin").read_bytes()


# ---- The size of the vocabulary ------------------------------------------------------------------


def parsed(*words):
    return parse_request([*SHAPE.removesuffix(" --vocab-size ").split(), *map(str, words)])


def test_without_vocab_size_it_is_that_of_the_corpora(corpora):
    found = parsed("--data", corpora / "a", corpora / "c")
    assert found.config.model.vocab_size == 300
    assert f"vocab-size 300, the tokens of {corpora}/c.tokenizer.json" in found.notes
    assert text.unused_rows(found.config) is None
    assert "vocab_size" not in found.given
    assert parsed("--data", corpora / "a").config.model.vocab_size == 257
    given = parsed("--data", corpora / "a", "--vocab-size", 400)
    assert given.config.model.vocab_size == 400
    named = parse_request(["--model", "gpt2-124m", "--steps", "1", "--data", f"{corpora}/a"])
    assert named.config.model.vocab_size == 50257, "the model is said, with its vocabulary"


def test_a_vocabulary_that_is_not_known_is_the_default(corpora):
    (corpora / "b.tokenizer.json").unlink()
    assert parsed("--data", corpora / "a", corpora / "b").config.model.vocab_size == 50257
    for wrong in ('{"model": {"vocab": 3}}', "{}", '{"model": {"vocab": {"a": "x"}}}'):
        (corpora / "b.tokenizer.json").write_text(wrong)
        assert parsed("--data", corpora / "b").config.model.vocab_size == 50257, wrong
    unigrams = {"model": {"vocab": [["a", 0.0], ["b", 1.0]]}, "added_tokens": [{"id": 2}]}
    (corpora / "b.tokenizer.json").write_text(json.dumps(unigrams))
    assert parsed("--data", corpora / "b").config.model.vocab_size == 3
    assert parsed("--data", "synthetic").config.model.vocab_size == 50257


@pytest.mark.parametrize("again", [False, True])
def test_a_run_goes_on_with_the_vocabulary_of_its_checkpoint(again, corpora, tmp_path):
    """A run of an earlier version began with 50,257 rows beside a corpus of 257.

    again: the command that goes on says the shape again, without the vocabulary.
    """
    out = ["--out", str(tmp_path / "run"), "--save-every", "1", "--device", "cpu"]
    run = [*SHAPE.split(), "400", "--data", f"{corpora}/a", *out, "--stop-at-samples", "4"]
    assert fork_one("train.py", *run).status == 75
    words = SHAPE.removesuffix(" --vocab-size ").split() if again else []
    ended = fork_one("train.py", *words, "--data", f"{corpora}/a", *out, "--resume", "auto")
    assert ended.status == 0, ended.err
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["model"]["vocab_size"] == 400
