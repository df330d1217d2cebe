"""Parses --eval-data. Pure arithmetic.

parse_eval_sets(("books=data/books", "news=data/news:512"))     all of books, 512 samples of news
"""

import re
from typing import NamedTuple

from config.messages import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
SPLIT_NAMES = ("validation", "test")  # splits of --data, which name the losses on them


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


def _whole(text: str) -> int | None:
    """Return the text as a whole number below 10^18, or None if it is not one."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None
