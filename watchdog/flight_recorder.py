"""Records a rank's actions and operations, to explain a hang and to draw a step.

    recorder = FlightRecorder()                      one per rank, made by distributed.context
    recorder.begin_step(7)
    recorder.at("F", 3)                              now: the forward of micro-batch 3
    group_log = recorder.group_log("tp", (4, 5))     one per group, kept by collectives.Group
    operation = group_log.enter("all_reduce", 4096)  before the call, because the call may hang
    operation.under_way(handle).wait()

An action is a part of a step or of another phase: F (a forward pass), B, optimizer, save, ...
An operation is a collective or a message. Each rank numbers the operations of a group, so a rank
that never entered the operation in which the others wait has a lower count than they have. The
training thread writes and the watchdog's thread reads without locks: a count may be out of date by
a microsecond. benchmarks/costs/watchdog.py measures the cost.

Over gloo a wait blocks the host until the operation is done. Over NCCL a wait returns at once and
makes the device's stream wait; a CUDA event behind the wait shows whether the stream has passed it.
An event before each operation shows whether the stream has come to it: a rank whose host has run
ahead, while its GPU stands in a product before the operation, has not entered the operation.
A span is a stretch of time with a name, kept to draw a step: (action, micro-batch, start, end).
"""

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

Place = tuple[str, int, str, int | None]  # phase, step, action, micro-batch or None
RING = 256  # the number of records that are kept
STEPS = 101  # the number of step durations that are kept, for their median
# The number of stream waits that are kept. The host is at most 1024 launches ahead of a stream, so
# the stream has passed all earlier waits, and none of them can be the cause of a hang.
DEVICE_WAITS = 1024
# After these seconds without progress the watchdog's thread asks the GPU's driver which wait the
# stream has not passed. It does not ask earlier, because the question may wait for a lock.
SECONDS_TO_ASK = 3.0


@dataclass(slots=True, eq=False)
class Operation:
    """One collective or message of this rank. Callers call its `wait` instead of torch's handle's.

    All times are seconds of time.monotonic().
    """

    group_log: "GroupLog"
    kind: str  # all_reduce, send, ...
    number: int  # from 1, among the group's collectives, or among the messages to or from a peer
    bytes: int  # the size of the tensor on this rank
    peer: int | None = None  # the other rank's position in the group; None for a collective
    place: Place = field(init=False)  # the action in which this rank started the operation
    entered: float = field(init=False)  # when the operation was recorded, before its start
    waited_since: float | None = None  # when `wait` was called
    ended: float | None = None  # when `wait` returned
    handle: Any = None  # torch's handle; None before the start and after the wait

    def __post_init__(self) -> None:
        """Append the operation to the recorder's ring, with the current action and time."""
        recorder = self.group_log.recorder
        self.place = recorder.place
        self.entered = time.monotonic()
        recorder.ring.append(self)
        recorder.progress += 1
        if recorder.stream:
            recorder.stream.come_to(self)

    def under_way(self, handle: Any) -> "Operation":
        """Keep torch's handle of the operation, which has just been started; return `self`.

        The Group that started it returns this Operation to the caller in place of torch's handle.
        """
        self.handle = handle
        return self

    def wait(self) -> None:
        """Wait until the operation is done and record the wait; a second call returns at once."""
        if self.handle is None:
            return
        recorder = self.group_log.recorder
        began = self.waited_since = time.monotonic()
        recorder.waiting = self
        marks = None  # over NCCL, if spans are kept: the timing events before and after the wait
        if recorder.stream:
            marks = recorder.stream.wait_for(self, recorder.stamp)
        else:
            self.handle.wait()
        self.handle = None
        self.ended = now = time.monotonic()
        recorder.waiting = None
        if recorder.stream is None:
            recorder.waited += now - began
        recorder.progress += 1
        if recorder.spans is not None:  # spans of this step are kept: add the wait
            side = {"send": f" to {self.peer}", "receive": f" from {self.peer}"}.get(self.kind, "")
            name = f"{self.kind} {self.number} of {self.group_log.role}{side}"
            recorder.spans.append(("wait", name, *(marks or (began, now))))

    def to_dict(self, now: float) -> dict[str, Any]:
        """Return the operation as plain values for a snapshot; times become seconds before `now`.

        Positions in the group become ranks of the world.
        """
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
    """Counts the operations of one group that this rank has entered; collectives.Group keeps it.

    role: the group's role in the mesh. ranks: the members' ranks in the world.
    """

    def __init__(self, recorder: "FlightRecorder", role: str, ranks: tuple[int, ...]):
        """Begin with no operations; called by FlightRecorder.group_log."""
        self.recorder = recorder
        self.role = role
        self.ranks = ranks
        self.entered = 0  # the number of collectives that this rank has entered
        # The number of messages to and from each peer, by the peer's position in `ranks`.
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def enter(self, kind: str, size: int) -> Operation:
        """Record a collective of `size` bytes on this rank, before it starts."""
        self.entered += 1
        return Operation(self, kind, self.entered, size)

    def enter_send(self, size: int, to: int) -> Operation:
        """Record a message of `size` bytes to the group's rank `to`, before the send starts."""
        number = self.sent[to] = self.sent.get(to, 0) + 1
        return Operation(self, "send", number, size, to)

    def enter_receive(self, size: int, source: int) -> Operation:
        """Record a receive of `size` bytes from position `source` of the group, before its start.

        The n-th receive from a rank gets the number n, as the sender's n-th send does.
        """
        number = self.received[source] = self.received.get(source, 0) + 1
        return Operation(self, "receive", number, size, source)


