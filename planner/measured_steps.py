"""Measured steps of a run, and what each cause of lost time takes of them.

    rows = read_rows("runs/a", ranks)             the run's times.jsonl
    steps = MeasuredSteps(rows, layout, order)    passes, waits and messages as arrays
    lost = steps.causes(shares)                   seconds of a step by cause; they sum to the step

A pipeline is the ranks that differ in pp alone. Each pipeline of each step is simulated
(schedules.simulation) with the seconds that its passes, waits and messages took. A cause's seconds
are what the simulated step loses when that cause takes no time, the causes before it being gone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
OF_RANK = ("total", "apart", "began", "offset", "error")  # numbers of a rank for the whole step
CAUSES_OF_WAITS = {"tied": "dp", "world": "all ranks"}  # other kinds of waits are causes themselves
# Causes that take time beside the computing, in the order in which they are removed. After them
# come those by which ranks compute for different times.
PARTS = ("host", "data", "p2p", "tp", "cp", "dp", "all ranks", "optimizer")
UNEVEN = ("slow ranks", "variation", "imbalance")
# The first axis of an array of seconds: by cause, and last what is computed.
PLACE = {name: number for number, name in enumerate((*PARTS, "compute"))}
MESSAGE = PLACE["p2p"]
COMPUTE = PLACE["compute"]


class Row(NamedTuple):
    """One measured step. Arrays of seconds have the axes rank and pass, after that of PLACE.

    seconds: of every pass by PLACE, where `p2p` is the wait for its input. ended, ready: when a
    pass ended and when its last message arrived, on one clock. after: what follows the passes, by
    PLACE. measured: the step without saves and evaluations; follows_others: whether there were any
    just before it. spent: by phase, in the `steps` since the row before.
    """

    steps: float
    spent: dict[str, float]
    nodes: list[str]
    seconds: np.ndarray
    ended: np.ndarray
    ready: np.ndarray
    after: np.ndarray
    measured: float
    follows_others: bool


def read_rows(run: str, ranks: int) -> list[Row]:
    """The measured steps of a run on that many ranks; UserError, with the line, if times.jsonl has
    values that telemetry/step_times.py does not write.
    """
    file = Path(run) / "times.jsonl"
    rows = []
    for number, values in enumerate(rows_of(file), start=1):
        try:
            row = _row(values)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"has not the numbers of a measured step: {error}"
            raise UserError(f"{file}, line {number} {reason}") from None
        if len(row.nodes) != ranks:
            has = f"has times of {len(row.nodes)} ranks, but the run has {ranks}"
            raise UserError(f"{file}, line {number} {has}")
        rows.append(row)
    return rows


def _row(values: Mapping[str, Any]) -> Row:
    """One line of times.jsonl. Its passes and phases are in microseconds, its clocks in seconds."""
    ranks = values["ranks"]
    kinds = [CAUSES_OF_WAITS.get(kind, kind) for kind in values["waits"]]
    passes = _numbers([rank["passes"] for rank in ranks]) / 1e6
    around = _numbers([[rank["around"][name] for name in AROUND] for rank in ranks]) / 1e6
    total, apart, began, offset, error = _numbers([[r[name] for name in OF_RANK] for r in ranks]).T
    steps = float(_numbers(values["steps"]))
    if steps < 1 or (total <= apart).any():
        raise ValueError("a step takes no time")
    start, end, data, ready, *waits = np.moveaxis(passes, 2, 0)
    seconds = _by_cause(waits, kinds)
    seconds[PLACE["data"]] = data
    seconds[COMPUTE] = end - start - data - sum(waits)
    log, begin, *after_passes = np.moveaxis(around, 1, 0)
    seconds[PLACE["host"], :, 0] = log[:, 0] + begin[:, 0]
    # The rank that ends its passes last is the one that counts from there on: all ranks leave the
    # last phase of a step at once.
    last = int(end[:, -1].argmax())
    computed, *waits = sum(after_passes)[last]
    after = _by_cause(waits, kinds)
    after[PLACE["optimizer"]] = computed
    # Ranks of a node have the same clock; its offset is that of the rank with the smallest error.
    nodes = [str(rank["node"]) for rank in ranks]
    offsets = {nodes[rank]: offset[rank] for rank in np.argsort(-error)}
    clocks = (began + [offsets[node] for node in nodes])[:, None]
    return Row(
        steps=steps,
        spent={phase: float(_numbers(spent)) for phase, spent in values["spent"].items()},
        nodes=nodes,
        seconds=seconds,
        ended=clocks + end,
        ready=clocks + ready,
        after=after,
        measured=float(total[last] - apart[last]) / 1e6,
        follows_others=bool(apart.any()),
    )


def _numbers(values: Any) -> np.ndarray:
    """An array of numbers that a run can have written; ValueError or TypeError if they are not."""
    found = np.array(values, float)
    if not (np.abs(found) < LARGEST_NUMBER).all():
        raise ValueError("a number is too large")
    return found


def _by_cause(waits: Sequence[Any], kinds: Sequence[str]) -> np.ndarray:
    """The waits of these kinds, added by PLACE."""
    seconds = np.zeros((len(PLACE), *np.shape(waits[0])))
    for kind, waited in zip(kinds, waits, strict=True):
        seconds[PLACE[kind]] += waited
    return seconds


class MeasuredSteps:
    """Steps with the same schedule, in arrays of seconds whose first axis is PLACE.

    seconds: what each pass takes: (PLACE, step, pipeline, pipeline rank, pass). `host` and `data`
    come before the wait for its input, `p2p` is the time of the message with its input, from the
    end of the pass that made it. after: what follows the last pass of every step: (PLACE, step).
    measured: mean seconds of a step, without saves and evaluations.
    """

    def __init__(self, rows: Sequence[Row], layout: Layout, order: Schedule):
        """Raises ValueError if the rows have other passes than the order."""
        self.order = order
        self.pipelines = np.array(rows_along(layout.axes, ["pp"]))  # ranks: (pipeline, pp)
        self.measured = float(np.mean([row.measured for row in rows]))
        self.after = np.stack([row.after for row in rows], axis=1)
        self.seconds = np.stack([row.seconds[:, self.pipelines] for row in rows], axis=1)
        ended = np.array([row.ended[self.pipelines] for row in rows])
        ready = np.array([row.ready[self.pipelines] for row in rows])
        if ended.shape[3] != len(order.ranks[0]):
            raise ValueError("its passes are not those of its schedule")
        self.place_of: dict[Action, tuple[int, int]] = {}
        for rank, actions in enumerate(order.ranks):
            self.place_of |= {action: (rank, number) for number, action in enumerate(actions)}
        late = self.seconds[MESSAGE] >= MOST_ARRIVED
        self.seconds[MESSAGE] = 0.0
        for action, (rank, number) in self.place_of.items():
            if sender := order.input_of(action):
                sent = ended[:, :, *self.place_of[sender]]
                message = np.maximum(0.0, ready[:, :, rank, number] - sent)
                self.seconds[MESSAGE, :, :, rank, number] = late[:, :, rank, number] * message

    def timing_of(self, action: Action) -> Timing:
        """Return the seconds of an action in the simulation, in every step and pipeline."""
        host, data, message, *waits_and_compute = self.seconds[:, :, :, *self.place_of[action]]
        return Timing(host + data, message, sum(waits_and_compute))

    def simulated(self) -> float:
        """Mean seconds of a step, simulated."""
        slots = simulate_each(self.order, self.timing_of, np.maximum)
        ends = np.max([row[-1].end for row in slots], axis=(0, 2))
        return float((ends + self.after.sum(axis=0)).mean())

    def by_stage(self) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
        """Mean seconds of passes, with their waits, and of messages that ranks waited for, by kind
        of pass and stage.
        """
        runs = {}
        messages = {}
        for key in dict.fromkeys((action.kind, action.stage) for action in self.place_of):
            timings = [self.timing_of(action) for action in self.place_of if action[:2] == key]
            runs[key] = float(np.mean([timing.runs for timing in timings]))
            sent = np.array([timing.message for timing in timings])
            messages[key] = float(sent.sum() / max(1, np.count_nonzero(sent)))
        return runs, messages

    def computed(self) -> np.ndarray:
        """The mean over the steps of the seconds in which a rank computes: (pipelines, ranks)."""
        return self.seconds[COMPUTE].sum(axis=3).mean(axis=0)

    def usual_shares(self, shares: Sequence[float]) -> np.ndarray:
        """For the ranks of every pipeline, the seconds that a usual rank computes as a share of the
        rank's own: 1 unless the rank is slow. shares: of the model's time, by stage.
        """
        of_ranks = np.bincount(self.order.rank_of, shares)
        rates = self.computed() / of_ranks
        alone = len(self.pipelines) == 1
        usual = np.quantile(rates, 0.5, axis=None if alone else 0, method="lower")
        slow = rates > usual * (SLOW_ALONE if alone else SLOW)
        return np.where(slow, usual / rates, 1.0)

    def causes(self, shares: Sequence[float]) -> dict[str, float]:
        """Mean seconds of a step by cause; the steps have lost all causes then.

        `compute` is what the passes of the average rank compute; `unexplained` is measured and not
        found when the step is simulated.
        """
        left = self.simulated()
        found = {"unexplained": self.measured - left}
        for cause in (*PARTS, *UNEVEN):
            self._remove(cause, shares)
            now = self.simulated()
            found[cause] = left - now
            left = now
        found["compute"] = float(self.computed().mean())
        found["bubble"] = left - found["compute"]
        return found

    def _remove(self, cause: str, shares: Sequence[float]) -> None:
        """Let a cause take no time. Without `variation` the passes of a kind and stage compute
        equally long in a step, without `imbalance` those of a kind.
        """
        if cause == "slow ranks":
            self.seconds[COMPUTE] *= self.usual_shares(shares)[:, :, None]
        elif cause in UNEVEN:
            same = 1 if cause == "imbalance" else 2
            keys = [[str(action[:same]) for action in actions] for actions in self.order.ranks]
            for key in np.unique(keys):
                of_key = np.array(keys) == key
                mean = self.seconds[COMPUTE][:, :, of_key].mean(axis=(1, 2))
                self.seconds[COMPUTE][:, :, of_key] = mean[:, None, None]
        else:
            self.after[PLACE[cause]] = 0.0
            self.seconds[PLACE[cause]] = 0.0
