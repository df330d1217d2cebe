"""Why the ranks of a run have ended, from what they left in the run's folder.

OUT/hang/case.json         what the watchdog or the pre-flight saw, and whom they name
OUT/metrics.jsonl          the step that was reached, and its loss
OUT/checkpoints            the newest complete one
OUT/run.json               the room that another checkpoint takes

These files may be of an earlier start. Their times do not tell, because the clock of a file server
may differ from that of this node: `files_before` reads the files before a start, and what is the
same afterwards is not of this start. Every case and every row holds the time at which it was made,
so that those of two starts differ.
"""

import contextlib
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.messages import NO_ROOM
from telemetry.row_file import read_object, read_rows

LEAST_ROOM = 1 << 20  # bytes that a run needs, whatever its checkpoints take
TAIL_BYTES = 1 << 16  # of metrics.jsonl
LOST = ("dead", "hang", "missing")  # kinds of cases in which no code has reported an error


@dataclass(frozen=True)
class Evidence:
    """How a start of the ranks ended."""

    status: int  # of the launcher
    kind: str = ""  # of the case: dead, hang, missing, failed, preflight; empty: there is none
    nodes: tuple[str, ...] = ()  # that the case names
    ranks: tuple[int, ...] = ()
    error: str = ""  # the last line of an exception, or a sentence
    silent: tuple[str, ...] = ()  # nodes on which no task can be started
    iteration: int = 1  # training step in which it ended, or before it
    newest: int | None = None  # step of the newest checkpoint
    finite: bool = True  # the last loss
    free: int = 0  # bytes where the run's folder is
    needed: int = 0  # bytes of another checkpoint
    requested: bool = False  # a signal asked for the end
    back: tuple[str, ...] = ()  # nodes that answer again, for which the ranks were asked to save

    @property
    def disk_is_full(self) -> bool:
        """Whether the run ended because it could not write."""
        return any(text in self.error for text in NO_ROOM) or (
            self.kind not in LOST and self.free < self.needed
        )

    @property
    def is_mistake(self) -> bool:
        """Whether a user's mistake ended it, or training that has diverged: both have status 2."""
        return self.status == 2 and self.kind not in (*LOST, "preflight")

    def describe(self) -> str:
        """The evidence as a part of a sentence."""
        parts = [f"status {self.status}"]
        if self.kind:
            ranks = f" rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
            where = f" on {', '.join(self.nodes)}" if self.nodes else ""
            parts.append(f"{self.kind}{ranks}{where}")
        if self.error:
            parts.append(self.error[:200])
        if self.silent:
            parts.append(f"no answer from {', '.join(self.silent)}")
        saved = "no checkpoint" if self.newest is None else f"newest checkpoint {self.newest}"
        at = f"after step {self.iteration - 1}"
        parts += [at if self.finite else f"{at}, whose loss is not finite", saved]
        if self.disk_is_full:
            parts.append(f"{self.free / 1e6:.1f} MB free of {self.needed / 1e6:.1f} needed")
        return "; ".join(parts)


@dataclass(frozen=True)
class Files:
    """Contents of the files that every start of the ranks writes anew; empty if there is none."""

    case: bytes  # hang/case.json
    metrics_size: int  # bytes of metrics.jsonl
    metrics_end: bytes  # the last of them, at most TAIL_BYTES


def files_before(out: str) -> Files:
    """The files as they are before a start of the ranks: those of an earlier start."""
    return Files(_read(_case_file(out)), *_end_of_metrics(out))


def read_evidence(
    out: str,
    status: int,
    before: Files,
    silent: tuple[str, ...] = (),
    requested: bool = False,
) -> Evidence:
    """What is known about a start that ended with this status. before: its `files_before`."""
    last, finite = _last_row(out, before)
    newest, _ = newest_checkpoint(out)
    return Evidence(
        status,
        **_case(out, before),
        silent=silent,
        iteration=1 + (last or newest or 0),
        newest=newest,
        finite=finite,
        free=free_bytes(out),
        needed=bytes_needed(out),
        requested=requested,
    )


