"""The coordinate check: how the size of each tensor grows with the width or the depth of a model.

    rows = compare(ladder, sizes, ...)       the exponent of each size, and which are wrong
    found = measure(config, steps, size)     one run: the size of what is computed, and of updates

Sizes are "natural": each should stay the same from the smallest to the largest model. If one grows
as a power of the width, no rate suits all widths; if one dies, its tensor is not trained in a large
model. (G. Yang, J. Simon, J. Bernstein, "A spectral condition for feature learning", arXiv
2310.17813; the check is that of G. Yang et al., arXiv 2203.03466, appendix D.)

    initial    of a matrix: root mean square times sqrt(inputs), the size of W x for a random x
    update     of a matrix: the root mean square of (change of W) x over that of x, for its inputs x
               of the step; of experts' and the head's matrices, whose inputs no module has: the
               spectral norm times sqrt(inputs / outputs), which is that for the x to which it
               responds most; of an embedding the root mean square, of a vector the largest change
    activation root mean square of what blocks add, of the residual stream, the attention scores and
               the logits
    change     of an activation since the first step, on the same tokens

The classes are taken from the shapes of two widths and not from what the engine calls a tensor, so
a wrong role is found: inputs and outputs grow, hidden; outputs alone, input-like; inputs alone,
output-like; no matrix, vector. What writes into the residual stream counts with its factor there
and the number of blocks, whose updates agree (at the beginning the root of it); by depth its class
is residual. Scores of attention count as their factor times the size of a head.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import data
import trainer
from architecture.shape import ModelShape
from checkpointing.hf_scales import is_added
from config.schema import Config
from tools.checker.sizes import Ladder

# The tensors of which a token takes rows: their first dimension has no products.
LOOKED_UP = re.compile(r"embedding\.(tokens|positions)\.weight")
SCALE_OF_SCORES, SCORES = "attention scores", "attention scores q k"
AS_HEAD = "embedding.tokens.weight as the head"
LEAST = 1e-12  # sizes below it are zero: nothing to fit
SUCCESSORS, BACK = 6, 7  # of the chain: successors of a token; how far back a token is repeated


class Chain(data.Synthetic):
    """Samples that can be learned: a Markov chain that now and then repeats an earlier token."""

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k, (seq_length + 1,), int64."""
        table = np.random.default_rng(7).integers(
            self.vocab_size, size=(self.vocab_size, SUCCESSORS)
        )
        random = np.random.default_rng((self.seed, self.stream, k))
        length = self.seq_length + 1
        choices = np.minimum(random.geometric(0.45, length), SUCCESSORS) - 1
        repeats = random.random(length) < 0.3
        tokens = random.integers(self.vocab_size, size=length)
        for i in range(1, length):
            repeated = repeats[i] and i >= BACK
            tokens[i] = tokens[i - BACK] if repeated else table[tokens[i - 1], choices[i]]
        return tokens


class Tensors(NamedTuple):
    """A tensor, or a matrix of one, by which sizes are compared across models.

    name: with * for the number of the block. shape: (outputs, inputs); () for what is no matrix.
    """

    name: str
    shape: tuple[int, ...]


@dataclass
class Measured:
    """The sizes of one run. size: its width or its number of blocks.

    values: by (quantity, tensor, step) the size; several blocks are averaged.
    """

    size: int
    values: dict[tuple[str, str, int], float] = field(default_factory=dict)


def measure(config: Config, steps: int, size: int) -> Measured:
    """Train so many steps on one batch, and return the sizes after each.

    config: a run of one rank, whose micro-batch is its batch. size: what the fit goes by.
    """
    state = trainer.build(config)
    model, stage = config.model, _stage(state)
    samples = Chain(model.vocab_size, model.seq_length, config.training.seed)
    found: dict[tuple[str, str, int], list[float]] = {}

    def add(quantity: str, name: str, step: int, value: float) -> None:
        found.setdefault((quantity, name, step), []).append(value)

    first = {p.spec.name: p.detach().clone() for p in stage.parameters()}
    for tensor, value in _sizes(stage, model, first, _initial):
        if tensor.shape or LOOKED_UP.fullmatch(tensor.name):
            add("initial", tensor.name, 0, value)
    if model.attention_blocks:
        add("initial", SCALE_OF_SCORES, 0, model.head_size / model.query_scalar**0.5)
    at_first: dict[str, Tensor] = {}
    with Watch(stage) as watch:
        for step in range(steps + 1):
            trainer.step(state, samples, 0, config.training.lr)
            for name, seen in watch.take().items():
                general = _general(name)
                add("activation", general, step, _rms(seen))
                at_first.setdefault(name, seen)
                if step:
                    add("change", general, step, _rms(seen - at_first[name]))
            moved = {p.spec.name: p.detach() - first[p.spec.name] for p in stage.parameters()}
            for tensor, value in _sizes(stage, model, moved, _update, watch.inputs):
                add("update", tensor.name, step + 1, value)
    values = {key: sum(each) / len(each) for key, each in found.items()}
    return Measured(size, values)


