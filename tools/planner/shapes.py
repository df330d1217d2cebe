"""Answers `plan.py shapes`: which hidden size, blocks, heads and MLP width train the fastest.

print(shapes(question).text)      # a Question as in tools/planner/questions.py

Shapes near a size are compared by their seconds per token at equal parameters: a shape with 2 %
more parameters may take 2 % longer. All are priced with the terms of every other question: products
in tiles and waves of the GPU, attention by head size, stages of whole blocks. A size that the user
gives (--hidden, --layers, --heads, --ffn-hidden) is held.
"""

import math
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from architecture import model_stats
from architecture.shape import ModelShape
from base.console import as_typed
from base.errors import LayoutError, UserError
from config.schema import Layout
from costs import op_costs, time_terms
from costs.job import Job
from tools.planner import budget, layouts, model_sizes
from tools.planner.enumeration import divisors
from tools.planner.questions import BILLION, Answer, Question
from tools.report.text_table import columns

NEAR = 0.03  # shapes whose parameters are so near to the size are compared
THINNEST, WIDEST = 60, 220  # hidden size over blocks of the shapes, as of published models
HEAD_SIZES = (64, 80, 96, 128, 192, 256)  # multiples of 8, which flash kernels have up to 256
FAST_HEADS = (64, 128)  # head sizes that every flash kernel is tuned for
STEP = 128  # hidden sizes and MLP widths are multiples of this, or of STEP x tp
CANDIDATES = 12  # shapes whose layouts are searched; the others are compared by their blocks alone
TOP = 10  # shapes that are printed without --top
LOSS = 0.04  # a reason is named if it costs more than this share


class Waves(NamedTuple):
    """How a product fills the GPU: its tile, waves of tiles, and the share of them that works."""

    rows: int
    columns: int
    number: int
    filled: float


@dataclass(frozen=True)
class Shape:
    """A shape with its fastest layout, and what of the GPU it leaves unused.

    products, attention: seconds if the arithmetic had the GPU's full rate, over the priced seconds.
    """

    model: ModelShape
    line: layouts.Ranked
    waves: Waves
    products: float
    attention: float
    reasons: tuple[str, ...]
    per_parameter: float  # seconds of a token for each parameter

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return model_stats.parameters(self.model)


def shapes(question: Question) -> Answer:
    """Return the answer of `plan.py shapes`: the fastest shapes near a size, with reasons.

    Raise UserError without a size, if no shape is near it, or if none fits.
    """
    options = Namespace(**vars(question.options) | {"question": "layouts"})
    size = _size(question)
    question = replace(question, options=options)
    like = question.config.model
    base = _ranked(question, model_sizes.near(like, size), None)
    if base is None:
        raise LayoutError(f"no layout of {size / BILLION:.1f} B parameters fits: give more GPUs")
    layout = base.layout
    found = _candidates(question, size, layout)
    if not found:
        raise LayoutError(
            f"no shape with the given options has about {size / BILLION:.2f} B parameters: give "
            "fewer of --hidden, --layers and --heads"
        )
    found.sort(key=partial(_block_seconds, question, layout))
    lines = {model: _ranked(question, model, layout) for model in found[:CANDIDATES]}
    ranked = [_shape(question, model, line) for model, line in lines.items() if line is not None]
    if not ranked:
        raise LayoutError(
            f"none of {len(lines)} shapes of {size / BILLION:.1f} B parameters fits in memory: "
            "give more GPUs"
        )
    ranked.sort(key=lambda shape: shape.per_parameter)
    top = options.top if options.top != 20 else TOP
    rows = [HEADS, *(_row(shape, ranked[0]) for shape in ranked[:top])]
    where = f"{question.gpus} GPUs of {question.machine.name}"
    names = ",".join(_name(shape.model) for shape in ranked[:3])
    text = [
        f"{len(found)} shapes of {size / BILLION:.2f} B parameters, the fastest of them on {where}",
        f"{question.batch}; beside: 80 % at equal parameters, beside the first line's",
        *columns(rows, ("why",)),
        f"measure them: {as_typed('python tune.py')} --try model={names} ...",
    ]
    data = {"size_parameters": size, "shapes": [_data(shape) for shape in ranked]}
    return Answer("\n".join(text), data)


