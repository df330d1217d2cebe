"""Parameters and FLOPs of a model and of its parts.

The parts of a model are the embedding (tokens, positions, their norm), the blocks, and the head
(final norm, output matrix, loss).

Symbols: L layers, h hidden, s sequence length, V vocabulary, f MLP width, a heads of size d,
g key/value heads, B samples. A GEMM that makes n columns from h has h n parameters, and 2 h n FLOPs
for a token.

A model may have blocks with experts beside blocks with one MLP, or blocks with a window beside
blocks without, or blocks with another mixer in the place of attention (block_kinds.py). Numbers of
one block are then means over all blocks. A function with a name such as `_block_flops` takes a
model whose blocks are alike; `block_flops` takes any model.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from architecture import block_kinds, mixer_stats
from architecture.shape import ModelShape
from base.errors import UserError

# ---- Parameters ----------------------------------------------------------------------------------


def norm_parameters(model: ModelShape) -> int:
    """Count the parameters of one normalisation: a scale, and in most LayerNorms a shift."""
    return model.hidden * (2 if model.norm == "layernorm" and model.norm_bias else 1)


def block_norms(model: ModelShape) -> int:
    """Count the norms of a block over the hidden size: of attention and MLP, in sandwich twice.

    With shared-norm there is one, and a block of one part has one. A mixer beside attention reads
    the norm of attention (block_kinds.py).
    """
    if model.hybrid_pattern != "none":
        return 0 if model.mixer_beside else 1
    return {"sandwich": 4, "shared-norm": 1}.get(model.block, 2)


def attends(model: ModelShape) -> bool:
    """Return whether the blocks have attention, in a model whose blocks are alike."""
    return "attention" in model.mixers_of(0)


def mixes(model: ModelShape) -> bool:
    """Return whether the blocks have a mixer in the place of attention, if the blocks are alike."""
    return model.has_mixer(0)


def head_norm_parameters(model: ModelShape) -> int:
    """Count the parameters of qk_norm head in a block: scales (d,) of queries and of keys.

    All heads share them. With another qk_norm the result is 0.
    """
    return 2 * model.head_size if model.qk_norm == "head" else 0


def normed_width(model: ModelShape) -> int:
    """Count the columns of queries and keys, (a + g) d, that qk_norm normalises; 0 without it."""
    if not attends(model) or model.qk_norm == "none":
        return 0
    return (model.heads + model.kv_heads) * model.head_size


def mean_of_blocks(model: ModelShape, value: Callable[[ModelShape], Any]) -> Any:
    """Return the mean of a number over a model's blocks, such as the FLOPs of a block.

    value: a function that takes a model whose blocks are alike and returns a block's number.
    """
    if not model.has_kinds:
        return value(model)
    return block_kinds.mean(model, value)


def block_parameters(model: ModelShape) -> Any:
    """Count the parameters of one block; 12 h^2 + 13 h for a plain GPT."""
    return mean_of_blocks(model, _block_parameters)


def parameters_of_blocks(model: ModelShape, first: int, last: int) -> int:
    """Count the parameters of a model's blocks [first, last), such as those of a pipeline stage."""
    if model.experts == 1 and model.mixer == "attention":  # all blocks have as many
        return (last - first) * _block_parameters(model)
    return block_kinds.total(model, _block_parameters, first, last)


@lru_cache(maxsize=256)
def _block_parameters(model: ModelShape) -> int:
    """Count the parameters of one block of a model whose blocks are alike.

    The result is cached: a plan asks for it once for every stage of every layout.
    """
    h = model.hidden
    mlps, _ = model.mlps  # the number of experts, or 1
    router = (h + model.router_bias) * mlps if mlps > 1 else 0
    norms = block_norms(model) * norm_parameters(model)
    shared = shared_parameters(model)
    return _mixer_parameters(model) + mlps * mlp_parameters(model) + shared + router + norms


def _mixer_parameters(model: ModelShape) -> int:
    """Count the parameters of a block's attention or other mixer; 0 for an MLP alone."""
    if mixes(model):
        return mixer_stats.parameters(model)
    if not attends(model):
        return 0
    # The matrices of queries, keys and values and of the attention's output, and their biases.
    attention = mixer_weights(model)
    attention += model.qkv_width + model.gate_width if model.qkv_bias else 0
    attention += model.hidden if model.bias else 0
    # With qk_norm full each column of queries and keys has a scale.
    scales = normed_width(model) if model.qk_norm == "full" else head_norm_parameters(model)
    scales += model.q_lora_rank + model.kv_lora_rank  # of the latents' norms
    return attention + scales + (model.heads if model.sinks else 0)


def whole_scales(model: ModelShape) -> int:
    """Count the parameters of norms in a block's attention or mixer that tp does not divide."""
    if mixes(model):
        return mixer_stats.whole_parameters(model)
    if not attends(model):
        return 0
    return head_norm_parameters(model) + model.q_lora_rank + model.kv_lora_rank


