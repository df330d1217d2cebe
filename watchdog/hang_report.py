"""The report of a hang or a death: its text and its files. Read wait_graph.py first.

    python -m watchdog.hang_report OUT         prints the report in OUT/hang again

The monitor writes, with `format_report` and `write_files`:

    OUT/hang/report.txt         the report as it was printed
    OUT/hang/rank_00003.json    one rank: its last action, its records, its groups, its stacks
    OUT/hang/case.json          the kind of case (a hang, a death, a failure), its time and the
                                culprits; a failed pre-flight lists the nodes that cannot be used
"""

import functools
import itertools
import json
import time
from pathlib import Path
from typing import Any

from config.messages import Parser, UserError, number_ranges, sentences
from watchdog.flight_recorder import describe_place
from watchdog.wait_graph import Case, Ranks, WaitGraph

_ranges = functools.partial(number_ranges, between=", ")
_RULE = "=" * 80  # the first and the last line of a report
# The most culprits, frames of a stack, and lines of a list that a report shows.
SHOWN_CULPRITS = 8
SHOWN_FRAMES = 6
SHOWN_LINES = 24


def format_report(case: Case, ranks: Ranks, out: str) -> str:
    """Return the report as text. out: the run's --out, or empty if no files are written."""
    culprits = case.culprits
    graph = WaitGraph(ranks)
    lines = ["", _RULE, f"{case.time}: {_headline(case, ranks)}"]
    for rank in culprits[:SHOWN_CULPRITS]:
        if rank in ranks:
            lines += _describe_rank(ranks[rank], graph)
    if len(culprits) > SHOWN_CULPRITS:
        lines.append(f"and {len(culprits) - SHOWN_CULPRITS} more: ranks {_ranges(culprits)}")
    if not culprits:
        lines.append(_describe_no_culprit(graph))
    lines += _shortened(mismatches(graph))
    lines += ["who waits for whom:", *_describe_waits(graph)]
    lines += ["where the ranks are:", *_describe_places(ranks)]
    lines += [f"stacks and records of every rank: {out}/hang/rank_*.json"] if out else []
    return "\n".join([*lines, _RULE])


def _headline(case: Case, ranks: Ranks) -> str:
    if case.kind == "missing":
        return (
            f"ranks {_ranges(case.missing)} of {case.size} did not connect to the watchdog in "
            f"{case.limit:.0f} s: see their output"
        )
    if case.kind == "failed":
        return f"rank {case.first} failed first, with the exception below"
    if case.kind == "dead":
        also = [rank for rank in case.gone if rank != case.first]
        rest = f"; ranks {_ranges(also)} ended after it" if also else ""
        return (
            f"DEAD: {_name(ranks[case.first])} ended without a goodbye: killed (by the "
            f"out-of-memory killer, the scheduler, a user), crashed, or os._exit{rest}"
        )
    seconds = ranks[case.still]["still"]
    return (
        f"HANG: rank {case.still} has made no progress for {seconds:.1f} s, the limit is "
        f"{case.limit:.1f} s (--hang-timeout)"
    )


def _describe_rank(rank: dict[str, Any], graph: WaitGraph) -> list[str]:
    """Return the lines on one culprit: name, the operation it never entered, activity, stacks."""
    lines = [f"CULPRIT: {_name(rank)}"]
    if found := graph.waiter_for(rank["rank"]):
        number, wait = found
        lines.append(f"  never entered {_operation(wait)}, in which rank {number} waits")
    if rank["error"]:
        lines += ["  " + line for line in rank["error"].rstrip().splitlines()]
    if rank["process"]:
        lines.append(f"  its process is {rank['process']}")
    if rank["state"] == "silent":
        lines.append(f"  it does not answer; its last message came {rank['heard']:.1f} s ago")
    if rank["snapshot"] is None:
        return lines + ["  it had not sent a heartbeat yet"]
    lines += _describe_activity(rank)
    if rank["memory"]:
        used = rank["memory"]["resident"] / 1e9
        free = rank["memory"]["available"] / 1e9
        lines.append(f"  memory: {used:.2f} GB resident, {free:.2f} GB available on its node")
    for name, frames in rank["stacks"].items():
        if name == "main" or rank["snapshot"]["background"]:
            lines.append(f"  its {name} thread is at" if name != "main" else "  it is at")
            lines += [f"    {_short(frame)}" for frame in frames[:SHOWN_FRAMES]]
    if not rank["stacks"] and rank["raw"]:
        raw = [f"    {line}" for line in rank["raw"].strip().splitlines()[: 2 * SHOWN_FRAMES]]
        lines += ["  its stack, written by faulthandler:", *raw]
    return lines


