"""The Context: this process among all ranks. Also the start and the end of a job.

    launch = discover()                   # launch.py, before torch
    prepare(config.run)                   # before torch is imported
    context = start(launch, config.run)   # ranks meet (rendezvous.py), the watchdog starts
    with context.failing_loudly():        # an exception on one rank ends all ranks, non-zero
        ...
    context.stop()

The context is passed as an argument and is never a global. Functions import torch and mpi4py
where they need them, so that a wrong option is reported before these slow imports. Read
rendezvous.py first.

The watchdog is a thread of each rank that sends heartbeats to the monitor, a process that rank 0
starts; the monitor finds ranks that hang or died and ends the job (watchdog/). The launcher is the
program that started the ranks: srun, mpirun, torchrun, or none (launch.py).
"""

import atexit
import contextlib
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

from base.errors import NodeError, UserError, leave_end
from config.run_options import Run
from distributed import network_variables
from distributed.early_end import SECONDS_TO_FLUSH, abort_by_mpi, ending_all_ranks
from distributed.launch import Launch, job_nodes
from distributed.rendezvous import MEETING_TIMEOUT, Meeting, meet
from distributed.run_lock import RunLock
from distributed.store import StoreExchange, host_address
from watchdog import hang_report
from watchdog.flight_recorder import FlightRecorder
from watchdog.heartbeat import Watchdog, start_monitor

if TYPE_CHECKING:
    from distributed.collectives import Group

COLLECTIVE_TIMEOUT = timedelta(hours=4)  # torch's timeout; the watchdog reports a hang long before
# Roles of groups whose operations the next matrix product waits for. Their NCCL streams have high
# priority: if another product is ready at the same time, NCCL's kernel gets its SMs first and runs
# beside that product. Megatron-LM offers the same as --high-priority-stream-groups.
HIGH_PRIORITY = ("tp", "cp", "heads", "kv")
# The most SMs (NCCL: CTAs) that an operation of a group takes, by the group's role;
# for other roles NCCL chooses. SMs that NCCL takes do not compute.
# Messages (forward, backward): the kernel of a message runs from its start until the other rank
# has joined, and messages of both groups run at once: one that finds no free SM would never begin.
# Four CTAs move about 80 GB/s, more than a network link.
# Gradients (dp, replicas, expert replicas): they are reduced during the backward pass, which needs
# the other SMs. kv copies, key copies, tied: a few gradients a step. world: a few numbers a step;
# each CTA takes memory.
# Two, four and 16 of a GPU's 132 SMs are estimates from published rates, not measured.
MOST_CTAS = {
    "forward": 4,
    "backward": 4,
    "dp": 16,
    "replicas": 16,
    "expert replicas": 16,
    "kv copies": 16,
    "key copies": 16,
    "tied": 16,
    "world": 2,
}
SECONDS_BEHIND_RANK_0 = 0.5  # the time by which `say_once` puts off the lines of other ranks
SECONDS_FOR_MONITOR_TO_END = 5.0  # the longest wait of `stop` for the monitor
SECONDS_FOR_THREADS_TO_REST = 5.0  # the longest wait of `stop` for threads of gloo
# The launcher takes the job's status from rank 0's exit (`_exit_job`). Under srun rank 0 exits
# SECONDS_AFTER_OTHERS after the other ranks. Under mpirun rank 0 ends the other ranks by MPI_Abort,
# and they sleep up to SECONDS_TO_BE_ENDED until that happens.
SECONDS_AFTER_OTHERS = 1.0
SECONDS_TO_BE_ENDED = 30.0


