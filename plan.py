"""The planner's command line: one question per command, answered as a table or as JSON.

    python plan.py layouts --model 176b --gpu a100-80 --nodes 48 --global-batch-size 2048
    python plan.py largest --gpu v100-32 --gpus 4

Options that describe the model, the layout and the training are those of train.py, as flags or in
a --config FILE; a layout option that is given is held fixed, the others are tried. `--json` prints
the same as data. `layouts --rehearse N` has rehearse.py, as a process, confirm the first N layouts.
"""

import gc
import json
import shlex
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from config import messages  # first: it ends a Python that is too old
from config.command_line import options_help, parse_request
from config.messages import Parser, UserError
from config.schema import Layout, ModelShape

with messages.installed("planning needs no other, `pip install numpy`"):
    from planner import (
        calibration,
        compare,
        duration_questions,
        flags,
        gap,
        growth,
        hardware,
        layout_questions,
        layout_table,
        model_questions,
        questions,
        run_files,
    )
    from planner.questions import Answer, Question

# Some questions neither try layouts nor take a whole one. These are the layout's options they read.
READ_OF_LAYOUT = {"model": (), "rampup": ("tp", "pp", "cp")}  # a ramp-up without --deadline
READ_OF_LAYOUT["shapes"] = ("tp", "cp", "micro_batch_size", "recompute")
LEANEST = ("largest", "smallest")  # questions that try layouts of their own
WRITTEN = ("trace", "stages", "write", "json", "picture")  # options that name a file to write
QUESTIONS = layout_table.QUESTIONS | duration_questions.QUESTIONS
QUESTIONS |= layout_questions.QUESTIONS | model_questions.QUESTIONS
QUESTIONS |= {"rampup": (growth.rampup, "a batch-size ramp-up, in stages")}
# Questions that try layouts: of a run they take model and training, and its layout is one of many.
SEARCHES = ("layouts", "days", "largest", "smallest", "shapes", "rampup")


def main(arguments: list[str] | None = None) -> None:
    """Answer one question on the command line; a mistake is one sentence and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    gc.disable()  # nothing that an answer leaves behind is in cycles; a seventh of a search's time
    with messages.sentences():
        answer = ask(arguments)
        as_json = "--json" in arguments and arguments[0] != "gap"  # gap's names a file
        print(json.dumps(answer.data, indent=1) if as_json else answer.text)


def ask(arguments: list[str]) -> Answer:
    """The answer to a command line; raises UserError."""
    if arguments[:1] == ["check"]:
        raise UserError("rows are checked by `python benchmarks/check_rows.py FILE [--json]`")
    if arguments[:1] == ["compare"] and not {"-h", "--help"} & set(arguments):
        return _compared(arguments[1:])
    options, rest = parser().parse_known_args(arguments)
    if options.question in ("constants", "calibrate", "gap") and rest:
        raise UserError(f"unknown argument {rest[0]!r}: see plan.py {options.question} --help")
    for name in WRITTEN:
        path = getattr(options, name, None)
        if isinstance(path, str):  # --json names a file for gap alone
            messages.check_file(path)
    if options.question == "constants":
        return layout_questions.constants()
    if options.question == "calibrate":
        return _calibrated(options)
    if options.question == "gap":
        return _gap(options)
    question, rest = question_of(options, rest)
    answer, _ = QUESTIONS[options.question]
    found = answer(question)
    if options.submit:
        return replace(found, text=f"{found.text}\n{_submitted(options.stages)}")
    return _rehearsed(question, found, rest) if options.rehearse else found


def question_of(options: Namespace, rest: list[str]) -> tuple[Question, list[str]]:
    """The question that the options ask, and the words that are train.py's; raises UserError."""
    flags.check(options)
    machine = _machine(options.gpu or "a100-80", options.calibration)
    notes = []
    if options.network:
        machine = hardware.with_network(machine, options.network * 1e9)
    if options.gpus_per_node:
        there = f"a node of {options.gpus_per_node} has the links that {machine.name} states for "
        notes.append(there + f"one of {machine.node}: {machine.network.bandwidth / 1e9:g} GB/s out")
        machine = replace(machine, node=options.gpus_per_node)
    before: dict[str, Any] = {}
    if options.config and run_files.is_source(options.config):
        before = run_files.options_of(options.config)
        layout = {field.name for field in fields(Layout)}
        if options.question in SEARCHES:
            before = {name: value for name, value in before.items() if name not in layout}
            notes.append(f"{options.config} gives model and training; its layout is not held")
    elif options.config:
        rest = [*rest, "--config", options.config]
    if options.model:
        rest = [*rest, "--model", options.model]
    defaults = partial(_defaults, options.question, machine, before)
    request = parse_request(rest, defaults=defaults, plans=True)
    config, options.model = request.config, options.model or request.model
    held = [field.name for field in fields(Layout) if field.name in request.given]
    if held and options.question in LEANEST:
        own = f"{options.question} tries every tp and pp at micro-batch 1, full recomputation"
        raise UserError(f"--{held[0].replace('_', '-')}: {own}")
    read = READ_OF_LAYOUT.get(options.question if options.deadline is None else "", held)
    unread = [f"--{name.replace('_', '-')}" for name in held if name not in read]
    notes += [f"{flag} changes nothing of {options.question}" for flag in unread]
    if config.training.precision == "bf16" and not machine.bf16:
        raise UserError(f"--precision bf16: {machine.device} has no bf16 arithmetic; use fp16")
    if not machine.bf16:
        how = f"{config.training.precision}, {machine.kernel} kernels"
        notes.append(f"{machine.device} has neither bf16 nor flash attention: planned with {how}")
    if config.model.experts > 1 and options.question in ("largest", "smallest", "shapes", "rampup"):
        goes = "goes with layouts, days and stages"
        raise UserError(f"a model with experts {goes}, not {options.question}")
    if options.fp8:
        machine = hardware.with_fp8(machine)
        notes.append("planned only: train.py cannot train with fp8")
    for note in (*request.notes, *notes):
        print(f"note: {note}", file=sys.stderr)
    question = Question(options, config, request.given, machine)
    return question, rest


