"""What a search found, as rows: the notes' own Markdown table, and CSV in the columns of rows.py.

ranked, failed = entries(result)        # layouts that ran, fastest first; and the others
"""

import csv
import io
import re
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from config.model_stats import parameters
from planner import published_rows
from planner.hardware import Machine
from planner.layouts import Rejected
from tuner.search_space import Candidate
from tuner.trials import Trial

BILLION = GIGA = 1e9
DRIFT = 0.05  # a reference layout that moved by more is told
# Columns of results.csv after those of rows.py and its optional ones.
MORE = (
    "trials",
    "sec_trials",
    "spread",
    "tokens_per_second",
    "mfu",
    "hfu",
    "predicted_sec",
    "mem_gb_per_stage",
)


@dataclass(frozen=True)
class Result:
    """All that a report is made from."""

    trials: list[Trial]
    candidates: list[Candidate]
    rejected: list[Rejected]
    machine: Machine
    ending: str  # why the search ended
    drift: list[float]  # of the reference layout: each time over the first
    command: Callable[[Candidate], list[str]]
    tokens: float | None
    title: str


@dataclass(frozen=True)
class Entry:
    """All trials of one layout as one row of the tables."""

    candidate: Candidate
    trials: list[Trial]  # that ran to the end; if none did, the last one
    notes: list[str]

    @property
    def ok(self) -> bool:
        """Whether it ran."""
        return self.trials[0].status == "ok"

    @property
    def seconds(self) -> float:
        """Median over the trials' medians."""
        return statistics.median(t.median for t in self.trials)

    @property
    def spread(self) -> float:
        """Slowest less fastest timed step of all trials, as a share of the median."""
        steps = [s for t in self.trials for s in t.seconds]
        return (max(steps) - min(steps)) / self.seconds

    @property
    def predicted(self) -> float:
        """Seconds as the planner has them now."""
        return self.candidate.prediction.seconds

    @property
    def memory(self) -> list[float]:
        """Bytes of the fullest rank of each stage, the most of all trials."""
        return [max(stage) for stage in zip(*(t.peak_memory for t in self.trials))]

    def rate(self, what: str) -> float:
        """tflops_model, tflops_hardware or tokens_per_second at the median."""
        first = self.trials[0]
        return getattr(first, what) * first.median / self.seconds


def entries(result: Result) -> tuple[list[Entry], list[Entry]]:
    """Layouts that ran, fastest first, and those that did not."""
    found, failed = [], []
    for candidate in result.candidates:
        own = [t for t in result.trials if t.key == candidate.key]
        ran = [t for t in own if t.status == "ok"]
        notes = [f"{t.status}: {t.reason}" for t in own if t.status != "ok"][-1:]
        if len(ran) > 1:
            notes.append(f"{len(ran)} trials")
        if ran:
            found.append(Entry(candidate, ran, notes))
        elif own:
            failed.append(Entry(candidate, own[-1:], notes))
    return sorted(found, key=lambda entry: entry.seconds), failed


def top_line(entry: Entry) -> str:
    """A layout and its figures in one line."""
    return (
        f"{entry.candidate.label:36} {entry.seconds:9.3f} s/iteration, spread {entry.spread:.0%}, "
        f"{entry.rate('tokens_per_second'):,.0f} tokens/s, {max(entry.memory) / GIGA:.2f} GB, "
        f"predicted {entry.predicted:.3f} s"
    )


def summary(result: Result, ranked: list[Entry]) -> list[str]:
    """What was measured, how far the planner was, whether the machine held still."""
    count = len(result.trials)
    bad = [t for t in result.trials if t.status != "ok"]
    kinds = {status: sum(t.status == status for t in bad) for status in {t.status for t in bad}}
    told = "".join(f", {n} {status}" for status, n in sorted(kinds.items()))
    lines = [
        f"{count} trials of {len(ranked)} layouts that ran{told}; "
        f"{len(result.rejected)} rejected without a run.",
        result.ending[0].upper() + result.ending[1:] + ".",
    ]
    if ranked:
        off = [entry.seconds / entry.predicted for entry in ranked]
        middle = statistics.median(off)
        rest = statistics.mean(abs(o / middle - 1) for o in off)
        lines.append(
            f"Measured over predicted: {middle:.2f} in the median, {rest:.0%} around that on "
            "average."
        )
    if result.drift:
        worst = max(result.drift, key=lambda d: abs(d - 1))
        text = f"One layout ran {len(result.drift)} times; furthest from its first: "
        lines.append(
            f"{text}{worst - 1:+.0%}"
            + (": the machine does not hold still." if abs(worst - 1) > DRIFT else ".")
        )
    if ranked and result.tokens:
        days = result.tokens / ranked[0].rate("tokens_per_second") / 86400
        lines.append(f"{result.tokens:.3g} tokens take {days:,.1f} days at the best layout's rate.")
    return lines


