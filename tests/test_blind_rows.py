"""If this failed, rows that came after the constants would be fitted on, or their errors hidden."""

import collections

import pytest
from ranks import ROOT

from benchmarks.planner import blind_rows, expert_cases, rates, source_accuracy

DENSE, OF_EXPERTS = blind_rows.read()


def test_no_constant_is_fitted_on_the_rows():
    sources = {row.source for row in DENSE}
    assert sources <= set(source_accuracy.LEFT_OUT)
    assert not sources & set(rates.SOURCES)
    fitted, _ = expert_cases.read()
    assert not {row.source for row in OF_EXPERTS} & {row.source for row in fitted}


def test_each_source_has_its_rows_and_says_when_it_was_published():
    count = collections.Counter(row.source for row in [*DENSE, *OF_EXPERTS])
    assert count == {
        "mlperf": 37,
        "simumax": 31,
        "vocabulary": 14,
        "megatron_bridge_2025": 40,
        "GPT-OSS-120B": 28,
    }
    assert set(count) == set(blind_rows.PUBLISHED)
    names = [row.id for row in [*DENSE, *OF_EXPERTS]]
    assert len(names) == len(set(names))


def test_the_steps_of_a_benchmark_are_those_of_its_logs():
    """A row of 2,048 H100: 16 replicas of 72 micro-batches, eight virtual stages."""
    row = next(row for row in DENSE if row.id == "ML50-eos-n256")
    at = row.layout
    assert (at.tp, at.pp, at.cp, at.dp, at.micro_batch_size) == (8, 8, 2, 16, 1)
    assert row.training.global_batch_size == 16 * 72
    assert row.facts["virtual_stages"] == 8
    assert row.seconds == pytest.approx(14.22, abs=0.01)


def test_figures_are_the_results_page():
    """All lines of the tables, in the page and as they are computed now."""
    written = (ROOT / "benchmarks" / "results" / "plan_unseen.md").read_text()
    lines = blind_rows.lines()
    assert len(lines) > 20
    assert [line for line in lines if line not in written] == []
