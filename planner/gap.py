"""Where a run's time went: `python plan.py gap RUN`, from the device's peak to what was achieved.

    answer = gap("runs/a")          a table; its data is for --json, and for `draw`

Measured are the steps in RUN/times.jsonl, which measured_steps.py divides by cause. What passes
compute is divided into products, attention and other operations in the proportion that the planner
predicts for the machine; the column `planned` has the planner's seconds.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from config.messages import UserError
from config.schema import Config, coordinates
from config.validation import check_split
from planner import block_costs, compare, hardware, measured_steps, op_costs, remedies, run_files
from planner.job import Job
from planner.measured_steps import MeasuredSteps
from planner.questions import FULL_BATCH, Answer
from planner.remedies import Remedy, Seconds
from schedules.partition import part_costs, stage_specs
from schedules.schedule import Schedule
from schedules.vocabulary import of_layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE = ("peak", "gemm", "attention", "elementwise", "recompute")
WAITS = ("tp", "cp", "dp", "p2p", "all ranks", "bubble", "imbalance", "slow ranks", "variation")
LINES = (*COMPUTE, *WAITS, "optimizer", "data", "host", "saving", "evaluation", "unexplained")
BETWEEN = ("save", "evaluate", "sample", "check replicas")  # phases between steps
MOST_PASSES = 200_000  # of all steps that are run again: the newest steps count
NAMED_SHARE = 0.1  # of what the slowest rank loses in a pass, to be named beside it
LABELLED = 0.01  # share of a step from which on a bar of the picture has a label
LEAST_SHARE = 0.005  # of a step, that a flag wins or its cause takes, to be proposed


@dataclass(frozen=True)
class Measured:
    """What a run's measured steps took. seconds: of a step, with its share of saves. passes:
    seconds by kind and stage, with collectives; sent: of a message; notes: by cause, where.
    """

    config: Config
    seconds: float
    steps: int
    causes: dict[str, float]
    order: Schedule
    passes: dict[tuple[str, int], float]
    sent: float
    notes: dict[str, str]
    device: str


def read(run: str) -> Measured:
    """The steps in a run's times.jsonl; UserError if there are none, or not those of its run.json.

    Measured are the steps with the newest batch size, without those that followed a save or an
    evaluation, after which ranks begin at other times. Saves and evaluations are those of all
    steps.
    """
    config, (_, device) = run_files.config_of(run), run_files.cluster_of(run)
    layout, model = config.layout, config.model
    check_split(model, layout)
    world = layout.tp * layout.pp * layout.cp * (layout.dp or 1)
    rows = measured_steps.read_rows(run, world)
    if not rows:
        raise UserError(f"{run}/times.jsonl has no measured step yet: the first one is step 4")
    spent = {phase: sum(row.spent.get(phase, 0.0) for row in rows) for phase in BETWEEN}
    count = sum(row.steps for row in rows)
    newest = [row for row in rows if row.passes.shape == rows[-1].passes.shape]
    newest = [row for row in newest if not row.follows_others] or newest
    newest = newest[-max(1, MOST_PASSES // newest[0].passes[..., 0].size) :]
    passes = newest[0].passes.shape[1]
    kinds = (3 if layout.splits_backward else 2) * layout.stages_per_rank
    kinds += 4 if layout.vocab_pp else 0
    try:
        order = of_layout(model, layout, passes // kinds, device)
        steps = MeasuredSteps(newest, layout, order)
    except ValueError as error:
        raise UserError(f"{run}/times.jsonl does not go with its run.json: {error}") from None
    specs = stage_specs(model, layout, part_costs(model, device))
    shares = [spec.share for spec in specs]
    runs = steps.by_stage(lambda one: one.timing.runs)
    messages = steps.by_stage(lambda one: one.timing.message)
    notes = _notes(steps, shares, runs, messages, newest[0].nodes)
    between = sum(spent.values()) / count
    causes = steps.causes(shares)
    causes["saving"] = spent["save"] / count
    causes["evaluation"] = between - causes["saving"]
    sent = [seconds for seconds in messages.values() if seconds]
    return Measured(
        config=config,
        seconds=steps.measured + between,
        steps=len(newest),
        causes=causes,
        order=order,
        passes=runs,
        sent=statistics.fmean(sent) if sent else 0.0,
        notes=notes,
        device=device,
    )


def _notes(
    steps: MeasuredSteps,
    shares: Sequence[float],
    runs: Seconds,
    messages: Seconds,
    nodes: list[str],
) -> dict[str, str]:
    """Where causes are found: slow ranks, the slowest messages, and the longest stage."""
    lost = steps.lost_by_slow_ranks(shares)
    named = []
    for rank in sorted(lost):
        if lost[rank] >= NAMED_SHARE * max(lost.values()):
            where = coordinates(rank, steps.axes)
            place = ", ".join(f"{axis} {where[axis]}" for axis in ("pp", "dp", "tp"))
            named.append(f"rank {rank} ({place}) on {nodes[rank]}")
    (kind, stage), slowest = max(messages.items(), key=lambda item: item[1])
    busy = defaultdict[int, float](float)
    for (_, at), seconds in runs.items():
        busy[at] += seconds
    notes = {"slow ranks": "; ".join(named)}
    if slowest:
        notes["p2p"] = f"to {kind} of stage {stage}: {1e3 * slowest:.1f} ms a message"
    notes["imbalance"] = f"stage {max(busy, key=busy.__getitem__)} is the longest"
    return notes


# ---- Beside the plan -----------------------------------------------------------------------------


def _job(run: str, name: str | None, measured: Measured) -> Job | None:
    """The measured steps on the machine of that name, or the first that has the run's device."""
    device, _ = run_files.cluster_of(run)
    machines = [hardware.load(name) for name in ([name] if name else hardware.names())]
    found = next((each for each in machines if name or each.has_device(device)), None)
    if found is None:
        return None
    layout, first = measured.config.layout, measured.order.ranks[0]
    batch = len({action.micro_batch for action in first}) * layout.micro_batch_size * layout.dp
    batches: dict[str, Any] = FULL_BATCH | {"global_batch_size": batch}
    training = replace(measured.config.training, **batches)
    return Job(measured.config.model, layout, training, found)


