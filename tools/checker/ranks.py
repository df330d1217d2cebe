"""Worlds of ranks that do one job after another: forks of this process, or of a launcher's ranks.

    with Worlds(work, at_once=2) as worlds:
        for number, answer in worlds.answers([(4, job), (2, other), ...]):
            ...

`work(context, job)` runs on every rank of a world, and the answers of its ranks come back as a
list. A world stays alive for further jobs of its size, so that a job costs no start. If a rank
raises an error, dies, or does not answer in time, the world is ended, and the answer is a Failure.

This process must have imported torch, and have no threads, when the first world is forked.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from base.errors import UserError
from config.run_options import Run
from distributed import local_ranks, placement
from distributed.context import Context, start
from distributed.parent_death import end_with_parent

FORK: Any = multiprocessing.get_context("fork")
Work = Callable[[Any, Any], Any]
Meet = Callable[[int, int, int], Any]  # rank, size, port: the context of `work`
RANKS_OF_NODE = 2


@dataclass
class Failure:
    """Why a job has no answer: the ranks that failed, and what the first of them said.

    kind: "refused" for a user's mistake, "error", "ended" for a rank that died, "hangs". stacks:
    of an error, or for a hang the innermost line of this code on each rank.
    """

    kind: str
    ranks: list[int]
    text: str
    stacks: dict[int, str] = field(default_factory=dict)


class Fork:
    """A rank that this process has forked; what a World asks of it."""

    def __init__(
        self, pipe: Connection, work: Work, meet: Meet, rank: int, size: int, port: int, folder: str
    ):
        """Fork the rank, which gets the pipe. folder: for its stack if it hangs."""
        arguments = (pipe, work, meet, rank, size, port, os.getpid(), folder)
        self.process = FORK.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        self.path = os.path.join(folder, f"stack-{self.process.pid}")
        pipe.close()

    def write_stack(self) -> None:
        """Have the rank write its stack, which `stack` returns a moment later."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def stack(self) -> list[str]:
        """Return the lines of the rank's stack; none if it has ended."""
        with contextlib.suppress(OSError), open(self.path) as file:
            return file.read().splitlines()
        return []

    def status(self) -> int | None:
        """Return the exit status; None while the rank runs."""
        found: int | None = self.process.exitcode
        return found

    def kill(self) -> None:
        """Kill the rank."""
        self.process.kill()

    def join(self) -> None:
        """Wait until the rank has ended."""
        self.process.join()


# Starts the ranks of a world: their number, what they do, how they meet, a folder for stacks. It
# returns the pipe to each rank and the rank, which has the methods of a Fork.
Start = Callable[[int, Work, Meet, str], tuple[list[Connection], list[Any]]]


def fork_all(size: int, work: Work, meet: Meet, folder: str) -> tuple[list[Connection], list[Fork]]:
    """Fork all ranks of a world from this process; return a pipe to each, and the ranks."""
    port = local_ranks.free_port()
    pipes, forks = [], []
    for rank in range(size):
        ours, theirs = FORK.Pipe()
        forks.append(Fork(theirs, work, meet, rank, size, port, folder))
        pipes.append(ours)
    return pipes, forks


class World:
    """Ranks that have met, and the pipe to each of them."""

    def __init__(self, size: int, work: Work, meet: Meet, folder: str, start: Start = fork_all):
        """Start the ranks. folder: for the stacks of ranks that hang."""
        self.size = size
        self.began = 0.0  # when the running job began
        self.number = -1  # the running job's number
        self.answers: dict[int, Any] = {}  # of the running job, by rank
        self.pipes, self.ranks = start(size, work, meet, folder)

    def begin(self, number: int, job: Any) -> None:
        """Give a job to every rank."""
        self.number, self.began, self.answers = number, time.monotonic(), {}
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a rank that has died: its pipe says so later
                pipe.send(job)

    def stacks(self) -> dict[int, str]:
        """Return where the ranks that have not answered are now, by rank."""
        found = {}
        silent = [rank for rank in range(self.size) if rank not in self.answers]
        for rank in silent:
            self.ranks[rank].write_stack()
        time.sleep(0.3)
        for rank in silent:
            if lines := self.ranks[rank].stack():
                found[rank] = next((x.strip() for x in lines if _is_of_step(x)), "")
        return found

    def end(self) -> None:
        """Kill the ranks."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()
        for pipe in self.pipes:
            pipe.close()


def _is_of_step(line: str) -> bool:
    """Return whether a line of a stack is in a step's own code, and not in what waits for ranks."""
    ours = not any(
        word in line for word in ("site-packages", "/distributed/", "/checker/", "lib/python")
    )
    return line.strip().startswith("File") and ours


