"""What --eval-data, --data-schedule and --curriculum say. Pure arithmetic.

parse_eval_sets(("books=data/books", "news=data/news:512"))     the last: 512 samples of it
parse_data_schedule(("100000:0.5,0.3,0.2",))                    weights from sample 100,000 on
Curriculum.parse("64:2048:1000", batches.consumed).length(512)  tokens of the 513th sample
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from config.messages import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
SPLIT_NAMES = ("validation", "test")  # of --data: their losses have these names
MULTIPLE = 8  # of lengths, unless a curriculum gives another: what fast matrix products take


class EvalSet(NamedTuple):
    """An evaluation set: all samples of a corpus (None), or so many."""

    name: str
    prefix: str
    samples: int | None


def parse_eval_sets(words: tuple) -> list[EvalSet]:
    """The sets of `NAME=PREFIX[:SAMPLES] ...`; UserError for another word or a name twice."""
    sets: list[EvalSet] = []
    for word in map(str, words):
        name, _, prefix = word.partition("=")
        before, _, count = prefix.rpartition(":")
        samples = _whole(count) if before else None
        if not (NAME.fullmatch(name) and prefix) or samples == 0:
            raise UserError(
                f"--eval-data takes NAME=PREFIX or NAME=PREFIX:SAMPLES such as books=data/books or "
                f"books=data/books:512, not {word!r}"
            )
        if name in (*SPLIT_NAMES, *(other.name for other in sets)):
            taken = "a split of --data" if name in SPLIT_NAMES else "another set"
            raise UserError(f"--eval-data {word}: {taken} is called {name}")
        sets.append(EvalSet(name, prefix if samples is None else before, samples))
    return sets


def parse_data_schedule(words: tuple) -> list[tuple[int, list[float]]]:
    """Samples and weights of `SAMPLES:W,W,... ...`; UserError if they are malformed or descend."""
    changes: list[tuple[int, list[float]]] = []
    for word in map(str, words):
        start, _, text = word.partition(":")
        first = _whole(start)
        try:
            weights = [float(weight) for weight in text.split(",")]
        except ValueError:
            weights = []
        fair = all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0
        if not first or not fair:
            raise UserError(
                f"--data-schedule takes SAMPLES:WEIGHT,WEIGHT,... such as 100000:0.5,0.3,0.2, from "
                f"a sample after the first on and with a positive weight, not {word!r}"
            )
        changes.append((first, weights))
    for (before, _), (after, _) in pairwise(changes):
        if after <= before:
            raise UserError(f"--data-schedule: {after} samples do not come after {before}")
    return changes


@dataclass(frozen=True)
class Curriculum:
    """Lengths of samples, in tokens: from `start` to `end` within so many steps.

    Every length is a multiple of `multiple`. samples: consumed by these steps.
    """

    start: int
    end: int
    samples: int
    multiple: int = MULTIPLE

    @classmethod
    def parse(cls, text: str, consumed: Callable[[int], int]) -> "Curriculum":
        """That of START:END:STEPS[:MULTIPLE]; UserError if it is malformed.

        consumed: samples of so many steps.
        """
        numbers = [_whole(word) or 0 for word in text.split(":")]
        if len(numbers) not in (3, 4) or min(numbers) == 0:
            wanted = "START:END:STEPS or START:END:STEPS:MULTIPLE such as 64:2048:10000"
            raise UserError(f"--curriculum takes {wanted}, not {text!r}")
        numbers[2] = consumed(numbers[2])
        found = cls(*numbers)
        if found.start % found.multiple or found.end % found.multiple:
            both = f"{found.start} and {found.end}"
            raise UserError(
                f"--curriculum {text}: MULTIPLE({found.multiple}) does not divide {both}"
            )
        if found.start >= found.end:
            raise UserError(f"--curriculum {text}: START({found.start}) is not below its END")
        return found

    def length(self, consumed: int) -> int:
        """Tokens of a sample in the step that begins after `consumed` samples.

        It grows linearly, rounded down to a multiple, and is `end` from `samples` on.
        """
        grown = (self.end - self.start) * min(consumed, self.samples) // self.samples
        length = self.start + grown
        return length - length % self.multiple


def _whole(text: str) -> int | None:
    """A whole number below 10^18; None if the text is none."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None
