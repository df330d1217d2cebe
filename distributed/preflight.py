"""Looks at every node before the first step: seconds that find what costs a night later.

    introduce(config, cluster)                     # before anything large is built
    check_room(config, cluster, needed, say)       # when a checkpoint's bytes are known

Every rank must answer, hold the same code and versions, agree on the time, allocate memory and
multiply; every group of the layout must all-reduce. Ranks answer through torch's store, with a time
limit, so that a node that is silent is named and can be left out, however it fails.
"""

import hashlib
import json
import platform
import shutil
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from config.messages import UserError
from config.schema import Config
from distributed import placement
from distributed.context import Context
from distributed.mesh import ROLES, Mesh

ROOT = Path(__file__).resolve().parent.parent
# A rank that has not answered by then is taken for lost: imports on a slow disk are behind it.
SECONDS_TO_ANSWER = 60.0
# Clocks further apart than this confuse whoever reads logs of several nodes.
SECONDS_OF_CLOCKS = 2.0
# Edge of the square GEMM, its repetitions, and how much slower than the median is worth a word. On
# CPUs other processes share the cores.
GEMM_EDGE = {"cuda": 8192, "cpu": 512}
GEMM_REPEATS = 5
SLOW = {"cuda": 1.1, "cpu": 2.0}
# Of a GPU's free memory, allocated and given back at once.
SHARE_TO_ALLOCATE = 0.9


def wanted(config: Config, context: Context) -> bool:
    """Whether to look at all: unless --preflight or --no-preflight says, above one node."""
    if config.run.preflight is not None:
        return config.run.preflight
    return len(set(context.nodes)) > 1


class RollCall:
    """Questions that every rank answers, through the store and no collective."""

    def __init__(self, context: Context, seconds: float = SECONDS_TO_ANSWER):
        self.context, self.seconds = context, seconds
        # A connection of its own: another thread may wait on the first one.
        self.store = context.store.clone() if context.store is not None else None
        # Roll calls are made in the same order everywhere, and must not read one another's.
        self._name = (
            f"preflight/{self.store.add(f'preflights/{context.rank}', 1)}" if self.store else ""
        )

    def ask(self, what: str, answer: Any) -> list[Any]:
        """Every rank's answer, in rank order; UserError that names who gave none in time."""
        if self.store is None:
            return [answer]
        key, rank = f"{self._name}/{what}", self.context.rank
        self.store.set(f"{key}/{rank}", json.dumps(answer))
        if rank == 0:
            self.store.set(f"{key}/all", json.dumps(self._answers(key)))
        try:
            self.store.wait([f"{key}/all"], timedelta(seconds=2 * self.seconds))
        except torch.distributed.DistError:
            answers = [None] + [answer] * (self.context.size - 1)
        else:
            answers = json.loads(self.store.get(f"{key}/all"))
        absent = [rank for rank, one in enumerate(answers) if one is None]
        if absent:
            raise UserError(
                f"preflight: {self.named(absent)} did not answer in {self.seconds:g} s ({what}); "
                f"{self.without(absent)}"
            )
        return answers

    def _answers(self, key: str) -> list[Any]:
        limit = time.monotonic() + self.seconds
        answers: list[Any] = []
        for rank in range(self.context.size):
            own = f"{key}/{rank}"
            while not self.store.check([own]) and time.monotonic() < limit:
                time.sleep(0.005)
            answers.append(json.loads(self.store.get(own)) if self.store.check([own]) else None)
        return answers

    def named(self, ranks: list[int]) -> str:
        """Ranks with their nodes: `rank 3 (n2)`, `ranks 4, 5, 6 and 5 more (n3, n4)`."""
        nodes = sorted({self.context.nodes[rank] for rank in ranks})
        first = ", ".join(map(str, ranks[:3]))
        more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
        return f"rank{'s'[: len(ranks) > 1]} {first}{more} ({', '.join(nodes)})"

    def without(self, ranks: list[int]) -> str:
        """How to start without the nodes of these ranks."""
        nodes = ",".join(sorted({self.context.nodes[rank] for rank in ranks}))
        if self.context.job_nodes is not None:
            return f"to go on without it: --exclude={nodes} for sbatch or srun"
        return f"to go on without it, leave {nodes} out of mpirun's hosts"


def introduce(config: Config, context: Context) -> None:
    """Show where every rank runs and what is odd about it, and look at the nodes if wanted.

    Collective over all ranks; UserError, on every rank, for what cannot work.
    """

    def say(line: str) -> None:
        if context.rank == 0:
            print(line, flush=True)

    if context.size > 1:
        say(placement.table(context.places, config.layout))
    for sentence in placement.placement_warnings(context.places, config.layout, context.job_nodes):
        say(f"note: {sentence}")
    if wanted(config, context):
        check_nodes(config, context, say)


