"""benchmarks/run_cases.py: what it has found is mended, and it sees what is wrong."""

import pytest

from benchmarks.drawn_runs import Case
from benchmarks.run_cases import Runner, complaints

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
    "blocking": Case(SMALL | {"blocking": True}, [(2, {"pp": 2, "vocab-pp": True})]),
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


@pytest.mark.parametrize(
    ("layout", "found"),
    [
        ({"lr": 1.001e-3}, "loss of (2, 'loss')"),
        ({"weight-decay": 0.2}, "weights/blocks.0.attention.out.weight"),
        ({"steps": 3, "lr-decay-samples": 16}, "rows are"),
        ({"lr": -1}, "one rank is not refused"),
    ],
)
def test_it_sees_a_run_that_differs(layout, found, tmp_path):
    case = Case(SMALL | {"lr": 1e-3, "adam-eps": 1e-6}, [(1, layout)])
    assert any(text.startswith(found) for text in Runner(tmp_path, 300.0).findings(case))


@pytest.mark.parametrize(
    ("status", "text", "wanted", "found"),
    [
        (0, "", 0, ""),
        (75, "note: a\n", 75, ""),
        (2, "error: tp(3) does not divide\n", 0, ""),
        (1, "Traceback", 0, "status 1 for 0"),
        (0, "", 75, "status 0 for 75"),
        (2, "error: a\nTraceback", 0, "not one sentence"),
        (2, "", 0, "not one sentence"),
        (0, "a warning", 0, "says"),
    ],
)
def test_how_a_run_may_end(status, text, wanted, found):
    complained = list(complaints(status, text, wanted))
    assert len(complained) == bool(found)
    assert not found or complained[0].startswith(found)
