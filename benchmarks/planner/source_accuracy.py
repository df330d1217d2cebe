"""The planner's error by source of measured rows: time, choice, memory, out of memory.

    found = compare(rows, predict(rows, values))

Used by plan_accuracy.py --rows FILE...
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from base.errors import UserError
from benchmarks.planner.robust_fit import refit_without_each
from benchmarks.planner.stated_rows import StatedRow
from benchmarks.ratios import kendall_tau
from costs import hardware, memory, risk, step_time
from costs.job import Job

FLAGGED = 0.2  # risk from which a row counts as predicted to run out: a lost job costs most
RECOMPUTATIONS = ("none", "selective", "full")  # from the least to the most
NEAR_BEST = 2.0  # rows within this factor of their table's best are counted apart too


class Guess(NamedTuple):
    """Seconds of a step, gigabytes by kind of figure, and the risk of running out of memory.

    interval, line: seconds between which 90, and within which 80, of 100 runs are expected.
    """

    seconds: float
    gigabytes: float
    risk: float
    interval: tuple[float, float] = (0.0, math.inf)
    line: float = math.inf


def predict(rows: Sequence[StatedRow], values: dict[str, float]) -> dict[str, Guess]:
    """Return the planner's prediction of every row, with these constants."""
    found = {}
    for row, machine in _on_machines(rows, values):
        job = Job(row.model, row.layout, row.training, machine)
        seconds = _seconds(row, machine)
        most = max(stage.total for stage in memory.stages(job))
        run_out = risk.out_of_memory(machine, most)
        block = float(step_time.block_passes(job).forward.forward)
        interval = risk.interval(job, seconds, block)
        line = float(risk.quantile(job, seconds, block))
        found[row.id] = Guess(seconds, _gigabytes(row, machine), run_out, interval, line)
    return found


def predictions(rows: Sequence[StatedRow], kind: str, values: dict[str, float]) -> dict[str, float]:
    """Predicted `seconds`, or `gigabytes` of the ranks that the source observed, by row."""
    figure = {"seconds": _seconds, "gigabytes": _gigabytes}[kind]
    return {row.id: figure(row, machine) for row, machine in _on_machines(rows, values)}


def errors(rows: Sequence[StatedRow], kind: str, values: dict[str, float]) -> list[float]:
    """Logarithms of predicted over measured, row by row."""
    predicted = predictions(rows, kind, values)
    return [math.log(predicted[row.id] / getattr(row, kind)) for row in rows]


def _on_machines(
    rows: Sequence[StatedRow], values: dict[str, float]
) -> list[tuple[StatedRow, hardware.Machine]]:
    machines = {name: hardware.load(name, **values) for name in {row.machine for row in rows}}
    return [(row, row.on(machines[row.machine], values)) for row in rows]


def _seconds(row: StatedRow, machine: hardware.Machine) -> float:
    """Seconds of a step."""
    job = Job(row.model, row.layout, row.training, machine)
    try:
        seconds, _ = step_time.pipeline_time(job)
        return (seconds + sum(step_time.step_parts(job).values())) * machine.slowdown
    except UserError as error:
        raise UserError(f"row {row.id}: {error}") from None


def _gigabytes(row: StatedRow, machine: hardware.Machine) -> float:
    """Gigabytes of what the row's figure counts, on the GPU that the source observed: torch's
    allocator alone, or all of the GPU.
    """
    table = memory.stages(Job(row.model, row.layout, row.training, machine))
    observed = {"first": table[:1], "ends": [table[0], table[-1]]}.get(row.memory_of, table)
    most = max(stage.total for stage in observed)
    outside = 0.0
    if row.memory_kind in ("allocated", "reserved"):
        outside = machine.context
        most -= outside + machine.software.buffers
    room = max(0.0, machine.memory - outside - most)
    return most / 1e9 + min(row.memory_ahead, room / 1e9)


def possible(rows: Sequence[StatedRow], values: dict[str, float]) -> list[StatedRow]:
    """The rows; where a source does not state its layouts, with the least recomputation at which
    all of a section fit into their GPUs: the assumed one cannot have run if it needs more.
    """
    found = {row.id: row for row in rows}
    for section in dict.fromkeys(row.section for row in rows if row.assumed):
        own = [row for row in rows if row.assumed and row.section == section]
        for recompute in RECOMPUTATIONS:
            own = [replace(r, layout=replace(r.layout, recompute=recompute)) for r in own]
            if all(guess.risk <= 0.5 for guess in predict(own, values).values()):
                break
        found |= {row.id: row for row in own}
    return list(found.values())


# ---- Fitting -------------------------------------------------------------------------------------

