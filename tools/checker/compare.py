"""The first tensor of a run that is not one rank's.

    reference = Reference(pieces)                       of one rank
    seen = SeenPieces.by(reference, pieces, layout, mesh)     on every rank of a layout; collective
    difference = first_difference(reference, seen)      the rank's together, or None

A tensor differs if an element is off by more than TOLERANCES of the tensor's largest element. In
fp64 rounding is millions of times smaller, but where it grows. How far it does is measured
(rounding.py), and a tensor of which it moves more than a TIMES-th of the tolerance may be off by
TIMES as much as was measured. Runs in 16 bits are computed in fp32 and fp64 (thresholds.py), and
compared with one rank's in fp64.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from config.schema import Config
from tools.checker.recorder import AFTER, GRADIENT, IN_USE, Key, Piece
from tools.checker.thresholds import has_wide_types

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1}
# How much larger the rounding of a layout may be than the largest of the draws that were measured:
# a sum over several ranks rounds more than once.
TIMES = 100
LOADS = "loads of experts"
# A tensor that may be off by more than this share of its largest element is not judged.
JUDGED = 1e-3
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
    tensor before it in one rank's order, of which every piece is equal. differing: all tensors that
    are not one rank's. compared: the number of tensors. more: what else is wrong, such as replicas
    that differ.
    """

    key: Key
    parts: list[TensorPart]
    last_equal: Key | None
    differing: list[Key] = field(default_factory=list)
    compared: int = 0
    more: list[str] = field(default_factory=list)

    @property
    def off(self) -> float:
        """The largest difference, relative to the tensor's largest element."""
        return max((part.off for part in self.parts), default=float("inf"))

    @property
    def results(self) -> set[str]:
        """What a user sees of a run and what differs of it: losses, gradients, weights."""
        kinds = {kind for _, kind, _ in self.differing}
        found = {"gradients"} if GRADIENT in kinds else set()
        found |= {"weights"} if kinds & {AFTER, IN_USE} else set()
        is_loss = any(key[1:] in (("number", "loss"), ("output", "head")) for key in self.differing)
        is_loss |= any(re.match(r"[^:]* loss: ", text) for text in self.more)
        return found | ({"losses"} if is_loss else set())

    @property
    def wrong(self) -> list[TensorPart]:
        """The pieces that differ."""
        return [part for part in self.parts if part.differs]


@dataclass
class Rounding:
    """What rounding does in a run on one rank (rounding.py).

    growth: how far it moves each tensor, relative to the tensor's largest element. held: steps and
    parameters whose update it decides.
    """

    growth: dict[Key, float] = field(default_factory=dict)
    held: set[tuple[int, str]] = field(default_factory=set)

    def add(self, growth: dict[Key, float], held: set[tuple[int, str]]) -> None:
        """Add what one more draw has shown."""
        for key, off in growth.items():
            self.growth[key] = max(off, self.growth.get(key, 0.0))
        self.held |= held


class Reference:
    """The tensors of a run on one rank, whole, in the order in which it computed them.

    tensors: by key. Activations are (s, samples, ...), parameters flat. order: the keys. aliases:
    see recorder. tolerance: the largest difference of an equal tensor that rounding does not move.
    rounding: what was measured of it.
    """

    def __init__(
        self,
        pieces: list[Piece],
        aliases: dict[str, tuple[str, str]],
        precision: str = "fp64",
        rounding: Rounding | None = None,
    ):
        """pieces: of a world of one rank. rounding: None if it was not measured."""
        self.aliases = aliases
        self.tolerance = TOLERANCES[precision]
        self.rounding = rounding or Rounding()
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

    def is_rounding(self, growth: float) -> bool:
        """Return whether rounding moves a tensor so far that it decides what is compared."""
        return not TIMES * growth <= self.tolerance

    def moved(self) -> list[Key]:
        """Return the tensors that rounding moves, in one rank's order."""
        growth = self.rounding.growth
        return [key for key in self.order if self.is_rounding(growth.get(key, 0.0))]

    def allowed(self, key: Key) -> float:
        """Return the largest difference of a tensor that rounding explains."""
        return max(self.tolerance, TIMES * self.rounding.growth.get(key, 0.0))

    def differs(self, key: Key, off: float) -> bool:
        """Return whether a tensor is off by more than rounding explains; infinity always is."""
        return not off <= self.allowed(key) or off == float("inf")

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


def relative(value: float, expected: float) -> float:
    """Return how far a number is off, relative to the expected one; infinity for NaN."""
    off = abs(value - expected)
    if not off < float("inf"):
        return float("inf")
    return off / abs(expected) if off else 0.0


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
            return reference.differs(key, offs.get(key, 0.0))

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
                wrong = reference.differs(piece.key, off)
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
    differing = [key for key in compared if reference.differs(key, offs[key])]
    if not differing:
        return None
    place = compared.index(differing[0])
    last_equal = compared[place - 1] if place else None
    parts = [part for each in seen for part in each.parts]
    return Difference(differing[0], parts, last_equal, differing, len(compared))
