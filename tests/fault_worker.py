"""Injects faults into real runs and records how the jobs end.

    python tests/fault_worker.py FOLDER JOBS.json     [{"layout", "ranks", "fault", "culprit"}, ...]
    mpirun -n 4 python tests/fault_worker.py FOLDER JOB.json rank       one rank of one such job

The first form forks the ranks from this process after its imports, as kill_worker.py does, with no
launcher that would end them: only the watchdog ends the job. This process is the subreaper of its
descendants, used to find stray processes. Prints one JSON object per job; "hit" says whether the
culprit came to its fault.
"""

import ctypes
import importlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import psutil

from base import errors

with errors.installed():
    import kill_worker

    import trainer
    import zero
    from checkpointing import file_format
    from config import validation
    from config.command_line import parse
    from corpora.prefetch import Prefetcher
    from distributed.launch import Launch, discover

SHAPE = (
    "--layers 2 --hidden 32 --heads 4 --seq-length 8 --vocab-size 31 --global-batch-size 8 "
    "--set pad_vocab_multiple=4 --steps 1000000 --log-every 1000000 --device cpu"
)
TIMEOUT = 5.0  # --hang-timeout
LIMIT = 120.0  # seconds; what has not ended by then is killed and reported as left
STEPS_LIMIT = 300.0  # seconds for tens of steps, beside endless loops on the same cores
FAULT_STEP = 4  # not among the first steps, for which the limit is longer
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
HIT = "fault_was_hit"  # a file in the run's folder
PR_SET_CHILD_SUBREAPER = 36


class Fault:
    """Replaces a function, counts its calls, and calls `inject` before one of them.

    hit: a file that is made before that.
    """

    def __init__(self, module, name: str, call: int, inject, hit: Path):
        self.original, self.call, self.calls = getattr(module, name), call, 0
        self.inject, self.hit = inject, hit
        setattr(module, name, self)

    def __call__(self, *arguments, **keywords):
        self.calls += 1
        if self.calls == self.call:
            self.hit.touch()
            self.inject()
        return self.original(*arguments, **keywords)

    def __get__(self, instance, owner=None):
        return self if instance is None else lambda *a, **k: self(instance, *a, **k)


def sleep_in_the_data_loader() -> None:
    time.sleep(3600)


def loop_for_ever() -> None:
    while True:
        len("an endless loop")


def hold_the_lock() -> None:
    time.sleep(1.5)  # until a heartbeat has reported that the first steps are done
    re.match(r"(a+)+$", "a" * 64 + "b")  # exponential time, in C, which holds the GIL


def fail() -> None:
    raise ValueError("injected")


def inject(fault: str, folder: Path) -> None:
    """Inject the fault into this process, which is the culprit of the run in that folder."""

    def before(module, name: str, call: int, what) -> None:
        Fault(module, name, call, what, folder / HIT)

    if fault in SIGNALS:
        before(
            zero.Optimizer, "step", 10 * FAULT_STEP, lambda: os.kill(os.getpid(), SIGNALS[fault])
        )
    elif fault == "data":
        before(Prefetcher, "take", 4 * FAULT_STEP + 1, sleep_in_the_data_loader)
    elif fault == "loop":
        before(zero.Optimizer, "step", FAULT_STEP, loop_for_ever)
    elif fault == "gil":
        before(zero.Optimizer, "step", FAULT_STEP, hold_the_lock)
    elif fault == "raise":
        before(zero.Optimizer, "step", FAULT_STEP, fail)
    elif fault == "evaluate":
        before(trainer, "evaluate", 1, sleep_in_the_data_loader)
    elif fault == "write":
        before(file_format, "write_shard", 1, sleep_in_the_data_loader)