def prepare(run: Run, pp: int = 1, experts: int = 1) -> None:
    """Set the environment variables that torch, CUDA, cuBLAS and NCCL read when they are loaded.

    Called before torch is imported. A variable that the user has set stays, but for those of
    blocking. pp: the number of pipeline stages. experts: the number of experts of a block.
    """
    if run.blocking:  # every collective blocks the host, and so does every kernel
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    # With CUDA_LAUNCH_BLOCKING a send returns when the message has arrived, so two stages that both
    # send before they receive would wait for each other.
    if run.blocking and pp == 1:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    # The messages of each group have a stream. Streams that share one of the device's hardware
    # queues (8 by default) may wait for one another, so more queues are asked for.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Silence torch's warning, on each rank, that messages of one group may wait for one another.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    # By default CUDA loads a kernel at its first launch, which waits until the device is idle. An
    # expert has another number of rows in each micro-batch, for which cuBLAS takes other kernels:
    # every stage would wait so in any action of the first steps. EAGER loads all kernels at the
    # start instead, which takes seconds and some hundred MB of each GPU.
    if experts > 1 and pp > 1:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # Memory segments that can grow leave no gaps between tensors of different sizes.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if run.compile:  # there are few small kernels: no pool of compiler processes beside each rank
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if run.deterministic or run.audit_every:  # cuBLAS repeats its bits only with this workspace
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def await_other_threads(seconds: float) -> None:
    """Return when all other threads of this process sleep, or after `seconds`.

    Called by `Context.stop` before the interpreter ends. A thread of gloo may still be freeing the
    tensor of its last operation, after the main thread's wait for that operation has returned. The
    thread needs the interpreter's lock for that, and would abort the process if the interpreter has
    begun to end.
    """
    this_thread = str(threading.get_native_id())
    deadline = time.monotonic() + seconds
    quiet_looks = 0  # looks in a row at which all other threads slept
    # Two looks are needed: a thread that sleeps because it waits for the interpreter's lock gets
    # the lock during the sleep of this loop, and the second look finds it awake.
    while quiet_looks < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
        threads = [path for path in Path("/proc/self/task").iterdir() if path.name != this_thread]
        quiet_looks = quiet_looks + 1 if all(map(_sleeps, threads)) else 0


def _sleeps(thread: Path) -> bool:
    """Return whether a thread sleeps or has ended. thread: its folder in /proc/self/task."""
    with contextlib.suppress(OSError):  # the thread has ended
        # The file is "PID (NAME) STATE ...", and the state S is sleep.
        _, _, fields = (thread / "stat").read_text().rpartition(")")
        return fields.split()[0] == "S"
    return True


