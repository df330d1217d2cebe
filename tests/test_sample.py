"""sample.py: if this failed, tokens would not be those that transformers writes."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import checkpoint_worker as worker
import golden_worker
import pytest
import ranks
import sample_worker
import torch
from compare import assert_close
from observed_steps import observed_step
from test_golden import without_layout

import checkpoint
import sample
from base.errors import UserError
from config import validation
from config.command_line import parse
from corpora import text
from corpora.encoder import END
from distributed.launch import Launch
from inference import decoding, run_samples
from inference.decoding import SamplingParams, choose

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


def continued(theirs, use_cache: bool = True) -> list[int]:
    """PROMPT and what a model of transformers continues it with."""
    theirs.generation_config.eos_token_id = None
    asked = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0}
    asked["use_cache"] = use_cache
    return theirs.generate(torch.tensor([PROMPT]), **asked)[0].tolist()


@pytest.mark.slow
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
# Sampled tokens must not count as tokens of the batch, whose counts move the biases of the experts.
EXPERTS = ROTARY | {
    "experts": 4,
    "experts_per_token": 2,
    "bias": False,
    "router": "sigmoid",
    "balance": "bias",
    "balance_rate": 0.05,
}
# Latents of all tokens are cached on each tensor rank; v is wider than the key.
LATENT = ROTARY | {
    "norm": "rmsnorm",
    "bias": False,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
WHILE_TRAINING = [
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "sequence_parallel": True, "zero": 0},
    {"zero": 1, "overlap_param_gather": True},
    {"zero": 3},
    {"pp": 2, "schedule": "zb-v", "recompute": "full", "zero": 2},
    ROTARY | {"tp": 2, "pp": 2, "clip_grad": 0.1},
    EXPERTS | {"tp": 2, "ep": 4, "sequence_parallel": True},
    EXPERTS | {"pp": 2, "ep": 2, "zero": 2},
    EXPERTS | {"cp": 2, "ep": 4, "zero": 3},
    LATENT | {"tp": 2, "pp": 2, "sequence_parallel": True},
    LATENT | {"tp": 2, "cp": 2, "zero": 3},
]


@pytest.mark.slow
def test_samples_while_training_are_the_same_under_every_layout(tmp_path):
    """After each of three steps, whose gradients they do not change."""
    spread = {"init_std": 0.2}  # so that samples are of different tokens
    jobs = [{"run": case | spread} for case in WHILE_TRAINING]
    results = ranks.results_of("tests/sample_worker.py", 4, jobs, tmp_path)
    for case, found in zip(WHILE_TRAINING, results, strict=True):
        alone = golden_worker.options(without_layout(case | spread))
        expected = sample_worker.sampled_steps(validation.check(alone, 1))
        assert [row["sample"] for row in found] == [row["sample"] for row in expected], case
        assert [len(row["sample"]) for row in found] == [12, 12, 12]
        for ours, theirs in zip(found, expected, strict=True):
            assert_close(ours["grad_norm"], theirs["grad_norm"], 2e-5, case)


LONG_LATER = ("smollm3 long", "olmo3 long")  # whose first block has no other tables for long texts
# With its cache transformers continues these otherwise than without: of smollm3 and olmo3 it keeps
# the keys of the short text, and one new token of Mamba-2 has a step that no limit bounds.
WITHOUT_CACHE = (*LONG_LATER, "bamba", "nemotron_h experts")


@pytest.mark.parametrize("case", LONG_LATER)
def test_a_text_becomes_long_where_the_first_block_does_not_turn(case, tmp_path, capsys):
    check_greedy_tokens([case], tmp_path, capsys)


@pytest.mark.slow
def test_every_familys_greedy_tokens_are_those_of_transformers(tmp_path, capsys):
    """Imported from transformers; on one rank. Of a family's cases the first: test_families.py has
    the logits of all."""
    cases = [case for case in pytest.importorskip("test_families").CASES if " " not in case]
    check_greedy_tokens(cases, tmp_path, capsys)


def check_greedy_tokens(cases, tmp_path: Path, capsys) -> None:
    families = pytest.importorskip("test_families")
    different = {}
    for case in cases:
        theirs, folder = families.their_model(case), tmp_path / case.replace(" ", "_")
        with torch.no_grad():
            for p in theirs.parameters():
                p.mul_(3.0 if p.dim() > 1 else 1.0)  # else a token is chosen again and again
        theirs.save_pretrained(folder / "hf")
        checkpoint.run_command(["import", "--from", "hf", f"{folder}/hf", f"{folder}/in"])
        capsys.readouterr()
        found = numbers(run_here(words(folder / "in"), capsys)[0])[0]
        expected = continued(theirs, use_cache=case not in WITHOUT_CACHE)
        end = theirs.config.eos_token_id  # ends a text, if it is in the vocabulary
        if end in expected[len(PROMPT) :]:
            expected = expected[: expected.index(end, len(PROMPT))]
        if found != expected:
            different[case] = found, expected
    assert different == {}


def test_the_program_prints_text_by_the_tokenizer_of_the_corpus(runs, tmp_path):
    """The program runs as a process under mpirun; a letter is a token."""
    (tmp_path / "tokenizer.json").write_text(letters().to_str())
    command = ["sample.py", str(runs["llama"]), "--tokenizer", str(tmp_path / "tokenizer.json")]
    command += ["--prompt", "ab", "--prompt", "cd", "--temperature", "0", "--max-tokens", "9"]
    done = ranks.mpirun(2, *command, "--tp", "2", "--device", "cpu", "--precision", "fp64")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert [line[:2] for line in lines] == ["ab", "cd"]
    folder = f"{runs['llama']}/checkpoints/step_00000001"
    assert f"note: {folder}, tokenizer: {tmp_path}/tokenizer.json\n" in done.err


def test_control_characters_of_a_tokenizer_do_not_reach_the_terminal(runs, tmp_path):
    """A tokenizer.json from elsewhere may decode to anything: here each token clears the screen."""
    (tmp_path / "tokenizer.json").write_text(letters(before="\x1b[2J").to_str())
    command = ["sample.py", str(runs["llama"]), "--tokenizer", str(tmp_path / "tokenizer.json")]
    command += ["--prompt", "a", "--temperature", "0", "--max-tokens", "9", "--device", "cpu"]
    done = ranks.fork_one(*command)
    assert done.status == 0, done.err
    assert "\x1b" not in done.out
    assert done.out.startswith(r"\x1b[2Ja")


def letters(end: str = "z", before: str = ""):
    """A tokenizer of 130 single characters, the first of them a to z; `before` each of these."""
    tokenizers = pytest.importorskip("tokenizers")
    names = [before + chr(code) for code in (*range(97, 123), *range(200, 304))]
    end = before + end
    ids = {name: i for i, name in enumerate(names) if name != end} | {END: names.index(end)}
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


@pytest.mark.parametrize("name", ["gpt2", "bloom", "window", "latent"])
def test_a_prompt_of_a_prefix_model_is_a_prefix(name, tmp_path, capsys):
    """Its tokens see all of it, as in training: what is drawn is what full masks find likeliest."""
    latent = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    models = MODELS | {"window": LLAMA | {"window": 4}, "latent": LLAMA | latent}
    rows = {}
    for objective in ("prefix", "causal"):
        run = save(tmp_path / objective, models[name] | {"objective": objective})
        (ids,) = numbers(run_here(words(run), capsys)[0])
        row = {"context": " ".join(map(str, PROMPT)), "answer": 0}
        row["continuations"] = [" ".join(map(str, ids[len(PROMPT) :]))]
        rows[objective] = json.dumps(row)
    for objective, row in rows.items():
        for asked in rows:
            (tmp_path / "t.jsonl").write_text(row)
            task = ["--eval-tasks", str(tmp_path / "t.jsonl"), "--device", "cpu"]
            out, notes = run_here([str(tmp_path / asked), *task], capsys)
            assert out.splitlines()[1].startswith(f"t: accuracy {float(asked == objective):.6f}")
            assert ("objective prefix" in notes) == (asked == "prefix")


def test_a_token_is_drawn_of_the_most_likely_ones():
    random, logits = torch.Generator().manual_seed(0), torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert choose(logits, SamplingParams(), random) == 0

    def shares(how: SamplingParams) -> list[float]:
        counts = torch.bincount(torch.tensor([choose(logits, how, random) for _ in range(4000)]))
        return (counts / 4000).tolist()

    assert shares(SamplingParams(1.0, 1.0)) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.04)
    assert shares(SamplingParams(1.0, 0.75)) == pytest.approx([0.625, 0.375], abs=0.04)
    assert shares(SamplingParams(1.0, 0.5)) == [1.0]
    squares = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    assert shares(SamplingParams(0.5)) == pytest.approx(
        (squares / squares.sum()).tolist(), abs=0.04
    )


def test_a_sample_ends_where_the_document_does(runs, tmp_path, capsys):
    common = [str(runs["gpt2"]), "--temperature", "0", "--max-tokens", "30", "--device", "cpu"]
    ids = numbers(run_here([*common, "--prompt", "5 17 2 64"], capsys)[0])[0]
    new = ids[4:]
    at = next(i for i, token in enumerate(new) if i > 3 and token < 130 and token not in ids[:4])
    at = new.index(new[at])
    names = [chr(code) for code in (*range(97, 123), *range(200, 304))]
    (tmp_path / "t.json").write_text(letters(names[new[at]]).to_str())
    prompt = ["--tokenizer", str(tmp_path / "t.json"), "--prompt"]
    prompt.append("".join(names[i] for i in ids[:4]))
    drawn = run_here([*common, *prompt], capsys)[0]
    assert drawn == "".join(names[i] for i in ids[: 4 + at]) + "\n"


# ---- Losses on named corpora ---------------------------------------------------------------------


def test_the_loss_of_a_checkpoint_is_that_of_the_run(tmp_path):
    """The losses on two corpora equal those of train.py's rows, also under another layout."""
    corpus = [sys.executable, "scripts/prepare_data.py", "--out", str(tmp_path / "text")]
    text_file = tmp_path / "a.txt"
    text_file.write_text("\n\n".join(f"line {i} of a text, {i * i}" for i in range(3000)))
    made = ranks.start([*corpus, "--vocab-size", "300", str(text_file)], 120)
    assert made.status == 0, made.err
    shape = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 300 --device cpu"
    command = f"train.py {shape} --steps 4 --out {tmp_path}/run --data {tmp_path}/text"
    command += f" --save-every 4 --eval-data a={tmp_path}/text:50 b={tmp_path}/text:7"
    command += " --sample-every 2"
    done = ranks.fork_ranks(2, *command.split(), "--tp", "2", "--sample-prompt", "line 5", "text")
    assert done.status == 0, done.err
    assert "are never used" not in done.err
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = {key: value for row in rows for key, value in row.items() if key.endswith("_loss")}
    log = (tmp_path / "run/log.txt").read_text()
    assert [log.count(f" sample at step {i} | 'line 5' -> '") for i in range(1, 5)] == [
        *(0, 1, 0, 1)
    ]
    assert log.count("| 'text' -> '") == 2
    assert not [line for line in log.splitlines() if line.endswith("|")]
    sets = [f"a={tmp_path}/text:50", f"b={tmp_path}/text:7"]
    words = ["sample.py", str(tmp_path / "run"), "--pp", "2", "--device", "cpu"]
    done = ranks.fork_ranks(2, *words, "--eval-data", *sets)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) == 2
    for line, (name, tokens) in zip(lines, {"a": 800, "b": 112}.items()):
        found = line.removeprefix(f"{name}: loss ").split(", ")
        assert float(found[0]) == pytest.approx(losses[f"{name}_loss"], abs=2e-5)
        perplexity = float(found[1].removeprefix("perplexity "))
        assert perplexity == pytest.approx(math.exp(float(found[0])), rel=1e-5)
        assert found[2] == f"{tokens} tokens"
    sampled = ranks.fork_one(*words[:2], "--prompt", "line 5")
    assert sampled.status == 0, sampled.err
    assert sampled.out.startswith("line 5")
    checkpoint_folder = f"{tmp_path}/run/checkpoints/step_00000004"
    assert f", tokenizer: {checkpoint_folder}/tokenizer.json\n" in sampled.err


