"""This process among all ranks: made by `start`, passed as an argument; how a job ends.

    launch = discover()                   # launch.py, before torch
    prepare(config.run)                   # before torch is imported
    context = start(launch, config.run)   # ranks meet (rendezvous.py), the watchdog starts
    with context.failing_loudly():        # an exception on one rank ends all ranks, non-zero
        ...
    context.stop()

torch and mpi4py are imported where they are needed: a mistake is reported before that takes time.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from config.messages import NodeError, UserError
from config.run_options import Run
from distributed.early_end import SECONDS_TO_FLUSH, ending_all_ranks
from distributed.job_store import host_address
from distributed.launch import Launch, job_nodes
from distributed.rendezvous import MEETING_TIMEOUT, Meeting, meet
from distributed.run_lock import RunLock
from distributed.store import StoreExchange
from watchdog.flight_recorder import FlightRecorder
from watchdog.heartbeat import Watchdog, start_monitor

if TYPE_CHECKING:
    from distributed.collectives import Group

COLLECTIVE_TIMEOUT = timedelta(hours=4)  # torch's own: the watchdog reports a hang long before
# Roles of groups whose operations the next product waits for: where a product is ready as soon,
# NCCL's kernel gets its SMs first and is hidden behind the product. Megatron-LM offers the same as
# --high-priority-stream-groups.
HIGH_PRIORITY = ("tp", "cp", "heads", "kv")
# The most SMs (NCCL: CTAs) that an operation of a group takes, by the first word of its role; NCCL
# chooses for the others. A message runs from when it is started until the other side is there too,
# and until then its SMs compute nothing; with --vocab-pp messages of several groups run at once,
# and those that find no SM left would never begin. Four CTAs move about 80 GB/s, more than a
# network link. Gradients are reduced while the backward pass computes. Four and 16 of a GPU's 132
# SMs are estimates from published rates and not measured; NCCL's limit is ncclConfig_t.maxCTAs.
MOST_CTAS = {"forward": 4, "backward": 4, "vocabulary": 4, "dp": 16, "replicas": 16}
SECONDS_FOR_MONITOR_TO_END = 5.0
SECONDS_FOR_THREADS_TO_REST = 5.0
M_ARENA_MAX = -8  # of glibc's malloc.h
# Rank 0 gives the launcher the job's status: under srun it ends this much later than the others;
# under mpirun it ends them, and they wait for that at most so long.
SECONDS_AFTER_OTHERS = 1.0
SECONDS_TO_BE_ENDED = 30.0


def prepare(run: Run, pp: int = 1) -> None:
    """Set the variables that torch, CUDA, cuBLAS and NCCL read when loaded, before torch is.

    pp: pipeline stages. A blocking launch returns when the message has arrived, so two stages that
    each send before they receive would wait for each other: with several, launches do not block.
    """
    if run.blocking:
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    if run.blocking and pp == 1:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    # Each group's messages have a stream of their own, and of those that share one of the device's
    # queues (8 by default) one may have to wait for another.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # torch would warn on each rank that a message alone may wait for others of its group.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    # Segments that grow leave no gaps between tensors of many sizes.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if run.compile:  # few small kernels: no pool of processes beside each rank
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def share_heap() -> None:
    """Have all threads of this process allocate from one heap, unless the user set how many.

    Call it before there are threads, which would keep their heaps and share them with later ones.
    Else each thread of gloo keeps the memory of the largest message that it has gathered.
    """
    chosen = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    libc = ctypes.CDLL(None)
    if not chosen and hasattr(libc, "mallopt"):  # glibc has it
        libc.mallopt(M_ARENA_MAX, 1)


def await_other_threads(seconds: float) -> None:
    """Return when all other threads of this process sleep, or after so many seconds.

    A thread of gloo may free the tensor of its last operation when the rank that waited for it has
    gone on. It needs the interpreter for that: one that has begun to end would abort the process.
    """
    own = str(threading.get_native_id())
    end = time.monotonic() + seconds
    quiet = 0
    # Twice: a thread that sleeps since it waits for the interpreter gets it during our sleep.
    while quiet < 2 and time.monotonic() < end:
        time.sleep(0.001)
        threads = [path for path in Path("/proc/self/task").iterdir() if path.name != own]
        quiet = quiet + 1 if all(map(_sleeps, threads)) else 0


def _sleeps(thread: Path) -> bool:
    """Whether a thread, a folder of /proc, sleeps or is gone; the state follows the name."""
    with contextlib.suppress(OSError):
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "S"
    return True


@dataclass
class Context(Meeting):
    """This process among all ranks, made by `start`: where it is, and what it shares with them."""

    recorder: FlightRecorder = field(default_factory=FlightRecorder)
    blocking: bool = False  # wait for every collective where it starts
    job_nodes: int | None = None  # of the Slurm job
    watchdog: Watchdog | None = None
    run_lock: RunLock | None = None  # on rank 0, from `take` on
    out: str = ""  # the folder of the run, from `take` on
    _groups: dict = field(default_factory=dict)

    def take(self, out: str) -> None:
        """Lock the folder of the run until the end; UserError, on rank 0, if another run has it."""
        self.out = out
        if self.rank == 0:
            self.run_lock = RunLock(out)
            atexit.register(self.run_lock.release)

    @property
    def nodes(self) -> list[str]:
        """The node of every rank."""
        return [place.node for place in self.places]

    def group(self, rows: Sequence[tuple[int, ...]], role: str) -> "Group":
        """This rank's group of a role; collective over all ranks.

        rows: the ranks of every group of that role. A rank in none of them is alone in its own.
        """
        import torch.distributed as dist

        from distributed.collectives import Group

        own = next((row for row in rows if self.rank in row), (self.rank,))
        # With a device NCCL connects the members of a new group at once, and not in its first
        # operation. The world has none: torch would make every rank split every group off it.
        on_nccl = self.backend == "nccl"
        device = self.device if on_nccl else None
        for row in rows:
            if role == "world" and len(row) > 1:
                self._groups[row, role] = dist.group.WORLD
            elif len(row) > 1 and (row, role) not in self._groups:
                options: dict[str, Any] = {"timeout": COLLECTIVE_TIMEOUT, "device_id": device}
                if on_nccl:  # torch without NCCL has no such options
                    options["pg_options"] = _nccl_options(role)
                self._groups[row, role] = dist.new_group(list(row), **options)
        log = self.recorder.group_log(role, own) if own in rows else None
        handle = self._groups.get((own, role))
        # The vocabulary's passes are messages of a schedule: a rank that waited for one where it
        # starts would not do what others need to join it.
        blocking = self.blocking and not role.startswith("vocabulary")
        return Group(own, own.index(self.rank), handle, log, blocking)

    def clock(self) -> tuple[float, float]:
        """Seconds to add to time.monotonic() for a clock common to all ranks, and their error."""
        if self.watchdog:
            return self.watchdog.clock_offset, self.watchdog.clock_error
        return time.time() - time.monotonic(), 0.0

    def describe(self) -> dict[str, Any]:
        """Where the run takes place, for run.json."""
        import torch

        cores = f"{psutil.cpu_count() or 1} CPU cores"
        on_gpu = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if on_gpu else cores
        return {
            "launcher": self.launch.launcher,
            "ranks": self.size,
            "nodes": sorted(set(self.nodes)),
            "device": device,
            "backend": self.backend,
            "threads_per_rank": self.threads,
            "places": [dataclasses.asdict(place) for place in self.places],
        }

    @contextlib.contextmanager
    def failing_loudly(self) -> Iterator[None]:
        """End every rank, non-zero, if an exception leaves the block; does no collective."""
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            self._fail(error)

    def stop(self, status: int = 0) -> None:
        """End in order, with the job's status; collective. With a status other than 0 it does not
        return.
        """
        self.recorder.enter("end")
        if self.size > 1:
            import torch.distributed as dist

            on_nccl = self.backend == "nccl"  # where torch would warn that it takes the current GPU
            dist.barrier(device_ids=[self.device.index] if on_nccl else None)
            dist.destroy_process_group()
        if self.run_lock:
            self.run_lock.release()
        if self.watchdog:
            self.watchdog.close()
            # It ends when all ranks have deregistered.
            self.watchdog.end_monitor(SECONDS_FOR_MONITOR_TO_END)
        if self.size > 1:
            await_other_threads(SECONDS_FOR_THREADS_TO_REST)
        if status:
            self._exit_job(status)

    def _exit_job(self, status: int) -> None:
        """Exit such that the launcher reports this status, which is not 0.

        When a rank exits with another status than 0, launchers kill the others and may report the
        kill's. So under srun only rank 0 exits with ours, after the others. MPICH's mpirun reports
        exactly the status that MPI_Abort is given.
        """
        for output in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads it any more, or its disk is full
                output.flush()
        if self.launch.launcher.startswith("mpirun"):
            if self.rank != 0:
                time.sleep(SECONDS_TO_BE_ENDED)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nothing failed: hide MPI_Abort's message
            self.end_all_ranks(status)
        if self.launch.mpi:
            from mpi4py import MPI

            MPI.Finalize()
            if self.rank != 0:
                os._exit(0)
            time.sleep(SECONDS_AFTER_OTHERS)
        os._exit(status)

    def _fail(self, error: BaseException) -> None:
        """Report the error and end the job.

        If another rank failed first or is dead, the monitor ends this process before the last line.
        The lock is released at once: another rank that failed too may end this one.
        """
        if self.run_lock:
            self.run_lock.release()
        status = error.status if isinstance(error, UserError) else 0
        trace = "".join(traceback.format_exception(error))
        if self.watchdog is None or self.watchdog.fail(trace, status):
            where = f"rank {self.rank} of {self.size} on {self.node} failed:\n"
            print(f"error: {error}" if status else where + trace, file=sys.stderr, flush=True)
            if isinstance(error, NodeError) and self.out:
                from watchdog import hang_report  # which a run without such an error does not need

                with contextlib.suppress(OSError):  # the sentence is printed
                    hang_report.write_refusal(f"{self.out}/hang", str(error), error.nodes)
            time.sleep(SECONDS_TO_FLUSH if self.size > 1 else 0.0)
        sys.stdout.flush()
        self.end_all_ranks(status or 1)

    def end_all_ranks(self, status: int) -> None:
        """End every rank at once, from any thread; without MPI the monitor ends the others."""
        if self.watchdog:
            self.watchdog.end_job(status)
        if self.run_lock:
            self.run_lock.release()
        if self.launch.mpi:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(status)
        os._exit(status)


def _nccl_options(role: str) -> Any:
    """torch's options of an NCCL group of that role: ProcessGroupNCCL.Options."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=role in HIGH_PRIORITY)
    options._timeout = COLLECTIVE_TIMEOUT  # torch warns if it is not new_group's
    name = role.partition(" ")[0]
    if name in MOST_CTAS:
        options.config.max_ctas = MOST_CTAS[name]
    return options


