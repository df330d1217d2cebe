"""Saving and loading compared with torch.distributed.checkpoint (DCP): same state, disk, process.

    mpirun -n 2 python benchmarks/peers/checkpoint.py FOLDER      prints the table

The state is a model of 46 million parameters with AdamW under tp 2; each tensor-parallel shard is
a DTensor for DCP. All operations run once per round; the table gives medians over the rounds, with
the smallest and the largest. Both systems flush their files to the disk; loads read from the page
cache; ours also reads every file to compare checksums. The pause of an asynchronous save is how
long the call takes that begins it.
"""

import os
import shutil
import statistics
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path

# Not this folder, whose modules have the names of modules at the root.
sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import trainer
from architecture import model_stats
from base.cli import Parser
from base.errors import UserError, exit_with
from checkpointing.save import Checkpointer
from checkpointing.state import Progress
from config import schema as configuration
from config import validation
from config.command_line import build
from distributed.context import start
from distributed.launch import discover

ROUNDS = 7
OPERATIONS = ("save", "load", "load under pp 2", "async: pause")
MODEL = {"layers": 12, "hidden": 512, "heads": 8, "seq_length": 256, "vocab_size": 16384}


def make(context, folder: str, **extra) -> tuple[trainer.TrainState, Checkpointer]:
    """The training of MODEL and its checkpoints in that folder; extra: other options."""
    values = MODEL | {"steps": 1, "out": folder, "save_every": 1} | extra
    config = validation.check(build(values), context.size)
    training = trainer.build(config, context)
    mesh, optimizer = training.factory.mesh, training.optimizer
    return training, Checkpointer(config, mesh, optimizer, context, print_line=lambda line: None)


def as_dcp(training: trainer.TrainState, mesh) -> dict[str, torch.Tensor]:
    """A copy of the state for DCP: DTensors over tp, or plain tensors where a rank has the whole.

    A copy, because DCP's stager does not take views of one buffer (torch 2.13).
    """
    state = {}
    for shard in training.optimizer.owned():
        for kind in ("weights", *training.optimizer.state_kinds):
            tensor = shard.read(kind, shard.start, shard.stop).view(shard.shape).clone()
            if training.factory.mesh.tp.size > 1:
                dim = shard.spec.dim
                place = Replicate() if dim is None else Shard(dim)
                tensor = DTensor.from_local(tensor, mesh, [place])
            state[f"{kind}/{shard.spec.name}"] = tensor
    return state


def slowest(seconds: float) -> float:
    """The largest of both ranks' numbers."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def timed(run) -> float:
    """Seconds that `run` takes on the slower of both ranks."""
    dist.barrier()
    began = time.perf_counter()
    run()
    return slowest(time.perf_counter() - began)


def pause_of(begin) -> float:
    """Begin an asynchronous save and wait until it is complete: seconds that the training pauses.

    `begin` returns a function that says whether the save is complete.
    """
    done = []
    pause = timed(lambda: done.append(begin()))
    while not done[0]():
        time.sleep(0.01)
    return pause


def fresh(folder: str) -> None:
    """Remove what an earlier round wrote, and wait for pending writes."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(os.path.join(folder, "checkpoints"))
        os.sync()
    dist.barrier()


def main() -> None:
    """Measure on two ranks and print the table."""
    warnings.filterwarnings("ignore")
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="for the checkpoints; its contents are replaced")
    try:
        launch = discover()
        folder = parser.parse_args().folder
        if launch.size != 2:
            raise UserError(f"this measures on 2 ranks, not {launch.size}: mpirun -n 2 python ...")
    except UserError as mistake:
        exit_with(mistake)
    context = start(launch, configuration.Run())
    with context.failing_loudly():
        results, parameters = measure(context, folder)
        if context.rank == 0:
            report(results, parameters)
    context.stop()


def measure(context, folder: str):
    """Seconds by operation and system, a list of rounds each; and the number of parameters."""
    ours, theirs = os.path.join(folder, "ours"), os.path.join(folder, "dcp")
    training, checkpoints = make(context, ours, tp=2, async_save=False)
    _, background = make(context, ours, tp=2)
    background.optimizer = training.optimizer
    other, from_ours = make(context, ours + ".other", pp=2, resume=ours)
    same = make(context, ours + ".same", tp=2, resume=ours)[1]
    for at, shard in enumerate(training.optimizer.owned()):
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.manual_seed(at)  # equal replicas; no zeros, which a disk may not store
            shard.write(kind, shard.start, torch.rand(shard.stop - shard.start))
    mesh = init_device_mesh("cpu", (2,))
    state, moved = as_dcp(training, mesh), as_dcp(other, mesh)

    def save() -> None:
        checkpoints.save(Progress(1, 8))
        dist.barrier()

    def begin_to_save():
        background.save(Progress(1, 8))
        return lambda: not background._thread.is_alive()

    def begin_dcp():
        return dcp.async_save(state, checkpoint_id=theirs).done

    systems = {
        "DCP": (
            theirs,
            lambda: dcp.save(state, checkpoint_id=theirs),
            lambda: dcp.load(state, checkpoint_id=theirs, no_dist=False),
            lambda: dcp.load(moved, checkpoint_id=theirs, no_dist=False),
            begin_dcp,
        ),
        "ours": (ours, save, same.resume, from_ours.resume, begin_to_save),
    }
    results: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        for system, (place, *operations, begin) in systems.items():
            fresh(place)
            seconds = [timed(operation) for operation in operations]
            checkpoints.close()
            fresh(place)
            seconds.append(pause_of(begin))
            background.close()
            if number:  # the first round is warm-up
                for name, value in zip(OPERATIONS, seconds):
                    results[name, system].append(value)
    return results, model_stats.parameters(training.config.model)


def report(results, parameters: int) -> None:
    """Print the table."""
    state = 12 * parameters
    print(f"{parameters:,} parameters, {state / 1e6:.0f} MB of state; {ROUNDS} rounds\n")
    print("| operation | ours, s | DCP, s | DCP / ours |\n|---|---|---|---|")
    for operation in OPERATIONS:
        sides = [results[operation, system] for system in ("ours", "DCP")]
        ours, theirs = map(statistics.median, sides)
        spread = [f"{statistics.median(x):.3f} ({min(x):.3f}-{max(x):.3f})" for x in sides]
        print(f"| {operation} | {' | '.join(spread)} | {theirs / ours:.2f} |")


if __name__ == "__main__":
    main()