@dataclass
class Context(Meeting):
    """This process among all ranks: its rank, node, device and stores, groups and watchdog.

    Made by `start`, once per process. Most attributes are those of Meeting (rendezvous.py).
    """

    recorder: FlightRecorder = field(default_factory=FlightRecorder)
    blocking: bool = False  # wait for every collective where it starts
    job_nodes: int | None = None  # the number of nodes of the Slurm job; None without Slurm
    watchdog: Watchdog | None = None  # None with --no-watchdog
    run_lock: RunLock | None = None  # on rank 0, set by `take`
    out: str = ""  # the folder of the run, set by `take`
    _groups: dict = field(default_factory=dict)  # torch's process groups, by (ranks, role)

    def lock_folder(self, out: str) -> None:
        """Lock the run's folder `out` until the end, on rank 0; the trainer calls this once.

        Rank 0 raises UserError if another run has locked the folder.
        """
        self.out = out
        if self.rank == 0:
            self.run_lock = RunLock(out)
            atexit.register(self.run_lock.release)

    @property
    def nodes(self) -> list[str]:
        """The name of every rank's node, in rank order."""
        return [place.node for place in self.places]

    def processes_here(self) -> list[tuple[int, int]]:
        """Return the processes of all ranks on this rank's node: (process id, start in ticks)."""
        ranks = zip(self.nodes, self.processes)
        return [process for node, process in ranks if node == self.node]

    def group(self, rows: Sequence[tuple[int, ...]], role: str) -> "Group":
        """Make all groups of a role and return this rank's group; collective over all ranks.

        The mesh calls this for each role. rows: the ranks of each group, such as (0, 1) and (2, 3).
        role: the groups' purpose, such as tp; each role has its own process groups and streams. A
        rank that is in no row gets a group of itself alone. A group of one rank needs no process
        group. torch requires that every rank makes every group, in the same order.
        """
        import torch.distributed as dist

        from distributed.collectives import Group

        members = next((row for row in rows if self.rank in row), (self.rank,))
        # With `device_id` NCCL connects the members of a new group at once, and not in the group's
        # first operation. The world's group has no device: if it had one, torch would make each
        # other group by splitting the world, in which every rank has to take part.
        on_nccl = self.backend == "nccl"
        device = self.device if on_nccl else None
        for row in rows:
            if role == "world" and len(row) > 1:  # torch has made this group already
                self._groups[row, role] = dist.group.WORLD
            elif len(row) > 1 and (row, role) not in self._groups:
                options: dict[str, Any] = {"timeout": COLLECTIVE_TIMEOUT, "device_id": device}
                if on_nccl:  # a build of torch without NCCL does not have this class of options
                    options["pg_options"] = _nccl_options(role)
                self._groups[row, role] = dist.new_group(list(row), **options)
        # A rank that is in no row gets no log: alone in its group, it communicates nothing.
        log = self.recorder.group_log(role, members) if members in rows else None
        handle = self._groups.get((members, role))  # None if this rank is the only member
        return Group(members, members.index(self.rank), handle, log, self.blocking)

    def clock(self) -> tuple[float, float]:
        """Return (offset, error): time.monotonic() + offset is the time of all ranks' common clock.

        error: the most seconds by which that time may be wrong. With a watchdog the common clock is
        the monitor's; without, it is the node's, and the error is given as 0. Spans of different
        ranks are compared by this clock.
        """
        if self.watchdog:
            return self.watchdog.clock_offset, self.watchdog.clock_error
        return time.time() - time.monotonic(), 0.0

    def describe(self) -> dict[str, Any]:
        """Return launcher, ranks, nodes and devices of the run, for run.json."""
        import torch

        device = f"{psutil.cpu_count() or 1} CPU cores"
        if self.device.type == "cuda":
            device = torch.cuda.get_device_name(self.device)
        network = None
        if self.backend == "nccl" and len(set(self.nodes)) > 1:
            network = network_variables.describe(torch.version.hip is not None)
        return {
            "launcher": self.launch.launcher,
            "ranks": self.size,
            "nodes": sorted(set(self.nodes)),
            "device": device,
            "backend": self.backend,
            "threads_per_rank": self.threads,
            "network": network,
            "places": [dataclasses.asdict(place) for place in self.places],
        }

    @contextlib.contextmanager
    def failing_loudly(self) -> Iterator[None]:
        """End every rank with a non-zero status if an exception leaves the block.

        Programs run their whole work in this block. It does no collective, so that it works when
        other ranks hang.
        """
        try:
            yield
        except SystemExit:  # the program ends on purpose
            raise
        except BaseException as error:
            self._fail(error)

    def stop(self, status: int = 0) -> None:
        """End the job in order, after all work is done; collective over all ranks.

        With a status other than 0 this call does not return: the process exits, and the launcher
        reports that status (75 after a run that was stopped early).
        """
        self.recorder.enter("end")
        if self.size > 1:
            import torch.distributed as dist

            # Over NCCL torch warns about a barrier without device_ids.
            device_ids = [self.device.index] if self.backend == "nccl" else None
            dist.barrier(device_ids=device_ids)
            dist.destroy_process_group()
        if self.run_lock:
            self.run_lock.release()
        if self.watchdog:
            self.watchdog.close()
            # The monitor ends when all ranks have deregistered.
            self.watchdog.end_monitor(SECONDS_FOR_MONITOR_TO_END)
        if self.size > 1:
            await_other_threads(SECONDS_FOR_THREADS_TO_REST)
        if status:
            if self.rank == 0:
                leave_end(status)
            self._exit_job(status)

    def _exit_job(self, status: int) -> None:
        """Exit so that the launcher reports `status`, which is not 0.

        Called by `stop`. When a rank exits with a status other than 0, launchers kill the other
        ranks and may report the status of a killed rank. So under srun the others exit with 0, and
        rank 0 exits later with `status`. MPICH's mpirun reports exactly the status that MPI_Abort
        is given, so under mpirun rank 0 ends all ranks by MPI_Abort.
        """
        for output in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the reader has ended, or the disk is full
                output.flush()
        if self.launch.launcher.startswith("mpirun"):
            if self.rank != 0:
                time.sleep(SECONDS_TO_BE_ENDED)
            self.end_all_ranks(status)
        if self.launch.mpi:  # under srun; mpirun was handled above
            from mpi4py import MPI

            MPI.Finalize()
            if self.rank != 0:
                os._exit(0)
            time.sleep(SECONDS_AFTER_OTHERS)
        os._exit(status)

    def _fail(self, error: BaseException) -> None:
        """Report the error and end the job; called by `failing_loudly`.

        If another rank failed first or is dead, the monitor normally ends this process while it
        waits in `watchdog.fail`; otherwise `fail` tells whether this rank prints its error. The
        lock on the run's folder is released before that, because another rank that failed too may
        end this process at any moment.
        """
        if self.run_lock:  # only on rank 0
            self.run_lock.release()
        status = error.status if isinstance(error, UserError) else 0  # 0: an exception of the code
        trace = "".join(traceback.format_exception(error))
        if self.watchdog is None or self.watchdog.fail(trace, status):
            text = f"rank {self.rank} of {self.size} on {self.node} failed:\n{trace}"
            if status:  # a user's mistake needs no traceback
                text = f"error: {error}"
                leave_end(status, str(error))
            print(text, file=sys.stderr, flush=True)
            if isinstance(error, NodeError) and self.out:
                with contextlib.suppress(OSError):  # the error has been printed already
                    hang_report.write_refusal(f"{self.out}/hang", error)
            time.sleep(SECONDS_TO_FLUSH if self.size > 1 else 0.0)
        sys.stdout.flush()
        self.end_all_ranks(status or 1)

    def say_once(self, line: str, about: str) -> None:
        """Print a line that several ranks may say, once in the job; from any thread.

        about: what the line is about; the monitor prints the first line about each thing. Without a
        watchdog every rank prints. The line of rank 0, which knows most, should be that one: other
        ranks wait for a moment.
        """
        if self.watchdog and self.size > 1:
            time.sleep(SECONDS_BEHIND_RANK_0 if self.rank else 0.0)
            if self.watchdog.say(line, about):
                return
        with contextlib.suppress(OSError):  # standard error may be closed
            print(line, file=sys.stderr, flush=True)

    def end_all_ranks(self, status: int) -> None:
        """End every rank at once with this status; may be called from any thread.

        MPI_Abort ends the other ranks; without MPI the watchdog's monitor does.
        """
        if self.watchdog:
            self.watchdog.end_job(status)
        if self.run_lock:
            self.run_lock.release()
        if self.launch.mpi:
            from mpi4py import MPI

            abort_by_mpi(MPI, status)
        os._exit(status)


