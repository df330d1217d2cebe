"""Which rank updates which whole matrix, and how its parts reach this rank and return.

Muon's update needs whole matrices, but a rank holds parts of them: tensor parallelism cuts matrices
along rows or columns, and ZeRO cuts the flat buffers of optim/buckets.py anywhere. Every matrix
gets one owner among the ranks that hold its parts or copies. Matrices go to their owners by an
all-to-all, and return by another:

    section of rank 0  [ a a a b ]  ->  owner of a: whole a  ->  f(a)  ->  [ a' a' a' b' ]
    section of rank 1  [ b b c c ]  ->  owner of b: whole b  ->  f(b)  ->  [ b' b' c' c' ]

This takes place in rounds, in each of which an owner has at most `round_elements` elements, or one
matrix: so the memory of the exchange does not grow with the model. While a round is computed, the
matrices of the next one arrive and those of the last one return.

A parameter says how it divides into matrices (parallel.Matrices): each matrix is a box of indices
of the global tensor. The elements of a box that are in a rank's section are one run of the box's
elements in row-major order, because a rank's buffer is in row-major order too. So a message is a
run for each matrix, and no indices are sent. Padding is in no box. In the section itself a run is a
few pieces of adjacent elements: that of q in a tensor of q, k and v has one for each group of
heads.

Ranks of the exchange are numbered r * T + t: r is the replica, t the tensor rank, T the number of
tensor ranks. If several ranks hold copies of an element (without ZeRO all replicas do, and of a
tensor that tp does not cut all tensor ranks do), the copy with the owner's own r or t is sent.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distributed.collectives import Group, Handle
from parallel import Box, ParamSpec


class Placed(NamedTuple):
    """A parameter in the buffer of a bucket.

    shape: that of the local parameter, with padding. offset: its first element in the buffer.
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    offset: int


class Section(NamedTuple):
    """A bucket as the exchange needs it: its parameters, and how its buffer is divided.

    size: the number of elements of a rank's section. sharded: whether replica r has the section
    from element r * size on; if not, every replica has the whole buffer.
    """

    parameters: list[Placed]
    size: int
    sharded: bool


class _Matrix(NamedTuple):
    """A matrix: the place of its parameter (bucket, index), its box in the global tensor, its name
    and its shape (rows, columns).
    """

    place: tuple[int, int]
    box: Box
    name: str
    shape: tuple[int, int]


class _Piece(NamedTuple):
    """Adjacent elements [start, stop) of this rank's section `section`."""

    section: int
    start: int
    stop: int


class _Round(NamedTuple):
    """The matrices that are exchanged together, as this rank sees them.

    own: the indices of those that this rank updates. out: the pieces that this rank sends to their
    owners, by rank. come: the parts of its own matrices that arrive, by rank: (rank, matrix).
    back: the pieces that the owners return. In all_to_all's form, (elements from each rank,
    elements to each rank), the sizes of the messages `to_owners` and `to_holders`.
    """

    own: list[int]
    out: list[_Piece]
    come: list[tuple[int, int]]
    back: list[_Piece]
    to_owners: tuple[list[int], list[int]]
    to_holders: tuple[list[int], list[int]]


class _Message(NamedTuple):
    """An all-to-all that has been started: its handle, what it sends, and what arrives."""

    handle: Handle
    source: Tensor
    output: Tensor

    def arrived(self) -> Tensor:
        """Wait for the all-to-all, and return what has arrived."""
        self.handle.wait()
        return self.output


