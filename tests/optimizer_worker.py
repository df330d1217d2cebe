"""Overflows and drift planted on one rank, found by all; run on 8 ranks.

Prints "ok" and the number of checks; a check that fails ends every rank.
"""

import math
import re

import golden_worker
import torch

import data
import trainer
from config import schema as configuration
from config import validation
from config.run_options import DynamicScale
from distributed.context import Context, start
from distributed.launch import discover
from distributed.store import StoreExchange
from optim.loss_scale import LossScale
from telemetry.replica_check import differing_replicas

CHECKS: list[str] = []


def check(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"does not hold: {what}")
    CHECKS.append(what)


def pieces(context: Context, **options) -> trainer.TrainState:
    case = {"tp": 2, "pp": 2, "lr": 1e-3} | options
    return trainer.build(validation.check(golden_worker.options(case), context.size), context)


def same_everywhere(exchange: StoreExchange, value, what: str) -> None:
    same = exchange.agree(repr(value), lambda every: len(set(every)) == 1)
    check(same, f"{what} is the same everywhere")


def plant(p: torch.nn.Parameter, bad: float):
    """Make the next gradients of a parameter bad, until the handle is removed."""

    def planted(gradient: torch.Tensor) -> torch.Tensor:
        whole = torch.full(gradient.shape, bad, dtype=gradient.dtype)
        return whole.to_sparse(1) if gradient.is_sparse else whole  # rows of an embedding

    return p.register_hook(planted)


def check_overflow(
    context: Context, exchange: StoreExchange, zero: int, precision: str, bad: float
) -> None:
    """A gradient that is not finite, on each rank in turn: all ranks skip and halve the scale."""
    run = pieces(
        context,
        zero=zero,
        precision=precision,
        sequence_parallel=True,
        global_batch_size=4,
    )
    # The first overflow halves the scale.
    rule = DynamicScale(initial_loss_scale_power=10, loss_scale_hysteresis=1)
    run.optimizer.scale = LossScale(run.config.training, rule)
    samples = data.Synthetic(61, 16, 1234)
    for turn in range(context.size):
        before = [p.detach().clone() for p in run.stages.parameters()]
        scale, updates = run.optimizer.scale.value, run.optimizer.updates
        handle = None
        if context.rank == turn:
            # A norm's or embedding's parameter: linear layers add gradients without hooks.
            handle = plant(list(run.stages.parameters())[turn % 2], bad)
        result = trainer.step(run, samples, 0, 1e-3)
        if handle:
            handle.remove()
        what = f"zero {zero} {precision}: {bad} on rank {turn}"
        check(result.skipped, f"{what} skips")
        same_everywhere(exchange, (result, run.optimizer.scale.state()), what)
        check(run.optimizer.updates == updates, f"{what} is no update")
        halved = max(scale / 2, 1.0) if precision == "fp16" else 1.0
        check(run.optimizer.scale.value == halved, f"{what} halves the scale")
        after = list(run.stages.parameters())
        check(all(torch.equal(a, b) for a, b in zip(after, before)), f"{what} changes no weight")
        result = trainer.step(run, samples, 8 * turn, 1e-3)
        check(not result.skipped and math.isfinite(result.grad_norm), f"{what}, the next step")
        unequal = differing_replicas(run.stages, run.optimizer, run.factory.mesh)
        check(unequal == [], f"{what}, replicas: {unequal}")


# Copied over tp and dp; over dp alone; over dp and, with a pipeline, on the last stage.
DRIFTING = ("blocks.0.mlp.down.bias", "blocks.0.mlp.up.weight", "embedding.tokens.weight")


def flip_bit(run: trainer.TrainState, name: str, kind: str) -> bool:
    """Flip the last bit of the first element of a tensor that is here; False if none is."""
    if kind == "weight":
        for p in run.stages.parameters():
            if p.spec.name == name:
                p.detach().view(-1)[:1].view(torch.int16).bitwise_xor_(1)
                return True
        return False
    stored = {"master": "weights"}.get(kind, kind)
    for shard in run.optimizer.owned():
        if shard.spec.name == name:
            values = shard.read(stored, shard.start, shard.stop).clone()
            values[:1].view(torch.int32).bitwise_xor_(1)
            shard.write(stored, shard.start, values)
            return True
    return False


