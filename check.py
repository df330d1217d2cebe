"""Is my change right in every layout? Compares a small run in many layouts with one rank.

    python check.py                                    after a change of the code: a GPT-2
    python check.py --config RUN.toml                  the code that this run uses
    python check.py --model llama-3-8b --optimizer muon --layout "tp 2 dp 2 zero 2"
    python check.py --program my_program.py            another program, such as one of Megatron Core
    python check.py --module my_layer.py:GatedThing    a torch module with a tensor plan

All of train.py's options are taken, a layout's (--zero 3) for half of the layouts, and these:

    --layouts N       this many layouts, and one for each eight of every variant; default: as many
                      as cover every pair of axes and options
    --layout TEXT     this one alone, such as "tp 2 pp 2 schedule zb-v"; may be given several times
    --ranks N         most ranks of a layout; default: 4, or 8 if there are 8 cores
    --minutes M       start no further layout after this many minutes
    --all             run all layouts; else a difference ends the check when 12 layouts have run
    --random N        check N random configurations, each in --layouts layouts (default: 2); options
                      of train.py hold in each: --random 50 --optimizer muon; --seed draws others
    --at-once N       layouts that run at the same time, default: as the cores allow
    --cuda            on this machine's GPUs, in bf16 with its tolerances; not tried on several GPUs
    --json            the verdict as one object of JSON on stdout (docs/check.md), lines on stderr

Under mpirun, srun or torchrun --program and --module use the ranks that were started. Their other
options are --layout, --layouts, --ranks, --minutes, --all, --at-once, --cuda, --json and --set
NAME=VALUE, which changes a name of the file. The file has layouts() and build(layout), or for a
module inputs(batch): docs/check_other_programs.md.

The run becomes small: few blocks, heads and experts, a vocabulary that does not divide; a corpus
becomes random documents. Everything is computed in fp64, where rounding hides nothing, and every
tensor of every step is compared with one rank's; how far rounding alone moves each is measured.
Some more layouts have the branches of 16-bit precision, other lengths and heads, or --compile. In
some a text is decoded and others are scored. Finally a run is saved in one layout and resumed in
others. A difference is reported with the first tensor, in the order in which tensors are computed,
the operations before it, and explanations that fit its values.

With --widths 64,128,256 or --depths 2,4,8 it compares no layouts: it says which tensors do not keep
their size, and with --rates whether the best learning rate stays; check.py --widths --help.

Under srun or mpirun, --cluster measures and tries the cluster itself and writes a page about it
(docs/clusters.md). It takes none of these options; its own: check.py --cluster --help.

Exit status: 0 if all layouts are equal to one rank; 1 if one is not; 2 a mistake; 3 an error of
this program, which is no verdict; 130 after Ctrl-C, which prints what has been equal.
"""

import dataclasses
import json
import os
import shlex
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

# python -P and PYTHONSAFEPATH leave out the folder of the program.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from base import errors  # imported first: it prints an error if Python is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    from base.cli import Parser
    from base.errors import LayoutError, UserError, nearest
    from config import validation
    from config.command_line import SHAPE, Request, parse_request
    from config.schema import Layout, all_options
    from distributed import local_ranks
    from distributed.early_end import ending_all_ranks
    from distributed.launch import Launch, discover
    from distributed.placement import allowed_cores
    from tools.checker import scaling
    from tools.checker.layouts import some, with_given
    from tools.checker.shrink import shrink, unsaid
    from tools.checker.variants import CheckPlan, plan_of

