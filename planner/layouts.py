"""Which layouts there are, which fit, and which is fastest: the planner's answers as data.

    ranked, rejected = rank(model, training, machine, gpus=384)

Every layout is either ranked or rejected with a sentence. Nothing here prints.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from config.batch_schedule import BatchSchedule
from config.messages import UserError
from config.model_stats import block_flops, parameters
from config.schema import Layout, ModelShape, Training, batch_schedule
from config.validation import check_batch, check_shape, check_split
from planner import memory
from planner.hardware import Machine
from planner.step_time import Prediction, block_pass, predict

MICRO_BATCHES = (1, 2, 4, 8, 16)
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Ranked:
    """A layout that fits, and its prediction."""

    layout: Layout
    prediction: Prediction
    rampup: str  # a verdict: "fits", or why some batch of the ramp-up does not divide


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot run, or all layouts with one tp and pp; and why."""

    layout: dict[str, int | str]
    reason: str


def rank(
    model: ModelShape,
    training: Training,
    machine: Machine,
    gpus: int,
    fixed: dict | None = None,
    wanted: Callable[[Layout], bool] = lambda layout: True,
) -> tuple[list[Ranked], list[Rejected]]:
    """All layouts on that many GPUs, fastest step first, and all that cannot run, with reasons.

    `fixed` holds Layout fields that are given, or lists of values to try for tp, pp, micro-batch
    and recomputation; the rest is tried. A layout that is not `wanted` is left out of both. Raises
    UserError if the model itself, or the ramp-up of the batch, is impossible.
    """
    check_shape(model)
    fixed, schedule = fixed or {}, batch_schedule(training, model.seq_length)
    ranked, rejected = [], []
    for tp in _choices(fixed, "tp", _divisors(gpus)):
        if tp > machine.node and "tp" not in fixed:
            reason = f"tp({tp}) would leave the node of {machine.node} GPUs; --tp {tp} tries it"
            rejected.append(Rejected({"tp": tp}, reason))
            continue
        for pp in _choices(fixed, "pp", _divisors(gpus // tp) if gpus % tp == 0 else [1]):
            single = {n: v for n, v in fixed.items() if not isinstance(v, list)}
            base = Layout(**{"partition": "balanced", **single, "tp": tp, "pp": pp})
            good, bad = _with_stages(model, training, machine, gpus, base, fixed, schedule, wanted)
            ranked += good
            rejected += bad
    return sorted(ranked, key=lambda r: r.prediction.seconds), rejected


def _with_stages(model, training, machine, gpus, base, fixed, schedule, wanted):
    """All micro-batches and recomputations of one tp and pp."""
    tp, pp = base.tp, base.pp
    ranked, rejected = [], []
    if gpus % (tp * pp):
        reason = f"tp({tp}) * pp({pp}) * dp(?) does not divide {gpus} GPUs"
        return [], [Rejected({"tp": tp, "pp": pp}, reason)]
    base = replace(base, dp=gpus // (tp * pp))
    try:
        check_split(model, base)
        if pp > model.layers and "partition" not in fixed:
            raise UserError(f"pp({pp}) leaves stages without a block: layers is {model.layers}")
    except UserError as error:
        return [], [Rejected({"tp": tp, "pp": pp}, str(error))]
    for micro in _choices(fixed, "micro_batch_size", MICRO_BATCHES):
        layout = replace(base, micro_batch_size=micro)
        try:
            check_batch(layout, "global-batch-size", training.global_batch_size)
        except UserError as error:
            rejected.append(Rejected(_named(layout), str(error)))
            continue
        for recompute in _choices(fixed, "recompute", recomputations(machine)):
            tried = replace(layout, recompute=recompute)
            if not wanted(tried):
                continue
            reason = does_not_fit(model, tried, training, machine)
            if reason:
                rejected.append(Rejected(_named(tried), reason))
                continue
            verdict = rampup_verdict(tried, schedule)
            ranked.append(Ranked(tried, predict(model, tried, training, machine), verdict))
    return ranked, rejected


def recomputations(machine: Machine) -> list[str]:
    """What is worth trying: a flash kernel recomputes the scores by itself, so not selective."""
    flash = machine.software.attention == "flash"
    return [r for r in RECOMPUTE if not (flash and r == "selective")]


def _choices(fixed: dict, name: str, default) -> list:
    given = fixed.get(name, default)
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _named(layout: Layout) -> dict[str, int | str]:
    names = ("tp", "pp", "dp", "micro_batch_size", "recompute")
    return {name: getattr(layout, name) for name in names}


def does_not_fit(model, layout, training, machine) -> str:
    """Which stage is out of memory and by how much, as a sentence; empty if all fit."""
    fullest = memory.fullest(model, layout, training, machine)
    if fullest.total <= machine.memory:
        return ""
    return (
        f"out of memory: stage {fullest.stage} needs {fullest.total / 1e9:.1f} GB, "
        f"{machine.name} has {machine.memory / 1e9:.1f}"
    )


# ------------------------------------------------------------------------------------------------
# How large, how few
# ------------------------------------------------------------------------------------------------


def largest(machine: Machine, gpus: int, training: Training, like: ModelShape) -> tuple:
    """The largest model (with `like`'s vocabulary and kind) that trains, and its layout.

    Hidden sizes are multiples of 256 with heads of 128; a model is 60 to 200 times as wide as
    deep, as those in seed 004 are. Micro-batch 1, full recomputation. UserError if none fits.
    """
    best = None
    for hidden in range(512, 32768, 256):
        deepest = hidden // 60
        found = _deepest(machine, gpus, training, like, hidden, deepest)
        if found and found[0].layers >= hidden // 200:
            size = parameters(found[0])
            best = max(best or (0,), (size, *found), key=lambda entry: entry[0])
        elif best:
            break
    if best is None:
        raise UserError(f"no model of hidden 512 or more fits on {gpus} x {machine.name}")
    return best


def _deepest(machine, gpus, training, like, hidden, deepest) -> tuple | None:
    """Bisection for the most blocks of that width that fit on some layout."""
    low, high, found = 1, deepest, None
    while low <= high:
        layers = (low + high) // 2
        model = replace(like, layers=layers, hidden=hidden, heads=hidden // 128)
        model = replace(model, kv_heads=model.heads, ffn_hidden=4 * hidden)
        layout = leanest(model, training, machine, gpus)
        if layout:
            found, low = (model, layout), layers + 1
        else:
            high = layers - 1
    return found


def leanest(model: ModelShape, training: Training, machine: Machine, gpus: int) -> Layout | None:
    """The first layout that fits at micro-batch 1 with full recomputation, or None."""
    least = parameters(model) * (2 + machine.software.gradient_bytes)  # not sharded by dp
    for tp in [d for d in _divisors(gpus) if d <= machine.node][::-1]:
        for pp in _divisors(gpus // tp):
            if pp > model.layers or least / (tp * pp) > machine.memory:
                continue
            dp = gpus // (tp * pp)
            layout = Layout(tp=tp, pp=pp, dp=dp, recompute="full")
            batch = replace(training, global_batch_size=-(-training.global_batch_size // dp) * dp)
            try:
                check_split(model, layout)
            except UserError:
                continue
            if not does_not_fit(model, layout, batch, machine):
                return layout
    return None


def smallest(model: ModelShape, training: Training, machine: Machine) -> tuple[int, Layout]:
    """The fewest nodes on which the model trains, and a layout there; UserError beyond 10,000."""
    check_shape(model)
    nodes = max(1, math.floor(4 * parameters(model) / (machine.memory * machine.node)))
    while nodes <= 10000:
        layout = leanest(model, training, machine, nodes * machine.node)
        if layout:
            return nodes, layout
        nodes += 1
    raise UserError(f"the model fits on no number of {machine.name} nodes up to 10000")


# ------------------------------------------------------------------------------------------------
# Shapes that suit the hardware
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A shape near a wanted size, and how well it suits tiles, tensor ranks and stages."""

    model: ModelShape
    parameters: int
    efficiency: float  # of the peak, in one block's forward and backward, everything counted
    ratio: float  # hidden over layers
    stages: list[int]  # pp for which layers + 2 divide, so that embedding and head count as blocks


def shapes(
    size: float, like: ModelShape, layout: Layout, training: Training, machine: Machine
) -> list[Shape]:
    """Shapes within 3 % of `size` parameters, the fastest per parameter first.

    Hidden is a multiple of 128 and of 8 tp; the head size one of 64 to 256, a multiple of 8; heads
    divide by tp and, times the micro-batch, by 4 tp (fused softmax). Ratios of 80 to 250.
    """
    found = []
    step = math.lcm(128, 8 * layout.tp)
    for hidden in range(step, 32768, step):
        layers = round((size - like.vocab_size * hidden) / (12 * hidden**2 + 13 * hidden))
        if layers < 1 or not 80 <= hidden / layers <= 250:
            continue
        for heads in _heads(hidden, layout):
            model = replace(
                like,
                layers=layers,
                hidden=hidden,
                heads=heads,
                kv_heads=heads,
                ffn_hidden=4 * hidden,
            )
            count = parameters(model)
            if abs(count / size - 1) < 0.03:
                found.append(_shape(model, count, layout, training, machine))
    if not found:
        raise UserError(f"no shape of {size:g} parameters with hidden a multiple of {step}")
    return sorted(found, key=lambda shape: -shape.efficiency)


def _heads(hidden: int, layout: Layout) -> list[int]:
    micro = layout.micro_batch_size
    return [
        hidden // head
        for head in range(64, 257, 8)
        if hidden % head == 0
        and hidden // head % layout.tp == 0
        and (hidden // head // layout.tp * micro) % 4 == 0
    ]


def _shape(model, count, layout, training, machine) -> Shape:
    seconds = block_pass(model, layout, training, machine).total
    tokens = model.seq_length * layout.micro_batch_size
    passes = 4 if layout.recompute == "full" else 3
    flops = passes * tokens * block_flops(model) / layout.tp
    suited = [pp for pp in range(2, 65) if (model.layers + 2) % pp == 0]
    efficiency = flops / seconds / machine.peak
    return Shape(model, count, efficiency, model.hidden / model.layers, suited)


# ------------------------------------------------------------------------------------------------
# Batch-size ramp-up
# ------------------------------------------------------------------------------------------------


def rampup_verdict(layout: Layout, schedule: BatchSchedule) -> str:
    """`fits`, or the first batch of the ramp-up that the layout cannot run; `-` without one."""
    levels = schedule.levels()
    if len(levels) == 1:
        return "-"
    share = layout.micro_batch_size * layout.dp
    for level in levels:
        if level.batch % share:
            return f"batch {level.batch} does not divide by {share}"
    return "fits"


@dataclass(frozen=True)
class Allowed:
    """A number of nodes that can run a batch, and the micro-batch sizes with which it can."""

    nodes: int
    dp: int
    micro_batches: list[int]


def allowed(layout: Layout, batch: int, node: int, most_nodes: int) -> list[Allowed]:
    """The numbers of nodes of `node` GPUs, up to `most_nodes`, whose replicas divide a batch.

    One replica has tp x pp GPUs; micro-batches are those that the ranking tries.
    """
    found, replica = [], layout.tp * layout.pp
    for nodes in range(1, most_nodes + 1):
        dp, rest = divmod(nodes * node, replica)
        if rest == 0 and batch % dp == 0:
            sizes = [size for size in MICRO_BATCHES if batch // dp % size == 0]
            found.append(Allowed(nodes, dp, sizes))
    return found
