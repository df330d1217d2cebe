"""Random runs of train.py on random layouts, each compared with the single-rank run.

    python benchmarks/layouts/run_cases.py --seconds 300 --seed 1  # status 1 if it finds any
    python benchmarks/layouts/run_cases.py --seed 1 --case 17           # one case of them

A case is drawn: a model, its training, data and run, and two layouts of 1 to 4 ranks. It is trained
on one rank, and on the first layout until a step at which it stops, saves, and goes on under the
second. Of this it is checked that
  * either both end with status 0, or the one that is refused is so in one sentence, which is about
    the layout if one rank is not refused;
  * every row of metrics.jsonl is there and has the single-rank run's numbers, and so has every
    tensor of the last checkpoint, weights and state, within BOUNDS; none is not finite;
  * replicas are equal, run.json is whole, and nothing else is printed as an error.
"""

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from compare import relative_difference
from ranks import fork_ranks

from benchmarks.layouts.drawn_runs import Case, Options, drawn, to_words, write_corpora

TIMES = ("seconds", "tokens_per_second", "tflops", "memory", "time", "elapsed", "mfu")
OF_LAYOUT = r"[tpcd]p\b|micro-batch|--(zero|sched|virtual|partition|recompute|seq|overlap)"

# Tolerances by precision: a relative one for losses and norms, and one for tensors, relative to
# their largest element. fp64 has the tolerances of test_golden.py. fp32 has ten times these: in six
# steps large rates multiply rounding by hundreds. 16-bit numbers are rounded to 2^-8 and 2^-11 at
# other places in each layout, so their tensors must be little more than finite. 8-bit codes flip.
# Adafactor divides a gradient by its own size: if a gradient is
# rounding alone, for example of the keys' biases, its weight may go anywhere, but the loss does
# not.
BOUNDS = {"fp64": (1e-10, 1e-8), "fp32": (1e-4, 1e-2), "fp16": (2e-2, 100), "bf16": (2e-2, 100)}
OF_RULE = {"adamw8bit": (1e-3, 0.2), "adafactor": (0.0, 10.0)}
ADAFACTOR_FP32 = 5e-3


class Runner:
    """Trains cases, each in a folder of its own; what came of them is in `counts`, and in `largest`
    the largest differences by precision.
    """

    def __init__(self, folder: Path, limit: float = 90.0):
        """limit: seconds of a start; more is a hang."""
        self.folder, self.limit = folder, limit
        self.counts, self.largest = Counter[str](), dict[str, list[float]]()

    def findings(self, case: Case) -> list[str]:
        """Return the commands that show a mistake, then the mistakes of the case; else nothing."""
        commands: list[str] = []
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            found = list(self._check(case, Path(name), commands))
        return commands + found if found else []

    def _check(self, case: Case, folder: Path, commands: list[str]) -> Iterator[str]:
        one, many = folder / "one", folder / "many"
        expected, words = self._start(case.common, 1, one, commands)
        yield from complaints(expected, words, 0)
        status, text, more = 75, "", {"stop-at-samples": case.stop} if case.stop else {}
        for count, layout in case.layouts:
            if status == 75:
                status, text = self._start(case.common | layout | more, count, many, commands)
                stops = status != 0 and "resume" not in more and case.stop > 0
                yield from complaints(status, text, 75 if stops else 0)
                more = {"resume": "auto"}
        if 2 not in (status, expected):
            self.counts["trained"] += 1
            yield from self._differences(case, one, many) if status == expected == 0 else ()
            return
        self.counts[re.sub(r"\d+|/\S+", "N", (text if status == 2 else words).strip())] += 1
        if expected != 2 and not re.search(OF_LAYOUT, text):
            yield "one rank is not refused"
        if status != 2:
            yield "one rank is refused"

    def _start(self, options: Options, count: int, out: Path, commands: list[str]):
        """Status and stderr of train.py."""
        options = options | {"check-replicas-every": 1, "out": out, "bind-cores": False}
        words = ["train.py", *to_words(options)]
        commands.append(f"{count} ranks: {shlex.join(words)}")
        try:
            outcome = fork_ranks(count, *words, timeout=self.limit)
        except subprocess.TimeoutExpired as expired:
            return 124, f"not done in {self.limit:.0f} s\n{expired.stderr}"
        return outcome.status, outcome.err

    def _differences(self, case: Case, one: Path, many: Path) -> Iterator[str]:
        """Rows and tensors that are not those of one rank."""
        expected, rows = (rows_of(out, case.common["precision"] == "fp64") for out in (one, many))
        if list(expected) != list(rows):
            yield f"rows are {list(rows)} for {list(expected)}"
            return
        skipped = [[row.get("skipped") for row in each.values()] for each in (expected, rows)]
        if skipped[0] != skipped[1] and case.common["precision"] == "fp16":
            self.counts["fp16: a gradient near the largest number overflows on one side only"] += 1
            return
        bounds = bounds_of(case)
        largest = self.largest.setdefault(case.common["precision"], [0.0, 0.0])
        for key, row in rows.items():
            for name, value in expected[key].items():
                overflows = row.get("skipped") and "grad_norm" in name
                same = overflows or row.get(name) == value != math.inf
                off = 0.0 if same else relative_difference(row.get(name, math.nan), value)
                largest[0] = max(largest[0], off)
                if not off <= bounds[0]:
                    yield f"{name} of {key}: {row.get(name)} for {value}"
        for name, value, other in tensors(one, many):
            off = relative_difference(other, value, float(np.abs(value).max()))
            largest[1] = max(largest[1], off)
            if not off <= bounds[1]:
                yield f"{name} differs by {off} of its largest element"
        facts = json.loads((many / "run.json").read_text())
        if not {"version", "config", "cluster", "kernels", "command", "versions"} <= facts.keys():
            yield f"run.json has {list(facts)}"


