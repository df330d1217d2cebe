"""Plans a run that grows with its batch: the cheapest nodes and layout for each batch size.

    python plan.py rampup ... --nodes 48 --train-samples 220000000 --deadline 95

A small batch keeps few GPUs busy: on fewer nodes its steps take longer, but cost fewer GPU-hours.
A level is a batch size of the ramp-up with its steps. A choice is a number of nodes and a layout.
A plan has a choice for each level. A stage is consecutive levels with the same choice; the number
of nodes never becomes smaller.

The deadline is kept by a price: a plan costs its GPU-seconds + price x seconds, so a higher price
prefers faster plans. Bisection finds the lowest price at which the cheapest plan is in time. No
other plan that is as fast costs fewer GPU-seconds.
"""

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from config.batch_schedule import Level
from config.errors import UserError
from config.paths import write_file
from config.schema import Config, Layout
from planner import duration_questions
from planner.duration_questions import DAY
from planner.job import Job
from planner.questions import FULL_BATCH, Answer, Question
from planner.step_time import predict

KEPT = 2  # number of fastest layouts kept for a number of nodes, at the first and the last level
# A number of nodes n is tried only if it is a simple fraction of the largest number, `most`: if
# lcm(n, most) is at most FRACTIONS times `most`.
FRACTIONS = 4
RESTART_MINUTES = 10.0  # minutes that a change of nodes takes, without the time in the queue
HOUR = 3600.0  # seconds
LEAST_PRICE = 1e-3  # GPU-seconds: the lowest price of a second that is tried; only cost counts
MOST_PRICE = 1e9  # GPU-seconds: the highest price of a second that is tried; only time counts
BISECTIONS = 60  # the lowest sufficient price is found by bisection with this number of steps
# The options of a layout that a stage's command sets, because the planner may choose them.
SEARCHED = ("tp", "pp", "micro_batch_size", "recompute", "zero", "partition")


class Choice(NamedTuple):
    """A layout on some nodes. seconds: the seconds of a step at each level; infinity if the layout
    cannot run the batch size.
    """

    nodes: int
    gpus: int
    layout: Layout
    seconds: tuple[float, ...]


class Plan(NamedTuple):
    """A choice for each level; the time and the cost of the whole run, with its restarts."""

    chosen: list[Choice]
    seconds: float
    gpu_seconds: float

    def totals(self) -> dict[str, Any]:
        """Return the plan's days, its GPU-hours, and its number of nodes at the end."""
        days, gpu_hours = self.seconds / DAY, self.gpu_seconds / HOUR
        return {"days": days, "gpu_hours": gpu_hours, "nodes": self.chosen[-1].nodes}


def at_price(
    levels: Sequence[Level], choices: Sequence[Choice], restart: float, price: float
) -> Plan:
    """Return the plan with the least GPU-seconds + price x seconds, by dynamic programming.

    Level by level it computes, for each choice, the least cost of a plan that ends with it.
    choices: in the order of their nodes. restart: seconds that a change of the choice takes, in
    which the nodes of the new choice wait.
    """
    gpus = np.array([choice.gpus for choice in choices], float)
    steps = [level.steps or 0 for level in levels]
    seconds = (np.array([choice.seconds for choice in choices]) * steps).T  # (levels, choices)
    numbers = np.arange(len(choices))
    rates = gpus + price  # the cost of a second with each choice, in GPU-seconds
    # totals: for each choice, the cost up to this level of the cheapest plan that ends with it.
    # origins: for each later level, an array with the choice from which each choice is reached.
    totals = rates * seconds[0]
    origins = []
    for of_level in seconds[1:]:
        # For each choice, the choice with as many nodes or fewer that is cheapest so far. The run
        # may change from it, which takes `restart` seconds, or keep its choice.
        before = np.array([totals[: number + 1].argmin() for number in numbers])
        changed = totals[before] + restart * rates
        origins.append(np.where(totals <= changed, numbers, before))
        totals = np.minimum(totals, changed) + rates * of_level
    # Find the path, the number of the choice at each level, from the last level to the first: its
    # end is the choice with the least total cost, and `origins` leads to the choice before.
    path = [int(totals.argmin())]
    for origin in reversed(origins):
        path.insert(0, int(origin[path[0]]))
    spent = seconds[range(len(path)), path]
    spent[1:] += restart * (np.diff(path) != 0)  # each change of the choice takes a restart
    chosen = [choices[number] for number in path]
    return Plan(chosen, float(spent.sum()), float(gpus[path] @ spent))


