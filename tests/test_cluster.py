"""How jobs start and end: if this failed, a rank that fails would leave the others waiting."""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import (
    ROOT,
    Job,
    mpi_command,
    mpirun,
    none_left,
    start,
)

from config.run_options import Run
from distributed import context as distributed_context
from distributed.context import Context, await_other_threads, prepare
from distributed.early_end import StartWatch, node_name
from distributed.launch import Launch, Local
from distributed.mesh import Mesh
from distributed.placement import Place

WORKER = "tests/failing_worker.py"

# ---- How a job ends ------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_failing_rank_ends_all():
    """The traceback is printed once, with rank and node; no process is left in a collective."""
    outcome = mpirun(2, WORKER, "raise", "1")
    assert outcome.status not in (0, 75)
    assert " of 2 mpirun" not in outcome.out  # no rank finished the collective
    assert outcome.err.count("Traceback") == 1
    assert outcome.err.count("ValueError: planted") == 1
    assert "rank 1 of 2 on " in outcome.err
    assert none_left(f"{WORKER} raise 1") == []


@pytest.mark.slow
def test_a_mistake_that_all_ranks_find_is_printed_once():
    outcome = mpirun(2, WORKER, "mistake", "0")
    assert outcome.status == 2
    assert outcome.err.count("error: planted: 3 does not divide 4") == 1
    assert "Traceback" not in outcome.err


@pytest.mark.slow
def test_the_wait_for_a_rank_that_does_not_start_is_limited():
    """MPI_Init holds Python's lock: no thread of Python could end this wait."""
    outcome = mpirun(2, WORKER, "absent", "1")
    assert outcome.status not in (0, 75)
    assert " of 2 mpirun" not in outcome.out
    assert "Timeout (0:00:08)!" in outcome.err
    assert re.search(r'launch.py", line \d+ in _local_by_mpi', outcome.err)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SMALL = "--layers 1 --hidden 8 --heads 2 --seq-length 8 --vocab-size 32 --global-batch-size 2"
LAUNCHERS = {
    "mpirun": [*mpi_command(2), sys.executable],
    "torchrun": TORCHRUN,
    # Without --kill-on-bad-exit=1, which would end the other ranks too.
    "srun": ["srun", "--mpi=pmi2", "-N2", "-n2", sys.executable],
}


def early(name: str, where: str, culprit: int, out: Path, request) -> list[str]:
    """The command of a job of two ranks, one of which fails at a moment in a way.

    The word after the last - of `name` is the launcher.
    """
    launcher = name.rpartition("-")[2]
    if launcher == "srun":
        request.getfixturevalue("slurm")
    train = [*SMALL.split(), "--steps", "1", "--out", str(out)]
    return [*LAUNCHERS[launcher], "tests/early_worker.py", *where.split(), str(culprit), *train]


