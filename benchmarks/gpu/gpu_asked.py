"""Compares the GPU day's goals with its figures, and runs for a calibration.

    python benchmarks/gpu/gpu_asked.py runs --section FILE --out DIR     DIR: of scripts/gpu_day.sh
    python benchmarks/gpu/gpu_asked.py asked --section FILE --out DIR

`runs` starts RUNS, each a train.py of one rank, and has plan.py calibrate write DIR/machine.toml by
them. No run has a shape of gpu.MODELS: on those the new constants are judged, by `asked`, which
takes the findings of the other parts from DIR/gpu-day.json. Parts of scripts/gpu_day.sh.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the project's own modules

from architecture import model_stats
from benchmarks.gpu.gpu import MODELS, Section, machine_of, this_machine
from benchmarks.gpu.gpu_models import AS_IT_IS, COMPILED, configuration, training
from costs import hardware, step_time
from costs.job import Job

LEAST_MFU, LEAST_RATIO = 0.5, 1.08  # share of the peak; ratio of tokens/s to the plain loop
MEMORY_WITHIN, STEP_WITHIN = 0.02, 0.08
MACHINE = "machine.toml"
# Runs that determine different constants: one micro-batch and eight (the step's fixed seconds),
# wide matrices, long samples (attention), small matrices. The first ones determine the most.
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
Row = tuple[str, str, str, bool | None]  # subject, goal, figure seen, whether it is met


def program(*words: str, folder: str | Path = ROOT) -> str:
    """Return a program's output; RuntimeError with the output if the program fails."""
    command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}:\n{done.stdout}\n{done.stderr}"[-4000:])
    return done.stdout


def runs(device: str, section: Section, out: Path) -> None:
    """Run all, and refit. RuntimeError if a run or the fit fails."""
    machine = this_machine(device)
    (out / MACHINE).unlink(missing_ok=True)  # the file of an earlier day
    if machine is None:
        section.add("hardware/ has no machine for the device that is here")
        return
    names = []
    with tempfile.TemporaryDirectory() as folder:
        for words in RUNS[device]:
            name = f"run-{len(names) + 1}"
            more = ["--precision", "bf16", "--device", device, "--out", str(Path(folder, name))]
            program("train.py", *words.split(), *more)
            section.add(f"* {name}, `train.py {words}`")
            names.append(name)
        write = ["--gpu", machine.name, "--write", str(out.resolve() / MACHINE)]
        told = program("plan.py", "calibrate", *names, *write, folder=folder)
    section.add("", "```", told.strip(), "```")


# ---- Asked and seen ------------------------------------------------------------------------------


def asked(device: str, section: Section, out: Path) -> None:
    """The table: each part that has not been run is a row without a figure."""
    parts = json.loads((out / "gpu-day.json").read_text())["parts"]
    found = {part["name"]: part["data"] for part in parts}
    words = MODELS[device][0][0]
    model = found.get("models", {}).get(words)
    machine = machine_of(found.get("facts", {}).get("device", ""))
    rows = [tests(found, part) for part in ("cuda", "nccl", "nccl4")]
    if model and machine:
        rows += [*speed(words, model, device, machine), memory(words, model)]
        rows += planned(words, model, device, machine, out)
    else:
        rows.append((f"{words}: speed, memory, step", "", "not run", None))
    answers = {None: "", True: "reached", False: "NOT REACHED"}
    section.add(
        "| what | asked | seen | |",
        "| --- | --- | --- | --- |",
        *(f"| {what} | {wish} | {seen} | {answers[good]} |" for what, wish, seen, good in rows),
        "",
        rows=rows,
    )


def tests(found: dict[str, Any], part: str) -> Row:
    """The row of a part that is tests."""
    data, what = found.get(part), f"{part} tests"
    if not data:
        return what, "all pass", "not run", None
    passed, failed = data["passed"], len(data["failed"])
    seen = f"{passed} passed, {failed} failed, {data['skipped']} skipped"
    if not data["finished"]:
        seen += ", ended before the last test"
    return what, "all pass", seen, bool(passed) and not failed and data["finished"]


def speed(
    words: str, model: dict[str, Any], device: str, machine: hardware.Machine
) -> Iterator[Row]:
    """MFU with --compile, of the device's peak, and tokens/s beside the plain loop's."""
    config = configuration(words, model["micro_batch"], device)
    flops = model_stats.model_flops(config.model, config.training.global_batch_size)
    wish = f"at least {LEAST_MFU:.0%} of {machine.peak / 1e12:.4g} TFLOP/s"
    seen, good = "not run", None
    if COMPILED in model["seconds"]:
        share = flops / statistics.median(model["seconds"][COMPILED]) / machine.peak
        seen, good = f"{share:.1%}", share >= LEAST_MFU
    yield f"{words}: MFU, causal half, --compile", wish, seen, good
    seen, good = "not run", None
    if "ratio" in model:
        seen, good = f"{model['ratio']:.3f}", model["ratio"] >= LEAST_RATIO
    wish = f"at least {LEAST_RATIO} of the plain compiled loop"
    yield f"{words}: tokens/s, --compile", wish, seen, good


def memory(words: str, model: dict[str, Any]) -> Row:
    """The most bytes of tensors in a step, beside the rehearsal's, which has no --compile."""
    what, seen = f"{words}: memory", model["peaks"].get(AS_IT_IS)
    wish = f"within {MEMORY_WITHIN:.0%} of the rehearsal"
    if seen is None:
        return what, wish, "not measured", None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.json")
        options = training(words, model["micro_batch"]).split()
        program("rehearse.py", *options, "--json", str(file))
        expected = json.loads(file.read_text())["stages"][0]["step_peak"]
    off = seen / expected - 1
    wish += f", {expected / 2**30:.2f} GiB"
    return what, wish, f"{seen / 2**30:.2f} GiB, {off:+.1%}", abs(off) <= MEMORY_WITHIN


def planned(
    words: str, model: dict[str, Any], device: str, machine: hardware.Machine, out: Path
) -> Iterator[Row]:
    """Seconds a step beside the planner's: as it comes, and with constants refitted on runs of
    other shapes, which is what is asked.
    """
    wish = f"within {STEP_WITHIN:.0%} of the planner after plan.py calibrate"
    if AS_IT_IS not in model["seconds"]:
        yield f"{words}: step", wish, "not run", None
        return
    config = configuration(words, model["micro_batch"], device)
    seconds = statistics.median(model["seconds"][AS_IT_IS])
    machines = {"(before calibration)": machine}
    if (out / MACHINE).exists():
        machines[wish] = hardware.load(str(out / MACHINE))
    for name, each in machines.items():
        job = Job(config.model, config.layout, config.training, each)
        expected = step_time.predict(job).seconds
        off = seconds / expected - 1
        seen = f"{1e3 * seconds:.1f} ms, {off:+.1%} of {1e3 * expected:.1f} ms"
        good = abs(off) <= STEP_WITHIN if name == wish else None
        yield f"{words}: step", name, seen, good
    if wish not in machines:
        yield f"{words}: step", wish, "not run", None


def main() -> None:
    """One part, into its section's file."""
    parts = {"runs": runs, "asked": asked}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=parts)
    parser.add_argument("--section", required=True, help="file for the findings")
    parser.add_argument("--out", type=Path, default=".", help="folder of all findings")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    o = parser.parse_args()
    parts[o.part](o.device, Section(o.section), o.out)


if __name__ == "__main__":
    main()