def _describe_activity(rank: dict[str, Any]) -> list[str]:
    """Return the lines on a rank's activity, from its last snapshot."""
    snapshot = rank["snapshot"]
    it_is = "it is" if rank["state"] == "answered" else "at its last message it was"
    lines = [f"  {it_is} in {describe_place(snapshot)}, without progress for {rank['still']:.1f} s"]
    if thread := snapshot["background"]:
        lines.append(f"  its checkpoint's thread: {thread['kind']}, for {thread['seconds']:.1f} s")
    if (wait := snapshot["wait"]) and wait["kind"] != "device":
        lines.append(f"  {it_is} waiting in {_operation(wait)}")
    if snapshot["device"]:
        lines.append(f"  its GPU has not passed {_operation(snapshot['device'])}")
    operations = [record for record in snapshot["last"] if "kind" in record]
    if operations and not (wait and "role" in wait):
        last = operations[-1]
        ended = last["ended"]
        begun = f"not done, begun {last['seconds']:.1f} s before"
        done = begun if ended is None else f"done {ended:.1f} s before"
        lines.append(f"  its last operation: {_operation(last)}, {done}")
    return lines


def _describe_no_culprit(graph: WaitGraph) -> str:
    unblocked = [number for number in graph.waits if not graph.blockers(number)]
    if unblocked:
        return (
            "NO CULPRIT AMONG THE RANKS: every rank has entered "
            f"{_operation(graph.waits[unblocked[0]])}, in which {_ranges(unblocked)} wait: look at "
            "the network or the devices between them"
        )
    return f"NO CULPRIT: ranks {_ranges(graph.waits)} wait for one another in a cycle"


def mismatches(graph: WaitGraph) -> list[str]:
    """Return a line for each rank whose collective differs from that of another rank.

    Two ranks are compared if both wait in a collective with the same group and number: then the
    kind and the number of bytes must be equal too.
    """
    found: dict[tuple, tuple[int, dict]] = {}
    lines = []
    for number, wait in graph.waits.items():
        if "role" not in wait or wait["peer"] is not None:
            continue
        key = (wait["role"], tuple(wait["ranks"]), wait["number"])
        first, other = found.setdefault(key, (number, wait))
        if (wait["kind"], wait["bytes"]) != (other["kind"], other["bytes"]):
            sizes = [f"{one['kind']} of {one['bytes']:,} bytes" for one in (other, wait)]
            lines.append(
                f"ranks {first} and {number} entered different operations as {wait['number']} of "
                f"{wait['role']}: {' and '.join(sizes)}"
            )
    return lines


def _describe_waits(graph: WaitGraph) -> list[str]:
    """Return one line for all ranks that wait in the same operation for the same ranks.

    The line with the most ranks comes first.
    """
    same: dict[tuple[str, tuple], list[int]] = {}
    for number, wait in graph.waits.items():
        same.setdefault((_operation(wait), tuple(graph.blockers(number))), []).append(number)
    lines = []
    for (operation, others), members in sorted(same.items(), key=lambda item: -len(item[1])):
        whom = f"for {_ranges(others)}" if others else "though all have entered it"
        lines.append(f"  {_ranges(members)} in {operation}: {whom}")
    return _shortened(lines) or ["  no rank is known to wait"]


def _describe_places(ranks: Ranks) -> list[str]:
    """Return one line for all ranks with the same current action.

    The line with the fewest ranks comes first, since the exceptional rank is often the cause.
    """
    places: dict[str, list[int]] = {}
    for number, rank in ranks.items():
        places.setdefault(_place(rank), []).append(number)
    ordered = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    return _shortened([f"  {len(own):4} x {_ranges(own)}: {at}" for at, own in ordered])


