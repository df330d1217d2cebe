"""Ranks whose flight records are set by hand, and the answers that a monitor would have of them."""

import json
from functools import partial

from watchdog import hang_report
from watchdog.flight_recorder import FlightRecorder, Operation
from watchdog.hang_report import JobFailure, WaitGraph, find_culprits


class DeviceEvent:
    """A CUDA event on the stream of a device that has done the first `done` of its events."""

    def __init__(self, device: dict[str, int]):
        self.device = device

    def record(self) -> None:
        self.device["recorded"] += 1
        self.place = self.device["recorded"]

    def query(self) -> bool:
        return self.place <= self.device["done"]


class Ranks:
    """Ranks of a tp 2 x pp 2 x dp 2 mesh whose records are set by hand.

    event: the class of their devices' events, over NCCL; None over gloo.
    """

    def __init__(self, size=8, event: type[DeviceEvent] | None = None):
        self.devices = [{"recorded": 0, "done": 0} for _ in range(size)]
        makers = [partial(event, device) if event else None for device in self.devices]
        self.recorders = [FlightRecorder(maker) for maker in makers]
        self.states = dict.fromkeys(range(size), "answered")
        self.still = dict.fromkeys(range(size), 100.0)

    def wait(self, rank: int, operation: Operation) -> None:
        self.recorders[rank].waiting = operation

    def passes(self, rank: int, events: int) -> None:
        """A rank's device has done the first `events` of its events."""
        self.devices[rank]["done"] = events

    def collective(self, role, ranks, waiting, kind="all_reduce"):
        """All of `ranks` have done one; those of `waiting` wait in the second."""
        for rank in ranks:
            self.recorders[rank].group_log(role, ranks).enter(kind, 4)
        for rank in waiting:
            self.wait(rank, self.recorders[rank].group_log(role, ranks).enter(kind, 4))

    def to_dict(self) -> hang_report.Ranks:
        ranks = {}
        for number, recorder in enumerate(self.recorders):
            ranks[number] = {
                "rank": number,
                "node": "n1",
                "pid": 1,
                "coordinates": {},
                "state": self.states[number],
                "process": None,
                "error": None,
                "heard": 1.0,
                "still": self.still[number],
                "memory": None,
                "groups": recorder.groups(),
                "snapshot": recorder.snapshot(9),
                "stacks": {},
                "raw": "",
            }
        # By JSON keys inside a rank become text, which they are in messages too.
        return {int(rank): values for rank, values in json.loads(json.dumps(ranks)).items()}

    def culprits(self, **case) -> list[int]:
        return find_culprits(hang(**case), WaitGraph(self.to_dict()))


def hang(**case) -> JobFailure:
    """A case of eight ranks."""
    return JobFailure("hang", **{"size": 8, "limit": 60.0, "still": 0, "time": "now"} | case)
