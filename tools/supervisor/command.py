"""The command that starts the ranks: its launcher, the folder of its run, the nodes it may use.

The user writes `supervise.py ... -- srun ... python train.py --out OUT --resume auto ...`. The
arguments after `--` are the command: the launcher with its options, the Python program, and the
options of the run. A spare node is a node of the Slurm job on which no rank runs. If the launcher
is srun in a Slurm job, the supervisor chooses the nodes of each start, and so can leave out a bad
node; otherwise the launcher chooses them.
"""

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from base.cli import Parser
from base.console import is_program
from base.errors import UserError
from config.command_line import read_toml
from config.run_options import Run
from distributed.launch import SlurmJob, slurm_job

# Options of srun that set the nodes or the number of tasks, and the short forms of these options.
# With one of them in the command the supervisor cannot choose the nodes.
NODE_OPTIONS = {"nodes": "N", "ntasks": "n", "nodelist": "w", "exclude": "x", "ntasks-per-node": ""}
SECONDS_TO_ANSWER = 20.0  # a node answers if a task that does nothing ends within this time


def run_options(argv: Sequence[str]) -> dict[str, str]:
    """Return the values of train.py's options `out` and `resume`, by name.

    argv: the options of the run. A flag counts more than the --config file, and the file more than
    the default. A file that cannot be read is ignored here, because train.py prints the error.
    Raise UserError for an option without a value.
    """
    parser = Parser(allow_abbrev=False, add_help=False)
    for name in ("--out", "--resume", "--config"):
        parser.add_argument(name)
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    flags, _ = parser.parse_known_args(list(argv))
    try:
        tree = read_toml(flags.config, flags.config) if flags.config else {}
    except UserError:
        tree = {}
    # In the file an option stands at the top or in a table, such as [run].
    tables = [tree, *(value for value in tree.values() if isinstance(value, dict))]
    options = {"out": Run.out, "resume": ""}
    for table in tables:
        options |= {name: str(table[name]) for name in options if name in table}
    by_key = dict(argument.split("=", 1) for argument in flags.set if "=" in argument)
    given = {name: getattr(flags, name) or by_key.get(name) for name in options}
    return options | {name: value for name, value in given.items() if value}


@dataclass(frozen=True)
class Command:
    """The command that starts the ranks.

    argv: the launcher with its options, the program, and the options of the run. out: the run's
    folder. job: the Slurm job, or None. nodes: all nodes of the Slurm job, in use or spare; () if
    the launcher chooses the nodes.
    """

    argv: tuple[str, ...]
    out: str
    job: SlurmJob | None
    nodes: tuple[str, ...] = ()
    used: int = 0  # number of nodes that the ranks run on

    @property
    def by_srun(self) -> bool:
        """Whether the launcher is srun, which does not pass all signals on to the ranks."""
        return Path(self.argv[0]).name == "srun"

    @property
    def options(self) -> list[str]:
        """The options of the run: all arguments after the program, from the first `--...` on."""
        return list(self.argv[self._first_option :])

    @property
    def _first_option(self) -> int:
        """The index of the run's first option in `argv`, or its length if there is no option."""
        program = program_at(self.argv) or 0
        for index in range(program, len(self.argv)):
            if self.argv[index].startswith("--"):
                return index
        return len(self.argv)

    def on(self, nodes: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """Return the command line that starts the ranks on these nodes.

        Without nodes the launcher chooses the nodes, and its arguments stay as the user gave them.
        options: arguments that replace the options of the run; () to keep the user's options.
        """
        argv = [*self.argv[: self._first_option], *(options or self.options)]
        if not nodes or self.job is None:
            return argv
        tasks = len(nodes) * self.job.tasks_per_node
        chosen = [f"--nodes={len(nodes)}", f"--ntasks={tasks}", f"--nodelist={','.join(nodes)}"]
        srun, *others = argv
        # If a node does not answer, Slurm releases the resources of an ended step minutes later.
        # With --overlap the next step does not wait for these resources.
        return [srun, *chosen, "--overlap", *others]


def read_command(argv: Sequence[str], spare: int) -> Command:
    """Return the command that the user wrote after `--`.

    spare: --spare-nodes, the number of the job's nodes that the ranks do not use. Raise UserError
    for a command that cannot be supervised: without a program, by torchrun, without --resume auto,
    or with spare nodes that the supervisor cannot choose.
    """
    script = program_at(argv)
    if script is None:
        after = f"but {shlex.join(argv):.60}" if argv else "but nothing"
        raise UserError(
            "supervise.py [options] -- srun ... train.py ... needs a program of Python after --, "
            f"{after}"
        )
    launcher = [Path(argument).name for argument in argv[:script]]
    if "torchrun" in launcher or "torch.distributed.run" in launcher:
        raise UserError(
            "torchrun does not pass on the status of the ranks, 75 is 1: start them with srun or "
            "mpirun"
        )
    options = run_options(argv[script + 1 :])
    if options["resume"] != "auto":
        now = f", not {options['resume']}" if options["resume"] else ""
        raise UserError(f"a restart continues by --resume auto: give it to {argv[script]}{now}")
    job = slurm_job()
    command = Command(tuple(argv), options["out"], job)
    named = _node_option(argv[1:script])  # an option by which the user has chosen nodes, or ""
    # With srun in a Slurm job of a known number of tasks per node, and without an option of the
    # user that names nodes, the supervisor chooses the nodes of each start.
    if command.by_srun and job and job.tasks_per_node and not named:
        if not 0 <= spare < len(job.nodes):
            raise UserError(f"--spare-nodes({spare}) must be below the job's {len(job.nodes)}")
        return Command(command.argv, command.out, job, job.nodes, len(job.nodes) - spare)
    if spare:
        given = f"leave out {named}" if named else "ranks by srun, and --ntasks-per-node"
        raise UserError(f"--spare-nodes({spare}) needs a Slurm job: {given}")
    return command


def program_at(argv: Sequence[str]) -> int | None:
    """Return the index of the program, such as train.py or an installed trine-train, or None."""
    return next((at for at, argument in enumerate(argv) if is_program(argument)), None)


def _node_option(argv: Sequence[str]) -> str:
    """Return the first argument that is srun's option for nodes or tasks, or ""."""
    for argument in argv:
        for name, short in NODE_OPTIONS.items():
            long = argument.split("=")[0] == f"--{name}"  # --nodes or --nodes=4
            if long or (short and argument.startswith(f"-{short}")):  # -N or -N4
                return argument
    return ""


def silent_nodes(nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes of this Slurm job on which no task can be started now.

    Called after a failure, to find nodes that are down. If no node answers, Slurm itself may not
    answer, so nothing is known and () is returned.
    """
    answering = answering_nodes(nodes, SECONDS_TO_ANSWER)
    if not answering:
        return ()
    return tuple(node for node in nodes if node not in answering)


def answering_nodes(nodes: Sequence[str], seconds: float) -> tuple[str, ...]:
    """Return the nodes of this Slurm job that answer within these seconds.

    A node answers if a task can be started on it and ends. All nodes are asked at once.
    """
    argv = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--mpi=none", "--quiet"]
    started = {
        node: subprocess.Popen(
            ["timeout", "--kill-after=2", str(seconds), *argv, f"--nodelist={node}", "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in nodes
    }
    return tuple(node for node, process in started.items() if process.wait() == 0)
