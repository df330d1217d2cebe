"""Answers `plan.py layouts`: a table of layouts by seconds per step, and why others cannot run.

print(ranked_layouts(question).text)      # a Question as in tools/planner/questions.py

A question has the options, the run's config, the machine and the number of GPUs. A layout is safe
if its risk, the probability of running out of memory, is at most --risk; else it is risky. A layout
is plain if it is of the kind that real runs have measured (1F1B, without cp). In
code, a `line` is a layout with its prediction (layouts.Ranked), and a place is its tp, pp and
micro-batch size.
"""

import math
import re
import shlex
from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

from base.errors import UserError
from config import schema
from config.command_line import to_words
from config.schema import Config
from config.timeline import Timeline
from costs import hardware, risk
from costs.job import Job
from costs.step_time import Prediction, at_other_network, predict
from tools.planner import batch_file, cost, layouts, picture
from tools.planner.questions import BILLION, MOST_SHARDED, Answer, Question, flags, is_unmeasured

PMI = "--mpi=pmi2 starts MPICH and its kin; Open MPI needs --launch 'srun --mpi=pmix -n {ranks}'"
STEPS = 1000  # the value of --steps in the printed command, if the user gives no length of the run
SHOWN_RISKY = 5  # number of risky layouts that are printed
# If the predicted times of two layouts differ by less than this factor, either may be the faster:
# predictions are 4 % off in the mean on machines on which they were fitted (docs/planning.md).
TOLD_APART = 1.06
WIDTH = 120  # width of a table that fits in a terminal, in characters
TEXTS = ("recompute", "schedule", "ramp-up")  # columns that are aligned to the left
# By column, the value that tells the reader nothing: a column whose cells all have it is left out.
LEFT_OUT = {"cp": "1", "ep": "1", "s/slow": "-", "ramp-up": "-"}
FIRST = "the first line is the fastest; a later one may have a faster schedule; --json: all flags"
NETWORK = (
    "note: s/step assumes the network bandwidth of the datasheet; s/slow, which ranks the lines, "
    "and 90 % assume a quarter of it; give yours as --network GB/s: the busbw of all ranks by "
    "scripts/bench_allreduce.sh"
)
UNMEASURED = (
    f"note: no measured row has --zero 3 over more than {MOST_SHARDED} ranks: such lines come "
    "after all others that are within their interval"
)
# Without --network one line says which layout is the fastest at this rate: bytes/s out of a node
# that has a single adapter of 200 Gb/s.
ONE_ADAPTER = 25e9


def ranked_layouts(question: Question) -> Answer:
    """Return the text and the data of the answer: ranked layouts, and rejected ones with reasons.

    All layouts are ranked only for --json and --picture, else --top layouts.
    """
    options = question.options
    needs_all = options.json or options.picture
    most = math.inf if needs_all else options.top
    answer = question.rank(most, plain=True)
    safe = [line for line in answer.ranked if line.prediction.risk <= options.risk]
    risky = [line for line in answer.ranked if line.prediction.risk > options.risk]
    data = {
        "gpus": question.gpus,
        "machine": question.machine.name,
        "global_batch_size": question.config.training.global_batch_size,
        "ranked": [_as_data(line, question) for line in safe],
        "risky": [_as_data(line, question) for line in risky],
        "rejected": [entry.layout | {"reason": entry.reason} for entry in answer.rejected],
    }
    lines = _listed(question, answer, safe, risky)
    if safe:
        lines += _risky_lines(safe, risky, question)
    elif risky:
        lines += _only_risky_lines(risky, question)
    lines += ["", f"{len(answer.rejected)} cannot run:"]
    lines += _reasons(answer.rejected, options.rejected)
    lines += notes(safe or risky)
    if not safe:
        lines += where_it_fits(question, answer)
    data["at_one_adapter"] = None
    if safe and (at_one_adapter := _at_one_adapter(question, safe)):
        data["at_one_adapter"], line = at_one_adapter
        lines.append(line)
    if safe:
        command_data, command_lines = _commands(question, safe[0], answer.plain)
        data |= command_data
        lines += command_lines
    if options.sbatch:
        lines.append(_batch_file(question, safe, answer.plain))
    if options.picture:
        _draw(question, answer)
        lines.append(f"written: {options.picture}")
    return Answer("\n".join(lines), data)


