"""Who is the cause of a hang, and the report that says so: from records alone, again at any time.

    python cluster.py explain OUT          prints the report of OUT/hang once more

The monitor writes, and this reads:

    OUT/hang/case.json          what was seen: a hang, a death, a failure; when; the culprits
    OUT/hang/rank_00003.json    one rank: where it stood, its last records, its groups, its stacks
    OUT/hang/report.txt         what was printed

The cause is found by following waits. A rank waits in an operation with a number. Who of that
group has not entered the operation of that number is waited for; that rank may itself wait, on
another axis, and so on. Where the waits end is the odd one out.
"""

import functools
import json
import os
from collections.abc import Iterable
from typing import Any

from config import UserError
from placement import in_short
from watchdog import standing

Ranks = dict[int, dict[str, Any]]  # as monitor.Rank.told gives them
_ranges = functools.partial(in_short, between=", ")
SHOWN_FRAMES = 6
SHOWN_GROUPS = 24  # places where ranks stand, largest groups of ranks first


# ------------------------------------------------------------------------------------------------
# Waits
# ------------------------------------------------------------------------------------------------


def wait_of(rank: dict[str, Any]) -> dict[str, Any] | None:
    """What a rank that can tell waits in, or failed in; None if not in a wait for other ranks."""
    snapshot = rank["snapshot"]
    if rank["state"] not in ("answered", "failed") or snapshot is None:
        return None
    wait = snapshot["wait"]
    if wait and wait["kind"] == "writer":
        wait = snapshot["aside"]  # it waits for its own thread, which may wait for others
    return wait if wait and wait["ranks"] else None


def blockers(rank: int, ranks: Ranks) -> list[int]:
    """The ranks for which a rank waits: they have not entered what it waits in, or are silent."""
    wait = wait_of(ranks[rank])
    if wait is None:
        return []
    candidates = [wait["peer"]] if wait.get("peer") is not None else wait["ranks"]
    others = [r for r in candidates if r != rank and r in ranks]
    if "role" not in wait:
        return others
    return [other for other in others if _is_behind(ranks[other], rank, wait)]


def _is_behind(other: dict[str, Any], rank: int, wait: dict[str, Any]) -> bool:
    if other["state"] not in ("answered", "failed") or other["snapshot"] is None:
        return True
    counted = counts(other, wait["role"], wait["ranks"])
    return counted is None or entered(counted, rank, wait) < wait["number"]


def counts(rank: dict[str, Any], role: str, members: list[int]) -> list | None:
    """[collectives entered, {position: sent}, {position: received}] of a rank in a group."""
    for (name, ranks), counted in zip(rank["groups"], rank["snapshot"]["counts"]):
        if name == role and list(ranks) == list(members):
            return counted
    return None


def entered(counted: list, rank: int, wait: dict[str, Any]) -> int:
    """How many operations like the one that `rank` waits in the counted rank has entered."""
    collectives, sent, received = counted
    if wait["peer"] is None:
        return collectives
    position = str(list(wait["ranks"]).index(rank))
    sides = {str(k): v for k, v in (sent if wait["kind"] == "receive" else received).items()}
    return sides.get(position, 0)


def ends_of_waits(ranks: Ranks, start: Iterable[int]) -> list[int]:
    """The ranks at which the waits of `start` end: those who wait for nobody themselves.

    One that waits although all have entered is no end: then the fault lies between the ranks.
    """
    seen, ends, queue = set(), [], list(start)
    while queue:
        rank = queue.pop()
        if rank in seen:
            continue
        seen.add(rank)
        if wait_of(ranks[rank]) is None:
            ends.append(rank)
        queue += blockers(rank, ranks)
    return sorted(ends)


def culprits(case: dict[str, Any], ranks: Ranks) -> list[int]:
    """The cause, most likely first; empty if the waits end nowhere."""
    if "first" in case:
        return [case["first"]]
    if case["kind"] == "missing":
        return case["missing"]
    still = [r for r in ranks if ranks[r]["still"] >= case["limit"] / 2]
    ends = [r for r in ends_of_waits(ranks, still) if r in still]
    return sorted(ends, key=lambda r: -ranks[r]["still"])


def mismatches(ranks: Ranks) -> list[str]:
    """Pairs of ranks that wait in the same number of one group, but in different operations."""
    found: dict[tuple, tuple[int, dict]] = {}
    lines = []
    for number, rank in ranks.items():
        wait = wait_of(rank)
        if wait is None or wait.get("peer") is not None or "role" not in wait:
            continue
        key = (wait["role"], tuple(wait["ranks"]), wait["number"])
        first, other = found.setdefault(key, (number, wait))
        if (wait["kind"], wait["bytes"]) != (other["kind"], other["bytes"]):
            lines.append(
                f"ranks {first} and {number} entered different operations as {wait['number']} of "
                f"{wait['role']}: {_size(other)} and {_size(wait)}"
            )
    return lines


