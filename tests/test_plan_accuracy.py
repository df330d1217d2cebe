"""If this failed, the planner would miss published rows by more than the documentation says."""

import statistics

import engines
import plan_accuracy as accuracy
import published_cases
import published_rows
import pytest

from config.messages import UserError

VALUES = {c.name: c.value for c in engines.constants()}
FIGURES = ("in-sample", "held out")


@pytest.fixture(scope="module")
def cases() -> list[published_cases.Case]:
    return published_cases.cases(published_rows.read(str(accuracy.DATA / "measured_rows.csv")))


@pytest.fixture(scope="module")
def tables() -> dict[str, list[str]]:
    return published_rows.read_tables(str(accuracy.DATA / "decision_tables.csv"))


@pytest.fixture(scope="module")
def predicted(cases) -> dict[tuple[str, str], dict[str, float]]:
    found = {}
    for kind in ("seconds", "gigabytes"):
        found[kind, "in-sample"] = accuracy.predictions(cases, kind, VALUES)
        found[kind, "held out"] = accuracy.held_out(cases, kind, VALUES)
    return found


def off(cases, predicted, kind, figure, sources) -> float:
    """Mean error in per cent over the usable rows of some sources."""
    own = [c for c in accuracy.usable(cases, kind) if c.source in sources]
    assert own
    return 100 * accuracy.mean_error(own, kind, predicted[kind, figure])


@pytest.mark.parametrize(("figure", "most"), [("in-sample", 4.0), ("held out", 6.0)])
def test_time_on_jean_zays_a100(cases, predicted, figure, most):
    assert off(cases, predicted, "seconds", figure, ("001",)) <= most


@pytest.mark.parametrize("figure", FIGURES)
def test_time_on_selene(cases, predicted, figure):
    assert off(cases, predicted, "seconds", figure, ("003",)) <= 6.0


@pytest.mark.parametrize("figure", FIGURES)
def test_time_and_memory_on_v100(cases, predicted, figure):
    assert off(cases, predicted, "seconds", figure, ("000", "002")) <= 8.0
    assert off(cases, predicted, "gigabytes", figure, ("000", "002")) <= 10.0


@pytest.mark.parametrize("figure", FIGURES)
def test_memory_on_a100(cases, predicted, figure):
    assert off(cases, predicted, "gigabytes", figure, ("001",)) <= 5.0


@pytest.mark.parametrize("figure", FIGURES)
def test_best_layouts_are_picked(cases, tables, predicted, figure):
    found = accuracy.decide(tables, cases, predicted["seconds", figure])
    assert len(found) == 12
    assert sum(f[3] == 0 for f in found) >= 9
    assert statistics.mean(f[3] for f in found) <= 0.01


def test_every_oom_is_predicted_and_nothing_else(cases):
    hits, missed, alarms = accuracy.out_of_memory(cases, VALUES)
    assert (len(hits), missed, alarms) == (8, [], [])


@pytest.mark.parametrize("kind", ["seconds", "gigabytes"])
def test_rows_far_off_are_explained(cases, predicted, kind):
    lines = accuracy._far(accuracy.usable(cases, kind), kind, predicted[kind, "held out"])
    assert lines
    assert not any("not explained" in line for line in lines)


def test_nothing_but_duplicates_and_invalid_rows_is_left_out(cases):
    own = [c for c in accuracy.usable(cases, "seconds") if c.source == "001"]
    assert len(own) == 92
    assert "001-L447" in {c.id for c in own}


def test_constants_are_at_their_optimum(cases):
    """A refit moves none by much: the shipped values are those the rows ask for."""
    for name, value in accuracy.fit_all(cases, VALUES, rounds=1).items():
        assert value == pytest.approx(VALUES[name], rel=0.02), name


def test_held_out_predictions_do_not_see_their_section(cases):
    """Doubling the seconds of one section moves the others' held-out predictions, not its own."""
    from dataclasses import replace

    section = "001 lower PP"
    spoiled = [
        replace(c, seconds=2 * c.seconds) if c.section == section and c.seconds else c
        for c in cases
    ]
    before = accuracy.held_out(cases, "seconds", VALUES)
    after = accuracy.held_out(spoiled, "seconds", VALUES)
    own = {c.id for c in cases if c.section == section}
    assert all(after[i] == pytest.approx(before[i], rel=1e-9) for i in own)
    assert any(after[i] != pytest.approx(before[i], rel=1e-4) for i in before if i not in own)


def test_the_report_prints_all_figures(capsys):
    accuracy.main([])
    text = capsys.readouterr().out
    for part in ("held out", "regret", "false alarms (0)", "001-L447", "Fitted constants"):
        assert part in text


def test_rows_from_elsewhere_are_never_fitted_on(cases):
    from dataclasses import replace

    others = [replace(c, section="elsewhere " + c.section, seconds=9e9) for c in cases[:40]]
    found = accuracy.held_out(others, "seconds", VALUES, cases)
    expected = accuracy.predictions(others, "seconds", VALUES)
    assert all(found[i] == pytest.approx(expected[i], rel=0.02) for i in expected)


def test_rows_that_were_never_fitted():
    cases = published_cases.cases(published_rows.read(str(accuracy.DATA / "unseen_rows.csv")))
    found = accuracy.predictions(cases, "seconds", VALUES)
    assert len(cases) == 5
    assert accuracy.mean_error(cases, "seconds", found) <= 0.05


def test_bad_rows_are_one_sentence(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("row_id\nx\n")
    with pytest.raises(UserError, match="lacks the columns section"):
        accuracy.main(["--rows", str(file)])
    with pytest.raises(UserError, match=r"rows.csv lacks the column table"):
        published_rows.read_tables(file)
    with pytest.raises(UserError, match=r"cannot read .*nowhere.csv"):
        published_rows.read_tables(tmp_path / "nowhere.csv")
