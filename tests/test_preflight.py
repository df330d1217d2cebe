"""If this failed, a fault of a node would be found in training and not before it."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from random import Random
from types import SimpleNamespace
from uuid import UUID

import pytest
import torch
import torch.distributed as dist
from fake_context import FakeContext as AnyContext
from golden_worker import options as golden_options
from ranks import mpirun

from base.errors import NodeError
from config import validation
from config.command_line import parse
from distributed import preflight
from distributed.mesh import mesh_of_run
from distributed.placement import Place
from distributed.preflight import Peers, checks_nodes
from distributed.store import StoreExchange

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
    assert "Error" not in said["with experts"]
    done = said["groups with experts"].split("; ")
    assert said["tried twice"] == "0"
    assert {"an all-to-all of (0, 1)", "an all-reduce of (0, 1)"} <= set(done)


class WithHandles(AnyContext):
    """A context whose groups of several ranks have process groups that do nothing."""

    def __init__(self, size: int):
        super().__init__(size)
        self.handles = []

    def group(self, rows, role):
        group = super().group(rows, role)
        if group.size > 1:
            group.handle = object()
            self.handles.append(group.handle)
        return group


@pytest.mark.parametrize(
    ("changes", "role"),
    [
        ({"tp": 2, "pp": 2, "schedule": "interleaved", "layers": 4}, "tp"),
        ({"cp": 4, "heads": 2}, "kv"),
        ({"cp": 2, "tp": 2, "zero": 1, "optimizer": "muon"}, "stage"),
        ({"ep": 2, "experts": 4, "experts_per_token": 2}, "experts"),
        ({"ep": 4, "experts": 4, "tp": 2, "experts_per_token": 2}, "expert_replicas"),
        ({"ep": 8, "experts": 8, "experts_per_token": 8, "nodes": "aabbccdd"}, "experts_across"),
        ({"ep": 8, "experts": 8, "experts_per_token": 8, "nodes": "aaaabbbb"}, "experts_within"),
        ({"tp": 4, "heads": 8, "kv_heads": 2}, "kv_copies"),
    ],
)
def test_every_group_is_tried_once_with_what_runs_over_it(changes, role):
    """Else the first transfer over a broken rail is in step 1, and a hang."""
    fields = dict(changes)
    context = WithHandles(8)
    context.nodes = list(fields.pop("nodes", "aaaaaaaa"))
    config = validation.check(golden_options({"global_batch_size": 16} | fields), 8)
    mesh = mesh_of_run(config, context)
    tried = preflight.roles_to_try(mesh, config.training.optimizer)
    found = [mesh.group(name).handle for name in tried]
    assert role in tried
    assert {id(handle) for handle in found} == {id(handle) for handle in context.handles}
    assert len(found) == len(context.handles)
    sends_to_all = {"heads", "experts", "experts_across", "experts_within", "stage"}
    for name in tried:
        assert (preflight.operation_of(name) == "an all-to-all") == (name in sends_to_all), name


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


class Counting(dist.HashStore):
    """A store that keeps the bytes of the results that ranks read."""

    def __init__(self):
        super().__init__()
        self.read = []

    def get(self, key):
        value = super().get(key)
        if key.endswith("/result"):
            self.read.append(len(value))
        return value


def test_each_rank_reads_what_was_found_and_not_the_answers_of_all(tmp_path, monkeypatch):
    """The versions of 64 ranks are 15 kB, which 64 ranks read: at 4,000 ranks, gigabytes."""
    monkeypatch.setattr(preflight, "check_groups", lambda config, peers, say: None)
    words = ["--layers", "1", "--hidden", "8", "--heads", "2", "--out", str(tmp_path)]
    config, store = parse(words), Counting()

    def checks(rank: int) -> None:
        context = Crowd(64)
        context.rank, context.second_store = rank, store
        context.places = [Place(node, 0, "cpu", None, (0,)) for node in context.nodes]
        preflight.check_nodes(config, Peers(context), lambda line: None)
        preflight.check_room(config, context, 1, lambda line: None)

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(checks, range(64)))
    assert len(store.read) == 3 * 64
    assert max(store.read) < 100


def test_places_of_all_ranks_are_sent_compressed():
    """Every rank reads the places of all: 4,096 ranks read 5 GB of text."""
    random = Random(1)
    cores = [tuple(range(16 * rank, 16 * rank + 16)) for rank in range(8)]
    places = [
        asdict(
            Place(
                f"node{i // 8}",
                i % 8,
                f"cuda:{i % 8}",
                f"GPU-{UUID(int=random.getrandbits(128))}",
                cores[i % 8],
                16,
            )
        )
        for i in range(512)
    ]
    store = Counting()
    with ThreadPoolExecutor(2) as pool:
        exchanges = [StoreExchange(store, rank, 2, "places") for rank in range(2)]
        told = list(pool.map(lambda each: each.gather("place", places), exchanges))
    assert told == [json.loads(json.dumps([places, places]))] * 2
    assert max(store.read) < 0.2 * len(json.dumps(told[0]))


# ---- Time ----------------------------------------------------------------------------------------


class Clock:
    """Time that passes in waits alone: of a check's thread, and of the exchange between ranks."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Together(Peers):
    """Rank 0's peers, of which `progress` says how far they have come at a time, or rank 0 itself
    if it is None.
    """

    def __init__(self, context, clock, progress=None):
        self.context, self.clock, self.progress = context, clock, progress
        self.seconds = preflight.seconds_to_answer(context.size)

    def agree(self, value, combine, key="agree"):
        own = [value] * self.context.size
        return combine(self.progress(self.clock.now, value) if self.progress else own)


