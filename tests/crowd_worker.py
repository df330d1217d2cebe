"""A monitor and a crowd: hundreds of ranks that only beat, all spoken for by this one process.

    python tests/crowd_worker.py FOLDER RANKS      prints one JSON object

What the monitor does for a large job does not need one: its ranks are connections that send what
watchdog.Watchdog sends, in a layout of tp 4, pp 8 and as many replicas as there are. They beat for
a while; then one of them stays in the data loader, all others in a collective of the world that it
has not entered. Told are the cores that the monitor took while all went well, whom it named, and
how long after the hang the ranks were told to end (--hang-timeout is 3 s here).
"""

import json
import os
import resource
import selectors
import socket
import sys
import time
from pathlib import Path

from config.schema import Layout, coordinates
from watchdog.flight_recorder import RING, FlightRecorder, Operation
from watchdog.heartbeat import RECORDS_IN_A_BEAT, Memory, start_monitor, start_of

TP, PP = 4, 8
LIMIT = 3.0  # --hang-timeout
SECONDS_WELL, SECONDS_AT_MOST = 5.0, 90.0
FRAMES = ["/home/user/trine/train.py:100 in step: loss = pipeline.train(batches)"] * 20


class Work:
    """A handle."""

    def wait(self) -> None:
        """At once."""


class Rank:
    """One of the crowd: its records and its two connections."""

    def __init__(self, rank: int, size: int, address: tuple[str, int, str]):
        host, port, token = address
        self.rank, self.recorder, self.received = rank, FlightRecorder(), b""
        stage = size // PP  # ranks of one
        axes = Layout(tp=TP, pp=PP, dp=stage // TP).axes
        tp, pp, dp = (coordinates(rank, axes)[axis] for axis in ("tp", "pp", "dp"))
        pipeline = tuple(range(rank % stage, size, stage))
        roles = {"tp": tuple(range(rank - tp, rank - tp + TP)), "world": tuple(range(size))}
        roles["dp"] = tuple(range(pp * stage + tp, (pp + 1) * stage, TP))
        roles |= {"forward": pipeline, "backward": pipeline}
        self.group_logs = {
            role: self.recorder.group_log(role, ranks) for role, ranks in roles.items()
        }
        self.recorder.coordinates = {"tp": tp, "pp": pp, "dp": dp}
        self.recorder.steps_done, self.recorder.place = 100, ("train", 100, "data", 0)
        for _ in range(RING):
            self.operation("tp").wait()
        self.operation("world").wait()
        process = {
            "pid": os.getpid(),
            "started": start_of(os.getpid()),
            "node": f"n{1 + rank // 8}",
        }
        self.stacks = socket.create_connection((host, port))
        self.stacks.sendall(line({"stacks": rank, "token": token}))
        self.talk = socket.create_connection((host, port))
        self.talk.sendall(line({"hello": rank, "token": token, **process}))
        told = {"groups": self.recorder.groups(), "coordinates": self.recorder.coordinates}
        self.talk.sendall(line(told))

    def operation(self, role: str) -> Operation:
        """The next collective of one of its groups, under way."""
        return self.group_logs[role].enter("all_reduce", 4096).under_way(Work())

    def beat(self, used: dict[str, int]) -> None:
        """As Watchdog._beat."""
        snapshot = self.recorder.snapshot(RECORDS_IN_A_BEAT)
        self.talk.sendall(line({"beat": snapshot, "memory": used, "sent": time.monotonic()}))

    def listen(self) -> list[dict]:
        """What the monitor has said."""
        *lines, self.received = (self.received + self.talk.recv(1 << 16)).split(b"\n")
        return [json.loads(one) for one in lines]

    def look(self, used: dict[str, int]) -> None:
        """As Watchdog._tell_all."""
        status = {"snapshot": self.recorder.snapshot(RING), "stacks": {"main": FRAMES}}
        self.talk.sendall(line({"status": status | {"memory": used, "processes": {}}}))

    def close(self) -> None:
        """As a process that ends."""
        self.talk.close()
        self.stacks.close()


def line(message: dict) -> bytes:
    return json.dumps(message).encode() + b"\n"


def processor_seconds(pid: int) -> float:
    """What a process has taken so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


class Crowd:
    """All ranks, and the time they live in."""

    def __init__(self, size: int, out: Path):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        address, self.monitor = start_monitor("127.0.0.1", "n0", size, str(out), LIMIT)
        self.ranks = [Rank(rank, size, address) for rank in range(size)]
        self.used, self.selector = Memory().read(), selectors.DefaultSelector()
        for rank in self.ranks:
            self.selector.register(rank.talk, selectors.EVENT_READ, rank)

    def live(self, seconds: float, moving: bool) -> bool:
        """Beat and answer until told to end (then True), or for so long."""
        until, due = time.monotonic() + seconds, 0.0
        while time.monotonic() < until:
            if time.monotonic() >= due:
                due = time.monotonic() + 1.0
                for rank in self.ranks:
                    rank.recorder.progress += moving
                    rank.beat(self.used)
            for key, _ in self.selector.select(0.05):
                for message in key.data.listen():
                    if "look" in message:
                        key.data.look(self.used)
                    if "end" in message:
                        return True
        return False

    def hang(self, culprit: int) -> None:
        """All but one enter a collective of the world and wait in it."""
        for rank in self.ranks:
            if rank.rank != culprit:
                operation = rank.operation("world")
                operation.waited_since = time.monotonic()
                rank.recorder.waiting = operation


def main() -> None:
    out, size = Path(sys.argv[1]), int(sys.argv[2])
    crowd, culprit = Crowd(size, out), size // 3
    crowd.live(2.0, moving=True)
    taken, began = processor_seconds(crowd.monitor.pid), time.monotonic()
    crowd.live(SECONDS_WELL, moving=True)
    seconds_well = time.monotonic() - began
    taken = processor_seconds(crowd.monitor.pid) - taken
    crowd.hang(culprit)
    began = time.monotonic()
    ended = crowd.live(SECONDS_AT_MOST, moving=False)
    seconds = time.monotonic() - began
    for rank in crowd.ranks:
        rank.close()
    status, case = crowd.monitor.wait(60), out / "hang/case.json"
    told = json.loads(case.read_text()) if case.exists() else {}
    result = {"ranks": size, "cores": round(taken / seconds_well, 3), "status": status}
    result |= {"ended": ended, "culprit": culprit, "named": told.get("culprits")}
    result |= {"seconds": round(seconds, 1), "files": len(list(out.glob("hang/rank_*.json")))}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
