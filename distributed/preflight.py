"""What is said and checked before step 1: where ranks run, and whether a node lacks something.

    introduce(config, context, "precision: bf16 ...")     every rank's place, warnings, node checks
    check_compiler(kernels, "cuda", "n1")                 before a kernel is compiled
    warms_up(config, "cuda")                              whether passes come before step 1
    check_room(config, context, needed=10**9, say=print)  memory and disk for checkpoints

The checks of nodes are fast, and find faults that would otherwise end the run hours later. Every
rank must answer, have the same source files, options and library versions, allocate memory and
multiply matrices; every group of the layout must do what the run does over it. Slow ranks are found
in training, by check_speed_every. The answers go through torch's store with a time limit
(store.py), so that a node which does not answer, for any reason, is named in the error and can be
left out.

A check of the nodes raises NodeError, on every rank, with the nodes to leave out: the supervisor
then starts the run again without them. `say` prints a line on rank 0. `peers` has rank 0 judge the
answers of all ranks, so that the ranks get what it finds and not all answers.

The names of a run's kernels tell which code does a part of the step, such as attention, where
several can do it; torch.compile makes some of these kernels.
"""

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from base.errors import NOT_WRITTEN, ClusterError, NodeError, PackageError
from config.run_options import Run
from config.schema import Config
from distributed import placement
from distributed.collectives import Group
from distributed.context import Context
from distributed.mesh import ROLES, Mesh, mesh_of_run
from distributed.placement import Say
from distributed.run_lock import free_bytes
from distributed.store import NoAnswer, StoreExchange

ROOT = Path(__file__).resolve().parent.parent
# A rank that has not answered a check after SECONDS_TO_ANSWER, and SECONDS_PER_RANK more for each
# rank of the job, is considered lost. Every rank has done its slow imports before the checks. But
# NCCL makes one communicator after the other, with connections that take the longer the more ranks
# there are: on a good day 15 to 30 s of 384 ranks, and over a minute of thousands.
SECONDS_TO_ANSWER = 60.0
SECONDS_PER_RANK = 0.25
# If all ranks are in the same step, nobody knows whether they hang. After this many times the limit
# without an end of the step they are taken to hang.
MOST_LIMITS = 5
STILL = 0.75  # the share of the limit after which a rank counts as still
LOOKS = 2  # how often within the limit the ranks exchange how far they have come
GEMM_EDGE = {"cuda": 8192, "cpu": 512}  # rows and columns of the matrices that a device multiplies
SHARE_TO_ALLOCATE = 0.9  # the share of a GPU's free memory that a check allocates and frees again
# What is tried over the groups of a role; over those of other roles it is an all-reduce.
OPERATIONS = {"forward": "a message", "backward": "a message"}
OPERATIONS |= dict.fromkeys(
    ("heads", "experts", "experts_across", "experts_within", "stage"), "an all-to-all"
)
NAMED = 3  # the most ranks that an error message lists; it gives only the number of further ranks
# The parts that --compile compiles, as a text for the log and run.json.
COMPILED = (
    "norms with the sums before them, heads with rotary positions, SwiGLU (in evaluations and "
    "samples these run as they are), and the loss; by torch.compile"
)


def checks_nodes(config: Config, context: Context) -> bool:
    """Return whether nodes are checked before step 1: by default if there are several nodes.

    --preflight and --no-preflight override the default.
    """
    if config.run.preflight is None:
        return len(set(context.nodes)) > 1
    return config.run.preflight


