"""Replaces a launcher and train.py in tests: writes a run's files at once, and can fail.

    python tests/fake_trainer.py RANKS train.py --tp 2 ...

Seconds follow an invented formula of the layout. The environment variable FAKE_FAILURES plants
failures: a JSON object from a kind of failure to a condition on the layout, as {"hang": {"pp": 4}}.
"""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

from architecture import model_stats
from config import command_line


def seconds(config, ranks: int) -> float:
    """Slower with tp, a little slower with pp, faster with larger micro-batches."""
    at = config.layout
    law = (
        1.0
        + 0.3 * math.log2(at.tp)
        + 0.1 * math.log2(at.pp)
        - 0.05 * math.log2(at.micro_batch_size)
    )
    law *= 1.3 if at.recompute == "full" else 1.0
    return law * config.model.hidden * config.training.global_batch_size / (1000 * ranks)


def planted(config) -> str:
    """The failure that is planted for this layout, if any."""
    for failure, condition in json.loads(os.environ.get("FAKE_FAILURES", "{}")).items():
        if all(getattr(config.layout, name) == value for name, value in condition.items()):
            return failure
    return ""


def main() -> None:
    ranks = int(sys.argv[1])
    arguments = sys.argv[next(i for i, a in enumerate(sys.argv) if a.endswith("train.py")) + 1 :]
    config = command_line.parse(arguments)
    out, failure = Path(config.run.out), planted(config)
    if failure == "oom":
        print(f"MemoryError: rank 0 cannot have {len(bytearray(2**46))} bytes")
    if failure == "crash":
        raise RuntimeError("planted")
    if failure == "hang":  # with a process in a session of its own, as mpirun's ranks have
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        time.sleep(600)
    cluster = {"launcher": "fake", "ranks": ranks, "nodes": ["here"], "device": "2 CPU cores"}
    cluster |= {"backend": "gloo", "threads_per_rank": 1}
    facts = {"flops_formula": "megatron-2025", "cluster": cluster}
    facts |= {"versions": {"python": "3"}, "commit": "abc"}
    (out / "run.json").write_text(json.dumps(facts))
    model, batch = config.model, config.training.global_batch_size
    flops = model_stats.model_flops(model, batch)
    executed = model_stats.hardware_flops(model, batch, config.layout.recompute)
    with open(out / "metrics.jsonl", "w") as file:
        for step in range(1, config.training.steps + 1):
            took = seconds(config, ranks) * (1 + 0.001 * step)
            row = {
                "iteration": step,
                "seconds": took,
                "loss": math.nan if failure == "diverged" and step == 3 else 5.0 / step,
                "tokens_per_second": batch * model.seq_length / took,
                "tflops_model": flops / took / ranks / 1e12,
                "tflops_hardware": executed / took / ranks / 1e12,
                "peak_memory_bytes": 10**9,
                "peak_memory_bytes_per_stage": [10**9] * config.layout.pp,
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
