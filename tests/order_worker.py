"""train.py that writes what its loop does in which order: `python THIS FOLDER ARGUMENTS...`.

FOLDER/order_RANK.json has a list of events: "pinning", where the buffers of saves are allocated,
"begin" and "end" of the loop, each garbage collection as the phase and step in which it ran, and
whether the collector runs by itself again at the end.
"""

import gc
import json
import sys
from pathlib import Path

import trainer
from checkpointing.save import Checkpointer
from config import validation
from config.command_line import parse
from distributed.launch import discover
from distributed.stop_conditions import Signals


def main() -> None:
    signals, launch = Signals(), discover()
    events, begin_pinning, run = [], Checkpointer.begin_pinning, trainer.Trainer.run
    loops: list[trainer.Trainer] = []

    def pin(checkpoints: Checkpointer) -> None:
        events.append("pinning")
        begin_pinning(checkpoints)

    def watched(loop: trainer.Trainer) -> bool:
        loops.append(loop)
        events.append("begin")
        result = run(loop)
        events.append("end")
        loops.clear()
        return result

    def collected(phase: str, about: dict) -> None:
        if phase == "start" and loops:
            events.append(loops[0].recorder.place[:2])

    Checkpointer.begin_pinning, trainer.Trainer.run = pin, watched
    gc.callbacks.append(collected)
    gc.set_threshold(50, 2, 2)  # by itself it would run many times in each step
    trainer.main(validation.check(parse(sys.argv[2:]), launch.size), launch, signals)
    gc.callbacks.remove(collected)
    events.append("automatic again" if gc.isenabled() else "switched off")
    Path(sys.argv[1], f"order_{launch.rank}.json").write_text(json.dumps(events))


if __name__ == "__main__":
    main()
