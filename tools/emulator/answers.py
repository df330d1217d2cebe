"""Answers two questions from a rehearsal: do all operations meet, and does the run fit in memory?

answer = answers.of(run, machine)
print(answer.text)
answer.data            # the same for programs

Operations meet if all members of a group start the same operations in the same order; a mismatch is
a place where they do not. A phase is a part of a run, such as "forward" (PHASES). rehearse.py
prints the text.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from costs import memory, memory_terms
from costs.hardware import Machine
from costs.job import Job
from tools.emulator.fake_devices import ONE_RANK
from tools.emulator.matching import deadlock, mismatches
from tools.emulator.rehearsal import STEADY, Rehearsal

GIGABYTE = 1e9
# The text points out a stage if the memory of its step in the rehearsal differs from plan.py's
# prediction by more than this share of the prediction.
SHARE_OF_DIFFERENCE = 0.04
PHASES = ("build", *STEADY, "evaluation", "check", "save")
KINDS = ("weights", "gradients", "optimizer", "activations", "temporaries", "buffers")


class Answers(NamedTuple):
    """The answers as text and as data. data["finding"]: the first problem in a sentence, or ""."""

    text: str
    data: dict[str, Any]


def of(run: Rehearsal, machine: Machine) -> Answers:
    """Return what a rehearsal has found, as text and as data: deadlocks, mismatches and memory.

    machine: the machine whose GPUs the run needs.
    """
    layout = run.config.layout
    # With several pipeline stages, blocking does not make the host wait for operations.
    blocking = run.config.run.blocking and layout.pp == 1
    # `stuck` has the sentences on operations that do not meet; a deadlock is only looked for if all
    # ranks do the same operations.
    stuck = mismatches(run.world)
    if not stuck and (circle := deadlock(run.world, blocking)):
        stuck = [circle]
    stages = [_stage(run, stage, machine) for stage in range(layout.pp)]
    fullest = max(stages, key=lambda stage: stage["needed"])
    fits = fullest["needed"] <= machine.memory
    room = _room(fullest, machine, _outside(run, machine))
    # `finding` is the first problem: operations that do not meet, or else too little memory.
    finding = "" if fits else room
    if stuck:
        finding = stuck[0]
    data = {
        "finding": finding,
        "ranks": len(run.world.traces),
        "ranks_run": [record.rank for record in run.records],
        "mismatches": stuck,
        "fits": fits,
        "stages": stages,
    }
    texts = [_header(run), _meeting_text(run, stuck), _memory_text(data, room)]
    return Answers("\n\n".join(texts), data)


def _header(run: Rehearsal) -> str:
    """Return the first line of the text: the ranks, the layout, and the number of ranks run.

    If the rehearsal has fewer micro-batches than a step of the run, the line gives both numbers.
    """
    layout = run.config.layout
    precision = run.config.training.precision
    ranks = len(run.world.traces)
    count = len(run.records)
    cp = f" x cp {layout.cp}" if layout.cp > 1 else ""
    axes = f"tp {layout.tp} x pp {layout.pp}{cp} x dp {layout.dp}"
    text = f"{ranks} ranks, {axes}, {precision}: {count} were run"
    if count < ranks:
        text += ", each other one is taken to do as one of its stage"
    text += f"; a step of {run.micro_batches} micro-batches"
    if run.micro_batches < run.of_run:
        text += f" in place of {run.of_run}: these reach the steady state"
    return f"{text}; it took {run.seconds:.0f} s of processor time"


def _meeting_text(run: Rehearsal, stuck: list[str]) -> str:
    """Return the answer whether all operations meet; stuck: the sentences on mismatches."""
    if stuck:
        return "Do all collectives match? No.\n" + "\n".join(f"  {line}" for line in stuck)
    total = 0
    for record in run.records:
        # Operations have numbers from 1, stops of the host have 0: so only operations are counted.
        total += sum(event.number > 0 and event.kind != "wait" for event in record.events)
    ran = len(run.records)
    not_run = len(run.world.traces) - ran
    text = f"Do all collectives match? Yes: {total:,} operations of the {ran} ranks that were run"
    if not not_run:
        return f"{text}, which are all; no deadlock."
    return f"{text}, no deadlock if the other {not_run} do as these (--all-ranks runs them)."


# ---- Will it fit? --------------------------------------------------------------------------------


def _stage(run: Rehearsal, stage: int, machine: Machine) -> dict[str, Any]:
    """Return the memory, in bytes, of the rank of a stage that needs the most memory.

    Only ranks that were run are considered. The result is an entry of answer.data["stages"]: the
    peak of each phase, the phase with the largest peak, the peak of a step, what held it, and
    plan.py's prediction of it.
    """
    records = [record for record in run.records if record.stage == stage]
    fullest = max(records, key=lambda record: record.peak)
    peaks = fullest.peaks
    largest = max(peaks, key=lambda name: peaks[name].bytes)  # the phase with the largest peak
    steady = [peaks[phase] for phase in STEADY if phase in peaks]
    held = max(steady, key=lambda peak: peak.bytes).held  # pairs (kind of tensor, bytes)
    # If the rehearsal sends all tokens to the experts of one of the ep ranks of a group, this rank
    # has ep times the mean number of rows.
    all_rows_on_one_rank = float(run.config.layout.ep or 1)
    rows_over_mean = all_rows_on_one_rank if run.routing == ONE_RANK else 1.0
    predicted = sum(memory.run_memory(run.config, rows_over_mean, run.node)[stage].values())
    return {
        "stage": stage,
        "rank": fullest.rank,
        "peaks": {name: peak.bytes for name, peak in peaks.items()},
        "largest": largest,
        "step_peak": fullest.step_peak,
        "predicted": predicted,
        "difference": fullest.step_peak / predicted - 1,
        "held": dict(held),
        "tensor": peaks[largest].tensor,
        "needed": fullest.peak + _outside(run, machine),
    }


def _outside(run: Rehearsal, machine: Machine) -> float:
    """Return the bytes of a GPU outside of torch's allocator: its context, and communication."""
    config = run.config
    job = Job(config.model, config.layout, config.training, replace(machine, node=run.node))
    return machine.context + float(memory_terms.buffers_of(job))


