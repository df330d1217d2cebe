"""Finds the largest model for some GPUs, and the fewest nodes for a model.

    parameters, shape, line = largest(question.leanest, like=preset("7b"), gpus=64)
    nodes, line = smallest(question.leanest, model, least=2)

Both ask only whether a model fits into memory, not how fast it is. `fits(model, gpus)` says so: it
returns a layout with its prediction, or None. It is Question.leanest, which searches as
`plan.py layouts` does and accepts the same risk, so that the answers agree.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any

from architecture.model_stats import parameters
from architecture.shape import ModelShape
from base.errors import LayoutError, UserError
from config.command_line import reshape
from config.validation import check_shape
from costs import memory_terms, risk
from costs.job import Job
from tools.planner.layouts import Ranked

# Hidden sizes that are tried are multiples of one of these, the largest that is at most a quarter
# of the size: tp then divides the heads.
STEPS = (1024, 512, 256, 128, 32)
NEAR = 0.03  # shapes whose parameters are so near to the number asked for are equal
USUAL = 110.0  # the hidden size over the number of blocks: 128 of Llama 8B and GPT-3, 102 of 70B
HEAD = 128  # the head size of published models from some hundred million parameters on
# A hidden size below SMALL has heads of SMALL_HEAD, as many for a key head as the model that it is
# like, and SMALL_LAYERS blocks. Pythia's models of 14 M and 31 M parameters have 6 blocks of 128
# and 256 with heads of 32; llama2.c's of 260 K and 15 M 5 of 64 with heads of 8, 6 of 288 with 48.
SMALL, SMALL_HEAD, SMALL_LAYERS = 512, 16, 6
SMALL_NEAR = 0.1  # in place of NEAR: half of a block is about so much of a small model
# Options that may have a list with an entry for each block, which no other number of blocks has.
LISTS = ("hybrid_pattern", "mixer_blocks", "window_blocks", "rotary_blocks")
MOST_NODES = 10_000  # `smallest` tries no more nodes than this

Fits = Callable[[ModelShape, int], Ranked | None]  # the arguments are the model and the GPUs


def largest(fits: Fits, like: ModelShape, gpus: int) -> tuple[int, ModelShape, Ranked]:
    """Return the parameters, the shape and a layout of the largest model that fits on some GPUs.

    like: a model whose other options the result has. The hidden sizes that are tried are multiples
    of 256, with heads of size 128. The hidden size is 60 to 200 times the number of layers, as in
    published models. Raise UserError if no model fits.
    """
    # For each hidden size, the deepest model that fits. From some hidden size on, the deepest model
    # would be too shallow for its width, and wider models more so: the loop ends.
    trains: list[tuple[int, ModelShape, Ranked]] = []
    for hidden in range(512, 32768, 256):
        found = _deepest(fits, like, gpus, hidden)
        if found and found[0].layers >= hidden // 200:
            trains.append((parameters(found[0]), *found))
        elif trains:
            break
    if not trains:
        raise LayoutError(f"no model of hidden 512 or more fits on {gpus} GPUs")
    return max(trains, key=lambda found: found[0])


def _deepest(
    fits: Fits, like: ModelShape, gpus: int, hidden: int
) -> tuple[ModelShape, Ranked] | None:
    """Return the model of a hidden size with the most blocks that fits, and a layout; or None.

    The number of blocks is found by bisection, since a deeper model needs more memory. It is at
    most a 60th of the hidden size. sized: makes the model with some number of blocks. fitting:
    returns a layout with which this model fits, or None.
    """
    sized = cache(lambda layers: resized(like, layers, hidden, hidden // 128))
    fitting = cache(lambda layers: fits(sized(layers), gpus))
    # The position in 1, 2, 3, ... of the first number of blocks that does not fit, which is the
    # number of the last one that fits; 0 if none does.
    most = bisect_left(range(1, hidden // 60 + 1), True, key=lambda n: fitting(n) is None)
    found = fitting(most) if most else None
    return (sized(most), found) if found else None


def resized(like: ModelShape, layers: int, hidden: int, heads: int) -> ModelShape:
    """Return a model with the options of `like`, but other numbers of layers and heads, and width.

    The proportions of `like` are kept. As many query heads share one key head as there, or if this
    number does not divide `heads`, their common divisor; in latent attention none are shared. The
    MLP is wider than the hidden size by the same factor, rounded to a multiple of 128, or of
    SMALL_HEAD in a small shape. Raise UserError if an option of `like` lists its blocks and the
    number of blocks is another.
    """
    for name in LISTS:
        value = getattr(like, name)
        is_list = value != "none" if name == "hybrid_pattern" else "," in value
        if is_list and layers != like.layers:
            other = "" if name == "hybrid_pattern" else "give it as N:M, or "
            raise UserError(
                f"{name} lists each of {like.layers} blocks, and this question tries other numbers "
                f"of blocks: {other}ask layouts, days, stages or smallest about this model"
            )
    shared = 1 if like.is_latent else like.heads // like.kv_heads
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads}
    sizes |= {"kv_heads": heads // math.gcd(heads, shared)}
    if like.ffn_hidden != like.default_ffn():
        step = SMALL_HEAD if _is_small(hidden, heads) else HEAD
        sizes["ffn_hidden"] = max(1, round(like.ffn_hidden / like.hidden * hidden / step)) * step
    if not like.is_latent:  # the heads of latent attention stay as wide as they are
        sizes["head_size"] = hidden // heads
    return reshape(like, sizes)


def _is_small(hidden: int, heads: int) -> bool:
    """Return whether a shape is one with heads of SMALL_HEAD below SMALL."""
    return hidden < SMALL and hidden == heads * SMALL_HEAD


def near(like: ModelShape, size: float, head_size: int | None = None) -> ModelShape:
    """Return the shape of about `size` parameters whose width and depth are the most usual.

    like: a model whose other options the result has. head_size: the size of the heads; None: HEAD,
    or SMALL_HEAD for a hidden size below SMALL. Of the shapes whose parameters are the nearest
    (NEAR), the one is taken whose hidden size divided by its blocks is the nearest to the usual.
    Raise UserError if the vocabulary leaves no shape of the size.
    """
    shapes = []
    if like.is_latent:  # its heads have sizes of their own; their number is as with HEAD
        head_size = HEAD
    for hidden in range(SMALL_HEAD, 65536, SMALL_HEAD):
        own = head_size or (HEAD if hidden >= SMALL else SMALL_HEAD)
        step = max(own, next((step for step in STEPS if hidden >= 4 * step), 1))
        if hidden % step or hidden % own:
            continue
        if own == SMALL_HEAD and hidden // own % (like.heads // like.kv_heads):
            continue  # as many query heads share a key head in all small shapes
        one, two = (parameters(resized(like, count, hidden, hidden // own)) for count in (1, 2))
        layers = round((size - one) / (two - one)) + 1
        if layers < max(1, hidden // 300):
            break
        shapes.append(resized(like, layers, hidden, hidden // own))
    if not shapes:
        raise LayoutError(
            f"no shape like this has {size:,.0f} parameters: the vocabulary of "
            f"{like.vocab_size:,} is too large; give --vocab-size or --model"
        )

    def off(shape: ModelShape) -> tuple[float, float]:
        """Return how far off are the parameters, beyond what is near, and width / depth."""
        error = abs(parameters(shape) / size - 1)
        small = _is_small(shape.hidden, shape.heads)
        equal, usual = (SMALL_NEAR, shape.hidden / SMALL_LAYERS) if small else (NEAR, USUAL)
        return max(0.0, error - equal), abs(math.log(shape.hidden / shape.layers / usual))

    return min(shapes, key=off)


def smallest(fits: Fits, model: ModelShape, node: int, least: int = 1) -> tuple[int, Ranked]:
    """Return the fewest full nodes on which a model fits, and a layout for them.

    node: the GPUs of a node. least: a number of nodes below which the model surely does not fit.
    Numbers of nodes are tried one after the other, since a larger one may be worse: 31 nodes have
    no common divisor with a batch of 2,048 samples, so that each replica must fill all of them.
    Raise UserError if MOST_NODES nodes do not hold the model.
    """
    check_shape(model)
    enough = 1  # a number of nodes that holds the model, found by doubling
    while (found := fits(model, enough * node)) is None:
        enough *= 2
        if enough > MOST_NODES:
            raise LayoutError(f"the model fits on no number of nodes up to {MOST_NODES}")
    for nodes in range(least, enough):
        if line := fits(model, nodes * node):
            return nodes, line
    return enough, found


def least_nodes(job: Job, accepted: float) -> int:
    """Return a number of nodes below which a model surely does not fit.

    They hold the optimizer's state alone, each number once. accepted: the highest probability of
    running out of memory. job: a job with the model on any layout.
    """
    room = risk.safe_bytes(job.machine, accepted) - job.machine.context
    state = parameters(job.model) * memory_terms.state_bytes(job)
    return max(1, math.ceil(state / max(room, 1.0) / job.machine.node))