# ---- Start-up ------------------------------------------------------------------------------------


def start(launch: Launch, run: Run, meet_within: timedelta = MEETING_TIMEOUT) -> Context:
    """Meet the other ranks and start the watchdog; collective over all ranks.

    Errors end the process as `rendezvous.meet` says, and an exception ends all ranks.
    """
    with ending_all_ranks(launch.watch):
        return _start(launch, run, meet_within)


def _start(launch: Launch, run: Run, meet_within: timedelta) -> Context:
    meeting = meet(launch, run, meet_within)
    import torch

    recorder = FlightRecorder(torch.cuda.Event if meeting.backend == "nccl" else None)
    context = Context(**vars(meeting), recorder=recorder, blocking=run.blocking)
    context.job_nodes = job_nodes()
    if run.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # Else torch fills each empty tensor, also those that a collective writes at once.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if run.watchdog:
        _start_watchdog(context, run, host_address(meeting.local))
        launch.watch.have_met()
    else:
        launch.watch.close()
    if context.size > 1:
        with context.failing_loudly():
            _start_process_groups(context)
    return context


def _start_process_groups(context: Context) -> None:
    """Start torch.distributed, under the watchdog; collective.

    torch sets NCCL's algorithms for --deterministic here. The world's group has no bound device:
    see `Context.group`.
    """
    import torch.distributed as dist

    context.recorder.enter("connect")
    dist.init_process_group(
        context.backend,
        store=context.group_store,
        rank=context.rank,
        world_size=context.size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _start_watchdog(context: Context, run: Run, host: str) -> None:
    """Connect to the monitor, which rank 0 starts first; from here on every wait has a limit."""
    address = None
    monitor = None
    try:
        if context.rank == 0:
            job = context.node, context.size, run.out, run.hang_timeout, context.monitor_key
            (*address, _), monitor = start_monitor(host, *job)
        exchange = StoreExchange(context.store, context.rank, context.size, "monitor")
        address = exchange.agree(address, lambda values: values[0])
        own = context.rank, context.node, context.end_all_ranks, monitor
        context.watchdog = Watchdog(context.recorder, (*address, context.monitor_key), *own)
    except OSError as error:
        if monitor:
            monitor.kill()
        if context.size > 1:
            raise
        text = f"note: no watchdog, since this machine has no loopback network: {error.strerror}"
        print(text, file=sys.stderr, flush=True)
        return
    atexit.register(context.watchdog.close)  # sys.exit deregisters from the monitor too
