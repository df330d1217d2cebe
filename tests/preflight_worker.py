"""Ranks that plant one fault after another for pre-flight to find: `mpirun -n 4 python THIS OUT`.

Rank 0 prints a line `FAULT: messages` for each. The last two are a rank that does not answer in
time and one that does not enter the collectives.
"""

import sys
import threading
import time

import torch

from base.errors import NodeError, UserError
from config import validation
from config.command_line import parse
from distributed import preflight
from distributed.context import start
from distributed.launch import discover
from distributed.placement import Place

CULPRIT = 2
# Seconds until a rank is considered lost. A connection to the store takes 5 s where the name server
# does not answer.
LIMIT = 8.0
OWN = {name: getattr(preflight, name) for name in ("versions", "try_device")}


def plant(fault: str, context) -> None:
    """This rank's part of the fault; undoes the fault before it."""
    for name, function in OWN.items():
        setattr(preflight, name, function)
    if context.rank == CULPRIT and fault == "torch":
        preflight.versions = lambda config: OWN["versions"](config) | {"torch": "1.13.1"}
    if context.rank == CULPRIT and fault == "broken":
        preflight.try_device = lambda *device: "CUDA error: uncorrectable ECC error"


def look(fault: str, config, context, seconds: float) -> None:
    """Run the checks; rank 0 prints their messages."""
    said = []
    plant(fault, context)
    try:
        preflight.check_nodes(config, preflight.Peers(context, seconds), said.append)
    except NodeError as error:
        said.append(f"NodeError of {error.nodes} {error}")
    if context.rank == 0:
        print(f"{fault}: {' | '.join(said)}", flush=True)


def tried_with_experts(context, out: str) -> None:
    """Check a run with experts and heads over cp; rank 0 prints what its groups have done."""
    words = "--layers 1 --hidden 8 --heads 2 --vocab-size 16 --steps 1 --cp 2 --ep 2 --experts 4"
    config = validation.check(parse([*words.split(), "--preflight", "--out", out]), context.size)
    done, own = [], preflight.try_group

    def try_group(group, operation, device):
        own(group, operation, device)
        done.append((f"{operation} of {group.ranks}", id(group.handle)))

    preflight.try_group = try_group
    look("with experts", config, context, 30.0)
    preflight.try_group = own
    if context.rank == 0:
        print(f"groups with experts: {'; '.join(words for words, _ in done)}", flush=True)
        print(f"tried twice: {len(done) - len(set(done))}", flush=True)


def room(name: str, config, context, needed: int) -> None:
    """Check memory and disk; rank 0 prints the messages."""
    said = []
    try:
        preflight.check_room(config, context, needed, said.append)
    except UserError as error:
        said.append(f"UserError {error}")
    if context.rank == 0:
        print(f"{name}: {' | '.join(said)}", flush=True)


def main() -> None:
    words = "--layers 1 --hidden 8 --heads 2 --vocab-size 16 --steps 1 --tp 2 --pp 2 --preflight"
    launch = discover()
    config = validation.check(parse([*words.split(), "--out", sys.argv[1]]), launch.size)
    context = start(launch, config.run)
    # For the messages, two nodes.
    context.places = [Place("a" if r < 2 else "b", r % 2, "cpu", None, (0,)) for r in range(4)]
    saving = validation.check(
        parse([*words.split(), "--out", sys.argv[1], "--save-every", "1"]), launch.size
    )
    with context.failing_loudly():
        for fault in ("nothing", "torch", "broken"):
            look(fault, config, context, 30.0)
        tried_with_experts(context, sys.argv[1])
        room("enough", saving, context, 10**6)
        preflight.free_bytes = lambda folder: 5 * 10**9
        room("no disk, no saves", config, context, 10**10)
        room("no disk", saving, context, 10**10)
        preflight.available_memory = lambda: 10**9
        room("no memory", saving, context, 4 * 10**9)
        torch.distributed.barrier()
        if context.rank == CULPRIT:
            context.store.wait(["the others do not wait any more"])
        look("absent", config, context, LIMIT)
        if context.rank == 0:
            context.store.set("the others do not wait any more", "")
        hang_in_groups(config, context)
    context.stop()


def hang_in_groups(config, context) -> None:
    """One rank answers, but does not make its groups."""
    plant("nothing", context)
    if context.rank == CULPRIT:
        preflight.mesh_of_run = lambda *arguments: threading.Event().wait()
    torch.distributed.barrier()
    look("hang", config, context, LIMIT)
    if context.rank != 0:
        time.sleep(30.0)  # until rank 0, which may still be printing, ends all
    time.sleep(1.0)  # mpirun passes on what was printed before the abort
    context.end_all_ranks(3)


if __name__ == "__main__":
    main()