class MatrixOwners:
    """The matrices of an update set, their owners, and the exchange of their elements.

    matrices: all of them, in the order of the buckets. owner_of: for each matrix the rank of the
    exchange that updates it.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        group: Group,
        tensor_ranks: int,
        heads: str,
        cost: Callable[[int, int], float],
        round_elements: int,
    ):
        """Find the matrices and give each an owner, the same on all ranks.

        group: the ranks that hold parts or copies. tensor_ranks: how many of them cut a tensor; 1
        for experts, whose matrices are whole. heads: the value of muon_qkv. cost: the work of an
        update by rows and columns; the owners' sums of it are about equal. round_elements: the most
        that an owner has in a round, if that is more than one matrix.
        """
        self.sections = sections
        self.group = group
        self.tensor_ranks = tensor_ranks
        self.matrices: list[_Matrix] = []
        for number, section in enumerate(sections):
            for index, placed in enumerate(section.parameters):
                self.matrices += _matrices_in(placed.spec, (number, index), heads)
        costs = [cost(*matrix.shape) for matrix in self.matrices]
        self.owner_of = balanced(costs, group.size)
        sizes = [math.prod(matrix.shape) for matrix in self.matrices]
        rounds = in_rounds(costs, sizes, self.owner_of, round_elements)
        self._runs_of_own = {
            (k, n): self._run(n, k)
            for n, owner in enumerate(self.owner_of)
            for k in range(group.size)
            if owner == group.rank
        }
        self._rounds = [self._round(numbers) for numbers in rounds]

    def _round(self, numbers: list[int]) -> _Round:
        """Return what this rank sends and gets so that owners update these matrices.

        numbers: of the matrices of the round. Counts of elements are by rank of the group.
        """
        here = self.group.rank
        ranks = range(self.group.size)
        of_owner: list[list[int]] = [[] for _ in ranks]
        for n in numbers:
            of_owner[self.owner_of[n]].append(n)
        own = of_owner[here]
        out, back = [], []
        sent, returned = [0] * self.group.size, [0] * self.group.size
        for k in ranks:
            for n in of_owner[k]:
                pieces = self._pieces(n)
                size = sum(stop - start for _, start, stop in pieces)
                back += pieces
                returned[k] += size
                if self._is_sent(n, here, k):
                    out += pieces
                    sent[k] += size
        come = [(k, n) for k in ranks for n in own if self._is_sent(n, k, here)]
        arriving, leaving = [0] * self.group.size, [0] * self.group.size
        for k, n in come:
            arriving[k] += _length(self._runs_of_own[k, n])
        for k in ranks:
            leaving[k] = sum(_length(self._runs_of_own[k, n]) for n in own)
        return _Round(own, out, come, back, (arriving, sent), (returned, leaving))

    def update(self, tensors: list[Tensor], function: Callable[[list[Tensor]], None]) -> None:
        """Replace every matrix by what `function` makes of it; collective over the group.

        tensors: for each section this rank's elements, flat, which are read and overwritten.
        function: takes matrices of this rank, each (rows, columns), perhaps none, and overwrites
        them. It is called once in each round.
        """
        coming = [self._send(tensors, round_) for round_ in self._rounds[:1]]
        going: tuple[_Round, _Message] | None = None  # the round that returns
        for number, round_ in enumerate(self._rounds):
            message = coming.pop()
            coming += [
                self._send(tensors, after) for after in self._rounds[number + 1 : number + 2]
            ]
            whole = self._join(round_, message.arrived())
            del message
            function(whole)
            if going:
                _write(tensors, *going)
                going = None  # frees what the round before has sent
            parts = [self._divided(n, matrix) for n, matrix in zip(round_.own, whole)]
            sent = [runs[k] for k in range(self.group.size) for runs in parts]
            going = round_, self._start(tensors[0], sent, round_.to_holders)
            del whole, parts, sent
        if going:
            _write(tensors, *going)

    def _send(self, tensors: list[Tensor], round_: _Round) -> _Message:
        """Start to send this rank's runs of a round's matrices to their owners."""
        parts = [tensors[number][start:stop] for number, start, stop in round_.out]
        return self._start(tensors[0], parts, round_.to_owners)

    def _start(
        self, like: Tensor, parts: list[Tensor], counts: tuple[list[int], list[int]]
    ) -> _Message:
        """Start an all-to-all of flat parts, which are in the order of the ranks they go to.

        like: a tensor of the type of the messages. counts: as in Group.all_to_all.
        """
        source = torch.cat([like.new_empty(0), *parts])
        output = like.new_empty(sum(counts[0]))
        return _Message(self.group.all_to_all(output, source, counts), source, output)

    # ---- This rank's elements --------------------------------------------------------------------

    def _placed(self, n: int) -> tuple[Section, Placed]:
        """Return the section and the parameter of matrix n."""
        number, index = self.matrices[n].place
        section = self.sections[number]
        return section, section.parameters[index]

    def _range(self, section: Section, placed: Placed, rank: int) -> tuple[int, int]:
        """Return which elements [start, stop) of the local parameter are in a rank's section."""
        first = self._first(section, rank)
        size = math.prod(placed.shape)
        start, stop = first - placed.offset, first + section.size - placed.offset
        return min(max(start, 0), size), min(max(stop, 0), size)

    def _first(self, section: Section, rank: int) -> int:
        """Return the element of the bucket at which a rank's section begins."""
        return rank // self.tensor_ranks * section.size if section.sharded else 0

    def _pieces(self, n: int) -> list[_Piece]:
        """Return where this rank's run of matrix n is in its section, in the run's order."""
        number, _ = self.matrices[n].place
        section, placed = self._placed(n)
        here = self.group.rank
        shift = placed.offset - self._first(section, here)
        runs = pieces_of(self._local_box(n, here), placed.shape, self._run(n, here))
        return [_Piece(number, start + shift, stop + shift) for start, stop in runs]

    # ---- Parts of matrices on other ranks --------------------------------------------------------

    def _is_sent(self, n: int, source: int, owner: int) -> bool:
        """Return whether rank `source` sends its part of matrix n: one copy of it is sent."""
        section, placed = self._placed(n)
        same_replica = source // self.tensor_ranks == owner // self.tensor_ranks
        same_tensor_rank = source % self.tensor_ranks == owner % self.tensor_ranks
        spec = placed.spec
        if spec.rows is not None:  # the first of the tensor ranks with the same rows sends
            starts = spec.rows.starts
            tensor_rank = source % self.tensor_ranks
            is_first = starts.index(starts[tensor_rank]) == tensor_rank
            return (section.sharded or same_replica) and is_first
        return (section.sharded or same_replica) and (spec.dim is not None or same_tensor_rank)

    def _held(self, placed: Placed, rank: int) -> Box:
        """Return the box of the global tensor that a rank's shard over tp holds; may be empty."""
        spec = placed.spec
        tensor_rank = rank % self.tensor_ranks
        if spec.rows is not None:
            return spec.rows.box(spec.shape, spec.rows.starts[tensor_rank])
        box = [(0, size) for size in spec.shape]
        if spec.dim is None:
            return tuple(box)
        first, stop = spec.start, spec.stop
        if self.tensor_ranks > 1:  # else all ranks of the exchange hold the same rows
            whole = spec.shape[spec.dim]
            rows = placed.shape[spec.dim]
            first, stop = (
                min(row, whole) for row in (tensor_rank * rows, (tensor_rank + 1) * rows)
            )
        box[spec.dim] = (first, stop)
        return tuple(box)

    def _common(self, n: int, rank: int) -> Box:
        """Return which indices of the global tensor matrix n and a rank both have, perhaps none."""
        _, placed = self._placed(n)
        held = self._held(placed, rank)
        return tuple(
            (min(max(low, first), stop), min(max(high, first), stop))
            for (low, high), (first, stop) in zip(self.matrices[n].box, held)
        )

    def _local_box(self, n: int, rank: int) -> Box:
        """Return which indices of a rank's local parameter matrix n has, perhaps none."""
        _, placed = self._placed(n)
        held = self._held(placed, rank)
        common = self._common(n, rank)
        box = [(low - first, high - first) for (low, high), (first, _) in zip(common, held)]
        merged = len(box) - len(placed.shape)  # dimensions that the local parameter lacks
        if any(low == high for low, high in box[:merged]):
            return ((0, 0),) * len(placed.shape)
        return tuple(box[merged:])

    def _run(self, n: int, rank: int) -> tuple[int, int]:
        """Return which elements [i, j) of its local box of matrix n a rank has in its section."""
        section, placed = self._placed(n)
        box = self._local_box(n, rank)
        start, stop = self._range(section, placed, rank)
        return elements_before(box, placed.shape, start), elements_before(box, placed.shape, stop)

    def _join(self, round_: _Round, arrived: Tensor) -> list[Tensor]:
        """Return this rank's whole matrices of a round, each contiguous, of what has arrived."""
        lengths = [_length(self._runs_of_own[pair]) for pair in round_.come]
        received = dict(zip(round_.come, arrived.split(lengths)))
        whole = []
        for n in round_.own:
            box = self.matrices[n].box
            parts = []  # of the matrix's box, with their places in it
            for t in range(self.tensor_ranks):
                holders = range(t, self.group.size, self.tensor_ranks)
                runs = [received[k, n] for k in holders if (k, n) in received]
                common = self._common(n, t)
                sides = [stop - start for start, stop in common]
                if runs and 0 not in sides:  # the runs are in the order of the sections
                    joined = runs[0] if len(runs) == 1 else torch.cat(runs)
                    parts.append((_slices(_inside(common, box)), joined.view(sides)))
            matrix = parts[0][1]
            if len(parts) > 1:
                matrix = matrix.new_empty([stop - start for start, stop in box])
                for place, part in parts:
                    matrix[place] = part
            whole.append(matrix.reshape(self.matrices[n].shape))
        return whole

    def _divided(self, n: int, whole: Tensor) -> list[Tensor]:
        """Return for each rank of the group its elements of matrix n, flat. whole: the matrix."""
        box = self.matrices[n].box
        view = whole.view([stop - start for start, stop in box])
        flats = [  # what each tensor rank has
            view[_slices(_inside(self._common(n, t), box))].reshape(-1)
            for t in range(self.tensor_ranks)
        ]
        return [
            flats[k % self.tensor_ranks][slice(*self._runs_of_own[k, n])]
            for k in range(self.group.size)
        ]


