"""The GPT: embedding, blocks, head and loss. A pipeline stage (`Stage`) is a slice of the model.

    [embedding] block* [final norm + head + loss]        a stage may lack any of the three parts

Shapes at line ends: s sequence, b samples, h hidden, a heads of size d, g key/value heads,
f MLP width, V vocabulary; with tensor parallelism a, g and f are the local a/tp, g/tp, f/tp.
Weights are drawn as in GPT-2: from a normal distribution, whose standard deviation is smaller by
sqrt(2 L), for L blocks, in the two matrices of a block that write into the residual stream.
Read parallel.py first; attention is in attention.py and the loss in loss.py.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Attention, KeyValueCache, Positions, recomputed
from config.schema import Layout, ModelShape
from data import Batch
from distributed.collectives import Group, reduce_from_tp
from loss import cross_entropy
from parallel import ColumnLinear, DeferredGradients, ParamFactory, RowLinear, column_linear
from schedules.partition import StageSpec

if TYPE_CHECKING:
    from corpora.attention_masks import Mask


class Norm(nn.Module):
    """LayerNorm or RMSNorm over h; every tensor rank holds the whole scale (and shift)."""

    def __init__(self, factory: ParamFactory, name: str, model: ModelShape):
        super().__init__()
        self.eps = model.norm_eps
        self.weight = factory.parameter(f"{name}.weight", (model.hidden,), fill=1.0)
        centred = model.norm == "layernorm"
        self.bias = factory.parameter(f"{name}.bias", (model.hidden,)) if centred else None
        self.normed, self.added = factory.fused(_normed), factory.fused(_added)

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x, self.weight, self.bias, self.eps)

    def of_sum(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + y and the norm of that sum; x and y are (s, b, h), and None counts as 0."""
        return (x, self(x)) if y is None else self.added(x, y, self.weight, self.bias, self.eps)


def _normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _added(x: Tensor, y: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
    x = x + y
    return x, _normed(x, *norm)


class MLP(nn.Module):
    """h -> f -> h with an activation; in a swiglu MLP gate and up are one matrix (2, f, h)."""

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        model: ModelShape,
        std: float,
        width: int | None = None,
    ):
        """std: the standard deviation of the second matrix. width: f, default: ffn_hidden."""
        super().__init__()
        activation = ACTIVATIONS[model.activation]
        self.activation = factory.fused(activation) if activation is _swiglu else activation
        f = width or model.ffn_hidden
        shape, dim = ((2, f), 1) if model.activation == "swiglu" else ((f,), 0)
        self.up = ColumnLinear(factory, f"{name}.up", model.hidden, shape, dim, model.bias)
        self.down = RowLinear(factory, f"{name}.down", f, model.hidden, std, model.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


# MLP compiles swiglu alone: each other activation is one kernel each way already.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "swiglu": _swiglu,
}


