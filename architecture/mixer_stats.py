"""The tensors, parameters and FLOPs of a mixer in the place of attention, from the options alone.

    tensors(model)        by name: shape, whether tp divides it, whether a matrix product takes it
    parameters(model)     of one block's mixer
    core_flops(model)     forward FLOPs of a token between the two matrices

The mixers are layers/mixers.py. A model here is one whose blocks are alike, all with the mixer
(block_kinds.py makes it). p, r: columns of a head's key and value; g key heads, a value heads.
"""

import math
from typing import NamedTuple

from architecture.shape import ModelShape

CHUNK = 64  # tokens whose products are computed together; the work within a chunk grows with it


class MixerTensor(NamedTuple):
    """A parameter of a mixer. divided: whether tp divides it; if not, each tensor rank has it whole
    and its gradient is a sum over them. multiplies: whether it is the matrix of a matrix product.
    """

    shape: tuple[int, ...]
    divided: bool = True
    multiplies: bool = False


def tensors(model: ModelShape) -> dict[str, MixerTensor]:
    """Return a block's tensors of the mixer, by their names in the block's mixer."""
    h = model.hidden
    g, a = model.mixer_key_heads, model.mixer_value_heads
    p, r = model.mixer_key_size, model.mixer_value_size
    of_key_head = 2 * p + a // g * r  # q, k, and the values of its value heads
    found = {
        "in.weight": MixerTensor((g, of_key_head + a // g * (r + 2), h), multiplies=True),
        "conv": MixerTensor((g, of_key_head, model.mixer_kernel)),
        "a_log": MixerTensor((a,)),
        "dt_bias": MixerTensor((a,)),
        "norm.weight": MixerTensor((r,), divided=False),
        "out.weight": MixerTensor((h, a * r), multiplies=True),
    }
    if model.bias:
        found["out.bias"] = MixerTensor((h,), divided=False)
    return found


def matrices(model: ModelShape) -> list[tuple[int, int, bool]]:
    """Return (outputs, inputs, whether tp divides it) of each matrix; the last is the output's."""
    return [
        (math.prod(tensor.shape[:-1]), tensor.shape[-1], tensor.divided)
        for tensor in tensors(model).values()
        if tensor.multiplies
    ]


def parameters(model: ModelShape) -> int:
    """Parameters of a block's mixer."""
    return sum(math.prod(tensor.shape) for tensor in tensors(model).values())


def whole_parameters(model: ModelShape) -> int:
    """Of the parameters of a block's mixer, those that tp does not divide, without biases."""
    weights = {name: t for name, t in tensors(model).items() if not name.endswith("bias")}
    return sum(math.prod(t.shape) for t in weights.values() if not t.divided)


def core_flops(model: ModelShape) -> float:
    """Forward FLOPs of a token between the mixer's matrices, in layers/linear_recurrence.py.

    Within a chunk of C tokens k k^T and q k^T of each key head, the solution of a triangular system
    for p + r columns of each value head, and the scores times what is written; with the state a
    product of p r numbers to read what it holds, one to write and one for the result.
    """
    size = min(CHUNK, model.seq_length)
    g, a = model.mixer_key_heads, model.mixer_value_heads
    p, r = model.mixer_key_size, model.mixer_value_size
    of_value_head = size / 2 * (p + r) + size * r + 3 * p * r
    return 2.0 * (2 * size * g * p + a * of_value_head)


def state_numbers(model: ModelShape) -> int:
    """The numbers that decoding keeps of a text in a block's mixer, however long the text is."""
    channels = 2 * model.mixer_key_heads * model.mixer_key_size
    channels += model.mixer_value_heads * model.mixer_value_size
    state = model.mixer_value_heads * model.mixer_key_size * model.mixer_value_size
    return state + (model.mixer_kernel - 1) * channels
