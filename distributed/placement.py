"""The place of every rank (node, cores, GPU), and warnings about how the ranks were placed.

    share = share_of_cores(physical_cores(allowed), ranks=4, index=1)
    for sentence in placement_warnings(places, layout, job_nodes=2): ...

All facts about the cluster are arguments, so that tests can describe clusters they do not have.
`places` is always the list of all ranks' places, in rank order: when the ranks meet, each tells its
place to the others (rendezvous.py). A logical CPU is one hardware thread of a physical core.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from architecture import dispatch
from architecture.shape import ModelShape
from base.errors import ClusterError, number_ranges
from config.mesh_axes import rows_along
from config.schema import Layout

Say = Callable[[str], None]  # prints a line on rank 0


@dataclass(frozen=True)
class Place:
    """The place where one rank runs."""

    node: str
    local_rank: int  # the rank's number among the ranks on its node
    device: str  # the name of torch's device: cpu, or such as cuda:3
    gpu: str | None  # an identifier, unique among all GPUs of the job; None on a CPU
    cores: tuple[int, ...]  # the logical CPUs on which the rank may run
    asked_cores: int | None = None  # --cpus-per-task of the Slurm job; None if it was not given
    # The logical CPUs on the socket of its GPU, as Linux writes them (0-31,64-95); None: not known.
    near_gpu: str | None = None
    visible_gpus: int | None = None  # how many GPUs this rank sees; None on a CPU


def ranks_by(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the ranks that have each value. values: the value of each rank, in rank order.

    Example: ranks_by(["n1", "n1", "n2"]) is {"n1": [0, 1], "n2": [2]}.
    """
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def ranks_of_nodes(ranks: Sequence[int], nodes: Sequence[str]) -> list[tuple[int, ...]]:
    """Return a group's ranks on each node, in the group's order; [] if they are not placed evenly.

    Even: equally many ranks on each node, one node after the other. ranks: the group, in its order.
    nodes: the node of every rank of the world. Example: ranks 0 to 3 on nodes a, a, b, b are
    [(0, 1), (2, 3)]; on a, b, a, b or on a, a, a, b they are [].
    """
    of_group = [nodes[rank] for rank in ranks]
    size = len(ranks) // len(set(of_group))
    rows = [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]
    is_even = len(rows) == len(set(of_group))
    return rows if is_even and all(len({nodes[r] for r in row}) == 1 for row in rows) else []


def nodes_sent_once(
    ranks: Sequence[int], nodes: Sequence[str], sends_once: Callable[[int], bool]
) -> list[tuple[int, ...]]:
    """Return a group's ranks on each node if a token is sent once to each node, else [].

    ranks: a group of experts. nodes: as for `ranks_of_nodes`. sends_once: whether a group that is
    placed evenly on so many nodes sends one copy (architecture/dispatch.py).
    """
    rows = ranks_of_nodes(ranks, nodes)
    return rows if len(rows) > 1 and sends_once(len(rows)) else []


# ---- Cores ---------------------------------------------------------------------------------------


def allowed_cores() -> tuple[int, ...]:
    """Return the logical CPUs that Slurm, a cgroup or taskset allow this process, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def threads_asked_for() -> int | None:
    """Return the number of threads in OMP_NUM_THREADS, or None if it is not set.

    OpenMP allows a list with a number for each nesting level, such as 4,2; the first number is for
    the outermost level and is returned. Raise UserError unless the variable is a whole number above
    0 or a list of such numbers.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    parts = [part.strip() for part in text.split(",")]
    if text and not all(part.isdecimal() and 0 < float(part) < 2**20 for part in parts):
        raise ClusterError(
            f"OMP_NUM_THREADS is {text!r}, not a number of threads above 0, or a list"
        )
    return int(parts[0]) if text else None


def physical_cores(logical: tuple[int, ...], sysfs: str = "/sys") -> list[tuple[int, ...]]:
    """Return the logical CPUs of each physical core, socket by socket.

    logical: the logical CPUs to group by core, such as those that this process may use; other CPUs
    of the same cores are left out. If CPUs 0 and 64 are one core, 0, 1, 64 give (0, 64) and (1,).
    Many machines number the cores of their sockets in turn: there the cores 0, 2, ... come before
    1, 3, ... sysfs: the folder of the kernel's files, for tests.
    """
    # The logical CPUs of a core, by the number of its socket and the core's first CPU.
    groups: dict[tuple[int, int], list[int]] = {}
    for cpu in logical:
        topology = Path(f"{sysfs}/devices/system/cpu/cpu{cpu}/topology")
        try:
            # The text is such as "0,64" or "0-1".
            siblings = (topology / "thread_siblings_list").read_text().replace("-", ",").split(",")
            first_cpu = int(siblings[0])
        except OSError:  # the kernel has no such file: take every CPU for a core
            first_cpu = cpu
        try:
            socket = int((topology / "physical_package_id").read_text())
        except OSError:
            socket = 0
        groups.setdefault((socket, first_cpu), []).append(cpu)
    return [tuple(groups[core]) for core in sorted(groups)]


