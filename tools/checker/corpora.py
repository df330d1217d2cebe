"""Small corpora of random documents in the place of the user's, for the small run.

    data, lines = small_data(config.data, model, folder)
    write_corpora(small)              the documents of both corpora and evaluations

Random tokens stay random tokens. A corpus becomes a small one whose documents end as the options
say; weights of a blend, the order of samples, masks and objective stay.
"""

import dataclasses
from pathlib import Path
from typing import Any

from architecture.shape import ModelShape
from config.run_options import Data, parse_eval_sets
from config.schema import Config

END = 3  # the token at the end of a document, unless --eod-token names one that the small run has
SAMPLES = 12  # of an evaluation on the validation split: replicas and micro-batches divide them
UNEVEN = 5  # of one on documents of its own: they need not, and do not
DOCUMENTS = 120
LONGEST = 40  # tokens of a document


def small_data(data: Data, model: ModelShape, folder: Path) -> tuple[Data, list[str]]:
    """Return the options of the small run's data and lines about what was changed.

    model: the small model. folder: that of the corpora, which `write_corpora` writes.
    """
    said = []
    changed: dict[str, Any] = {"eval_samples": SAMPLES, "eval_every": 0, "skip_samples": None}
    changed |= {"phases": None, "eval_tasks": None}
    if data.skip_samples:
        said.append("--skip-samples is left out")
    if data.cache not in (None, "none"):
        said.append("--cache: orders of samples are not kept")
    end = data.eod_token
    if end is not None and end >= model.vocab_size:
        end = END
        changed["eod_token"] = end
    has_corpora = data.data != ("synthetic",)
    changed["cache"] = "none"
    if has_corpora:
        from corpora.blends import parse_blend  # imported here: it imports numpy

        prefixes, _ = parse_blend(data.data)
        small_prefix = {prefix: str(folder / f"corpus{n}") for n, prefix in enumerate(prefixes)}
        changed["data"] = tuple(small_prefix.get(str(word), word) for word in data.data)
        said.append(f"--data: random documents in the place of {', '.join(map(str, prefixes))}")
    sets = []
    names = [each.name for each in parse_eval_sets(data.eval_data or ())]
    for number, name in enumerate(names or ["documents"]):
        sets.append(f"{name}={folder / f'evaluated{number}'}:{UNEVEN + 2 * number}")
    changed["eval_data"] = tuple(sets)
    if names:
        said.append("--eval-data: random documents")
    return dataclasses.replace(data, **changed), said


def write_corpora(small: Config) -> None:
    """Write the corpora of a small run, and those that it evaluates."""
    from corpora.blends import parse_blend  # imported here: it imports numpy

    data, seed = small.data, small.training.seed
    end = END if data.eod_token is None else data.eod_token
    seeds: dict[str, int] = {}
    if data.data != ("synthetic",):
        seeds |= {prefix: seed + n for n, prefix in enumerate(parse_blend(data.data)[0])}
    sets = parse_eval_sets(data.eval_data or ())
    seeds |= {each.prefix: seed + 100 + n for n, each in enumerate(sets)}
    for prefix, of_prefix in seeds.items():
        _write(str(prefix), small.model.vocab_size, end, of_prefix)


def _write(prefix: str, vocabulary: int, end: int, seed: int) -> None:
    """Write a corpus of random documents, and marks of random tokens as answers.

    vocabulary: the number of token ids. end: the id that ends each document.
    """
    import numpy as np

    from corpora.token_files import ANSWERS, IndexedDatasetWriter

    random = np.random.default_rng(seed)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    answers = IndexedDatasetWriter(f"{prefix}{ANSWERS}", 2)
    with IndexedDatasetWriter(prefix, vocabulary) as tokens, answers as marks:
        for size in random.integers(1, LONGEST, size=DOCUMENTS):
            words = random.integers(vocabulary, size=size)
            words[words == end] = (end + 1) % vocabulary
            tokens.add_document([*words, end])
            marks.add_document(random.integers(2, size=size + 1))