def _stage(state: trainer.ModelState) -> Any:
    """Return the only stage of a run of one rank."""
    (stage,) = state.stages
    return stage


class Watch:
    """Keeps what the blocks of a stage add, the residual stream and the logits of a step.

    It is a context manager: within it hooks of the modules keep these tensors.
    """

    def __init__(self, stage: Any):
        """Register nothing yet. stage: the only stage, with the whole model."""
        self.stage = stage
        self.seen: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}  # of matrices, (rows, inputs), by the parameter's name
        self.hooks: list[Any] = []
        self.scores = _Scores()

    def __enter__(self) -> "Watch":
        """Register the hooks that keep the tensors of each forward pass.

        Kept are the embedding's output, what each mixer and MLP adds to the residual stream, the
        inputs of weight matrices, the stream before the head, the logits and attention's scores.
        """
        for number, block in enumerate(self.stage.blocks):
            # In blocks of these kinds a norm follows the mixer and the MLP: its output is added.
            norm = {"sandwich": "post_norm", "post-norm": "norm"}.get(block.kind)
            for name, mixer in block.mixers():
                added = getattr(block, f"attention_{norm}") if norm else mixer
                self._watch(added, f"blocks.{number}.{name}")
            if block.has_mlp:
                added = getattr(block, f"mlp_{norm}") if norm else block.mlp
                self._watch(added, f"blocks.{number}.mlp")
        self._watch(self.stage.embedding, "embedding")
        for module in self.stage.blocks.modules():
            owned = [p for p in module.parameters(recurse=False) if p.spec.decay]
            if owned:
                self._watch_inputs(module, [p for p in owned if not p.spec.is_expert])
        self.hooks.append(self.stage.head.register_forward_pre_hook(self._keep_stream))
        self.scores.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        self.scores.__exit__(None, None, None)
        for hook in self.hooks:
            hook.remove()

    def take(self) -> dict[str, Tensor]:
        """Return the tensors that were kept since the last call, by name."""
        seen, self.seen = self.seen, {}
        for number, scores in enumerate(self.scores.seen):
            seen[f"{SCORES} ({number})"] = scores
        self.scores.seen.clear()
        return seen

    def _watch(self, module: nn.Module, name: str) -> None:
        """Keep the output of a module from now on, as `name`."""

        def keep(module: nn.Module, inputs: Any, result: Tensor) -> None:
            self.seen[name] = result.detach().clone()

        self.hooks.append(module.register_forward_hook(keep))

    def _watch_inputs(self, module: nn.Module, matrices: list[Any]) -> None:
        """Keep the input of a module's matrices from now on, (rows, inputs), by parameter."""

        def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            """Keep the first input for each matrix that takes inputs of its width."""
            x = inputs[0].detach()
            for p in matrices:
                if x.shape[-1] == p.spec.shape[-1]:
                    self.inputs[p.spec.name] = x.reshape(-1, x.shape[-1]).clone()

        self.hooks.append(module.register_forward_pre_hook(keep))

    def _keep_stream(self, head: Any, inputs: tuple[Tensor, Tensor]) -> None:
        """Keep the residual stream before the head, and the logits computed from it."""
        x = inputs[0].detach()
        self.seen["residual stream"] = x.clone()
        with torch.no_grad():
            self.seen["logits"] = head.logits(x).clone()


class _Scores(TorchFunctionMode):
    """Keeps the scores q k / sqrt(d) of torch's attention, (b, heads, s, s), as it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keep the scores of q and k, and call the function; torch calls this for each function."""
        if function is F.scaled_dot_product_attention:
            q, k = (t.detach() for t in args[:2])
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            self.seen.append(q @ k.mT / q.shape[-1] ** 0.5)
        return function(*args, **(kwargs or {}))


def _rms(x: Tensor) -> float:
    """Return the root mean square of the elements."""
    return x.double().square().mean().sqrt().item()


def _general(name: str) -> str:
    """Return a name with * for the number of the block."""
    name = re.sub(r" \(\d+\)$", "", name)
    return re.sub(r"^blocks\.\d+\.", "blocks.*.", name)


# ---- Sizes of parameters -------------------------------------------------------------------------

Size = Callable[[str, Tensor, Tensor | None], float]
NO_INPUTS: Mapping[str, Tensor] = MappingProxyType({})


