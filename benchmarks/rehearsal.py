"""Rehearses forty right configurations and plants 100 mismatches: alarms, memory against the plan.

    python benchmarks/rehearsal.py > benchmarks/results/rehearsal.md
    python benchmarks/rehearsal.py --only "ZeRO 3" "176b"

A process of its own compiles and loads the device guard; nothing here needs a GPU. The memory of a
configuration is that of its stages' steady step, tensors as the allocator rounds them, against
planner/memory.py.
"""

import argparse
import collections
import itertools
import os
import platform
import re
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from config.command_line import parse
from config.validation import check_any_length
from emulator import device_guard
from planner import hardware

MISMATCHES = 100
WORLDS = ("tp 2", "pp 2", "tp 2 pp 2 dp 2", "ZeRO 3", "1b3, pp 2", "104b", "384 ranks", "176b")


def main(names: list[str]) -> None:
    """Print both tables."""
    device_guard.load()
    from rehearsal_cases import CASES

    from emulator import answers, rehearsal
    from planner.hardware import Machine

    machine: Machine = hardware.load("h100")
    cases = {}
    for name in names or CASES:
        world, words = CASES[name]
        config = check_any_length(parse(words.split()), world)
        layout = config.layout.automatic(config.model.seq_length, on_gpu=True)
        config = replace(config, layout=layout)
        nodes = -(-world // machine.node)
        cases[name] = rehearsal.Case(config, world, nodes, machine.device)
    began, processor = time.monotonic(), time.process_time()
    runs = dict(zip(cases, rehearsal.rehearse(list(cases.values()))))
    print(head(len(runs), time.monotonic() - began))
    print("| configuration | ranks | run | alarms | memory against plan.py, per stage | core s |")
    print("|---|--:|--:|---|---|--:|")
    within = []
    for name, run in runs.items():
        answer = answers.of(run, machine).data
        differences = [stage["difference"] for stage in answer["stages"]]
        within.append(max(map(abs, differences)) <= answers.SHARE_OF_DIFFERENCE)
        shown = ", ".join(f"{each:+.1%}" for each in differences)
        alarms = "; ".join(answer["mismatches"]) or "none"
        ranks = f"{answer['ranks']} | {len(answer['ranks_run'])}"
        print(f"| {name} | {ranks} | {alarms} | {shown} | {run.seconds:.0f} |")
    print(f"\nWithin 4 % in every stage: {sum(within)} of {len(within)}.\n")
    plant({name: run.world for name, run in runs.items() if name in WORLDS})
    print(f"\nProcessor time of the judging process: {time.process_time() - processor:.0f} s.")
    if "176b" in runs:
        on_two_cores("176b")


def processor_seconds() -> float:
    """Of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def on_two_cores(name: str) -> None:
    """Print how long the command takes for a configuration on two cores."""
    from rehearsal_cases import CASES

    world, words = CASES[name]
    command = f"rehearse.py --gpus {world} --gpu h100 {words}"
    before, began, used = os.getloadavg()[0], time.monotonic(), processor_seconds()
    start = ["taskset", "-c", "0,1", sys.executable, *command.split()]
    subprocess.run(start, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    took, used = time.monotonic() - began, processor_seconds() - used
    print(f"\n## {world} ranks of {name} on two cores\n\n    taskset -c 0,1 python {command}\n")
    print(
        f"{took:.1f} s from start to end, {used:.1f} processor seconds, of which two free ", end=""
    )
    print(f"cores take {used / 2:.1f} s; load of the machine {before:.1f} before and ", end="")
    print(f"{os.getloadavg()[0]:.1f} after it. The goal is 60 s.")


def head(count: int, seconds: float) -> str:
    """What was run, where, and how long it took."""
    import torch
    from gpu_day import commit

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"""# The rehearsal: alarms, planted mismatches, memory against the plan

    python benchmarks/rehearsal.py > benchmarks/results/rehearsal.md

Trine at {commit()}, {time.strftime("%Y-%m-%d")}, {os.cpu_count()} cores ({platform.machine()}),
Python {platform.python_version()}, torch {torch.__version__}; no GPU takes part. Load averages of
the machine, with all that others ran on it: {load}.

{count} configurations in {seconds:.0f} s. Core s: seconds of a configuration's ranks, one after the
other, on cores that others may share.
"""


def plant(worlds: dict) -> None:
    """Plant MISMATCHES in turn into the worlds and print how many are found and named."""
    from planted_mismatches import KINDS, Cannot
    from planted_mismatches import plant as planted

    from emulator.matching import mismatches

    found, tried, each = collections.Counter(), collections.Counter(), MISMATCHES // len(KINDS)
    for kind, seed in itertools.product(KINDS if worlds else (), range(100 * each)):
        if tried[kind] == each:
            continue
        try:
            world, rank, role, _ = planted(list(worlds.values())[seed % len(worlds)], kind, seed)
        except Cannot:
            continue
        tried[kind] += 1
        sentences = mismatches(world)
        named = (re.search(rf"\brank {rank}\b", s) and f"of {role}" in s for s in sentences)
        found[kind] += any(named)
    print("| planted on one rank | planted | found and named |\n|---|--:|--:|")
    for kind in tried:
        print(f"| {kind} | {tried[kind]} | {found[kind]} |")
    print(f"| all | {tried.total()} | {found.total()} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="CONFIGURATION")
    main(parser.parse_args().only)
