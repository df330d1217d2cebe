"""Muon's Newton-Schulz iteration in fp32 and in bf16: loss curves, and updates' singular values.

    python benchmarks/layouts/muon_dtype.py FOLDER      prints the tables; FOLDER gets the runs

The model and the corpus are those of recipes/dense-1m, on one CPU core, with three seeds. Weights,
gradients and activations are fp32 in both: the dtype of the iteration is all that differs. The
singular values are of every matrix that a run updates in its first, middle and last step, before
the factor of the learning rate; an orthogonal matrix has 1 alone.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the project's own modules

from base.cli import Parser
from base.errors import sentences
from base.paths import check_folder

SEEDS = (1, 2, 3)
DTYPES = {"fp32": "master", "bf16": "bf16"}
STEPS = 120
SHOWN = (20, 40, 60, 90, 120)
LOOKED_AT = (1, STEPS // 2, STEPS)
SCRIPTS = (
    "make_stories.py --out {data}/stories.jsonl",
    "make_stories.py --out {data}/others.jsonl --stories 600 --seed 2",
    "prepare_data.py --out {data}/stories --vocab-size 512 {data}/stories.jsonl",
    "prepare_data.py --out {data}/others --tokenizer {data}/stories.tokenizer.json "
    "{data}/others.jsonl",
)
# What a run does in its process: it keeps the singular values of updates of LOOKED_AT steps.
WORKER = """
import json, sys
import torch
from optim import muon
torch.set_num_threads(1)
own, update = muon.newton_schulz, muon.Muon.update
step, values = 0, {}
def counted(self, *arguments):
    global step
    step += 1
    update(self, *arguments)
def kept(x):
    found = own(x)
    if step in LOOKED_AT:
        values.setdefault(step, []).extend(torch.linalg.svdvals(found.double()).flatten().tolist())
    return found
muon.newton_schulz, muon.Muon.update = kept, counted
import runpy
out = sys.argv[sys.argv.index("--out") + 1]
try:
    runpy.run_path("train.py", run_name="__main__")
finally:
    with open(out + "/values.json", "w") as file:
        json.dump(values, file)
"""


def prepare(folder: Path) -> None:
    """Make the corpora of the recipe in the folder, if they are not there."""
    if (folder / "others.idx").exists():
        return
    for words in SCRIPTS:
        script, *rest = words.format(data=folder).split()
        command = [sys.executable, f"scripts/{script}", *rest]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def run(folder: Path, dtype: str, seed: int) -> None:
    """Train with one dtype and seed, unless the folder has the run."""
    out = folder / f"{dtype}-{seed}"
    if (out / "values.json").exists():
        return
    words = f"--config recipes/dense-1m/run.toml --steps {STEPS} --optimizer muon --device cpu"
    words += f" --seed {seed} --set muon_dtype={DTYPES[dtype]} --out {out}"
    words += f" --data {folder / 'stories'} --eval-data others={folder / 'others'}:512"
    worker = WORKER.replace("LOOKED_AT", repr(LOOKED_AT))
    command = [sys.executable, "-c", worker, *words.split()]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def rows_of(folder: Path, dtype: str, seed: int) -> list[dict]:
    """Return the rows of a run's metrics."""
    text = (folder / f"{dtype}-{seed}" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(rows: list[dict]) -> list[float]:
    """Return the mean loss of the 20 steps up to each of SHOWN."""
    of_step = {row["iteration"]: row["loss"] for row in rows if "loss" in row}
    return [statistics.mean(of_step[n] for n in range(at - 19, at + 1)) for at in SHOWN]


def print_losses(folder: Path) -> None:
    """Print the losses of all runs."""
    print("| iteration in | seed |", " | ".join(f"step {at}" for at in SHOWN), "| unseen stories |")
    print("| --- | --: |", "--: | " * len(SHOWN), "--: |")
    for dtype in DTYPES:
        for seed in SEEDS:
            rows = rows_of(folder, dtype, seed)
            [*_, last] = [row for row in rows if "others" in str(row.get("validation_losses"))]
            unseen = last["validation_losses"]["others"]
            shown = " | ".join(f"{loss:.4f}" for loss in losses(rows))
            print(f"| {dtype} | {seed} | {shown} | {unseen:.4f} |")


def print_values(folder: Path) -> None:
    """Print quantiles of the singular values of the updates of all seeds."""
    print("\n| iteration in | step | least | 5 % | half | 95 % | largest |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for dtype in DTYPES:
        for step in LOOKED_AT:
            values = []
            for seed in SEEDS:
                kept = json.loads((folder / f"{dtype}-{seed}" / "values.json").read_text())
                values += kept[str(step)]
            values.sort()
            places = [0, len(values) // 20, len(values) // 2, -1 - len(values) // 20, -1]
            shown = " | ".join(f"{values[place]:.4f}" for place in places)
            print(f"| {dtype} | {step} | {shown} |")


def main() -> None:
    """Prepare the corpora, run all runs that are not there, print the tables."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets corpora and runs")
    with sentences():
        folder = parser.parse_args().folder.absolute()
        check_folder("FOLDER", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    for seed in SEEDS:
        for dtype in DTYPES:
            run(folder, dtype, seed)
    print_losses(folder)
    print_values(folder)


if __name__ == "__main__":
    main()
