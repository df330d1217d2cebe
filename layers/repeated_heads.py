"""The matrix of queries, keys and values where there are fewer key/value heads than tensor ranks.

With g heads on a multiple of g ranks, tp / g neighbouring ranks have the same key/value head and an
equal share of its query heads each:

    rank        0            1            2            3         g = 2, four query heads of each
    rows     q0 q1 k v    q2 q3 k v    q0 q1 k v    q2 q3 k v
    head        0            0            1            1

The global tensor is that of layers/attention.py, (g, rows of a head, d, h). A rank's rows of it are
not adjacent, and some are held by several ranks, so they are several parameters, each with one
range of rows: q; kv, whose gradient is summed over the ranks that hold it (`mesh.kv_copies`); and
the gates of the queries. One product computes all of them.
"""

from torch import Tensor, nn

from parallel import Matrices, ParamFactory, RowsOfRanks, joined_column_linear

COPIES = "kv_copies"  # the mesh's group of the ranks with the same key/value head


def rows_of_heads(heads: int, factory: ParamFactory) -> RowsOfRanks | None:
    """Return the rows of each rank of a tensor with a row for each key/value head, such as norms.

    None: tp divides the heads, so the rows are equal parts.
    """
    tp = factory.mesh.tp.size
    if heads % tp == 0:
        return None
    return RowsOfRanks(tuple(rank * heads // tp for rank in range(tp)), 1, 1, COPIES)


class RepeatedHeads(nn.Module):
    """y = x W^T + b, (s, b, in) -> (s, b, rows of this rank), in the order q, k, v, gates."""

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        inputs: int,
        shape: tuple[int, int, int],
        bias: bool,
        matrices: Matrices,
    ):
        """Make this rank's rows of W, (*shape, inputs), and of b if `bias`.

        shape: (g, rows of a head, d). matrices: its parts are q, k, v and perhaps gates.
        """
        super().__init__()
        self.factory = factory
        heads, rows_of_head, _ = shape
        tp = factory.mesh.tp.size
        ranks = tp // heads  # that share a head
        self.names: list[str] = []
        self.has_bias = bias
        for part, first, count, copies in _parts(matrices, ranks):
            starts = []
            for rank in range(tp):
                head, place = divmod(rank, ranks)
                own = 0 if copies else place * count
                starts.append(head * rows_of_head + first + own)
            rows = RowsOfRanks(tuple(starts), count, 2, copies)
            weight = factory.parameter(
                f"{name}.weight",
                (*shape, inputs),
                std=factory.std,
                decay=True,
                matrices=matrices,
                rows=rows,
            )
            self.register_parameter(f"{part}_weight", weight)
            if bias:
                made = factory.parameter(f"{name}.bias", shape, rows=rows)
                self.register_parameter(f"{part}_bias", made)
            self.names.append(part)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's columns of y: (s, b, rows d)."""
        weights = [getattr(self, f"{part}_weight") for part in self.names]
        biases = [getattr(self, f"{part}_bias") for part in self.names if self.has_bias]
        return joined_column_linear(x, weights, biases, self.factory)


def _parts(matrices: Matrices, ranks: int) -> list[tuple[str, int, int, str]]:
    """Return the name of each parameter, its first row in a head, the rows of a rank, and the group
    that holds the same rows. ranks: those that share a head.
    """
    lengths = dict(matrices.parts)
    queries = lengths["q"]
    parts = [("q", 0, queries // ranks, ""), ("kv", queries, 2, COPIES)]
    if gates := lengths.get("gate", 0):
        parts.append(("gate", queries + 2, gates // ranks, ""))
    return parts
