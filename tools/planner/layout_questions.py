"""Answers the questions of plan.py about one layout: `stages`, `timeline`; and `constants`.

print(stages(question).text)      # a Question as in tools/planner/questions.py

A question has the planner's flags, the configuration of a run and a machine. Its job is the layout
that the user gave, with model, training options and machine.
"""

import json
from dataclasses import asdict
from typing import Any

from base.paths import write_file
from costs import hardware, memory, risk, step_time
from costs.auto_schedule import decide_layout, note
from costs.job import Job
from costs.partition_costs import specs_of
from schedules import partition, simulation
from schedules.orders import schedule_for
from tools.planner.questions import BILLION, Answer, Question, memory_data


def stages(question: Question) -> Answer:
    """Return the answer of `plan.py stages`: blocks, parameters, memory and time of each stage.

    Memory is of each pipeline rank, which may hold several stages. Times are drawn as bars.
    """
    job = question.job()
    # With --schedule auto, take the layout with the schedule that is chosen.
    job = job._replace(layout=decide_layout(job)[0])
    rows, table = specs_of(job), memory.stages(job)
    fullest = max(table, key=lambda stage: stage.total).stage
    names = (*memory.OF_RUN, "buffers", "context", "total")
    head = "".join(f"{name:>12}" for name in (*names, "free"))
    lines = [partition.stage_table(rows, job.model), "", f"on {job.machine.name}"]
    lines.append(f"GB per GPU{head}")
    # A row of the memory table is a rank, which is called a stage if it holds only one.
    row_of = "stage" if job.layout.stages == job.layout.pp else "rank"
    for stage in table:
        parts = [getattr(stage, name) for name in names] + [job.machine.memory - stage.total]
        line = f"{row_of:5} {stage.stage:<4}" + "".join(f"{part / BILLION:12.1f}" for part in parts)
        lines.append(line + "  <- fullest" * (stage.stage == fullest))
    probability = risk.out_of_memory(job.machine, table[fullest].total)
    accepted = f"accepted: {question.options.risk:.0%} (--risk)"
    lines.append(f"risk of running out of memory: {probability:.1%}; {accepted}")
    loads = expert_loads(question, job)
    lines += _lines_of_loads(loads, question)
    lines += ["", "share of time"]
    widest = max(row.share for row in rows)
    for row in rows:
        bar = "#" * round(50 * row.share / widest)
        lines.append(f"stage {row.index:3} {bar:50} {row.share:.1%}")
    data: dict[str, Any] = {"stages": [_stage_data(row) for row in rows]}
    data |= {"memory": [memory_data(row) for row in table]}
    data |= {"fullest_rank": fullest, "risk_fraction": probability, "expert_loads": loads}
    return Answer("\n".join(lines), data)


def _stage_data(spec: partition.StageSpec) -> dict[str, Any]:
    """Return a stage as data."""
    data = asdict(spec)
    return data | {"share_fraction": data.pop("share")}


def expert_loads(question: Question, job: Job) -> dict[str, float] | None:
    """Return the memory if one GPU's experts get more rows of tokens than those of other GPUs.

    rows_over_mean_factor: the rows of the GPU that gets all rows of its expert group, over the mean
    of the group's GPUs. total_bytes: what the fullest GPU then needs. safe_rows_over_mean_factor:
    the most rows over the mean with which the risk of too little memory is at most --risk; 0 if
    there are none. Return None without expert parallelism.
    """
    if job.ep == 1:
        return None
    all_rows = float(job.ep)
    safe_bytes = risk.safe_bytes(job.machine, question.options.risk)
    return {
        "rows_over_mean_factor": all_rows,
        "total_bytes": memory.fullest(job._replace(rows_over_mean=all_rows)).total,
        "safe_rows_over_mean_factor": memory.most_rows(job, safe_bytes),
    }


def _lines_of_loads(loads: dict[str, float] | None, question: Question) -> list[str]:
    """Return lines on the loads of experts; loads: the result of `expert_loads`."""
    if loads is None:
        return []
    all_rows = loads["rows_over_mean_factor"]
    needed = loads["total_bytes"] / BILLION
    lines = [
        "experts: the table is for equal loads. If all rows of an expert group go to one GPU",
        f"({all_rows:g} times the mean), the fullest GPU needs {needed:.1f} GB.",
    ]
    safe_rows = loads["safe_rows_over_mean_factor"]
    if safe_rows >= 1:
        lines.append(
            f"Up to {safe_rows:.1f} times the mean, the risk of too little memory is at most "
            f"{question.options.risk:.0%}."
        )
    return lines


def timeline(question: Question) -> Answer:
    """Return the answer of `plan.py timeline`: the schedule drawn as text, and a Chrome trace.

    The drawing has equal times for all stages, the trace and the printed bubble have predicted
    seconds. At most 4 pp micro-batches are shown. The trace is written to the file of --trace. With
    --schedule auto a line says which schedule was chosen.
    """
    job, path = question.job(), question.options.trace
    count = min(job.micro_batches, 4 * job.layout.pp)
    layout, choice = decide_layout(job)
    job, order = job._replace(layout=layout), schedule_for(layout, count)
    slots = simulation.simulate(order, step_time.action_seconds(job))
    events = [
        simulation.trace_event(str(slot.action), 0, stage, slot.start, slot.end)
        for stage, row in enumerate(slots)
        for slot in row
    ]
    trace, bubble = simulation.trace(events), simulation.bubble(slots)
    lines = [simulation.draw(simulation.simulate(order))]
    lines.append(f"bubble {bubble:.1%} with {count} micro-batches")
    lines += [note(choice)] if choice else []
    if path:
        write_file(path, json.dumps(trace))
        lines.append(f"written: {path} (open in ui.perfetto.dev or chrome://tracing)")
    return Answer("\n".join(lines), trace | {"bubble_fraction": bubble})


def constants() -> Answer:
    """Return the answer of `plan.py constants`: the fitted constants, with value and meaning."""
    found, lines = hardware.constants(), []
    for c in found:
        lines += [f"{c.name} = {c.value:g} {c.unit}", f"    {c.meaning}; fitted on {c.fitted_on}"]
    return Answer("\n".join(lines), [asdict(c) for c in found])
