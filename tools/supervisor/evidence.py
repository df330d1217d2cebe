"""Finds out why the ranks of a run have ended, from the files in the run's folder.

OUT/hang/case.json         a case: the fault that the watchdog or a check found, its ranks and nodes
OUT/metrics.jsonl          the last step and its loss
OUT/checkpoints            the newest complete checkpoint
OUT/run.json               the bytes of a checkpoint
OUT/end.json               the exit status and the error sentence of the rank that ended the run

The supervisor starts the ranks of one run again and again, in the same folder OUT. So these files
may come from an earlier start of the ranks. Their times do not show that, because the clock of a
file server may differ from the clock of this node. So `files_before` reads the files before a
start (`before` below), and a file that is the same afterwards comes from an earlier start. Every
case and every row of metrics.jsonl holds its time, so the files of two starts always differ.
"""

import contextlib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.errors import NO_ROOM
from base.regular_files import MOST_OF_OBJECT, open_regular, read_regular
from distributed.run_lock import free_bytes
from telemetry.row_file import read_object, read_rows

LEAST_ROOM = 1 << 20  # free bytes that a run needs even if its checkpoints are smaller
TAIL_BYTES = 1 << 16  # the bytes that are read from the end of metrics.jsonl
LOST = ("dead", "hang", "missing")  # kinds of cases in which no code has reported an error
REFUSED = ("preflight", "audit")  # kinds of cases whose nodes have failed a check
SPIKE = "spike"  # the kind of case with which a run goes back to a checkpoint: --on-spike rollback


@dataclass(frozen=True)
class Evidence:
    """How a start of the ranks ended."""

    status: int  # exit status of the rank that ended the run, else that of the launcher
    kind: str = ""  # kind of case: dead, hang, missing, failed, preflight, audit, spike; or empty
    nodes: tuple[str, ...] = ()  # nodes that the case names
    ranks: tuple[int, ...] = ()  # ranks that the case names
    error: str = ""  # the last line of an exception, or another error message
    silent: tuple[str, ...] = ()  # nodes on which no task can be started
    iteration: int = 1  # the step after the last complete step: the ranks ended in or before it
    newest: int | None = None  # the step of the newest complete checkpoint
    finite: bool = True  # whether the last loss is finite
    free: int = 0  # the free bytes on the disk of the run's folder
    needed: int = 0  # the bytes that must be free for another checkpoint
    requested: bool = False  # whether a signal asked the supervisor for the end
    # Nodes that were left out and answer again. To use them, the supervisor asked the ranks to save
    # and to end.
    back: tuple[str, ...] = ()

    @property
    def disk_is_full(self) -> bool:
        """Whether the run ended because it could not write: an error says so, or room is lacking.

        If a rank was lost, that explains the end better than a disk that happens to be full.
        """
        reported = any(text in self.error for text in NO_ROOM)
        return reported or (self.kind not in LOST and self.free < self.needed)

    @property
    def is_mistake(self) -> bool:
        """Whether a UserError or diverged training ended the run; both have status 2.

        If there is a case of a lost rank, a failed check or a spike (LOST, REFUSED, SPIKE), status
        2 is no such mistake: another start may succeed.
        """
        return self.status == 2 and self.kind not in (*LOST, *REFUSED, SPIKE)

    def describe(self) -> str:
        """Return the evidence as text, such as `status 1; dead rank 3 on n7; ...`."""
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


def end_file(out: str) -> Path:
    """Return the file into which a rank writes how it ends (errors.leave_end).

    out: the run's folder. The session removes the file before it starts the ranks.
    """
    return Path(out, "end.json").absolute()


@dataclass(frozen=True)
class Files:
    """The contents of the files that differ after every start of the ranks.

    A missing file counts as empty.
    """

    case: bytes  # hang/case.json
    metrics_size: int  # bytes of metrics.jsonl
    metrics_end: bytes  # the last bytes of metrics.jsonl, at most TAIL_BYTES


def files_before(out: str) -> Files:
    """Return the present contents of the files; called before the ranks are started.

    out: the run's folder.
    """
    return Files(_read(_case_file(out)), *_end_of_metrics(out))


def read_evidence(
    out: str,
    status: int,
    before: Files,
    silent: tuple[str, ...] = (),
    requested: bool = False,
) -> Evidence:
    """Return the evidence about the end of the ranks.

    out: the run's folder. status: the launcher's exit status. before: the result of `files_before`
    for this start. silent: nodes on which no task can be started. requested: whether a signal
    asked for the end.
    """
    fields = _case(out, before)
    end = read_object(_read(end_file(out)))
    # Launchers lose the status of a rank, and may end with that of a rank which they killed.
    if status and isinstance(end.get("status"), int) and end["status"]:
        status = end["status"]
        fields["error"] = fields.get("error") or str(end.get("error", ""))
    last_step, finite = _last_row(out, before)
    newest, _ = newest_checkpoint(out)
    # If this start has done no step, the ranks were at the step after their checkpoint.
    steps_done = last_step or newest or 0
    return Evidence(
        status,
        **fields,
        silent=silent,
        iteration=1 + steps_done,
        newest=newest,
        finite=finite,
        free=free_bytes(out),
        needed=bytes_needed(out),
        requested=requested,
    )


