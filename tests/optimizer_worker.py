"""Overflows and drift planted on one rank, found by all; run under mpirun on 8 ranks.

Prints "ok" and the number of checks; a check that fails ends every rank.
"""

import math

import golden_worker
import torch

import data
import trainer
from config import schema as configuration
from config import validation
from distributed.context import Context, start
from distributed.launch import discover
from distributed.store import StoreExchange

CHECKS: list[str] = []


def check(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"does not hold: {what}")
    CHECKS.append(what)


def pieces(context: Context, **options) -> trainer.TrainState:
    case = {"tp": 2, "pp": 2, "lr": 1e-3} | options
    if context.size < 4:
        case["pp"] = 1
    return trainer.build(validation.check(golden_worker.options(case), context.size), context)


def same_everywhere(exchange: StoreExchange, value, what: str) -> None:
    same = exchange.agree(repr(value), lambda every: len(set(every)) == 1)
    check(same, f"{what} is the same everywhere")


def plant(p: torch.nn.Parameter, bad: float):
    """Make the next gradients of a parameter bad, until the handle is removed."""
    return p.register_hook(
        lambda gradient: (
            gradient.clone()
            .flatten()[:1]
            .mul(0)
            .add(bad)
            .expand(gradient.numel())
            .view_as(gradient)
        )
    )


def check_overflow(
    context: Context, exchange: StoreExchange, zero: int, precision: str, bad: float
) -> None:
    """An inf on one rank, whichever: every rank skips, halves the scale, and goes on alike."""
    run = pieces(
        context,
        zero=zero,
        precision=precision,
        sequence_parallel=True,
        initial_loss_scale_power=10,
        loss_scale_hysteresis=1,
    )
    samples = data.Synthetic(61, 16, 1234)
    for turn in range(context.size):
        before = [p.detach().clone() for p in run.stages.parameters()]
        scale, steps = run.optimizer.scale.value, run.optimizer.steps
        handle = None
        if context.rank == turn:
            handle = plant(list(run.stages.parameters())[turn % 3], bad)
        result = trainer.step(run, samples, 0, 1e-3)
        if handle:
            handle.remove()
        what = f"zero {zero} {precision}: {bad} on rank {turn}"
        check(result.skipped, f"{what} skips")
        same_everywhere(exchange, (result, run.optimizer.scale.state()), what)
        check(run.optimizer.steps == steps, f"{what} is no step")
        halved = max(scale / 2, 1.0) if precision == "fp16" else 1.0
        check(run.optimizer.scale.value == halved, f"{what} halves the scale")
        after = list(run.stages.parameters())
        check(all(torch.equal(a, b) for a, b in zip(after, before)), f"{what} changes no weight")
        result = trainer.step(run, samples, 8 * turn, 1e-3)
        check(not result.skipped and math.isfinite(result.grad_norm), f"{what}, the next step")
        unequal = trainer.unequal_replicas(run.stages, run.optimizer, run.factory.mesh)
        check(unequal == [], f"{what}, replicas: {unequal}")


def check_adamw(context: Context, steps: int = 100) -> None:
    """ZeRO-1 over all ranks, each with a share of the gradient: torch's AdamW on one rank."""
    run = pieces(context, tp=1, pp=1, zero=1, clip_grad=0.5, weight_decay=0.1)
    ours = list(run.stages.parameters())
    theirs = [p.detach().clone() for p in ours]
    decayed = [p for p, own in zip(theirs, ours) if own.spec.decay]
    rest = [p for p, own in zip(theirs, ours) if not own.spec.decay]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-6, foreach=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        run.optimizer.begin_step(1, 1)
        for own, p in zip(ours, theirs):
            shares = torch.randn(context.size, *p.shape, generator=generator)
            own.main_grad.copy_(shares[context.rank])
            p.grad = shares.sum(0)
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        adamw.step()
        run.optimizer.step(1e-3, torch.tensor(0.0))
    off = max((a.detach() - b).abs().max().item() for a, b in zip(ours, theirs))
    check(off < 1e-6, f"{steps} steps of AdamW under ZeRO-1, off by {off}")


def check_drift(context: Context, exchange: StoreExchange, zero: int) -> None:
    """One flipped bit in optimizer state or a weight is found and its rank is named."""
    run = pieces(context, zero=zero, tied=True)
    mesh = run.factory.mesh
    trainer.step(run, data.Synthetic(61, 16, 1234), 0, 1e-3)
    odd = 1  # tp rank 1, dp rank 0, first stage
    for piece in run.optimizer.owned() if context.rank == odd else ():
        if piece.spec.name == "blocks.0.mlp.down.bias":
            values = piece.read("exp_avg", piece.start, piece.stop).clone()
            values[0] += 1e-3
            piece.write("exp_avg", piece.start, values)
    found = trainer.unequal_replicas(run.stages, run.optimizer, mesh)
    every = exchange.agree(found, lambda all: [line for one in all for line in one])
    name = "blocks.0.mlp.down.bias exp_avg differs over"
    check(any(line.startswith(f"{name} tp: ranks [1] and [0]") for line in every), str(every))
    if zero == 0 and mesh.dp.size > 1:
        check(any(line.startswith(f"{name} dp") and "[1]" in line for line in every), str(every))
    check(all(line.startswith(name) for line in every), "nothing else is named")


def main() -> None:
    context = start(discover(), configuration.Run())
    with context.failing_loudly():
        exchange = StoreExchange(context.store, context.rank, context.size, "checks")
        for zero in (0, 1, 2):
            check_overflow(context, exchange, zero, "fp16", math.inf)
        check_overflow(context, exchange, 1, "bf16", math.nan)
        check_overflow(context, exchange, 1, "fp32", -math.inf)
        check_adamw(context)
        for zero in (0, 1):
            check_drift(context, exchange, zero)
        if context.rank == 0:
            print("ok", len(CHECKS))
    context.stop()


if __name__ == "__main__":
    main()
