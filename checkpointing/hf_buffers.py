"""Tensors of a transformers folder that become no parameter: each is looked at before it is left.

    check_buffers(source, slices, model)                   of tensors whose names are is_buffer's
    difference = largest_difference(embedding, head)       of a tied model: 0.0 if they are equal

Older versions of transformers saved buffers beside the weights: causal masks (GPT-2, GPT-NeoX and
so Pythia), the score of a masked token, and rotary frequencies. They follow from config.json, here
and in transformers 5, which reads none of them. A buffer that has another value than that says that
the weights were trained as another model than config.json describes: such a folder is refused.

`slices` are the tensors of safetensors by name (get_dtype, get_shape; they read when indexed).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from architecture.shape import ModelShape
from base.errors import CheckpointError
from layers.rotary import rotary_frequencies

# A score at most as large as this has no share in a softmax beside scores of ordinary size. GPT-2
# has -1e4 and GPT-NeoX -1e9, which are -9984 in bf16 and -inf in fp16.
MASKED_SCORE = -1000.0
# Rounding of frequencies that were saved in bf16, relative, and in fp16 below its normal numbers.
FREQUENCY_ERROR = 2.0**-8, 2.0**-24
# Rows of a matrix that are compared at once.
ROWS_AT_ONCE = 2**13


def is_buffer(name: str) -> bool:
    """Return whether a tensor's name is that of a buffer, which `check_buffers` can check."""
    return _check_by_name(name) is not None


def check_buffers(source: str, slices: dict[str, Any], model: ModelShape) -> None:
    """Raise UserError unless each of these buffers has the value that the model gives it.

    source: the folder. slices: the tensors that no parameter is made of.
    """
    for name in sorted(slices):
        check = _check_by_name(name)
        if check and (problem := check(slices[name][...].float(), model)):
            raise CheckpointError(
                f"{source}: {name} {problem}: the weights belong to another model than config.json "
                "describes, or this tensor is wrong and may be deleted"
            )


def _check_by_name(name: str) -> Callable[[Tensor, ModelShape], str] | None:
    """Return the check of the buffer with this name; None if the name is that of no buffer.

    The check returns what is wrong with a tensor, or an empty text.
    """
    checks = {
        ("attn.bias", "attention.bias"): _problem_of_mask,
        ("attn.masked_bias", "attention.masked_bias"): _problem_of_masked_score,
        ("rotary_emb.inv_freq",): _problem_of_frequencies,
    }
    ends = ((end, check) for names, check in checks.items() for end in names)
    return next((check for end, check in ends if ("." + name).endswith("." + end)), None)


def _problem_of_mask(mask: Tensor, model: ModelShape) -> str:
    """Check a causal mask, (1, 1, n, n) or (n, n): 1 or true where a token, a row, sees another."""
    n = math.isqrt(mask.numel())
    if [size for size in mask.shape if size > 1] != [n, n] * (n > 1):
        return f"has the shape {tuple(mask.shape)}, and is no mask of (1, 1, n, n)"
    wrong = int((mask.reshape(n, n) != torch.ones(n, n).tril()).sum())
    return f"differs from the causal mask in {wrong:,} of {mask.numel():,} values" if wrong else ""


def _problem_of_masked_score(score: Tensor, model: ModelShape) -> str:
    """Check the score that stands for those of masked tokens: a single number."""
    if score.numel() != 1:
        return f"has the shape {tuple(score.shape)}, and is no single score of masked tokens"
    value = float(score)
    if value <= MASKED_SCORE:
        return ""
    return f"is {value:g}, and a masked token's score is {MASKED_SCORE:g} or less"


def _problem_of_frequencies(saved: Tensor, model: ModelShape) -> str:
    """Check rotary frequencies, (r/2,), as of the base or as of the scaling of some block."""
    if model.positions != "rotary":
        return f"are rotary frequencies, and the positions are {model.positions}"
    closest = ""
    for ours in _frequencies(model):
        if saved.shape != ours.shape:
            return f"has the shape {tuple(saved.shape)}, and {tuple(ours.shape)} is that of r/2"
        relative, absolute = FREQUENCY_ERROR
        wrong = ~((saved.double() - ours).abs() <= relative * ours + absolute)
        if not wrong.any():
            return ""
        at = int(wrong.nonzero()[0])
        theirs, here = float(saved[at]), float(ours[at])
        closest = closest or f"has {theirs:g} as frequency {at}, and rope_theta gives {here:g}"
    return closest


def _frequencies(model: ModelShape) -> list[Tensor]:
    """Return the rotary frequencies of a model's blocks: the plain ones first, then scaled ones.

    Versions differ in whether the buffer has the scaling. Those of longrope depend on the length.
    """
    plain, scaled = [], []
    for block in dict.fromkeys(map(model.attention_of, range(model.layers))):
        unscaled = dataclasses.replace(block, rotary_scaling="none")
        plain.append(rotary_frequencies(model, unscaled, 1)[0])
        lengths = (1, model.seq_length)
        scaled += [rotary_frequencies(model, block, length)[0] for length in lengths]
    return plain + scaled


def largest_difference(one: Any, other: Any) -> float:
    """Return the largest difference between the elements of two matrices, (rows, columns).

    one, other: slices of the same shape, which may be of different types. Rows are read in parts,
    so that neither matrix is in memory. A NaN in either is an infinite difference.
    """
    largest = 0.0
    rows, _ = one.get_shape()
    for start in range(0, rows, ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        difference = (one[part].double() - other[part].double()).abs()
        largest = max(largest, float(difference.nan_to_num(nan=torch.inf).max()))
    return largest
