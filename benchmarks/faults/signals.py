"""Sends runs signals at random moments, and measures when they are answered and when the runs end.

    python benchmarks/faults/signals.py --count 40 --seed 1  prints a row for each, and the slowest

Each run is sent SIGUSR1, SIGTERM or SIGINT at a random moment from its first import on. Its steps
are short, or take minutes: in one product, or in passes of many micro-batches. If it
has not ended some seconds after the answer, it is sent the signal again. Right is: a line that says
what will happen, and an end with status 75 and a checkpoint of the last step, or with a sentence
that says why nothing is saved.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "--layers 2 --hidden 32 --heads 4 --seq-length 32 --vocab-size 64 --device cpu"
SHAPE += " --steps 100000 --lr-schedule constant --hang-timeout 600"
NUMBERS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
# The steps are short ones, minutes of passes, or one long product.
KINDS = {
    "short steps": ["train.py", "--global-batch-size", "8"],
    "long steps": ["train.py", "--global-batch-size", "65536"],
    "long calls": ["benchmarks/faults/signals.py", "--work", "--global-batch-size", "8"],
}
ROWS = 10_000  # of a product that takes half a minute on a core
ANSWERS = (
    "a second SIG",  # what will happen
    "before all ranks have met: ending at once",
    "stopped by SIG",  # the end itself, if it comes first
)
WHY_NOT = ("ending at once, without a save", "before all ranks have met", "after step 0 of")


@dataclass
class Outcome:
    """One run: what was sent and when, when it was answered and ended, and what it said."""

    kind: str
    ranks: int
    number: signal.Signals
    sent_after: float  # seconds from when the run could take signals
    answered: float | None = None  # seconds from the signal to the line that answers it
    ended: float | None = None  # seconds from the last signal to the end
    signals: int = 1
    status: int | None = None
    lines: list[tuple[float, str]] = field(default_factory=list)  # with their times
    saved: bool = False  # whether the newest checkpoint is that of the last step

    @property
    def text(self) -> str:
        """Everything that was printed."""
        return "\n".join(line for _, line in self.lines)

    def wrong(self) -> str:
        """Return the fault of this run; empty if there is none."""
        if self.ended is None:
            return "it did not end"
        if "Traceback" in self.text:
            return "a traceback"
        by_launcher = self.ranks > 1 and self.status not in (0, 75)  # MPI_Init, or mpirun itself
        if self.answered is None and not by_launcher:
            return "no answer"
        if self.status == 75 and self.saved:
            return ""
        said = any(words in self.text for words in WHY_NOT)
        return "" if said or by_launcher else "nothing saved, and no sentence says why"


def takes_signals(pid: int) -> bool:
    """Whether a process holds signals back or handles them, or has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    bit = 1 << (signal.SIGTERM - 1)
    masks = re.findall(r"Sig(?:Blk|Cgt):\s*(\w+)", text)
    return not masks or any(int(mask, 16) & bit for mask in masks)


def send(kind: str, ranks: int, number: signal.Signals, delay: float, limit: float) -> Outcome:
    """Run once; send the signal `delay` seconds after the run can take it.

    limit: the most seconds for the answer, and again for the end.
    """
    result = Outcome(kind, ranks, number, delay)
    with tempfile.TemporaryDirectory() as out:
        beside = Path(sys.executable).with_name("mpirun")  # of the MPI in .venv, if one is there
        mpirun = str(beside) if beside.exists() else "mpirun"
        launcher = [mpirun, "-n", str(ranks)] if ranks > 1 else []
        words = [*launcher, sys.executable, *KINDS[kind], *SHAPE.split(), "--out", out]
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

        def read() -> None:
            for line in process.stdout or ():
                result.lines.append((time.monotonic(), line.rstrip()))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        while not takes_signals(process.pid):
            time.sleep(0.002)
        time.sleep(delay)
        first = last = time.monotonic()
        process.send_signal(number)
        _wait(lambda: process.poll() is not None or _answer(result, first) is not None, limit)
        if kind != "short steps":  # the step would take minutes
            _wait(lambda: process.poll() is not None, 2.0)
        else:
            _wait(lambda: process.poll() is not None, limit)
        if process.poll() is None:
            last = time.monotonic()
            result.signals = 2
            process.send_signal(number)
            _wait(lambda: process.poll() is not None, limit)
        if process.poll() is None:
            process.kill()
        else:
            result.ended = time.monotonic() - last
        result.status = process.wait()
        reader.join(10.0)
        answer = _answer(result, first)
        result.answered = None if answer is None else answer - first
        result.saved = _is_saved(Path(out))
    return result


def _wait(what, limit: float) -> None:
    """Wait until `what` is true, at most so many seconds."""
    until = time.monotonic() + limit
    while not what() and time.monotonic() < until:
        time.sleep(0.005)


def _answer(result: Outcome, since: float) -> float | None:
    """Return the time of the first line that answers a signal."""
    for when, line in list(result.lines):
        if when >= since and any(words in line for words in ANSWERS):
            return when
    return None


def _is_saved(out: Path) -> bool:
    """Return whether the newest checkpoint is complete and of the last step in metrics.jsonl."""
    metrics = out / "metrics.jsonl"
    rows = metrics.read_text().splitlines() if metrics.exists() else []
    found = re.findall(r'"iteration": (\d+)', rows[-1]) if rows else []
    return bool(found) and (out / f"checkpoints/step_{int(found[0]):08d}/manifest.json").exists()


def draw(seed: int, ranks: tuple[int, ...] = (1, 1, 2)) -> tuple[str, int, signal.Signals, float]:
    """Return a run and a signal at random: the arguments of `send` but for the limit."""
    chance = random.Random(seed)
    return (
        chance.choice([*KINDS]),
        chance.choice(ranks),
        chance.choice(NUMBERS),
        15 * chance.random(),
    )


def work(words: list[str]) -> None:
    """Train as train.py does, but each step also has one product that takes half a minute."""
    sys.path.insert(0, str(ROOT))
    from distributed.stop_conditions import Signals

    signals = Signals()
    import torch

    import trainer
    from config import validation
    from config.command_line import parse
    from distributed.launch import discover

    launch, step = discover(), trainer.step
    signals.follow(launch)
    matrix = torch.ones(ROWS, ROWS)

    def slow(*arguments):
        torch.mm(matrix, matrix)  # Python handles no signal meanwhile, in this thread
        return step(*arguments)

    trainer.step = slow
    trainer.main(validation.check(parse(words), launch.size), launch, signals)


def main() -> int:
    """Send the signals; return 1 if a run was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    bad, answers, ends = 0, [], []
    for seed in range(options.seed, options.seed + options.count):
        result = send(*draw(seed), limit=120.0)
        wrong = result.wrong()
        bad += bool(wrong)
        answers += [result.answered] if result.answered is not None else []
        ends += [result.ended] if result.ended is not None else []
        print(
            f"{seed} {result.kind}, {result.ranks} ranks, {result.number.name} after "
            f"{result.sent_after:.1f} s: answered in "
            f"{'-' if result.answered is None else f'{result.answered:.2f}'} s, "
            f"{result.signals} signals, status {result.status}, ended in {result.ended or 0:.2f} s"
            f"{', saved' if result.saved else ''} {wrong}",
            flush=True,
        )
        if wrong:
            print(result.text[-3000:], flush=True)
    if answers and ends:
        print(f"slowest answer {max(answers):.2f} s, slowest end {max(ends):.2f} s, wrong {bad}")
    return min(bad, 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        sys.exit(work(sys.argv[2:]))
    sys.exit(main())
