"""Plans a run that grows with its batch: the cheapest nodes and layout for each batch size.

    python plan.py rampup ... --nodes 48 --train-samples 220000000 --deadline 95

A small batch keeps few GPUs busy: on fewer nodes its steps take longer, but cost fewer GPU-hours.
A level is a batch size of the ramp-up with its steps. A stage is consecutive levels with the same
nodes and layout; nodes never become fewer. A price of a second, in GPU-seconds, makes fast plans
cheaper than slow ones: the lowest price at which the cheapest plan keeps the deadline is found by
bisection. No other plan that is as fast costs fewer GPU-seconds.
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

KEPT = 2  # number of fastest layouts kept for a number of nodes, at the first and the last level
FRACTIONS = 4  # n nodes are tried if lcm(n, most) is at most FRACTIONS times `most`
RESTART_MINUTES = 10.0  # minutes that a change of nodes takes, without the time in the queue
HOUR, DAY = 3600.0, 86400.0
LEAST_PRICE = 1e-3  # price of a second, in GPU-seconds
MOST_PRICE = 1e9  # price of a second at which only time counts
BISECTIONS = 60
SEARCHED = ("tp", "pp", "micro_batch_size", "recompute", "zero", "partition")


@dataclass(frozen=True)
class Choice:
    """A layout on some nodes. seconds: the seconds of a step at each level; infinity if the layout
    cannot run the batch size.
    """

    nodes: int
    gpus: int
    layout: Layout
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """A plan. chosen: for each level, the index of its choice. seconds, gpu_seconds: the time and
    the cost of the whole run.
    """

    chosen: tuple[int, ...]
    seconds: float
    gpu_seconds: float

    @property
    def starts(self) -> list[int]:
        """The indices of the levels with which the stages begin, then the number of levels."""
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
        """Return the plan with these choices; its time and cost include the restarts.

        chosen: for each level, the index of its choice.
        """
        seconds = self.seconds[chosen, range(len(chosen))]
        gpus = self.gpus[list(chosen)]
        is_new_stage = np.diff(chosen) != 0
        waiting = gpus[1:][is_new_stage]  # the GPUs that wait while a new stage starts
        return Plan(
            chosen=tuple(chosen),
            seconds=float(seconds.sum() + self.restart * len(waiting)),
            gpu_seconds=float(gpus @ seconds + self.restart * waiting.sum()),
        )

    def at_price(self, price: float) -> Plan:
        """Return the plan with the least GPU-seconds + price x seconds, found level by level."""
        rates = self.gpus + price
        first, *others = (rates[:, None] * self.seconds).T
        totals = first
        choices = np.arange(len(totals))
        origins = []
        for prices in others:
            # For each choice, the cheapest earlier choice with as many nodes or fewer: the run may
            # change from it.
            before = np.array([totals[: choice + 1].argmin() for choice in choices])
            changed = totals[before] + self.restart * rates
            origins.append(np.where(totals <= changed, choices, before))
            totals = np.minimum(totals, changed) + prices
        chosen = [int(totals.argmin())]
        for origin in reversed(origins):
            chosen.insert(0, int(origin[chosen[0]]))
        return self.plan(chosen)


def cheapest(table: Table, deadline: float) -> Plan:
    """Return the plan with the fewest GPU-seconds that takes at most `deadline` seconds.

    It is the cheapest plan at the lowest price of a second with which the deadline is kept. If no
    plan is in time, return the fastest plan.
    """
    low = LEAST_PRICE
    high = MOST_PRICE
    best = table.at_price(high)
    price = low
    for _ in range(BISECTIONS):
        plan = table.at_price(price)
        if plan.seconds <= deadline:
            best = plan
            high = price
        else:
            low = price
        price = math.sqrt(low * high)
    return best


# ---- What can run --------------------------------------------------------------------------------


def levels_of_run(config: Config) -> list[Level]:
    """Return the levels that the run reaches, all with their steps.

    Raise UserError if the length of the run is not given.
    """
    training = config.training
    if training.steps is None and training.train_samples is None:
        raise UserError("how long is the run? give --train-samples or --steps")
    levels = []
    for level in config.batches.levels():
        steps_left = config.total_steps - level.first_step
        if steps_left > 0:
            steps = min(level.steps or steps_left, steps_left)
            levels.append(replace(level, steps=steps))
    return levels


def node_counts(most: int) -> list[int]:
    """Return the numbers of nodes up to `most` that are simple fractions of it."""
    return [n for n in range(1, most + 1) if math.lcm(n, most) <= FRACTIONS * most]


def choices(question: Question, levels: Sequence[Level], most: int) -> list[Choice]:
    """Return the choices in the order of their nodes; with equal nodes, the layout that is fastest
    at the last level comes last.

    For each number of nodes up to `most`, they are the KEPT fastest safe layouts at the first level
    and at the last level.
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
    """Return the run's config with the batch size of a level from its start."""
    sized = FULL_BATCH | {"global_batch_size": level.batch}
    return replace(question.config, training=replace(question.config.training, **sized))


