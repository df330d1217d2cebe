"""A measured step run again in arithmetic: how long it takes when a cause of lost time is gone.

    step = Step(row, layout, schedule)                  a row of times.jsonl
    step.seconds()                                      as its passes, messages and waits give it
    lost = causes([step, ...], shares)                  seconds by cause, measured one after another

Ranks that wait for one another inside of passes (those of tp and cp, with gradients reduced in the
passes those of dp too) are one unit: a pass takes what its slowest rank computes, and what all
wait beside. A unit begins a pass when it has done the one before and the message is there.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from config.schema import Layout, coordinates, rows_along
from schedules.schedule import Action, Schedule

COLLECTIVES = ("tp", "cp", "dp")  # that a pass may wait for
AROUND = ("reduce", "optimizer", "statistics")  # what follows the passes, in that order
LEAST_DP_SHARE = 0.01  # of a step in which passes wait for dp: from here on replicas are one unit
SLOW, SLOW_ALONE = 1.10, 1.5  # times what others compute: with others of its stage, without
MOST_ARRIVED = 50e-6  # seconds: a receive that waited no longer found its message there


@dataclass(slots=True)
class Pass:
    """A pass of a unit, in seconds. own: what each of its ranks computes; data: the longest wait
    for a batch; waits: those for collectives that no rank's computing explains.
    """

    own: list[float]
    data: float
    waits: dict[str, float]
    sent: float  # from the end of the pass that sends its input until that is there

    @property
    def seconds(self) -> float:
        """From its input's arrival to its end."""
        return max(self.own) + self.data + sum(self.waits.values())


