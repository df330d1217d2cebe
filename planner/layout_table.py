"""The question `layouts`: all of them by seconds per step, and why others cannot run.

print(ranked_layouts(question).text)      # a Question as in planner/questions.py
"""

import math
import re
import shlex
from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

from config import schema
from config.command_line import to_words
from config.messages import UserError
from config.schema import Config
from planner import cost, layouts, model_sizes, picture, risk
from planner.job import Job
from planner.questions import BILLION, Answer, Question, Questions, flags
from planner.step_time import Prediction, predict

STEPS = 1000  # of the command that is printed, if no length is given
SHOWN_RISKY = 5
# Two layouts that are less apart the plan may well confuse: it is 4 % off in the mean on machines
# that it was fitted on (docs/planning.md).
TOLD_APART = 1.06
WIDTH = 120  # of a table, in columns of a terminal
TEXTS = ("recompute", "schedule", "ramp-up")  # columns that begin at the left
LEFT_OUT = {"cp": "1", "ep": "1", "ramp-up": "-"}  # columns that hold nothing else are left out
FIRST = "the first line is the fastest; a later one may have a faster schedule; --json: all flags"
NETWORK = (
    "note: ranked at the rate of the network's datasheet, and 90 % reaches to a quarter of it: "
    "--network GB/s gives yours, the busbw of all ranks by scripts/bench_allreduce.sh"
)


def ranked_layouts(question: Question) -> Answer:
    """All layouts ranked, all rejected ones with their reason."""
    options = question.options
    every = options.json or options.rehearse or options.picture
    found = question.rank(math.inf if every else options.top, plain=True)
    ranked = [one for one in found.ranked if one.prediction.risk <= options.risk]
    risky = [one for one in found.ranked if one.prediction.risk > options.risk]
    data = {
        "gpus": question.gpus,
        "machine": question.machine.name,
        "global_batch_size": question.config.training.global_batch_size,
        "ranked": [_as_data(one, question) for one in ranked],
        "risky": [_as_data(one, question) for one in risky],
        "rejected": [one.layout | {"reason": one.reason} for one in found.rejected],
    }
    lines = _listed(question, found, ranked)
    lines += _risky_lines(ranked, risky, question)
    lines += ["", f"{len(found.rejected)} cannot run:"]
    lines += _reasons(found.rejected, options.rejected)
    lines += notes(ranked[:1])
    if not found.ranked:
        lines += where_it_fits(question, found.rejected)
    if ranked and not question.machine.software.fp8:  # which train.py does not have
        more, commands = _commands(question, ranked[0], found.plain)
        data |= more
        lines += commands
    if options.picture:
        _draw(question, found)
        lines.append(f"written: {options.picture}")
    return Answer("\n".join(lines), data)


def _listed(question: Question, found: layouts.Answer, ranked: list[layouts.Ranked]) -> list[str]:
    """The table, under a line that says of what, and how many are not in it."""
    training, top = question.config.training, question.options.top
    fitting = len(found.ranked) + found.slower
    lines = [
        f"{fitting} layouts fit on {question.gpus} GPUs of {question.machine.name}, "
        f"global batch {training.global_batch_size}, {training.precision}"
    ]
    if ranked:
        lines += ranked_lines(ranked[:top], question)
    slower = found.slower + max(0, len(ranked) - top)
    if slower:
        lines.append(f"... and {slower} slower ones")
    if len(ranked) > 1:
        lines.append(FIRST)
    return lines


def _commands(
    question: Question, first: layouts.Ranked, plain: list[layouts.Ranked]
) -> tuple[dict[str, Any], list[str]]:
    """Return the commands for the first layout, and for a plain one if it is nearly as fast."""
    launcher, words = _launcher(question), _command(question, first.layout)
    data: dict[str, Any] = {"launcher": launcher, "command": words, "recommended": None}
    lines = []
    if simple := _recommended(question, first, plain):
        data["recommended"] = _as_data(simple, question)
        command = shlex.join([*launcher, *_command(question, simple.layout)])
        lines += [_given_up(simple, first), f"recommended: {command}"]
    lines.append(f"the first: {shlex.join([*launcher, *words])}")
    return data, lines + _stand_ins(question)


def _draw(question: Question, found: layouts.Answer) -> None:
    """Tokens per second over memory: of what fits, the front of it, and of what does not fit."""
    run = question.config
    fits = [_point(one.prediction) for one in found.ranked]
    over = []
    for entry in found.rejected:
        if entry.whole and entry.reason.startswith("out of memory"):
            over.append(_point(predict(run.model, entry.whole, run.training, question.machine)))
    groups = {"does not fit": over, "fits": fits, "front": picture.front(fits)}
    title = f"{question.gpus} GPUs of {question.machine.name}"
    picture.write(question.options.picture, "GB on the fullest GPU", "tokens/s", groups, title)


