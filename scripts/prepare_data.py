"""Turn text into a corpus that `train.py --data` reads.

    python scripts/prepare_data.py --out data/stdlib --stdlib
    python scripts/prepare_data.py --out data/books --vocab-size 32000 books/ more.jsonl
    python scripts/prepare_data.py --out data/new --tokenizer data/books.tokenizer.json new/

A .py, .txt or .md file is one document, a line of a .jsonl file and a row of a table are one (all
formats: scripts/text_sources.py). Documents are shuffled with a fixed seed, so that a split by
range is a random one, and each ends with the end-of-document token. The outputs are OUT.bin and
OUT.idx (format: corpora/token_files.py), OUT.tokenizer.json and OUT.sha256 (scripts/corpus.py).

Texts are read twice, to train the tokenizer and to encode, and are not held in memory.
"""

import argparse
import array
import os
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

# Python puts this script's folder on the path; the modules that it uses are in its parent.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import messages  # first: it ends a Python that is too old

with messages.installed():
    import numpy as np
    from rich.progress import Progress
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from config.messages import Parser, UserError, exit_with
    from config.validation import check_folder
    from corpora.token_files import IndexedDatasetWriter
    from scripts.corpus import write_checksums
    from scripts.text_sources import (
        SHOWN,
        WHOLE,
        BadTexts,
        is_read_in_place,
        kind_of,
        parse_line,
        spool,
        walk,
    )

MOST_IDS = 2**22  # of a new tokenizer: more than any text needs, and its trainer allocates them all
TEST_FOLDERS = {"test", "tests", "idle_test"}
BATCH_BYTES = 1 << 20  # text encoded at a time: enough for all cores
MOST_OPEN = 64  # files of lines
PIECE, AT_ONCE = 1 << 16, 16  # characters of a piece of a long document; pieces encoded at a time


class Texts:
    """The documents of some files, in a shuffled order, read when iterated over.

    Only a document's place (file, byte offset) is held in memory: 12 bytes, whatever its length.
    """

    def __init__(self, paths: list[Path], json_key: str, shuffle_seed: int, bad: BadTexts):
        self.paths, self.json_key, self.bad = paths, json_key, bad
        self.undecodable = self.empty = 0
        self._whole = [kind_of(path) in WHOLE for path in paths]
        self._open: dict[Path, BinaryIO] = {}
        lines = [[0] if whole else _line_starts(path) for path, whole in zip(paths, self._whole)]
        counts = [len(starts) for starts in lines]
        order = np.random.RandomState(shuffle_seed).permutation(sum(counts))
        self._file = np.repeat(np.arange(len(paths), dtype=np.int32), counts)[order]
        self._offset = np.concatenate([np.asarray(starts, np.int64) for starts in lines])[order]

    def __len__(self) -> int:
        return len(self._file)

    def __iter__(self) -> Iterator[str | None]:
        """Each document's text; None for one that is bad, or empty or not UTF-8, which counts."""
        self.undecodable = self.empty = 0
        for file, offset in zip(self._file, self._offset):
            try:
                text = self._read(file, int(offset))
            except UnicodeDecodeError:
                self.undecodable += 1
                yield None
                continue
            self.empty += text is not None and not text.strip()
            yield text if text and text.strip() else None

    def _read(self, number: int, offset: int) -> str | None:
        path = self.paths[number]
        if self._whole[number]:
            return path.read_bytes().decode("utf-8")
        if path not in self._open:
            if len(self._open) == MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[path] = open(path, "rb")  # noqa: SIM115 (closed when others are needed)
        file = self._open[path]
        file.seek(offset)
        line = file.readline()
        # Where a line is takes long to find, so only if it is bad.
        found = BadTexts(limit=1)
        text = parse_line(line, "", self.json_key, found)
        for reason in found.found.values():
            self.bad.add(_place(path, offset), reason)
        return text


def _line_starts(path: Path) -> array.array:
    """Byte offsets of the lines of a file, without the blank ones."""
    starts, offset = array.array("q"), 0
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                starts.append(offset)
            offset += len(line)
    return starts


def _place(path: Path, offset: int) -> str:
    """FILE:LINE of a byte offset, for a message."""
    line, left = 1, offset
    with open(path, "rb") as file:
        while left:
            block = file.read(min(left, 1 << 20))
            line, left = line + block.count(b"\n"), left - len(block)
    return f"{path}:{line}"


