"""scripts/gpu_day.sh: if this failed, a part that fails would cost the findings of the others."""

import json
import sys
from pathlib import Path

import pytest
import test_nccl
from ranks import none_left, start

from benchmarks.gpu import gpu, gpu_day, gpu_models
from benchmarks.gpu.gpu_day import Part

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


def test_a_part_that_fails_or_takes_too_long_stops_no_other(tmp_path, capsys):
    word = f"planted-{tmp_path.name}"
    look = f"print(open({str(tmp_path / 'gpu-day.json')!r}).read())"
    parts = [
        Part("bad", "Fails", 60, ("-c", "raise ValueError('planted')"), True),
        Part("slow", "Too slow", 6, ("-c", SLOW, word), True),
        Part("looks", "Looks", 60, ("-c", look)),
    ]
    outcomes = gpu_day.run_all(parts, tmp_path, 200, "planted parts")
    gpu_day.tell(outcomes, tmp_path)
    printed = capsys.readouterr().out
    again = f"again: bash scripts/gpu_day.sh --out {tmp_path} --parts bad,slow\n"
    assert printed.endswith(again)
    text, found = read(tmp_path)
    statuses = {name: part["status"] for name, part in found.items()}
    assert statuses == {
        "bad": "failed with status 1",
        "slow": "over its limit of 6 s, killed",
        "looks": "done",
    }
    assert found["slow"]["data"] == {"x": 1}
    assert "found before" in text
    assert "ValueError: planted" in text
    assert "Not done: bad, slow." in text
    assert '"status": "running"' in text  # the last part read it: a kill would leave that
    assert (tmp_path / "gpu-day.log").read_text().count("====") == 3
    assert none_left(word) == []
    parts[0] = Part("bad", "Fails", 60, ("-c", "print('mended')"))
    gpu_day.run_all(parts, tmp_path, 200, "the red part again", ["bad"])
    _, found = read(tmp_path)
    assert (found["bad"]["status"], found["slow"]["data"]) == ("done", {"x": 1})


def test_a_part_that_is_asked_for_alone_may_take_all_the_time(tmp_path):
    """Its limit is for the parts after it, which would not be reached."""
    parts = [
        Part("slow", "Slow", 0.5, ("-c", "import time; time.sleep(1)")),
        Part("other", "Other", 60, ("-c", "")),
    ]
    gpu_day.run_all(parts, tmp_path, 200, "alone", ["slow"])
    _, found = read(tmp_path)
    assert found["slow"]["status"] == "done"


def test_the_day_measures_a_model_before_it_tests(tmp_path):
    parts = [part.name for part in gpu_day.all_parts(tmp_path, rehearse=False)]
    assert parts == [
        *("facts", "train", "train-compile", "llama", "llama-compile", "experts"),
        *("models", "profile"),
        *("cuda", "nccl"),
        *("groups", "muon", "muon-fp32", "windows", "windows-compile", "known"),
        *("ceilings", "calibration", "runs", "asked", "nccl4"),
    ]
    with_tests = {p.name: p.command for p in gpu_day.all_parts(tmp_path, False, "cp or zb-v")}
    assert "(cp or zb-v) and four-ranks" in with_tests["nccl4"]
    assert "(cp or zb-v) and not four-ranks" in with_tests["nccl"]


def test_two_calls_of_ten_minutes(tmp_path):
    """What a set has to do ends within its call, also if each part takes all that it may."""
    limits = {part.name: part.limit for part in gpu_day.all_parts(tmp_path, rehearse=False)}
    assert set(gpu_day.SETS) == {"first", "second"}
    for names in gpu_day.SETS.values():
        assert sum(limits[name] for name in names) <= gpu_day.CALL


@pytest.mark.long
@pytest.mark.slow
def test_the_new_parts_of_both_calls_run_on_a_cpu(tmp_path):
    script = ["bash", "scripts/gpu_day.sh", "--rehearse", "--out", str(tmp_path)]
    parts = "groups,muon,windows-compile,known"  # muon-fp32 and windows are two of them, less
    outcome = start([*script, "--parts", parts], timeout=400)
    assert outcome.status == 0, outcome.err
    text, found = read(tmp_path)
    assert {part["status"] for part in found.values()} == {"done"}, text
    assert found["groups"]["data"].keys() == {"groups_2", "groups_4", "groups_8"}
    wrong = start([*script, "--first", "--second"], timeout=60)
    assert wrong.status == 2
    assert "not allowed with" in wrong.err


def test_an_allocator_that_fails_is_tried_first_and_avoided(monkeypatch):
    """Else every run of train.py would fail where segments cannot grow."""
    assert gpu.allocator_problem("cpu") == ""
    assert gpu.allocator_problem("no-such-device").startswith("status 1: RuntimeError: ")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    facts = gpu_day.Outcome(Part("facts", "", 1, ()), data={"expandable_segments": True})
    gpu_day.avoid_what_failed([facts])
    assert "PYTORCH_ALLOC_CONF" not in gpu_day.os.environ
    facts.data["expandable_segments"] = False
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")  # so that it is not set after the test
    gpu_day.avoid_what_failed([facts])
    assert gpu_day.os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"


