"""The curve that a run's loss should follow (--expect), and the step at which it leaves its band.

    expected.jsonl    a row for each step at which the loss left the band, or came back

FILE is what `plan.py ladder --write` writes: an object with ascending `tokens`, and for each the
expected `loss` and a band from `low` to `high`; between them it is linear. Or it is the folder of a
run: then the curve is that run's loss, and the band as wide as its losses vary. The mean of the
last SMOOTH steps is compared. Nothing is stopped or changed.
"""

import json
import math
import os
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import FileError
from base.regular_files import MOST_OF_OBJECT, MOST_OF_ROWS, read_regular
from telemetry.log import Log
from telemetry.observer import Observer, Step
from telemetry.row_file import RowFile, read_rows
from zero import StepResult

SMOOTH = 10  # steps of the run whose mean is compared
SIGMAS = 4.0  # half the band of a run's own curve, in standard deviations of such a mean
LEAST = 0.01  # and at least this share of the loss
SAME_END = 0.05  # a curve and a run whose ends are nearer are about equally many tokens
NAME = "expected.jsonl"


@dataclass(frozen=True)
class Curve:
    """A band of losses over tokens, which ascend. source: where it is from, for messages.

    parameters: of the model that it is about, if that is known.
    """

    tokens: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    source: str
    parameters: int | None = None

    def notes(self, parameters: int, tokens: int) -> list[str]:
        """Return what makes it the curve of another run than one of so many tokens, in lines."""
        begin, end, found = self.tokens[0], self.tokens[-1], []
        if self.parameters and self.parameters != parameters:
            found.append(
                f"note: --expect {self.source} is about a model of {self.parameters:,} parameters; "
                f"this one has {parameters:,}"
            )
        if tokens < begin:
            found.append(
                f"note: --expect {self.source} begins after {begin:,.0f} tokens; this run ends "
                f"after {tokens:,}, and no step of it is compared"
            )
        elif abs(tokens - end) > SAME_END * end:
            found.append(
                f"note: --expect {self.source} is about {end:,.0f} tokens; this run has {tokens:,}"
            )
        return found

    def band(self, tokens: int) -> tuple[float, float] | None:
        """Return the band after so many tokens; None before the curve begins or after its end."""
        if not self.tokens[0] <= tokens <= self.tokens[-1]:
            return None
        after = min(bisect_right(self.tokens, tokens), len(self.tokens) - 1)
        a, b = self.tokens[after - 1], self.tokens[after]
        share = (tokens - a) / (b - a)
        low, high = (
            each[after - 1] + share * (each[after] - each[after - 1])
            for each in (self.low, self.high)
        )
        return low, high


def read(path: str) -> Curve:
    """Return the curve in a file or a run's folder; UserError if it has none."""
    if os.path.isdir(path):
        return _of_run(path)
    try:
        found = json.loads(read_regular(Path(path), MOST_OF_OBJECT))
    except OSError as error:
        raise FileError(f"--expect: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"--expect {path} is no JSON: {error}") from None
    found = found if isinstance(found, dict) else {}
    tokens, low, high = (_numbers(found.get(name)) for name in ("tokens", "low", "high"))
    if not tokens or not len(tokens) == len(low) == len(high):
        raise FileError(
            f"--expect {path} needs lists of numbers of one length, tokens, low and high, as "
            "plan.py ladder --write has them"
        )
    if len(tokens) < 2 or sorted({*tokens}) != tokens:
        raise FileError(f"--expect {path}: its tokens are two numbers or more, ascending")
    parameters = found.get("parameters")
    return Curve(tokens, low, high, path, parameters if isinstance(parameters, int) else None)


def _of_run(folder: str) -> Curve:
    """Return the curve of a run's losses, with a band as wide as they vary."""
    try:
        rows = read_rows(read_regular(Path(folder, "metrics.jsonl"), MOST_OF_ROWS))
    except OSError as error:
        raise FileError(f"--expect: cannot read {folder}/metrics.jsonl: {error.strerror}") from None
    rows = [row for row in rows if _is_number(row.get("loss")) and row.get("consumed_tokens")]
    if len(rows) < 4 * SMOOTH:
        raise FileError(
            f"--expect {folder} has {len(rows)} steps with a loss; a curve needs {4 * SMOOTH}"
        )
    tokens, low, high = [], [], []
    for first in range(0, len(rows) - SMOOTH + 1, SMOOTH):
        losses = [float(row["loss"]) for row in rows[first : first + SMOOTH]]
        mean = statistics.fmean(losses)
        # The mean of the run and of the one that is compared vary alike.
        half = SIGMAS * statistics.stdev(losses) * math.sqrt(2 / SMOOTH)
        half = max(half, LEAST * abs(mean))
        tokens.append(float(rows[first + SMOOTH - 1]["consumed_tokens"]))
        low.append(mean - half)
        high.append(mean + half)
    return Curve(tokens, low, high, folder, _parameters_of_run(folder))


def _parameters_of_run(folder: str) -> int | None:
    """Return the parameters that a run's run.json says, or None."""
    try:
        found = json.loads(read_regular(Path(folder, "run.json"), MOST_OF_OBJECT))
    except (OSError, ValueError, RecursionError):  # the curve is in another file
        return None
    parameters = found.get("parameters") if isinstance(found, dict) else None
    return parameters if isinstance(parameters, int) else None


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _numbers(value: Any) -> list[float]:
    """Return a list of numbers; an empty one if the value is no such list."""
    is_list = isinstance(value, list) and all(map(_is_number, value))
    return list(map(float, value)) if is_list else []


class ExpectedCurve(Observer):
    """Says in the log, and in expected.jsonl, when the loss leaves the band or comes back."""

    def __init__(self, path: str, out: str, log: Log, parameters: int, tokens: int):
        """Read the curve of --expect, the file `path`, on the rank that writes the log.

        out: the run's folder. parameters, tokens: of the run; a curve about another model or length
        is noted. Raise UserError if the file has no curve.
        """
        self.curve = read(path) if log.is_writer else None
        self.log = log
        for line in self.curve.notes(parameters, tokens) if self.curve else ():
            log.note(line)
        self.rows = RowFile(os.path.join(out, NAME), log.note)
        self.recent: deque[float] = deque(maxlen=SMOOTH)
        self.is_outside = False

    def after_step(self, step: Step, result: StepResult) -> None:
        """Note when the mean loss of the last SMOOTH steps leaves the band, or comes back."""
        if self.curve is None or not math.isfinite(result.loss):
            return
        self.recent.append(result.loss)
        band = self.curve.band(step.done.usage.tokens)
        if band is None or len(self.recent) < SMOOTH:
            return
        loss, (low, high) = statistics.fmean(self.recent), band
        is_outside = not low <= loss <= high
        if is_outside == self.is_outside:
            return
        self.is_outside = is_outside
        what = "left" if is_outside else "is back in"
        self.log.note(
            f" step {step.iteration}: the loss {what} the band of {self.curve.source}: {loss:.4f}, "
            f"expected {low:.4f} to {high:.4f}"
        )
        self.rows.write(
            {
                "iteration": step.iteration,
                "loss": loss,
                "low": low,
                "high": high,
                "outside": is_outside,
            }
        )

    def at_exit(self) -> None:
        """Write the last rows."""
        self.rows.finish()