def _seconds(question: Question, layout: Layout, level: Level) -> float:
    """Return the seconds of a layout's step at a level; infinity if it cannot run the batch size,
    does not fit, or has a higher risk than --risk.
    """
    if level.batch % (layout.micro_batch_size * layout.dp):
        return math.inf
    if layout.schedule == "auto":  # the run searches a schedule that is never slower than 1F1B
        layout = replace(layout, schedule="1f1b")
    run = _at_size(question, level)
    prediction = predict(run.model, layout, run.training, question.machine)
    if prediction.fits and prediction.risk <= question.options.risk:
        return prediction.seconds
    return math.inf


# ---- The answer ----------------------------------------------------------------------------------


def rampup(question: Question) -> Answer:
    """Answer `plan.py rampup`: with --deadline the cheapest plan of stages, else the ramp-up's
    duration (`duration_questions.rampup`). Raise UserError for options that do not go together.
    """
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
    most, gpus_of_part_node = divmod(question.gpus, question.machine.node)
    if gpus_of_part_node:
        raise UserError(
            f"--deadline plans full nodes of {question.machine.node}, not --gpus {question.gpus}"
        )
    minutes = RESTART_MINUTES if options.restart is None else options.restart
    if not 0 <= minutes < math.inf:
        raise UserError(f"--restart must be at least 0, not {minutes:g}")
    return _planned(question, most, 60 * minutes)


def _planned(question: Question, most: int, restart: float) -> Answer:
    """Return the answer with the cheapest plan on up to `most` nodes that ends by the deadline, and
    write it to the file of --stages. restart: seconds that a change of nodes takes.
    """
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
        # scripts/stages.py recognises the run by model and batches, and gives sbatch these words.
        "model": asdict(question.config.model),
        "batches": question.config.batches.starts,
        "sbatch": (options.submit or "").split(),
    }
    write_file(options.stages, json.dumps(data, indent=1) + "\n")
    return Answer("\n".join(_lines(data)), data)


def _totals(plan: Plan, able: Sequence[Choice]) -> dict[str, Any]:
    """Return a plan's days, its GPU-hours, and its number of nodes at the end."""
    return {
        "days": plan.seconds / DAY,
        "gpu_hours": plan.gpu_seconds / HOUR,
        "nodes": able[plan.chosen[-1]].nodes,
    }


def _constant(
    levels: Sequence[Level], able: Sequence[Choice], deadline: float, restart: float
) -> dict[str, Any] | None:
    """Return the totals of the cheapest plan with a constant number of nodes that is in time, or
    None.
    """
    totals_in_time = []
    for _, choices_of_nodes in groupby(able, key=lambda choice: choice.nodes):
        same_nodes = list(choices_of_nodes)
        plan = cheapest(Table(levels, same_nodes, restart), deadline)
        if plan.seconds <= deadline:
            totals_in_time.append(_totals(plan, same_nodes))
    return min(totals_in_time, key=lambda totals: totals["gpu_hours"], default=None)


def _stage(levels: Sequence[Level], choice: Choice, first: int, last: int) -> dict[str, Any]:
    """Return the stage of the levels [first, last): its nodes, times, and options of train.py."""
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
    """Return the lines of the answer: a line for each stage, and the GPU-hours that the plan saves.

    data: the answer's data.
    """
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
