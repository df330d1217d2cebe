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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from config.schema import Config
from tools.checker.recorder import AFTER, GRADIENT, IN_USE, Key, Piece
from tools.checker.thresholds import has_wide_types

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.1}
DRAWN = 0  # the step of the state that is drawn, which no arithmetic of a run has touched
# How much larger the rounding of a layout may be than the largest of the draws that were measured:
# a sum over several ranks rounds more than once.
TIMES = 100
LOADS = "loads of experts"
# A tensor that may be off by more than this share of its largest element is not judged.
JUDGED = 1e-3
# What a program that is not Trine computes in 32 bits in places: its rounding is measured.
TOLERANCES_OF_PROGRAMS = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 0.1}
MOST_CUTS = 32  # of a tensor, among which the nearest to a piece is looked for
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
    that differ. terms: tensors before it of which ranks hold terms of a sum, and over which axis.
    """

    key: Key
    parts: list[TensorPart]
    last_equal: Key | None
    differing: list[Key] = field(default_factory=list)
    compared: int = 0
    more: list[str] = field(default_factory=list)
    terms: list[tuple[Key, str]] = field(default_factory=list)

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
    of_drawn: that of the state before the first step. rounding: what was measured of it. calls: by
    key, of tensors whose pieces are found by their values, those of each call of the module.
    """

    def __init__(
        self,
        pieces: list[Piece],
        aliases: dict[str, tuple[str, str]],
        precision: str = "fp64",
        rounding: Rounding | None = None,
        of_program: bool = False,
    ):
        """Put together the tensors of one rank from its pieces. rounding: None: not measured.

        of_program: whether the program is not Trine: then what its modules return is named only
        before a result that differs (`differing`).
        """
        self.aliases = aliases
        self.of_program = of_program
        self.tolerance = (TOLERANCES_OF_PROGRAMS if of_program else TOLERANCES)[precision]
        self.of_drawn = self.tolerance
        self.rounding = rounding or Rounding()
        groups: dict[Key, list[Piece]] = {}
        for piece in pieces:
            groups.setdefault(piece.key, []).append(piece)
        self.order = sorted(groups, key=_in_order(list(groups)))
        self.tensors = {key: _whole(pieces) for key, pieces in groups.items()}
        self.calls = {
            key: [piece.values for piece in pieces]
            for key, pieces in groups.items()
            if pieces[0].is_found
        }
        self.scales = {key: _largest(values) for key, values in self.tensors.items()}
        self.largest: dict[tuple[int, str], float] = {}  # of a kind in a step
        for key in self.order:
            kind = key[:2]
            self.largest[kind] = max(self.largest.get(kind, 0.0), self.scales[key])

    def in_precision(self, config: Config) -> "Reference":
        """Return this for a run whose types are others than one rank's: with their tolerance.

        Masters are drawn in the type of one rank's weights: before the first step nothing is
        rounded.
        """
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
        tolerance = self.of_drawn if key[0] == DRAWN else self.tolerance
        return max(tolerance, TIMES * self.rounding.growth.get(key, 0.0))

    def differs(self, key: Key, off: float) -> bool:
        """Return whether a tensor is off by more than rounding explains; infinity always is."""
        return not off <= self.allowed(key) or off == float("inf")

    def expected(self, piece: Piece, tp: int, tp_rank: int) -> np.ndarray | None:
        """Return what one rank has in the place of a piece; None if there is nothing to compare."""
        whole = self.tensors.get(piece.key)
        if whole is None:
            return None
        if piece.is_found:
            return self._nearest(piece)
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

    def _nearest(self, piece: Piece) -> np.ndarray | None:
        """Return the cut of one rank's tensors that is nearest to a piece; None: no cut fits.

        A gradient counts up to a factor: what divides the loss of a rank is the program's choice,
        and what comes of it shows in the gradients of parameters.
        """
        calls = self.calls[piece.key]
        (number,) = piece.place[0]
        own = calls[number : number + 1]
        is_scaled = piece.key[1].startswith("gradient")
        others = (whole for place, whole in enumerate(calls) if place != number)
        for whole in (*own, *others):
            for cut in _matching(whole, piece.values, is_scaled):
                cut = _scaled(cut, piece.values) if is_scaled else cut
                if self.off(piece.key, piece.values, cut) <= self.tolerance:
                    return cut
        best, least = None, float("inf")
        for cut in islice(_cuts((own or calls)[0], piece.values.shape), MOST_CUTS):
            cut = _scaled(cut, piece.values) if is_scaled else cut
            off = self.off(piece.key, piece.values, cut)
            if best is None or off < least:
                best, least = cut, off
        return best

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
    """Return the whole tensor of which a run on one rank has recorded these pieces.

    A parameter is flat; an activation is (rows, samples, ...), with NaN where no piece is.
    """
    first = pieces[0]
    if first.is_found:  # calls of a module, whose places are not known: the largest values
        return max((piece.values for piece in pieces), key=_largest)
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


