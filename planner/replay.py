"""A measured step run again in arithmetic: how long it takes when a cause of lost time is gone.

    step = Step(row, layout, schedule)          a row of times.jsonl
    step.seconds()                              of the step, from its passes, messages and waits
    lost = causes([step, ...], slow_ranks(...)) seconds by cause, each gone after those before it

Ranks that wait for one another inside of passes (those of tp and cp, and where passes wait for dp
the replicas too) are one unit: a pass takes what its slowest rank computes, and what all of them
wait beside. A unit begins a pass when it has done the one before and the input is there.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from config.schema import Layout, coordinates, rows_along
from schedules.schedule import Action, Schedule

LEAST_DP_SHARE = 0.01  # of a step in which passes wait for dp: from here on replicas are one unit
# Times what others compute from which on a rank is slow: of its stages, or of others if alone.
SLOW, SLOW_ALONE = 1.10, 1.5
MOST_ARRIVED = 50  # microseconds: a receive that waited no longer found its message there
# What a part of a step is counted as: computing around the passes, and waits by what for.
AROUND = {"reduce": "optimizer", "optimizer": "optimizer", "statistics": "host"}
COUNTED = {"tied": "dp", "world": "all ranks"}
Excess = Mapping[tuple[int, str, int], float]  # seconds by rank, kind of pass and stage


@dataclass
class Part:
    """A pass of a unit, or what its ranks do together after the passes. own: what each computes in
    a pass; parts: seconds by cause, `p2p` those until the input is there after it was sent.
    """

    members: Sequence[int]
    own: list[float]
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """From when input and batch are there to the end."""
        beside = sum(s for cause, s in self.parts.items() if cause not in ("p2p", "data"))
        return max(self.own) + beside


class Step:
    """One measured step. lanes: the pipelines that go their own ways until the passes have ended;
    for each of their ranks a unit's passes in order. measured: seconds, without saves in between.
    """

    def __init__(self, row: Mapping[str, Any], layout: Layout, schedule: Schedule):
        """ValueError if the row has other passes than the schedule."""
        self.ranks, self.waits = row["ranks"], row["waits"]
        self.schedule, self.axes = schedule, layout.axes
        self.places = [coordinates(rank, self.axes) for rank in range(len(self.ranks))]
        self.began = _aligned(self.ranks)
        self.measured = (self.ranks[0]["total"] - self.ranks[0]["apart"]) / 1e6
        counts = [len(schedule.ranks[place["pp"]]) for place in self.places]
        if counts != [len(rank["passes"]) for rank in self.ranks]:
            raise ValueError("its passes are not those of its schedule")
        dp, total = 4 + self.waits.index("dp"), sum(rank["total"] for rank in self.ranks)
        waited = sum(one[dp] for rank in self.ranks for one in rank["passes"])
        joined = waited > LEAST_DP_SHARE * total
        rows = rows_along(self.axes, ["cp", "tp", *["dp"] * joined])
        of_lane = range(0, len(rows), len(rows) // self.axes["pp"])
        units = [[rows[at + lane] for at in of_lane] for lane in range(len(rows) // len(of_lane))]
        self.lanes = [[self._passes(unit, pp) for pp, unit in enumerate(lane)] for lane in units]
        self.before = [[self._before(unit) for unit in lane] for lane in units]
        self.after = [part for name in AROUND for part in self._together(name)]

    def _before(self, members: Sequence[int]) -> Part:
        """Between the steps, and until the first pass."""
        around = [self.ranks[rank]["around"] for rank in members]
        host = max(each["log"][0] + each["begin"][0] for each in around)
        return Part(members, [0.0], {"host": host / 1e6})

    def _together(self, name: str) -> list[Part]:
        """What follows the passes under that name. All leave it at once, so the rank that came last
        is in it for the shortest time.
        """
        found = []
        for group in rows_along(self.axes, ("dp", "cp") if name == "optimizer" else self.axes):
            rows = [self.ranks[rank]["around"][name] for rank in group]
            last = min(rows, key=sum)
            own = min(sum(last), max(row[0] for row in rows))
            parts = {AROUND[name]: own / 1e6}
            for kind, wait in zip(self.waits, last[1:], strict=True):
                share = (sum(last) - own) * wait / (sum(last[1:]) or 1) / 1e6
                cause = COUNTED.get(kind, kind)
                parts[cause] = parts.get(cause, 0.0) + share
            parts["dp"] += parts.pop("p2p")
            found.append(Part(group, [0.0], parts))
        return found

    def _passes(self, members: Sequence[int], pp: int) -> dict[Action, Part]:
        """A unit's passes. Waits beside the slowest rank's computing: in proportion, by kind."""
        found, p2p = {}, 4 + self.waits.index("p2p")
        for number, action in enumerate(self.schedule.ranks[pp]):
            rows = [self.ranks[rank]["passes"][number] for rank in members]
            own = [(row[1] - row[0] - row[2] - sum(row[4:])) / 1e6 for row in rows]
            length = statistics.fmean(row[1] - row[0] - row[p2p] for row in rows) / 1e6
            parts = {"data": max(row[2] for row in rows) / 1e6}
            beside, waits = max(0.0, length - max(own) - parts["data"]), {}
            for kind in ("tp", "cp", "dp"):
                waits[kind] = sum(row[4 + self.waits.index(kind)] for row in rows)
            whole = sum(waits.values()) or 1
            parts |= {kind: beside * wait / whole for kind, wait in waits.items()}
            sent = [self._sent(rank, action, row) for rank, row in zip(members, rows, strict=True)]
            found[action] = Part(members, own, parts | {"p2p": statistics.fmean(sent)})
        return found

    def _sent(self, rank: int, action: Action, row: Sequence[int]) -> float:
        """Seconds from the end of the pass that made a rank's input until it was there."""
        needed, waited = self.schedule.input_of(action), row[4 + self.waits.index("p2p")]
        if needed is None or not row[3] or waited < MOST_ARRIVED:
            return 0.0
        pp = self.schedule.rank_of[needed.stage]
        source = self.places.index(self.places[rank] | {"pp": pp})
        end = self.ranks[source]["passes"][self.schedule.ranks[pp].index(needed)][1]
        since = self.began[rank] - self.began[source] + (row[3] - end) / 1e6
        return max(0.0, since)

    def every(self) -> list[tuple[Action, Part]]:
        """All passes of all units."""
        return [each for lane in self.lanes for unit in lane for each in unit.items()]

    def seconds(self) -> float:
        """Of the step, from the end of the one before."""
        at = [0.0] * len(self.ranks)
        for lane, before in zip(self.lanes, self.before, strict=True):
            ends: dict[Action, float] = {}
            now = [part.seconds for part in before]
            for pp, action in self.schedule.order:
                one, needed = lane[pp][action], self.schedule.input_of(action)
                start = now[pp] + one.parts["data"]  # a batch is read before the input is awaited
                if needed is not None and self.schedule.rank_of[needed.stage] != pp:
                    start = max(start, ends[needed] + one.parts["p2p"])
                for other in self.schedule.of_all_ranks(action):
                    start = max(start, ends[other])
                now[pp] = ends[action] = start + one.seconds
            for part, end in zip(before, now, strict=True):
                for rank in part.members:
                    at[rank] = end
        for part in self.after:
            end = max(at[rank] for rank in part.members) + part.seconds
            for rank in part.members:
                at[rank] = end
        return max(at)

    # -- without a cause --------------------------------------------------------------------

    def without(self, cause: str) -> None:
        """A cause of `parts` takes no time."""
        around = [part for lane in self.before for part in lane] + self.after
        for part in [*around, *(one for _, one in self.every())]:
            part.parts[cause] = 0.0

    def without_excess(self, excess: Excess) -> None:
        """Slow ranks compute a pass as fast as others do."""
        for (kind, stage, _), one in self.every():
            for at, rank in enumerate(one.members):
                one.own[at] = max(0.0, one.own[at] - excess.get((rank, kind, stage), 0.0))

    def even_out(self, over_stages: bool) -> None:
        """Passes of a kind and stage compute equally long; over_stages: those of any stage."""
        groups = defaultdict(list)
        for (kind, stage, _), one in self.every():
            groups[kind, None if over_stages else stage].append(one)
        for alike in groups.values():
            mean = statistics.fmean(max(one.own) for one in alike)
            for one in alike:
                one.own = [mean]

    def busy(self) -> float:
        """Seconds that a unit computes in passes, on average."""
        return sum(max(one.own) for _, one in self.every()) / sum(map(len, self.lanes))