def _size(question: Question) -> float:
    """Return the number of parameters: --size, or the size of the budget (budget.py)."""
    options = question.options
    if options.size and options.gpu_hours:
        raise UserError("give --size or --gpu-hours, not both")
    if options.size:
        return float(options.size)
    if options.gpu_hours or options.days:
        found = budget.budget(question).data["found"]["the budget"]
        return float(found["parameters"])
    given = {"hidden", "layers"} & set(question.given)
    if "model" in question.given or question.options.model or len(given) == 2:
        return float(model_stats.parameters(question.config.model))
    raise UserError("of which size? give --size 180B, or --gpu-hours H")


def _candidates(question: Question, size: float, layout: Layout) -> list[ModelShape]:
    """Return the shapes near a size that a layout's tp divides, within what the user gave."""
    like, given = question.config.model, set(question.given)
    tp = layout.tp
    found = dict[tuple, list[ModelShape]]()  # by hidden size and heads
    hiddens = [like.hidden] if "hidden" in given else range(512, 32769, STEP)
    for hidden in hiddens:
        for heads in _heads(like, hidden, given, tp):
            layers = like.layers
            if "layers" not in given:
                layers = _layers(like, hidden, heads, size, layout.pp)
            ratio = hidden / max(layers, 1)
            is_held = {"layers", "hidden"} & given
            if not is_held and not THINNEST <= ratio <= WIDEST:
                continue
            for width in _widths(like, hidden, given, tp):
                own: dict[str, Any] = {"ffn_hidden": width} if width else {}
                model = replace(model_sizes.resized(like, layers, hidden, heads), **own)
                near = abs(model_stats.parameters(model) / size - 1) <= NEAR
                if near and _divides(model, tp):
                    found.setdefault((hidden, heads), []).append(model)
    by_seconds = partial(_block_seconds, question, layout)
    return [min(models, key=by_seconds) for models in found.values()]