def _machine(name: str, calibration: str | None = None) -> hardware.Machine:
    """The machine of --gpu, after its note for the user; raises UserError."""
    machine = hardware.load(name, calibration)
    if machine.note:
        print(f"note: {machine.note}", file=sys.stderr)
    return machine


def _defaults(
    name: str, machine: hardware.Machine, before: dict[str, Any], given: Collection[str]
) -> dict[str, Any]:
    """Return the defaults of what neither flags nor a file gave: the options `before` of a run,
    then the question's.
    """
    if "model" in given:
        own = {field.name for field in fields(ModelShape)}
        before = {key: value for key, value in before.items() if key not in own}
    return questions.defaults(name, machine, {*given, *before}) | before


def _compared(arguments: list[str]) -> Answer:
    """Two layouts, each a quoted text of flags or a run's folder; what follows is for both."""
    sides, shared = arguments[:2], arguments[2:]
    if len(sides) < 2:
        raise UserError('compare takes two layouts, such as "--tp 4 --pp 12" "--tp 8 --pp 6"')
    asked: list[Question] = []
    for side in sides:
        is_flags = side.lstrip().startswith("-")
        try:
            own = shlex.split(side) if is_flags else ["--config", side]
        except ValueError as error:
            raise UserError(f"compare: {side!r}: {error}") from None
        options, rest = parser().parse_known_args(["compare", "A", "B", *shared, *own])
        if not is_flags and not run_files.is_source(side):
            raise UserError(f"compare: {side!r} is neither flags nor a run's folder")
        if not is_flags and not options.gpu:
            raise UserError(f"compare: which machine is {side} to be priced on? give --gpu NAME")
        asked.append(question_of(options, rest)[0])
    return compare.compare(asked[0], asked[1], sides)


def _calibrated(options: Namespace) -> Answer:
    """The constants that runs determine, written if --write says where."""
    if not options.gpu:
        raise UserError("calibrate needs --gpu: the machine of the runs, or the one most like it")
    machine = _machine(options.gpu)
    runs = [run_files.read(path, machine) for path in options.runs]
    return calibration.answer(calibration.fit(runs, machine), options.write)


def _gap(options: Namespace) -> Answer:
    """Where a run's time went; its data and its picture in the files that were named."""
    if options.gpu:
        _machine(options.gpu)
    found = gap.gap(options.run, options.gpu)
    if options.picture:
        gap.draw(cast(dict[str, Any], found.data), options.picture)
    messages.write_file(options.json, json.dumps(found.data, indent=1) + "\n")
    return found


