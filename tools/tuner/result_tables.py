"""Writes the results of a search: table.md, results.csv, layouts.svg; and makes the printed lines.

A layout may have several trials, which are short runs of train.py. A candidate is a layout with the
other options of the run and the planner's prediction.

result.ranked       the layouts that ran, fastest first
result.rows         the layouts that ran, fastest first, then the layouts that failed
"""

import csv
import io
import math
import re
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from architecture.model_stats import parameters
from costs.hardware import Machine
from tools.planner.layouts import Rejected
from tools.report import picture
from tools.tuner.search_space import Candidate
from tools.tuner.trials import Trial

BILLION = GIGA = 1e9
HEAD = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")
WORD_OF_COLUMN = re.compile(r"(tp|pp|dp|mbs)[0-9]+")  # a word of a label that has a column
# The columns of results.csv, which begin as those of the table of published rows in benchmarks/
# (so some stay empty here). A column with the name of an option has the option's value.
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
    """The trials of one layout, which are one row of the tables."""

    candidate: Candidate
    trials: list[Trial]  # the trials that ran to the end; without such a trial, the last trial
    notes: list[str]  # texts about the last failure, and the number of trials if it is above 1

    @property
    def ok(self) -> bool:
        """Whether the layout ran to the end in at least one trial.

        Then `trials` has only the trials that ran; else it has the last trial, which failed.
        """
        return self.trials[0].status == "ok"

    @property
    def seconds(self) -> float:
        """The median over the trials of their median seconds of a step; infinite if none ran."""
        if not self.ok:
            return math.inf
        return statistics.median(trial.median for trial in self.trials)

    @property
    def spread(self) -> float:
        """The slowest minus the fastest timed step of all trials, as a share of the median."""
        seconds = [step for trial in self.trials for step in trial.seconds]
        return (max(seconds) - min(seconds)) / self.seconds

    @property
    def memory(self) -> list[float]:
        """The peak bytes of each pipeline stage's fullest rank, the largest of all trials."""
        return [max(stage) for stage in zip(*(trial.peak_memory for trial in self.trials))]

    def rate(self, name: str) -> float:
        """Return a rate of the layout, scaled from its first trial to the median of all trials.

        name: tflops_model, tflops_hardware (both per rank) or tokens_per_second (of all ranks).
        """
        first_trial = self.trials[0]
        return getattr(first_trial, name) * first_trial.median / self.seconds


@dataclass(frozen=True)
class SearchResult:
    """Everything that a report is made from."""

    trials: list[Trial]
    candidates: list[Candidate]
    rejected: list[Rejected]
    machine: Machine
    ending: str  # why the search ended
    command: Callable[[Candidate], list[str]]  # returns the command that trains on a layout
    title: str

    @cached_property
    def rows(self) -> list[LayoutResult]:
        """The results of all layouts that have trials: the fastest first, failed ones last.

        A layout that ran at least once has the figures of the trials that ran.
        """
        rows = []
        for candidate in self.candidates:
            trials = [trial for trial in self.trials if trial.key == candidate.key]
            if not trials:
                continue
            ran = [trial for trial in trials if trial.status == "ok"]
            failed = [trial for trial in trials if trial.status != "ok"]
            notes = [f"{trial.status}: {trial.reason}" for trial in failed[-1:]]
            if len(ran) > 1:
                notes.append(f"{len(ran)} trials")
            rows.append(LayoutResult(candidate, ran or trials[-1:], notes))
        return sorted(rows, key=lambda row: row.seconds)

    @property
    def ranked(self) -> list[LayoutResult]:
        """The layouts that ran, fastest first."""
        return [row for row in self.rows if row.ok]


def top_line(row: LayoutResult) -> str:
    """Return a printed line with a layout and its figures; the layout must have run."""
    return (
        f"{row.candidate.label:36} {row.seconds:9.3f} s/iteration, spread {row.spread:.0%}, "
        f"{row.rate('tokens_per_second'):,.0f} tokens/s, {max(row.memory) / GIGA:.2f} GB, "
        f"predicted {row.candidate.prediction.seconds:.3f} s"
    )


