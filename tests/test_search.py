"""The tuner's search: if this failed, it would measure too much or stop before the fastest."""

import math

import pytest
import tune_replay

from tuner.search import Point, Search


def grid(slope: float) -> tuple[list[Point], list[float]]:
    """Layouts of 4 tp x 4 pp with nearly equal predictions; tp really costs `slope` a doubling."""
    points, real = [], []
    for tp in range(4):
        for pp in range(4):
            points.append(Point(f"tp{2**tp} pp{2**pp}", 1.0 + 0.01 * pp, (tp, pp)))
            real.append(2.0 * math.exp(slope * tp))
    return points, real


def drive(search: Search, real: list[float]) -> list[int]:
    order = []
    while (index := search.next()) is not None:
        search.add(index, real[index])
        order.append(index)
    return order


def test_the_first_is_the_one_predicted_fastest():
    points, _ = grid(0.3)
    search = Search([*points, Point("fast", 0.5, (3, 3))])
    assert search.points[search.next()].name == "fast"
    assert search.best is None


def test_a_factor_common_to_all_is_no_reason_to_go_on():
    """A machine ten times slower than assumed, ratios as predicted: two or three runs decide."""
    points = [Point(str(i), 1.0 + 0.3 * i, (i, 0)) for i in range(10)]
    search = Search(points)
    assert drive(search, [10 * p.predicted for p in points])[0] == 0
    assert len(search.measured) <= 3


def test_a_slope_is_learned_and_used():
    points, real = grid(-0.3)  # predicted: tp does not matter; measured: tp 8 is the fastest
    search = Search(points)
    order = drive(search, real)
    assert points[search.best].name.startswith("tp8")
    assert len(order) <= len(points) // 2
    mean, _ = search.posterior()
    assert mean[0] - mean[-4] == pytest.approx(
        0.9, abs=0.15
    )  # the same for layouts without a measurement


def test_failures_are_results():
    points, _ = grid(0.3)
    search = Search(points)
    first = search.next()
    search.add(first, None)
    assert search.best is None
    assert search.next() not in (None, first)
    for index in range(len(points)):
        search.add(index, None)
    assert search.next() is None
    assert search.best is None


def test_where_layouts_fail_others_are_tried_first():
    """All with pp 8 fail, and are predicted fastest: the search does not run them all."""
    points = [Point(f"tp{t} pp{p}", 1.0 - 0.01 * p, (t, p)) for t in range(4) for p in range(4)]
    search = Search(points)
    for _ in range(4):
        index = search.next()
        search.add(index, None if points[index].features[1] == 3 else 1.0)
    assert len(search.failed) <= 2
    assert search.best is not None


def test_what_the_planner_says_of_itself_counts():
    """A risk of running out of memory comes later; an unsure layout is tried before a sure one."""
    safe, risky = Point("safe", 1.05, (0,)), Point("risky", 1.0, (1,), risk=0.5)
    assert Search([safe, risky]).next() == 0
    alike = [Point("sure", 1.1, (1,), 0.1), Point("unsure", 1.1, (-1,), 0.4)]
    search = Search([Point("first", 1.0, (0,), 0.1), *alike])
    search.add(0, 1.0)
    _, deviation = search.posterior()
    assert deviation[2] > deviation[1]
    assert search.next() == 2


def test_a_repeated_layout_counts_by_its_mean():
    search = Search([Point("a", 1.0, (0,)), Point("b", 1.0, (1,))], noise=0.1)
    search.add(0, 1.0)
    search.add(1, 1.05)
    assert search.best == 0
    search.add(0, 1.4)
    assert search.best == 1


# -- on measured choices ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["in-sample", "held out"])
def test_published_tables(kind):
    found = tune_replay.published(kind)
    assert len(found) == 12
    assert sum(one.found_at is not None and one.found_at <= 3 for one in found) >= 10
    assert max(one.regret_after[-1] for one in found) <= 0.01
    assert sum(len(one.order) for one in found) < sum(one.rows for one in found)


def test_the_space_measured_in_full():
    found, facts = tune_replay.measured_space()
    assert 40 <= found.rows <= 60
    assert found.within(tune_replay.GOAL) <= found.rows // 4
    assert found.regret_after[-1] <= tune_replay.GOAL
    assert facts["times"] > 3
    ends = [one.regret_after[-1] for one in tune_replay.measured_space_with_noise(0.03)]
    assert sum(ends) / len(ends) < 0.01
    assert all(
        len(one.order) <= found.rows // 4 for one in tune_replay.measured_space_with_noise(0.1)
    )