MODEL = "gpt2-124m"  # the run if no options are given
MOST_RANKS = 16
OWN: tuple[str, ...] = ("--layouts", "--layout", "--ranks", "--minutes", "--all", "--random")
OWN += ("--at-once", "--cuda", "--cluster", "--program", "--module", "--json")
OWN += scaling.OPTIONS
# Options that do not go together, and why.
APART = {
    ("layout", "layouts"): "a check has the layouts that are named, or picks so many",
    ("layout", "ranks"): "a layout that is named says how many ranks it has",
    ("random", "layout"): "random runs have random layouts",
    ("random", "all"): "random runs never stop early",
    ("random", "cuda"): "random runs are compared in fp64, on CPUs",
    ("random", "json"): "random runs have a verdict each",
    ("random", "program"): "what is drawn are runs of train.py",
    ("random", "module"): "what is drawn are runs of train.py",
    ("program", "module"): "a module is checked as a program of its own",
}
SAVED_AFTER = 1  # the step after which the resumed run is saved
NO_VERDICT = 3  # the exit status of an error of this program
NO_ANSWER = {"verdict": "none"}  # beside a mistake, with --json


def main(arguments: list[str]) -> int:
    """Check the run of these arguments, print the verdict, and return the exit status.

    Raise UserError if an option is wrong; torch is imported after that.
    """
    if "--cluster" in arguments:
        from tools.checker.cluster import main as check_cluster  # for the ranks of a launcher

        return check_cluster(arguments)
    launch = Launch("python")
    try:
        launch = discover()
        return _check_here(arguments, launch)
    except UserError as mistake:
        # Rank 0 prints what all ranks find, and ends the job; a mistake of a rank's own comes late.
        if launch.size == 1:
            raise
        with ending_all_ranks(launch.watch):
            if launch.rank:
                time.sleep(launch.exit_delay)
            errors.exit_with(mistake, beside=NO_ANSWER)


def _check_here(arguments: list[str], launch: Launch) -> int:
    """Check the run of these arguments on this rank of a launch; a launch of one: on forks."""
    if scaling.is_asked(arguments):
        return scaling.main(arguments, _request)
    is_of_others = any(word.partition("=")[0] in ("--program", "--module") for word in arguments)
    if launch.size > 1 and not is_of_others:
        raise UserError(
            f"{launch.launcher} has started {launch.size} ranks, and check.py starts its own: call "
            f"it alone; --program, --module and --cluster use the ranks that are there"
        )
    given, train_arguments = _parser(is_of_others).parse_known_args(arguments)
    of_train = {"--config", "--set", *(f"--{name.replace('_', '-')}" for name in all_options())}
    for word in train_arguments:  # what is nearly one of this program's options
        flag = word.partition("=")[0]
        is_flag = flag.startswith("--") and flag not in of_train | {"--model"}
        if is_flag and (near := nearest(flag, OWN, 0.8)):
            raise UserError(f"unknown argument {word!r}{near}")
    _check_options(given)
    if is_of_others and {"-h", "--help"}.isdisjoint(train_arguments):
        return _check_program(given, train_arguments, launch)
    has_model = bool({"model", "config"} & _named(train_arguments))
    if given.random and not has_model:  # what is drawn says the shape; its options may be a part
        request = _request(["--model", MODEL, *train_arguments])
        request = dataclasses.replace(request, given=request.given - {"model"})
    else:
        request = _request(train_arguments)
    ranks = given.ranks or (8 if len(allowed_cores()) >= 8 else 4)
    if given.random:
        return _check_random(given, ranks, request, train_arguments)
    with tempfile.TemporaryDirectory(prefix="trine-check-") as folder:
        small, lines = shrink(request.config, Path(folder), given.cuda)
        lines += unsaid(request.config, small, request.given, lines)
        validation.check(small, 1)
        plan = plan_of(small, request.config, ranks, given.layouts, given.layout or ())
        wanted = given_layout(request)
        if given.layout and wanted:
            lines.append(f"without {_flags(wanted)}: the layouts are those of --layout")
        elif wanted:
            layouts, of_given = with_given(small, ranks, plan.layouts, wanted)
            plan = dataclasses.replace(plan, layouts=layouts)
            lines += of_given
        if not plan.every:
            raise LayoutError(f"this run has no layout but one rank, on up to {ranks} ranks")
        for note in request.notes:
            print(f"note: {note}", file=sys.stderr)
        introduction = [*plan.introduction(), *(f"small: {text}" for text in lines)]
        return _check(plan, given, Path(folder), introduction)


