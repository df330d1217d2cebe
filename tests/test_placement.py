"""If this failed, ranks would share cores or GPUs, or train on a CPU beside a GPU."""

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import start_ranks

from architecture.shape import ModelShape
from base.errors import UserError, number_ranges
from config.run_options import Run
from config.schema import Layout
from distributed import gpus, placement, rendezvous
from distributed.placement import Place


def places(nodes: str, cores: int = 1, gpus: str = "", asked: int | None = None) -> list[Place]:
    """A rank for each letter of `nodes`, on the node of that letter; GPUs likewise."""
    return [
        Place(node, nodes[:rank].count(node), "cpu", gpu, tuple(range(cores)), asked)
        for rank, (node, gpu) in enumerate(zip(nodes, gpus or [None] * len(nodes)))
    ]


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ([(0,), (1,), (2,), (3,)], 2, [(0, 1), (2, 3)]),
        ([(0, 4), (1, 5), (2, 6), (3, 7)], 2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ([(0,), (1,), (2,)], 2, [(0,), (1, 2)]),
        ([(0, 1)], 2, [None, None]),  # two threads of one core are not two cores
    ],
)
def test_ranks_share_whole_cores(cores, ranks, expected):
    shares = [placement.share_of_cores(cores, ranks, index) for index in range(ranks)]
    assert shares == expected


@pytest.mark.parametrize(
    ("local_rank", "local_size", "visible", "sharing", "gpu"),
    [(3, 4, 4, False, 3), (1, 2, 8, False, 1), (3, 4, 1, False, 0), (3, 4, 2, True, 1)],
)
def test_gpu_by_local_rank(local_rank, local_size, visible, sharing, gpu):
    assert gpus.choose_gpu(local_rank, local_size, visible, "n1", sharing) == gpu


def test_fewer_gpus_than_ranks():
    with pytest.raises(UserError, match="8 ranks on node n1 have 4 GPUs; start at most 4 a node"):
        gpus.choose_gpu(0, 8, 4, "n1", sharing=False)


def test_two_ranks_on_one_gpu():
    """Each sees one GPU; only the identifiers of all ranks show that it is the same."""
    gpus.check_gpus(places("aabb", gpus="wxyz"))
    with pytest.raises(UserError, match=r"ranks 2, 3 on node b .* \(y\), of 2 .*") as e:
        gpus.check_gpus(places("aabb", gpus="wxyy"))
    # --gpus-per-task would hide the other ranks' GPUs, which NCCL needs to see.
    assert "give srun --gpus-per-node=2 --gpu-bind=none (train.py may share GPUs" in str(e.value)


def test_the_switch_of_the_nccl_tests(monkeypatch):
    """Each rank is a host of its own to NCCL; nothing is set without it, or if none share a GPU."""
    names = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")
    for name in (placement.SHARE_FOR_TESTS, *names):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)
    shared, apart = places("aabb", gpus="wxyy"), places("aabb", gpus="wxyz")
    assert not gpus.share_gpu_for_tests(shared, 3)
    monkeypatch.setenv(placement.SHARE_FOR_TESTS, "1")
    assert not gpus.share_gpu_for_tests(apart, 3)
    assert not any(name in os.environ for name in names)
    assert gpus.share_gpu_for_tests(shared, 3)
    assert [os.environ[name] for name in names] == ["rank3", "lo", "1"]


@pytest.mark.parametrize(
    ("capability", "advice"),
    [
        ((7, 0), r"install torch's build for CUDA 12.6 \(\+cu126\)"),
        ((13, 0), "a build of"),
    ],
)
def test_a_gpu_that_torch_has_no_kernels_for_is_refused(capability, advice, monkeypatch):
    facts = {"is_available": True, "device_count": 1, "get_device_name": "Tesla V100-SXM2-32GB"}
    facts |= {"get_device_capability": capability, "set_device": None, "synchronize": None}
    facts["get_device_properties"] = SimpleNamespace(uuid="x")
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    local, launch = SimpleNamespace(rank=0, size=1), SimpleNamespace(size=1)

    def choose():
        return rendezvous._choose_device(Run(device="cuda"), launch, local, "n1")

    def fails(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *_, **__: ones(1))
    assert choose() == (torch.device("cuda", 0), "GPU-x", "none")
    monkeypatch.setattr(torch, "ones", fails)
    sm = "sm_{}{}".format(*capability)
    sentence = rf"V100-SXM2-32GB has compute capability {capability[0]}.{capability[1]} \({sm}\)"
    with pytest.raises(UserError, match=f"{sentence}, .* no kernel image is available; .*{advice}"):
        choose()


