"""If this failed, the tuner would not survive real runs that hang, crash or lack memory."""

import json
import sys

import psutil
import pytest
import ranks
from ranks import ROOT

from tuner import trials

LAUNCH = f"{sys.executable} {ROOT}/tests/planting_launcher.py {{ranks}}"


@pytest.mark.slow
def test_a_third_fails_for_real_and_the_rest_is_ranked(tmp_path):
    words = "--layers 2 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 16"
    words += " --hidden 64 --positions rotary --device cpu --timed 3 --time-limit 90 --tp 2 --all"
    words += " --no-sequence-parallel --recompute none --try micro-batch-size=1,2,4,8,16"
    command = [sys.executable, "tune.py", *words.split(), "--gpu", "cpu", "--gpus", "2"]
    done = ranks.start([*command, "--launch", LAUNCH, "--out", str(tmp_path)], 400)
    assert done.status == 0, done.err + done.out
    stored = [json.loads(s) for s in (tmp_path / "trials.jsonl").read_text().splitlines()]
    found = {t["config"]["layout"]["micro_batch_size"]: t for t in stored}
    statuses = {size: trial["status"] for size, trial in found.items()}
    assert statuses == {1: "ok", 2: "hang", 4: "crash", 8: "oom", 16: "ok"}
    assert "memory" in found[8]["reason"]
    assert "RuntimeError: planted" in found[4]["reason"]
    for trial in (t for t in stored if t["status"] == "ok"):
        assert len(trial["seconds"]) == 3
        assert len(trial["peak_memory"]) == 1
        assert trial["tflops_model"] > 0
        assert trial["formula"] == "megatron-2025"
    assert not [p for p in psutil.process_iter() if _is_left(p, str(tmp_path))]
    table = (tmp_path / "table.md").read_text()
    assert table.index("oom: ") > table.rindex("GB |")


def _is_left(process: psutil.Process, folder: str) -> bool:
    try:
        own = trials.TRIAL_VARIABLE in process.environ()
        return own and any(folder in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
