"""prepare_data.py: its speed beside the tokenizer library alone, its memory, and kills.

python benchmarks/prepare.py --lines 1000000 --repeats 3      # short lines, both in turn
python benchmarks/prepare.py --only document --megabytes 1000
python benchmarks/prepare.py --only kills --rounds 20
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

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


def measure_lines(folder: Path, tokenizer: Path, count: int, repeats: int) -> None:
    """Short lines: seconds of the library alone, with texts in memory, and of the program."""
    path = folder / "lines.jsonl"
    write_lines(path, count)
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    library, seconds, memory = Tokenizer.from_file(str(tokenizer)), ([], []), []
    for _ in range(repeats):
        began = time.perf_counter()
        for first in range(0, count, AT_ONCE):
            batch = texts[first : first + AT_ONCE]
            _ = [encoding.ids for encoding in library.encode_batch_fast(batch)]
        seconds[0].append(time.perf_counter() - began)
        began = time.perf_counter()
        memory.append(finish(start(folder / "c", "--tokenizer", tokenizer, path)))
        seconds[1].append(time.perf_counter() - began)
    alone, ours = map(statistics.median, seconds)
    print(f"{count} lines: library {alone:.1f} s, program {ours:.1f} s, ratio {alone / ours:.2f}")
    print(f"at most {max(memory):.0f} MB, load {os.getloadavg()[0]:.1f}", flush=True)


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
    parser.add_argument("--only", nargs="+", default=["lines", "document", "kills"])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finish(start(folder / "t", "--vocab-size", 2000, ROOT / "docs"))
        tokenizer = folder / "t.tokenizer.json"
        if "lines" in options.only:
            measure_lines(folder, tokenizer, options.lines, options.repeats)
        if "document" in options.only:
            measure_document(folder, tokenizer, options.megabytes)
        if "kills" in options.only:
            write_lines(folder / "lines.jsonl", 300_000)
            words = ["--tokenizer", tokenizer, folder / "lines.jsonl"]
            print("statuses of the killed:", kill_rounds(folder, words, options.rounds))


if __name__ == "__main__":
    main()
