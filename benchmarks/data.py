"""Data, side by side with megatron-core in one run: random samples, orders, blends, cold pages.

    python benchmarks/data.py                          # 1 M documents; about 10 minutes
    python benchmarks/data.py --documents 50000000     # and the ranks of a node, --ranks 8

Each figure is the median of --repeats runs, ours and Megatron's in turn; `load` is the machine's
load average when it was taken. The corpus has lengths of an exponential distribution, mean 600.
"""

import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import data
import trainer
from benchmarks.megatron_data import Megatron
from config import validation
from config.command_line import parse
from config.messages import Parser
from config.run_options import Data
from corpora import token_files
from corpora.blends import blend_order, normalise
from corpora.mapped_files import ArrayCache
from corpora.objectives import Objective
from corpora.sample_order import GPTSamples
from corpora.token_files import HEADER, MAGIC, VERSION, IndexedDataset

LENGTH, SEED, VOCAB = 2048, 1234, 8192
RANK = Path(__file__).with_name("order_of_rank.py")


def write_corpus(prefix: str, documents: int, tokens_too: bool = True) -> None:
    """Random tokens; without tokens the .bin is a hole of the right size."""
    random = np.random.default_rng(0)
    lengths = np.maximum(1, random.exponential(600, documents)).astype("<i4")
    sizes, tokens = lengths.astype("<i8") * 2, int(lengths.sum(dtype=np.int64))
    with open(prefix + ".bin", "wb") as file:
        for begin in range(0, tokens if tokens_too else 0, 1 << 24):
            count = min(1 << 24, tokens - begin)
            file.write(random.integers(VOCAB, size=count, dtype=np.uint16).tobytes())
        file.truncate(2 * tokens)
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
    began = time.perf_counter()
    call(*values)
    return time.perf_counter() - began


def read_all(get, numbers) -> None:
    for number in numbers:
        get(number)


def row(name: str, unit: str, own: list[float], theirs: list[float] | None = None) -> None:
    """Print the medians, our share of Megatron's, and the load."""
    text = f"| {name} | {unit} | {statistics.median(own):.4g} |"
    if theirs:
        a, b = statistics.median(own), statistics.median(theirs)
        text += f" {b:.4g} | {a / b:.2f} |"
    else:
        text += " | |"
    print(f"{text} {os.getloadavg()[0]:.1f} |", flush=True)


# ---- Orders and samples --------------------------------------------------------------------------


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
    """Random samples per second, pages in memory."""
    cache = str(folder / "cache")
    theirs = {resets: megatron.samples(prefix, None, cache, resets) for resets in (False, True)}
    own = ours(prefix, None, cache)
    resets = {"eod_token": 0, "reset_attention": True, "reset_positions": True}
    makers = {
        "own resets": Objective(Data(mask_eod_loss=True, **resets)),
        "own prefixes": Objective(Data(objective="prefix", mask_eod_loss=True, **resets)),
    }
    rates: dict[str, list[float]] = {"ours": [], "plain": [], "resets": []}
    rates |= {name: [] for name in makers}
    for turn in range(repeats + 1):
        chosen = range(turn * 4000, turn * 4000 + 4000)
        read_all(own.sample, chosen)  # into memory
        rates["ours"].append(4000 / seconds(read_all, own.sample, chosen))
        rates["plain"].append(4000 / seconds(read_all, theirs[False].__getitem__, chosen))
        rates["resets"].append(50 / seconds(read_all, theirs[True].__getitem__, chosen[:50]))
        for name, maker in makers.items():
            make = functools.partial(maker.row, own)
            rates[name].append(4000 / seconds(read_all, make, chosen))
    row("random samples, warm", "1/s", rates["ours"], rates["plain"])
    row("random samples with resets and masked ends", "1/s", rates["own resets"], rates["resets"])
    row("the same with prefixes, Megatron without", "1/s", rates["own prefixes"], rates["resets"])