def _listed(
    question: Question,
    answer: layouts.Ranking,
    safe: list[layouts.Ranked],
    risky: list[layouts.Ranked],
) -> list[str]:
    """Return the lines of the table of safe layouts, with a title and the number of slower ones.

    answer: the planner's answer; its layouts that fit and were not ranked count as slower.
    """
    training = question.config.training
    top = question.options.top
    fitting = len(safe) + answer.slower
    verb = "layout fits" if fitting == 1 else "layouts fit"
    fits = f"{fitting} {verb} on {question.gpus} GPUs of {question.machine.name}"
    risks = risk_of_fitting(question, [] if safe else risky)
    batch = f"global batch {training.global_batch_size}"
    lines = [f"{fits} {risks}, {batch}, {training.precision}"]
    if safe:
        lines += ranked_lines(safe[:top], question)
    slower = answer.slower + max(0, len(safe) - top)
    if slower:
        lines.append(f"... and {slower} slower {'one' if slower == 1 else 'ones'}")
    if len(safe) > 1:
        lines.append(FIRST)
    return lines


def _has_networks(lines: list[layouts.Ranked]) -> bool:
    """Return whether lines are predicted at several rates of a network that nobody measured."""
    return any(line.prediction.at_networks for line in lines)


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


def _at_one_adapter(
    question: Question, lines: list[layouts.Ranked]
) -> tuple[dict[str, Any], str] | None:
    """Return which of some lines is the fastest if a node has one network adapter (ONE_ADAPTER).

    It is returned as data and as a printed line. Return None if the network's rate is known, is
    not above this one, or does not matter on these GPUs.
    """
    machine = question.machine
    if not _has_networks(lines) or machine.network.bandwidth <= ONE_ADAPTER:
        return None
    slow = hardware.with_network(machine, ONE_ADAPTER)
    run = question.config

    def likely(line: layouts.Ranked) -> float:
        job = Job(run.model, line.priced, run.training, machine)
        return at_other_network(line.prediction, job, slow)

    def seconds(line: layouts.Ranked) -> float:
        job = Job(run.model, line.priced, run.training, slow)
        return predict(job, line.prediction.memory).seconds

    # Two lines are simulated: the first one, and the one that is likely the fastest.
    best = min(lines[: question.options.top], key=likely)
    best = min(lines[0], best, key=seconds)
    rate = f"{ONE_ADAPTER / BILLION:g} GB/s"
    text = f"with {rate} per node (one 200 Gb/s adapter): "
    if best is lines[0]:
        text += f"the first line is still the fastest of these, {seconds(best):.2f} s"
    else:
        text += f"{_words(best.layout, question)}, {seconds(best):.2f} s, where the first takes "
        text += f"{seconds(lines[0]):.2f} s; --network {ONE_ADAPTER / BILLION:g} ranks by it"
    return {"seconds": seconds(best), "flags": _flags(best.layout, question)}, text


def _commands(
    question: Question, first: layouts.Ranked, plain: list[layouts.Ranked]
) -> tuple[dict[str, Any], list[str]]:
    """Return the commands that train on the first layout and on the recommended one, if any.

    They are returned as entries of the answer's data, and as printed lines. A plain layout that is
    nearly as fast as the first one is recommended; a line says how much speed it gives up. Further
    lines name the options for which a command has stand-ins, such as synthetic data. plain: the
    fastest plain layout, or empty.
    """
    launcher = _launcher(question)
    words = _command(question, first.layout)
    data: dict[str, Any] = {"launcher": launcher, "command": words, "recommended": None}
    lines = []
    if recommended := _recommended(first, plain):
        data["recommended"] = _as_data(recommended, question)
        command = shlex.join([*launcher, *_command(question, recommended.layout)])
        lines += [_given_up(recommended, first, question), f"recommended: {command}"]
    lines.append(f"the first: {shlex.join([*launcher, *words])}")
    return data, lines + _stand_ins(question, first.layout)