def cheapest(
    levels: Sequence[Level], choices: Sequence[Choice], restart: float, deadline: float
) -> Plan:
    """Return the plan with the fewest GPU-seconds that takes at most `deadline` seconds.

    It is the cheapest plan at the lowest price of a second with which the deadline is kept. If no
    plan is in time, return the fastest plan.
    """
    low, high = LEAST_PRICE, MOST_PRICE
    best = at_price(levels, choices, restart, high)  # the fastest plan, if no plan is in time
    price = low
    for _ in range(BISECTIONS):
        plan = at_price(levels, choices, restart, price)
        if plan.seconds <= deadline:
            best, high = plan, price
        else:
            low = price
        price = math.sqrt(low * high)  # the middle of the two prices' logarithms
    return best


# ---- What can run --------------------------------------------------------------------------------


def levels_of_run(config: Config) -> list[Level]:
    """Return the levels that the run reaches, each with its number of steps.

    The last level gets the steps that remain of the run. Raise UserError if the user did not give
    the length of the run.
    """
    training = config.training
    if training.steps is None and training.train_samples is None:
        raise UserError("how long is the run? give --train-samples or --steps")
    levels = []
    for level in config.batches.levels():
        left = config.total_steps - level.first_step
        if left > 0:
            levels.append(replace(level, steps=min(level.steps or left, left)))
    return levels


def node_counts(most: int) -> list[int]:
    """Return the numbers of nodes to try, up to `most`: simple fractions of it (FRACTIONS).

    For 48 nodes they are 1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 36 and 48.
    """
    return [n for n in range(1, most + 1) if math.lcm(n, most) <= FRACTIONS * most]


def choices_of(question: Question, levels: Sequence[Level], most: int) -> list[Choice]:
    """Return the choices from which a plan is made, in the order of their nodes.

    For each number of nodes up to `most`, they are the KEPT fastest layouts at the first level and
    at the last level whose risk is at most --risk. With equal nodes, the layout that is fastest at
    the last level comes last, so that a plan may change to it.
    """
    # For each level, the configuration of a run that has its batch size from the first step on.
    runs = []
    for level in levels:
        sized = FULL_BATCH | {"global_batch_size": level.batch}
        training = replace(question.config.training, **sized)
        runs.append(replace(question.config, training=training))
    choices = []
    for nodes in node_counts(most):
        gpus = nodes * question.machine.node
        options = Namespace(**vars(question.options) | {"nodes": None, "gpus": gpus})
        kept: list[Layout] = []
        for run in (runs[0], runs[-1]):
            ranked = replace(question, options=options, config=run).rank(KEPT).ranked
            safe = [row.layout for row in ranked if row.prediction.risk <= options.risk]
            kept += [layout for layout in safe[:KEPT] if layout not in kept]
        for layout in kept:
            seconds = tuple(_seconds(question, layout, run) for run in runs)
            choices.append(Choice(nodes, gpus, layout, seconds))
    return sorted(choices, key=lambda choice: (choice.nodes, -choice.seconds[-1]))


def _seconds(question: Question, layout: Layout, run: Config) -> float:
    """Return the seconds of a layout's step in a run with one batch size.

    It is infinity if the layout cannot run the batch size, does not fit, or has a higher risk of
    running out of memory than --risk.
    """
    if run.training.global_batch_size % (layout.micro_batch_size * layout.dp):
        return math.inf
    if layout.schedule == "auto":  # the run searches a schedule that is never slower than 1F1B
        layout = replace(layout, schedule="1f1b")
    prediction = predict(Job(run.model, layout, run.training, question.machine))
    safe = prediction.fits and prediction.risk <= question.options.risk
    return prediction.seconds if safe else math.inf


# ---- The answer ----------------------------------------------------------------------------------


