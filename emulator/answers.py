"""The answers of a rehearsal, in words and as data: do all meet, does it fit, what stops the host.

answer = answers.of(run, machine)             # verbose=True: with what stops the host
print(answer.text)
answer.data            # the same for programs
"""

from typing import Any, NamedTuple

from emulator.matching import deadlock, mismatches
from emulator.recording import COPY
from emulator.rehearsal import STEADY, RankRecord, Rehearsal
from planner import memory
from planner.hardware import Machine

GIGABYTE = 1e9
# Planned and rehearsed memory of a stage that differ by more are pointed out.
SHARE_OF_DIFFERENCE = 0.04


class Answers(NamedTuple):
    """The answers of a rehearsal. data["finding"]: the first error found, or empty."""

    text: str
    data: dict[str, Any]


def of(run: Rehearsal, machine: Machine, verbose: bool = False) -> Answers:
    """The answers of a rehearsal, for a GPU of that machine.

    verbose: the text also says where the host stops in Trine's code, and how many kernels it
    launches, which only a developer of Trine can change; the data always has both.
    """
    meeting = mismatches(run.world)
    blocking = run.config.run.blocking and run.config.layout.pp == 1  # as context.prepare sets it
    if not meeting and (stuck := deadlock(run.world, blocking)):
        meeting = [stuck]
    stages = [_stage(run, stage, machine) for stage in range(run.config.layout.pp)]
    fullest = max(stages, key=lambda stage: stage["needed"])
    fits = fullest["needed"] <= machine.memory
    room = _room(fullest, machine)
    finding = "; ".join(meeting[:1] or [room] * (not fits))
    data = {"good": not finding, "finding": finding, **_about(run)}
    data |= {"mismatches": meeting, "fits": fits, "stages": stages}
    data |= {"stops": _stops(run.records), "launches": _launches(run)}
    about = _header(data)
    meet = _meeting_text(run, meeting)
    texts = [about, meet, _memory_text(data, room)]
    if verbose:
        texts.append(_stops_text(data))
    return Answers("\n\n".join(texts), data)


def _about(run: Rehearsal) -> dict[str, Any]:
    layout = run.config.layout
    names = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp}
    return names | {
        "precision": run.config.training.precision,
        "ranks": len(run.world.traces),
        "ranks_run": [record.rank for record in run.records],
        "micro_batches": run.micro_batches,
        "micro_batches_of_run": run.of_run,
        "seconds": round(run.seconds, 1),
    }


def _header(about: dict[str, Any]) -> str:
    count = len(about["ranks_run"])
    ranks = about["ranks"]
    axes = f"tp {about['tp']} x pp {about['pp']}" + f" x cp {about['cp']}" * (about["cp"] > 1)
    text = f"{ranks} ranks, {axes} x dp {about['dp']}, {about['precision']}: {count} were run"
    if count < ranks:
        text += ", each other one is taken to do as one of its stage"
    text += f"; a step of {about['micro_batches']} micro-batches"
    if about["micro_batches"] < about["micro_batches_of_run"]:
        text += f" in place of {about['micro_batches_of_run']}: these reach the steady state"
    return f"{text}; it took {about['seconds']:.0f} s of processor time"


# ---- Will every collective meet? -----------------------------------------------------------------


def _meeting_text(run: Rehearsal, found: list[str]) -> str:
    if found:
        return "Will every collective meet? No.\n" + "\n".join(f"  {line}" for line in found)
    total = sum(e.number > 0 and e.kind != "wait" for own in run.records for e in own.events)
    ran = len(run.records)
    rest = len(run.world.traces) - ran
    text = f"Will every collective meet? Yes: {total:,} operations of the {ran} ranks that were run"
    if not rest:
        return f"{text}, which are all; no deadlock."
    return f"{text}, no deadlock if the other {rest} do as these (--all-ranks runs them)."


# ---- Will it fit? --------------------------------------------------------------------------------


def _stage(run: Rehearsal, stage: int, machine: Machine) -> dict[str, Any]:
    """Memory of the fullest rank of a stage that was run, in bytes."""
    fullest = max((r for r in run.records if r.stage == stage), key=lambda r: r.peak)
    phase = max(fullest.peaks, key=lambda name: fullest.peaks[name].bytes)
    peak = max((fullest.peaks[p] for p in STEADY if p in fullest.peaks), key=lambda p: p.bytes)
    predicted = sum(memory.of_run(run.config)[stage].values())
    return {
        "stage": stage,
        "rank": fullest.rank,
        "peaks": {name: peak.bytes for name, peak in fullest.peaks.items()},
        "largest": phase,
        "step_peak": fullest.step_peak,
        "predicted": predicted,
        "difference": fullest.step_peak / predicted - 1,
        "held": dict(peak.held),
        "tensor": fullest.peaks[phase].tensor,
        "needed": fullest.peak + machine.context + machine.software.buffers,
        "saved": fullest.saved,
        "kernels": fullest.kernels,
    }


