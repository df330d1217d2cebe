"""Measured steps of a run, and what each cause of lost time takes of them.

    rows = read_rows("runs/a", ranks)             the run's times.jsonl
    steps = MeasuredSteps(rows, layout, order)    passes, waits and messages as arrays
    lost = steps.causes(shares)                   seconds of a step by cause; they sum to the step

A pipeline is the ranks that differ in pp alone. Each pipeline of each step is simulated
(schedules.simulation) with the seconds that its passes, waits and messages took. A cause's seconds
are what the simulated step loses when that cause takes no time, the causes before it being gone.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config.messages import UserError
from config.schema import Layout, rows_along
from planner.run_files import rows_of
from schedules.schedule import Action, Schedule
from schedules.simulation import Timing, simulate_each

# A rank is slow if it computes this many times as long as the median of the ranks with its stages;
# the second number is for ranks that are alone with their stages and compared with all others.
SLOW, SLOW_ALONE = 1.10, 1.5
# A receive that waited for fewer seconds than this found its message there.
MOST_ARRIVED = 50e-6
LARGEST_NUMBER = 1e15  # microseconds in times.jsonl: 30 years
AROUND = ("log", "begin", "reduce", "optimizer", "statistics")  # phases beside the passes
CAUSES_OF_WAITS = {"tied": "dp", "world": "all ranks"}  # other kinds of waits are causes themselves
IN_PASSES = ("tp", "cp", "dp", "all ranks")  # causes of waits inside of passes
# All causes, in the order in which they are removed: those that take time beside the computing, and
# those by which passes compute for different times.
PARTS = ("host", "data", "p2p", *IN_PASSES, "optimizer")
COMPUTED = ("slow ranks", "variation", "imbalance")


@dataclass(frozen=True)
class Row:
    """One measured step, in seconds; the first axis of an array is the rank.

    passes: of each pass start, end, data, when its last message arrived, and waits by `kinds`.
    around: of each phase its own seconds and its waits. measured: without saves and evaluations.
    clocks: when each rank began to measure. spent: by phase, in the `steps` since the row before.
    follows_others: whether a save or an evaluation came before it.
    """

    steps: float
    spent: dict[str, float]
    kinds: list[str]
    nodes: list[str]
    passes: np.ndarray
    around: np.ndarray
    measured: np.ndarray
    clocks: np.ndarray
    follows_others: bool


def read_rows(run: str, ranks: int) -> list[Row]:
    """The measured steps of a run on that many ranks; UserError, with the line, if times.jsonl has
    values that telemetry/step_times.py does not write.
    """
    file, found = Path(run) / "times.jsonl", []
    for number, values in enumerate(rows_of(file), start=1):
        try:
            found.append(_row(values))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            where = f"{file}, line {number}"
            raise UserError(f"{where} has not the numbers of a measured step: {error}") from None
        if len(found[-1].nodes) != ranks:
            there = f"{file}, line {number} has times of {len(found[-1].nodes)} ranks"
            raise UserError(f"{there}, but the run has {ranks}")
    return found


def _row(values: Mapping[str, Any]) -> Row:
    """One line of times.jsonl. Its passes and phases are in microseconds, its clocks in seconds."""
    ranks = values["ranks"]
    kinds = [CAUSES_OF_WAITS.get(kind, kind) for kind in values["waits"]]
    passes = _numbers([rank["passes"] for rank in ranks])
    around = _numbers([[rank["around"][name] for name in AROUND] for rank in ranks])
    whole = _numbers([[rank["total"], rank["apart"]] for rank in ranks])
    clocks = _numbers([[rank["began"], rank["offset"], rank["error"]] for rank in ranks])
    widths = passes.shape[2], around.shape[2], passes.size > 0
    if widths != (4 + len(kinds), 1 + len(kinds), True) or not {"tp", "p2p"} <= set(kinds):
        raise ValueError("numbers are missing")
    # Ranks of a node have the same clock; its offset is that of the rank with the smallest error.
    nodes = [str(rank["node"]) for rank in ranks]
    surest_last = np.argsort(-clocks[:, 2], kind="stable")
    offsets = {nodes[rank]: clocks[rank, 1] for rank in surest_last}
    return Row(
        steps=float(_numbers(values["steps"])),
        spent={phase: float(_numbers(spent)) for phase, spent in values["spent"].items()},
        kinds=kinds,
        nodes=nodes,
        passes=passes / 1e6,
        around=around / 1e6,
        measured=(whole[:, 0] - whole[:, 1]) / 1e6,
        clocks=clocks[:, 0] + [offsets[node] for node in nodes],
        follows_others=bool(whole[:, 1].any()),
    )


def _numbers(values: Any) -> np.ndarray:
    """An array of numbers that a run can have written; ValueError or TypeError if they are not."""
    found = np.array(values, float)
    if not (np.abs(found) < LARGEST_NUMBER).all():
        raise ValueError("a number is too large")
    return found


class Pass:
    """One pass of the schedule, in arrays of seconds with the axes step and pipeline.

    compute: what the rank computes. parts: by cause, what the pass takes beside it: `host` and
    `data` before it waits for its input, `p2p` of the message with its input, and waits for other
    ranks. ready, end: when the last message arrived and when the pass ended, on one clock.
    """

    def __init__(self, numbers: np.ndarray, kinds: Sequence[str], clock: np.ndarray):
        """numbers: those of a Row; kinds: of its waits; clock: when the rank began to measure."""
        start, end, data, ready, *waits = np.moveaxis(numbers, -1, 0)
        self.compute = end - start - data - sum(waits)
        self.end = clock + end
        self.ready = clock + ready
        self.parts: dict[str, Any] = dict.fromkeys(PARTS, 0.0)
        self.parts["data"] = data
        for kind, waited in zip(kinds, waits, strict=True):
            self.parts[kind] = self.parts[kind] + waited

    def set_message(self, sender: "Pass | None") -> None:
        """Turn the wait for the input into the seconds from the end of the pass that made the input
        until the input was there.
        """
        late = self.parts["p2p"] >= MOST_ARRIVED
        seconds = self.ready - sender.end if sender else np.zeros(late.shape)
        self.parts["p2p"] = np.where(late, np.maximum(seconds, 0.0), 0.0)

    @property
    def timing(self) -> Timing:
        """The same for the simulation."""
        parts = self.parts
        waits = sum(parts[cause] for cause in IN_PASSES)
        return Timing(parts["host"] + parts["data"], parts["p2p"], self.compute + waits)


class MeasuredSteps:
    """Steps with the same schedule. pipelines: their ranks. passes: of all steps and pipelines.

    after: by cause, seconds of each step that follow its last pass. measured: mean seconds of a
    step, without saves and evaluations.
    """

    def __init__(self, rows: Sequence[Row], layout: Layout, order: Schedule):
        """Raises ValueError if the rows have other passes than the order."""
        self.order = order
        self.axes = layout.axes
        self.pipelines = rows_along(layout.axes, ["pp"])
        kinds = rows[0].kinds
        self.measured = float(np.mean([row.measured[0] for row in rows]))
        clocks = np.array([row.clocks for row in rows])
        passes = np.array([row.passes for row in rows])
        around = np.array([row.around for row in rows])
        if passes.shape[2] != len(order.ranks[0]):
            raise ValueError("its passes are not those of its schedule")
        before = around[:, :, :2, 0].sum(axis=2)  # `log` and `begin`
        self.passes: dict[Action, Pass] = {}
        for actions, ranks in zip(order.ranks, np.transpose(self.pipelines), strict=True):
            for number, action in enumerate(actions):
                self.passes[action] = Pass(passes[:, ranks, number], kinds, clocks[:, ranks])
            self.passes[actions[0]].parts["host"] = before[:, ranks]
        for action, one in self.passes.items():
            sender = order.input_of(action)
            one.set_message(self.passes[sender] if sender else None)

        # All ranks leave the step's last phase at once, so the rank that ended its passes last
        # takes the shortest time from there on.
        after = around[:, :, 2:].sum(axis=2)
        last = np.arange(len(rows)), after.sum(axis=2).argmin(axis=1)
        self.after: dict[str, Any] = dict.fromkeys(PARTS, 0.0)
        _, _, reduce, optimizer, statistics = around[last][:, :, 0].T
        self.after["optimizer"] = reduce + optimizer
        self.after["host"] = statistics
        for kind, waited in zip(kinds, after[last][:, 1:].T, strict=True):
            # Messages after the passes are those of replicas.
            cause = "dp" if kind == "p2p" else kind
            self.after[cause] = self.after[cause] + waited

    def seconds(self) -> float:
        """Mean seconds of a step, simulated."""
        slots = simulate_each(self.order, lambda action: self.passes[action].timing, np.maximum)
        ends = np.max([row[-1].end for row in slots], axis=0)
        return float(np.mean(ends.max(axis=1) + sum(self.after.values())))

    def by_stage(self, seconds_of: Callable[[Pass], Any]) -> dict[tuple[str, int], float]:
        """Means over the passes of a kind in a stage."""
        groups = self._alike(over_stages=False)
        return {
            key: float(np.mean([seconds_of(one) for one in alike])) for key, alike in groups.items()
        }

    def _alike(self, over_stages: bool) -> dict[tuple[str, int], list[Pass]]:
        """The passes by kind and stage; over_stages: by kind alone."""
        found = defaultdict[tuple[str, int], list[Pass]](list)
        for action, one in self.passes.items():
            found[action.kind, 0 if over_stages else action.stage].append(one)
        return found

    def computed(self) -> np.ndarray:
        """Mean seconds of a step that every rank of every pipeline computes in its passes."""
        of_ranks = []
        for actions in self.order.ranks:
            seconds = sum(self.passes[action].compute for action in actions)
            of_ranks.append(np.mean(seconds, axis=0))
        return np.transpose(of_ranks)

    def usual_shares(self, shares: Sequence[float]) -> np.ndarray:
        """For every rank of every pipeline, the seconds that a usual rank computes as a share of
        its own: 1 unless the rank is slow. shares: of the model's time, by stage.
        """
        stages = [self.order.stages_on(pp) for pp in range(len(self.order.ranks))]
        rates = self.computed() / [sum(shares[stage] for stage in held) for held in stages]
        alone = len(self.pipelines) == 1
        usual = np.quantile(rates, 0.5, axis=None if alone else 0, method="lower")
        slow = rates > usual * (SLOW_ALONE if alone else SLOW)
        return np.where(slow, usual / rates, 1.0)

    def lost_by_slow_ranks(self, shares: Sequence[float]) -> dict[int, float]:
        """Seconds that slow ranks compute longer in a step than usual, by rank."""
        lost = self.computed() * (1 - self.usual_shares(shares))
        by_rank = zip(np.ravel(self.pipelines), np.ravel(lost), strict=True)
        return {int(rank): float(seconds) for rank, seconds in by_rank if seconds}

    def remove(self, cause: str, shares: Sequence[float]) -> None:
        """Let a cause of PARTS or of COMPUTED take no time."""
        if cause == "slow ranks":
            usual = self.usual_shares(shares)
            for action, one in self.passes.items():
                one.compute *= usual[:, self.order.rank_of[action.stage]]
        elif cause in COMPUTED:
            for alike in self._alike(over_stages=cause == "imbalance").values():
                mean = np.mean([one.compute for one in alike], axis=(0, 2))
                for one in alike:
                    one.compute = np.tile(mean[:, None], len(self.pipelines))
        else:
            for parts in [self.after, *(one.parts for one in self.passes.values())]:
                parts[cause] = 0.0

    def causes(self, shares: Sequence[float]) -> dict[str, float]:
        """Mean seconds of a step by cause; the steps have lost all causes then.

        `compute` is what the passes of the average rank compute; `unexplained` is measured and not
        found when the step is simulated.
        """
        left = self.seconds()
        found = {"unexplained": self.measured - left}
        for cause in (*PARTS, *COMPUTED):
            self.remove(cause, shares)
            now = self.seconds()
            found[cause], left = left - now, now
        found["compute"] = float(self.computed().mean())
        found["bubble"] = left - found["compute"]
        return found