def given_layout(request: Request) -> dict[str, Any]:
    """Return the options of a layout that the user gave, without those that leave it open."""
    fields = {field.name for field in dataclasses.fields(Layout)} & set(request.given)
    values = {name: getattr(request.config.layout, name) for name in sorted(fields)}
    return {name: value for name, value in values.items() if value not in (None, "auto")}


def _flags(names: Iterable[str]) -> str:
    """Return options as a user writes them."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _check_options(given: Namespace) -> None:
    """Raise UserError if one of this program's options is out of range or goes with no other."""
    for name in ("layouts", "ranks", "random", "at_once"):
        value = getattr(given, name)
        flag = f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise UserError(f"{flag} is at least 1, not {value}")
    if given.ranks is not None and given.ranks > MOST_RANKS:
        raise UserError(f"--ranks is from 1 to {MOST_RANKS}, not {given.ranks}")
    if given.minutes is not None and not 0 < given.minutes < float("inf"):
        raise UserError(f"--minutes is a number above 0, not {given.minutes:g}")
    for (one, other), why in APART.items():
        if getattr(given, one) and getattr(given, other):
            raise UserError(f"give one of --{one} and --{other}: {why}")


def _check(plan: CheckPlan, given: Namespace, folder: Path, lines: Sequence[str]) -> int:
    """Run the layouts, print a line for each and the verdict, and return the exit status.

    lines: of the introduction.
    """
    local_ranks.prepare()
    with errors.installed():
        from tools.checker.engine import Engine
        from tools.checker.report import WIDTH
        from tools.checker.session import Session

    session = Session(given.json, given.all, given.minutes)
    session.say(*lines)
    with Engine(plan.small, _at_once(given), others=plan.others) as engine:

        def notes() -> Iterator[str]:
            """Yield a line on the variants that do not run, which the run of one rank has shown."""
            names = [each.name for each in plan.others if each not in engine.others]
            if names:
                why = "rounding decides updates, in 16 bits more of them"
                yield f"{'not run':{WIDTH}s} {', '.join(names)}: {why}"

        return session.judge(
            engine,
            lambda may_begin: _outcomes(engine, plan, folder, may_begin),
            len(plan.every),
            {"program": "trine"},
            notes,
        )


