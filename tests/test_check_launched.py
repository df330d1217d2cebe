"""check.py --program under a launcher: if these failed, its ranks would each do a check of their
own, print it several times, or end with a status that is not the verdict's."""

import json
import sys

import pytest
from ranks import mpi_command, start

from distributed.local_ranks import RankPlace, environment_of_rank

PROGRAM = ["check.py", "--program", "tests/own_program.py"]
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
LAUNCHERS = {
    "mpirun": lambda ranks: [*mpi_command(ranks), sys.executable, "-W", "ignore"],
    "torchrun": lambda ranks: [*TORCHRUN, "--nproc-per-node", str(ranks)],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_ranks_that_are_there_are_used(launcher):
    words = [*LAUNCHERS[launcher](2), *PROGRAM, "--set", "fault=no sum", "--json"]
    done = start(words, timeout=900)
    (line,) = done.out.splitlines()  # of rank 0 alone
    data = json.loads(line)
    assert (done.status, data["status"]) == (1, 1), done.err
    outcomes = {each["layout"]: each["outcome"] for each in data["layouts"]}
    assert outcomes["tp 2"] == "differs"
    assert outcomes["dp 2"] == "equal"
    assert f"on the 2 ranks that {launcher} has started" in done.err
    assert "not run, of more than 2 ranks: tp 2 dp 2 (4)" in done.err
    assert done.err.count("DIFFERS") == 1
    assert "BAD TERMINATION" not in done.err


@pytest.mark.slow
def test_a_layout_of_fewer_ranks_runs_on_the_first_ones():
    done = start([*LAUNCHERS["mpirun"](3), *PROGRAM, "--layout", "dp 2", "--json"], timeout=900)
    data = json.loads(done.out)
    assert (done.status, data["verdict"], data["resume_checked"]) == (0, "equal", True), done.err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*PROGRAM, "--layout", "tp 2 dp 2"], "has 4 ranks, and {} has started 2"),
        ([*PROGRAM, "--ranks", "3"], "--ranks 3: {} has started 2"),
        ([*PROGRAM, "--at-once", "2"], "--at-once 2: the ranks that {} has started"),
        (["check.py", "--model", "gpt2-124m"], "{} has started 2 ranks, and check.py starts its"),
    ],
)
def test_a_mistake_is_said_once(launcher, words, said):
    done = start([*LAUNCHERS[launcher](2), *words], timeout=300)
    assert done.status == (2 if launcher == "mpirun" else 1)  # torchrun's own status is 1
    assert done.err.count("error: ") == 1 or launcher == "torchrun"
    assert done.err.count(said.format(launcher)) == 1


def test_a_forked_rank_is_none_of_its_launchers(monkeypatch):
    """With torchrun's variables torch would look for torchrun's store, which has other ranks."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("PMI_RANK", "3")
    found = environment_of_rank(RankPlace(1, ["a", "b"], "a", 4000), "")
    assert not {"TORCHELASTIC_USE_AGENT_STORE", "PMI_RANK"} & set(found)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "0")