def rampup(question: Question) -> Answer:
    """Return the answer of `plan.py rampup`; raise UserError for options that do not go together.

    With --deadline it is the cheapest plan of stages, which is also written to the file of
    --stages; without, it says on what each batch size can run (`duration_questions.rampup`).
    """
    options = question.options
    if options.submit and not options.stages:
        raise UserError("--submit needs --stages FILE, from which the jobs have their stages")
    found = duration_questions.rampup(question)  # raises UserError if the run has no ramp-up
    if options.deadline is None:
        if options.stages or options.restart is not None:
            needs = "need --deadline DAYS, within which the run ends"
            raise UserError(f"--stages and --restart {needs}")
        return found
    node = question.machine.node
    most, gpus_of_part_node = divmod(question.gpus, node)
    if gpus_of_part_node:
        raise UserError(f"--deadline plans full nodes of {node}, not --gpus {question.gpus}")
    minutes = RESTART_MINUTES if options.restart is None else options.restart
    if not 0 <= minutes < math.inf:
        raise UserError(f"--restart must be at least 0, not {minutes:g}")
    levels = levels_of_run(question.config)
    choices = choices_of(question, levels, most)
    data = _planned(levels, choices, 60 * minutes, options.deadline)
    if data is None:
        tried = f"nodes of {question.machine.name}: {', '.join(map(str, node_counts(most)))}"
        runs = "no plan runs every batch size, with never fewer nodes than before"
        raise UserError(f"{runs}; {tried}")
    # The file of --stages is read by scripts/stages.py, which submits a job for each stage. It
    # recognises the run by `model` and `batches`, and passes the words in `sbatch` to sbatch.
    data |= {"model": asdict(question.config.model), "batches": question.config.batches.starts}
    data["sbatch"] = (options.submit or "").split()
    write_file(options.stages, json.dumps(data, indent=1) + "\n")
    return Answer(_text(data), data)


def _planned(
    levels: Sequence[Level], choices: Sequence[Choice], restart: float, deadline: float
) -> dict[str, Any] | None:
    """Return the cheapest plan that ends within `deadline` days, as data for the answer.

    The data also have the totals of the cheapest plan with a constant number of nodes. None: no
    plan runs every batch size. Raise UserError if no plan is in time.
    """
    if not choices:
        return None
    plan = cheapest(levels, choices, restart, deadline * DAY)
    # A plan takes infinitely many seconds if some level cannot run with any of the choices.
    if plan.seconds == math.inf:
        return None
    if plan.seconds > deadline * DAY:
        fastest = f"the fastest plan takes {plan.seconds / DAY:.4g} days"
        raise UserError(f"--deadline {deadline:g} days cannot be kept: {fastest}")
    constant = []
    for nodes in sorted({choice.nodes for choice in choices}):
        same = [choice for choice in choices if choice.nodes == nodes]
        constant.append(cheapest(levels, same, restart, deadline * DAY))
    in_time = [other.totals() for other in constant if other.seconds <= deadline * DAY]
    # The levels at which a stage begins: the first, and each with another choice than before.
    starts = [n for n, one in enumerate(plan.chosen) if n == 0 or one is not plan.chosen[n - 1]]
    ends = [*starts[1:], len(levels)]
    stages = [_stage(levels, plan.chosen[first], first, end) for first, end in zip(starts, ends)]
    least = min(in_time, key=lambda totals: totals["gpu_hours"], default=None)
    return plan.totals() | {"stages": stages, "constant": least}


def _stage(levels: Sequence[Level], choice: Choice, first: int, last: int) -> dict[str, Any]:
    """Return the data of a stage with the levels [first, last): nodes, times, train.py's options.

    A stage begins and stops at numbers of samples: `consumed` is the number before a level. The
    first stage needs no beginning, and the last one no stop.
    """
    begin = levels[first].consumed
    stop = levels[last].consumed if last < len(levels) else 0
    seconds = sum((levels[n].steps or 0) * choice.seconds[n] for n in range(first, last))
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


def _text(data: dict[str, Any]) -> str:
    """Return the text of the answer: a line for each stage, and the GPU-hours that the plan saves.

    data: the result of `_planned`. The plan is compared with the cheapest plan in time whose number
    of nodes is constant.
    """
    lines = [" nodes      batches     days   GPU-hours  train.py"]
    for stage in data["stages"]:
        sizes = " to ".join(map(str, stage["batches"]))
        times = f"{stage['days']:9.2f}{stage['gpu_hours']:12,.0f}"
        lines.append(f"{stage['nodes']:6}{sizes:>13}{times}  {' '.join(stage['words'])}")
    total = f"{data['days']:.2f} days, {data['gpu_hours']:,.0f} GPU-hours"
    same = data["constant"]
    if same is None:
        return "\n".join([*lines, f"{total}; no constant number of nodes runs every size in time"])
    saved = 1 - data["gpu_hours"] / same["gpu_hours"]
    constant = f"{same['nodes']} nodes throughout: {same['days']:.2f} days"
    lines.append(f"{total}; {constant}, {same['gpu_hours']:,.0f}: {saved:.1%} fewer GPU-hours")
    return "\n".join(lines)
