"""Which ranks of a world a rehearsal runs, and as which of them every other rank is taken to do.

    chosen(config)              # the ranks that are run
    taken_as(config, ran)       # for every rank of the world, the one of `ran` that stands for it

What a rank does depends on its stage, on its place among those that gather keys, and on whether it
is first, last or between on an axis of the mesh: the first rank reports and holds what is not
split, the last one holds padding.
"""

import math
from collections.abc import Sequence

from config.schema import Config, coordinates

FIRST, BETWEEN, LAST = range(3)
AXES = ("pp", "dp", "cp", "tp")
# Nine ranks by their kind of place on each of AXES. On any two axes each pair of kinds is there
# once: an orthogonal array of strength two, which needs 9 of the 81 combinations.
PAIRS = [
    (stage, replica, (stage + 2 * replica) % 3, (stage + replica) % 3)
    for stage in (FIRST, BETWEEN, LAST)
    for replica in (FIRST, BETWEEN, LAST)
]
# The last ranks of the first and of the last stage.
ENDS = [(stage, LAST, LAST, LAST) for stage in (FIRST, LAST)]


def chosen(config: Config) -> list[int]:
    """The ranks to run: the first one of every stage and place among those that gather keys, and
    those of PAIRS and ENDS.
    """
    sizes = [config.layout.axes[axis] for axis in AXES]
    wanted = set()
    for kinds in (*PAIRS, *ENDS):
        wanted.add(tuple(_position(kind, size) for kind, size in zip(kinds, sizes)))
    places = _places(config)
    ranks = {rank for rank, place in enumerate(places) if place in wanted}
    return sorted(ranks | {group[0] for group in _alike(config, places)})


def taken_as(config: Config, ran: Sequence[int]) -> list[int]:
    """For every rank of the world the one of `ran`, which holds all of `chosen`, that does the
    same: of its stage and its place among those that gather keys, with the most axes on which both
    are first, between or last, and of these the lowest.
    """
    places = _places(config)
    own = set(ran)
    kinds = [_kinds(config, place) for place in places]
    found = list(range(len(places)))
    for group in _alike(config, places):
        candidates = [rank for rank in group if rank in own]
        of_kinds = {}
        for rank in group:
            if rank in own:
                continue
            if kinds[rank] not in of_kinds:
                of_kinds[kinds[rank]] = max(
                    candidates, key=lambda other: _common(kinds[rank], kinds[other])
                )
            found[rank] = of_kinds[kinds[rank]]
    return found


def _places(config: Config) -> list[tuple[int, ...]]:
    """Every rank's positions on AXES."""
    axes = config.layout.axes
    found = []
    for rank in range(math.prod(axes.values())):
        at = coordinates(rank, axes)
        found.append(tuple(at[axis] for axis in AXES))
    return found


def _alike(config: Config, places: list[tuple[int, ...]]) -> list[list[int]]:
    """Ranks of one stage, at one place among those that gather keys; each group ascends."""
    heads = config.layout.over_heads(config.model)
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, (stage, _, context, _) in enumerate(places):
        groups.setdefault((stage, context // heads), []).append(rank)
    return list(groups.values())


def _position(kind: int, size: int) -> int:
    """A position of that kind on an axis; on a short axis that has none, another one."""
    return (0, size // 2, size - 1)[kind]


def _kinds(config: Config, place: tuple[int, ...]) -> tuple[int, ...]:
    """Whether a rank is first, between or last on each of AXES."""
    found = []
    for axis, position in zip(AXES, place):
        ends = {config.layout.axes[axis] - 1: LAST, 0: FIRST}
        found.append(ends.get(position, BETWEEN))
    return tuple(found)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of axes on which two ranks are of the same kind."""
    return sum(a == b for a, b in zip(one, other))
