"""The tuner's search with measured rows in place of runs: how many it needs, how well it chooses.

    cases, predicted = load("rows.csv")
    print("\\n".join(lines([replay("all rows", cases, predicted)])))

A decision table is a choice between rows: the same purpose, several layouts. They are compared by
seconds per sample. Random order and trying all rows are the baselines.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import published_cases
import published_rows
from published_cases import Case

from config.messages import UserError
from config.schema import Config
from planner import hardware
from planner.step_time import predict
from tuner.search import Search, features


@dataclass(frozen=True)
class Replay:
    """One table's search: what was measured, in order, and how good the best of it is.

    Regret is the seconds of the best measured row over those of the best row of all, minus 1.
    """

    table: str
    rows: int
    order: list[str]  # ids of the rows that were measured
    found_at: int | None  # the number of the measurement that found the best row
    regret_after: list[float]  # after each measurement
    random: float  # measurements that random order needs for the best row, on average
    random_regret: float  # mean of random orders, after the same number of measurements

    def within(self, share: float) -> int | None:
        """The number of the measurement after which the regret is at most `share`."""
        return next((i for i, r in enumerate(self.regret_after, 1) if r <= share + 1e-12), None)

    def regret(self, count: int) -> float:
        """Regret after that many measurements, or at the end if there are fewer."""
        return self.regret_after[min(count, len(self.regret_after)) - 1]


def read_cases(path: str) -> tuple[list[dict[str, str]], list[Case]]:
    """The rows of a file and the runs that they describe; UserError if it is no table of rows."""
    rows = published_rows.read(path)
    return rows, published_cases.cases(rows)


def load(path: str) -> tuple[list[Case], dict[str, float]]:
    """The runs of a file of rows, and the predicted seconds of each by row id.

    A row's own `predicted_sec` is taken if it has one, else the planner's prediction. Raises
    UserError if the file is not a table of rows.
    """
    rows, cases = read_cases(path)
    given = {row["row_id"]: row.get("predicted_sec") for row in rows}
    machines = {name: hardware.load(name) for name in {c.machine for c in cases}}
    predicted = {}
    for case in cases:
        if given.get(case.id):
            predicted[case.id] = float(given[case.id])
            continue
        machine = case.on(machines[case.machine])
        predicted[case.id] = predict(case.model, case.layout, case.training, machine).seconds
    return cases, predicted


def replay(
    name: str,
    cases: list[Case],
    predicted: dict[str, float],
    min_gain: float = 0.01,
    noise: float = 0,
    trial: Callable[[Case], float] | None = None,
    most: int | None = None,
) -> Replay:
    """Search among the rows of one table; rows without seconds are runs that failed.

    `trial` gives the seconds of one run of a row, which vary around the row's by `noise` (standard
    deviation of the logarithm): the contenders then run once more, as in tuner/session.py. At most
    `most` runs take place.
    """
    real = [_per_sample(case, case.seconds) for case in cases]
    expected = [_per_sample(case, predicted[case.id]) for case in cases]
    positions = [features(Config(case.model, case.layout, case.training)) for case in cases]
    search = Search(expected, positions, min_gain, noise)
    order: list[str] = []
    regrets: list[float] = []
    best = min(seconds for seconds in real if seconds)

    def measure(index: int) -> None:
        case = cases[index]
        search.add(index, _per_sample(case, trial(case)) if trial else real[index])
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


def replay_tables(
    tables: dict[str, list[str]],
    cases: list[Case],
    predicted: dict[str, float],
    min_gain: float = 0.01,
) -> list[Replay]:
    """One search for each table that has rows; UserError if none has."""
    by_id = {case.id: case for case in cases}
    found = []
    for name, ids in tables.items():
        own = [by_id[i] for i in ids if i in by_id]
        if any(case.seconds for case in own):
            found.append(replay(name, own, predicted, min_gain))
    if not found:
        raise UserError("the tables name none of the rows")
    return found


def lines(found: list[Replay]) -> list[str]:
    """One row for each table, and their summary, in Markdown."""
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
