"""Fast checks of every node before step 1: faults that would otherwise end the run hours later.

Every rank must answer, have the same source files, options and library versions, allocate memory
and multiply matrices; every group of the layout must all-reduce. Slow ranks are found in training,
by --check-speed-every. The answers go through torch's store with a time limit (store.py), so that a
node which does not answer, for any reason, is named in the error and can be left out.

A check of the nodes raises NodeError, on every rank, with the nodes to leave out: the supervisor
then starts the run again without them. `say` prints a line on rank 0. `peers` gathers values.
"""

import hashlib
import json
import platform
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from config.messages import NodeError, UserError
from config.schema import Config
from distributed import placement
from distributed.context import Context
from distributed.mesh import ROLES, Mesh, mesh_of_run
from distributed.placement import Say
from distributed.run_lock import free_bytes
from distributed.store import NoAnswer, StoreExchange

ROOT = Path(__file__).resolve().parent.parent
# A rank that has not answered a check after this time is considered lost. A minute is enough,
# because every rank has done its slow imports before the checks.
SECONDS_TO_ANSWER = 60.0
GEMM_EDGE = {"cuda": 8192, "cpu": 512}  # rows and columns of the matrices that a device multiplies
SHARE_TO_ALLOCATE = 0.9  # the share of a GPU's free memory that a check allocates and frees again
OPERATIONS = {"forward": "a message", "backward": "a message"}  # tried over a role's groups
NAMED = 3  # the most ranks that an error message lists; it gives only the number of further ranks


class Peers(StoreExchange):
    """Exchange of values between all ranks with a time limit, and the names of ranks in errors."""

    def __init__(self, context: Context, seconds: float = SECONDS_TO_ANSWER):
        """seconds: the time after which a silent rank is considered lost."""
        self.context = context
        # The second connection to the store, because a wait of another thread may occupy the first.
        store = context.second_store
        name = "preflight"
        super().__init__(store, context.rank, context.size, name, context.recorder, seconds)

    def gather(self, key: str, value: Any) -> list[Any]:
        """Return every rank's value in rank order; collective over all ranks.

        key: names the check in the error. Raise NodeError, on every rank, with the silent ranks.
        """
        try:
            return super().gather(key, value)
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

    def nodes(self, ranks: list[int]) -> list[str]:
        """Return the names of the nodes on which these ranks run, sorted, each name once."""
        return sorted({self.context.nodes[rank] for rank in ranks})


def check_nodes(config: Config, peers: Peers, say: Say) -> None:
    """Check that all ranks answer, their versions, devices and groups; collective over all ranks.

    Called by start_checks.introduce before the model is built. Print one line with the result.
    Raise NodeError, on every rank, if a check fails.
    """
    began = time.perf_counter()
    context = peers.context
    # Each `gather` also checks that every rank answers within the time limit.
    check_versions(peers.gather("start", versions(config)), peers)
    gpu = context.places[context.rank].gpu
    sharing = sum(place.gpu == gpu for place in context.places)  # ranks on this rank's GPU
    check_devices(peers.gather("device", try_device(context.device, sharing)), peers)
    check_groups(config, peers)
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
        raise NodeError(
            f"preflight: the device of {peers.named(failed)} failed: {errors[failed[0]]}; "
            f"{peers.without(failed)}",
            peers.nodes(failed),
        )


# ---- Groups --------------------------------------------------------------------------------------


