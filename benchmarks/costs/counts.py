"""What one rank does in a step on a fake GPU: kernels, host stops, collectives, bytes, memory.

    python benchmarks/costs/counts.py                 compares the eight runs with counts.toml
    python benchmarks/costs/counts.py --write         writes counts.toml
    python benchmarks/costs/counts.py --only dense    the runs with this word in their names
    python benchmarks/costs/counts.py --run "--gpus 32 --nodes 4 --model llama-2-7b --zero 1"
                                                      prints the counts of any run of rehearse.py

Nothing here takes time: these are numbers of a rehearsal, equal on each machine. A number may grow
by GROWTH; tests/test_step_counts.py fails if one grows by more, so the change that makes it grow
writes counts.toml too, and says why. --file FILE takes the place of counts.toml.
"""

import argparse
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import rehearse
from costs import auto_schedule, hardware
from tools.emulator import device_guard

FILE = ROOT / "benchmarks/data/counts.toml"
GROWTH = 0.03  # by which a number may grow
COMMON = "--gpu h100-80 --micro-batch-size 1 "
RUNS = {
    "dense, zero 1": "--gpus 8 --model 1b3 --layers 2 --global-batch-size 32",
    "dense, muon": "--gpus 8 --model 1b3 --layers 6 --global-batch-size 8 --optimizer muon",
    "tp 4": "--gpus 8 --model llama-2-7b --layers 2 --tp 4 --global-batch-size 8",
    "pp 4, interleaved": "--gpus 4 --model llama-2-7b --layers 8 --pp 4 --schedule interleaved "
    "--global-batch-size 8",
    "zero 3": "--gpus 8 --model llama-2-7b --layers 2 --zero 3 --global-batch-size 16",
    "experts of a node": "--gpus 8 --model qwen3-30b-a3b --layers 2 --ep 8 --global-batch-size 8",
    "experts of four nodes": "--gpus 32 --nodes 4 --model qwen3-30b-a3b --layers 2 --ep 32 "
    "--global-batch-size 32",
    "latent attention, cp 8": "--gpus 8 --model deepseek-v3 --layers 4 --seq-length 32768 --cp 8 "
    "--ep 8 --global-batch-size 1",
}


def counts_of(words: str) -> dict[str, float]:
    """Return the numbers of rank 0's second step in a run; words: rehearse.py's command line.

    kernels by phase; host stops; of each kind of collective of a group its number and, if it has
    any, its megabytes (an all-gather's whole output, else what the rank puts in; a message's size);
    GB of memory at the peak of each phase.
    """
    from tools.emulator import rehearsal
    from tools.emulator.recording import COPY, LOAD, READ

    options, rest = rehearse.option_parser().parse_known_args((COMMON + words).split())
    machine = hardware.load(options.gpu)
    nodes = rehearse.nodes_of(options, machine.node)
    request = rehearse.parse_request(rest, __doc__, lambda _: {"precision": machine.precision})
    config = rehearse.check_any_length(request.config, options.gpus, "GPUs")
    layout = config.layout.automatic(config.model.seq_length, on_gpu=True)
    config, _ = auto_schedule.decide(replace(config, layout=layout), "cuda")
    short = rehearsal.shortened(config)
    record = rehearsal.run_rank(short, 0, options.gpus, nodes, machine.device, options.routing)
    found: dict[str, float] = {f"kernels {phase}": n for phase, n in record.kernels.items()}
    events = [event for event in record.events if event.place.startswith("step 2")]
    found["host stops"] = sum(event.kind in (READ, COPY) for event in events)
    calls, sizes = Counter[str](), Counter[str]()
    for event in events:
        if event.kind in ("wait", READ, COPY, LOAD):
            continue
        name = f"{event.role} {event.kind}"
        calls[name] += 1
        sizes[name] += event.bytes * (sum(event.rows[1]) if event.rows else 1)
    for name in sorted(calls):
        found[name] = calls[name]
        found[f"{name} MB"] = round(sizes[name] / 1e6, 3)
    for phase in rehearsal.STEADY:
        found[f"peak {phase} GB"] = round(record.peaks[phase].bytes / 1e9, 3)
    return found


def grown(before: dict[str, float], now: dict[str, float]) -> list[str]:
    """Return a sentence for each number that has grown by more than GROWTH, or is new or gone."""
    sentences = [f"{name} is gone" for name in before.keys() - now.keys()]
    for name, value in now.items():
        allowed = before.get(name, 0.0) * (1 + GROWTH)
        if name.endswith(("MB", "GB")):
            allowed += 0.001  # the last digit
        if value > allowed:
            sentences.append(f"{name} is {value:g}, and was {before.get(name, 0):g}")
    return sentences


def main(arguments: list[str]) -> int:
    """Return 1 if a number has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--run", action="append", default=[])
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args(arguments)
    device_guard.load()  # before torch is imported
    import torch

    torch.set_num_threads(1)
    for words in options.run:
        print(_table({words: counts_of(words)}))
    if options.run:
        return 0
    before = tomllib.loads(options.file.read_text()) if options.file.exists() else {}
    now: dict[str, Any] = {}
    failed = False
    for name, words in RUNS.items():
        if options.only not in name:
            continue
        now[name] = counts_of(words)
        for sentence in grown(before.get(name, {}), now[name]):
            failed = True
            print(f"{name}: {sentence}")
    if options.write:
        options.file.write_text(HEAD + _table(before | now))
        return 0
    return int(failed)


HEAD = """# Counts of a rank on a fake GPU: benchmarks/costs/counts.py writes and explains them.
# A change that makes a number grow by more than 3 % writes it anew, and its commit says why.
"""


def _table(runs: dict[str, dict[str, float]]) -> str:
    """Return the counts of runs as TOML."""
    lines = []
    for name, counts in runs.items():
        lines += ["", f'["{name}"]', *(f'"{key}" = {value}' for key, value in counts.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
