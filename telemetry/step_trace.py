"""One training step drawn: a Chrome trace in which the pipeline schedule can be seen.

    python train.py ... --profile-step 20      writes OUT/step_20.trace.json
    chrome://tracing or ui.perfetto.dev        opens it

Every rank is a process row, named by stage and place, with two tracks: what it does (F0 is the
forward of micro-batch 0, B0 its backward) and what it waits in. Spans come from records.py. Clocks
of one node are one clock; between nodes they are aligned by the watchdog's beats, to half of the
shortest round trip, or, without a watchdog, as well as the nodes' own clocks agree.
"""

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from config.schema import Run

if TYPE_CHECKING:
    from distributed.context import Context
    from distributed.store import StoreExchange
    from parallel import ParamFactory

# Names of colours that the viewers know.
COLOURS = {"F": "thread_state_running", "B": "rail_animation", "data": "thread_state_iowait"}


class StepTrace:
    """Draws the step that --profile-step names; every rank has one and calls the same methods."""

    def __init__(
        self,
        run: Run,
        build: "ParamFactory",
        exchange: "StoreExchange",
        context: "Context",
        say: Callable,
    ):
        self.step, self.build = run.profile_step, build
        self.exchange, self.context = exchange, context
        self.path, self.say = os.path.join(run.out, f"step_{self.step}.trace.json"), say

    def before(self, step: int) -> None:
        """Keep spans from here on, if it is the step. On a GPU each action then ends with its
        stream's work, so that spans are the device's; messages on other streams go on.
        """
        if step != self.step:
            return
        recorder, device = self.build.mesh.recorder, self.build.device
        if device.type == "cuda":
            recorder.settle = torch.cuda.current_stream(device).synchronize
        recorder.spans = []

    def after(self, step: int) -> None:
        """If it is the step, every rank's spans into one file, by rank 0."""
        if step != self.step:
            return
        recorder = self.build.mesh.recorder
        recorder.at("draw")
        spans, recorder.spans, recorder.settle = recorder.spans, None, None
        offset, error = self.context.clock()
        own = {"node": self.context.node, "offset": offset, "error": error, "spans": spans}
        self.exchange.tell("trace", own | {"coordinates": recorder.coordinates})
        if self.build.mesh.rank == 0:
            with open(self.path, "w") as file:
                json.dump(merge(self.exchange.collect("trace")), file)
        self.say(f"step {step} is drawn in {self.path}")


def merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The trace of all ranks, in rank order: offsets turn each one's clock into a common one."""
    offsets = {}
    for rank in sorted(ranks, key=lambda rank: -rank["error"]):
        offsets[rank["node"]] = rank["offset"]  # the best known one of a node stays
    starts = [s[2] + offsets[rank["node"]] for rank in ranks for s in rank["spans"]]
    zero = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for number, rank in enumerate(ranks):
        place = rank["coordinates"]
        axes = f"stage {place['pp']}, tp {place['tp']}, dp {place['dp']}"
        events.append(_name("process_name", number, 0, f"rank {number}: {axes} on {rank['node']}"))
        events += [
            _name("thread_name", number, 0, "does"),
            _name("thread_name", number, 1, "waits"),
        ]
        for span in rank["spans"]:
            events.append(_event(span, number, place["pp"], offsets[rank["node"]] - zero))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(span: list, pid: int, stage: int, offset: float) -> dict[str, Any]:
    """A span (action, micro-batch, from, to) or ("wait", operation, from, to); times in us."""
    kind, what, began, ended = span
    waits = kind == "wait"
    event = {
        "ph": "X",
        "pid": pid,
        "tid": int(waits),
        "name": what if waits else kind if what is None else f"{kind}{what}",
        "cat": "wait" if waits else "action",
        "ts": round((began + offset) * 1e6, 3),
        "dur": round((ended - began) * 1e6, 3),
        "args": {"stage": stage} if waits else {"stage": stage, "micro_batch": what},
    }
    return event | ({"cname": COLOURS[kind]} if kind in COLOURS else {})
