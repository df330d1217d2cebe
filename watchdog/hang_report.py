"""The report of a hang or a death: told from records alone, again at any time.

    python cluster.py explain OUT          prints the report of OUT/hang once more

The monitor writes, and this reads:

    OUT/hang/case.json          what was seen: a hang, a death, a failure; when; the culprits
    OUT/hang/report.txt         what was printed
    OUT/hang/rank_00003.json    one rank: where it stood, its last records, its groups, its stacks

Who is the cause is found in waits.py.
"""

import functools
import json
import os
from typing import Any

from config.messages import UserError, number_ranges
from watchdog.heartbeat import standing
from watchdog.wait_graph import Ranks, Waits

_ranges = functools.partial(number_ranges, between=", ")
SHOWN_FRAMES = 6
SHOWN_LINES = 24  # of waits, and of places


# ------------------------------------------------------------------------------------------------
# The report
# ------------------------------------------------------------------------------------------------


def tell(case: dict[str, Any], ranks: Ranks, out: str) -> str:
    """The report, for people to read."""
    found, waits = case["culprits"], Waits(ranks)
    lines = ["", "=" * 80, _headline(case, ranks)]
    for rank in found[:8]:
        if rank in ranks:
            lines += _portrait(ranks[rank], waits)
    if len(found) > 8:
        lines.append(f"and {len(found) - 8} more: ranks {_ranges(found)}")
    if not found:
        lines += _nobody(waits)
    lines += _shortened(mismatches(waits))
    lines += ["who waits for whom:", *_lines_of_waits(waits)]
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


def _portrait(rank: dict[str, Any], waits: Waits) -> list[str]:
    """One culprit: who, where, what it did, and what of it is missed."""
    lines = [f"CULPRIT: {_name(rank)}"]
    if missed := waits.missed(rank["rank"]):
        number, wait = missed
        lines.append(f"  never entered {_operation(wait)}, in which rank {number} waits")
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


def _nobody(waits: Waits) -> list[str]:
    free = [number for number in waits.of if not waits.blockers(number)]
    if free:
        operation = _operation(waits.of[free[0]])
        return [
            f"NO CULPRIT AMONG THE RANKS: every rank has entered {operation}, in which "
            f"{_ranges(free)} wait: look at the network or the devices between them"
        ]
    return [f"NO CULPRIT: ranks {_ranges(waits.of)} wait for one another in a circle"]


def mismatches(waits: Waits) -> list[str]:
    """Pairs of ranks that wait in the same number of one group, but in different operations."""
    found: dict[tuple, tuple[int, dict]] = {}
    lines = []
    for number, wait in waits.of.items():
        if "role" not in wait or wait["peer"] is not None:
            continue
        key = (wait["role"], tuple(wait["ranks"]), wait["number"])
        first, other = found.setdefault(key, (number, wait))
        if (wait["kind"], wait["bytes"]) != (other["kind"], other["bytes"]):
            lines.append(
                f"ranks {first} and {number} entered different operations as {wait['number']} of "
                f"{wait['role']}: {_size(other)} and {_size(wait)}"
            )
    return lines


def _lines_of_waits(waits: Waits) -> list[str]:
    """A line for all ranks that wait in the same operation for the same ranks; most first."""
    same: dict[tuple[str, tuple], list[int]] = {}
    for number, wait in waits.of.items():
        same.setdefault((_operation(wait), tuple(waits.blockers(number))), []).append(number)
    lines = []
    for (operation, others), members in sorted(same.items(), key=lambda item: -len(item[1])):
        whom = f"for {_ranges(others)}" if others else "though all have entered it"
        lines.append(f"  {_ranges(members)} in {operation}: {whom}")
    return _shortened(lines) or ["  nobody is known to wait"]


def _places(ranks: Ranks) -> list[str]:
    """Ranks grouped by where they stand, the rarest place first: the odd one out is on top."""
    places: dict[str, list[int]] = {}
    for number, rank in ranks.items():
        places.setdefault(_place(rank), []).append(number)
    ordered = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    lines = [f"  {len(members):4} x {_ranges(members)}: {at}" for at, members in ordered]
    return _shortened(lines)


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - SHOWN_LINES
    return lines if more <= 0 else [*lines[:SHOWN_LINES], f"  and {more} more such lines"]


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


def write(folder: str, case: dict[str, Any], ranks: Ranks, report: str) -> None:
    """Write the files of a case, what people read first, in case the rest cannot be written.

    An earlier case's folder is kept as hang.1, hang.2, ...
    """
    if os.path.exists(folder):
        number = 1
        while os.path.exists(f"{folder}.{number}"):
            number += 1
        os.rename(folder, f"{folder}.{number}")
    os.makedirs(folder)
    _write(folder, "report.txt", report + "\n")
    for number, rank in ranks.items():
        _write(folder, f"rank_{number:05d}.json", _by_lines(rank, depth=3))
    _write(folder, "case.json", _by_lines(case, depth=1))


def _write(folder: str, name: str, text: str) -> None:
    with open(os.path.join(folder, name), "w") as file:
        file.write(text)


def _by_lines(value: Any, depth: int) -> str:
    """As JSON, with line breaks down to that depth: a line for each record, each frame of a stack.

    json's own indentation goes down to the last number, and takes ten times as long.
    """
    if depth == 0 or not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value)
    if isinstance(value, dict):
        items = (f"{json.dumps(key)}: {_by_lines(v, depth - 1)}" for key, v in value.items())
        return "{\n" + ",\n".join(items) + "\n}"
    return "[\n" + ",\n".join(_by_lines(v, depth - 1) for v in value) + "\n]"


def read(folder: str) -> tuple[dict[str, Any], Ranks]:
    """The case in OUT/hang; raises OSError."""
    with open(os.path.join(folder, "case.json")) as file:
        case = json.load(file)
    ranks = {}
    for name in sorted(os.listdir(folder)):
        if name.startswith("rank_"):
            with open(os.path.join(folder, name)) as file:
                ranks[int(name[5:10])] = json.load(file)
    return case, ranks


def explain(out: str) -> str:
    """The newest report of a run's folder once more; UserError if there is none."""
    folder = out if os.path.basename(os.path.normpath(out)) == "hang" else os.path.join(out, "hang")
    report = os.path.join(folder, "report.txt")
    try:
        if os.path.exists(report) and not os.path.exists(os.path.join(folder, "case.json")):
            with open(report) as file:  # the job ended before all its records were written
                return file.read()
        return tell(*read(folder), out)
    except OSError as error:
        raise UserError(
            f"no report of a hang in {out}: {error.filename}: {error.strerror}"
        ) from None
