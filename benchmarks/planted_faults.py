"""Plants faults into small runs, and counts what `runs.py diff` names.

    python benchmarks/planted_faults.py --keep RESULTS.jsonl [--minutes 7]

A run with a fault (B) is compared with a right run of the same model in another layout (A). Both
trace every step. Call sites of collectives are recorded in right runs; tests/plants.py alters the
results of one site, and tests/planted_by_hand.py has the faults that are no collective's. A fault
that changes no bit of the run's losses, traces and weights does not count.

Results are kept in RESULTS.jsonl, and right runs in a folder next to it, so that the list can be
run in parts. The last part writes results/planted_faults.md.
"""

import itertools
import json
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the project's own modules

import planted_by_hand
from kept import Kept, add_options, from_options
from planted_names import expected
from planted_report import report
from plants import CHANGES
from ranks import results_of

from config.messages import Parser, UserError, exit_with
from numerics import diff
from numerics.traces import read

RESULTS = ROOT / "benchmarks" / "results" / "planted_faults.md"
COUNT = 120
STEPS = 3
AT_ONCE = 8  # runs of one start of ranks
TINY = {"hidden": 16, "heads": 4, "layers": 4, "steps": STEPS}
TINY |= {"trace_numerics": list(range(1, STEPS + 1))}
MODELS: dict[str, dict] = {
    "gpt": {},
    "rotary": {
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "kv_heads": 2,
        "tied": False,
        "precision": "fp64",
    },
    "experts": {"experts": 4, "experts_per_token": 2, "bias": False, "balance": "bias"},
}
# Ranks, model, options.
LAYOUTS: dict[str, tuple[int, str, dict]] = {
    "one": (1, "gpt", {}),
    "one-batch2": (1, "gpt", {"micro_batch_size": 2, "recompute": "full"}),
    "one-rotary": (1, "rotary", {}),
    "one-experts": (1, "experts", {}),
    "tp": (2, "gpt", {"tp": 2}),
    "tp-sp": (2, "gpt", {"tp": 2, "sequence_parallel": True}),
    "pp": (2, "gpt", {"pp": 2}),
    "pp-zbh1": (2, "gpt", {"pp": 2, "schedule": "zb-h1"}),
    "pp-zbv": (2, "gpt", {"pp": 2, "schedule": "zb-v"}),
    "pp-interleaved": (2, "gpt", {"pp": 2, "schedule": "interleaved"}),
    "pp-vocab": (2, "gpt", {"pp": 2, "vocab_pp": True}),
    "dp-z0": (2, "gpt", {"dp": 2, "zero": 0}),
    "dp-z1": (2, "gpt", {"dp": 2, "zero": 1, "micro_batch_size": 2}),
    "dp-z2": (2, "gpt", {"dp": 2, "zero": 2}),
    "dp-z3": (2, "gpt", {"dp": 2, "zero": 3}),
    "cp": (2, "gpt", {"cp": 2}),
    "tp-rotary": (2, "rotary", {"tp": 2, "sequence_parallel": True}),
    "cp-rotary": (2, "rotary", {"cp": 2}),
    "pp-rotary": (2, "rotary", {"pp": 2, "schedule": "gpipe"}),
    "tp-experts": (2, "experts", {"tp": 2}),
    "ep-dp": (2, "experts", {"dp": 2, "ep": 2}),
    "tp-pp": (4, "gpt", {"tp": 2, "pp": 2}),
    "tp-dp-z1": (4, "gpt", {"tp": 2, "dp": 2, "zero": 1}),
    "tp-sp-dp-z2": (4, "gpt", {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 2}),
    "pp-dp-z2": (4, "gpt", {"pp": 2, "dp": 2, "zero": 2}),
    "tp-pp-vocab": (4, "gpt", {"tp": 2, "pp": 2, "vocab_pp": True}),
    "tp-cp": (4, "gpt", {"tp": 2, "cp": 2}),
    "cp-dp": (4, "gpt", {"cp": 2, "dp": 2}),
    "pp4": (4, "gpt", {"pp": 4}),
    "cp4-rotary": (4, "rotary", {"cp": 4}),
    "dp4-rotary": (4, "rotary", {"dp": 4, "zero": 1, "tied": False}),
    "ep-tp": (4, "experts", {"tp": 2, "dp": 2, "ep": 2}),
    "ep-pp": (4, "experts", {"pp": 2, "dp": 2, "ep": 2}),
    "tp-pp-dp": (8, "gpt", {"tp": 2, "pp": 2, "dp": 2}),
}


