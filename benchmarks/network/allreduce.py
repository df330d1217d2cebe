"""Bus bandwidth of collectives on the world and on the groups of a layout, and the line rate.

    mpirun -n 8 python benchmarks/network/allreduce.py --tp 2 --pp 2
    srun -n 384 python benchmarks/network/allreduce.py --tp 8 --pp 6 --line-rate 400 --gpu h100
    torchrun --nproc-per-node 8 benchmarks/network/allreduce.py --pairs

Groups are measured alone (the first of each kind) and all at once, as in training. There is no
barrier between trials; a trial's time is the mean over the ranks of the slowest group. Writes
allreduce.csv, pairs.csv and calibration.toml (for plan.py and tune.py) into --out.
Definitions: tools/checker/bandwidth.py.
"""

import argparse
import csv
import math
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from base.cli import Parser
from base.errors import UserError, exit_with
from base.paths import check_folder
from config.run_options import Run
from config.schema import Layout
from costs import hardware
from distributed.launch import Launch, discover
from tools.checker.bandwidth import (
    OPERATIONS,
    Measured,
    by_series,
    calibration,
    calibration_text,
    columns,
    fit,
    line,
    line_rate,
    size_text,
    slow_links,
    write_csv,
)

if TYPE_CHECKING:  # mistakes are said before torch is imported
    from tools.checker.timed_collectives import RankGroups

KIB, MIB, GIB = 2**10, 2**20, 2**30
PAIR_BYTES = 16 * MIB


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


def placed(tp: int, pp: int, size: int) -> Layout:
    """The layout with dp filled in; UserError if it does not divide the ranks."""
    if size % (tp * pp):
        raise UserError(f"tp({tp}) * pp({pp}) * dp(?) does not divide {size} ranks")
    return Layout(tp=tp, pp=pp, dp=size // (tp * pp))


def run(given, world: "RankGroups", layout: Layout) -> list[Measured]:
    """All rows, each printed when it is measured."""
    largest = min(given.max_bytes, world.free_bytes())
    from tools.checker.timed_collectives import Plan, check_sum, measure

    plan = Plan(given.trials, given.warm_ups, given.seconds)
    check_sum(world)
    measured: list[Measured] = []
    for group, together, name in series_to_run(given, layout):
        size = given.min_bytes
        while size <= largest:
            row = measure(world, group, together, name, size, plan)
            size *= given.factor
            if row is None:
                continue
            if world.context.rank == 0:
                cells = columns(row, given.line_rate)
                if not measured or measured[-1].group != group:
                    print(line({name: name for name in cells}))
                name_of_group = f"{group} x {row.groups}" if together else group
                print(line(cells | {"group": name_of_group}), flush=True)
            measured.append(row)
    return measured


def conclude(given, world: "RankGroups", measured: list[Measured], extra: dict[str, float]) -> None:
    """Print the fits and write the files; on rank 0."""
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
    write_csv([columns(row, given.line_rate) for row in measured], out / "allreduce.csv")
    nodes = len(set(world.context.nodes))
    entries = extra | calibration(measured, world.context.size // nodes, nodes)
    device = world.context.describe()["device"]
    (out / "calibration.toml").write_text(calibration_text(device, entries))
    use = f"for plan.py and tune.py: --calibration {out}/calibration.toml"
    print(f"written: {out}/allreduce.csv; {use}")


def scan(given, world: "RankGroups") -> None:
    """The pair scan, printed and written; collective."""
    size = min(PAIR_BYTES, given.max_bytes)
    from tools.checker.timed_collectives import pair_scan

    pairs = pair_scan(world, size)
    if world.context.rank:
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
        if launch.size < 2:
            raise UserError("one rank has nothing to exchange: start this with mpirun or srun")
        machine = hardware.load(given.gpu) if given.gpu else None
        layout = placed(given.tp, given.pp, launch.size)
    except UserError as mistake:
        exit_with(mistake, launch.rank == 0, launch.exit_delay)
    from benchmarks.network.rates import rates
    from distributed.context import start
    from tools.checker.timed_collectives import RankGroups, limits_of_sms

    rate = (given.line_rate * 1e9, "--line-rate") if given.line_rate else line_rate()
    given.line_rate = rate[0] if rate else None
    context = start(launch, Run(device=given.device))
    world = RankGroups(context, layout)
    if context.rank == 0:
        if machine and machine.note:
            print(f"note: {machine.note}", file=sys.stderr)
        facts = context.describe()
        facts.pop("places")  # a line for every rank is too long
        print(", ".join(f"{name}: {value}" for name, value in facts.items()))
        known = f"{rate[0] / 1e9:g} Gbit/s ({rate[1]})" if rate else "not known; give --line-rate"
        print(f"line rate of a node: {known}; a dash: the group is within one node")
        if context.device.type == "cuda":
            print(limits_of_sms())
        print()
    extra = rates(world, machine) if given.rates else {}
    measured = run(given, world, layout)
    if given.pairs:
        scan(given, world)
    if context.rank == 0 and measured:
        conclude(given, world, measured, extra)
    context.stop()


if __name__ == "__main__":
    main()
