"""Which rank updates which whole matrix, and how its parts reach this rank and return.

Muon's update needs whole matrices, but a rank holds parts of them: tensor parallelism cuts matrices
along rows or columns, and ZeRO cuts the flat buffers of optim/buckets.py anywhere. Every matrix
gets one owner among the ranks that hold its parts or copies. For all matrices of an update set
there is one all-to-all to the owners, and one back:

    section of rank 0  [ a a a b ]  ->  owner of a: whole a  ->  f(a)  ->  [ a' a' a' b' ]
    section of rank 1  [ b b c c ]  ->  owner of b: whole b  ->  f(b)  ->  [ b' b' c' c' ]

A parameter says how it divides into matrices (parallel.Matrices): each matrix is a box of indices
of the global tensor. The elements of a box that are in a rank's section are one run of the box's
elements in row-major order, because a rank's buffer is in row-major order too. So a message is a
run for each matrix, and no indices are sent. Padding is in no box.

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

from distributed.collectives import Group
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


class MatrixOwners:
    """The matrices of an update set, their owners, and the exchange of their elements.

    matrices: all of them, in the order of the buckets. owner_of: for each matrix the rank of the
    exchange that updates it. own: the indices of this rank's matrices.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        group: Group,
        tensor_ranks: int,
        heads: str,
        cost: Callable[[int, int], float],
    ):
        """Find the matrices and give each an owner, the same on all ranks.

        group: the ranks that hold parts or copies. tensor_ranks: how many of them cut a tensor; 1
        for experts, whose matrices are whole. heads: the value of muon_qkv. cost: the work of an
        update by rows and columns; the owners' sums of it are about equal.
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
        here = group.rank
        owned_by: list[list[int]] = [[] for _ in range(group.size)]
        for n, owner in enumerate(self.owner_of):
            owned_by[owner].append(n)
        self.own = owned_by[here]
        ranks = range(group.size)
        # Pairs (rank, matrix) in the order of the messages' elements. `out`: of the parts that this
        # rank sends to owners, and gets back; `come`: of the parts of its own matrices.
        self._out = [(k, n) for k in ranks for n in owned_by[k] if self._is_sent(n, here, k)]
        self._come = [(k, n) for k in ranks for n in self.own if self._is_sent(n, k, here)]
        self._return = [(k, n) for k in ranks for n in self.own]
        self._back = [(k, n) for k in ranks for n in owned_by[k]]
        self._runs_here = {n: self._run(n, here) for n in range(len(self.matrices))}
        self._runs_of_own = {(k, n): self._run(n, k) for k in ranks for n in self.own}

    def update(self, tensors: list[Tensor], function: Callable[[list[Tensor]], None]) -> None:
        """Replace every matrix by what `function` makes of it; collective over the group.

        tensors: for each section this rank's elements, flat, which are read and overwritten.
        function: takes this rank's matrices in the order of `own`, each (rows, columns), perhaps
        none, and overwrites them.
        """
        like = tensors[0]
        parts = self._read(tensors)
        sent = [(k, parts[n]) for k, n in self._out]
        lengths = [(k, _length(self._runs_of_own[k, n])) for k, n in self._come]
        received = dict(zip(self._come, self._exchange(like, sent, lengths)))
        whole = [self._join(n, received) for n in self.own]
        function(whole)
        result = dict(zip(self.own, whole))
        sent = [(k, self._part(n, k, result[n])) for k, n in self._return]
        lengths = [(k, _length(self._runs_here[n])) for k, n in self._back]
        back = self._exchange(like, sent, lengths)
        self._write(tensors, {n: values for (_, n), values in zip(self._back, back)})

    def _exchange(
        self, like: Tensor, sent: list[tuple[int, Tensor]], lengths: list[tuple[int, int]]
    ) -> Sequence[Tensor]:
        """Send parts to ranks, and return the parts that arrive: one all-to-all.

        sent: pairs (rank, part), by rank. lengths: pairs (rank, elements) of the parts that arrive.
        """
        counts_in, counts_out = [0] * self.group.size, [0] * self.group.size
        for rank, part in sent:
            counts_out[rank] += part.numel()
        for rank, length in lengths:
            counts_in[rank] += length
        source = torch.cat([like.new_empty(0), *(part.reshape(-1) for _, part in sent)])
        output = like.new_empty(sum(counts_in))
        self.group.at_once.all_to_all(output, source, (counts_in, counts_out)).wait()
        return output.split([length for _, length in lengths])

    # ---- This rank's elements --------------------------------------------------------------------

    def _placed(self, n: int) -> tuple[Section, Placed]:
        """Return the section and the parameter of matrix n."""
        number, index = self.matrices[n].place
        section = self.sections[number]
        return section, section.parameters[index]

    def _range(self, section: Section, placed: Placed, rank: int) -> tuple[int, int]:
        """Return which elements [start, stop) of the local parameter are in a rank's section."""
        replica = rank // self.tensor_ranks
        first = replica * section.size if section.sharded else 0
        size = math.prod(placed.shape)
        start, stop = first - placed.offset, first + section.size - placed.offset
        return min(max(start, 0), size), min(max(stop, 0), size)

    def _opened(self, tensors: list[Tensor], place: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return a local parameter: its elements in this rank's section, and the whole of it.

        The second is a view of the first if the section has all of it; else it is a copy, in which
        the elements of other sections are zero.
        """
        section = self.sections[place[0]]
        placed = section.parameters[place[1]]
        start, stop = self._range(section, placed, self.group.rank)
        replica = self.group.rank // self.tensor_ranks
        first = placed.offset + start - (replica * section.size if section.sharded else 0)
        held = tensors[place[0]][first : first + stop - start]
        if held.numel() == math.prod(placed.shape):
            return held, held.view(placed.shape)
        whole = held.new_zeros(math.prod(placed.shape))
        whole[start:stop] = held
        return held, whole.view(placed.shape)

    def _places(self) -> dict[tuple[int, int], list[int]]:
        """Return the matrices of every parameter of which this rank holds elements."""
        found: dict[tuple[int, int], list[int]] = {}
        for n, matrix in enumerate(self.matrices):
            if _length(self._runs_here[n]):
                found.setdefault(matrix.place, []).append(n)
        return found

    def _read(self, tensors: list[Tensor]) -> dict[int, Tensor]:
        """Return this rank's run of every matrix, flat."""
        parts = dict.fromkeys(range(len(self.matrices)), tensors[0].new_empty(0))
        for place, numbers in self._places().items():
            _, whole = self._opened(tensors, place)
            for n in numbers:
                box = self._local_box(n, self.group.rank)
                parts[n] = whole[_slices(box)].reshape(-1)[slice(*self._runs_here[n])]
        return parts

    def _write(self, tensors: list[Tensor], parts: dict[int, Tensor]) -> None:
        """Overwrite this rank's run of every matrix by `parts`, flat."""
        for place, numbers in self._places().items():
            held, whole = self._opened(tensors, place)
            for n in numbers:
                view = whole[_slices(self._local_box(n, self.group.rank))]
                if parts[n].numel() == view.numel():
                    view.copy_(parts[n].view(view.shape))
                    continue
                flat = view.reshape(-1).clone()
                flat[slice(*self._runs_here[n])] = parts[n]
                view.copy_(flat.view(view.shape))
            if whole.numel() != held.numel():
                section, placed = self._placed(numbers[0])
                held.copy_(whole.view(-1)[slice(*self._range(section, placed, self.group.rank))])

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
        """Return which indices of the global tensor a rank holds, perhaps none."""
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

    def _join(self, n: int, received: dict[tuple[int, int], Tensor]) -> Tensor:
        """Return the whole matrix n, contiguous, of the parts that ranks have sent."""
        parts = []  # of the matrix's box, with their places in it
        box = self.matrices[n].box
        lengths = [stop - start for start, stop in box]
        for t in range(self.tensor_ranks):
            runs = [
                received[k, n]
                for k in range(t, self.group.size, self.tensor_ranks)
                if (k, n) in received
            ]
            common = self._common(n, t)
            here = [stop - start for start, stop in common]
            if runs and 0 not in here:  # the runs are in the order of the sections
                joined = runs[0] if len(runs) == 1 else torch.cat(runs)
                parts.append((common, joined.view(here)))
        if len(parts) == 1:
            return parts[0][1].reshape(self.matrices[n].shape)
        whole = parts[0][1].new_empty(lengths)
        for common, part in parts:
            whole[_slices(_inside(common, box))] = part
        return whole.view(self.matrices[n].shape)

    def _part(self, n: int, rank: int, whole: Tensor) -> Tensor:
        """Return a rank's run of matrix n, flat. whole: the matrix."""
        box = self.matrices[n].box
        view = whole.view([stop - start for start, stop in box])
        view = view[_slices(_inside(self._common(n, rank), box))]
        return view.reshape(-1)[slice(*self._runs_of_own[rank, n])]


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