# ------------------------------------------------------------------------------------------------
# table.md
# ------------------------------------------------------------------------------------------------

HEAD = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")


def markdown(result: Result, ranked, failed, lines: list[str]) -> list[str]:
    """The notes' own table, fastest first, then what failed and what was rejected."""
    text = [f"# Tuning: {result.title}", "", *lines, "", where(result), ""]
    text += [f"| {' | '.join(HEAD)} |", "| " + " | ".join(["--:"] * 10) + " | :-- |"]
    for entry in ranked + failed:
        text.append("| " + " | ".join(cells(entry, result)) + " |")
    text += ["", "* Mem: peak of the fullest rank. TFLOPs: hardware TFLOPs per rank by the formula"]
    text += [f"  {formula(result)}, recomputation counted. Sec/it: median of timed steps."]
    if ranked:
        best = ranked[0]
        text += ["", f"Fastest: {best.candidate.label}.", ""]
        text += ["    " + shlex.join(result.command(best.candidate))]
    if result.rejected:
        text += ["", f"## Rejected without a run: {len(result.rejected)}", ""]
        text += [f"* {rejection(entry)}" for entry in result.rejected]
    return text


def cells(entry: Entry, result: Result) -> list[str]:
    """One row of the notes' table."""
    config, layout = entry.candidate.config, entry.candidate.config.layout
    nodes = -(-entry.candidate.ranks // result.machine.node)
    measured = ["", "", ""]
    if entry.ok:
        seconds, rate = entry.seconds, entry.rate("tflops_hardware")
        measured = [memory_text(max(entry.memory)), digits(seconds), digits(rate)]
    numbers = (layout.dp, layout.tp, layout.pp, layout.micro_batch_size)
    return [
        str(nodes),
        size_text(parameters(config.model)),
        *map(str, numbers),
        str(config.training.global_batch_size),
        *measured,
        "; ".join([*differences(entry), *entry.notes]).replace("|", "/"),
    ]


def differences(entry: Entry) -> list[str]:
    """What the columns of the notes' table do not say of a layout."""
    model, training = entry.candidate.config.model, entry.candidate.config.training
    layout = " ".join(entry.candidate.label.split()[4:])
    shape = f"h {model.hidden}, {model.heads} heads, {model.layers} layers"
    dates = sorted({t.started[5:10] for t in entry.trials})
    words = [layout, shape, training.precision, training.optimizer, ", ".join(dates)]
    return [word for word in words if word]


def where(result: Result) -> str:
    """Machine, versions and commit of the trials."""
    ran = next((t for t in reversed(result.trials) if t.cluster), None)
    if ran is None:
        return f"Machine model: {result.machine.name}."
    c, v = ran.cluster, ran.versions
    versions = ", ".join(f"{name} {version}" for name, version in v.items())
    nodes = len(c["nodes"])
    return (
        f"{c['ranks']} ranks by {c['launcher']} on {nodes} node{'s' * (nodes > 1)}, {c['device']}, "
        f"{c['backend']}, {c['threads_per_rank']} threads a rank; {versions}; "
        f"commit {(ran.commit or 'none')[:10]}; machine model {result.machine.name}; "
        f"{time.strftime('%Y-%m-%d')}."
    )


def formula(result: Result) -> str:
    """The FLOPs formula of the trials."""
    return next((t.formula for t in result.trials if t.formula), "(none ran)")


def rejection(entry: Rejected) -> str:
    """A rejected layout and why, in one line."""
    names = {"micro_batch_size": "mbs", "sequence_parallel": "sp"}
    at = " ".join(
        str(v) if k == "layout" else f"{names.get(k, k)} {v}" for k, v in entry.layout.items()
    )
    return f"{at}: {entry.reason}"


def kinds(rejected: list[Rejected]) -> list[tuple[int, str]]:
    """How many there are of each kind of reason, with one example of it."""
    found: dict[str, list[Rejected]] = {}
    for entry in rejected:
        found.setdefault(re.sub(r"\d[\d.]*", "#", entry.reason), []).append(entry)
    return sorted(((len(own), own[0].reason) for own in found.values()), reverse=True)


def bound(best: Candidate | None, beyond: Candidate | None) -> str:
    """What a bisection ended with, in one sentence."""

    def told(candidate: Candidate) -> str:
        size = size_text(parameters(candidate.config.model))
        return f"{size} on {candidate.ranks} ranks ({candidate.label})"

    if best is None:
        return f"nothing trained, not even {told(beyond)}" if beyond else "nothing can be laid out"
    return f"{told(best)} trained" + (f"; {told(beyond)} did not" if beyond else "")


# ------------------------------------------------------------------------------------------------
# results.csv
# ------------------------------------------------------------------------------------------------


def row(entry: Entry, number: int, result: Result) -> dict[str, str]:
    """A row in the columns of rows.py, and a few more."""
    config, layout = entry.candidate.config, entry.candidate.config.layout
    model, training, machine = config.model, config.training, result.machine
    values = dict.fromkeys((*published_rows.COLUMNS, *published_rows.OPTIONAL, *MORE), "")
    values |= {
        "row_id": f"tune-{number}",
        "section": f"tune {result.title}",
        "gpu": machine.name,
        "gpus": entry.candidate.ranks,
        "size_b": f"{parameters(model) / BILLION:.6g}",
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "ffn": model.ffn_hidden,
        "seq": model.seq_length,
        "vocab": model.vocab_size,
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "mbs": layout.micro_batch_size,
        "gbs": training.global_batch_size,
        "zero_stage": layout.zero,
        "recompute": layout.recompute,
        "precision": training.precision,
        "optimizer": training.optimizer,
        "status": {"ok": "ok", "oom": "OOM", "hang": "hang"}.get(entry.trials[0].status, "fail"),
        "kv_heads": model.kv_heads,
        "activation": model.activation,
        "sequence_parallel": layout.sequence_parallel,
        "schedule": layout.schedule,
        "partition": layout.partition,
        "trials": len(entry.trials),
        "predicted_sec": f"{entry.predicted:.6g}",
        "note": "; ".join(entry.notes),
    }
    return {
        k: str(v) for k, v in (values | (_measured(entry, machine) if entry.ok else {})).items()
    }


def _measured(entry: Entry, machine: Machine) -> dict[str, str]:
    """The columns that only a layout that ran has."""
    hardware, model = entry.rate("tflops_hardware"), entry.rate("tflops_model")
    return {
        "formula": entry.trials[0].formula,
        "mem_gb": f"{max(entry.memory) / GIGA:.3f}",
        "sec_per_it": f"{entry.seconds:.6g}",
        "sec_clean": f"{entry.seconds:.6g}",
        "tflops": f"{hardware:.6g}",
        "sec_trials": " ".join(f"{trial.median:.6g}" for trial in entry.trials),
        "spread": f"{entry.spread:.3f}",
        "tokens_per_second": f"{entry.rate('tokens_per_second'):.6g}",
        "mfu": f"{1e12 * model / machine.peak:.4f}",
        "hfu": f"{1e12 * hardware / machine.peak:.4f}",
        "mem_gb_per_stage": " ".join(f"{stage / GIGA:.3f}" for stage in entry.memory),
    }


def csv_text(table: list[dict[str, str]], found: list[Entry]) -> str:
    """results.csv; notes as they are after the check."""
    text = io.StringIO()
    names = (*published_rows.COLUMNS, *published_rows.OPTIONAL, *MORE)
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for values, entry in zip(table, found, strict=True):
        writer.writerow(values | {"note": "; ".join(entry.notes)})
    return text.getvalue()


def digits(number: float) -> str:
    """Two decimals, or as many as four digits need."""
    return f"{number:.2f}" if number >= 100 else f"{number:.4g}"


def size_text(count: float) -> str:
    """Parameters as the notes write them: 181B, 1.3B, 124M."""
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count / 1e3:.3g}K"


def memory_text(size: float) -> str:
    """Such as 47GB, or 0.31GB."""
    return f"{size / GIGA:.0f}GB" if size >= 10 * GIGA else f"{size / GIGA:.2f}GB"
