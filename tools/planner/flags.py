"""Defines the planner's own flags: the meaning of each, and its limits.

    add(parser, {"top", "risk"})    all flags; --help shows these two, and those in EVERYWHERE
    check(options, read, readers)   UserError for a value out of range, or a flag that is not read

A question of plan.py, such as `layouts`, reads some of the flags. Every flag is accepted by the
parser of every question, so that a flag which the question does not read gets a helpful error.

All other flags are train.py's. To add a flag, add a line to FLAGS, and its name to the questions of
plan.py that read it.
"""

import math
import re
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from base.cli import UNITS, Parser
from base.errors import UserError
from costs import hardware, networks, risk
from costs.networks import Network
from tools.planner.programs import PROGRAMS

DEFAULT_TOP = 20  # the number of lines of a table without --top
# The names of the flags that every question reads.
EVERYWHERE = ("config", "gpus_per_node", "calibration", "network")


# A rate of a network, with or without its unit: 25, 25GB, 25 GB/s; 200Gb/s are bits.
RATE = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?) *(?:([KMGT])(B|b|bit)(?:ps|/s)?)?")


MOST_RATE = 1e14  # bytes/s; a --network as fast as this is a mistake of its unit
# A number of parameters: 7e9, 7B, 350M, 1.5T.
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:E[+-]?[0-9]+)?)([MBT])?")


def network(text: str) -> Network:
    """Return the network of --network: one of networks.toml by its name, or one of a measured rate.

    text: a name, or the rate that all ranks of a node together reach to other nodes, in GB/s or
    with a unit. Raise UserError unless the rate is above 0 and below MOST_RATE.
    """
    if text in networks.names():
        return networks.load(text)
    measured = 1e9 * rate(text)  # bytes/s
    if not 0 < measured < MOST_RATE:
        limit = f"below {MOST_RATE / 1e9:g}" if measured > 0 else "above 0"
        raise UserError(f"--network must be {limit} GB/s, not {measured / 1e9:g}")
    return Network("", "", measured, measured, "")


def rate(text: str) -> float:
    """Return a rate of the command line in GB/s; a number without a unit is in GB/s."""
    found = RATE.fullmatch(text.strip())
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    if found is None or math.isnan(number):
        known = ", ".join(networks.names())
        such = "such as 25, 25GB/s or 200Gb/s"
        raise ArgumentTypeError(f"{text!r} is no rate in GB/s, {such}, and none of {known}")
    if found[2] is None:
        return number
    bits = 1 if found[3] == "B" else 8
    return number * UNITS[found[2].replace("G", "B")] / 1e9 / bits


def size(text: str) -> float:
    """Return a number of parameters, such as 7e9, 7B or 350M."""
    found = SIZE.fullmatch(text.strip().upper())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is no number of parameters, such as 180B or 350M")
    return float(found[1]) * {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}[found[2] or ""]


class Flag(NamedTuple):
    """A flag of the command line.

    type: the type of its value, or a function that reads it; bool: a switch without a value. below:
    the value must be above 0 and below this number; None: any value. many: the flag takes
    several values. repeated: the flag may be given several times, with a value each.
    """

    help: str
    type: Callable[[str], Any] = str
    metavar: str | None = None
    below: float | None = None
    many: bool = False
    repeated: bool = False


SPELLED = {"program": "--for"}  # flags whose name in code is another one

