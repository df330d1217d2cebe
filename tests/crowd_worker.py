"""A monitor and hundreds of ranks that only send heartbeats, all of them in this process.

    python tests/crowd_worker.py FOLDER RANKS      prints one JSON object

To load the monitor as a large job does, connections are enough that send what heartbeat.Watchdog
sends, in a layout of tp 4, pp 8 and as many replicas as there are. After a while one rank stays in
the data loader and all others in a collective of the world that it has not entered. The result has
the cores that the monitor used before that, the rank that it named, and the seconds from the hang
to the order to end (--hang-timeout is 3 s here).
"""

import json
import os
import resource
import selectors
import sys
import time
from pathlib import Path

from config.schema import Layout, coordinates
from watchdog.flight_recorder import RING, FlightRecorder, Operation
from watchdog.handshake import Address, Process, connect
from watchdog.heartbeat import BEAT_RECORDS, MemoryReader, encode, start_monitor, start_time

TP, PP = 4, 8
LIMIT = 3.0  # --hang-timeout
MEASURED_SECONDS, MAX_SECONDS = 5.0, 90.0
FRAMES = ["/home/user/trine/train.py:100 in step: loss = pipeline.train(batches)"] * 20


class Work:
    """A handle of an operation that has ended."""

    def wait(self) -> None:
        """Return at once."""


class Rank:
    """One rank: its records and its two connections."""

    def __init__(self, rank: int, size: int, address: Address):
        self.rank, self.recorder, self.received = rank, FlightRecorder(), b""
        stage = size // PP  # ranks of a stage
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
        process = Process(rank, f"n{1 + rank // 8}", os.getpid(), start_time(os.getpid()))
        self.stacks = connect(address, "stacks", process)
        self.messages = connect(address, "rank", process)
        groups = {"groups": self.recorder.groups(), "coordinates": self.recorder.coordinates}
        self.messages.sendall(encode(groups))

    def operation(self, role: str) -> Operation:
        """The next collective of one of its groups, started."""
        return self.group_logs[role].enter("all_reduce", 4096).under_way(Work())

    def beat(self, memory: dict[str, int]) -> None:
        """Do the same as Watchdog._beat."""
        snapshot = self.recorder.snapshot(BEAT_RECORDS)
        message = {"beat": snapshot, "memory": memory, "sent": time.monotonic()}
        self.messages.sendall(encode(message))

    def listen(self) -> list[dict]:
        """The monitor's messages."""
        *lines, self.received = (self.received + self.messages.recv(1 << 16)).split(b"\n")
        return [json.loads(one) for one in lines]

    def send_status(self, memory: dict[str, int]) -> None:
        """Do the same as Watchdog._send_status."""
        status = {"snapshot": self.recorder.snapshot(RING), "stacks": {"main": FRAMES}}
        self.messages.sendall(encode({"status": status | {"memory": memory, "processes": {}}}))

    def close(self) -> None:
        """Close the connection, as a process that ends does."""
        self.messages.close()
        self.stacks.close()


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


class Crowd:
    """All ranks and their monitor."""

    def __init__(self, size: int, out: Path):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        address, self.monitor = start_monitor("127.0.0.1", "n0", size, str(out), LIMIT, "key")
        self.ranks = [Rank(rank, size, address) for rank in range(size)]
        self.memory, self.selector = MemoryReader().read(), selectors.DefaultSelector()
        for rank in self.ranks:
            self.selector.register(rank.messages, selectors.EVENT_READ, rank)

    def run(self, seconds: float, moving: bool) -> bool:
        """Send heartbeats and answers for so long; True as soon as the monitor says to end."""
        until, due = time.monotonic() + seconds, 0.0
        while time.monotonic() < until:
            if time.monotonic() >= due:
                due = time.monotonic() + 1.0
                for rank in self.ranks:
                    rank.recorder.progress += moving
                    rank.beat(self.memory)
            for key, _ in self.selector.select(0.05):
                for message in key.data.listen():
                    if "inspect" in message:
                        key.data.send_status(self.memory)
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
    crowd.run(2.0, moving=True)
    before, began = processor_seconds(crowd.monitor.pid), time.monotonic()
    crowd.run(MEASURED_SECONDS, moving=True)
    cores = (processor_seconds(crowd.monitor.pid) - before) / (time.monotonic() - began)
    crowd.hang(culprit)
    began = time.monotonic()
    ended = crowd.run(MAX_SECONDS, moving=False)
    seconds = time.monotonic() - began
    for rank in crowd.ranks:
        rank.close()
    status, path = crowd.monitor.wait(60), out / "hang/case.json"
    case = json.loads(path.read_text()) if path.exists() else {}
    result = {"ranks": size, "cores": round(cores, 3), "status": status}
    result |= {"ended": ended, "culprit": culprit, "named": case.get("culprits")}
    result |= {"seconds": round(seconds, 1), "files": len(list(out.glob("hang/rank_*.json")))}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