def introduce(config: Config, context: Context, decided: str) -> None:
    """Print where every rank runs, and warnings; then run the pre-flight checks, if wanted.

    decided: a line for automatic decisions, such as the precision; may be empty. Called once before
    the model is built; collective over all ranks. Raise UserError, on every rank, if a check fails.
    """

    def say(line: str) -> None:
        """Print a line on rank 0."""
        if context.rank != 0:
            return
        try:
            print(line, flush=True)
        except OSError as error:  # as the log does: a full disk does not end a run
            if error.errno not in NOT_WRITTEN:
                raise

    if context.size > 1:
        say(placement.table(context.places))
    if decided:
        say(decided)
    of_run = context.places, config.layout, context.job_nodes, config.model
    for sentence in placement.placement_warnings(*of_run):
        say(f"note: {sentence}")
    pp = config.layout.pp
    if context.device.type == "cuda":
        if config.run.blocking and pp > 1:
            say(f"note: blocking = true: with pp({pp}) it does not wait for every CUDA kernel")
        if not config.run.compile:
            say("note: on one H200 --compile made steps 8 to 72 % faster (docs/training.md)")
    if checks_nodes(config, context):
        check_nodes(config, Peers(context), say)


# ---- Nodes ---------------------------------------------------------------------------------------


def seconds_to_answer(ranks: int) -> float:
    """Return the seconds after which a rank is considered lost, in a job of this many ranks."""
    return SECONDS_TO_ANSWER + SECONDS_PER_RANK * ranks


class Peers(StoreExchange):
    """Exchange of values between all ranks with a time limit, and the names of ranks in errors."""

    def __init__(self, context: Context, seconds: float | None = None):
        """Send nothing yet. seconds: limit of an answer; None: by the number of ranks."""
        self.context = context
        if seconds is None:
            seconds = seconds_to_answer(context.size)
        # The second connection to the store, because a wait of another thread may occupy the first.
        store = context.second_store
        name = "preflight"
        super().__init__(store, context.rank, context.size, name, context.recorder, seconds)

    def agree(self, value: Any, combine: Callable[[list], Any], key: str = "agree") -> Any:
        """Return combine(values of all ranks), computed on rank 0; collective over all ranks.

        An error of `combine` is raised on every rank. key: names the check in the error. Raise
        NodeError, on every rank, with the silent ranks.
        """
        try:
            return super().agree(value, combine, key)
        except NoAnswer as error:
            raise NodeError(
                f"preflight: {self.named(error.ranks)} did not answer in {self.seconds:g} s "
                f"({key}); {self.without(error.ranks)}",
                self.nodes(error.ranks),
            ) from None

    def named(self, ranks: list[int]) -> str:
        """Return ranks and their nodes as text: `rank 3 (n2)`, `ranks 4, 5, 6 and 5 more (n3)`."""
        noun = "ranks" if len(ranks) > 1 else "rank"
        numbers = ", ".join(map(str, ranks[:NAMED]))
        if len(ranks) > NAMED:
            numbers += f" and {len(ranks) - NAMED} more"
        return f"{noun} {numbers} ({', '.join(self.nodes(ranks))})"

    def without(self, ranks: list[int]) -> str:
        """Return the text that explains how to start the job without the nodes of these ranks."""
        nodes = ",".join(self.nodes(ranks))
        if self.context.job_nodes is not None:
            return f"to run without it: --exclude={nodes} for sbatch or srun"
        return f"to run without it, leave {nodes} out of mpirun's hosts"

    def refusal(self, text: str, ranks: list[int]) -> NodeError:
        """Return the error that these ranks have failed a check, with the nodes to leave out.

        If all ranks of several nodes have failed alike, the cause is none of the nodes: none is
        named. text: what failed, where and why.
        """
        if len(ranks) == self.context.size and len(self.nodes(ranks)) > 1:
            return NodeError(f"preflight: {text}; no node is named, since all fail alike", [])
        return NodeError(f"preflight: {text}; {self.without(ranks)}", self.nodes(ranks))

    def nodes(self, ranks: list[int]) -> list[str]:
        """Return the names of the nodes on which these ranks run, sorted, each name once."""
        return sorted({self.context.nodes[rank] for rank in ranks})


