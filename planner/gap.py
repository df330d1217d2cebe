"""Answers `plan.py gap RUN`: where the time of a run's steps went, and which flags win it back.

    answer = gap("runs/a")          a table; its data is for --json

The table has a line for each cause: its measured seconds (RUN/times.jsonl, which measured_steps.py
divides by cause), the planner's seconds for the same layout on the run's machine, and a remedy: a
change of flags with the seconds that it would win. A remedy shortens the whole step, so it may win
more than its cause takes alone. A pass is the forward or backward of a micro-batch in a stage.
"""

import statistics
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from config.command_line import to_words
from config.messages import UserError
from config.schema import Config, Layout, coordinates
from config.validation import check_split
from planner import compare, hardware, measured_steps, run_files
from planner.job import Job
from planner.measured_steps import MeasuredSteps, Row
from planner.questions import FULL_BATCH, Answer
from schedules.orders import build, of_layout
from schedules.partition import balanced, part_costs, placement, stage_specs
from schedules.schedule import Schedule
from schedules.simulation import makespan

COMPUTE = ("compute", "recompute")
WAITS = ("tp", "cp", "dp", "p2p", "all ranks", "bubble", "imbalance", "slow ranks", "variation")
# The causes in the order of the table's lines: all seconds of a step, and of saves and evaluations.
LINES = (*COMPUTE, *WAITS, "optimizer", "data", "host", "saving", "evaluation", "unexplained")
EVALUATION = ("evaluate", "sample", "check replicas")  # phases that count as evaluation
MOST_PASSES = 200_000  # only the newest steps are simulated, with at most this many passes in all
NAMED_SHARE = 0.1  # a slow rank is named if it loses at least this share of what the slowest loses
# A remedy is shown if it wins, and its cause takes, at least this share of a step.
LEAST_SHARE = 0.005
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")  # tried as remedies against the bubble
Seconds = Mapping[tuple[str, int], float]  # the seconds of a pass, by its kind and stage


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
    costs = part_costs(config.model, kind)
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
    machine = hardware.load(name) if name else hardware.of_device(device)
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
    remedies |= remedies_of_passes(config, steps.order, passes, sent, kind)
    lines = []
    for cause in LINES:
        seconds = causes.get(cause, 0.0)
        remedy = remedies.get(cause, Remedy(0.0, ""))
        if min(seconds, remedy.seconds) < LEAST_SHARE * total:  # too little to be worth a line
            remedy = Remedy(0.0, "")
        line = {"cause": cause, "measured": seconds, "planned": plan.get(cause, 0.0)}
        line |= {"where": where.get(cause, ""), "flags": remedy.flags, "wins": remedy.seconds}
        lines.append(line if machine else line | {"planned": None})
    data = {
        "run": run,
        "seconds": total,
        "steps": steps.after.shape[1],
        "lines": lines,
        "machine": machine.name if machine else None,
        "closure": 1 - causes["unexplained"] / total,
    }
    return Answer(_table(data), data)


def _measured(run: str, config: Config, device: str) -> tuple[list[Row], MeasuredSteps]:
    """Return all rows of a run's times.jsonl, and the steps to analyse, as `MeasuredSteps`.

    The newest steps with as many passes as the last step are analysed, so in a ramp-up only steps
    with the newest batch size. After a save or an evaluation the ranks begin a step at different
    times; such a step is analysed only if there are no other steps. Raise UserError without rows.
    """
    layout = config.layout
    check_split(config.model, layout)
    world = layout.tp * layout.pp * layout.cp * (layout.dp or 1)
    rows = measured_steps.read_rows(run, world)
    if not rows:
        raise UserError(f"{run}/times.jsonl has no measured step yet: the first one is step 4")
    newest = rows[-1].ended  # (ranks, passes)
    alike = [row for row in rows if row.ended.shape == newest.shape]
    plain = [row for row in alike if not row.follows_others]  # not after a save or an evaluation
    chosen = (plain or alike)[-max(1, MOST_PASSES // newest.size) :]
    # The number of a rank's passes for one micro-batch: F, B and perhaps W in each of its stages.
    # All passes divided by it are the step's micro-batches.
    passes = (3 if layout.splits_backward else 2) * layout.stages_per_rank
    try:
        order = of_layout(layout, newest.shape[1] // passes)
        return rows, MeasuredSteps(chosen, layout, order)
    except ValueError as error:
        raise UserError(f"{run}/times.jsonl does not go with its run.json: {error}") from None


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
    total, machine = data["seconds"], data["machine"]
    text = [f"{data['run']}: {total:.4f} s a step, the mean of {data['steps']} measured steps"]
    text.append(f"{'':12}{'s/step':>9}{'share':>8}{'planned':>9}   would win")
    step = {"cause": "step", "measured": total, "flags": "", "where": f"planned on {machine}"}
    step["planned"] = sum(line["planned"] or 0.0 for line in data["lines"])
    for line in [*data["lines"], step]:
        seconds = line["measured"]
        if max(abs(seconds), line["planned"] or 0.0) < 1e-4 * total:
            continue
        planned = f"{line['planned']:.4f}" if machine else "-"
        won = f"{line['wins']:.4f} s: {line['flags']}; " if line["flags"] else ""
        row = f"{line['cause']:12}{seconds:9.4f}{seconds / total:8.1%}{planned:>9}   "
        text.append(f"{row}{won}{line['where']}".rstrip("; "))
    text.append(f"the named causes are {data['closure']:.1%} of the step")
    text.append(f"other layouts: python plan.py layouts --config {data['run']}")
    return "\n".join(text)


# ---- The flags that would win time back, by the schedule's simulation ----------------------------


def remedies_of_passes(
    config: Config, order: Schedule, passes: Seconds, sent: float, device: str
) -> dict[str, Remedy]:
    """Return the remedies against the causes `bubble` and `imbalance`, found by simulation.

    Against the bubble other schedules and half the micro-batch size are tried, against imbalance
    another partition. Each is simulated with the seconds of the measured passes; the time that it
    saves of the simulated step is what it wins. passes: seconds by kind and stage, collectives
    included. sent: seconds of a message between stages. device: such as "cuda", for the costs.
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
        costs = part_costs(model, device)
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