def _heads(like: ModelShape, hidden: int, given: set[str], tp: int) -> list[int]:
    """Return the numbers of heads to try for a hidden size."""
    if "heads" in given:
        return [like.heads] if hidden % like.heads == 0 else []
    if like.is_latent:
        return [like.heads]
    shared = like.heads // like.kv_heads  # query heads of a key head
    numbers = [hidden // size for size in HEAD_SIZES if hidden % size == 0]
    found = [heads for heads in numbers if heads % (shared * tp) == 0]
    if found or "hidden" not in given:
        return found
    # No usual head size divides the hidden size that the user gave: all that flash kernels have.
    most = [heads for heads in divisors(hidden) if heads % (shared * tp) == 0]
    return [heads for heads in most if HEAD_SIZES[0] <= hidden // heads <= HEAD_SIZES[-1]]


def _widths(like: ModelShape, hidden: int, given: set[str], tp: int) -> list[int]:
    """Return the MLP widths to try: that of the user, or like's share of the hidden size."""
    if "ffn_hidden" in given:
        return [like.ffn_hidden]
    wanted = like.ffn_hidden / like.hidden * hidden
    steps = (STEP * tp, 256 * tp)
    return sorted({max(1, round(wanted / step)) * step for step in steps})


def _layers(like: ModelShape, hidden: int, heads: int, size: float, pp: int) -> int:
    """Return the blocks with which a hidden size is near a number of parameters.

    It is a multiple of the stages pp if one is near enough.
    """
    one, two = (
        model_stats.parameters(model_sizes.resized(like, count, hidden, heads)) for count in (1, 2)
    )
    exact = (size - one) / (two - one) + 1
    even = round(exact / pp) * pp
    is_near = even > 0 and abs(even - exact) * (two - one) <= NEAR * size
    return even if is_near else max(1, round(exact))


def _divides(model: ModelShape, tp: int) -> bool:
    """Return whether tp divides heads, KV heads, hidden size and MLP width."""
    sizes = (model.heads, model.kv_heads, model.hidden, model.ffn_hidden)
    return all(size % tp == 0 for size in sizes)


def _ranked(question: Question, model: ModelShape, near: Layout | None) -> layouts.Ranked | None:
    """Return a model's fastest layout, or None if none fits; near: a layout to search around.

    Around a layout, its cp and schedule are kept, and tp, pp and micro-batch are half as much, as
    much, and twice as much.
    """
    config = replace(question.config, model=model)
    asked = replace(question, config=config)
    if near is not None:
        fixed: dict[str, Any] = {"cp": near.cp, "schedule": near.schedule}
        gpus = divisors(question.gpus)
        for name in ("tp", "pp", "micro_batch_size"):
            if name in question.given:
                continue
            value = getattr(near, name)
            sizes = [size for size in (value // 2, value, 2 * value) if size in gpus]
            fixed[name] = sizes or [value]
        asked = replace(asked, near=fixed)
    lines = asked.rank(most=1).ranked
    safe = [line for line in lines if line.prediction.risk <= question.options.risk]
    return safe[0] if safe else None


def _block_seconds(question: Question, layout: Layout, model: ModelShape) -> float:
    """Return the seconds of a micro-batch through the blocks with a layout, for each parameter."""
    job = Job(model, layout, question.config.training, question.machine)
    block = time_terms.block_seconds(job)
    seconds = model.layers * (block.forward + block.backward) + sum(time_terms.head(job))
    return float(seconds / model_stats.parameters(model))


def _shape(question: Question, model: ModelShape, line: layouts.Ranked) -> Shape:
    """Return a model shape with its layout, the efficiency of its GEMMs, and why it is slow."""
    job = Job(model, line.layout, question.config.training, question.machine)
    machine = job.machine
    best, taken, worst = 0.0, 0.0, (0.0, "", (0, 0))
    for name, (m, n, k, count), seconds in zip(
        _names(model), time_terms.matrices(job), time_terms.products(job), strict=False
    ):
        ideal = 6.0 * m * n * k * count / (machine.peak * machine.gemm_fraction)
        best, taken = best + ideal, taken + float(sum(seconds))
        lost = float(sum(seconds)) - ideal
        worst = max(worst, (lost, name, (int(m), int(n))))
    attention = time_terms.core_seconds(job)
    scores = 3.5 * model_stats.score_flops(model) * job.tokens / job.layout.tp
    at_best = scores / (machine.peak * machine.flash_fraction)
    waves = waves_of(job, *worst[2])
    share = worst[0] / max(taken, 1e-30)
    reasons = _reasons(job, worst[1], worst[2], share, waves)
    per_token = line.prediction.quantile / (
        question.config.training.global_batch_size * model.seq_length
    )
    return Shape(
        model=model,
        line=line,
        waves=waves,
        products=best / taken,
        attention=at_best / float(sum(attention)),
        reasons=tuple(reasons),
        per_parameter=per_token / model_stats.parameters(model),
    )


def _names(model: ModelShape) -> list[str]:
    """Return the names of a block's products, in the order of time_terms.matrices."""
    first = [f"attention {n}" for n in range(len(model_stats.mixer_matrices(model)) - 2)]
    return [*first, "q, k, v", "attention's output", "MLP's first", "MLP's second"]


def waves_of(job: Job, rows: int, outs: int) -> Waves:
    """Return how a product rows x outs fills the GPU, with the tile that the planner takes."""
    processors = job.machine.processors

    def priced(tile: tuple[int, int, float]) -> tuple[float, Waves]:
        """Return a number that grows with the time of a tile (rows, columns, speed), its waves."""
        height, width, speed = tile
        tiles = -(-rows // height) * -(-outs // width)
        count = -(-tiles // processors)
        used = rows * outs / (count * processors * height * width)
        return count * height * width / speed, Waves(height, width, count, used)

    return min(map(priced, op_costs.TILES), key=lambda pair: pair[0])[1]


def _reasons(
    job: Job, product: str, sizes: tuple[int, int], share: float, waves: Waves
) -> list[str]:
    """Return what makes a shape slower than the GPU allows, as short texts."""
    model, layout = job.model, job.layout
    found = []
    width = model.hidden // layout.tp
    if op_costs.aligned(width, model.ffn_hidden // layout.tp) < 1:
        found.append(f"hidden / tp = {width} is no multiple of {op_costs.ALIGNMENT}")
    if model.head_size % op_costs.ALIGNMENT:
        found.append(f"head size {model.head_size} is no multiple of {op_costs.ALIGNMENT}")
    elif model.head_size > HEAD_SIZES[-1]:
        found.append(f"head size {model.head_size}: no flash kernel above {HEAD_SIZES[-1]}")
    elif model.head_size not in FAST_HEADS:
        found.append(f"head size {model.head_size}, kernels are tuned for 64 and 128")
    if share > LOSS and waves.filled < 1 - LOSS:
        tiles = f"{waves.number} waves of {waves.rows} x {waves.columns} tiles"
        found.append(f"{product} GEMM: {tiles}, {waves.filled:.0%} full")
    parts = model.layers / layout.stages
    if layout.pp > 1 and model.layers % layout.stages:
        found.append(f"{model.layers} blocks over {layout.stages} stages: {parts:.1f} each")
    if layout.recompute != "none":
        number = layout.recompute_layers
        blocks = {None: "all blocks", 1: "1 block"}.get(number, f"{number} blocks")
        found.append(f"recomputes {blocks} of a stage")
    return found or ["GEMMs and heads fill the GPU"]


HEADS = [
    *("hidden", "blocks", "heads", "head", "MLP", "params", "tp", "pp", "mbs", "products"),
    *("waves", "attn", "s/step", "80 %", "beside", "GB", "why"),
]


def _row(shape: Shape, first: Shape) -> list[str]:
    """Return the cells of a line of the table; speed is compared with the `first` line's."""
    model, layout, p = shape.model, shape.line.layout, shape.line.prediction
    return [
        str(model.hidden),
        str(model.layers),
        str(model.heads),
        str(model.head_size),
        str(model.ffn_hidden),
        f"{shape.parameters / BILLION:.2f} B",
        str(layout.tp),
        str(layout.pp),
        str(layout.micro_batch_size),
        f"{shape.products:.0%}",
        f"{shape.waves.number} {shape.waves.filled:.0%}",
        f"{shape.attention:.0%}",
        f"{p.seconds:.2f}",
        f"{p.quantile:.2f}",
        f"{shape.per_parameter / first.per_parameter - 1:+.1%}",
        f"{max(stage.total for stage in p.memory) / BILLION:.0f}",
        "; ".join(shape.reasons),
    ]


def _name(model: ModelShape) -> str:
    """Return a shape as --model and --try name it: blocks x hidden x heads x MLP width."""
    return f"{model.layers}x{model.hidden}x{model.heads}x{model.ffn_hidden}"


def _waves_data(waves: Waves) -> dict[str, Any]:
    """Return how a product fills the GPU as data."""
    tile = {"tile_rows": waves.rows, "tile_columns": waves.columns}
    return tile | {"waves": waves.number, "filled_fraction": waves.filled}


def _data(shape: Shape) -> dict[str, Any]:
    """Return a shape as data."""
    model = shape.model
    dividing = [tp for tp in divisors(math.gcd(model.heads, model.hidden)) if _divides(model, tp)]
    return {
        "name": _name(model),
        "parameters": shape.parameters,
        "model": asdict(model),
        "layout": asdict(shape.line.layout),
        "step_seconds": shape.line.prediction.seconds,
        "seconds_per_token_and_parameter": shape.per_parameter,
        "products_fraction": shape.products,
        "attention_fraction": shape.attention,
        "tp_that_divide": dividing,
        "pp_that_divide": divisors(model.layers),
        "costliest_product": _waves_data(shape.waves),
        "reasons": list(shape.reasons),
    }