def check_nodes(config: Config, peers: Peers, say: Say) -> None:
    """Check that all ranks answer, their versions, devices and groups; collective over all ranks.

    Called by `introduce` before the model is built. Print one line with the result.
    Raise NodeError, on every rank, if a check fails.
    """
    began = time.perf_counter()
    context = peers.context
    # Each `agree` also checks that every rank answers within the time limit.
    peers.agree(versions(config), lambda answers: check_versions(answers, peers), "start")
    gpu = context.places[context.rank].gpu
    sharing = sum(place.gpu == gpu for place in context.places)  # ranks on this rank's GPU
    error = try_device(context.device, sharing)
    peers.agree(error, lambda errors: check_devices(errors, peers), "device")
    check_groups(config, peers, say)
    say(
        f"preflight: {context.size} ranks on {len(set(context.nodes))} nodes answer, every device "
        f"multiplies, all groups reduce ({time.perf_counter() - began:.1f} s)"
    )


# ---- Versions ------------------------------------------------------------------------------------


def versions(config: Config) -> dict[str, str]:
    """Return this rank's versions and hashes, by name; they must be the same on every rank.

    The hashes are of Trine's source files and of the run's options.
    """
    sources = hashlib.sha256()
    packages = [path.parent for path in ROOT.glob("*/__init__.py")]
    for path in sorted(file for folder in (ROOT, *packages) for file in folder.glob("*.py")):
        sources.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    options = json.dumps(config.as_dict(), sort_keys=True).encode()
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "numpy": np.__version__,
        "Trine's source files": sources.hexdigest()[:12],
        "options": hashlib.sha256(options).hexdigest()[:12],
    }


def check_versions(of_ranks: list[dict[str, str]], peers: Peers) -> None:
    """Raise NodeError if versions differ; the error has the name, the ranks and both values.

    of_ranks: the result of `versions` on every rank. The value of most ranks counts as right, so
    the nodes of the other ranks are named as the nodes to leave out.
    """
    for name in of_ranks[0]:
        values = [versions_of_rank[name] for versions_of_rank in of_ranks]
        [(usual, _)] = Counter(values).most_common(1)
        differing = [rank for rank, value in enumerate(values) if value != usual]
        if differing:
            raise NodeError(
                f"preflight: {name}: {values[differing[0]]} on {peers.named(differing)}, {usual} "
                f"on the other ranks; make them equal, or: {peers.without(differing)}",
                peers.nodes(differing),
            )


# ---- Devices -------------------------------------------------------------------------------------


def try_device(device: torch.device, sharing: int = 1) -> str:
    """Allocate memory and multiply; return the error of the device, or an empty text.

    device: this rank's CPU or GPU; on a GPU nearly all free memory is allocated. sharing: the
    number of ranks that allocate on this GPU at the same time.
    """
    try:
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            share = SHARE_TO_ALLOCATE / sharing
            torch.empty(int(free * share), dtype=torch.uint8, device=device)
            torch.cuda.empty_cache()
        multiply(device)
    except RuntimeError as error:  # torch raises this for a device that does not work
        return str(error).splitlines()[0]
    return ""


def multiply(device: torch.device) -> None:
    """Multiply two square matrices; raise RuntimeError if the product's first column is wrong."""
    edge = GEMM_EDGE[device.type]
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    # Row i of `a` is all zeros (i even) or all ones (i odd), and the other matrix is all ones. So a
    # row of the product is all 0 or all `edge`: integers, exact in any order of summation.
    rows = torch.arange(edge, device=device).remainder(2).to(dtype)
    a = rows[:, None].expand(edge, edge).contiguous()
    product = a @ torch.ones_like(a)
    if not torch.equal(product[:, 0].float(), rows.float() * edge):
        raise RuntimeError(f"a GEMM of {edge} x {edge} gave a wrong product")


def check_devices(errors: list[str], peers: Peers) -> None:
    """Raise NodeError if a device failed. errors: the result of `try_device` on every rank."""
    failed = [rank for rank, error in enumerate(errors) if error]
    if failed:
        raise peers.refusal(
            f"the device of {peers.named(failed)} failed: {errors[failed[0]]}", failed
        )


# ---- Groups --------------------------------------------------------------------------------------


