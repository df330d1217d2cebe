"""Runs the planner's command line: one question per command, answered as a table or as JSON.

    python plan.py layouts --model 176b --gpu a100-80 --nodes 48 --global-batch-size 2048
    python plan.py largest --gpu v100-32 --gpus 4

Options that describe the model, the layout and the training are those of train.py, as flags or in
a --config FILE; a layout option that is given is held fixed, the others are tried. The planner has
further flags of its own (tools/planner/flags.py), such as --nodes. `--json` prints the same as
data. To add a question, add a line to QUESTIONS.
"""

import gc
import json
import os
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# python -P and PYTHONSAFEPATH leave out the folder of the program.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from base import errors  # imported first, since it ends with an error if Python is too old

if __name__ == "__main__":
    errors.begin_program()

from architecture.shape import ModelShape
from base import paths
from base.cli import Parser
from base.errors import UserError, printable
from config.command_line import options_help, parse_request
from config.schema import Layout

with errors.installed("planning needs no other, `pip install numpy`"):
    from costs import hardware
    from tools.planner import (
        budget,
        calibration,
        compare,
        duration_questions,
        flags,
        gap,
        growth,
        ladder,
        layout_questions,
        layout_table,
        measured,
        model_questions,
        programs,
        questions,
        run_files,
        shapes,
    )
    from tools.planner.program import Program
    from tools.planner.questions import Answer, Question


class Kind(NamedTuple):
    """A question: its function, its text in --help, and the planner's flags that it reads.

    layout: the options of a layout that it reads; None: all. tries: whether it tries layouts; then
    --config RUN gives it the run's model and training options, but not its layout. example: the
    model of the question if the user gives none. small: this model if the machine has CPUs alone.
    """

    answer: Callable[..., Answer]
    text: str
    flags: tuple[str, ...]
    layout: tuple[str, ...] | None = None
    tries: bool = False
    example: str | None = None
    small: str | None = None


GPUS = ("nodes", "gpus")
BUDGET = ("gpu_hours", "days", "law", "tokens_per_parameter")
PROGRAM = ("program", "fp8")  # with --for another program answers
MEASURED = ("measured",)
COSTS = ("price_per_gpu_hour", "watts_per_gpu")
TABLE = (
    *GPUS,
    *PROGRAM,
    *MEASURED,
    "top",
    "rejected",
    "risk",
    "picture",
    *COSTS,
    "launch",
    "sbatch",
)
RAMP_UP = (*GPUS, "risk", "nodes_by_batch", "jobs", "submit")
QUESTIONS = {
    "layouts": Kind(
        layout_table.ranked_layouts,
        "all layouts by seconds per step, and why others cannot run",
        TABLE,
        tries=True,
    ),
    "stages": Kind(
        layout_questions.stages,
        "blocks, parameters, time and memory per stage",
        (*GPUS, *PROGRAM, "risk"),
    ),
    "days": Kind(
        duration_questions.days,
        "how long training takes",
        (*GPUS, *PROGRAM, *MEASURED, "tokens", "days", "risk", *COSTS),
        tries=True,
    ),
    "budget": Kind(
        budget.budget,
        "the largest model worth training on some GPU hours, its tokens, layout and cost",
        (*GPUS, *PROGRAM, *MEASURED, *BUDGET, "risk", *COSTS, "write"),
        tries=True,
        example="llama-3-8b",
        small="stories260k",
    ),
    "shapes": Kind(
        shapes.shapes,
        "shapes of a model near a size, by seconds per token, with reasons",
        (*GPUS, *PROGRAM, *MEASURED, *BUDGET, "size", "top", "risk"),
        tries=True,
        example="llama-3-8b",
        small="stories260k",
    ),
    "largest": Kind(
        model_questions.largest,
        "the largest model that trains on some GPUs",
        (*GPUS, *PROGRAM, "risk"),
        layout=(),
        tries=True,
        example="gpt3-175b",
    ),
    "smallest": Kind(
        model_questions.smallest,
        "the fewest nodes that hold a model",
        (*PROGRAM, "risk"),
        layout=(),
        tries=True,
    ),
    "rampup": Kind(
        growth.rampup,
        "a batch-size ramp-up, in segments",
        RAMP_UP,
        tries=True,
        example="bloom-176b",
    ),
    "timeline": Kind(
        layout_questions.timeline,
        "the schedule as a picture and a Chrome trace",
        (*GPUS, "trace"),
        example="bloom-176b",
    ),
    "model": Kind(model_questions.model, "parameters, FLOPs and bytes of a model", (), ()),
    "compare": Kind(
        compare.compare,
        "two layouts: where one loses time and memory against the other",
        (*GPUS, *PROGRAM, "risk"),
    ),
}
EXAMPLE = "llama-3-8b"  # with --for, of questions that have an example
WRITTEN = ("trace", "jobs", "write", "picture", "sbatch")  # options that name a file to write


