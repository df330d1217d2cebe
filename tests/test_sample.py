"""sample.py: if this failed, tokens would not be those that transformers writes."""

import json
import math
from pathlib import Path

import checkpoint_worker as worker
import golden_worker
import pytest
import ranks
import sample_worker
import torch
from compare import assert_close

import checkpoint
import decoding
import sample
from config import validation
from corpora import text
from decoding import Choice, choose
from distributed.launch import Launch
from scripts import prepare_data

SHAPE = {"layers": 3, "hidden": 48, "heads": 6, "vocab_size": 131, "seq_length": 40}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "positions": "rotary"}
MODELS = {
    "gpt2": {"positions": "learned"},
    "bloom": {"positions": "alibi", "embedding_norm": True},
    "llama": LLAMA | {"kv_heads": 2, "ffn_hidden": 80, "tied": False},
}
PROMPT, COUNT = [5, 17, 130, 2, 64], 30


def save(out: Path, extra: dict) -> Path:
    """A run of random weights, so large that no token is chosen again and again: its folder."""
    worker.save_random(out, 0.5, **SHAPE, **extra)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: save(folder / name, extra) for name, extra in MODELS.items()}


def words(run: Path, *more: str) -> list[str]:
    """Arguments of sample.py: greedy, of one prompt of ids."""
    prompt = ["--prompt", " ".join(map(str, PROMPT)), "--max-tokens", str(COUNT)]
    return [str(run), *prompt, "--temperature", "0", "--device", "cpu", *more]


def numbers(out: str) -> list[list[int]]:
    """The lines of ids that were printed."""
    return [list(map(int, line.split())) for line in out.splitlines()]


def expected_ids(run: Path, hf: Path) -> list[int]:
    """PROMPT and what transformers continues it with."""
    transformers = pytest.importorskip("transformers")
    arguments = ["export", "--to", "hf", f"{run}/checkpoints/step_00000001", str(hf)]
    checkpoint.run_command(arguments)
    return continued(transformers.AutoModelForCausalLM.from_pretrained(hf).eval())


def continued(theirs) -> list[int]:
    """PROMPT and what a model of transformers continues it with."""
    theirs.generation_config.eos_token_id = None
    asked = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    return theirs.generate(torch.tensor([PROMPT]), **asked)[0].tolist()


def test_greedy_tokens_are_those_of_transformers_under_every_layout(runs, tmp_path):
    layouts = (("--tp", "2", "--pp", "2"), ("--pp", "2"), ())
    jobs = [{"sample": words(run, *layout)} for run in runs.values() for layout in layouts]
    printed = ranks.results_of("tests/sample_worker.py", 4, jobs, tmp_path)
    found = [ids for lines in printed for ids in numbers("\n".join(lines))]
    assert len(found) == len(jobs)
    for index, (name, run) in enumerate(runs.items()):
        expected = expected_ids(run, tmp_path / name)
        assert len(set(expected[len(PROMPT) :])) > 3, "else a wrong cache might not show"
        own = found[index * len(layouts) :][: len(layouts)]
        assert own == [expected] * len(layouts), name


ROTARY = {"positions": "rotary", "tied": False}
WHILE_TRAINING = [
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "sequence_parallel": True, "zero": 0},
    {"zero": 1, "overlap_param_gather": True},
    {"zero": 3},
    {"pp": 2, "schedule": "zb-v", "recompute": "full", "zero": 2},
    ROTARY | {"tp": 2, "pp": 2, "clip_grad": 0.1},
]


def test_samples_while_training_are_the_same_under_every_layout(tmp_path):
    """After each of three steps, whose gradients they do not change."""
    spread = {"init_std": 0.2}  # so that samples are of different tokens
    jobs = [{"run": case | spread} for case in WHILE_TRAINING]
    results = ranks.results_of("tests/sample_worker.py", 4, jobs, tmp_path)
    of_model = ("positions", "tied", "clip_grad")
    for case, found in zip(WHILE_TRAINING, results, strict=True):
        alone = golden_worker.options({k: case[k] for k in of_model if k in case} | spread)
        expected = sample_worker.sampled_steps(validation.check(alone, 1))
        assert [row["sample"] for row in found] == [row["sample"] for row in expected], case
        assert [len(row["sample"]) for row in found] == [12, 12, 12]
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours["grad_norm"], theirs["grad_norm"], 2e-5, case)


