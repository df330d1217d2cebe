"""The loss after 200 steps in fp32, bf16 and fp16, on 1 to 8 ranks, on Python's own sources.

    python benchmarks/layouts/precision.py FOLDER  prints the table; FOLDER gets corpus and runs

Compared are the mean loss of the last 20 steps and the validation loss, each with fp32 on one
rank. A small model and vocabulary: CPUs multiply fp16 two hundred times slower than fp32.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the project's own modules

from base.cli import Parser
from base.errors import sentences
from base.paths import check_folder

MODEL = "--layers 2 --hidden 64 --heads 4 --seq-length 64 --vocab-size 512 --positions rotary"
TRAINING = "--global-batch-size 4 --steps 200 --lr 3e-3 --min-lr 3e-4 --lr-warmup-samples 80"
DATA = "--split 95,5,0 --eval-samples 64 --log-every 50"
MESHES = {1: "", 2: "--tp 2", 4: "--tp 2 --pp 2", 8: "--tp 2 --pp 2 --zero 2"}


def run(folder: Path, ranks: int, precision: str) -> tuple[float, float, int, float]:
    """Mean loss of the last 20 steps, validation loss, steps skipped, last loss scale."""
    out = folder / f"{precision}-{ranks}"
    words = f"{MODEL} {TRAINING} {DATA} {MESHES[ranks]} --precision {precision}"
    command = ["mpirun", "-n", str(ranks), sys.executable, str(ROOT / "train.py")]
    command += [*words.split(), "--data", str(folder / "corpus"), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    last = [row["loss"] for row in steps[-20:]]
    validation = next(row["validation_loss"] for row in rows if "validation_loss" in row)
    skipped = sum(row["skipped"] for row in steps)
    return sum(last) / len(last), validation, skipped, steps[-1]["loss_scale"]


def main() -> None:
    """Prepare the corpus if it is not there, run everything, print the table."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets corpus and runs")
    with sentences():
        folder = parser.parse_args().folder
        check_folder("FOLDER", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "corpus.idx").exists():
        prepare = [sys.executable, "scripts/prepare_data.py", "--stdlib", "--vocab-size", "512"]
        subprocess.run([*prepare, "--out", str(folder / "corpus")], check=True, cwd=ROOT)
    print(
        "| precision | ranks | layout | loss | off fp32 | validation | off fp32 | skipped | scale |"
    )
    print("| --- | --: | --- | --: | --: | --: | --: | --: | --: |", flush=True)
    base = None
    for precision in ("fp32", "bf16", "fp16"):
        for ranks, mesh in MESHES.items():
            loss, validation, skipped, scale = run(folder, ranks, precision)
            base = base or (loss, validation)
            print(
                f"| {precision} | {ranks} | {mesh.replace('--', '')} | {loss:.4f} |"
                f" {loss / base[0] - 1:+.3%} | {validation:.4f} | {validation / base[1] - 1:+.3%} |"
                f" {skipped} | {scale:g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