def check_groups(config: Config, peers: Peers, say: Say = lambda line: None) -> None:
    """Communicate in every group of the layout, as OPERATIONS says; collective over all ranks.

    A thread does it, so that a hang of a rank does not block this rank: after each time limit the
    ranks exchange how far they have come. say: prints a line on rank 0. Raise NodeError, on every
    rank, with the ranks that failed or did not finish in time (`stuck_ranks`).
    """
    # The names of the steps. progress.at is the index of the step that this rank does now.
    names = (
        "making the groups",
        *(f"{operation_of(role)} over {role.replace('_', ' ')}" for role in ROLES),
    )
    progress = _Progress()
    done = threading.Event()
    context = peers.context

    def reduce() -> None:
        """Make the groups and communicate in each; put steps and a failure into `progress`.

        Runs in a thread. At the end the event `done` is set.
        """
        try:
            if context.device.type == "cuda":
                torch.cuda.set_device(context.device)  # each thread has its own current device
            mesh = mesh_of_run(config, context)
            tried = roles_to_try(mesh, config.training.optimizer)
            for step, role in enumerate(ROLES, 1):
                progress.begin(step)
                if role in ("forward", "backward"):
                    pass_along(mesh, role[0].upper(), context.device)
                elif role in tried:
                    try_group(mesh.group(role), operation_of(role), context.device)
            progress.begin(len(names))
        except RuntimeError as error:
            progress.error = str(error).splitlines()[0]
        done.set()

    def slowest(answers: list[dict[str, Any]]) -> int:
        """Return the step of the slowest rank; raise NodeError if ranks hold up the others."""
        least = min(answer["at"] for answer in answers)
        stuck = stuck_ranks(answers, peers.seconds) if least < len(names) else []
        if stuck:
            reason = answers[stuck[0]]["error"] or f"not done in {peers.seconds:g} s"
            raise peers.refusal(f"{names[least]} fails on {peers.named(stuck)}: {reason}", stuck)
        return least

    # A daemon thread: if it hangs, the job can still end with the error below.
    threading.Thread(target=reduce, name="preflight", daemon=True).start()
    looks = 0  # the exchanges since the slowest rank began its step
    before = -1  # the step of the slowest rank in the last exchange
    while True:
        # A rank that is done comes to the exchange early, and must not take the others for lost.
        done.wait(peers.seconds / LOOKS)
        least = peers.agree(progress.to_dict(), slowest, "groups")
        if least == len(names):
            return
        looks = looks + 1 if least == before else 1
        before = least
        limits, rest = divmod(looks, LOOKS)
        if limits == MOST_LIMITS:
            raise NodeError(
                f"preflight: {names[least]} is not done on any rank in {limits * peers.seconds:g} "
                f"s; no rank is ahead of the others, so no node is named: look at the network",
                [],
            )
        if not rest:
            say(f"preflight: {names[least]} is slow, still going on")


def operation_of(role: str) -> str:
    """Return, in words, what the pre-flight does in the groups of a role."""
    return OPERATIONS.get(role, "an all-reduce")


def roles_to_try(mesh: Mesh, optimizer: str) -> list[str]:
    """Return the roles whose groups this rank tries: one of those with the same group and the same
    operation, of groups that have a process group. Only Muon sends over `stage`.
    """
    found: dict[tuple[int, str], str] = {}
    for role in ROLES:
        group = mesh.group(role)
        unused = role == "stage" and optimizer != "muon"
        if group.handle is not None and not unused:
            found.setdefault((id(group.handle), operation_of(role)), role)
    return list(found.values())


def try_group(group: Group, operation: str, device: torch.device) -> None:
    """All-reduce ones over a group, or have all ranks send all others their numbers in the group.

    operation: the words of `operation_of`. Raise RuntimeError if the result is wrong.
    """
    if operation == "an all-to-all":
        ranks = torch.arange(group.size, device=device)
        arrived = torch.empty_like(ranks)
        group.all_to_all(arrived, torch.full_like(ranks, group.rank)).wait()
        if not torch.equal(arrived, ranks):
            raise RuntimeError(f"the ranks 0 to {group.size - 1} arrived as {arrived.tolist()}")
        return
    total = torch.ones(1, device=device)
    group.all_reduce(total).wait()
    if total.item() != group.size:
        raise RuntimeError(f"the sum of {group.size} ones is {total.item()}")


