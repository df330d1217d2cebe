"""The results of a search: table.md, results.csv, layouts.svg, and the lines that are printed.

result.ranked       the layouts that ran, fastest first
result.rows         the same, then those that failed
"""

import csv
import io
import math
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property

from config.model_stats import parameters
from planner import picture
from planner.hardware import Machine
from planner.layouts import Rejected
from tuner.search_space import Candidate
from tuner.trials import Trial

BILLION = GIGA = 1e9
HEAD = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")
# Columns of results.csv; those that have an option's name hold that option.
# fmt: off
COLUMNS = (
    "row_id", "section", "gpu", "gpus", "size_b", "layers", "hidden", "heads", "ffn", "seq",
    "vocab", "dp", "tp", "pp", "mbs", "gbs", "zero_stage", "recompute", "precision", "optimizer",
    "status", "mem_gb", "sec_per_it", "tflops", "dp_clean", "gbs_clean", "sec_clean",
    "sec_derived", "formula", "dup_of", "quality", "note",
    "kv_heads", "activation", "sequence_parallel", "schedule", "partition",
    "trials", "sec_trials", "spread", "tokens_per_second", "mfu", "hfu", "predicted_sec",
    "mem_gb_per_stage",
)
# fmt: on


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
        """Median over the trials' medians; infinite if none ran."""
        return statistics.median(t.median for t in self.trials) if self.ok else math.inf

    @property
    def spread(self) -> float:
        """Slowest minus fastest timed step of all trials, as a share of the median."""
        steps = [s for t in self.trials for s in t.seconds]
        return (max(steps) - min(steps)) / self.seconds

    @property
    def memory(self) -> list[float]:
        """Bytes of the fullest rank of each stage, the largest of all trials."""
        return [max(stage) for stage in zip(*(t.peak_memory for t in self.trials))]

    def rate(self, name: str) -> float:
        """tflops_model, tflops_hardware or tokens_per_second at the median."""
        first = self.trials[0]
        return getattr(first, name) * first.median / self.seconds


@dataclass(frozen=True)
class SearchResult:
    """Everything that a report is made from."""

    trials: list[Trial]
    candidates: list[Candidate]
    rejected: list[Rejected]
    machine: Machine
    ending: str  # why the search ended
    command: Callable[[Candidate], list[str]]  # what to type to train on that layout
    title: str

    @cached_property
    def rows(self) -> list[LayoutResult]:
        """One row for each layout that has trials: fastest first, failed ones last."""
        found = []
        for candidate in self.candidates:
            own = [t for t in self.trials if t.key == candidate.key]
            ran = [t for t in own if t.status == "ok"]
            notes = [f"{t.status}: {t.reason}" for t in own if t.status != "ok"][-1:]
            notes += [f"{len(ran)} trials"] * (len(ran) > 1)
            if own:
                found.append(LayoutResult(candidate, ran or own[-1:], notes))
        return sorted(found, key=lambda row: row.seconds)

    @property
    def ranked(self) -> list[LayoutResult]:
        """The layouts that ran, fastest first."""
        return [row for row in self.rows if row.ok]


def top_line(row: LayoutResult) -> str:
    """A layout and its figures in one line."""
    return (
        f"{row.candidate.label:36} {row.seconds:9.3f} s/iteration, spread {row.spread:.0%}, "
        f"{row.rate('tokens_per_second'):,.0f} tokens/s, {max(row.memory) / GIGA:.2f} GB, "
        f"predicted {row.candidate.prediction.seconds:.3f} s"
    )


def summary(result: SearchResult) -> list[str]:
    """Return what was measured, the planner's error, and whether the machine's speed changed."""
    ranked = result.ranked
    kinds = Counter(t.status for t in result.trials if t.status != "ok")
    failures = "".join(f", {n} {status}" for status, n in sorted(kinds.items()))
    lines = [
        f"{len(result.trials)} trials of {len(ranked)} layouts that ran{failures}; "
        f"{len(result.rejected)} rejected without a run.",
        result.ending[0].upper() + result.ending[1:] + ".",
    ]
    if ranked:
        ratios = [row.seconds / row.candidate.prediction.seconds for row in ranked]
        middle = statistics.median(ratios)
        rest = statistics.mean(abs(ratio / middle - 1) for ratio in ratios)
        error = f"median {middle:.2f}, mean deviation from it {rest:.0%}"
        lines.append(f"Measured over predicted: {error}.")
    rehearsed = [t for t in result.trials if t.rehearsal]
    if rehearsed:
        took = sum(t.rehearsal for t in rehearsed)
        bad = sum(not t.command for t in rehearsed)
        lines.append(
            f"{len(rehearsed)} layouts were rehearsed on fake GPUs before their first trial, "
            f"{took:.0f} s in all; {bad} of them rejected."
        )
    return lines


# ---- table.md ------------------------------------------------------------------------------------


def markdown(result: SearchResult) -> list[str]:
    """The table of layouts, fastest first and failed ones last, and what was rejected."""
    text = [f"# Tuning: {result.title}", "", *summary(result), "", environment_line(result), ""]
    text += [f"| {' | '.join(HEAD)} |", "| " + " | ".join(["--:"] * 10) + " | :-- |"]
    text += ["| " + " | ".join(_markdown_row(row, result)) + " |" for row in result.rows]
    formula = next((t.formula for t in result.trials if t.formula), "(none ran)")
    text += ["", "* Mem: peak of the fullest rank. TFLOPs: hardware TFLOPs per rank by the formula"]
    text += [f"  {formula}, recomputation counted. Sec/it: median of timed steps."]
    if result.ranked:
        best = result.ranked[0].candidate
        text += ["", f"Fastest: {best.label}.", "", "    " + shlex.join(result.command(best))]
    if result.rejected:
        text += ["", f"## Rejected without a run: {len(result.rejected)}", ""]
        text += [f"* {rejection_line(entry)}" for entry in result.rejected]
    return text


