"""Answers `plan.py gap RUN`: where the time of a run's steps went, and which flags win it back.

    answer = gap("runs/a")                        a table; its data is for --json
    rows = read_rows("runs/a", ranks)             the run's times.jsonl
    steps = MeasuredSteps(rows, layout, order)    passes, waits and messages as arrays
    lost = steps.causes(shares)                   seconds of a step by cause; they sum to the step

The table has a line for each cause: its measured seconds, the planner's seconds for the same layout
on the run's machine, and a remedy: a change of flags with the seconds that it would win. A remedy
shortens the whole step, so it may win more than its cause takes alone.

A pipeline is a set of ranks that differ only in pp; the run has several with dp, tp or cp. Each
pipeline of each step is simulated (schedules.simulation) with the seconds that its passes, waits
and messages took. Then the causes are removed one after the other: their seconds are set to 0, and
the steps are simulated again. A cause takes the seconds by which the simulated step became shorter.

Arrays of seconds have a first axis with an entry for each cause: PLACE gives the index of a cause.
A pass is one action of the schedule on a rank: the forward or backward of a micro-batch in a stage.
"""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from base.console import as_typed
from base.errors import RunError
from config.command_line import to_words
from config.mesh_axes import coordinates, rows_along
from config.schema import Config, Layout
from config.validation import check_split
from costs import hardware
from costs.job import Job
from costs.partition_costs import part_costs
from schedules.orders import build, schedule_for
from schedules.partition import PartCosts, balanced, placement, stage_specs
from schedules.schedule import Action, Schedule
from schedules.simulation import Timing, makespan, simulate_each
from tools.planner import compare, enumeration, run_files
from tools.planner.questions import FULL_BATCH, Answer
from tools.planner.run_files import rows_of

COMPUTING = ("compute", "recompute")
WAITS = ("tp", "cp", "dp", "p2p", "all ranks", "bubble", "imbalance", "slow ranks", "variation")
# The causes in the order of the table's lines: all seconds of a step, and of saves and evaluations.
LINES = (*COMPUTING, *WAITS, "optimizer", "data", "host", "saving", "evaluation", "unexplained")
EVALUATION = ("evaluate", "sample", "check replicas")  # phases that count as evaluation
MOST_PASSES = 200_000  # only the newest steps are simulated, with at most this many passes in all
NAMED_SHARE = 0.1  # a slow rank is named if it loses at least this share of what the slowest loses
# A remedy is shown if it wins, and its cause takes, at least this share of a step.
LEAST_SHARE = 0.005
# Tried as remedies against the bubble; gpipe has that of 1F1B.
SCHEDULES = tuple(name for name in enumeration.SCHEDULES if name != "gpipe")
Seconds = Mapping[tuple[str, int], float]  # the seconds of a pass, by its kind and stage
# A rank counts as slow if it computes more than SLOW times as long as the median of the ranks with
# the same stages. With one pipeline no other rank has the same stages; then each rank is compared
# with all other ranks, whose work differs, so the limit is SLOW_ALONE.
SLOW, SLOW_ALONE = 1.10, 1.5
# If a receive waited for fewer seconds than this, its message had already arrived and cost nothing.
MOST_ARRIVED = 50e-6
LARGEST_NUMBER = 1e15  # a larger number in times.jsonl is an error: 1e15 microseconds are 30 years
AROUND = ("log", "begin", "reduce", "optimizer", "statistics")  # phases of a step outside of passes
OF_RANK = ("total", "apart", "began", "offset", "error")  # numbers of a rank for the whole step
# The causes of two kinds of waits in times.jsonl; every other kind is also the name of its cause.
CAUSES_OF_WAITS = {"tied": "dp", "world": "all ranks"}
# `causes` removes the causes in this order: first PARTS, which take time in addition to computing,
# then UNEVEN, which make some ranks or passes compute longer than others.
PARTS = ("host", "data", "p2p", "tp", "cp", "dp", "all ranks", "optimizer")
UNEVEN = ("slow ranks", "variation", "imbalance")
# The index of a cause on the first axis of an array of seconds; `compute`, the last, is the time in
# which a pass neither waits nor does anything else in PARTS.
PLACE = {name: number for number, name in enumerate((*PARTS, "compute"))}
MESSAGE = PLACE["p2p"]
COMPUTE = PLACE["compute"]