class _Progress:
    """How far this rank has come in `check_groups`; written by its thread.

    at: the index of the step that runs; the number of steps when all are done. error: the text of
    a failure, or None.
    """

    def __init__(self) -> None:
        self.error: str | None = None
        self.begin(0)

    def begin(self, step: int) -> None:
        """Note that a step begins now."""
        self.at = step
        self.since = time.monotonic()

    def to_dict(self) -> dict[str, Any]:
        """Return the values that the ranks exchange; still: the seconds since the step began."""
        return {"at": self.at, "error": self.error, "still": time.monotonic() - self.since}


def stuck_ranks(answers: list[dict[str, Any]], seconds: float) -> list[int]:
    """Return the ranks that hold up the others, or [] if all go on or none is to blame.

    answers: `_Progress.to_dict` of every rank. seconds: the time limit. The ranks that have come
    least far hold up the others if no rank has begun a step for most of the limit (STILL) and some
    are ahead. If all are in the same step, the network may be slow for all of them alike. Ranks
    that have failed are named at once.
    """
    least = min(answer["at"] for answer in answers)
    last = [rank for rank, answer in enumerate(answers) if answer["at"] == least]
    failures = [(answer["at"], rank) for rank, answer in enumerate(answers) if answer["error"]]
    if failures:  # the failure in the earliest step may have caused the others
        return [rank for step, rank in sorted(failures) if step == min(failures)[0]]
    moving = min(answer["still"] for answer in answers) < STILL * seconds
    return [] if moving or len(last) == len(answers) else last


def pass_along(mesh: Mesh, kind: str, device: torch.device) -> None:
    """Pass a number on through the pipeline as activations (kind F) or gradients (B) are.

    An all-reduce would connect rings that a run does not need. Raise RuntimeError if the number
    that arrives is another one.
    """
    step = 1 if kind == "F" else -1
    rank, size = mesh.pp.rank, mesh.pp.size
    number = torch.ones(1, device=device)
    if 0 <= rank - step < size:
        number.zero_()
        mesh.channel(kind).receive(number, rank - step).wait()
        if number.item() != 1:
            raise RuntimeError(f"the message 1 arrived as {number.item()}")
    if 0 <= rank + step < size:
        mesh.channel(kind).send(number, rank + step).wait()


# ---- Room for checkpoints ------------------------------------------------------------------------


def check_room(config: Config, context: Context, needed: int, say: Say) -> None:
    """Check that memory and disk have room for a checkpoint, in a run whose nodes are checked.

    Called before step 1, when the model's size is known; collective over all ranks. needed: bytes
    of a checkpoint; the value of rank 0 is used. say: prints a line on rank 0. Raise UserError,
    with the needed and the free bytes, if the run is to save and has no room. A run that only saves
    if it is stopped early gets a warning.
    """
    if not checks_nodes(config, context):
        return
    run = config.run
    peers = Peers(context)
    answer = {"memory": available_memory(), "disk": free_bytes(run.out), "needed": needed}
    warning = peers.agree(answer, lambda answers: _warning_of_room(run, answers, peers), "room")
    if warning:
        say(warning)


def _warning_of_room(run: Run, answers: list[dict[str, int]], peers: Peers) -> str:
    """Return a warning if a run that saves only when it is stopped has no room for that, or "".

    Raise UserError if the run is to save and has no room. answers: every rank's free "memory" and
    "disk" in bytes, and the "needed" bytes of a checkpoint.
    """
    needed = answers[0]["needed"]
    if run.saves and run.async_save:
        _check_memory(answers, needed, peers)
    # Ranks may see different disks under one name: the disk with the least room counts.
    free, rank_at_disk = min((answer["disk"], rank) for rank, answer in enumerate(answers))
    if needed <= free:
        return ""
    sentence = (
        f"preflight: a checkpoint takes {needed / 1e9:.3f} GB, and {free / 1e9:.3f} GB are "
        f"free where {run.out} is, seen from {peers.named([rank_at_disk])}"
    )
    if run.saves:
        raise ClusterError(sentence)
    return f"{sentence}: a run that is stopped early could not be saved"


