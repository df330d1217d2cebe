"""The processes of benchmarks/peers/peers.py: one side of a comparison, started, asked, ended.

Every rank is a process of its own with the variables that torchrun sets, one thread, and the cores
that Trine binds its ranks to, whoever's rank it is.
"""

import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from ranks import free_port

START, ANSWER, END = 300.0, 1800.0, 30.0  # seconds within which a side starts, answers, ends
CHECKED = 3  # steps at the start, whose losses and norms must agree; they warm up, too
LOSS_ERROR, NORM_ERROR = 2e-5, 2e-4  # relative: fp32 rounding, after some steps of AdamW


class SideError(RuntimeError):
    """A side failed, or does not compute what the others do."""


class Block(NamedTuple):
    """Some steps of a side: seconds from barrier to barrier; losses and gradient norms by step;
    the peak of resident bytes of each rank. Of rank 0: the seconds in which its thread was busy,
    and those in each kind of operation if the steps were under a profiler.
    """

    seconds: float
    losses: list[float]
    norms: list[float]
    peaks: list[int]
    busy: float
    kernels: dict[str, float]


class Side:
    """The ranks of one program that is compared; they wait without processor time until asked."""

    def __init__(self, label: str, words: list[str], ranks: int, folder: Path):
        """words: of the Python program; folder: for what the ranks print to stderr."""
        self.label, self.folder = label, folder
        folder.mkdir()
        self.ranks: list[subprocess.Popen] = []
        common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": free_port()}
        common |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
        common |= {"TORCHELASTIC_RUN_ID": "none"}
        for rank in range(ranks):
            own = common | {"RANK": rank, "LOCAL_RANK": rank}
            self.ranks.append(self._start(words, rank, {k: str(v) for k, v in own.items()}))

    def _start(self, words: list[str], rank: int, own: dict[str, str]) -> subprocess.Popen:
        with open(self.folder / f"{rank}.err", "w") as err:
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env={**os.environ, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                bufsize=1,
            )

    def wait_until_ready(self) -> None:
        """Return when every rank waits for a command; SideError if one cannot."""
        self._answers(START)

    def bind(self, cores: list[list[int]]) -> None:
        """Let every thread of each rank run on its cores only; threads to come inherit that."""
        for process, own in zip(self.ranks, cores):
            for thread in psutil.Process(process.pid).threads():
                os.sched_setaffinity(thread.id, own)

    def cores(self) -> list[list[int]]:
        """The cores of every rank."""
        return [psutil.Process(process.pid).cpu_affinity() for process in self.ranks]

    def run(self, steps: int) -> Block:
        """Do the next steps; SideError if a rank fails or a loss is not finite.

        The loss is the mean over the ranks that know one; norms must be equal on all. No steps: the
        peaks of memory begin anew; below 0: so many under torch's profiler.
        """
        for process in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # its end is found below
                process.stdin.write(f"{steps}\n")
        answers = self._answers(ANSWER)
        losses, norms = [], []
        for results in zip(*(answer["results"] for answer in answers)):
            known = [loss for loss, _ in results if loss is not None]
            losses.append(sum(known) / len(known))
            norms.append(results[0][1])
            if any(abs(norm - norms[-1]) > 1e-5 * norms[-1] for _, norm in results):
                raise SideError(f"{self.label}: ranks have unequal gradient norms: {results}")
        if not all(map(math.isfinite, (*losses, *norms))):
            raise SideError(f"{self.label}: losses {losses}, gradient norms {norms}")
        seconds = max(answer["seconds"] for answer in answers)
        peaks = [answer["peak"] for answer in answers]
        first = answers[0]
        return Block(seconds, losses, norms, peaks, first["busy"], first["kernels"])

    def _answers(self, seconds: float) -> list[dict]:
        """One line of each rank; SideError if a rank ends before, or that takes longer."""
        found: dict[int, dict] = {}
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self.ranks):
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while len(found) < len(self.ranks):
                ready = waiting.select(until - time.monotonic())
                if not ready:
                    raise SideError(f"{self.label}: no answer within {seconds:.0f} s")
                for key, _ in ready:
                    line = key.fileobj.readline()
                    if not line:
                        raise SideError(
                            f"{self.label}: rank {key.data} ended{self._tail(key.data)}"
                        )
                    found[key.data] = json.loads(line)
                    waiting.unregister(key.fileobj)
        return [found[rank] for rank in sorted(found)]

    def _tail(self, rank: int) -> str:
        """Return the last lines that a rank printed."""
        return ":\n" + (self.folder / f"{rank}.err").read_text(errors="replace")[-2000:]

    def end(self) -> None:
        """End all ranks: they leave when their input ends; what does not is killed."""
        started = []
        for process in self.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                own = psutil.Process(process.pid)
                started += [own, *own.children(recursive=True)]
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        psutil.wait_procs(started, END)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self.ranks:
            process.stdout.close()
            process.wait()


def check_equal(sides: list[Side]) -> None:
    """Run the first steps; SideError unless every side's losses and norms are Trine's."""
    first = [side.run(CHECKED) for side in sides]
    for side, block in zip(sides[1:], first[1:]):
        for what, most in (("losses", LOSS_ERROR), ("norms", NORM_ERROR)):
            ours, theirs = getattr(first[0], what), getattr(block, what)
            error = max(abs(a / b - 1.0) for a, b in zip(ours, theirs))
            if not error <= most:
                raise SideError(
                    f"{what} of {sides[0].label} and of {side.label} differ by {error:.1e}, more "
                    f"than {most:.0e}: {ours} and {theirs}"
                )
