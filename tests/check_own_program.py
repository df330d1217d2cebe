"""Check tests/own_program.py with faults, and print for each what JSON has of the verdict.

python tests/check_own_program.py FAULT...     one process, which has imported torch once
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.checker.program_engine import ProgramEngine
from tools.checker.programs import read_program
from tools.checker.report import findings, outcome_data

FILE = Path(__file__).with_name("own_program.py")

if __name__ == "__main__":
    for fault in sys.argv[1:]:
        program = read_program(FILE, {"fault": fault})
        with (
            tempfile.TemporaryDirectory() as folder,
            ProgramEngine(program, program.layouts[1:], seconds=600.0) as engine,
        ):
            engine.begin()
            outcomes = [*engine.run(), *engine.resume(Path(folder))]
        found = [finding.data for finding in findings(engine.reference, outcomes)]
        data = {"fault": fault, "outcomes": list(map(outcome_data, outcomes)), "found": found}
        print(json.dumps(data), flush=True)
