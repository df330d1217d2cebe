"""The planner's own flags: what each means, which questions read it, and its limits.

    add("layouts", parser)      all flags; --help shows those that the question reads
    check(options)              UserError for a value out of range, or a flag that is not read

All other flags are train.py's. To add a flag, add a line to FLAGS.
"""

import math
from argparse import SUPPRESS, Namespace
from dataclasses import dataclass
from typing import Any

from config.messages import Parser, UserError
from planner import hardware, risk

ON_GPUS = ("layouts", "stages", "days", "largest", "rampup", "timeline", "compare")
DEFAULT_TOP = 20  # lines


@dataclass(frozen=True)
class Flag:
    """A flag. type: of its value; bool for a switch. questions: those that read it, None: all.
    below: what its value must be below, where it must be above 0 too.
    """

    name: str
    help: str
    type: type = str
    metavar: str | None = None
    questions: tuple[str, ...] | None = None
    below: float | None = None

    @property
    def flag(self) -> str:
        """Return the flag as it is typed."""
        return f"--{self.name.replace('_', '-')}"

    def is_read_by(self, question: str) -> bool:
        """Whether the flag changes that question's answer."""
        return self.questions is None or question in self.questions


FLAGS = (
    Flag("config", "TOML file of options, a run's folder, its run.json, or a checkpoint"),
    Flag("gpus_per_node", "of a node, if not as in the machine's file", int, "N", below=1e4),
    Flag("nodes", "full nodes (default 1)", int, questions=ON_GPUS, below=1e6),
    Flag("gpus", "GPUs, in place of nodes", int, questions=ON_GPUS, below=1e6),
    Flag("calibration", "measured rates of this machine, TOML", metavar="FILE"),
    Flag("network", "GB/s of a node as measured, in place of the datasheet's", float, below=1e5),
    Flag(
        "top",
        f"lines to print (default {DEFAULT_TOP})",
        int,
        questions=("layouts", "shapes"),
        below=math.inf,
    ),
    Flag("rejected", "print every rejected layout", bool, questions=("layouts",)),
    Flag("tokens", "tokens to train on", float, questions=("days",), below=1e18),
    Flag("size", "parameters wanted", float, questions=("shapes",), below=1e16),
    Flag(
        "risk",
        f"of running out of memory, accepted ({risk.DEFAULT})",
        float,
        questions=("layouts", "days", "rampup"),
    ),
    Flag(
        "rehearse",
        "rehearse the first N layouts",
        int,
        "N",
        questions=("layouts",),
        below=math.inf,
    ),
    Flag(
        "deadline",
        "days: fewest GPU-hours within them",
        float,
        "DAYS",
        questions=("rampup",),
        below=1e5,
    ),
    Flag(
        "restart",
        "minutes that a change of nodes takes (10)",
        float,
        "MINUTES",
        questions=("rampup",),
    ),
    Flag("stages", "write the stages, for scripts/stages.py", str, "FILE", ("rampup",)),
    Flag(
        "submit",
        "submit the first: sbatch's options and the batch file",
        str,
        "WORDS",
        ("rampup",),
    ),
    Flag("trace", "write a Chrome trace", str, "FILE", ("timeline",)),
    Flag("picture", "draw tokens/s over memory of all layouts", str, "FILE.svg", ("layouts",)),
    Flag(
        "price_per_gpu_hour",
        "adds what a billion tokens cost",
        float,
        "PRICE",
        ("layouts", "days"),
        below=1e6,
    ),
    Flag(
        "watts_per_gpu",
        "power, in place of the datasheet's",
        float,
        "WATTS",
        ("layouts", "days"),
        below=1e5,
    ),
    Flag(
        "fp8",
        "planned only: linear layers of blocks in fp8",
        bool,
        questions=("layouts", "days", "stages", "timeline", "compare", "model"),
    ),
)


def add(question: str, parser: Parser) -> None:
    """Add the planner's own flags; --help shows those that the question reads."""
    names = ", ".join(hardware.names())
    machines = f"machine: {names}; a family such as a100; or a FILE.toml like one"
    parser.add_argument("--gpu", help=machines, metavar="NAME")
    parser.add_argument("--model", help=SUPPRESS)  # one of train.py's, listed with them
    for flag in FLAGS:
        text = flag.help if flag.is_read_by(question) else SUPPRESS
        if flag.name == "gpus":
            parser.add_gpus(text)
            continue
        kind: dict[str, Any] = {"type": flag.type, "metavar": flag.metavar}
        if flag.type is bool:
            kind = {"action": "store_true", "default": None}
        parser.add_argument(flag.flag, help=text, **kind)


def check(options: Namespace) -> None:
    """Raise UserError for a value out of range, a flag that the question does not read, or flags
    that do not go together; give --top and --risk their defaults.
    """
    if options.calibration and not options.gpu:
        raise UserError("--calibration needs --gpu: which machine was it measured on?")
    given = [flag for flag in FLAGS if getattr(options, flag.name) is not None]
    for flag in given:
        _check_range(flag, getattr(options, flag.name))
    if options.risk is not None and not 0 < options.risk <= 1:
        raise UserError(f"--risk must be above 0 and at most 1, not {options.risk:g}")
    if options.nodes and options.gpus:
        raise UserError(f"give --nodes({options.nodes}) or --gpus({options.gpus}), not both")
    for flag in given:
        if flag.questions and not flag.is_read_by(options.question):
            readers = _listed(flag.questions)
            raise UserError(f"{flag.flag} goes with {readers}, not {options.question}")
    options.top = DEFAULT_TOP if options.top is None else options.top
    options.risk = risk.DEFAULT if options.risk is None else options.risk


def _check_range(flag: Flag, number: float) -> None:
    if flag.below is None or 0 < number < flag.below:
        return
    limit = f"below {flag.below:g}" if number > 0 else "above 0"
    raise UserError(f"{flag.flag} must be {limit}, not {number:g}")


def _listed(names: tuple[str, ...]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