def _batch_file(question: Question, safe: list[layouts.Ranked], plain: list[layouts.Ranked]) -> str:
    """Write the batch file of --sbatch for the recommended layout, or the first, and return a line.

    Raise UserError if there is no safe layout.
    """
    if question.program:
        raise UserError(
            f"--sbatch writes batch files for train.py, not for {question.program.name}"
        )
    if not safe:
        raise UserError("--sbatch: no layout fits at --risk, so there is nothing to submit")
    chosen = _recommended(safe[0], plain) or safe[0]
    longest = chosen.prediction.interval[1]
    words = _words_of_train(question, chosen.layout)
    batch_file.write(question.options.sbatch, question.machine, question.gpus, longest, words)
    where = shlex.quote(question.options.sbatch)
    what = _words(chosen.layout, question)
    return f"written: {where}, for {what}; in the repository: sbatch {where}"


def _draw(question: Question, answer: layouts.Ranking) -> None:
    """Write a picture of layouts, tokens per second over memory, to the file of --picture.

    It shows the layouts that fit, the fastest of them for each memory (the front), and the layouts
    that were rejected because they do not fit, which are predicted here.
    """
    run = question.config
    fits = [_point(line.prediction) for line in answer.ranked]
    over = []
    for entry in answer.rejected:
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


def _recommended(first: layouts.Ranked, plain: list[layouts.Ranked]) -> layouts.Ranked | None:
    """Return the plain layout to recommend instead of the first layout, or None.

    The prediction of a plain layout is more certain, because real runs have measured its kind. It
    is recommended unless the first layout is the same, is faster by more than TOLD_APART, or is so
    much faster at the slowest network that the plain one is not within its interval there. plain:
    the fastest plain layout, or an empty list.
    """
    if not plain or plain[0].layout == first.layout:
        return None
    simple, fastest = plain[0].prediction, first.prediction
    is_near = simple.seconds <= fastest.seconds * TOLD_APART
    is_near = is_near and simple.compared <= fastest.interval[1]
    return plain[0] if is_near else None


def _given_up(recommended: layouts.Ranked, first: layouts.Ranked, question: Question) -> str:
    """Return a line on the seconds that a user gives up with the recommended layout.

    It says how much slower this layout is than the first one, and why it is recommended.
    """
    prediction = recommended.prediction
    slower = beside(prediction.seconds / first.prediction.seconds)
    slow = ""
    if prediction.at_networks:
        slow = f" ({beside(prediction.compared / first.prediction.compared)} on the slow network)"
    return (
        f"{_words(recommended.layout, question)}: {prediction.seconds:.2f} s, {slower} than the "
        f"first{slow}: within the prediction's error, and runs of this kind were measured"
    )


def beside(ratio: float) -> str:
    """Return a ratio of seconds as text: 1.016 is "1.6% more", 0.984 "1.6% less"."""
    return f"{abs(ratio - 1):.1%} {'more' if ratio >= 1 else 'less'}"


def where_it_fits(question: Question, answer: layouts.Ranking) -> list[str]:
    """Return a line that names a layout or a number of nodes with which the model would fit.

    Called if no layout is safe. It returns no line if memory is not the reason.
    """
    has_room = [entry.reason.startswith("out of memory") for entry in answer.rejected]
    if not answer.ranked and not any(has_room):
        return []
    if line := question.leanest(question.config.model, question.gpus):
        return [f"not as it was given, but {_words(line.layout, question)} fits"]
    try:
        nodes, line = question.fewest_nodes()
    except UserError as error:
        return [str(error)]
    hold = "node of {} holds" if nodes == 1 else "nodes of {} hold"
    hold = hold.format(question.machine.node)
    return [f"{nodes} {hold} it, with {_words(line.layout, question)}"]


