"""What a rank does and did last: the records that explain a hang and from which a step is drawn.

    recorder = FlightRecorder()                      one per rank, made by distributed.context
    recorder.begin_step(7)
    recorder.at("F", 3)                              now: the forward of micro-batch 3
    group_log = recorder.group_log("tp", (4, 5))     one per group, kept by collectives.Group
    operation = group_log.enter("all_reduce", 4096)  before the call, because the call may hang
    operation.under_way(handle).wait()

Each rank numbers the operations of a group: the one that never entered the operation in which the
others wait has a lower count. The training thread writes, the watchdog's thread reads, without
locks: a count may be out of date by a microsecond. benchmarks/watchdog.py measures the cost.
"""

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

Place = tuple[str, int, str, int | None]  # phase, step, action, micro-batch
RING = 256  # records kept
STEPS = 101  # step durations kept, for their median
# Waits of a GPU's stream that are kept: the host can be at most 1024 launches ahead of a stream.
DEVICE_WAITS = 1024
SECONDS_TO_ASK = 3.0  # without progress; only then the watchdog's thread asks the GPU's driver


@dataclass(slots=True, eq=False)
class Operation:
    """One collective or message of this rank, in place of torch's handle; times are monotonic."""

    group_log: "GroupLog"
    kind: str
    number: int  # of the group's collectives, or of the messages to or from one peer, from 1
    bytes: int  # the size on this rank
    peer: int | None = None  # position in the group
    place: Place = field(init=False)
    entered: float = field(init=False)
    waited_since: float | None = None
    ended: float | None = None
    handle: Any = None  # torch's

    def __post_init__(self) -> None:
        recorder = self.group_log.recorder
        self.place = recorder.place
        self.entered = time.monotonic()
        recorder.ring.append(self)
        recorder.progress += 1

    def under_way(self, handle: Any) -> "Operation":
        """Keep the handle of the started operation; returns itself."""
        self.handle = handle
        return self

    def wait(self) -> None:
        """Wait for the handle and record it; a second call returns at once."""
        if self.handle is None:
            return
        recorder = self.group_log.recorder
        began = self.waited_since = time.monotonic()
        recorder.waiting = self
        marks = recorder.wait_for(self)
        self.handle = None
        self.ended = now = time.monotonic()
        recorder.waiting = None
        if recorder.new_event is None:
            recorder.waited += now - began
        recorder.progress += 1
        if recorder.spans is not None:
            side = {"send": f" to {self.peer}", "receive": f" from {self.peer}"}.get(self.kind, "")
            name = f"{self.kind} {self.number} of {self.group_log.role}{side}"
            recorder.spans.append(("wait", name, *(marks or (began, now))))

    def to_dict(self, now: float) -> dict[str, Any]:
        """The record as plain values; times as seconds before `now`."""
        return {
            "kind": self.kind,
            "role": self.group_log.role,
            "ranks": self.group_log.ranks,
            "number": self.number,
            "bytes": self.bytes,
            "peer": None if self.peer is None else self.group_log.ranks[self.peer],
            "place": self.place,
            "seconds": _seconds_before(now, self.entered),
            "waiting": _seconds_before(now, self.waited_since),
            "ended": _seconds_before(now, self.ended),
        }


class GroupLog:
    """Counts the operations of one group that this rank has entered."""

    def __init__(self, recorder: "FlightRecorder", role: str, ranks: tuple[int, ...]):
        self.recorder = recorder
        self.role = role
        self.ranks = ranks
        self.entered = 0  # collectives
        self.sent: dict[int, int] = {}  # messages, by position in the group
        self.received: dict[int, int] = {}

    def enter(self, kind: str, size: int) -> Operation:
        """Record a collective of `size` bytes on this rank, before it starts."""
        self.entered += 1
        return Operation(self, kind, self.entered, size)

    def enter_send(self, size: int, to: int) -> Operation:
        """Record a message of `size` bytes to the group's rank `to`, before it starts."""
        number = self.sent[to] = self.sent.get(to, 0) + 1
        return Operation(self, "send", number, size, to)

    def enter_receive(self, size: int, source: int) -> Operation:
        """Record a message of `size` bytes from the group's rank `source`, before it starts."""
        number = self.received[source] = self.received.get(source, 0) + 1
        return Operation(self, "receive", number, size, source)


