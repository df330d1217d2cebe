"""The planner's constants refitted on runs of train.py on the GPU here, as a user would do it.

    python benchmarks/gpu_runs.py --section FILE --out DIR [--device cpu]

Starts RUNS one after the other, each a train.py of one rank, and has plan.py calibrate write
DIR/machine.toml by them. No run has a shape of gpu.MODELS: on those the new constants are judged,
by gpu_asked.py. A part of scripts/gpu_day.sh.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the project's own modules

from gpu import Section, this_machine

from planner import run_files

MACHINE = "machine.toml"
# What tells constants apart: one micro-batch and eight (the step's fixed seconds), wide matrices,
# long samples (attention), small matrices. The most telling first.
RUNS = {
    "cuda": [
        "--layers 12 --hidden 2048 --heads 16 --seq-length 2048 --micro-batch-size 4 "
        "--global-batch-size 4 --steps 20",
        "--layers 12 --hidden 2048 --heads 16 --seq-length 2048 --micro-batch-size 4 "
        "--global-batch-size 32 --steps 10",
        "--layers 6 --hidden 4096 --heads 32 --seq-length 2048 --micro-batch-size 2 "
        "--global-batch-size 16 --steps 10",
        "--layers 12 --hidden 2048 --heads 16 --seq-length 8192 --micro-batch-size 1 "
        "--global-batch-size 8 --steps 10",
        "--layers 24 --hidden 1024 --heads 16 --seq-length 1024 --micro-batch-size 16 "
        "--global-batch-size 64 --steps 10",
    ],
    "cpu": [
        f"--layers 2 --hidden {hidden} --heads 4 --seq-length 64 --vocab-size 512 "
        f"--micro-batch-size 2 --global-batch-size {batch} --steps 12"
        for hidden, batch in [(64, 2), (64, 8), (128, 4)]
    ],
}
SECONDS = 80.0  # after which no further run is started
FEWEST = 3  # runs for a fit


def run(words: str, device: str, out: Path) -> str:
    """Start a run; empty, or the end of its output if it failed."""
    command = [sys.executable, "train.py", *words.split(), "--precision", "bf16"]
    command += ["--device", device, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{done.stdout}\n{done.stderr}"[-2000:]


def fit(device: str, section: Section, out: Path) -> None:
    """Run all, and refit; RuntimeError if too few have ended well."""
    machine, began, ended = this_machine(device), time.monotonic(), []
    if machine is None:
        section.add("hardware/ has no machine for the device that is here")
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, words in enumerate(RUNS[device]):
            if time.monotonic() - began > SECONDS:
                section.add(f"* not run, after {SECONDS:.0f} s: `train.py {words}`")
                continue
            name = f"run-{number + 1}"
            if wrong := run(words, device, Path(folder, name)):
                section.add(f"* failed: `train.py {words}`", "", "```", wrong, "```")
                continue
            found = run_files.read(str(Path(folder, name)), machine)
            told = f"{1e3 * found.seconds:.1f} ms, median of {found.steps}"
            section.add(f"* {name}, `train.py {words}`: {told}, its spread {found.spread:.1%}")
            ended.append(name)
        if len(ended) < FEWEST:
            raise RuntimeError(f"{len(ended)} runs ended well, a fit takes {FEWEST}")
        command = [sys.executable, str(ROOT / "plan.py"), "calibrate", *ended]
        command += ["--gpu", machine.name, "--write", str(out.resolve() / MACHINE)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    section.add("", "```", f"{done.stdout}{done.stderr}".strip(), "```", machine=machine.name)


def main() -> None:
    """The part, into its section's file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", required=True, help="file for the findings")
    parser.add_argument("--out", required=True, help="folder for the machine's file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    o = parser.parse_args()
    Path(o.out, MACHINE).unlink(missing_ok=True)  # of an earlier run
    fit(o.device, Section(o.section), Path(o.out))


if __name__ == "__main__":
    main()