PHASES = ("build", *STEADY, "evaluation", "check", "save")
KINDS = ("weights", "gradients", "optimizer", "activations", "temporaries", "buffers")


def _room(fullest: dict[str, Any], machine: Machine) -> str:
    reserved = (machine.context + machine.software.buffers) / GIGABYTE
    return (
        f"rank {fullest['rank']} of stage {fullest['stage']} needs "
        f"{fullest['needed'] / GIGABYTE:.1f} GB, of which {reserved:.1f} GB for context and "
        f"communication, of {machine.memory / GIGABYTE:.1f} GB of {machine.name}"
    )


def _memory_text(data: dict[str, Any], room: str) -> str:
    stages = data["stages"]
    verdict = "Yes" if data["fits"] else "No"
    lines = [f"Will it fit? {verdict}: {room}."]
    lines.append("Largest bytes of tensors of a rank in each phase, GB:")
    lines += _table("stage", PHASES, [(s["stage"], s["peaks"]) for s in stages])
    lines.append("What held them at the peak of the step, and plan.py's prediction, GB:")
    columns = (*KINDS, "peak", "plan")
    rows = [
        (s["stage"], s["held"] | {"peak": s["step_peak"], "plan": s["predicted"]}) for s in stages
    ]
    lines += _table("stage", columns, rows)
    for stage in stages:
        lines.append(f"  stage {stage['stage']}: {stage['largest']}, {stage['tensor']}")
        if abs(stage["difference"]) > SHARE_OF_DIFFERENCE:
            lines[-1] += f"; its step takes {stage['difference']:+.1%} of plan.py's bytes"
    return "\n".join(lines)


def _table(head: str, columns: tuple[str, ...], rows: list[tuple[Any, dict]]) -> list[str]:
    shown = [name for name in columns if any(values.get(name) for _, values in rows)]
    lines = [f"  {head:>6}" + "".join(f"{name:>13}" for name in shown)]
    for label, values in rows:
        cells = "".join(f"{values.get(name, 0) / GIGABYTE:13.3f}" for name in shown)
        lines.append(f"  {label:>6}{cells}")
    return lines


# ---- What stops the host? ------------------------------------------------------------------------


def _stops(records: list[RankRecord]) -> list[dict[str, Any]]:
    """Each stop of the host in the second step, with the rank that has most of them."""
    most: dict[tuple[str, str, str], tuple[int, int]] = {}
    for record in records:
        for stop, count in record.stops.items():
            most[stop] = max(most.get(stop, (0, 0)), (count, record.rank))
    return [
        {"waits": kind != COPY, "what": what, "line": line, "count": count, "rank": rank}
        for (kind, what, line), (count, rank) in sorted(
            most.items(),
            key=lambda entry: -entry[1][0],
        )
    ]


def _launches(run: Rehearsal) -> dict[str, float]:
    """Kernels of the rank that launches most of them."""
    busiest = max(run.records, key=lambda record: sum(record.kernels.values()))
    passes = busiest.kernels.get("forward", 0) + busiest.kernels.get("backward", 0)
    each = passes / run.micro_batches
    once = busiest.kernels.get("optimizer", 0)
    return {"rank": busiest.rank, "per_micro_batch": each, "per_step_beside": once}


def _stops_text(data: dict[str, Any]) -> str:
    lines = [f"What stops the host? In the second step, of {data['micro_batches']} micro-batches:"]
    for stop in data["stops"]:
        where = f"{stop['count']} times on rank {stop['rank']}"
        waits = "the device" if stop["waits"] else "the copy alone"
        lines.append(f"  {stop['what']} at {stop['line']}, {where}: it waits for {waits}")
    lines += ["  nothing"] if not data["stops"] else []
    most = data["launches"]
    lines.append(
        f"Kernels launched by rank {most['rank']}: {most['per_micro_batch']:.0f} per micro-batch, "
        f"{most['per_step_beside']} per step beside"
    )
    return "\n".join(lines)
