"""Times collectives of the groups of a layout, and messages between pairs of nodes.

check.py --cluster and benchmarks/network/allreduce.py report them. All functions with RankGroups
are collective over their ranks.
"""

import functools
import statistics
import time
from dataclasses import dataclass

import psutil
import torch

from config.mesh_axes import rows_along
from config.schema import Layout
from distributed.context import Context, most_ctas
from distributed.mesh import Mesh
from tools.checker.bandwidth import Measured

ITEM = 4  # bytes of an element: fp32
ROLES = {"world": "world", "tp": "tp", "dp": "dp", "pp": "forward"}  # of the groups, by name
FEWEST = 3  # trials of a row, however long they take


@dataclass(frozen=True)
class Plan:
    """Number of trials and warm-ups; `seconds` of a row beyond which there are fewer trials."""

    trials: int
    warm_ups: int
    seconds: float


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was started on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RankGroups:
    """The ranks and their groups over NCCL or gloo, through the Group class that training uses.

    groups: this rank's group of each kind, such as "tp". rows: by kind, the ranks of every group.
    """

    def __init__(self, context: Context, layout: Layout):
        """Make the groups of a layout by their names in ROLES; collective over all ranks."""
        self.context = context
        self.device = context.device
        mesh = Mesh(layout.axes, context)
        self.groups = {name: mesh.group(role) for name, role in ROLES.items()}
        axes = {"world": tuple(layout.axes), "tp": ("tp",), "dp": ("dp",), "pp": ("pp",)}
        self.rows = {name: rows_along(layout.axes, along) for name, along in axes.items()}

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """Return the numbers of every rank, in the order of ranks."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        rows = own.new_empty(self.context.size * len(own))
        self.groups["world"].all_gather(rows, own).wait()
        return rows.view(self.context.size, -1).tolist()

    def buffer(self, elements: int) -> torch.Tensor:
        """Zeros in the device's memory."""
        return torch.zeros(elements, device=self.device)

    def finish(self, handle) -> None:
        """Wait until an operation is done."""
        handle.wait()
        synchronise(self.device)

    def free_bytes(self) -> float:
        """Return how many bytes every rank may allocate for buffers, the same on all ranks."""
        if self.device.type == "cuda":
            own = torch.cuda.mem_get_info(self.device)[0] / 3
        else:
            own = psutil.virtual_memory().available / self.context.local.size / 4
        return min(row[0] for row in self.gather([own]))


def limits_of_sms() -> str:
    """Return a note on the groups whose NCCL collectives may use few SMs, and so may be slower."""
    limits = {name: most_ctas(role) for name, role in ROLES.items()}
    limited = ", ".join(f"{name} {limit}" for name, limit in limits.items() if limit)
    return (
        f"SMs (CTAs) that an operation takes at most, as in training: {limited}; these groups may "
        f"be slower than the links, which is no sign of a broken one. Pairs go over world."
    )


def operation(world: RankGroups, group_name: str, name: str, elements: int):
    """Return a function that runs the operation once; None for a rank that takes no part in it.

    group_name: of ROLES. name: of bandwidth.OPERATIONS. elements: of the whole buffer.
    """
    group = world.groups[group_name]
    mine = group.ranks.index(world.context.rank)
    whole = world.buffer(elements)
    if name == "all-reduce":
        return lambda: world.finish(group.all_reduce(whole))
    if name == "p2p":
        other = mine ^ 1
        if other >= len(group.ranks):
            return None
        return lambda: ping_pong(world, group_name, whole, other, first=mine < other)
    part = world.buffer(elements // len(group.ranks))
    if name == "reduce-scatter":
        return lambda: world.finish(group.reduce_scatter(part, whole))
    return lambda: world.finish(group.all_gather(whole, part))


def ping_pong(world: RankGroups, group: str, buffer: torch.Tensor, other: int, first: bool) -> None:
    """Send a buffer to a position in the group and back."""
    turns = (world.groups[group].send, world.groups[group].receive)
    for turn in turns if first else turns[::-1]:
        world.finish(turn(buffer, other))


def measure(
    world: RankGroups, group: str, together: bool, name: str, size: int, plan: Plan
) -> Measured | None:
    """Time one operation; None if no rank took part. Half the time of p2p there and back counts."""
    rows = world.rows[group] if together else world.rows[group][:1]
    count = len(rows[0])
    elements = max(1, size // ITEM // count) * count
    takes_part = any(world.context.rank in row for row in rows)
    once = operation(world, group, name, elements) if takes_part else None
    share = 0.5 if name == "p2p" else 1.0
    seconds = [share * each for each in timed(world, once, plan)]
    everyone = world.gather(seconds if once else [-1.0] * len(seconds))
    series = []
    for row in rows:
        members = [everyone[rank] for rank in row if everyone[rank][0] >= 0]
        if members:
            series.append([statistics.mean(column) for column in zip(*members)])
    if not series:
        return None
    slowest = max(series, key=statistics.median)
    crosses = any(len({world.context.nodes[rank] for rank in row}) > 1 for row in rows)
    return Measured(group, together, count, len(rows), name, elements * ITEM, slowest, crosses)


def timed(world: RankGroups, once, plan: Plan) -> list[float]:
    """Return the seconds of each trial on this rank; the number of trials is equal on all ranks.

    once: runs the operation; None: this rank only joins the barriers.
    """

    def trial() -> float:
        """Return the seconds of one run of the operation."""
        began = time.perf_counter()
        if once is not None:
            once()
        return time.perf_counter() - began

    world.gather([0.0])  # a barrier
    longest = max(row[0] for row in world.gather([trial()]))
    affordable = int(plan.seconds / max(longest, 1e-9))
    trials = max(FEWEST, min(plan.trials, affordable))
    for _ in range(min(plan.warm_ups - 1, max(1, affordable // 4))):
        trial()
    world.gather([0.0])
    return [trial() for _ in range(trials)]


def check_sum(world: RankGroups) -> None:
    """Raise RuntimeError unless an all-reduce of ones gives the number of ranks."""
    ones = world.buffer(world.context.size) + 1
    world.finish(world.groups["world"].all_reduce(ones))
    if float(ones[0]) != world.context.size:
        raise RuntimeError(f"an all-reduce of ones over {world.context.size} ranks gave {ones[0]}")


def pair_scan(world: RankGroups, size: int) -> dict[tuple[str, str], float]:
    """Return the bytes/s between every two nodes, or every two ranks if there is one node.

    Pairs that share no node are measured at the same time, in rounds. Names are those of nodes, or
    `rank N`.
    """
    nodes = world.context.nodes
    firsts = {node: nodes.index(node) for node in dict.fromkeys(nodes)}
    if len(firsts) == 1:
        firsts = {f"rank {rank}": rank for rank in range(world.context.size)}
    names = list(firsts)
    found = {}
    buffer = world.buffer(size // ITEM)
    for pairs in rounds_of_pairs(len(names)):
        once = None
        for a, b in pairs:
            ends = [firsts[names[a]], firsts[names[b]]]
            if world.context.rank in ends:
                first = world.context.rank == ends[0]
                once = functools.partial(ping_pong, world, "world", buffer, ends[first], first)
        everyone = world.gather([statistics.median(timed(world, once, Plan(5, 2, 2.0)))])
        for a, b in pairs:
            found[names[a], names[b]] = size / (everyone[firsts[names[a]]][0] / 2)
    return found


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of 0 to count - 1, in rounds of disjoint pairs (the circle method)."""
    seats = list(range(count + count % 2))  # the last seat of an odd number is empty
    half = len(seats) // 2
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]))
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