# ---- Mistakes ------------------------------------------------------------------------------------


def test_a_vocabulary_that_no_text_uses_is_a_note(tmp_path):
    (tmp_path / "c.tokenizer.json").write_text(letters().to_str())

    def note(size: int, data: tuple = (f"{tmp_path}/c",)) -> str | None:
        return text.unused_rows(worker.options({"vocab_size": size, "data": data}))

    assert note(130) is None
    assert note(132) is None, "rounded up to a multiple of 4"
    sentence = f"the model has a vocabulary of 133, but {tmp_path}/c.tokenizer.json has 130 tokens"
    assert note(133).startswith(sentence)
    assert "--vocab-size 130" in note(50257)
    assert note(50257, (f"{tmp_path}/none",)) is None
    assert note(50257, ("synthetic",)) is None
    (tmp_path / "d.tokenizer.json").write_text("{")
    assert note(50257, (f"{tmp_path}/d",)).startswith("cannot read the tokenizer ")


def test_a_prompt_that_does_not_fit_is_a_sentence(runs, tmp_path):
    (tmp_path / "t.json").write_text(letters().to_str())
    long = ["--prompt", "1 " * 20 + "1", "--max-tokens", "30"]
    wrong = {
        (
            "--prompt",
            "a text",
        ): "the corpus: give --tokenizer FILE, or token ids such as '17 4 250'",
        ("--prompt", "1 131"): "--prompt: token id 131 is not below vocab-size(131)",
        (
            *long,
            "--tp",
            "5",
        ): "has 21 tokens and --max-tokens is 30: together 51, but max-positions is 40",
        (
            "--prompt",
            "1",
            "--tp",
            "5",
            "--max-tokens",
            "39",
        ): "tp(5) * pp(1) * dp(?) does not divide 1 rank: start",
        ("--prompt", "1", "--tokenizer", str(runs["gpt2"] / "run.json")): "there is no such file",
    }
    for more, sentence in wrong.items():
        with pytest.raises(UserError) as caught:
            sample.prepare_task(sample.parse([str(runs["gpt2"]), *more]), 1)
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)


