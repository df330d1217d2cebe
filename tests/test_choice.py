"""The choice of --schedule auto: the fastest named schedule within 1F1B's memory, on every rank."""

import dataclasses
import json
import subprocess
import sys

import golden_worker
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ranks import ROOT, fork_ranks

from config import validation
from config.schema import Layout, ModelShape
from schedules import orders
from schedules.choice import (
    MOST_HELD,
    Task,
    action_seconds,
    decide,
    decide_layout,
    fastest,
    task_of,
)
from schedules.partition import PassCosts
from schedules.simulation import makespan, simulate

COST = st.floats(0.05, 3.0)
TIGHT = 1e-9


@st.composite
def tasks(draw, most_ranks=5, most_micro_batches=12):
    """A small model on a pipeline, with limits from below one micro-batch to more than enough."""
    ranks, layers = draw(st.integers(1, most_ranks)), draw(st.integers(1, 12))
    assume(ranks <= layers + 2)
    parts = tuple(PassCosts(*(draw(COST) for _ in range(4))) for _ in range(3))
    limit = parts[1].held * draw(st.floats(1.0, 3.0 * layers))
    count = draw(st.integers(1, most_micro_batches))
    tied = draw(st.booleans())
    return Task(parts, layers, ranks, count, limit, draw(st.floats(0, 0.5)), tied=tied)


def named_ones(task: Task) -> dict[tuple[str, int], tuple[float, float]]:
    """Seconds and held activations of every named schedule, by name and stages of a rank."""
    found = {}
    for name in orders.ORDERS:
        for virtual in (2, 3, 4) if name == "interleaved" else (2 if name == "zb-v" else 1,):
            if name != "1f1b" and task.ranks * virtual > task.layers + 2:
                continue
            rank_of = orders.rank_of_stages(name, task.ranks, virtual)
            stages = task.stages(name, task.balanced(rank_of))
            order = orders.build(name, task.ranks, task.micro_batches, virtual)
            seconds = makespan(order, action_seconds(stages, order.split), task.transfer)
            found[name, virtual] = seconds, max(order.most_held([one.held for one in stages]))
    return found


@settings(max_examples=60)
@given(tasks())
def test_the_choice_is_the_fastest_named_schedule_within_the_limit(task):
    choice = fastest(task)
    order = orders.build(choice.name, task.ranks, task.micro_batches, choice.virtual)
    assert sum(choice.blocks) == task.layers
    slots = simulate(order, action_seconds(choice.stages, order.split), task.transfer)
    assert choice.seconds == pytest.approx(max(row[-1].end for row in slots))
    named = named_ones(task)
    within = [
        seconds
        for (name, _), (seconds, held) in named.items()
        if name == "1f1b" or held <= MOST_HELD * task.limit
    ]
    if task.micro_batches <= task.ranks:  # with more, GPipe is not tried
        assert choice.seconds == pytest.approx(min(within))
    assert choice.seconds <= choice.plain.seconds
    assert choice.plain.seconds == pytest.approx(named["1f1b", 1][0])
    assert choice.name in str(choice)


def equal_stages(ranks: int, count: int, layers: int | None = None) -> Task:
    layers = layers or 2 * ranks
    free, block = PassCosts(0.0, 0.0, 0.0, 0.0), PassCosts(1.0, 1.0, 1.0, 1.0)
    limit = float(layers)  # 1F1B's first rank holds this
    return Task((free, block, free), layers, ranks, count, limit)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (8, 16)])
def test_equal_stages_idle_half_of_1f1b_at_most(ranks, count):
    task = equal_stages(ranks, count)
    choice = fastest(task)
    busy = 3 * task.layers / ranks * count
    assert choice.plain.seconds - busy == pytest.approx(3 * (ranks - 1) * task.layers / ranks)
    assert choice.seconds - busy <= (choice.plain.seconds - busy) / 2 + TIGHT


