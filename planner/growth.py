"""Growth with the batch: for each batch size of a ramp-up the nodes and the layout that cost least.

    python plan.py rampup ... --nodes 48 --train-samples 220000000 --deadline 95

A small batch keeps few GPUs busy: on fewer nodes its steps take longer, but cost fewer GPU-hours.
A stage is consecutive sizes with the same nodes and layout; nodes never become fewer. The plan is
the cheapest at a price of a second, the lowest price at which the deadline is kept, by bisection:
no other plan that is as fast costs less.
"""

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from config.batch_schedule import Level
from config.messages import UserError, write_file
from config.schema import Config, Layout
from planner import duration_questions
from planner.questions import FULL_BATCH, Answer, Question
from planner.step_time import predict

KEPT = 2  # layouts on a number of nodes: the fastest with the first batch size, and with the last
FRACTIONS = 4  # numbers of nodes that are tried: n with lcm(n, most) at most this times the most
RESTART_MINUTES = 10.0  # that a change of nodes takes, without the time in the queue
HOUR, DAY = 3600.0, 86400.0
LEAST_PRICE, MOST_PRICE = 1e-3, 1e9  # of a second, in GPU-seconds: with the most only time counts
BISECTIONS = 60
SEARCHED = ("tp", "pp", "micro_batch_size", "recompute", "zero", "partition")


@dataclass(frozen=True)
class Choice:
    """A layout on some nodes. seconds: of a step at each level, inf where it cannot run."""

    nodes: int
    gpus: int
    layout: Layout
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """For each level the number of its choice; seconds and GPU-seconds of the whole run."""

    chosen: tuple[int, ...]
    seconds: float
    gpu_seconds: float

    @property
    def starts(self) -> list[int]:
        """The levels with which the stages begin, and the number of levels."""
        changes = np.flatnonzero(np.diff(self.chosen)) + 1
        return [0, *map(int, changes), len(self.chosen)]


class Table:
    """The seconds of every choice at every level, all steps of the level together.

    The choices are in the order of their nodes. restart: seconds that a change of the choice takes,
    in which the nodes of the new choice wait.
    """

    def __init__(self, levels: Sequence[Level], choices: Sequence[Choice], restart: float):
        steps = [level.steps or 0 for level in levels]
        self.gpus = np.array([choice.gpus for choice in choices], float)
        self.seconds = np.array([choice.seconds for choice in choices], float) * steps
        self.restart = restart

    def plan(self, chosen: Sequence[int]) -> Plan:
        """The plan with these choices, with its restarts."""
        seconds = self.seconds[chosen, range(len(chosen))]
        gpus = self.gpus[list(chosen)]
        waiting = gpus[1:][np.diff(chosen) != 0]  # while a new stage starts
        return Plan(
            chosen=tuple(chosen),
            seconds=float(seconds.sum() + self.restart * len(waiting)),
            gpu_seconds=float(gpus @ seconds + self.restart * waiting.sum()),
        )

    def at_price(self, price: float) -> Plan:
        """The plan of the fewest GPU-seconds + price x seconds, found level by level."""
        rates = self.gpus + price
        first, *others = (rates[:, None] * self.seconds).T
        totals = first
        choices = np.arange(len(totals))
        origins = []
        for prices in others:
            # For each choice, the cheapest that has no more nodes, from which the run may change.
            before = np.array([totals[: choice + 1].argmin() for choice in choices])
            changed = totals[before] + self.restart * rates
            origins.append(np.where(totals <= changed, choices, before))
            totals = np.minimum(totals, changed) + prices
        chosen = [int(totals.argmin())]
        for origin in reversed(origins):
            chosen.insert(0, int(origin[chosen[0]]))
        return self.plan(chosen)


def cheapest(table: Table, deadline: float) -> Plan:
    """The plan of the fewest GPU-seconds within `deadline` seconds, at the lowest price of a second
    that keeps it; the fastest plan if none is in time.
    """
    low, high = LEAST_PRICE, MOST_PRICE
    best, price = table.at_price(high), low
    for _ in range(BISECTIONS):
        plan = table.at_price(price)
        if plan.seconds <= deadline:
            best, high = plan, price
        else:
            low = price
        price = math.sqrt(low * high)
    return best


