"""Prints, as JSON, what the host of one rank does in a step of a rehearsal, for each line of words.

    python tests/host_worker.py WORLD RANK "WORDS" ["WORDS" ...]

late: the lines where a collective is started on NCCL's stream although its wait stands in the same
line. stops: by line, how often the host waits for the device or for a copy in the second step.
"""

import copy
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from config.command_line import parse
from config.validation import check_any_length
from tools.emulator import device_guard

device_guard.load()
from tools.emulator import rehearsal
from tools.emulator.recording import COPY, MESSAGES, READ, RecordingContext, RecordingGroup


def watch_groups() -> set[int]:
    """Have each group note in the result which events of its trace `group.at_once` started."""
    at_once: set[int] = set()
    make_group = RecordingContext.group

    def group(context: RecordingContext, rows: list, role: str):
        made = make_group(context, rows, role)
        if isinstance(made, RecordingGroup):
            record = made._record
            made.at_once = copy.copy(made)

            def noted(*arguments, **keywords):
                at_once.add(len(made.trace.events))
                return record(*arguments, **keywords)

            made.at_once._record = noted
        return made

    RecordingContext.group = group
    return at_once


def run(words: str, world: int, rank: int, at_once: set[int]) -> dict:
    """Rehearse one rank."""
    at_once.clear()
    config = check_any_length(parse(words.split()), world)
    layout = config.layout.automatic(config.model.seq_length, on_gpu=True)
    config = rehearsal.shortened(replace(config, layout=layout))
    record = rehearsal.run_rank(config, rank, world, 1, "NVIDIA H100 80GB HBM3")
    late = set()
    for event in record.events:
        if event.kind == "wait" and event.number not in at_once:
            started = record.events[event.number]
            in_a_phase = not started.place.startswith("start")
            if in_a_phase and started.kind not in MESSAGES and started.line == event.line:
                late.add(f"{started.kind} of {started.role} at {event.line}")
    stops: dict[str, int] = {}
    by_line = Counter()
    for event in record.events:
        if event.place.startswith(f"step {rehearsal.STEPS},") and event.kind in (READ, COPY):
            by_line[event.op, event.line] += 1
    for (what, line), count in by_line.items():
        stops[f"{what} at {line.partition(':')[0]}"] = count
    return {"late": sorted(late), "noted": len(at_once), "stops": stops}


if __name__ == "__main__":
    world, rank, *lines = sys.argv[1:]
    noted = watch_groups()
    print(json.dumps([run(words, int(world), int(rank), noted) for words in lines]))