def summary(result: SearchResult) -> list[str]:
    """Return lines about the number of trials, how the search ended, and the planner's error."""
    ranked = result.ranked
    failed = Counter(trial.status for trial in result.trials if trial.status != "ok")
    failures = "".join(f", {count} {status}" for status, count in sorted(failed.items()))
    lines = [
        f"{len(result.trials)} trials of {len(ranked)} layouts that ran{failures}; "
        f"{len(result.rejected)} rejected without a run.",
        result.ending[0].upper() + result.ending[1:] + ".",
    ]
    if ranked:
        ratios = [row.seconds / row.candidate.prediction.seconds for row in ranked]
        median = statistics.median(ratios)
        deviation = statistics.mean(abs(ratio / median - 1) for ratio in ratios)
        error = f"median {median:.2f}, mean deviation from it {deviation:.0%}"
        lines.append(f"Measured over predicted: {error}.")
    return lines


def data(result: SearchResult) -> dict[str, Any]:
    """Return the search as an object for `tune.py --json`: its layouts, the fastest first.

    step_seconds is null for a layout that never ran to the end; command trains on the fastest one.
    """
    layouts = []
    for row in result.rows:
        facts: dict[str, Any] = {
            "layout": row.candidate.label,
            "ranks": row.candidate.ranks,
            "step_seconds": row.seconds if row.ok else None,
            "predicted_step_seconds": row.candidate.prediction.seconds,
            "trials": len(row.trials),
            "notes": row.notes,
        }
        if row.ok:
            facts |= {"spread_fraction": row.spread, "memory_bytes_per_stage": row.memory}
            facts |= {"tokens_per_second": row.rate("tokens_per_second")}
        layouts.append(facts)
    best = result.ranked[0].candidate if result.ranked else None
    return {
        "ending": result.ending,
        "layouts": layouts,
        "rejected": len(result.rejected),
        "command": result.command(best) if best else None,
    }


# ---- table.md ------------------------------------------------------------------------------------


