"""Jobs of a real Slurm: training over two nodes, and a time limit at which no step is lost."""

import json
import shlex
import subprocess
import sys
import time

import pytest
from ranks import ROOT, Job, mpirun, srun_command, start

from config import validation
from config.command_line import parse

SHAPE = "--layers 2 --hidden 32 --heads 4 --seq-length 32 --vocab-size 64 --global-batch-size 8"
WORDS = f"{SHAPE} --device cpu --pp 2 --lr-schedule constant --lr 1e-3".split()
# Slurm checks limits every 30 s: the signal comes between 29 and 59 s after the start. The run is
# longer; the limit's last second and KillWait are enough to save.
STEPS, PAUSE = 130, 0.45

BATCH = """#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=1 --signal=B:USR1@1 --requeue
#SBATCH --job-name=limit --open-mode=append --output={out}/batch.txt
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source scripts/slurm_job.sh
LOGS={out}/logs
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
ranks tests/paced_worker.py {pause} {words} --steps {steps} --out {out} --resume auto
"""


@pytest.mark.slow
def test_srun_trains_over_two_nodes(tmp_path, slurm):
    """Pre-flight checks the nodes, and the table shows where each rank is."""
    launcher = srun_command(4, "--ntasks-per-node=2")
    command = [*launcher, sys.executable, "train.py", *WORDS, "--tp", "2", "--steps", "3"]
    with Job([*command, "--out", str(tmp_path)], tmp_path) as job:
        assert job.status() == 0, job.text
        assert "4 ranks by srun on n1, n2: tp 2 x pp 2 x dp 1" in job.text
        assert "preflight: 4 ranks on 2 nodes answer" in job.text
        lines = [line.split() for line in job.text.splitlines()]
        table = [row for row in lines if row[1:2] in (["n1"], ["n2"])]
        assert [row[:3] for row in table] == [
            ["0", "n1", "0"],
            ["1", "n1", "1"],
            ["2", "n2", "0"],
            ["3", "n2", "1"],
        ]
        assert ["".join(row[5:]) for row in table] == ["000", "100", "010", "110"]  # tp, pp, dp
    places = json.loads((tmp_path / "run.json").read_text())["cluster"]["places"]
    assert [place["node"] for place in places] == ["n1", "n1", "n2", "n2"]


@pytest.mark.slow
def test_a_time_limit_loses_nothing(tmp_path, slurm):
    """On the signal the run saves and exits with 75; the job is requeued and resumes."""
    out, straight = tmp_path / "job", tmp_path / "straight"
    out.mkdir()
    batch = tmp_path / "limit.slurm"
    words = shlex.join(WORDS)
    batch.write_text(BATCH.format(out=out, pause=PAUSE, words=words, steps=STEPS))
    subprocess.run(["sbatch", str(batch)], cwd=ROOT, check=True)
    limit = time.monotonic() + 400
    while not list(out.glob("metrics.jsonl*")):  # two starts at the same time would be slow
        assert time.monotonic() < limit, output(out)
        time.sleep(0.5)
    words = [*WORDS, "--steps", str(STEPS), "--out", str(straight)]
    outcome = mpirun(2, "train.py", *words, OMP_NUM_THREADS="1")  # as in the batch file
    assert outcome.status == 0, outcome.err
    while subprocess.run(["squeue", "--noheader"], capture_output=True, text=True).stdout:
        assert time.monotonic() < limit, output(out)
        time.sleep(0.5)
    endings = [line for line in output(out).splitlines() if "status" in line and "start" in line]
    assert len(endings) > 1, output(out)
    for number, line in enumerate(endings):
        last = number == len(endings) - 1
        assert f"start {number}: status {0 if last else 75}" in line, output(out)
    starts = [read(path) for path in sorted(out.glob("metrics.jsonl.*"))] + [
        read(out / "metrics.jsonl")
    ]
    assert [row["iteration"] for rows in starts for row in rows] == list(range(1, STEPS + 1))
    losses = [row["loss"] for rows in starts for row in rows]
    assert losses == [row["loss"] for row in read(straight / "metrics.jsonl")]
    logs = sorted(path.name.split(".")[1] for path in (out / "logs").iterdir())
    assert logs == ["0", "1"]  # by node number: both nodes have this host's name
    print(f"{len(endings)} starts, of {[len(rows) for rows in starts]} steps, bitwise one run")


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def output(out) -> str:
    """The output of the batch file and of the ranks."""
    paths = [out / "batch.txt", *sorted((out / "logs").glob("*"))]
    return "\n".join(path.read_text()[-3000:] for path in paths if path.exists())


@pytest.mark.parametrize("name", ["train_1b3", "train_104b", "train_176b"])
def test_batch_files_request_what_their_run_needs(name):
    """bash parses them, and their command line fits the number of ranks that they request."""
    path = ROOT / "scripts" / f"{name}.slurm"
    assert start(["bash", "-n", str(path)]).status == 0
    text = path.read_text()
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH --")
    )
    ranks = int(asked["nodes"]) * int(asked["ntasks-per-node"])
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]
    assert asked["signal"].startswith("B:USR1@")
    assert "requeue" in asked or asked["array"].endswith("%1")
    assert not any(word in asked for word in ("account", "partition", "qos", "constraint"))
    line = text.partition("ranks train.py ")[2].replace("\\\n", " ")
    words = [word.replace("$OUT", "runs/x").replace("$DATA", "x") for word in shlex.split(line)]
    checked = validation.check(parse(words), ranks)
    assert checked.run.kill_switch == "runs/x/kill"
    assert checked.run.device == "cuda", "with too old a driver a CPU would train"
    layouts = {"train_1b3": (1, 1, 32), "train_104b": (4, 32, 1), "train_176b": (4, 12, 8)}
    layout = checked.layout
    assert (layout.tp, layout.pp, layout.dp) == layouts[name]
