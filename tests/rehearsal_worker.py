"""Rehearses configurations in one process and leaves the rehearsals for a test to judge.

    python tests/rehearsal_worker.py FILE.json OUT.pickle [both ways]

FILE: {name: [world, "words of the command line"]}. OUT: {name: Rehearsal}. both ways: a stage takes
activations and gradients ahead, all but those of the first micro-batch.
"""

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from config.command_line import parse
from config.validation import check_any_length
from costs import hardware
from costs.auto_schedule import decide
from schedules.schedule import Schedule
from tools.emulator import device_guard

device_guard.load()
from tools.emulator import rehearsal

# One process runs all ranks: torch keeps what it has found out about an operation on fake tensors,
# and a second process would find out all of it again.
MOST = 1

if __name__ == "__main__":
    if sys.argv[3:] == ["both ways"]:
        Schedule.may_be_ahead = lambda schedule, action: action.micro_batch > 0
    words = json.loads(Path(sys.argv[1]).read_text())
    machine, found = hardware.load("a100-80"), {}
    with rehearsal.processes(MOST, machine.device) as pool:
        for name, (world, line) in words.items():
            config = check_any_length(parse(line.split()), world)
            layout = config.layout.automatic(config.model.seq_length, on_gpu=True)
            config, _ = decide(replace(config, layout=layout), "cuda")
            case = rehearsal.RehearsalCase(config, world, -(-world // machine.node), machine.device)
            found[name] = rehearsal.rehearse(case, pool)
    Path(sys.argv[2]).write_bytes(pickle.dumps(found))
