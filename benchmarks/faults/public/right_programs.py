"""Draws small models of Megatron Core and of torchtitan, and asks check.py: none may be accused.

    python benchmarks/faults/public/right_programs.py --keep RESULTS.jsonl [--minutes 60]
        [--runs 10] [--program megatron_core | torchtitan]

Each run is one call of an adapter of examples/check with drawn options, in all of its layouts. For
torchtitan its packages must be on PYTHONPATH. A layout that differs is a finding about the program
or about the checker; the row has the whole verdict.
"""

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT)]  # the project's own modules

from base.cli import Parser
from benchmarks.results_file import add_options, from_options

# By adapter, names of its file and the values that are drawn.
DRAWN: dict[str, dict[str, list[str]]] = {
    "megatron_core": {
        "experts": ["0", "0", "4", "8"],
        "tied": ["True", "False"],
        "gated": ["True", "False"],
        "groups": ["2", "4"],
        "options": ["{}", "{'qk_layernorm': True}", "{'add_bias_linear': False}"],
    },
    "torchtitan": {
        "MODEL": ["llama3", "qwen3"],
        "DIM": ["32", "48", "64"],
        "LAYERS": ["4", "5"],
        "VOCABULARY": ["48", "64"],
        "LENGTH": ["8", "16"],
        "EXPERTS": ["4", "8"],
        "EXPERTS_PER_TOKEN": ["1", "2"],
    },
}
LIMIT = 3600.0  # seconds of a call


def drawn(program: str, number: int) -> dict[str, str]:
    """Return the drawn values of a run by name."""
    chance = random.Random(f"{program}/{number}")
    return {name: chance.choice(values) for name, values in DRAWN[program].items()}


def asked(case: tuple[str, int]) -> list[dict[str, Any]]:
    """Call check.py once, and return a row with the numbers of its layouts."""
    program, number = case
    given = [word for item in drawn(program, number).items() for word in ("--set", "=".join(item))]
    call = ["check.py", "--program", f"examples/check/{program}.py", *given, "--all"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *call],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    words = [line.split(" ")[0] for line in done.stdout.splitlines()]
    row = {"program": program, "number": number, "call": call, "status": done.returncode}
    row |= {"equal": words.count("equal"), "seconds": time.monotonic() - began}
    row |= {"not": sum(words.count(x) for x in ("DIFFERS", "REFUSED", "ERROR", "HANGS"))}
    print(row["status"], f"{row['seconds']:.0f} s", row["equal"], row["not"], " ".join(given))
    return [row | {"text": done.stdout[-6000:] + done.stderr[-1500:]}]


def main() -> None:
    """Ask about the runs that are missing in the file of results, and print the sums."""
    parser = Parser("right_programs.py", description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--runs", type=int, default=10, help="of each program")
    parser.add_argument("--program", default="", choices=["", *DRAWN])
    given = parser.parse_args()
    keep = from_options(given)
    known = {(row["program"], row["number"]) for row in keep.rows()}
    cases = [(p, n) for n in range(given.runs) for p in DRAWN if given.program in ("", p)]
    keep.run(asked, [case for case in cases if case not in known])
    for program in DRAWN:
        rows = [row for row in keep.rows() if row["program"] == program]
        layouts, accused = (sum(row[name] for row in rows) for name in ("equal", "not"))
        print(f"{program}: {len(rows)} models, {layouts} layouts equal, {accused} not")


if __name__ == "__main__":
    main()