# ---- The measured steps -------------------------------------------------------------------------


class MeasuredStep(NamedTuple):
    """One measured step. Arrays of seconds have the axes rank and pass, after that of PLACE.

    seconds: what every pass took: (PLACE, rank, pass); `p2p` is the wait for the pass's input.
    ended, ready: when a pass ended, and when its last message arrived, on one clock for all ranks:
    (rank, pass). after: what followed the passes: (PLACE,). measured: the seconds of the step
    without saves and evaluations. follows_others: whether a save or an evaluation came just before
    the step. steps: the number of steps since the row before. spent: by phase, rank 0's seconds in
    these steps. nodes: the name of each rank's node.
    """

    steps: float
    spent: dict[str, float]
    nodes: list[str]
    seconds: np.ndarray
    ended: np.ndarray
    ready: np.ndarray
    after: np.ndarray
    measured: float
    follows_others: bool


def read_rows(run: str, ranks: int) -> list[MeasuredStep]:
    """Return the measured steps of a run from its times.jsonl; ranks: the number of ranks.

    Raise UserError with the number of the line if a line has values that telemetry/step_times.py
    would not write, or another number of ranks.
    """
    file = Path(run) / "times.jsonl"
    rows = []
    for number, values in enumerate(rows_of(file), start=1):
        try:
            row = _row(values)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"is no row of a measured step: {error}"
            raise RunError(f"{file}, line {number} {reason}") from None
        if len(row.nodes) != ranks:
            has = f"has times of {len(row.nodes)} ranks, but the run has {ranks}"
            raise RunError(f"{file}, line {number} {has}")
        rows.append(row)
    return rows


def _row(values: Mapping[str, Any]) -> MeasuredStep:
    """Return a line of times.jsonl as a `MeasuredStep`; telemetry/step_times.py says what it has.

    Passes and phases of the line are in microseconds, its clocks in seconds. `apart` is the time of
    saves and evaluations just before the step, which `total` includes.
    """
    ranks = values["ranks"]
    # The line names the kinds of waits, such as "tp", once: a pass has a number for each kind, in
    # this order. Here the kinds are replaced by the causes to which their seconds count.
    kinds = [CAUSES_OF_WAITS.get(kind, kind) for kind in values["waits"]]
    passes = _numbers([rank["passes"] for rank in ranks]) / 1e6
    around = _numbers([[rank["around"][name] for name in AROUND] for rank in ranks]) / 1e6
    total, apart, began, offset, error = _numbers([[r[name] for name in OF_RANK] for r in ranks]).T
    steps = float(_numbers(values["steps"]))
    if steps < 1 or (total <= apart).any():
        raise ValueError("a step takes no time")
    # Passes: (rank, pass, number); the numbers are start, end, seconds of data loading, the time at
    # which the last message arrived, and the seconds of each kind of wait.
    start, end, data, ready, *waits = np.moveaxis(passes, 2, 0)
    seconds = _by_cause(waits, kinds)
    seconds[PLACE["data"]] = data
    seconds[COMPUTE] = end - start - data - sum(waits)
    # The phases `log` and `begin` come before the first pass, the others after the last pass. Each
    # phase has the seconds without waits, then those of each kind of wait: (rank, number).
    log, begin, *after_passes = np.moveaxis(around, 1, 0)
    seconds[PLACE["host"], :, 0] = log[:, 0] + begin[:, 0]
    # All ranks end the step at the same time, because they wait for one another in the last phase.
    # So the rank that ends its passes last determines how long the phases after them take.
    last = int(end[:, -1].argmax())
    computed, *waits = sum(after_passes)[last]
    after = _by_cause(waits, kinds)
    after[PLACE["optimizer"]] = computed
    # The ranks of a node have the same clock. Each has measured its offset from the common clock;
    # the measurement with the smallest error comes last here and is used for the whole node.
    nodes = [str(rank["node"]) for rank in ranks]
    offsets = {nodes[rank]: offset[rank] for rank in np.argsort(-error)}
    clocks = (began + [offsets[node] for node in nodes])[:, None]
    return MeasuredStep(
        steps=steps,
        spent={phase: float(_numbers(spent)) for phase, spent in values["spent"].items()},
        nodes=nodes,
        seconds=seconds,
        ended=clocks + end,
        ready=clocks + ready,
        after=after,
        measured=float(total[last] - apart[last]) / 1e6,
        follows_others=bool(apart.any()),
    )


