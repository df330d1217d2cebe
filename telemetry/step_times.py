"""Measures the passes and waits of some steps on every rank: OUT/times.jsonl for `plan.py gap`.

Eight of the first steps are measured, then one step in ten or more. A row of the file covers the
time from the end of the step before to the end of the measured step: the passes and waits of every
rank, and rank 0's seconds by phase since the row before. On a GPU, CUDA events on the stream give
the times; they are read when the step has ended. Then the rows of the ranks are gathered through
the store; the next step is not measured, so no row has this time. Read watchdog/flight_recorder.py
first: its spans (kind, subject, start, end) are the measurements.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from distributed.store import StoreExchange
from schedules.schedule import STEPS
from telemetry.log import Log
from telemetry.row_file import RowFile

FIRST_STEPS = range(4, 20, 2)  # these steps are measured whatever the interval is
# Steps from one measured step to the next, at least; and passes of all ranks per step of the
# interval, so that gathering rows takes less than 1 % of a run.
LEAST_INTERVAL, PASSES_PER_STEP = 10, 500
WAITS = ("p2p", "tp", "cp", "dp", "tied", "world")  # kinds of waits, in the order of a row
# The kind of wait by the role of the group that is waited for; groups with other roles send between
# pipeline stages and count as "p2p".
ROLE_WAITS = {"tp": "tp", "cp": "cp", "dp": "dp", "replicas": "dp", "tied": "tied"}
ROLE_WAITS |= {"heads": "cp", "kv": "cp", "world": "world"}


class StepTimes:
    """Writes times.jsonl; every rank calls `after` at the end of every step."""

    def __init__(self, exchange: StoreExchange, log: Log):
        """exchange: passes values between all ranks through the store.

        On GPUs with gloo (ranks that share a GPU) nothing is measured, because the host's times
        would not be the device's.
        """
        self.exchange = exchange
        self.log = log
        run = log.config.run
        self.recorder = log.context.recorder
        self.on_gpu = log.context.device.type == "cuda"
        self.measures = not self.on_gpu or log.context.backend != "gloo"
        self.interval = max(run.log_every or 1, LEAST_INTERVAL)
        self.file = RowFile(os.path.join(run.out, "times.jsonl"), log.note)
        # Steps since the last row, and the time.monotonic() at which the measured step began.
        self.steps, self.began = 0, 0.0
        self.spent = dict(self.recorder.spent)
        self.since = time.monotonic()

    def after(self, step: int) -> None:
        """Write the row of `step` if it was measured; start measuring if the next step is due.

        Called after every step.
        """
        self.steps += 1
        recorder = self.recorder
        if recorder.spans is not None:
            self._write(step)
        due = step + 1 in FIRST_STEPS or (step + 1) % self.interval == 0
        if self.measures and due:
            self.began = time.monotonic()
            recorder.keep_spans(self._event if self.on_gpu else None)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _write(self, step: int) -> None:
        recorder = self.recorder
        context = self.log.context
        spans = recorder.spans or []
        recorder.spans = None
        recorder.stamp = None
        own = rank_row(spans, self._seconds_of(spans))
        offset, error = context.clock()
        own |= {"node": context.node, "began": self.began, "offset": offset, "error": error}
        self.exchange.tell("times", own)
        # All ranks must measure the same steps, so the interval must be equal on all ranks. It is,
        # since each rank has the same number of passes.
        passes = len(own["passes"]) * context.size
        self.interval = max(self.interval, passes // PASSES_PER_STEP)
        if not self.log.is_writer:
            return
        ranks = self.exchange.collect("times")
        now = time.monotonic()
        spent = recorder.spent
        row: dict[str, Any] = {"iteration": step, "steps": self.steps, "elapsed": now - self.since}
        row["spent"] = {phase: s - self.spent.get(phase, 0.0) for phase, s in spent.items()}
        self.file.write(row | {"waits": WAITS, "ranks": ranks})
        self.steps = 0
        self.spent = dict(spent)
        self.since = now

    def _seconds_of(self, spans: list[tuple]) -> Callable[[Any], float]:
        """Return the function from a mark of a span to seconds since the measured step began.

        A mark is a time.monotonic() on a CPU and a CUDA event on a GPU.
        """
        if not self.on_gpu:
            return lambda mark: mark - self.began
        spans[-1][3].synchronize()
        return lambda mark: spans[0][2].elapsed_time(mark) / 1e3


def rank_row(spans: list[tuple], seconds_of: Callable[[Any], float]) -> dict[str, Any]:
    """Return a rank's part of a row, in microseconds; times count from the start of the row.

    passes: a list per pass, in order: start (with its data loading), end, duration of data loading,
    end of the last receive from another stage (0: none), then the waits in the order of WAITS.
    around: for the phases `log` (between steps), `begin`, `reduce`, `optimizer` and `statistics`:
    duration without waits, then the waits. apart: duration of evaluations and saves before the
    step. total: the end of the last span that is not a wait.
    """
    passes: list[list[int]] = []
    around: dict[str, list[int]] = {}
    waits: Counter[str] = Counter()
    first = data = ready = apart = total = 0
    between = any(span[0] == "begin" for span in spans)
    for kind, subject, since, until in spans:
        start, end = (round(1e6 * seconds_of(mark)) for mark in (since, until))
        if kind == "wait":
            operation = subject.split(" ", 1)[0]
            role = subject.split(" of ")[1].split(" ")[0]
            name = ROLE_WAITS.get(role, "p2p")
            waits[name] += end - start
            ready = end if (operation, name) == ("receive", "p2p") else ready
            continue
        total = end
        waited = [waits[name] for name in WAITS]
        apart_from_step = between and kind not in ("begin", "log")
        between = between and kind != "begin"
        if apart_from_step:
            apart += end - start
        elif kind == "data":
            first = start
            data = end - start
            continue
        elif kind in STEPS:
            passes.append([first if data else start, end, data, ready, *waited])
        else:
            own = [end - start - sum(waited), *waited]
            around[kind] = [a + b for a, b in zip(around.get(kind, [0] * len(own)), own)]
        waits = Counter()
        first = 0
        data = 0
        ready = 0
    return {"passes": passes, "around": around, "apart": apart, "total": total}
