"""Random cases of samples against megatron-core, and damaged files that must give a sentence.

    python benchmarks/data_cases.py --cases 3000 --mutations 600

Cases: one to four corpora, with and without weights, empty documents, splits, up to some epochs.
Where Megatron builds, ours is bit-equal, or refused for a reason of REASONS, which docs/data.md
names. Mutations: pairs, JSON lines, tables and archives with bytes changed, cut or added.
"""

import argparse
import bz2
import gzip
import importlib.util
import io
import json
import logging
import lzma
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import h5py
import numpy as np

import data
from benchmarks.megatron_data import Megatron
from config.command_line import parse
from config.messages import Parser, UserError
from corpora.sample_order import GPTSamples, split_ranges
from corpora.token_files import IndexedDataset, IndexedDatasetWriter
from scripts import corpus, prepare_data

VOCAB = 1000
SECONDS = 60  # that a damaged file may take
REASONS = {  # our refusals where Megatron builds, and the words of docs/data.md
    r"hold \d+ tokens, but one sample takes": "A split of a corpus without one whole sample",
}


class Case:
    """A random run: corpora in a folder, flags, and what is asked of Megatron."""

    def __init__(self, seed: int, folder: str):
        random = np.random.default_rng(seed)
        self.prefixes = [f"{folder}/{i}" for i in range(random.choice([1, 1, 2, 3, 4]))]
        for prefix in self.prefixes:
            longest = int(random.choice([3, 40, 300, 300]))
            lengths = random.integers(0, longest, size=random.integers(1, 150))
            lengths[random.random(len(lengths)) < random.choice([0, 0.3])] = 0
            with IndexedDatasetWriter(prefix, VOCAB) as writer:
                for length in lengths:
                    writer.add_document(random.integers(VOCAB, size=length))
        self.seq_length = int(random.integers(1, 40))
        self.seed = int(random.integers(2**32 - 1))
        shares = random.choice(["1", "1,1,0", "8,1,1", "969,30,1", "0.5,0.25,0.25"])
        self.split = str(shares)
        self.batch = int(random.integers(1, 9))
        self.steps = int(random.choice([1, 5, 40, 200]))
        self.evaluated = int(random.choice([1, 5, 20, 100]))
        weighted = len(self.prefixes) > 1 and random.random() < 0.6
        weights = random.choice([0.001, 0.1, 0.5, 1, 3, 7], size=len(self.prefixes)).tolist()
        self.weights: list[float] | None = weights if weighted else None

    def has_no_tokens(self) -> bool:
        """Whether a split that has a share has no tokens: Megatron counts its epochs for ever."""
        datasets = [IndexedDataset(prefix) for prefix in self.prefixes]
        asked = [float(share) > 0 for share in self.split.split(",")]
        splits = [(d, zip(asked, split_ranges(self.split, len(d)))) for d in datasets]
        return any(share and not d.tokens_in(own) for d, each in splits for share, own in each)

    def flags(self) -> list[str]:
        """The command line of the run."""
        words = self.prefixes
        if self.weights:
            words = [str(word) for pair in zip(self.weights, self.prefixes) for word in pair]
        text = (
            f"--layers 1 --hidden 8 --heads 1 --seq-length {self.seq_length} --vocab-size {VOCAB}"
        )
        text += f" --steps {self.steps} --global-batch-size {self.batch} --seed {self.seed}"
        text += f" --split {self.split} --eval-samples {self.evaluated} --cache none"
        return [*text.split(), "--data", *words]


def compare(megatron: Megatron, case: Case) -> str:
    """Return a case's outcome: equal, refused: REASON, a difference, or who does not build."""
    sizes = [case.steps * case.batch, case.evaluated, case.evaluated]
    options = case.prefixes, case.weights, case.split, case.seq_length, case.seed, None, VOCAB
    try:
        theirs = None if case.has_no_tokens() else megatron.build(sizes, megatron.config(*options))
    except Exception:  # Megatron raises errors of any kind: by its checks, or by a defect
        theirs = None
    try:
        splits = data.build(parse(case.flags()))
    except UserError as error:
        if theirs is None:
            return "neither builds"
        named = [words for pattern, words in REASONS.items() if re.search(pattern, str(error))]
        return f"refused: {named[0]}" if named else f"DIFFERS: refused, {error}"
    if theirs is None:
        return "only ours builds"
    for name, ours, oracle, size in zip(
        ("train", "validation", "test"),
        (splits.train, splits.validation, splits.test),
        theirs,
        sizes,
    ):
        if ours is None or oracle is None:
            continue  # not asked for; a test split that is too small is a note
        for k in range(min(size, len(oracle))):
            expected = oracle[k]
            sample = ours.sample(k)
            wanted = np.append(expected["tokens"].numpy(), expected["labels"].numpy()[-1:])
            if not np.array_equal(sample, wanted):
                return f"DIFFERS: {name} sample {k}"
        if len(ours) < size:
            return f"DIFFERS: {name} has {len(ours)} of {size} samples"
    return "equal"


