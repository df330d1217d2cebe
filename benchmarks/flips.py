"""Bits that flip in one rank's memory: what notices them, and what a restart continues from.

    python benchmarks/flips.py          writes benchmarks/results/flips.md

Two data replicas train a small model for 60 steps and save every 4 steps; replicas are compared
before each save, and otherwise only every 1,000 steps. One bit of rank 1 flips in step 46. If that
ends the run, it is resumed without the fault. The last loss is compared with that of a run without
a fault: the same bits mean that no corrupted state was continued from.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "flips.md"
OPTIONS = (
    "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 8 "
    "--micro-batch-size 2 --device cpu --steps 60 --save-every 4 --max-nan-steps 3 --resume auto"
)
KINDS = ("weight", "exp_avg", "exp_avg_sq", "gradient")
BITS = {"weight": (3, 22, 30), "exp_avg": (3, 30), "exp_avg_sq": (22,), "gradient": (30,)}
STEP = 46


def train(out: Path, zero: int, fault: str, step: int) -> tuple[int, str]:
    """Status and standard error of one start of two ranks; step 0: without the fault."""
    words = ["tests/corrupted_worker.py", fault, "1", str(step), *OPTIONS.split()]
    words += ["--zero", str(zero), "--out", str(out)]
    command = ["mpirun", "-n", "2", sys.executable, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


def last_row(out: Path) -> dict:
    """The row of the last step."""
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])


def spiked(out: Path) -> bool:
    """Whether a spike of the loss or of the gradient norm was recorded."""
    path = out / "spikes.jsonl"
    return path.exists() and bool(path.read_text())


def examine(folder: Path, zero: int, kind: str, bit: int, clean: float) -> list[str]:
    """The cells of one row of the table."""
    out = folder / f"{zero}-{kind}-{bit}"
    fault = f"flip:{kind}:{bit}"
    status, error = train(out, zero, fault, STEP)
    noticed = "nothing"
    if "replicas are no longer equal" in error:
        noticed = error.partition("after iteration ")[2].partition(" ")[0]
        noticed = f"the check before the save of step {noticed}"
    elif status:
        noticed = error.strip().splitlines()[-1][:80]
    elif spiked(out):
        noticed = "a spike of the gradient norm or loss is recorded"
    resumed = ""
    if status:
        names = sorted(path.name for path in (out / "checkpoints").glob("step_*"))
        resumed = names[-1].removeprefix("step_").lstrip("0") if names else "0"
        status, error = train(out, zero, fault, 0)
    loss = last_row(out)["loss"]
    equal = "the same bits" if loss == clean else f"off by {abs(loss / clean - 1):.1e}"
    shutil.rmtree(out)
    return [str(zero), kind, str(bit), noticed, resumed or "-", equal if not status else "ended"]


def main() -> None:
    """Try each flip and write the table."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for zero in (0, 1):
            status, error = train(folder / "clean", zero, "flip:weight:0", 0)
            if status:
                raise SystemExit(error)
            clean = last_row(folder / "clean")["loss"]
            shutil.rmtree(folder / "clean")
            for kind in KINDS:
                for bit in BITS[kind]:
                    rows.append(examine(folder, zero, kind, bit, clean))
                    print(" | ".join(rows[-1]), flush=True)
    text = (__doc__ or "").replace("          writes benchmarks/results/flips.md", "")
    head = (
        "| --zero | flipped | bit | noticed by | resumed from step | last loss against no fault |"
    )
    lines = [f"# {text.strip()}", "", f"torch {torch.__version__}, 2 ranks on CPUs.", ""]
    lines += [head, "| --: | --- | --: | --- | --: | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
