"""Answers `plan.py layouts`: a table of layouts, the best bet first, and why others cannot run.

    print(ranked_layouts(question).text)      # a Question as in questions.py

found_layouts.py finds the answer; here it is rendered as text, a batch file and a picture.
"""

import re
import shlex

from base.console import IS_INSTALLED
from base.errors import LayoutError, UserError
from config import schema
from costs import risk
from costs.job import Job
from costs.step_time import Prediction, predict
from tools.planner import batch_file, cost, layouts
from tools.planner.found_layouts import (
    FoundLayouts,
    OtherNetwork,
    as_data,
    find,
    has_networks,
    rampup,
)
from tools.planner.layout_commands import command, flags_text, stand_ins, train_arguments
from tools.planner.questions import BILLION, Answer, Question
from tools.report import picture
from tools.report.text_table import columns

SHOWN_RISKY = 5  # number of risky layouts that are printed
# By column, the value that tells the reader nothing: a column whose cells all have it is left out.
LEFT_OUT = {"cp": "1", "ep": "1", "ramp-up": "-"}
FIRST = (
    "ranked by 80 %, the seconds that a step keeps within in four of five runs: the best bet first"
)
NETWORK = (
    "note: s/step assumes the network bandwidth of the datasheet; 80 % and 90 % assume a third of "
    "it; give yours as --network GB/s: the busbw of all ranks by scripts/bench_allreduce.sh"
)


def ranked_layouts(question: Question) -> Answer:
    """Return ranked layouts and rejected ones with reasons, as text and as data.

    Write the batch file of --sbatch and the picture of --picture, if they were asked for.
    """
    found = find(question)
    lines = [_text(found)]
    if question.options.sbatch:
        lines.append(_batch_file(found))
    if path := question.options.picture:
        _draw(found)
        lines.append(f"written: {path}")
    return Answer("\n".join(lines), as_data(found))


def _text(found: FoundLayouts) -> str:
    """Return the answer as text: the table, risky and rejected layouts, notes, the commands."""
    question = found.question
    lines = _listed(found)
    if found.safe:
        lines += _risky_lines(found)
    elif found.risky:
        lines += _only_risky_lines(found)
    lines += ["", f"{len(found.rejected)} cannot run:"]
    lines += _reasons(found.rejected, question.options.rejected)
    lines += notes(found.safe or found.risky) + found.elsewhere
    lines += _network_lines(found)
    if found.safe:
        lines += _command_lines(found)
    return "\n".join(lines)


def _listed(found: FoundLayouts) -> list[str]:
    """Return the lines of the table of safe layouts, with a title and the number of slower ones."""
    question, safe = found.question, found.safe
    training = question.config.training
    top = question.options.top
    fitting = len(safe) + found.slower
    verb = "layout fits" if fitting == 1 else "layouts fit"
    fits = f"{fitting} {verb} on {question.gpus} GPUs of {question.machine.name}"
    risks = risk_of_fitting(question, [] if safe else found.risky)
    batch = f"global batch {training.global_batch_size}"
    lines = [f"{fits} {risks}, {batch}, {training.precision}"]
    if safe:
        lines += ranked_lines(safe[:top], question)
    slower = found.slower + max(0, len(safe) - top)
    if slower:
        lines.append(f"... and {slower} slower {'one' if slower == 1 else 'ones'}")
    if len(safe) > 1:
        lines.append(FIRST)
    return lines


def risk_of_fitting(question: Question, risky: list[layouts.Ranked]) -> str:
    """Return a text on the risk with which a layout counts as one that fits.

    risky: the layouts that fit only with a higher risk, if no other layout fits; else empty.
    """
    accepted = f"{question.options.risk:.0%}"
    if not risky:
        return f"at a risk of at most {accepted}"
    risks = sorted(line.prediction.risk for line in risky)
    between = " to ".join(dict.fromkeys(f"{risk:.0%}" for risk in (risks[0], risks[-1])))
    return f"at a risk of at most {accepted} ({len(risky)} at {between})"


def _network_lines(found: FoundLayouts) -> list[str]:
    """Return a line for each answer on other networks; networks with the same answer share it."""
    question = found.question
    kinds: dict[str, list[OtherNetwork]] = {}  # by flags, "" of the first line
    for other in found.on_networks:
        flags = "" if other.is_first else flags_text(other.line.layout, question)
        kinds.setdefault(flags, []).append(other)
    lines = []
    for flags, others in kinds.items():
        names = ", ".join(
            f"{one.network.name} ({one.network.busbw / BILLION:g} GB/s a node)" for one in others
        )
        took = ", ".join(f"{one.seconds:.2f}" for one in others)
        if not flags:
            lines.append(f"on {names}: the first line is still the best of these, {took} s")
            continue
        first = ", ".join(f"{one.first_seconds:.2f}" for one in others)
        text = f"on {names}: {flags}, {took} s, where the first takes {first} s"
        lines.append(f"{text}; --network {others[0].network.name} ranks by it")
    return lines