# ---- What can run --------------------------------------------------------------------------------


def levels_of_run(config: Config) -> list[Level]:
    """The batch sizes that the run reaches, the last one with its steps too; UserError."""
    training = config.training
    if training.decrease_batch_size_if_needed:
        raise UserError("--decrease-batch-size-if-needed would give each layout other batch sizes")
    if training.steps is None and training.train_samples is None:
        raise UserError("how long is the run? give --train-samples or --steps")
    found = []
    for level in config.batches.levels():
        left = config.total_steps - level.first_step
        if left > 0:
            found.append(replace(level, steps=min(level.steps or left, left)))
    return found


def node_counts(most: int) -> list[int]:
    """Numbers of nodes up to `most` that are simple fractions of it."""
    return [n for n in range(1, most + 1) if math.lcm(n, most) <= FRACTIONS * most]


def choices(question: Question, levels: Sequence[Level], most: int) -> list[Choice]:
    """The fastest layouts on each number of nodes, with the first batch size or the last, in the
    order of nodes; on the same nodes those for the last size come last.
    """
    found = []
    for nodes in node_counts(most):
        gpus = nodes * question.machine.node
        options = Namespace(**vars(question.options) | {"nodes": None, "gpus": gpus})
        kept: list[Layout] = []
        for level in (levels[0], levels[-1]):
            at_size = replace(question, options=options, config=_at_size(question, level))
            ranked = at_size.rank(KEPT).ranked
            safe = [row.layout for row in ranked if row.prediction.risk <= options.risk]
            kept += [layout for layout in safe[:KEPT] if layout not in kept]
        for layout in kept:
            seconds = tuple(_seconds(question, layout, level) for level in levels)
            found.append(Choice(nodes, gpus, layout, seconds))
    return sorted(found, key=lambda choice: (choice.nodes, -choice.seconds[-1]))


def _at_size(question: Question, level: Level) -> Config:
    """The run, with that batch size from its start."""
    sized = FULL_BATCH | {"global_batch_size": level.batch}
    return replace(question.config, training=replace(question.config.training, **sized))


def _seconds(question: Question, layout: Layout, level: Level) -> float:
    """Return the seconds of a step; inf if the layout cannot run that batch size, or not at the
    accepted risk.
    """
    if level.batch % (layout.micro_batch_size * layout.dp):
        return math.inf
    if layout.schedule == "auto":  # never slower, and searched for when the run starts
        layout = replace(layout, schedule="1f1b")
    run = _at_size(question, level)
    found = predict(run.model, layout, run.training, question.machine)
    return found.seconds if found.fits and found.risk <= question.options.risk else math.inf


# ---- The answer ----------------------------------------------------------------------------------


def rampup(question: Question) -> Answer:
    """With --deadline the cheapest plan of stages, else as `duration_questions.rampup`."""
    options = question.options
    if options.submit and not options.stages:
        raise UserError("--submit needs --stages FILE, from which the jobs have their stages")
    found = duration_questions.rampup(question)  # UserError without a ramp-up
    if options.deadline is None:
        if options.stages or options.restart is not None:
            raise UserError(
                "--stages and --restart need --deadline DAYS, within which the run ends"
            )
        return found
    most, rest = divmod(question.gpus, question.machine.node)
    if rest:
        raise UserError(
            f"--deadline plans full nodes of {question.machine.node}, not --gpus {question.gpus}"
        )
    minutes = RESTART_MINUTES if options.restart is None else options.restart
    if not 0 <= minutes < math.inf:
        raise UserError(f"--restart must be at least 0, not {minutes:g}")
    return _planned(question, most, 60 * minutes)


