"""Finds a layout for fewer nodes than a run was started on, by the planner and a rehearsal.

    options = Options("v100-32", None, 1.5)
    found = Fewer(command, config, options).best(left=47)      # a layout on at most 47 nodes

The planner predicts the seconds of a step with each layout. The rehearsal (rehearse.py) runs one
layout's ranks without a GPU, and finds operations that would hang and too little memory. It is
started as a process, because the supervisor must not import torch. Model, data and global batch
stay the same, so training does too. The layout as given is the layout of the user's command; a
layout's flags are its options as words of a command line.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from base.errors import LayoutError, UserError
from config.command_line import to_words
from config.schema import GROUPS, Config, Layout
from config.validation import refusal
from costs import hardware, risk
from tools.planner import layouts
from tools.planner.enumeration import Asked
from tools.supervisor.command import Command

REHEARSE = Path(__file__).resolve().parents[2] / "rehearse.py"
# Options of a layout that the planner chooses for fewer nodes; the others stay as given.
FREE = (
    *("dp", "tp", "pp", "micro_batch_size", "zero"),
    *("recompute", "recompute_layers", "recompute_blocks"),
)
MOST_REHEARSED = 3  # the most layouts that are rehearsed, the fastest first
SECONDS_TO_REHEARSE = 900.0  # after this time a rehearsal is killed


@dataclass(frozen=True)
class Options:
    """The user's limits for layouts on fewer nodes."""

    gpu: str  # the name of a machine of hardware/
    calibration: str | None  # the planner's --calibration; None if it was not given
    max_slowdown: float  # how many times longer than with the layout as given a step may take


@dataclass(frozen=True)
class SmallerLayout:
    """A layout on fewer nodes.

    nodes: the number of nodes. flags: the layout's options. seconds: the predicted seconds of a
    step. reason: why this layout was chosen; empty until it was chosen.
    """

    nodes: int
    flags: tuple[str, ...]
    seconds: float
    reason: str = ""


