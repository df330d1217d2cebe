"""If this failed, plans of experts would miss costs, or public rows by more than is written."""

import pytest
from ranks import ROOT

from benchmarks.planner import expert_rows

# ---- Public rows ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    return expert_rows.read()


def test_every_row_is_compared_or_set_aside_with_a_reason(rows):
    compared, aside = rows
    names = [row.id for row in compared] + [name for own in aside.values() for name in own]
    assert sorted(names) == sorted(f"M-{number}" for number in range(1, 220))
    assert len(compared) == 152


def test_each_model_held_out_is_as_near_as_the_results_say(rows):
    """benchmarks/results/plan_moe.md was written by this program, with these figures."""
    text = (ROOT / "benchmarks" / "results" / "plan_moe.md").read_text()
    compared, aside = rows
    found = expert_rows.held_out(compared)
    for line in expert_rows.report(compared, aside, found):
        assert line in text, line
    for values, off in found.values():
        assert set(values) > set(expert_rows.PRIORS)
        assert sum(map(abs, off.values())) / len(off) <= 0.15
