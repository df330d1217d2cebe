"""Which layouts there are, which fit, and which is fastest: the planner's answers as data.

    ranked, rejected = rank(model, training, machine, gpus=384)

Every layout is either ranked or rejected with a sentence. Nothing here prints.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from config.batch_schedule import BatchSchedule
from config.messages import UserError
from config.model_stats import block_flops, parameters
from config.schema import Layout, ModelShape, Training, batch_schedule
from config.validation import check_batch, check_shape, check_sharding, check_split
from config.validation import refusal_of_vocab_pp as refused
from planner import memory
from planner.hardware import Machine
from planner.job import Job
from planner.step_time import Prediction, block_pass, predict
from schedules.automatic import settled_layout

MICRO_BATCHES = (1, 2, 4, 8, 16)
SEARCHED = 8  # layouts for which --schedule auto is searched: the fastest with 1F1B


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
    fixed: dict[str, Any] | None = None,
    wanted: Callable[[Layout], bool] = lambda layout: True,
) -> tuple[list[Ranked], list[Rejected]]:
    """All layouts on that many GPUs, fastest step first, and all that cannot run, with reasons.

    `fixed` holds Layout fields that are given, or lists of values to try for tp, pp, micro-batch
    and recomputation; the rest is tried. A layout that is not `wanted` is in neither list. Raises
    UserError if the model itself, or the ramp-up of the batch, is impossible.
    """
    check_shape(model)
    if (fixed or {}).get("schedule") == "auto":
        plain = dict(fixed or {}) | {"schedule": "1f1b"}
        if not plain.get("vocab_pp") and refused(training):
            plain["vocab_pp"] = False
        asked = lambda layout: wanted(replace(layout, schedule="auto"))  # noqa: E731
        found = rank(model, training, machine, gpus, plain, asked)
        return _searched(*found, model, training, machine)
    schedule = batch_schedule(training, model.seq_length)
    ranked, rejected = [], []
    for candidate in _candidates(model, training, machine, gpus, fixed or {}):
        if isinstance(candidate, Rejected):
            rejected.append(candidate)
        elif wanted(candidate):
            reason = does_not_fit(Job(model, candidate, training, machine))
            if reason and "zero" not in (fixed or {}):
                sharded = _sharded(Job(model, candidate, training, machine))
                candidate, reason = (sharded, "") if sharded else (candidate, reason)
            if reason:
                rejected.append(_rejected(candidate, reason))
            else:
                prediction = predict(model, candidate, training, machine)
                ranked.append(Ranked(candidate, prediction, rampup_verdict(candidate, schedule)))
    return sorted(ranked, key=lambda r: r.prediction.seconds), rejected


def _searched(
    ranked: list[Ranked],
    rejected: list[Rejected],
    model: ModelShape,
    training: Training,
    machine: Machine,
) -> tuple[list[Ranked], list[Rejected]]:
    """The fastest layouts, priced with the schedule that --schedule auto finds for each.

    The others keep the price of 1F1B, of which auto is never slower in simulation.
    """
    found = []
    for one in ranked[:SEARCHED]:
        job = Job(model, one.layout, training, machine)
        asked = replace(one.layout, schedule="auto")
        try:
            layout, _ = settled_layout(model, asked, job.micro_batches)
        except UserError as error:  # nothing holds as little as --activation-memory
            rejected.append(_rejected(asked, str(error)))
            continue
        prediction = predict(model, layout, training, machine)
        faster = prediction.fits and prediction.seconds < one.prediction.seconds
        found.append(
            replace(one, layout=asked, prediction=prediction if faster else one.prediction)
        )
    rest = [replace(one, layout=replace(one.layout, schedule="auto")) for one in ranked[SEARCHED:]]
    return sorted(found + rest, key=lambda r: r.prediction.seconds), rejected


def _candidates(
    model: ModelShape, training: Training, machine: Machine, gpus: int, fixed: dict[str, Any]
) -> Iterator[Layout | Rejected]:
    """Every layout that divides GPUs, model and batch, and why the others do not."""
    single = {name: value for name, value in fixed.items() if not isinstance(value, list)}
    for tp in _choices(fixed, "tp", _divisors(gpus)):
        if tp > machine.node and "tp" not in fixed:
            reason = f"tp({tp}) would leave the node of {machine.node} GPUs; --tp {tp} tries it"
            yield Rejected({"tp": tp}, reason)
            continue
        for pp in _choices(fixed, "pp", _divisors(gpus // tp) if gpus % tp == 0 else [1]):
            base = Layout(**{"partition": "balanced", **single, "tp": tp, "pp": pp})
            try:
                base = _placed(model, gpus, base, "partition" in fixed)
            except UserError as error:
                yield Rejected({"tp": tp, "pp": pp}, str(error))
                continue
            yield from _variants(base, training, machine, fixed)


def _variants(
    base: Layout, training: Training, machine: Machine, fixed: dict[str, Any]
) -> Iterator[Layout | Rejected]:
    """A placed layout with every micro-batch and recomputation."""
    # A flash kernel recomputes the scores anyway, so that `selective` changes nothing.
    flash = not machine.software.keeps_scores
    tried = ("none", "full") if flash else ("none", "selective", "full")
    for micro in _choices(fixed, "micro_batch_size", MICRO_BATCHES):
        layout = replace(base, micro_batch_size=micro)
        try:
            check_batch(layout, "global-batch-size", training.global_batch_size)
        except UserError as error:
            yield _rejected(layout, str(error))
            continue
        for recompute in _choices(fixed, "recompute", tried):
            yield replace(layout, recompute=recompute)


def _placed(model: ModelShape, gpus: int, layout: Layout, empty_stages: bool) -> Layout:
    """The layout with dp filled in; UserError if it divides neither GPUs nor model."""
    tp, pp, dp = layout.tp, layout.pp, layout.dp
    if gpus % (tp * pp):
        raise UserError(f"tp({tp}) * pp({pp}) * dp(?) does not divide {gpus} GPUs")
    if dp is not None and tp * pp * dp != gpus:
        raise UserError(f"tp({tp}) * pp({pp}) * dp({dp}) = {tp * pp * dp} is not {gpus} GPUs")
    layout = replace(layout, dp=gpus // (tp * pp))
    check_split(model, layout)
    if pp > model.layers and not empty_stages:
        raise UserError(f"pp({pp}) leaves stages without a block: layers is {model.layers}")
    return layout


def _rejected(layout: Layout, reason: str) -> Rejected:
    names = ("tp", "pp", "dp", "micro_batch_size", "recompute")
    return Rejected({name: getattr(layout, name) for name in names}, reason)


def _choices(fixed: dict[str, Any], name: str, default: Iterable[Any]) -> list[Any]:
    given = fixed.get(name, default)
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _sharded(job: Job) -> Layout | None:
    """The layout with the least of --zero 2 and 3 at which it fits: neither is faster than 1, so
    there is no need for them elsewhere. None if it fits with neither, or train.py refuses it.
    """
    for zero in (2, 3):
        layout = replace(job.layout, zero=zero)
        try:
            check_sharding(layout, job.training)
        except UserError:
            continue
        if not does_not_fit(job._replace(layout=layout)):
            return layout
    return None


def does_not_fit(job: Job) -> str:
    """Which stage is out of memory, needs what and has what, as a sentence; empty if all fit."""
    fullest, machine = memory.fullest(job), job.machine
    if fullest.total <= machine.memory:
        return ""
    needs = f"stage {fullest.stage} needs {fullest.total / 1e9:.1f} GB"
    return f"out of memory: {needs}, {machine.name} has {machine.memory / 1e9:.1f}"


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
    low, high, found = 1, hidden // 60, None
    while low <= high:
        layers = (low + high) // 2
        model = _resized(like, layers, hidden, hidden // 128)
        if layout := leanest(model, training, machine, gpus):
            found, low = (model, layout), layers + 1
        else:
            high = layers - 1
    return found


def _resized(like: ModelShape, layers: int, hidden: int, heads: int) -> ModelShape:
    """A model of `like`'s kind with full attention heads and an MLP of 4 x hidden."""
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads}
    return replace(like, **sizes, ffn_hidden=4 * hidden, head_size=hidden // heads)


def leanest(model: ModelShape, training: Training, machine: Machine, gpus: int) -> Layout | None:
    """The first layout that fits at micro-batch 1 with full recomputation, or None."""
    for tp in [d for d in _divisors(gpus) if d <= machine.node][::-1]:
        for pp in _divisors(gpus // tp):
            layout = Layout(tp=tp, pp=pp, dp=gpus // (tp * pp), recompute="full")
            if _trains(Job(model, layout, training, machine)):
                return layout
    return None


def _trains(job: Job) -> bool:
    """Whether it divides the model and fits, with the batch rounded up to a multiple of dp."""
    model, layout, training, machine = job
    states = parameters(model) * (2 + machine.software.gradient_bytes)  # not sharded by dp
    if layout.pp > model.layers or states / (layout.tp * layout.pp) > machine.memory:
        return False
    try:
        check_split(model, layout)
    except UserError:
        return False
    samples = -(-training.global_batch_size // layout.dp) * layout.dp
    job = job._replace(training=replace(training, global_batch_size=samples))
    # One micro-batch in flight is the least of any schedule, and known without building one.
    needs_least = memory.fullest(job, in_flight=1).total
    return needs_least <= machine.memory and not does_not_fit(job)


def smallest(model: ModelShape, training: Training, machine: Machine) -> tuple[int, Layout]:
    """The fewest nodes on which the model trains, and a layout there; UserError beyond 10,000."""
    check_shape(model)
    fewest = max(1, math.floor(4 * parameters(model) / (machine.memory * machine.node)))
    for nodes in range(fewest, 10001):
        if layout := leanest(model, training, machine, nodes * machine.node):
            return nodes, layout
    raise UserError(f"the model fits on no number of {machine.name} nodes up to 10000")


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
    for hidden in range(step, 32768, step):
        layers = round((size - like.vocab_size * hidden) / (12 * hidden**2 + 13 * hidden))
        if layers < 1 or not 80 <= hidden / layers <= 250:
            continue
        for head in range(64, 257, 8):
            heads, rest = divmod(hidden, head)
            if rest or heads % layout.tp or heads // layout.tp * layout.micro_batch_size % 4:
                continue
            model = _resized(like, layers, hidden, heads)
            if abs(parameters(model) / size - 1) < 0.03:
                found.append((model, _efficiency(Job(model, layout, training, machine))))
    if not found:
        raise UserError(f"no shape of {size:g} parameters with hidden a multiple of {step}")
    return sorted(found, key=lambda entry: -entry[1])


def _efficiency(job: Job) -> float:
    passes = 4 if job.layout.recompute == "full" else 3
    flops = passes * job.tokens * block_flops(job.model) / job.layout.tp
    return flops / sum(block_pass(job)) / job.machine.peak


# ---- Batch-size ramp-up --------------------------------------------------------------------------


def rampup_verdict(layout: Layout, schedule: BatchSchedule) -> str:
    """`fits`, or the first batch of the ramp-up that the layout cannot run; `-` without one."""
    levels = schedule.levels()
    if len(levels) == 1:
        return "-"
    share = layout.micro_batch_size * layout.dp
    odd = next((level.batch for level in levels if level.batch % share), None)
    return "fits" if odd is None else f"batch {odd} does not divide by {share}"


def allowed(layout: Layout, batch: int, node: int, most_nodes: int) -> list[dict[str, Any]]:
    """The numbers of `nodes` of `node` GPUs, up to `most_nodes`, whose replicas divide a batch.

    Each with its `dp`, one replica having tp x pp GPUs, and with those `micro_batches` of the
    ranking that divide the batch.
    """
    found, replica = [], layout.tp * layout.pp
    for nodes in range(1, most_nodes + 1):
        dp, rest = divmod(nodes * node, replica)
        if rest == 0 and batch % dp == 0:
            sizes = [size for size in MICRO_BATCHES if batch // dp % size == 0]
            found.append({"nodes": nodes, "dp": dp, "micro_batches": sizes})
    return found