def case_is_written(out: str, before: Files) -> bool:
    """Return whether the current start of the ranks has written a case, so that they will end."""
    return bool(_new_case(out, before))


def has_trained(out: str, before: Files) -> bool:
    """Return whether the current start of the ranks has finished a training step."""
    return _last_row(out, before)[0] is not None


def _case_file(out: str) -> Path:
    return Path(out, "hang", "case.json")


def _new_case(out: str, before: Files) -> dict[str, Any]:
    """Return the case of the current start; {} if there is no case or its file is cut short."""
    text = _read(_case_file(out))
    return {} if text == before.case else read_object(text)


def _case(out: str, before: Files) -> dict[str, Any]:
    """Return the fields of Evidence that the case of the current start gives: kind, nodes, ...

    The result is {} without a case. The files may be incomplete, so every value is checked.
    """
    case = _new_case(out, before)
    if not case:
        return {}
    ranks = tuple(rank for rank in _list(case, "culprits") if isinstance(rank, int))
    # The watchdog's case names ranks, whose files have the nodes and errors. The case of a failed
    # check has the nodes and the error itself.
    files = [Path(out, "hang", f"rank_{rank:05d}.json") for rank in ranks]
    reports = [read_object(_read(file)) for file in files]
    nodes = {str(report["node"]) for report in reports if report.get("node")}
    nodes |= set(map(str, _list(case, "nodes")))
    errors = [str(report["error"]).rstrip() for report in reports if report.get("error")]
    if case.get("error"):
        errors.append(str(case["error"]))
    return {
        "kind": str(case.get("kind", "")),
        "nodes": tuple(sorted(nodes)),
        "ranks": ranks,
        "error": errors[0].rpartition("\n")[2] if errors else "",
    }


def _list(case: dict[str, Any], name: str) -> list:
    """Return the value `name` of a case, such as "nodes"; [] if it is missing or no list."""
    value = case.get(name)
    return value if isinstance(value, list) else []


def _read(file: Path) -> bytes:
    """Return the contents of a file; empty if the file cannot be read."""
    try:
        return read_regular(file, MOST_OF_OBJECT)
    except OSError:
        return b""


def _end_of_metrics(out: str) -> tuple[int, bytes]:
    """Return the size of metrics.jsonl and its last bytes; (0, b"") if it cannot be read."""
    try:
        with open_regular(Path(out, "metrics.jsonl")) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return size, file.read()
    except OSError:
        return 0, b""


def _last_row(out: str, before: Files) -> tuple[int | None, bool]:
    """Return the last step in metrics.jsonl, and whether the last loss is finite.

    The step is None, and the loss counts as finite, if the current start has written no row yet:
    then the file is as it was before the start.
    """
    size, end = _end_of_metrics(out)
    # The file is as it was before this start of the ranks.
    if (size, end) == (before.metrics_size, before.metrics_end):
        return None, True
    last_lines = end.splitlines()[-2:]  # two, because the last line may be cut short
    rows = read_rows(b"\n".join(last_lines))
    rows = [row for row in rows if isinstance(row.get("iteration"), int)]
    if not rows:
        return None, True
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), float)]
    return rows[-1]["iteration"], all(map(math.isfinite, losses[-1:]))


def newest_checkpoint(out: str) -> tuple[int | None, int]:
    """Return the step of the newest complete checkpoint, and its bytes, at least LEAST_ROOM.

    Without a complete checkpoint the result is None and LEAST_ROOM.
    """
    checkpoints = [  # (step, folder) of each folder such as step_00001200
        (int(match[1]), folder)
        for folder in Path(out, "checkpoints").glob("step_*")
        if (match := re.fullmatch(r"step_(\d+)", folder.name))
    ]
    for step, folder in sorted(checkpoints, reverse=True):
        # A folder without a manifest is not complete. A folder that vanishes was deleted by the run
        # because it keeps enough newer checkpoints.
        with contextlib.suppress(OSError):
            (folder / "manifest.json").stat()
            needed = sum(file.stat().st_size for file in folder.iterdir())
            return step, max(LEAST_ROOM, needed)
    return None, LEAST_ROOM


def bytes_needed(out: str) -> int:
    """Return the free bytes that the run needs to save a checkpoint, at least LEAST_ROOM.

    The run has written the number into run.json. If it is not there, the size of the newest
    checkpoint is returned.
    """
    stated = read_object(_read(Path(out, "run.json"))).get("checkpoint_bytes")
    needed = stated if isinstance(stated, int) else newest_checkpoint(out)[1]
    return max(LEAST_ROOM, needed)
