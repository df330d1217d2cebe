"""The tensors of mixers (layers/mixers.py) in the files of transformers, and back.

    to_ours, to_theirs = conversions("gated_delta_net", "in.weight", model, family)

Ours have a dimension for the heads, (heads, rows of a head, ...), so that tensor parallelism cuts
them by heads; theirs are flat. `rows` of a family says what the rows of their tensors are: "q k v"
are the rows q of all heads, then k of all, then v; "head: q k v" are q, k and v of the first head,
then those of the second. Their convolutions are (channels, 1, taps).

Mamba-2 has one matrix of z, x, b, c and dt in all families, where ours are two, since tensor
parallelism cuts z, x and dt by heads but b and c by groups. Each of ours is a `part` of theirs:

    part("mamba2", "keys.weight", model)    which rows of their tensor ours has
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from architecture import mixer_stats
from architecture.families import Family
from architecture.shape import ModelShape

EACH_HEAD = "head:"

# Of each tensor of Mamba-2 that is a part of theirs: the rows of a head, or of a group, in ours,
# and all rows of theirs in order.
_PARTS = {
    "in.weight": ("z x dt", "z x b c dt"),
    "keys.weight": ("b c", "z x b c dt"),
    "conv": ("x", "x b c"),
    "conv_keys": ("b c", "x b c"),
    "conv_bias": ("x", "x b c"),
    "conv_keys_bias": ("b c", "x b c"),
}


@dataclass(frozen=True)
class Part:
    """Our tensor as some rows of theirs.

    shape: of ours. rows: the numbers of their rows, in our order. count: how many rows theirs has.
    has_taps: whether theirs is (channels, 1, taps).
    """

    shape: tuple[int, ...]
    rows: Tensor
    count: int
    has_taps: bool

    def to_ours(self, theirs: Tensor) -> Tensor:
        """Return our tensor of their whole one; RuntimeError if that has another number of rows."""
        if len(theirs) != self.count:
            raise RuntimeError(f"{len(theirs)} rows, not {self.count}")
        return theirs[self.rows.to(theirs.device)].reshape(self.shape)

    def to_theirs(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of their tensor that ours has."""
        flat = ours.flatten(0, 1)
        return (flat.unsqueeze(1) if self.has_taps else flat,)

    def write(self, rows: Tensor, tensors: dict[str, Tensor], name: str) -> None:
        """Write our rows into their tensor `name`, which is made if it is not there."""
        whole = tensors.setdefault(name, rows.new_empty(self.count, *rows.shape[1:]))
        whole[self.rows] = rows


def part(mixer: str, tensor: str, model: ModelShape) -> Part | None:
    """Return which rows of their tensor a tensor of a mixer is; None if it is whole tensors."""
    if mixer != "mamba2" or tensor not in _PARTS:
        return None
    names, order = (text.split() for text in _PARTS[tensor])
    g, a = model.mixer_key_heads, model.mixer_value_heads
    p, r = model.mixer_key_size, model.mixer_value_size
    sizes = {"z": (a, r), "x": (a, r), "b": (g, p), "c": (g, p), "dt": (a, 1)}
    found, count = {}, 0
    for name in order:
        heads, size = sizes[name]
        found[name] = count + torch.arange(heads * size).view(heads, size)
        count += heads * size
    rows = torch.cat([found[name] for name in names], 1).flatten()
    shape = mixer_stats.tensors(model)[tensor].shape
    return Part(shape, rows, count, tensor in ("conv", "conv_keys"))


def conversions(
    mixer: str, tensor: str, model: ModelShape, family: Family
) -> tuple[Callable[..., Tensor], Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return the conversions (to ours, to theirs) of a tensor of a mixer, such as "in.weight"."""
    shape = mixer_stats.tensors(model)[tensor].shape
    rows = family.rows.get(f"{mixer}.{tensor}")
    has_taps = tensor.startswith("conv") and "bias" not in tensor
    if mixer == "kda" and tensor == "low.weight":  # their two matrices to small vectors
        sizes_of_low = [model.mixer_key_size, model.mixer_value_size]
        return lambda *theirs: torch.cat(theirs), lambda ours: ours.split(sizes_of_low)
    if mixer == "kda" and tensor == "a_log":
        return lambda theirs: theirs.reshape(shape), lambda ours: (ours.view(1, 1, -1, 1),)
    if rows is None:
        kept = int(has_taps or mixer_stats.tensors(model)[tensor].multiplies)

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
    """Return how many rows of each name a key head has in Trine's tensor, in Trine's order."""
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
    """Return the tensors of transformers with the rows of one of Trine's: inverse of `_by_head`.

    ours: (heads, rows of a head, ...). rows: for each tensor of transformers the names of its rows,
    such as "q k v", or "head: q k v" if they go head by head. sizes: the rows of each name in a
    head. has_taps: whether theirs is (channels, 1, taps), of a convolution.
    """
    parts = dict(zip(sizes, ours.split(list(sizes.values()), 1), strict=True))
    theirs = []
    for text in rows:
        pieces = [parts[name] for name in text.removeprefix(EACH_HEAD).split()]
        if text.startswith(EACH_HEAD):
            tensor = torch.cat(pieces, 1).flatten(0, 1)
        else:
            tensor = torch.cat([piece.flatten(0, 1) for piece in pieces])
        theirs.append(tensor.unsqueeze(1) if has_taps else tensor)
    return tuple(theirs)