def _scaled(cut: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return a cut times the number that brings it nearest to values, if that is near."""
    square = float((cut * cut).sum())
    factor = float((cut * values).sum()) / square if square else 1.0
    largest = _largest(values)
    return factor * cut if np.abs(values - factor * cut).max(initial=0.0) <= 1e-6 * largest else cut


def _cuts(whole: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield the parts of a tensor with a shape that a rank may have, whatever cuts it."""
    for indices in product(*_ways(whole, shape)):
        yield whole[np.ix_(*indices)]


def _ways(whole: np.ndarray, shape: tuple[int, ...]) -> list[list[np.ndarray]]:
    """Return the indices that a rank may have of each dimension; nothing if no part has the shape.

    Of a dimension that is shorter a rank has a part in one piece, the same part of two or three
    matrices that are stacked (gate and up; q, k and v), the chunks i and 2 n - 1 - i, or each n-th
    row.
    """
    if whole.ndim != len(shape):
        return [[]]
    ways: list[list[np.ndarray]] = []
    for size, here in zip(whole.shape, shape, strict=True):
        if here == size:
            ways.append([np.arange(size)])
        elif here and size % here == 0:
            ways.append(list(_parts_of(size, size // here)))
        else:
            return [[]]
    return ways


def _matching(whole: np.ndarray, values: np.ndarray, is_scaled: bool) -> Iterator[np.ndarray]:
    """Yield the parts of a tensor that have the two largest of these values, all of which may be.

    is_scaled: if they have them up to a factor.
    """
    ways = _ways(whole, values.shape)
    if not all(ways) or not values.size:
        return
    magnitudes = np.abs(values).reshape(-1)
    largest = int(magnitudes.argmax())
    magnitudes[largest] = -1.0
    probes = [
        np.unravel_index(place, values.shape) for place in (largest, int(magnitudes.argmax()))
    ]
    first, second = (
        whole[np.ix_(*([way[p] for way in dim] for dim, p in zip(ways, probe, strict=True)))]
        for probe in probes
    )
    a, b = (float(values[probe]) for probe in probes)
    if is_scaled:
        is_close = np.abs(first * b - second * a) <= 1e-5 * np.abs(first * b)
    else:
        is_close = np.maximum(np.abs(first - a), np.abs(second - b)) <= 1e-4 * abs(a)
    for numbers in np.argwhere(is_close):
        yield whole[np.ix_(*(dim[n] for dim, n in zip(ways, numbers, strict=True)))]


def _parts_of(size: int, ranks: int) -> Iterator[np.ndarray]:
    """Yield the indices of a dimension that one of `ranks` may have, see `_cuts`."""
    every = np.arange(size)
    yield from np.split(every, ranks)
    for stacked in (2, 3):
        if size % (stacked * ranks) == 0:
            yield from every.reshape(stacked, ranks, -1).swapaxes(0, 1).reshape(ranks, -1)
    if size % (2 * ranks) == 0:
        chunks = np.split(every, 2 * ranks)
        yield from (np.concatenate([chunks[i], chunks[-1 - i]]) for i in range(ranks))
    yield from (every[i::ranks] for i in range(ranks))


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
    differs first on any rank. terms: see Difference.
    """

    offs: dict[Key, float]
    parts: list[TensorPart]
    terms: list[tuple[Key, str]] = field(default_factory=list)

    @classmethod
    def by(cls, reference: Reference, pieces: list[Piece], tp: int, mesh: Any) -> "SeenPieces":
        """Compare this rank's pieces with one rank's; keep the parts of the first that differs.

        Collective over all ranks. tp: of the layout. mesh: has this rank's place on each axis.
        """
        offs: dict[Key, float] = {}

        def compare(some: Iterable[Piece]) -> dict[Key, float]:
            """Compare some of this rank's pieces, and return how far they are off on any rank."""
            for piece in some:
                if reference.differs(piece.key, offs.get(piece.key, 0.0)):
                    continue  # another piece of the tensor has shown it
                expected = reference.expected(piece, tp, mesh.place.get("tp", 0))
                if expected is not None:
                    off = reference.off(piece.key, piece.values, expected)
                    offs[piece.key] = max(off, offs.get(piece.key, 0.0))
            every: list[Any] = [offs] * mesh.size
            if mesh.size > 1:
                torch.distributed.all_gather_object(every, offs)
            return _largest_of(every)

        together = compare(piece for piece in pieces if not piece.is_found)
        wrong = differing(reference, together)
        if wrong and reference.of_program:  # what modules return says where it begins
            last = wrong[0][0]
            together = compare(x for x in pieces if x.is_found and x.key[0] <= last)
        terms: list[tuple[Key, str]] = []
        while True:
            known = [key for key, _ in terms]
            first = next(iter(differing(reference, together, known)), None)
            parts = list(_parts_here(reference, pieces, first, tp, mesh))
            axis = _axis_of_terms(reference, first, parts, mesh)
            if first is None or not axis:
                return cls(offs, parts, terms)
            terms.append((first, axis))


def _parts_here(
    reference: Reference, pieces: list[Piece], key: Key | None, tp: int, mesh: Any
) -> Iterator[TensorPart]:
    """Yield this rank's parts of tensor `key`, each with the values of one rank at its place."""
    for piece in pieces:
        if piece.key != key:
            continue
        expected = reference.expected(piece, tp, mesh.place.get("tp", 0))
        if expected is not None:
            off = reference.off(piece.key, piece.values, expected)
            wrong = reference.differs(piece.key, off)
            yield TensorPart(mesh.rank, mesh.place, piece, expected, off, wrong)


def _axis_of_terms(
    reference: Reference, key: Key | None, parts: list[TensorPart], mesh: Any
) -> str:
    """Return the axis whose ranks hold terms of what a module returns on one rank; or nothing.

    Collective. A module of another program may leave the sum to what comes after it.
    """
    if key not in reference.calls or key[1] != "output" or mesh.size == 1:
        return ""
    every: list[Any] = [None] * mesh.size
    torch.distributed.all_gather_object(every, parts)
    together = [part for each in every for part in each]
    axes = dict.fromkeys(axis for part in together for axis in part.place)
    for axis in axes:
        groups = groups_along(together, axis)
        sums = [(np.sum([p.piece.values for p in g], 0), g[0].expected) for g in groups]
        if sums and not any(reference.differs(key, reference.off(key, *pair)) for pair in sums):
            return axis
    return ""


def groups_along(parts: list[TensorPart], axis: str) -> list[list[TensorPart]]:
    """Return the parts of ranks that differ along an axis only and should be equal."""
    found: dict[tuple, list[TensorPart]] = {}
    if not all(axis in part.place for part in parts):
        return []
    for part in parts:
        others = tuple(p for name, p in part.place.items() if name != axis)
        where = tuple(place.tobytes() for place in part.piece.place)
        found.setdefault((others, where), []).append(part)
    groups = [group for group in found.values() if len({p.place[axis] for p in group}) > 1]
    alike = [
        group
        for group in groups
        if all(
            p.expected.shape == group[0].expected.shape
            and np.array_equal(p.expected, group[0].expected)
            for p in group
        )
    ]
    wrong = [group for group in alike if any(p.differs for p in group)]
    return wrong if len(alike) == len(groups) else []


def _largest_of(every: list[dict[Key, float]]) -> dict[Key, float]:
    """Return by tensor how far it is off on the rank that is farthest off."""
    offs: dict[Key, float] = {}
    for each in every:
        for key, off in each.items():
            offs[key] = max(off, offs.get(key, 0.0))
    return offs


def differing(reference: Reference, offs: dict[Key, float], terms: Sequence[Key] = ()) -> list[Key]:
    """Return the tensors that are not one rank's, in one rank's order. offs: on any rank.

    What a module of another program returns may differ and be right: a term of a sum over ranks,
    tokens in another order. It counts only in the step of the first result that differs (a loss, a
    gradient, a norm, weights or state), and only if nothing after it in the same pass is equal, and
    if it was equal before. terms: tensors that are known to be such terms.
    """
    compared = [key for key in reference.order if key in offs]
    wrong = [key for key in compared if reference.differs(key, offs[key])]
    if not reference.of_program:
        return wrong
    results = [key for key in wrong if key not in reference.calls]
    if not results:
        return []
    step = results[0][0]
    kept = set(results)
    is_wrong = set(wrong)
    innocent = {key[1:] for key in wrong if key in reference.calls and key[0] < step}
    innocent |= {key[1:] for key in terms}
    for kind in ("output", "gradient of output"):
        if kind == "output" and (step, "number", "loss") not in is_wrong:
            continue  # what the loss is computed from is right
        for key in reversed([key for key in compared if key[:2] == (step, kind)]):
            if key not in is_wrong:
                break
            if key[1:] not in innocent:
                kept.add(key)
    return [key for key in wrong if key in kept]


def first_difference(reference: Reference, seen: list[SeenPieces]) -> Difference | None:
    """Return the first tensor that is not one rank's, in one rank's order, or None.

    seen: of every rank.
    """
    offs = _largest_of([each.offs for each in seen])
    terms = seen[0].terms
    wrong = differing(reference, offs, [key for key, _ in terms])
    if not wrong:
        return None
    compared = [key for key in reference.order if key in offs]
    before = compared[: compared.index(wrong[0])]
    equal = [key for key in before if not reference.differs(key, offs[key])]
    parts = [part for each in seen for part in each.parts]
    last_equal = equal[-1] if equal else None
    return Difference(wrong[0], parts, last_equal, wrong, len(compared), terms=terms)