def _check_memory(answers: list[dict[str, int]], needed: int, peers: Peers) -> None:
    """Raise UserError if a node has no host memory for its ranks' copies of a checkpoint.

    answers: every rank's free "memory" in bytes. needed: bytes of the whole checkpoint, of which
    every rank copies an equal part for an asynchronous save.
    """
    for node, ranks in placement.ranks_by(peers.context.nodes).items():
        copy = needed * len(ranks) / peers.context.size
        memory = min(answers[rank]["memory"] for rank in ranks)
        if copy > memory:
            raise ClusterError(
                f"preflight: node {node} copies {copy / 1e9:.3f} GB to host memory for a save, and "
                f"{memory / 1e9:.3f} GB are free: ask Slurm for more (--mem), or give "
                "--set async_save=false"
            )


def available_memory() -> int:
    """Return the bytes of host memory this process can still allocate, within cgroup limits.

    A cgroup is a folder of the kernel's tree of process groups; Slurm limits a job's memory by it.
    """
    available = psutil.virtual_memory().available
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # no cgroups
        return available
    prefix = "0::"  # the line with this process's folder of cgroup version 2 begins with this text
    names = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    folder = Path("/sys/fs/cgroup" + names[0]) if names and names[0] else None
    # Each folder's file memory.max limits the processes of that folder and of all folders in it. So
    # the loop goes up from the process's folder, until the root folder, which has no memory.max.
    while folder and (folder / "memory.max").exists():
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            used = int((folder / "memory.current").read_text())
            available = min(available, int(limit) - used)
        folder = folder.parent
    return available


# ---- Kernels -------------------------------------------------------------------------------------


def check_compiler(kernels: dict[str, str], device: str, node: str) -> None:
    """Raise UserError if a kernel needs torch.compile and this node lacks a compiler or triton.

    kernels: a text about the chosen kernels by kind: "attention", and with --compile "compiled".
    Attention by torch's flex_attention is compiled too. device: cpu or cuda. node: the name of this
    node, for the message. Without this check the run would fail in the first step.
    """
    if "flex_attention" not in kernels["attention"] and "compiled" not in kernels:
        return
    on_gpu = device == "cuda"
    what = "--compile" if "compiled" in kernels else kernels["attention"]
    # On a GPU triton calls a C compiler, on a CPU torch calls a C++ compiler.
    variable, default = ("CC", "gcc") if on_gpu else ("CXX", "g++")
    name = os.environ.get(variable, default)
    if shutil.which(name) is None:
        raise PackageError(
            f"{what} needs a compiler, and {node} has no {name}: install g++ there, load the "
            f"cluster's module of gcc, or give another one in {variable}"
        )
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise PackageError(f"{what} needs triton on GPUs, and {node} has none: pip install triton")


def kernel_names(config: Config, optimizer: str, attention: str, source: str) -> dict[str, str]:
    """Return the names of a run's kernels by kind, for the log and run.json.

    optimizer, attention: the names of the kernels that the trainer has chosen. source: the text
    about how samples are read.
    """
    kernels = {"optimizer": optimizer, "attention": attention, "data": source}
    if config.run.compile:
        kernels["compiled"] = COMPILED
    return kernels


def warms_up(config: Config, device: str) -> bool:
    """Return whether the run does a warm-up, a pass with one micro-batch, before step 1.

    It does with --compile, so that step 1 does not contain the compilation, and on GPUs with
    several pipeline ranks: a GPU loads a CUDA kernel at its first launch, and that launch waits
    until nothing runs on the device. A message to another rank is a running kernel too, until that
    rank receives it, so each first launch would delay the neighbours. Nothing waits for ever,
    though, in any action (Schedule.may_be_ahead).

    device: cpu or cuda. trainer.warm_up does the pass.
    """
    return config.run.compile or (device == "cuda" and config.layout.pp > 1)
