"""Keeps a run going: starts its ranks again, in the same allocation, when a fault has ended them.

    python supervise.py -- mpirun -n 4 python train.py ... --out OUT --resume auto
    python supervise.py --spare-nodes 1 -- srun --mpi=pmi2 python train.py ... --resume auto

With too few nodes left the job goes back to the queue. With --gpu the run first continues on fewer
nodes: the planner finds the best layout for what is left, and the rehearsal checks it.

Every decision is a line of the log and of OUT/supervisor.jsonl, with the evidence. Exit status: 0
finished; 75 queue the job again; that of the ranks otherwise, such as 2, a user's mistake.
"""

import math
import os
import sys
from argparse import Namespace

# python -P and PYTHONSAFEPATH leave out the folder of the program.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from base import errors  # imported first, because it refuses a Python that is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    from base.cli import Parser
    from base.errors import UserError
    from config.command_line import parse
    from tools.supervisor.command import Command, read_command
    from tools.supervisor.fewer import Fewer, Options
    from tools.supervisor.session import Supervisor


def main(arguments: list[str]) -> int:
    """Supervise the ranks' command and return the exit status; UserError for wrong options.

    arguments: the words of the command line: options, `--`, and the ranks' command.
    """
    end_of_options = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser.described(__doc__ or "")
    parser.usage = "supervise.py [--OPTION VALUE ...] -- PROGRAM ..."
    add = parser.add_argument
    text = "nodes of the Slurm job to keep free as spares (default: 0)"
    add("--spare-nodes", type=int, default=0, metavar="N", help=text)
    text = "stop if there are more restarts in an hour (default: 6)"
    add("--restarts-per-hour", type=int, default=6, metavar="N", help=text)
    text = "continue on fewer nodes, too; the ranks' machine, as for plan.py"
    add("--gpu", metavar="NAME", help=text)
    add("--calibration", metavar="FILE", help="measured rates of --gpu, as for plan.py")
    text = "how many times as long a step may take on fewer nodes (default: 1.5)"
    add("--max-slowdown", type=float, metavar="X", help=text)
    options, unknown = parser.parse_known_args(arguments[:end_of_options])  # those before `--`
    if unknown and end_of_options == len(arguments):
        raise UserError(
            f"give -- before the program to supervise: supervise.py -- {unknown[0]} ..."
        )
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    for name in ("spare_nodes", "restarts_per_hour"):
        number = getattr(options, name)
        if number < 0:
            raise UserError(f"--{name.replace('_', '-')} must be at least 0, not {number}")
    ranks_command = arguments[end_of_options + 1 :]
    command = read_command(ranks_command, options.spare_nodes)
    fewer_nodes = _layouts_for_fewer_nodes(command, options)  # None without --gpu
    # The session starts the command, and again after each fault, until the run is done or hopeless.
    return Supervisor(command, options.restarts_per_hour, fewer_nodes).run()


def _layouts_for_fewer_nodes(command: Command, options: Namespace) -> Fewer | None:
    """Return the object that finds layouts for fewer nodes; None without --gpu.

    The session asks it for a layout if too few nodes are left for the run's layout. command: the
    ranks' command. Raise UserError if the options do not go together.
    """
    if options.gpu is None:
        if options.calibration or options.max_slowdown is not None:
            raise UserError("--calibration and --max-slowdown need --gpu NAME")
        return None
    slowdown = 1.5 if options.max_slowdown is None else options.max_slowdown
    if not 1 <= slowdown < math.inf:
        raise UserError(f"--max-slowdown must be at least 1 and finite, not {slowdown:g}")
    if not command.nodes:
        raise UserError(
            f"--gpu {options.gpu} is for other numbers of nodes, which needs a Slurm job: ranks by "
            "srun without options that place them, and --ntasks-per-node"
        )
    try:
        config = parse(command.options)
    except UserError:
        return None  # the options of train.py are wrong: the ranks print this error and end
    return Fewer(command, config, Options(options.gpu, options.calibration, slowdown))


if __name__ == "__main__":
    with errors.sentences():
        sys.exit(main(sys.argv[1:]))
