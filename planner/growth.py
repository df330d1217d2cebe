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
from itertools import groupby
from typing import Any

from config.batch_schedule import Level
from config.messages import UserError, write_file
from config.schema import Config, Layout
from planner import questions
from planner.questions import FULL_BATCH, Answer, Question
from planner.step_time import predict

KEPT = 2  # layouts on so many nodes: the fastest with the first batch size, and with the last
FRACTIONS = 4  # numbers of nodes that are tried: n with lcm(n, most) at most so many times the most
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
    """A choice for every level. restart: seconds that each change of the choice takes."""

    levels: Sequence[Level]
    chosen: tuple[Choice, ...]
    restart: float

    @property
    def stages(self) -> list[tuple[Choice, list[int]]]:
        """Each choice with the numbers of its levels."""
        numbers = groupby(range(len(self.levels)), key=lambda number: self.chosen[number])
        return [(choice, list(of_choice)) for choice, of_choice in numbers]

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        steps = sum(self.step_seconds(number) for number in range(len(self.levels)))
        return steps + self.restart * (len(self.stages) - 1)

    @property
    def gpu_seconds(self) -> float:
        """Of the whole run; the nodes of a new stage wait while it starts."""
        steps = sum(c.gpus * self.step_seconds(number) for number, c in enumerate(self.chosen))
        return steps + self.restart * sum(c.gpus for c, _ in self.stages[1:])

    def step_seconds(self, number: int) -> float:
        """Of all steps of a level."""
        return (self.levels[number].steps or 0) * self.chosen[number].seconds[number]

    def totals(self) -> dict[str, float]:
        """Days, GPU-hours, and the most nodes."""
        days, hours = self.seconds / DAY, self.gpu_seconds / HOUR
        return {"days": days, "gpu_hours": hours, "nodes": self.chosen[-1].nodes}


def at_price(
    levels: Sequence[Level], choices: Sequence[Choice], price: float, restart: float
) -> Plan | None:
    """The plan of least GPU-seconds + price x seconds; choices may only change to later ones in
    their order, which is that of nodes. None if none can run every level.
    """
    totals, origins = [0.0] * len(choices), []
    for number, level in enumerate(levels):
        least, row, sums = 0, [], []
        for at, choice in enumerate(choices):
            least = at if totals[at] < totals[least] else least
            rate = choice.gpus + price
            moved = totals[least] + restart * rate
            changes = number > 0 and moved < totals[at]
            row.append(least if changes else at)
            before = moved if changes else totals[at]
            sums.append(before + (level.steps or 0) * choice.seconds[number] * rate)
        totals = sums
        origins.append(row)
    path = [min(range(len(choices)), key=totals.__getitem__, default=0)]
    if not choices or totals[path[0]] == math.inf:
        return None
    for row in origins[:0:-1]:
        path.append(row[path[-1]])
    return Plan(levels, tuple(choices[at] for at in reversed(path)), restart)


def cheapest(
    levels: Sequence[Level], choices: Sequence[Choice], deadline: float, restart: float
) -> Plan | None:
    """The plan of least GPU-seconds within `deadline` seconds, at the lowest price of a second that
    keeps it. None if no plan runs every level; UserError if none is as fast.
    """
    best = at_price(levels, choices, MOST_PRICE, restart)
    if best is None:
        return None
    if best.seconds > deadline:
        fastest = f"the fastest plan takes {best.seconds / DAY:.4g} days"
        raise UserError(f"--deadline {deadline / DAY:g} days cannot be kept: {fastest}")
    low, high, price = LEAST_PRICE, MOST_PRICE, 0.0
    for _ in range(BISECTIONS):
        plan = at_price(levels, choices, price, restart)
        if plan and plan.seconds <= deadline:
            best, high = plan, price
        elif price:
            low = price
        if not high:  # the cheapest of all is fast enough
            break
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
    total, found = config.total_steps, []
    for level in config.batches.levels():
        left = total - level.first_step
        found += [replace(level, steps=min(level.steps or left, left))] if left > 0 else []
    return found


def node_counts(most: int) -> list[int]:
    """Numbers of nodes up to `most` that are simple fractions of it."""
    return [n for n in range(1, most + 1) if math.lcm(n, most) <= FRACTIONS * most]


def choices(question: Question, levels: Sequence[Level], most: int) -> list[Choice]:
    """The fastest layouts on each number of nodes, with the first batch size or the last, in the
    order of nodes; on the same nodes those for the last size come last.
    """
    node, found = question.machine.node, []
    for nodes in node_counts(most):
        kept: list[Layout] = []
        for level in (levels[0], levels[-1]):
            options = Namespace(**vars(question.options) | {"nodes": None, "gpus": nodes * node})
            at_size = replace(question, options=options, config=_at_size(question, level))
            ranked = at_size.rank(KEPT).ranked
            safe = [r for r in ranked if r.prediction.risk <= options.risk]
            kept += [r.layout for r in safe[:KEPT] if r.layout not in kept]
        for layout in kept:
            seconds = tuple(_seconds(question, layout, level) for level in levels)
            found.append(Choice(nodes, nodes * node, layout, seconds))
    return sorted(found, key=lambda choice: (choice.nodes, -choice.seconds[-1]))


def _at_size(question: Question, level: Level) -> Config:
    """The run, with that batch size from its start."""
    sized = FULL_BATCH | {"global_batch_size": level.batch}
    return replace(question.config, training=replace(question.config.training, **sized))


