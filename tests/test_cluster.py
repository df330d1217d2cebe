"""Launchers, disagreements, and how a job ends when one rank fails."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from ranks import ROOT, mpirun, start

from cluster import Launch, discover

WORKER = "tests/failing_worker.py"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch("python")),
        (
            {"TORCHELASTIC_RUN_ID": "x", "RANK": "2", "WORLD_SIZE": "4", "PMI_SIZE": "9"},
            Launch("torchrun", 2, 4),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("mpirun", 1, 2, mpi=True)),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"},
            Launch("mpirun of Open MPI", 0, 8, mpi=True),
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
            Launch("srun", 3, 4, mpi=True),
        ),
        # Inside salloc or an sbatch script, plain python is one process, whatever the job asked.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Launch("python")),
        (
            {
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_NTASKS": "4",
            },
            Launch("python"),
        ),
    ],
)
def test_the_launcher_is_read_from_its_variables(environment, expected):
    assert discover(environment) == expected


def test_launcher_and_mpi_must_agree():
    """What `srun` without PMI does: every process believes that it is alone."""
    words = "--layers 1 --hidden 8 --heads 1 --vocab-size 16 --steps 1 --out runs/never"
    command = [sys.executable, "train.py", *words.split()]
    outcome = start(
        command, SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_NTASKS="4", OMP_NUM_THREADS="1"
    )
    assert outcome.status == 2
    assert "srun started 4 tasks and calls this one 0, but MPI" in outcome.err
    assert "says rank 0 of 1" in outcome.err
    assert "Traceback" not in outcome.err
    assert not (ROOT / "runs/never").exists()


def processes_with(word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if word in " ".join(process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 2])
def test_one_failing_rank_ends_all(culprit):
    """The traceback comes once, with rank and node; the others do not hang in their collective."""
    began = time.monotonic()
    outcome = mpirun(3, WORKER, "raise", str(culprit), timeout=90)
    assert outcome.status != 0
    assert time.monotonic() - began < 60
    assert outcome.err.count("Traceback") == 1
    assert outcome.err.count("ValueError: planted") == 1
    assert f"rank {culprit} of 3 on " in outcome.err
    assert f"{WORKER} raise {culprit}" not in [
        " ".join(p.cmdline()) for p in processes_with(WORKER)
    ]


@pytest.mark.slow
def test_a_mistake_that_all_ranks_find_is_told_once():
    outcome = mpirun(3, WORKER, "mistake", "0", timeout=90)
    assert outcome.status == 2
    assert outcome.err.count("error: planted: 3 does not divide 4") == 1
    assert "Traceback" not in outcome.err


@pytest.mark.slow
def test_two_jobs_on_one_node_do_not_meet():
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(mpirun, 2, WORKER, "port", "1", timeout=120) for _ in range(2)]
    for job in jobs:
        outcome = job.result()
        assert outcome.status == 0, outcome.err
        lines = sorted(outcome.out.split("\n"))
        assert lines == ["", "rank 0 of 2 mpirun", "rank 1 of 2 mpirun"]


@pytest.mark.slow
def test_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    outcome = start([*command, "--nproc-per-node", "2", WORKER, "none", "9"], timeout=120)
    assert outcome.status == 0, outcome.err
    assert sorted(outcome.out.split("\n"))[1:] == ["rank 0 of 2 torchrun", "rank 1 of 2 torchrun"]


def test_a_mistake_before_the_start_is_told_once_and_quickly():
    """Found before torch is imported: no rank has met another yet."""
    began = time.monotonic()
    words = "--layers 2 --hidden 8 --heads 2 --steps 1 --tp 3"
    outcome = mpirun(4, "train.py", *words.split())
    assert outcome.status == 2
    assert outcome.err.count("error: tp(3) * pp(1) * dp(?) does not divide 4 ranks") == 1
    assert "Traceback" not in outcome.err
    assert time.monotonic() - began < 5