def _sizes(
    stage: Any,
    model: ModelShape,
    tensors: Mapping[str, Tensor],
    size: Size,
    inputs: Mapping[str, Tensor] = NO_INPUTS,
) -> Iterator[tuple[Tensors, float]]:
    """Yield the matrices and vectors of a stage with their sizes.

    tensors: the values or their changes, by the name of the parameter. size: of one of them.
    inputs: those of matrices, where they are known.
    """
    for p in stage.parameters():
        if not p.requires_grad:
            continue
        spec, values = p.spec, tensors[p.spec.name]
        name = _general(spec.name)
        if LOOKED_UP.fullmatch(spec.name):
            yield Tensors(name, ()), size("looked up", values, None)
        if not spec.decay or LOOKED_UP.fullmatch(spec.name):
            if not spec.decay:
                yield (
                    Tensors(name, ()),
                    _factor(model, spec.name, name, size) * size("vector", values, None),
                )
            if not (model.tied and spec.name == "embedding.tokens.weight"):
                continue
            name = AS_HEAD
        factor = _factor(model, spec.name, name, size)
        x = inputs.get(spec.name)
        if spec.matrices is None:
            matrix = values.flatten(0, -2)
            yield Tensors(name, tuple(matrix.shape)), factor * size("matrix", matrix, x)
            continue
        by_part: dict[str, list[float]] = {}
        shape: dict[str, tuple[int, ...]] = {}
        for part, box in spec.matrices.boxes(spec.shape, "split"):
            label = f"{name}: {part}" if part and not part[0].isdigit() else name
            matrix = values[tuple(slice(*one) for one in box)].flatten(0, -2)
            shape[label] = tuple(matrix.shape)
            by_part.setdefault(label, []).append(factor * size("matrix", matrix, x))
        for label, each in by_part.items():
            trained = [value for value in each if value > LEAST]  # experts may have had no token
            yield Tensors(label, shape[label]), sum(trained) / max(1, len(trained))


def _factor(model: ModelShape, name: str, label: str, size: Size) -> float:
    """Return the factor with which a tensor's result counts: that of the head, or of a branch.

    size: `_initial` or `_update`: what the branches of blocks add is random at the beginning, and
    agrees in the updates.
    """
    if name == "head.weight" or label == AS_HEAD:
        return 1 / model.logit_divisor
    if is_added(model, name):
        return model.residual_multiplier * model.layers ** (0.5 if size is _initial else 1.0)
    return 1.0


def _initial(kind: str, values: Tensor, x: Tensor | None) -> float:
    """Return the initial size of a tensor: of its product with a random vector, or its own."""
    inputs = values.shape[-1] if kind == "matrix" else 1
    return _rms(values) * math.sqrt(inputs)


def _update(kind: str, change: Tensor, x: Tensor | None) -> float:
    """Return the size of a weight's change, as the head of the file defines it.

    kind: looked up (an embedding), vector, or matrix. x: the matrix's inputs, (rows, inputs), if
    they are known.
    """
    if kind == "looked up":
        touched = change.abs().amax(1) > 0
        return _rms(change[touched]) if touched.any() else 0.0
    if kind == "vector":
        return change.abs().max().item()  # of few heads the signs may differ
    if x is not None:
        return _rms(x @ change.T) / max(_rms(x), LEAST)
    outputs, inputs = change.shape
    return _spectral_norm(change) * math.sqrt(inputs / outputs)


def _spectral_norm(matrix: Tensor) -> float:
    """Return the largest singular value, by power iteration on the smaller side."""
    matrix = matrix.double()
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    x = torch.ones(len(gram), dtype=gram.dtype) / math.sqrt(len(gram))
    x = x + 0.1 * torch.linspace(-1, 1, len(gram), dtype=gram.dtype)
    length = 0.0
    for _ in range(20):
        x = gram @ x
        length = x.norm().item()
        if length == 0:
            return 0.0
        x = x / length
    return math.sqrt(length)


