"""Rehearses a run of any size without its cluster: the real trainer of every distinct rank, on fake
GPUs. Will every collective meet? Will it fit?

    python rehearse.py --gpus 384 --nodes 48 --gpu a100-80 --model bloom-176b --tp 4 --pp 12 ...

All of train.py's options are taken, and these:

    --gpus N        ranks of the run, one for each GPU, default 1
    --nodes N       on so many nodes, default: as few as the GPUs of a node allow
    --gpu NAME      a machine as for plan.py, default a100-80; with --on cpu: cpu
    --calibration FILE  what was measured of --gpu, its memory too, as for plan.py
    --routing even|one-rank  of tokens to experts: as many to each, or all that a group of --ep
                    ranks has to its first rank, which then holds the most
    --all-ranks     run every rank, not only those that may differ
    --json FILE     write the answers as data too
    --verbose       for developers of Trine: also where its code stops the host, and its kernels

How long does a step take? One real device stands for each stage in turn (docs/rehearsal.md):

    --on cpu|cuda       run there; the links of --gpu say what the other ranks' part takes
    --links FILE        allreduce.csv of benchmarks/allreduce.py: operations by size, not the links

Exit status: 0 if all is well; 1 if operations do not meet, or memory does not suffice; 2 a mistake.
"""

import json
import sys
import time
from argparse import Namespace
from dataclasses import replace

from config.command_line import parse_request
from config.messages import Parser, UserError, check_file, exit_with, write_file
from config.schema import Config
from config.validation import check_any_length
from emulator import device_guard
from planner import hardware
from schedules.choice import decide
from schedules.choice import note as note_of

MOST_RANKS = 1_000_000  # largest --gpus
CLEAR = "\r\x1b[K"
LINES = 4  # lines of progress if standard error is not a terminal


def main(arguments: list[str]) -> int:
    """Rehearse the run of these arguments, print the answers, and return the exit status."""
    try:
        return _rehearse(arguments)
    except UserError as mistake:
        exit_with(mistake)