def _command_lines(found: FoundLayouts) -> list[str]:
    """Return the command of the first layout, and a line on the fastest one by the median.

    Further lines name what the command has that the user did not give.
    """
    question, first = found.question, found.safe[0]
    lines = []
    if fastest := found.by_median:
        lines.append(_median_line(fastest, first, question))
    line = shlex.join([*found.launcher, *command(question, first.layout)])
    return [*lines, f"the first: {line}", *stand_ins(question, first.layout)]


def _batch_file(found: FoundLayouts) -> str:
    """Write the batch file of --sbatch for the first layout, and return a line.

    Raise UserError if there is no safe layout.
    """
    question = found.question
    if question.program:
        raise UserError(
            f"--sbatch writes batch files for train.py, not for {question.program.name}"
        )
    if not found.safe:
        raise LayoutError("--sbatch: no layout fits at --risk, so there is nothing to submit")
    chosen = found.safe[0]
    longest = chosen.prediction.interval[1]
    words = train_arguments(question, chosen.layout)
    batch_file.write(question.options.sbatch, question.machine, question.gpus, longest, words)
    where = shlex.quote(question.options.sbatch)
    what = flags_text(chosen.layout, question)
    folder = "in the folder of the corpus" if IS_INSTALLED else "in the repository"
    return f"written: {where}, for {what}; {folder}: sbatch {where}"


def _draw(found: FoundLayouts) -> None:
    """Write a picture of layouts, tokens per second over memory, to the file of --picture.

    It shows the layouts that fit, the fastest of them for each memory (the front), and the layouts
    that were rejected because they do not fit, which are predicted here.
    """
    question = found.question
    run = question.config
    fits = [_point(line.prediction) for line in [*found.safe, *found.risky]]
    over = []
    for entry in found.rejected:
        if entry.whole and entry.reason.startswith("out of memory"):
            prediction = predict(Job(run.model, entry.whole, run.training, question.machine))
            over.append(_point(prediction))
    groups = {"does not fit": over, "fits": fits, "front": picture.front(fits)}
    title = f"{question.gpus} GPUs of {question.machine.name}"
    picture.write(question.options.picture, "GB on the fullest GPU", "tokens/s", groups, title)


def _point(prediction: Prediction) -> picture.Point:
    """Return the point of a layout in the picture: (GB on the fullest GPU, tokens per second)."""
    fullest = max(stage.total for stage in prediction.memory)
    return fullest / BILLION, prediction.tokens_per_second


def _median_line(fastest: layouts.Ranked, first: layouts.Ranked, question: Question) -> str:
    """Return a line on the layout with the least predicted seconds, and why it is not the first."""
    prediction = fastest.prediction
    less = beside(prediction.seconds / first.prediction.seconds)
    more = beside(prediction.quantile / first.prediction.quantile)
    why = f": {', '.join(prediction.far)}" if prediction.far else ""
    return (
        f"the fastest by the median, {flags_text(fastest.layout, question)}: "
        f"{prediction.seconds:.2f} s, {less} than the first, but one run in five takes longer than "
        f"{prediction.quantile:.2f} s, {more}{why}"
    )


def beside(ratio: float) -> str:
    """Return a ratio of seconds as text: 1.016 is "1.6% more", 0.984 "1.6% less"."""
    return f"{abs(ratio - 1):.1%} {'more' if ratio >= 1 else 'less'}"


def _risky_lines(found: FoundLayouts) -> list[str]:
    """Return lines on the risky layouts that are faster than every safe layout.

    A line says by how many GB the layout exceeds the memory at which it would be safe, and names a
    safe layout with the same tp, pp and micro-batch size if there is one.
    """
    question, safe, risky = found.question, found.safe, found.risky
    first_safe = safe[0].prediction.quantile
    faster = [line for line in risky if line.prediction.quantile < first_safe]
    if not risky:
        return []
    accepted = question.options.risk
    machine = question.machine
    lines = [
        "",
        f"{len(risky)} more fit with a risk above {accepted:.0%}, {len(faster)} of them faster:",
    ]
    allowed = risk.safe_bytes(machine, accepted)
    for risky_line in faster[:SHOWN_RISKY]:
        layout = risky_line.layout
        p = risky_line.prediction
        needed = machine.memory - p.margin  # the predicted bytes of the fullest GPU
        over = (needed - allowed) / BILLION
        same_place = [line for line in safe if _place(line.layout) == _place(layout)]
        advice = ""
        if same_place:
            advice = f"; safe with {flags_text(same_place[0].layout, question)}"
        lines.append(
            f"  {flags_text(layout, question)}: {p.seconds:.2f} s, risk {p.risk:.0%}, "
            f"safe with {over:.1f} GB less{advice}"
        )
    return lines


