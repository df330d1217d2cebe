"""What a search found, as tables: Markdown (table.md), and CSV in the columns of published_rows.

ranked, failed = layout_results(result)     # layouts that ran, fastest first; and the others
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
DRIFT_LIMIT = 0.05  # a larger change of the reference layout's seconds is pointed out
ROW_ID = "tune-"  # row_id of results.csv, before the row's number
# Columns of results.csv after those of published_rows and its optional ones.
EXTRA_COLUMNS = (
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
class SearchResult:
    """Everything that a report is made from."""

    trials: list[Trial]
    candidates: list[Candidate]
    rejected: list[Rejected]
    machine: Machine
    ending: str  # why the search ended
    drift: list[float]  # of the reference layout: seconds of each trial over those of the first
    command: Callable[[Candidate], list[str]]  # what to type to train on that layout
    tokens: float | None
    title: str


@dataclass(frozen=True)
class LayoutResult:
    """All trials of one layout: one row of the tables."""

    candidate: Candidate
    trials: list[Trial]  # those that ran to the end; if none did, the last one
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
        """Slowest minus fastest timed step of all trials, as a share of the median."""
        steps = [s for t in self.trials for s in t.seconds]
        return (max(steps) - min(steps)) / self.seconds

    @property
    def predicted(self) -> float:
        """Seconds that the planner predicts."""
        return self.candidate.prediction.seconds

    @property
    def memory(self) -> list[float]:
        """Bytes of the fullest rank of each stage, the largest of all trials."""
        return [max(stage) for stage in zip(*(t.peak_memory for t in self.trials))]

    def rate(self, name: str) -> float:
        """tflops_model, tflops_hardware or tokens_per_second at the median."""
        first = self.trials[0]
        return getattr(first, name) * first.median / self.seconds


def layout_results(result: SearchResult) -> tuple[list[LayoutResult], list[LayoutResult]]:
    """Layouts that ran, fastest first, and those that did not."""
    found, failed = [], []
    for candidate in result.candidates:
        own = [t for t in result.trials if t.key == candidate.key]
        ran = [t for t in own if t.status == "ok"]
        notes = [f"{t.status}: {t.reason}" for t in own if t.status != "ok"][-1:]
        if len(ran) > 1:
            notes.append(f"{len(ran)} trials")
        if ran:
            found.append(LayoutResult(candidate, ran, notes))
        elif own:
            failed.append(LayoutResult(candidate, own[-1:], notes))
    return sorted(found, key=lambda entry: entry.seconds), failed


def top_line(entry: LayoutResult) -> str:
    """A layout and its figures in one line."""
    return (
        f"{entry.candidate.label:36} {entry.seconds:9.3f} s/iteration, spread {entry.spread:.0%}, "
        f"{entry.rate('tokens_per_second'):,.0f} tokens/s, {max(entry.memory) / GIGA:.2f} GB, "
        f"predicted {entry.predicted:.3f} s"
    )


def summary(result: SearchResult, ranked: list[LayoutResult]) -> list[str]:
    """What was measured, the planner's error, and whether the machine's speed changed."""
    count = len(result.trials)
    bad = [t for t in result.trials if t.status != "ok"]
    kinds = {status: sum(t.status == status for t in bad) for status in {t.status for t in bad}}
    failures = "".join(f", {n} {status}" for status, n in sorted(kinds.items()))
    lines = [
        f"{count} trials of {len(ranked)} layouts that ran{failures}; "
        f"{len(result.rejected)} rejected without a run.",
        result.ending[0].upper() + result.ending[1:] + ".",
    ]
    if ranked:
        ratios = [entry.seconds / entry.predicted for entry in ranked]
        median = statistics.median(ratios)
        rest = statistics.mean(abs(ratio / median - 1) for ratio in ratios)
        lines.append(
            f"Measured over predicted: median {median:.2f}, mean deviation from it {rest:.0%}."
        )
    if result.drift:
        worst = max(result.drift, key=lambda ratio: abs(ratio - 1)) - 1
        verdict = ": the machine's speed changes." if abs(worst) > DRIFT_LIMIT else "."
        lines.append(
            f"One layout ran {len(result.drift)} times; largest change from its first trial: "
            f"{worst:+.0%}{verdict}"
        )
    if ranked and result.tokens:
        days = result.tokens / ranked[0].rate("tokens_per_second") / 86400
        lines.append(f"{result.tokens:.3g} tokens take {days:,.1f} days at the best layout's rate.")
    return lines


# ------------------------------------------------------------------------------------------------
# table.md
# ------------------------------------------------------------------------------------------------

HEAD = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")


def markdown(
    result: SearchResult, ranked: list[LayoutResult], failed: list[LayoutResult], lines: list[str]
) -> list[str]:
    """The table of layouts, fastest first and failed ones last, and what was rejected."""
    text = [f"# Tuning: {result.title}", "", *lines, "", environment_line(result), ""]
    text += [f"| {' | '.join(HEAD)} |", "| " + " | ".join(["--:"] * 10) + " | :-- |"]
    for entry in ranked + failed:
        text.append("| " + " | ".join(markdown_row(entry, result)) + " |")
    text += ["", "* Mem: peak of the fullest rank. TFLOPs: hardware TFLOPs per rank by the formula"]
    formula = next((t.formula for t in result.trials if t.formula), "(none ran)")
    text += [f"  {formula}, recomputation counted. Sec/it: median of timed steps."]
    if ranked:
        best = ranked[0]
        text += ["", f"Fastest: {best.candidate.label}.", ""]
        text += ["    " + shlex.join(result.command(best.candidate))]
    if result.rejected:
        text += ["", f"## Rejected without a run: {len(result.rejected)}", ""]
        text += [f"* {rejection_line(entry)}" for entry in result.rejected]
    return text


def markdown_row(entry: LayoutResult, result: SearchResult) -> list[str]:
    """The cells of one row of table.md."""
    config, layout = entry.candidate.config, entry.candidate.config.layout
    nodes = -(-entry.candidate.ranks // result.machine.node)
    measured = ["", "", ""]
    if entry.ok:
        seconds, rate = entry.seconds, entry.rate("tflops_hardware")
        measured = [format_memory(max(entry.memory)), format_number(seconds), format_number(rate)]
    numbers = (layout.dp, layout.tp, layout.pp, layout.micro_batch_size)
    return [
        str(nodes),
        format_size(parameters(config.model)),
        *map(str, numbers),
        str(config.training.global_batch_size),
        *measured,
        "; ".join([*_remarks(entry), *entry.notes]).replace("|", "/"),
    ]


def _remarks(entry: LayoutResult) -> list[str]:
    """What the columns of table.md do not show of a layout."""
    model, training = entry.candidate.config.model, entry.candidate.config.training
    layout = " ".join(entry.candidate.label.split()[4:])
    shape = f"h {model.hidden}, {model.heads} heads, {model.layers} layers"
    dates = sorted({t.started[5:10] for t in entry.trials})
    remarks = [layout, shape, training.precision, training.optimizer, ", ".join(dates)]
    return [remark for remark in remarks if remark]


def environment_line(result: SearchResult) -> str:
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


def rejection_line(entry: Rejected) -> str:
    """A rejected layout and why, in one line."""
    names = {"micro_batch_size": "mbs", "sequence_parallel": "sp"}
    at = " ".join(
        str(v) if k == "layout" else f"{names.get(k, k)} {v}" for k, v in entry.layout.items()
    )
    return f"{at}: {entry.reason}"


def rejections_by_reason(rejected: list[Rejected]) -> list[tuple[int, str]]:
    """How many rejections have the same reason but for its numbers, with one example of each."""
    found: dict[str, list[Rejected]] = {}
    for entry in rejected:
        found.setdefault(re.sub(r"\d[\d.]*", "#", entry.reason), []).append(entry)
    return sorted(((len(own), own[0].reason) for own in found.values()), reverse=True)


def bound_sentence(best: Candidate | None, failed: Candidate | None) -> str:
    """What a bisection ended with: the last run that trained, and the next one, which did not."""

    def run(candidate: Candidate) -> str:
        size = format_size(parameters(candidate.config.model))
        return f"{size} on {candidate.ranks} ranks ({candidate.label})"

    if best is None:
        return f"nothing trained, not even {run(failed)}" if failed else "no layout is possible"
    return f"{run(best)} trained" + (f"; {run(failed)} did not" if failed else "")


# ------------------------------------------------------------------------------------------------
# results.csv
# ------------------------------------------------------------------------------------------------


def csv_row(entry: LayoutResult, number: int, result: SearchResult) -> dict[str, str]:
    """A row of results.csv: the columns of published_rows, and EXTRA_COLUMNS."""
    config, layout = entry.candidate.config, entry.candidate.config.layout
    model, training, machine = config.model, config.training, result.machine
    values = dict.fromkeys((*published_rows.COLUMNS, *published_rows.OPTIONAL, *EXTRA_COLUMNS), "")
    values |= {
        "row_id": f"{ROW_ID}{number}",
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
    if entry.ok:
        values |= _measured_columns(entry, machine)
    return {name: str(value) for name, value in values.items()}


def _measured_columns(entry: LayoutResult, machine: Machine) -> dict[str, str]:
    """The columns that are empty unless the layout ran."""
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


def csv_text(table: list[dict[str, str]], found: list[LayoutResult]) -> str:
    """The text of results.csv, with the notes as they are after the check."""
    text = io.StringIO()
    names = (*published_rows.COLUMNS, *published_rows.OPTIONAL, *EXTRA_COLUMNS)
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    for values, entry in zip(table, found, strict=True):
        writer.writerow(values | {"note": "; ".join(entry.notes)})
    return text.getvalue()


def format_number(number: float) -> str:
    """Four significant digits; two decimals from 100 on."""
    return f"{number:.2f}" if number >= 100 else f"{number:.4g}"


def format_size(count: float) -> str:
    """A number of parameters, as 181B, 1.3B, 124M."""
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count / 1e3:.3g}K"


def format_memory(size: float) -> str:
    """A number of bytes, as 47GB or 0.31GB."""
    return f"{size / GIGA:.0f}GB" if size >= 10 * GIGA else f"{size / GIGA:.2f}GB"