class Fewer:
    """Finds layouts of one run on fewer nodes.

    config: the run's configuration, before dp is filled in.
    """

    def __init__(self, command: Command, config: Config, options: Options):
        """Predict the seconds of a step with the layout as given, to compare others with it.

        config: the run's configuration, before dp is filled in. Raise UserError if the planner
        finds a user's mistake.
        """
        self.command = command
        self.config = config
        self.options = options
        self.machine = hardware.load(options.gpu, options.calibration)
        given = {name: value for name, value in vars(config.layout).items() if value is not None}
        # The options of the user's layout are fixed. The user runs this layout already, so any risk
        # of running out of memory (1.0) is accepted.
        answer = self._rank(command.used, given, accepted=1.0)
        # The predicted seconds of a step with the layout as given; None if the planner rejects this
        # layout, for the reason `rejected`.
        self.seconds: float | None = None
        self.rejected = answer.rejected[0].reason if answer.rejected else "no layout is left"
        if answer.ranked:
            self.seconds = answer.ranked[0].prediction.seconds

    def options_with(self, flags: tuple[str, ...]) -> list[str]:
        """Return the run's options as arguments, with these flags in place of the layout's."""
        arguments = list(flags)
        for group in GROUPS:  # the groups of options: model, layout, data, ...
            if group != "layout":
                arguments += to_words(getattr(self.config, group))
        return arguments

    def best(self, left: int) -> SmallerLayout:
        """Return the fastest layout on at most `left` nodes that the rehearsal accepts.

        left: the number of usable nodes. Raise UserError if the planner has no layout, if a step is
        slower than --max-slowdown allows, or if the MOST_REHEARSED fastest layouts are rejected.
        """
        if self.seconds is None:
            raise LayoutError(f"the planner does not price the layout as given: {self.rejected}")
        layouts_by_speed = self._layouts(left)
        if not layouts_by_speed:
            raise LayoutError(f"the planner finds no layout on {left} nodes")
        limit = self.options.max_slowdown
        finding = ""  # the text of the latest rehearsal
        for found in layouts_by_speed[:MOST_REHEARSED]:
            slowdown = found.seconds / self.seconds
            times = f"a step {slowdown:.2f} times as long, as predicted on {self.machine.name}"
            if slowdown > limit:  # the layouts are sorted: the next ones are slower still
                finding = finding or f"{times}: above --max-slowdown {limit:g}"
                break
            accepted, finding = self._rehearse(found)
            if accepted:
                flags = " ".join(found.flags) or "without flags"
                reason = f"goes on with {found.nodes} nodes, {flags}: {times}; {finding}"
                return replace(found, reason=reason)
        raise UserError(f"on {left} nodes {finding}")

    def _layouts(self, left: int) -> list[SmallerLayout]:
        """Return the planner's layouts on `left` nodes and fewer, the fastest first.

        Every number of nodes above left / 2 is tried: a smaller number often divides the batch
        better, such as 32 instead of 47.
        """
        free = [*FREE]  # options that the planner chooses anew
        # A --partition that lists each stage's blocks fits only the pp that the user has given.
        if "," in self.config.layout.partition:
            free.append("partition")
        default = Layout()
        kept = {}  # the options that the user has set and the planner may not choose
        for name, value in vars(self.config.layout).items():
            if name not in free and value != getattr(default, name):
                kept[name] = value
        found = []
        for nodes in range(left, left // 2, -1):
            for ranked in self._rank(nodes, kept, risk.DEFAULT).ranked:
                if ranked.prediction.risk <= risk.DEFAULT:  # the risk of running out of memory
                    # Without --dp: train.py computes it from the number of ranks.
                    flags = tuple(to_words(ranked.layout, without="dp"))
                    found.append(SmallerLayout(nodes, flags, ranked.prediction.seconds))
        return sorted(found, key=lambda layout: layout.seconds)

    def _rank(self, nodes: int, fixed: dict[str, Any], accepted: float) -> layouts.Ranking:
        """Return the planner's layouts on a number of nodes.

        fixed: options of the layout that the planner must not change, by name. accepted: the
        largest risk of running out of memory with which a layout is ranked.
        """
        # --precision auto becomes the precision of this machine's GPUs.
        config = self.config.with_precision(self.machine.precision)
        ranks = self._ranks(nodes)
        asked = Asked(config.model, config.training, self.machine, ranks, fixed)

        def refused(layout: Layout) -> str:
            """Return the reason why train.py would not run a layout, or an empty text."""
            return refusal(replace(config, layout=layout), ranks)

        return layouts.rank(asked, refused, accepted)

    def _rehearse(self, found: SmallerLayout) -> tuple[bool, str]:
        """Rehearse a layout; return whether it is accepted, and a sentence on the rehearsal.

        A layout that cannot be rehearsed is accepted: then the planner's prediction alone counts.
        """
        words = ["--gpus", str(self._ranks(found.nodes)), "--nodes", str(found.nodes)]
        words += ["--gpu", self.options.gpu]
        if self.options.calibration:
            words += ["--calibration", self.options.calibration]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "answers.json")
            error = _run_rehearsal([*words, "--json", str(file), *self.options_with(found.flags)])
            # The text of the fault, "" without a fault, or None if there was no rehearsal.
            finding = json.loads(file.read_text())["finding"] if file.exists() else None
        if finding:
            return False, f"the rehearsal rejects {' '.join(found.flags)}: {finding}"
        if finding is None:
            return True, f"not rehearsed: {error}"
        return True, "rehearsed: all operations of the ranks that were run match, and it fits"

    def _ranks(self, nodes: int) -> int:
        """Return the number of ranks on this number of nodes; 0 without a Slurm job."""
        return nodes * (self.command.job.tasks_per_node if self.command.job else 0)


def _run_rehearsal(words: list[str]) -> str:
    """Run rehearse.py with these arguments; return the last line of its messages.

    The result itself is in the file that the arguments name; the line tells why there is none.
    """
    try:
        done = subprocess.run(
            [sys.executable, str(REHEARSE), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_REHEARSE,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS_TO_REHEARSE:g} s"
    return (done.stderr.strip().splitlines() or ["no answer"])[-1]
