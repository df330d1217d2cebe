"""Training objectives: which tokens each token sees, and which labels count in the loss.

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
    """Samples that an objective reads by their number."""

    def __len__(self) -> int: ...

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k: (seq_length + 1,), int64."""

    def answers(self, k: int) -> np.ndarray:
        """Return 1 for each token of sample k that is in an answer, else 0: (seq_length + 1,)."""

    def file_of(self, k: int) -> str:
        """Return the path of the file that holds sample k's tokens."""


class Objective:
    """Makes the rows of a micro-batch from samples, by the data options.

    fields: the names of a row's arrays, each of shape (seq_length,), int64. masks_loss: whether
    some labels may be NO_TARGET.
    """

    def __init__(self, options: Data, seed: int = 0):
        self.options = options
        self.seed = seed
        self.fields = ["tokens", "labels"]
        self.fields += ["starts", "stops"] if options.masks_attention else []
        self.fields += ["positions"] if options.reset_positions else []
        self.masks_loss = options.masks_loss
        self.plain = len(self.fields) == 2 and not self.masks_loss

    def row(self, samples: Readable, k: int) -> dict[str, np.ndarray]:
        """Return the row of sample k: an array for each of `fields`."""
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
            row["starts"], row["stops"] = _per_token(borders[:-1], borders), places + 1
        if options.objective == "prefix":
            random = np.random.default_rng((self.seed, k))
            ends = _per_token(prefix_ends(borders, random), borders)
            row["stops"] = np.maximum(row["stops"], ends)
            counted = places + 1 >= ends
        if options.mask_eod_loss:
            counted &= row["tokens"] != options.eod_token
        if options.answers_only:
            counted &= samples.answers(k)[1:] != 0
        if options.masks_loss:
            row["labels"] = np.where(counted, row["labels"], NO_TARGET)
        return row


def document_borders(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Return the first token of each document in `tokens`, and at the end the number of tokens.

    eod: the token id that ends a document.
    """
    after = np.flatnonzero(tokens[:-1] == eod) + 1
    return np.concatenate([[0], after, [len(tokens)]])


def _per_token(of_documents: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Return an array that has, for each token, the value of the token's document."""
    return np.repeat(of_documents, np.diff(borders))


def prefix_ends(borders: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the end of each document's prefix, which has 1 to n - 1 of the n tokens.

    All these lengths are equally likely. The prefix of a document of one token is that token.
    """
    return borders[:-1] + random.integers(1, np.maximum(2, np.diff(borders)))
