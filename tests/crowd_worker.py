"""A monitor and hundreds of ranks that only send heartbeats, all of them in this process.

    python tests/crowd_worker.py FOLDER RANKS      prints one JSON object

All ranks but one wait in a collective of the world that this one has not entered. Connections are
enough that send what heartbeat.Watchdog sends. The result has the rank that the monitor named and
the seconds from the hang to the order to end (--hang-timeout is 3 s here).
"""

import json
import os
import resource
import selectors
import sys
import time
from pathlib import Path

from handmade_records import Ranks

from watchdog.flight_recorder import RING
from watchdog.handshake import Process, connect
from watchdog.heartbeat import BEAT_RECORDS, MemoryReader, encode, start_monitor, start_time

LIMIT = 3.0  # --hang-timeout
MAX_SECONDS = 90.0
FRAMES = ["/home/user/trine/train.py:100 in step: loss = pipeline.train(batches)"] * 20


def is_told_to_end(recorders: dict, memory: dict[str, int]) -> bool:
    """Send heartbeats and answers; True as soon as the monitor says to end.

    recorders: each rank's connection for messages, and its recorder.
    """
    selector, until, due = selectors.DefaultSelector(), time.monotonic() + MAX_SECONDS, 0.0
    for messages, recorder in recorders.items():
        selector.register(messages, selectors.EVENT_READ, recorder)
    while time.monotonic() < until:
        if time.monotonic() >= due:
            due = time.monotonic() + 1.0
            for messages, recorder in recorders.items():
                beat = {"beat": recorder.snapshot(BEAT_RECORDS), "memory": memory}
                messages.sendall(encode(beat | {"sent": time.monotonic()}))
        for key, _ in selector.select(0.05):
            received = key.fileobj.recv(1 << 16)
            if b'"inspect"' in received:
                status = {"snapshot": key.data.snapshot(RING), "stacks": {"main": FRAMES}}
                status |= {"memory": memory, "processes": {}}
                key.fileobj.sendall(encode({"status": status}))
            if b'"end"' in received:
                return True
    return False


def main() -> None:
    out, size = Path(sys.argv[1]), int(sys.argv[2])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    address, monitor = start_monitor("127.0.0.1", "n0", size, str(out), LIMIT, "key")
    ranks, culprit, began = Ranks(size), size // 3, time.monotonic()
    world = tuple(range(size))
    ranks.collective("world", world, [rank for rank in world if rank != culprit])
    recorders: dict = {}
    stacks = []
    for rank, recorder in enumerate(ranks.recorders):
        recorder.steps_done, recorder.coordinates = 100, {"dp": rank}
        process = Process(rank, f"n{1 + rank // 8}", os.getpid(), start_time(os.getpid()))
        stacks.append(connect(address, "stacks", process))
        messages = connect(address, "rank", process)
        groups = {"groups": recorder.groups(), "coordinates": recorder.coordinates}
        messages.sendall(encode(groups))
        recorders[messages] = recorder
    ended = is_told_to_end(recorders, MemoryReader().read())
    seconds = time.monotonic() - began
    for connection in [*recorders, *stacks]:
        connection.close()
    status, path = monitor.wait(60), out / "hang/case.json"
    case = json.loads(path.read_text()) if path.exists() else {}
    result = {"ranks": size, "status": status, "ended": ended, "culprit": culprit}
    result |= {"named": case.get("culprits"), "seconds": round(seconds, 1)}
    print(json.dumps(result | {"files": len(list(out.glob("hang/rank_*.json")))}))


if __name__ == "__main__":
    main()
