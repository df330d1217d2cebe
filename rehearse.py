"""Rehearses a run of any size without its cluster: the real trainer of every distinct rank, on fake
GPUs. Will every collective meet? Will it fit? What stops the host?

    python rehearse.py --world 384 --nodes 48 --gpu a100-80 --model bloom-176b --tp 4 --pp 12 ...

All of train.py's options are taken, and these:

    --world N       ranks of the run, default 1
    --nodes N       on so many nodes, default: as few as the GPUs of a node allow
    --gpu NAME      a machine of hardware/, default a100-80
    --all-ranks     run every rank, not only those that may differ
    --json FILE     write the answers as data too

Exit status: 0 if all is well; 1 if operations do not meet, or memory does not suffice; 2 a mistake.
"""

import json
import sys
from argparse import Namespace

from config.command_line import parse
from config.messages import Parser, UserError, exit_with
from config.validation import check_any_length
from emulator import device_guard
from planner import hardware


def main(arguments: list[str]) -> int:
    """Rehearse what the arguments say and print the answers; the exit status."""
    try:
        return _rehearse(arguments)
    except UserError as mistake:
        exit_with(mistake)


def _rehearse(arguments: list[str]) -> int:
    options, rest = _parser().parse_known_args(arguments)
    machine = hardware.load(options.gpu)
    nodes = _nodes(options, machine.node)
    config = check_any_length(parse(rest, __doc__), options.world)
    device_guard.load()
    from emulator import answers, rehearsal

    case = rehearsal.Case(config, options.world, nodes, machine.device, options.all_ranks)
    (run,) = rehearsal.rehearse([case])
    answer = answers.of(run, machine)
    print(answer.text)
    if options.json:
        try:
            with open(options.json, "w") as file:
                json.dump(answer.data, file, indent=1)
        except OSError as error:
            raise UserError(f"cannot write --json {options.json}: {error.strerror}") from None
    return 0 if answer.good else 1


def _parser() -> Parser:
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--gpu", default="a100-80")
    parser.add_argument("--all-ranks", action="store_true")
    parser.add_argument("--json")
    return parser


def _nodes(options: Namespace, per_node: int) -> int:
    """The number of nodes; UserError if it does not divide the ranks."""
    if options.world < 1:
        raise UserError(f"--world must be at least 1, not {options.world}")
    nodes = options.nodes or -(-options.world // per_node)
    if nodes < 1 or options.world % nodes:
        raise UserError(f"nodes({nodes}) does not divide world({options.world})")
    return nodes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