# Refitted without a source before it is predicted. What only one source could determine is not
# fitted at all, but stated (tools/planner/engines.toml) or assumed (hardware/).
FITTED = ("a100_torch_gemm", "h100_torch_gemm", "nvlink_latency")
# Sources that are never fitted on here: its layout is assumed; those of Megatron-Core, which
# rates.py fits; those of Trine itself; and those of November 2026, which came after the constants.
LEFT_OUT = ("nemo_launcher", "dgxc", "nemo_guide", "dgxc_2025", "megatron_bridge", "primus")
LEFT_OUT += ("trine_h100", "trine_h200", "internevo", "olmo_core", "tinyllama", "automodel")
LEFT_OUT += ("mlperf", "simumax", "vocabulary", "megatron_bridge_2025")  # blind_rows.py
ROUNDS = 2  # steps of a fit


def fitted_on(rows: Sequence[StatedRow]) -> list[StatedRow]:
    """The rows on which constants are fitted: those within NEAR_BEST of their table's best, but for
    those with fp8 or cp, whose costs no constant is about.
    """
    timed = [row for row in rows if row.status == "ok" and row.seconds and not row.aside]
    timed = [row for row in timed if row.layout.cp == 1 and not row.facts.get("fp8")]
    return [row for row in _near_best(timed) if row.source not in LEFT_OUT]


def held_out(
    rows: Sequence[StatedRow],
    known: Sequence[StatedRow],
    start: dict[str, float],
    of_megatron: dict[str, dict[str, float]],
) -> dict[str, Guess]:
    """Predictions, those of each source with constants fitted on the others' `known` rows.

    of_megatron: by source of Megatron-Core's runs, constants fitted without it (rates.py).
    """
    constants = refit_without_each(
        fitted_on(known),
        lambda row: row.source,
        lambda some, values: errors(some, "seconds", values),
        FITTED,
        start,
        ROUNDS,
    )
    found: dict[str, Guess] = {}
    for source in sorted({row.source for row in rows}):
        mine = [row for row in rows if row.source == source]
        found |= predict(mine, (constants | of_megatron).get(source, start))
    return found


# ---- Figures -------------------------------------------------------------------------------------


def compare(
    rows: Sequence[StatedRow], guesses: dict[str, Guess], accepted: float = risk.DEFAULT
) -> dict[str, Any]:
    """All figures of some rows: shares, not per cent; None where there is nothing to compare."""
    own = [row for row in rows if not row.aside]
    every = [row for row in rows if row.status == "ok" and row.seconds]
    timed = [row for row in every if not row.aside]
    near = _near_best(timed)
    found: dict[str, Any] = {
        "rows": len(rows),
        "set_aside": len(rows) - len(own),
        "time": off_by([guesses[r.id].seconds / r.seconds for r in timed]),
        "time_near_best": off_by([guesses[r.id].seconds / r.seconds for r in near]),
        "in_interval": _inside(timed, guesses),
        "in_interval_near_best": _inside(near, guesses),
        "choice": _choice(timed, guesses),
        "choice_of_all": _choice(every, guesses),
        "choice_near_best": _choice(near, guesses),
        "caution": _caution(own, guesses, accepted),
        "memory": {},
        "out_of_memory": _out_of_memory(own, guesses),
    }
    weighed = [row for row in own if row.status == "ok" and row.gigabytes]
    for kind in sorted({row.memory_kind for row in weighed}):
        mine = [row for row in weighed if row.memory_kind == kind]
        ratios = [guesses[r.id].gigabytes / r.gigabytes for r in mine]
        found["memory"][kind or "not stated"] = off_by(ratios)
    return found


