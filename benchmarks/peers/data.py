"""Data, side by side with megatron-core in one run: orders, random samples, blends.

    python benchmarks/peers/data.py [--documents 1000000] [--repeats 5]        about 10 minutes

Each figure is the median of --repeats runs, ours and Megatron's in turn; `load` is the machine's
load average when it was taken. The corpus has lengths of an exponential distribution, mean 600.
"""

import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from base.cli import Parser
from benchmarks.peers.megatron_data import Megatron
from config.run_options import Data
from corpora.blends import blend_order, normalise
from corpora.mapped_files import ArrayCache
from corpora.objectives import Objective
from corpora.sample_order import GPTSamples
from corpora.token_files import HEADER, MAGIC, VERSION, IndexedDataset

LENGTH, SEED, VOCAB = 2048, 1234, 8192
READ = 4000  # samples of a turn


def write_corpus(prefix: str, documents: int) -> None:
    """Random tokens."""
    random = np.random.default_rng(0)
    lengths = np.maximum(1, random.exponential(600, documents)).astype("<i4")
    sizes = lengths.astype("<i8") * 2
    with open(prefix + ".bin", "wb") as file:
        for count in np.add.reduceat(lengths, range(0, documents, 10_000), dtype=np.int64):
            file.write(random.integers(VOCAB, size=count, dtype=np.uint16).tobytes())
    with open(prefix + ".idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        for column in (lengths, np.cumsum(sizes) - sizes, np.arange(documents + 1, dtype="<i8")):
            file.write(column.tobytes())


def ours(prefix: str, count: int | None, cache: str | None) -> GPTSamples:
    """Our samples of the whole corpus."""
    store = ArrayCache(cache)
    dataset = IndexedDataset(prefix, store)
    return GPTSamples(dataset, range(len(dataset)), count, LENGTH, SEED, VOCAB, "megatron", store)


def seconds(call, *values) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    call(*values)
    return time.perf_counter() - began


def read_all(get, numbers: range) -> None:
    """Get every sample of these numbers."""
    for number in numbers:
        get(number)


def row(name: str, unit: str, own: list[float], theirs: list[float]) -> None:
    """Print the medians, our share of Megatron's, and the load."""
    a, b = statistics.median(own), statistics.median(theirs)
    load = os.getloadavg()[0]
    print(f"| {name} | {unit} | {a:.4g} | {b:.4g} | {a / b:.2f} | {load:.1f} |", flush=True)


def measure_orders(megatron: Megatron, prefix: str, folder: Path, repeats: int) -> None:
    """Cold (built and stored) and from the cache, for 1 and 3 epochs."""
    epoch = (IndexedDataset(prefix).tokens - 1) // LENGTH
    for epochs in (1, 3):
        cold, warm = ([], []), ([], [])
        for _ in range(repeats):
            for side, make in enumerate((ours, megatron.samples)):
                cache = tempfile.mkdtemp(dir=folder)
                for times in (cold, warm):
                    times[side].append(seconds(make, prefix, epochs * epoch, cache))
                shutil.rmtree(cache)
        row(f"order, {epochs} epochs, cold", "s", *cold)
        row(f"order, {epochs} epochs, from the cache", "s", *warm)


def measure_samples(megatron: Megatron, prefix: str, folder: Path, repeats: int) -> None:
    """Random samples per second, pages in memory; also with masks at the ends of documents."""
    cache = str(folder / "cache")
    own = ours(prefix, None, cache)
    resets = Data(mask_eod_loss=True, eod_token=0, reset_attention=True, reset_positions=True)
    masked = functools.partial(Objective(resets).row, own)
    plain, theirs = (megatron.samples(prefix, None, cache, reset) for reset in (False, True))
    cases = {
        "random samples, warm": (own.sample, plain.__getitem__, READ),
        "random samples with resets and masked ends": (masked, theirs.__getitem__, READ // 80),
    }
    for name, (get, get_theirs, count) in cases.items():
        rates: tuple[list[float], list[float]] = ([], [])
        for turn in range(repeats):
            numbers = range(turn * READ, turn * READ + READ)
            read_all(own.sample, numbers)  # into memory
            rates[0].append(READ / seconds(read_all, get, numbers))
            rates[1].append(count / seconds(read_all, get_theirs, numbers[:count]))
        row(name, "1/s", *rates)


def measure_blends(megatron: Megatron) -> None:
    """Blending indices, once: many samples of a few sets, and sets of tiny weights."""
    random = np.random.default_rng(1)
    cases = {
        "blend of 10 sets, 1e+08 samples": (random.random(10), 10**8),
        "blend of 100 sets, tiny weights, 1e+07 samples": (
            np.array([1.0, *10 ** random.uniform(-6, -3, 99)]),
            10**7,
        ),
    }
    for name, (weights, size) in cases.items():
        shares = normalise(weights)
        times = [[seconds(make, shares, size)] for make in (blend_order, megatron.blend)]
        row(name, "s", *times)


def main() -> None:
    """Print a row of a table for each measurement."""
    parser = Parser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()}, numpy {np.__version__}")
    print("\n| what | unit | ours | megatron-core | ratio | load |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder, prefix = Path(name), f"{name}/c"
        write_corpus(prefix, options.documents)
        megatron = Megatron()
        measure_orders(megatron, prefix, folder, options.repeats)
        measure_samples(megatron, prefix, folder, options.repeats)
        measure_blends(megatron)


if __name__ == "__main__":
    main()