def test_every_familys_greedy_tokens_are_those_of_transformers(tmp_path, capsys):
    """Imported from transformers; on one rank."""
    families = pytest.importorskip("test_families")
    different = {}
    for case in families.CASES:
        theirs, folder = families.their_model(case), tmp_path / case.replace(" ", "_")
        with torch.no_grad():
            for p in theirs.parameters():
                p.mul_(3.0 if p.dim() > 1 else 1.0)  # else a token is chosen again and again
        theirs.save_pretrained(folder / "hf")
        checkpoint.run_command(["import", "--from", "hf", f"{folder}/hf", f"{folder}/in"])
        capsys.readouterr()
        found = numbers(run_here(words(folder / "in"), capsys)[0])[0]
        expected = continued(theirs)
        if found != expected:
            different[case] = found, expected
    assert different == {}


@pytest.mark.parametrize(("before", "shown"), [("", ""), ("\x1b[2J", r"\x1b[2J")])
def test_control_characters_of_a_tokenizer_do_not_reach_the_terminal(before, shown, runs, tmp_path):
    """A tokenizer.json from elsewhere may decode to anything: here each token clears the screen.

    The program runs as a process under mpirun; a letter is a token.
    """
    (tmp_path / "tokenizer.json").write_text(letters(before=before).to_str())
    command = ["sample.py", str(runs["llama"]), "--tokenizer", str(tmp_path / "tokenizer.json")]
    command += ["--prompt", "a", "--prompt", "c", "--temperature", "0", "--max-tokens", "9"]
    done = ranks.mpirun(2, *command, "--tp", "2", "--device", "cpu", "--precision", "fp64")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert [line[: len(shown) + 1] for line in lines] == [f"{shown}a", f"{shown}c"]
    assert "\x1b" not in done.out
    folder = f"{runs['llama']}/checkpoints/step_00000001"
    assert f"note: {folder}, tokenizer: {tmp_path}/tokenizer.json\n" in done.err


def letters(end: str = "z", before: str = ""):
    """A tokenizer of 130 single characters, the first of them a to z; `before` each of these."""
    tokenizers = pytest.importorskip("tokenizers")
    names = [before + chr(code) for code in (*range(97, 123), *range(200, 304))]
    end = before + end
    ids = {name: i for i, name in enumerate(names) if name != end} | {text.END: names.index(end)}
    first = tokenizers.models.WordLevel(
        ids, unk_token=names[0]
    )  # a token for every character, if `before`
    tokenizer = tokenizers.Tokenizer(first)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return tokenizer


def run_here(arguments: list[str], capsys) -> tuple[str, str]:
    """Output and notes of sample.py on one rank, in this process."""
    from distributed.context import start

    task = sample.prepare_task(sample.parse(arguments), 1)
    lines = list(sample.run(task, start(Launch("python"), task.config.run)))
    return "".join(f"{line}\n" for line in lines), capsys.readouterr().err


def test_a_seed_draws_the_same_text_again_and_the_cache_changes_nothing(runs, capsys, monkeypatch):
    drawn = [*words(runs["bloom"]), "--temperature", "1.5", "--top-p", "0.9"]
    first, again = run_here(drawn, capsys)[0], run_here(drawn, capsys)[0]
    assert first == again
    assert first != run_here([*drawn, "--seed", "7"], capsys)[0]

    decode, seen = decoding.Pipeline.decode, []

    def without_cache(pipeline, tokens, cache):
        seen.append(tokens)
        fresh = decoding.KeyValueCache(100, cache.slopes, cache.device)
        return decode(pipeline, torch.cat(seen, 1), fresh)

    cached = [run_here(words(run), capsys)[0] for run in runs.values()]
    monkeypatch.setattr(decoding.Pipeline, "decode", without_cache)
    for run, ids in zip(runs.values(), cached):
        seen.clear()
        assert run_here(words(run), capsys)[0] == ids
        assert [len(tokens[0]) for tokens in seen] == [len(PROMPT)] + [1] * (COUNT - 1)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Choice(), [1.0]),
        (Choice(1.0, 1.0), [0.5, 0.3, 0.15, 0.05]),
        (Choice(1.0, 0.75), [0.625, 0.375]),
        (Choice(1.0, 0.5), [1.0]),
        (Choice(0.5), [0.6849, 0.2466, 0.0616, 0.0068]),  # squares over their sum
    ],
)
def test_a_token_is_drawn_of_the_most_likely_ones(how, expected):
    random, logits = torch.Generator().manual_seed(0), torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    drawn = torch.tensor([choose(logits, how, random) for _ in range(4000)])
    assert (torch.bincount(drawn) / 4000).tolist() == pytest.approx(expected, abs=0.04)