# One moment for each way to fail, under the launchers, because their ranks end differently.
FAILURES = {
    "import-mpirun": ("imports import", 1, "has no package 'torch'"),
    "late-mpirun": ("imports raise", 0, "OSError: [Errno 5] planted"),
    "mpi-torchrun": ("before raise", 1, "OSError: [Errno 5] planted"),
    "mistake-mpirun": ("before mistake", 1, "error: planted: no such device"),
    "connect-0-mpirun": ("meeting raise", 0, "OSError: [Errno 5] planted"),
    "connect-1-torchrun": ("meeting raise", 1, "OSError: [Errno 5] planted"),
    "mistake-srun": ("before mistake", 1, "error: planted: no such device"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.slow
def test_a_rank_that_fails_before_all_have_met_ends_the_job(name, tmp_path, request):
    where, culprit, said = FAILURES[name]
    command = early(name, where, culprit, tmp_path, request)
    outcome = start(command, timeout=120, TEST=str(tmp_path))
    assert outcome.status not in (0, 75)
    assert outcome.err.count(said) == 1, outcome.err
    failed = f"rank {culprit} of 2 on {node_name()} failed:"
    assert (failed in outcome.err) == said.startswith("OSError")
    assert not (tmp_path / "hang").exists()
    assert none_left(str(tmp_path)) == watches_left(tmp_path) == []


def watches_left(test: Path) -> list[int]:
    """The watches of starts with that variable TEST, after a moment to end."""
    until = time.monotonic() + 5
    while True:
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            words, environ = process.info["cmdline"] or [], process.info["environ"] or {}
            if "early_end" in " ".join(words) and environ.get("TEST") == str(test):
                found.append(process.pid)
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


# Each moment, and each launcher at an early and at a late one.
LOSSES = [
    "imports kill-mpirun",
    "before stop-mpirun",
    "after stop-mpirun",
    "meeting kill-torchrun",
    "imports kill-srun",
    "after stop-srun",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_that_is_lost_during_the_start_ends_the_job(name, tmp_path, request):
    """It would last for half an hour, and after the meeting for two minutes."""
    where = name.partition("-")[0]
    outcome = start(early(name, where, 1, tmp_path, request), timeout=100, TEST=str(tmp_path))
    assert outcome.status not in (0, 75)
    assert outcome.err.count("DEAD: rank 1 ") == 1, outcome.err
    stopped = "it was stopped (SIGSTOP) before " in outcome.err
    assert stopped == where.endswith("stop")
    case = json.loads((tmp_path / "hang/case.json").read_text())
    assert (case["kind"], case["culprits"]) == ("dead", [1])
    assert not (tmp_path / "hang.1").exists()  # no other rank has been reported
    assert none_left(str(tmp_path)) == watches_left(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(2)"], ids=["kill", "exit"])
def test_the_watch_of_a_rank_has_the_launcher_end_the_job(end):
    """The launcher is imitated as under srun: after MPI has begun it answers the last command."""
    code = "import os, sys; from distributed.early_end import StartWatch, ending_all_ranks; "
    code += f"watch = StartWatch(); watch.begin()\nwith ending_all_ranks(watch): {end}"
    launcher, of_rank = socket.socketpair()
    with launcher, of_rank:
        launcher.settimeout(60)
        places = {"PMI_FD": str(of_rank.fileno()), "PMI_RANK": "1", "PMI_SIZE": "2"}
        rank = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, **places, "SLURM_STEP_ID": "0"},
            pass_fds=[of_rank.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        of_rank.close()
        said = b"".join(iter(lambda: launcher.recv(1024), b""))
    assert said.splitlines()[-1] == b"cmd=abort exitcode=1"
    _, err = rank.communicate(timeout=60)
    assert rank.returncode == (2 if "exit" in end else -9)
    assert ("DEAD: rank 1 on " in err) == ("kill" in end)


def test_a_rank_whose_watch_was_killed_goes_on_and_ends(monkeypatch):
    """torchrun sends SIGTERM to the rank and to its watch."""
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    watch = StartWatch()
    watch.begin()
    watch._process.kill()
    watch._process.wait()
    watch.follow("runs/never")
    watch.close()


NO_LOOPBACK = "ip link set lo up; ip addr del 127.0.0.1/8 dev lo; "


@pytest.mark.parametrize("before", ["", NO_LOOPBACK], ids=["no network", "no loopback address"])
def test_without_a_network_several_ranks_end_and_one_trains(before, tmp_path):
    shell = ["unshare", "-n", "sh", "-c", f'{before}exec "$@"', "sh"]
    if start([*shell, "true"]).status:
        pytest.skip("this user may not make a network")
    train = [sys.executable, "train.py", *SMALL.split(), "--steps", "1", "--out", str(tmp_path)]
    alone = start([*shell, *train], timeout=120)
    assert alone.status == 0, alone.err
    assert "note: no watchdog, since this machine has no loopback network" in alone.err
    outcome = start([*shell, *mpi_command(2), *train], timeout=120)
    assert outcome.status == 1
    said = f"{node_name()} cannot reach the store of this job at"
    assert (said if not before else f"rank 0 of 2 on {node_name()} failed:") in outcome.err
    assert "c10d" not in outcome.err
    assert none_left(str(tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["imports", "meeting", "after"])
def test_a_signal_to_one_rank_of_srun_ends_the_job(moment, tmp_path, request):
    """Without --kill-on-bad-exit=1; ranks that have met stop at their first boundary."""
    command = early("srun", f"{moment} term", 1, tmp_path, request)
    outcome = start(command, timeout=100, TEST=str(tmp_path))
    said = "SIGTERM before all ranks have met: ending at once" in outcome.err
    assert said == (moment != "after"), outcome.err
    assert (outcome.status == 75) == (moment == "after")
    assert outcome.status
    assert not (tmp_path / "hang").exists()
    assert none_left(str(tmp_path)) == watches_left(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM-mpirun", "SIGTERM-torchrun", "SIGTERM-srun"])
def test_a_signal_while_ranks_meet_ends_them(name, tmp_path, request):
    """Rank 0 does not come to meet the other."""
    number = signal.Signals[name.partition("-")[0]]
    with Job(early(name, "before sleep", 0, tmp_path / "run", request), tmp_path) as job:
        job.wait_for(lambda: all(f"rank {rank} comes to before" in job.text for rank in (0, 1)))
        time.sleep(0.5)
        ranks = {}
        for process in psutil.process_iter(["cmdline", "environ"]):
            environ = process.info["environ"] or {}
            rank = environ.get("RANK", environ.get("PMI_RANK"))
            if rank and str(tmp_path / "run") in (process.info["cmdline"] or []):
                ranks[rank] = process
        ranks["1"].send_signal(number)
        assert job.status() not in (0, 75)
        assert psutil.wait_procs(ranks.values(), timeout=30)[1] == []
        if name.endswith("torchrun"):  # in MPI_Init the kernel ends it, and the launcher says so
            assert f"{number.name} before all ranks have met: ending at once" in job.text


def test_other_threads_are_awaited():
    """A thread of gloo, for example, frees tensors after the rank that waited has gone on."""
    ended = []

    def work() -> None:
        for _ in range(20):  # without the interpreter, which it needs between two of them
            hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    await_other_threads(60.0)
    assert ended
    thread.join()


def test_debugging_flags_set_what_torch_reads_when_it_is_loaded():
    names = ("CUDA_LAUNCH_BLOCKING", "TORCH_NCCL_BLOCKING_WAIT", "CUBLAS_WORKSPACE_CONFIG")
    names += ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS")
    names += ("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",)
    code = (
        "import os, sys; from config.run_options import Run; "
        "from distributed.context import prepare; "
        "prepare(Run(blocking=True, deterministic=True), {}); assert 'torch' not in sys.modules; "
        f"print(*(os.environ.get(name) for name in {names}))"
    )

    def set_for(pp: int, **environment: str) -> list[str]:
        return start([sys.executable, "-c", code.format(pp)], **environment).out.split()

    expected = ["1", "1", ":4096:8", "expandable_segments:True", "None", "32", "false"]
    assert set_for(1) == expected
    # With several stages a blocking launch of a message would wait for the other stage's.
    assert set_for(2)[:2] == ["None", "1"]
    given = "max_split_size_mb:64"
    assert set_for(1, PYTORCH_ALLOC_CONF=given)[3:5] == [given, "None"]
    assert set_for(1, PYTORCH_CUDA_ALLOC_CONF=given)[3:5] == ["None", given]
    assert set_for(1, CUDA_DEVICE_MAX_CONNECTIONS="1")[5] == "1"


@pytest.mark.parametrize(
    ("pp", "experts", "given", "expected"),
    [(2, 8, None, "EAGER"), (2, 1, None, None), (1, 8, None, None), (2, 8, "LAZY", "LAZY")],
)
def test_kernels_are_loaded_at_the_start_if_stages_have_experts(
    pp, experts, given, expected, monkeypatch
):
    environment = {"CUDA_MODULE_LOADING": given} if given else {}
    monkeypatch.setattr(os, "environ", environment)
    prepare(Run(), pp, experts)
    assert os.environ.get("CUDA_MODULE_LOADING") == expected


def test_process_groups_start_under_the_watchdog():
    """With the algorithms for --deterministic chosen, and no group split from the world's."""
    outcome = mpirun(2, "tests/startup_worker.py")
    assert outcome.status == 0, outcome.err[-2000:]
    assert json.loads(outcome.out) == {
        "watched": True,
        "deterministic": True,
        "fills": False,  # filling empty tensors would cost a write of each
        "device_id": "None",
        "world is torch's": True,
        "groups": 2,  # the world's and that of the data replicas
    }


class NcclOptions:
    """Stands in for ProcessGroupNCCL.Options, which torch's CPU builds lack."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)
        self._timeout = None


def groups_made(monkeypatch, backend: str) -> dict[str, dict]:
    """Return the arguments to torch for each role of a mesh of 32 ranks with all groups."""
    asked: list[dict] = []
    of_world: list[dict] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: of_world.append(options)
    )
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: asked.append(options))
    monkeypatch.setattr(dist, "get_backend", lambda handle: backend)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=None))
    if backend == "nccl":
        nccl = SimpleNamespace(Options=NcclOptions)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    else:
        monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    local, device = Local(0, 32, True, 1, 0), torch.device("cuda", 0)
    launch = Launch("srun", 0, 32)
    places = [Place("n0", 0, "cuda", None, ())] * 32
    context = Context(launch, 0, 32, "n0", local, places, device, backend, 1, None)
    of_role: dict[str, dict] = {}
    make = Context.group

    def group(self, rows, role):
        before = len(asked)
        made = make(self, rows, role)
        for options in asked[before:]:
            of_role[role] = options
        return made

    monkeypatch.setattr(Context, "group", group)
    axes = {"pp": 2, "dp": 2, "cp": 4, "tp": 2}
    distributed_context._start_process_groups(context)
    Mesh(axes, context, over_heads=2, ep=4)
    # Of experts on several nodes there are other groups.
    context.places = [Place(f"n{n // 2}", 0, "cuda", None, ()) for n in range(32)]
    Mesh(axes, context, ep=4, sends_once=lambda nodes: True)
    (of_role["world"],) = of_world
    return of_role


# The most SMs of a group's operations; groups of messages have 4, groups of a layer no limit.
LIMITS = {"dp": 16, "replicas": 16, "expert replicas": 16, "tied": 16, "world": 2}


def test_groups_on_nccl_are_bound_to_a_device_and_limit_their_kernels(monkeypatch):
    """Else messages take lazy communicators of two ranks, and SMs that the products need."""
    of_role = groups_made(monkeypatch, "nccl")
    of_experts = {"experts", "experts across", "experts within", "expert replicas"}
    assert {"tp", "cp", "heads", "kv"} | of_experts <= set(of_role)
    for role, options in of_role.items():
        wanted = options["pg_options"]
        # torch would make all other groups by splitting a world that is bound to a device.
        device = None if role == "world" else torch.device("cuda", 0)
        assert options.get("device_id") == device, role
        assert wanted._timeout == options["timeout"], "torch warns if they differ"
        assert wanted.is_high_priority_stream == (role in ("tp", "cp", "heads", "kv")), role
        few = role.startswith(("forward", "backward"))
        limit = 4 if few else LIMITS.get(role)
        assert wanted.config.max_ctas == limit, role
    assert LIMITS.keys() <= of_role.keys()


def test_groups_of_a_torch_without_nccl_ask_for_none_of_its_options(monkeypatch):
    of_role = groups_made(monkeypatch, "gloo")
    assert of_role
    for options in of_role.values():
        assert options.get("device_id") is None
        assert "pg_options" not in options
