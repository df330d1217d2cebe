"""Writes the small corpora that lines of the golden test read, before a test runs the lines."""

from pathlib import Path

import numpy as np

from corpora.token_files import IndexedDatasetWriter

VOCAB = 61
END = 3  # the token that ends a document of the chats


def write_corpora(folder: Path) -> None:
    """Write three corpora of random tokens: a has 12 samples of 16 tokens, b 15, c 21."""
    lengths = {"a": [20] * 10, "b": [30] * 8, "c": [7] * 49}
    for number, name in enumerate(lengths):
        random = np.random.default_rng(number)
        with IndexedDatasetWriter(str(folder / name), VOCAB) as writer:
            for length in lengths[name]:
                writer.add_document(random.integers(VOCAB, size=length))


def write_chats(folder: Path) -> None:
    """Write 300 random documents, and beside them which of their tokens are answers."""
    random = np.random.default_rng(1)
    with (
        IndexedDatasetWriter(f"{folder}/chats", VOCAB) as tokens,
        IndexedDatasetWriter(f"{folder}/chats.targets", 2) as answers,
    ):
        for size in random.integers(1, 20, size=300):
            tokens.add_document([*random.integers(4, VOCAB, size=size), END])
            answers.add_document(random.integers(2, size=size + 1))