def planned(job: Job) -> dict[str, float]:
    """Seconds of a step by LINES, as the planner has them."""
    found, machine, layers = compare.by_cause(job), job.machine, job.model.layers
    matrices = block_costs.matrices(job)
    head = job.tokens, job.vocab_columns, job.model.hidden
    gemm = layers * sum(sum(block_costs.linear(job, *each)) for each in matrices)
    gemm += sum(op_costs.linear(machine, *head, job.number_bytes))
    products = layers * sum(rows * outs * ins * alike for rows, outs, ins, alike in matrices)
    peak = min(6.0 * (products + head[0] * head[1] * head[2]) / machine.peak, gemm)
    parts = {"peak": peak, "gemm": gemm - peak}
    parts["attention"] = layers * sum(block_costs.attention(job))
    scale = job.micro_batches / job.layout.pp * machine.slowdown
    parts = {name: scale * seconds for name, seconds in parts.items()}
    parts["elementwise"] = max(0.0, found.pop("compute") - sum(parts.values()))
    for cause, into in (("tied", "dp"), ("fixed", "host")):
        found[into] += found.pop(cause)
    return parts | found


# ---- The answer ----------------------------------------------------------------------------------


def gap(run: str, machine: str | None = None) -> Answer:
    """The table of a run, and its lines as data; machine: of hardware/, default: by its device."""
    measured = read(run)
    job, causes, plan = _job(run, machine, measured), dict(measured.causes), dict[str, float]()
    about = measured.config, measured.order, measured.passes, measured.sent, measured.device
    ways = remedies.of_passes(*about) | {
        "slow ranks": Remedy(causes["slow ranks"], "start without that node"),
        "data": Remedy(causes["data"], "a faster source of --data"),
        "saving": Remedy(causes["saving"] / 2, "--save-every twice as large"),
        "evaluation": Remedy(causes["evaluation"] / 2, "--eval-every twice as large"),
    }
    compute = causes.pop("compute")
    causes["elementwise"] = compute
    if job:
        plan = planned(job)
        total = sum(plan[name] for name in COMPUTE)
        causes |= {name: compute * plan[name] / total for name in COMPUTE}
        peak = min(plan["peak"], causes["peak"] + causes["gemm"])
        causes |= {"peak": peak, "gemm": causes["peak"] + causes["gemm"] - peak}
        ways |= remedies.of_layout(job, measured.config, measured.seconds)
    least, rows = LEAST_SHARE * measured.seconds, []
    for cause in LINES:
        seconds, way = causes.get(cause, 0.0), ways.get(cause, Remedy(0.0, ""))
        row = {
            "cause": cause,
            "measured": seconds,
            "planned": plan.get(cause, 0.0) if job else None,
        }
        row["where"] = measured.notes.get(cause, "")
        useful = min(seconds, way.seconds) >= least
        row |= {"flags": way.flags, "wins": way.seconds} if useful else {"flags": "", "wins": 0.0}
        rows.append(row)
    data = {"run": run, "seconds": measured.seconds, "steps": measured.steps, "lines": rows}
    data["machine"] = job.machine.name if job else None
    data["closure"] = 1 - causes["unexplained"] / measured.seconds
    return Answer(_table(data), data)


