"""If this failed, the tuner would not survive real runs that crash or lack memory."""

import json
import sys

import pytest
import ranks
from ranks import ROOT

LAUNCH = f"{sys.executable} {ROOT}/tests/planting_launcher.py {{ranks}}"


@pytest.mark.slow
def test_two_fail_for_real_and_the_other_is_ranked(tmp_path):
    words = "--layers 2 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 16"
    words += " --hidden 64 --positions rotary --device cpu --timed 3 --tp 2 --all"
    words += " --no-sequence-parallel --recompute none --try micro-batch-size=1,4,8"
    command = [sys.executable, "tune.py", *words.split(), "--gpu", "cpu", "--gpus", "2"]
    done = ranks.start([*command, "--launch", LAUNCH, "--out", str(tmp_path)], 400)
    assert done.status == 0, done.err + done.out
    stored = [json.loads(s) for s in (tmp_path / "trials.jsonl").read_text().splitlines()]
    found = {t["config"]["layout"]["micro_batch_size"]: t for t in stored}
    statuses = {size: trial["status"] for size, trial in found.items()}
    assert statuses == {1: "ok", 4: "crash", 8: "oom"}
    assert "memory" in found[8]["reason"]
    assert "RuntimeError: planted" in found[4]["reason"]
    assert (len(found[1]["seconds"]), len(found[1]["peak_memory"])) == (3, 1)
    assert found[1]["tflops_model"] > 0
    assert found[1]["formula"] == "megatron-2025"
    assert ranks.none_left(str(tmp_path)) == []
    table = (tmp_path / "table.md").read_text()
    assert table.index("oom: ") > table.rindex("GB |")
