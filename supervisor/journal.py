"""OUT/supervisor.jsonl: every decision with its evidence, for people and for the next start.

{"time": "2026-11-21T20:41:47+0000", "at": seconds since 1970, "job": "7.0", "action": "restart",
 "reason": ..., "out": nodes left out, "evidence": {...}}
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from supervisor.decisions import Action, Decision, Earlier
from supervisor.evidence import Evidence


class Journal:
    """The decisions of a run, those of earlier supervisors too.

    job: Slurm's number of the job and of its start, or empty. A row that cannot be written counts
    all the same, until this process ends.
    """

    def __init__(self, out: str, job: str):
        self.path, self.job = Path(out, "supervisor.jsonl"), job
        self.rows = read_rows(self.path)

    def add(self, found: Evidence, decision: Decision) -> None:
        """Append a decision; prints it, and prints if it cannot be written."""
        when, at = time.strftime("%Y-%m-%dT%H:%M:%S%z"), time.time()
        row: dict[str, Any] = {"time": when, "at": at, "job": self.job, **vars(decision)}
        row["evidence"] = dataclasses.asdict(found)
        self.rows.append(json.loads(json.dumps(row)))
        say(f"{found.describe()}: {decision.action}: {decision.reason}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            say(f"cannot write {self.path}: {error.strerror}")

    def earlier(self) -> list[Earlier]:
        """The decisions so far, the oldest first."""
        now, found = time.time(), []
        for row in self.rows:
            lists = {name: tuple(row["evidence"][name]) for name in ("nodes", "ranks", "silent")}
            decision = Decision(Action(row["action"]), row["reason"], tuple(row["out"]))
            found.append(Earlier(now - row["at"], Evidence(**row["evidence"] | lists), decision))
        return found

    def left_out(self) -> set[str]:
        """The nodes that this start of the job has left out."""
        return {node for row in self.rows if row["job"] == self.job for node in row["out"]}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The decisions in a file; those that are cut short, or not of this form, are passed over."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
            Evidence(**row["evidence"])
            Action(row["action"])
            if isinstance(row["at"], float) and {"job", "reason", "out"} <= row.keys():
                found.append(row)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return found


def say(text: str) -> None:
    """Print a line of the supervisor."""
    print(f"supervisor: {time.strftime('%Y-%m-%dT%H:%M:%S%z')}: {text}", flush=True)
