"""The same search with measured rows in place of runs: how many it needs, and what it gives away.

    print("\\n".join(report("rows.csv", "tables.csv", gain=0.01)))

A table is a choice between rows: the same purpose, several layouts. They are compared by seconds
per sample. Beside the search stand random order and trying all.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from config.messages import UserError
from config.schema import Config
from planner import hardware, published_rows
from planner.published_rows import Case
from planner.step_time import predict
from tuner.search import Point, Search, features


@dataclass(frozen=True)
class Replay:
    """One table's search: what was measured, in order, and how good the best of it is."""

    table: str
    rows: int
    order: list[str]  # ids of the rows that were measured
    found_at: int | None  # the number of the measurement that found the best row
    regret_after: list[float]  # best so far over the best of all, less 1, after each measurement
    random: float  # measurements that random order needs for the best row, on average
    random_regret: float  # after as many as the search took, on average

    def within(self, share: float) -> int | None:
        """The number of the measurement after which the regret is at most `share`."""
        return next((i for i, r in enumerate(self.regret_after, 1) if r <= share + 1e-12), None)

    def regret(self, count: int) -> float:
        """Regret after that many measurements, or at the end if there are fewer."""
        return self.regret_after[min(count, len(self.regret_after)) - 1]


def predictions(cases: list[Case], given: list[dict[str, str]]) -> dict[str, float]:
    """Seconds as the planner has them, by row; as the row says, if it has `predicted_sec`."""
    said = {row["row_id"]: row.get("predicted_sec") for row in given}
    machines = {name: hardware.load(name) for name in {c.machine for c in cases}}
    found = {}
    for case in cases:
        if said.get(case.id):
            found[case.id] = float(said[case.id])
            continue
        machine = case.on(machines[case.machine])
        found[case.id] = predict(case.model, case.layout, case.training, machine).seconds
    return found


def replay(
    name: str,
    cases: list[Case],
    predicted: dict[str, float],
    gain: float = 0.01,
    noise: float = 0,
    trial: Callable[[Case], float] | None = None,
    most: int | None = None,
) -> Replay:
    """Search among the rows of one table; rows without seconds are runs that failed.

    `trial` gives the seconds of one run of a row, where they vary around the row's by `noise`
    (standard deviation of the logarithm): the contenders then run once more, as in tune.py. At
    most `most` runs take place.
    """
    real = [_per_sample(case, case.seconds) for case in cases]
    points = [
        Point(
            c.id, _per_sample(c, predicted[c.id]), features(Config(c.model, c.layout, c.training))
        )
        for c in cases
    ]
    search, order, regrets = Search(points, gain, noise=noise), [], []
    best = min(seconds for seconds in real if seconds)

    def measure(index: int) -> None:
        case = cases[index]
        search.tell(index, _per_sample(case, trial(case)) if trial else real[index])
        order.append(case.id)
        regrets.append(math.inf if search.best is None else real[search.best] / best - 1)

    while (index := search.next()) is not None and len(order) != most:
        measure(index)
    for index in search.contenders() if trial else []:
        if len(order) != most:
            measure(index)
    return Replay(
        table=name,
        rows=len(cases),
        order=order,
        found_at=next((i for i, r in enumerate(regrets, 1) if r == 0), None),
        regret_after=regrets,
        random=(len(cases) + 1) / 2,
        random_regret=random_regret([r for r in real if r], len(order)),
    )


def _per_sample(case: Case, seconds: float | None) -> float | None:
    return seconds / case.training.global_batch_size if seconds else None


def random_regret(real: list[float], count: int) -> float:
    """Mean regret of the best of `count` rows drawn at random."""
    order, total = sorted(real), math.comb(len(real), min(count, len(real)))
    count = min(count, len(real))
    mean = sum(
        seconds * math.comb(len(order) - 1 - index, count - 1) / total
        for index, seconds in enumerate(order)
    )
    return mean / order[0] - 1


def replay_all(
    tables: dict[str, list[str]],
    cases: list[Case],
    predicted: dict[str, float],
    gain: float = 0.01,
    noise: float = 0,
) -> list[Replay]:
    """Every table that has rows; UserError if none has."""
    by_id = {case.id: case for case in cases}
    found = []
    for name, ids in tables.items():
        own = [by_id[i] for i in ids if i in by_id]
        if any(case.seconds for case in own):
            found.append(replay(name, own, predicted, gain, noise))
    if not found:
        raise UserError("the tables name none of the rows")
    return found


def report(path: str, tables: str | None, gain: float = 0.01) -> list[str]:
    """Replay a file of rows, all of them as one choice if no tables are given; Markdown lines."""
    given = published_rows.read(path)
    cases = published_rows.cases(given)
    choices = published_rows.read_tables(tables) if tables else {"all rows": [c.id for c in cases]}
    return lines(replay_all(choices, cases, predictions(cases, given), gain))


def lines(found: list[Replay]) -> list[str]:
    """One row a table, and what they come to, in Markdown."""
    text = [
        "| table | rows | measured | best found at | regret % after 1, 2, 3, all | "
        "random: best at, regret % after as many |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        regrets = ", ".join(f"{100 * one.regret(n):.2f}" for n in (1, 2, 3, len(one.order)))
        text.append(
            f"| {one.table} | {one.rows} | {len(one.order)} | {one.found_at or 'not'} | "
            f"{regrets} | {one.random:.1f}, {100 * one.random_regret:.2f} |"
        )
    early = sum(one.found_at is not None and one.found_at <= 3 for one in found)
    ends = [one.regret_after[-1] for one in found]
    tried, total = sum(len(one.order) for one in found), sum(one.rows for one in found)
    return [
        *text,
        "",
        f"Best found within 3 measurements in {early} of {len(found)} tables; regret at the end: "
        f"largest {100 * max(ends):.2f} %, mean {100 * statistics.mean(ends):.2f} %. "
        f"{tried} measurements where trying all takes {total}.",
    ]
