"""Random cases of samples against megatron-core.

    python benchmarks/peers/data_cases.py --cases 3000

Cases: one to four corpora, with and without weights, empty documents, splits, up to some epochs.
Where Megatron builds, ours is bit-equal, or refused for a reason of REASONS, which docs/data.md
names.
"""

import logging
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import data
from base.cli import Parser
from base.errors import UserError
from benchmarks.peers.megatron_data import Megatron
from config.command_line import parse
from corpora.sample_order import split_ranges
from corpora.token_files import IndexedDataset, IndexedDatasetWriter

VOCAB = 1000
REASONS = {  # our refusals where Megatron builds, and the words of docs/data.md
    r"hold \d+ tokens, but one sample takes": "A split of a corpus without one whole sample",
}


@dataclass
class Case:
    """A run: corpora, and what is asked of them; sizes: samples of train, validation and test."""

    prefixes: list[str]
    weights: list[float] | None
    seq_length: int
    seed: int
    split: str
    batch: int
    steps: int
    evaluated: int

    @property
    def sizes(self) -> list[int]:
        """Samples of train, validation and test."""
        return [self.steps * self.batch, self.evaluated, self.evaluated]

    def has_no_tokens(self) -> bool:
        """Whether a split that has a share has no tokens: Megatron counts its epochs for ever."""
        shares = [float(share) for share in self.split.split(",")]
        for dataset in map(IndexedDataset, self.prefixes):
            for share, own in zip(shares, split_ranges(self.split, len(dataset))):
                if share and not dataset.tokens_in(own):
                    return True
        return False

    def flags(self) -> list[str]:
        """The command line of the run."""
        words = self.prefixes
        if self.weights:
            words = [str(word) for pair in zip(self.weights, self.prefixes) for word in pair]
        text = (
            f"--layers 1 --hidden 8 --heads 1 --seq-length {self.seq_length} --vocab-size {VOCAB} "
            f"--steps {self.steps} --global-batch-size {self.batch} --seed {self.seed} "
            f"--split {self.split} --eval-samples {self.evaluated} --cache none"
        )
        return [*text.split(), "--data", *words]


def draw(seed: int, folder: str) -> Case:
    """A random case, whose corpora are written into a folder."""
    random = np.random.default_rng(seed)
    prefixes = [f"{folder}/{i}" for i in range(random.choice([1, 1, 2, 3, 4]))]
    for prefix in prefixes:
        longest = int(random.choice([3, 40, 300, 300]))
        lengths = random.integers(0, longest, size=random.integers(1, 150))
        lengths[random.random(len(lengths)) < random.choice([0, 0.3])] = 0
        with IndexedDatasetWriter(prefix, VOCAB) as writer:
            for length in lengths:
                writer.add_document(random.integers(VOCAB, size=length))
    seq_length = int(random.integers(1, 40))
    data_seed = int(random.integers(2**32 - 1))
    split = str(random.choice(["1", "1,1,0", "8,1,1", "969,30,1", "0.5,0.25,0.25"]))
    batch = int(random.integers(1, 9))
    steps = int(random.choice([1, 5, 40, 200]))
    evaluated = int(random.choice([1, 5, 20, 100]))
    weighted = len(prefixes) > 1 and random.random() < 0.6
    weights = random.choice([0.001, 0.1, 0.5, 1, 3, 7], size=len(prefixes)).tolist()
    own = weights if weighted else None
    return Case(prefixes, own, seq_length, data_seed, split, batch, steps, evaluated)


def compare(megatron: Megatron, case: Case) -> str:
    """Return a case's outcome: equal, refused: REASON, a difference, or who does not build."""
    options = case.prefixes, case.weights, case.split, case.seq_length, case.seed, None, VOCAB
    theirs = None
    try:
        if not case.has_no_tokens():
            theirs = megatron.build(case.sizes, megatron.config(*options))
    except Exception as error:  # Megatron raises errors of any kind: by its checks, or by a defect
        logging.info("Megatron does not build: %s", error)
    try:
        splits = data.build(parse(case.flags()))
    except UserError as error:
        if theirs is None:
            return "neither builds"
        named = [words for pattern, words in REASONS.items() if re.search(pattern, str(error))]
        return f"refused: {named[0]}" if named else f"DIFFERS: refused, {error}"
    if theirs is None:
        return "only ours builds"
    for name, oracle, size in zip(("train", "validation", "test"), theirs, case.sizes):
        ours = getattr(splits, name)
        if ours is None or oracle is None:
            continue  # not asked for; a test split that is too small is a note
        for k in range(min(size, len(oracle))):
            expected = oracle[k]
            wanted = np.append(expected["tokens"].numpy(), expected["labels"].numpy()[-1:])
            if not np.array_equal(ours.sample(k), wanted):
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
            outcome = compare(megatron, draw(seed, folder))
        outcomes[f"{outcome} (seed {seed})" if "DIFFERS" in outcome else outcome] += 1
    return outcomes


def main() -> None:
    """Print how often each outcome was; exit status 1 if one is a difference."""
    parser = Parser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    options = parser.parse_args()
    outcomes = compare_all(Megatron(), range(options.first, options.first + options.cases))
    for outcome, count in sorted(outcomes.items()):
        print(f"| {outcome} | {count} |")
    sys.exit(any("DIFFERS" in outcome for outcome in outcomes))


if __name__ == "__main__":
    main()
