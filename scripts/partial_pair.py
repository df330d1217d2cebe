"""A .bin/.idx pair that is written chunk by chunk and gets its name at the end, all at once.

    PREFIX.partial.bin       tokens so far             PREFIX.partial.lengths   i32 for a document
    PREFIX.partial.journal   where the next chunk begins; what is behind it is cut off

Publishing is journaled too: a program that is killed while it renames goes on with it.
"""

import os
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from config.messages import UserError
from corpora.token_files import checksums_of, token_type_of, write_index
from scripts.documents import Found
from scripts.encode_documents import Chunk, Encoded
from scripts.journal import Journal

MOST_IN_DOCUMENT = 2**31 - 1  # tokens: lengths are 32 bits in this format
SECONDS_BETWEEN_ENTRIES = 1.0  # waiting for the disk after every chunk would take longer
KINDS = ("tokenizer.json", "tokenizer.model", "tokenizer.tiktoken")
# In the order of publishing: without an index there is no pair.
NAMES = (*KINDS, "bad.txt", "bin", "idx", "sha256")


class PartialPair:
    """The pair of a journal's job. tokens, documents, found: so far, also by a killed run.

    next: where the following chunk begins.
    """

    def __init__(self, journal: Journal, vocab_size: int):
        self.journal, self.found = journal, Found()
        self._unsaved, self._saved = Found(), time.monotonic()
        self.token_type = token_type_of(vocab_size)
        state = {"next": [0, 0], "tokens": 0, "documents": 0, "open": 0} | journal.last("next")
        for entry in journal.entries:
            self.found.add(Found(**entry.get("found", {})))
        self.next: tuple[int, int] = tuple(state["next"])
        self.tokens, self.documents, self._open = (
            state[name] for name in ("tokens", "documents", "open")
        )
        sizes = {"bin": self.tokens * self.token_type.itemsize, "lengths": 4 * self.documents}
        self._files = {}
        for name, size in sizes.items():
            path = journal.partial(name)
            file = open(path, "r+b" if size else "wb")  # noqa: SIM115 (closed by `close`)
            file.truncate(size)
            file.seek(size)
            self._files[name] = file

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Write a chunk; `save` is called every second or so."""
        lengths = list(encoded.lengths)
        if lengths:
            lengths[0] += self._open
            self._open = lengths.pop() if encoded.goes_on else 0
        if max([*lengths, self._open]) > MOST_IN_DOCUMENT:
            raise UserError(f"a document has more than {MOST_IN_DOCUMENT} tokens: divide it")
        self._files["bin"].write(encoded.tokens.astype(self.token_type, copy=False).data)
        self._files["lengths"].write(np.array(lengths, "<i4").tobytes())
        self.tokens += len(encoded.tokens)
        self.documents += len(lengths)
        self.next = chunk.next
        self.found.add(encoded.found)
        self._unsaved.add(encoded.found)
        if time.monotonic() - self._saved >= SECONDS_BETWEEN_ENTRIES:
            self.save()

    def save(self) -> None:
        """Note in the journal what is written; all of it is on the disk when this returns."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        state = {"tokens": self.tokens, "documents": self.documents, "open": self._open}
        self.journal.add({"next": self.next, **state, "found": asdict(self._unsaved)})
        self._unsaved, self._saved = Found(), time.monotonic()

    def close(self) -> None:
        """Close the files, which stay."""
        for file in self._files.values():
            file.close()

    def finish(self, summary: str) -> None:
        """Write the index and the checksums, and publish; summary: for whoever goes on with it."""
        self.close()
        partial = self.journal.partial
        lengths = np.fromfile(partial("lengths"), "<i4")
        write_index(partial("idx"), self.token_type, lengths, np.arange(len(lengths) + 1))
        sums = checksums_of(self.journal.prefix, partial("bin").removesuffix(".bin"))
        Path(partial("sha256")).write_bytes(sums)
        names = [name for name in NAMES if os.path.exists(partial(name))]
        self.journal.add({"published": names, "summary": summary})
        publish(self.journal)


def publish(journal: Journal) -> None:
    """Give the files of a finished job their names, those that have them not yet."""
    names = journal.last("published")["published"]
    # An old index must never describe the new tokens.
    for name in NAMES:
        if name not in names or (name == "idx" and os.path.exists(journal.partial("idx"))):
            Path(f"{journal.prefix}.{name}").unlink(missing_ok=True)
    for name in names:
        if os.path.exists(journal.partial(name)):
            os.replace(journal.partial(name), f"{journal.prefix}.{name}")