# ---- Exponents -----------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """A quantity of a tensor: its sizes by size of the model, and the exponent.

    kind: the class of the tensor; "" for an activation. least: the exponent is right from this one
    to 0, but for a tolerance. verdict: grows or dies, or "" if it is right.
    """

    quantity: str
    name: str
    kind: str
    sizes: tuple[float, ...]
    exponent: float
    least: float
    verdict: str


# By how much an exponent may be off for sizes of a large ratio; NOISE of a logarithm adds to it for
# a small one. Initial sizes are means over many numbers and known well.
TOLERANCES = {"initial": 0.1, "update": 0.3, "activation": 0.3, "change": 0.3}
NOISE = 0.12
# In a small model an update has a part that agrees with no input, as a random matrix has, whose
# response falls as the root of the width. What dies falls as the width itself.
SLOW = {"update": 0.45, "change": 0.45}


def classes(smaller: Config, larger: Config) -> dict[str, str]:
    """Return the class of each tensor, by which of its dimensions grow between two widths."""
    found = {}
    shapes = []
    for config in (smaller, larger):
        stage = _stage(trainer.build_model(config))
        nothing = {p.spec.name: p.detach() for p in stage.parameters()}
        named = _sizes(stage, config.model, nothing, lambda kind, values, x: 1.0)
        shapes.append({tensor.name: tensor.shape for tensor, _ in named})
    for name, shape in shapes[0].items():
        other = shapes[1].get(name, shape)
        grows = tuple(b > a for a, b in zip(shape, other))
        kind = {(True, True): "hidden", (True, False): "input-like", (False, True): "output-like"}
        is_looked_up = LOOKED_UP.fullmatch(name) is not None
        found[name] = "input-like" if is_looked_up else kind.get(grows, "vector")  # type: ignore[arg-type]
    return found | {SCALE_OF_SCORES: "attention scale"}


def compare(
    ladder: Ladder,
    sizes: Sequence[int],
    by_depth: bool,
    seeds: int,
    updates: int,
    rate: float,
) -> list["Fitted"]:
    """Return the exponents of a model's tensors and activations over its sizes.

    ladder: makes the models. sizes: widths, or by_depth the numbers of blocks. seeds: the runs of
    each size. updates: the steps after which tensors are compared. rate: the learning rate.
    """
    runs = []
    for size in sizes:
        shape = ladder.shape(size, by_depth)
        configs = [ladder.at(*shape, seed + 1, lr=rate) for seed in range(seeds)]
        runs.append([measure(config, updates, size) for config in configs])
    kinds = classes(*(ladder.at(ladder.width * n, ladder.layers, 1) for n in (1, 2)))
    if by_depth:
        kinds = with_residual(kinds, ladder.config.model)
    return fit(runs, kinds, by_depth, updates)


def with_residual(kinds: Mapping[str, str], model: ModelShape) -> dict[str, str]:
    """Return the classes with residual for what blocks add to the stream, as depth has them."""
    return {
        name: "residual" if is_added(model, name.replace("*", "0", 1)) else kind
        for name, kind in kinds.items()
    }


def fit(
    runs: Sequence[Sequence[Measured]], kinds: Mapping[str, str], by_depth: bool, steps: int
) -> list[Fitted]:
    """Return the exponents of all quantities, as they are after the last step.

    runs: for each size of the model the runs with other seeds. by_depth: whether the size is the
    number of blocks.
    """
    sizes = [runs_of_size[0].size for runs_of_size in runs]
    last = {"initial": 0, "update": steps, "activation": steps, "change": steps}
    found = []
    for quantity, name, step in runs[0][0].values:
        if step != last[quantity]:
            continue
        key = quantity, name, step
        values = tuple(_mean(run.values.get(key, 0.0) for run in each) for each in runs)
        if min(values) <= LEAST:
            continue
        exponent = slope(sizes, values)
        kind = kinds.get(name, "")
        falls = _may_fall(quantity, name, kind, by_depth)
        tolerance = TOLERANCES[quantity] + NOISE / math.log(sizes[-1] / sizes[0])
        verdict = "grows" if exponent > tolerance else ""
        if exponent < -falls - tolerance - SLOW.get(quantity, 0.0):
            verdict = "dies"
        found.append(Fitted(quantity, name, kind, values, exponent, -falls, verdict))
    return found


def _mean(values: Iterator[float] | Any) -> float:
    """Return the geometric mean; 0 if a value is 0."""
    each = list(values)
    if min(each) <= 0:
        return 0.0
    return math.exp(sum(map(math.log, each)) / len(each))


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent p of values ~ sizes^p, by least squares of the logarithms."""
    x, y = np.log(sizes), np.log(values)
    return float(np.polyfit(x, y, 1)[0])


def _may_fall(quantity: str, name: str, kind: str, by_depth: bool) -> float:
    """Return by which power a size may fall and be right; infinity: however fast.

    A result of the head or a router is a sum of random products at the beginning, which may fall as
    the root of the width; once trained its terms agree. Activations may fall: those of blocks begin
    near zero. So may the change of scores, which begins with products of a small change and a
    random vector, and initial sizes by depth.
    """
    if quantity == "activation" or name == SCORES or (quantity == "initial" and by_depth):
        return math.inf
    return 0.5 if quantity == "initial" and kind == "output-like" else 0.0
