"""The choice of --schedule auto: never over a memory limit, never slower than a named one, the
same on every rank; and the orders that list scheduling makes, beside the fastest of all.
"""

import dataclasses
import itertools
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
from schedules import orders, schedule
from schedules.choice import Choice, decide, decide_layout, search
from schedules.list_scheduling import Task, task_of
from schedules.orders import SEARCHED
from schedules.partition import PassCosts, StageCosts
from schedules.schedule import Action, Schedule, ScheduleError
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


def named_ones(task: Task) -> list[float]:
    """Seconds of every named schedule with the balanced partition that fits."""
    found = []
    for name in orders.ORDERS:
        for virtual in (2, 3) if name == "interleaved" else (1,):
            stages = task.ranks * (2 if name.endswith("-v") else virtual)
            if stages > task.layers + 2 or task.ranks == 1:
                continue
            rank_of = orders.rank_of_stages(name, task.ranks, virtual)
            costs = task.costs(name, task.balanced(rank_of))
            order = orders.build(name, task.ranks, task.micro_batches, virtual)
            held = order.most_held([one.held for one in costs.stages])
            if max(held) <= task.limit:
                seconds = costs.seconds(order.split)
                found.append(makespan(order, seconds, task.transfer))
    return found


def built(choice: Choice, task: Task) -> Schedule:
    """The schedule that was chosen."""
    costs = choice.costs if choice.name in SEARCHED else None
    return orders.build(choice.name, task.ranks, task.micro_batches, choice.virtual, costs)


@settings(max_examples=60)
@given(tasks())
def test_what_is_found_runs_within_memory_and_no_named_one_is_faster(task):
    try:
        choice = search(task)
    except ScheduleError:
        assert named_ones(task) == []
        return
    order = built(choice, task)
    schedule.check(order, task.micro_batches, backward=True)
    assert sum(choice.blocks) == task.layers
    held = order.most_held([one.held for one in choice.costs.stages])
    assert max(held) <= task.limit * (1 + TIGHT)
    slots = simulate(order, choice.costs.seconds(order.split), task.transfer)
    assert choice.seconds == pytest.approx(max(row[-1].end for row in slots))
    assert choice.seconds <= min(named_ones(task), default=choice.seconds) * (1 + TIGHT)
    assert choice.plain is None or choice.seconds <= choice.plain.seconds * (1 + TIGHT)
    assert choice.name in str(choice)


def sequences(count: int, room: int, done=(0, 0, 0)) -> list[list[tuple[str, int]]]:
    """Every order of one rank's passes within its memory."""
    forwards, backwards, weights = done
    if weights == count:
        return [[]]
    found = []
    for kind, possible in (
        ("F", forwards < count and forwards - weights < room),
        ("B", backwards < forwards),
        ("W", weights < backwards),
    ):
        place = "FBW".index(kind)
        after = tuple(n + (i == place) for i, n in enumerate(done))
        rest = sequences(count, room, after) if possible else []
        found += [[(kind, done[place]), *row] for row in rest]
    return found


def fastest_by_trying_all(ranks, count, seconds, room, transfer) -> float:
    """The end of the fastest of all orders of all ranks together, without any bound."""
    ends = []
    for rows in itertools.product(*(sequences(count, room[r]) for r in range(ranks))):
        made = tuple(tuple(Action(k, r, m) for k, m in row) for r, row in enumerate(rows))
        try:
            order = Schedule("any", made, tuple(range(ranks)))
            ends.append(makespan(order, seconds, transfer))
        except ScheduleError:  # these orders deadlock
            continue
    return min(ends)


@st.composite
def small_pipelines(draw, sizes):
    """Ranks, micro-batches, seconds, room and transfer of a pipeline with one stage a rank."""
    ranks, count = draw(st.sampled_from(sizes))
    cost = st.sampled_from([0.5, 1.0, 2.0]) | COST
    seconds = {(kind, r): draw(cost) for kind in "FBW" for r in range(ranks)}
    room = [draw(st.integers(1, ranks + 1))] * ranks
    return ranks, count, seconds, room, draw(st.sampled_from([0.0, 0.3]))


