"""Plants faults in real runs and looks at what becomes of them.

    python tests/fault_worker.py FOLDER JOBS.json     [{"layout", "ranks", "fault", "culprit"}, ...]
    mpirun -n 4 python tests/fault_worker.py FOLDER JOB.json rank       one rank of one such job

By the first, ranks are forked from this process after its imports, as in kill_worker.py, with no
launcher to clean up behind them: what ends the job is the watchdog alone. This process adopts what
its ranks leave behind, so nothing can hide. Prints one JSON object per job.
"""

import ctypes
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import kill_worker
import psutil

import data
import trainer
import zero
from checkpointing import file_format
from config import validation
from config.command_line import parse
from distributed.launch import Launch, discover

SHAPE = (
    "--layers 2 --hidden 32 --heads 4 --seq-length 8 --vocab-size 31 --global-batch-size 8 "
    "--pad-vocab-multiple 4 --steps 1000000 --log-every 1000000 --device cpu"
)
TIMEOUT = 5.0  # --hang-timeout
LIMIT = 30.0  # seconds in which a job must be gone
FAULT_STEP = 4  # a run's first steps are given more time
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
PR_SET_CHILD_SUBREAPER = 36


class Fault:
    """Counts the calls of a function on the culprit and does something else at one of them."""

    def __init__(self, module, name: str, call: int, does):
        self.original, self.call, self.calls, self.does = getattr(module, name), call, 0, does
        setattr(module, name, self)

    def __call__(self, *arguments, **keywords):
        self.calls += 1
        if self.calls == self.call:
            self.does()
        return self.original(*arguments, **keywords)

    def __get__(self, instance, owner=None):
        return self if instance is None else lambda *a, **k: self(instance, *a, **k)


def sleep_in_the_data_loader() -> None:
    time.sleep(3600)


def loop_for_ever() -> None:
    while True:
        len("never ends")


def hold_the_lock() -> None:
    time.sleep(1.5)  # a beat has told that the run is settled
    re.match(r"(a+)+$", "a" * 64 + "b")  # exponential, in C, with Python's lock held


def fail() -> None:
    raise ValueError("planted")


def plant(fault: str) -> None:
    """Put the fault into this process, which is the culprit."""
    if fault in SIGNALS:
        Fault(zero.Optimizer, "step", 10 * FAULT_STEP, lambda: lose(os.getpid(), fault))
    elif fault == "data":
        Fault(data, "micro_batch", 4 * FAULT_STEP + 1, sleep_in_the_data_loader)
    elif fault == "loop":
        Fault(zero.Optimizer, "step", FAULT_STEP, loop_for_ever)
    elif fault == "gil":
        Fault(zero.Optimizer, "step", FAULT_STEP, hold_the_lock)
    elif fault == "raise":
        Fault(zero.Optimizer, "step", FAULT_STEP, fail)
    elif fault == "evaluate":
        Fault(trainer, "evaluate", 1, sleep_in_the_data_loader)
    elif fault == "write":
        Fault(file_format, "write_shard", 1, sleep_in_the_data_loader)


def be_rank(rank: int, port: int, folder: Path, job: dict) -> None:
    """What a forked process does: a rank of train.py, faulty or not; never returns."""
    output = os.open(folder / f"rank{rank}.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    kill_worker.be_torchruns(rank, job["ranks"], port)
    status = 1
    try:
        if job["fault"] in SIGNALS:
            job = job | {"culprit": None}  # our parent does it, at a random moment
        do_job(Launch("torchrun", rank, job["ranks"]), folder, job)
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def do_job(launch: Launch, folder: Path, job: dict) -> None:
    """A rank of train.py, with the fault if it is the culprit."""
    words = [*SHAPE.split(), *job["layout"].split(), "--out", str(folder)]
    words += ["--hang-timeout", str(TIMEOUT)]
    if job["fault"] == "evaluate":
        words += ["--eval-samples", "8", "--eval-every", str(FAULT_STEP)]
    if job["fault"] == "write":
        words += ["--save-every", str(FAULT_STEP)]
    if launch.rank == job["culprit"]:
        plant(job["fault"])
    trainer.main(validation.check(parse(words), launch.size), launch)


def lose(pid: int, fault: str) -> None:
    """What befalls a process without a word of its own."""
    os.kill(pid, SIGNALS[fault])


def run(folder: Path, job: dict, chance: random.Random) -> dict:
    """One job: its ranks started, its fault planted, its end watched."""
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
        time.sleep(1.2 + chance.uniform(0.0, 0.5))  # a beat has told that the run is settled
        began = time.monotonic()
        lose(ids[job["culprit"]], job["fault"])
    if job["fault"] == "suspended":
        suspend(ids, folder / "metrics.jsonl")
    gone = all_gone(ids, began + LIMIT)
    seconds = time.monotonic() - began
    left = end_what_is_left()
    case = folder / "hang/case.json"
    told = json.loads(case.read_text()) if case.exists() else {"culprits": None, "kind": None}
    output = "".join(path.read_text() for path in sorted(folder.glob("rank*.log")))
    return job | {
        "named": told["culprits"],
        "kind": told["kind"],
        "seconds": round(seconds, 1),
        "statuses": gone,
        "left": left,
        "output": output[-6000:],
    }


def suspend(ids: list[int], metrics: Path) -> None:
    """Stop all processes, as `scontrol suspend` does, for longer than a hang; then end in order."""
    wait_for_rows(metrics, FAULT_STEP)
    everyone = psutil.Process().children(recursive=True)
    for process in everyone:
        process.suspend()
    time.sleep(TIMEOUT + 3.0)
    rows = metrics.read_bytes().count(b"\n")
    for process in everyone:
        process.resume()
    wait_for_rows(metrics, rows + 50)
    for i in ids:
        os.kill(i, signal.SIGTERM)


def check(result: dict) -> None:
    """Raise unless the job was gone in time, without a rest, and its culprit named."""
    in_time = LIMIT if result["kind"] == "hang" else 10.0
    good = {
        "named": result["named"] == [result["culprit"]],
        "kind": result["kind"]
        == {"raise": "failed", "killed": "dead"}.get(result["fault"], "hang"),
        "in time": result["seconds"] < in_time,
        "all ended, non-zero": len(result["statuses"]) == result["ranks"]
        and all(result["statuses"].values()),
        "nothing left": result["left"] == [],
    }
    wrong = [what for what, right in good.items() if not right]
    if wrong:
        raise RuntimeError(f"not so: {', '.join(wrong)}: {json.dumps(result, indent=1)}")


def wait_for_rows(metrics: Path, count: int) -> None:
    until = time.monotonic() + LIMIT
    while metrics.read_bytes().count(b"\n") < count:
        if time.monotonic() > until:
            raise RuntimeError(f"no {count} steps: {kill_worker.logs(metrics.parent)}")
        time.sleep(0.01)


def all_gone(ids: list[int], until: float) -> dict[int, int]:
    """Exit statuses of the ranks that ended by then, and of the monitor, which is adopted here."""
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
    """The command lines of processes that should have ended; then they do."""
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
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    chance = random.Random(len(jobs))
    for number, job in enumerate(jobs):
        print(json.dumps(run(folder / f"job{number}", job, chance)), flush=True)


if __name__ == "__main__":
    main()
