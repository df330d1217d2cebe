"""Saving and loading compared with torch.distributed.checkpoint (DCP): same state, disk, process.

    mpirun -n 2 python benchmarks/checkpoint.py FOLDER      prints the tables

The state is a model of 46 million parameters with AdamW under tp 2; each tensor-parallel shard is
a DTensor for DCP. All operations run once per round; the tables give medians over the rounds, with
the smallest and the largest. Both systems flush their files to the disk; loads read from the page
cache; ours also reads every file to compare checksums. While an asynchronous save is under way both
ranks compute matrix products, and the time that these take beyond that without a save counts as a
cost of the save, in addition to the pause.
"""

import functools
import os
import shutil
import statistics
import sys
import time
import warnings
from pathlib import Path

# Not this folder, whose modules have the names of modules at the root.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import trainer
from checkpointing.save import Checkpointer
from checkpointing.state import Progress
from config import model_stats, validation
from config import schema as configuration
from config.command_line import build
from config.messages import Parser, UserError, exit_with
from distributed.context import start
from distributed.launch import discover

ROUNDS = 7
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


def work() -> float:
    """Seconds of matrix products, as in a training step."""
    began = time.perf_counter()
    x = torch.ones(384, 384)
    for _ in range(12):
        x = x @ x * 1e-3
    return time.perf_counter() - began


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


def asynchronous(begin, usual: float) -> dict[str, float]:
    """Begin a save and work until it is complete: seconds of pause, of slower work, in total.

    `begin` returns a function that says whether the save is complete. usual: seconds of `work`
    without a save.
    """
    dist.barrier()
    began = time.perf_counter()
    done = begin()
    pause, extra = time.perf_counter() - began, 0.0
    while not done():
        extra += work() - usual
    total = time.perf_counter() - began
    return {"pause": slowest(pause), "slowing": slowest(extra), "complete": slowest(total)}


def ours_in_background(checkpoints: Checkpointer):
    """Begin our save; a function that says whether it is complete."""
    checkpoints.save(Progress(1, 8))
    return lambda: not checkpoints._thread.is_alive()


def size_of(folder: str) -> int:
    """Bytes of all files under a folder."""
    return sum(
        os.path.getsize(os.path.join(at, n)) for at, _, names in os.walk(folder) for n in names
    )


def fresh(folder: str) -> None:
    """Remove what an earlier round wrote, and wait for pending writes."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        os.sync()
    dist.barrier()


def main() -> None:
    """Measure on two ranks and print the tables."""
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
        results, sizes, parameters = measure(context, folder)
        if context.rank == 0:
            report(results, sizes, parameters)
    context.stop()


def measure(context, folder: str):
    """Seconds by operation and system, a list of rounds each; bytes by system; parameters."""
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
    usual = statistics.median(work() for _ in range(30))
    results: dict[tuple[str, str], list[float]] = {}
    sizes = {}

    def record(operation: str, system: str, value: float) -> None:
        results.setdefault((operation, system), []).append(value)

    quiet = functools.partial(dcp.load, no_dist=False)
    for number in range(ROUNDS + 1):
        seconds = {}
        fresh(theirs)
        seconds["save", "DCP"] = timed(lambda: dcp.save(state, checkpoint_id=theirs))
        sizes["DCP"] = size_of(theirs)
        seconds["load", "DCP"] = timed(lambda: quiet(state, checkpoint_id=theirs))
        seconds["load under pp 2", "DCP"] = timed(lambda: quiet(moved, checkpoint_id=theirs))
        fresh(ours)
        os.makedirs(os.path.join(ours, "checkpoints"), exist_ok=True)
        seconds["save", "ours"] = timed(lambda: (checkpoints.save(Progress(1, 8)), dist.barrier()))
        checkpoints.close()
        sizes["ours"] = size_of(ours)
        seconds["load", "ours"] = timed(same.resume)
        seconds["load under pp 2", "ours"] = timed(from_ours.resume)
        fresh(theirs)
        parts = asynchronous(lambda: dcp.async_save(state, checkpoint_id=theirs).done, usual)
        seconds |= {(f"async: {name}", "DCP"): value for name, value in parts.items()}
        fresh(ours)
        os.makedirs(os.path.join(ours, "checkpoints"), exist_ok=True)
        parts = asynchronous(lambda: ours_in_background(background), usual)
        background.close()
        seconds |= {(f"async: {name}", "ours"): value for name, value in parts.items()}
        if number:  # the first round is warm-up
            for (operation, system), value in seconds.items():
                record(operation, system, value)
    return results, sizes, model_stats.parameters(training.config.model)


def report(results, sizes: dict[str, int], parameters: int) -> None:
    """Print both tables, and how much of a save the training waits for."""
    state = 12 * parameters
    print(f"{parameters:,} parameters, {state / 1e6:.0f} MB of state; {ROUNDS} rounds\n")
    print("| operation | ours, s | DCP, s | DCP / ours | ours, MB/s | DCP, MB/s |")
    print("|---|---|---|---|---|---|")
    for operation in dict.fromkeys(operation for operation, _ in results):
        ours, theirs = results[operation, "ours"], results[operation, "DCP"]
        a, b = statistics.median(ours), statistics.median(theirs)
        rate = [f"{state / x / 1e6:.0f}" if "async" not in operation else "" for x in (a, b)]
        spread = [f"{m:.3f} ({min(x):.3f}-{max(x):.3f})" for m, x in ((a, ours), (b, theirs))]
        print(f"| {operation} | {' | '.join(spread)} | {b / a:.2f} | {' | '.join(rate)} |")
    print("\n| | bytes on disk | per parameter |\n|---|---|---|")
    for system, size in sizes.items():
        print(f"| {system} | {size:,} | {size / parameters:.4f} |")
    pause = statistics.median(results["async: pause", "ours"])
    print(f"\nour pause is {pause / statistics.median(results['save', 'ours']):.2f} of our save")


if __name__ == "__main__":
    main()