def _only_risky_lines(found: FoundLayouts) -> list[str]:
    """Return the table of risky layouts where no layout is safe, and the commands of the first."""
    question, risky = found.question, found.risky
    lines = ranked_lines(risky[: question.options.top], question)
    lines.append("none of them is recommended; their commands:")
    for line in risky[:SHOWN_RISKY]:
        text = shlex.join([*found.launcher, *command(question, line.layout)])
        lines.append(f"  risk {line.prediction.risk:.0%}: {text}")
    return lines + stand_ins(question, risky[0].layout)


def _place(layout: schema.Layout) -> tuple[int, int, int]:
    """Return a layout's tp, pp and micro-batch size."""
    return layout.tp, layout.pp, layout.micro_batch_size


def ranked_lines(ranked: list[layouts.Ranked], question: Question) -> list[str]:
    """Return the lines of a table of layouts, with a head line.

    A column is left out if it tells nothing: for example cp if all layouts have cp 1 (LEFT_OUT).
    """
    rows = [_cells(line, question) for line in ranked]
    heads = []
    for name in rows[0]:
        if any(row[name] != LEFT_OUT.get(name) for row in rows):
            heads.append(name)
    return columns([heads, *([row[name] for name in heads] for row in rows)])


def _cells(line: layouts.Ranked, question: Question) -> dict[str, str]:
    """Return a layout's row of the table: the printed cells by the names of their columns."""
    layout = line.layout
    p = line.prediction
    rates = cost.rates_of(question.options, question.machine)
    run = question.config
    job = Job(run.model, layout, run.training, question.machine)
    axes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "dp": layout.dp}
    axes |= {"ep": int(job.ep), "mbs": layout.micro_batch_size}
    schedule = layout.schedule
    if layout.schedule == "interleaved":
        schedule += f" {layout.stages_per_rank}"
    upper_end = p.interval[1]
    return {name: str(size) for name, size in axes.items()} | {
        "recompute": f"{layout.recompute} {layout.recompute_layers or ''}".rstrip(),
        "schedule": schedule if layout.pp > 1 else "-",
        "sp": "sp" if layout.sequence_parallel else "-",
        "zero": str(layout.zero),
        "s/step": f"{p.seconds:.2f}",
        # The seconds that a step keeps within in 80 of 100 runs, by which the lines are ranked.
        "80 %": f"{p.quantile:.2f}",
        # How much longer a step may take: the upper end of the interval of 90 of 100 runs.
        "90 %": f"+{upper_end / p.seconds - 1:.0%}",
        "tokens/s": f"{p.tokens_per_second:,.0f}",
        "MFU": f"{p.mfu:.1%}",
        "bubble": f"{p.bubble:.1%}",
        "GB": f"{max(stage.total for stage in p.memory) / BILLION:.1f}",
        "risk": f"{p.risk:.1%}",
        **rates.cells(question.gpus, p.tokens_per_second),
        # The cell has only "batch 48" of the text "batch 48 does not divide by 32".
        "ramp-up": rampup(line, question).partition(" does")[0],
    }


def _reasons(rejected: list[layouts.Rejected], every: bool) -> list[str]:
    """Return the lines with the reasons of rejected layouts.

    every: a line for each layout. Otherwise layouts whose reasons differ only in numbers share a
    line; its example is the layout that needs the least memory.
    """
    if every:
        lines = []
        for entry in rejected:
            values = " ".join(f"{name}={value}" for name, value in entry.layout.items())
            lines.append(f"  {values}: {entry.reason}")
        return lines
    kinds: dict[str, list[str]] = {}  # by a reason's text without numbers: all reasons of this kind
    for entry in rejected:
        kinds.setdefault(re.sub(r"[\d.]+", "", entry.reason), []).append(entry.reason)
    lines = [f"  {len(reasons):4}  {min(reasons, key=_needed)}" for reasons in kinds.values()]
    return [*lines, "  (one example of each kind; --rejected shows all)"]


def _needed(reason: str) -> list[float]:
    """Return the gigabytes after "needs" in a reason, as a key by which reasons are compared.

    It is a list with one number, or empty for a reason about something else.
    """
    return [float(number) for number in re.findall(r"needs ([\d.]+) GB", reason)]


def notes(ranked: list[layouts.Ranked]) -> list[str]:
    """Return notes on ranked layouts: warnings about the first, what of it is far, the network."""
    lines = [f"note: {text}" for line in ranked[:1] for text in line.prediction.warnings]
    for line in ranked[:1]:
        if line.prediction.far:
            what = ", ".join(line.prediction.far)
            lines.append(f"note: the first line is far from measured runs, hence its 80 %: {what}")
    if has_networks(ranked):
        lines.append(NETWORK)
    return lines
