"""Times collectives, pairs of nodes, and a device's rates: what `benchmarks/allreduce.py` reports.

`world` is that of worlds.py; all functions but the last are collective over its ranks.
"""

import statistics
import time
from dataclasses import dataclass

import psutil
from bandwidth import Measured

from planner import hardware

ITEM = 4  # bytes of an element: fp32
FEWEST = 3  # trials of a row, however long they take


@dataclass(frozen=True)
class Plan:
    """Number of trials and warm-ups; `seconds` of a row beyond which there are fewer trials."""

    trials: int
    warm_ups: int
    seconds: float


def operation(world, group: str, name: str, elements: int):
    """A function that runs the operation once, None for a rank without part in it; and the share of
    its time to report: p2p sends to the neighbour and back, and half of that counts.
    """
    ranks = world.ranks(group)
    mine, count = ranks.index(world.rank), len(ranks)
    if name == "all-reduce":
        whole = world.buffer(elements)
        return lambda: world.all_reduce(group, whole), 1.0
    if name == "p2p":
        other = mine ^ 1
        if other >= count:
            return None, 0.5
        buffer = world.buffer(elements)
        return lambda: _ping_pong(world, group, buffer, other, first=mine < other), 0.5
    whole, part = world.buffer(elements), world.buffer(elements // count)
    if name == "reduce-scatter":
        return lambda: world.reduce_scatter(group, part, whole), 1.0
    return lambda: world.all_gather(group, whole, part), 1.0


def _ping_pong(world, group: str, buffer, other: int, first: bool) -> None:
    if first:
        world.send(group, buffer, other)
        world.receive(group, buffer, other)
    else:
        world.receive(group, buffer, other)
        world.send(group, buffer, other)


def measure(
    world, rows, group: str, together: bool, name: str, size: int, plan: Plan
) -> Measured | None:
    """Time one operation; collective over all ranks. None if no rank took part."""
    own_rows = rows[group] if together else rows[group][:1]
    count = len(own_rows[0])
    elements = max(1, size // ITEM // count) * count
    takes_part = any(world.rank in row for row in own_rows)
    once, share = operation(world, group, name, elements) if takes_part else (None, 1.0)
    seconds = _trials(world, once, plan)
    everyone = world.gather([-1.0] * len(seconds) if once is None else [share * s for s in seconds])
    series = []
    for row in own_rows:
        members = [everyone[rank] for rank in row if everyone[rank][0] >= 0]
        if members:
            series.append([statistics.mean(column) for column in zip(*members)])
    if not series:
        return None
    slowest = max(series, key=statistics.median)
    crosses = any(len({world.nodes[rank] for rank in row}) > 1 for row in own_rows)
    return Measured(group, together, count, len(own_rows), name, elements * ITEM, slowest, crosses)


def _trials(world, once, plan: Plan) -> list[float]:
    """Seconds of each trial on this rank; the number of trials is the same on all ranks."""
    world.gather([0.0])  # a barrier
    first = _time(once)
    longest = max(row[0] for row in world.gather([first]))
    affordable = int(plan.seconds / max(longest, 1e-9))
    trials = max(FEWEST, min(plan.trials, affordable))
    for _ in range(min(plan.warm_ups - 1, max(1, affordable // 4))):
        _time(once)
    world.gather([0.0])
    return [_time(once) for _ in range(trials)]


def _time(once) -> float:
    began = time.perf_counter()
    if once is not None:
        once()
    return time.perf_counter() - began


def check_sum(world) -> None:
    """RuntimeError unless an all-reduce of ones gives the number of ranks."""
    buffer = world.buffer(world.size)
    buffer += 1
    world.all_reduce("world", buffer)
    if float(buffer[0]) != world.size:
        raise RuntimeError(f"an all-reduce of ones over {world.size} ranks gave {buffer[0]}")


def beside_plain_loop(world, size: int, rounds: int = 15) -> tuple[float, float]:
    """The world's all-reduce as timed here, and in a plain loop of torch's own, alternating.

    Seconds of each at the first quartile of all its calls: other processes disturb the slower
    calls, and not both sides equally.
    """
    buffer, ours, plain = world.buffer(size // ITEM), [], []

    def time_ours() -> None:
        plan = Plan(trials=8, warm_ups=2, seconds=1.0)
        ours.extend(_trials(world, lambda: world.all_reduce("world", buffer), plan))

    def time_plain() -> None:
        world.plain_all_reduce(buffer)
        for _ in range(8):
            began = time.perf_counter()
            world.plain_all_reduce(buffer)
            plain.append(time.perf_counter() - began)

    for number in range(rounds):
        for turn in (time_ours, time_plain) if number % 2 else (time_plain, time_ours):
            turn()
    return sorted(ours)[len(ours) // 4], sorted(plain)[len(plain) // 4]


def rates(world, machine: hardware.Machine | None) -> dict[str, float]:
    """Rates of compute and memory while all ranks compute, for hardware.calibrate."""
    torch, cuda = world.torch, world.device.type == "cuda"
    width, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    left = torch.randn(width, width, device=world.device, dtype=dtype)
    block = torch.zeros((2**30 if cuda else 2**25) // ITEM, device=world.device)
    product, copy = torch.empty_like(left), torch.empty_like(block)

    def typical(once) -> float:
        def finished():
            once()
            world.synchronize()

        seconds = statistics.median(_trials(world, finished, Plan(20, 5, 1.0)))
        return max(row[0] for row in world.gather([seconds]))

    flops = 2.0 * width**3 / typical(lambda: torch.mm(left, left, out=product))
    found = {"bandwidth": 2.0 * block.nbytes / typical(lambda: copy.copy_(block))}
    if machine:
        found["gemm_fraction"] = flops / (machine.peak if cuda else machine.vector_peak)
    if not cuda:
        local = world.context.local.size
        held = psutil.Process().memory_info().rss
        found |= {"memory": psutil.virtual_memory().available / local + held, "node": local}
        mine = psutil.Process().cpu_affinity()
        seen = world.gather([float(core in mine) for core in range(psutil.cpu_count())])
        found["ranks_per_core"] = max(1.0, local / sum(map(max, zip(*seen))))
    return found


def pair_scan(world, size: int) -> dict[tuple[str, str], float]:
    """Bytes/s between every two nodes, or ranks if there is one node; collective.

    In rounds of disjoint pairs. Names are those of nodes, or `rank N`.
    """
    firsts = {node: world.nodes.index(node) for node in dict.fromkeys(world.nodes)}
    if len(firsts) == 1:
        firsts = {f"rank {rank}": rank for rank in range(world.size)}
    names, found = list(firsts), {}
    buffer = world.buffer(size // ITEM)
    for pairs in rounds_of_pairs(len(names)):
        other = first = None
        for a, b in pairs:
            ends = firsts[names[a]], firsts[names[b]]
            if world.rank in ends:
                first = world.rank == ends[0]
                other = ends[1] if first else ends[0]
        once = None
        if other is not None:
            once = lambda o=other, f=first: _ping_pong(world, "world", buffer, o, f)  # noqa: E731
        seconds = statistics.median(_trials(world, once, Plan(5, 2, 2.0)))
        everyone = world.gather([seconds])
        for a, b in pairs:
            found[names[a], names[b]] = size / (everyone[firsts[names[a]]][0] / 2)
    return found


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of `count`, in rounds of disjoint pairs (the circle method)."""
    seats = list(range(count)) + [None] * (count % 2)
    half, rounds = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]))
        rounds.append([tuple(sorted(p)) for p in pairs if None not in p])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