def _shortened(lines: list[str]) -> list[str]:
    """Return at most SHOWN_LINES lines, followed by the number of lines that were left out."""
    more = len(lines) - SHOWN_LINES
    return lines if more <= 0 else [*lines[:SHOWN_LINES], f"  and {more} more such lines"]


def _place(rank: dict[str, Any]) -> str:
    """Return a rank's current action, and its innermost frame outside of the recorder and groups.

    If the rank failed, the last line of its error stands in place of the frame.
    """
    if rank["snapshot"] is None:
        return f"{rank['state']}, before its first heartbeat"
    state = "" if rank["state"] == "answered" else f"{rank['state']}, was in "
    line = state + describe_place(rank["snapshot"])
    if rank["error"]:
        return f"{line} | {rank['error'].rstrip().splitlines()[-1][:100]}"
    frames = [_short(frame) for frame in rank["stacks"].get("main", [])]
    callers = [f for f in frames if not f.startswith(("flight_recorder.py", "collectives.py"))]
    return line + "".join(f" | {frame}" for frame in callers[:1])


def _name(rank: dict[str, Any]) -> str:
    axes = ", ".join(f"{axis} {place}" for axis, place in rank["coordinates"].items())
    place = f" ({axes})" if axes else ""
    return f"rank {rank['rank']}{place} on {rank['node']}, pid {rank['pid']}"


def _operation(wait: dict[str, Any]) -> str:
    """Return text for the operation of a wait, or for a wait of another kind."""
    if "role" not in wait:
        return f"{wait['kind']} (for {_ranges(wait['ranks'])})" if wait["ranks"] else wait["kind"]
    side = {"send": "to", "receive": "from"}.get(wait["kind"])
    peer = f" {side} {wait['peer']}" if side else f" (ranks {_ranges(wait['ranks'])})"
    return f"{wait['kind']} {wait['number']} of {wait['role']}{peer}, {wait['bytes']:,} bytes"


def _short(frame: str) -> str:
    """Return a stack's frame with the file's name in place of its path."""
    path, _, rest = frame.partition(":")
    return f"{Path(path).name}:{rest}"


def write_files(folder: str, case: dict[str, Any], ranks: Ranks, report: str) -> None:
    """Write the files of a case into `folder`; the report comes first, in case writing fails.

    The folder of an earlier case is renamed to hang.1, hang.2, ... Raise OSError if writing fails.
    """
    path = Path(folder)
    if path.exists():
        names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))
    path.mkdir(parents=True)
    (path / "report.txt").write_text(report + "\n")
    for number, rank in ranks.items():
        (path / f"rank_{number:05d}.json").write_text(json.dumps(rank))
    (path / "case.json").write_text(json.dumps(case))


def write_refusal(folder: str, sentence: str, nodes: list[str]) -> None:
    """Write the case of a failed check before step 1. Raise OSError if writing fails.

    sentence: the error. nodes: the nodes that cannot be used.
    """
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    case = {"kind": "preflight", "time": when, "culprits": [], "nodes": nodes, "error": sentence}
    write_files(folder, case, {}, f"\n{_RULE}\n{when}: {sentence}\n{_RULE}")


def read_report(out: str) -> str:
    """Return the newest report in a run's folder; raise UserError if it is missing or damaged."""
    path = Path(out, "report.txt" if Path(out).name == "hang" else "hang/report.txt")
    try:
        report = path.read_text()
    except OSError as error:
        raise UserError(f"no report of a hang in {out}: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if report.count(f"{_RULE}\n") < 2 or not report.endswith(f"{_RULE}\n"):
        raise UserError(f"{path} is cut short or damaged: it does not end with a line of =")
    return report


def main() -> None:
    """Print the newest report in a run's folder; raise UserError if there is none."""
    parser = Parser("hang_report", description="Print the report of a hang or a death again.")
    parser.add_argument("out", metavar="OUT", help="the run's --out folder")
    print(read_report(parser.parse_args().out), end="")


if __name__ == "__main__":
    with sentences():
        main()
