"""Bus bandwidth of collectives on the world and on the groups of a layout, and the line rate.

    mpirun -n 8 python benchmarks/allreduce.py --tp 2 --pp 2
    srun -n 384 python benchmarks/allreduce.py --tp 8 --pp 6 --line-rate 400 --gpu a100-80 --rates
    torchrun --nproc-per-node 8 benchmarks/allreduce.py --pairs
    mpirun -n 8 python benchmarks/allreduce.py --host         # mpi4py's host buffers, no torch

Groups are measured alone (the first of each kind) and all at once, as in training. There is no
barrier between trials; a trial's time is the mean over the ranks of the slowest group. Writes
allreduce.csv, allreduce.png, pairs.csv and calibration.toml (for plan.py and tune.py) into --out.
Definitions: bandwidth.py. Ctrl-C stops and prints the rows so far; a second one ends at once.
"""

import argparse
import csv
import math
import re
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil
from bandwidth import (
    HEAD,
    OPERATIONS,
    Measured,
    by_series,
    calibration,
    calibration_text,
    fit,
    line,
    plot,
    size_text,
    slow_links,
    write_csv,
)
from worlds import HostWorld, TorchWorld, group_rows, placed

from config.messages import Parser, UserError, exit_with
from config.schema import Layout, Run
from config.validation import check_folder
from distributed.launch import Launch, discover
from planner import hardware

KIB, MIB, GIB = 2**10, 2**20, 2**30
ITEM = 4  # bytes of an element: fp32
PAIR_BYTES = 16 * MIB
FEWEST = 3  # trials of a row, however long they take


# ------------------------------------------------------------------------------------------------
# Measuring
# ------------------------------------------------------------------------------------------------


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


# ------------------------------------------------------------------------------------------------
# The line rate
# ------------------------------------------------------------------------------------------------


def line_rate(root: Path = Path("/sys/class")) -> tuple[float, str] | None:
    """Bits per second of all of a node's adapters, and the source of that; None if unknown.

    InfiniBand and Omni-Path ports if there are any, else the fastest network card that is up.
    """
    ports = sorted(root.glob("infiniband/*/ports/*/rate"))
    found = [re.match(r"([\d.]+) Gb/sec", path.read_text()) for path in ports]
    total = sum(float(match.group(1)) for match in found if match)
    if total:
        return total * 1e9, f"{len(ports)} ports under {root}/infiniband"
    speeds = {}
    for path in root.glob("net/*/speed"):
        try:
            speeds[path.parent.name] = int(path.read_text())
        except OSError:  # a card that is down or virtual has none
            continue
    card = max(speeds, key=speeds.get, default=None)
    if card is None or speeds[card] <= 0:
        return None
    return speeds[card] * 1e6, f"card {card}"


# ------------------------------------------------------------------------------------------------
# The program
# ------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; UserError if options contradict one another."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the layout")
    parser.add_argument("--pp", type=int, default=1, help="its pipeline stages; dp follows")
    parser.add_argument("--min-bytes", type=int, default=32 * KIB, help="smallest (default 32 KiB)")
    parser.add_argument("--max-bytes", type=int, default=16 * GIB, help="largest, as memory allows")
    parser.add_argument("--factor", type=int, default=2, help="from one size to the next")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--warm-ups", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one row; long: fewer trials")
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, metavar="|".join(OPERATIONS))
    parser.add_argument("--pairs", action="store_true", help="scan all pairs of nodes (or ranks)")
    parser.add_argument("--host", action="store_true", help="mpi4py's host buffers, not torch's")
    parser.add_argument("--rates", action="store_true", help="also GEMM and memory rates")
    parser.add_argument("--gpu", help="the planner's machine that the calibration is for")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--line-rate", type=float, help="Gbit/s of a node, instead of the found one"
    )
    parser.add_argument("--out", default="runs/allreduce", help="folder for the files")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.operations if name not in OPERATIONS]
    if unknown:
        raise UserError(f"--operations are of {', '.join(OPERATIONS)}, not {unknown[0]}")
    if given.rates and given.host:
        raise UserError("--rates measures torch's kernels: leave out --host")
    if min(given.min_bytes, given.trials, given.warm_ups, given.tp, given.pp) < 1:
        raise UserError("sizes, trials, warm-ups, tp and pp are at least 1")
    numbers = {"seconds": given.seconds, "line-rate": given.line_rate}
    for name, number in numbers.items():
        if number is not None and not 0 < number < math.inf:
            raise UserError(f"--{name} must be a number above 0, not {number}")
    check_folder("--out", given.out)
    if given.factor < 2 or given.max_bytes < given.min_bytes:
        raise UserError(
            f"no sizes from {given.min_bytes} to {given.max_bytes} by factors of {given.factor}: "
            "--max-bytes is at least --min-bytes, and --factor at least 2"
        )
    return given


class Stop:
    """Whether Ctrl-C was pressed; takes effect on all ranks between two rows."""

    def __init__(self):
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, number, frame) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested = True

    def agreed(self, world) -> bool:
        """Whether a stop was requested on any rank; collective."""
        return max(row[0] for row in world.gather([float(self.requested)])) > 0