def _point(prediction: Prediction) -> picture.Point:
    fullest = max(stage.total for stage in prediction.memory)
    return fullest / BILLION, prediction.tokens_per_second


def _recommended(
    question: Question, first: layouts.Ranked, plain: list[layouts.Ranked]
) -> layouts.Ranked | None:
    """The fastest layout of the kind that measured runs have, if the first is of another kind and
    too little faster for the plan to tell them apart.
    """
    safe = [one for one in plain if one.prediction.risk <= question.options.risk]
    if not safe or safe[0].prediction.seconds > first.prediction.seconds * TOLD_APART:
        return None
    return safe[0] if safe[0].layout != first.layout else None


def _given_up(simple: layouts.Ranked, first: layouts.Ranked) -> str:
    """Return what the recommended layout is, and what it costs."""
    seconds = simple.prediction.seconds
    more = seconds / first.prediction.seconds - 1
    return (
        f"{_words(simple.layout)}: {seconds:.2f} s, {more:.1%} more than the first, but of a kind "
        "that was measured: the plan does not tell them apart"
    )


def where_it_fits(question: Question, rejected: list[layouts.Rejected]) -> list[str]:
    """A sentence on what would hold the model, if memory is why no layout is ranked."""
    run, machine = question.config, question.machine
    if not any(one.reason.startswith("out of memory") for one in rejected):
        return []
    allowed = risk.safe_bytes(machine, question.options.risk)
    about = run.model, run.training, replace(machine, memory=allowed)
    if found := model_sizes.leanest(*about, question.gpus):
        return [f"not as it was given, but {' '.join(flags(found))} fits"]
    try:
        nodes, found = model_sizes.smallest(*about)
    except UserError as error:
        return [str(error)]
    return [f"{nodes} nodes of {machine.node} hold it, with {' '.join(flags(found))}"]


def _command(question: Question, layout: schema.Layout) -> list[str]:
    """Return the words after the launcher that train on a layout, with --model as it was given.

    It starts as it is: data and length that were not given are synthetic and STEPS.
    """
    run, name = question.config, question.options.model
    run = replace(run, layout=layout)
    words = [word for group in schema.GROUPS for word in to_words(getattr(run, group), "dp")]
    if name:
        shape, given = to_words(run.model), question.given
        own = ["--model", name, *to_words(run.model, always=given, only=given)]
        words[: len(shape)] = own
    if run.data.data == ("synthetic",):
        words += ["--data", "synthetic"]
    if not _has_length(run):
        words += ["--steps", str(STEPS)]
    return ["python", "train.py", *words]


def _launcher(question: Question) -> list[str]:
    """Return the words that start the ranks: mpirun on one node, srun on several."""
    if question.gpus == 1:
        return []
    if question.gpus <= question.machine.node:
        return ["mpirun", "-n", str(question.gpus)]
    return ["srun", "--mpi=pmi2", "-n", str(question.gpus)]


def _has_length(run: Config) -> bool:
    return bool(run.training.steps or run.training.train_samples)


def _stand_ins(question: Question) -> list[str]:
    """A line on what a command of `_command` has in the place of options that were not given."""
    run, missing = question.config, []
    if run.data.data == ("synthetic",):
        missing.append("--data synthetic is random tokens: give the prefix of your corpus")
    if not _has_length(run):
        missing.append(f"--steps {STEPS} is an example: give your length")
    return [f"  {'; '.join(missing)}"] if missing else []


def _as_data(found: layouts.Ranked, question: Question) -> dict[str, Any]:
    told: dict[str, Any] = {"rampup": found.rampup, "flags": flags(found.layout)}
    rates = cost.rates_of(question.options, question.machine)
    told |= rates.per_billion(question.gpus, found.prediction.tokens_per_second)
    return asdict(found.layout) | told | asdict(found.prediction)


