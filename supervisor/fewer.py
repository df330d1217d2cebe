"""Finds a layout for fewer nodes than a run was started on: the planner's, checked by a rehearsal.

    options = Options("v100-32", None, 1.5, frozenset({"tp"}))
    found = Fewer(command, config, options).best(left=47)      # UserError if there is none

plan.py and rehearse.py are started as processes, because the supervisor must not import torch,
which the rehearsal needs. Model, data and global batch stay the same, so training does too.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from config.command_line import to_words
from config.messages import UserError
from config.schema import Config, Layout
from supervisor.command import Command

ROOT = Path(__file__).resolve().parent.parent
KEPT = ("tp", "pp", "micro_batch_size", "recompute", "zero")  # options that --keep-... can fix
MOST_REHEARSED = 3  # at most this many layouts are rehearsed, until a rehearsal accepts one
AT_ONCE = 4  # processes of the planner at the same time
SECONDS_TO_PLAN = 120.0
SECONDS_TO_REHEARSE = 900.0


@dataclass(frozen=True)
class Options:
    """The user's limits for layouts on fewer nodes."""

    gpu: str  # the name of a machine of hardware/
    calibration: str | None
    max_slowdown: float  # most seconds of a step, relative to the layout as given
    keep: frozenset[str]  # options of KEPT that stay as given


@dataclass(frozen=True)
class Found:
    """A layout on fewer nodes. nodes: their number; reason: why this layout was chosen."""

    nodes: int
    flags: tuple[str, ...]
    reason: str


class Fewer:
    """Finds layouts of one run on fewer nodes. Raise UserError if the planner finds a mistake.

    config: the run's configuration, before dp is filled in. seconds: predicted seconds of a step
    with the layout as given; None if the planner rejects this layout, with the reason `rejected`.
    """

    def __init__(self, command: Command, config: Config, options: Options):
        self.command = command
        self.config = config
        self.options = options
        measured = ["--calibration", options.calibration] if options.calibration else []
        self.machine = ["--gpu", options.gpu, *measured]
        every = [field.name for field in fields(Layout)]
        answer = self._plan(command.used, to_words(self.config.layout, always=every), "--risk", "1")
        rows = answer["ranked"]
        rejected = answer["rejected"]
        self.planned_on = answer.get("machine", options.gpu)  # of a family such as a100: a member
        self.seconds: float | None = rows[0]["seconds"] if rows else None
        self.rejected: str = rejected[0]["reason"] if rejected else "no layout is left"

    def words(self, flags: Sequence[str]) -> list[str]:
        """Return the run's options with the layout replaced by these flags."""
        return [*flags, *_other_words(self.config)]

    def best(self, left: int) -> Found:
        """Return the fastest layout on at most `left` nodes that the rehearsal does not reject.

        Raise UserError if there is no such layout, or if it is slower than the user allows.
        """
        if self.config.training.decrease_batch_size_if_needed:
            raise UserError("--decrease-batch-size-if-needed: another layout has other batches")
        if self.seconds is None:
            raise UserError(f"the planner does not price the layout as given: {self.rejected}")
        rows = self._rows(left)
        limit = self.options.max_slowdown
        said = ""
        if not rows:
            raise UserError(f"the planner finds no layout on {left} nodes")
        for row in rows[:MOST_REHEARSED]:
            slowdown = row["seconds"] / self.seconds
            times = f"a step {slowdown:.2f} times as long, as predicted on {self.planned_on}"
            if slowdown > limit:
                said = said or f"{times}: above --max-slowdown {limit:g}"
                break
            accepted, said = self._rehearse(row)
            if accepted:
                named = " ".join(row["flags"]) or "without flags"
                reason = f"goes on with {row['nodes']} nodes, {named}: {times}; {said}"
                return Found(row["nodes"], tuple(row["flags"]), reason)
        raise UserError(f"on {left} nodes {said}")

    def _rows(self, left: int) -> list[dict[str, Any]]:
        """Return the planner's layouts, fastest first, on `left` to more than `left / 2` nodes.

        Often a smaller number of nodes divides the batch better: 32 nodes better than 47.
        """
        flags = self._held()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            counts = range(left, left // 2, -1)
            answers = pool.map(lambda nodes: self._plan(nodes, flags), counts)
            rows = [row | {"nodes": n} for n, a in zip(counts, answers) for row in a["ranked"]]
        rows = [row for row in rows if row["rampup"] in ("-", "fits")]
        return sorted(rows, key=lambda row: row["seconds"])

    def _held(self) -> list[str]:
        """Return flags of the layout options that stay as given; the planner chooses the others."""
        layout = self.config.layout
        keep = self.options.keep
        free = {"dp", *KEPT} - keep
        free |= {"recompute_layers"} if "recompute" in free else set()
        free |= {"partition"} if "," in layout.partition and "pp" in free else set()
        default = Layout()
        freed = replace(layout, **{name: getattr(default, name) for name in free})
        return to_words(freed, always=keep)

    def _plan(self, nodes: int, flags: Sequence[str], *more: str) -> dict[str, Any]:
        """Return plan.py's JSON answer for this number of nodes; UserError if it exits with 2."""
        words = ["layouts", "--json", *self.machine, "--gpus", str(self._ranks(nodes)), *more]
        done = _run("plan.py", [*words, *self.words(flags)], SECONDS_TO_PLAN)
        said = _last_line(done.stderr)
        if done.returncode == 2:
            raise UserError(said.removeprefix("error: "))
        if done.returncode:
            return {"ranked": [], "rejected": [{"reason": f"plan.py has failed: {said}"}]}
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def _rehearse(self, row: dict[str, Any]) -> tuple[bool, str]:
        """Rehearse a layout; return whether it can be started, and a sentence on the rehearsal."""
        words = ["--gpus", str(self._ranks(row["nodes"])), "--nodes", str(row["nodes"])]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "answers.json")
            words += [*self.machine, "--json", str(file), *self.words(row["flags"])]
            done = _run("rehearse.py", words, SECONDS_TO_REHEARSE)
            finding = json.loads(file.read_text())["finding"] if file.exists() else None
        if finding:
            return False, f"the rehearsal rejects {' '.join(row['flags'])}: {finding}"
        if finding is None:
            return True, f"not rehearsed: {_last_line(done.stderr)}"
        return True, "rehearsed: every operation of the ranks that were run meets, and it fits"

    def _ranks(self, nodes: int) -> int:
        return nodes * (self.command.job.tasks_per_node if self.command.job else 0)


def _other_words(config: Config) -> list[str]:
    """Return all options of a run except its layout.

    precision and global_batch_size are always included, because plan.py has other defaults.
    """
    training = to_words(config.training, always=("precision", "global_batch_size"))
    return [*to_words(config.model), *training, *to_words(config.data), *to_words(config.run)]


def _run(program: str, words: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program of the root to its end, or return status 124 after `seconds`."""
    command = [sys.executable, str(ROOT / program), *words]
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {seconds:g} s")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no answer"])[-1]
