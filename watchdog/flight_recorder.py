"""What a rank does and did last: the records from which a hang is explained and a step is drawn.

    recorder = Recorder()                            one per rank; cluster.start makes it
    recorder.begin_step(7)
    recorder.at("F", 3)                              now: the forward of micro-batch 3
    book = recorder.book("tp", (4, 5))               one per group, kept by collectives.Group
    operation = book.enter("all_reduce", 4096)       before the call, for the call itself may hang
    operation.under_way(handle).wait()

Operations of a group are numbered on each rank, so ranks can be compared: who never entered the
one that the others wait in? Only the thread that trains writes here; the watchdog's thread reads.
There are no locks: a record is an object put into a ring, and a number that is one off for a
microsecond harms nobody. benchmarks/watchdog.py has what it costs.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

RING = 256  # records kept
STEPS = 101  # durations of steps kept, for their median
DEVICE_WAITS = 4096  # waits on a GPU's stream kept until they are timed


class Operation:
    """One collective or message: entered, perhaps waited for, done. It is its own handle.

    `number` counts the group's collectives, or the messages to or from that one `peer`, from 1.
    """

    __slots__ = (
        "bytes",
        "ended",
        "entered",
        "group_log",
        "handle",
        "kind",
        "number",
        "peer",
        "place",
        "waited_since",
    )

    def __init__(
        self, group_log: "GroupLog", kind: str, number: int, size: int, peer: int | None = None
    ):
        self.group_log, self.kind, self.number, self.bytes, self.peer = (
            group_log,
            kind,
            number,
            size,
            peer,
        )
        recorder = group_log.recorder
        self.place = recorder.place
        self.entered, self.waited_since, self.ended = time.monotonic(), None, None
        self.handle = None
        recorder.ring.append(self)
        recorder.progress += 1

    def under_way(self, handle) -> "Operation":
        """Take the handle of what was started; returns itself."""
        self.handle = handle
        return self

    def wait(self) -> None:
        """Wait for the handle, on record; a second call has nothing to wait for."""
        if self.handle is None:
            return
        recorder = self.group_log.recorder
        began = self.waited_since = time.monotonic()
        recorder.waiting = self
        if recorder.new_event is None:
            self.handle.wait()
        else:
            recorder.wait_on_stream(self)
        self.handle = None
        self.ended = now = time.monotonic()
        recorder.waiting = None
        recorder.waited += now - began
        recorder.progress += 1
        if recorder.spans is not None:
            recorder.spans.append(("wait", self.name(), began, now))

    def name(self) -> str:
        """`all_reduce 12 of tp`, or `receive 3 of forward from 1`, by position in the group."""
        side = (
            "" if self.peer is None else f" {'to' if self.kind == 'send' else 'from'} {self.peer}"
        )
        return f"{self.kind} {self.number} of {self.group_log.role}{side}"

    def told(self, now: float) -> dict[str, Any]:
        """The record as plain values; times as seconds before `now`."""
        return {
            "kind": self.kind,
            "role": self.group_log.role,
            "ranks": self.group_log.ranks,
            "number": self.number,
            "bytes": self.bytes,
            "peer": None if self.peer is None else self.group_log.ranks[self.peer],
            "place": self.place,
            "seconds": _before(self.entered, now),
            "waiting": _before(self.waited_since, now),
            "ended": _before(self.ended, now),
        }


def _before(moment: float | None, now: float) -> float | None:
    return None if moment is None else round(now - moment, 3)


class GroupLog:
    """The operations of one group as this rank has entered them, counted."""

    def __init__(self, recorder: "FlightRecorder", role: str, ranks: tuple[int, ...]):
        self.recorder, self.role, self.ranks = recorder, role, ranks
        self.entered = 0
        self.sent: dict[int, int] = {}  # by position in the group
        self.received: dict[int, int] = {}

    def enter(self, kind: str, size: int) -> Operation:
        """A collective of `size` bytes on this rank is about to start."""
        self.entered += 1
        return Operation(self, kind, self.entered, size)

    def enter_send(self, size: int, to: int) -> Operation:
        """A message to the group's rank `to` is about to leave."""
        number = self.sent[to] = self.sent.get(to, 0) + 1
        return Operation(self, "send", number, size, to)

    def enter_receive(self, size: int, source: int) -> Operation:
        """A message from the group's rank `source` is about to be asked for."""
        number = self.received[source] = self.received.get(source, 0) + 1
        return Operation(self, "receive", number, size, source)


