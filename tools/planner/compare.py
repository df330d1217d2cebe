"""Answers `plan.py compare`: two layouts side by side, their seconds by cause and their memory.

    answer = compare(first, second, ["tp 4", "tp 8"])

The seconds of a step are divided by cause as follows. The pipeline is predicted again and again,
each time with one more cause that takes no time: first the messages between stages (p2p), then also
the collectives in the passes (tp), then the host, then recomputation. A cause gets the seconds by
which the prediction falls. The pipeline's other seconds are compute and bubble (idle time), so all
causes add up to the step.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from costs import memory
from costs.auto_schedule import decide_layout
from costs.hardware import Link
from costs.job import Job
from costs.step_time import pipeline_time, predict, step_parts
from tools.planner.questions import BILLION, Answer, Question, flags

PARTS = (*memory.OF_RUN, "buffers", "context")  # the parts of a GPU's memory that are compared
FREE = Link(0.0, math.inf, 1.0)  # a link over which every message takes no time
# The fields of a layout in which no block is recomputed.
NO_RECOMPUTE: dict[str, Any] = {"recompute": "none", "recompute_layers": None}
# The causes in the order in which they are printed.
CAUSES = ("compute", "recompute", "tp", "p2p", "host", "bubble", "dp", "tied", "optimizer", "fixed")


def by_cause(job: Job) -> dict[str, float]:
    """Return the predicted seconds of a step by the names in CAUSES.

    With experts or cp, the cause `tp` includes their collectives. Called by `plan.py compare`, and
    by `plan.py gap` for the column `planned`.
    """
    software = replace(
        job.machine.software, host_per_block=0, host_per_operation=0, host_of_block=0
    )
    no_links = replace(job.machine, nvlink=FREE, network=FREE)
    no_host = replace(no_links, software=software)
    no_recompute = replace(job.layout, **NO_RECOMPUTE)
    # By cause, the job in which this cause and all causes before it take no time. Messages between
    # stages are an argument of `pipeline_time`, so for p2p the job is the same.
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
    # The rest of the pipeline's time is computing and idle time.
    found["bubble"] = left * idle
    found["compute"] = left * (1 - idle)
    found |= step_parts(job)
    found["dp"] = found.pop("reduce")
    return {cause: found[cause] * job.machine.slowdown for cause in CAUSES}


def _facts(question: Question) -> dict[str, Any]:
    """Return the prediction of one of the two layouts, as an entry of the answer's data.

    It has the seconds by cause, the memory of the fullest GPU by part, and train.py's flags.
    """
    job = question.job()
    layout, _ = decide_layout(job)
    job = job._replace(layout=layout)
    prediction, fullest = predict(job), memory.fullest(job)
    parts = {name: getattr(fullest, name) for name in PARTS}
    return {
        "step_seconds": prediction.seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "cause_seconds": by_cause(job),
        "memory_bytes": parts | {"total": fullest.total},
        "fits": prediction.fits,
        "risk_fraction": prediction.risk,
        "machine": job.machine.name,
        "gpus": job.gpus,
        "global_batch_size": job.training.global_batch_size,
        "flags": flags(job.layout),
    }


def compare(first: Question, second: Question, names: Sequence[str]) -> Answer:
    """Return the answer of `plan.py compare`: tables of seconds and memory of two layouts, A and B.

    names: the text of both layouts as the user typed it, flags or a run's folder.
    """
    sides = {"A": _facts(first), "B": _facts(second)}
    one, two = sides.values()
    lines = []
    for (letter, facts), name in zip(sides.items(), names, strict=True):
        where = f"{facts['gpus']} GPUs of {facts['machine']}"
        lines.append(f"{letter}: {name}: {where}, global batch {facts['global_batch_size']}")
    seconds = [facts["cause_seconds"] | {"step": facts["step_seconds"]} for facts in sides.values()]
    lines += ["", "seconds per step       A         B     B - A"]
    lines += _rows(seconds[0], seconds[1], unit=1.0)
    lines += ["", "GB, fullest GPU        A         B     B - A"]
    lines += _rows(one["memory_bytes"], two["memory_bytes"], unit=BILLION)
    before, after = one["tokens_per_second"], two["tokens_per_second"]
    lines += ["", f"tokens/s: {before:,.0f} and {after:,.0f}, B has {after / before:.3f}x"]
    differences = {
        cause: two["cause_seconds"][cause] - one["cause_seconds"][cause] for cause in CAUSES
    }
    most = max(CAUSES, key=lambda cause: abs(differences[cause]))
    if differences[most]:
        lines.append(f"most of the difference: {most}, {differences[most]:+.2f} s a step")
    accepted = first.options.risk
    risks = " and ".join(f"{facts['risk_fraction']:.1%}" for facts in sides.values())
    lines.append(f"risk of running out of memory: {risks}; accepted: {accepted:.0%} (--risk)")
    for letter, facts in sides.items():
        if not facts["fits"]:
            lines.append(f"{letter} runs out of memory")
        elif facts["risk_fraction"] > accepted:
            lines.append(f"{letter} fits only with a risk above {accepted:.0%}")
    if one["global_batch_size"] != two["global_batch_size"]:
        lines.append("note: the global batches differ: compare tokens/s, not seconds")
    return Answer("\n".join(lines), {"a": one, "b": two, "difference_seconds": differences})


def _rows(before: dict[str, float], after: dict[str, float], unit: float) -> list[str]:
    """Return a table's lines: a name, the values of A and of B, and the difference B - A.

    before, after: values of A and B by name. unit: the number by which values are divided for
    printing, 1 for seconds or 1e9 for bytes. A name whose value is 0 in both layouts has no line.
    """
    found = []
    for name in before:
        first = before[name] / unit
        second = after[name] / unit
        if first or second:
            found.append(f"  {name:14}{first:10.3f}{second:10.3f}{second - first:10.3f}")
    return found