def mixer_matrices(model: ModelShape) -> list[tuple[int, int, bool]]:
    """Return (outputs, inputs, whether tp divides it) of each matrix of a block's attention, or of
    the mixer in its place.

    The last one is the output's; an MLP alone has none. Latent attention has matrices from the
    hidden state to the latents, which every tensor rank has whole, and from the latents to the
    heads, which tp divides by heads (arXiv 2405.04434, section 2.1.2 and 2.1.3).
    """
    if mixes(model):
        return mixer_stats.matrices(model)
    if not attends(model):
        return []
    h = model.hidden
    out = (h, model.attention_width, True)
    if not model.is_latent:
        return [(model.qkv_width + model.gate_width, h, True), out]
    matrices = [(model.query_width, model.q_lora_rank or h, True)]
    if model.q_lora_rank:
        matrices.insert(0, (model.q_lora_rank, h, False))
    matrices.append((model.kv_lora_rank + model.qk_rope_head_dim, h, False))
    of_head = model.qk_nope_head_dim + model.v_head_dim  # a head's key and value, from the latent
    matrices.append((model.heads * of_head, model.kv_lora_rank, True))
    return [*matrices, out]


def mixer_weights(model: ModelShape) -> int:
    """Count the weights of the matrices of a block's attention or other mixer, without biases."""
    return sum(outputs * inputs for outputs, inputs, _ in mixer_matrices(model))


def whole_weights(model: ModelShape) -> int:
    """Count the parameters of a block's latent attention that every tensor rank has whole.

    They are the matrices that make the latents; without latent attention there are none.
    """
    return sum(outs * ins for outs, ins, divided in mixer_matrices(model) if not divided)


def key_value_width(model: ModelShape) -> int:
    """Count the columns of the keys and values of all key/value heads, which one matrix makes.

    0 with latent attention, whose heads tp divides, and of a mixer in the place of attention.
    """
    if model.mixer != "attention" or model.is_latent:
        return 0
    return 2 * model.kv_heads * model.head_size


def key_value_parameters(model: ModelShape) -> int:
    """Count the parameters of keys and values in a block's attention, which tp may repeat.

    With qk_norm full each column of the keys has a scale.
    """
    width = key_value_width(model)
    scales = width // 2 if model.qk_norm == "full" else 0
    return width * (model.hidden + model.qkv_bias) + scales


def mixer_key_parameters(model: ModelShape) -> int:
    """Count the parameters of a mixer's key heads in a block, which tensor ranks may share."""
    return mixer_stats.key_parameters(model) if mixes(model) else 0


def mlp_parameters(model: ModelShape) -> int:
    """Count the parameters of one MLP; in an MoE model it is one expert of a block."""
    up = model.up_width
    return model.hidden * (up + model.ffn_hidden) + (up + model.hidden if model.bias else 0)


def shared_parameters(model: ModelShape) -> int:
    """Count the parameters of the shared expert, which every token takes, and of its gate."""
    biases = 0
    if model.bias and model.shared_ffn_hidden:
        biases = model.up_matrices * model.shared_ffn_hidden + model.hidden
    return _shared_weights(model) + biases


def _shared_weights(model: ModelShape) -> int:
    """Count the weights, without biases, of the shared expert and of its gate."""
    matrices = model.up_matrices + 1  # up (and SwiGLU's gate), and down
    gate = model.hidden if model.shared_gate else 0
    return matrices * model.hidden * model.shared_ffn_hidden + gate


def embedding_parameters(model: ModelShape) -> int:
    """Count the parameters of the embedding: tokens without padding, learned positions, norm."""
    tokens = model.vocab_size * model.hidden
    positions = model.max_positions * model.hidden if model.positions == "learned" else 0
    return tokens + positions + (norm_parameters(model) if model.embedding_norm else 0)


def head_parameters(model: ModelShape) -> int:
    """Count the parameters of the head: the final norm, and the output matrix unless it is tied."""
    matrix = 0 if model.tied else model.vocab_size * model.hidden
    return norm_parameters(model) + matrix


def predictor_parameters(model: ModelShape) -> int:
    """Count the parameters of mtp_depth's modules: a block, three norms and a matrix each."""
    if not model.mtp_depth:
        return 0
    block = _block_parameters(block_kinds.predictor(model))
    return model.mtp_depth * (block + 3 * norm_parameters(model) + 2 * model.hidden**2)


def parameters(model: ModelShape) -> int:
    """Count the parameters of the whole model, each counted once, without vocabulary padding."""
    blocks = parameters_of_blocks(model, 0, model.layers) + predictor_parameters(model)
    return embedding_parameters(model) + blocks + head_parameters(model)


# ---- FLOPs ---------------------------------------------------------------------------------------

