"""Where a run's time went: `python plan.py gap RUN`, from what passes compute to the whole step.

    answer = gap("runs/a")          a table; its data is for --json, and for `draw`

Measured are the steps in RUN/times.jsonl, which measured_steps.py divides by cause. The column
`planned` has the planner's seconds for the same layout on the run's machine.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from config.messages import UserError
from config.schema import Config, coordinates
from config.validation import check_split
from planner import compare, hardware, measured_steps, remedies, run_files
from planner.job import Job
from planner.measured_steps import MeasuredSteps, Row
from planner.questions import FULL_BATCH, Answer
from planner.remedies import Remedy
from schedules.orders import of_layout
from schedules.partition import part_costs, stage_specs
from schedules.schedule import VOCABULARY, Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE = ("compute", "recompute")
WAITS = ("tp", "cp", "dp", "p2p", "all ranks", "bubble", "imbalance", "slow ranks", "variation")
LINES = (*COMPUTE, *WAITS, "optimizer", "data", "host", "saving", "evaluation", "unexplained")
BETWEEN = ("save", "evaluate", "sample", "check replicas")  # phases between steps
MOST_PASSES = 200_000  # of all steps that are simulated: the newest steps count
NAMED_SHARE = 0.1  # a rank is named if it loses this share of what the slowest rank loses
LEAST_SHARE = 0.005  # a flag is proposed if it wins this share of a step, and its cause takes it


@dataclass(frozen=True)
class Measured:
    """The times of a run's measured steps.

    seconds: of a step, with its share of saves and evaluations. passes: seconds by kind and stage,
    with collectives; sent: of a message; notes: by cause, where.
    """

    config: Config
    device: str
    seconds: float
    steps: int
    causes: dict[str, float]
    order: Schedule
    passes: dict[tuple[str, int], float]
    sent: float
    notes: dict[str, str]


def read(run: str) -> Measured:
    """The steps in a run's times.jsonl; UserError if there are none, or not those of its run.json.

    The steps are those with the newest batch size. Ranks begin at other times after a save or an
    evaluation, so steps that follow one count only if there are no others.
    """
    config = run_files.config_of(run)
    _, device = run_files.cluster_of(run)
    layout, model = config.layout, config.model
    check_split(model, layout)
    world = layout.tp * layout.pp * layout.cp * (layout.dp or 1)
    rows = measured_steps.read_rows(run, world)
    if not rows:
        raise UserError(f"{run}/times.jsonl has no measured step yet: the first one is step 4")
    chosen = _chosen(rows)
    _, passes = chosen[0].ended.shape
    passes_of_micro_batch = (3 if layout.splits_backward else 2) * layout.stages_per_rank
    if layout.vocab_pp:
        passes_of_micro_batch += len(VOCABULARY)
    try:
        order = of_layout(model, layout, passes // passes_of_micro_batch, device)
        steps = MeasuredSteps(chosen, layout, order)
    except ValueError as error:
        raise UserError(f"{run}/times.jsonl does not go with its run.json: {error}") from None
    shares = [spec.share for spec in stage_specs(model, layout, part_costs(model, device))]
    runs, messages = steps.by_stage()
    late = [seconds for seconds in messages.values() if seconds]
    notes = {"slow ranks": _slow_ranks(steps, shares, layout.axes, chosen[0].nodes)}
    if late:
        kind, stage = max(messages, key=messages.__getitem__)
        notes["p2p"] = f"{kind} of stage {stage}: {1e3 * max(late):.1f} ms a message"
    _, longest = max(runs, key=runs.__getitem__)
    notes["imbalance"] = f"stage {longest} has the longest pass"
    causes = steps.causes(shares) | _between(rows)
    return Measured(
        config=config,
        device=device,
        seconds=steps.measured + causes["saving"] + causes["evaluation"],
        steps=len(chosen),
        causes=causes,
        order=order,
        passes=runs,
        sent=statistics.fmean(late) if late else 0.0,
        notes=notes,
    )


def _chosen(rows: Sequence[Row]) -> Sequence[Row]:
    """The newest rows with the last one's batch size, those after no save or evaluation if any."""
    newest = rows[-1].ended
    alike = [row for row in rows if row.ended.shape == newest.shape]
    plain = [row for row in alike if not row.follows_others]
    count = max(1, MOST_PASSES // newest.size)
    return (plain or alike)[-count:]


def _between(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds of a step that saves and evaluations took, of all steps until the last row."""
    steps = sum(row.steps for row in rows)
    save, *others = (sum(row.spent.get(phase, 0.0) for row in rows) for phase in BETWEEN)
    return {"saving": save / steps, "evaluation": sum(others) / steps}


def _slow_ranks(
    steps: MeasuredSteps, shares: Sequence[float], axes: dict[str, int], nodes: list[str]
) -> str:
    """The ranks that lose the most, with their places in the mesh and their nodes."""
    lost = steps.computed() * (1 - steps.usual_shares(shares))
    most_lost = (lost > 0) & (lost >= NAMED_SHARE * lost.max())
    shown = [axis for axis in axes if axis != "cp" or axes["cp"] > 1]
    named = []
    for rank in sorted(map(int, steps.pipelines[most_lost])):
        place = coordinates(rank, axes)
        where = ", ".join(f"{axis} {place[axis]}" for axis in shown)
        named.append(f"rank {rank} ({where}) on {nodes[rank]}")
    return "; ".join(named)


# ---- Beside the plan -----------------------------------------------------------------------------


def _job(run: str, name: str | None, measured: Measured) -> Job | None:
    """The measured steps on the machine of that name, or the first that has the run's device."""
    if name:
        machine = hardware.load(name)
    else:
        device, _ = run_files.cluster_of(run)
        machines = map(hardware.load, hardware.names())
        fitting = [machine for machine in machines if machine.has_device(device)]
        if not fitting:
            return None
        machine = fitting[0]
    layout = measured.config.layout
    micro_batches = 1 + max(action.micro_batch for action in measured.order.ranks[0])
    batch = {"global_batch_size": micro_batches * layout.micro_batch_size * layout.dp}
    training = replace(measured.config.training, **FULL_BATCH | batch)
    return Job(measured.config.model, layout, training, machine)


def planned(job: Job) -> dict[str, float]:
    """Seconds of a step by LINES, as the planner has them."""
    found = compare.by_cause(job)
    found["dp"] += found.pop("tied")
    found["host"] += found.pop("fixed")
    return found


# ---- The answer ----------------------------------------------------------------------------------


def gap(run: str, machine: str | None = None) -> Answer:
    """The table of a run, and its lines as data; machine: of hardware/, default: by its device."""
    measured = read(run)
    job = _job(run, machine, measured)
    causes = measured.causes
    plan: dict[str, float] = {}
    if job:
        plan = planned(job)
        # Both are computed in the same passes: the planner says in which proportion.
        again = plan["recompute"] / (plan["compute"] + plan["recompute"])
        causes["recompute"] = causes["compute"] * again
        causes["compute"] -= causes["recompute"]
    ways = _ways(measured)
    rows = []
    for cause in LINES:
        seconds = causes.get(cause, 0.0)
        way = ways.get(cause, Remedy(0.0, ""))
        if min(seconds, way.seconds) < LEAST_SHARE * measured.seconds:
            way = Remedy(0.0, "")
        rows.append(
            {
                "cause": cause,
                "measured": seconds,
                "planned": plan.get(cause, 0.0) if job else None,
                "where": measured.notes.get(cause, ""),
                "flags": way.flags,
                "wins": way.seconds,
            }
        )
    data = {
        "run": run,
        "seconds": measured.seconds,
        "steps": measured.steps,
        "lines": rows,
        "machine": job.machine.name if job else None,
        "closure": 1 - causes["unexplained"] / measured.seconds,
    }
    return Answer(_table(data), data)


def _ways(measured: Measured) -> dict[str, Remedy]:
    """By cause what would win time back."""
    causes = measured.causes
    return {
        "slow ranks": Remedy(causes["slow ranks"], "start without that node"),
        "data": Remedy(causes["data"], "a faster source of --data"),
        "saving": Remedy(causes["saving"] / 2, "--save-every twice as large"),
        "evaluation": Remedy(causes["evaluation"] / 2, "--eval-every twice as large"),
        **remedies.of_passes(
            measured.config, measured.order, measured.passes, measured.sent, measured.device
        ),
    }


def _table(data: dict[str, Any]) -> str:
    """A line for each cause that takes a ten-thousandth of the step."""
    total, machine = data["seconds"], data["machine"]
    lines = [f"{data['run']}: {total:.4f} s a step, the mean of {data['steps']} measured steps"]
    lines.append(f"{'':12}{'s/step':>9}{'share':>8}{'planned':>9}   would win")
    step = {"cause": "step", "measured": total, "flags": "", "where": f"planned on {machine}"}
    step["planned"] = sum(row["planned"] or 0.0 for row in data["lines"])
    for row in [*data["lines"], step]:
        if max(abs(row["measured"]), row["planned"] or 0.0) < 1e-4 * total:
            continue
        planned_seconds = f"{row['planned']:.4f}" if machine else "-"
        line = f"{row['cause']:12}{row['measured']:9.4f}{row['measured'] / total:8.1%}"
        line += f"{planned_seconds:>9}   "
        if row["flags"]:
            line += f"{row['wins']:.4f} s: {row['flags']}; "
        lines.append((line + row["where"]).rstrip("; "))
    lines.append(f"the named causes are {data['closure']:.1%} of the step")
    lines.append(f"other layouts: python plan.py layouts --config {data['run']}")
    return "\n".join(lines)


def draw(data: dict[str, Any], path: str) -> None:
    """Write the picture of `waterfall` as an SVG file; UserError if it cannot be written."""
    try:
        waterfall(data).savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def waterfall(data: dict[str, Any]) -> "Figure":
    """The lines as bars, each of which begins where the one above ends, and the whole step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names: list[str] = []
    ends = 0.0
    for row in data["lines"]:
        seconds = row["measured"]
        if abs(seconds) >= 1e-4 * data["seconds"]:
            axes.barh(len(names), seconds, left=ends, color="#2563b8")
            names.append(f"{row['cause']} {seconds / data['seconds']:.1%}")
            ends += seconds
    axes.barh(len(names), data["seconds"], color="#696c74")
    axes.set_yticks(range(len(names) + 1), [*names, "step"])
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a step", title=f"{data['run']}: where the time went")
    return figure
