"""Does `plan.py gap` find where a run's time went? Planted causes, and the sum of its lines.

    python benchmarks/gap.py [NUMBER ...]        prints the tables; NUMBER: only these causes

Runs are real ones of 1, 2 and 4 ranks (tests/gap_worker.py): sleeps are planted as a slow rank, a
slow source of data, a link that delivers late, and stages whose blocks sleep under an uneven
partition. Every second pair of steps has the cause, so what it costs is measured in the same run:
the median of the steps that have it, less that of the others. Found: its line is the largest,
beside the bubble, of what the steps lost, and a slow rank is named. Exit status 1 if a cause was
not found, its size is more than 15 % off, or the lines of a run do not sum to its steps within 3 %.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project's own modules

from ranks import start_ranks

from planner import gap

SHAPE = (
    "--layers 8 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --pad-vocab-multiple 4 "
    "--global-batch-size 8 --micro-batch-size 1 --steps 19 --device cpu --data synthetic"
)
LARGER = (
    "--layers 8 --hidden 256 --heads 4 --seq-length 128 --vocab-size 512 --global-batch-size 16 "
    "--micro-batch-size 2 --steps 14 --device cpu --data synthetic"
)
ONE, TP, PP, PP4, DP = ("", 1), ("--tp 2", 2), ("--pp 2", 2), ("--pp 4", 4), ("", 2)
ZERO3, TP_PP, PP_DP, DP4 = ("--zero 3", 2), ("--tp 2 --pp 2", 4), ("--pp 2", 4), ("", 4)
CLOSED = {"1 rank": ONE, "tp 2": TP, "pp 2": PP, "pp 4": PP4, "dp 2": DP, "tp 2 x pp 2": TP_PP}
CLOSED |= {"ZeRO 3, dp 2": ZERO3}
SLOW, UNEVEN, DATA, LINK = "slow ranks", "imbalance", "data", "p2p"
CASES: list[tuple[str, tuple[str, int], dict[str, Any]]] = [
    (SLOW, DP, {"slow": [1, 0.15]}),
    (SLOW, TP, {"slow": [0, 0.12]}),
    (SLOW, TP_PP, {"slow": [2, 0.2]}),
    (SLOW, PP_DP, {"slow": [3, 0.25]}),
    (SLOW, DP4, {"slow": [2, 0.3]}),
    (UNEVEN, ("--pp 2 --partition 6,2", 2), {"uneven": [0.03, 4]}),
    (UNEVEN, ("--pp 2 --partition 2,6", 2), {"uneven": [0.04, 4]}),
    (UNEVEN, ("--pp 4 --partition 1,4,2,1", 4), {"uneven": [0.06, 2]}),
    (UNEVEN, ("--tp 2 --pp 2 --partition 6,2", 4), {"uneven": [0.04, 4]}),
    (UNEVEN, ("--pp 2 --partition 7,1", 4), {"uneven": [0.05, 4]}),
    (DATA, ONE, {"data": 0.1}),
    (DATA, DP, {"data": 0.2}),
    (DATA, TP, {"data": 0.15}),
    (DATA, PP, {"data": 0.2}),
    (DATA, ZERO3, {"data": 0.15}),
    (LINK, PP, {"link": ["forward", 0, 0.5]}),
    (LINK, PP, {"link": ["backward", 1, 0.5]}),
    (LINK, PP4, {"link": ["forward", 1, 0.4]}),
    (LINK, TP_PP, {"link": ["forward", 0, 0.3]}),
    (LINK, PP_DP, {"link": ["backward", 1, 0.4]}),
]
WITHIN, CLOSES = 0.15, 0.03


def run(
    layout: tuple[str, int], planted: dict[str, Any], shape: str = SHAPE, partition: str = "layers"
) -> tuple[dict[str, Any], float]:
    """The data of `gap` on a run's steps with the cause, and the seconds that it cost a step."""
    words, ranks = layout
    if "--pp" in words and "--partition" not in words:
        words += f" --partition {partition}"
    with tempfile.TemporaryDirectory() as out:
        program = ["tests/gap_worker.py", json.dumps(planted), *shape.split(), *words.split()]
        done = start_ranks(ranks, *program, "--out", out)
        if done.status:
            raise RuntimeError(f"{words} {planted}: status {done.status}\n{done.err}")
        steps, times = rows(Path(out) / "metrics.jsonl")[3:], Path(out) / "times.jsonl"
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for row in steps:
            seconds[row["iteration"] % 4 < 2].append(row["seconds"])
        kept = [row for row in rows(times) if row["iteration"] % 4 < 2 or not planted]
        times.write_text("".join(json.dumps(row) + "\n" for row in kept))
        data: Any = gap.gap(out).data
    return data, statistics.median(seconds[True]) - statistics.median(seconds[False])


def rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def lost(data: dict[str, Any]) -> dict[str, float]:
    """Seconds by line, of what is no computing and no bubble."""
    lines = {row["cause"]: row["measured"] for row in data["lines"]}
    return {cause: s for cause, s in lines.items() if cause not in (*gap.COMPUTE, "bubble")}


def check(cause: str, layout: tuple[str, int], planted: dict[str, Any]) -> dict[str, Any]:
    """A planted cause: what it cost, what its line has, whether it was found."""
    found, cost = run(layout, planted)
    lines = lost(found)
    where = next(row["where"] for row in found["lines"] if row["cause"] == cause)
    alone = where.startswith(f"rank {planted.get('slow', [0])[0]} ") and ";" not in where
    named = alone or cause != SLOW
    largest = max(lines, key=lines.__getitem__) == cause
    result = {"cause": cause, "layout": layout, "planted": planted, "cost": cost}
    result |= {"line": lines[cause], "off": lines[cause] / cost - 1, "found": largest and named}
    return result | {"closure": found["closure"], "seconds": found["seconds"]}


def main() -> int:
    """Print both tables; 1 if anything is missed."""
    chosen = [int(word) for word in sys.argv[1:]] or range(1, len(CASES) + 1)
    print(
        "| | cause | ranks, layout | planted | step, s | costs, s | line, s | off | found | sum |"
    )
    print("| --: | --- | --- | --- | --: | --: | --: | --: | --- | --: |")
    missed = 0
    for number in chosen:
        one = check(*CASES[number - 1])
        words, ranks = one["layout"]
        good = one["found"] and abs(one["off"]) <= WITHIN and abs(one["closure"] - 1) <= CLOSES
        missed += not good
        planted = ", ".join(f"{name} {value}" for name, value in one["planted"].items())
        cells = [
            number,
            one["cause"],
            f"{ranks}, {words or 'dp'}",
            planted,
            f"{one['seconds']:.3f}",
        ]
        cells += [f"{one['cost']:.3f}", f"{one['line']:.3f}", f"{one['off']:+.1%}"]
        cells += ["yes" if one["found"] else "no", f"{one['closure']:.1%}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if not sys.argv[1:]:
        print("\n| layout | a step, s | named causes |\n| --- | --: | --: |")
        for name, layout in CLOSED.items():
            data, _ = run(layout, {}, LARGER, "balanced")
            missed += abs(data["closure"] - 1) > CLOSES
            print(f"| {name} | {data['seconds']:.3f} | {data['closure']:.1%} |", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
