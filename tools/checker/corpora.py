"""Small corpora of random documents in the place of the user's, for the small run.

    data, lines = small_data(config.data, model, seed, folder)

Random tokens stay random tokens. A corpus becomes a small one whose documents end as the options
say; weights of a blend, the order of samples, masks and objective stay.
"""

import dataclasses
from pathlib import Path
from typing import Any

from architecture.shape import ModelShape
from config.run_options import Data, parse_eval_sets

END = 3  # the token at the end of a document, unless --eod-token names one that the small run has
SAMPLES = 12  # of an evaluation
DOCUMENTS = 120
LONGEST = 40  # tokens of a document


def small_data(data: Data, model: ModelShape, seed: int, folder: Path) -> tuple[Data, list[str]]:
    """Return the options of the small run's data and lines about what was changed.

    model: the small model. folder: where the corpora are written.
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
    if has_corpora or data.eval_data:
        changed["cache"] = "none"
    if has_corpora:
        from corpora.blends import parse_blend  # imported here: it imports numpy

        prefixes, _ = parse_blend(data.data)
        small_prefix = {prefix: str(folder / f"corpus{n}") for n, prefix in enumerate(prefixes)}
        changed["data"] = tuple(small_prefix.get(str(word), word) for word in data.data)
        for number, path in enumerate(small_prefix.values()):
            _write(path, model.vocab_size, END if end is None else end, seed + number)
        said.append(f"--data: random documents in the place of {', '.join(map(str, prefixes))}")
    sets = []
    for number, each in enumerate(parse_eval_sets(data.eval_data or ())):
        path = str(folder / f"evaluated{number}")
        _write(path, model.vocab_size, END if end is None else end, seed + 100 + number)
        sets.append(f"{each.name}={path}:{SAMPLES - 5 * number % SAMPLES}")
    if sets:
        changed["eval_data"] = tuple(sets)
        said.append("--eval-data: random documents")
    return dataclasses.replace(data, **changed), said


def _write(prefix: str, vocabulary: int, end: int, seed: int) -> None:
    """Write a corpus of random documents, and which of its tokens are answers."""
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