def compare_all(megatron: Megatron, seeds: range) -> Counter[str]:
    """The outcomes of these cases, counted; a difference names its seed."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    outcomes = Counter[str]()
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            outcome = compare(megatron, Case(seed, folder))
        outcomes[f"{outcome} (seed {seed})" if "DIFFERS" in outcome else outcome] += 1
    return outcomes


# ---- Damaged files -------------------------------------------------------------------------------


def damaged(whole: bytes, random: np.random.Generator) -> bytes:
    """Some bytes changed, cut off, removed, added or repeated."""
    raw = bytearray(whole)
    for _ in range(random.integers(1, 4)):
        place = int(random.integers(len(raw) + 1))
        stop = place + int(random.integers(1, 30))
        kind = random.integers(5)
        if kind == 0:
            raw[place:stop] = random.bytes(len(raw[place:stop]))
        elif kind == 1:
            del raw[place:]
        elif kind == 2:
            del raw[place:stop]
        elif kind == 3:
            raw[place:place] = random.bytes(stop - place)
        else:
            raw[place:place] = raw[place:stop] * 3
    return bytes(raw)


def sources(folder: Path) -> dict[str, bytes]:
    """Good files of every kind that is compressed, a table or an array, and JSON lines."""
    texts = [f"text {i} Grüße, a second" for i in range(50)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    found = {"a.jsonl": lines, "a.csv": b"text,id\n" + b"".join(b'"a, b",1\n' for _ in texts)}
    for suffix, pack in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        found[f"a.jsonl.{suffix}"] = pack(lines)
    with h5py.File(folder / "a.h5", "w") as file:
        file["tokens"] = np.arange(500).reshape(50, 10) % 256
    if importlib.util.find_spec("zstandard"):
        import zstandard

        found["a.jsonl.zst"] = zstandard.ZstdCompressor().compress(lines)
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, folder / "a.parquet")
        with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
            writer.write_table(table)
    return found | {path.name: path.read_bytes() for path in folder.iterdir()}


def mutate_all(seeds: range) -> Counter[str]:
    """Outcomes of damaged files: a sentence, or read all the same; else an exception is raised."""
    outcomes = Counter[str]()
    with tempfile.TemporaryDirectory() as name, redirect_stdout(io.StringIO()):
        folder = Path(name)
        good = sources(folder)
        lines = folder / "pair.jsonl"
        lines.write_bytes(good["a.jsonl"])
        prepare(folder / "pair", lines)
        for seed in seeds:
            random = np.random.default_rng(seed)
            kinds: list[Callable] = [_damage_pair, _damage_source]
            outcomes[kinds[seed % 2](folder, good, random)] += 1
    return outcomes


def prepare(out: Path, source: Path) -> None:
    """With bytes as tokens, and some bad lines skipped."""
    words = ["--out", str(out), "--tokenizer", "bytes", "--skip-bad", "3", str(source)]
    prepare_data.main(words)


def _damage_source(folder: Path, good: dict[str, bytes], random: np.random.Generator) -> str:
    name = str(random.choice(sorted(good)))
    target = folder / f"damaged.{name.partition('.')[2]}"
    target.write_bytes(damaged(good[name], random))
    with _limited(f"{name} of this seed"):
        try:
            prepare(folder / "out", target)
        except UserError:
            return "source: a sentence"
        finally:
            target.unlink()
    assert not list(folder.glob("out.partial*"))
    return "source: read"


def _verifies(prefix: str) -> bool:
    try:
        corpus.verify(prefix)
    except UserError:
        return False
    return True


def _damage_pair(folder: Path, good: dict[str, bytes], random: np.random.Generator) -> str:
    """Every change is seen by `verify`; opened without it, the pair gives samples or a sentence."""
    path = folder / str(random.choice(["pair.bin", "pair.idx"]))
    whole = path.read_bytes()
    path.write_bytes(damaged(whole, random))
    prefix = str(folder / "pair")
    with _limited(f"{path.name} of this seed"):
        try:
            if path.read_bytes() != whole and _verifies(prefix):
                raise AssertionError("verify has not seen a change")
            dataset = IndexedDataset(prefix)
            samples = GPTSamples(dataset, range(len(dataset)), None, 8, 1, VOCAB)
            for k in range(min(50, len(samples))):
                samples.sample(k)
        except UserError:
            return "pair: a sentence"
        finally:
            path.write_bytes(whole)
    return "pair: seen by verify, opens"


@contextmanager
def _limited(what: str) -> Iterator[None]:
    """TimeoutError after SECONDS."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{what} took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    """Print how often each outcome was; exit status 1 if one is a difference."""
    parser = Parser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--mutations", type=int, default=600)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    options: argparse.Namespace = parser.parse_args()
    cases = compare_all(Megatron(), range(options.first, options.first + options.cases))
    changed = mutate_all(range(options.first, options.first + options.mutations))
    for outcome, count in sorted({**cases, **changed}.items()):
        print(f"| {outcome} | {count} |")
    sys.exit(any("DIFFERS" in outcome for outcome in cases))


if __name__ == "__main__":
    main()
