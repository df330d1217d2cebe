"""One training step as a Chrome trace, which shows the pipeline schedule as it ran.

    python train.py ... --profile-step 20      writes OUT/step_20.trace.json
    chrome://tracing or ui.perfetto.dev        opens it

Every rank is a process of the trace with two threads: its actions (F forward, B backward) and its
waits (all_reduce tp), from watchdog/flight_recorder.py. A viewer aggregates slices by these names;
the number of the micro-batch, or of the group's operation, is an argument of the slice. Ranks of a
node share a clock; clocks of nodes are aligned by the watchdog's heartbeats, to half of the
shortest round trip; without a watchdog, the nodes' wall clocks are used.

--torch-profile N writes what torch.profiler sees of a step, operators and CUDA kernels, for the
first rank of every pipeline stage: OUT/torch_step_N_rank_R.json, for the same viewers.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from distributed.store import StoreExchange
from schedules.simulation import trace, trace_event, trace_label
from telemetry.log import Log

ACTIONS, WAITS = 0, 1  # the threads of a rank
# Names of colours in the viewers.
COLOURS = {"F": "thread_state_running", "B": "rail_animation", "data": "thread_state_iowait"}


class StepTrace:
    """Writes the trace of step --profile-step; every rank calls the same methods."""

    def __init__(self, exchange: StoreExchange, log: Log, finish_sending: Callable[[], None]):
        """exchange: between all ranks, through the store; finish_sending: waits for the messages
        that this rank still sends.
        """
        self.exchange = exchange
        self.log = log
        run = log.config.run
        self.finish_sending = finish_sending
        self.device = log.context.device
        self.recorder = log.context.recorder
        self.step = run.profile_step
        self.path = os.path.join(run.out, f"step_{self.step}.trace.json")
        self.profiled_step = run.torch_profile
        rank = log.context.rank
        name = f"torch_step_{self.profiled_step}_rank_{rank}.json"
        self.profile_path = os.path.join(run.out, name)
        self.profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Keep spans from now on, if `step` is traced. On a GPU each action then waits for its
        stream, so that spans are the device's; messages on other streams are not waited for.
        """
        at = self.recorder.coordinates
        if step == self.profiled_step and at["tp"] == at["dp"] == at.get("cp", 0) == 0:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if step != self.step:
            return
        if self.device.type == "cuda":
            self.recorder.settle = torch.cuda.current_stream(self.device).synchronize
        self.recorder.keep_spans()

    def after(self, step: int) -> None:
        """If `step` is traced, rank 0 writes every rank's spans to one file; if it is profiled,
        the ranks that are write one each.
        """
        if self.profiler:
            # torch ends the record of a message as it is waited for; once the profiler has stopped,
            # that record is freed memory.
            self.finish_sending()
            self.profiler.stop()
            with self.log.without(self.profile_path):
                open(self.profile_path, "w").close()  # export_chrome_trace says not why it cannot
                self.profiler.export_chrome_trace(self.profile_path)
            self.profiler = None
            self.log.note(f"torch.profiler's trace of step {step}: {self.profile_path}")
        if step != self.step:
            return
        recorder = self.recorder
        recorder.at("trace")
        context = self.log.context
        offset, error = context.clock()
        own = {"node": context.node, "offset": offset, "error": error, "spans": recorder.spans}
        recorder.spans = recorder.settle = None
        self.exchange.tell("trace", own | {"coordinates": recorder.coordinates})
        if self.log.is_writer:
            merged = merge(self.exchange.collect("trace"))
            with self.log.without(self.path), open(self.path, "w") as file:
                json.dump(merged, file)
        self.log.note(f"trace of step {step}: {self.path}")


def merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The trace of all ranks, given in rank order; adding `offset` aligns a rank's clock.

    All ranks of a node take the offset with the smallest error. Times begin at the first span.
    """
    by_error = sorted(ranks, key=lambda rank: -rank["error"])
    offsets = {rank["node"]: rank["offset"] for rank in by_error}
    starts = [span[2] + offsets[rank["node"]] for rank in ranks for span in rank["spans"]]
    first = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for number, rank in enumerate(ranks):
        at = rank["coordinates"]
        coordinates = f"stage {at['pp']}, tp {at['tp']}, dp {at['dp']}"
        name = f"rank {number}: {coordinates} on {rank['node']}"
        events.append(trace_label("process_name", number, 0, name))
        events.append(trace_label("thread_name", number, ACTIONS, "actions"))
        events.append(trace_label("thread_name", number, WAITS, "waits"))
        offset = offsets[rank["node"]] - first
        events += [_event(span, number, at["pp"], offset) for span in rank["spans"]]
    return trace(events)


def _event(span: list, rank: int, stage: int, offset: float) -> dict[str, Any]:
    """A span (action, micro-batch, start, end) in seconds; of a wait the second one is the
    operation, as "all_reduce 12 of tp".
    """
    kind, subject, start, end = span
    start += offset
    end += offset
    if kind == "wait":
        head, _, group = subject.partition(" of ")
        operation, number = head.rsplit(" ", 1)
        name = f"{operation} {group}"
        args = {"stage": stage, "number": int(number)}
        return trace_event(name, rank, WAITS, start, end, cat="wait", args=args)
    args = {"stage": stage, "micro_batch": subject}
    colour = {"cname": COLOURS[kind]} if kind in COLOURS else {}
    return trace_event(kind, rank, ACTIONS, start, end, cat="action", args=args, **colour)