def options(layout: str, out: Path) -> dict:
    """The options of a run, as tests/golden_worker.py takes them."""
    _, model, own = LAYOUTS[layout]
    return TINY | MODELS[model] | own | {"out": str(out)}


def run_all(jobs: list[dict], ranks: int) -> list[dict]:
    """Run jobs of tests/plants_worker.py in one start of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return results_of("tests/plants_worker.py", ranks, jobs, Path(folder), timeout=900)


def make_right_runs(folder: Path, keep: Kept) -> None:
    """Make the runs without a fault that are missing, with `sites.json` of their call sites."""

    def make(chunk: tuple[str, ...]) -> list[dict]:
        jobs = [{"case": options(name, folder / name), "plant": None} for name in chunk]
        for name, result in zip(chunk, run_all(jobs, LAYOUTS[chunk[0]][0]), strict=True):
            (folder / name / "sites.json").write_text(json.dumps(result["seen"]))
        return []

    keep.run(make, chunks([n for n in LAYOUTS if not (folder / n / "sites.json").exists()]))


def chunks(names: list[str], layout_of=lambda name: name) -> list[tuple]:
    """The names in lists for one start each: of equal ranks, and not too many."""
    by_ranks = sorted(names, key=lambda name: LAYOUTS[layout_of(name)][0])
    found = []
    for _, of in itertools.groupby(by_ranks, key=lambda name: LAYOUTS[layout_of(name)][0]):
        found += _batched(list(of))
    return found


def _batched(names: list) -> list[tuple]:
    return [tuple(names[i : i + AT_ONCE]) for i in range(0, len(names), AT_ONCE)]


def plan(folder: Path) -> list[dict]:
    """All planned faults: those by hand first, then drawn ones, so that all sites, layouts and
    changes occur.
    """
    drawn = random.Random(0)
    found = []
    for name, fault in planted_by_hand.FAULTS.items():
        for layout in fault.layouts:
            plant = {"by_hand": name, "step": drawn.choice((1, 2)), "rank": None}
            if name in ("other_seed", "vocabulary_off_by_one", "rotary_off_by_one"):
                plant |= {"rank": 1}
            if name == "bias_of_every_rank":
                plant |= {"step": 2}  # in step 1 the bias is 0
            found.append({"layout": layout, "plant": plant})
    sites: dict[str, list[dict]] = {}
    for layout in LAYOUTS:
        for site, detail, method, role, kind in json.loads(
            (folder / layout / "sites.json").read_text()
        ):
            if "int" in kind:
                continue  # counts of rows, from which the sizes of messages follow
            plant = {"site": site, "detail": detail if drawn.random() < 0.5 else None}
            place = site.split(" < ")[0].split(":")[0] + site.split(" ", 1)[1] + method + role
            sites.setdefault(place, []).append({"layout": layout, "plant": plant})
    wanted = list(sites)
    drawn.shuffle(wanted)
    changes = itertools.cycle(CHANGES)
    while len(found) < 2 * COUNT:
        for place in wanted:
            one = drawn.choice(sites[place])
            more = {"change": next(changes), "step": drawn.choice((1, 2))}
            size = LAYOUTS[one["layout"]][0]
            more["rank"] = drawn.choice((None, None, None, drawn.randrange(size)))
            if more["change"] == "stale":
                more["step"] = 1
            candidate = {"layout": one["layout"], "plant": one["plant"] | more}
            if candidate not in found:
                found.append(candidate)
    for number, fault in enumerate(found):
        model = LAYOUTS[fault["layout"]][1]
        others = [n for n in LAYOUTS if LAYOUTS[n][1] == model and n != fault["layout"]]
        fault |= {"number": number, "reference": drawn.choice(others)}
    return found


def right_pairs(folder: Path) -> list[tuple[str, str, bool]]:
    """Every pair of right runs of one model, and whether diff accuses it."""
    pairs = itertools.combinations(LAYOUTS, 2)
    alike = [(a, b) for a, b in pairs if LAYOUTS[a][1] == LAYOUTS[b][1]]
    return [(a, b, diff.compare(folder / a, folder / b)["differs"]) for a, b in alike]


def unlike(a: Path, b: Path) -> bool:
    """Whether any file of two runs differs in a bit."""
    names = ["metrics.jsonl", "weights.json"]
    names += [f"numerics/step-{step:06d}.npz" for step in range(1, STEPS + 1)]
    return any((a / name).read_bytes() != (b / name).read_bytes() for name in names)


def make_faults(folder: Path, faults: tuple[dict, ...]) -> list[dict]:
    """Run faults of layouts of equal ranks in one start; return their rows."""
    rows = []
    with tempfile.TemporaryDirectory() as made:
        outs = [Path(made) / str(fault["number"]) for fault in faults]
        jobs = [
            {"case": options(fault["layout"], out), "plant": fault["plant"]}
            for fault, out in zip(faults, outs, strict=True)
        ]
        results = run_all(jobs, LAYOUTS[faults[0]["layout"]][0])
        for fault, out, result in zip(faults, outs, results, strict=True):
            changed = unlike(folder / fault["layout"], out)
            found = diff.compare(folder / fault["reference"], out)
            facts = json.loads((out / "run.json").read_text())
            text = diff.text(found)
            about = {"changed": changed, "hits": result["hits"], "text": text}
            about |= {"losses": found["losses"], "tensor": found["tensor"]}
            about["blocks"] = facts["blocks_per_stage"]
            about["parameters"] = read(out / "numerics" / "step-000001.npz").about["parameters"]
            row = fault | about
            row["expected"] = expected(row) if changed and result["hits"] else None
            rows.append(row)
            print(fault["number"], fault["layout"], changed, flush=True)
    return rows


def main() -> None:
    """Run what is missing in the file of results; write the report if nothing is."""
    parser = Parser("planted_faults.py", description=(__doc__ or "").splitlines()[0])
    add_options(parser, minutes=60.0)
    given = parser.parse_args()
    kept = from_options(given)
    folder = given.keep.with_suffix(".runs").absolute()
    make_right_runs(folder, kept)
    if not all((folder / name / "sites.json").exists() for name in LAYOUTS):
        print("right runs are left: run the command again")
        return
    planned = plan(folder)
    counted: list[dict] = []
    first = 0
    while len(counted) < COUNT and first < len(planned):
        stop = first + COUNT - len(counted)
        done = {row["number"] for row in kept.rows()}
        wanted = [fault for fault in planned[first:stop] if fault["number"] not in done]
        kept.run(
            lambda faults: make_faults(folder, faults),
            chunks(wanted, lambda fault: fault["layout"]),
        )
        rows = {row["number"]: row for row in kept.rows()}
        if not all(fault["number"] in rows for fault in planned[first:stop]):
            print("faults are left: run the command again")
            return
        counted += [rows[n] for n in range(first, stop) if rows[n]["changed"]]
        first = stop
    RESULTS.write_text(report(counted, first, right_pairs(folder), len(LAYOUTS)))
    print(f"written: {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        exit_with(error)
