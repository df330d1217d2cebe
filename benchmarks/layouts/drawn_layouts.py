"""What the programs that compare random layouts with one rank share: a draw, and names of parts."""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import golden_worker

from base.errors import UserError
from config import validation


def draw_case(
    ranks: int,
    seed: int | str,
    choices: Mapping[str, Sequence[Any]],
    complete: Callable[[dict, int], dict],
) -> dict:
    """Draw values until train.py takes the layout on that many ranks, and return its case.

    choices: what each option may be; tp, pp, cp, schedule and micro_batch_size are among them.
    complete: from the values and dp to the case, in the words of tests/golden_worker.py.
    """
    generator = random.Random(seed)
    while True:
        values = {name: generator.choice(options) for name, options in choices.items()}
        if values["pp"] == 1:
            values["schedule"] = "1f1b"
        dp = max(1, ranks // (values["tp"] * values["pp"] * values["cp"]))
        case = complete(values, dp)
        try:
            validation.check(golden_worker.options(case), ranks)
        except UserError:
            continue
        return case


def starts(layouts: Mapping[int, int], at_once: Mapping[int, int] | int) -> list[str]:
    """Return a name for each start of ranks: their number and the first layout's, such as `4/20`.

    layouts: how many there are by the number of ranks. at_once: how many of them share a start.
    """
    found = []
    for ranks, count in layouts.items():
        step = at_once if isinstance(at_once, int) else at_once[ranks]
        found += [f"{ranks}/{first}" for first in range(0, count, step)]
    return found