def check_groups(config: Config, peers: Peers) -> None:
    """All-reduce in every group of the layout; collective over all ranks.

    A thread does it, so that a hang of a rank does not block this rank: the ranks then exchange how
    far they have come. Raise NodeError, on every rank, with the ranks that failed or did not finish
    in time.
    """
    # The names of the steps. answer["at"] is the index of the step that this rank does now.
    names = (
        "making the groups",
        *(f"{OPERATIONS.get(role, 'an all-reduce')} over {role}" for role in ROLES),
    )
    answer: dict[str, Any] = {"at": 0, "error": None}
    context = peers.context
    done = threading.Event()

    def reduce() -> None:
        """Make the groups and sum ones in each; put progress and a failure into `answer`.

        Runs in a thread. answer["at"]: an index of `names`, the step that runs; len(names) when all
        are done. answer["error"]: the text of a failure. At the end the event `done` is set.
        """
        try:
            if context.device.type == "cuda":
                torch.cuda.set_device(context.device)  # each thread has its own current device
            mesh = mesh_of_run(config, context)
            for answer["at"], role in enumerate(ROLES, 1):
                if role in ("forward", "backward"):
                    pass_along(mesh, role[0].upper(), context.device)
                    continue
                group = mesh.group(role)
                total = torch.ones(1, device=context.device)
                group.all_reduce(total).wait()
                if total.item() != group.size:
                    raise RuntimeError(f"the sum of {group.size} ones is {total.item()}")
            answer["at"] = len(names)
        except RuntimeError as error:
            answer["error"] = str(error).splitlines()[0]
        done.set()

    # A daemon thread: if it hangs, the job can still end with the error below.
    threading.Thread(target=reduce, name="preflight", daemon=True).start()
    done.wait(peers.seconds)
    answers = peers.gather("groups", answer)
    # The ranks that have come least far are named: the other ranks wait for them.
    least = min(answer["at"] for answer in answers)
    if least == len(names):
        return
    stuck = [rank for rank, answer in enumerate(answers) if answer["at"] == least]
    reason = answers[stuck[0]]["error"] or f"not done in {peers.seconds:g} s"
    text = f"preflight: {names[least]} fails on {peers.named(stuck)}: {reason}"
    raise NodeError(f"{text}; {peers.without(stuck)}", peers.nodes(stuck))


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
        mesh.channel(kind, rank - step, rank).receive(number, rank - step).wait()
        if number.item() != 1:
            raise RuntimeError(f"the message 1 arrived as {number.item()}")
    if 0 <= rank + step < size:
        mesh.channel(kind, rank, rank + step).send(number, rank + step).wait()


# ---- Room for checkpoints ------------------------------------------------------------------------


def check_room(config: Config, context: Context, needed: int, say: Say) -> None:
    """Check that memory and disk have room for a checkpoint; collective over all ranks.

    Called before step 1, when the model's size is known. needed: bytes of a checkpoint; the value
    of rank 0 is used. Raise UserError, with the needed and the free bytes, if the run is to save
    and has no room. A run that only saves if it is stopped early gets a warning.
    """
    run = config.run
    peers = Peers(context)
    answer = {"memory": available_memory(), "disk": free_bytes(run.out), "needed": needed}
    answers = peers.gather("room", answer)
    needed = answers[0]["needed"]
    if run.saves and run.async_save:
        _check_memory(answers, needed, peers)
    # Ranks may see different disks under one name: the disk with the least room counts.
    free, rank_at_disk = min((answer["disk"], rank) for rank, answer in enumerate(answers))
    if needed > free:
        sentence = (
            f"preflight: a checkpoint takes {needed / 1e9:.3f} GB, and {free / 1e9:.3f} GB are "
            f"free where {run.out} is, seen from {peers.named([rank_at_disk])}"
        )
        if run.saves:
            raise UserError(sentence)
        say(f"{sentence}: a run that is stopped early could not be saved")


def _check_memory(answers: list[dict[str, int]], needed: int, peers: Peers) -> None:
    """Raise UserError if a node has no host memory for its ranks' copies of a checkpoint.

    answers: every rank's free "memory" in bytes. needed: bytes of the whole checkpoint, of which
    every rank copies an equal part for an asynchronous save.
    """
    for node, ranks in placement.ranks_by(peers.context.nodes).items():
        copy = needed * len(ranks) / peers.context.size
        memory = min(answers[rank]["memory"] for rank in ranks)
        if copy > memory:
            raise UserError(
                f"preflight: node {node} copies {copy / 1e9:.3f} GB to host memory for a save, and "
                f"{memory / 1e9:.3f} GB are free: ask Slurm for more (--mem), or --no-async-save"
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
