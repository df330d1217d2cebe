"""golden_worker.py with mistakes of latent attention planted, to show that a comparison finds them.

A job is a case of golden_worker.py and perhaps a "fault", a key of FAULTS. The result says whether
replicas are unequal, for which golden_worker.py fails.
"""

import contextlib

import golden_worker
import torch
from torch import Tensor

from config import buffer_sizes, validation
from distributed.collectives import Group, gather_sequence, spread_to_tp
from distributed.context import Context
from layers import latent_attention
from parallel import ColumnLinear, linear


class WrongSum(torch.autograd.Function):
    """`spread_to_tp`, whose gradient is summed over tp so many times: 0 or 2."""

    @staticmethod
    def forward(ctx, x, tp, gather, times):
        ctx.tp, ctx.gather, ctx.times = tp, gather, times
        return gather_sequence(x, tp) if gather else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        for _ in range(ctx.times):
            ctx.tp.at_once.all_reduce(grad).wait()
        return ctx.tp.shard(grad) if ctx.gather else grad, None, None, None


def lost(x: Tensor, tp: Group, sequence_parallel: bool) -> Tensor:
    return x if tp.size == 1 else WrongSum.apply(x, tp, sequence_parallel, 0)


def twice(x: Tensor, tp: Group, sequence_parallel: bool) -> Tensor:
    return x if tp.size == 1 else WrongSum.apply(x, tp, sequence_parallel, 2)


class Lost(ColumnLinear):
    """A column-parallel layer whose input's gradient is not summed over tp."""

    def forward(self, x: Tensor) -> Tensor:
        factory = self.factory
        x = lost(x, factory.mesh.tp, factory.sequence_parallel)
        return linear(x, self.weight, self.bias, factory.deferred)


def of_latent(factory, name, *sizes, **options) -> ColumnLinear:
    """kv_b as `Lost`, other layers as they are."""
    kind = Lost if name.endswith("kv_b") else ColumnLinear
    return kind(factory, name, *sizes, **options)


# What stands in a name of layers/latent_attention.py instead.
FAULTS = {
    "rotary key lost": {"spread_to_tp": lost},
    "rotary key twice": {"spread_to_tp": twice},
    "latent lost": {"ColumnLinear": of_latent},
}
RIGHT = {"spread_to_tp": spread_to_tp, "ColumnLinear": ColumnLinear}


@contextlib.contextmanager
def planted(fault: str):
    """The names of layers/latent_attention.py with a fault of FAULTS, or with none ("")."""
    for name, value in FAULTS.get(fault, {}).items():
        setattr(latent_attention, name, value)
    try:
        yield
    finally:
        for name, value in RIGHT.items():
            setattr(latent_attention, name, value)


def run_case(job: dict, context: Context) -> dict:
    case = {name: value for name, value in job.items() if name != "fault"}
    with planted(job.get("fault", "")):
        config = validation.check(golden_worker.options(case), context.size)
        result = golden_worker.run(config, context)
    return result | {"unequal": bool(result["unequal"])}


if __name__ == "__main__":
    buffer_sizes.LEAST_BUCKET = 1
    golden_worker.run_jobs(run_case)
