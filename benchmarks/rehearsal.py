"""Rehearses forty right configurations and plants 100 mismatches: alarms, memory against the plan.

    python benchmarks/rehearsal.py > benchmarks/results/rehearsal.md
    python benchmarks/rehearsal.py --only "ZeRO 3" "176b"

A process of its own compiles and loads the device guard; nothing here needs a GPU. The memory of a
configuration is that of its stages' steady step, tensors as the allocator rounds them, against
planner/memory.py.
"""

import argparse
import collections
import re
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
    print("# The rehearsal: alarms, planted mismatches, memory against the plan\n")
    print(f"{len(runs)} configurations, {time.monotonic() - began:.0f} s, of cores ", end="")
    print(f"{sum(run.seconds for run in runs.values()):.0f} s (benchmarks/rehearsal.py)\n")
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


def plant(worlds: dict) -> None:
    """Plant MISMATCHES in turn into the worlds and print how many are found and named."""
    from planted_mismatches import KINDS, Cannot
    from planted_mismatches import plant as planted

    from emulator.matching import mismatches

    found, tried, seed = collections.Counter(), collections.Counter(), 0
    while worlds and tried.total() < MISMATCHES and seed < 50 * MISMATCHES:
        kind, name = KINDS[seed % len(KINDS)], list(worlds)[seed // len(KINDS) % len(worlds)]
        seed += 1
        try:
            world, rank, role, _ = planted(worlds[name], kind, seed)
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