class StreamWaits:
    """The waits of the device's stream over NCCL, where a wait does not make the host wait."""

    def __init__(self, new_event: Callable[[], Any]):
        """Record nothing yet. new_event: makes a CUDA event without a time stamp."""
        self.new_event = new_event
        # The last operations for which the stream was made to wait, each with the CUDA event that
        # was recorded behind the wait: if the event is done, the stream has passed the wait.
        self._last: deque[tuple[Operation, Any]] = deque(maxlen=DEVICE_WAITS)
        # The last operations that the host has started, each with the CUDA event that was recorded
        # before it: if the event is done, the stream has come to the operation.
        self._started: deque[tuple[Operation, Any]] = deque(maxlen=DEVICE_WAITS)
        # The timing events before and after each wait, while spans are kept; for `take_seconds`.
        self.timed: list[tuple[Any, Any]] = []

    def come_to(self, operation: Operation) -> None:
        """Record an event before an operation that the host starts next."""
        self._record(self._started, operation)

    def _record(self, kept: deque[tuple[Operation, Any]], operation: Operation) -> None:
        """Record an event on the stream now, and keep it with the operation.

        To make an event costs time. Once DEVICE_WAITS events are kept, the stream has passed the
        oldest, so this event is used again; `append` drops its old entry.
        """
        event = kept[0][1] if len(kept) == DEVICE_WAITS else self.new_event()
        event.record()
        kept.append((operation, event))

    def wait_for(
        self, operation: Operation, stamp: Callable[[], Any] | None
    ) -> tuple[Any, Any] | None:
        """Make the stream wait for the operation's handle, and record an event after the wait.

        In a hang the event shows whether the stream has passed the operation; only the watchdog's
        thread queries it. stamp: makes a timing event, while spans are kept (`keep_spans`); the
        result is then the timing events before and after the wait. Otherwise both are None.
        """
        first = stamp() if stamp else None
        operation.handle.wait()
        self._record(self._last, operation)
        if stamp is None:
            return None
        self.timed.append((first, stamp()))
        return self.timed[-1]

    def take_seconds(self) -> float:
        """Return the stream's seconds in timed waits since the step began or since the last call.

        The stream must have passed these waits, as after a step whose result the host has read.
        """
        timed = self.timed
        self.timed = []
        return sum(first.elapsed_time(last) for first, last in timed) / 1e3  # from milliseconds

    def not_passed(self) -> Operation | None:
        """Return the first operation for which the stream still waits, or None.

        Called by the watchdog's thread when the rank makes no progress. The queries ask the driver,
        which may wait for a lock that another thread holds. After an error of the device every
        query raises that error again: then return None, because the main thread reports the error.
        """
        waits = list(self._last)
        with suppress(RuntimeError):
            return next((operation for operation, passed in waits if not passed.query()), None)
        return None

    def not_come_to(self) -> list[Operation]:
        """Return the operations that the host has started and the stream has not come to, in order.

        Called as `not_passed` is. One stream computes, so that behind the first such operation all
        later ones are such operations too.
        """
        started = list(self._started)
        with suppress(RuntimeError):
            for index, (_, event) in enumerate(started):
                if not event.query():
                    return [operation for operation, _ in started[index:]]
        return []


