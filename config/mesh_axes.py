"""The axes of the mesh of ranks, and the position of each rank on them. Pure arithmetic.

coordinates(3, {"pp": 2, "tp": 2})              {"pp": 1, "tp": 1}
rows_along({"pp": 2, "tp": 2}, ["tp"])          [(0, 1), (2, 3)]: the tp groups
"""

import math
from collections.abc import Collection, Mapping

# The axes of the mesh of ranks, the slowest first: neighbouring ranks differ in tp.
AXES = ("pp", "dp", "cp", "tp")


def coordinates(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Return a rank's position on every axis; `axes` has the sizes, with the slowest axis first.

    rank = ((pp * DP + dp) * CP + cp) * TP + tp, where DP, CP and TP are sizes. Only this function
    computes it. Example: axes pp 2, dp 1, cp 1, tp 2; rank 3 has pp 1, dp 0, cp 0, tp 1.
    """
    place = {}
    for name in reversed(list(axes)):
        rank, place[name] = divmod(rank, axes[name])
    return {name: place[name] for name in axes}


def rows_along(axes: Mapping[str, int], names: Collection[str]) -> list[tuple[int, ...]]:
    """Return all groups of ranks that differ only along the named axes, such as the tp groups.

    axes: the sizes of all axes. names: the axes along which the ranks of a group differ. The ranks
    of a group ascend. Example: pp 2 and tp 2, names ("tp",): (0, 1) and (2, 3); ("pp",): (0, 2) and
    (1, 3).
    """
    # Each group's ranks. The key is their common position on the axes that are not in `names`.
    rows: dict[tuple, list[int]] = {}
    for rank in range(math.prod(axes.values())):
        place = coordinates(rank, axes)
        others = tuple(position for name, position in place.items() if name not in names)
        rows.setdefault(others, []).append(rank)
    return [tuple(row) for row in rows.values()]
