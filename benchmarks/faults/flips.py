"""Bits that flip in one rank's memory: what notices them, and what a restart continues from.

    python benchmarks/faults/flips.py --keep RESULTS.jsonl [--minutes 7]  writes results/flips.md

Two ranks train a small model for 60 steps and save every 4 steps; replicas are compared before each
save, and otherwise only every 1,000 steps. One bit of one rank flips in step 46, after 32 steps
from which the rule for spikes has its mean. If that ends the run, the cause is read from the report
of the run (OUT/hang), and it is resumed without the fault. All weights and
optimizer state of the last checkpoint are compared with those of a run without a fault: the same
bits mean that no corrupted state was continued from.

With --tp 2 there is one data replica, so ZeRO has nothing to shard, and these are run once.
Results are kept in RESULTS.jsonl, so that the list can be run in parts: flips that are in it are
not run again, and with --minutes none is begun after that time.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.results_file import add_options, from_options, machine

RESULTS = ROOT / "benchmarks" / "results" / "flips.md"
OPTIONS = (
    "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 8 "
    "--micro-batch-size 2 --device cpu --steps 60 --save-every 4 --resume auto "
    "--set max_nan_steps=3"
)
STEP = 46
ZERO_0, ZERO_1, TENSOR = "--zero 0", "--zero 1", "--tp 2"
# The tensor in which a bit flips, the bit (of 32; 30 is the exponent's highest), and the rank.
OF_REPLICAS = (
    ("weight", 3, 1),
    ("weight", 22, 1),
    ("weight", 22, 0),
    ("weight", 30, 1),
    ("exp_avg", 3, 1),
    ("exp_avg", 22, 1),
    ("exp_avg", 30, 1),
    ("exp_avg_sq", 22, 1),
    ("exp_avg_sq", 30, 1),
    ("gradient", 22, 1),
    ("gradient", 30, 1),
)
# Rank 1 of two has only rows that pad the vocabulary of the first tensor that is split.
OF_TENSOR_RANKS = (("norm", 22, 1), ("norm", 30, 1), ("split", 22, 0))
FLIPS = [
    *((ZERO_0, *flip) for flip in OF_REPLICAS),
    *((TENSOR, *flip) for flip in OF_TENSOR_RANKS),
    *((ZERO_1, *flip) for flip in OF_REPLICAS),
]
SECONDS_FOR_THE_REPORT = 60.0  # which the monitor writes when the ranks have ended


def train(out: Path, layout: str, flip: str, rank: int, step: int) -> tuple[int, str]:
    """Status and standard error of one start of two ranks; step 0: without the fault."""
    words = ["tests/corrupted_worker.py", f"flip:{flip}", str(rank), str(step)]
    words += [*OPTIONS.split(), *layout.split(), "--out", str(out)]
    command = [str(Path(sys.executable).with_name("mpirun")), "-n", "2", sys.executable, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


def last_row(out: Path) -> dict:
    """The row of the last step."""
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])


def last_state(out: Path) -> dict[str, str]:
    """A digest of each array of the last checkpoint: weights and optimizer state of each rank."""
    newest = max((out / "checkpoints").glob("step_*"))
    digests = {}
    for path in sorted(newest.glob("rank_*.h5")):
        with h5py.File(path) as file:
            for name, array in file.items():
                digests[f"{path.name} {name}"] = hashlib.sha256(array[()].tobytes()).hexdigest()
    return digests


def failure(out: Path) -> str:
    """The exception of the rank that the run's report says failed first, with its traceback."""
    case = out / "hang" / "case.json"
    limit = time.monotonic() + SECONDS_FOR_THE_REPORT
    while not (case.exists() and case.read_text().endswith("}")):
        if time.monotonic() > limit:
            return ""
        time.sleep(0.1)
    first = json.loads(case.read_text())["first"]
    return json.loads((out / "hang" / f"rank_{first:05d}.json").read_text())["error"]


def cause(out: Path) -> str:
    """Why the run ended, in words, from its report."""
    error = failure(out)
    if not error:
        return "ended without a report"
    found = re.search(r"after step (\d+) replicas are no longer equal: (\S+ \S+)", error)
    if not found:
        return error.strip().splitlines()[-1][:80]
    when = f"the save of step {found[1]}"
    if "in give_up" in error:
        when = f"calling step {found[1]} diverged, after 3 losses that are NaN"
    elif int(found[1]) % 4:
        when = f"the end of step {found[1]}"
    return f"comparing replicas before {when}: {found[2]}"