def check_nodes(
    config: Config,
    context: Context,
    say: Callable[[str], None],
    seconds: float = SECONDS_TO_ANSWER,
) -> None:
    """Answers, versions, clocks, devices and groups; collective over all ranks.

    UserError, on every rank, for what cannot work; `say` tells on rank 0 what is only odd.
    """
    began, roll = time.perf_counter(), RollCall(context, seconds)
    check_versions(roll.ask("start", versions(config)), roll)
    roll.ask("clocks, begin", True)  # all read theirs within milliseconds
    apart = check_clocks(roll.ask("clocks", time.time()), roll, say)
    device = roll.ask("device", try_device(context.device))
    speeds = check_devices(device, context.device.type, roll, say)
    check_groups(config, context, roll)
    say(
        f"preflight: {context.size} ranks on {len(set(context.nodes))} nodes answer, clocks are "
        f"{apart:.3f} s apart, GEMMs run at {speeds}, all groups reduce "
        f"({time.perf_counter() - began:.1f} s)"
    )


# ------------------------------------------------------------------------------------------------
# Versions and clocks
# ------------------------------------------------------------------------------------------------


def source_files() -> list[Path]:
    """Every source file that a run may import: those of the root and of the wings, sorted."""
    wings = [path.parent for path in ROOT.glob("*/__init__.py")]
    return sorted(file for folder in (ROOT, *wings) for file in folder.glob("*.py"))


def versions(config: Config) -> dict[str, str]:
    """What must be the same on every rank."""
    sources = hashlib.sha256()
    for path in source_files():
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


def check_versions(of_ranks: list[dict[str, str]], roll: RollCall) -> None:
    """UserError that names the ranks which differ from most, in what, and both values."""
    for what in of_ranks[0]:
        usual = Counter(own[what] for own in of_ranks).most_common(1)[0][0]
        other = [rank for rank, own in enumerate(of_ranks) if own[what] != usual]
        if other:
            raise UserError(
                f"preflight: {what}: {of_ranks[other[0]][what]} on {roll.named(other)}, {usual} "
                f"on the other ranks; make them equal, or: {roll.without(other)}"
            )


def check_clocks(clocks: list[float], roll: RollCall, say: Callable[[str], None]) -> float:
    """Seconds between the first and the last of the clocks; a word if they are far apart."""
    middle = statistics.median(clocks)
    far = [rank for rank, clock in enumerate(clocks) if abs(clock - middle) > SECONDS_OF_CLOCKS]
    if far:
        ahead = clocks[far[0]] - middle
        say(
            f"preflight: the clock of {roll.named(far)} is {abs(ahead):.0f} s "
            f"{'ahead' if ahead > 0 else 'behind'}"
        )
    return max(clocks) - min(clocks)


# ------------------------------------------------------------------------------------------------
# Devices
# ------------------------------------------------------------------------------------------------


def try_device(device: torch.device) -> dict[str, Any]:
    """Allocate and multiply: {"flops": per second} or {"error": what went wrong}."""
    try:
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            torch.empty(int(free * SHARE_TO_ALLOCATE), dtype=torch.uint8, device=device)
            torch.cuda.empty_cache()
        return {"flops": multiply(device)}
    except RuntimeError as error:  # what torch raises for a device that does not work
        return {"error": str(error).splitlines()[0]}


def multiply(device: torch.device) -> float:
    """Best FLOP/s of a few square GEMMs; RuntimeError if a product is not what it must be."""
    edge = GEMM_EDGE[device.type]
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    # Rows of zeros and of ones by ones: whole numbers, exact in any order of sums.
    rows = torch.arange(edge, device=device).remainder(2).to(dtype)
    a = rows[:, None].expand(edge, edge).contiguous()
    b = torch.ones_like(a)
    seconds = []
    for _ in range(1 + GEMM_REPEATS):  # the first warms up
        began = time.perf_counter()
        product = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    if not torch.equal(product[:, 0].float(), rows.float() * edge):
        raise RuntimeError(f"a GEMM of {edge} x {edge} gave a wrong product")
    return 2 * edge**3 / min(seconds[1:])


