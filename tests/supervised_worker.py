"""train.py with planned faults, for supervise.py: `python THIS PLAN.json ARGUMENTS...`.

PLAN: a fault for each start of the ranks, or null: {"fault", "rank", "step"}. How many starts there
were is the number of lines in OUT/supervisor.jsonl. With "always", a fault of every later start.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from base import errors

with errors.installed():
    import trainer
    from config import validation
    from config.command_line import parse
    from distributed.launch import discover
    from distributed.stop_conditions import Signals


def end_launcher() -> None:
    """Kill the process that supervise.py has started, and wait for the end."""
    lines = [(process, process.parent()) for process in psutil.Process().parents()]
    found = [process for process, above in lines if above and "supervise.py" in above.cmdline()]
    found[0].kill()
    time.sleep(3600)


def stop() -> None:
    time.sleep(1.5)  # until a heartbeat has reported that the first steps are done
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ValueError("planned")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    "kill": kill,
    "stop": stop,
    "hang": lambda: time.sleep(3600),
    "raise": fail,
    "launcher": end_launcher,
}


def planned(path: str, out: str) -> dict | None:
    """The fault of this start, if there is one."""
    plan, journal = json.loads(Path(path).read_text()), Path(out, "supervisor.jsonl")
    starts = len(journal.read_text().splitlines()) if journal.exists() else 0
    if isinstance(plan, dict):  # always
        return plan
    return plan[starts] if starts < len(plan) else None


def main() -> None:
    signals, launch = Signals(), discover()
    config = validation.check(parse(sys.argv[2:]), launch.size)
    fault, step = planned(sys.argv[1], config.run.out), trainer.step

    def faulty(state, samples, consumed, lr):
        done = consumed // config.training.global_batch_size
        if fault and launch.rank == fault["rank"] and done + 1 == fault["step"]:
            time.sleep(0.5)  # until the writer has written the row of the step before
            Path(config.run.out, "fault").write_text(str(time.time()))
            if fault["fault"] == "nan":
                for stage in state.stages:
                    next(stage.parameters()).data.fill_(float("nan"))
            else:
                FAULTS[fault["fault"]]()
        return step(state, samples, consumed, lr)

    trainer.step = faulty
    trainer.main(config, launch, signals)


if __name__ == "__main__":
    main()