def rows_since(path: Path) -> list[dict]:
    """The rows of a file of the run from the step of the flip on; none if there is no file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["iteration"] >= STEP]


def traces(out: Path) -> str:
    """Spikes and skipped updates since the flip, which a run without a fault has none of."""
    found = [
        f"a recorded spike: {row['of']} of step {row['iteration']}"
        for row in rows_since(out / "spikes.jsonl")
    ]
    found += [
        f"a norm that is not finite: the update of step {row['iteration']} is skipped"
        for row in rows_since(out / "metrics.jsonl")
        if row["skipped"]
    ]
    return "; ".join(found[:2])


def examine(folder: Path, layout: str, flip: tuple[str, int, int], clean: dict) -> dict:
    """One row of the table: what noticed the flip, and what the last checkpoint is."""
    kind, bit, rank = flip
    out = folder / "flipped"
    fault = f"{kind}:{bit}"
    status, _ = train(out, layout, fault, rank, STEP)
    noticed = traces(out)
    resumed = ""
    if status:
        noticed = cause(out)
        names = sorted(path.name for path in (out / "checkpoints").glob("step_*"))
        resumed = names[-1].removeprefix("step_").lstrip("0") if names else "0"
        status, _ = train(out, layout, fault, rank, 0)
    loss = last_row(out)["loss"]
    outcome = "ended again"
    if not status:
        outcome = "the same bits"
        if last_state(out) != clean["state"]:
            outcome = f"other bits; the loss is off by {abs(loss / clean['loss'] - 1):.1e}"
    shutil.rmtree(out)
    return {
        "flip": [layout, *flip],
        "noticed": noticed or "nothing",
        "resumed": resumed or "-",
        "outcome": outcome,
    }


def without_fault(folder: Path, layout: str) -> dict:
    """Loss and state at the end of a run of that layout without a fault."""
    out = folder / "clean"
    status, error = train(out, layout, "weight:0", 0, 0)
    if status:
        raise SystemExit(error)
    if traces(out):
        raise SystemExit(f"without a fault there is {traces(out)}")
    clean = {"loss": last_row(out)["loss"], "state": last_state(out)}
    shutil.rmtree(out)
    return clean


def page(rows: list[dict]) -> str:
    """The results file."""
    text = (__doc__ or "").replace("      writes results/flips.md", "").strip()
    ended = [row for row in rows if row["resumed"] != "-"]
    same = sum(row["outcome"] == "the same bits" for row in ended)
    lines = [f"# {text}", "", f"{machine()}, shared, 2 ranks."]
    lines += [f"Of {len(FLIPS)} flips {len(rows)} were run. The flip"]
    lines += [f"ended {len(ended)} runs, which were resumed: {same} of them end with the bits of a"]
    hidden = [row for row in rows if row["flip"][0] == ZERO_1 and row["noticed"] == "nothing"]
    changed = sum(row["outcome"] != "the same bits" for row in hidden)
    lines += [f"run without a fault. Under ZeRO 1 nothing noticed {len(hidden)} of"]
    lines += [
        f"{len(OF_REPLICAS)} flips, and {changed} of these changed the state for good: sharded"
    ]
    lines += ["state has no copy, and weights are those of the rank that updates them.", ""]
    lines += [
        "| layout | flipped | bit | rank | noticed by | resumed from step | last checkpoint |"
    ]
    lines += ["| --- | --- | --: | --: | --- | --: | --- |"]
    for row in sorted(rows, key=lambda row: FLIPS.index(tuple(row["flip"]))):
        cells = [*row["flip"], row["noticed"], row["resumed"], row["outcome"]]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try each flip that is not kept yet and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    options = parser.parse_args()
    keep = from_options(options)
    there = [tuple(row["flip"]) for row in keep.rows()]
    clean: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as name:

        def tried(flip: tuple) -> list[dict]:
            """The row of one flip; the run without a fault is made once for each layout."""
            layout = flip[0]
            if layout not in clean:
                clean[layout] = without_fault(Path(name), layout)
            row = examine(Path(name), layout, flip[1:], clean[layout])
            print(json.dumps(row), flush=True)
            return [row]

        keep.run(tried, [flip for flip in FLIPS if flip not in there])
    rows = [row for row in keep.rows() if tuple(row["flip"]) in FLIPS]
    RESULTS.write_text(page(rows))


if __name__ == "__main__":
    main()