def _table(data: dict[str, Any]) -> str:
    """A line for each cause that takes a ten-thousandth of the step, from the peak down."""
    total, plan = data["seconds"], data["machine"]
    lines = [f"{data['run']}: {total:.4f} s a step, the mean of {data['steps']} measured steps"]
    lines.append(f"{'':12}{'s/step':>9}{'share':>8}{'planned':>9}   would win")
    whole = {"cause": "step", "measured": total, "flags": "", "where": f"planned on {plan}"}
    whole["planned"] = sum(row["planned"] for row in data["lines"]) if plan else None
    for row in [*data["lines"], whole]:
        if max(abs(row["measured"]), row["planned"] or 0.0) < 1e-4 * total:
            continue
        beside = "-" if row["planned"] is None else f"{row['planned']:.4f}"
        won = f"{row['wins']:.4f} s: {row['flags']}" if row["flags"] else ""
        text = "; ".join(filter(None, (won, row["where"])))
        share = row["measured"] / total
        line = f"{row['cause']:12}{row['measured']:9.4f}{share:8.1%}{beside:>9}   {text}"
        lines.append(line.rstrip())
    lines.append(f"the named causes are {data['closure']:.1%} of the step")
    return "\n".join(lines)


def draw(data: dict[str, Any], path: str) -> None:
    """Write the picture of `waterfall` as an SVG file; UserError if it cannot be written."""
    try:
        waterfall(data).savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def waterfall(data: dict[str, Any]) -> "Figure":
    """The lines as bars that begin where the one before ends, from the peak to the step.

    A bar of less than LABELLED of the step has no label: such labels would lie on one another.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes, at = figure.add_subplot(), 0.0
    shown = [row for row in data["lines"] if abs(row["measured"]) >= 1e-4 * data["seconds"]]
    for place, row in enumerate(shown):
        color = "#13795b" if row["cause"] in COMPUTE else "#2563b8"
        axes.bar(place, row["measured"], 0.8, at, color=color)
        at += row["measured"]
        share, top = row["measured"] / data["seconds"], max(at, at - row["measured"])
        if abs(share) >= LABELLED:
            label: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": "x-small"}
            axes.text(place, top, f"{share:.0%}", **label)
    axes.bar(len(shown), data["seconds"], 0.8, color="#696c74")
    names = [*(row["cause"] for row in shown), "step"]
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right")
    axes.set(ylabel="seconds of a step", title=f"{data['run']}: where the time went")
    axes.margins(y=0.15)  # room for the label of the highest bar
    return figure
