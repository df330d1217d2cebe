"""The tensors of mixers (layers/mixers.py) in the files of transformers, and back.

    to_ours, to_theirs = conversions("gated_delta_net", "in.weight", model, family)

Ours have a dimension for the heads, (heads, rows of a head, ...), so that tensor parallelism cuts
them by heads; theirs are flat. `rows` of a family says what the rows of their tensors are: "q k v"
are the rows q of all heads, then k of all, then v; "head: q k v" are q, k and v of the first head,
then those of the second. Their convolutions are (channels, 1, taps).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from architecture import mixer_stats
from architecture.families import Family
from architecture.shape import ModelShape

EACH_HEAD = "head:"


def conversions(
    mixer: str, tensor: str, model: ModelShape, family: Family
) -> tuple[Callable[..., Tensor], Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return the conversions (to ours, to theirs) of a tensor of a mixer, such as "in.weight"."""
    shape = mixer_stats.tensors(model)[tensor].shape
    rows = family.rows.get(f"{mixer}.{tensor}")
    has_taps = tensor.startswith("conv") and "bias" not in tensor
    if rows is None:
        kept = 1 if has_taps or tensor in ("in.weight", "out.weight") else 0

        def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
            flat = ours.reshape(-1, *ours.shape[len(shape) - kept :])
            return (flat.unsqueeze(1) if has_taps else flat,)

        return lambda theirs: theirs.reshape(shape), to_theirs
    sizes = _rows_of_head(mixer, model, tensor)
    return (
        lambda *theirs: _by_head([_flat(t, has_taps) for t in theirs], rows, sizes, shape[0]),
        lambda ours: _from_heads(ours, rows, sizes, has_taps),
    )


def _flat(theirs: Tensor, has_taps: bool) -> Tensor:
    """Return their tensor as (rows, ...): taps without the dimension of size 1."""
    return theirs.squeeze(1) if has_taps else theirs


def _rows_of_head(mixer: str, model: ModelShape, tensor: str) -> dict[str, int]:
    """Return the rows of a head in our tensor, by name and in our order."""
    p, r = model.mixer_key_size, model.mixer_value_size
    shared = model.mixer_value_heads // model.mixer_key_heads  # value heads of a key head
    sizes = {"q": p, "k": p, "v": shared * r}
    if tensor == "conv":
        return sizes
    if mixer == "kda":
        return sizes | {"b": 1}
    return sizes | {"z": shared * r, "b": shared, "a": shared}


def _by_head(theirs: list[Tensor], rows: list[str], sizes: dict[str, int], heads: int) -> Tensor:
    """Return our tensor, (heads, rows, ...), of theirs, (rows of all heads, ...) each.

    Without "head:" theirs are one tensor in pieces, wherever it was cut: transformers 5.23 saves
    the taps of q, k and v as three thirds.
    """
    if not rows[0].startswith(EACH_HEAD):
        names = " ".join(rows).split()
        whole = torch.cat(theirs).split([heads * sizes[name] for name in names])
        parts = {
            name: part.unflatten(0, (heads, -1)) for name, part in zip(names, whole, strict=True)
        }
        return torch.cat([parts[name] for name in sizes], 1)
    of_heads = torch.cat([tensor.unflatten(0, (heads, -1)) for tensor in theirs], 1)
    names = " ".join(rows).replace(EACH_HEAD, "").split()
    split = of_heads.split([sizes[name] for name in names], 1)
    parts = dict(zip(names, split, strict=True))
    return torch.cat([parts[name] for name in sizes], 1)


def _from_heads(
    ours: Tensor, rows: list[str], sizes: dict[str, int], has_taps: bool
) -> tuple[Tensor, ...]:
    """Return their tensors of ours, the inverse of `_by_head`."""
    parts = dict(zip(sizes, ours.split(list(sizes.values()), 1), strict=True))
    found = []
    for text in rows:
        own = [parts[name] for name in text.removeprefix(EACH_HEAD).split()]
        if text.startswith(EACH_HEAD):
            tensor = torch.cat(own, 1).flatten(0, 1)
        else:
            tensor = torch.cat([part.flatten(0, 1) for part in own])
        found.append(tensor.unsqueeze(1) if has_taps else tensor)
    return tuple(found)
