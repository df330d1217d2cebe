"""Keeps a run going: starts its ranks again, in the same allocation, when a fault has ended them.

    python supervise.py -- mpirun -n 4 python train.py ... --out OUT --resume auto
    python supervise.py --spare-nodes 1 -- srun --mpi=pmi2 python train.py ... --resume auto

    --spare-nodes N         nodes of the Slurm job that the ranks leave free, default 0
    --restarts-per-hour N   at most, default 6

With too few nodes left the job goes back to the queue; with --gpu the run first goes on with fewer:

    --gpu NAME              the machine of plan.py that the ranks run on: the planner finds the best
                            layout for what is left, and the rehearsal checks it
    --calibration FILE      what was measured of it, as for plan.py
    --max-slowdown X        how many times as long a step may take, default 1.5
    --keep-tp ...           and -pp, -micro-batch-size, -recompute, -zero: these stay as given

Every decision is a line of the log and of OUT/supervisor.jsonl, with the evidence. Exit status: 0
finished; 75 queue the job again; that of the ranks otherwise, such as 2, a user's mistake.
"""

import math
import sys
from argparse import Namespace

from config import messages  # first: it ends a Python that is too old

with messages.installed():
    from config.command_line import parse
    from config.messages import Parser, UserError
    from supervisor.command import Command, read_command
    from supervisor.fewer import KEPT, Fewer, Options
    from supervisor.session import Session


def main(arguments: list[str]) -> int:
    """Supervise the command after `--` and return the exit status; UserError for wrong options."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser("supervise.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--spare-nodes", type=int, default=0, help="of the job, left free")
    parser.add_argument("--restarts-per-hour", type=int, default=6, help="at most (default 6)")
    parser.add_argument("--gpu", metavar="NAME", help="go on with fewer nodes: the planner's name")
    parser.add_argument("--calibration", metavar="FILE", help="what was measured of --gpu")
    parser.add_argument("--max-slowdown", type=float, metavar="X", help="of a step (default 1.5)")
    for name in KEPT:
        flag = f"--keep-{name.replace('_', '-')}"
        parser.add_argument(flag, action="store_true", help="as given, with fewer nodes too")
    given = parser.parse_args(arguments[:at])
    for name in ("spare_nodes", "restarts_per_hour"):
        if (number := getattr(given, name)) < 0:
            raise UserError(f"--{name.replace('_', '-')} must be at least 0, not {number}")
    command = read_command(arguments[at + 1 :], given.spare_nodes)
    return Session(command, given.restarts_per_hour, _fewer(command, given)).run()


def _fewer(command: Command, given: Namespace) -> Fewer | None:
    """Return the object that finds layouts for fewer nodes, or None without --gpu.

    Raise UserError if the options do not go together.
    """
    keep = frozenset(name for name in KEPT if getattr(given, f"keep_{name}"))
    if given.gpu is None:
        if given.calibration or given.max_slowdown is not None or keep:
            raise UserError("--calibration, --max-slowdown and --keep-... need --gpu NAME")
        return None
    slowdown = 1.5 if given.max_slowdown is None else given.max_slowdown
    if not 1 <= slowdown < math.inf:
        raise UserError(f"--max-slowdown must be at least 1 and finite, not {slowdown:g}")
    if not command.nodes:
        raise UserError(
            f"--gpu {given.gpu} is for other numbers of nodes, which needs a Slurm job: ranks by "
            "srun without options that place them, and --ntasks-per-node"
        )
    try:
        config = parse(command.options)
    except UserError:  # the ranks print this error, and end
        return None
    return Fewer(command, config, Options(given.gpu, given.calibration, slowdown, keep))


if __name__ == "__main__":
    with messages.sentences():
        sys.exit(main(sys.argv[1:]))
