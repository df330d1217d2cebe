"""The GPT: embedding, blocks, head and loss. A pipeline stage (`Stage`) is a slice of the model.

    [embedding] block* [final norm + head + loss]        a stage may lack any of the three parts

Shapes at line ends: s sequence, b samples, h hidden, a heads of size d, g key/value heads,
f MLP width, V vocabulary; with tensor parallelism a, g and f are the local a/tp, g/tp, f/tp.
Weights are drawn as in GPT-2: from a normal distribution, whose standard deviation is smaller by
sqrt(2 L), for L blocks, in the two matrices of a block that write into the residual stream. With
--mup, architecture/mup.py says how deviations and rates depend on the width and the depth.
A ParamFactory makes the parameters, which are split over tp, and has the settings of all layers.
Read parallel.py first; attention is in layers/attention.py and layers/latent_attention.py, the loss
in layers/loss.py.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architecture.block_attention import BlockAttention
from architecture.shape import ModelShape
from base.errors import ProgramError
from config.schema import Layout
from data import Batch
from distributed.collectives import reduce_from_tp
from layers import mixers
from layers.attention import Attention, KeyValueCache, Positions, rms_norm_plus_one
from layers.experts import ExpertMLP
from layers.latent_attention import LatentAttention, WholeLinear
from layers.loss import cross_entropy, token_scores
from parallel import (
    ColumnLinear,
    Matrices,
    ParamFactory,
    RowLinear,
    column_linear,
    exact_dtype,
    recompute,
)
from schedules.partition import StageSpec

if TYPE_CHECKING:
    from layers.local_attention import LocalPositions


class Norm(nn.Module):
    """LayerNorm or RMSNorm over h; every tensor rank holds the whole scale (and shift)."""

    def __init__(self, factory: ParamFactory, name: str, model: ModelShape):
        """Make a norm's scale, and a LayerNorm's shift; name: the beginning of their names."""
        super().__init__()
        self.eps = model.norm_eps
        fill = 0.0 if model.norm_plus_one else 1.0
        self.weight = factory.parameter(f"{name}.weight", (model.hidden,), fill=fill)
        has_shift = model.norm == "layernorm" and model.norm_bias
        self.bias = factory.parameter(f"{name}.bias", (model.hidden,)) if has_shift else None
        with_sum: Callable = _add_and_normalise
        alone: Callable = _normalise
        if model.norm_plus_one:
            with_sum = _add_and_normalise_plus_one
            alone = _normalise_plus_one
        if model.norm == "layernorm" and not has_shift:
            with_sum = _add_and_normalise_without_shift
            alone = _normalise_without_shift
        self._normalise = factory.compile_for_training(alone)
        self._add_and_normalise = factory.compile_for_training(with_sum)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x, (s, b, h)."""
        return self._normalise(x, self.weight, self.bias, self.eps)

    def add_and_normalise(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + y and the norm of this sum, (s, b, h) each; y may be None for 0."""
        if y is None:
            return x, self(x)
        return self._add_and_normalise(x, y, self.weight, self.bias, self.eps)


def _normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the RMSNorm of x over h if bias is None, else the LayerNorm."""
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _add_and_normalise(x: Tensor, y: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
    """Return x + y and its norm; norm: the weight, bias and eps that `_normalise` takes."""
    x = x + y
    return x, _normalise(x, *norm)


def _normalise_plus_one(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    """Return the RMSNorm of x over h whose scale is 1 + weight, as Gemma has it.

    It is computed in fp32 at least, because 1 + weight in bf16 would lose most of the weight.
    """
    return rms_norm_plus_one(x, weight, eps)


def _add_and_normalise_plus_one(x: Tensor, y: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
    """Return x + y and its norm; norm: the weight, None and eps."""
    x = x + y
    return x, _normalise_plus_one(x, *norm)


def _normalise_without_shift(x: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    """Return the LayerNorm of x over h with a scale alone, as Cohere has it."""
    return F.layer_norm(x, weight.shape, weight, None, eps)


def _add_and_normalise_without_shift(x: Tensor, y: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
    """Return x + y and its norm; norm: the weight, None and eps."""
    x = x + y
    return x, _normalise_without_shift(x, *norm)


class MLP(nn.Module):
    """h -> f -> h with an activation; if it has a gate, gate and up are one matrix (2, f, h)."""

    def __init__(
        self, factory: ParamFactory, name: str, model: ModelShape, std: float, width: int = 0
    ):
        """Make an MLP's two matrices. std: for the second. width: f; 0: the model's ffn_hidden."""
        super().__init__()
        f = width or model.ffn_hidden
        shape: tuple[int, ...] = (f,)
        matrices = Matrices()
        self.activation = activation_of(model)
        if model.up_matrices == 2:
            shape = (2, f)
            matrices = Matrices(each=(0,))  # gate and up
            # Those without a gate are not compiled: each is a single kernel of torch.
            self.activation = factory.compile_for_training(self.activation)
        split_dim = len(shape) - 1  # the dimension f, which is split over tp
        self.up = ColumnLinear(
            factory, f"{name}.up", model.hidden, shape, split_dim, model.bias, matrices
        )
        self.down = RowLinear(factory, f"{name}.down", f, model.hidden, std, model.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output for x: (s, b, h), or (s/tp, b, h) with sequence parallelism."""
        return self.down(self.activation(self.up(x)))


def _swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up, (s, b, f), for gate and up side by side in x, (s, b, 2 f)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _geglu(x: Tensor) -> Tensor:
    """Return gelu(gate) * up, (s, b, f), with gelu by tanh, for x as in `_swiglu`."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def _relu2(x: Tensor) -> Tensor:
    """Return the square of ReLU (arXiv 2109.08668), as Nemotron has it."""
    return F.relu(x).square()


@functools.cache
def _clamped_swiglu(alpha: float, limit: float) -> Callable[[Tensor], Tensor]:
    """Return the activation of gpt-oss: gate * sigmoid(alpha gate) * (up + 1).

    The gate is at most `limit`, and up is between -limit and limit.
    """

    def activation(x: Tensor) -> Tensor:
        """Return the activation, (s, b, f), for gate and up side by side in x, (s, b, 2 f)."""
        gate, up = x.chunk(2, -1)
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)

    return activation


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
    "swiglu": _swiglu,
    "geglu": _geglu,
}


def activation_of(model: ModelShape) -> Callable[[Tensor], Tensor]:
    """Return the function between the two matrices of the model's MLPs."""
    if model.activation == "clamped_swiglu":
        return _clamped_swiglu(model.swiglu_alpha, model.swiglu_limit)
    if (factor := model.multiplier("gate")) != 1.0:
        return _with_scaled_gate(model.activation, factor)
    return ACTIVATIONS[model.activation]


@functools.cache
def _with_scaled_gate(name: str, factor: float) -> Callable[[Tensor], Tensor]:
    """Return an activation whose gate is multiplied first, as Falcon-H1's."""

    def activation(x: Tensor) -> Tensor:
        """Return the activation, (s, b, f), for gate and up side by side in x, (s, b, 2 f)."""
        gate, up = x.chunk(2, -1)
        return ACTIVATIONS[name](torch.cat([gate * factor, up], -1))

    return activation


def _expert_mlp(factory: ParamFactory, name: str, model: ModelShape, std: float) -> nn.Module:
    """Return a block's experts with their router, which are in the place of an MLP."""
    shared_mlp = None
    if model.shared_ffn_hidden:
        shared_mlp = MLP(factory, f"{name}.shared", model, std, width=model.shared_ffn_hidden)
    return ExpertMLP(factory, name, model, std, activation_of(model), shared_mlp)


def _mixer(name: str, model: ModelShape, index: int) -> Callable[..., nn.Module]:
    """Return what makes a mixer of block number `index`, which is attention in most models."""
    if name != "attention":
        return mixers.CLASSES[name]
    if model.is_latent:
        return LatentAttention
    return functools.partial(Attention, block=model.attention_of(index))


def times(x: Tensor, multiplier: float) -> Tensor:
    """Return x times a number, and x itself for 1."""
    return x if multiplier == 1.0 else x * multiplier


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); layers/mixers.py has what may be in the place
    of attention, or beside it. With hybrid_pattern a block is one of these two parts.

    With --block post-norm: x + norm(attention(x)), then x + norm(MLP(x)). With --block parallel:
    x + attention(norm(x)) + MLP(norm(x)), where each norm has weights of its own; with --block
    shared-norm they are one. With --block sandwich: x + norm(attention(norm(x))), then
    x + norm(MLP(norm(x))).
    """

    def __init__(self, factory: ParamFactory, index: int, model: ModelShape, recompute: str):
        """Make block number `index` of the model. recompute: this block's value of --recompute."""
        super().__init__()
        name = f"blocks.{index}"
        # Of the output matrices of attention and MLP; with muP for depth as at the base.
        std = factory.std / math.sqrt(2 * (model.mup_base_layers or model.layers))
        self.mixer_names = model.mixers_of(index)  # attention, the mixer in its place, or both
        if self.mixer_names:
            self.attention_norm = Norm(factory, f"{name}.attention_norm", model)
        for mixer_name in self.mixer_names:
            make_mixer = _mixer(mixer_name, model, index)
            is_again = recompute == "selective"
            mixer = make_mixer(factory, f"{name}.{mixer_name}", model, std, is_again)
            self.add_module(mixer_name, mixer)
        self.multipliers = [
            model.multiplier("attention" if name == "attention" else "mixer")
            for name in self.mixer_names
        ]
        self.has_mlp = model.has_mlp(index)
        self.mlp_multiplier = model.multiplier("mlp")
        self.kind = model.block_of(index)  # --block: where the norms are
        self.is_sandwich = self.kind == "sandwich"
        if self.is_sandwich:  # norms of the outputs too
            self.attention_post_norm = Norm(factory, f"{name}.attention_post_norm", model)
            self.mlp_post_norm = Norm(factory, f"{name}.mlp_post_norm", model)
        self.has_experts = model.has_experts(index)
        if self.has_mlp and self.kind != "shared-norm":
            self.mlp_norm = Norm(factory, f"{name}.mlp_norm", model)
        if self.has_mlp:
            make_mlp = _expert_mlp if self.has_experts else MLP
            self.mlp = make_mlp(factory, f"{name}.mlp", model, std)
        self.recompute = recompute == "full"  # the backward pass runs the whole block again
        self.multiplier = model.residual_multiplier

    def mixers(self) -> list[tuple[str, nn.Module]]:
        """Return what mixes the tokens, by name: the module `attention` in most models."""
        return [(name, self.get_submodule(name)) for name in self.mixer_names]

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        mask: Any,
        rotary: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return two tensors whose sum is the block's output: (s, b, h), or (s/tp, b, h) with
        sequence parallelism. One kernel of --compile does this sum and the next block's first norm.

        x, y: the two tensors of the block before; y is None in a stage's first block. mask: see
        Attention. rotary: tables that turn q and k. cache: earlier keys and values, for decoding.
        tokens: this rank's tokens of the micro-batch, (b, s); of a stage that is not the first only
        if a layer of it has the attribute `reads_tokens`, else None.
        """
        # The router writes its choice of experts into this list, and reads it if the pass is
        # recomputed, so that recomputation cannot change the choice.
        chosen_experts: list[Tensor] = []
        if self.recompute and torch.is_grad_enabled():
            x = x if y is None else x + y  # one tensor is kept for the backward pass, and not two
            return recompute(self._run, x, None, mask, rotary, cache, tokens, chosen_experts)
        return self._run(x, y, mask, rotary, cache, tokens, chosen_experts)

    def _run(
        self,
        x: Tensor,
        y: Tensor | None,
        mask: Any,
        rotary: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None,
        tokens: Tensor | None,
        chosen_experts: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Run the block in the form of --block; return two tensors whose sum is its output."""
        mix = functools.partial(self._mix, mask=mask, rotary=rotary, cache=cache, tokens=tokens)
        scaled = self._scaled
        if not self.has_mlp:  # a block of attention or a mixer alone
            x, normed = self.attention_norm.add_and_normalise(x, y)
            return x, scaled(mix(normed))
        mlp = functools.partial(self._mlp, chosen_experts=chosen_experts)
        if not self.mixer_names:  # a block of an MLP alone
            x, normed = self.mlp_norm.add_and_normalise(x, y)
            return x, scaled(mlp(normed))
        if self.kind == "post-norm":  # norms after attention and MLP; the others: before
            x = x if y is None else x + y
            x = x + scaled(self.attention_norm(mix(x)))
            return x, scaled(self.mlp_norm(mlp(x)))
        x, normed = self.attention_norm.add_and_normalise(x, y)
        y = mix(normed)
        if self.is_sandwich:
            y = scaled(self.attention_post_norm(y))
            x, normed = self.mlp_norm.add_and_normalise(x, y)
            return x, scaled(self.mlp_post_norm(mlp(normed)))
        y = scaled(y)
        if self.kind == "shared-norm":
            return x + y, scaled(mlp(normed))
        if self.kind == "parallel":  # attention and MLP take the same x
            return x + y, scaled(mlp(self.mlp_norm(x)))
        x, normed = self.mlp_norm.add_and_normalise(x, y)
        return x, scaled(mlp(normed))

    def _mix(self, x: Tensor, mask: Any, rotary: Any, cache: Any, tokens: Any) -> Tensor:
        """Return the sum of the results of attention and mixer for x; the rest: see `forward`.

        mask: of two that stand side by side, those of both.
        """
        masks = mask if len(self.mixer_names) > 1 else (mask,)
        results = [
            times(mixer(x, mask, rotary, cache, tokens), factor)
            for (_, mixer), mask, factor in zip(self.mixers(), masks, self.multipliers, strict=True)
        ]
        return results[0] if len(results) == 1 else results[0] + results[1]

    def _mlp(self, x: Tensor, chosen_experts: list[Tensor]) -> Tensor:
        """Return the result of the MLP or the experts for x; chosen_experts: see `forward`."""
        y = self.mlp(x, chosen_experts=chosen_experts) if self.has_experts else self.mlp(x)
        return times(y, self.mlp_multiplier)

    def _scaled(self, y: Tensor) -> Tensor:
        """Return what is added to the residual stream for a result of attention or MLP."""
        return times(y, self.multiplier)


TOKENS = "embedding.tokens.weight"  # the name of the embedding's matrix in a checkpoint


class VocabEmbedding(nn.Module):
    """The tokens' embedding matrix, with its rows split over tp.

    The last rank's rows may end in padding, which no token selects.
    """

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        vocab: int,
        padded: int,
        hidden: int,
        tied: bool,
        copy: bool = False,
        weight: nn.Parameter | None = None,
    ):
        """Make this rank's part of `padded` rows. weight: a matrix to take in place of a new one.

        tied, copy: see ParamSpec.
        """
        super().__init__()
        self.factory = factory
        self.group = factory.mesh.tp
        shape = (vocab, hidden)  # without the rows of padding
        self.weight: nn.Parameter
        if weight is not None:
            self.weight = weight
            return
        self.weight = factory.parameter(
            name,
            shape,
            std=factory.std,
            dim=0,
            padded=padded,
            decay=True,
            tied=tied,
            copy=copy,
            role="input",
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens (b, s): (s, b, h), or its part (s/tp, b, h)."""
        tokens = tokens.t()
        # A sparse gradient adds the tokens' rows to the weight's gradient buffer in place. A dense
        # gradient would be a temporary tensor of the whole matrix in each micro-batch.
        buffer = getattr(self.weight, "main_grad", None)
        sparse = buffer is not None and buffer.is_cpu and buffer.dtype == self.weight.dtype
        if self.group.size == 1:
            return F.embedding(tokens, self.weight, sparse=sparse)
        rows_here = self.weight.shape[0]
        row = tokens - self.group.rank * rows_here  # the tokens' rows in this rank's part
        absent = (row < 0) | (row >= rows_here)  # tokens whose rows other ranks hold
        embeddings = F.embedding(row.masked_fill(absent, 0), self.weight, sparse=sparse)
        embeddings = embeddings.masked_fill(absent[..., None], 0.0)
        return reduce_from_tp(embeddings, self.factory.mesh.tp, self.factory.sequence_parallel)


class Embedding(nn.Module):
    """Token and position embedding: (b, s) -> (s, b, h); (s/tp, b, h) with sequence parallelism."""

    def __init__(self, factory: ParamFactory, model: ModelShape, padded: int, tied: bool):
        """Make the embeddings. padded: the token matrix's rows. tied: another rank has a copy."""
        super().__init__()
        self.sequence_group = factory.mesh.tp if factory.sequence_parallel else None  # divides s
        self.cp = factory.mesh.cp
        h = model.hidden
        self.tokens = VocabEmbedding(factory, TOKENS, model.vocab_size, padded, h, tied=tied)
        self.positions = None
        if model.positions == "learned":
            name = "embedding.positions.weight"
            shape = (model.max_positions, h)
            self.positions = factory.parameter(
                name, shape, std=factory.std, decay=True, role="input"
            )
        self.norm = Norm(factory, "embedding.norm", model) if model.embedding_norm else None
        self.multiplier = model.embedding_multiplier
        self.scale: Tensor | None = None  # in the precision of the weights, as Gemma's
        if model.embedding_scaled:
            self.scale = torch.tensor(h**0.5, dtype=factory.dtype, device=factory.device)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the embeddings of tokens (b, s).

        positions: the tokens' positions, (b, s). None: they count from 0 in each sample.
        """
        x = self.tokens(tokens)
        if self.scale is not None:
            x = x * self.scale
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.positions is not None:
            if positions is None:
                tp_size = self.sequence_group.size if self.sequence_group else 1
                length = len(x) * self.cp.size * tp_size  # tokens of a whole sample
                rows = self.cp.balanced_shard(self.positions[:length, None], 0)  # of this cp rank
                x = x + self._shard_sequence(rows)
            else:
                x = x + F.embedding(self._shard_sequence(positions.t()), self.positions)
        return x if self.norm is None else self.norm(x)

    def _shard_sequence(self, rows: Tensor) -> Tensor:
        """Return this tensor rank's tokens of `rows` (s, ...); all without sequence parallelism."""
        return self.sequence_group.shard(rows) if self.sequence_group else rows


class Head(nn.Module):
    """Final norm, output matrix and loss: (s, b, h), labels (b, s) -> loss of each token, (s, b).

    A tied head uses the embedding's token matrix. If both are on one rank, they share one tensor.
    Otherwise the head has a copy, which stays equal because the gradients of both are summed.
    """

    def __init__(
        self,
        factory: ParamFactory,
        model: ModelShape,
        padded: int,
        embedding: Embedding | None,
    ):
        """Make final norm and output matrix (`padded` rows). embedding: this rank's, if any."""
        super().__init__()
        self.factory = factory
        # Whether the embedding uses this matrix too, or the head itself several times.
        self.shared = model.mtp_depth > 0
        self.softcap = model.logit_softcap  # 0: none
        self.divisor = model.logit_divisor
        self.norm = Norm(factory, "head.norm", model)
        self.weight: nn.Parameter
        if model.tied and embedding is not None:
            self.shared = True
            self.weight = embedding.tokens.weight
        else:  # if tied, a copy of the first stage's matrix: both copies get both gradients
            tied = model.tied
            shape = (model.vocab_size, model.hidden)
            name = TOKENS if tied else "head.weight"
            self.weight = factory.parameter(
                name,
                shape,
                std=factory.std,
                dim=0,
                padded=padded,
                decay=True,
                tied=tied,
                copy=tied,
                role="input" if tied else "head",
            )
        self.spec = self.weight.spec

    def logits(self, x: Tensor) -> Tensor:
        """Return this rank's columns of the logits for x (s, b, h), with padding: (s, b, V/tp)."""
        return self.logits_of_normed(self.norm(x))

    def logits_of_normed(self, normed: Tensor) -> Tensor:
        """Return this rank's columns of the logits for normalised x (s, b, h): (s, b, V/tp)."""
        logits = column_linear(normed, self.weight, None, self.factory, self.shared)
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if not self.softcap:
            return logits
        # The loss overwrites the last product's result, which no backward pass reads.
        return (logits / self.softcap).tanh() * self.softcap

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token, (s, b), for x (s, b, h) and labels (b, s).

        In training with --z-loss the result has the z-loss of each token too: (2, s, b).
        """
        z_loss = self.factory.training.z_loss if torch.is_grad_enabled() else 0.0
        return self.losses(self.norm(x), labels, z_loss)

    def losses(self, normed: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
        """Return what `forward` does for normalised x (s, b, h). z_loss: the coefficient."""
        factory = self.factory
        logits = self.logits_of_normed(normed)
        tp = factory.mesh.tp
        return cross_entropy(logits, labels.t(), tp, self.spec, factory.compile, z_loss)

    def scores(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return each token's loss, and 1 if its label is the likeliest token, else 0: (2, s, b).

        x: (s, b, h). labels: (b, s).
        """
        factory = self.factory
        logits = self.logits(x)
        return token_scores(logits, labels.t(), factory.mesh.tp, self.spec, factory.compile)


class TokenPredictor(nn.Module):
    """A module of multi-token prediction: predicts a token beyond the next one, from that token.

        x_k = W [norm(embedding of token i + k) ; norm(h_(k-1))],  h_k = norm(block(x_k))

    h_0 is the main model's output after its final norm; the head's matrix makes logits of token
    i + k + 1 of h_k (DeepSeek-V3, arXiv 2412.19437, section 2.2, with W's columns in the order of
    its files). Embedding and head are the main model's. W is whole on every tensor rank. Only
    training runs these modules.
    """

    def __init__(self, factory: ParamFactory, depth: int, model: ModelShape, recompute: str):
        """Make module number `depth`, from 1 on. recompute: its block's value of --recompute.

        Its parameters have the number of a block after the model's, as in DeepSeek's files.
        """
        super().__init__()
        index = model.layers + depth - 1
        name = f"blocks.{index}.mtp"
        self.embedding_norm = Norm(factory, f"{name}.embedding_norm", model)
        self.hidden_norm = Norm(factory, f"{name}.hidden_norm", model)
        self.join = WholeLinear(factory, f"{name}.join", 2 * model.hidden, model.hidden, Matrices())
        self.block = Block(factory, index, model, recompute)
        self.norm = Norm(factory, f"{name}.norm", model)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        mask: Any,
        rotary: tuple[Tensor, Tensor] | None,
        tokens: Tensor,
    ) -> Tensor:
        """Return h_k, (s, b, h) or (s/tp, b, h) with sequence parallelism, as are hidden, h_(k-1),
        and `embedded`, the embeddings of the tokens k later. mask, rotary, tokens: see Block.
        """
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        x, y = self.block(self.join(both), None, mask, rotary, None, tokens)
        return self.norm(x + y)


def _positions(
    factory: ParamFactory,
    model: ModelShape,
    numbers: list[int],
    with_attention: list[BlockAttention],
    micro_batch: int,
    masked: bool,
) -> "Positions | LocalPositions | mixers.MixerInputs":
    """Return the masks and rotary tables of a stage's blocks, for samples of model.seq_length.

    numbers: of the blocks. with_attention: the attention of those that have it.
    """
    positions = None
    if with_attention:
        positions = _attention_positions(factory, model, with_attention, micro_batch, masked)
    kinds = [model.mixers_of(number) for number in numbers]
    if positions is not None and set(kinds) == {("attention",)}:
        return positions
    return mixers.MixerInputs(factory, positions, kinds)


def _attention_positions(
    factory: ParamFactory,
    model: ModelShape,
    blocks: list[BlockAttention],
    micro_batch: int,
    masked: bool,
) -> "Positions | LocalPositions":
    """Return the masks and rotary tables of a stage's blocks, which all have attention."""
    positions = Positions(factory, model, micro_batch, masked, blocks[0])
    if blocks[0].is_plain and all(block == blocks[0] for block in blocks):
        return positions
    from layers.local_attention import LocalPositions  # imported here: only if blocks differ

    return LocalPositions(factory, model, micro_batch, positions, blocks)


class Stage(nn.Module):
    """The slice of the model that one pipeline stage holds; `spec` says which."""

    def __init__(
        self,
        factory: ParamFactory,
        model: ModelShape,
        layout: Layout,
        spec: StageSpec,
        first: "Stage | None" = None,
        masked: bool = False,
    ):
        """Make the parts that `spec` names. first: the pipeline's first stage, if this rank holds
        it beside this stage. masked: whether each batch says which tokens each token sees.

        The parameters are those that its layers make: they may be others than the options describe
        (architecture/tensors.py). Raise UserError if one of them cannot be split, saved or updated.
        """
        super().__init__()
        padded = model.padded_vocab(layout)
        self.spec = spec
        self.factory = factory
        self.layers = model.layers
        self.embedding: Embedding | None = None
        if spec.embedding:
            self.embedding = Embedding(factory, model, padded, spec.tied)
        self.blocks = nn.ModuleList()
        self._add_blocks(factory, model, layout)
        self.head: Head | None = None
        if spec.head:
            embedding_stage = self if first is None else first  # has the matrix of a tied head
            self.head = Head(factory, model, padded, embedding_stage.embedding)
        if self.head is not None and first is not None and model.tied:
            self.head.weight.passes = 2  # the number of gradients in each micro-batch
        self.predictors = nn.ModuleList()
        if self.head is not None and model.mtp_depth:
            self._add_predictors(factory, model, layout, padded, first)
        self.positions: Positions | LocalPositions | mixers.MixerInputs | None = None
        if spec.blocks or self.predictors:
            # The blocks' attention is that of the longest samples, also for shorter ones.
            numbers = [n for n, _ in self.numbered_blocks()]
            with_attention = [
                model.attention_of(n) for n in numbers if "attention" in model.mixers_of(n)
            ]
            self._make_positions = functools.partial(
                _positions,
                factory,
                numbers=numbers,
                with_attention=with_attention,
                micro_batch=layout.micro_batch_size,
                masked=masked,
            )
            self._positions_of: dict[int, Any] = {}  # by seq_length
            self.set_length(model)
        self.reads_tokens = any(getattr(layer, "reads_tokens", False) for layer in self.modules())
        check_parameters(self)

    def set_length(self, model: ModelShape) -> None:
        """Take samples of the model's seq_length from now on: with masks and tables for them.

        model: the model of this stage, with another seq_length.
        """
        if not self.spec.blocks and not self.predictors:
            return
        if model.seq_length not in self._positions_of:
            self._positions_of[model.seq_length] = self._make_positions(model=model)
        self.positions = self._positions_of[model.seq_length]

    def _add_blocks(self, factory: ParamFactory, model: ModelShape, layout: Layout) -> None:
        """Make this stage's blocks; the layout says how many, from the first on, recompute."""
        recomputed_blocks = layout.recomputed_blocks(self.spec.blocks, self.spec.index)
        for n in range(self.spec.blocks):
            recomputation = layout.recompute if n < recomputed_blocks else "none"
            block = Block(factory, self.spec.first + n, model, recomputation)
            self.blocks.append(block)
            if factory.shard is not None:  # --zero 3: before the next block needs memory
                factory.shard(block)

    def _add_predictors(
        self,
        factory: ParamFactory,
        model: ModelShape,
        layout: Layout,
        padded: int,
        first: "Stage | None",
    ) -> None:
        """Make the modules of --mtp-depth and what embeds their tokens: the embedding's matrix, or
        a copy of it if another rank has the embedding.
        """
        for depth in range(1, model.mtp_depth + 1):
            predictor = TokenPredictor(factory, depth, model, layout.recompute)
            self.predictors.append(predictor)
            if factory.shard is not None:
                factory.shard(predictor)
        embedding = (self if first is None else first).embedding
        weight = None
        if embedding is not None:
            weight = embedding.tokens.weight
            if first is not None:
                weight.passes = 2  # the other stage's backward pass gives it a gradient too
        elif model.tied and self.head is not None:
            weight = self.head.weight
        size = model.vocab_size, padded, model.hidden
        self.next_tokens = VocabEmbedding(factory, TOKENS, *size, True, True, weight)

    def numbered_blocks(self) -> list[tuple[int, "Block"]]:
        """Return the stage's blocks with their numbers; those of predictors follow the model's."""
        found: list[Any] = list(enumerate(self.blocks, self.spec.first))
        found += [(n, module.block) for n, module in enumerate(self.predictors, self.layers)]
        return found

    def forward(
        self, x: Tensor, batch: Batch | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the stage's output for x: tokens (b, s) on the first stage, else activations.

        The output is activations, (s, b, h), or on the last stage the sum of the targets' losses;
        in training with --z-loss, (2,), that sum and the sum of their z-losses; and with
        --mtp-depth one number more, the sum of the predictors' losses times LossWeight.mtp.
        The last stage needs the batch, and with masks every stage does. With a cache (decoding), x
        belongs to the tokens after the cached tokens, and the last stage returns this rank's logits
        of the next token: (b, V/tp). If continuations are scored, it returns Head.scores.
        """
        x = self.hidden_states(x, batch, cache)
        if self.head is None:  # not the last stage
            return x
        if cache is not None:
            last_token = x[-1:]
            return self.head.logits(last_token)[0]
        if batch is None:  # without labels: the last block's output
            return x
        if batch.rows is not None:
            return self.head.scores(x, batch.labels)
        losses = self.head(x, batch.labels)
        if not self.predictors or not torch.is_grad_enabled():
            return losses.sum() if losses.dim() == 2 else losses.sum((1, 2))
        # After the head has run, whose hooks wait for its weights, and past the norm's own hooks,
        # which have seen it.
        normed = self.head.norm.forward(x)
        sums = losses.sum((-2, -1)).view(-1)
        return torch.cat([sums, self._later_losses(self.head, normed, batch).view(1)])

    def _later_losses(self, head: Head, hidden: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the predictors' losses, each times its factor of LossWeight.mtp.

        hidden: the main model's output after the final norm, (s, b, h).
        """
        total = hidden.new_zeros((), dtype=exact_dtype(hidden.dtype))
        kinds: Any = self.positions
        kinds = kinds.inputs_by_block(batch, None, len(self.blocks) + len(self.predictors))
        factors = self.factory.loss_weight.mtp
        modules = zip(self.predictors, kinds[len(self.blocks) :], factors, strict=True)
        for depth, (predictor, (mask, rotary), factor) in enumerate(modules, 1):
            tokens = batch.tokens_after(depth)
            hidden = predictor(hidden, self.next_tokens(tokens), mask, rotary, tokens)
            losses = head.losses(hidden, batch.labels_after(depth))
            total = total + factor * losses.sum()
        return total

    def hidden_states(
        self, x: Tensor, batch: Batch | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the last block's output, (s, b, h); the arguments are those of `forward`."""
        tokens = x if self.embedding is not None else None
        token_positions = None
        if batch is not None:
            tokens = batch.tokens
            token_positions = batch.positions
        elif cache is not None:
            tokens = cache.new_tokens if tokens is None else tokens
            token_positions = cache.positions
        if self.embedding is not None:
            x = self.embedding(x, token_positions)
        if self.positions is not None:
            count = len(self.blocks) + len(self.predictors)
            kinds = self.positions.inputs_by_block(batch, cache, count)[: len(self.blocks)]
            y = None  # a block's output is x + y: the next block adds them, in its first kernel
            for block, (mask, rotary) in zip(self.blocks, kinds, strict=True):
                x, y = block(x, y, mask, rotary, cache, tokens)
            x = x if y is None else x + y
        return x


def check_parameters(stage: nn.Module) -> None:
    """Raise UserError unless each tensor of a stage says which part of which global tensor it is.

    Else no rank could tell how its gradient is summed, and no checkpoint what it is.
    """
    # By the name of the global tensor and its rows on this rank, where the first one of it is.
    modules: dict[tuple[str, int, int], str] = {}
    for where, p in stage.named_parameters():
        spec = getattr(p, "spec", None)
        if spec is None:
            raise ProgramError(
                f"the parameter {where} says nothing of its name and its parts: make it with "
                "factory.parameter(name, shape, ...), or factory.constant if nothing trains it"
            )
        # Only a tensor whose rows are given for each rank may be several parameters.
        part = (spec.name, spec.start, spec.stop) if spec.rows is not None else (spec.name, 0, 0)
        if part in modules:
            raise ProgramError(
                f"two parameters are called {spec.name}: {modules[part]} and {where}"
            )
        modules[part] = where
    for where, _ in stage.named_buffers():
        raise ProgramError(
            f"{where} is a buffer, which no checkpoint keeps: make it with factory.constant, or "
            "keep it as a plain attribute if it can be computed again"
        )
