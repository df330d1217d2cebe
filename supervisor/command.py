"""The command that starts the ranks: its launcher, the folder of its run, the nodes it may use."""

import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from config.messages import Parser, UserError
from config.run_options import Run
from distributed.launch import SlurmJob, slurm_job

# Options of srun that say where it starts how many tasks, each with its short form.
PLACES = {"nodes": "N", "ntasks": "n", "nodelist": "w", "exclude": "x", "ntasks-per-node": ""}
SECONDS_TO_ANSWER = 20.0  # of a node, for a task that does nothing


def run_options(words: Sequence[str]) -> dict[str, str]:
    """`out` and `resume` of a run as train.py finds them: of a flag, of the file, or the default.

    A file that cannot be read gives nothing: train.py says so. UserError for an option without its
    value.
    """
    parser = Parser(allow_abbrev=False, add_help=False)
    for name in ("--out", "--resume", "--config"):
        parser.add_argument(name)
    given, _ = parser.parse_known_args(list(words))
    try:
        tree = tomllib.loads(Path(given.config).read_text()) if given.config else {}
    except (OSError, ValueError, RecursionError):
        tree = {}
    tables = [tree, *(value for value in tree.values() if isinstance(value, dict))]
    found = {"out": Run.out, "resume": ""}
    for table in tables:
        found |= {name: str(table[name]) for name in found if name in table}
    return found | {name: getattr(given, name) for name in found if getattr(given, name)}


@dataclass(frozen=True)
class Command:
    """What starts the ranks. nodes: those of the job that are in use or spare; () if not known."""

    words: tuple[str, ...]
    out: str
    job: SlurmJob | None
    nodes: tuple[str, ...] = ()
    used: int = 0  # nodes that the ranks take

    @property
    def by_srun(self) -> bool:
        """Whether the launcher is srun, which has signals of its own."""
        return Path(self.words[0]).name == "srun"

    @property
    def options(self) -> list[str]:
        """The options of the run: the words of its program from the first that is one."""
        return list(self.words[self._first_option :])

    @property
    def _first_option(self) -> int:
        at = program_at(self.words) or 0
        options = (n for n in range(at, len(self.words)) if self.words[n].startswith("--"))
        return next(options, len(self.words))

    def on(self, nodes: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """The words that start the ranks on these nodes, as given if there are none.

        options: in place of those of the run, if there are any.
        """
        words = [*self.words[: self._first_option], *(options or self.options)]
        if not nodes or self.job is None:
            return words
        tasks = len(nodes) * self.job.tasks_per_node
        places = [f"--nodes={len(nodes)}", f"--ntasks={tasks}", f"--nodelist={','.join(nodes)}"]
        # What an ended step holds on a node that does not answer is released minutes later.
        return [words[0], *places, "--overlap", *words[1:]]


def read_command(words: Sequence[str], spare: int) -> Command:
    """The command after `--`; UserError for one that cannot be supervised.

    spare: nodes of the job that the ranks do not take.
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
    placed = _places(words[1:script])
    if command.by_srun and job and job.tasks_per_node and not placed:
        if not 0 <= spare < len(job.nodes):
            raise UserError(f"--spare-nodes({spare}) must be below the job's {len(job.nodes)}")
        return Command(command.words, command.out, job, job.nodes, len(job.nodes) - spare)
    if spare:
        given = f"leave out {placed}" if placed else "ranks by srun, and --ntasks-per-node"
        raise UserError(f"--spare-nodes({spare}) needs a Slurm job: {given}")
    return command


def program_at(words: Sequence[str]) -> int | None:
    """Where the program is among the words of a command, None if there is none."""
    return next((at for at, word in enumerate(words) if word.endswith(".py")), None)


def _places(words: Sequence[str]) -> str:
    """The first option of srun that says where tasks are started, or an empty string."""
    for word in words:
        for name, short in PLACES.items():
            long = word.split("=")[0] == f"--{name}"
            if long or (short and word.startswith(f"-{short}")):
                return word
    return ""


def silent_nodes(nodes: Sequence[str]) -> tuple[str, ...]:
    """Nodes of this Slurm job on which no task can be started now.

    If none answers it is Slurm that does not, and nothing is known of the nodes.
    """
    found = answering_nodes(nodes, SECONDS_TO_ANSWER)
    return tuple(node for node in nodes if node not in found) if found else ()


def answering_nodes(nodes: Sequence[str], seconds: float) -> tuple[str, ...]:
    """Nodes of this Slurm job on which a task runs and ends within that time."""
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