def _experts(factory: ParamFactory, name: str, model: ModelShape, std: float) -> nn.Module:
    """Return a block's experts with their router, in place of its MLP."""
    from experts import ExpertMLP  # here, since only models with experts need the module

    width = model.shared_ffn_hidden
    shared = MLP(factory, f"{name}.shared", model, std, width) if width else None
    return ExpertMLP(factory, name, model, std, ACTIVATIONS[model.activation], shared)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)).

    With --block post-norm: x + norm(attention(x)), then x + norm(MLP(x)). With --block parallel:
    x + attention(norm(x)) + MLP(norm(x)), where each norm has weights of its own.
    """

    def __init__(self, factory: ParamFactory, index: int, model: ModelShape, recompute: str):
        super().__init__()
        name = f"blocks.{index}"
        std = factory.std / math.sqrt(2 * model.layers)  # for the two output matrices
        self.attention_norm = Norm(factory, f"{name}.attention_norm", model)
        self.attention = Attention(
            factory, f"{name}.attention", model, std, recompute == "selective"
        )
        self.mlp_norm = Norm(factory, f"{name}.mlp_norm", model)
        self.has_experts = model.has_experts(index)
        self.mlp = (_experts if self.has_experts else MLP)(factory, f"{name}.mlp", model, std)
        self.recompute = recompute == "full"
        self.kind = model.block

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        mask: "Mask | None",
        rotary: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return two tensors whose sum is the block's output: (s, b, h), or (s/tp, b, h) with
        sequence parallelism. One kernel of --compile does this sum and the next block's first norm.

        x, y: of the block before; y is None in a stage's first block. The rest: Attention.forward.
        """
        choice: list[Tensor] = []  # of experts: it is kept, so that recomputation cannot change it
        if self.recompute and torch.is_grad_enabled():
            x = x if y is None else x + y  # one tensor is kept, not two
            return recomputed(self._run, x, None, mask, rotary, cache, choice)
        return self._run(x, y, mask, rotary, cache, choice)

    def _run(
        self,
        x: Tensor,
        y: Tensor | None,
        mask: "Mask | None",
        rotary: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None,
        choice: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        mlp = functools.partial(self.mlp, kept=choice) if self.has_experts else self.mlp
        if self.kind == "post-norm":
            x = x if y is None else x + y
            x = x + self.attention_norm(self.attention(x, mask, rotary, cache))
            return x, self.mlp_norm(mlp(x))
        x, normed = self.attention_norm.of_sum(x, y)
        y = self.attention(normed, mask, rotary, cache)
        if self.kind == "parallel":
            return x + y, mlp(self.mlp_norm(x))
        mixed, normed = self.mlp_norm.of_sum(x, y)
        return mixed, mlp(normed)


# ---- Embedding, head and the stage ---------------------------------------------------------------

TOKENS = "embedding.tokens.weight"


class VocabEmbedding(nn.Module):
    """The tokens' embedding matrix, its rows split over tp: (b, s) -> (s, b, h) or (s/tp, b, h).

    The last rank's rows may end in padding, which no token selects. over: with --vocab-pp, the
    group of pp and tp over which the rows are split instead. `forward` sums over tp alone, so the
    caller then has to sum its results over the pipeline ranks.
    """

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        vocab: int,
        padded: int,
        hidden: int,
        tied: bool,
        over: Group | None = None,
    ):
        super().__init__()
        self.factory = factory
        self.group = over or factory.mesh.tp
        shape = (vocab, hidden)
        self.weight = factory.parameter(
            name, shape, std=factory.std, dim=0, padded=padded, decay=True, tied=tied, over=over
        )

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.t()
        # A sparse gradient adds the tokens' rows to the weight's gradient buffer in place. A dense
        # one would be a temporary tensor of the whole matrix in each micro-batch.
        total = getattr(self.weight, "main_grad", None)
        sparse = total is not None and total.is_cpu and total.dtype == self.weight.dtype
        if self.group.size == 1:
            return F.embedding(tokens, self.weight, sparse=sparse)
        local = tokens - self.group.rank * self.weight.shape[0]
        absent = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(absent, 0), self.weight, sparse=sparse)
        rows = rows.masked_fill(absent[..., None], 0.0)
        return reduce_from_tp(rows, self.factory.mesh.tp, self.factory.sequence_parallel)


class Embedding(nn.Module):
    """Token and position embedding: (b, s) -> (s, b, h), or (s/tp, b, h) with sequence parallelism.

    With --vocab-pp it has no token matrix. Its input is then the sum over the ranks of the
    outputs of VocabularyPart, in the shape of its result.
    """

    def __init__(
        self, factory: ParamFactory, model: ModelShape, padded: int, tied: bool, spread: bool
    ):
        """tied: another rank holds a copy of the token matrix; spread: VocabularyPart has it."""
        super().__init__()
        self.part = factory.mesh.tp if factory.sequence_parallel else None
        self.cp = factory.mesh.cp
        h = model.hidden
        self.tokens = None
        if not spread:
            self.tokens = VocabEmbedding(factory, TOKENS, model.vocab_size, padded, h, tied=tied)
        self.positions = None
        if model.positions == "learned":
            name = "embedding.positions.weight"
            shape = (model.max_positions, h)
            self.positions = factory.parameter(name, shape, std=factory.std, decay=True)
        self.norm = Norm(factory, "embedding.norm", model) if model.embedding_norm else None

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the embeddings of tokens (b, s); with --vocab-pp `tokens` is already their sum.

        positions: of the tokens, (b, s). None: the places of this rank's tokens in each sample.
        """
        x = tokens if self.tokens is None else self.tokens(tokens)
        if self.positions is not None:
            if positions is None:
                parts = self.cp.size * (self.part.size if self.part else 1)
                rows = self.cp.balanced_shard(self.positions[: len(x) * parts, None], 0)
                x = x + self._own_part(rows)
            else:
                x = x + F.embedding(self._own_part(positions.t()), self.positions)
        return x if self.norm is None else self.norm(x)

    def _own_part(self, rows: Tensor) -> Tensor:
        """Return this rank's rows along the sequence: all rows without sequence parallelism."""
        return self.part.shard(rows) if self.part else rows