def _numbers(values: Any) -> np.ndarray:
    """Return values of times.jsonl as an array.

    Raise ValueError or TypeError if a value is no number, is not finite or is impossibly large.
    """
    found = np.array(values, float)
    if not (np.abs(found) < LARGEST_NUMBER).all():
        raise ValueError("a number is too large")
    return found


def _by_cause(waits: Sequence[Any], kinds: Sequence[str]) -> np.ndarray:
    """Return an array of seconds by cause, as PLACE orders them: (PLACE, ...).

    waits: for each kind of wait, an array of seconds. kinds: for each of them, the name of its
    cause. The seconds of kinds with the same cause are added; other causes are 0.
    """
    seconds = np.zeros((len(PLACE), *np.shape(waits[0])))
    for kind, waited in zip(kinds, waits, strict=True):
        seconds[PLACE[kind]] += waited
    return seconds


class MeasuredSteps:
    """Steps with the same schedule, in arrays of seconds whose first axis is PLACE.

    seconds: what each pass takes: (PLACE, step, pipeline, pipeline rank, pass). `host` and `data`
    come before the wait for the pass's input. `p2p` is the time of the message with this input,
    from the end of the pass that sent it. after: what follows the last pass of every step: (PLACE,
    step). measured: mean seconds of a step, without saves and evaluations.
    """

    def __init__(self, rows: Sequence[MeasuredStep], layout: Layout, order: Schedule):
        """Put the rows' seconds into arrays: `seconds` for the passes, `after` for what follows.

        order: the run's schedule. Raise ValueError if the rows have another number of passes.
        """
        self.order = order
        # The numbers of the ranks of each pipeline: (pipeline, pp).
        self.pipelines = np.array(rows_along(layout.axes, ["pp"]))
        self.measured = float(np.mean([row.measured for row in rows]))
        self.after = np.stack([row.after for row in rows], axis=1)
        self.seconds = np.stack([row.seconds[:, self.pipelines] for row in rows], axis=1)
        # When each pass ended and got its last message: (step, pipeline, pipeline rank, pass).
        ended = np.array([row.ended[self.pipelines] for row in rows])
        ready = np.array([row.ready[self.pipelines] for row in rows])
        if ended.shape[3] != len(order.ranks[0]):
            raise ValueError("its passes are not those of its schedule")
        # By action, its pipeline rank and its number among the rank's passes.
        self.place_of: dict[Action, tuple[int, int]] = {}
        for rank, actions in enumerate(order.ranks):
            self.place_of |= {action: (rank, number) for number, action in enumerate(actions)}
        # So far seconds[MESSAGE] has each pass's wait for its input. In a simulation the waits
        # follow from other times, so they are replaced by the time of the message with the input:
        # from the end of the sending pass until the input was there. It is 0 if the rank did not
        # wait long (`late` is False), since then the true time is unknown.
        late = self.seconds[MESSAGE] >= MOST_ARRIVED
        self.seconds[MESSAGE] = 0.0
        for action, (rank, number) in self.place_of.items():
            if sender := order.input_of(action):
                sent = ended[:, :, *self.place_of[sender]]
                message = np.maximum(0.0, ready[:, :, rank, number] - sent)
                self.seconds[MESSAGE, :, :, rank, number] = late[:, :, rank, number] * message

    def timing_of(self, action: Action) -> Timing:
        """Return the measured seconds of an action, for the simulation: (steps, pipelines) arrays.

        They are the rank's time before it needs the action's input, the time of the message with
        the input, and the time of the action with its waits for collectives.
        """
        # The first axis has the causes in the order of PLACE; host, data and p2p are the first.
        host, data, message, *waits_and_compute = self.seconds[:, :, :, *self.place_of[action]]
        return Timing(host + data, message, sum(waits_and_compute))

    def simulated(self) -> float:
        """Return the mean seconds of a step when all pipelines are simulated with these arrays.

        A step ends when its slowest pipeline has ended and the phases after the passes are done.
        """
        # Times are arrays (step, pipeline), so np.maximum finds the later of two times.
        slots = simulate_each(self.order, self.timing_of, np.maximum)
        # The ends of the ranks' last passes: (rank, step, pipeline). The latest counts in a step.
        ends = np.max([row[-1].end for row in slots], axis=(0, 2))
        return float((ends + self.after.sum(axis=0)).mean())

    def by_stage(self) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
        """Return two mean values by (kind of pass, stage): seconds of the passes, and of messages.

        The seconds of a pass include its waits for collectives. Of the messages with the passes'
        inputs, only those that a rank had to wait for are in the mean.
        """
        runs = {}
        messages = {}
        for key in dict.fromkeys((action.kind, action.stage) for action in self.place_of):
            timings = [self.timing_of(action) for action in self.place_of if action[:2] == key]
            runs[key] = float(np.mean([timing.runs for timing in timings]))
            # A message of 0 seconds is one for which no rank waited: it is not in the mean.
            sent = np.array([timing.message for timing in timings])
            messages[key] = float(sent.sum() / max(1, np.count_nonzero(sent)))
        return runs, messages

    def computed(self) -> np.ndarray:
        """Return the seconds in which each rank computes in a step, mean of the steps.

        The shape is (pipelines, pipeline ranks).
        """
        return self.seconds[COMPUTE].sum(axis=3).mean(axis=0)

    def usual_shares(self, shares: Sequence[float]) -> np.ndarray:
        """Return for each rank the factor on its seconds that makes it as fast as a usual rank.

        It is below 1 for a slow rank (SLOW), and 1 for all others: (pipelines, ranks). A usual rank
        is the median, for the same work. shares: the share of each stage in the model's time.
        """
        # The share of each pipeline rank, which may hold several stages.
        of_ranks = np.bincount(self.order.rank_of, shares)
        rates = self.computed() / of_ranks
        # With several pipelines a rank is compared with the ranks of the other pipelines that have
        # the same stages (axis 0). If it is alone, it is compared with all ranks of its pipeline.
        alone = len(self.pipelines) == 1
        usual = np.quantile(rates, 0.5, axis=None if alone else 0, method="lower")
        slow = rates > usual * (SLOW_ALONE if alone else SLOW)
        return np.where(slow, usual / rates, 1.0)

    def causes(self, shares: Sequence[float]) -> dict[str, float]:
        """Return the mean seconds of a step by cause; all causes together are the measured step.

        `compute` is what the passes of the average rank compute, and `bubble` is what remains when
        all causes are removed. `unexplained` is the measured minus the simulated step. The call
        removes the causes from this object, so it can be made only once, after all other calls.
        """
        left = self.simulated()
        found = {"unexplained": self.measured - left}
        for cause in (*PARTS, *UNEVEN):
            self._remove(cause, shares)
            now = self.simulated()
            found[cause] = left - now
            left = now
        found["compute"] = float(self.computed().mean())
        found["bubble"] = left - found["compute"]
        return found

    def _remove(self, cause: str, shares: Sequence[float]) -> None:
        """Change the arrays so that a cause takes no time; shares: as in `usual_shares`.

        Without `slow ranks` a slow rank computes as fast as a usual rank. Without `variation` all
        passes of the same kind and stage take their mean in a step; without `imbalance` all passes
        of the same kind do, in whatever stage. The seconds of any other cause become 0.
        `self.seconds` has the axes (cause, step, pipeline, rank, pass), so
        `self.seconds[COMPUTE]` is the computing time of every pass.
        """
        if cause == "slow ranks":
            self.seconds[COMPUTE] *= self.usual_shares(shares)[:, :, None]
        elif cause in UNEVEN:
            # Passes with the same key get their mean. The key is an action's first field, its kind,
            # or its first two fields, kind and stage.
            same = 1 if cause == "imbalance" else 2
            keys = [[str(action[:same]) for action in actions] for actions in self.order.ranks]
            for key in np.unique(keys):
                of_key = np.array(keys) == key
                mean = self.seconds[COMPUTE][:, :, of_key].mean(axis=(1, 2))
                self.seconds[COMPUTE][:, :, of_key] = mean[:, None, None]
        else:
            self.after[PLACE[cause]] = 0.0
            self.seconds[PLACE[cause]] = 0.0