def test_a_sample_ends_where_the_document_does(runs, tmp_path, capsys):
    """A token that the model writes by itself is made the end of a document."""
    common = [str(runs["gpt2"]), "--temperature", "0", "--max-tokens", "30", "--device", "cpu"]
    prompt, new = [5, 17, 2, 64], numbers(run_here([*common, "--prompt", "5 17 2 64"], capsys)[0])
    new = new[0][len(prompt) :]
    end = next(token for token in new[4:] if token < 130 and token not in prompt)
    names = [chr(code) for code in (*range(97, 123), *range(200, 304))]
    (tmp_path / "t.json").write_text(letters(names[end]).to_str())
    given = ["--tokenizer", str(tmp_path / "t.json"), "--prompt", "".join(names[i] for i in prompt)]
    drawn = run_here([*common, *given], capsys)[0]
    assert drawn == "".join(names[i] for i in prompt + new[: new.index(end)]) + "\n"


# ---- Losses on named corpora ---------------------------------------------------------------------


def test_the_loss_of_a_checkpoint_is_that_of_the_run(tmp_path):
    """The losses on two corpora equal those of train.py's rows, also under another layout."""
    text_file, text = tmp_path / "a.txt", str(tmp_path / "text")
    text_file.write_text("\n\n".join(f"line {i} of a text, {i * i}" for i in range(3000)))
    prepare_data.main(["--out", text, "--vocab-size", "300", str(text_file)])
    sets = ["--eval-data", f"a={text}:50", f"b={text}:7"]
    shape = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 300 --device cpu"
    command = f"train.py {shape} --steps 4 --out {tmp_path}/run --data {text} --save-every 4 --tp 2"
    prompts = ["--sample-every", "2", "--sample-prompt", "line 5", "text"]
    done = ranks.fork_ranks(2, *command.split(), *sets, *prompts)
    assert done.status == 0, done.err
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = {key: value for row in rows for key, value in row.items() if key.endswith("_loss")}
    for iteration in (2, 4):
        assert f" sample at iteration {iteration} | 'line 5' -> '" in done.out
    assert done.out.count("| 'text' -> '") == 2
    words = ["sample.py", str(tmp_path / "run"), "--device", "cpu"]
    done = ranks.fork_ranks(2, *words, "--pp", "2", *sets)
    assert done.status == 0, done.err
    for line, (name, tokens) in zip(done.out.splitlines(), (("a", 800), ("b", 112)), strict=True):
        loss, perplexity, count = line.removeprefix(f"{name}: loss ").split(", ")
        assert float(loss) == pytest.approx(losses[f"{name}_loss"], abs=2e-5)
        found = float(perplexity.removeprefix("perplexity "))
        assert found == pytest.approx(math.exp(float(loss)), rel=1e-5)
        assert count == f"{tokens} tokens"
    sampled = ranks.fork_one(*words, "--prompt", "line 5")
    assert sampled.status == 0, sampled.err
    assert sampled.out.startswith("line 5")
    assert f", tokenizer: {text}.tokenizer.json\n" in sampled.err


# ---- Mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "name", "expected"),
    [
        (132, "c", None),  # 130, rounded up to a multiple of 4
        (133, "c", "the model has a vocabulary of 133, but {}/c.tokenizer.json has 130 tokens"),
        (50257, "none", None),
        (50257, "d", "cannot read the tokenizer "),
    ],
)
def test_a_vocabulary_that_no_text_uses_is_a_note(size, name, expected, tmp_path):
    (tmp_path / "c.tokenizer.json").write_text(letters().to_str())
    (tmp_path / "d.tokenizer.json").write_text("{")
    given = worker.options({"vocab_size": size, "data": (f"{tmp_path}/{name}",)})
    note = text.unused_rows(given)
    assert note is expected is None or note.startswith(expected.format(tmp_path))