class Head(nn.Module):
    """Final norm, output matrix and loss: (s, b, h), labels (b, s) -> loss of each token, (s, b).

    A tied head uses the embedding's token matrix. If both are on one rank, they share one tensor.
    Otherwise the head has a copy, which stays equal because the gradients of both are summed.
    """

    def __init__(
        self, factory: ParamFactory, model: ModelShape, padded: int, embedding: Embedding | None
    ):
        """embedding: the model's, if this rank holds it; else None."""
        super().__init__()
        self.factory = factory
        self.shared = False
        self.norm = Norm(factory, "head.norm", model)
        self.weight: nn.Parameter
        if model.tied and embedding is not None and embedding.tokens is not None:
            self.shared = True
            self.weight = embedding.tokens.weight
        else:
            tied = model.tied
            shape = (model.vocab_size, model.hidden)
            name = TOKENS if tied else "head.weight"
            std = factory.std
            self.weight = factory.parameter(
                name, shape, std=std, dim=0, padded=padded, decay=True, tied=tied, copy=tied
            )
        self.spec = self.weight.spec

    def logits(self, x: Tensor) -> Tensor:
        """Return this rank's columns of the logits, padding included: (s, b, V/tp)."""
        return column_linear(self.norm(x), self.weight, None, self.factory, self.shared)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        about = self.factory.mesh.tp, self.spec, self.factory.compile
        return cross_entropy(self.logits(x), labels.t(), *about)


class VocabularyPart(nn.Module):
    """With --vocab-pp, this rank's rows of embedding and output matrix (one matrix if tied).

    Every pipeline rank has one. `forward` takes tokens (b, s) and returns this rank's term of
    their embeddings: 0 for tokens whose rows other pipeline ranks hold. vocabulary.py calls both
    methods; `deferred` keeps the computation of the output matrix's gradient until pass T, which
    needs the gradient of the logits' input first.
    """

    def __init__(self, factory: ParamFactory, model: ModelShape, padded: int):
        super().__init__()
        over = factory.mesh.vocabulary
        shape = (model.vocab_size, model.hidden)
        self.deferred = DeferredGradients()
        self.factory = replace(factory, deferred=self.deferred)
        self.tokens = VocabEmbedding(factory, TOKENS, shape[0], padded, shape[1], False, over)
        self.weight: nn.Parameter = self.tokens.weight
        if model.tied:
            self.weight.passes = 2  # gradients in a micro-batch: of the embedding and the output
        else:
            name = "head.weight"
            self.weight = factory.parameter(
                name, shape, std=factory.std, dim=0, padded=padded, decay=True, over=over
            )
        self.spec = self.weight.spec

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)

    def logits(self, x: Tensor) -> Tensor:
        """Return this rank's columns of the logits, (s, b, V/n), for x after the final norm."""
        return column_linear(x, self.weight, None, self.factory)


