"""How a mistake of the user is told: one sentence, exit status 2, never a traceback.

Everything that reads what a person gave (flags, files, data) raises `UserError`; the entry points
print it with `exit_with`.
"""

import argparse
import difflib
import sys
import time
from collections.abc import Iterable
from typing import NoReturn


class UserError(Exception):
    """A mistake the user can mend: shown as one sentence, exit status 2, never a traceback."""


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are UserErrors: one sentence, as everywhere."""

    def error(self, message: str) -> NoReturn:
        """Raise the message as a UserError."""
        raise UserError(message)


def as_user_error(make, *arguments):
    """What `make` returns; its ValueError, which is a sentence about options, as a UserError."""
    try:
        return make(*arguments)
    except ValueError as error:
        raise UserError(str(error)) from None


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean ...?` with the known name that is most alike, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def number_ranges(numbers: Iterable[int], between: str = ",") -> str:
    """Whole numbers as 0-3,8: how Slurm and taskset write them. between: one that reads better."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return between.join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def exit_with(error: UserError, speak: bool = True, patience: float = 1.0) -> NoReturn:
    """Print the sentence, if this is the rank that speaks, and leave with status 2.

    A launcher ends the whole job when one rank leaves with an error, so the silent ranks wait
    `patience` seconds for the one that speaks.
    """
    if speak:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(patience)
    sys.exit(2)