def test_samples_of_the_log_are_drawn_at_the_temperature_that_was_asked_for():
    words = "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61 --steps 1 --seed 7"
    words += " --sample-every 1 --sample-prompt 1 --sample-temperature 0.5"
    made = run_samples.RunSamples(parse(words.split()), None, None, print)
    assert made.choice == SamplingParams(0.5, seed=7)
    assert made.ends == made.text.ends


def test_samples_of_the_log_end_where_the_continued_model_ends():
    asked: list[tuple[int, ...]] = []
    decoder = SimpleNamespace(
        mesh=SimpleNamespace(recorder=SimpleNamespace(enter=lambda phase: None)),
        generate=lambda prompt, count, how, ends: asked.append(ends) or [],
    )
    words = "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61 --steps 1"
    words += " --sample-every 1 --sample-prompt 1"
    made = run_samples.RunSamples(
        parse(words.split()), decoder, lambda: None, lambda line: None, (5,)
    )
    made.between_steps(observed_step(1, is_last=True))
    assert asked == [(5,)]


def test_an_output_that_has_no_room_is_a_sentence(runs):
    command = [sys.executable, "sample.py", str(runs["gpt2"]), "--prompt", "1", "--max-tokens", "2"]
    with open("/dev/full", "w") as full:
        pipes = {"stdout": full, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, cwd=ranks.ROOT, **pipes)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "error: cannot write the output: No space left on device"


def test_the_report_of_several_ranks_goes_into_a_new_folder(monkeypatch, tmp_path):
    """A folder of a known name in a shared place could be somebody else's, or a link of theirs."""
    monkeypatch.setattr(sample.tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"trine-sample-{sample.os.getuid()}").symlink_to(tmp_path)
    folders = [Path(sample._report_folder()) for _ in range(2)]
    assert folders[0] != folders[1]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    assert all(not folder.is_symlink() for folder in folders)