def share_of_cores(cores: list[tuple[int, ...]], ranks: int, index: int) -> tuple[int, ...] | None:
    """Return the logical CPUs for one of several ranks that share cores; None if cores < ranks.

    cores: the logical CPUs of each core. ranks: the number of ranks that share the cores. index:
    this rank's number among these ranks. A share has adjacent cores, so that a rank stays on one
    socket, near its GPU, because GPUs are numbered by socket as well. Example: of 8 cores and 3
    ranks, rank 0 gets cores 0 and 1, rank 1 gets 2 to 4, rank 2 gets 5 to 7.
    """
    if ranks > len(cores):
        return None
    first = index * len(cores) // ranks
    end = (index + 1) * len(cores) // ranks
    return tuple(sorted(cpu for core in cores[first:end] for cpu in core))


# ---- GPUs ----------------------------------------------------------------------------------------


# An environment variable for tests: if it is set, ranks share a GPU over NCCL (tests/test_nccl.py).
SHARE_FOR_TESTS = "TRINE_TEST_SHARE_GPU"


def check_devices(places: list[Place]) -> None:
    """Raise UserError if some ranks have a GPU and other ranks have none.

    Called when all ranks have met. Ranks on CPUs use gloo and ranks on GPUs use NCCL, so they could
    not communicate.
    """
    cpu_ranks = [rank for rank, place in enumerate(places) if place.device == "cpu"]
    if not cpu_ranks or len(cpu_ranks) == len(places):
        return
    nodes = ", ".join(sorted({places[rank].node for rank in cpu_ranks}))
    raise ClusterError(
        f"torch sees a CUDA device on {len(places) - len(cpu_ranks)} of {len(places)} ranks, and "
        f"none on ranks {number_ranges(cpu_ranks)} (node {nodes}): leave that node out, mend its "
        f"driver, or give --device cpu"
    )


def shared_gpus(places: list[Place]) -> dict[str, list[int]]:
    """Return the ranks of each GPU that several ranks share, by the GPU's identifier."""
    ranks_by_gpu = ranks_by(place.gpu for place in places)
    return {gpu: ranks for gpu, ranks in ranks_by_gpu.items() if gpu and len(ranks) > 1}


# ---- Warnings and the table at the start ---------------------------------------------------------


def placement_warnings(
    places: list[Place],
    layout: Layout,
    job_nodes: int | None = None,
    model: ModelShape | None = None,
) -> list[str]:
    """Return one line of text for each property of the placement that makes the run slower.

    Rank 0 prints these lines before the model is built. job_nodes: the number of nodes of the Slurm
    job, None without Slurm. model: None if the run has none.
    """
    warnings = [*_uneven_nodes(places, job_nodes), *_split_group(places, layout)]
    if model is not None and model.experts > 1:
        warnings += _uneven_experts(places, layout, model)
    warnings += _cores_not_inherited(places) + _far_from_gpu(places)
    return warnings + _one_gpu_visible(places) + _sharing(places)


def _uneven_nodes(places: list[Place], job_nodes: int | None) -> Iterator[str]:
    """Yield a warning if nodes have unequal numbers of ranks, and one if nodes have no rank."""
    ranks = Counter(place.node for place in places)  # the number of ranks on each node
    low = min(ranks, key=ranks.__getitem__)
    high = max(ranks, key=ranks.__getitem__)
    if ranks[low] != ranks[high]:
        yield (
            f"nodes have unequal numbers of ranks: {ranks[high]} on {high}, {ranks[low]} on {low}; "
            f"--ntasks-per-node (mpirun: -ppn) sets one for all"
        )
    if job_nodes is not None and len(ranks) < job_nodes:
        used = f"{len(places)} ranks are on {len(ranks)} of them"
        yield f"the job holds {job_nodes} nodes, but its {used}"


def _split_group(places: list[Place], layout: Layout) -> list[str]:
    """Return a list with at most one warning: about the first tp group that spans several nodes.

    If no tp group does, the warning is about the first cp group that spans several nodes. These
    groups communicate in every layer, and the network is slow in comparison with a node's links.
    """
    for kind, axis, product in (("tensor", "tp", "tp"), ("context", "cp", "tp x cp")):
        for ranks in rows_along(layout.axes, (axis,)):
            nodes = sorted({places[rank].node for rank in ranks})
            if len(nodes) > 1:
                return [
                    f"{kind}-parallel ranks {ranks[0]} to {ranks[-1]} are on nodes "
                    f"{', '.join(nodes)}: every layer waits for the network; choose a {product} "
                    f"that divides the ranks of a node, and place ranks node by node (srun "
                    f"--distribution=block)"
                ]
    return []


