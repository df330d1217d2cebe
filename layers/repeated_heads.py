"""Matrices of heads, some rows of which several tensor ranks have, as heads are too few for tp.

With g heads on a multiple of g ranks, tp / g neighbouring ranks have the same head and an equal
share of what belongs to it: in attention a key/value head and its query heads, in a gated delta net
a key head and its value heads.

    rank        0            1            2            3         g = 2, four query heads of each
    rows     q0 q1 k v    q2 q3 k v    q0 q1 k v    q2 q3 k v
    head        0            0            1            1

The global tensor is that of the layer, (g, rows of a head, ...). A rank's rows of it are not
adjacent, and some are held by several ranks, so they are several parameters, each with one range of
rows: here q; kv, whose gradient is summed over the ranks that hold it (a group of the mesh); and
the gates of the queries. One product computes all of them.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from parallel import Matrices, ParamFactory, RowsOfRanks, joined_column_linear


class Repeated(NamedTuple):
    """The mesh's group of the tensor ranks with the same head, and the parts that all of them have,
    and not a share.
    """

    group: str
    parts: tuple[str, ...]


KEYS_AND_VALUES = Repeated("kv_copies", ("k", "v"))


def rows_of_heads(heads: int, factory: ParamFactory) -> RowsOfRanks | None:
    """Return the rows of each rank of a tensor with a row for each key/value head, such as norms.

    None: tp divides the heads, so the rows are equal parts.
    """
    tp = factory.mesh.tp.size
    if heads % tp == 0:
        return None
    starts = tuple(rank * heads // tp for rank in range(tp))
    return RowsOfRanks(starts, 1, 1, KEYS_AND_VALUES.group)


def add_parts(
    module: nn.Module,
    kind: str,
    factory: ParamFactory,
    name: str,
    shape: tuple[int, ...],
    parts: tuple[tuple[str, int], ...],
    repeated: Repeated,
    **options: Any,
) -> list[str]:
    """Give a module its rank's rows of the tensor `name`, and return the parameters' names in it.

    They stand in the order of `parts`, the names and lengths of the rows of a head. shape: (g, rows
    of a head, ...). kind: ends the parameters' names. options: of ParamFactory.parameter.
    """
    heads, rows_of_head = shape[:2]
    tp = factory.mesh.tp.size
    ranks = tp // heads  # that share a head
    names = []
    for part, first, count, is_repeated in _ranges(parts, ranks, repeated.parts):
        starts = []
        for rank in range(tp):
            head, place = divmod(rank, ranks)
            own = 0 if is_repeated else place * count
            starts.append(head * rows_of_head + first + own)
        rows = RowsOfRanks(tuple(starts), count, 2, repeated.group if is_repeated else "")
        names.append(f"{part}_{kind}")
        parameter = factory.parameter(name, shape, rows=rows, **options)
        module.register_parameter(names[-1], parameter)
    return names


class RepeatedHeads(nn.Module):
    """y = x W^T + b, (s, b, in) -> (s, b, rows of this rank), in the order of the parts of W."""

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        inputs: int,
        shape: tuple[int, ...],
        bias: bool,
        matrices: Matrices,
        repeated: Repeated = KEYS_AND_VALUES,
    ):
        """Make this rank's rows of W, (*shape, inputs), and of b if `bias`.

        shape: (g, rows of a head, ...). matrices: its parts are the rows.
        """
        super().__init__()
        self.factory = factory
        own = matrices.parts, repeated
        options: dict[str, Any] = {"std": factory.std, "decay": True, "matrices": matrices}
        made = f"{name}.weight", (*shape, inputs)
        self.weights = add_parts(self, "weight", factory, *made, *own, **options)
        self.biases = []
        if bias:
            self.biases = add_parts(self, "bias", factory, f"{name}.bias", shape, *own)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's columns of y: (s, b, rows ...)."""
        weights = [getattr(self, name) for name in self.weights]
        biases = [getattr(self, name) for name in self.biases]
        return joined_column_linear(x, weights, biases, self.factory)


def _ranges(
    parts: tuple[tuple[str, int], ...], ranks: int, repeated: tuple[str, ...]
) -> list[tuple[str, int, int, bool]]:
    """Return name, first row in a head, rows of a rank and whether several ranks have them, of each
    range of adjacent rows. ranks: those that share a head.
    """
    found: list[tuple[str, int, int, bool]] = []
    first = 0
    for name, length in parts:
        is_repeated = name in repeated
        if is_repeated and found and found[-1][3]:
            before, start, count, _ = found[-1]
            found[-1] = before + name, start, count + length, True
        else:
            found.append((name, first, length if is_repeated else length // ranks, is_repeated))
        first += length
    return found
