"""The place of every rank (node, cores, GPU), and warnings about how the ranks were placed.

    share = share_of_cores(physical_cores(allowed), ranks=4, index=1)
    for sentence in placement_warnings(places, layout, job_nodes=2): ...

All facts about the cluster are arguments, so that tests can describe clusters they do not have.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.messages import UserError, number_ranges
from config.schema import Layout, coordinates, rows_along

# With more ranks than this the table has a row for each node, not for each rank.
RANKS_IN_FULL = 64

Say = Callable[[str], None]  # prints a line on rank 0


@dataclass(frozen=True)
class Place:
    """The place where one rank runs."""

    node: str
    local_rank: int  # the rank's number among the ranks on its node
    device: str  # cpu, or cuda:3
    gpu: str | None  # unique among all GPUs of the job; None on a CPU
    cores: tuple[int, ...]  # the logical CPUs on which it may run
    asked_cores: int | None = None  # --cpus-per-task of the Slurm job


def ranks_by(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Group ranks by value: return the ranks of each value. values: one per rank, in rank order."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


# ---- Cores ---------------------------------------------------------------------------------------


def allowed_cores() -> tuple[int, ...]:
    """The logical CPUs that Slurm, a cgroup or taskset allow this process."""
    return tuple(sorted(os.sched_getaffinity(0)))


def threads_asked_for() -> int | None:
    """Return the number of threads in OMP_NUM_THREADS, or None if it is not set.

    OpenMP allows a list with a number for each nesting level; the first is the outermost level.
    Raise UserError unless the variable is a list of whole numbers above 0.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    parts = [part.strip() for part in text.split(",")]
    if text and not all(part.isdecimal() and 0 < float(part) < 2**20 for part in parts):
        raise UserError(f"OMP_NUM_THREADS is {text!r}, not a number of threads above 0, or a list")
    return int(parts[0]) if text else None


def physical_cores(logical: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Group logical CPUs by physical core: for each core, in the machine's order, its threads.

    logical: the CPUs to group; CPUs of a core that are not in `logical` are left out.
    """
    groups: dict[int, list[int]] = {}
    for cpu in logical:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            first = int(path.read_text().replace("-", ",").split(",")[0])
        except OSError:  # the kernel has no such file: take every CPU for a core
            first = cpu
        groups.setdefault(first, []).append(cpu)
    return [tuple(groups[first]) for first in sorted(groups)]


def share_of_cores(cores: list[tuple[int, ...]], ranks: int, index: int) -> tuple[int, ...] | None:
    """Return the logical CPUs for one of several ranks that share cores; None if cores < ranks.

    cores: the threads of each core. ranks: how many ranks share the cores. index: this rank's
    number among them. A share is adjacent cores, so that a rank stays on one socket; GPUs are
    numbered by socket as well.
    """
    if ranks > len(cores):
        return None
    own = cores[index * len(cores) // ranks : (index + 1) * len(cores) // ranks]
    return tuple(sorted(cpu for core in own for cpu in core))


# ---- GPUs ----------------------------------------------------------------------------------------


# An environment variable for tests: if it is set, ranks share a GPU over NCCL (tests/test_nccl.py).
SHARE_FOR_TESTS = "TRINE_TEST_SHARE_GPU"


def check_devices(places: list[Place]) -> None:
    """Raise UserError if some ranks have a GPU and others none: these could not communicate."""
    without = [rank for rank, place in enumerate(places) if place.device == "cpu"]
    if not without or len(without) == len(places):
        return
    nodes = ", ".join(sorted({places[rank].node for rank in without}))
    raise UserError(
        f"torch sees a CUDA device on {len(places) - len(without)} of {len(places)} ranks, and "
        f"none on ranks {number_ranges(without)} (node {nodes}): leave that node out, mend its "
        f"driver, or give --device cpu"
    )


def shared_gpus(places: list[Place]) -> dict[str, list[int]]:
    """Return the ranks of each GPU that several ranks have, by the GPU's identifier."""
    ranks = ranks_by(place.gpu for place in places)
    return {gpu: several for gpu, several in ranks.items() if gpu and len(several) > 1}


# ---- Warnings and the table at the start ---------------------------------------------------------


def placement_warnings(
    places: list[Place],
    layout: Layout,
    job_nodes: int | None = None,
) -> list[str]:
    """Return one line of text for each property of the placement that makes the run slower.

    job_nodes: the number of nodes of the Slurm job, None without Slurm.
    """
    found = [*_uneven_nodes(places, job_nodes), *_split_group(places, layout)]
    return found + _cores_not_inherited(places) + _sharing(places)


def _uneven_nodes(places: list[Place], job_nodes: int | None) -> Iterator[str]:
    """Yield a warning if nodes have unequal numbers of ranks, and one if nodes have no rank."""
    ranks = Counter(place.node for place in places)
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
    """Return a warning of the first tp group that is on several nodes, or else of a cp group."""
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


def _cores_not_inherited(places: list[Place]) -> list[str]:
    """Return a warning if ranks have fewer cores than --cpus-per-task."""
    short = [rank for rank, p in enumerate(places) if len(p.cores) < (p.asked_cores or 0)]
    return [
        f"{len(short)} ranks, the first is {rank} on {places[rank].node}, have "
        f"{len(places[rank].cores)} cores, but the job asked for --cpus-per-task="
        f"{places[rank].asked_cores}: since Slurm 22.05 srun does not inherit it; give it to srun "
        f"as well"
        for rank in short[:1]
    ]


def _sharing(places: list[Place]) -> list[str]:
    return [
        f"ranks {number_ranges(ranks)} share one GPU ({gpu}) and each takes its turn: for tests "
        f"(over nccl only {SHARE_FOR_TESTS} allows it), not for training"
        for gpu, ranks in shared_gpus(places).items()
    ]


def table(places: list[Place], layout: Layout) -> str:
    """Return the table of all ranks: rank, node, local rank, device, cores, and mesh coordinates.

    With more than RANKS_IN_FULL ranks the table has a row for each node.
    """
    if len(places) > RANKS_IN_FULL:
        return _table_of_nodes(places)
    widths = {"tp": 4, "pp": 4} | ({"cp": 4} if layout.cp > 1 else {}) | {"dp": 5}
    head = "".join(f"{axis:>{width}}" for axis, width in widths.items())
    rows = [f"  rank  node                 local  device   {'cores':16} {head}"]
    for rank, place in enumerate(places):
        at = coordinates(rank, layout.axes)
        where = "".join(f"{at[axis]:{width}}" for axis, width in widths.items())
        rows.append(
            f"{rank:6}  {place.node:20} {place.local_rank:5}  {place.device:8} "
            f"{number_ranges(place.cores):16} {where}"
        )
    return "\n".join(rows)


def _table_of_nodes(places: list[Place]) -> str:
    rows = [f"{'node':20} {'devices':>8}  {'cores':16} ranks (the place of each is in run.json)"]
    for node, own in ranks_by(place.node for place in places).items():
        devices = len({places[rank].gpu or rank for rank in own})
        cores = {core for rank in own for core in places[rank].cores}
        rows.append(f"{node:20} {devices:8}  {number_ranges(cores):16} {number_ranges(own)}")
    return "\n".join(rows)
