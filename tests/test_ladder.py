"""plan.py budget --write and plan.py ladder: if this failed, a large run would begin on a wrong
recipe, or on a prediction that its small runs do not support.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import plan
from architecture.model_stats import parameters
from architecture.mup import mup_of
from base.errors import UserError
from config import command_line, validation
from tools.planner import ladder, recipe
from tools.planner.scaling_laws import BATCH_LAWS, LAWS, RATE_LAW

SIZES = {"small": (2, 64), "middle": (3, 128), "large": (4, 256)}
WORDS = "--vocab-size 512 --seq-length 128 --global-batch-size 8 --lr-schedule linear"
E, S = 1.5, 0.8  # of the data that the runs of these tests have


def model_words(layers: int, hidden: int) -> str:
    return f"--layers {layers} --hidden {hidden} --heads 4 {WORDS}"


def write_run(folder: Path, layers: int, hidden: int, noise: float = 0.0) -> Path:
    """A run whose losses are those of the law of these tests, with its record."""
    config = command_line.parse([*model_words(layers, hidden).split(), "--steps", "200"])
    folder.mkdir(parents=True)
    facts = {"config": config.as_dict()}
    (folder / "run.json").write_text(json.dumps(facts))
    size, random = parameters(config.model), np.random.default_rng(layers)
    tokens = 8 * 128 * np.arange(1, 201) * (size // 100_000 + 1)
    end = E + S * ladder.terms(LAWS["chinchilla"], size, tokens[-1], layers)
    curve = E + (end - E) * (1 + 2 * np.exp(-tokens / tokens[-1] * 12))
    rows = [
        {"loss": float(loss + noise * random.normal()), "consumed_tokens": int(count)}
        for loss, count in zip(curve, tokens, strict=True)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_target(folder: Path, layers: int = 8, hidden: int = 512, samples: int = 200_000) -> Path:
    path = folder / "run.toml"
    path.write_text(
        f"[model]\nlayers = {layers}\nhidden = {hidden}\nheads = 4\nvocab_size = 512\n"
        f"seq_length = 128\n[training]\nglobal_batch_size = 8\ntrain_samples = {samples}\n"
        'lr_schedule = "linear"\n'
    )
    return path


@pytest.fixture
def runs(tmp_path) -> list[str]:
    return [str(write_run(tmp_path / name, *size, noise=1e-3)) for name, size in SIZES.items()]


def test_the_loss_of_a_large_run_is_that_of_the_law_of_its_ladder(runs, tmp_path):
    target = write_target(tmp_path)
    data = plan.ask(["ladder", *runs, "--for-run", str(target)]).data
    config = command_line.parse(["--config", str(target)])
    true = E + S * ladder.terms(LAWS["chinchilla"], parameters(config.model), 200_000 * 128, 8)
    assert (data["e_nats"], data["s_factor"]) == pytest.approx((E, S), rel=0.02)
    assert data["loss_nats"] == pytest.approx(true, rel=0.005)
    assert data["between_nats"][0] < true < data["between_nats"][1]
    assert (
        data["between_nats"][1] - data["between_nats"][0]
        >= 2 * ladder.LEAST * data["loss_nats"] * 0.99
    )
    assert data["tokens"] == 200_000 * 128


def test_more_noise_gives_a_wider_interval(tmp_path):
    target = write_target(tmp_path)
    widths, sigmas = [], []
    for noise in (1e-3, 1.0):
        folder = tmp_path / f"noise{noise}"
        paths = [str(write_run(folder / n, *size, noise=noise)) for n, size in SIZES.items()]
        data = plan.ask(["ladder", *paths, "--for-run", str(target)]).data
        widths.append(data["between_nats"][1] - data["between_nats"][0])
        sigmas.append(data["sigma_nats"])
    assert sigmas[1] > 10 * sigmas[0]
    assert widths[1] > widths[0]


def test_the_answer_says_whether_to_go_on(runs, tmp_path):
    text = plan.ask(["ladder", *runs, "--for-run", str(write_target(tmp_path))]).text
    assert text.splitlines()[-1].startswith(("go on: the interval", "not sure: the interval"))
    far = write_target(tmp_path, layers=48, hidden=2048)
    text = plan.ask(["ladder", *runs, "--for-run", str(far)]).text
    assert "times the parameters of the largest of the ladder, above 64" in text
    for path, loss in zip(runs, (2.0, 3.0, 4.0), strict=True):  # larger models are worse
        rows = [json.loads(line) for line in (Path(path) / "metrics.jsonl").open()]
        text = "".join(json.dumps(row | {"loss": loss}) + "\n" for row in rows)
        (Path(path) / "metrics.jsonl").write_text(text)
    text = plan.ask(["ladder", *runs, "--for-run", str(write_target(tmp_path))]).text
    assert "\nstop: the losses do not fall with size" in text


def test_the_curve_of_the_large_run_ends_at_its_prediction(runs, tmp_path):
    written = tmp_path / "expected.json"
    words = ["ladder", *runs, "--for-run", str(write_target(tmp_path)), "--write", str(written)]
    data = plan.ask(words).data
    curve = json.loads(written.read_text())
    assert curve["tokens"][-1] == data["tokens"]
    assert curve["loss"][-1] == pytest.approx(data["loss_nats"], rel=1e-3)
    assert curve["tokens"] == sorted(curve["tokens"])
    assert curve["loss"][0] > curve["loss"][-1]
    for low, loss, high in zip(curve["low"], curve["loss"], curve["high"], strict=True):
        assert low < loss < high


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("RUN0 RUN1", "a ladder has 3 runs or more, not 2"),
        ("RUN0 RUN0 RUN0", "too alike for a fit: their terms by chinchilla"),
        ("RUN0 RUN1 RUN2 --law x", "--law 'x': there are chinchilla, gemstones"),
        ("RUN0 RUN1 RUN2 --write e.json", "--write writes the curve of the run of --for-run"),
    ],
)
def test_a_ladder_that_says_nothing_is_a_sentence(words, message, runs):
    for number, path in enumerate(runs):
        words = words.replace(f"RUN{number}", path)
    with pytest.raises(UserError, match=message):
        plan.ask(["ladder", *words.split()])


@pytest.mark.parametrize(
    ("group", "option", "value", "sentence"),
    [
        ("training", "lr", 0.5, r"lr is \S+ in \S+small and 0.5 in \S+large"),
        ("training", "weight_decay", 0.2, "weight_decay is"),
        ("model", "mup", 64, r"mup is 0 in \S+small and 64 in \S+large"),
        ("data", "data", ["other"], "data is"),
        (
            "training",
            "steps",
            90_000,
            r"large ended at [\d,]+ of 92,160,000 tokens: .* --resume goes on",
        ),
    ],
)
def test_runs_of_another_recipe_or_without_their_end_are_refused(
    group, option, value, sentence, runs
):
    path = Path(runs[-1]) / "run.json"
    facts = json.loads(path.read_text())
    facts["config"][group][option] = value
    path.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=sentence):
        plan.ask(["ladder", *runs])


# ---- The recipe ----------------------------------------------------------------------------------

BUDGET = "budget --gpu h100 --gpu-hours 2000 --gpus 16"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The answer to a budget, and the run file that it wrote."""
    path = tmp_path_factory.mktemp("budget") / "run.toml"
    return plan.ask([*BUDGET.split(), "--write", str(path)]), path