def _rehearsed(question: Question, found: Answer, rest: list[str]) -> Answer:
    """The answer with what a rehearsal says about its first layouts."""
    options, config = question.options, question.config
    if question.machine.software.fp8:
        raise UserError("--rehearse: the engine has no fp8")
    if options.config and run_files.is_source(options.config):
        raise UserError(f"--rehearse takes flags or a TOML file, not --config {options.config}")
    training, data = config.training, cast(dict[str, Any], found.data)
    rest += ["--precision", training.precision]
    rest += ["--global-batch-size", str(training.global_batch_size)]
    rows = data["ranked"][: options.rehearse]
    heard: list[str] = []
    for number, row in enumerate(rows, start=1):
        print(f"rehearsing layout {number} of {len(rows)}", file=sys.stderr, flush=True)
        heard.append(_rehearse(row, rest, options, data["gpus"]))
    text = "\n".join([found.text, "rehearsed:", *(f"  {sentence}" for sentence in heard)])
    return Answer(text, data | {"rehearsed": heard})


def _submitted(stages: str) -> str:
    """Return what scripts/stages.py prints when it submits the first stage, or raise UserError."""
    program = str(Path(__file__).parent / "scripts" / "stages.py")
    words = [sys.executable, program, "submit", stages]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    return done.stdout.strip()


def _rehearse(row: dict[str, Any], rest: list[str], options: Namespace, gpus: int) -> str:
    """Return the verdict of a rehearsal about a layout of the table, in a line."""
    words = [*rest, *row["flags"]]
    name = "tp {tp} pp {pp} dp {dp} micro-batch {micro_batch_size} {recompute}".format(**row)
    program = str(Path(__file__).with_name("rehearse.py"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.json"
        words += ["--gpus", str(gpus), "--gpu", options.gpu or "a100-80", "--json", str(out)]
        words += ["--calibration", options.calibration] if options.calibration else []
        done = subprocess.run([sys.executable, program, *words], capture_output=True, text=True)
        if not out.exists():
            return f"{name}: not rehearsed: {(done.stderr.splitlines() or ['no answer'])[-1]}"
        answers = json.loads(out.read_text())
    if answers["finding"]:
        return f"{name}: rejected: {answers['finding']}"
    most = max(stage["needed"] for stage in answers["stages"]) / 1e9
    return f"{name}: every operation of the ranks that were run meets, fits with {most:.1f} GB"


def parser() -> ArgumentParser:
    """The planner's own flags, by question; all others are train.py's."""
    found = Parser(
        prog="plan.py",
        description="What fits, how fast, and why not the others.",
        epilog="`plan.py QUESTION --help` lists the flags that a question takes.",
        allow_abbrev=False,
    )
    commands = found.add_subparsers(dest="question", required=True, metavar="QUESTION")
    shared = Parser(add_help=False, allow_abbrev=False)
    form: dict[str, Any] = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
    form["epilog"] = options_help("model", "layout", "training")
    shared.add_argument("--json", action="store_true", help="print data, not a table")
    for name, (_, text) in QUESTIONS.items():
        flags.add(name, commands.add_parser(name, help=text, parents=[shared], **form))
    text = "two layouts: where one loses time and memory against the other"
    two = commands.add_parser("compare", help=text, parents=[shared], **form)
    two.add_argument("sides", nargs=2, metavar="A|B", help="flags in quotes, or a run's folder")
    flags.add("compare", two)
    text = "refit the constants that a machine's own runs determine"
    one = commands.add_parser("calibrate", help=text, parents=[shared], allow_abbrev=False)
    one.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs on this machine")
    one.add_argument("--gpu", help="machine whose constants are refitted", metavar="NAME")
    one.add_argument("--write", help="write a machine for --gpu FILE", metavar="FILE.toml")
    text = "where a run's time went, and which flag would win it back"
    one = commands.add_parser("gap", help=text, allow_abbrev=False)
    one.add_argument("run", metavar="RUN", help="folder of a run, ended or not")
    one.add_argument("--gpu", help="machine to plan beside it, default: by its device")
    one.add_argument("--json", help="write the table's data", metavar="FILE")
    one.add_argument("--picture", help="draw a waterfall of it", metavar="FILE.svg")
    text = "every fitted constant, its value and what it was fitted on"
    commands.add_parser("constants", help=text, parents=[shared])
    return found


if __name__ == "__main__":
    main()
