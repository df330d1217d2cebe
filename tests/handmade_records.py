"""Ranks whose flight records are set by hand, and the answers that a monitor would have of them."""

import json

from watchdog import hang_report
from watchdog.flight_recorder import FlightRecorder, Operation
from watchdog.hang_report import Case, WaitGraph, find_culprits


class Ranks:
    """Ranks of a tp 2 x pp 2 x dp 2 mesh whose records are set by hand."""

    def __init__(self, size=8):
        self.recorders = [FlightRecorder() for _ in range(size)]
        self.states = dict.fromkeys(range(size), "answered")
        self.still = dict.fromkeys(range(size), 100.0)

    def wait(self, rank: int, operation: Operation) -> None:
        self.recorders[rank].waiting = operation

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
        return json.loads(json.dumps(ranks), object_hook=with_numbers)

    def culprits(self, **case) -> list[int]:
        return find_culprits(hang(**case), WaitGraph(self.to_dict()))


def hang(**case) -> Case:
    """A case of eight ranks."""
    return Case("hang", 8, **{"limit": 60.0, "still": 0, "time": "now"} | case)


def with_numbers(values: dict) -> dict:
    """Ranks as numbers, which JSON has as text; keys inside a rank stay text, as in messages."""
    return {int(k): v for k, v in values.items()} if "0" in values and "7" in values else values