@settings(max_examples=25)
@given(small_pipelines([(1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (4, 1)]))
def test_small_pipelines_are_built_nearly_as_fast_as_the_fastest_order(pipeline):
    """Against every order of every rank, tried without bounds."""
    ranks, count, seconds, room, transfer = pipeline
    stages = [PassCosts(*(seconds[kind, r] for kind in "FBW"), 1.0) for r in range(ranks)]
    costs = StageCosts(tuple(stages), float(room[0]), transfer)
    order = orders.build("searched", ranks, count, costs=costs)
    end = makespan(order, seconds, transfer)
    assert end <= 1.4 * fastest_by_trying_all(*pipeline)


def equal_stages(ranks: int, count: int, layers: int | None = None) -> Task:
    layers = layers or 2 * ranks
    free, block = PassCosts(0.0, 0.0, 0.0, 0.0), PassCosts(1.0, 1.0, 1.0, 1.0)
    limit = float(layers)  # 1F1B's first rank holds this
    return Task((free, block, free), layers, ranks, count, limit)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (8, 16)])
def test_equal_stages_idle_a_third_of_1f1b_in_its_memory(ranks, count):
    task = equal_stages(ranks, count)
    choice = search(task)
    busy = 3 * task.layers / ranks * count
    assert choice.plain.seconds - busy == pytest.approx(3 * (ranks - 1) * task.layers / ranks)
    assert choice.seconds - busy <= (choice.plain.seconds - busy) / 3 + TIGHT


@pytest.mark.parametrize("given", ["counted", "10.7,12.5,6.6,0.1,0.1,0.1"])
def test_unequal_passes_idle_two_fifths_of_1f1b_in_its_memory(given):
    """Four ranks, eight micro-batches, next to no head: counted costs, and some that were timed."""
    shape = ModelShape(8, 256, 8, seq_length=256, vocab_size=256)
    asked = Layout(pp=4, dp=1, schedule="auto", schedule_costs=given)
    task = dataclasses.replace(task_of(shape, asked, "cpu"), micro_batches=8)
    choice = search(task)
    assert choice.idle <= 0.41 * choice.plain.idle
    held = built(choice, task).most_held([one.held for one in choice.costs.stages])
    assert max(held) <= task.limit * (1 + TIGHT)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_schedule_that_was_priced_is_executed(recompute):
    """The schedule of a model and a layout is decided once, and not again."""
    asked = dataclasses.replace(LAYOUT, recompute=recompute)
    layout, choice = decide_layout(SHAPE, asked, 12, "cpu")
    order = orders.of_layout(SHAPE, layout, 12, "cpu")
    transfer = task_of(SHAPE, asked, "cpu").transfer
    end = makespan(order, choice.costs.seconds(order.split), transfer)
    assert end == pytest.approx(choice.seconds)
    assert orders.stage_costs(SHAPE, layout, "cpu") in (None, choice.costs)
    assert decide_layout(SHAPE, layout, 12, "cpu") == (layout, None)


def test_a_partition_that_is_given_is_kept():
    task = dataclasses.replace(equal_stages(4, 8), blocks=(1, 3, 3, 1), limit=12.0)
    assert search(task).blocks == (1, 3, 3, 1)


PROGRAM = """
from test_choice import SHAPE, LAYOUT
from schedules.choice import decide_layout
from schedules.orders import of_layout
layout, choice = decide_layout(SHAPE, LAYOUT, 12)
order = of_layout(SHAPE, layout, 12)
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


def test_a_run_without_a_pipeline_has_nothing_to_search():
    config = validation.check(golden_worker.options({"schedule": "auto"}), 1)
    found, choice = decide(config, "cpu")
    assert (found.layout.schedule, choice) == ("1f1b", None)