def test_the_log_names_a_faster_schedule_that_holds_too_much():
    task = equal_stages(4, 8)
    task = dataclasses.replace(task, limit=task.limit / 3)
    choice = fastest(task)
    assert choice.name == "1f1b"
    named = named_ones(task)
    fastest_of_all = min(named, key=lambda key: named[key][0])
    assert (choice.faster.name, choice.faster.virtual) == fastest_of_all
    times = named[fastest_of_all][1] / task.limit
    assert f"; {choice.faster.title} would take" in str(choice)
    assert f"hold {times:.2f} times the activations of 1F1B's fullest rank" in str(choice)


def test_given_costs_change_the_choice():
    """Four ranks, eight micro-batches, next to no head: counted costs, and some that were timed."""
    shape = ModelShape(8, 256, 8, seq_length=256, vocab_size=256)
    for costs in ("counted", "10.7,12.5,6.6,0.1,0.1,0.1"):
        asked = Layout(pp=4, dp=1, schedule="auto", schedule_costs=costs)
        choice = fastest(task_of(shape, asked, "cpu", 8))
        assert choice.idle <= 0.7 * choice.plain.idle
        block = choice.stages[1]
        is_timed = block.inputs / block.weights == pytest.approx(12.5 / 6.6)
        assert is_timed == (costs != "counted")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_schedule_that_was_priced_is_executed(recompute):
    """The schedule of a model and a layout is decided once, and not again."""
    asked = dataclasses.replace(LAYOUT, recompute=recompute)
    layout, choice = decide_layout(SHAPE, asked, 12, "cpu")
    order = orders.of_layout(layout, 12)
    transfer = task_of(SHAPE, asked, "cpu", 12).transfer
    end = makespan(order, action_seconds(choice.stages, order.split), transfer)
    assert end == pytest.approx(choice.seconds)
    assert decide_layout(SHAPE, layout, 12, "cpu") == (layout, None)


def test_a_partition_that_is_given_is_kept():
    task = dataclasses.replace(equal_stages(4, 8), blocks=(1, 3, 3, 1), limit=12.0)
    assert fastest(task).blocks == (1, 3, 3, 1)


PROGRAM = """
from test_choice import SHAPE, LAYOUT
from schedules.choice import decide_layout
from schedules.orders import of_layout
layout, choice = decide_layout(SHAPE, LAYOUT, 12)
order = of_layout(layout, 12)
print(layout.schedule, layout.partition, [list(map(str, row)) for row in order.ranks])
"""
SHAPE = ModelShape(11, 256, 8, vocab_size=8192, seq_length=256)
LAYOUT = Layout(pp=4, dp=1, schedule="auto")


def test_every_process_finds_the_same():
    """Ranks need not tell one another: whatever Python's hash seed."""
    seen = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout)
    assert len(seen) == 1


def test_a_run_measures_once_and_keeps_it_when_resumed(tmp_path):
    """run.json has the numbers and the schedule; the same command with --resume has them again."""
    command = (
        f"train.py --pp 2 --schedule auto --schedule-costs measured --layers 4 --hidden 32 --heads "
        f"4 --seq-length 16 --vocab-size 64 --device cpu --global-batch-size 4 --out {tmp_path} "
        "--resume auto"
    )
    found = []
    for steps in ("1", "2"):
        outcome = fork_ranks(2, *command.split(), "--steps", steps)
        assert outcome.status == 0, outcome.err
        assert "--schedule auto, costs " in outcome.out
        found.append(json.loads((tmp_path / "run.json").read_text())["config"]["layout"])
    assert found[0] == found[1]
    assert all(float(each) > 0 for each in found[0]["schedule_costs"].split(","))


def test_a_run_without_a_pipeline_has_nothing_to_choose():
    config = validation.check(golden_worker.options({"schedule": "auto"}), 1)
    found, choice = decide(config, "cpu")
    assert (found.layout.schedule, choice) == ("1f1b", None)
