"""Schedules, named and chosen: if this failed, one would change the result of a run.

Each against the single-rank run, on four ranks. Checkpoints know no schedule: what one saves, the
next continues.
"""

import pytest
from compare import assert_within
from golden_worker import options
from test_checkpoint import check_chain
from test_golden import TOLERANCE, check_lines, effect_of_rounding, lines_of

from config import validation
from costs.auto_schedule import decide


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["schedules", "choices"])
def test_every_schedule_equals_the_single_rank_run(feature, tmp_path):
    check_lines(feature, tmp_path)


def test_a_checkpoint_knows_no_schedule(tmp_path):
    """Saved under 1F1B, continued under interleaved and from there under ZB-V, and back."""
    common = {"layers": 4, "save_every": 2, "precision": "fp64"}
    layouts = [
        {"pp": 2},
        {"pp": 2, "schedule": "interleaved"},
        {"pp": 2, "schedule": "zb-v"},
        {"pp": 2, "schedule": "zb-h1", "zero": 2},
        {"pp": 2, "schedule": "auto"},
        {"pp": 2, "partition": "1,3"},
    ]
    check_chain(2, common, layouts, tmp_path)


def test_the_lines_of_choices_choose_several_schedules():
    names = set()
    for case in lines_of("choices")[4][:4]:
        config, _ = decide(validation.check(options(case), 4), "cpu")
        names.add(config.layout.schedule)
    assert names == {"1f1b", "zb-h1", "interleaved"}


def test_rounding_is_well_within_the_tolerance_with_many_words():
    """Most gradients of a large vocabulary are small, so that Adam could make rounding large."""
    case = lines_of("choices")[4][0]
    assert_within(effect_of_rounding(case), TOLERANCE["fp32"] / 3, case)
