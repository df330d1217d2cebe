"""Rehearses configurations in one process and leaves the rehearsals for a test to judge.

    python tests/rehearsal_worker.py FILE.json OUT.pickle

FILE: {name: [world, "words of the command line"]}. OUT: {name: Rehearsal}.
"""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from config.command_line import parse
from config.validation import check_any_length
from emulator import device_guard
from planner import hardware
from schedules.choice import decide

device_guard.load()
from emulator import rehearsal

if __name__ == "__main__":
    words = json.loads(Path(sys.argv[1]).read_text())
    machine, cases = hardware.load("a100-80"), []
    for world, line in words.values():
        config = check_any_length(parse(line.split()), world)
        layout = config.layout.automatic(config.model.seq_length, on_gpu=True)
        config, _ = decide(replace(config, layout=layout), "cuda")
        cases.append(rehearsal.Case(config, world, -(-world // machine.node), machine.device))
    found = dict(zip(words, rehearsal.rehearse(cases)))
    Path(sys.argv[2]).write_bytes(pickle.dumps(found))