def _matrices_in(spec: ParamSpec, place: tuple[int, int], heads: str) -> list[_Matrix]:
    """Return the matrices of a parameter; of experts, those that this rank holds."""
    if spec.matrices is None:
        raise ValueError(f"{spec.name} does not say how it divides into matrices")
    found = []
    for name, box in spec.matrices.boxes(spec.shape, heads):
        if spec.is_expert and not spec.start <= box[0][0] < spec.stop:
            continue
        if spec.rows is not None and not any(
            _overlap(box, spec.rows.box(spec.shape, first)) for first in spec.rows.starts
        ):
            continue  # it is of another parameter, with other rows of this tensor
        *rows, columns = [stop - start for start, stop in box]
        name = f"{spec.name}:{name}" if name else spec.name
        found.append(_Matrix(place, box, name, (math.prod(rows), columns)))
    return found


def balanced(costs: list[float], owners: int) -> list[int]:
    """Return an owner for each cost, such that the owners' sums are about equal.

    The largest cost goes first, to the owner with the smallest sum so far (R. L. Graham, "Bounds on
    multiprocessing timing anomalies", 1969). Equal costs and sums go by number, so all ranks find
    the same owners.
    """
    sums = [(0.0, owner) for owner in range(owners)]
    owner_of = [0] * len(costs)
    for n in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        total, owner = sums[0]
        owner_of[n] = owner
        heapq.heapreplace(sums, (total + costs[n], owner))
    return owner_of