class FlightRecorder:
    """The records of one rank: its last operations and actions, and its current action.

    new_event: over NCCL a function that makes a CUDA event: a wait makes the stream wait, not the
    host. Over gloo it is None: the host waits. coordinates: this rank's position on each axis of
    the mesh, which the mesh sets. progress: a number that grows with every record; a rank whose
    progress does not grow may hang.
    """

    def __init__(self, new_event: Callable[[], Any] | None = None):
        """Begin at the action start; a rank makes one recorder. new_event: see the class."""
        # The last records: operations, and actions with the times at which they began.
        self.ring: deque[Operation | tuple[Place, float]] = deque(maxlen=RING)
        self.group_logs: dict[tuple[str, tuple[int, ...]], GroupLog] = {}  # by (role, ranks)
        self.coordinates: dict[str, int] = {}  # this rank's position on each axis of the mesh
        self.place: Place = ("start", 0, "start", None)  # the current action
        self.since = time.monotonic()  # when the current action (`place`) began
        self.progress = 0  # grows with each action, operation and end of a wait
        self.waiting: Operation | None = None  # the operation in which the host waits now
        self.waited = 0.0  # the host's seconds in waits since `take_waited`
        self.background: dict[str, Any] | None = None  # the checkpoint thread's action
        # The progress of the thread that writes checkpoints. Two threads must not add to the same
        # number, so this thread has a number of its own.
        self.background_progress = 0
        self.other_wait: dict[str, Any] | None = None  # a wait that is not an Operation
        self.step_began = self.since  # when the newest training step began
        self.steps: deque[float] = deque(maxlen=STEPS)  # seconds of the last steps
        self.steps_done = 0  # since this process began; the first steps may take longer
        # The spans since `keep_spans`, else None: (action, micro-batch, start, end). The span of a
        # wait has the action "wait" and the operation in place of the micro-batch.
        self.spans: list[tuple] | None = None
        self.stamp: Callable[[], Any] | None = None  # returns a span's time; None: monotonic clock
        self._mark: Any = None  # when the current action began, as the time of a span
        # The seconds spent in each phase. Between two steps the phase is `log`.
        self.spent: dict[str, float] = defaultdict(float)
        self.stream = StreamWaits(new_event) if new_event else None  # None over gloo
        # The progress in the last snapshot that showed new progress, and the time of that snapshot.
        self._seen = -1, 0.0

    def group_log(self, role: str, ranks: tuple[int, ...]) -> GroupLog:
        """Return the log of a group; groups with the same role and ranks share one log."""
        return self.group_logs.setdefault((role, ranks), GroupLog(self, role, ranks))

    # -- what the rank does now -------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Record that a training step begins; the trainer calls this before the step's first pass.

        Until the schedule names an action (`at`), the action is "begin".
        """
        # The seconds in waits between the steps do not count as waits of this step.
        self.waited = 0.0
        if self.stream:
            self.stream.timed = []
        self._move(("train", step, "begin", None))
        self.step_began = self.since

    def end_step(self) -> None:
        """Record that a training step has ended; its duration counts towards the median."""
        self.steps.append(time.monotonic() - self.step_began)
        self.steps_done += 1
        self.enter("log")  # the phase between two steps

    def enter(self, phase: str) -> None:
        """Record that a phase other than a training step begins: evaluate, save, load, end, ..."""
        self._move((phase, self.place[1], phase, None))  # place[1]: the step, which stays the same

    def at(self, action: str, micro_batch: int | None = None) -> None:
        """Record that the next action begins: data, F, B, reduce, optimizer, ...

        The phase and the step stay the same.
        """
        self._move((self.place[0], self.place[1], action, micro_batch))

    def _move(self, place: Place) -> None:
        """End the current action and begin the action `place`; `begin_step` and others call this.

        place: (phase, step, action, micro-batch). The seconds of the action that ends count towards
        its phase.
        """
        now = time.monotonic()
        self.spent[self.place[0]] += now - self.since
        if self.spans is not None:  # spans are kept (`keep_spans`): add the action that ends
            mark = self.stamp() if self.stamp else now
            self.spans.append((*self.place[2:], self._mark, mark))
            self._mark = mark
        self.place = place
        self.since = now
        self.ring.append((place, now))
        self.progress += 1

    def keep_spans(self, stamp: Callable[[], Any] | None = None) -> None:
        """Keep spans (action, micro-batch, start, end) from now on, until `spans` is None again.

        stamp: returns the time of a span's start or end; None: seconds of time.monotonic(). Over
        NCCL it records a CUDA event on the stream and returns the event; the span of a wait then
        has the two events between which the stream waited.
        """
        self.spans = []
        self.stamp = stamp
        self._mark = stamp() if stamp else time.monotonic()

    @contextmanager
    def waiting_for(self, kind: str, ranks: Sequence[int] = ()) -> Iterator[None]:
        """Record a wait that is not an Operation, as long as the block of `with` runs.

        kind: store (a value of `ranks` in the store), device (the GPU's work), writer (the thread
        that writes a checkpoint), or room (on the disk). An exception does not clear the record, so
        that the report shows in which wait the rank failed.
        """
        self.other_wait = _wait(kind, ranks)
        yield
        self.other_wait = None
        self.progress += 1

    def background_at(self, kind: str | None, ranks: Sequence[int] = ()) -> None:
        """Record the next action of the thread that writes a checkpoint; called by that thread.

        kind: the action in words; None: the thread has ended its work. ranks: the ranks for which
        the thread waits in this action.
        """
        self.background = _wait(kind, ranks) if kind else None
        self.background_progress += 1

    # -- time in waits ----------------------------------------------------------------------

    def take_waited(self) -> float:
        """Return the seconds in waits since the step began or since the last call.

        Over gloo these are waits of the host. Over NCCL they are waits of the device's stream,
        which are timed only while spans with a `stamp` are kept; otherwise return NaN. Called when
        the device has done the step, so that the stream has passed every wait.
        """
        if self.stream is None:
            waited = self.waited
            self.waited = 0.0
            return waited
        return self.stream.take_seconds() if self.stamp else math.nan

    # -- for the watchdog's thread ----------------------------------------------------------

    def snapshot(self, records: int) -> dict[str, Any]:
        """Return the rank's current action, its wait and last `records` records, as plain values.

        The watchdog's thread calls this for each heartbeat, and once more with all records when the
        monitor asks what this rank does.
        """
        now = time.monotonic()
        progress = self.progress + self.background_progress
        if progress != self._seen[0]:
            self._seen = progress, now
        is_still = now - self._seen[1] >= SECONDS_TO_ASK  # no new progress for these seconds
        # The operation for which the GPU's stream waits, the operation for which the host waits,
        # and the host's wait that is no operation; each is None if there is no such wait.
        device = None
        ahead: list[Operation] = []  # the operations that the host has started and the GPU not
        if is_still and self.stream:
            device = self.stream.not_passed()
            ahead = self.stream.not_come_to()
        waiting = self.waiting
        other = self.other_wait
        if waiting is None and (other is None or other["kind"] == "device"):
            # The host is not in a wait, or waits for the GPU. It may be blocked in any action after
            # the operation that the stream has not passed, because its launch queue is full. So the
            # rank really waits in that operation, `device`.
            waiting = device
        if waiting in ahead:  # the GPU stands before the operation, and the rank in none
            waiting = None
        return {
            **dict(zip(("phase", "step", "action", "micro_batch"), self.place)),
            "since": _seconds_before(now, self.since),
            "progress": progress,
            "steps_done": self.steps_done,
            "median_step": statistics.median(self.steps) if self.steps else 0.0,
            "wait": waiting.to_dict(now) if waiting else _wait_to_dict(other, now),
            "device": device.to_dict(now) if device else None,
            "before": ahead[0].to_dict(now) if ahead else None,
            "background": _wait_to_dict(self.background, now),
            "counts": _counts(list(self.group_logs.values()), ahead),
            "last": [_record_to_dict(r, now) for r in list(self.ring)[-records:]],
        }

    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return role and ranks of every group, in the order of "counts" in a snapshot.

        A heartbeat sends the groups only if there are new groups, the counts each time.
        """
        return list(self.group_logs)


