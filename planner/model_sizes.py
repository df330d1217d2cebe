"""Finds the largest model for some GPUs, and the fewest nodes for a model.

    parameters, shape, layout = largest(machine, gpus=64, training=training, like=preset("7b"))
    nodes, layout = smallest(model, training, machine)

`largest` and `smallest` ask only whether a model fits into memory, not how fast it is. So they try
layouts that need the least memory, here called lean: micro-batch 1 with full recomputation.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from config.command_line import reshape
from config.messages import UserError
from config.model_stats import parameters
from config.schema import Layout, ModelShape, Training
from config.validation import check_shape, check_split
from planner import memory
from planner.enumeration import LONG, divisors
from planner.hardware import Machine
from planner.job import Job

MOST_NODES = 10_000  # `smallest` tries no more nodes than this


def largest(
    machine: Machine, gpus: int, training: Training, like: ModelShape
) -> tuple[int, ModelShape, Layout]:
    """Return the parameters, shape and layout of the largest model that fits on some GPUs.

    like: a model whose other options the result has. The hidden sizes that are tried are multiples
    of 256, with heads of size 128. The hidden size is 60 to 200 times the number of layers, as in
    published models. Raise UserError if no model fits.
    """
    # For each hidden size, the deepest model that fits. From some hidden size on, the deepest model
    # would be too shallow for its width, and wider models more so: the loop ends.
    trains: list[tuple[int, ModelShape, Layout]] = []
    for hidden in range(512, 32768, 256):
        found = _deepest(machine, gpus, training, like, hidden)
        if found and found[0].layers >= hidden // 200:
            trains.append((parameters(found[0]), *found))
        elif trains:
            break
    if not trains:
        raise UserError(f"no model of hidden 512 or more fits on {gpus} x {machine.name}")
    return max(trains, key=lambda found: found[0])


def _deepest(
    machine: Machine, gpus: int, training: Training, like: ModelShape, hidden: int
) -> tuple[ModelShape, Layout] | None:
    """Return the model of a hidden size with the most blocks that fits, and a layout; or None.

    The number of blocks is found by bisection, since a deeper model needs more memory. It is at
    most a 60th of the hidden size. sized: makes the model with some number of blocks. fitting:
    returns a layout with which this model fits, or None.
    """
    sized = cache(lambda layers: _resized(like, layers, hidden, hidden // 128))
    fitting = cache(lambda layers: leanest(sized(layers), training, machine, gpus))
    # The position in 1, 2, 3, ... of the first number of blocks that does not fit, which is the
    # number of the last one that fits; 0 if none does.
    most = bisect_left(range(1, hidden // 60 + 1), True, key=lambda n: fitting(n) is None)
    found = fitting(most) if most else None
    return (sized(most), found) if found else None


def _resized(like: ModelShape, layers: int, hidden: int, heads: int) -> ModelShape:
    """Return a model with the options of `like`, but other numbers of layers and heads, and width.

    The proportions of `like` are kept. As many query heads share one key head as there, or if this
    number does not divide `heads`, their common divisor. The MLP is wider than the hidden size by
    the same factor, rounded to a multiple of 128.
    """
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads}
    sizes |= {"kv_heads": heads // math.gcd(heads, like.heads // like.kv_heads)}
    if like.ffn_hidden != like.default_ffn():
        sizes["ffn_hidden"] = max(1, round(like.ffn_hidden / like.hidden * hidden / 128)) * 128
    return reshape(like, sizes | {"head_size": hidden // heads})


def _lean(model: ModelShape, machine: Machine, gpus: int = 0) -> Iterator[Layout]:
    """Yield the lean layouts of a model, without dp, in the order in which they are tried.

    gpus: tp, pp and cp must divide this number; 0: no such limit. Small cp come first, then large
    tp, then small pp. cp above 1 is tried only for long samples. train.py must accept the split.
    """
    ranks = divisors(gpus) if gpus else range(1, max(machine.node, model.layers) + 1)
    tps = [tp for tp in ranks if tp <= machine.node][::-1]
    cps = [2**k for k in range(11) if k == 0 or model.seq_length >= LONG]  # 1, or 1 to 1024
    for cp, tp, pp in product(cps, tps, [pp for pp in ranks if pp <= model.layers]):
        layout = Layout(tp=tp, pp=pp, cp=cp, recompute="full")
        with suppress(UserError):
            check_split(model, layout)
            yield layout


def leanest(model: ModelShape, training: Training, machine: Machine, gpus: int) -> Layout | None:
    """Return the first lean layout that fits on exactly `gpus` GPUs, or None.

    Also called if no layout of `plan.py layouts` fits, to say which layout would.
    """
    for lean in _lean(model, machine, gpus):
        dp, rest = divmod(gpus, lean.tp * lean.pp * lean.cp)
        layout = replace(lean, dp=dp)
        if not rest and _trains(Job(model, layout, training, machine)):
            return layout
    return None


def _trains(job: Job) -> bool:
    """Return whether a job fits into memory, with the batch rounded up to a multiple of dp."""
    dp = job.layout.dp or 1
    samples = -(-job.training.global_batch_size // dp) * dp
    training = replace(job.training, global_batch_size=samples)
    return memory.fullest(job._replace(training=training)).total <= job.machine.memory


def smallest(model: ModelShape, training: Training, machine: Machine) -> tuple[int, Layout]:
    """Return the fewest full nodes on which a model fits, and a layout for them.

    Each lean layout is tried with fewer nodes than the best layout so far. More replicas never need
    more memory on a GPU, so the fewest replicas are found by bisection. Raise UserError if more
    than MOST_NODES nodes would be needed.
    """
    check_shape(model)
    fewest, found = MOST_NODES + 1, None
    for lean in _lean(model, machine):
        replica = lean.tp * lean.pp * lean.cp
        # The fewest nodes that whole replicas fill: replicas of 12 GPUs fill 3 nodes of 8 GPUs.
        nodes = math.lcm(replica, machine.node) // machine.node
        # with_dp(n): this layout on n times `nodes` nodes.
        with_dp = lambda n: replace(lean, dp=n * nodes * machine.node // replica)  # noqa: B023, E731
        # fits(n): whether the model then fits into memory.
        fits = lambda n: _trains(Job(model, with_dp(n), training, machine))  # noqa: B023, E731
        # count * nodes is a number of nodes that is less than the fewest so far. If the largest
        # count fits, the smallest count that fits is found by bisection.
        counts = range(1, (fewest - 1) // nodes + 1)
        if counts and fits(counts[-1]):
            count = counts[bisect_left(counts, True, key=fits)]
            fewest, found = nodes * count, with_dp(count)
    if found is None:
        raise UserError(f"the model fits on no number of {machine.name} nodes up to {MOST_NODES}")
    return fewest, found
