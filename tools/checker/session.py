"""What a check prints while it runs, and its verdict: lines for a person, or one object of JSON.

    session = Session(as_json=True, all_of_them=False, minutes=None)
    session.say("60 layouts ...")
    status = session.judge(engine, outcomes, total, {"program": "my_program.py"})

The engine is one of Trine's layouts or of another program's; both have `begin`, `reference` and
`reference_of`, and what they yield is an `Outcome`.
"""

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

from base.cli import VERSION
from base.errors import UserError
from tools.checker.engine import Outcome
from tools.checker.report import WIDTH, findings, line, outcome_data, verdict

# Layouts that tell where a difference comes from, and if there are two: those of one setting.
ENOUGH = 12
INTERRUPTED = 130  # the exit status after Ctrl-C


class Session:
    """A check that runs. as_json: the verdict is JSON on stdout, and lines go to stderr."""

    def __init__(self, as_json: bool, all_of_them: bool, minutes: float | None):
        """Begin to count time. all_of_them: no difference ends the check. minutes: the limit."""
        self.as_json, self.all_of_them = as_json, all_of_them
        self.began = time.monotonic()
        self.until = self.began + 60.0 * minutes if minutes else float("inf")
        self.outcomes: list[Outcome] = []
        self.alone: Sequence[str] = ()  # what is wrong on one rank

    def say(self, *lines: str) -> None:
        """Print lines for a person."""
        if not lines:
            return
        print(*lines, sep="\n", file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def may_begin(self) -> bool:
        """Return whether another layout may begin: in time, and if there is no verdict yet."""
        differs = any(not outcome.is_equal for outcome in self.outcomes) or self.alone
        has_verdict = differs and len(self.outcomes) >= ENOUGH and not self.all_of_them
        return not has_verdict and time.monotonic() < self.until

    def judge(
        self,
        engine: Any,
        outcomes: Callable[[Callable[[], bool]], Iterator[Outcome]],
        total: int,
        about: dict[str, Any],
        notes: Callable[[], Iterator[str]] = lambda: iter(()),
    ) -> int:
        """Run one rank and the layouts, print the verdict, and return the exit status.

        outcomes: yields what comes of layouts, while the function that it gets returns True. total:
        layouts without resumes. about: what is checked, for JSON. notes: lines after the one rank.
        Raise UserError if none ran within the minutes.
        """
        one = engine.begin()
        self.alone = one.alone
        losses = " ".join(f"{loss:.6f}" for loss in one.losses)
        self.say(f"{'losses':{WIDTH}s} one rank: {losses}")
        self.say(*(f"{'WRONG':{WIDTH}s} one rank: {sentence}" for sentence in one.alone), *notes())
        status = 0
        try:
            for outcome in outcomes(self.may_begin):
                self.outcomes.append(outcome)
                self.say(line(outcome))
        except KeyboardInterrupt:
            status = INTERRUPTED
            self.say("interrupted; what has run until then:")
        if not self.outcomes and not self.alone and not status:  # then nothing says "equal"
            raise UserError(
                f"no layout ran: one rank took {time.monotonic() - self.began:.0f} s; give more "
                "than those --minutes"
            )
        wrong = [outcome for outcome in self.outcomes if not outcome.is_equal]
        trained = [outcome for outcome in self.outcomes if outcome.resumed_from is None]
        left, seconds = max(total - len(trained), 0), time.monotonic() - self.began
        said = verdict(engine.reference, self.outcomes, left, seconds, engine.reference_of)
        if self.outcomes:
            self.say(*said)
        has_resumed = len(trained) < len(self.outcomes)
        if not has_resumed:
            self.say("not checked: a resume")
        self.say(*(f"WRONG on one rank too: {sentence}" for sentence in one.alone))
        status = status or int(bool(one.alone) or bool(wrong))
        if self.as_json:
            found = findings(engine.reference, self.outcomes, engine.reference_of)
            data = {"status": status, "verdict": _word(status)} | about
            data |= {"losses": one.losses, "one_rank": list(one.alone)}
            data |= {"layouts": [outcome_data(outcome) for outcome in self.outcomes]}
            data |= {"differences": [finding.data for finding in found], "not_run": left}
            data |= {"resume_checked": has_resumed, "seconds": round(seconds, 1)}
            print_json(data)
        return status


def _word(status: int) -> str:
    """Return the verdict of an exit status in a word."""
    return {0: "equal", 1: "different", INTERRUPTED: "interrupted"}[status]


def versions() -> dict[str, str]:
    """Return the versions of what has run."""
    found = {"trine": VERSION, "python": platform.python_version()}
    return found | {"torch": metadata.version("torch")}


def print_json(data: dict[str, Any]) -> None:
    """Print the one object that --json promises."""
    print(json.dumps(data | {"versions": versions()}, allow_nan=False), flush=True)
