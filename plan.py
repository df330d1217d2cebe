"""The planner's command line: one question per command, answered as a table or as JSON.

    python plan.py layouts --model 176b --gpu a100-80 --nodes 48 --global-batch-size 2048
    python plan.py largest --gpu v100-32 --gpus 4

Options that describe the model, the layout and the training are those of train.py, as flags or in
a --config FILE; a layout option that is given is held fixed, the others are tried. `--json` prints
the same as data. `layouts --rehearse N` has rehearse.py, as a process, confirm the first N layouts.
"""

import json
import math
import subprocess
import sys
import tempfile
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from config import messages  # first: it ends a Python that is too old
from config.command_line import options_help, parse_request
from config.messages import Parser, UserError
from planner import growth, hardware, questions, risk
from planner.questions import Answer, Question

# The planner's own flags that one or two questions read.
READ_BY = {"rejected": ("layouts",), "rehearse": ("layouts",), "top": ("layouts", "shapes")}
READ_BY |= {"tokens": ("days",), "size": ("shapes",), "trace": ("timeline",)}
READ_BY |= dict.fromkeys(("deadline", "restart", "stages", "submit"), ("rampup",))
LIMITS = {"nodes": 1e6, "gpus": 1e6, "top": math.inf, "tokens": 1e18, "size": 1e16}
LIMITS |= {"deadline": 1e5}  # days
QUESTIONS = questions.QUESTIONS | {"rampup": (growth.rampup, "a batch-size ramp-up, in stages")}


def main(arguments: list[str] | None = None) -> None:
    """Answer one question on the command line; a mistake is one sentence and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with messages.sentences():
        answer = ask(arguments)
        as_json = "--json" in arguments
        print(json.dumps(answer.data, indent=1) if as_json else answer.text)


def ask(arguments: list[str]) -> Answer:
    """The answer to a command line; raises UserError."""
    if arguments[:1] == ["check"]:
        raise UserError("rows are checked by `python benchmarks/check_rows.py FILE [--json]`")
    options, rest = _parser().parse_known_args(arguments)
    if options.question == "constants":
        if rest:
            raise UserError(f"unknown argument {rest[0]!r}: constants takes --json only")
        return questions.constants()
    if options.calibration and not options.gpu:
        raise UserError("--calibration needs --gpu: which machine was it measured on?")
    machine = hardware.load(options.gpu or "a100-80", options.calibration)
    for name, most in LIMITS.items():
        number = getattr(options, name)
        if number is not None and not 0 < number < most:
            limit = f"below {most:g}" if number > 0 else "above 0"
            raise UserError(f"--{name} must be {limit}, not {number:g}")
    if not 0 < options.risk <= 1:
        raise UserError(f"--risk must be above 0 and at most 1, not {options.risk:g}")
    if options.nodes and options.gpus:
        raise UserError(f"give --nodes({options.nodes}) or --gpus({options.gpus}), not both")
    for name, readers in READ_BY.items():
        if getattr(options, name) is not None and options.question not in readers:
            others = " and ".join(readers)
            raise UserError(f"--{name} goes with {others}, not {options.question}")
    options.top = 20 if options.top is None else options.top
    defaults = partial(questions.defaults, options.question)
    request = parse_request(rest, defaults=defaults, plans=True)
    for note in request.notes:
        print(f"note: {note}", file=sys.stderr)
    answer, _ = QUESTIONS[options.question]
    found = answer(Question(options, request.config, request.given, machine))
    if options.submit:
        return replace(found, text=f"{found.text}\n{_submitted(options.stages)}")
    if not options.rehearse:
        return found
    training, data = request.config.training, cast(dict[str, Any], found.data)
    rest += ["--precision", training.precision]
    rest += ["--global-batch-size", str(training.global_batch_size)]
    rows = data["ranked"][: options.rehearse]
    heard = [_rehearse(row, rest, options, data["gpus"]) for row in rows]
    text = "\n".join([found.text, "rehearsed:", *(f"  {sentence}" for sentence in heard)])
    return Answer(text, data | {"rehearsed": heard})


def _submitted(stages: str) -> str:
    """What scripts/stages.py prints when it submits the first stage; UserError if it cannot."""
    program = str(Path(__file__).parent / "scripts" / "stages.py")
    words = [sys.executable, program, "submit", stages]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    return done.stdout.strip()


def _rehearse(row: dict[str, Any], rest: list[str], options: Namespace, gpus: int) -> str:
    """What a rehearsal says about a layout of the table, in a line."""
    words = [*rest, *row["flags"]]
    name = "tp {tp} pp {pp} dp {dp} micro-batch {micro_batch_size} {recompute}".format(**row)
    program = str(Path(__file__).with_name("rehearse.py"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.json"
        words += ["--world", str(gpus), "--gpu", options.gpu or "a100-80", "--json", str(out)]
        words += ["--calibration", options.calibration] if options.calibration else []
        done = subprocess.run([sys.executable, program, *words], capture_output=True, text=True)
        if not out.exists():
            return f"{name}: not rehearsed: {(done.stderr.splitlines() or ['no answer'])[-1]}"
        answers = json.loads(out.read_text())
    if answers["finding"]:
        return f"{name}: rejected: {answers['finding']}"
    most = max(stage["needed"] for stage in answers["stages"]) / 1e9
    return f"{name}: every operation meets, fits with {most:.1f} GB"


def _parser() -> ArgumentParser:
    parser = Parser(
        prog="plan.py",
        description="What fits, how fast, and why not the others.",
        epilog="`plan.py QUESTION --help` lists the flags that a question takes.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    shared = Parser(add_help=False, allow_abbrev=False)
    form: dict[str, Any] = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
    form["epilog"] = options_help("model", "layout", "training")
    shared.add_argument("--json", action="store_true", help="print data, not a table")
    for name, (_, text) in QUESTIONS.items():
        _add_flags(name, commands.add_parser(name, help=text, parents=[shared], **form))
    text = "every fitted constant, its value and what it was fitted on"
    commands.add_parser("constants", help=text, parents=[shared])
    return parser


def _add_flags(question: str, parser: ArgumentParser) -> None:
    """The planner's own flags; --help shows those that the question reads."""

    def add(name: str, text: str, **kind: Any) -> None:
        shown = question in READ_BY.get(name, (question,))
        parser.add_argument(f"--{name}", help=text if shown else SUPPRESS, **kind)

    add("gpu", "machine: " + ", ".join(hardware.names()), metavar="NAME")
    add("nodes", "full nodes (default 1)", type=int)
    add("gpus", "GPUs, in place of nodes", type=int)
    add("calibration", "measured rates of this machine, TOML", metavar="FILE")
    add("top", "lines to print (default 20)", type=int)
    add("rejected", "print every rejected layout", action="store_true", default=None)
    add("tokens", "tokens to train on", type=float)
    add("size", "parameters wanted", type=float)
    about_risk = "of running out of memory, accepted (0.05)"
    add("risk", about_risk, type=float, default=risk.DEFAULT)
    add("rehearse", "rehearse the first N layouts", type=int, metavar="N")
    add("deadline", "days: fewest GPU-hours within them", type=float, metavar="DAYS")
    add("restart", "minutes that a change of nodes takes (10)", type=float, metavar="MINUTES")
    add("stages", "write the stages, for scripts/stages.py", metavar="FILE")
    add("submit", "submit the first: sbatch's options and the batch file", metavar="WORDS")
    add("trace", "write a Chrome trace", metavar="FILE")


if __name__ == "__main__":
    main()
