"""Kills around phases and branches: if this failed, a restart would leave the run's curve."""

import json
import sys

import pytest
from ranks import start


@pytest.mark.slow
def test_kills_at_random_moments_stay_on_the_curve(tmp_path):
    """Two kills of a run, one of its branch; the program takes any number of them."""
    command = [sys.executable, "tests/phase_kill_worker.py", str(tmp_path), "3", "7"]
    outcome = start(command, timeout=400)
    assert outcome.status == 0, outcome.err[-4000:]
    result = json.loads(outcome.out.splitlines()[-1])
    assert (len(result["run"]), len(result["branch"])) == (2, 1)
    assert result["rows"] >= 120