def _planned(question: Question, most: int, restart: float) -> Answer:
    """The answer about the cheapest plan on up to `most` nodes that ends by the deadline."""
    options = question.options
    levels = levels_of_run(question.config)
    able = choices(question, levels, most)
    table = Table(levels, able, restart) if able else None
    plan = cheapest(table, options.deadline * DAY) if table else None
    if table is None or plan is None or plan.seconds == math.inf:
        tried = f"nodes of {question.machine.name}: {', '.join(map(str, node_counts(most)))}"
        raise UserError(
            f"no plan runs every batch size, with never fewer nodes than before; {tried}"
        )
    if plan.seconds > options.deadline * DAY:
        fastest = f"the fastest plan takes {plan.seconds / DAY:.4g} days"
        raise UserError(f"--deadline {options.deadline:g} days cannot be kept: {fastest}")
    data = _totals(plan, able) | {
        "stages": [
            _stage(levels, able[plan.chosen[first]], first, last)
            for first, last in pairwise(plan.starts)
        ],
        "constant": _constant(levels, able, options.deadline * DAY, restart),
        # By which scripts/stages.py knows the run, and what it gives to sbatch.
        "model": asdict(question.config.model),
        "batches": question.config.batches.starts,
        "sbatch": (options.submit or "").split(),
    }
    write_file(options.stages, json.dumps(data, indent=1) + "\n")
    return Answer("\n".join(_lines(data)), data)


def _totals(plan: Plan, able: Sequence[Choice]) -> dict[str, Any]:
    """Days, GPU-hours, and the most nodes."""
    return {
        "days": plan.seconds / DAY,
        "gpu_hours": plan.gpu_seconds / HOUR,
        "nodes": able[plan.chosen[-1]].nodes,
    }


def _constant(
    levels: Sequence[Level], able: Sequence[Choice], deadline: float, restart: float
) -> dict[str, Any] | None:
    """The totals of the cheapest plan on the same nodes throughout that is in time, if any is."""
    found = []
    for _, of_nodes in groupby(able, key=lambda choice: choice.nodes):
        own = list(of_nodes)
        plan = cheapest(Table(levels, own, restart), deadline)
        if plan.seconds <= deadline:
            found.append(_totals(plan, own))
    return min(found, key=lambda totals: totals["gpu_hours"], default=None)


def _stage(levels: Sequence[Level], choice: Choice, first: int, last: int) -> dict[str, Any]:
    """The stage of the levels [first, last): where it runs, and what to give train.py in it."""
    begin = levels[first].consumed
    stop = levels[last].consumed if last < len(levels) else 0
    seconds = 0.0
    for number in range(first, last):
        seconds += (levels[number].steps or 0) * choice.seconds[number]
    options = {name: getattr(choice.layout, name) for name in SEARCHED}
    if begin:
        options["begin_at_samples"] = begin
    if stop:
        options["stop_at_samples"] = stop
    words = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
    return {
        "nodes": choice.nodes,
        "gpus": choice.gpus,
        "batches": [levels[first].batch, levels[last - 1].batch],
        "begin_at_samples": begin,
        "stop_at_samples": stop,
        "days": seconds / DAY,
        "gpu_hours": choice.gpus * seconds / HOUR,
        "layout": asdict(choice.layout),
        "words": " ".join(words).split(),
    }


def _lines(data: dict[str, Any]) -> list[str]:
    """The answer as text: every stage, and what the plan saves."""
    lines = [" nodes      batches     days   GPU-hours  train.py"]
    for stage in data["stages"]:
        sizes = " to ".join(map(str, stage["batches"]))
        words = " ".join(stage["words"])
        line = f"{stage['nodes']:6}{sizes:>13}{stage['days']:9.2f}{stage['gpu_hours']:12,.0f}"
        lines.append(f"{line}  {words}")
    total = f"{data['days']:.2f} days, {data['gpu_hours']:,.0f} GPU-hours"
    same = data["constant"]
    if same is None:
        return [*lines, f"{total}; no constant number of nodes runs every size in time"]
    saved = 1 - data["gpu_hours"] / same["gpu_hours"]
    constant = f"{same['nodes']} nodes throughout: {same['days']:.2f} days"
    constant += f", {same['gpu_hours']:,.0f}"
    return [*lines, f"{total}; {constant}: {saved:.1%} fewer GPU-hours"]
