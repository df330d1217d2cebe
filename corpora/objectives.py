"""Training objectives: which tokens each token sees, and which labels count in the loss.

The arrays of a row, which is one sample of a micro-batch:

    tokens, labels     a label that does not count in the loss is NO_TARGET
    starts, stops      token q sees tokens starts[q] to stops[q] - 1; without them, 0 to q
    positions          each token's place in its document; without them, 0 to s - 1

A document ends with the token --eod-token, as in Megatron. Random choices follow from (seed, k), so
they are the same in every layout and after a restart.
"""

from typing import Protocol

import numpy as np

from config.run_options import Data

NO_TARGET = -1


class Readable(Protocol):
    """Samples that an objective can read, each by its number k."""

    def __len__(self) -> int: ...

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k: (seq_length + 1,), int64."""

    def answers(self, k: int) -> np.ndarray:
        """Return 1 for each token of sample k that is in an answer, else 0: (seq_length + 1,)."""

    def file_of(self, k: int) -> str:
        """Return the path of the file that holds sample k's tokens."""


class Objective:
    """Makes the rows of a micro-batch from samples, as the data options say.

    fields: the names of a row's arrays, which are (seq_length,), int64. masks_loss: whether labels
    may be NO_TARGET. plain: whether a row is only a sample's tokens and labels.
    """

    def __init__(self, options: Data, seed: int = 0):
        self.options = options
        self.seed = seed
        self.fields = ["tokens", "labels"]
        if options.masks_attention:
            self.fields += ["starts", "stops"]
        if options.reset_positions:
            self.fields.append("positions")
        self.masks_loss = options.masks_loss
        self.plain = len(self.fields) == 2 and not self.masks_loss

    def row(self, samples: Readable, k: int) -> dict[str, np.ndarray]:
        """Return the row of sample k: an array (seq_length,) for each name in `fields`."""
        options = self.options
        text = samples.sample(k)
        row = {"tokens": text[:-1], "labels": text[1:]}
        if self.plain:
            return row
        size = len(row["tokens"])
        places = np.arange(size)
        whole = np.array([0, size])
        borders = whole
        if options.reset_attention or options.reset_positions:
            borders = document_borders(row["tokens"], options.eod_token)
        if options.reset_positions:
            row["positions"] = places - _per_token(borders[:-1], borders)
        borders = borders if options.reset_attention else whole
        counted = np.ones(size, bool)
        if options.masks_attention:
            row["starts"] = _per_token(borders[:-1], borders)
            row["stops"] = places + 1
        if options.objective == "prefix":
            random = np.random.default_rng((self.seed, k))
            ends = _per_token(prefix_ends(borders, random), borders)
            row["stops"] = np.maximum(row["stops"], ends)
            counted = places + 1 >= ends  # labels after the prefix
        if options.mask_eod_loss:
            counted &= row["tokens"] != options.eod_token
        if options.answers_only:
            counted &= samples.answers(k)[1:] != 0
        if options.masks_loss:
            row["labels"] = np.where(counted, row["labels"], NO_TARGET)
        return row


def document_borders(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Return the index of the first token of each document, and at the end the number of tokens.

    tokens: (s,). eod: the token id that ends a document. The result is (documents + 1,).
    """
    after = np.flatnonzero(tokens[:-1] == eod) + 1
    return np.concatenate([[0], after, [len(tokens)]])


def _per_token(of_documents: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Return for each token the value of its document, (s,).

    of_documents: a value for each document. borders: see `document_borders`.
    """
    return np.repeat(of_documents, np.diff(borders))


def prefix_ends(borders: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the index after each document's prefix, (documents,).

    borders: see `document_borders`. The prefix of a document of n tokens has 1 to n - 1 tokens,
    with equal probability; the prefix of a single token is that token.
    """
    return borders[:-1] + random.integers(1, np.maximum(2, np.diff(borders)))
