"""A run of train.py on one GPU, as a user would start it: does it work, and how fast is it?

    python benchmarks/gpu_train.py --section FILE [--compile] [--device cpu]

The first of gpu.MODELS for a few steps, with what plan.py gap says of them. A part of
scripts/gpu_day.sh.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the project's own modules

from gpu import MODELS, Section
from gpu_models import training

STEPS, WARM_UP = 20, 5  # steps of the run; those at its begin whose time does not count


def measure(words: str, device: str, section: Section) -> None:
    """Run train.py with these words, and add what its rows say; exits if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "run"))
        command = [sys.executable, "train.py", *words.split(), "--steps", str(STEPS)]
        command += ["--device", device, "--out", out]
        status = subprocess.run(command, cwd=ROOT).returncode  # its output is shown as it comes
        if status:
            sys.exit(f"error: train.py {words} ended with status {status}")
        text = Path(out, "metrics.jsonl").read_text()
        gap = [sys.executable, "plan.py", "gap", out]
        causes = subprocess.run(gap, cwd=ROOT, capture_output=True, text=True)
    rows = [json.loads(line) for line in text.splitlines()]
    rows = [row for row in rows if row["iteration"] > WARM_UP and "seconds" in row]
    seconds = [row["seconds"] for row in rows]
    middle, mfu = statistics.median(seconds), rows[-1]["mfu"]
    spread = f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}"
    tokens = statistics.median(row["tokens_per_second"] for row in rows)
    memory = max(row["peak_memory_bytes"] for row in rows) / 2**30
    share = "of an unknown peak"
    if mfu is not None:
        share = f"MFU {statistics.median(row['mfu'] for row in rows):.1%}"
    section.add(
        f"`train.py {words}`: {1e3 * middle:.1f} ms a step ({spread}), {tokens:,.0f} tokens/s, "
        f"{share}, {memory:.2f} GiB, loss {rows[-1]['loss']:.3f} after step {STEPS}",
        "",
        "```",
        (causes.stdout + causes.stderr).strip(),
        "```",
        seconds=seconds,
        mfu=mfu,
    )
    if causes.returncode:
        sys.exit(f"error: plan.py gap ended with status {causes.returncode}")


def main() -> None:
    """The part, into its section's file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", required=True, help="file for the findings")
    parser.add_argument("--compile", action="store_true", help="train.py --compile")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    o = parser.parse_args()
    words = training(*MODELS[o.device][0])
    if o.compile:
        words += " --compile"
    measure(words, o.device, Section(o.section))


if __name__ == "__main__":
    main()