def bounds_of(case: Case) -> tuple[float, float]:
    """The largest difference of a row's numbers, and of a tensor from its largest element."""
    precision, rule = case.common.get("precision", "fp32"), case.common.get("optimizer")
    rows, tensors = map(max, BOUNDS[precision], OF_RULE.get(rule, (0.0, 0.0)))
    is_noisy = rule == "adafactor" and precision != "fp64"
    return max(rows, ADAFACTOR_FP32 if is_noisy else 0.0), tensors


def complaints(status: int, text: str, wanted: int) -> Iterator[str]:
    """Yield what is wrong with the end of a run that was neither as wanted nor refused."""
    # Without the watchdog every rank prints what all have found; USDT is of torch's profiler.
    found = dict.fromkeys(text.splitlines())
    lines = [line for line in found if not line.startswith(("note: ", "USDT:"))]
    if status not in (2, wanted):
        yield f"status {status} for {wanted}: {text[-3000:]}"
    elif status == 2 and (len(lines) != 1 or not lines[0].startswith("error: ")):
        yield f"not one sentence: {text[-3000:]}"
    elif status != 2 and lines:
        yield f"says {text[-3000:]}"


def rows_of(out: Path, with_texts: bool = False) -> dict[tuple, dict[str, Any]]:
    """The rows of a run and of those that it continues, by iteration and kind, without times; and
    the texts that it has sampled, each as a kind.
    """
    found: dict[tuple, dict[str, Any]] = {}
    for path in (*sorted(out.glob("metrics.jsonl.*")), out / "metrics.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            kept = {n: v for n, v in row.items() if not any(word in n for word in TIMES)}
            found[row["iteration"], *(n for n in row if n.endswith("loss"))] = kept
    for path in (*sorted(out.glob("log.txt.*")), out / "log.txt") if with_texts else ():
        lines = path.read_text().splitlines()
        found |= {(line,): {} for line in lines if line.startswith(" sample at iteration")}
    return found


def tensors(one: Path, many: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Every tensor of the last checkpoints of two runs, with its name."""
    paths = [max(out.glob("checkpoints/step_*")) / "index.h5" for out in (one, many)]
    with h5py.File(paths[0]) as expected, h5py.File(paths[1]) as found:
        for kind in expected:
            if expected[kind].keys() != found[kind].keys():
                raise AssertionError(f"{paths} hold different tensors of {kind}")
            for name in expected[kind]:
                yield f"{kind}/{name}", expected[kind][name][...], found[kind][name][...]


def main() -> int:
    """Draw and check until the time is over; the number of findings decides the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--case", type=int, help="only this one")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        runner = Runner(Path(name))
        write_corpora(runner.folder)

        def check(number: int) -> bool:
            if options.case is None and time.monotonic() > until:
                return False
            found = runner.findings(drawn(f"{options.seed}/{number}", runner.folder))
            if found:
                print(f"case {options.seed}/{number}", *found, "", sep="\n  ", flush=True)
            return bool(found)

        numbers = range(10_000) if options.case is None else [options.case]
        wrong = sum(pool.map(check, numbers))
    total, trained = sum(runner.counts.values()), runner.counts.pop("trained", 0)
    print(f"{total} cases, {trained} trained, {wrong} with findings; largest differences of rows")
    print(f"and tensors: {runner.largest}; the others:")
    for text, count in runner.counts.most_common():
        print(f"{count:6d}  {text}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