@pytest.mark.parametrize(
    ("given", "tp_cp", "job_nodes", "sentence"),
    [
        (places("aaab"), (1, 1), 2, "unequal numbers of ranks: 3 on a, 1 on b; --ntasks-per-node"),
        (places("aabb"), (1, 1), 3, "the job holds 3 nodes, but its 4 ranks are on 2 of them"),
        (places("abab"), (2, 1), 2, "tensor-parallel ranks 0 to 1 are on nodes a, b"),
        (places("aabb"), (4, 1), 2, "tensor-parallel ranks 0 to 3 are on nodes a, b"),
        (places("aabb"), (1, 4), 2, "context-parallel ranks 0 to 3 are on nodes a, b: every layer"),
        (places("abab"), (1, 2), 2, "context-parallel ranks 0 to 1 are on nodes a, b"),
        (places("aabb"), (2, 2), 2, "ranks 0 to 2 are on nodes a, b: .* a tp x cp that divides"),
        (places("abab"), (2, 2), 2, "tensor-parallel ranks 0 to 1 are on nodes a, b: .* a tp that"),
        (places("aabb", 1, asked=8), (2, 1), 2, "4 ranks, the first is 0 on a, have 1 cores, but"),
    ],
)
def test_each_warning(given, tp_cp, job_nodes, sentence):
    tp, cp = tp_cp
    layout = Layout(tp=tp, cp=cp, dp=4 // tp // cp)
    (found,) = placement.placement_warnings(given, layout, job_nodes)
    assert re.search(sentence, found)


EXPERTS = ModelShape(2, 64, 4, experts=8, experts_per_token=4, activation="swiglu", bias=False)


@pytest.mark.parametrize(
    ("nodes", "ep", "k", "ranks"),
    [
        ("aabb", 4, 4, ""),
        ("aabb", 2, 4, ""),
        ("abcd", 4, 4, ""),
        ("abab", 4, 4, "0 to 3, which are on nodes a, b"),
        ("aaaabbba", 4, 4, "4 to 7, which are on nodes a, b"),
        ("abbabb", 3, 4, "0 to 2, which are on nodes a, b"),
        ("abab", 4, 2, ""),  # one copy would spare little
        ("abab", 1, 4, ""),
    ],
)
def test_experts_that_are_placed_unevenly_are_named_once(nodes, ep, k, ranks):
    model = dataclasses.replace(EXPERTS, experts_per_token=k)
    layout, given = Layout(dp=len(nodes), ep=ep), places(nodes, cores=8, asked=8)
    without = placement.placement_warnings(given, layout)
    found = placement.placement_warnings(given, layout, model=model)
    assert len(found) == len(without) + bool(ranks)
    assert any(f"divided over ranks {ranks}" in line for line in found) == bool(ranks)
    dense = dataclasses.replace(EXPERTS, experts=1, experts_per_token=1)
    assert placement.placement_warnings(given, layout, model=dense) == without


def test_a_good_placement_has_no_warnings():
    given = places("aabb", cores=8, asked=8)
    assert placement.placement_warnings(given, Layout(tp=2, dp=2), job_nodes=2) == []
    assert placement.placement_warnings(given, Layout(tp=2, dp=2), job_nodes=None) == []


def write_cpus(folder: Path, sockets: dict[int, int], sibling: int = 0) -> None:
    """Write the kernel's files about CPUs: the socket of each; `sibling` numbers lie between the
    two threads of a core, 0: a core has one.
    """
    for cpu, socket in sockets.items():
        topology = folder / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket}\n")
        threads = f"{cpu % sibling},{cpu % sibling + sibling}" if sibling else str(cpu)
        (topology / "thread_siblings_list").write_text(f"{threads}\n")


def test_each_rank_has_cores_of_one_socket_where_sockets_are_numbered_in_turn(tmp_path):
    """As on many servers of two sockets: CPUs 0, 2, 4 ... are of socket 0, and 1, 3, 5 ... of 1."""
    write_cpus(tmp_path, {cpu: cpu % 2 for cpu in range(16)}, sibling=8)
    cores = placement.physical_cores(tuple(range(16)), str(tmp_path))
    assert cores == [(c, c + 8) for c in (0, 2, 4, 6, 1, 3, 5, 7)]
    shares = [placement.share_of_cores(cores, 4, rank) for rank in range(4)]
    assert shares == [(0, 2, 8, 10), (4, 6, 12, 14), (1, 3, 9, 11), (5, 7, 13, 15)]
    assert placement.physical_cores((3, 4), str(tmp_path / "none")) == [(3,), (4,)]