def series_to_run(given, layout: Layout) -> list[tuple[str, bool, str]]:
    """(group, together, operation) of every series: groups of one rank are left out."""
    found = []
    for name, size in (("world", None), ("tp", layout.tp), ("pp", layout.pp), ("dp", layout.dp)):
        total = layout.tp * layout.pp * layout.dp
        if size == 1 or (size == total and name != "world"):
            continue
        for together in (False, True)[: 1 if size is None else 2]:
            found += [(name, together, operation) for operation in given.operations]
    return found


def run(given, world) -> tuple[list[Measured], bool]:
    """All rows, each printed when measured; and whether Ctrl-C stopped it."""
    stop, prints = Stop(), world.rank == 0
    layout = placed({"tp": given.tp, "pp": given.pp}, world.size)
    rows, measured = group_rows(layout), []
    largest = min(row[0] for row in world.gather([world.free_bytes()]))
    sizes, size = [], given.min_bytes
    while size <= min(given.max_bytes, largest):
        sizes.append(size)
        size *= given.factor
    plan = Plan(given.trials, given.warm_ups, given.seconds)
    check_sum(world)
    if prints:
        print(HEAD, flush=True)
    for group, together, name in series_to_run(given, layout):
        for size in sizes:
            if stop.agreed(world):
                return measured, True
            row = measure(world, rows, group, together, name, size, plan)
            if row is None:
                continue
            measured.append(row)
            if prints:
                print(line(row, given.line_rate), flush=True)
    return measured, False


def conclude(given, world, measured: list[Measured], extra: dict[str, float]) -> None:
    """Print the fits and write files and plot; on rank 0."""
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    print("\nalpha: seconds a message; beta: bytes/s of one rank, one way, in long messages")
    for (group, together, name), own in by_series(measured).items():
        alpha, beta = fit(own)
        how = "all at once" if together else "alone"
        print(
            f"  {group:6} {how:12} {name:15} {own[0].ranks:4} ranks   "
            f"alpha {1e6 * alpha:10.1f} us   beta {beta / 1e9:8.3f} GB/s"
        )
    write_csv(measured, given.line_rate, out / "allreduce.csv")
    plot(measured, given.line_rate, out / "allreduce.png")
    nodes = len(set(world.nodes))
    entries = extra | calibration(measured, world.size // nodes, nodes)
    device = world.what["device"]
    (out / "calibration.toml").write_text(calibration_text(device, entries))
    written = ", ".join(f"{out}/{n}" for n in ("allreduce.csv", "allreduce.png"))
    print(f"written: {written}; for plan.py and tune.py: --calibration {out}/calibration.toml")


def scan(given, world) -> None:
    """The pair scan, printed and written; collective."""
    size = min(PAIR_BYTES, given.max_bytes)
    pairs = pair_scan(world, size)
    if world.rank:
        return
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "pairs.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("from", "to", "GBps"))
        writer.writerows((a, b, f"{rate / 1e9:.6g}") for (a, b), rate in pairs.items())
    middle = statistics.median(pairs.values())
    slowest = min(pairs, key=pairs.get)
    print(
        f"\n{len(pairs)} pairs, {size_text(size)} each way: median {middle / 1e9:.3f} GB/s, "
        f"slowest {' to '.join(slowest)} with {pairs[slowest] / 1e9:.3f}"
    )
    print("\n".join(slow_links(pairs) or ["no pair is below 80 % of the median"]))


def main() -> None:
    """Measure, print, write."""
    launch = Launch("python")
    try:
        launch = discover()
        given = parse(sys.argv[1:])
        if given.host and not launch.mpi:
            raise UserError(f"--host needs mpirun or srun; this was started by {launch.launcher}")
        if launch.size < 2:
            raise UserError("one rank has nothing to exchange: start this with mpirun or srun")
        machine = hardware.load(given.gpu) if given.gpu else None
        layout = {"tp": given.tp, "pp": given.pp}
        placed(layout, launch.size)
        host = HostWorld(launch, layout) if given.host else None
    except UserError as mistake:
        exit_with(mistake, launch.rank == 0, launch.exit_delay)
    rate = (given.line_rate * 1e9, "--line-rate") if given.line_rate else line_rate()
    given.line_rate = rate[0] if rate else None
    world = host or TorchWorld(launch, Run(device=given.device), layout)
    prints = world.rank == 0
    if prints:
        what = ", ".join(f"{k}: {v}" for k, v in world.what.items())
        print(what)
        known = f"{rate[0] / 1e9:g} Gbit/s ({rate[1]})" if rate else "not known; give --line-rate"
        print(f"line rate of a node: {known}; a dash: the group is within one node\n")
    extra = rates(world, machine) if given.rates else {}
    measured, stopped = run(given, world)
    if measured and not stopped and not given.host and "all-reduce" in given.operations:
        size = max(row.size for row in measured if row.group == "world")
        ours, plain = beside_plain_loop(world, min(size, 16 * MIB))
        if prints:
            print(
                f"\nall-reduce of {size_text(min(size, 16 * MIB))} on the world, first quartile: "
                f"{1e3 * ours:.2f} ms here, {1e3 * plain:.2f} ms in a plain loop of "
                f"torch.distributed.all_reduce; busbw differs by {100 * (plain / ours - 1):+.1f} %"
            )
    if given.pairs and not stopped:
        scan(given, world)
    if prints and measured:
        conclude(given, world, measured, extra)
    world.stop()
    sys.exit(130 if stopped else 0)


if __name__ == "__main__":
    main()
