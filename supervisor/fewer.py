"""Finds a layout for fewer nodes than a run was started on, by the planner and a rehearsal.

    options = Options("v100-32", None, 1.5, frozenset({"tp"}))
    found = Fewer(command, config, options).best(left=47)      # a layout on at most 47 nodes

The planner (plan.py) predicts the seconds of a step with each layout. The rehearsal (rehearse.py)
runs one layout's ranks without a GPU, and finds operations that would hang and too little memory.
Flags are options on the command line, as a list of words: ["--tp", "2", "--pp", "4"].

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
MOST_REHEARSED = 3  # the most layouts that are rehearsed, the fastest first
AT_ONCE = 4  # processes of the planner at the same time
SECONDS_TO_PLAN = 120.0  # after this time a process of the planner is killed
SECONDS_TO_REHEARSE = 900.0  # after this time a rehearsal is killed


@dataclass(frozen=True)
class Options:
    """The user's limits for layouts on fewer nodes."""

    gpu: str  # the name of a machine of hardware/
    calibration: str | None  # the planner's --calibration; None if it was not given
    max_slowdown: float  # most seconds of a step, relative to the layout as given
    keep: frozenset[str]  # options of KEPT that stay as given


@dataclass(frozen=True)
class Found:
    """A layout on fewer nodes.

    nodes: the number of nodes. flags: the layout's options. reason: why this layout was chosen.
    """

    nodes: int
    flags: tuple[str, ...]
    reason: str


class Fewer:
    """Finds layouts of one run on fewer nodes.

    config: the run's configuration, before dp is filled in. machine: the planner's options for the
    GPU. planned_on: the name of that GPU. seconds: predicted seconds of a step with the layout as
    given; None if the planner rejects this layout, with the reason `rejected`.
    """

    def __init__(self, command: Command, config: Config, options: Options):
        """Predict the layout as given; raise UserError if the planner finds a user's mistake."""
        self.command = command
        self.config = config
        self.options = options
        self.machine = ["--gpu", options.gpu]
        if options.calibration:
            self.machine += ["--calibration", options.calibration]
        names = [field.name for field in fields(Layout)]
        flags = to_words(self.config.layout, always=names)  # all, so that the planner chooses none
        answer = self._plan(command.used, flags, "--risk", "1")
        rows = answer["ranked"]
        rejected = answer["rejected"]
        self.planned_on = answer.get("machine", options.gpu)  # a100 is a family: this is the member
        self.seconds: float | None = rows[0]["seconds"] if rows else None
        self.rejected: str = rejected[0]["reason"] if rejected else "no layout is left"

    def words(self, flags: Sequence[str]) -> list[str]:
        """Return the run's options with the layout's options replaced by these flags."""
        return [*flags, *_other_words(self.config)]

    def best(self, left: int) -> Found:
        """Return the fastest layout on at most `left` nodes that the rehearsal accepts.

        left: the number of usable nodes. Raise UserError if the planner has no layout, if a step is
        slower than --max-slowdown allows, or if the MOST_REHEARSED fastest layouts are rejected.
        """
        if self.config.training.decrease_batch_size_if_needed:
            raise UserError("--decrease-batch-size-if-needed: another layout has other batches")
        if self.seconds is None:
            raise UserError(f"the planner does not price the layout as given: {self.rejected}")
        rows = self._rows(left)
        limit = self.options.max_slowdown
        finding = ""  # the text of the latest rehearsal
        if not rows:
            raise UserError(f"the planner finds no layout on {left} nodes")
        for row in rows[:MOST_REHEARSED]:
            slowdown = row["seconds"] / self.seconds
            times = f"a step {slowdown:.2f} times as long, as predicted on {self.planned_on}"
            if slowdown > limit:
                finding = finding or f"{times}: above --max-slowdown {limit:g}"
                break
            accepted, finding = self._rehearse(row)
            if accepted:
                flags = " ".join(row["flags"]) or "without flags"
                reason = f"goes on with {row['nodes']} nodes, {flags}: {times}; {finding}"
                return Found(row["nodes"], tuple(row["flags"]), reason)
        raise UserError(f"on {left} nodes {finding}")

    def _rows(self, left: int) -> list[dict[str, Any]]:
        """Return the planner's layouts on `left` nodes and fewer, the fastest first.

        Every number of nodes above left / 2 is tried: a smaller number often divides the batch
        better, such as 32 instead of 47. A row has nodes, seconds of a step, flags and rampup.
        """
        flags = self._kept_flags()
        counts = range(left, left // 2, -1)  # numbers of nodes
        rows = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = pool.map(lambda nodes: self._plan(nodes, flags), counts)
            for nodes, answer in zip(counts, answers):
                rows += [row | {"nodes": nodes} for row in answer["ranked"]]
        # Other rows have a size in the batch's ramp-up that the layout does not divide.
        rows = [row for row in rows if row["rampup"] in ("-", "fits")]
        return sorted(rows, key=lambda row: row["seconds"])

    def _kept_flags(self) -> list[str]:
        """Return flags of the layout options that stay as given; the planner chooses the others."""
        layout = self.config.layout
        keep = self.options.keep
        free = {"dp", *KEPT} - keep  # names of the options that the planner chooses
        if "recompute" in free:
            free.add("recompute_layers")
        if "," in layout.partition and "pp" in free:  # a list of blocks is for the given pp
            free.add("partition")
        default = Layout()
        kept = replace(layout, **{name: getattr(default, name) for name in free})
        return to_words(kept, always=keep)

    def _plan(self, nodes: int, flags: Sequence[str], *more: str) -> dict[str, Any]:
        """Return plan.py's JSON answer for a number of nodes: layouts in `ranked` and `rejected`.

        flags: the layout's fixed options. more: further options of plan.py. Raise UserError if
        plan.py reports a user's mistake; any other failure of plan.py is a rejected layout.
        """
        words = ["layouts", "--json", *self.machine, "--gpus", str(self._ranks(nodes)), *more]
        done = _run("plan.py", [*words, *self.words(flags)], SECONDS_TO_PLAN)
        error = _last_line(done.stderr)
        if done.returncode == 2:
            raise UserError(error.removeprefix("error: "))
        if done.returncode:
            return {"ranked": [], "rejected": [{"reason": f"plan.py has failed: {error}"}]}
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def _rehearse(self, row: dict[str, Any]) -> tuple[bool, str]:
        """Rehearse a layout; return whether it is accepted, and a sentence on the rehearsal.

        row: a row of `_rows`. A layout that cannot be rehearsed is accepted.
        """
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
        """Return the number of ranks on this number of nodes; 0 without a Slurm job."""
        return nodes * (self.command.job.tasks_per_node if self.command.job else 0)


def _other_words(config: Config) -> list[str]:
    """Return the words of all options of a run except the layout's.

    precision and global_batch_size are always included, because plan.py has other defaults.
    """
    training = to_words(config.training, always=("precision", "global_batch_size"))
    return [*to_words(config.model), *training, *to_words(config.data), *to_words(config.run)]


def _run(program: str, words: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program in Trine's root folder and return its status and output.

    program: its file name. words: its arguments. After `seconds` it is killed; its status is 124.
    """
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
    """Return the last line of a program's messages, or `no answer` if there is none."""
    return (text.strip().splitlines() or ["no answer"])[-1]
