"""Parsers of --eval-data, --data-schedule and --curriculum. Pure arithmetic.

parse_eval_sets(("books=data/books", "news=data/news:512"))     all of books, 512 samples of news
parse_data_schedule(("100000:0.5,0.3,0.2",))                    weights from sample 100,000 on
Curriculum.parse("64:2048:1000", batches.consumed).length(512)  tokens a sample after 512 samples
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from config.messages import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
SPLIT_NAMES = ("validation", "test")  # splits of --data, which name the losses on them
MULTIPLE = 8  # lengths are multiples of 8, unless --curriculum says otherwise, for fast GEMMs


class EvalSet(NamedTuple):
    """An evaluation set. samples: how many samples of the corpus; None: all of them."""

    name: str
    prefix: str
    samples: int | None


def parse_eval_sets(words: tuple) -> list[EvalSet]:
    """Return the sets of words NAME=PREFIX[:SAMPLES]; UserError if malformed or a name repeats."""
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
    """Return (first sample, weights) by words SAMPLES:W,W,...; UserError if they do not ascend."""
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
    """Growing lengths of samples, in tokens, from `start` to `end`.

    samples: consumed samples after which the length is `end`. Every length is a multiple of
    `multiple`.
    """

    start: int
    end: int
    samples: int
    multiple: int = MULTIPLE

    @classmethod
    def parse(cls, text: str, consumed: Callable[[int], int]) -> "Curriculum":
        """Return the curriculum START:END:STEPS[:MULTIPLE]; UserError if the text is malformed.

        consumed: a function from a number of steps to the samples that they consume.
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
        """Return the tokens of a sample in the step that begins after `consumed` samples.

        The length grows linearly, rounded down to a multiple, and is `end` from `samples` on.
        """
        grown = (self.end - self.start) * min(consumed, self.samples) // self.samples
        length = self.start + grown
        return length - length % self.multiple


def _whole(text: str) -> int | None:
    """Return the text as a whole number below 10^18, or None if it is not one."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None