# ------------------------------------------------------------------------------------------------
# The report
# ------------------------------------------------------------------------------------------------


def tell(case: dict[str, Any], ranks: Ranks, out: str) -> str:
    """The report, for people to read."""
    found = case["culprits"]
    lines = ["", "=" * 80, _headline(case, ranks)]
    for rank in found[:8]:
        if rank in ranks:
            lines += _portrait(ranks[rank], case, ranks)
    if len(found) > 8:
        lines.append(f"and {len(found) - 8} more: ranks {_ranges(found)}")
    if not found:
        lines += _nobody(ranks)
    lines += mismatches(ranks)
    lines += ["who waits for whom:", *_waits(ranks)]
    lines += ["where they stand:", *_places(ranks)]
    lines += [f"stacks and records of every rank: {out}/hang/rank_*.json", "=" * 80]
    return "\n".join(lines)


def _headline(case: dict[str, Any], ranks: Ranks) -> str:
    when = case["time"]
    if case["kind"] == "missing":
        return (
            f"{when}: ranks {_ranges(case['missing'])} of {case['size']} never came to the "
            f"watchdog in {case['limit']:.0f} s: look at their output"
        )
    if case["kind"] == "failed":
        return f"{when}: rank {case['first']} failed first, with the exception below"
    if case["kind"] == "dead":
        also = [rank for rank in case["gone"] if rank != case["first"]]
        rest = f"; ranks {_ranges(also)} went after it" if also else ""
        return (
            f"{when}: DEAD: {_name(ranks[case['first']])} ended without a word: killed (by the "
            f"out-of-memory killer, the scheduler, a hand), crashed, or os._exit{rest}"
        )
    still = ranks[case["still"]]
    return (
        f"{when}: HANG: rank {case['still']} has made no progress for {still['still']:.1f} s, "
        f"the limit is {case['limit']:.1f} s (--hang-timeout)"
    )


def _portrait(rank: dict[str, Any], case: dict[str, Any], ranks: Ranks) -> list[str]:
    """One culprit: who, where, what it did, and what of it is missed."""
    lines = [f"CULPRIT: {_name(rank)}"]
    awaited = _missed(rank["rank"], ranks)
    if awaited:
        lines.append(f"  never entered {awaited}")
    if rank["error"]:
        lines += ["  " + line for line in rank["error"].rstrip().splitlines()]
    if rank["process"]:
        lines.append(f"  its process is {rank['process']}")
    if rank["state"] == "silent":
        lines.append(f"  it does not answer; it was last heard {rank['heard']:.1f} s ago")
    if rank["snapshot"] is None:
        return lines + ["  it had not yet said where it stood"]
    snapshot = rank["snapshot"]
    it = "it is" if rank["state"] == "answered" else "when last heard it was"
    lines.append(f"  {it} in {standing(snapshot)}, without progress for {rank['still']:.1f} s")
    if snapshot["aside"]:
        aside = snapshot["aside"]
        lines.append(f"  its checkpoint's thread: {aside['kind']}, for {aside['seconds']:.1f} s")
    if snapshot["wait"] and snapshot["wait"]["kind"] != "device":
        lines.append(f"  {it} waiting in {_operation(snapshot['wait'])}")
    if snapshot["device"]:
        lines.append(f"  its GPU has not passed {_operation(snapshot['device'])}")
    done = [r for r in snapshot["last"] if "kind" in r]
    if done and not (snapshot["wait"] and "role" in snapshot["wait"]):
        lines.append(f"  its last operation: {_operation(done[-1])}, {_age(done[-1])}")
    if rank["memory"]:
        used, free = rank["memory"]["resident"] / 1e9, rank["memory"]["available"] / 1e9
        lines.append(f"  memory: {used:.2f} GB resident, {free:.2f} GB available on its node")
    for name, frames in rank["stacks"].items():
        if name == "main" or snapshot["aside"]:
            lines.append(f"  its {name} thread is at" if name != "main" else "  it is at")
            lines += [f"    {_short(frame)}" for frame in frames[:SHOWN_FRAMES]]
    if not rank["stacks"] and rank["raw"]:
        lines += ["  its stack, taken without its help:"]
        lines += [f"    {line}" for line in rank["raw"].strip().splitlines()[: 2 * SHOWN_FRAMES]]
    return lines


def _missed(culprit: int, ranks: Ranks) -> str | None:
    """The operation in which somebody waits for that rank: of several, the one of fewest ranks."""
    waits = [
        (len(wait["ranks"]), number, wait)
        for number in ranks
        if culprit in blockers(number, ranks) and "role" in (wait := wait_of(ranks[number]))
    ]
    if not waits:
        return None
    _, number, wait = min(waits, key=lambda found: found[:2])
    return f"{_operation(wait)}, in which rank {number} waits"


