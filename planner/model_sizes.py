"""The largest model for some GPUs, the fewest nodes for a model, and shapes that suit the hardware.

    parameters, shape, layout = largest(machine, gpus=64, training=training, like=preset("7b"))
    nodes, layout = smallest(model, training, machine)

All of them only ask what fits: at micro-batch 1 with full recomputation, in the order of `_lean`.
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
from config.model_stats import block_flops, block_parameters, parameters
from config.schema import Layout, ModelShape, Training
from config.validation import check_shape, check_split
from planner import memory
from planner.enumeration import LONG, divisors
from planner.hardware import Machine
from planner.job import Job
from planner.step_time import block_pass

MOST_NODES = 10_000  # on which the smallest number is looked for

# ---- How large, how few --------------------------------------------------------------------------


def largest(
    machine: Machine, gpus: int, training: Training, like: ModelShape
) -> tuple[int, ModelShape, Layout]:
    """Parameters, shape and layout of the largest model of `like`'s kind that trains.

    Hidden sizes are multiples of 256 with heads of 128; a model is 60 to 200 times as wide as
    deep, as published ones are. Micro-batch 1, full recomputation. UserError if none fits.
    """
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
    """Bisection for the most blocks of that width that fit on some layout."""
    sized = cache(lambda layers: _resized(like, layers, hidden, hidden // 128))
    fitting = cache(lambda layers: leanest(sized(layers), training, machine, gpus))
    most = bisect_left(range(1, hidden // 60 + 1), True, key=lambda n: fitting(n) is None)
    found = fitting(most) if most else None
    return (sized(most), found) if found else None


def _resized(like: ModelShape, layers: int, hidden: int, heads: int) -> ModelShape:
    """A model of `like`'s kind: as many heads share keys and values, or what of that divides the
    heads, and the MLP is as many times as wide, to a multiple of 128.
    """
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads}
    sizes |= {"kv_heads": heads // math.gcd(heads, like.heads // like.kv_heads)}
    if like.ffn_hidden != like.default_ffn():
        sizes["ffn_hidden"] = max(1, round(like.ffn_hidden / like.hidden * hidden / 128)) * 128
    return reshape(like, sizes | {"head_size": hidden // heads})


def _lean(model: ModelShape, machine: Machine, gpus: int = 0) -> Iterator[Layout]:
    """The layouts at micro-batch 1 with full recomputation whose tp, pp and cp divide so many GPUs
    (0: any number), without dp, in the order in which they are tried; cp of long samples only.
    """
    ranks = divisors(gpus) if gpus else range(1, max(machine.node, model.layers) + 1)
    tps = [tp for tp in ranks if tp <= machine.node][::-1]
    cps = [2**k for k in range(11) if k == 0 or model.seq_length >= LONG]
    for cp, tp, pp in product(cps, tps, [pp for pp in ranks if pp <= model.layers]):
        layout = Layout(tp=tp, pp=pp, cp=cp, recompute="full")
        with suppress(UserError):
            check_split(model, layout)
            yield layout


def leanest(model: ModelShape, training: Training, machine: Machine, gpus: int) -> Layout | None:
    """The first layout that fits at micro-batch 1 with full recomputation, or None."""
    for lean in _lean(model, machine, gpus):
        dp, rest = divmod(gpus, lean.tp * lean.pp * lean.cp)
        layout = replace(lean, dp=dp)
        if not rest and _trains(Job(model, layout, training, machine)):
            return layout
    return None


def _trains(job: Job) -> bool:
    """Whether it fits, with the batch rounded up to a multiple of dp."""
    dp = job.layout.dp or 1
    samples = -(-job.training.global_batch_size // dp) * dp
    training = replace(job.training, global_batch_size=samples)
    return memory.fullest(job._replace(training=training)).total <= job.machine.memory


def smallest(model: ModelShape, training: Training, machine: Machine) -> tuple[int, Layout]:
    """The fewest nodes on which the model trains, and a layout there; UserError beyond MOST_NODES.

    With more replicas a layout never needs more memory, so that their number is bisected.
    """
    check_shape(model)
    fewest, found = MOST_NODES + 1, None
    for lean in _lean(model, machine):
        replica = lean.tp * lean.pp * lean.cp
        nodes = math.lcm(replica, machine.node) // machine.node  # the fewest that it fills
        with_dp = lambda n: replace(lean, dp=n * nodes * machine.node // replica)  # noqa: B023, E731
        fits = lambda n: _trains(Job(model, with_dp(n), training, machine))  # noqa: B023, E731
        counts = range(1, (fewest - 1) // nodes + 1)
        if counts and fits(counts[-1]):
            count = counts[bisect_left(counts, True, key=fits)]
            fewest, found = nodes * count, with_dp(count)
    if found is None:
        raise UserError(f"the model fits on no number of {machine.name} nodes up to {MOST_NODES}")
    return fewest, found


# ---- Shapes that suit the hardware ---------------------------------------------------------------


def shapes(
    size: float, like: ModelShape, layout: Layout, training: Training, machine: Machine
) -> list[tuple[ModelShape, float]]:
    """Shapes within 3 % of `size` parameters and their share of the peak, the highest first.

    The share is that of one block's forward and backward, everything counted. UserError if none.
    Hidden is a multiple of 128 and of 8 tp; the head size one of 64 to 256, a multiple of 8; heads
    divide by tp and, times the micro-batch, by 4 tp (fused softmax). Ratios of 80 to 250.
    """
    found, step = [], math.lcm(128, 8 * layout.tp)
    for hidden, head in product(range(step, 32768, step), range(64, 257, 8)):
        heads, rest = divmod(hidden, head)
        if rest or heads % layout.tp or heads // layout.tp * layout.micro_batch_size % 4:
            continue
        one = _resized(like, 1, hidden, heads)
        layers = 1 + round((size - parameters(one)) / block_parameters(one))
        odd = one.kv_heads % layout.tp or one.ffn_hidden % layout.tp
        if odd or layers < 1 or not 80 <= hidden / layers <= 250:
            continue
        model = replace(one, layers=layers)
        if abs(parameters(model) / size - 1) < 0.03:
            found.append((model, _efficiency(Job(model, layout, training, machine))))
    if not found:
        wanted = f"hidden a multiple of {step} and 80 to 250 times its layers"
        raise UserError(f"no shape of {size:g} parameters with {wanted}")
    return sorted(found, key=lambda entry: -entry[1])


def _efficiency(job: Job) -> float:
    passes = 4 if job.layout.recompute == "full" else 3
    flops = passes * job.tokens * block_flops(job.model) / job.layout.tp
    return flops / sum(block_pass(job)) / job.machine.peak
