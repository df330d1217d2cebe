"""Two layouts side by side: seconds of a step by cause, and memory of the fullest GPU.

    answer = compare(first, second, ["tp 4", "tp 8"])

A cause's seconds are what the step loses when it takes no time, the causes before it being gone
already, in this order: messages between stages, collectives in the passes, the host, recomputation.
What is then left of the pipeline is compute and bubble, so that all add up to the step.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner import memory
from planner.hardware import Link
from planner.job import Job
from planner.questions import BILLION, Answer, Question, flags
from planner.step_time import pipeline_time, predict, step_parts
from schedules.choice import decide_layout

PARTS = (*memory.OF_RUN, "buffers", "context")  # of a GPU's memory
FREE = Link(0.0, math.inf, 1.0)
NO_RECOMPUTE: dict[str, Any] = {"recompute": "none", "recompute_layers": None}
CAUSES = ("compute", "recompute", "tp", "p2p", "host", "bubble", "dp", "tied", "optimizer", "fixed")


def by_cause(job: Job) -> dict[str, float]:
    """Seconds of a step by CAUSES; with experts or cp, `tp` has their collectives too."""
    software = replace(job.machine.software, host_per_block=0, host_per_operation=0)
    no_links = replace(job.machine, nvlink=FREE, network=FREE)
    no_host = replace(no_links, software=software)
    no_recompute = replace(job.layout, **NO_RECOMPUTE)
    # In this order each cause takes no time, with those before it.
    without = {
        "p2p": job,
        "tp": job._replace(machine=no_links),
        "host": job._replace(machine=no_host),
        "recompute": job._replace(machine=no_host, layout=no_recompute),
    }
    left, idle = pipeline_time(job)
    found = {}
    for cause, rest in without.items():
        seconds, idle = pipeline_time(rest, sent=0.0)
        found[cause] = left - seconds
        left = seconds
    found["bubble"] = left * idle
    found["compute"] = left * (1 - idle)
    found |= step_parts(job)
    found["dp"] = found.pop("reduce")
    return {cause: found[cause] * job.machine.slowdown for cause in CAUSES}


def _facts(question: Question) -> dict[str, Any]:
    """One side: its seconds by cause, its memory by part, and what to type."""
    job = question.job()
    layout, _ = decide_layout(job.model, job.layout, job.micro_batches)
    job = job._replace(layout=layout)
    prediction, fullest = predict(job), memory.fullest(job)
    parts = {name: getattr(fullest, name) for name in PARTS}
    return {
        "seconds": prediction.seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "causes": by_cause(job),
        "memory": parts | {"total": fullest.total},
        "fits": prediction.fits,
        "machine": job.machine.name,
        "gpus": job.gpus,
        "global_batch_size": job.training.global_batch_size,
        "flags": flags(job.layout),
    }


def compare(first: Question, second: Question, names: Sequence[str]) -> Answer:
    """Where the second of two layouts gains and loses; `names`: what the user calls them."""
    sides = {"A": _facts(first), "B": _facts(second)}
    one, two = sides.values()
    lines = []
    for (letter, facts), name in zip(sides.items(), names, strict=True):
        where = f"{facts['gpus']} GPUs of {facts['machine']}"
        lines.append(f"{letter}: {name}: {where}, global batch {facts['global_batch_size']}")
    seconds = [facts["causes"] | {"step": facts["seconds"]} for facts in sides.values()]
    lines += ["", "seconds per step       A         B     B - A"]
    lines += _rows(seconds[0], seconds[1], unit=1.0)
    lines += ["", "GB, fullest GPU        A         B     B - A"]
    lines += _rows(one["memory"], two["memory"], unit=BILLION)
    before, after = one["tokens_per_second"], two["tokens_per_second"]
    lines += ["", f"tokens/s: {before:,.0f} and {after:,.0f}, B has {after / before:.3f}x"]
    differences = {cause: two["causes"][cause] - one["causes"][cause] for cause in CAUSES}
    most = max(CAUSES, key=lambda cause: abs(differences[cause]))
    if differences[most]:
        lines.append(f"most of the difference: {most}, {differences[most]:+.2f} s a step")
    for letter, facts in sides.items():
        if not facts["fits"]:
            lines.append(f"{letter} runs out of memory")
    if one["global_batch_size"] != two["global_batch_size"]:
        lines.append("note: the global batches differ: compare tokens/s, not seconds")
    return Answer("\n".join(lines), {"a": one, "b": two, "difference": differences})


def _rows(before: dict[str, float], after: dict[str, float], unit: float) -> list[str]:
    """A line for each name that takes anything on a side."""
    found = []
    for name in before:
        first = before[name] / unit
        second = after[name] / unit
        if first or second:
            found.append(f"  {name:14}{first:10.3f}{second:10.3f}{second - first:10.3f}")
    return found