# ---- The answer ----------------------------------------------------------------------------------


class Remedy(NamedTuple):
    """A change of a run: the seconds of a step that it would win, and its flags as text."""

    seconds: float
    flags: str


def gap(run: str, name: str | None = None) -> Answer:
    """Return the answer of `plan.py gap`, or raise UserError if times.jsonl cannot be used.

    name: the machine to plan on, which is by default the one with the run's device.
    """
    config = run_files.config_of(run)
    run_files.check_schedule(run, config)
    device, kind = run_files.cluster_of(run)
    rows, steps = _measured(run, config, kind)
    costs = part_costs(config.model, config.training.precision, kind)
    shares = [spec.share for spec in stage_specs(config.model, config.layout, costs)]
    passes, messages = steps.by_stage()
    late = [seconds for seconds in messages.values() if seconds]  # messages that ranks waited for
    # By cause, a text that says where in the run it occurs.
    where = {"slow ranks": _slow_ranks(steps, shares, config.layout.axes, rows[-1].nodes)}
    where["imbalance"] = f"stage {max(passes, key=passes.__getitem__)[1]} has the longest pass"
    if late:
        pass_kind, stage = max(messages, key=messages.__getitem__)
        where["p2p"] = f"{pass_kind} of stage {stage}: {1e3 * max(late):.1f} ms a message"
    causes = steps.causes(shares)
    # Saves and evaluations run between steps; their seconds are divided by all steps of the run.
    step_count = sum(row.steps for row in rows)
    spent = {"saving": ("save",), "evaluation": EVALUATION}
    for cause, phases in spent.items():
        seconds = sum(row.spent.get(phase, 0.0) for row in rows for phase in phases)
        causes[cause] = seconds / step_count
    total = steps.measured + causes["saving"] + causes["evaluation"]
    machine = hardware.load(name) if name else hardware.machine_with_device(device)
    plan = _planned(config, steps.order, machine) if machine else {}
    if plan:
        # A measured backward pass contains the recomputation, so its seconds are divided between
        # `compute` and `recompute` in the proportion that the planner predicts.
        again = plan["recompute"] / (plan["compute"] + plan["recompute"])
        causes["recompute"] = causes["compute"] * again
        causes["compute"] -= causes["recompute"]
    remedies = {
        "slow ranks": Remedy(causes["slow ranks"], "start without that node"),
        "data": Remedy(causes["data"], "a faster source of --data"),
        "saving": Remedy(causes["saving"] / 2, "--save-every twice as large"),
        "evaluation": Remedy(causes["evaluation"] / 2, "--eval-every twice as large"),
    }
    sent = statistics.fmean(late) if late else 0.0
    remedies |= remedies_of_passes(config, steps.order, passes, sent, costs)
    lines = []
    for cause in LINES:
        seconds = causes.get(cause, 0.0)
        remedy = remedies.get(cause, Remedy(0.0, ""))
        if min(seconds, remedy.seconds) < LEAST_SHARE * total:  # too little to be worth a line
            remedy = Remedy(0.0, "")
        line = {"cause": cause, "measured_seconds": seconds}
        line["planned_seconds"] = plan.get(cause, 0.0) if machine else None
        line |= {"where": where.get(cause, ""), "flags": remedy.flags}
        line["wins_seconds"] = remedy.seconds
        lines.append(line)
    data = {
        "run": run,
        "step_seconds": total,
        "steps": steps.after.shape[1],
        "lines": lines,
        "machine": machine.name if machine else None,
        "unknown": run_files.note_of_unknown(run),
        "closure_fraction": 1 - causes["unexplained"] / total,
    }
    return Answer(_table(data), data)


