"""What the GPU day is asked for beside what was seen; and the emulator beside the planner.

    python benchmarks/gpu_asked.py emulator --section FILE
    python benchmarks/gpu_asked.py asked --section FILE --out DIR    DIR: of scripts/gpu_day.sh

`asked` takes the findings of the other parts from DIR/gpu-day.json, DIR/calibration.toml and
DIR/machine.toml, and what rehearse.py says of the memory: it needs no GPU, and can be run again
anywhere. Parts of scripts/gpu_day.sh.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the project's own modules

import gpu_runs
from gpu import MODELS, Section, machine_of, this_machine
from gpu_models import AS_IT_IS, COMPILED, FORMULAS, configuration, training

from config import model_stats
from planner import hardware, step_time

LEAST_MFU, LEAST_RATIO = 0.5, 1.15  # of the device's peak; of the plain loop's tokens/s
MEMORY_WITHIN, STEP_WITHIN = 0.02, 0.08
# One rank of each kind of a world of eight.
EMULATED = {"cuda": "--model 1b3 --precision bf16 --global-batch-size 32"}
EMULATED["cpu"] = f"{MODELS['cpu'][0][0]} --precision bf16 --global-batch-size 32"
Row = tuple[str, str, str, bool | None]  # what, asked, seen, and whether that is reached


def rehearse(*words: str) -> str:
    """What rehearse.py prints; RuntimeError with all that it printed if it fails."""
    command = [sys.executable, "rehearse.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def emulator(device: str, section: Section) -> None:
    """rehearse.py --on the device here, with the links of its machine."""
    machine = this_machine(device)
    if machine is None:
        section.add("hardware/ has no machine for the device that is here")
        return
    words = f"{EMULATED[device]} --tp 2 --pp 2 --gpus 8 --on {device} --gpu {machine.name}"
    section.add(f"`rehearse.py {words}`:", "", "```", rehearse(*words.split()), "```")


# ---- Asked and seen ------------------------------------------------------------------------------


def asked(device: str, section: Section, out: Path) -> None:
    """The table: each part that has not been run is a row without a figure."""
    parts = json.loads((out / "gpu-day.json").read_text())["parts"]
    found = {part["name"]: part["data"] for part in parts}
    rows = [*tests(found), *speed(found, device), *memory(found, device)]
    rows += planned(found, device, out)
    answers = {None: "", True: "reached", False: "NOT REACHED"}
    section.add(
        "| what | asked | seen | |",
        "| --- | --- | --- | --- |",
        *(f"| {what} | {wish} | {seen} | {answers[good]} |" for what, wish, seen, good in rows),
        "",
        rows=rows,
    )


def tests(found: dict[str, Any]) -> Iterator[Row]:
    """Rows of the parts that are tests."""
    for part in ("cuda", "nccl", "nccl4"):
        data, what = found.get(part), f"{part} tests"
        if not data:
            yield what, "all pass", "not run", None
            continue
        passed, failed = data["passed"], len(data["failed"])
        seen = f"{passed} passed, {failed} failed, {data['skipped']} skipped"
        seen += "" if data["finished"] else ", ended before the last test"
        yield what, "all pass", seen, bool(passed) and not failed and data["finished"]


def model(found: dict[str, Any], device: str) -> tuple[str, dict[str, Any] | None]:
    """The first of MODELS, and what was measured of it."""
    words = MODELS[device][0][0]
    return words, found.get("models", {}).get(words)


def speed(found: dict[str, Any], device: str) -> Iterator[Row]:
    """MFU with --compile, of the device's peak and of the measured GEMM; and beside the loop."""
    words, data = model(found, device)
    if data is None or COMPILED not in data["seconds"]:
        yield f"{words}: MFU and tokens/s", f"at least {LEAST_MFU:.0%}", "not run", None
        return
    config = configuration(words, data["micro_batch"], device)
    flops = model_stats.model_flops(config.model, config.training.global_batch_size, FORMULAS[0])
    rate = flops / statistics.median(data["seconds"][COMPILED])
    machine, gemm = machine_for(found), found.get("ceilings", {}).get("gemm")
    what = f"{words}: MFU, causal half, --compile"
    if machine:
        share = rate / machine.peak
        wish = f"at least {LEAST_MFU:.0%} of {machine.peak / 1e12:.4g} TFLOP/s"
        yield what, wish, f"{share:.1%}", share >= LEAST_MFU
    if gemm:
        yield what, f"(of the measured GEMM, {gemm / 1e12:.4g} TFLOP/s)", f"{rate / gemm:.1%}", None
    ratio, seen, good = data.get("ratio"), "not run", None
    if ratio is not None:
        seen, good = f"{ratio:.3f}", ratio >= LEAST_RATIO
    wish = f"at least {LEAST_RATIO} of the plain compiled loop"
    yield f"{words}: tokens/s, --compile", wish, seen, good


