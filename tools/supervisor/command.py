"""The command that starts the ranks: its launcher, the folder of its run, the nodes it may use.

The user writes `supervise.py ... -- srun ... python train.py --out OUT --resume auto ...`. The
words after `--` are the command: the launcher with its options, the Python program, and the options
of the run. A spare node is a node of the Slurm job on which no rank runs. If the launcher is srun
in a Slurm job, the supervisor chooses the nodes of each start, and so can leave out a bad node;
otherwise the launcher chooses them.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from base.cli import Parser
from base.errors import UserError
from config.command_line import read_toml
from config.run_options import Run
from distributed.launch import SlurmJob, slurm_job

# Options of srun that set the nodes or the number of tasks, and the short forms of these options.
# With one of them in the command the supervisor cannot choose the nodes.
PLACES = {"nodes": "N", "ntasks": "n", "nodelist": "w", "exclude": "x", "ntasks-per-node": ""}
SECONDS_TO_ANSWER = 20.0  # a node answers if a task that does nothing ends within this time


def run_options(words: Sequence[str]) -> dict[str, str]:
    """Return the values of train.py's options `out` and `resume`, by name.

    words: the options of the run. A flag counts more than the --config file, and the file more than
    the default. A file that cannot be read is ignored here, because train.py prints the error.
    Raise UserError for an option without a value.
    """
    parser = Parser(allow_abbrev=False, add_help=False)
    for name in ("--out", "--resume", "--config"):
        parser.add_argument(name)
    parser.add_argument("--set", nargs="+", action="extend", default=[])
    flags, _ = parser.parse_known_args(list(words))
    try:
        tree = read_toml(flags.config, flags.config) if flags.config else {}
    except UserError:
        tree = {}
    # In the file an option stands at the top or in a table, such as [run].
    tables = [tree, *(value for value in tree.values() if isinstance(value, dict))]
    options = {"out": Run.out, "resume": ""}
    for table in tables:
        options |= {name: str(table[name]) for name in options if name in table}
    by_key = dict(word.split("=", 1) for word in flags.set if "=" in word)
    given = {name: getattr(flags, name) or by_key.get(name) for name in options}
    return options | {name: value for name, value in given.items() if value}


@dataclass(frozen=True)
class Command:
    """The command that starts the ranks.

    words: the launcher with its options, the program, and the options of the run. out: the run's
    folder. job: the Slurm job, or None. nodes: all nodes of the Slurm job, in use or spare; () if
    the launcher chooses the nodes.
    """

    words: tuple[str, ...]
    out: str
    job: SlurmJob | None
    nodes: tuple[str, ...] = ()
    used: int = 0  # number of nodes that the ranks run on

    @property
    def by_srun(self) -> bool:
        """Whether the launcher is srun, which does not pass all signals on to the ranks."""
        return Path(self.words[0]).name == "srun"

    @property
    def options(self) -> list[str]:
        """The options of the run: all words after the program, from the first `--...` on."""
        return list(self.words[self._first_option :])

    @property
    def _first_option(self) -> int:
        """The index of the run's first option in `words`, or len(words) if there is no option."""
        program = program_at(self.words) or 0
        for index in range(program, len(self.words)):
            if self.words[index].startswith("--"):
                return index
        return len(self.words)

    def on(self, nodes: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """Return the words that start the ranks on these nodes.

        Without nodes the launcher chooses the nodes, and its words stay as the user gave them.
        options: words that replace the options of the run; () to keep the user's options.
        """
        words = [*self.words[: self._first_option], *(options or self.options)]
        if not nodes or self.job is None:
            return words
        tasks = len(nodes) * self.job.tasks_per_node
        places = [f"--nodes={len(nodes)}", f"--ntasks={tasks}", f"--nodelist={','.join(nodes)}"]
        srun, *other_words = words
        # If a node does not answer, Slurm releases the resources of an ended step minutes later.
        # With --overlap the next step does not wait for these resources.
        return [srun, *places, "--overlap", *other_words]


def read_command(words: Sequence[str], spare: int) -> Command:
    """Return the command that the user wrote after `--`.

    spare: --spare-nodes, the number of the job's nodes that the ranks do not use. Raise UserError
    for a command that cannot be supervised: without a program, by torchrun, without --resume auto,
    or with spare nodes that the supervisor cannot choose.
    """
    script = program_at(words)
    if script is None:
        raise UserError("no program after --: supervise.py [options] -- srun ... train.py ...")
    launcher = [Path(word).name for word in words[:script]]
    if "torchrun" in launcher or "torch.distributed.run" in launcher:
        raise UserError(
            "torchrun does not pass on the status of the ranks, 75 is 1: start them with srun or "
            "mpirun"
        )
    options = run_options(words[script + 1 :])
    if options["resume"] != "auto":
        now = f", not {options['resume']}" if options["resume"] else ""
        raise UserError(f"a restart continues by --resume auto: give it to {words[script]}{now}")
    job = slurm_job()
    command = Command(tuple(words), options["out"], job)
    placed = _places(words[1:script])  # an option by which the user has chosen nodes, or ""
    # With srun in a Slurm job of a known number of tasks per node, and without an option of the
    # user that names nodes, the supervisor chooses the nodes of each start.
    if command.by_srun and job and job.tasks_per_node and not placed:
        if not 0 <= spare < len(job.nodes):
            raise UserError(f"--spare-nodes({spare}) must be below the job's {len(job.nodes)}")
        return Command(command.words, command.out, job, job.nodes, len(job.nodes) - spare)
    if spare:
        given = f"leave out {placed}" if placed else "ranks by srun, and --ntasks-per-node"
        raise UserError(f"--spare-nodes({spare}) needs a Slurm job: {given}")
    return command


def program_at(words: Sequence[str]) -> int | None:
    """Return the index of the Python program, the first word that ends in .py, or None."""
    return next((at for at, word in enumerate(words) if word.endswith(".py")), None)


def _places(words: Sequence[str]) -> str:
    """Return the first word that is one of srun's options in PLACES, or an empty string."""
    for word in words:
        for name, short in PLACES.items():
            long = word.split("=")[0] == f"--{name}"  # --nodes or --nodes=4
            if long or (short and word.startswith(f"-{short}")):  # -N or -N4
                return word
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
    words = ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--mpi=none", "--quiet"]
    started = {
        node: subprocess.Popen(
            ["timeout", "--kill-after=2", str(seconds), *words, f"--nodelist={node}", "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in nodes
    }
    return tuple(node for node, process in started.items() if process.wait() == 0)
