"""If this failed, the planner would miss published rows by more than the documentation says."""

import statistics
from dataclasses import replace

import pytest
from ranks import ROOT

from base.errors import UserError
from benchmarks.planner import plan_accuracy as accuracy
from benchmarks.planner import published_cases, published_rows
from benchmarks.planner.source_accuracy import off_by
from benchmarks.planner.stated_rows import StatedRow
from costs import hardware

VALUES = dict(hardware.fitted_values())
FIGURES = ("in-sample", "held out")


@pytest.fixture(scope="module")
def cases() -> list[StatedRow]:
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


def test_each_section_is_predicted_in_sample_as_the_results_say(capsys):
    """benchmarks/results/plan.md has these rows of the report: time and memory of all sections."""
    accuracy.main([])
    printed = capsys.readouterr().out
    written = (ROOT / "benchmarks" / "results" / "plan.md").read_text()
    rows = [line.split("|") for line in printed.splitlines() if line.count("|") == 12]
    in_sample = ["|".join(row[:7]) for row in rows]
    assert len(in_sample) == 70
    assert [row for row in in_sample if row not in written] == []
    for part in ("regret", "false alarms (0)", "Fitted constants"):
        assert part in printed


@pytest.mark.parametrize(
    ("kind", "sources", "most"),
    [
        ("seconds", ("001",), 6.0),
        ("seconds", ("003",), 6.0),
        ("seconds", ("000", "002"), 8.0),
        ("gigabytes", ("001",), 5.0),
        ("gigabytes", ("000", "002"), 10.0),
    ],
)
def test_mean_error_of_sections_that_were_not_fitted_on(cases, predicted, kind, sources, most):
    """In per cent, over the usable rows of some sources."""
    own = [case for case in accuracy.usable(cases, kind) if case.source in sources]
    assert own
    found = predicted[kind, "held out"]
    assert 100 * off_by([found[c.id] / getattr(c, kind) for c in own])["mean"] <= most


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


def test_rows_from_elsewhere_are_never_fitted_on(cases):
    others = [replace(c, section="elsewhere " + c.section, seconds=9e9) for c in cases[:40]]
    found = accuracy.held_out(others, "seconds", VALUES, cases)
    expected = accuracy.predictions(others, "seconds", VALUES)
    assert all(found[i] == pytest.approx(expected[i], rel=0.02) for i in expected)


@pytest.mark.parametrize(
    ("kind", "count", "worst", "mean"), [("seconds", 5, 0.08, 0.05), ("gigabytes", 1, 0.1, 0.1)]
)
def test_rows_that_were_never_fitted(kind, count, worst, mean):
    cases = published_cases.cases(published_rows.read(str(accuracy.DATA / "unseen_rows.csv")))
    found = accuracy.predictions(cases, kind, VALUES)
    stated = [case for case in cases if getattr(case, kind)]
    assert len(stated) == count
    errors = off_by([found[case.id] / getattr(case, kind) for case in stated])
    assert errors["largest"] <= worst
    assert errors["mean"] <= mean


def test_bad_rows_are_one_sentence(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("row_id\nx\n")
    with pytest.raises(UserError, match="lacks the columns section"):
        accuracy.main(["--rows", str(file)])
    with pytest.raises(UserError, match=r"rows.csv lacks the column table"):
        published_rows.read_tables(file)
    with pytest.raises(UserError, match=r"cannot read .*nowhere.csv"):
        published_rows.read_tables(tmp_path / "nowhere.csv")
