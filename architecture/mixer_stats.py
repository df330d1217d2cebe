"""The tensors, parameters and FLOPs of a mixer in the place of attention, from the options alone.

    tensors(model)        by name: shape, whether tp divides it, whether a matrix product takes it
    parameters(model)     of one block's mixer
    core_flops(model)     forward FLOPs of a token between the two matrices

The mixers are layers/mixers.py. A model here is one whose blocks are alike, all with the mixer
(block_kinds.py makes it). p, r: columns of a head's key and value; g key heads, a value heads.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from architecture.shape import ModelShape

CHUNK = 64  # tokens whose products are computed together; the work within a chunk grows with it


class MixerTensor(NamedTuple):
    """A parameter of a mixer. divided: whether tp divides it; if not, each tensor rank has it
    whole. multiplies: whether it is the matrix of a matrix product.
    """

    shape: tuple[int, ...]
    divided: bool = True
    multiplies: bool = False


Tensors = dict[str, MixerTensor]


def tensors(model: ModelShape) -> Tensors:
    """Return a block's tensors of the mixer, by their names in the block's mixer."""
    h = model.hidden
    found = _TENSORS[model.mixer](model)
    width = h if model.mixer == "short_conv" else model.mixer_value_heads * model.mixer_value_size
    found["out.weight"] = MixerTensor((h, width), multiplies=True)
    if model.bias:
        found["out.bias"] = MixerTensor((h,), divided=False)
    return found


def _gated_delta_net(model: ModelShape) -> Tensors:
    """Return the tensors of layers/gated_delta_net.py, without those of the output."""
    g, a = model.mixer_key_heads, model.mixer_value_heads
    p, r = model.mixer_key_size, model.mixer_value_size
    of_key_head = 2 * p + a // g * r  # q, k, and the values of its value heads
    rows = of_key_head + a // g * (r + 2)
    return {
        "in.weight": MixerTensor((g, rows, model.hidden), multiplies=True),
        "conv": MixerTensor((g, of_key_head, model.mixer_kernel)),
        "a_log": MixerTensor((a,)),
        "dt_bias": MixerTensor((a,)),
        "norm.weight": MixerTensor((r,), divided=False),
    }


def _kda(model: ModelShape) -> Tensors:
    """Return the tensors of layers/kimi_delta_attention.py, without those of the output."""
    h, a = model.hidden, model.mixer_value_heads
    p, r = model.mixer_key_size, model.mixer_value_size
    return {
        "in.weight": MixerTensor((a, 2 * p + r + 1, h), multiplies=True),
        "low.weight": MixerTensor((p + r, h), divided=False, multiplies=True),
        "decay.weight": MixerTensor((a, p, p), multiplies=True),
        "gate.weight": MixerTensor((a, r, r), multiplies=True),
        "conv": MixerTensor((a, 2 * p + r, model.mixer_kernel)),
        "a_log": MixerTensor((a,)),
        "dt_bias": MixerTensor((a, p)),
        "norm.weight": MixerTensor((r,), divided=False),
    }


def _mamba2(model: ModelShape) -> Tensors:
    """Return the tensors of layers/mamba2.py, without those of the output.

    tp divides those of groups too if it can, which no model alone says.
    """
    h, g, a = model.hidden, model.mixer_key_heads, model.mixer_value_heads
    p, r = model.mixer_key_size, model.mixer_value_size
    found = {
        "in.weight": MixerTensor((a, 2 * r + 1, h), multiplies=True),
        "keys.weight": MixerTensor((g, 2 * p, h), multiplies=True),
        "conv": MixerTensor((a, r, model.mixer_kernel)),
        "conv_keys": MixerTensor((g, 2 * p, model.mixer_kernel)),
        "a_log": MixerTensor((a,)),
        "dt_bias": MixerTensor((a,)),
        "d": MixerTensor((a,)),
    }
    if model.mixer_norm:
        found["norm.weight"] = MixerTensor((a, r))
    if model.mixer_conv_bias:
        found |= {"conv_bias": MixerTensor((a, r)), "conv_keys_bias": MixerTensor((g, 2 * p))}
    return found


def _short_conv(model: ModelShape) -> Tensors:
    """Return the tensors of layers/short_conv.py, without those of the output."""
    h = model.hidden
    found = {
        "in.weight": MixerTensor((3, h, h), multiplies=True),
        "conv": MixerTensor((h, model.mixer_kernel)),
    }
    return found | ({"conv_bias": MixerTensor((h,))} if model.mixer_conv_bias else {})


_TENSORS: dict[str, Callable[[ModelShape], Tensors]] = {
    "gated_delta_net": _gated_delta_net,
    "kda": _kda,
    "mamba2": _mamba2,
    "short_conv": _short_conv,
}


def channels(model: ModelShape) -> int:
    """Return the channels of the mixer's convolution."""
    if model.mixer == "short_conv":
        return model.hidden
    return key_columns(model) + model.mixer_value_heads * model.mixer_value_size


def matrices(model: ModelShape) -> list[tuple[int, int, bool]]:
    """Return (outputs, inputs, whether tp divides it) of each matrix; the last is the output's."""
    return [
        (math.prod(tensor.shape[:-1]), tensor.shape[-1], tensor.divided)
        for tensor in tensors(model).values()
        if tensor.multiplies
    ]


def parameters(model: ModelShape) -> int:
    """Count the parameters of a block's mixer."""
    return sum(math.prod(tensor.shape) for tensor in tensors(model).values())


def whole_parameters(model: ModelShape) -> int:
    """Count the parameters of a mixer's norm in a block that tp does not divide."""
    scale = tensors(model).get("norm.weight")
    return 0 if scale is None or scale.divided else math.prod(scale.shape)


def key_parameters(model: ModelShape) -> int:
    """Count the parameters of a mixer's key heads in a block, which value heads share.

    Several tensor ranks have them if there are fewer key heads than ranks.
    """
    of_column = model.hidden + model.mixer_kernel
    of_column += model.mixer == "mamba2" and model.mixer_conv_bias
    return key_columns(model) * of_column


def key_columns(model: ModelShape) -> int:
    """Return the columns of queries and keys of all key heads: of b and c in Mamba-2."""
    has_keys = model.mixer not in ("attention", "short_conv")
    return has_keys * 2 * model.mixer_key_heads * model.mixer_key_size


def core_flops(model: ModelShape) -> float:
    """Count the forward FLOPs of a token between a mixer's matrices (layers/linear_recurrence.py).

    Within a chunk of C tokens q k^T and the scores times what is written, and with the state a
    product of p r numbers to write and one for the result. By the delta rule also k k^T, the
    solution of a triangular system for p + r columns, and a product to read what the state holds.
    """
    if model.mixer == "short_conv":
        return 0.0
    size = min(CHUNK, model.seq_length)
    g, a = model.mixer_key_heads, model.mixer_value_heads
    p, r = model.mixer_key_size, model.mixer_value_size
    products: float = size * g * p + a * (size * r + 2 * p * r)
    if model.mixer != "mamba2":
        products += size * g * p + a * (size / 2 * (p + r) + p * r)
    return 2.0 * products


def state_numbers(model: ModelShape) -> int:
    """Count the numbers that a block's mixer keeps in decoding, for a text of any length."""
    state = model.mixer_value_heads * model.mixer_key_size * model.mixer_value_size
    last = (model.mixer_kernel - 1) * channels(model)
    return last if model.mixer == "short_conv" else state + last