def _nobody(ranks: Ranks) -> list[str]:
    waiting = [r for r in ranks if wait_of(ranks[r]) is not None]
    free = [r for r in waiting if not blockers(r, ranks)]
    if free:
        operation = _operation(wait_of(ranks[free[0]]))
        return [
            f"NO CULPRIT AMONG THE RANKS: every rank has entered {operation}, in which "
            f"{_ranges(free)} wait: look at the network or the devices between them"
        ]
    return [f"NO CULPRIT: ranks {_ranges(waiting)} wait for one another in a circle"]


def _waits(ranks: Ranks) -> list[str]:
    """One line for all ranks that wait in the same operation for the same ranks."""
    same: dict[tuple[str, tuple], list[int]] = {}
    for number, rank in ranks.items():
        wait = wait_of(rank)
        if wait is not None:
            same.setdefault((_operation(wait), tuple(blockers(number, ranks))), []).append(number)
    lines = []
    for (operation, others), members in same.items():
        whom = f"for {_ranges(others)}" if others else "though all have entered it"
        lines.append(f"  {_ranges(members)} in {operation}: {whom}")
    return lines or ["  nobody is known to wait"]


def _places(ranks: Ranks) -> list[str]:
    """Ranks grouped by where they stand, the rarest place first: the odd one out is on top."""
    places: dict[str, list[int]] = {}
    for number, rank in ranks.items():
        places.setdefault(_place(rank), []).append(number)
    ordered = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    lines = [f"  {len(members):4} x {_ranges(members)}: {at}" for at, members in ordered]
    return lines[:SHOWN_GROUPS]


def _place(rank: dict[str, Any]) -> str:
    if rank["snapshot"] is None:
        return f"{rank['state']}, before its first word"
    state = "" if rank["state"] == "answered" else f"{rank['state']}, was in "
    line = state + standing(rank["snapshot"])
    if rank["error"]:
        return f"{line} | {rank['error'].rstrip().splitlines()[-1][:100]}"
    frames = [_short(frame) for frame in rank["stacks"].get("main", [])]
    own = [f for f in frames if not f.startswith(("records.py", "collectives.py"))]
    return line + "".join(f" | {frame}" for frame in own[:1])


def _name(rank: dict[str, Any]) -> str:
    axes = ", ".join(f"{axis} {place}" for axis, place in rank["coordinates"].items())
    return (
        f"rank {rank['rank']}"
        + f" ({axes})" * bool(axes)
        + f" on {rank['node']}, pid {rank['pid']}"
    )


def _size(wait: dict[str, Any]) -> str:
    return f"{wait['kind']} of {wait['bytes']:,} bytes"


def _operation(wait: dict[str, Any]) -> str:
    """An operation or another wait, in words."""
    if "role" not in wait:
        return f"{wait['kind']}" + f" (for {_ranges(wait['ranks'])})" * bool(wait["ranks"])
    side = {"send": "to", "receive": "from"}.get(wait["kind"])
    peer = f" {side} {wait['peer']}" if side else f" (ranks {_ranges(wait['ranks'])})"
    return f"{wait['kind']} {wait['number']} of {wait['role']}{peer}, {wait['bytes']:,} bytes"


def _age(record: dict[str, Any]) -> str:
    if record["ended"] is not None:
        return f"done {record['ended']:.1f} s before"
    return f"not done, begun {record['seconds']:.1f} s before"


def _short(frame: str) -> str:
    """A frame with its file's name in place of the path."""
    path, _, rest = frame.partition(":")
    return f"{os.path.basename(path)}:{rest}"


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------


def write(folder: str, case: dict[str, Any], ranks: Ranks) -> None:
    """Write the files of a case; an earlier case's folder is kept as hang.1, hang.2, ..."""
    if os.path.exists(folder):
        number = 1
        while os.path.exists(f"{folder}.{number}"):
            number += 1
        os.rename(folder, f"{folder}.{number}")
    os.makedirs(folder)
    for number, rank in ranks.items():
        with open(os.path.join(folder, f"rank_{number:05d}.json"), "w") as file:
            json.dump(rank, file, indent=1)
    with open(os.path.join(folder, "report.txt"), "w") as file:
        file.write(tell(case, ranks, os.path.dirname(folder)) + "\n")
    with open(os.path.join(folder, "case.json"), "w") as file:
        json.dump(case, file, indent=1)


def read(out: str) -> tuple[dict[str, Any], Ranks]:
    """The newest case of a run's folder; UserError if there is none."""
    folder = out if os.path.basename(os.path.normpath(out)) == "hang" else os.path.join(out, "hang")
    try:
        with open(os.path.join(folder, "case.json")) as file:
            case = json.load(file)
        ranks = {}
        for name in sorted(os.listdir(folder)):
            if name.startswith("rank_"):
                with open(os.path.join(folder, name)) as file:
                    ranks[int(name[5:10])] = json.load(file)
    except OSError as error:
        raise UserError(
            f"no report of a hang in {out}: {error.filename}: {error.strerror}"
        ) from None
    return case, ranks


def explain(out: str) -> str:
    """The report of a run's folder once more."""
    case, ranks = read(out)
    return tell(case, ranks, out)
