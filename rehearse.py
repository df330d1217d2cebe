"""Rehearses a run of any size without its cluster: the real trainer of every distinct rank, on fake
GPUs. Do all collectives match? Does it fit?

    python rehearse.py --gpus 384 --nodes 48 --gpu a100-80 --model bloom-176b --tp 4 --pp 12 ...

All of train.py's options are taken, and these:

    --gpus N        ranks of the run, one for each GPU, default 1
    --nodes N       nodes of the run, default: as few as the GPUs of a node allow
    --gpu NAME      a machine as for plan.py, default a100-80
    --calibration FILE  measured rates and memory of that machine, as for plan.py
    --routing even|one-rank  how an MoE model routes tokens: evenly over the experts, or all tokens
                    of an ep group to its first rank, the worst case for memory
    --all-ranks     run every rank, not only those that may differ
    --json FILE     also write the answers as JSON

Exit status: 0 if all is well; 1 if collectives or messages do not match, or memory is
not enough; 2 a mistake.
"""

import json
import os
import sys
import time
from argparse import Namespace
from dataclasses import replace

# python -P and PYTHONSAFEPATH leave out the folder of the program.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from base import errors

if __name__ == "__main__":
    errors.begin_program()

from base.cli import Parser
from base.errors import LayoutError, UserError
from base.paths import check_file, write_file
from config.command_line import parse_request
from config.validation import check_any_length
from costs import auto_schedule, hardware
from tools.emulator import device_guard

MOST_RANKS = 1_000_000  # largest --gpus
LINES = 4  # lines that RankProgress prints after its first, if nothing takes long
SILENCE = 15.0  # seconds after which RankProgress prints a line without a further quarter


def main(arguments: list[str]) -> int:
    """Rehearse the run of these arguments, print the answers, and return the exit status.

    A UserError ends the program with one line and the exit status 2.
    """
    with errors.sentences():
        return _rehearse(arguments)


def _rehearse(arguments: list[str]) -> int:
    """Do the work of `main`: read the arguments, rehearse each rank, print the answers.

    Return the exit status. Raise UserError for wrong arguments.
    """
    options, train_arguments = option_parser().parse_known_args(arguments)
    check_file(options.json)
    machine = hardware.load(options.gpu, options.calibration)
    nodes = nodes_of(options, machine.node)
    request = parse_request(train_arguments, __doc__, lambda _: {"precision": machine.precision})
    # The same decisions as at the start of a run, for GPUs: checks, layout, then the schedule.
    config = check_any_length(request.config, options.gpus, "GPUs")
    layout = config.layout.automatic(config.model.seq_length, on_gpu=True)
    config, decided = auto_schedule.decide(replace(config, layout=layout), "cuda")
    notes = list(request.notes)
    if machine.note:
        notes.insert(0, machine.note)
    if config.run.compile:
        notes.append("--compile: what it fuses is rehearsed as it is")
    if config.run.device not in ("auto", "cuda"):
        notes.append(f"--device {config.run.device}: rehearsed on fake GPUs")
    if decided:  # --schedule auto has chosen a schedule
        notes.append(auto_schedule.note(decided))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    own_kernels = {"adamw8bit": "bitsandbytes'", "apex": "apex'"}.get(config.training.optimizer)
    if own_kernels:
        given = f"--optimizer {config.training.optimizer}"
        why = f"{own_kernels} kernels write to memory, and fake GPUs have none"
        raise UserError(f"{given} is not rehearsed: {why}; plan.py has its memory")
    # This imports torch with a library that lets it run on fake GPUs: no import before may do so.
    device_guard.load()
    from tools.emulator import answers, rehearsal

    case = rehearsal.RehearsalCase(
        config, options.gpus, nodes, machine.device, options.all_ranks, options.routing
    )
    ranks = len(rehearsal.ranks_of(case))
    with rehearsal.processes(ranks, machine.device) as pool:
        run = rehearsal.rehearse(case, pool, RankProgress(ranks))
    answer = answers.of(run, machine)
    print(answer.text)
    write_file(options.json, json.dumps(answer.data, indent=1))
    return 1 if answer.data["finding"] else 0


class RankProgress:
    """Prints to standard error how many of `total` ranks have ended, and since when it works.

    There is a line for each quarter of the ranks, and one after SILENCE seconds without a line: the
    first rank of a large model takes minutes.
    """

    def __init__(self, total: int):
        """Begin with no rank done, and print so; total: the number of ranks to rehearse."""
        self.total = total
        self.began = time.monotonic()
        self._quarter = -1  # the last quarter that was printed
        self._printed = self.began  # when the last line was printed
        self(0)

    def __call__(self, done: int) -> None:
        """Note that `done` ranks have ended; print a line if there is something to say.

        The rehearsal calls this after each rank, and every few seconds.
        """
        quarter = done * LINES // self.total
        now = time.monotonic()
        is_silent = now - self._printed >= SILENCE
        if quarter > self._quarter or is_silent:
            text = f"ranks rehearsed: {done} of {self.total}, {now - self.began:.0f} s"
            if is_silent:
                text += (
                    "; each builds its model and runs two steps on fake GPUs, on a core of its own"
                )
            print(text, file=sys.stderr, flush=True)
            self._printed = now
        self._quarter = quarter


def option_parser() -> Parser:
    """Return the parser of the options that train.py does not have.

    `_rehearse` gives all other options to the parser of train.py. The texts of --help are this
    file's docstring.
    """
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_gpus("number of ranks of the run, each with a GPU (default 1)", default=1)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--routing", choices=("even", "one-rank"), default="even")
    parser.add_argument("--all-ranks", action="store_true")
    parser.add_argument("--gpu", default="a100-80")
    parser.add_argument("--json")
    parser.add_argument("--calibration")
    return parser


def nodes_of(options: Namespace, per_node: int) -> int:
    """Return the number of nodes; UserError if it does not divide the number of ranks.

    per_node: the GPUs of a node. Without --nodes the result is the smallest number that divides the
    ranks and has enough GPUs: 12 ranks on nodes of 8 GPUs need 2 nodes, with 6 ranks each.
    """
    if not 1 <= options.gpus <= MOST_RANKS:
        raise UserError(f"--gpus must be from 1 to {MOST_RANKS}, not {options.gpus}")
    if options.nodes is None:
        fewest = -(-options.gpus // per_node)
        return next(n for n in range(fewest, options.gpus + 1) if options.gpus % n == 0)
    if options.nodes < 1 or options.gpus % options.nodes:
        raise LayoutError(f"nodes({options.nodes}) does not divide gpus({options.gpus})")
    return options.nodes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