def off_by(ratios: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median and largest error, and the bias, of ratios of predicted to measured: raw,
    and after the one multiplier that makes the mean error least.
    """
    if not ratios:
        return None
    scale = min((1 / ratio for ratio in ratios), key=lambda s: sum(abs(s * r - 1) for r in ratios))
    sizes = [abs(ratio - 1) for ratio in ratios]
    scaled = [abs(scale * ratio - 1) for ratio in ratios]
    return {
        "n": len(ratios),
        "mean": statistics.mean(sizes),
        "median": statistics.median(sizes),
        "largest": max(sizes),
        "bias": statistics.mean(ratios) - 1,
        "scaled_mean": statistics.mean(scaled),
    }


def _inside(rows: list[StatedRow], guesses: dict[str, Guess]) -> float | None:
    """Share of the rows that took a time within the predicted interval."""
    inside = [guesses[r.id].interval[0] <= r.seconds <= guesses[r.id].interval[1] for r in rows]
    return statistics.mean(inside) if rows else None


def tables(rows: Sequence[StatedRow]) -> list[list[StatedRow]]:
    """Rows among which a layout is chosen."""
    found: dict[tuple, list[StatedRow]] = {}
    for row in rows:
        found.setdefault(row.table, []).append(row)
    return list(found.values())


def _near_best(timed: list[StatedRow]) -> list[StatedRow]:
    kept = []
    for table in tables(timed):
        best = min(row.seconds for row in table)
        kept += [row for row in table if row.seconds <= NEAR_BEST * best]
    return kept


def _choice(timed: list[StatedRow], guesses: dict[str, Guess]) -> dict[str, float] | None:
    """Return best picked, regret and Kendall's tau of tables with two rows or more that ran."""
    regrets, taus = [], []
    for table in tables(timed):
        if len(table) < 2:
            continue
        picked = min(table, key=lambda row: guesses[row.id].seconds)
        regrets.append(picked.seconds / min(row.seconds for row in table) - 1)
        measured = [row.seconds for row in table]
        taus.append(kendall_tau(measured, [guesses[row.id].seconds for row in table]))
    if not regrets:
        return None
    return {
        "tables": len(regrets),
        "best_picked": sum(regret == 0 for regret in regrets),
        "regret": statistics.mean(regrets),
        "tau": statistics.mean(taus),
    }


def _caution(
    rows: list[StatedRow], guesses: dict[str, Guess], accepted: float
) -> dict[str, float] | None:
    """Return, for tables in which some layouts ran out of memory and some ran, how often the
    fastest one of acceptable risk had run out; and the cost of the slower choice where it had not.
    """
    count, out, none, costs = 0, 0, 0, []
    for table in tables(rows):
        ran = [row for row in table if row.status == "ok" and row.seconds]
        if not ran or not any(row.status == "OOM" for row in table):
            continue
        count += 1
        safe = [r for r in table if r.status != "failed" and guesses[r.id].risk <= accepted]
        if not safe:
            none += 1
            continue
        picked = min(safe, key=lambda row: guesses[row.id].seconds)
        if picked.status == "OOM":
            out += 1
        else:
            free = min(ran, key=lambda row: guesses[row.id].seconds)
            costs.append(max(0.0, picked.seconds / free.seconds - 1))
    if not count:
        return None
    cost = statistics.mean(costs) if costs else math.nan
    return {"tables": count, "first_out_of_memory": out, "nothing_safe": none, "cost": cost}


def _out_of_memory(rows: list[StatedRow], guesses: dict[str, Guess]) -> dict[str, int | float]:
    """Rows that ran out of memory and were predicted to, that were not, and false alarms."""
    over = {row.id: guesses[row.id].risk > FLAGGED for row in rows}
    out = [row for row in rows if row.status == "OOM"]
    ran = [row for row in rows if row.status == "ok"]
    return {
        "ran_out": len(out),
        "found": sum(over[row.id] for row in out),
        "missed": sum(not over[row.id] for row in out),
        "ran": len(ran),
        "false_alarms": sum(over[row.id] for row in ran),
    }


# ---- The report ----------------------------------------------------------------------------------


def report(figures: dict[str, dict[str, Any]]) -> list[str]:
    """The figures of each source as lines of Markdown, in per cent."""
    lines = ["", "| source | n | aside | mean | median | max | bias | scaled | in interval |"]
    lines[-1] += " near best: n, mean, in interval | best | regret | tau | regret of all rows |"
    lines.append("|---" * 14 + "|")
    for name, found in figures.items():
        time, near, choice = found["time"], found["time_near_best"], found["choice"]
        if not time or not near:
            continue
        cells = [name, time["n"], found["set_aside"]]
        cells += [_cent(time[key]) for key in ("mean", "median", "largest", "bias", "scaled_mean")]
        cells.append(_cent(found["in_interval"]))
        inside = _cent(found["in_interval_near_best"])
        cells.append(f"{near['n']}, {_cent(near['mean'])}, {inside}")
        cells += ["-"] * 4
        if choice:
            cells[-4:] = [f"{choice['best_picked']} of {choice['tables']}"]
            cells += [_cent(choice["regret"]), f"{choice['tau']:.2f}"]
            among = found["choice_near_best"]
            if among:
                cells[-2] += f" ({_cent(among['regret'])})"
            cells.append(_cent(found["choice_of_all"]["regret"]))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines + _memory_report(figures)


def _memory_report(figures: dict[str, dict[str, Any]]) -> list[str]:
    head = "| source | memory, by kind: n, mean, bias | out of memory found | false alarms |"
    lines = ["", head + " first choice had run out | cost of caution |", "|---" * 6 + "|"]
    for name, found in figures.items():
        kinds = [
            f"{kind}: {one['n']}, {_cent(one['mean'])}, {_cent(one['bias'])}"
            for kind, one in found["memory"].items()
        ]
        out, caution = found["out_of_memory"], found["caution"]
        cells = [name, "; ".join(kinds) or "-", f"{out['found']} of {out['ran_out']}"]
        cells += [f"{out['false_alarms']} of {out['ran']}", "-", "-"]
        if caution:
            cells[-2] = f"{caution['first_out_of_memory']} of {caution['tables']}"
            cells[-1] = _cent(caution["cost"])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cent(share: float) -> str:
    return f"{100 * share:.1f}"
