"""Trains a GPT: one run, from its configuration to its last row of metrics.

    python train.py --model gpt2-124m --data synthetic --steps 20 --global-batch-size 8
    mpirun -n 4 python train.py --config run.toml --tp 2 --pp 2
    srun -n 384 python train.py --model bloom-176b --tp 4 --pp 12 ...
    torchrun --nproc-per-node 8 train.py --tp 8 ...

dp follows from the number of ranks. `python train.py --help` lists every option.
"""

import sys

from cluster import Cluster, Launch, discover, start
from config import Config, Training, UserError, check, exit_with
from options import parse

if __name__ == "__main__":
    # --help, a typo or a batch that does not divide is answered before torch is imported.
    LAUNCH = discover()
    try:
        CONFIG = check(parse(sys.argv[1:], __doc__), LAUNCH.size)
    except UserError as mistake:
        exit_with(mistake, speak=LAUNCH.rank == 0)

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import data
import plan
from checkpoint import Checkpointer
from log import Log
from model import Stage, attention_kernel
from parallel import Builder, Mesh
from pipeline import Pipeline
from restore import Progress
from zero import Optimizer, StepResult, unequal_replicas

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


# ------------------------------------------------------------------------------------------------
# The pieces of a run
# ------------------------------------------------------------------------------------------------


@dataclass
class Pieces:
    """What one rank holds of a run, for one layout."""

    config: Config
    build: Builder
    parts: list[plan.Stage]  # of every rank of the pipeline
    stage: Stage
    pipeline: Pipeline
    optimizer: Optimizer


def build(config: Config, cluster: Cluster | None = None) -> Pieces:
    """Build this rank's stage, pipeline and optimizer; collective over all ranks.

    `config` has passed config.check. Without a cluster it is a world of one on the CPU.
    """
    layout, training = config.layout, config.training
    mesh = Mesh(layout, cluster)
    builder = Builder(
        mesh,
        DTYPES[training.precision],
        cluster.device if cluster else torch.device("cpu"),
        training.seed,
        training.init_std,
        layout.sequence_parallel,
    )
    costs = plan.part_costs(config.model, builder.device.type)
    parts = plan.stages(config.model, layout, costs)
    stage = Stage(builder, config.model, layout, parts[mesh.pp_rank])
    optimizer = Optimizer(stage, builder, training, layout.zero)
    return Pieces(config, builder, parts, stage, Pipeline(stage, builder, config), optimizer)


def step(pieces: Pieces, samples: data.Samples, consumed: int, lr: float) -> StepResult:
    """One optimizer step on the global batch that starts at sample `consumed`."""
    config, pipeline = pieces.config, pieces.pipeline
    tokens = config.training.global_batch_size * config.model.seq_length
    batches = _batches(pieces, samples, consumed)
    loss = pipeline.train(batches, tokens, pieces.optimizer.start_reducing)
    return pieces.optimizer.step(lr, loss, tokens)


def evaluate(pieces: Pieces, samples: data.Samples) -> float:
    """Mean loss per token over the first --eval-samples; collective over all ranks."""
    config, layout = pieces.config, pieces.config.layout
    count = config.data.eval_samples
    micro_batches = count // (layout.micro_batch_size * layout.dp)
    loss = pieces.pipeline.evaluate(_batches(pieces, samples, 0), micro_batches)
    pieces.build.mesh.world.all_reduce(loss).wait()
    return loss.item() / (count * config.model.seq_length)


def _batches(pieces: Pieces, samples: data.Samples, first: int):
    """The function that gives this replica's micro-batches of the global batch at `first`."""
    mesh, device = pieces.build.mesh, pieces.build.device

    def batch(index: int) -> tuple[Tensor, Tensor]:
        layout = pieces.config.layout
        tokens, labels = data.micro_batch(samples, first, index, layout, mesh.dp.rank)
        return tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    return batch


def learning_rate(training: Training, samples: int, total: int) -> float:
    """The rate of the step that starts when `samples` of `total` have been trained on.

    Linear warm-up, then cosine, linear, constant, or WSD (arXiv 2404.06395: constant, and a
    linear fall at the end), to min_lr at lr_decay_samples.
    """
    peak, low = training.lr, training.min_lr
    end = training.lr_decay_samples or total
    if samples < training.lr_warmup_samples:
        return (
            peak
            * (samples + training.global_batch_size)
            / (training.lr_warmup_samples + training.global_batch_size)
        )
    if training.lr_schedule == "constant":
        return peak
    if samples >= end:
        return low
    start = training.lr_warmup_samples
    if training.lr_schedule == "wsd":
        start = max(start, end - (training.lr_wsd_decay_samples or end // 10))
    done = max(0.0, (samples - start) / max(1, end - start))
    if training.lr_schedule == "cosine":
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * done))
    return low + (peak - low) * (1 - done)


# ------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------


def main(config: Config, launch: Launch) -> None:
    """Run to the end, or end every rank with a non-zero status."""
    cluster = start(launch, config.run)
    with cluster.failing_loudly():
        splits = data.build(config)
        check_precision(config.training.precision, cluster)
        pieces = build(config, cluster)
        kernels = {
            "optimizer": pieces.optimizer.kernel,
            "attention": attention_kernel(config.model, pieces.build),
        }
        log = Log(config, cluster, pieces.build.mesh, pieces.parts, kernels)
        mesh, samples = pieces.build.mesh, splits.train
        checkpoints = Checkpointer(config, mesh, pieces.optimizer, cluster, samples, log.note)
        loop(pieces, splits, log, checkpoints)
        checkpoints.close()
        log.close()
    cluster.stop()


def loop(pieces: Pieces, splits: data.Splits, log: Log, checkpoints: Checkpointer) -> None:
    """Train up to the configured number of steps, evaluating, logging and saving on the way."""
    config, training = pieces.config, pieces.config.training
    batch, total = training.global_batch_size, config.total_steps
    done = checkpoints.resume()
    consumed, skipped = done.consumed_samples, done.skipped_samples
    for iteration in range(done.iteration + 1, total + 1):
        began = time.perf_counter()
        lr = learning_rate(training, consumed - skipped, total * batch)
        result = step(pieces, splits.train, consumed, lr)
        consumed += batch
        skipped += batch if result.skipped else 0
        log.step(iteration, consumed, lr, result, time.perf_counter() - began)

        last = iteration == total
        every = config.data.eval_every
        if splits.validation and (last or (every and iteration % every == 0)):
            loss = evaluate(pieces, splits.validation)
            log.evaluation("validation", iteration, consumed, loss)
        every = config.run.check_replicas_every
        if every and (last or iteration % every == 0):
            check_replicas(pieces, iteration)
        checkpoints.after_step(Progress(iteration, consumed, skipped), last)
    if splits.test:
        log.evaluation("test", total, consumed, evaluate(pieces, splits.test))


def check_precision(precision: str, cluster: Cluster) -> None:
    """Raise UserError if the device has no arithmetic of that precision."""
    if precision != "bf16" or cluster.device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(cluster.device)
        raise UserError(f"--precision bf16: {name} has no bf16 arithmetic; use fp32")


def check_replicas(pieces: Pieces, iteration: int) -> None:
    """Raise RuntimeError, naming parameters and ranks, if copies of a weight have drifted apart."""
    unequal = unequal_replicas(pieces.stage, pieces.build.mesh)
    if unequal:
        raise RuntimeError(
            f"after iteration {iteration} replicas are no longer equal: {'; '.join(unequal[:5])}"
            + (f" and {len(unequal) - 5} more" if len(unequal) > 5 else "")
        )


if __name__ == "__main__":
    main(CONFIG, LAUNCH)