def axes_of_copies(run: trainer.TrainState, name: str, kind: str) -> set[str]:
    """The axes over which this rank's tensor has copies that are compared."""
    mesh, optimizer = run.factory.mesh, run.optimizer
    (spec,) = [spec for spec in optimizer.specs if spec.name == name]
    over_dp = kind == "weight" or not any(group.sharded for group in optimizer.groups)
    axes = {"dp"} if over_dp and mesh.dp.size > 1 else set()
    axes |= {"tp"} if spec.dim is None and mesh.tp.size > 1 else set()
    return axes | ({"tied"} if spec.tied else set())


def check_drift(context: Context, exchange: StoreExchange, **options) -> set[tuple[str, str]]:
    """One flipped bit of a weight, a master or a moment on one rank is found, and the rank named.

    The rank is the last one that holds the tensor. Returns the (axis, kind) that were found.
    """
    run = pieces(context, tied=True, precision="bf16", **options)  # masters are not the weights
    found = set()
    trainer.step(run, data.Synthetic(61, 16, 1234), 0, 1e-3)
    kinds = (
        ("master", "exp_avg") if run.optimizer.fully_sharded else ("weight", "master", "exp_avg")
    )
    for name in DRIFTING:
        for kind in kinds:
            # A second flip, of the same bit, restores it.
            holds = flip_bit(run, name, kind) and flip_bit(run, name, kind)
            rank = max(i for i, held in enumerate(exchange.gather("holds", holds)) if held)
            found |= check_one_drift(context, exchange, run, name, kind, rank)
    check(differing_replicas(run.stages, run.optimizer, run.factory.mesh) == [], "all is restored")
    return found


def check_one_drift(
    context: Context,
    exchange: StoreExchange,
    run: trainer.TrainState,
    name: str,
    kind: str,
    rank: int,
) -> set[tuple[str, str]]:
    own = context.rank == rank
    axes = axes_of_copies(run, name, kind) if own else set()
    if own:
        flip_bit(run, name, kind)
    differences = differing_replicas(run.stages, run.optimizer, run.factory.mesh)
    if own:
        flip_bit(run, name, kind)
    own_lines = [difference.sentence for difference in differences]
    lines = sorted({line for lines in exchange.gather("lines", own_lines) for line in lines})
    expected = exchange.gather("axes", sorted(axes))[rank]
    what = f"{run.config.layout}, {name} {kind} on rank {rank}: {lines}"
    seen = []
    for line in lines:
        start, _, ranks = line.partition(": ")
        axis = start.removeprefix(f"{name} {kind} differs over ")
        check(axis != start, f"no other tensor is named: {what}")
        check(str(rank) in re.findall(r"\d+", ranks), f"the rank is named: {what}")
        seen.append(axis)
    check(sorted(seen) == expected, f"found over {expected}: {what}")
    return {(axis, kind) for axis in seen}


def main() -> None:
    context = start(discover(), configuration.Run())
    with context.failing_loudly():
        exchange = StoreExchange(context.store, context.rank, context.size, "checks")
        for zero in (0, 1, 2):
            check_overflow(context, exchange, zero, "fp16", math.inf)
        check_overflow(context, exchange, 1, "bf16", math.nan)
        check_overflow(context, exchange, 1, "fp32", -math.inf)
        seen = set()
        for zero in (0, 1, 2):
            seen |= check_drift(context, exchange, zero=zero)
        seen |= check_drift(context, exchange, zero=3, pp=1)
        axes = ("tp", "dp", "tied")
        expected = {(axis, kind) for axis in axes for kind in ("weight", "master", "exp_avg")}
        check(seen == expected, f"copies of every kind over every axis have drifted: {seen}")
        if context.rank == 0:
            print("ok", len(CHECKS))
    context.stop()


if __name__ == "__main__":
    main()
