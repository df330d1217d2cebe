"""If this failed, plans of experts would miss costs, or public rows by more than is written."""

import pytest
from ranks import ROOT

from benchmarks.planner import expert_cases, expert_rows

OTHER_PROGRAMS = ("NeMo AutoModel", "PithTrain issue 79", "torchao")

# ---- Public rows ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    return expert_cases.read()


def test_every_row_is_compared_or_set_aside_with_a_reason(rows):
    compared, aside = rows
    names = [row.id for row in compared] + [name for own in aside.values() for name in own]
    assert sorted(names) == sorted(f"M-{number}" for number in range(1, 245))
    assert sum(row.status == "ok" for row in compared) == 173
    assert sum(row.status == "OOM" for row in compared) == 4


@pytest.mark.slow
def test_each_model_held_out_is_as_near_as_the_results_say(rows):
    """benchmarks/results/plan_moe.md was written by this program, with these figures."""
    text = (ROOT / "benchmarks" / "results" / "plan_moe.md").read_text()
    compared, aside = rows
    found = expert_rows.held_out(compared)
    for line in expert_rows.report(compared, aside, found):
        assert line in text, line
    by_megatron = {row.id for row in compared if not row.section.startswith(OTHER_PROGRAMS)}
    every = {name: abs(each) for one in found.values() for name, each in one.off.items()}
    off = [each for name, each in every.items() if name in by_megatron]
    assert len(off) == 166
    assert sum(off) / len(off) <= 0.12
    assert sum(len(one.alarms) for one in found.values()) <= 0.2 * len(every)
    assert [one.missed for one in found.values() if one.missed] == []
