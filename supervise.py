"""Keeps a run going: starts its ranks again, in the same allocation, when a fault has ended them.

    python supervise.py -- mpirun -n 4 python train.py ... --out OUT --resume auto
    python supervise.py --spare-nodes 1 -- srun --mpi=pmi2 python train.py ... --resume auto

    --spare-nodes N         nodes of the Slurm job that the ranks leave free, default 0
    --restarts-per-hour N   at most, default 6

Every decision is a line of the log and of OUT/supervisor.jsonl, with the evidence. Exit status: 0
finished; 75 queue the job again; that of the ranks otherwise, such as 2, a user's mistake.
"""

import sys

from config import messages  # first: it ends a Python that is too old

with messages.installed():
    from config.messages import Parser, UserError
    from supervisor.command import read_command
    from supervisor.session import Session


def main(arguments: list[str]) -> int:
    """Supervise the command after `--`; the exit status. Raises UserError."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser("supervise.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--spare-nodes", type=int, default=0, help="of the job, left free")
    parser.add_argument("--restarts-per-hour", type=int, default=6, help="at most (default 6)")
    given = parser.parse_args(arguments[:at])
    for name, number in vars(given).items():
        if number < 0:
            raise UserError(f"--{name.replace('_', '-')} must be at least 0, not {number}")
    command = read_command(arguments[at + 1 :], given.spare_nodes)
    return Session(command, given.restarts_per_hour).run()


if __name__ == "__main__":
    with messages.sentences():
        sys.exit(main(sys.argv[1:]))