def _aligned(ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """When each rank's measuring began, on one clock; those of a node take its surest offset."""
    by_error = sorted(ranks, key=lambda rank: -rank["error"])
    offsets = {rank["node"]: rank["offset"] for rank in by_error}
    return [rank["began"] + offsets[rank["node"]] for rank in ranks]


def slow_ranks(steps: Sequence[Step], shares: Sequence[float]) -> Excess:
    """What slow ranks compute longer than others, on average.

    A rank is compared with the others of its stages; one that is alone there with what all ranks
    need for their stages' shares of the model's time. Stages that have none are left out.
    """
    values = defaultdict(list)
    for (kind, stage, _), one in (each for step in steps for each in step.every()):
        for rank, seconds in zip(one.members, one.own, strict=True):
            values[rank, kind, stage].append(seconds)
    own = {key: statistics.fmean(each) for key, each in values.items() if shares[key[2]]}
    stages: dict[int, set[int]] = defaultdict(set)
    rates: dict[int, float] = defaultdict(float)
    for rank, _, stage in own:
        stages[rank].add(stage)
    for (rank, _, _), seconds in own.items():
        rates[rank] += seconds / sum(shares[stage] for stage in stages[rank])
    excess = {}
    for (rank, kind, stage), seconds in own.items():
        peers = [each for each in stages if stages[each] == stages[rank]]
        alone = len(peers) == 1
        usual = statistics.median_low(rates[each] for each in (rates if alone else peers))
        if rates[rank] <= usual * (SLOW_ALONE if alone else SLOW):
            continue
        others = statistics.median_low(own[each, kind, stage] for each in peers)
        excess[rank, kind, stage] = seconds - (seconds * usual / rates[rank] if alone else others)
    return excess


def causes(steps: Sequence[Step], excess: Excess) -> dict[str, float]:
    """Mean seconds of the steps by cause, in the order in which each is then gone; they change.

    `compute` is what passes compute, of the average rank; `unexplained`: measured, but not found
    when the step is run again.
    """
    parts = ("host", "data", "p2p", "tp", "cp", "dp", "all ranks", "optimizer")
    others = ("slow ranks", "variation", "imbalance", "bubble")
    found = dict.fromkeys([*parts, *others, "compute", "unexplained"], 0.0)
    for step in steps:
        left = step.seconds()
        found["unexplained"] += step.measured - left
        for cause in (*parts, *others):
            if cause in parts:
                step.without(cause)
            elif cause == "slow ranks":
                step.without_excess(excess)
            elif cause != "bubble":
                step.even_out(over_stages=cause == "imbalance")
            now = step.busy() if cause == "bubble" else step.seconds()
            found[cause], left = found[cause] + left - now, now
        found["compute"] += left
    return {cause: seconds / len(steps) for cause, seconds in found.items()}