class Step:
    """One measured step. lanes: pipelines that do not wait for one another before the passes have
    ended, by position on dp. around: by name and rank, what it computes and waits outside of them.
    """

    def __init__(self, row: Mapping[str, Any], layout: Layout, schedule: Schedule):
        """ValueError if the row has other passes than the schedule."""
        self.ranks, self.waits, self.layout = row["ranks"], row["waits"], layout
        self.schedule, self.axes = schedule, layout.axes
        self.places = [coordinates(rank, self.axes) for rank in range(len(self.ranks))]
        first = self.ranks[0]
        self.measured = (first["total"] - first["apart"]) / 1e6
        self.began = _aligned(self.ranks)
        counts = [len(schedule.ranks[place["pp"]]) for place in self.places]
        if counts != [len(rank["passes"]) for rank in self.ranks]:
            raise ValueError("its passes are not those of its schedule")
        whole = sum(rank["total"] for rank in self.ranks)
        in_passes = sum(one[4 + self.waits.index("dp")] for r in self.ranks for one in r["passes"])
        lanes = [None] if in_passes > LEAST_DP_SHARE * whole else range(self.axes["dp"])
        self.lanes = [self._lane(position) for position in lanes]
        self.before = {rank: self._around(rank, "log") + self._around(rank, "begin")
                       for rank in range(len(self.ranks))}
        self.after = {name: [self._around(rank, name) for rank in range(len(self.ranks))]
                      for name in AROUND}
        self.after_waits = {name: self._waits_around(name) for name in AROUND}

    def _around(self, rank: int, name: str) -> float:
        return self.ranks[rank]["around"].get(name, [0])[0] / 1e6

    def _waits_around(self, name: str) -> dict[str, dict[tuple[int, ...], float]]:
        """By what is waited for and the ranks that do: what the last one to come waits."""
        rows = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp", "cp"), "tied": self.axes, "world": self.axes}
        found: dict[str, dict[tuple[int, ...], float]] = {}
        for kind, axes in rows.items():
            at = 1 + self.waits.index(kind)
            found[kind] = {}
            for group in rows_along(self.axes, axes):
                values = [self.ranks[rank]["around"].get(name, [0] * (at + 1))[at] for rank in group]
                values = [one for one in values if one] if kind == "tied" else values
                found[kind][group] = min(values, default=0) / 1e6
        return found

    # -- the passes -------------------------------------------------------------------------

    def _lane(self, position: int | None) -> list["Unit"]:
        """The units of a pipeline, by its rank; position: on dp, None: all replicas in one."""
        members: list[list[int]] = [[] for _ in range(self.axes["pp"])]
        for rank, place in enumerate(self.places):
            if position in (None, place["dp"]):
                members[place["pp"]].append(rank)
        return [Unit(ranks, self._passes(ranks, pp)) for pp, ranks in enumerate(members)]

    def _passes(self, members: list[int], pp: int) -> dict[Action, Pass]:
        found = {}
        for number, action in enumerate(self.schedule.ranks[pp]):
            rows = [self.ranks[rank]["passes"][number] for rank in members]
            own = [(row[1] - row[0] - row[2] - sum(row[4:])) / 1e6 for row in rows]
            data = max(row[2] for row in rows) / 1e6
            p2p = 4 + self.waits.index("p2p")
            length = statistics.fmean(row[1] - row[0] - row[p2p] for row in rows) / 1e6
            beside = max(0.0, length - max(own) - data)
            shares = {k: sum(row[4 + self.waits.index(k)] for row in rows) for k in COLLECTIVES}
            every = sum(shares.values()) or 1
            waits = {kind: beside * share / every for kind, share in shares.items()}
            sent = [self._sent(rank, action, row, row[p2p]) for rank, row in zip(members, rows)]
            found[action] = Pass(own, data, waits, statistics.fmean(sent))
        return found

    def _sent(self, rank: int, action: Action, row: Sequence[int], waited: int) -> float:
        """Seconds from the end of the pass that made a rank's input until it was there."""
        needed, place = self.schedule.input_of(action), self.places[rank]
        if needed is None or not row[3] or waited < 1e6 * MOST_ARRIVED:
            return 0.0
        pp = self.schedule.rank_of[needed.stage]
        source = self.places.index(place | {"pp": pp})
        end = self.ranks[source]["passes"][self.schedule.ranks[pp].index(needed)][1]
        apart = self.began[rank] - self.began[source]
        return min(waited / 1e6, max(0.0, apart + (row[3] - end) / 1e6))

    # -- how long it takes ------------------------------------------------------------------

    def seconds(self) -> float:
        """Of the step, from the end of the one before."""
        at = self._end_of_passes()
        for name in AROUND:
            at = [end + own for end, own in zip(at, self.after[name], strict=True)]
            for kind, groups in self.after_waits[name].items():
                if kind == "tied":
                    at = [end + wait for wait in groups.values() for end in at]
                    continue
                if kind == "world" and name == "optimizer":
                    continue
                for group, wait in groups.items():
                    met = max(at[rank] for rank in group) + wait
                    for rank in group:
                        at[rank] = met
        return max(at)

    def _end_of_passes(self) -> list[float]:
        """When every rank has done its passes."""
        at = [0.0] * len(self.ranks)
        for lane in self.lanes:
            ends: dict[Action, float] = {}
            now = [max(self.before[rank] for rank in unit.members) for unit in lane]
            for pp, action in self.schedule.order:
                one, needed, start = lane[pp].passes[action], self.schedule.input_of(action), now[pp]
                if needed is not None and self.schedule.rank_of[needed.stage] != pp:
                    start = max(start, ends[needed] + one.sent)
                for other in self.schedule.of_all_ranks(action):
                    start = max(start, ends[other])
                now[pp] = ends[action] = start + one.seconds
            for unit, end in zip(lane, now, strict=True):
                for rank in unit.members:
                    at[rank] = end
        return at

    def passes(self) -> list[tuple[list[int], Action, Pass]]:
        """Every pass with the ranks that do it."""
        return [(u.members, a, p) for lane in self.lanes for u in lane for a, p in u.passes.items()]

    # -- without a cause --------------------------------------------------------------------

    def without_host(self) -> None:
        """Nothing between the steps, nor around the passes but reduction and optimizer."""
        self.before = dict.fromkeys(self.before, 0.0)
        self.after["statistics"] = [0.0] * len(self.ranks)

    def without_data(self) -> None:
        """Every batch is there when it is asked for."""
        for _, _, one in self.passes():
            one.data = 0.0

    def without_messages(self) -> None:
        """An input is there when the pass that sends it has ended."""
        for _, _, one in self.passes():
            one.sent = 0.0

    def without(self, kind: str) -> None:
        """Its collectives take no time."""
        for _, _, one in self.passes():
            one.waits[kind] = 0.0
        for waits, other in product(self.after_waits.values(), ("tied", "world")):
            for name in (kind, other) if kind == "dp" else (kind,):
                waits[name] = dict.fromkeys(waits[name], 0.0)

    def without_excess(self, excess: Mapping[tuple[int, str, int], float]) -> None:
        """Slow ranks compute a pass as others do. excess: seconds by rank, kind and stage."""
        for members, (kind, stage, _), one in self.passes():
            one.own = [max(0.0, own - excess.get((rank, kind, stage), 0.0))
                       for rank, own in zip(members, one.own, strict=True)]

    def evenly(self, over_stages: bool) -> None:
        """Passes of a kind and stage compute equally long; over_stages: those of any stage."""
        groups = defaultdict(list)
        for _, (kind, stage, _), one in self.passes():
            groups[kind, None if over_stages else stage].append(one)
        for alike in groups.values():
            mean = statistics.fmean(max(one.own) for one in alike)
            for one in alike:
                one.own = [mean]

    def without_optimizer(self) -> None:
        """No rank computes anything after the passes."""
        self.after = {name: [0.0] * len(self.ranks) for name in AROUND}

    def busy(self) -> float:
        """Seconds that a rank computes in passes, on average."""
        units = sum(map(len, self.lanes))
        return sum(max(one.own) for _, _, one in self.passes()) / units


