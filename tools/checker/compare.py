"""The first tensor of a run that is not one rank's.

    reference = Reference(pieces)                       of one rank
    seen = SeenPieces.by(reference, pieces, layout, mesh)     on every rank of a layout; collective
    difference = first_difference(reference, seen)      the rank's together, or None

A tensor differs if an element is off by more than TOLERANCES of the tensor's largest element. In
fp64 rounding is millions of times smaller, also where it grows from step to step. Runs in 16 bits
are computed in fp32 and fp64 (thresholds.py), and compared with one rank's in fp64.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from config.schema import Config
from tools.checker.recorder import IN_USE, Key, Piece
from tools.checker.thresholds import has_wide_types

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1}
# A tensor whose elements are all this small, relative to the largest of its kind, is rounding.
FLOOR = 1e-4  # of the tolerance


@dataclass
class TensorPart:
    """A piece that a rank has, and what one rank has there. place: the rank's on each axis."""

    rank: int
    place: dict[str, int]
    piece: Piece
    expected: np.ndarray
    off: float  # the largest difference, relative to the tensor's largest element; inf for NaN
    differs: bool


@dataclass
class Difference:
    """The first tensor of a layout that is not one rank's.

    key: its step, kind and name. parts: the pieces of it, those that differ first. last_equal: the
    tensor before it in one rank's order, of which every piece is equal. differ, compared: numbers
    of tensors. more: what else is wrong, such as replicas that differ.
    """

    key: Key
    parts: list[TensorPart]
    last_equal: Key | None
    differ: int = 0
    compared: int = 0
    more: list[str] = field(default_factory=list)

    @property
    def off(self) -> float:
        """The largest difference, relative to the tensor's largest element."""
        return max((part.off for part in self.parts), default=float("inf"))

    @property
    def wrong(self) -> list[TensorPart]:
        """The pieces that differ."""
        return [part for part in self.parts if part.differs]


