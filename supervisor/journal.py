"""OUT/supervisor.jsonl: every decision with its evidence, for people and for the next start.

{"time": "2026-11-21T20:41:47+0000", "at": seconds since 1970, "job": "7.0", "action": "restart",
 "reason": ..., "out": nodes left out, "back": nodes used again, "used": their number from now on,
 "flags": the layout on so many nodes, "evidence": {...}}
"""

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.messages import printable
from supervisor.decisions import Action, Decision, Earlier
from supervisor.evidence import Evidence
from telemetry.row_file import RowFile, read_rows


@dataclass(frozen=True)
class Entry:
    """One decision. at: seconds since 1970; job: of Slurm, and its start, or empty."""

    at: float
    job: str
    evidence: Evidence
    decision: Decision


class Journal:
    """The decisions of a run, those of earlier supervisors too."""

    def __init__(self, out: str, job: str):
        self.job, path = job, Path(out, "supervisor.jsonl")
        self.entries = read_entries(path)
        self.file = RowFile(str(path), say)  # what a full disk does not take is written later

    def add(self, found: Evidence, decision: Decision) -> None:
        """Print a decision and append it to the file."""
        say(f"{found.describe()}: {decision.action}: {decision.reason}")
        entry = Entry(time.time(), self.job, found, decision)
        self.entries.append(entry)
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "at": entry.at, "job": self.job}
        with contextlib.suppress(OSError):  # RowFile says so
            Path(self.file.path).parent.mkdir(parents=True, exist_ok=True)
        self.file.write(row | vars(decision) | {"evidence": dataclasses.asdict(found)})

    def earlier(self) -> list[Earlier]:
        """The decisions so far, the oldest first.

        A clock that was set back since then makes a decision one of the future: its distance
        counts, or it would be of the last hour for as long as the clock was wrong.
        """
        now = time.time()
        return [Earlier(abs(now - e.at), e.evidence, e.decision) for e in self.entries]

    def left_out(self) -> set[str]:
        """The nodes that this start of the job has left out."""
        return set(self._left_out())

    @property
    def has_left_out(self) -> bool:
        """Whether this start of the job has ever left a node out."""
        return any(entry.decision.out for entry in self._of_this_start())

    def silent(self) -> set[str]:
        """Those of `left_out` that did not answer: such a node may come back."""
        return {node for node, silent in self._left_out().items() if silent}

    def _left_out(self) -> dict[str, bool]:
        """The nodes that are left out, and whether they did not answer then."""
        found: dict[str, bool] = {}
        for entry in self._of_this_start():
            found |= {node: node in entry.evidence.silent for node in entry.decision.out}
            found = {node: was for node, was in found.items() if node not in entry.decision.back}
        return found

    def layout(self) -> tuple[int, tuple[str, ...]]:
        """The nodes that the ranks take now and their layout's flags; 0 if it is as given."""
        for entry in reversed(self._of_this_start()):
            if entry.decision.used or entry.decision.back:
                return entry.decision.used, entry.decision.flags
        return 0, ()

    def _of_this_start(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.job == self.job]


def read_entries(path: Path) -> list[Entry]:
    """The decisions in a file; what is cut short, or not of this form, is passed over."""
    found = []
    with contextlib.suppress(OSError):  # there are none
        for row in read_rows(path.read_bytes()):
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                found.append(_entry(row))
    return found


def _entry(row: dict[str, Any]) -> Entry:
    """The entry that a row holds; TypeError, ValueError or KeyError if it holds none."""
    given: dict[str, Any] = row["evidence"]
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in given.items()
    }
    found = Evidence(**values)
    for name, default in vars(Evidence(0)).items():
        if name != "newest" or found.newest is not None:
            _check_type(getattr(found, name), int if name == "newest" else type(default))
    out, back, flags = (tuple(map(str, row.get(name, ()))) for name in ("out", "back", "flags"))
    action = Action(row["action"])
    reason = str(row["reason"])
    used = int(row.get("used", 0))
    decision = Decision(action, reason, out, back, used, flags)
    return Entry(float(row["at"]), str(row["job"]), found, decision)


def _check_type(value: Any, kind: type) -> None:
    """TypeError for a value of another type, or a tuple of other things than words and numbers."""
    words = value if isinstance(value, tuple) else ()
    if not isinstance(value, kind) or not all(isinstance(word, str | int) for word in words):
        raise TypeError(value)


def say(text: str) -> None:
    """Print a line of the supervisor; a case may hold text that a terminal must not get."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    print(f"supervisor: {now}: {printable(text)}", flush=True)