def markdown(result: SearchResult) -> list[str]:
    """Return the lines of table.md, the report for people.

    It has a summary, the table of layouts that were tried, the command that trains on the fastest
    one, and the rejected layouts with reasons.
    """
    text = [f"# Tuning: {result.title}", "", *summary(result), "", environment_line(result), ""]
    text += [f"| {' | '.join(HEAD)} |", "| " + " | ".join(["--:"] * 10) + " | :-- |"]
    text += ["| " + " | ".join(_markdown_row(row, result)) + " |" for row in result.rows]
    formulas = [trial.formula for trial in result.trials if trial.formula]
    formula = formulas[0] if formulas else "(none ran)"
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
    """Return the cells of a row of table.md.

    The last cell has the notes: options that have no column, then the model's shape, the dates of
    the trials and more. A layout that did not run has no figures.
    """
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
    # The words of the label that no column shows, for example "full" and "zero1".
    options = " ".join(word for word in label.split() if not WORD_OF_COLUMN.fullmatch(word))
    shape = f"h {model.hidden}, {model.heads} heads, {model.layers} layers"
    months_and_days = {trial.started[5:10] for trial in row.trials}
    dates = ", ".join(sorted(months_and_days))
    notes = [options, shape, training.precision, training.optimizer, dates, *row.notes]
    nodes = -(-row.candidate.ranks // result.machine.node)
    numbers = (layout.dp, layout.tp, layout.pp, layout.micro_batch_size, training.global_batch_size)
    text = "; ".join(note for note in notes if note).replace("|", "/")
    return [str(nodes), format_size(parameters(model)), *map(str, numbers), *measured, text]


def environment_line(result: SearchResult) -> str:
    """Return a line about the machine, versions and commit, as the newest trial has stored them.

    Without a trial that started, only the planner's machine is known.
    """
    ran = [trial for trial in result.trials if trial.cluster]
    if not ran:
        return f"Machine model: {result.machine.name}."
    newest = ran[-1]
    cluster = newest.cluster
    count = len(cluster["nodes"])
    nodes = "1 node" if count == 1 else f"{count} nodes"
    versions = ", ".join(f"{name} {version}" for name, version in newest.versions.items())
    commit = newest.commit or "none"
    return (
        f"{cluster['ranks']} ranks by {cluster['launcher']} on {nodes}, {cluster['device']}, "
        f"{cluster['backend']}, {cluster['threads_per_rank']} threads a rank; {versions}; "
        f"commit {commit[:10]}; machine model {result.machine.name}; "
        f"{time.strftime('%Y-%m-%d')}."
    )


def rejection_line(entry: Rejected) -> str:
    """Return a printed line with a rejected layout and the reason."""
    short_names = {"micro_batch_size": "mbs ", "sequence_parallel": "sp ", "layout": ""}
    words = [f"{short_names.get(name, f'{name} ')}{value}" for name, value in entry.layout.items()]
    return f"{' '.join(words)}: {entry.reason}"


# ---- results.csv ---------------------------------------------------------------------------------


def csv_text(result: SearchResult) -> str:
    """Return the text of results.csv: a line of names, then a line per layout that has trials."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="")
    writer.writeheader()
    for number, row in enumerate(result.rows, start=1):
        writer.writerow(_csv_row(row, number, result))
    return text.getvalue()


def _csv_row(row: LayoutResult, number: int, result: SearchResult) -> dict[str, object]:
    """Return the values of a row of results.csv by column; columns without a value stay empty.

    A layout that did not run has no measured values. In tables of published rows `sec_clean` has
    corrected seconds; here it is the same as `sec_per_it`.
    """
    config = row.candidate.config
    model = config.model
    layout = config.layout
    training = config.training
    options = asdict(model) | asdict(layout) | asdict(training)
    values = {name: options[name] for name in COLUMNS if name in options}
    statuses = {"ok": "ok", "oom": "OOM", "hang": "hang"}
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
        "status": statuses.get(row.trials[0].status, "fail"),
        "trials": len(row.trials),
        "predicted_sec": f"{row.candidate.prediction.seconds:.6g}",
        "note": "; ".join(row.notes),
    }
    if row.ok:
        tflops_hardware = row.rate("tflops_hardware")
        tflops_model = row.rate("tflops_model")
        values |= {
            "formula": row.trials[0].formula,
            "mem_gb": f"{max(row.memory) / GIGA:.3f}",
            "sec_per_it": f"{row.seconds:.6g}",
            "sec_clean": f"{row.seconds:.6g}",
            "tflops": f"{tflops_hardware:.6g}",
            "sec_trials": " ".join(f"{trial.median:.6g}" for trial in row.trials),
            "spread": f"{row.spread:.3f}",
            "tokens_per_second": f"{row.rate('tokens_per_second'):.6g}",
            "mfu": f"{1e12 * tflops_model / result.machine.peak:.4f}",
            "hfu": f"{1e12 * tflops_hardware / result.machine.peak:.4f}",
            "mem_gb_per_stage": " ".join(f"{stage / GIGA:.3f}" for stage in row.memory),
        }
    return values


# ---- layouts.svg ---------------------------------------------------------------------------------


def draw(result: SearchResult, path: str) -> None:
    """Write layouts.svg, a picture of the layouts that ran, to the file `path`.

    It has a point for each layout, tokens per second over the fullest rank's GB. A line joins the
    fastest layouts for each memory (`picture.front`).
    """
    points = []
    for row in result.ranked:
        points.append((max(row.memory) / GIGA, row.rate("tokens_per_second")))
    groups = {"measured": points, "front": picture.front(points)}
    picture.write(path, "GB on the fullest rank", "tokens/s", groups, result.title)


def format_number(number: float) -> str:
    """Return a number as text: four significant digits, or two decimals from 100 on."""
    return f"{number:.2f}" if number >= 100 else f"{number:.4g}"


def format_size(count: float) -> str:
    """Return a number of parameters as text, for example 181B, 1.3B or 124M."""
    if count >= 1e9:
        return f"{count / 1e9:.3g}B"
    if count >= 1e6:
        return f"{count / 1e6:.3g}M"
    return f"{count / 1e3:.3g}K"