def _serve(
    pipe: Connection,
    work: Work,
    meet: Meet,
    rank: int,
    size: int,
    port: int,
    parent: int,
    folder: str,
) -> None:
    """Run a rank in its forked process: meet the others, then do jobs until it is killed."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program
    faulthandler.register(signal.SIGUSR1, open(os.path.join(folder, f"stack-{os.getpid()}"), "w"))  # noqa: SIM115
    gc.freeze()  # a collection would copy what this rank shares with its parent
    context = meet(rank, size, port)
    while True:
        job = pipe.recv()
        try:
            answer = work(context, job)
        except UserError as mistake:
            answer = Failure("refused", [rank], str(mistake))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(last.filename)}:{last.lineno}"
            answer = Failure("error", [rank], f"{type(error).__name__}: {error} ({where})")
            answer.stacks = {rank: traceback.format_exc()}
        pipe.send(answer)


def _meet(run: Run, rank: int, size: int, port: int) -> Context:
    """Meet the other ranks, and take every RANKS_OF_NODE ranks for a node.

    So experts are on several nodes with --ep 4, and tokens go another way to them
    (distributed/node_dispatch.py). Only names change, as the ranks still meet over this machine's
    loopback network.
    """
    context = start(local_ranks.become_rank(rank, size, port), run)
    if placement.threads_asked_for() is None:
        torch.set_num_threads(1)  # tensors are so small that several threads only wait
    of_rank = [f"node {rank // RANKS_OF_NODE}" for rank in range(context.size)]
    context.node = of_rank[context.rank]
    context.places = [replace(p, node=n) for p, n in zip(context.places, of_rank, strict=True)]
    return context


class Worlds:
    """Keeps worlds of several sizes, of which at most `at_once` work at a time."""

    def __init__(
        self,
        work: Work,
        run: Run | Meet,
        at_once: int = 2,
        seconds: float = 90.0,
        keeps: bool = True,
        start: Start = fork_all,
    ):
        """Keep how worlds start; none is started yet.

        work: does a job on a rank, see the top of the file. seconds: the time limit of a job. run:
        device and backend, or a function of rank, size and port with which ranks meet. keeps:
        whether a world does several jobs, which not every program allows. start: starts its ranks.
        """
        self.start = start
        self.work, self.at_once, self.seconds, self.keeps = work, at_once, seconds, keeps
        self.meet = partial(_meet, run) if isinstance(run, Run) else run
        self.idle: list[World] = []
        self.busy: list[World] = []
        self.folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> "Worlds":
        return self

    def __exit__(self, *_: Any) -> None:
        """End all ranks, and remove the folder of their stacks."""
        for world in [*self.idle, *self.busy]:
            world.end()
        self.idle, self.busy = [], []
        self.folder.cleanup()

    def answers(
        self, jobs: Sequence[tuple[int, Any]], may_begin: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[int, list[Any] | Failure]]:
        """Yield the number of each job with the answers of its ranks, as they come.

        jobs: the ranks of each, and what `work` gets. may_begin: whether a further job may begin.
        """
        waiting = list(enumerate(jobs))
        while waiting or self.busy:
            if not may_begin():
                waiting = []
            while waiting and len(self.busy) < self.at_once:
                number, (size, job) = waiting.pop(0)
                world = self._world(size)
                world.begin(number, job)
                self.busy.append(world)
            if self.busy:
                yield from self._ended()

    def _world(self, size: int) -> World:
        """Return an idle world of this size, or a new one."""
        for world in self.idle:
            if world.size == size:
                self.idle.remove(world)
                return world
        return World(size, self.work, self.meet, self.folder.name, self.start)

    def _ended(self) -> Iterator[tuple[int, list[Any] | Failure]]:
        """Wait for answers; yield those of the worlds whose job has ended."""
        place_of: dict[Any, tuple[World, int]] = {
            pipe: (world, rank)
            for world in self.busy
            for rank, pipe in enumerate(world.pipes)
            if rank not in world.answers
        }
        ready: list[Any] = wait(list(place_of), timeout=1.0)
        for pipe in ready:
            world, rank = place_of[pipe]
            try:
                world.answers[rank] = pipe.recv()
            except (EOFError, OSError):
                status = world.ranks[rank].status()
                world.answers[rank] = Failure("ended", [rank], f"rank {rank} ended ({status})")
        for world in list(self.busy):
            failed = [x for x in world.answers.values() if isinstance(x, Failure)]
            is_late = time.monotonic() - world.began > self.seconds
            if len(world.answers) == world.size and not failed:
                self.busy.remove(world)
                if self.keeps:
                    self.idle.append(world)
                else:
                    world.end()
                yield world.number, [world.answers[rank] for rank in range(world.size)]
            elif failed or is_late:
                yield world.number, self._failure(world, failed)
                self.busy.remove(world)
                world.end()

    def _failure(self, world: World, failed: list[Failure]) -> Failure:
        """Return why a job has no answer; other ranks may say the same a moment later."""
        if not failed:
            silent = [rank for rank in range(world.size) if rank not in world.answers]
            text = f"no answer within {self.seconds:.0f} s"
            return Failure("hangs", silent, text, world.stacks())
        # An error that breaks a connection makes the others fail too: the first cause counts.
        first = min(failed, key=lambda x: ("refused", "error", "ended").index(x.kind))
        ranks = sorted(rank for each in failed if each.text == first.text for rank in each.ranks)
        return Failure(first.kind, ranks, first.text, first.stacks)