def _command(question: Question, layout: schema.Layout) -> list[str]:
    """Return the words of the command, without its launcher, that trains on a layout.

    It is a command of train.py, or of the program of --for.

    The command can be run as it is: if the user gave no data or no length, it has synthetic data or
    STEPS steps.
    """
    run = question.config
    if program := question.program:
        return program.words(run, layout, question.gpus, bool(question.options.fp8))
    words = _words_of_train(question, layout)
    if "--data" not in words:
        words += ["--data", "synthetic"]
    if not _has_length(run):
        words += ["--steps", str(STEPS)]
    return ["python", "train.py", *words]


def _words_of_train(question: Question, layout: schema.Layout) -> list[str]:
    """Return train.py's words for a layout, with all that the user gave and nothing in its place.

    If the user gave --model, they have --model too, and of the options of the model only those that
    the user gave in addition; otherwise they have all the model's sizes.
    """
    run = replace(question.config, layout=layout)
    name = question.options.model
    # Random tokens are the default; who has asked for them gets them in a batch file too.
    always = {"data"}.intersection(question.given)
    words = []
    for group in schema.GROUPS:
        words += to_words(getattr(run, group), "dp", always=always)
    if name:
        # The words of the model's sizes are the first of `words`, as `model` is the first group.
        # They are replaced by --model and the options that the user gave in addition.
        size_words = to_words(run.model)
        given = question.given
        model_words = ["--model", name, *to_words(run.model, always=given, only=given)]
        words[: len(size_words)] = model_words
    return words


def _launcher(question: Question) -> list[str]:
    """Return the words that start the ranks: none on one GPU, mpirun on one node, else srun.

    --launch replaces them; raise UserError if its words cannot be read.
    """
    if given := question.options.launch:
        try:
            return shlex.split(given.replace("{ranks}", str(question.gpus)))
        except ValueError as error:
            raise UserError(f"--launch {given!r}: {error}") from None
    if question.program:
        nodes, node = _whole_nodes(question)
        return ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(node)]
    if question.gpus == 1:
        return []
    if question.gpus <= question.machine.node:
        return ["mpirun", "-n", str(question.gpus)]
    return ["srun", "--mpi=pmi2", "-n", str(question.gpus)]


