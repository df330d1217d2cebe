"""Runs that showed a defect: if this failed, what benchmarks/layouts/run_cases.py found is back."""

import pytest

from benchmarks.layouts.drawn_runs import Case
from benchmarks.layouts.run_cases import Runner

SMALL = {"layers": 4, "hidden": 16, "heads": 4, "seq-length": 8, "vocab-size": 61, "steps": 4}
SMALL |= {"global-batch-size": 4, "precision": "fp64", "save-every": 2}
ADAFACTOR = SMALL | {"optimizer": "adafactor", "lr": 1e-2}
# Each is small and showed a defect.
FOUND = {
    # Adafactor's means of the embedding counted rows of padding.
    "padding": Case(ADAFACTOR, [(2, {"pad-vocab-multiple": 1})]),
    # The one of two replicas that owns no tied matrix ended in an exception.
    "no matrix": Case(ADAFACTOR, [(4, {"pp": 2})]),
    # The ranks waited for each other for ever.
    "blocking": Case(SMALL | {"blocking": True}, [(2, {"pp": 2})]),
    # The end of the run divided by the share of time of a stage that has no blocks.
    "no blocks": Case(SMALL | {"steps": 5}, [(3, {"pp": 3, "partition": "0,0,4"})]),
    # State that Muon's matrices do not have was written in fp32 among tensors of fp64.
    "muon": Case(SMALL | {"optimizer": "muon", "async-save": False}, [(1, {})]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_mended(name, tmp_path):
    runner = Runner(tmp_path, limit=300.0)
    assert runner.findings(FOUND[name]) == []
    assert runner.counts == {"trained": 1}