def measure_blends(megatron: Megatron, repeats: int, small: bool) -> None:
    """Blending indices: many samples of a few sets, and sets of tiny weights."""
    random, scale = np.random.default_rng(1), 10 if small else 1
    cases = {
        f"blend of 10 sets, {10**8 // scale:.0e} samples": (random.random(10), 10**8 // scale),
        f"blend of 100 sets, tiny weights, {10**7 // scale:.0e} samples": (
            np.array([1.0, *10 ** random.uniform(-6, -3, 99)]),
            10**7 // scale,
        ),
    }
    for name, (weights, size) in cases.items():
        shares = normalise(weights)
        found: list = [None, None]
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            for side, make in enumerate((blend_order, megatron.blend)):
                began = time.perf_counter()
                found[side] = make(shares, size)
                times[side].append(time.perf_counter() - began)
            assert all(np.array_equal(a, b) for a, b in zip(*found)), "the blends differ"
        row(name, "s", *times)


# ---- Ranks of a node -----------------------------------------------------------------------------


def measure_ranks(prefix: str, folder: Path, ranks: int) -> None:
    """Processes that need the same order of 3 epochs, cold: seconds, CPU seconds, memory.

    Ours start at once. Of Megatron's the first builds, and the others start when it has done so,
    as torch.distributed makes them wait. Imports are not counted.
    """
    figures = []
    for side in ("ours", "megatron"):
        cache = tempfile.mkdtemp(dir=folder)
        command = [sys.executable, str(RANK), side, prefix, cache]
        waves = [ranks] if side == "ours" else [1, ranks - 1]
        wall, every = 0.0, []
        for count in waves:
            starts = [
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)
            ]
            outs = [list(map(float, p.communicate()[0].split()[-6:])) for p in starts]
            wall += max(out[1] for out in outs) - min(out[0] for out in outs)
            every += outs
        memory = max(sum(out[4] for out in every[-count:]), every[0][4])
        peak, used = max(out[3] for out in every), sum(out[2] for out in every)
        figures.append([wall, used, peak, memory])
        shutil.rmtree(cache)
    names = "time", "CPU time", "largest resident memory of one", "memory of all (PSS)"
    for name, unit, own, other in zip(names, ("s", "s", "GB", "GB"), *figures):
        row(f"{ranks} ranks, 3 epochs: {name}", unit, [own], [other])


# ---- Steps ---------------------------------------------------------------------------------------


def measure_steps(prefix: str, folder: Path, steps: int) -> None:
    """Steps of a small model: warm pages, always cold pages, 20 ms of delay for each sample.

    Variants take turns, so that the load of the machine is the same for all.
    """
    words = f"--layers 4 --hidden 256 --heads 4 --seq-length 512 --vocab-size {VOCAB}"
    words += f" --data {prefix} --split 1 --steps {10 * steps} --global-batch-size 8"
    words += f" --micro-batch-size 2 --cache {folder / 'cache'}"
    config = validation.check(parse(words.split()), 1)
    state, samples = trainer.build(config), data.build(config).train
    own, descriptor = os.pread, os.open(prefix + ".bin", os.O_RDONLY)

    def cold(*place):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return own(*place)

    def late(*place):
        time.sleep(0.02 / 1.85)  # a sample of 513 tokens is read in 1.85 cuts
        return own(*place)

    variants = {"warm": own, "always cold": cold, "20 ms late": late}
    times: dict[str, list[float]] = {name: [] for name in variants}
    consumed = 0
    for turn in range(steps):
        for name, read in variants.items():
            token_files.os.pread = read
            for repeat in range(5):  # what was read ahead is of the variant before: not counted
                took = seconds(trainer.step, state, samples, consumed, 1e-4)
                consumed += 8
                times[name] += [took] if repeat >= 2 and turn else []
    token_files.os.pread = own
    for name, taken in times.items():
        row(f"step, {name}, against warm", "s", taken, times["warm"])
    state.reader.close()
    os.close(descriptor)


def main() -> None:
    """Measure what --only names, and print a row of a table for each."""
    parser = Parser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="blends of a tenth of the samples")
    parser.add_argument("--only", nargs="+", default=["orders", "samples", "blends", "steps"])
    parser.add_argument("--folder", default=None, help="for the corpus and the caches")
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()}, numpy {np.__version__}")
    print("\n| what | unit | ours | megatron-core | ratio | load |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, prefix = Path(name), f"{name}/c"
        write_corpus(prefix, options.documents, tokens_too="ranks" not in options.only)
        if "ranks" in options.only:
            return measure_ranks(prefix, folder, options.ranks)
        megatron = Megatron()
        if "orders" in options.only:
            measure_orders(megatron, prefix, folder, options.repeats)
        if "samples" in options.only:
            measure_samples(megatron, prefix, folder, options.repeats)
        if "blends" in options.only:
            measure_blends(megatron, 1 if not options.small else options.repeats, options.small)
        if "steps" in options.only:
            measure_steps(prefix, folder, options.repeats)


if __name__ == "__main__":
    main()
