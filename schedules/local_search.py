"""A faster order from an order, where there are too many to try all: passes moved within a rank.

    rows = improved(rows, rank_of, seconds, transfer, sizes, limits)

A pass is taken out of a rank's row and put in a few places earlier or later. What is not slower,
holds no more than it may and does not deadlock is kept. Moves are drawn from a generator with a
fixed seed, so that all ranks find the same.
"""

import random
from collections.abc import Sequence
from itertools import accumulate

from schedules.list_scheduling import Row
from schedules.schedule import STEPS
from schedules.simulation import Seconds

ACTIONS = 600_000  # simulated in all
MOST_TRIES, FARTHEST = 4000, 5  # moves that are tried, and places that a pass moves by at the most
FEWEST_TRIES = 200  # with less nothing is found


def improved(
    rows: Sequence[Row],
    rank_of: Sequence[int],
    seconds: Seconds,
    transfer: float,
    sizes: Sequence[float],
    limits: Sequence[float],
) -> Sequence[Row]:
    """The rows of an order with a split backward, or faster ones; arguments as in `list_rows`."""
    tries = min(MOST_TRIES, ACTIONS // sum(map(len, rows)))
    draw, rows = random.Random(0), list(rows)
    best = _ends(rows, rank_of, seconds, transfer)
    for _ in range(tries if tries >= FEWEST_TRIES else 0):
        rank = draw.randrange(len(rows))
        before = rows[rank]
        rows[rank] = _moved(before, draw.randrange(len(before)), draw.randint(-FARTHEST, FARTHEST))
        held = accumulate(sizes[s] * ((kind == "F") - (kind == "W")) for kind, s, _ in rows[rank])
        fits = rows[rank] is not before and max(held) <= limits[rank] * (1 + 1e-9)
        ends = _ends(rows, rank_of, seconds, transfer) if fits else None
        if ends and best and ends <= best:
            best = ends
        else:
            rows[rank] = before
    return rows


def _moved(row: Row, place: int, by: int) -> Row:
    """The row with a pass moved; the row itself if that would change the order of a micro-batch's
    passes, or of the micro-batches of a pass.
    """
    to = max(0, min(len(row) - 1, place + by))
    kind, stage, m = row[place]
    passed = row[min(place, to) : max(place, to) + 1]
    alike = sum(s == stage and (k == kind or n == m) for k, s, n in passed)
    if to == place or alike > 1:
        return row
    left = [*row[:place], *row[place + 1 :]]
    return [*left[:to], row[place], *left[to:]]


def _ends(
    rows: Sequence[Row], rank_of: Sequence[int], seconds: Seconds, transfer: float
) -> tuple[float, float] | None:
    """When the last pass ends, and the sum of all passes' ends; None if ranks wait for ever."""
    places, clocks, total = [0 for _ in rows], [0.0 for _ in rows], 0.0
    ends: dict[tuple[str, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                kind, stage, m = action = row[places[rank]]
                source = stage - STEPS[kind]
                if kind != "W" and 0 <= source < len(rank_of):
                    arrived = ends.get((kind, source, m))
                    if arrived is None:
                        break
                    arrived += transfer * (rank_of[source] != rank)
                    clocks[rank] = max(clocks[rank], arrived)
                clocks[rank] += seconds[kind, stage]
                ends[action] = clocks[rank]
                total += clocks[rank]
                places[rank] += 1
                moved = True
    return (max(clocks), total) if len(ends) == sum(map(len, rows)) else None