def _counts(
    group_logs: list[GroupLog], ahead: list[Operation]
) -> list[tuple[int, dict[int, int], dict[int, int]]]:
    """Return for each group (collectives, messages sent, received by peer) that the rank entered.

    ahead: the operations that the host has started and the GPU has not come to: not entered yet.
    """
    entered = {id(log): log.entered for log in group_logs}
    sent = {id(log): dict(log.sent) for log in group_logs}
    received = {id(log): dict(log.received) for log in group_logs}
    for operation in reversed(ahead):  # so that the first of each kind counts in the end
        log = id(operation.group_log)
        if operation.peer is None:
            entered[log] = operation.number - 1
        elif operation.kind == "send":
            sent[log][operation.peer] = operation.number - 1
        else:
            received[log][operation.peer] = operation.number - 1
    return [(entered[log], sent[log], received[log]) for log in entered]


def describe_place(snapshot: dict[str, Any]) -> str:
    """Return the current action of a snapshot as text: `step 7, F of micro-batch 3`."""
    action = snapshot["action"]
    phase = snapshot["phase"]
    batch = snapshot["micro_batch"]
    parts = []
    if snapshot["step"]:
        parts.append(f"step {snapshot['step']}")
    if phase not in ("train", action):  # the phase is told only where the action does not tell it
        parts.append(phase)
    parts.append(action if batch is None else f"{action} of micro-batch {batch}")
    return ", ".join(parts)


def _seconds_before(now: float, moment: float | None) -> float | None:
    """Return the seconds from a moment until now, to the millisecond; None if there is no moment.

    Both are times of time.monotonic().
    """
    return None if moment is None else round(now - moment, 3)


def _wait(kind: str, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the record of a wait that begins now and is not an Operation, as for the store."""
    return {"kind": kind, "ranks": list(ranks), "began": time.monotonic()}


def _wait_to_dict(wait: dict[str, Any] | None, now: float) -> dict[str, Any] | None:
    """Return a wait that `_wait` recorded, for a snapshot; None if there is no wait.

    The seconds that it has lasted until `now` stand in place of the time of its begin.
    """
    if wait is None:
        return None
    return {"kind": wait["kind"], "ranks": wait["ranks"], "seconds": round(now - wait["began"], 3)}


def _record_to_dict(record: Operation | tuple[Place, float], now: float) -> dict[str, Any]:
    """Return an operation, or an action and the time of its beginning, as plain values."""
    if isinstance(record, Operation):
        return record.to_dict(now)
    place, moment = record
    return {"place": place, "seconds": _seconds_before(now, moment)}