class Reference:
    """The tensors of a run on one rank, whole, in the order in which it computed them.

    tensors: by key. Activations are (s, samples, ...), parameters flat. order: the keys. aliases:
    see recorder. tolerance: the largest difference of an equal tensor.
    """

    def __init__(
        self, pieces: list[Piece], aliases: dict[str, tuple[str, str]], precision: str = "fp64"
    ):
        """pieces: of a world of one rank."""
        self.aliases = aliases
        self.tolerance = TOLERANCES[precision]
        groups: dict[Key, list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(piece.key, []).append(piece)
        self.order = sorted(groups, key=_in_order(list(groups)))
        self.tensors = {key: _whole(pieces) for key, pieces in groups.items()}
        self.scales = {key: _largest(values) for key, values in self.tensors.items()}
        self.largest: dict[tuple[int, str], float] = {}  # of a kind in a step
        for key in self.order:
            kind = key[:2]
            self.largest[kind] = max(self.largest.get(kind, 0.0), self.scales[key])

    def in_precision(self, config: Config) -> "Reference":
        """Return this for a run whose types are others than one rank's: with their tolerance."""
        if not has_wide_types(config):
            return self
        other = copy.copy(self)
        other.tolerance = TOLERANCES["fp32"]
        return other

    def expected(self, piece: Piece, tp: int, tp_rank: int) -> np.ndarray | None:
        """Return what one rank has in the place of a piece; None if there is nothing to compare."""
        whole = self.tensors.get(piece.key)
        if whole is None:
            return None
        if piece.is_parameter:
            (elements,) = piece.place
            inside = not elements.size or elements.max() < whole.size
            return whole[elements] if inside else None
        rows, samples = piece.place
        if max(rows, default=0) >= whole.shape[0] or max(samples, default=0) >= whole.shape[1]:
            return np.full(piece.values.shape, np.nan)
        found = whole[rows, samples] if piece.paired else whole[np.ix_(rows, samples)]
        if found.ndim != piece.values.ndim:
            return None
        for dim, (all_of_it, here) in enumerate(zip(found.shape, piece.values.shape)):
            if here == all_of_it:
                continue
            if here * tp != all_of_it:
                return None
            found = np.split(found, tp, dim)[tp_rank]
        return found

    def off(self, key: Key, values: np.ndarray, expected: np.ndarray) -> float:
        """Return the largest difference over the tensor's largest element; inf for NaN."""
        scale = max(self.scales[key], FLOOR * self.largest[key[:2]], 1e-300)
        if not values.size:
            return 0.0
        worst = float(np.abs(values - expected).max())
        return worst / scale if np.isfinite(worst) else float("inf")


def _in_order(keys: list[Key]) -> Callable[[Key], tuple[int, int, int]]:
    """Return a sort key: steps ascend, and tensors are in the order in which they were computed.

    The parameters of a kind, such as gradients, are in the order in which a pass uses them.
    """
    used = [name for _, kind, name in keys if kind == IN_USE]
    place_of = {name: place for place, name in reversed(list(enumerate(used)))}
    first_of_kind: dict[tuple[int, str], int] = {}
    for place, (step, kind, _) in enumerate(keys):
        first_of_kind.setdefault((step, kind), place)
    places = {key: place for place, key in enumerate(keys)}

    def sort_key(key: Key) -> tuple[int, int, int]:
        """Return the step, the place of the kind or of the tensor, and the place in the kind."""
        step, kind, name = key
        if kind == IN_USE or name not in place_of:
            return step, places[key], 0
        return step, first_of_kind[step, kind], place_of[name]

    return sort_key


def _whole(pieces: list[Piece]) -> np.ndarray:
    """Return the tensor that pieces of one rank make up."""
    first = pieces[0]
    if first.is_parameter:
        size = 1 + max((int(p.place[0].max()) for p in pieces if p.place[0].size), default=0)
        flat = np.full(size, np.nan)
        for piece in pieces:
            flat[piece.place[0]] = piece.values
        return flat
    rows = 1 + max(int(piece.place[0].max()) for piece in pieces)
    samples = 1 + max(int(piece.place[1].max()) for piece in pieces)
    features = first.values.shape[1 if first.paired else 2 :]
    whole = np.full((rows, samples, *features), np.nan)
    for piece in pieces:
        index: Any = piece.place if piece.paired else np.ix_(*piece.place)
        whole[index] = piece.values
    return whole


def _largest(values: np.ndarray) -> float:
    """Return the largest magnitude, 0 without elements."""
    return float(np.abs(values).max(initial=0.0))


@dataclass
class SeenPieces:
    """What a rank has found about its pieces.

    offs: by key the largest difference from one rank's. parts: the pieces of the tensor that
    differs first on any rank.
    """

    offs: dict[Key, float]
    parts: list[TensorPart]

    @classmethod
    def by(cls, reference: Reference, pieces: list[Piece], tp: int, mesh: Any) -> "SeenPieces":
        """Compare this rank's pieces; collective over the world. tp: of the layout."""
        offs: dict[Key, float] = {}
        for piece in pieces:
            expected = reference.expected(piece, tp, mesh.place["tp"])
            if expected is not None:
                off = reference.off(piece.key, piece.values, expected)
                offs[piece.key] = max(off, offs.get(piece.key, 0.0))

        def differs(key: Key) -> bool:
            """Return whether a tensor is not one rank's here."""
            return not offs.get(key, 0.0) <= reference.tolerance

        first = next((key for key in reference.order if differs(key)), None)
        if mesh.size > 1:
            every: list[Any] = [None] * mesh.size
            torch.distributed.all_gather_object(every, first)
            places = [reference.order.index(key) for key in every if key is not None]
            first = reference.order[min(places)] if places else None
        parts = []
        for piece in pieces:
            if piece.key != first:
                continue
            expected = reference.expected(piece, tp, mesh.place["tp"])
            if expected is not None:
                off = reference.off(piece.key, piece.values, expected)
                wrong = not off <= reference.tolerance
                parts.append(TensorPart(mesh.rank, mesh.place, piece, expected, off, wrong))
        return cls(offs, parts)


def first_difference(reference: Reference, seen: list[SeenPieces]) -> Difference | None:
    """Return the first tensor that is not one rank's, in one rank's order, or None.

    seen: of every rank.
    """
    offs: dict[Key, float] = {}
    for each in seen:
        for key, off in each.offs.items():
            offs[key] = max(off, offs.get(key, 0.0))
    compared = [key for key in reference.order if key in offs]
    differing = [key for key in compared if not offs[key] <= reference.tolerance]
    if not differing:
        return None
    place = compared.index(differing[0])
    last_equal = compared[place - 1] if place else None
    parts = [part for each in seen for part in each.parts]
    return Difference(differing[0], parts, last_equal, len(differing), len(compared))
