"""If this failed, a budget would buy another model than the one that is worth training."""

import math
from dataclasses import asdict

import pytest

import plan
from architecture.model_stats import parameters
from base.errors import UserError
from benchmarks.planner import loss_rows
from config.spelling import preset
from tools.planner import model_sizes
from tools.planner.scaling_laws import LAWS


def ask(words: str) -> plan.Answer:
    return plan.ask(words.split())


def test_a_law_has_the_tokens_that_its_loss_asks_for():
    """At equal 6 N D no other size has a lower loss; numbers of the paper of the repeated fit."""
    law = LAWS["chinchilla"]._replace(ratio=None)
    for size in (1e9, 10e9, 70e9):
        tokens = law.tokens(size)
        best = law.loss(size, tokens, 32)
        for factor in (0.8, 0.95, 1.05, 1.25):
            assert law.loss(size * factor, tokens / factor, 32) > best
    assert 15 < law.tokens(70e9) / 70e9 < 30  # about 20, as the first two approaches say
    assert LAWS["chinchilla"].tokens(70e9) == 1.4e12  # the model Chinchilla
    assert LAWS["chinchilla"].loss(70e9, 1.4e12, 80) == pytest.approx(1.97, abs=0.03)


def test_losses_of_models_that_a_fit_has_not_seen_are_within_a_per_cent():
    rows = loss_rows.read()
    found = loss_rows.held_out(rows)
    errors = {model: sum(map(abs, off)) / len(off) for model, off in found.items()}
    assert len(rows) == 770
    assert sum(errors.values()) / len(errors) < 0.01
    assert [model for model, off in errors.items() if off > 0.01] == [(768, 3)]  # 3 blocks
    law, used = loss_rows.fit(rows), LAWS["gemstones"]
    for name in loss_rows.NAMES:
        assert getattr(used, name) == pytest.approx(getattr(law, name), rel=0.02), name


def test_a_budget_takes_its_gpu_hours_and_the_tokens_of_the_law():
    answer = ask("budget --gpu h100 --gpu-hours 5000 --gpus 32 --price-per-gpu-hour 2").data
    best = answer["found"]["the budget"]
    assert answer["gpu_hours"] == pytest.approx(5000)
    assert answer["cost"] == pytest.approx(10000)
    assert best["days"] == pytest.approx(5000 / 32 / 24)
    assert best["tokens"] == pytest.approx(best["tokens_per_second"] * best["days"] * 86400)
    assert best["tokens"] / best["parameters"] == pytest.approx(20, rel=0.1)
    half, twice = answer["found"]["half"], answer["found"]["twice"]
    # with 20 tokens a parameter, twice the FLOPs are root two times the parameters
    for less, more in ((half, best), (best, twice)):
        assert more["parameters"] / less["parameters"] == pytest.approx(math.sqrt(2), rel=0.12)
        assert more["loss_nats"] < less["loss_nats"]
    assert "gemstones" in answer["other_laws"]


@pytest.mark.parametrize(
    "like", ["--gpu h100 --gpu-hours 5000 --gpus 32", "--gpu cpu --gpu-hours 8"]
)
def test_the_command_for_other_layouts_is_of_the_same_model(like):
    answer = ask(f"budget {like}")
    (line,) = [each for each in answer.text.splitlines() if each.startswith("its layouts: ")]
    words = line.split("plan.py ")[1].split()
    options, rest = plan.parser("layouts").parse_known_args(words)
    shape = plan.question_of(options, rest, says=False).config.model
    assert asdict(shape) == answer.data["found"]["the budget"]["model"]


def test_a_small_model_has_heads_and_blocks_as_published_ones():
    """Heads of 16 below a width of 512, in pairs with a key head, and about six blocks."""
    like = preset("stories260k")
    for size in (1e5, 2e5, 4e5, 8e5, 1.5e6, 3e6, 6e6, 1e7):
        shape = model_sizes.near(like, size)
        assert parameters(shape) == pytest.approx(size, rel=0.11), size
        assert shape.head_size == 16
        assert shape.heads == 2 * shape.kv_heads
        assert 4 <= shape.layers <= 11, (size, shape.layers)
    large = model_sizes.near(preset("llama-3-8b"), 8e9)
    assert (large.head_size, large.hidden % 256) == (128, 0)
    fixed = model_sizes.near(like, 1e7, head_size=64)
    assert (fixed.head_size, fixed.hidden % 64) == (64, 0)
    with pytest.raises(UserError, match=r"the vocabulary of 128,256 is too large; give --vocab"):
        model_sizes.near(preset("llama-3-8b"), 3e6)


def test_two_of_hours_days_and_gpus_give_the_third():
    by_hours = ask("budget --gpu h100 --gpu-hours 7680 --gpus 32").data
    by_days = ask("budget --gpu h100 --days 10 --gpus 32").data
    by_both = ask("budget --gpu h100 --gpu-hours 7680 --days 10").data
    assert by_hours["found"] == by_days["found"] == by_both["found"]
    assert by_both["gpus"] == 32


@pytest.mark.parametrize(("hours", "days", "gpus"), [(5000, 3, 72), (300, 3, 8), (200, 3, 4)])
def test_with_hours_and_days_the_run_takes_no_longer_than_those_days(hours, days, gpus):
    answer = ask(f"budget --gpu h100 --gpu-hours {hours} --days {days}").data
    assert answer["gpus"] == gpus
    assert answer["found"]["the budget"]["days"] <= days


def test_a_ratio_of_the_user_and_another_law():
    ratio = ask("budget --gpu h100 --days 10 --gpus 32 --tokens-per-parameter 100").data
    best = ratio["found"]["the budget"]
    assert best["tokens"] / best["parameters"] == pytest.approx(100, rel=0.15)
    assert set(ratio["other_laws"]) == {"chinchilla", "gemstones"}
    text = ask("budget --gpu h100 --days 2 --gpus 8 --law gemstones").text
    assert "by gemstones: fitted on the 22 models of arXiv 2502.06857" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "what is the budget"),
        ("--days 30", "what is the budget"),
        ("--gpu-hours 5 --days 3 --gpus 8", "give two of"),
        ("--gpu-hours 5000 --law kaplan", "there are chinchilla, gemstones"),
        ("--gpu-hours 5000 --model mixtral-8x7b", "a model with experts"),
        ("--gpu-hours 0", "must be above 0"),
        ("--days 3000 --gpus 1", "no layout fits on 1 GPUs"),
    ],
)
def test_a_budget_that_says_nothing_is_a_sentence(words, sentence):
    with pytest.raises(UserError, match=sentence):
        ask(f"budget --gpu h100 {words}")


def test_gpus_for_a_date_are_the_fewest_that_reach_it():
    words = "--model llama-3-8b --gpu h100 --tokens 3e11 --global-batch-size 1024"
    answer = ask(f"days {words} --days 20").data
    nodes = answer["nodes"]
    assert answer["days"] <= 20
    assert answer["gpus"] == nodes * 8
    assert ask(f"days {words} --nodes {nodes}").data["days"] == answer["days"]
    if nodes > 1:
        assert ask(f"days {words} --nodes {nodes - 1}").data["days"] > 20
    with pytest.raises(UserError, match="leave out --gpus and --nodes"):
        ask(f"days {words} --days 20 --nodes 2")
