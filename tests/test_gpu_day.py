"""scripts/gpu_day.sh: parts that fail or take too long stop no other, and nothing found is lost."""

import json
import sys
from pathlib import Path

import pytest
import test_nccl
from ranks import ROOT, none_left, start

sys.path.append(str(ROOT / "benchmarks"))

import gpu
import gpu_day
import gpu_profile
from gpu_day import Part

SLEEP = "import time; time.sleep(600)"
# Finds something, starts a process in a session of its own, and is not done in time.
SLOW = f"""
import json, subprocess, sys, time
open(sys.argv[-1], "w").write(json.dumps({{"lines": ["found before"], "data": {{"x": 1}}}}))
subprocess.Popen([sys.executable, "-c", {SLEEP!r}, sys.argv[1]], start_new_session=True)
{SLEEP}
"""


def read(out: Path) -> tuple[str, dict[str, dict]]:
    """The Markdown, and the parts by name."""
    parts = json.loads((out / "gpu-day.json").read_text())["parts"]
    return (out / "gpu-day.md").read_text(), {part["name"]: part for part in parts}


def test_a_part_that_fails_or_takes_too_long_stops_no_other(tmp_path):
    word = f"planted-{tmp_path.name}"
    look = f"print(open({str(tmp_path / 'gpu-day.json')!r}).read())"
    parts = [
        Part("bad", "Fails", 60, ("-c", "raise ValueError('planted')", None)),
        Part("slow", "Too slow", 6, ("-c", SLOW, word, None)),
        Part("absent", "Absent", 60, ("-c", "", None), lambda: "not there: planted"),
        Part("looks", "Looks", 60, ("-c", look)),
    ]
    gpu_day.run_all(parts, tmp_path, 200, "planted parts")
    text, found = read(tmp_path)
    statuses = {name: part["status"] for name, part in found.items()}
    assert statuses == {
        "bad": "failed with status 1",
        "slow": "over its limit of 6 s, killed",
        "absent": "not there: planted",
        "looks": "done",
    }
    assert found["slow"]["data"] == {"x": 1}
    assert "found before" in text
    assert "ValueError: planted" in text
    assert "Not done: bad, slow, absent." in text
    assert '"status": "running"' in text  # what the last part read: a kill would leave that
    assert (tmp_path / "gpu-day.log").read_text().count("====") == 3
    assert none_left(word) == []


def test_what_the_time_does_not_reach_is_said(tmp_path):
    parts = [Part("late", "Late", 60, ("-c", "", None))]
    gpu_day.run_all(parts, tmp_path, 1.0, "no time")
    _, found = read(tmp_path)
    assert found["late"]["status"].startswith("not reached: ")
    assert found["late"]["status"].endswith(" of 1 s left")


def test_the_rehearsal_of_two_parts(tmp_path):
    script = ["bash", "scripts/gpu_day.sh", "--rehearse", "--out", str(tmp_path)]
    outcome = start([*script, "--parts", "facts,calibration"], timeout=120)
    assert outcome.status == 0, outcome.err
    text, found = read(tmp_path)
    assert {part["status"] for part in found.values()} == {"done"}, text
    assert text.startswith("# Rehearsal of the GPU day on a CPU: no figure of it is a result")
    assert "* torch: " in text
    machine = gpu.hardware.load("cpu", str(tmp_path / "calibration.toml"))
    assert machine.bandwidth == pytest.approx(found["calibration"]["data"]["bandwidth"], rel=1e-3)
    wrong = start([*script, "--parts", "fact"], timeout=60)
    assert wrong.status == 2
    assert "there is no part 'fact'" in wrong.err


@pytest.mark.slow
def test_the_nccl_tests_run_on_the_cpu():
    """The layouts on two ranks, so that they are right when they first meet a GPU."""
    tests = ["-m", "pytest", "tests/test_nccl.py", "--rehearse-cuda", "-p", "no:cacheprovider"]
    outcome = start([sys.executable, *tests, "-vv", "-k", "two-ranks"], OMP_NUM_THREADS="1")
    assert outcome.status == 0, outcome.out[-4000:]
    _, data = gpu_day.told_by_log(outcome.out)
    assert data == {"passed": len(test_nccl.CASES[2]), "failed": [], "skipped": 0}


def test_lines_of_pytest_are_counted_also_when_it_was_killed():
    text = (
        "tests/test_a.py::test_x[tp=2 pp=2] PASSED   [ 25%]\n"
        "tests/test_a.py::test_y FAILED              [ 50%]\n"
        "tests/test_a.py::test_z SKIPPED (no GPU)    [ 75%]\ntests/test_a.py::test_w "
    )
    lines, data = gpu_day.told_by_log(text)
    assert data == {"passed": 1, "failed": ["tests/test_a.py::test_y"], "skipped": 1}
    assert lines[0] == "1 passed, 1 failed, 1 skipped."


def test_time_that_kernels_cover_together():
    assert gpu_profile.union([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0), (5.5, 5.7)]) == 4.0
    assert gpu_profile.union([]) == 0.0


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 85e9, "h100"),
        ("NVIDIA H200", 150e9, "h200"),
        ("NVIDIA A100-SXM4-40GB", 42e9, "a100-40"),
        ("NVIDIA GeForce RTX 9999", 32e9, None),
    ],
)
def test_the_planners_machine_of_a_device(name, memory, expected):
    found = gpu.machine_of(name, memory)
    assert (found and found.name) == expected