def be_rank(rank: int, port: int, folder: Path, job: dict) -> None:
    """A forked process: a rank of train.py, faulty or not; never returns."""
    output = os.open(folder / f"rank{rank}.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    kill_worker.set_torchrun_variables(rank, job["ranks"], port)
    status = 1
    try:
        if job["fault"] in SIGNALS:
            job = job | {"culprit": None}  # the parent process does it, at a random moment
        do_job(Launch("torchrun", rank, job["ranks"]), folder, job)
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def do_job(launch: Launch, folder: Path, job: dict) -> None:
    """A rank of train.py, with the fault if it is the culprit."""
    words = [*SHAPE.split(), *job["layout"].split(), "--out", str(folder)]
    words += ["--hang-timeout", str(job.get("timeout", TIMEOUT))]
    if job["fault"] == "evaluate":
        words += ["--eval-samples", "8", "--eval-every", str(FAULT_STEP)]
    if job["fault"] == "write":
        words += ["--save-every", str(FAULT_STEP)]
    if launch.rank == job["culprit"]:
        inject(job["fault"], folder)
    trainer.main(validation.check(parse(words), launch.size), launch)


def run(folder: Path, job: dict, chance: random.Random) -> dict:
    """One job: start the ranks, inject the fault, wait for the end; returns the result."""
    folder.mkdir()
    port, ids = kill_worker.free_port(), []
    for rank in range(job["ranks"]):
        child = os.fork()
        if child == 0:
            be_rank(rank, port, folder, job)
        ids.append(child)
    kill_worker.wait_for_first_row(folder / "metrics.jsonl", 0, ids)
    began = time.monotonic()
    if job["fault"] in SIGNALS:
        wait_for_rows(folder / "metrics.jsonl", FAULT_STEP)
        time.sleep(1.2 + chance.uniform(0.0, 0.5))  # until a heartbeat has reported that
        began = time.monotonic()
        (folder / HIT).touch()
        os.kill(ids[job["culprit"]], SIGNALS[job["fault"]])
    if job["fault"] == "suspended":
        suspend(ids, folder / "metrics.jsonl")
        began = time.monotonic()
    statuses = all_gone(ids, began + LIMIT)
    seconds = time.monotonic() - began
    left, path = end_what_is_left(), folder / "hang/case.json"
    case = json.loads(path.read_text()) if path.exists() else {"culprits": None, "kind": None}
    output = "".join(path.read_text() for path in sorted(folder.glob("rank*.log")))
    return job | {
        "named": case["culprits"],
        "kind": case["kind"],
        "seconds": round(seconds, 1),
        "hit": (folder / HIT).exists(),
        "statuses": statuses,
        "left": left,
        "output": output[-6000:],
    }


def suspend(ids: list[int], metrics: Path) -> None:
    """Suspend all processes, as `scontrol suspend` does, for longer than TIMEOUT; later SIGTERM."""
    wait_for_rows(metrics, FAULT_STEP)
    processes = psutil.Process().children(recursive=True)
    for process in processes:
        process.suspend()
    time.sleep(TIMEOUT + 3.0)
    rows = metrics.read_bytes().count(b"\n")
    for process in processes:
        process.resume()
    wait_for_rows(metrics, rows + 20)
    for i in ids:
        os.kill(i, signal.SIGTERM)


def check(result: dict) -> None:
    """RuntimeError unless all ranks ended, no process is left, and the culprit is the one named.

    A rank that had not ended within LIMIT has no status and is left.
    """
    expected = {"raise": "failed", "killed": "dead"}.get(result["fault"], "hang")
    statuses = result["statuses"].values()
    good = {
        "named": result["named"] == [result["culprit"]],
        "kind": result["kind"] == expected,
        "all ended, non-zero": len(statuses) == result["ranks"] and all(statuses),
        "nothing left": result["left"] == [],
    }
    wrong = [what for what, right in good.items() if not right]
    if wrong:
        raise RuntimeError(f"wrong: {', '.join(wrong)}: {json.dumps(result, indent=1)}")


def wait_for_rows(metrics: Path, count: int) -> None:
    until = time.monotonic() + STEPS_LIMIT
    while metrics.read_bytes().count(b"\n") < count:
        if time.monotonic() > until:
            raise RuntimeError(f"no {count} steps: {kill_worker.logs(metrics.parent)}")
        time.sleep(0.01)


def all_gone(ids: list[int], until: float) -> dict[int, int]:
    """Exit statuses of the ranks that end by then; it waits for the monitor too, adopted here."""
    statuses: dict[int, int] = {}
    while time.monotonic() < until:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid in ids:
            statuses[ids.index(pid)] = os.waitstatus_to_exitcode(status)
        if pid == 0:
            time.sleep(0.02)
    return statuses


def end_what_is_left() -> list[str]:
    """Kill the processes that should have ended; returns their command lines."""
    left = psutil.Process().children(recursive=True)
    lines = [" ".join(process.cmdline()) for process in left]
    for process in left:
        process.kill()
        process.wait()
    return lines


def main() -> None:
    folder, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    if sys.argv[3:] == ["rank"]:
        do_job(discover(), folder, jobs)
        return
    # Before the forks: all ranks with --zero 3 need it, and it takes a second.
    importlib.import_module("torch._dynamo")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    chance = random.Random(json.dumps(jobs))
    for number, job in enumerate(jobs):
        print(json.dumps(run(folder / f"job{number}", job, chance)), flush=True)


if __name__ == "__main__":
    main()
