"""The schedule does not change the result: each against the single-rank run, on four ranks.

Checkpoints know no schedule: what one saves, the next continues.
"""

import pytest
from test_checkpoint import check_chain
from test_golden import check_lines


@pytest.mark.slow
def test_every_schedule_equals_the_single_rank_run(tmp_path):
    check_lines("schedules", tmp_path)


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
