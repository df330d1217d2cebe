"""Layouts over real NCCL: if this failed, a GPU cluster would hang or train another model.

    python -m pytest tests/test_nccl.py                      on a machine with a GPU
    python -m pytest tests/test_nccl.py --rehearse-cuda      the same code on CPUs over gloo

Ranks are plain processes: no MPI is needed. Many layouts share a start of ranks, which takes 10 to
20 s on a GPU; where one hangs or ends the ranks, the layouts after it get another start.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("h5py", reason="Trine's checkpoints need h5py, which is not installed here")

import fault_worker
from compare import relative_difference
from layout_runs import LayoutRuns
from ranks import Outcome, start_ranks
from test_golden import lines_of, weight_difference

pytestmark = pytest.mark.cuda
# In fp64 no rounding hides an error. bf16 runs the kernels and the fp32 sums of real training; its
# roundings differ by layout, and Adam makes whole steps of those of small gradients.
TOLERANCES = {
    "fp64": {"losses": 1e-9, "norms": 1e-9, "weights": 1e-9},
    "bf16": {"losses": 5e-3, "norms": 3e-2, "weights": 1e-1},
}

CASES = lines_of("nccl")
NUMBERED = [(ranks, number) for ranks, cases in CASES.items() for number in range(len(cases))]
WORDS = {2: "two-ranks", 4: "four-ranks"}


def name(place: tuple[int, int]) -> str:
    """Return the name of a case: its ranks and its options."""
    ranks, number = place
    words = [f"{key}={value}" for key, value in CASES[ranks][number].items()]
    return f"{WORDS[ranks]}: {' '.join(words)}"


@pytest.fixture(scope="module")
def machine(cuda_device, tmp_path_factory) -> LayoutRuns:
    backend = "nccl" if cuda_device == "cuda" else "gloo"
    return LayoutRuns(cuda_device, backend, tmp_path_factory.mktemp("nccl"))


def test_one_micro_batch_in_ranks_that_have_loaded_no_kernel(machine):
    """Before all others, in a start of its own: a kernel that is loaded waits until nothing runs,
    so that a receive whose message comes after it would make both ranks wait for ever.
    """
    check_layout(machine, 2, [CASES[2][0] | {"tp": 1, "pp": 2, "micro_batch_size": 4}], 0)


@pytest.mark.parametrize("place", NUMBERED, ids=name)
def test_a_layout_equals_the_single_rank(machine, place):
    """Losses, gradient norms, weights; and copies of a weight are equal to the bit."""
    ranks, number = place
    check_layout(machine, ranks, CASES[ranks], number)


def check_layout(machine: LayoutRuns, ranks: int, cases: list[dict], number: int) -> None:
    """Fail unless one of the cases, which share a start of ranks, gives what a single rank does."""
    options = cases[number]
    result, expected = machine.results(ranks, cases)[number], machine.reference(options)
    assert "error" not in result, result["error"]
    assert len(result["losses"]) == options["steps"]
    assert result["unequal"] == []
    off = {what: relative_difference(result[what], expected[what]) for what in ("losses", "norms")}
    off["weights"] = weight_difference(result["weights"], expected["weights"])
    print(f"{result['seconds']} s, largest relative differences {off}")
    for what, tolerance in TOLERANCES[options["precision"]].items():
        assert off[what] <= tolerance, (off, result[what], expected[what])


SHAPE = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 61 --global-batch-size 4 "
SHAPE += "--set pad_vocab_multiple=4 --lr 1e-2 --lr-schedule constant --precision fp64 --steps 4 "
SHAPE += "--micro-batch-size 2"


def test_save_resume_under_another_layout_check_and_profile(machine):
    """Two whole runs of train.py, preflight included; from step 3 on the second repeats the first.

    A replica check after every second step; a profile of step 4 on a rank of each stage.
    """
    first, second = machine.folder / "first", machine.folder / "second"
    both = f"{SHAPE} --device {machine.device} --backend {machine.backend} --preflight "
    both += "--hang-timeout 20 --check-replicas-every 2 --set torch_profile=4"
    words = f"{both} --tp 2 --sequence-parallel --save-every 2 --out {first}"
    outcome = machine.start(2, "train.py", *words.split(), timeout=90)
    assert outcome.status == 0, outcome.err[-4000:]
    assert "all groups reduce" in outcome.out
    shared = "ranks 0-1 share one GPU" in outcome.out
    assert shared == (machine.device == "cuda")
    words = f"{both} --pp 2 --out {second} --resume {first}/checkpoints/step_00000002"
    outcome = machine.start(2, "train.py", *words.split(), timeout=90)
    assert outcome.status == 0, outcome.err[-4000:]
    rows, again = (read_rows(folder) for folder in (first, second))
    assert [row["iteration"] for row in again] == [3, 4]
    for what in ("loss", "grad_norm"):
        values, expected = ([row[what] for row in some] for some in (again, rows[2:]))
        assert relative_difference(values, expected) <= TOLERANCES["fp64"]["losses"], what
    profiles = sorted(path.name for path in second.glob("torch_step_4_rank_*.json"))
    assert profiles == ["torch_step_4_rank_0.json", "torch_step_4_rank_1.json"]


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_hang_on_each_axis_is_named(machine):
    """Rank 1 sleeps in its data loader; rank 0 waits for it in tp, in the pipeline, in dp.

    The three jobs run at once: most of the time they wait. A step is short, so that it stays
    within the limit where six processes take turns on one GPU.
    """
    layouts = {"tp": "--tp 2", "pp": "--pp 2", "dp": ""}
    limit = {"cuda": 10.0, "cpu": fault_worker.TIMEOUT}[machine.device]

    def hang(axis: str) -> tuple[str, Outcome]:
        out, job = machine.folder / axis, machine.folder / f"{axis}.json"
        layout = f"{layouts[axis]} --device {machine.device} --backend {machine.backend}"
        layout += " --global-batch-size 2"
        fault = {"layout": layout, "fault": "data", "culprit": 1, "timeout": limit}
        job.write_text(json.dumps(fault))
        words = ("tests/fault_worker.py", str(out), str(job), "rank")
        return axis, machine.start(2, *words, timeout=120)

    with ThreadPoolExecutor(len(layouts)) as pool:
        outcomes = dict(pool.map(hang, layouts))
    for axis, outcome in outcomes.items():
        path = machine.folder / axis / "hang" / "case.json"
        assert path.exists(), (axis, outcome.status, outcome.err[-4000:])
        found = json.loads(path.read_text())
        assert (found["kind"], found["culprits"]) == ("hang", [1]), (axis, outcome.err[-4000:])
        assert found["limit"] == limit
        assert outcome.status not in (0, 124), axis
        assert "CULPRIT: rank 1 (" in outcome.err, axis


def test_the_switch_alone_lets_ranks_share_a_gpu(machine):
    """Without it, two ranks on one GPU are refused in one sentence."""
    if machine.device != "cuda":
        pytest.skip("a rehearsal on CPUs has no GPU to share")
    words = f"{SHAPE} --device cuda --backend nccl --out {machine.folder / 'refused'}"
    environment = {"CUDA_VISIBLE_DEVICES": "0", "TRINE_TEST_SHARE_GPU": ""}
    outcome = start_ranks(2, "train.py", *words.split(), timeout=60, **environment)
    assert outcome.status == 2
    assert "ranks 0, 1 on node" in outcome.err
    assert "Traceback" not in outcome.err