# Ends the program where it imports torch, and prints what is set by then.
PREPARED = """
import os, runpy, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), os.environ["PYTORCH_ALLOC_CONF"])
            sys.exit(7)

sys.meta_path.insert(0, Finder())
sys.argv = [sys.argv[1], "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("program", ["gpu_models.py"])
def test_models_are_measured_as_train_py_runs_them(program):
    """With its allocator and its number of queues, which torch reads when it is loaded."""
    outcome = start([sys.executable, "-c", PREPARED, f"benchmarks/gpu/{program}"])
    assert (outcome.status, outcome.out) == (7, "32 expandable_segments:True\n"), outcome.err


class Sides:
    """In place of what gpu_models.py measures: sides whose steps do nothing, or that fail.

    failing: the side that cannot be made.
    """

    def __init__(self, monkeypatch, failing: str):
        self.made, self.failing = [], failing
        monkeypatch.setattr(gpu_models, "ours", lambda config, device, name: (self.make(name), "k"))
        monkeypatch.setattr(gpu_models, "plain", lambda c, device: self.make(gpu_models.PLAIN))

    def make(self, name: str) -> gpu_models.Side:
        """The side of that name."""
        self.made.append(name)
        if name == self.failing:
            raise ValueError(f"{name} is broken\nand more")
        return gpu_models.Side(name, lambda: 1.0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [gpu_models.PLAIN, gpu_models.COMPILED, gpu_models.AS_IT_IS])
def test_a_side_that_fails_costs_no_other_its_figure(tmp_path, monkeypatch, failing):
    every = {gpu_models.AS_IT_IS, gpu_models.COMPILED, gpu_models.PLAIN}
    sides = Sides(monkeypatch, failing)
    section = gpu.Section(str(tmp_path / "section.json"))
    found = gpu_models.compare(*gpu.MODELS["cpu"][0], "cpu", section)
    assert sides.made[0] == gpu_models.AS_IT_IS, "the figure that matters most is the first"
    assert set(found["seconds"]) == every - {failing}
    assert found["failed"] == {failing: "ValueError"}
    assert ("ratio" in found) == (failing == gpu_models.AS_IT_IS)
    assert f"* {failing} failed: ValueError: {failing} is broken\n" in "\n".join(section.lines)


def test_what_the_time_does_not_reach_is_said(tmp_path):
    parts = [Part("late", "Late", 60, ("-c", ""), True)]
    gpu_day.run_all(parts, tmp_path, 1.0, "no time")
    _, found = read(tmp_path)
    assert found["late"]["status"].startswith("not reached: ")
    assert found["late"]["status"].endswith(" of 1 s left")


@pytest.mark.slow
def test_the_rehearsal_of_four_parts(tmp_path):
    script = ["bash", "scripts/gpu_day.sh", "--rehearse", "--out", str(tmp_path)]
    outcome = start([*script, "--parts", "facts,train,calibration,runs"], timeout=180)
    assert outcome.status == 0, outcome.err
    text, found = read(tmp_path)
    assert {part["status"] for part in found.values()} == {"done"}, text
    assert text.startswith("# Rehearsal of the GPU day on a CPU: no figure of it is a result")
    assert "PyTorch version: " in text
    assert "* expandable_segments:True: works" in text
    assert "20/20" in text
    machine = gpu.hardware.load("cpu", str(tmp_path / "calibration.toml"))
    assert machine.bandwidth == pytest.approx(found["calibration"]["data"]["bandwidth"], rel=1e-3)
    assert found["runs"]["lines"][0].startswith("* run-1, `train.py --layers 2")
    assert (
        "3 runs on cpu: " in text or "error: " in text
    )  # a busy machine's runs may determine nothing
    wrong = start([*script, "--parts", "fact"], timeout=60)
    assert wrong.status == 2
    assert "there is no part 'fact'" in wrong.err


@pytest.mark.long
@pytest.mark.slow
def test_the_nccl_tests_run_on_the_cpu():
    """The layouts on two ranks, so that they are right when they first meet a GPU."""
    tests = ["-m", "pytest", "tests/test_nccl.py", "--rehearse-cuda", "-p", "no:cacheprovider"]
    chosen = "no_kernel or (two-ranks and not compile and not bf16)"  # those are about kernels
    outcome = start([sys.executable, *tests, "-vv", "-k", chosen], OMP_NUM_THREADS="1")
    assert outcome.status == 0, outcome.out[-4000:]
    _, data = gpu_day.told_by_log(outcome.out)
    cases = [case for case in test_nccl.CASES[2] if case["precision"] != "bf16"]
    count = len(cases) + 1
    expected = {"passed": count, "failed": [], "skipped": 0, "finished": True}
    assert data == expected


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