def _markdown_row(row: LayoutResult, result: SearchResult) -> list[str]:
    """The cells of one row; its notes begin with what no column shows of the layout."""
    config = row.candidate.config
    label = row.candidate.label
    model = config.model
    layout = config.layout
    training = config.training
    measured = ["", "", ""]
    if row.ok:
        rate = format_number(row.rate("tflops_hardware"))
        memory = max(row.memory) / GIGA
        size = f"{memory:.0f}GB" if memory >= 10 else f"{memory:.2f}GB"
        measured = [size, format_number(row.seconds), rate]
    options = " ".join(label.split()[4:])
    shape = f"h {model.hidden}, {model.heads} heads, {model.layers} layers"
    dates = ", ".join(sorted({t.started[5:10] for t in row.trials}))
    notes = [options, shape, training.precision, training.optimizer, dates, *row.notes]
    nodes = -(-row.candidate.ranks // result.machine.node)
    numbers = (layout.dp, layout.tp, layout.pp, layout.micro_batch_size, training.global_batch_size)
    text = "; ".join(note for note in notes if note).replace("|", "/")
    return [str(nodes), format_size(parameters(model)), *map(str, numbers), *measured, text]


def environment_line(result: SearchResult) -> str:
    """Machine, versions and commit of the trials."""
    ran = next((t for t in reversed(result.trials) if t.cluster), None)
    if ran is None:
        return f"Machine model: {result.machine.name}."
    c = ran.cluster
    count = len(c["nodes"])
    versions = ", ".join(f"{name} {version}" for name, version in ran.versions.items())
    return (
        f"{c['ranks']} ranks by {c['launcher']} on {count} node{'s' * (count > 1)}, {c['device']}, "
        f"{c['backend']}, {c['threads_per_rank']} threads a rank; {versions}; "
        f"commit {(ran.commit or 'none')[:10]}; machine model {result.machine.name}; "
        f"{time.strftime('%Y-%m-%d')}."
    )


def rejection_line(entry: Rejected) -> str:
    """A rejected layout and why, in one line."""
    names = {"micro_batch_size": "mbs ", "sequence_parallel": "sp ", "layout": ""}
    place = [f"{names.get(name, name + ' ')}{value}" for name, value in entry.layout.items()]
    return f"{' '.join(place)}: {entry.reason}"


# ---- results.csv ---------------------------------------------------------------------------------


def csv_text(result: SearchResult) -> str:
    """The text of results.csv."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="")
    writer.writeheader()
    for number, row in enumerate(result.rows, start=1):
        writer.writerow(_csv_row(row, number, result))
    return text.getvalue()


def _csv_row(row: LayoutResult, number: int, result: SearchResult) -> dict[str, object]:
    """The columns of one row that are not empty."""
    config = row.candidate.config
    model = config.model
    layout = config.layout
    training = config.training
    options = asdict(model) | asdict(layout) | asdict(training)
    values = {name: options[name] for name in COLUMNS if name in options}
    values |= {
        "row_id": f"tune-{number}",
        "section": f"tune {result.title}",
        "gpu": result.machine.name,
        "gpus": row.candidate.ranks,
        "size_b": f"{parameters(model) / BILLION:.6g}",
        "ffn": model.ffn_hidden,
        "seq": model.seq_length,
        "vocab": model.vocab_size,
        "mbs": layout.micro_batch_size,
        "gbs": training.global_batch_size,
        "zero_stage": layout.zero,
        "status": {"ok": "ok", "oom": "OOM", "hang": "hang"}.get(row.trials[0].status, "fail"),
        "trials": len(row.trials),
        "predicted_sec": f"{row.candidate.prediction.seconds:.6g}",
        "note": "; ".join(row.notes),
    }
    if row.ok:
        hardware = row.rate("tflops_hardware")
        rate = row.rate("tflops_model")
        values |= {
            "formula": row.trials[0].formula,
            "mem_gb": f"{max(row.memory) / GIGA:.3f}",
            "sec_per_it": f"{row.seconds:.6g}",
            "sec_clean": f"{row.seconds:.6g}",
            "tflops": f"{hardware:.6g}",
            "sec_trials": " ".join(f"{trial.median:.6g}" for trial in row.trials),
            "spread": f"{row.spread:.3f}",
            "tokens_per_second": f"{row.rate('tokens_per_second'):.6g}",
            "mfu": f"{1e12 * rate / result.machine.peak:.4f}",
            "hfu": f"{1e12 * hardware / result.machine.peak:.4f}",
            "mem_gb_per_stage": " ".join(f"{stage / GIGA:.3f}" for stage in row.memory),
        }
    return values


# ---- layouts.svg ---------------------------------------------------------------------------------


def draw(result: SearchResult, path: str) -> None:
    """Write tokens per second over the memory of the fullest rank, of the layouts that ran."""
    points = []
    for row in result.ranked:
        points.append((max(row.memory) / GIGA, row.rate("tokens_per_second")))
    groups = {"measured": points, "front": picture.front(points)}
    picture.write(path, "GB on the fullest rank", "tokens/s", groups, result.title)


def format_number(number: float) -> str:
    """Four significant digits; two decimals from 100 on."""
    return f"{number:.2f}" if number >= 100 else f"{number:.4g}"


def format_size(count: float) -> str:
    """A number of parameters, as 181B, 1.3B, 124M."""
    unit, name = (1e9, "B") if count >= 1e9 else (1e6, "M") if count >= 1e6 else (1e3, "K")
    return f"{count / unit:.3g}{name}"