def in_rounds(
    costs: list[float], sizes: list[int], owner_of: list[int], most: int
) -> list[list[int]]:
    """Return the numbers of the matrices of each round, ascending.

    In a round an owner has at most `most` elements, or one matrix. Each owner begins with its most
    costly matrices, so in a round all owners have about equal work.
    """
    filled: dict[int, tuple[int, int]] = {}  # by owner: its last round, and its elements there
    rounds: list[list[int]] = []
    for n in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        number, elements = filled.get(owner_of[n], (0, 0))
        if elements and elements + sizes[n] > most:
            number, elements = number + 1, 0
        filled[owner_of[n]] = number, elements + sizes[n]
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(n)
    return [sorted(numbers) for numbers in rounds]


def pieces_of(box: Box, shape: Sequence[int], run: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the flat ranges [start, stop) of a tensor of this shape that hold a run of a box.

    run: elements [i, j) of the box in row-major order.
    """
    first, stop = run
    if first == stop:
        return []
    # `inner` elements of the box are adjacent: all of its trailing dimensions that are whole, and
    # one more. The other dimensions of the box count the ranges.
    outer = len(shape) - 1
    while outer > 0 and box[outer] == (0, shape[outer]):
        outer -= 1
    inner = math.prod(end - start for start, end in box[outer:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = []
    for number in range(first // inner, -(-stop // inner)):
        place = box[outer][0] * strides[outer]
        rest = number
        for dim in reversed(range(outer)):
            start, end = box[dim]
            rest, index = divmod(rest, end - start)
            place += (start + index) * strides[dim]
        low, high = max(first - number * inner, 0), min(stop - number * inner, inner)
        found.append((place + low, place + high))
    return found


def elements_before(box: Box, shape: Sequence[int], end: int) -> int:
    """Return how many elements of a box have a flat index below `end` in a tensor of this shape."""
    lengths = [stop - start for start, stop in box]
    count = 0
    inner = math.prod(shape)
    inner_of_box = math.prod(lengths)
    if inner_of_box == 0:
        return 0
    for (start, stop), size, length in zip(box, shape, lengths):
        inner //= size
        inner_of_box //= length
        index, end = divmod(end, inner)
        if index < start:
            return count
        if index >= stop:
            return count + length * inner_of_box
        count += (index - start) * inner_of_box
    return count


def _length(run: tuple[int, int]) -> int:
    """Return the number of elements of a run [i, j)."""
    return run[1] - run[0]


def _overlap(box: Box, other: Box) -> bool:
    """Return whether two boxes have an index in common."""
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(box, other))


def _inside(part: Box, box: Box) -> Box:
    """Return a part of a box by indices that count from the box's first."""
    return tuple((low - first, high - first) for (low, high), (first, _) in zip(part, box))


def _slices(box: Box) -> tuple[slice, ...]:
    """Return the index that takes a box out of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def _write(tensors: list[Tensor], round_: _Round, message: _Message) -> None:
    """Overwrite this rank's runs of a round's matrices by what the owners return."""
    pieces = round_.back
    values = message.arrived().split([stop - start for _, start, stop in pieces])
    if pieces:
        views = [tensors[number][start:stop] for number, start, stop in pieces]
        torch._foreach_copy_(views, list(values))