def memory(found: dict[str, Any], device: str) -> Iterator[Row]:
    """The most bytes of tensors in a step, beside the rehearsal's, which has no --compile."""
    words, data = model(found, device)
    what, wish = f"{words}: memory", f"within {MEMORY_WITHIN:.0%} of the rehearsal"
    if data is None or AS_IT_IS not in data["peaks"]:
        yield what, wish, "not run", None
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "answer.json")
        rehearse(*training(words, data["micro_batch"]).split(), "--json", str(file))
        expected = json.loads(file.read_text())["stages"][0]["step_peak"]
    seen = data["peaks"][AS_IT_IS]
    wish += f", {expected / 2**30:.2f} GiB"
    if seen is None:
        yield what, wish, "not measured", None
        return
    off = seen / expected - 1
    yield what, wish, f"{seen / 2**30:.2f} GiB, {off:+.1%}", abs(off) <= MEMORY_WITHIN


def planned(found: dict[str, Any], device: str, out: Path) -> Iterator[Row]:
    """Seconds a step, beside the planner's: as it comes, with measured rates, and with constants
    refitted on runs of other shapes, which is what is asked.
    """
    words, data = model(found, device)
    machine, what = machine_for(found), f"{words}: step"
    wish = f"within {STEP_WITHIN:.0%} of the planner after plan.py calibrate"
    if machine is None or data is None or AS_IT_IS not in data["seconds"]:
        yield what, wish, "not run", None
        return
    config = configuration(words, data["micro_batch"], device)
    seconds = statistics.median(data["seconds"][AS_IT_IS])
    rates, fitted = out / "calibration.toml", out / gpu_runs.MACHINE
    machines = {"(before calibration)": machine}
    if rates.exists():
        machines["(with measured rates)"] = hardware.load(machine.name, str(rates))
    if fitted.exists():
        machines[wish] = hardware.load(str(fitted))
    for name, each in machines.items():
        expected = step_time.predict(config.model, config.layout, config.training, each).seconds
        off = seconds / expected - 1
        seen = f"{1e3 * seconds:.1f} ms, {off:+.1%} of {1e3 * expected:.1f} ms"
        yield what, name, seen, abs(off) <= STEP_WITHIN if name == wish else None
    if wish not in machines:
        yield what, wish, "not run", None


def machine_for(found: dict[str, Any]) -> hardware.Machine | None:
    """The planner's machine for the device of the part `facts`, or of the calibration."""
    if name := found.get("calibration", {}).get("machine"):
        return hardware.load(name)
    return machine_of(found.get("facts", {}).get("device", ""))


def main() -> None:
    """One part, into its section's file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("emulator", "asked"))
    parser.add_argument("--section", required=True, help="file for the findings")
    parser.add_argument("--out", help="folder with the other parts' findings")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    o = parser.parse_args()
    section = Section(o.section)
    if o.part == "emulator":
        emulator(o.device, section)
    else:
        asked(o.device, section, Path(o.out or "."))


if __name__ == "__main__":
    main()