class Stage(nn.Module):
    """The slice of the model that one pipeline stage holds; `spec` says which.

    forward(x, batch): x is tokens (b, s) on the first stage, else activations (s, b, h); the
    result is activations, or on the last stage the sum of the targets' losses. The last stage needs
    the batch, and with masks every stage does. With --vocab-pp the first stage takes the sum of
    embeddings, and the last stage returns the final norm's output (vocabulary.py does the rest).
    """

    def __init__(
        self,
        factory: ParamFactory,
        model: ModelShape,
        layout: Layout,
        spec: StageSpec,
        first: "Stage | None" = None,
        masked: bool = False,
    ):
        """first: the pipeline's first stage, if this rank holds it beside this stage. masked:
        whether each batch says which tokens each token sees.

        Raise ValueError if the stage has not as many parameters as `spec` says.
        """
        super().__init__()
        padded = model.padded_vocab(layout)
        self.spec = spec
        self.vocabulary: VocabularyPart | None = None
        if layout.vocab_pp:
            self.vocabulary = VocabularyPart(factory, model, padded)
        self.embedding: Embedding | None = None
        if spec.embedding:
            self.embedding = Embedding(factory, model, padded, spec.tied, layout.vocab_pp)
        self.blocks = nn.ModuleList()
        self._add_blocks(factory, model, layout)
        self.head: Head | None = None
        self.output_norm: Norm | None = None
        if spec.head and layout.vocab_pp:
            self.output_norm = Norm(factory, "head.norm", model)
        elif spec.head:
            holder = self if first is None else first
            self.head = Head(factory, model, padded, holder.embedding)
        shared: list[nn.Parameter] = []
        if self.head is not None and first is not None and model.tied:
            shared.append(self.head.weight)
            self.head.weight.passes = 2  # gradients in a micro-batch: one from each stage
        self.positions: Positions | None = None
        if spec.blocks:
            self.positions = Positions(factory, model, layout.micro_batch_size, masked)
        _check_count(self, shared)

    def _add_blocks(self, factory: ParamFactory, model: ModelShape, layout: Layout) -> None:
        """Make this stage's blocks; --recompute may apply to the first of them only."""
        recomputed_blocks = layout.recomputed_blocks(self.spec.blocks, self.spec.index)
        for n in range(self.spec.blocks):
            recompute = layout.recompute if n < recomputed_blocks else "none"
            block = Block(factory, self.spec.first + n, model, recompute)
            self.blocks.append(block)
            if factory.shard is not None:
                factory.shard(block)

    def forward(
        self, x: Tensor, batch: Batch | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return activations; on the last stage the loss sum, or logits with a cache.

        With a cache (decoding), x belongs to the tokens that follow the cached ones, and the last
        stage returns this rank's logits for the token after x's last one: (b, V/tp).
        """
        x = self.hidden_states(x, batch, cache)
        if cache is not None:
            return x if self.head is None else self.head.logits(x[-1:])[0]
        if self.head is None or batch is None:
            return x
        return self.head(x, batch.labels).sum()

    def hidden_states(
        self, x: Tensor, batch: Batch | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the output of this stage's last block, and with --vocab-pp of the final norm."""
        places = None if batch is None else batch.positions
        if cache is not None:
            places = cache.positions
        if self.embedding is not None:
            x = self.embedding(x, places)
        if self.positions is not None:
            mask = self.positions.mask(batch)
            rotary = self.positions.rotary(places)
            y = None
            for block in self.blocks:
                x, y = block(x, y, mask, rotary, cache)
            x = x if y is None else x + y
        return x if self.output_norm is None else self.output_norm(x)


def _check_count(stage: Stage, shared: list[nn.Parameter]) -> None:
    """Raise ValueError unless the stage has the number of parameters that was planned for it.

    Memory plans and FLOPs come from the planned numbers: they would be wrong without an error.
    shared: parameters of this stage that count on another stage.
    """
    spec = stage.spec
    built = 0
    spread = list(stage.vocabulary.parameters()) if stage.vocabulary else []
    for p in filter(lambda p: p.requires_grad, stage.parameters()):
        whole = math.prod(p.spec.shape) if all(p is not q for q in shared) else 0
        built += spec.vocabulary * p.shape[1] if any(p is q for q in spread) else whole
    if built != spec.parameters:
        planned = f"{spec.parameters} were planned"
        raise ValueError(f"stage {spec.index} built {built} parameters, but {planned}")
