"""A supervised run whose node is lost, in Slurm: if this failed, a lost node would end the run."""

import json
import signal
from pathlib import Path

import pytest
from ranks import Job, fork_one, fork_ranks
from supervised_runs import (
    ONE_THREAD,
    WORDS,
    LostNodes,
    curve,
    decisions,
    in_slurm,
    wait_for_idle,
)


def nodes_of(run: Path) -> list[list[str]]:
    """The nodes of the ranks of every start, the oldest first."""
    files = [path for path in run.glob("run.json*") if path.suffix != ".new"]  # still written
    files.sort(key=lambda path: path.stat().st_mtime)
    starts = [json.loads(file.read_text())["cluster"]["places"] for file in files]
    return [[place["node"] for place in places] for places in starts]


@pytest.mark.slow
def test_a_node_that_is_gone_is_left_out(tmp_path, slurm):
    """With its daemon, for good: the spare one takes its place, and the curve stays bitwise."""
    words, run = [*WORDS, "--steps", "60", "--tp", "2"], tmp_path / "run"
    command = in_slurm(tmp_path, ["--spare-nodes", "1"], *words)
    with Job(command, run, **ONE_THREAD) as job, LostNodes() as lost:
        job.wait_for(lambda: len(job.rows) > 5)
        lost.end("n2")
        assert job.status(600) == 0, job.text
    wait_for_idle(3)
    gone, finished = decisions(tmp_path)
    assert (gone["action"], gone["out"]) == ("restart", ["n2"])
    assert (gone["evidence"]["kind"], gone["evidence"]["silent"]) == ("dead", ["n2"])
    assert finished["action"] == "pass the status on"
    assert nodes_of(run) == [["n1", "n2"], ["n1", "n3"]]
    straight = ["--out", str(tmp_path / "straight"), "--save-every", "60"]
    done = fork_ranks(2, "train.py", *words, *straight)
    assert done.status == 0, done.err
    losses = curve(run)
    assert sorted(losses) == list(range(1, 61))
    assert losses == curve(tmp_path / "straight")


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_nodes_until_they_come_back(tmp_path, slurm):
    """Without a spare one: with another layout on two nodes, then as given on three."""
    size = [*WORDS, "--global-batch-size", "12"]
    words, run = [*size, "--steps", "100000", "--save-every", "100000"], tmp_path / "run"
    command = in_slurm(tmp_path, ["--gpu", "cpu", "--max-slowdown", "3"], *words)
    with Job(command, run, **ONE_THREAD) as job:
        with LostNodes() as lost:
            job.wait_for(lambda: len(job.rows) > 5)
            lost.end("n2")
            # The planner and the rehearsal took 100 s at a load of 37.
            job.wait_for(lambda: len(nodes_of(run)) == 2 and len(job.rows) > 5, 600)
        job.wait_for(lambda: len(nodes_of(run)) == 3 and len(job.rows) > 5, 600)
        job.send(signal.SIGTERM)
        assert job.status(600) == 75, job.text
    wait_for_idle(3)
    gone, back, ended = decisions(tmp_path)
    assert (gone["action"], gone["out"], gone["used"]) == ("restart", ["n2"], 2)
    assert "goes on with 2 nodes" in gone["reason"]
    assert "all operations of the ranks that were run match, and it fits" in gone["reason"]
    assert (back["action"], back["back"]) == ("restart with the layout as given", ["n2"])
    assert ended["action"] == "pass the status on"
    assert nodes_of(run) == [["n1", "n2", "n3"], ["n1", "n3"], ["n1", "n2", "n3"]]
    losses = curve(run, 1e-6)
    last = max(losses)
    assert sorted(losses) == list(range(1, last + 1))
    straight = ["train.py", *size, "--steps", str(last), "--save-every", str(last)]
    done = fork_one(*straight, "--out", str(tmp_path / "straight"))
    assert done.status == 0, done.err
    assert losses == pytest.approx(curve(tmp_path / "straight"), rel=1e-6)
