"""What variables of launchers that are not known here say of this process: which of how many.

    for stated in stated_by(os.environ):
        if stated.is_several: ...

Each process of such a launcher would train alone, on the same samples. Most launchers name their
variables in pairs with the same first word: WORLD_SIZE and RANK, FLUX_JOB_SIZE and FLUX_TASK_RANK.
What starts one command on each of several nodes numbers the nodes: NNODES and NODE_RANK,
SKYPILOT_NUM_NODES and SKYPILOT_NODE_RANK. Others have lists and JSON: PLATFORMS is the table of
these, by their documentation. Slurm's, MPI's and torchrun's are known (launch.py).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from base.errors import printable

# The first words of variables of launchers that give a rank, but not the number of ranks.
ONLY_RANKS = ("PALS",)
# Words of variables that count nodes, or number them.
OF_NODES = {"NODE", "NODES", "NNODES"}
UNKNOWN = "a launcher that is not known here"


@dataclass(frozen=True)
class Stated:
    """What a launcher's variables say of this process.

    launcher: its name. variable: says which process this is, or "". place: that number or name, or
    "". counter: the variable with the number of processes, or "". count: that number; 0: not known.
    is_several: whether there are other processes beside this one. is_first: whether there probably
    are, but no variable says it.
    """

    launcher: str
    variable: str
    place: str
    counter: str
    count: int
    is_several: bool
    is_first: bool = False

    def __str__(self) -> str:
        """Return, as in `this process is number 1 (RANK) of 2 (WORLD_SIZE) of a launcher ...`."""
        if not self.place:
            which = "one"
        elif self.place.isdecimal():
            which = f"number {self.place} ({self.variable})"
        else:
            which = f"{self.place} ({self.variable})"
        of = f" of {self.count} ({self.counter})" if self.count else ""
        return f"this process is {which}{of} of {self.launcher}"


# ---- Platforms -----------------------------------------------------------------------------------


def _whole(text: str | None) -> int:
    """Return the whole number in a variable; -1 if it is missing or another text."""
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) < 10
    return int(text or "") if is_number else -1


def _json_of(text: str) -> object:
    """Return the JSON value in a variable; None if it is another text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _count_of_number(env: Mapping[str, str], name: str) -> int:
    """Return the number in a variable; 0 if it is not known."""
    return max(0, _whole(env.get(name)))


def _count_of_list(env: Mapping[str, str], name: str) -> int:
    """Return the length of a JSON list, such as SM_HOSTS = ["algo-1", "algo-2"]."""
    value = _json_of(env.get(name, ""))
    return len(value) if isinstance(value, list) else 0


def _count_of_cluster(env: Mapping[str, str], name: str) -> int:
    """Return the number of addresses in {"cluster": {"worker": [ADDRESS, ...], ...}, ...}."""
    value = _json_of(env.get(name, ""))
    cluster = value.get("cluster") if isinstance(value, dict) else None
    lists = cluster.values() if isinstance(cluster, dict) else ()
    return sum(len(each) for each in lists if isinstance(each, list))


def _count_of_tasks(env: Mapping[str, str], name: str) -> int:
    """Return the sum of VC_MASTER_NUM, VC_WORKER_NUM, ..., one for each task of a Volcano job."""
    begin, end = name.split("*")
    numbers = [_whole(text) for key, text in env.items() if key.startswith(begin)
               and key.endswith(end) and len(key) > len(begin + end)]  # fmt: skip
    return sum(number for number in numbers if number > 0)


def _place_in_cluster(env: Mapping[str, str], name: str) -> str:
    """Return, as in "worker 1", the entry "task" of a cluster's JSON; "" without it."""
    value = _json_of(env.get(name, ""))
    task = value.get("task") if isinstance(value, dict) else None
    return f"{task.get('type')!s:.40} {task.get('index')!s:.9}" if isinstance(task, dict) else ""


def _place(env: Mapping[str, str], name: str) -> str:
    """Return a variable's text as it is printed; "" without it."""
    return printable(env.get(name, ""))[:80]


