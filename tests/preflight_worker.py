"""Ranks that plant one fault after another and let pre-flight find it: `mpirun -n 4 python THIS`.

Rank 0 prints a line `FAULT: what was said`. The last fault is a rank that does not answer.
"""

import sys
import time

import torch

import checks
import preflight
from cluster import start
from config import UserError
from launch import discover
from options import parse
from placement import Place

CULPRIT = 2
OWN = {name: getattr(preflight, name) for name in ("versions", "try_device", "check_clocks")}


def plant(fault: str, cluster) -> None:
    """Make this rank's part of the fault; everything else is as it should be."""
    for name, function in OWN.items():
        setattr(preflight, name, function)
    if cluster.rank == CULPRIT and fault == "torch":
        preflight.versions = lambda config: OWN["versions"](config) | {"torch": "1.13.1"}
    if cluster.rank == CULPRIT and fault == "broken":
        preflight.try_device = lambda device: {"error": "CUDA error: uncorrectable ECC error"}
    if fault == "slow":
        slow = cluster.rank == CULPRIT
        preflight.try_device = lambda device: {"flops": 1e12 if slow else 5e12}
    if fault == "clock":
        apart = [0.0, 0.1, 100.0, 0.0]
        preflight.check_clocks = lambda clocks, *rest: OWN["check_clocks"](apart, *rest)


def look(fault: str, config, cluster, seconds: float) -> None:
    """Run the checks and say on rank 0 what they said."""
    said = []
    plant(fault, cluster)
    try:
        preflight.check_nodes(config, cluster, said.append, seconds)
    except UserError as error:
        said.append(f"UserError {error}")
    if cluster.rank == 0:
        print(f"{fault}: {' | '.join(said)}", flush=True)


def room(name: str, config, cluster, needed: int) -> None:
    """The same for memory and disk."""
    said = []
    try:
        preflight.check_room(config, cluster, needed, said.append)
    except UserError as error:
        said.append(f"UserError {error}")
    if cluster.rank == 0:
        print(f"{name}: {' | '.join(said)}", flush=True)


def main() -> None:
    words = "--layers 1 --hidden 8 --heads 2 --vocab-size 16 --steps 1 --tp 2 --pp 2 --preflight"
    launch = discover()
    config = checks.check(parse([*words.split(), "--out", sys.argv[1]]), launch.size)
    cluster = start(launch, config.run)
    # Two nodes, as far as messages go.
    cluster.places = [Place("a" if r < 2 else "b", r % 2, "cpu", None, (0,)) for r in range(4)]
    saving = checks.check(
        parse([*words.split(), "--out", sys.argv[1], "--save-every", "1"]), launch.size
    )
    with cluster.failing_loudly():
        for fault in ("nothing", "torch", "broken", "slow", "clock"):
            look(fault, config, cluster, 30.0)
        room("enough", saving, cluster, 10**6)
        preflight.free_disk = lambda folder: 5 * 10**9
        room("no disk, no saves", config, cluster, 10**10)
        room("no disk", saving, cluster, 10**10)
        preflight.available_memory = lambda: 10**9
        room("no memory", saving, cluster, 4 * 10**9)
        torch.distributed.barrier()
        if cluster.rank == CULPRIT:  # it comes back when the others have given it up
            time.sleep(9.0)
        look("absent", config, cluster, 5.0)
        hang_in_groups(config, cluster)
    cluster.stop()


def hang_in_groups(config, cluster) -> None:
    """One rank answers, but does not enter the groups' collectives."""
    plant("nothing", cluster)
    if cluster.rank == CULPRIT:
        preflight.Mesh = lambda *arguments: time.sleep(9.0)
    torch.distributed.barrier()
    look("hang", config, cluster, 5.0)
    if cluster.rank != 0:
        time.sleep(30.0)  # rank 0 may still be speaking, and it ends all
    time.sleep(1.0)  # mpirun carries its words before an abort can overtake them
    cluster.end_all_ranks(3)


if __name__ == "__main__":
    main()