def _room(fullest: dict[str, Any], machine: Machine, outside: float) -> str:
    """Return a sentence on the memory that the rank with the largest need takes of its GPU.

    fullest: the result of `_stage` for the stage of this rank. outside: the result of `_outside`.
    """
    reserved = outside / GIGABYTE
    return (
        f"rank {fullest['rank']} of stage {fullest['stage']} needs "
        f"{fullest['needed'] / GIGABYTE:.1f} GB, of which {reserved:.1f} GB for context and "
        f"communication, of {machine.memory / GIGABYTE:.1f} GB of {machine.name}"
    )


def _memory_text(data: dict[str, Any], room: str) -> str:
    """Return the answer whether the run fits, with a row for each stage in two tables.

    Below the tables a line for each stage names the phase with the largest peak, and the tensor
    whose allocation reached it. data: the data of the answers. room: the sentence of `_room`.
    """
    stages = data["stages"]
    verdict = "Yes" if data["fits"] else "No"
    lines = [f"Will it fit? {verdict}: {room}."]
    lines.append("Largest bytes of tensors of a rank in each phase, GB:")
    lines += _table(PHASES, [stage["peaks"] for stage in stages])
    lines.append("What held them at the peak of the step, and plan.py's prediction, GB:")
    rows = []
    for stage in stages:
        rows.append({**stage["held"], "peak": stage["step_peak"], "plan": stage["predicted"]})
    lines += _table((*KINDS, "peak", "plan"), rows)
    for stage in stages:
        line = f"  stage {stage['stage']}: {stage['largest']}, {stage['tensor']}"
        if abs(stage["difference"]) > SHARE_OF_DIFFERENCE:
            line += f"; its step takes {stage['difference']:+.1%} of plan.py's bytes"
        lines.append(line)
    return "\n".join(lines)


def _table(columns: tuple[str, ...], stages: list[dict[str, float]]) -> list[str]:
    """Return the lines of a table in GB with a row for each stage, without empty columns.

    stages: for each stage, the bytes by the name of the column.
    """
    shown = [name for name in columns if any(values.get(name) for values in stages)]
    lines = [f"  {'stage':>6}" + "".join(f"{name:>13}" for name in shown)]
    for stage, values in enumerate(stages):
        cells = "".join(f"{values.get(name, 0) / GIGABYTE:13.3f}" for name in shown)
        lines.append(f"  {stage:>6}{cells}")
    return lines