class FlightRecorder:
    """The records of one rank, and where it stands now.

    `new_event` makes a timing CUDA event where waits are those of a stream (nccl), else None.
    """

    def __init__(self, new_event: Callable[[], Any] | None = None):
        self.ring: deque = deque(maxlen=RING)
        self.group_logs: list[GroupLog] = []
        self.coordinates: dict[str, int] = {}  # of this rank in the mesh: tp, pp, dp
        self.place = ("start", 0, "start", None)  # phase, step, action, micro-batch
        self.since = time.monotonic()
        self.progress = 0  # grows with every record; standing still is what a hang looks like
        self.waiting: Operation | None = None
        self.waited = 0.0  # seconds in waits since `take_waited`
        self.aside: dict[str, Any] | None = None  # what the checkpoint's thread does
        self.aside_progress = 0
        self.joined: dict[str, Any] | None = None  # a wait that is no operation
        self.steps: deque = deque(maxlen=STEPS)
        self.steps_done = 0
        self.spans: list[tuple] | None = None  # while a step is drawn (steptrace.py)
        self.settle: Callable[[], None] | None = None  # then: wait for the device's stream
        self.new_event, self._events, self._on_stream = new_event, [], deque(maxlen=DEVICE_WAITS)

    def group_log(self, role: str, ranks: tuple[int, ...]) -> GroupLog:
        """The book of a group; groups of the same ranks and role share one."""
        for group_log in self.group_logs:
            if (group_log.role, group_log.ranks) == (role, ranks):
                return group_log
        self.group_logs.append(GroupLog(self, role, ranks))
        return self.group_logs[-1]

    # -- where it stands --------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """A training step begins."""
        self.take_waited()  # what was waited between steps belongs to none
        self._move(("train", step, "begin", None))
        self._step_began = self.since

    def end_step(self) -> None:
        """A training step has ended; its duration counts towards the median."""
        self.steps.append(time.monotonic() - self._step_began)
        self.steps_done += 1

    def enter(self, phase: str) -> None:
        """What is not a training step begins: evaluate, save, load, end."""
        self._move((phase, self.place[1], phase, None))

    def at(self, action: str, micro_batch: int | None = None) -> None:
        """The next action of the phase begins: data, F, B, reduce, optimizer, ..."""
        self._move((self.place[0], self.place[1], action, micro_batch))

    def _move(self, place: tuple) -> None:
        if self.settle is not None:
            self.settle()
        now = time.monotonic()
        if self.spans is not None:
            self.spans.append((*self.place[2:], self.since, now))
        self.place, self.since = place, now
        self.ring.append((place, now))
        self.progress += 1

    @contextmanager
    def waiting_for(self, what: str, ranks: Sequence[int] = ()):
        """A wait that is no operation of a group: `store` (for `ranks`), `device` or `writer`.

        An exception leaves it standing: that is where the rank failed.
        """
        self.joined = {"kind": what, "ranks": list(ranks), "began": time.monotonic()}
        yield
        self.joined = None
        self.progress += 1

    def aside_at(self, what: str | None, ranks: Sequence[int] = ()) -> None:
        """The checkpoint's thread goes on: it writes, waits for `ranks`, or has ended (None)."""
        self.aside = what and {"kind": what, "ranks": list(ranks), "began": time.monotonic()}
        self.aside_progress += 1

    # -- time in waits ----------------------------------------------------------------------

    def take_waited(self) -> float:
        """Seconds spent in waits since the last call; on nccl, seconds that the stream spent.

        Of a stream's waits those count that have passed: call it after the step's last `values`.
        """
        waited, self.waited = self.waited, 0.0
        if self.new_event is None:
            return waited
        waited = 0.0
        while self._on_stream and self._on_stream[0][2].query():
            _, first, last = self._on_stream.popleft()
            waited += first.elapsed_time(last) / 1e3
            self._events += [first, last]
        return waited

    def wait_on_stream(self, operation: Operation) -> None:
        """The handle's wait between two events: the host goes on, the stream waits.

        Until the second has passed, the device has not: that is how a hang is seen from here.
        """
        first, last = (self._events.pop() if self._events else self.new_event() for _ in range(2))
        first.record()
        operation.handle.wait()
        last.record()
        self._on_stream.append((operation, first, last))

    def device_waits_for(self) -> Operation | None:
        """The first operation that the device's stream has not passed yet."""
        for operation, _, last in list(self._on_stream):
            if not last.query():
                return operation
        return None

    # -- what is told -----------------------------------------------------------------------

    def snapshot(self, records: int) -> dict[str, Any]:
        """Where the rank stands and its last records, as plain values; for the other thread."""
        now = time.monotonic()
        phase, step, action, micro_batch = self.place
        waiting = self.waiting
        device = self.device_waits_for()
        joined, aside = self.joined, self.aside
        if waiting is None and (joined is None or joined["kind"] == "device"):
            waiting = device  # the host may stand anywhere behind it: its queue is full, say
        return {
            "phase": phase,
            "step": step,
            "action": action,
            "micro_batch": micro_batch,
            "since": _before(self.since, now),
            "progress": self.progress + self.aside_progress,
            "steps_done": self.steps_done,
            "median_step": statistics.median(self.steps) if self.steps else 0.0,
            "wait": waiting.told(now) if waiting else _told(joined, now),
            "device": device.told(now) if device else None,
            "aside": _told(aside, now),
            "counts": [(b.entered, b.sent, b.received) for b in list(self.group_logs)],
            "last": [_told_record(r, now) for r in list(self.ring)[-records:]],
        }

    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Role and ranks of every group, in the order of the snapshot's counts."""
        return [(group_log.role, group_log.ranks) for group_log in list(self.group_logs)]


def _told(wait: dict[str, Any] | None, now: float) -> dict[str, Any] | None:
    if not wait:
        return None
    return {"kind": wait["kind"], "ranks": wait["ranks"], "seconds": _before(wait["began"], now)}


def _told_record(record, now: float) -> dict[str, Any]:
    if isinstance(record, Operation):
        return record.told(now)
    place, moment = record
    return {"place": place, "seconds": _before(moment, now)}