def find_files(paths: list[str], stdlib: bool, unknown: Counter[str] | None = None) -> list[Path]:
    """The text files named by `paths` or in folders of them, sorted; UserError if there is none.

    unknown: counts, by their suffix, the files in folders that are not of a known kind.
    """
    found, unknown = set(), Counter() if unknown is None else unknown
    for path in map(Path, paths):
        if str(path) == "-":
            found.add(path)
        elif path.is_dir():
            found.update(walk(path, set(), unknown))
        elif not path.exists():
            raise UserError(f"{path} does not exist")
        elif kind_of(path) is None:
            raise UserError(f"{path} is not one of {SHOWN}")
        else:
            found.add(path.resolve())
    if stdlib:
        skip = TEST_FOLDERS | {"site-packages", "dist-packages"}
        library = walk(Path(sysconfig.get_path("stdlib")), skip, Counter())
        found.update(path for path in library if path.suffix == ".py")
    if not found:
        raise UserError(f"no {SHOWN} file in {' '.join(paths)}")
    return sorted(found)


def train_tokenizer(texts, vocab_size: int, end_token: str, limit: int, progress) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids, trained on the first `limit` bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def sample() -> Iterator[str]:
        read = 0
        for text in progress.track(texts, len(texts), description="tokenizer"):
            if text is not None:
                yield text
                read += len(text.encode())
            if read >= limit:
                return

    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def load_tokenizer(path: str, end_token: str) -> Tokenizer:
    """A tokenizer of the `tokenizers` library; UserError if it lacks the end token."""
    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read --tokenizer {path}: {error.strerror}") from None
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"--tokenizer {path} is not a tokenizer: {error}") from None
    if tokenizer.token_to_id(end_token) is None:
        raise UserError(f"--tokenizer {path} has no token {end_token!r}; name its --end-token")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(texts, tokenizer: Tokenizer, end_token: str, writer, progress) -> int:
    """Write every text, with the end token, as a document; returns the bytes of text encoded."""
    end = tokenizer.token_to_id(end_token)
    # A text that contains the name of a special token must not end a document.
    tokenizer.encode_special_tokens = True
    cuts = _is_cut_at_spaces(tokenizer)

    def encoded(batch: list[str]) -> tuple[np.ndarray, list[int]]:
        ids: list[int] = []
        lengths = []
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            own = encoding.ids
            ids += own
            ids.append(end)
            lengths.append(len(own) + 1)
        return np.array(ids, np.int64), lengths

    total, waiting = 0, []
    with ThreadPoolExecutor(1) as thread:  # the library's own threads run while texts are read
        for batch in _batches(progress.track(texts, len(texts), description="encoding")):
            total += sum(len(text.encode()) for text in batch)
            for ids, lengths in (future.result() for future in waiting):
                writer.add_documents(ids, lengths)
            waiting = []
            if len(batch) == 1 and cuts and len(batch[0]) > AT_ONCE * PIECE:
                ids = _encode_long(batch[0], tokenizer)
                writer.add_document(np.append(ids, np.int32(end)))
            else:
                waiting = [thread.submit(encoded, batch)]
        for ids, lengths in (future.result() for future in waiting):
            writer.add_documents(ids, lengths)
    return total