def _rehearse(arguments: list[str]) -> int:
    options, rest = _parser().parse_known_args(arguments)
    check_file(options.json)
    usual = "cpu" if options.on == "cpu" else "a100-80"
    machine = hardware.load(options.gpu or usual, options.calibration)
    nodes = _nodes(options, machine.node)
    request = parse_request(rest, __doc__, lambda _: {"precision": machine.precision})
    config = check_any_length(request.config, options.gpus)
    fused = ["--compile: what it fuses is rehearsed as it is"] * config.run.compile
    layout = config.layout.automatic(config.model.seq_length, on_gpu=options.on != "cpu")
    device = "cpu" if options.on == "cpu" else "cuda"
    other = [f"--device {config.run.device}: rehearsed on {options.on or 'fake GPUs'}"]
    other *= config.run.device not in ("auto", device)
    config, choice = decide(replace(config, layout=layout), device)
    found = [note_of(config.layout, choice)] if choice else []
    for note in [*filter(None, [machine.note]), *request.notes, *fused, *other, *found]:
        print(f"note: {note}", file=sys.stderr)
    if options.on:
        return _emulate(options, config, replace(machine, node=options.gpus // nodes))
    if options.links:
        raise UserError("--links is about seconds: give --on cpu|cuda")
    if config.training.optimizer == "adamw8bit":
        why = "bitsandbytes' kernels write to memory, and fake GPUs have none"
        raise UserError(f"--optimizer adamw8bit is not rehearsed: {why}; plan.py has its memory")
    device_guard.load()
    from emulator import answers, rehearsal

    case = rehearsal.Case(
        config, options.gpus, nodes, machine.device, options.all_ranks, options.routing
    )
    show = Progress("ranks rehearsed", len(rehearsal.ranks_of(case)))
    try:
        (run,) = rehearsal.rehearse([case], show)
    finally:
        show.close()
    answer = answers.of(run, machine, options.verbose)
    print(answer.text)
    write_file(options.json, json.dumps(answer.data, indent=1))
    return 1 if answer.data["finding"] else 0


def _emulate(options: Namespace, config: Config, machine: hardware.Machine) -> int:
    """Measure each stage on the device, print the whole run's step, and return the exit status."""
    if options.all_ranks:
        raise UserError("--all-ranks is about operations: --on runs one rank of each stage")
    if config.layout.zero == 3 and options.gpus > 1:
        raise UserError("--on does not emulate --zero 3, whose groups are torch's own")
    if config.model.experts > 1:
        raise UserError("--on does not emulate experts: how long they take depends on the routing")
    if config.layout.vocab_pp:
        raise UserError("--on does not emulate --vocab-pp: its passes wait for other stages")
    if config.layout.schedule not in ("gpipe", "1f1b", "zb-h1"):
        name = config.layout.schedule
        raise UserError(f"--on does not emulate --schedule {name}: it takes gpipe, 1f1b or zb-h1")
    import torch

    from emulator import emulation, recording

    if options.on == "cuda" and not torch.cuda.is_available():
        raise UserError("--on cuda: torch sees no CUDA device here")
    here = "CPU" if options.on == "cpu" else torch.cuda.get_device_name()
    if not machine.has_device(here):
        every = [name for name in hardware.names() if hardware.load(name).has_device(here)]
        both = f"--gpu {machine.name} has {machine.device!r}, and here is {here!r}"
        raise UserError(f"{both}: give --gpu {' or '.join(every) or 'FILE.toml'}")
    link = recording.MachineLinks(machine, config.layout)
    price = recording.MeasuredLinks(options.gpus, options.links) if options.links else link
    show = Progress("stages measured", config.layout.pp)
    try:
        stages = emulation.measured(config, options.gpus, machine.node, options.on, show)
    finally:
        show.close()
    answer = emulation.report(config, options.gpus, machine, stages, price.seconds)
    print(answer.text)
    write_file(options.json, json.dumps(answer.data, indent=1))
    return 0


class Progress:
    """Shows on standard error how many of `total` ranks or stages are done; `what` names them.

    On a terminal one line is rewritten; elsewhere a line is printed for each quarter.
    """

    def __init__(self, what: str, total: int):
        self.what = what
        self.total = total
        self.began = time.monotonic()
        self._on_terminal = sys.stderr.isatty()
        self._quarter = -1
        self(0)

    def __call__(self, done: int) -> None:
        """Show that `done` of the ranks or stages are done."""
        text = f"{self.what}: {done} of {self.total}, {time.monotonic() - self.began:.0f} s"
        quarter = done * LINES // self.total
        if self._on_terminal:
            print(f"{CLEAR}{text}", end="", file=sys.stderr, flush=True)
        elif quarter > self._quarter:
            print(text, file=sys.stderr, flush=True)
        self._quarter = quarter

    def close(self) -> None:
        """Remove the line from the terminal."""
        if self._on_terminal:
            print(CLEAR, end="", file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_gpus("ranks of the run", default=1)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--routing", choices=("even", "one-rank"), default="even")
    parser.add_argument("--all-ranks", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--on", choices=("cpu", "cuda"))
    for name in ("--gpu", "--json", "--calibration", "--links"):
        parser.add_argument(name)
    return parser


def _nodes(options: Namespace, per_node: int) -> int:
    """Return the number of nodes; UserError if it does not divide the number of ranks."""
    if not 1 <= options.gpus <= MOST_RANKS:
        raise UserError(f"--gpus must be from 1 to {MOST_RANKS}, not {options.gpus}")
    if options.nodes is None:
        fewest = -(-options.gpus // per_node)
        return next(n for n in range(fewest, options.gpus + 1) if options.gpus % n == 0)
    if options.nodes < 1 or options.gpus % options.nodes:
        raise UserError(f"nodes({options.nodes}) does not divide gpus({options.gpus})")
    return options.nodes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