def test_the_run_file_is_the_answer_and_is_taken_by_train(written):
    answer, path = written
    best = answer.data["found"]["the budget"]
    config = validation.check(command_line.parse(["--config", str(path)]), 16)
    assert parameters(config.model) == best["parameters"]
    assert config.model.hidden == best["model"]["hidden"]
    for name, value in best["layout"].items():
        if name in ("tp", "pp", "cp", "zero", "schedule", "recompute"):
            assert getattr(config.layout, name) == value, name
    tokens = config.training.train_samples * config.model.seq_length
    assert tokens == pytest.approx(best["tokens"], rel=0.01)
    assert config.training.lr_schedule == "linear"
    assert config.training.lr_warmup_samples == pytest.approx(
        0.01 * config.training.train_samples, rel=0.05
    )
    assert mup_of(config.model).width > 1
    assert mup_of(config.model).depth > 1


def test_the_ladder_has_three_runs_with_one_base_and_one_ratio_of_tokens(written):
    answer, path = written
    large = command_line.parse(["--config", str(path)])
    lines = [line for line in answer.text.splitlines() if line.strip().startswith("ladder ")]
    configs = [command_line.parse(line.split("train.py ")[1].split()) for line in lines]
    sizes = [parameters(config.model) for config in configs]
    for size, part in zip(sizes, (32, 16, 8), strict=True):
        assert size == pytest.approx(parameters(large.model) / part, rel=0.15)
    first = configs[0].model
    ratios = []
    for config in [*configs, large]:
        assert (config.model.mup, config.model.mup_base_layers) == (first.hidden, first.layers)
        assert config.training.lr == large.training.lr
        samples = config.training.train_samples
        ratios.append(samples * config.model.seq_length / parameters(config.model))
    assert ratios == pytest.approx([ratios[-1]] * 4, rel=0.02)
    assert mup_of(first).width == mup_of(first).depth == 1


