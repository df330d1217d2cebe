"""Which layouts there are, which fit, and which is fastest: the planner's answers as data.

    ranked, rejected = rank(model, training, machine, gpus=384)

Every layout is either ranked or rejected with a sentence. Nothing here prints.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from config.batch_schedule import BatchSchedule
from config.command_line import reshape
from config.messages import UserError
from config.model_stats import block_flops, block_parameters, parameters
from config.schema import Layout, ModelShape, Training, batch_schedule
from config.validation import check_batch, check_shape, check_split, with_dp
from config.validation import refusal_of_vocab_pp as refused
from planner import memory, risk
from planner.hardware import Machine
from planner.job import Job
from planner.search import Search, Watch, does_not_fit, place, ways
from planner.step_time import Prediction, block_pass, predict
from schedules.automatic import settled_layout

MICRO_BATCHES = (1, 2, 4, 8, 16)
LONG = 4096  # tokens of a sample from which on cp is searched
MOST_NODES = 10_000  # on which the smallest number is looked for
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
    refusal: Callable[[Layout], str] = lambda layout: "",
    accepted: float = risk.DEFAULT,
    watch: Watch = iter,
) -> tuple[list[Ranked], list[Rejected]]:
    """The layouts on that many GPUs, fastest step first, and all that cannot run, with reasons.

    Of those that are alike in tp, pp and micro-batch the fastest is ranked, and if its risk of
    running out of memory is more than `accepted`, the fastest below that too. `fixed` holds Layout
    fields that are given, or lists of values to try for tp, pp and micro-batch; the rest is tried.
    refusal: why else a layout cannot run, or "". watch: see planner/search.py. Raises UserError if
    the model itself, or the ramp-up of the batch, is impossible.
    """
    check_shape(model)
    fixed = fixed or {}
    if fixed.get("schedule") == "auto":
        plain = fixed | {"schedule": "1f1b"}
        if not plain.get("vocab_pp") and refused(training):
            plain["vocab_pp"] = False
        asked = lambda layout: refusal(replace(layout, schedule="auto"))  # noqa: E731
        of_1f1b = rank(model, training, machine, gpus, plain, asked, accepted, watch)
        return _searched(*of_1f1b, model, training, machine)
    schedule = batch_schedule(training, model.seq_length)
    search = Search(model, training, machine, fixed, accepted, refusal)
    rejected, pending = [], {}
    about = model, machine, gpus
    for placed in watch(list(_candidates(*about, fixed))):
        for found in [placed] if isinstance(placed, Rejected) else _sized(placed, training, fixed):
            if isinstance(found, Rejected):
                rejected.append(found)
            elif reason := search.add(found):
                largest_micro = search.never_fits(found)
                reason += "; larger micro-batches need more" * largest_micro
                pending[place(found[0])] = _rejected(found[0], reason)
                if largest_micro:
                    break
    shared = [_sized(placed, training, fixed) for placed in _sharing_samples(*about, fixed)]
    sized = [found for each in shared for found in each if not isinstance(found, Rejected)]
    search.add_leading(sized, watch)
    search.finish(watch)
    ranked = [Ranked(*one, rampup_verdict(one[0], schedule)) for one in search.found()]
    ran = {place(one.layout) for one in ranked}
    return ranked, rejected + [one for axes, one in pending.items() if axes not in ran]


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
    model: ModelShape, machine: Machine, gpus: int, fixed: dict[str, Any]
) -> Iterator[list[Layout] | Rejected]:
    """The ways to run every tp and pp that divide GPUs and model, and why the others do not."""
    single = {name: value for name, value in fixed.items() if not isinstance(value, list)}
    for tp in _choices(fixed, "tp", divisors(gpus)):
        if tp > machine.node and "tp" not in fixed:
            reason = f"tp({tp}) would leave the node of {machine.node} GPUs; --tp {tp} tries it"
            yield Rejected({"tp": tp}, reason)
            continue
        for pp in _choices(fixed, "pp", divisors(gpus // tp) if gpus % tp == 0 else [1]):
            base = Layout(**{"partition": "balanced", **single, "tp": tp, "pp": pp})
            try:
                yield ways(model, with_dp(base, gpus, "GPUs"), fixed)
            except UserError as error:
                yield Rejected({"tp": tp, "pp": pp}, str(error))


def _sharing_samples(
    model: ModelShape, machine: Machine, gpus: int, fixed: dict[str, Any]
) -> Iterator[list[Layout]]:
    """The ways with every cp above 1, of long samples where cp is not given."""
    if "cp" in fixed or model.seq_length < LONG:
        return
    for cp in divisors(gpus)[1:]:
        if model.seq_length % (2 * cp) == 0:
            found = _candidates(model, machine, gpus, fixed | {"cp": cp})
            yield from (placed for placed in found if not isinstance(placed, Rejected))


def _sized(
    placed: list[Layout], training: Training, fixed: dict[str, Any]
) -> Iterator[list[Layout] | Rejected]:
    """The ways of one tp and pp with every micro-batch that divides the batch, the smallest first,
    and why the others do not.
    """
    samples = max(1, training.global_batch_size // (placed[0].dp or 1))
    even = training.global_batch_size % (placed[0].dp or 1) == 0
    sizes = sorted({*MICRO_BATCHES, *divisors(samples)}) if even else MICRO_BATCHES
    for micro in _choices(fixed, "micro_batch_size", sizes):
        layout = replace(placed[0], micro_batch_size=micro)
        try:
            check_batch(layout, "global-batch-size", training.global_batch_size)
        except UserError as error:
            yield _rejected(layout, str(error))
            continue
        yield [replace(way, micro_batch_size=micro) for way in placed]


def _rejected(layout: Layout, reason: str) -> Rejected:
    names = ("tp", "pp", "dp", "micro_batch_size", "recompute")
    return Rejected({name: getattr(layout, name) for name in names}, reason)


def _choices(fixed: dict[str, Any], name: str, default: Iterable[Any]) -> list[Any]:
    given = fixed.get(name, default)
    return list(given) if isinstance(given, (list, tuple)) else [given]


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


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
    model, layout, training, machine = job
    dp, states = layout.dp or 1, parameters(model) * (2 + machine.software.gradient_bytes)
    if states / (layout.tp * layout.pp) > machine.memory:  # of what is not sharded by dp
        return False
    samples = -(-training.global_batch_size // dp) * dp
    job = job._replace(training=replace(training, global_batch_size=samples))
    # One micro-batch in flight is the least of any schedule, and known without building one.
    needs_least = memory.fullest(job, in_flight=1).total
    return needs_least <= machine.memory and not does_not_fit(job)


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

    Each with its `dp`, one replica having tp x pp x cp GPUs, and with those `micro_batches` of the
    ranking that divide the batch.
    """
    found, replica = [], layout.tp * layout.pp * layout.cp
    for nodes in range(1, most_nodes + 1):
        dp, rest = divmod(nodes * node, replica)
        if rest == 0 and batch % dp == 0:
            sizes = [size for size in MICRO_BATCHES if batch // dp % size == 0]
            found.append({"nodes": nodes, "dp": dp, "micro_batches": sizes})
    return found