class Crowd(FakeContext):
    """A context of many ranks, eight on a node."""

    def __init__(self, size: int):
        super().__init__(job_nodes=size // 8)
        self.size, self.device = size, torch.device("cpu")
        self.nodes = [f"n{rank // 8:03}" for rank in range(size)]


def groups_checked(size: int, seconds: dict[str, float], monkeypatch, progress=None) -> list[str]:
    """The lines of the groups' check if their steps take so long, by role; "made" for making."""
    clock = Clock()
    ends = []  # when each step ends
    for name in ("made", *preflight.ROLES):
        ends.append((ends or [0.0])[-1] + seconds.get(name, 1.0))

    class Steps:
        """The thread that makes the groups, and the event at its end, in virtual time."""

        def __init__(self, target=None, **how):
            self.at = 0

        def start(self):
            pass

        def wait(self, limit):
            until = min(clock.now + limit, ends[-1])
            while ends[self.at] < until:
                clock.now = ends[self.at]
                self.at += 1
                made[0].begin(self.at)
            clock.now = max(clock.now, until)
            if clock.now == ends[-1]:
                made[0].begin(len(ends))

        set = start

    made = []
    own = preflight._Progress

    def progress_of_rank():
        made.append(own())
        return made[-1]

    monkeypatch.setattr(preflight, "_Progress", progress_of_rank)
    monkeypatch.setattr(preflight, "time", clock)
    monkeypatch.setattr(preflight, "threading", SimpleNamespace(Event=Steps, Thread=Steps))
    said = []
    config = SimpleNamespace(layout=SimpleNamespace(axes={}))
    preflight.check_groups(config, Together(Crowd(size), clock, progress), said.append)
    return said


@pytest.mark.parametrize("size", [384, 4096])
def test_many_ranks_start_within_the_limit_if_each_collective_takes_a_second(size, monkeypatch):
    """Making the groups takes a second for each of 19 communicators."""
    assert groups_checked(size, {"made": 19.0}, monkeypatch) == []


def test_what_is_slow_everywhere_names_no_node(monkeypatch):
    said = groups_checked(64, {"world": 200.0}, monkeypatch)
    assert said == ["preflight: an all-reduce over world is slow, still going on"] * 2
    with pytest.raises(NodeError, match="not done on any rank in 380 s") as caught:
        groups_checked(64, {"world": 1e9}, monkeypatch)
    assert caught.value.nodes == []


def test_a_rank_that_holds_up_the_others_is_named(monkeypatch):
    """After one limit, if the others are ahead of it and nothing moves any more."""

    def behind(now, value):
        ahead = [{"at": 3, "error": None, "still": now - 2.0}] * 64
        ahead[17] = {"at": 2, "error": None, "still": now - 1.0}
        return ahead

    with pytest.raises(NodeError, match="an all-reduce over cp fails on rank 17") as caught:
        groups_checked(64, {"dp": 1e9}, monkeypatch, behind)
    assert caught.value.nodes == ["n002"]


def test_all_that_fail_alike_name_no_node():
    peers = Together(Crowd(64), Clock())
    with pytest.raises(NodeError, match="all fail alike") as caught:
        preflight.check_devices(["no driver"] * 64, peers)
    assert caught.value.nodes == []
    with pytest.raises(NodeError, match="rank 3") as caught:
        preflight.check_devices(["", "", "", "broken"] + [""] * 60, peers)
    assert caught.value.nodes == ["n000"]