class Platform(NamedTuple):
    """A row of PLATFORMS.

    launcher: its name. variable, place_of: the variable that says which process this is, and its
    reader. counter, count_of: the same for the number of processes; "" if no variable says it: then
    a number above 0 shows that there are several. indexed: whether it numbers processes only where
    several are usual.
    """

    launcher: str
    variable: str
    counter: str = ""
    count_of: Callable[[Mapping[str, str], str], int] = _count_of_number
    place_of: Callable[[Mapping[str, str], str], str] = _place
    indexed: bool = False


# Each starts one process on each of its nodes or pods. Job arrays (SLURM_ARRAY_TASK_ID,
# SGE_TASK_ID, AWS_BATCH_JOB_ARRAY_INDEX) are not here: their elements are runs of their own.
PLATFORMS = (
    Platform("TFJob or Vertex AI", "TF_CONFIG", "TF_CONFIG", _count_of_cluster, _place_in_cluster),
    Platform("Vertex AI", "CLUSTER_SPEC", "CLUSTER_SPEC", _count_of_cluster, _place_in_cluster),
    Platform("SageMaker", "SM_CURRENT_HOST", "SM_HOSTS", _count_of_list),
    Platform("Volcano", "VC_TASK_INDEX", "VC_*_NUM", _count_of_tasks),
    Platform("Volcano", "VK_TASK_INDEX", "VC_*_NUM", _count_of_tasks),  # its older name
    Platform("ModelArts", "MA_TASK_INDEX", "MA_NUM_HOSTS"),
    Platform("PaddleJob", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    Platform("an indexed Kubernetes Job", "JOB_COMPLETION_INDEX", indexed=True),
    Platform("Nomad", "NOMAD_ALLOC_INDEX"),
    Platform("pbsdsh", "PBS_VNODENUM"),
    Platform("aprun", "ALPS_APP_PE"),
    Platform(UNKNOWN, "", "WORLD_SIZE"),  # without a RANK
)


def _platform_launches(env: Mapping[str, str]) -> Iterator[Stated]:
    """Yield what the variables of PLATFORMS say."""
    for row in PLATFORMS:
        place = row.place_of(env, row.variable)
        count = row.count_of(env, row.counter) if row.counter else 0
        if not (place or count):
            continue
        several = count > 1 or (count == 0 and _whole(place) > 0)
        first = row.indexed and place == "0"
        yield Stated(row.launcher, row.variable, place, row.counter, count, several, first)


# ---- Pairs with the same first word --------------------------------------------------------------


def _rank_pairs(env: Mapping[str, str]) -> Iterator[Stated]:
    """Yield what pairs of variables such as RANK and WORLD_SIZE say, or a rank alone."""
    ranks = {}  # by the first word of the name, a variable with the number of this process
    sizes = {}  # and a variable with the number of processes
    for name, value in sorted(env.items()):
        words = name.split("_")
        family = words[0] if len(words) > 1 and words[0] not in OF_NODES else ""
        # Numbers on a node, or of torchrun's groups, do not say whether there are several.
        is_partial = {"LOCAL", "GROUP", "UNIVERSE", "CROSS", "SLURM", "ROLE", "PER"} & set(words)
        if is_partial or _whole(value) < 0:
            continue
        family = "" if name in ("WORLD_SIZE", "NUM_NODES") else family
        of_nodes = bool(OF_NODES & set(words))
        if words[-1] in ("RANK", "RANKID", "PROCID", *(("INDEX",) if of_nodes else ())):
            ranks[family, of_nodes] = name
        elif words[-1] in ("SIZE", "NPROCS", "NRANKS", "NTASKS", "RANKS", "NODES", "NNODES"):
            sizes[family, of_nodes] = name
        elif of_nodes and words[-1] == "COUNT":
            sizes[family, True] = name
    for (family, of_nodes), rank in ranks.items():
        size = sizes.get((family, of_nodes), "")
        if of_nodes and not size:  # it may be the number in the name of a node
            continue
        count = int(env[size]) if size else 0
        several = count > 1 if size else int(env[rank]) > 0 or family in ONLY_RANKS
        yield Stated(UNKNOWN, rank, env[rank], size, count, several)


def stated_by(env: Mapping[str, str]) -> list[Stated]:
    """Return what the variables of launchers that are not known here say of this process."""
    return [*_rank_pairs(env), *_platform_launches(env)]