def _at_once(given: Namespace) -> int:
    """Return how many layouts run at the same time."""
    return given.at_once or (1 if given.cuda else max(2, len(allowed_cores()) // 2))


def _check_program(given: Namespace, arguments: Sequence[str], launch: Launch) -> int:
    """Check the program or the module of a user's file; print the verdict, return the exit status.

    arguments: those that are none of this program's options, which must be none.
    """
    if arguments:
        what = "--program" if given.program else "--module"
        raise UserError(
            f"unknown argument {arguments[0]!r}: {what} takes none of train.py's options"
        )
    changed = dict(_pair(text) for text in given.set or ())
    local_ranks.prepare()
    with errors.installed():
        from tools.checker.program_check import check_program

    return check_program(given, changed, _at_once(given), launch)


def _pair(text: str) -> tuple[str, str]:
    """Return the name and the value of --set."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"--set is NAME=VALUE, such as parallel_output=False, not {text!r}")
    return name, value


def _outcomes(
    runner: Any, plan: CheckPlan, folder: Path, may_begin: Callable[[], bool]
) -> Iterator[Any]:
    """Yield what came of each layout, and then of the runs that are saved and go on."""
    yield from runner.run(plan.layouts, may_begin)
    for number, each in enumerate(plan.resumes()):
        is_of_types = each.variant is not None and each.variant not in runner.others
        if may_begin() and not is_of_types:
            out = folder / f"run{number}"
            yield from runner.resume(each.saved_by, each.going_on, SAVED_AFTER, out, each.variant)


def _check_random(given: Namespace, ranks: int, request: Request, arguments: list[str]) -> int:
    """Check runs drawn at random, print those that differ, and return the exit status.

    request, arguments: the options of train.py that all of them have; --seed draws other runs.
    """
    from tools.checker.drawn import drawn

    parser = Parser("check.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--seed")
    _, fixed = parser.parse_known_args(arguments)
    seed = request.config.training.seed
    values = _values(request, {"seed"})
    if layout := [name for name in values if name in vars(Layout())]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(layout))
        raise UserError(f"--random draws its layouts: give it no {flags}")
    drawn(f"{seed}/0", fixed, values)  # a mistake is said before torch is loaded
    local_ranks.prepare()
    with errors.installed():
        from tools.checker.engine import Engine
        from tools.checker.report import line, verdict

    began = time.monotonic()
    at_once = _at_once(given)
    runs, wrong, ran = 0, 0, 0
    for number in range(given.random):
        if given.minutes and time.monotonic() - began > 60.0 * given.minutes:
            break
        name = f"{seed}/{number}"
        words = drawn(name, fixed, values)
        with tempfile.TemporaryDirectory(prefix="trine-check-") as folder:
            small, _ = shrink(_request(words).config, Path(folder))
            chosen = some(small, ranks, given.layouts or 2, name)
            with Engine(small, at_once) as runner:
                alone = runner.begin().alone
                outcomes = list(runner.run(chosen))
                differs = [*alone, *(outcome for outcome in outcomes if not outcome.is_equal)]
                if differs:
                    print(f"run {name}: {shlex.join(words)}", *alone, sep="\n")
                    print(*map(line, outcomes), *verdict(runner.reference, outcomes), sep="\n")
        runs, ran, wrong = runs + 1, ran + len(outcomes), wrong + bool(differs)
        print(f"{runs} runs, {ran} layouts, {wrong} runs differ", flush=True)
    return int(wrong > 0)


def _named(arguments: list[str]) -> set[str]:
    """Return the names of the flags in a command line, and its values too."""
    return {word.lstrip("-").partition("=")[0] for word in arguments}


def _values(request: Request, without: set[str]) -> dict[str, Any]:
    """Return the values of the options that were given, by name, but for those in `without`."""
    config = request.config
    groups = (config.model, config.training, config.data, config.run, config.layout)
    values = {name: value for group in groups for name, value in vars(group).items()}
    values["model"] = request.model
    return {name: values[name] for name in request.given if name not in without}


def _request(arguments: list[str]) -> Request:
    """Return the run of train.py's options; of GPT-2 if they name no model."""

    def defaults(options: Any) -> dict[str, Any]:
        """Return a length for a run without one: the check has steps of its own."""
        return {} if {"steps", "train_samples"} & set(options) else {"steps": 1}

    if _named(arguments).isdisjoint({"config", *SHAPE}):
        arguments = ["--model", MODEL, *arguments]
    return parse_request(arguments, __doc__ or "", defaults)


def _parser(is_of_others: bool = False) -> Parser:
    """Return the parser of the options that are not train.py's; --help is that of train.py.

    is_of_others: whether another program is checked, of which --set changes names.
    """
    parser = Parser("check.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--layouts", type=int, metavar="N")
    parser.add_argument("--layout", action="append", metavar="TEXT")
    parser.add_argument("--ranks", type=int, metavar="N")
    parser.add_argument("--minutes", type=float, metavar="M")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--random", type=int, metavar="N")
    parser.add_argument("--at-once", type=int, metavar="N")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--program", metavar="FILE")
    parser.add_argument("--module", metavar="FILE:CLASS")
    if is_of_others:
        parser.add_argument("--set", action="append", metavar="NAME=VALUE")
    return parser


if __name__ == "__main__":
    try:
        with errors.sentences(beside=NO_ANSWER):
            sys.exit(main(sys.argv[1:]))
    except Exception as error:  # an error of this program is no verdict on the code that it checks
        traceback.print_exc()
        if "--json" in sys.argv:
            said = {"error": f"{type(error).__name__}: {error}", "code": "internal"}
            print(json.dumps(said | {"status": NO_VERDICT} | NO_ANSWER), flush=True)
        sys.exit(NO_VERDICT)
