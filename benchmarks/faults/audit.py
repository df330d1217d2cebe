"""Injects wrong products into small runs with --audit-every, and counts what the audits name.

    python benchmarks/faults/audit.py --keep RESULTS.jsonl [--minutes 7]  writes results/audit.md

An error flips one bit of one element of one product of one rank, all drawn at random from the
products of a micro-batch, forward and backward. A permanent error flips it whenever the product is
computed; one of chance p flips it in that share of the computations. Every audit follows a step of
training; the error is in the audit alone, so that the next step starts from right weights. Audits
without an error count false alarms. The product of an expert without tokens has no bit that could
flip, and is not counted. Results are kept in RESULTS.jsonl, so that the list can be run
in parts: cases that are in it are not run again.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project's own modules

from ranks import results_of

from base.cli import Parser
from base.errors import UserError, exit_with
from benchmarks.results_file import add_options, from_options, machine

RESULTS = ROOT / "benchmarks" / "results" / "audit.md"
TINY = {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 8, "vocab_size": 32}
TINY |= {"global_batch_size": 6}
ROTARY = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
EXPERTS = {"experts": 4, "experts_per_token": 2, "bias": False}
# Ranks and options; with three replicas, or two where no bit is flipped.
LAYOUTS: list[tuple[int, dict]] = [
    (3, {}),
    (3, {"zero": 0, "precision": "bf16"}),
    (3, {"zero": 2, "recompute": "full", **ROTARY}),
    (3, {"recompute": "selective", "tied": False}),
    (3, {"balance": "sequence", **EXPERTS}),
    (3, {"micro_batch_size": 2, "positions": "alibi"}),
    (6, {"tp": 2, "zero": 0}),
    (6, {"tp": 2, "sequence_parallel": True, "zero": 2}),
    (6, {"pp": 2, "schedule": "zb-h1", "layers": 2}),
    (6, {"pp": 2, "schedule": "zb-v", "layers": 4}),
    (6, {"cp": 2, **ROTARY}),
    (6, {"tp": 2, "ep": 2, "balance": "bias", **EXPERTS}),
]
PAIRS: list[dict] = [{}, {"precision": "bf16"}, {"zero": 2, **ROTARY}, {"recompute": "full"}]
PAIRS += [{"balance": "global", **EXPERTS}]
PERMANENT = 50  # errors of a layout
CHANCES = (0.1, 0.25, 0.5, 0.75)
OF_CHANCE, AUDITS_OF_ERROR = 100, 4  # errors of each chance, audits of each error
CLEAN = 1000  # audits of a start; each of PAIRS has two starts
COST = {"layers": 4, "hidden": 256, "heads": 4, "seq_length": 256, "vocab_size": 512}
COST |= {"global_batch_size": 16}
MICRO_BATCHES = 8  # of a step of COST with two replicas


def cases() -> list[dict]:
    """All starts of ranks: their kind, ranks, options, steps, and drawn errors by step."""
    found = []
    for number, (ranks, options) in enumerate(LAYOUTS):
        faults = {
            str(step): [10_000 + 100 * number + step, 1.0] for step in range(2, PERMANENT + 2)
        }
        found.append({"kind": "permanent", "ranks": ranks, "options": options, "faults": faults})
    for number, chance in enumerate(CHANCES):
        steps = range(OF_CHANCE * AUDITS_OF_ERROR)
        first = 20_000 + OF_CHANCE * number
        faults = {str(s + 2): [first + s // AUDITS_OF_ERROR, chance] for s in steps}
        found.append({"kind": "chance", "ranks": 3, "options": {}, "faults": faults})
    for seed in (1, 2):
        for options in PAIRS:
            seeded = options | {"seed": seed}
            found.append({"kind": "clean", "ranks": 2, "options": seeded, "steps": CLEAN})
    found.append({"kind": "clean", "ranks": 6, "options": {"tp": 2}, "steps": CLEAN // 5})
    found.append(
        {"kind": "clean", "ranks": 4, "options": {"pp": 2, "layers": 2}, "steps": CLEAN // 5}
    )
    found.append({"kind": "cost", "ranks": 2, "options": COST, "steps": 12})
    return [{"number": number, "faults": {}, **case} for number, case in enumerate(found)]


def run(case: dict) -> list[dict]:
    """Start the ranks of a case; return its row."""
    with tempfile.TemporaryDirectory() as folder:
        options = TINY | case["options"] | {"out": f"{folder}/run"}
        steps = case.get("steps", len(case["faults"]) + 1)
        job = {"case": options, "steps": steps, "faults": case["faults"]}
        (result,) = results_of(
            "tests/audits_worker.py", case["ranks"], [job], Path(folder), timeout=900
        )
    errors = [
        {"rank": fault["rank"], "named": ranks, "flips": flips, "chance": fault["chance"]}
        for fault, ranks, _, flips in result["found"].values()
    ]
    row = {"number": case["number"], "errors": errors, "clean": steps - len(errors)}
    row |= {name: result[name] for name in ("false_alarms", "seconds", "products")}
    print(f"case {case['number']}: {len(errors)} errors, {steps} audits", flush=True)
    return [row]


def report(rows: dict[int, dict]) -> str:
    """Return the text of results/audit.md."""
    listed = [(case, rows[case["number"]]) for case in cases()]
    of_kind = {k: [(c, r) for c, r in listed if c["kind"] == k] for k in ("permanent", "chance")}
    lines = ["# Wrong products that audits name", ""]
    lines += [line.rstrip() for line in _introduction().splitlines()[2:]]
    clean = sum(row["clean"] for _, row in listed)
    alarms = sum(row["false_alarms"] for _, row in listed)
    wrong = sum(
        bool(e["named"]) if not e["flips"] else e["named"] not in ([], [e["rank"]])
        for _, row in listed
        for e in row["errors"]
    )
    errors = PERMANENT * len(LAYOUTS) + OF_CHANCE * len(CHANCES)
    lines += ["", f"{machine()}. {errors:,} errors; {clean:,} audits without an error had", ""]
    lines[-2] += f" {alarms} false alarms; {wrong} findings named another rank than the wrong one."
    lines += ["## Permanent errors", "", "| ranks | options | errors | named by the first audit |"]
    lines += ["| --: | --- | --: | --: |"]
    for case, row in of_kind["permanent"]:
        flipped = [e for e in row["errors"] if e["flips"]]
        named = sum(e["named"] == [e["rank"]] for e in flipped)
        words = " ".join(f"{name}={value}" for name, value in case["options"].items())
        lines.append(f"| {case['ranks']} | {words or 'none'} | {len(flipped)} | {named} |")
    lines += ["", "## Errors of chance p", ""]
    lines += [f"Each of {OF_CHANCE} errors was in {AUDITS_OF_ERROR} audits.", ""]
    lines += ["| p | audits with a flipped bit | named | errors found | 1 - (1 - p)^n | sigma |"]
    lines += ["| --: | --: | --: | --: | --: | --: |"]
    for (_, row), chance in zip(of_kind["chance"], CHANCES, strict=True):
        lines.append(_line_of_chance(row["errors"], chance))
    return "\n".join([*lines, "", "## Cost", "", _cost(listed[-1][1]), ""])


def _introduction() -> str:
    return (__doc__ or "").replace("      writes results/audit.md", "").strip()


def _line_of_chance(errors: list[dict], chance: float) -> str:
    flipped = [e for e in errors if e["flips"]]
    named = sum(e["named"] == [e["rank"]] for e in flipped)
    runs = [errors[i : i + AUDITS_OF_ERROR] for i in range(0, len(errors), AUDITS_OF_ERROR)]
    share = sum(any(e["named"] for e in run) for run in runs) / len(runs)
    expected = 1 - (1 - chance) ** AUDITS_OF_ERROR
    sigma = (expected * (1 - expected) / len(runs)) ** 0.5
    return f"| {chance} | {len(flipped)} | {named} | {share:.1%} | {expected:.1%} | {sigma:.1%} |"


def _cost(row: dict) -> str:
    """Return a sentence about the seconds of an audit and of a micro-batch."""
    steps, audits = (seconds / 12 for seconds in row["seconds"])
    ratio = audits / steps * MICRO_BATCHES
    return (
        f"4 blocks of hidden 256, 256 tokens, two replicas of one rank: a step of {MICRO_BATCHES} "
        f"micro-batches\ntook {steps:.3f} s, an audit {audits:.3f} s, which is {ratio:.1f} times a "
        "micro-batch's share of the step."
    )


def main() -> None:
    """Run the cases that are missing in the file of results; write the report if none is."""
    parser = Parser("audit.py", description=(__doc__ or "").splitlines()[0])
    add_options(parser, minutes=60.0)
    given = parser.parse_args()
    kept = from_options(given)
    done = {row["number"] for row in kept.rows()}
    kept.run(run, [case for case in cases() if case["number"] not in done])
    rows = {row["number"]: row for row in kept.rows()}
    missing = len(cases()) - len(rows)
    if missing:
        print(f"{missing} cases are left: run the command again")
        return
    RESULTS.write_text(report(rows))
    print(f"written: {json.dumps(str(RESULTS.relative_to(ROOT)))}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        exit_with(error)