FLAGS = {
    "program": Flag(f"answer for {' or '.join(PROGRAMS)}, with its command", str, "PROGRAM"),
    "fp8": Flag("linear layers in fp8, with --for", bool),
    "config": Flag("TOML file of options, a run's folder, its run.json, or a checkpoint"),
    "gpus_per_node": Flag("GPUs of a node, if not as in the machine's file", int, "N", 1e4),
    "nodes": Flag("full nodes (default 1)", int, None, 1e6),
    "gpus": Flag("GPUs, in place of nodes", int, None, 1e6),
    "calibration": Flag("TOML file of measured rates of this machine", str, "FILE"),
    "network": Flag(
        f"measured GB/s of a node, in place of the datasheet's; or {', '.join(networks.names())}",
        network,
        "GB/s",
    ),
    "measured": Flag(
        "correct by a run: its folder, or 'tp 4 pp 2 mbs 1 = 5.31 s'; may be given several times",
        str,
        "RUN",
        repeated=True,
    ),
    "top": Flag(f"lines to print (default {DEFAULT_TOP})", int, None, math.inf),
    "rejected": Flag("print every rejected layout", bool),
    "tokens": Flag("tokens to train on", float, None, 1e18),
    "gpu_hours": Flag("budget, on --gpus or for --days", float, "H", 1e12),
    "days": Flag("days that the run may take", float, "DAYS", 1e5),
    "law": Flag("scaling law: chinchilla (the default) or gemstones", str, "LAW"),
    "tokens_per_parameter": Flag("training tokens, in place of the law's", float, "N", 1e6),
    "size": Flag("parameters of the model, such as 180B", size, "N", 1e15),
    "write": Flag("write the run as a run file, with a ladder of small runs", str, "RUN.toml"),
    "risk": Flag(f"accepted risk of running out of memory (default {risk.DEFAULT})", float),
    "nodes_by_batch": Flag(
        "segments of the run: the number of nodes from each batch size on",
        metavar="BATCH:NODES",
        many=True,
    ),
    "jobs": Flag("write the segments, for scripts/growing_jobs.py", str, "FILE"),
    "submit": Flag("submit the first segment: sbatch's options and the batch file", str, "WORDS"),
    "trace": Flag("write a Chrome trace", str, "FILE"),
    "picture": Flag("draw tokens/s over memory of all layouts", str, "FILE.svg"),
    "price_per_gpu_hour": Flag("adds the cost of a billion tokens", float, "PRICE", 1e6),
    "watts_per_gpu": Flag("power of a GPU, in place of the datasheet's", float, "WATTS", 1e5),
    "sbatch": Flag("write a Slurm batch file for the first layout", str, "FILE"),
    "launch": Flag("launcher of the commands: 'srun --mpi=pmix -n {ranks}'", str, "WORDS"),
}


# Flags that went, and what to give instead.
GONE = {
    "deadline": "name the segments yourself: --nodes-by-batch 192:18 400:32 2048:48",
    "restart": "the days of `rampup` are without restarts",
}


def add(parser: Parser, read: Collection[str]) -> None:
    """Add all flags of the planner to a question's parser.

    read: the names of the flags that the question reads. --help shows these and EVERYWHERE.
    """
    names = ", ".join(hardware.names())
    machines = f"machine: {names}; a family such as a100; or a FILE.toml like one"
    parser.add_argument("--gpu", help=machines, metavar="NAME")
    # --help lists --model among train.py's flags, so it is hidden among the planner's.
    parser.add_argument("--model", help=SUPPRESS)
    for name, flag in FLAGS.items():
        text = flag.help if name in read or name in EVERYWHERE else SUPPRESS
        kind: dict[str, Any] = {"type": flag.type, "metavar": flag.metavar}
        if flag.type is bool:
            kind = {"action": "store_true", "default": None}
        if flag.many:
            kind["nargs"] = "+"
        if flag.repeated:
            kind["action"] = "append"
        if name == "gpus":
            parser.add_gpus(text)
        else:
            parser.add_argument(words_of(name), dest=name, help=text, **kind)
    for name in GONE:
        parser.add_argument(words_of(name), help=SUPPRESS)


def words_of(name: str) -> str:
    """Return an option's name as the user types it: "gpus_per_node" becomes "--gpus-per-node"."""
    if name in SPELLED:
        return SPELLED[name]
    return f"--{name.replace('_', '-')}"


def check(
    options: Namespace, read: Collection[str], readers: Callable[[str], Collection[str]]
) -> None:
    """Check the values of the planner's flags, and give --top and --risk their defaults.

    Raise UserError for a value out of range, for flags that do not go together, and for a flag that
    the question does not read. read: the names of the flags that it reads. readers: returns the
    questions that read a flag, for the error's text.
    """
    if options.calibration and not options.gpu:
        raise UserError("--calibration needs --gpu: which machine was it measured on?")
    for name, instead in GONE.items():
        if getattr(options, name) is not None:
            raise UserError(f"{words_of(name)} is gone: {instead}")
    given = {name: getattr(options, name) for name in FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        below = FLAGS[name].below
        if below is not None and not 0 < value < below:
            limit = f"below {below:g}" if value > 0 else "above 0"
            raise UserError(f"{words_of(name)} must be {limit}, not {value:g}")
    if options.risk is not None and not 0 < options.risk <= 1:
        raise UserError(f"--risk must be above 0 and at most 1, not {options.risk:g}")
    if options.fp8 and not options.program:
        raise UserError("--fp8 is gone: train.py cannot train in fp8; --for PROGRAM plans another")
    if options.nodes and options.gpus:
        raise UserError(f"give --nodes({options.nodes}) or --gpus({options.gpus}), not both")
    for name in given:
        if name not in read and name not in EVERYWHERE:
            # The questions that read the flag, as a list in words: "layouts, days and rampup".
            goes = " and ".join(", ".join(readers(name)).rsplit(", ", 1))
            raise UserError(f"{words_of(name)} goes with {goes}, not {options.question}")
    options.top = options.top or DEFAULT_TOP
    options.risk = options.risk or risk.DEFAULT