def test_the_laws_of_batch_and_rate_are_those_of_their_papers():
    """Numbers that the papers print, or that follow from their formulas."""
    deepseek, step, critical = BATCH_LAWS
    assert deepseek.tokens(1e9, 1e10) == pytest.approx(0.2920 * 6e19**0.3271)
    assert step.tokens(1e9, 1e11) == pytest.approx(0.58 * 1e11**0.571)
    assert critical.tokens(1e9, 1e11, loss=2.5) == pytest.approx(2e8 / 2.5 ** (1 / 0.21))
    assert RATE_LAW.rate(1e9, 1e11) == pytest.approx(1.79 * 1e9**-0.713 * 1e11**0.307, rel=1e-9)
    assert math.isclose(RATE_LAW.rate(1e9, 1e11), 1.64e-3, rel_tol=0.05)


def test_hours_of_a_cpu_have_a_run_file_and_a_ladder(tmp_path):
    """With another length of the samples than that of the model's preset: train.py takes both."""
    path = tmp_path / "run.toml"
    words = f"budget --gpu cpu --gpu-hours 8 --gpus 2 --seq-length 256 --write {path}"
    lines = plan.ask(words.split()).text.splitlines()
    large = validation.check(command_line.parse(["--config", str(path)]), 2)
    assert 1e6 < parameters(large.model) < 1e7
    assert large.model.max_positions == 256
    rungs = [line.split("train.py ")[1] for line in lines if line.strip().startswith("ladder ")]
    sizes = []
    for words in rungs:
        for ranks in (1, 2):
            config = validation.check(command_line.parse(words.split()), ranks)
        assert config.model.head_size == large.model.head_size  # muP's scores are for one size
        sizes.append(parameters(config.model))
    assert sizes == sorted(sizes)
    for size, part in zip(sizes, (32, 16, 8), strict=True):
        assert size == pytest.approx(parameters(large.model) / part, rel=0.15)
    text = "\n".join(lines)
    assert "in 4.0 hours" in text
    assert "0.00 B" not in text
    assert "note: chinchilla has runs from 44 M parameters on" in text
    assert "try on by factors of 2: the law is far from its runs" in text


def test_a_budget_too_small_for_a_ladder_is_a_sentence(tmp_path):
    words = f"budget --gpu h100 --gpu-hours 30 --gpus 1 --write {tmp_path / 'run.toml'}"
    with pytest.raises(UserError, match=r"ladder"):
        plan.ask(words.split())
    assert not (tmp_path / "run.toml").exists()


def test_a_run_file_has_what_is_not_a_default_and_reads_back():
    words = "--model llama-3.2-1b --mup 256 --lr 2e-3 --steps 7 --zero 2 --data synthetic"
    config = command_line.parse([*words.split(), "--set", "norm_eps=1e-6"])
    lines = recipe.toml_of(config)
    assert "mup = 256" in lines
    assert "zero = 2" in lines
    assert not [line for line in lines if line.startswith(("logit_divisor", "kv_lora_rank", "tp"))]