FORMULAS = ("megatron-2025", "megatron-2021", "bigscience")


def block_flops(model: ModelShape) -> float:
    """Count the forward FLOPs of a block for one token: GEMMs, and causal attention's half."""
    return mean_of_blocks(model, _block_flops)


def _block_flops(model: ModelShape) -> float:
    """Count the forward FLOPs of one block for one token, of a model whose blocks are alike.

    A multiplication and an addition are 2 FLOPs. A token uses each weight of a GEMM once, so the
    number of multiplications is the number of weights. `_shared_weights` are the weights of the
    MLP that every token of a model with experts takes.
    """
    mlp = model.up_width + model.ffn_hidden  # weights of an MLP's GEMMs over the hidden size
    mlps, active = model.mlps  # the number of experts, and of those that compute a token
    router = mlps if mlps > 1 else 0
    products = mixer_weights(model) + model.hidden * (active * mlp + router)
    return 2.0 * (products + shared_parameters(model)) + score_flops(model)


def score_flops(model: ModelShape) -> float:
    """Count the forward FLOPs of a block's q k^T and p v for one token: 2 s (a d) for a plain GPT.

    For each token that a token sees, q k^T has a multiplication for each column of the queries, and
    p v for each of the result. A multiplication and an addition are 2 FLOPs. A mixer in the place
    of attention has its products within chunks and with its state.
    """
    if mixes(model):
        return mixer_stats.core_flops(model)
    if not attends(model):
        return 0.0
    return 2.0 * seen_tokens(model) * (model.query_width + model.attention_width)


def seen_tokens(model: ModelShape) -> float:
    """Count the tokens that a token sees, the mean over a sample, if all blocks are alike.

    Causal attention sees half of the s tokens. With a window of w tokens the first w tokens of a
    sample see half of w, and all others see w: w - w^2 / 2s.
    """
    s = model.seq_length
    w = min(model.window or s, s)
    return w - w * w / (2 * s)


def head_flops(model: ModelShape) -> float:
    """Count the forward FLOPs of output matrix and multi-token prediction for one token."""
    return 2.0 * model.hidden * model.vocab_size + predictor_flops(model)


def predictor_flops(model: ModelShape) -> float:
    """Count the forward FLOPs of mtp_depth's modules for one token: matrix, block and output."""
    if not model.mtp_depth:
        return 0.0
    block = _block_flops(block_kinds.predictor(model))
    products = 2.0 * model.hidden * (2 * model.hidden + model.vocab_size)
    return model.mtp_depth * (block + products)


def forward_flops(model: ModelShape, formula: str = "megatron-2025") -> tuple[float, float]:
    """Count the forward FLOPs for one token of one block, and of the head, by a published formula.

    Published speeds in FLOP/s count FLOPs by one of these:

    * megatron-2025: every GEMM, the causal half of attention; as in Megatron-LM since core 0.12.
    * megatron-2021: equation 3 of arXiv 2104.04473, full attention, f = 4h and g = a assumed.
    * bigscience: 2 P with P = 12 h^2 + 13 h, no attention, no head.
    """
    h = model.hidden
    if formula == "megatron-2025":
        return block_flops(model), head_flops(model)
    if formula == "megatron-2021":
        return 24.0 * h**2 * (1 + model.seq_length / (6 * h)), head_flops(model)
    if formula == "bigscience":
        return 2.0 * (12 * h**2 + 13 * h), 0.0
    raise UserError(f"no FLOPs formula is called {formula!r}: take one of {', '.join(FORMULAS)}")


def model_flops(model: ModelShape, samples: int, formula: str = "megatron-2025") -> float:
    """Count the FLOPs that a step on `samples` samples needs: three times the forward FLOPs.

    The backward pass has twice the FLOPs of the forward pass: for each product one for the gradient
    of the input and one for the gradient of the weights. formula: see `forward_flops`.
    """
    block, head = forward_flops(model, formula)
    return 3.0 * samples * model.seq_length * (model.layers * block + head)


def hardware_flops(
    model: ModelShape,
    samples: int,
    recompute: str = "none",
    formula: str = "megatron-2025",
    blocks: int | None = None,
) -> float:
    """Count the FLOPs that a step on `samples` samples executes, recomputation included.

    recompute: `full` repeats a block's forward pass, `selective` only its q k^T and p v; the head
    is never recomputed. formula: see `forward_flops`. blocks: the number of recomputed blocks of
    the model, default: all.
    """
    block, _ = forward_flops(model, formula)
    # Selective recomputation repeats q k^T and p v.
    selective = mean_of_blocks(model, score_flops)
    repeated_by_mode = {"none": 0.0, "full": block, "selective": selective}  # per block and token
    blocks = model.layers if blocks is None else blocks
    repeated = samples * model.seq_length * blocks * repeated_by_mode[recompute]
    return model_flops(model, samples, formula) + repeated