def _measured(run: str, config: Config, device: str) -> tuple[list[MeasuredStep], MeasuredSteps]:
    """Return all rows of a run's times.jsonl, and the steps to analyse, as `MeasuredSteps`.

    The newest steps with as many passes as the last step are analysed, so in a ramp-up only steps
    with the newest batch size. After a save or an evaluation the ranks begin a step at different
    times; such a step is analysed only if there are no other steps. Raise UserError without rows.
    """
    layout = config.layout
    check_split(config.model, layout)
    world = layout.tp * layout.pp * layout.cp * (layout.dp or 1)
    rows = read_rows(run, world)
    if not rows:
        raise RunError(f"{run}/times.jsonl has no measured step yet: the first one is step 4")
    newest = rows[-1].ended  # (ranks, passes)
    alike = [row for row in rows if row.ended.shape == newest.shape]
    plain = [row for row in alike if not row.follows_others]  # not after a save or an evaluation
    chosen = (plain or alike)[-max(1, MOST_PASSES // newest.size) :]
    # The number of a rank's passes for one micro-batch: F, B and perhaps W in each of its stages.
    # All passes divided by it are the step's micro-batches.
    passes = (3 if layout.splits_backward else 2) * layout.stages_per_rank
    try:
        order = schedule_for(layout, newest.shape[1] // passes)
        return rows, MeasuredSteps(chosen, layout, order)
    except ValueError as error:
        raise RunError(f"{run}/times.jsonl does not go with its run.json: {error}") from None


def _slow_ranks(
    steps: MeasuredSteps, shares: list[float], axes: dict[str, int], nodes: list[str]
) -> str:
    """Return the names of the slow ranks, with their places in the mesh and their nodes, as text.

    A rank loses the seconds that it computes longer than a usual rank with the same work; the ranks
    that lose the most are named (NAMED_SHARE). shares: the share of each stage in the model's time.
    axes: the sizes of the mesh's axes. nodes: by rank, the name of its node.
    """
    lost = steps.computed() * (1 - steps.usual_shares(shares))
    most_lost = (lost > 0) & (lost >= NAMED_SHARE * lost.max())
    named = []
    for rank in sorted(map(int, steps.pipelines[most_lost])):
        place = coordinates(rank, axes)
        shown = [f"{axis} {place[axis]}" for axis in axes if axis != "cp" or axes["cp"] > 1]
        named.append(f"rank {rank} ({', '.join(shown)}) on {nodes[rank]}")
    return "; ".join(named)


def _planned(config: Config, order: Schedule, machine: hardware.Machine) -> dict[str, float]:
    """Return the planner's seconds of the run's step by cause, for the column `planned`.

    order: the schedule of the measured steps, which has their number of micro-batches.
    """
    layout = config.layout
    micro_batches = order.numbered.micro_batches
    batch = {"global_batch_size": micro_batches * layout.micro_batch_size * (layout.dp or 1)}
    training = replace(config.training, **FULL_BATCH | batch)
    found = compare.by_cause(Job(config.model, layout, training, machine))
    # The measured causes have no `tied` and `fixed`: their seconds are measured as dp and host.
    found["dp"] += found.pop("tied")
    found["host"] += found.pop("fixed")
    return found


def _table(data: dict[str, Any]) -> str:
    """Return the text of the answer: a line for each cause, and a line for the whole step.

    A cause is left out if it takes less than a ten-thousandth of the step, measured and planned.
    """
    total, machine = data["step_seconds"], data["machine"]
    text = [f"{data['run']}: {total:.4f} s a step, the mean of {data['steps']} measured steps"]
    text.append(f"{'':12}{'s/step':>9}{'share':>8}{'planned':>9}   would save")
    step = {
        "cause": "step",
        "measured_seconds": total,
        "flags": "",
        "where": f"planned on {machine}",
    }
    step["planned_seconds"] = sum(line["planned_seconds"] or 0.0 for line in data["lines"])
    for line in [*data["lines"], step]:
        seconds = line["measured_seconds"]
        if max(abs(seconds), line["planned_seconds"] or 0.0) < 1e-4 * total:
            continue
        planned = f"{line['planned_seconds']:.4f}" if machine else "-"
        won = f"{line['wins_seconds']:.4f} s: {line['flags']}; " if line["flags"] else ""
        row = f"{line['cause']:12}{seconds:9.4f}{seconds / total:8.1%}{planned:>9}   "
        text.append(f"{row}{won}{line['where']}".rstrip("; "))
    text.append(f"the named causes are {data['closure_fraction']:.1%} of the step")
    if data["unknown"] is not None:
        text.append(f"note: {data['unknown']}")
    command = as_typed(f"python plan.py layouts --config {shlex.quote(data['run'])}")
    text.append(f"other layouts: {command}")
    return "\n".join(text)


# ---- The flags that would win time back, by the schedule's simulation ----------------------------


def remedies_of_passes(
    config: Config, order: Schedule, passes: Seconds, sent: float, costs: PartCosts
) -> dict[str, Remedy]:
    """Return the remedies against the causes `bubble` and `imbalance`, found by simulation.

    Against the bubble other schedules and half the micro-batch size are tried, against imbalance
    another partition. Each is simulated with the seconds of the measured passes; the time that it
    saves of the simulated step is what it wins. passes: seconds by kind and stage, collectives
    included. sent: seconds of a message between stages. costs: by which blocks are shared out.
    """
    layout, model = config.layout, config.model
    if layout.pp == 1:  # without a pipeline there is no bubble
        return {}
    now = makespan(order, passes, sent)
    found = {"bubble": Remedy(0.0, "")}
    for schedule in SCHEDULES:
        for parts in (1, 2):  # each micro-batch as it is, and divided into two
            size, odd = divmod(layout.micro_batch_size, parts)
            new = replace(layout, micro_batch_size=size)
            if schedule != layout.schedule:
                new = replace(new, schedule=schedule)
            if odd or new == layout or model.layers < new.stages:
                continue
            count = order.numbered.micro_batches * parts
            new_order = build(schedule, layout.pp, count, new.stages_per_rank)
            seconds = makespan(new_order, _divided(passes, order, new_order, parts), sent)
            found["bubble"] = max(found["bubble"], Remedy(now - seconds, _changes(layout, new)))
    if layout.stages_per_rank == 1:
        blocks = ",".join(map(str, balanced(model.layers, placement(layout), costs)))
        # By (kind, stage), the seconds of a pass with the new partition: the measured seconds of
        # this kind summed over all stages, times the share of the model that the stage then has.
        even: dict[tuple[str, int], float] = {}
        for spec in stage_specs(model, replace(layout, partition=blocks), costs):
            for kind in order.kinds:
                whole = sum(seconds for key, seconds in passes.items() if key[0] == kind)
                even[kind, spec.index] = spec.share * whole
        found["imbalance"] = Remedy(now - makespan(order, even, sent), f"--partition {blocks}")
    return found


def _divided(passes: Seconds, order: Schedule, new: Schedule, parts: int) -> Seconds:
    """Return the seconds of a new schedule's passes, by kind and stage, from the measured passes.

    A rank keeps its work, which its new stages share equally. order, new: the measured and the new
    schedule. parts: the number of micro-batches into which each micro-batch is divided. If only the
    new schedule splits the backward pass, half of the measured backward is for weights (W).
    """
    found: dict[tuple[str, int], float] = {}
    for stage, rank in enumerate(new.rank_of):
        # The share of a rank's work on a micro-batch that is in one pass of the new schedule.
        share = 1 / (len(new.stages_on(rank)) * parts)
        stages = order.stages_on(rank)
        of_kind = {kind: share * sum(passes[kind, old] for old in stages) for kind in order.kinds}
        backward = of_kind["B"] + of_kind.get("W", 0.0)
        weights = of_kind.get("W", backward / 2) if new.split else 0.0
        found |= {("F", stage): of_kind["F"], ("W", stage): weights}
        found["B", stage] = backward - weights
    return found


def _changes(before: Layout, after: Layout) -> str:
    """Return the flags that turn the layout `before` into `after`, as text, for a remedy.

    Only fields that differ have a flag, without dp, which follows from the number of ranks.
    """
    names = [field.name for field in fields(Layout)]
    kept = [name for name in names if getattr(before, name) == getattr(after, name)]
    nothing: dict[str, Any] = dict.fromkeys(kept)  # all None: to_words writes no flag for None
    return " ".join(to_words(replace(after, **nothing), "dp", always=names))
