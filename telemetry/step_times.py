"""Measures the passes and waits of some steps on every rank: OUT/times.jsonl for `plan.py gap`.

Eight of the first steps are measured, then one step in ten or more. A row of the file covers the
time from the end of the step before to the end of the measured step: the passes and waits of every
rank, and rank 0's seconds by phase since the row before. On a GPU, CUDA events on the stream give
the times; they are read when the step has ended. Then the rows of the ranks are gathered through
the store; the next step is not measured, so no row has this time. Read watchdog/flight_recorder.py
first: its spans (kind, subject, start, end) are the measurements. A span is an action of the rank,
such as ("F", 3, ...) for the forward pass of micro-batch 3, or a wait inside of an action, such as
("wait", "receive 7 of forward from 0", ...). A row has for each rank, in microseconds from the
row's start:

    passes   a list per pass: start (with its data loading), end, duration of data loading, end of
             the last receive from another stage (0: none), then the waits in the order of WAITS
    around   a list per phase (log: between steps; begin, reduce, optimizer, statistics): duration
             without waits, then the waits
    apart    duration of evaluations and saves before the step
    total    end of the last span that is not a wait
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from distributed.store import StoreExchange
from telemetry.log import Log
from telemetry.observer import Observer, Step
from telemetry.row_file import RowFile
from zero import StepResult

PASSES = {*"FBW"}  # kinds of spans that are passes of a schedule
FIRST_STEPS = range(4, 20, 2)  # these steps are measured whatever the interval is
LEAST_INTERVAL = 10  # steps from a measured step to the next measured step, at least
# The interval, in steps, is at least the number of all ranks' passes in a step over this number, so
# that gathering the rows takes less than 1 % of a run.
PASSES_PER_STEP = 500
WAITS = ("p2p", "tp", "cp", "dp", "tied", "world")  # kinds of waits, in the order of a row
# The kind of wait by the role of the group that is waited for; groups with other roles send between
# pipeline stages and count as "p2p".
ROLE_WAITS = {"tp": "tp", "cp": "cp", "dp": "dp", "replicas": "dp", "tied": "tied"}
ROLE_WAITS |= {"heads": "cp", "kv": "cp", "kv copies": "tp", "key copies": "tp", "world": "world"}


class StepTimes(Observer):
    """Writes times.jsonl."""

    def __init__(self, exchange: StoreExchange, log: Log):
        """Prepare to measure; exchange: passes values between all ranks through the store.

        On GPUs with gloo (ranks that share a GPU) nothing is measured, because the host's times
        would not be the device's.
        """
        self.exchange = exchange
        self.log = log
        run = log.config.run
        self.recorder = log.context.recorder
        self.on_gpu = log.context.device.type == "cuda"
        self.measures = not self.on_gpu or log.context.backend != "gloo"
        self.interval = max(run.log_every or 1, LEAST_INTERVAL)  # steps between measured steps
        self.file = RowFile(os.path.join(run.out, "times.jsonl"), log.note)
        self.steps = 0  # the number of steps since the last row
        self.began = 0.0  # time.monotonic() when the measured step began
        # When the last row was written: the seconds that each phase had taken, time.monotonic().
        self.spent = dict(self.recorder.spent)
        self.since = time.monotonic()

    def after_step(self, step: Step, result: StepResult) -> None:
        """Write the step's row if it was measured; start measuring if the next step is due."""
        iteration = step.iteration
        self.steps += 1
        recorder = self.recorder
        if recorder.spans is not None:  # the recorder has kept the spans of this step
            self._write(iteration)
        due = iteration + 1 in FIRST_STEPS or (iteration + 1) % self.interval == 0
        if self.measures and due:  # the recorder keeps the spans of the next step, with their marks
            self.began = time.monotonic()
            make_mark = self._event if self.on_gpu else None
            recorder.keep_spans(make_mark)

    def _event(self) -> torch.cuda.Event:
        """Return a CUDA event that is recorded on the current stream, to mark a time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _write(self, step: int) -> None:
        """Gather the ranks' parts of the row of a measured step; write the row on rank 0."""
        recorder = self.recorder
        context = self.log.context
        spans = recorder.spans or []
        recorder.spans = None  # the recorder keeps no more spans
        recorder.stamp = None  # the recorder makes no more CUDA events
        own = rank_row(spans, self._seconds_of(spans))
        # `began` plus `offset` is a time on a clock that is common to all ranks, up to `error`.
        offset, error = context.clock()
        own |= {"node": context.node, "began": self.began, "offset": offset, "error": error}
        self.exchange.tell("times", own)  # rank 0 collects the parts of all ranks below
        # All ranks must measure the same steps, so the interval must be equal on all ranks. It is,
        # since each rank has the same number of passes.
        passes = len(own["passes"]) * context.size
        self.interval = max(self.interval, passes // PASSES_PER_STEP)
        if not self.log.is_writer:
            return
        ranks = self.exchange.collect("times")
        now = time.monotonic()
        spent = recorder.spent  # rank 0's seconds by phase since the run began
        row: dict[str, Any] = {"iteration": step, "steps": self.steps, "elapsed": now - self.since}
        spent_before = self.spent
        row["spent"] = {name: spent[name] - spent_before.get(name, 0.0) for name in spent}
        self.file.write(row | {"waits": WAITS, "ranks": ranks})
        self.steps = 0
        self.spent = dict(spent)
        self.since = now

    def _seconds_of(self, spans: list[tuple]) -> Callable[[Any], float]:
        """Return a function that turns a mark into seconds since the measured step began.

        A mark is the start or the end of a span (kind, subject, start, end): a time.monotonic() on
        a CPU, and a CUDA event on a GPU.
        """
        if not self.on_gpu:
            return lambda mark: mark - self.began
        _, _, first_start, _ = spans[0]
        _, _, _, last_end = spans[-1]
        last_end.synchronize()  # an event has its time only when the stream has passed it
        return lambda mark: first_start.elapsed_time(mark) / 1e3


def rank_row(spans: list[tuple], seconds_of: Callable[[Any], float]) -> dict[str, Any]:
    """Return a rank's part of a row: passes, around, apart and total (see the file's docstring).

    spans: (kind, subject, start, end), in order; seconds_of: turns a start or end into seconds.
    """
    passes: list[list[int]] = []
    around: dict[str, list[int]] = {}
    apart = 0
    total = 0
    # The waits, the data loading and the last receive since the last phase or pass. They happened
    # inside of the next phase or pass of the list, since a span is added when it ends.
    waits: Counter[str] = Counter()
    data_start = 0
    data_duration = 0
    received = 0
    # True until the loop has come to the span "begin", with which the measured step begins.
    before_step = any(kind == "begin" for kind, *_ in spans)
    for kind, subject, start_mark, end_mark in spans:
        start = round(1e6 * seconds_of(start_mark))
        end = round(1e6 * seconds_of(end_mark))
        if kind == "wait":  # its subject is, for example, "receive 7 of forward from 0"
            operation = subject.split(" ")[0]
            role = subject.split(" of ")[1].split(" ")[0]
            name = ROLE_WAITS.get(role, "p2p")
            waits[name] += end - start
            if operation == "receive" and name == "p2p":
                received = end
            continue
        total = end
        waited = [waits[name] for name in WAITS]
        is_apart = before_step and kind not in ("begin", "log")
        before_step = before_step and kind != "begin"
        if is_apart:  # an evaluation or a save
            apart += end - start
        elif kind == "data":  # data loading counts, with its waits, as a part of the next pass
            data_start = start
            data_duration = end - start
            continue
        elif kind in PASSES:
            pass_start = data_start if data_duration else start
            passes.append([pass_start, end, data_duration, received, *waited])
        else:  # a phase, which may have several spans: they are added
            numbers = [end - start - sum(waited), *waited]
            sums = around.get(kind, [0] * len(numbers))
            around[kind] = [earlier + number for earlier, number in zip(sums, numbers)]
        waits = Counter()
        data_start = 0
        data_duration = 0
        received = 0
    return {"passes": passes, "around": around, "apart": apart, "total": total}