def case_is_written(out: str, before: Files) -> bool:
    """Whether there is a case of the start with these `files_before`."""
    return bool(_new_case(out, before))


def has_trained(out: str, before: Files) -> bool:
    """Whether the start with these `files_before` has done a step."""
    return _last_row(out, before)[0] is not None


def _case_file(out: str) -> Path:
    return Path(out, "hang", "case.json")


def _new_case(out: str, before: Files) -> dict[str, Any]:
    """The case of that start; empty if there is none, or if it was cut short."""
    text = _read(_case_file(out))
    return {} if text == before.case else read_object(text)


def _case(out: str, before: Files) -> dict[str, Any]:
    """Fields of the evidence that the case of that start gives."""
    case = _new_case(out, before)
    if not case:
        return {}
    lists = {name: case.get(name) for name in ("culprits", "nodes")}
    culprits, named = (value if isinstance(value, list) else [] for value in lists.values())
    ranks = tuple(rank for rank in culprits if isinstance(rank, int))
    files = [Path(out, "hang", f"rank_{rank:05d}.json") for rank in ranks]
    of_ranks = [read_object(_read(file)) for file in files]
    nodes = {str(rank["node"]) for rank in of_ranks if rank.get("node")}
    nodes |= set(map(str, named))
    errors = [str(rank["error"]).rstrip() for rank in of_ranks if rank.get("error")]
    errors += [str(case["error"])] if case.get("error") else []
    return {
        "kind": str(case.get("kind", "")),
        "nodes": tuple(sorted(nodes)),
        "ranks": ranks,
        "error": errors[0].splitlines()[-1] if errors else "",
    }


def _read(file: Path) -> bytes:
    """The contents of a file; empty if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _end_of_metrics(out: str) -> tuple[int, bytes]:
    """The size of metrics.jsonl and its last bytes; nothing if it cannot be read."""
    try:
        with open(Path(out, "metrics.jsonl"), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return size, file.read()
    except OSError:
        return 0, b""


def _last_row(out: str, before: Files) -> tuple[int | None, bool]:
    """The last step of that start, None if it did none; whether its loss is finite."""
    size, end = _end_of_metrics(out)
    if (size, end) == (before.metrics_size, before.metrics_end):
        return None, True
    rows = read_rows(b"\n".join(end.splitlines()[-2:]))
    rows = [row for row in rows if isinstance(row.get("iteration"), int)]
    if not rows:
        return None, True
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), float)]
    return rows[-1]["iteration"], all(map(math.isfinite, losses[-1:]))


def newest_checkpoint(out: str) -> tuple[int | None, int]:
    """The step of the newest complete checkpoint, if there is one; bytes that another takes."""
    found = [
        (int(match[1]), folder)
        for folder in Path(out, "checkpoints").glob("step_*")
        if (match := re.fullmatch(r"step_(\d+)", folder.name))
    ]
    for step, folder in sorted(found, reverse=True):
        # One without a manifest is not complete, one that vanishes has been surplus.
        with contextlib.suppress(OSError):
            (folder / "manifest.json").stat()
            needed = sum(file.stat().st_size for file in folder.iterdir())
            return step, max(LEAST_ROOM, needed)
    return None, LEAST_ROOM


def bytes_needed(out: str) -> int:
    """The free bytes without which the run does not save: its number, which run.json has, or, of a
    run that does not have it, the size of the newest checkpoint.
    """
    stated = read_object(_read(Path(out, "run.json"))).get("checkpoint_bytes")
    needed = stated if isinstance(stated, int) else newest_checkpoint(out)[1]
    return max(LEAST_ROOM, needed)


def free_bytes(out: str) -> int:
    """Free bytes where that folder is or will be."""
    path = Path(out).resolve()
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