def _uneven_experts(places: list[Place], layout: Layout, model: ModelShape) -> list[str]:
    """Return a list with at most one warning: about the first group of experts that would send one
    copy of a token to a node if its ranks were placed evenly.
    """
    ep = layout.ep or 1
    nodes = [place.node for place in places]
    sends_once = partial(dispatch.sends_once, model)
    for first in range(0, len(places), ep):
        ranks = range(first, first + ep)
        used = sorted({nodes[rank] for rank in ranks})
        if sends_once(len(used)) and not nodes_sent_once(ranks, nodes, sends_once):
            return [
                f"experts are divided over ranks {first} to {first + ep - 1}, which are on nodes "
                f"{', '.join(used)}, but not equally many on each, one node after the other: a "
                f"token goes to a node once for each of its experts there, and not once; choose an "
                f"ep that divides the ranks of a node or is a multiple of them, and place ranks "
                f"node by node (srun --distribution=block)"
            ]
    return []


def _cores_not_inherited(places: list[Place]) -> list[str]:
    """Return a warning if ranks have fewer cores than the Slurm job's --cpus-per-task, or [].

    This happens if only sbatch was given the option, and srun started the ranks without it.
    """
    ranks = [rank for rank, p in enumerate(places) if len(p.cores) < (p.asked_cores or 0)]
    if not ranks:
        return []
    first = places[ranks[0]]
    return [
        f"{len(ranks)} ranks, the first is {ranks[0]} on {first.node}, have {len(first.cores)} "
        f"cores, but the job asked for --cpus-per-task={first.asked_cores}: since Slurm 22.05 srun "
        f"does not inherit it; give it to srun as well"
    ]


def _cpus_of(text: str) -> set[int]:
    """Return the numbers in a list as Linux writes it: 0-2,8 gives 0, 1, 2 and 8."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _far_from_gpu(places: list[Place]) -> list[str]:
    """Return a warning if ranks are bound to cores that are not on the socket of their GPU, or [].

    A rank that may run on all cores of that socket, and on others, is not bound to a socket.
    """
    far = []
    for rank, place in enumerate(places):
        near, cores = _cpus_of(place.near_gpu or ""), set(place.cores)
        if near and not cores <= near and not near <= cores:
            far.append(rank)
    if not far:
        return []
    first = places[far[0]]
    return [
        f"{len(far)} ranks, the first is {far[0]} on {first.node}, run on cores "
        f"{number_ranges(first.cores)}, but cores {first.near_gpu} are on the socket of its GPU "
        f"({first.device}): each copy and launch crosses the sockets; give srun "
        f"--distribution=block:block"
    ]


def _one_gpu_visible(places: list[Place]) -> list[str]:
    """Return a note if each of several ranks of a node sees one GPU alone, or []."""
    for node, ranks in ranks_by(place.node for place in places).items():
        if len(ranks) > 1 and all(places[rank].visible_gpus == 1 for rank in ranks):
            if len({places[rank].gpu for rank in ranks}) < len(ranks):
                continue  # they share a GPU, which is another warning
            return [
                f"each of the {len(ranks)} ranks on {node} sees one GPU alone: if Slurm confines "
                f"devices, NCCL cannot use the links between them and is many times as slow; give "
                f"srun --gpus-per-node={len(ranks)} --gpu-bind=none"
            ]
    return []


def _sharing(places: list[Place]) -> list[str]:
    """Return a warning for each GPU that several ranks share."""
    return [
        f"ranks {number_ranges(ranks)} share one GPU ({gpu}) and each takes its turn: for tests "
        f"(over nccl only {SHARE_FOR_TESTS} allows it), not for training"
        for gpu, ranks in shared_gpus(places).items()
    ]


def table(places: list[Place]) -> str:
    """Return the table that rank 0 prints at the start, with a line for each node.

    The columns are the node's name, its number of devices, its cores and its ranks.
    """
    lines = [f"{'node':20} {'devices':>8}  {'cores':16} ranks (the place of each is in run.json)"]
    for node, ranks in ranks_by(place.node for place in places).items():
        devices = {places[rank].gpu or rank for rank in ranks}  # a rank on a CPU is its own device
        cores = {core for rank in ranks for core in places[rank].cores}
        columns = f"{node:20} {len(devices):8}  {number_ranges(cores):16}"
        lines.append(f"{columns} {number_ranges(ranks)}")
    return "\n".join(lines)