def _nccl_options(role: str) -> Any:
    """Return NCCL's options of a group with this role: priority, SMs and the time limit."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=role in HIGH_PRIORITY)
    options._timeout = COLLECTIVE_TIMEOUT  # torch warns if new_group has another timeout
    ctas = most_ctas(role)
    if ctas is not None:
        options.config.max_ctas = ctas
    return options


def most_ctas(role: str) -> int | None:
    """Return the most SMs that an operation of a group takes, or None if NCCL chooses.

    role: the group's role, such as `dp`.
    """
    return MOST_CTAS.get(role)


# ---- Start-up ------------------------------------------------------------------------------------


def start(launch: Launch, run: Run, meet_within: timedelta = MEETING_TIMEOUT) -> Context:
    """Meet the other ranks and start the watchdog; collective over all ranks.

    A UserError ends the process as in `rendezvous.meet`. Any other exception ends all ranks.
    """
    with ending_all_ranks(launch.watch):
        return _start(launch, run, meet_within)


def _start(launch: Launch, run: Run, meet_within: timedelta) -> Context:
    """Do the work of `start`, in the order: meeting, watchdog, torch.distributed."""
    meeting = meet(launch, run, meet_within)
    import torch

    recorder = FlightRecorder(torch.cuda.Event if meeting.backend == "nccl" else None)
    context = Context(**vars(meeting), recorder=recorder, blocking=run.blocking)
    context.job_nodes = job_nodes()
    if run.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # With deterministic algorithms torch also fills every new empty tensor with a value, even
        # if a collective overwrites all of it. That costs time and is switched off.
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
    """Start torch.distributed, with the watchdog running; collective over all ranks.

    This makes the group of all ranks, without a device_id for the reason that `Context.group`
    gives. If --deterministic has set torch's deterministic algorithms before, torch also sets
    NCCL's algorithms in this call.
    """
    import torch.distributed as dist

    context.recorder.enter("connect")
    options: dict[str, Any] = {}
    if context.backend == "nccl":
        options["pg_options"] = _nccl_options("world")
    dist.init_process_group(
        context.backend,
        store=context.group_store,
        rank=context.rank,
        world_size=context.size,
        timeout=COLLECTIVE_TIMEOUT,
        **options,
    )


def _start_watchdog(context: Context, run: Run, host: str) -> None:
    """Start this rank's watchdog, which finds hangs from here on; collective over all ranks.

    Rank 0 first starts the monitor, a process to which all watchdogs connect. host: the address of
    this node. Without a loopback network a single process prints a note and has no watchdog.
    """
    address = None
    monitor = None
    key = context.monitor_key
    try:
        if context.rank == 0:
            # The host and the port of the monitor; the third item is `key`, which is known.
            (*address, _), monitor = start_monitor(
                host, context.node, context.size, run.out, run.hang_timeout, key
            )
        exchange = StoreExchange(context.store, context.rank, context.size, "monitor")
        address = exchange.agree(address, lambda values: values[0])  # all ranks get rank 0's value
        context.watchdog = Watchdog(
            context.recorder,
            (*address, key),
            context.rank,
            context.node,
            context.end_all_ranks,
            monitor,
            ranks_here=context.processes_here(),
            limit=run.hang_timeout,
        )
    except OSError as error:
        if monitor:
            monitor.kill()
        if context.size > 1:
            raise
        text = f"note: no watchdog, since this machine has no loopback network: {error.strerror}"
        print(text, file=sys.stderr, flush=True)
        return
    atexit.register(context.watchdog.close)  # sys.exit deregisters from the monitor too
