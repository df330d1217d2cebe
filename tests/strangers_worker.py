"""A rank of a run that waits for strangers: `mpirun -n 2 python THIS OUT WORDS` (of train.py).

At three places a rank waits until OUT/PLACE.go is there, after it has written OUT/PLACE.waits: the
last rank before it connects to the store, and to the monitor; rank 0 in its third step. OUT/open.go
is there from the start: rank 0 only says that its store is open.
"""

import sys
import time
from pathlib import Path

import trainer
import zero
from config import validation
from config.command_line import parse
from distributed import rendezvous
from distributed import store as job_store
from distributed.launch import discover
from watchdog import heartbeat

OUT = Path(sys.argv[1])


def wait_before(module, name: str, place: str, call: int = 1) -> None:
    """Make a function wait, in one of its calls, for the file of that place."""
    original, calls = getattr(module, name), []

    def waits(*arguments, **keywords):
        calls.append(name)
        if len(calls) == call:
            OUT.mkdir(parents=True, exist_ok=True)
            (OUT / f"{place}.waits").touch()
            while not (OUT / f"{place}.go").exists():
                time.sleep(0.02)
        return original(*arguments, **keywords)

    setattr(module, name, waits)


def main() -> None:
    launch = discover()
    if launch.rank == launch.size - 1:
        wait_before(rendezvous, "open_store", "store")
        wait_before(heartbeat, "connect", "monitor")
    if launch.rank == 0:
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "open.go").touch()
        wait_before(job_store, "meet", "open")
        wait_before(zero.Optimizer, "step", "step", call=3)
    trainer.main(validation.check(parse(sys.argv[2:]), launch.size), launch)


if __name__ == "__main__":
    main()
