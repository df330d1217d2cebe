"""One rank of a node that finds its order of three epochs, for benchmarks/data.py.

    python benchmarks/order_of_rank.py ours|megatron PREFIX CACHE

Prints, after all imports: when it began and ended (seconds of the system's clock), its CPU seconds,
its peak resident and its proportional memory in GB.
"""

import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LENGTH, SEED, EPOCHS = 2048, 1234, 3


def samples_in(prefix: str) -> int:
    """Of all epochs; two bytes are a token."""
    return EPOCHS * ((os.path.getsize(prefix + ".bin") // 2 - 1) // LENGTH)


def find_ours(prefix: str, cache: str):
    """Our samples of the whole corpus, by the cache; torch is not needed for them."""
    from corpora.mapped_files import ArrayCache
    from corpora.sample_order import GPTSamples
    from corpora.token_files import IndexedDataset

    store, count = ArrayCache(cache), samples_in(prefix)

    def find() -> GPTSamples:
        dataset = IndexedDataset(prefix, store)
        return GPTSamples(
            dataset, range(len(dataset)), count, LENGTH, SEED, None, "megatron", store
        )

    return find


def find_megatrons(prefix: str, cache: str):
    """Megatron's."""
    from benchmarks.megatron_data import Megatron

    megatron, count = Megatron(), samples_in(prefix)
    return lambda: megatron.samples(prefix, count, cache)


def main() -> None:
    """Find it, and print what it took."""
    side, prefix, cache = sys.argv[1:]
    find = (find_ours if side == "ours" else find_megatrons)(prefix, cache)
    began, used = time.time(), time.process_time()
    samples = find()
    used, ended = time.process_time() - used, time.time()
    index = samples.shuffle_index
    int(index[::1024].sum())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    own = next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e6
    print(began, ended, used, peak, own, len(samples))


if __name__ == "__main__":
    main()