def _whole_nodes(question: Question) -> tuple[int, int]:
    """Return the nodes of the question's GPUs, and the GPUs of each that are used."""
    node = min(question.machine.node, question.gpus)
    return -(-question.gpus // node), node


def _has_length(run: Config) -> bool:
    """Return whether the user gave the length of the run, in steps or samples."""
    return bool(run.training.steps or run.training.train_samples)


def _stand_ins(question: Question, layout: schema.Layout) -> list[str]:
    """Return a line on the data and the length that `_command` chose, if the user gave none."""
    run = question.config
    missing: list[str] = []
    if question.program:
        missing += question.program.notes(run, layout)
    elif run.data.data == ("synthetic",):
        missing.append("--data synthetic is random tokens: give the prefix of your corpus")
    if not _has_length(run) and not question.program:
        missing.append(f"--steps {STEPS} is an example: give your length")
    if question.has_default_batch:
        missing.append(f"{question.batch}: give --global-batch-size or --batch-tokens")
    lines = [f"  {'; '.join(missing)}"] if missing else []
    launched = question.options.launch or question.program
    if not launched and question.gpus > question.machine.node:
        lines.append(f"  {PMI}")
    return lines


def _as_data(line: layouts.Ranked, question: Question) -> dict[str, Any]:
    """Return a layout's entry in the JSON answer: options, prediction, flags, and costs."""
    more: dict[str, Any] = {
        "rampup": _rampup(line, question),
        "flags": _flags(line.layout, question),
    }
    rates = cost.rates_of(question.options, question.machine)
    more |= rates.per_billion(question.gpus, line.prediction.tokens_per_second)
    return asdict(line.layout) | more | asdict(line.prediction)


def _rampup(line: layouts.Ranked, question: Question) -> str:
    """Return as text whether a layout can run every batch size of the run's ramp-up.

    It is "fits", or the first batch size that does not fit, or "-" without a ramp-up.
    """
    return layouts.rampup_verdict(line.layout, Timeline(question.config).batches)


def _risky_lines(
    safe: list[layouts.Ranked], risky: list[layouts.Ranked], question: Question
) -> list[str]:
    """Return lines on the risky layouts that are faster than every safe layout.

    A line says by how many GB the layout exceeds the memory at which it would be safe, and names a
    safe layout with the same tp, pp and micro-batch size if there is one.
    """
    fastest_safe = safe[0].prediction.compared
    faster = [line for line in risky if line.prediction.compared < fastest_safe]
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
            advice = f"; safe with {_words(same_place[0].layout, question)}"
        lines.append(
            f"  {_words(layout, question)}: {p.seconds:.2f} s, risk {p.risk:.0%}, "
            f"safe with {over:.1f} GB less{advice}"
        )
    return lines


def _only_risky_lines(risky: list[layouts.Ranked], question: Question) -> list[str]:
    """Return the table of risky layouts where no layout is safe, and the commands of the first."""
    lines = ranked_lines(risky[: question.options.top], question)
    lines.append("none of them is recommended; their commands:")
    for line in risky[:SHOWN_RISKY]:
        command = shlex.join([*_launcher(question), *_command(question, line.layout)])
        lines.append(f"  risk {line.prediction.risk:.0%}: {command}")
    return lines + _stand_ins(question, risky[0].layout)


def _place(layout: schema.Layout) -> tuple[int, int, int]:
    """Return a layout's tp, pp and micro-batch size."""
    return layout.tp, layout.pp, layout.micro_batch_size


def _words(layout: schema.Layout, question: Question) -> str:
    """Return the command-line flags of a layout as printed text: train.py's, or those of --for."""
    return " ".join(_flags(layout, question)) or "(train.py's defaults)"


def _flags(layout: schema.Layout, question: Question) -> list[str]:
    """Return the command-line words of a layout: train.py's, or those of --for."""
    if program := question.program:
        return program.layout_words(question.config, layout)
    return flags(layout)


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


def columns(rows: list[list[str]], texts: Collection[str] = TEXTS) -> list[str]:
    """Return the lines of a table with aligned columns; the first row has the columns' names.

    Columns with a name in `texts` are aligned to the left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # A wide table has only one space between its columns, and none before the first.
    is_wide = sum(widths) + 2 * len(widths) > WIDTH
    gap = " " if is_wide else "  "
    lines = []
    for row in rows:
        line = ""
        for name, cell, width in zip(rows[0], row, widths, strict=True):
            aligned = cell.ljust(width) if name in texts else cell.rjust(width)
            line += gap + aligned
        lines.append(line.rstrip()[is_wide:])
    return lines


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
        "s/slow": f"{p.compared:.2f}" if p.at_networks else "-",
        # How much longer a step may take: the upper end of the interval of 90 of 100 runs.
        "90 %": f"+{upper_end / p.seconds - 1:.0%}",
        "tokens/s": f"{p.tokens_per_second:,.0f}",
        "MFU": f"{p.mfu:.1%}",
        "bubble": f"{p.bubble:.1%}",
        "GB": f"{max(stage.total for stage in p.memory) / BILLION:.1f}",
        "risk": f"{p.risk:.1%}",
        **rates.cells(question.gpus, p.tokens_per_second),
        # The cell has only "batch 48" of the text "batch 48 does not divide by 32".
        "ramp-up": _rampup(line, question).partition(" does")[0],
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
    """Return notes on ranked layouts: warnings about the first, the network, unmeasured kinds."""
    lines = [f"note: {text}" for line in ranked[:1] for text in line.prediction.warnings]
    if _has_networks(ranked):
        lines.append(NETWORK)
    if any(is_unmeasured(line.layout) for line in ranked):
        lines.append(UNMEASURED)
    return lines