def _risky_lines(
    safe: list[layouts.Ranked], risky: list[layouts.Ranked], question: Question
) -> list[str]:
    """The layouts that are faster than the fastest safe one, and what would make them safe."""
    best = safe[0].prediction.seconds if safe else math.inf
    faster = [r for r in risky if r.prediction.seconds < best]
    if not risky:
        return []
    accepted, machine = question.options.risk, question.machine
    lines = [
        "",
        f"{len(risky)} more fit with a risk above {accepted:.0%}, {len(faster)} of them faster:",
    ]
    allowed = risk.safe_bytes(machine, accepted)
    for one in faster[:SHOWN_RISKY]:
        at, p = one.layout, one.prediction
        over = (machine.memory - p.margin - allowed) / BILLION
        alike = [r for r in safe if _place(r.layout) == _place(at)]
        way = f"; safe with {_words(alike[0].layout)}" if alike else ""
        lines.append(
            f"  {_words(at)}: {p.seconds:.2f} s, risk {p.risk:.0%}, "
            f"safe with {over:.1f} GB less{way}"
        )
    return lines


def _place(at: schema.Layout) -> tuple[int, int, int]:
    return at.tp, at.pp, at.micro_batch_size


def _words(at: schema.Layout) -> str:
    return " ".join(flags(at)) or "(train.py's defaults)"


def ranked_lines(ranked: list[layouts.Ranked], question: Question) -> list[str]:
    """The table of some layouts, its columns as wide as what they hold."""
    rows = [_cells(one, question) for one in ranked]
    heads = []
    for name in rows[0]:
        if any(row[name] != LEFT_OUT.get(name) for row in rows):
            heads.append(name)
    return columns([heads, *([row[name] for name in heads] for row in rows)])


def columns(rows: list[list[str]], texts: Collection[str] = TEXTS) -> list[str]:
    """Lines with the cells of `rows`; the first row is the head. Columns in `texts` begin at the
    left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = "  " if sum(widths) + 2 * len(widths) <= WIDTH else " "
    lines = []
    for row in rows:
        line = ""
        for name, cell, width in zip(rows[0], row, widths, strict=True):
            line += gap + (cell.ljust(width) if name in texts else cell.rjust(width))
        lines.append(line.rstrip())
    return lines


def _cells(found: layouts.Ranked, question: Question) -> dict[str, str]:
    """A line of the table, by the heads of its columns."""
    at, p = found.layout, found.prediction
    rates = cost.rates_of(question.options, question.machine)
    run = question.config
    job = Job(run.model, at, run.training, question.machine)
    axes = {"tp": at.tp, "pp": at.pp, "cp": at.cp, "dp": at.dp}
    axes |= {"ep": int(job.ep), "mbs": at.micro_batch_size}
    several = f" {at.stages_per_rank}" if at.schedule == "interleaved" else ""
    schedule = f"{at.schedule}{several}{' vocab' * bool(at.vocab_pp)}"
    return {name: str(size) for name, size in axes.items()} | {
        "recompute": f"{at.recompute} {at.recompute_layers or ''}".rstrip(),
        "schedule": schedule if at.pp > 1 else "-",
        "sp": "sp" if at.sequence_parallel else "-",
        "zero": str(at.zero),
        "s/step": f"{p.seconds:.2f}",
        "90 %": f"+{p.interval[1] / p.seconds - 1:.0%}",  # how far its upper end is above
        "tokens/s": f"{p.tokens_per_second:,.0f}",
        "MFU": f"{p.mfu:.1%}",
        "bubble": f"{p.bubble:.1%}",
        "GB": f"{max(stage.total for stage in p.memory) / BILLION:.1f}",
        "risk": f"{p.risk:.1%}",
        **rates.cells(question.gpus, p.tokens_per_second),
        "ramp-up": found.rampup.partition(" does")[0],  # or the first batch that does not divide
    }


def _reasons(rejected: list[layouts.Rejected], every: bool) -> list[str]:
    """All of them, or an example of each kind, of too much memory the one that needs least."""
    if every:
        lines = []
        for one in rejected:
            values = " ".join(f"{name}={value}" for name, value in one.layout.items())
            lines.append(f"  {values}: {one.reason}")
        return lines
    kinds: dict[str, list[str]] = {}
    for one in rejected:
        kinds.setdefault(re.sub(r"[\d.]+", "", one.reason), []).append(one.reason)
    lines = [f"  {len(reasons):4}  {min(reasons, key=_needed)}" for reasons in kinds.values()]
    return [*lines, "  (one example of each kind; --rejected shows all)"]


def _needed(reason: str) -> list[float]:
    """The gigabytes that a reason names."""
    return [float(number) for number in re.findall(r"needs ([\d.]+) GB", reason)]


def notes(ranked: list[layouts.Ranked]) -> list[str]:
    told = [f"note: {text}" for r in ranked for text in r.prediction.warnings]
    return told + [NETWORK] * any(r.prediction.at_networks for r in ranked)


QUESTIONS: Questions = {
    "layouts": (ranked_layouts, "all layouts by seconds per step, and why others cannot run"),
}
