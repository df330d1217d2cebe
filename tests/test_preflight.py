"""If this failed, a fault of a node would be found in training and not before it."""

import pytest
from ranks import mpirun

from config.command_line import parse
from distributed.placement import Place
from distributed.preflight import Peers
from distributed.start_checks import checks_nodes

EXPECTED = {
    "nothing": ["preflight: 4 ranks on 2 nodes answer", "all groups reduce"],
    "torch": [
        "NodeError of ['b'] preflight: torch: 1.13.1 on rank 2 (b), ",
        " on the other ranks; make them equal, or: to run without it, leave b out of mpirun's",
    ],
    "broken": ["NodeError of ['b'] preflight: the device of rank 2 (b) failed: CUDA error: unc"],
    "no disk, no saves": ["10.000 GB, and 5.000 GB are free", "stopped early could not be saved"],
    "no disk": ["UserError preflight: a checkpoint takes 10.000 GB, and 5.000 GB are free"],
    "no memory": [
        "UserError preflight: node a copies 2.000 GB to host memory",
        "1.000 GB are free",
    ],
    "absent": ["NodeError of ['b'] preflight: rank 2 (b) did not answer in 8 s (start)"],
    "hang": [
        "NodeError of ['b'] preflight: making the groups fails on rank 2 (b): not done in 8 s"
    ],
}


@pytest.mark.slow
def test_each_fault_is_named(tmp_path):
    outcome = mpirun(4, "tests/preflight_worker.py", str(tmp_path), OMP_NUM_THREADS="1")
    said = dict(line.split(": ", 1) for line in outcome.out.splitlines() if ": " in line)
    assert said["enough"] == ""
    for fault, parts in EXPECTED.items():
        assert fault in said, outcome.out + outcome.err
        for part in parts:
            assert part in said[fault], outcome.out + outcome.err
    assert "Error" not in said["nothing"]


class FakeContext:
    """The part of a Context that the messages need."""

    rank, size, second_store, recorder = 0, 3, None, None
    nodes = ("n1", "n2", "n2")
    places = tuple(Place(node, 0, "cpu", None, (0,)) for node in nodes)

    def __init__(self, job_nodes):
        self.job_nodes = job_nodes


def test_a_node_can_be_left_out():
    """By the options of the launcher that started the job."""
    in_slurm, by_hand = Peers(FakeContext(2)), Peers(FakeContext(None))
    assert in_slurm.named([1, 2]) == "ranks 1, 2 (n2)"
    assert "--exclude=n2 for sbatch or srun" in in_slurm.without([1, 2])
    assert "leave n2 out of mpirun's hosts" in by_hand.without([1])


def test_enabled_above_one_node():
    words = ["--layers", "1", "--hidden", "8", "--heads", "2"]
    two, one = FakeContext(2), FakeContext(2)
    one.nodes = ("n1",) * 3
    assert checks_nodes(parse(words), two)
    assert not checks_nodes(parse(words), one)
    assert checks_nodes(parse([*words, "--preflight"]), one)
    assert not checks_nodes(parse([*words, "--no-preflight"]), two)
