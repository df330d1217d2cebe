"""Training objectives: which tokens each token sees, and which labels count in the loss.

The arrays of a row, which is one sample of a micro-batch, with an entry for each of its s tokens:

    tokens, labels     a label that does not count in the loss is NO_TARGET
    starts, stops      token q sees tokens starts[q] to stops[q] - 1; without them, 0 to q
    positions          each token's place in its document; without them, 0 to s - 1

A document ends with the token --eod-token, as in Megatron. Random choices follow from (seed, k), so
they are the same in every layout and after a restart.
"""

from typing import Protocol

import numpy as np

from config.run_options import Data

NO_TARGET = -1  # the label of a token that does not count in the loss


class Readable(Protocol):
    """Samples that an objective can read, each by its number k.

    GPTSamples, Blend and data.Synthetic have these methods; this class only lists them.
    """

    def __len__(self) -> int: ...

    def sample(self, k: int) -> np.ndarray:
        """Return the tokens of sample k: (seq_length + 1,), int64."""

    def answers(self, k: int) -> np.ndarray:
        """Return 1 for each token of sample k that is in an answer, else 0: (seq_length + 1,)."""

    def file_of(self, k: int) -> str:
        """Return the path of the file that holds sample k's tokens, for error messages."""


class Objective:
    """Makes the rows of a micro-batch from samples, as the data options say.

    fields: the names of a row's arrays, which are (seq_length,), int64. masks_loss: whether labels
    may be NO_TARGET. plain: whether a row is only a sample's tokens and labels.
    """

    def __init__(self, options: Data, seed: int = 0):
        """Find out from the data options which arrays a row has, and whether labels are masked.

        seed: the seed of the random choices of --objective prefix. fields: the names of a row's
        arrays. masks_loss: whether an option leaves labels out of the loss. plain: whether a row is
        only a sample's tokens and labels.
        """
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
        """Return the row of sample k: an array (seq_length,) for each name in `fields`.

        Called for every sample that is read, in the threads of prefetch.py.
        """
        options = self.options
        text = samples.sample(k)
        row = {"tokens": text[:-1], "labels": text[1:]}
        if self.plain:  # no option changes what a token sees, or which labels count
            return row
        size = len(row["tokens"])
        places = np.arange(size)
        # Borders are the indices of the first tokens of documents, and at the end s. Positions
        # start again at each document with reset_positions, and a token sees only its document with
        # reset_attention; without these options the sample counts as one document.
        whole = np.array([0, size])
        borders = whole
        if options.reset_attention or options.reset_positions:
            borders = document_borders(row["tokens"], options.eod_token)
        if options.reset_positions:
            row["positions"] = places - _per_token(borders[:-1], borders)
        borders = borders if options.reset_attention else whole
        counted = np.ones(size, bool)  # for each label, whether it counts in the loss
        if options.masks_attention:  # a token sees the tokens of its document up to itself
            row["starts"] = _per_token(borders[:-1], borders)
            row["stops"] = places + 1
        # With --objective prefix, the tokens of a prefix see the whole prefix, and only the labels
        # after it count: label q is token q + 1.
        if options.objective == "prefix":
            random = np.random.default_rng((self.seed, k))
            ends = _per_token(prefix_ends(borders, random), borders)
            row["stops"] = np.maximum(row["stops"], ends)
            counted = places + 1 >= ends
        # The label of a token that ends a document is the first token of another document, which
        # this document does not determine.
        if options.mask_eod_loss:
            counted &= row["tokens"] != options.eod_token
        if options.answers_only:  # a label counts if it is a token of an answer
            counted &= samples.answers(k)[1:] != 0
        if options.masks_loss:
            row["labels"] = np.where(counted, row["labels"], NO_TARGET)
        return row


def document_borders(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Return the index of the first token of each document, and at the end the number of tokens.

    tokens: (s,). eod: the token id that ends a document. The result is (documents + 1,): if tokens
    1 and 4 of 6 are `eod`, it is 0, 2, 5, 6.
    """
    # The last token is left out: if it is `eod`, no document begins after it.
    after = np.flatnonzero(tokens[:-1] == eod) + 1
    return np.concatenate([[0], after, [len(tokens)]])


def _per_token(of_documents: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Return for each token the value of its document, (s,).

    of_documents: a value for each document. borders: the index of the first token of each document,
    and at the end s. With values 7, 8 and borders 0, 2, 5 the result is 7, 7, 8, 8, 8.
    """
    return np.repeat(of_documents, np.diff(borders))


def prefix_ends(borders: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the index after each document's prefix, (documents,), chosen at random.

    borders: the index of the first token of each document, and at the end the number of tokens. The
    prefix of a document of n tokens has 1 to n - 1 tokens, with equal probability, so that at least
    one label after it counts; the prefix of a single token is this token.
    """
    # `integers` draws numbers below its second argument: up to n - 1, or 1 if n is 1.
    return borders[:-1] + random.integers(1, np.maximum(2, np.diff(borders)))