def check_devices(
    answers: list[dict[str, Any]], kind: str, roll: RollCall, say: Callable[[str], None]
) -> str:
    """UserError that names devices which failed; a word on slow ones; the speeds in short."""
    failed = [rank for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        raise UserError(
            f"preflight: the device of {roll.named(failed)} failed: "
            f"{answers[failed[0]]['error']}; {roll.without(failed)}"
        )
    speeds = [answer["flops"] for answer in answers]
    median = statistics.median(speeds)
    slow = [rank for rank, speed in enumerate(speeds) if median / speed > SLOW[kind]]
    for rank in slow:
        say(
            f"preflight: {roll.named([rank])} multiplies at {speeds[rank] / 1e12:.3f} TFLOP/s, "
            f"{median / speeds[rank]:.1f} times slower than the median {median / 1e12:.3f}; "
            f"{roll.without([rank])}"
        )
    return f"{min(speeds) / 1e12:.3f} to {max(speeds) / 1e12:.3f} TFLOP/s"


# ------------------------------------------------------------------------------------------------
# Groups
# ------------------------------------------------------------------------------------------------


def check_groups(config: Config, context: Context, roll: RollCall) -> None:
    """An all-reduce in every group of the layout; UserError that names who does not end one.

    They run in a thread, which is left behind if it hangs: the job ends then.
    """
    names = ("making the groups", *(f"an all-reduce over {role}" for role in ROLES))
    at, errors, done = [0], [], threading.Event()

    def reduce() -> None:
        """Make the groups and sum ones in each; what goes wrong is left in `errors`."""
        try:
            if context.device.type == "cuda":
                torch.cuda.set_device(context.device)  # each thread has its own
            mesh = Mesh(config.layout.axes, context)
            for at[0], role in enumerate(ROLES, 1):
                group, total = getattr(mesh, role), torch.ones(1, device=context.device)
                group.all_reduce(total).wait()
                if total.item() != group.size:
                    raise RuntimeError(f"the sum of {group.size} ones is {total.item()}")
            at[0] = len(names)
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])
        done.set()

    threading.Thread(target=reduce, name="preflight", daemon=True).start()
    done.wait(roll.seconds)
    answers = roll.ask("groups", {"at": at[0], "error": "".join(errors)})
    # Who has come least far is who the others wait for, or one of those who do not reach another.
    least = min(answer["at"] for answer in answers)
    if least == len(names):
        return
    stuck = [rank for rank, answer in enumerate(answers) if answer["at"] == least]
    why = answers[stuck[0]]["error"] or f"not done in {roll.seconds:g} s"
    raise UserError(
        f"preflight: {names[least]} fails on {roll.named(stuck)}: {why}; {roll.without(stuck)}"
    )


# ------------------------------------------------------------------------------------------------
# Room for checkpoints
# ------------------------------------------------------------------------------------------------


def check_room(config: Config, context: Context, needed: int, say: Callable[[str], None]) -> None:
    """Whether memory and disk hold checkpoints of rank 0's `needed` bytes; collective over all.

    UserError with both numbers if not one can be saved although saves are asked for.
    """
    if not wanted(config, context):
        return
    run, roll = config.run, RollCall(context)
    own = {"memory": available_memory(), "disk": free_disk(run.out), "needed": needed}
    answers = roll.ask("room", own)
    needed = answers[0]["needed"]
    saves = run.save_every or run.save_every_minutes
    if saves and run.async_save:
        _check_memory(answers, needed, roll)
    disk = min(range(len(answers)), key=lambda rank: answers[rank]["disk"])
    free = answers[disk]["disk"]
    if needed > free:
        sentence = (
            f"preflight: a checkpoint takes {needed / 1e9:.3f} GB, and {free / 1e9:.3f} GB are "
            f"free where {run.out} is, seen from {roll.named([disk])}"
        )
        if saves:
            raise UserError(sentence)
        say(f"{sentence}: a run that is stopped early could not be saved")


def _check_memory(answers: list[dict[str, int]], needed: int, roll: RollCall) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(roll.context.nodes):
        ranks_of.setdefault(node, []).append(rank)
    for node, ranks in ranks_of.items():
        copy = needed * len(ranks) / roll.context.size
        memory = min(answers[rank]["memory"] for rank in ranks)
        if copy > memory:
            raise UserError(
                f"preflight: node {node} copies {copy / 1e9:.3f} GB to host memory for a save, and "
                f"{memory / 1e9:.3f} GB are free: ask Slurm for more (--mem), or --no-async-save"
            )


def free_disk(folder: str) -> int:
    """Bytes free where that folder is, or will be."""
    path = Path(folder).resolve()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def available_memory() -> int:
    """Bytes of host memory that this process may still take, under the limits of its cgroups."""
    available = psutil.virtual_memory().available
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # no cgroups
        return available
    own = next((line[3:] for line in lines if line.startswith("0::")), None)
    folder = Path("/sys/fs/cgroup" + own) if own else None
    while folder and (folder / "memory.max").exists():
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            used = int((folder / "memory.current").read_text())
            available = min(available, int(limit) - used)
        folder = folder.parent
    return available