def _batches(texts) -> Iterator[list[str]]:
    """Texts of about BATCH_BYTES together; a long one is alone. None is left out."""
    batch, size = [], 0
    for text in texts:
        if text is None:
            continue
        if len(text) > AT_ONCE * PIECE:
            if batch:
                yield batch
            yield [text]
            batch, size = [], 0
            continue
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _is_cut_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether no token of it goes on from a letter to a space: true of byte-level BPE as trained
    here, whose pattern is that of GPT-2.
    """
    before = tokenizer.pre_tokenizer
    plain = isinstance(before, pre_tokenizers.ByteLevel) and not before.add_prefix_space
    return plain and tokenizer.normalizer is None


def _encode_long(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of a long text, piece by piece: the library takes 100 bytes for each character.

    A piece ends before a single space between two words, where a token ends too.
    """
    pieces, begin, boundary = [], 0, re.compile(r"(?<=\w)(?= \w)")
    while begin < len(text):
        place = boundary.search(text, begin + PIECE)
        stop = place.start() if place else len(text)
        pieces.append((begin, stop))
        begin = stop
    found = []
    for first in range(0, len(pieces), AT_ONCE):
        batch = [text[begin:stop] for begin, stop in pieces[first : first + AT_ONCE]]
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        found += [np.array(encoding.ids, np.int32) for encoding in encodings]
    return np.concatenate(found)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; UserError if options do not go together."""
    parser = Parser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help=f"files or folders of {SHOWN}; - for stdin")
    add("--out", required=True, metavar="PREFIX", help="write PREFIX.bin, .idx, .tokenizer.json")
    add("--stdlib", action="store_true", help="add Python's standard library, without its tests")
    add("--vocab-size", type=int, metavar="N", help="ids of the new tokenizer (default: 8192)")
    add("--tokenizer", metavar="FILE", help="use this tokenizer and train none")
    add("--tokenizer-mb", type=float, default=100, metavar="MB", help="text to train it on (100)")
    add("--end-token", default="<|endoftext|>", help="ends every document (<|endoftext|>)")
    add("--json-key", default="text", help="key of the text in .jsonl lines (text)")
    add("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad lines or rows (0)")
    add("--shuffle-seed", type=int, default=1234, help="seed of the documents' order (1234)")
    options = parser.parse_args(arguments)
    if not options.paths and not options.stdlib:
        raise UserError("nothing to prepare: name files or folders, or give --stdlib")
    if options.tokenizer and options.vocab_size is not None:
        raise UserError("--vocab-size is for a new tokenizer; --tokenizer has its own")
    if options.vocab_size is None:
        options.vocab_size = 8192
    if options.vocab_size < 257:
        raise UserError(f"--vocab-size({options.vocab_size}) must hold 256 bytes and the end token")
    if options.skip_bad < 0:
        raise UserError(f"--skip-bad({options.skip_bad}) must be at least 0")
    if options.vocab_size > MOST_IDS:
        raise UserError(f"--vocab-size({options.vocab_size}) must be at most {MOST_IDS}")
    if not 0 < options.tokenizer_mb < 1e9:
        raise UserError(f"--tokenizer-mb({options.tokenizer_mb}) must be above 0 and below 1e9")
    if not os.path.basename(options.out):
        raise UserError(f"--out {options.out} is a folder: name a prefix in it, as data/books")
    check_folder("the folder of --out,", os.path.dirname(options.out) or ".")
    if not 0 <= options.shuffle_seed < 2**32:
        raise UserError(f"--shuffle-seed({options.shuffle_seed}) must be in 0..{2**32 - 1}")
    return options


def main(arguments: list[str]) -> None:
    """Read texts, train or load the tokenizer, write the corpus; raises UserError."""
    options = parse(arguments)
    begin, bad, unknown = time.perf_counter(), BadTexts(options.skip_bad), Counter[str]()
    paths = find_files(options.paths, options.stdlib, unknown)
    if unknown:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(unknown.items()))
        print(f"not read, because their kind is not known: {kinds}", flush=True)
    copied = f"{options.out}.{os.getpid()}.partial.jsonl"
    try:
        streams = [path for path in paths if not is_read_in_place(path)]
        if streams:
            os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
            spool(streams, options.json_key, copied, bad)
            paths = [path for path in paths if is_read_in_place(path)] + [Path(copied)]
        prepare(Texts(paths, options.json_key, options.shuffle_seed, bad), options, begin)
    finally:
        Path(copied).unlink(missing_ok=True)


def prepare(texts: Texts, options: argparse.Namespace, begin: float) -> None:
    """Train or load the tokenizer and write the corpus; begin: of the clock of what it prints."""
    end = options.end_token
    with Progress(disable=not sys.stdout.isatty()) as progress:
        if options.tokenizer:
            tokenizer = load_tokenizer(options.tokenizer, end)
        else:
            limit = int(options.tokenizer_mb * 1e6)
            tokenizer = train_tokenizer(texts, options.vocab_size, end, limit, progress)
        vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
        with IndexedDatasetWriter(options.out, vocab_size) as writer:
            size = encode(texts, tokenizer, end, writer, progress)
            if not writer.documents:
                raise UserError(f"none of the {len(texts)} documents has text in UTF-8")
            texts.bad.write(options.out + ".bad.txt")
            # An older corpus of this name must not remain beside the new tokenizer.
            for suffix in (".idx", ".sha256"):
                Path(options.out + suffix).unlink(missing_ok=True)
            tokenizer.save(options.out + ".tokenizer.json")
    write_checksums(options.out)
    seconds = time.perf_counter() - begin
    print(
        f"{options.out}: {writer.documents:,} documents, {writer.tokens:,} tokens, "
        f"{size / writer.tokens:.2f} bytes/token, {seconds:.1f} s; "
        f"skipped {texts.undecodable} not in UTF-8, {texts.empty} empty"
        + (f", {len(texts.bad.found)} bad ({options.out}.bad.txt)" if texts.bad.found else "")
    )
    print(f"train with: --data {options.out} --vocab-size {vocab_size}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        exit_with(error)
    except OSError as error:  # a file that cannot be read, a disk that is full
        exit_with(UserError(str(error)))