def main(arguments: list[str] | None = None) -> None:
    """Answer the question on the command line; a mistake prints a line and ends with status 2.

    arguments: the words of the command line; None: of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # Garbage collection would take a seventh of a search's time and find nothing: no cycles of
    # objects are made that become unused.
    gc.disable()
    with errors.sentences():
        answer = ask(arguments)
        text = json.dumps(answer.data, indent=1) if "--json" in arguments else answer.text
        print(printable(text))


def ask(arguments: list[str]) -> Answer:
    """Return the answer to a command line; raise UserError for a mistake.

    Most questions are in QUESTIONS and take the options of train.py too. `compare` has two layouts,
    so its words are parsed in `_compared`; `constants`, `gap`, `ladder` and `calibrate` have few.
    """
    if arguments[:1] == ["compare"] and not {"-h", "--help"} & set(arguments):
        return _compared(arguments[1:])
    # The words in `rest` are not the planner's: they belong to train.py, or are unknown.
    options, rest = parser(arguments[0] if arguments else None).parse_known_args(arguments)
    name = options.question
    if rest and name not in QUESTIONS:
        raise UserError(f"unknown argument {rest[0]!r}: see plan.py {name} --help")
    for option in WRITTEN:  # fail now if a file cannot be written, not after a long search
        paths.check_file(getattr(options, option, None))
    if name == "constants":
        return layout_questions.constants()
    if name == "gap":
        if options.gpu:
            _machine(options.gpu)  # called only to print the machine's note for the user
        return gap.gap(options.run, options.gpu)
    if name == "ladder":
        return ladder.ladder(options.runs, options.for_run, options.law, options.write)
    if name == "calibrate":
        if not options.gpu:
            needs = "the machine of the runs, or the one most like it"
            raise UserError(f"calibrate needs --gpu: {needs}")
        machine = _machine(options.gpu)
        runs = [run_files.read(path, machine) for path in options.runs]
        return calibration.answer(calibration.fit(runs, machine), options.write)
    question = question_of(options, rest)
    if options.measured:
        corrected = _corrected(question, rest)
        question = replace(question, machine=corrected.machine)
    found = QUESTIONS[name].answer(question)
    if options.measured:
        text = "\n".join([found.text, *measured.lines(corrected)])
        found = Answer(text, found.data | {"measured": measured.as_data(corrected)})
    if options.submit:
        return replace(found, text=f"{found.text}\n{_submitted(options.jobs)}")
    return found


def question_of(options: Namespace, rest: list[str], says: bool = True) -> Question:
    """Return the question of a command line, with its machine and the configuration of a run.

    options: the planner's flags. rest: the words of train.py. says: whether notes for the user go
    to stderr.
    """
    name = options.question
    kind = QUESTIONS[name]
    if options.program and kind.example:  # the examples of train.py are none of every program
        kind = kind._replace(example=EXAMPLE)
    flags.check(
        options,
        kind.flags,
        lambda flag: [other for other, one in QUESTIONS.items() if flag in one.flags],
    )
    program = programs.of(options.program) if options.program else None
    machine = _machine(options.gpu or "a100-80", options.calibration, program, says)
    notes = []
    if options.network:
        machine = hardware.with_network(machine, options.network.busbw)
        notes += [options.network.note] if options.network.name else []
    if options.gpus_per_node:
        there = f"a node of {options.gpus_per_node} has the links that {machine.name} states for "
        notes.append(there + f"one of {machine.node}: {machine.network.bandwidth / 1e9:g} GB/s out")
        machine = replace(machine, node=options.gpus_per_node)
    # Options of a run that --config names; flags take precedence over them.
    before: dict[str, Any] = {}
    layout_names = [field.name for field in fields(Layout)]
    if kind.small and machine.device == "CPU":
        kind = kind._replace(example=kind.small)
    if options.config and run_files.is_source(options.config):
        before = run_files.options_of(options.config)
        unknown = run_files.note_of_unknown(options.config)
        if unknown is not None:
            notes.append(unknown)
        if kind.tries:  # the question tries layouts, so the run's own layout is not kept
            before = {option: before[option] for option in before if option not in layout_names}
            notes.append(f"{options.config} gives model and training; its layout is not held")
    elif options.config:
        rest = [*rest, "--config", options.config]
    if options.model:
        rest = [*rest, "--model", options.model]
    defaults = partial(_defaults, kind, machine, before)
    request = parse_request(rest, defaults=defaults, plans=True)
    config, options.model = request.config, options.model or request.model
    known = {*request.given, *before}
    if kind.small and kind.example == kind.small and _takes_example(kind, known):
        notes.append(
            f"the model is like {kind.small}, with a vocabulary of {config.model.vocab_size:,} and "
            f"{config.model.seq_length} tokens a sample: --model, --vocab-size and --seq-length "
            "say otherwise"
        )
    # Layout options that the question does not read are refused, or noted.
    reads = kind.layout
    if name == "rampup" and options.nodes_by_batch is None:
        reads = ("tp", "pp", "cp")
    for option in layout_names:
        if option in request.given and reads is not None and option not in reads:
            flag = flags.words_of(option)
            if kind.tries and not reads:
                tries = f"{name} tries every tp and pp at micro-batch 1, full recomputation"
                raise UserError(f"{flag}: {tries}")
            notes.append(f"{flag} changes nothing of {name}")
    if config.training.precision == "bf16" and not machine.bf16:
        raise UserError(f"--precision bf16: {machine.device} has no bf16 arithmetic; use fp16")
    if not machine.bf16:
        how = f"{config.training.precision}, {machine.kernel} kernels"
        notes.append(f"{machine.device} has neither bf16 nor flash attention: planned with {how}")
    if config.model.experts > 1 and kind.tries and name not in (*questions.SEARCHED, "smallest"):
        goes = "goes with layouts, days and stages, and with smallest"
        raise UserError(f"a model with experts {goes}, not {name}")
    if program:
        given = {name: getattr(config.layout, name) for name in layout_names}
        program.check({name: given[name] for name in layout_names if name in request.given})
        reason = program.refusal(config, Layout(dp=1))
        if reason:
            raise UserError(f"{reason} (--for {program.name})")
        machine = program.on(machine, config.model, bool(options.fp8))
        notes += program.left_out(request.given)
    for note in (*request.notes, *notes) if says else ():
        print(f"note: {note}", file=sys.stderr)
    return Question(options, config, request.given, machine)


def _corrected(question: Question, rest: list[str]) -> measured.Corrected:
    """Return the question's machine, corrected by the runs of --measured.

    rest: the words of train.py. A run of train.py has its own options and no other's. A stated one
    has the question's machine, program, model and training options, where its own words do not say
    otherwise. Raise UserError for a run that cannot be read.
    """
    options = question.options
    machine = question.machine
    if options.program:  # a folder is a run of train.py, on the same GPUs
        plain = Namespace(**{**vars(options), "program": None, "fp8": None, "measured": None})
        machine = question_of(plain, rest, says=False).machine
    runs = []
    for text in options.measured:
        if run_files.is_source(text):
            runs.append(run_files.read(text, machine))
            continue
        run = measured.stated(text)
        own, words = parser("stages").parse_known_args(["stages", *run.words])
        places = ("nodes", "gpus")
        has_place = run.dp or any(getattr(own, name) for name in places)
        taken = ("config", "model", "gpu", "gpus_per_node", "calibration", "network")
        for name in (*taken, "program", "fp8", *(() if has_place else places)):
            if getattr(own, name) is None:
                setattr(own, name, getattr(options, name))
        there = question_of(own, [*rest, *words], says=False)
        if run.dp:
            layout = there.config.layout
            own.gpus = layout.tp * layout.pp * layout.cp * run.dp
        try:
            job = there.job()
        except UserError as error:
            raise UserError(f"--measured {text!r}: {error}") from None
        runs.append(run_files.MeasuredRun(text, job, run.seconds, 1, 0.0))
    has_experts = question.config.model.experts > 1
    return measured.correct(question.machine, runs, measured.priors(), has_experts)


def _machine(
    name: str,
    calibration: str | None = None,
    program: Program | None = None,
    says: bool = True,
) -> hardware.Machine:
    """Return the machine of --gpu, and print its note for the user; raise UserError if unknown.

    calibration: the file of --calibration with measured rates, or None. program: that of --for, of
    whose published runs the machine may have other rates. says: whether to print the note.
    """
    load = program.machine if program else hardware.load
    machine = load(name, calibration)
    if machine.note and says:
        print(f"note: {machine.note}", file=sys.stderr)
    return machine


def _defaults(
    kind: Kind, machine: hardware.Machine, before: dict[str, Any], given: Collection[str]
) -> dict[str, Any]:
    """Return the values of options that the user gave neither as flags nor in a file.

    They are the options of the run that --config names (`before`), then the question's defaults: an
    example model, a batch size, the machine's precision. given: the names of options that the user
    gave. Called while the words of train.py are parsed.
    """
    if "model" in given:  # the sizes of --model replace the sizes of the run's model
        shape = {field.name for field in fields(ModelShape)}
        before = {name: value for name, value in before.items() if name not in shape}
    known = {*given, *before}
    values: dict[str, Any] = {"precision": machine.precision}
    if _takes_example(kind, known):
        values["model"] = kind.example
    if "batch_schedule" not in known:
        values["global_batch_size"] = questions.BATCH
    return values | before


def _takes_example(kind: Kind, known: Collection[str]) -> bool:
    """Return whether a question has its example model; known: options that have a value."""
    return (
        bool(kind.example)
        and "model" not in known
        and not {"layers", "hidden", "heads"} <= {*known}
    )


def _compared(arguments: list[str]) -> Answer:
    """Return the answer of `plan.py compare A B ...`; raise UserError for a mistake.

    A and B are each a quoted text of flags, or a run's folder; the words after them are for both.
    """
    sides, shared = arguments[:2], arguments[2:]
    if len(sides) < 2:
        raise UserError('compare takes two layouts, such as "--tp 4 --pp 12" "--tp 8 --pp 6"')
    asked = []
    for side in sides:
        words = ["--config", side]
        is_flags = side.lstrip().startswith("-")
        if is_flags:
            try:
                words = shlex.split(side)
            except ValueError as error:
                raise UserError(f"compare: {side!r}: {error}") from None
        elif not run_files.is_source(side):
            raise UserError(f"compare: {side!r} is neither flags nor a run's folder")
        options, rest = parser("compare").parse_known_args(["compare", "A", "B", *shared, *words])
        if not is_flags and not options.gpu:
            raise UserError(f"compare: which machine is {side} to be priced on? give --gpu NAME")
        asked.append(question_of(options, rest))
    return compare.compare(asked[0], asked[1], sides)


def _submitted(jobs: str) -> str:
    """Submit the first segment's job, and return what scripts/growing_jobs.py prints.

    jobs: the file of --jobs, which `rampup` has just written. Raise UserError if the program
    fails.
    """
    program = str(Path(__file__).parent / "scripts" / "growing_jobs.py")
    words = [sys.executable, program, "submit", jobs]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    return done.stdout.strip()


def parser(asked: str | None = None) -> ArgumentParser:
    """Return the parser of the planner's own flags, with a subcommand for each question.

    The questions in QUESTIONS also take train.py's options, which this parser leaves unparsed;
    --help lists them. asked: a question in QUESTIONS whose flags alone are needed, since to make
    those of all takes a while; any other word: all.
    """
    found = Parser(
        prog="plan.py",
        description="Predicts which layouts fit, how fast they are, and why others cannot run.",
        epilog="`plan.py QUESTION --help` lists the flags that a question takes.",
        allow_abbrev=False,
    )
    commands = found.add_subparsers(dest="question", required=True, metavar="QUESTION")
    shared = Parser(add_help=False, allow_abbrev=False)
    shared.add_argument("--json", action="store_true", help="print JSON, not a table")

    def command(name: str, text: str, **form: Any) -> Parser:
        return commands.add_parser(name, help=text, parents=[shared], allow_abbrev=False, **form)

    form = RawDescriptionHelpFormatter
    options = options_help("model", "layout", "training")
    for name, kind in QUESTIONS.items():
        own = command(name, kind.text, formatter_class=form, epilog=options)
        if asked in QUESTIONS and name != asked:
            continue
        if name == "compare":
            own.add_argument(
                "sides",
                nargs=2,
                metavar="A|B",
                help="a layout's flags in quotes, or a run's folder",
            )
        flags.add(own, kind.flags)
    own = command("calibrate", "fit the planner's constants to your own runs on a machine")
    own.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs on this machine")
    own.add_argument("--gpu", help="machine whose constants are refitted", metavar="NAME")
    own.add_argument(
        "--write", help="write a machine file, for --gpu FILE.toml", metavar="FILE.toml"
    )
    own = command("ladder", "the loss of a large run, by those of small ones")
    own.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs with one recipe")
    own.add_argument("--for-run", help="run file of the large run", metavar="RUN.toml")
    own.add_argument("--law", help=flags.FLAGS["law"].help, metavar="LAW")
    own.add_argument("--write", help="write its curve for train.py --expect", metavar="FILE.json")
    own = command("gap", "where a run's time went, and which flags would make it faster")
    own.add_argument("run", metavar="RUN", help="folder of a run, ended or not")
    own.add_argument("--gpu", help="machine to compare with, default: by the run's device")
    command("constants", "every fitted constant, its value and what it was fitted on")
    return found


if __name__ == "__main__":
    main()