def _seconds(question: Question, layout: Layout, level: Level) -> float:
    """Of a step; inf if the layout cannot run that batch size, or not at the accepted risk."""
    if level.batch % (layout.micro_batch_size * layout.dp):
        return math.inf
    if layout.schedule == "auto":  # never slower, and searched for when the run starts
        layout = replace(layout, schedule="1f1b")
    run = _at_size(question, level)
    found = predict(run.model, layout, run.training, question.machine)
    return found.seconds if found.fits and found.risk <= question.options.risk else math.inf


# ---- The answer ----------------------------------------------------------------------------------


def rampup(question: Question) -> Answer:
    """With --deadline the cheapest plan of stages, else what `questions.rampup` answers."""
    options = question.options
    if options.submit and not options.stages:
        raise UserError("--submit needs --stages FILE, from which the jobs have their stages")
    found = questions.rampup(question)  # UserError without a ramp-up
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
    levels = levels_of_run(question.config)
    minutes = RESTART_MINUTES if options.restart is None else options.restart
    if not 0 <= minutes < math.inf:
        raise UserError(f"--restart must be at least 0, not {minutes:g}")
    able, limits = choices(question, levels, most), (options.deadline * DAY, 60 * minutes)
    plan = cheapest(levels, able, *limits)
    if plan is None:
        tried = f"nodes of {question.machine.name}: {', '.join(map(str, node_counts(most)))}"
        raise UserError(
            f"no plan runs every batch size, with never fewer nodes than before; {tried}"
        )
    same = _constant(levels, able, *limits)
    data = plan.totals() | {
        "levels": [_level(plan, number) for number in range(len(levels))],
        "stages": [_stage(plan, choice, numbers) for choice, numbers in plan.stages],
        "constant": same.totals() if same else None,
        # By which scripts/stages.py knows the run, and what it gives to sbatch.
        "model": asdict(question.config.model),
        "batches": question.config.batches.starts,
        "sbatch": (options.submit or "").split(),
    }
    write_file(options.stages, json.dumps(data, indent=1) + "\n")
    return Answer("\n".join(_lines(data)), data)


def _constant(
    levels: Sequence[Level], able: Sequence[Choice], deadline: float, restart: float
) -> Plan | None:
    """The cheapest plan on the same nodes throughout that keeps the deadline, if there is one."""
    of_nodes = [[c for c in able if c.nodes == nodes] for nodes in sorted({c.nodes for c in able})]
    plans = [at_price(levels, own, 0.0, restart) for own in of_nodes]
    kept = [plan for plan in plans if plan and plan.seconds <= deadline]
    return min(kept, key=lambda plan: plan.gpu_seconds, default=None)


def _level(plan: Plan, number: int) -> dict[str, Any]:
    choice = plan.chosen[number]
    found = asdict(plan.levels[number])
    found |= {"nodes": choice.nodes, "seconds": choice.seconds[number]}
    return found | {"gpu_hours": choice.gpus * plan.step_seconds(number) / HOUR}


def _stage(plan: Plan, choice: Choice, numbers: list[int]) -> dict[str, Any]:
    """One stage: where it runs, and what to give train.py in it."""
    first, last = plan.levels[numbers[0]], plan.levels[numbers[-1]]
    stop = 0 if last is plan.levels[-1] else plan.levels[numbers[-1] + 1].consumed
    seconds = sum(map(plan.step_seconds, numbers))
    words = [f"--{name.replace('_', '-')} {getattr(choice.layout, name)}" for name in SEARCHED]
    words += [f"--begin-at-samples {first.consumed}"] if first.consumed else []
    words += [f"--stop-at-samples {stop}"] if stop else []
    found = {"nodes": choice.nodes, "gpus": choice.gpus, "batches": [first.batch, last.batch]}
    found |= {"begin_at_samples": first.consumed, "stop_at_samples": stop, "days": seconds / DAY}
    found |= {"gpu_hours": choice.gpus * seconds / HOUR, "layout": asdict(choice.layout)}
    return found | {"words": " ".join(words).split()}


def _lines(data: dict[str, Any]) -> list[str]:
    """The answer as text: every batch size, every stage, and what it saves."""
    lines = [" batch  first step    consumed    steps  nodes   s/step   GPU-hours"]
    lines += [
        f"{lv['batch']:6}{lv['first_step']:12,}{lv['consumed']:12,}{lv['steps']:9,}"
        f"{lv['nodes']:7}{lv['seconds']:9.2f}{lv['gpu_hours']:12,.0f}"
        for lv in data["levels"]
    ]
    lines.append(" nodes      batches     days   GPU-hours  train.py")
    for stage in data["stages"]:
        sizes = " to ".join(map(str, stage["batches"]))
        line = f"{stage['nodes']:6}{sizes:>13}{stage['days']:9.2f}{stage['gpu_hours']:12,.0f}  "
        lines.append(line + " ".join(stage["words"]))
    total, same = f"{data['days']:.2f} days, {data['gpu_hours']:,.0f} GPU-hours", data["constant"]
    if same is None:
        return [*lines, f"{total}; no constant number of nodes runs every size in time"]
    saved = 1 - data["gpu_hours"] / same["gpu_hours"]
    constant = f"{same['nodes']} nodes throughout: {same['days']:.2f} days, "
    return [*lines, f"{total}; {constant}{same['gpu_hours']:,.0f}: {saved:.1%} fewer GPU-hours"]