def test_a_rank_on_the_wrong_socket_is_named(monkeypatch, tmp_path):
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    folder = tmp_path / "bus/pci/devices/0000:41:00.0"
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text("0-3,8-11\n")
    near = gpus.near_cores(torch.device("cuda", 0), str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a fake GPU of a rehearsal
    assert gpus.near_cores(torch.device("cuda", 0), str(tmp_path)) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert near == "0-3,8-11"
    assert gpus.near_cores(torch.device("cuda", 0), str(tmp_path / "none")) is None

    def warnings(*cores: tuple[int, ...]) -> list[str]:
        given = [
            Place("n1", i, f"cuda:{i}", f"g{i}", c, None, near, 2) for i, c in enumerate(cores)
        ]
        return placement.placement_warnings(given, Layout(dp=len(cores)))

    assert warnings((0, 1, 8, 9), (2, 3, 10, 11)) == []
    assert warnings(tuple(range(16))) == [], "it is not bound to a socket"
    for wrong in (4, 5, 6, 7), (3, 4, 11, 12):
        (found,) = warnings((0, 1, 8, 9), wrong)
        assert found.startswith("1 ranks, the first is 1 on n1, run on cores ")
        assert "but cores 0-3,8-11 are on the socket of its GPU (cuda:1)" in found


def test_ranks_that_see_one_gpu_each_are_told_of_the_links_between_them():
    def found(visible: list[int]) -> list[str]:
        given = [
            Place("n1", i, "cuda:0", f"g{i}", (i,), None, None, v) for i, v in enumerate(visible)
        ]
        return placement.placement_warnings(given, Layout(dp=len(visible)))

    assert found([2, 2]) == found([1]) == []
    (note,) = found([1, 1])
    assert "each of the 2 ranks on n1 sees one GPU alone" in note
    assert note.endswith("give srun --gpus-per-node=2 --gpu-bind=none")


def test_table():
    _, first, second = placement.table(places("aabb", cores=4)).splitlines()
    assert first.split() == ["a", "2", "0-3", "0-1"]
    assert second.split() == ["b", "2", "0-3", "2-3"]


def test_number_ranges():
    assert number_ranges((0, 1, 2, 3, 8, 10, 11)) == "0-3,8,10-11"


def test_a_node_without_its_gpus_is_named():
    """Its ranks would choose gloo, the others NCCL, and all would wait for ever."""
    places = [Place("a", 0, "cuda:0", "g0", (0,)), Place("b", 0, "cpu", None, (0,))]
    places += [Place("b", 1, "cpu", None, (0,)), Place("c", 0, "cuda:0", "g1", (0,))]
    with pytest.raises(UserError, match=r"on 2 of 4 ranks, and none on ranks 1-2 \(node b\)"):
        placement.check_devices(places)
    placement.check_devices(places[:1])
    placement.check_devices(places[1:3])


# A rank that has a GPU and one that has none, as far as they know: they would talk over gloo.
MEETS_ON = """
import sys
import torch
from config.run_options import Run
from distributed import rendezvous
from distributed.launch import discover
launch = discover()
device = torch.device("cuda", 0) if launch.rank else torch.device("cpu")
rendezvous._choose_device = lambda *_: (device, "g0" if launch.rank else None, "gloo")
rendezvous.meet(launch, Run())
print("met")
"""


@pytest.mark.slow
def test_ranks_of_which_one_has_no_gpu_do_not_meet():
    """`check_devices` is called when all know where they are, before a process group starts."""
    outcome = start_ranks(2, "-c", MEETS_ON, timeout=120)
    assert outcome.status == 2, outcome.err
    assert "torch sees a CUDA device on 1 of 2 ranks, and none on ranks 0" in outcome.err
    assert "met" not in outcome.out


def test_auto_does_not_train_on_the_cpu_beside_a_gpu_that_torch_cannot_use(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = str(tmp_path)
    gpus.check_unused_gpu("13.0", "; the driver here is 470.82.01", folder)  # no GPU
    (tmp_path / "nvidiactl").touch()
    gpus.check_unused_gpu("13.0", "", folder)
    (tmp_path / "nvidia0").touch()
    gpus.check_unused_gpu(None, "", folder)  # a torch for CPUs
    for shown in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        gpus.check_unused_gpu("13.0", "", folder)
    for shown in ("0", "GPU-8f", " 1,0", None):
        if shown is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        with pytest.raises(UserError) as refused:
            gpus.check_unused_gpu("13.0", "; the driver here is 470.82.01", folder)
        said = str(refused.value)
        assert said.startswith(
            f"--device auto: this node has {tmp_path}/nvidia0, but torch can use"
        )
        assert "driver here is 470.82.01; to run on the CPU all the same, give --device cpu" in said


def test_only_a_given_cpu_is_silent_beside_such_a_gpu(monkeypatch):
    """`--device auto` asks, `--device cpu` does not."""
    asked = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(gpus, "check_unused_gpu", lambda *facts: asked.append(facts))
    launch = SimpleNamespace(size=1)
    for device in ("auto", "cpu"):
        chosen = rendezvous._choose_device(Run(device=device), launch, None, "n1")
        assert (chosen[0].type, chosen[2]) == ("cpu", "none")
    assert len(asked) == 1


def test_a_driver_that_torch_cannot_use_is_explained(tmp_path):
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27\n")
    why = gpus.unusable_driver("2.13.0", "13.0", str(path))
    assert "the driver here is 470.82.01, and torch 2.13.0 is built for CUDA 13.0" in why
    assert "install torch's build for CUDA 12.6" in why
    assert "is built for CPUs" in gpus.unusable_driver("2.13.0+cpu", None, str(path))
    assert gpus.unusable_driver("2.13.0", "13.0", str(tmp_path / "none")) == ""