class FlightRecorder:
    """The records of one rank: its last operations and actions, and what it does now.

    new_event: makes a CUDA event where a wait makes the stream wait and not the host (nccl); None
    where the host waits (gloo). coordinates: this rank's on the axes of the mesh,
    which sets them. progress: grows with every record; a rank whose progress stands may hang.
    """

    def __init__(self, new_event: Callable[[], Any] | None = None):
        self.ring: deque[Operation | tuple[Place, float]] = deque(maxlen=RING)
        self.group_logs: dict[tuple[str, tuple[int, ...]], GroupLog] = {}
        self.coordinates: dict[str, int] = {}
        self.place: Place = ("start", 0, "start", None)
        self.since = time.monotonic()  # when it came to that place
        self.progress = 0
        self.waiting: Operation | None = None
        self.waited = 0.0  # seconds in waits since `take_waited`
        self.background: dict[str, Any] | None = None  # what the checkpoint's thread does
        self.background_progress = 0  # that thread's own count: two threads never write one
        self.other_wait: dict[str, Any] | None = None  # a wait that is not an Operation
        self.steps: deque[float] = deque(maxlen=STEPS)
        self.steps_done = 0
        self.spans: list[tuple] | None = None  # while kept: step_trace.py and step_times.py
        self.stamp: Callable[[], Any] | None = None  # of them, the time; None: the host's clock
        self._mark: Any = None  # when the place was come to, as a span has it
        self.spent: dict[str, float] = defaultdict(float)  # seconds by phase; `log`: between steps
        self.settle: Callable[[], None] | None = None  # then: wait for the device's stream
        self.new_event = new_event
        # The last waits of the device's stream, each with an event that the stream passes after it.
        self._on_stream: deque[tuple[Operation, Any]] = deque(maxlen=DEVICE_WAITS)
        # Around each wait of a step that is measured: timing events, of which `stamp` makes one.
        self._timed_waits: list[tuple[Any, Any]] = []
        self._seen = -1, 0.0  # progress that a snapshot had first, and when

    def group_log(self, role: str, ranks: tuple[int, ...]) -> GroupLog:
        """The log of a group; groups of the same ranks and role share one."""
        return self.group_logs.setdefault((role, ranks), GroupLog(self, role, ranks))

    # -- what the rank does now -------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """A training step begins."""
        self.waited, self._timed_waits = 0.0, []  # the waits between steps do not count
        self._move(("train", step, "begin", None))
        self._step_began = self.since

    def end_step(self) -> None:
        """A training step has ended; its duration counts towards the median."""
        self.steps.append(time.monotonic() - self._step_began)
        self.steps_done += 1
        self.enter("log")

    def enter(self, phase: str) -> None:
        """A phase other than a training step begins: evaluate, save, load, end."""
        self._move((phase, self.place[1], phase, None))

    def at(self, action: str, micro_batch: int | None = None) -> None:
        """The next action of the phase begins: data, F, B, reduce, optimizer, ..."""
        self._move((self.place[0], self.place[1], action, micro_batch))

    def _move(self, place: Place) -> None:
        if self.settle is not None:
            self.settle()
        now = time.monotonic()
        self.spent[self.place[0]] += now - self.since
        if self.spans is not None:
            mark = self.stamp() if self.stamp else now
            self.spans.append((*self.place[2:], self._mark, mark))
            self._mark = mark
        self.place = place
        self.since = now
        self.ring.append((place, now))
        self.progress += 1

    def keep_spans(self, stamp: Callable[[], Any] | None = None) -> None:
        """Keep spans (action, micro-batch, start, end) from now on, until `spans` is None again.

        stamp: gives what stands for a time in them, on nccl a CUDA event that it records on the
        stream; a wait's two are then the events between which the stream waited.
        """
        self.spans = []
        self.stamp = stamp
        self._mark = stamp() if stamp else time.monotonic()

    @contextmanager
    def waiting_for(self, kind: str, ranks: Sequence[int] = ()) -> Iterator[None]:
        """A wait that is not an Operation: `store` (for `ranks`), `device` or `writer`.

        Not cleared by an exception, so that the report shows in which wait the rank failed.
        """
        self.other_wait = _wait(kind, ranks)
        yield
        self.other_wait = None
        self.progress += 1

    def background_at(self, kind: str | None, ranks: Sequence[int] = ()) -> None:
        """What the checkpoint's thread does from now on, or waits for (`ranks`); None: ended."""
        self.background = _wait(kind, ranks) if kind else None
        self.background_progress += 1

    # -- time in waits ----------------------------------------------------------------------

    def take_waited(self) -> float:
        """Seconds in waits since the step began or the last call: of the host, or on nccl of the
        device's stream. NaN on nccl if no spans with a `stamp` are kept: these waits are not timed.

        Call this when the device has done the step, so that its stream has passed every wait.
        """
        if self.new_event is None:
            waited = self.waited
            self.waited = 0.0
            return waited
        if self.stamp is None:
            return math.nan
        timed = self._timed_waits
        self._timed_waits = []
        return sum(first.elapsed_time(last) for first, last in timed) / 1e3

    def wait_for(self, operation: Operation) -> tuple[Any, Any] | None:
        """Wait for the handle; on nccl the stream waits and the host goes on.

        There an event is recorded after the wait: after a hang it tells whether the stream has
        passed the operation. It takes no time stamp and is never queried by this thread. Two timing
        events around the wait are recorded, and returned, only while spans are kept with a `stamp`.
        """
        if self.new_event is None:
            operation.handle.wait()
            return None
        first = self.stamp() if self.stamp else None
        operation.handle.wait()
        # The oldest of so many events lies behind the stream, and is used again.
        reuses = len(self._on_stream) == DEVICE_WAITS
        passed = self._on_stream[0][1] if reuses else self.new_event()
        passed.record()
        self._on_stream.append((operation, passed))
        if self.stamp is None:
            return None
        self._timed_waits.append((first, self.stamp()))
        return self._timed_waits[-1]

    def device_waits_for(self) -> Operation | None:
        """The first operation that the device's stream has not passed yet.

        Asks the driver, which may wait for a lock that another thread holds. None too after an
        error of the device, which every query raises again: the main thread reports it.
        """
        waits = list(self._on_stream)
        with suppress(RuntimeError):
            return next((operation for operation, passed in waits if not passed.query()), None)
        return None

    # -- for the watchdog's thread ----------------------------------------------------------

    def snapshot(self, records: int) -> dict[str, Any]:
        """What the rank does now and its last `records` records, as plain values."""
        now = time.monotonic()
        progress = self.progress + self.background_progress
        if progress != self._seen[0]:
            self._seen = progress, now
        stands = now - self._seen[1] >= SECONDS_TO_ASK
        device = self.device_waits_for() if stands else None
        waiting = self.waiting
        other = self.other_wait
        if waiting is None and (other is None or other["kind"] == "device"):
            waiting = device  # the host may be at any later place, its launch queue full
        return {
            **dict(zip(("phase", "step", "action", "micro_batch"), self.place)),
            "since": _seconds_before(now, self.since),
            "progress": progress,
            "steps_done": self.steps_done,
            "median_step": statistics.median(self.steps) if self.steps else 0.0,
            "wait": waiting.to_dict(now) if waiting else _wait_to_dict(other, now),
            "device": device.to_dict(now) if device else None,
            "background": _wait_to_dict(self.background, now),
            "counts": [(g.entered, g.sent, g.received) for g in list(self.group_logs.values())],
            "last": [_record_to_dict(r, now) for r in list(self.ring)[-records:]],
        }

    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Role and ranks of every group, in the order of the snapshot's counts."""
        return list(self.group_logs)


def describe_place(snapshot: dict[str, Any]) -> str:
    """What a snapshot's rank does: `step 7, F of micro-batch 3`."""
    action = snapshot["action"]
    phase = snapshot["phase"]
    batch = snapshot["micro_batch"]
    parts = [f"step {snapshot['step']}"] if snapshot["step"] else []
    parts += [phase] if phase not in ("train", action) else []
    return ", ".join([*parts, action if batch is None else f"{action} of micro-batch {batch}"])


def _seconds_before(now: float, moment: float | None) -> float | None:
    return None if moment is None else round(now - moment, 3)


def _wait(kind: str, ranks: Sequence[int]) -> dict[str, Any]:
    return {"kind": kind, "ranks": list(ranks), "began": time.monotonic()}


def _wait_to_dict(wait: dict[str, Any] | None, now: float) -> dict[str, Any] | None:
    if wait is None:
        return None
    return {"kind": wait["kind"], "ranks": wait["ranks"], "seconds": round(now - wait["began"], 3)}


def _record_to_dict(record: Operation | tuple[Place, float], now: float) -> dict[str, Any]:
    if isinstance(record, Operation):
        return record.to_dict(now)
    place, moment = record
    return {"place": place, "seconds": _seconds_before(now, moment)}
