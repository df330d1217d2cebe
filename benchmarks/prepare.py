"""prepare_data.py: its speed beside the tokenizer library alone, its memory, and kills.

python benchmarks/prepare.py --only lines --lines 1000000      # short lines, both in turn
python benchmarks/prepare.py --only memory --megabytes 500
python benchmarks/prepare.py --only document --megabytes 1000
python benchmarks/prepare.py --only kills --rounds 20
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil
from tokenizers import Tokenizer

from config.messages import Parser

SCRIPT = ROOT / "scripts" / "prepare_data.py"
ENDS = (".bin", ".idx", ".tokenizer.json", ".crc32")
AT_ONCE = 10_000  # lines that the library alone gets in a call


def start(prefix, *words) -> subprocess.Popen:
    """prepare_data.py with these words."""
    command = [sys.executable, str(SCRIPT), "--out", str(prefix), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(program: subprocess.Popen) -> float:
    """Wait for its end; its largest resident memory in MB."""
    printed = program.stdout.read() if program.stdout else ""
    _, status, used = os.wait4(program.pid, 0)
    program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode:
        raise RuntimeError(printed)
    return used.ru_maxrss / 1e3


def contents(prefix: object) -> list[bytes]:
    """What it wrote."""
    return [Path(f"{prefix}{end}").read_bytes() for end in ENDS]


def words_of_docs() -> list[str]:
    """Words to make texts of."""
    return (ROOT / "docs" / "data.md").read_text().split()


def write_lines(path: Path, count: int) -> None:
    """JSON lines of eight words, 50 characters."""
    draw, words = random.Random(1), words_of_docs()
    with open(path, "w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(draw.choices(words, k=8))}) + "\n")


def kill_rounds(folder: Path, words: list, rounds: int, seed: int = 1) -> list[int]:
    """Kill a preparation after each of some entries in its journal, then let it end; statuses.

    Every second one has three processes, every fifth gets SIGTERM. AssertionError if the result
    has other bytes than that of a run that nothing stopped, or something is left beside it.
    """
    finish(start(folder / "whole", *words))
    draw, journal, statuses = random.Random(seed), folder / "c.partial.journal", []
    for turn in range(rounds):
        seen = journal.stat().st_size if journal.exists() else 0
        program = start(folder / "c", *words, "--processes", 1 + 2 * (turn % 2))
        deadline = time.monotonic() + 120
        while program.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.stat().st_size > seen:
                break
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.2))
        program.send_signal(signal.SIGTERM if turn % 5 == 4 else signal.SIGKILL)
        program.communicate(timeout=120)
        statuses.append(program.returncode)
    finish(start(folder / "c", *words, "--processes", 2))
    assert contents(folder / "c") == contents(folder / "whole"), "other bytes after the kills"
    assert not list(folder.glob("c.partial*")), "something is left"
    return statuses


def watch(program: subprocess.Popen) -> float:
    """Wait for its end; the largest memory in MB of it and its processes together (PSS)."""
    most, tree = 0.0, psutil.Process(program.pid)
    while program.poll() is None:
        with contextlib.suppress(psutil.Error):
            every = [tree, *tree.children(recursive=True)]
            most = max(most, sum(one.memory_full_info().pss for one in every) / 1e6)
        time.sleep(0.25)
    if program.returncode:
        raise RuntimeError(program.stdout.read() if program.stdout else "")
    return most


def library_alone(library: Tokenizer, texts: list[str], take_ids: bool) -> None:
    """`encode_batch_fast` over texts in memory, and perhaps the ids of each as a list."""
    for first in range(0, len(texts), AT_ONCE):
        encodings = library.encode_batch_fast(texts[first : first + AT_ONCE])
        if take_ids:
            _ = [encoding.ids for encoding in encodings]


def measure_lines(folder: Path, tokenizer: Path, options: argparse.Namespace) -> None:
    """Short lines: seconds of the library alone, with texts in memory, and of the program."""
    path, count = folder / "lines.jsonl", options.lines
    write_lines(path, count)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    library = Tokenizer.from_file(str(tokenizer))
    words = ["--tokenizer", tokenizer, path, "--processes"]
    sides: dict[str, Callable[[], object]] = {
        "library": lambda: library_alone(library, texts, False),
        "library, ids as lists": lambda: library_alone(library, texts, True),
    }
    for processes in options.processes:
        name = f"program, {processes} processes"
        sides[name] = lambda n=processes: finish(start(folder / "c", *words, n))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.repeats):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - began)
    print(f"{count} lines, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    for name, taken in seconds.items():
        ratios = [statistics.median(seconds[n]) / statistics.median(taken) for n in [*sides][:2]]
        print(f"  {name}: {statistics.median(taken):.1f} s, ratio {ratios[0]:.2f} {ratios[1]:.2f}")


def measure_memory(folder: Path, tokenizer: Path, options: argparse.Namespace) -> None:
    """Many lines of some hundred characters: memory of all processes together."""
    draw, words, size = random.Random(1), words_of_docs(), 0
    with open(folder / "many.jsonl", "w") as file:
        while size < options.megabytes * 10**6:
            text = " ".join(draw.choices(words, k=draw.randrange(10, 300)))
            size += file.write(json.dumps({"text": text}) + "\n")
    for processes in options.processes:
        began = time.perf_counter()
        words_of_run = ["--tokenizer", tokenizer, folder / "many.jsonl", "--processes", processes]
        most = watch(start(folder / "c", *words_of_run))
        took = time.perf_counter() - began
        print(
            f"{size / 1e6:.0f} MB, {processes} processes: at most {most:.0f} MB, {took:.0f} s, "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def measure_document(folder: Path, tokenizer: Path, megabytes: int) -> None:
    """One document: seconds and memory."""
    draw, words, size = random.Random(1), words_of_docs(), 0
    with open(folder / "long.txt", "w") as file:
        while size < megabytes * 10**6:
            size += file.write(" ".join(draw.choices(words, k=100_000)) + "\n")
    began = time.perf_counter()
    memory = finish(start(folder / "c", "--tokenizer", tokenizer, folder / "long.txt"))
    took = time.perf_counter() - began
    print(f"a document of {megabytes} MB: {took:.0f} s, {memory:.0f} MB, {os.getloadavg()[0]:.1f}")


def main() -> None:
    """Measure what --only names."""
    parser = Parser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", default=["lines", "memory", "document", "kills"])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cores", type=int, default=2, help="that both sides may use")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finish(start(folder / "t", "--vocab-size", 2000, ROOT / "docs"))
        tokenizer = folder / "t.tokenizer.json"
        if "lines" in options.only:
            measure_lines(folder, tokenizer, options)
        if "memory" in options.only:
            measure_memory(folder, tokenizer, options)
        if "document" in options.only:
            measure_document(folder, tokenizer, options.megabytes)
        if "kills" in options.only:
            write_lines(folder / "lines.jsonl", 300_000)
            words = ["--tokenizer", tokenizer, folder / "lines.jsonl"]
            print("statuses of the killed:", kill_rounds(folder, words, options.rounds))


if __name__ == "__main__":
    main()