@dataclass(frozen=True)
class Unit:
    """Ranks that do the same passes together."""

    members: list[int]
    passes: dict[Action, Pass]


def _aligned(ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """When each rank's measuring began, on one clock; `error` is that of a node's `began`."""
    return [rank["began"] for rank in ranks]


def own_seconds(steps: Sequence[Step]) -> dict[tuple[int, str, int], float]:
    """What a pass computes on average, by rank, kind and stage."""
    found = defaultdict(list)
    for step in steps:
        for members, (kind, stage, _), one in step.passes():
            for rank, own in zip(members, one.own, strict=True):
                found[rank, kind, stage].append(own)
    return {key: statistics.fmean(values) for key, values in found.items()}


def slow_ranks(
    own: Mapping[tuple[int, str, int], float], shares: Sequence[float]
) -> dict[tuple[int, str, int], float]:
    """What slow ranks compute longer than others, by rank, kind and stage.

    A rank is compared with the others of its stages; one that is alone there with what the stages
    of all ranks need for their share (`shares`, by stage) of the model's time.
    """
    stages, ranks = defaultdict(set), defaultdict(set)
    for rank, _, stage in own:
        stages[rank].add(stage)
        ranks[stage].add(rank)
    total = {rank: sum(s for (r, _, _), s in own.items() if r == rank) for rank in stages}
    rates = {rank: total[rank] / sum(shares[s] for s in stages[rank]) for rank in stages}
    excess = {}
    for rank, own_stages in stages.items():
        peers = sorted(ranks[min(own_stages)])
        alone = len(peers) == 1
        usual = statistics.median_low([rates[each] for each in (rates if alone else peers)])
        if rates[rank] <= usual * (SLOW_ALONE if alone else SLOW):
            continue
        for (r, kind, stage), seconds in own.items():
            if r != rank:
                continue
            other = seconds * usual / rates[rank]
            if not alone:
                other = statistics.median_low([own[each, kind, stage] for each in peers])
            excess[rank, kind, stage] = seconds - other
    return excess


def causes(
    steps: Sequence[Step], excess: Mapping[tuple[int, str, int], float]
) -> dict[str, float]:
    """Mean seconds of the steps by cause, in the order in which each is then gone; they change.

    `compute` is what passes compute, of the average rank; `unexplained`: measured, but not found
    when the step is run again.
    """
    gone = {
        "host": Step.without_host,
        "data": Step.without_data,
        "p2p": Step.without_messages,
        "tp": lambda step: step.without("tp"),
        "cp": lambda step: step.without("cp"),
        "dp": lambda step: step.without("dp"),
        "slow ranks": lambda step: step.without_excess(excess),
        "variation": lambda step: step.evenly(over_stages=False),
        "imbalance": lambda step: step.evenly(over_stages=True),
        "optimizer": Step.without_optimizer,
        "bubble": lambda step: None,
    }
    found = dict.fromkeys(["compute", *gone, "unexplained"], 0.0)
    for step in steps:
        left = step.seconds()
        found["unexplained"] += step.measured - left
        for cause, remove in gone.items():
            remove(step)
            now = step.busy() if cause == "bubble" else step.seconds()
            found[cause] += left - now
            left = now
        found["compute"] += left
    return {cause: seconds / len(steps) for cause, seconds in found.items()}
