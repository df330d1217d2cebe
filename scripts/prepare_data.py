"""Turn text into a corpus that `train.py --data` reads.

    python scripts/prepare_data.py --out data/stdlib --stdlib
    python scripts/prepare_data.py --out data/books --vocab-size 32000 books/ more.jsonl
    python scripts/prepare_data.py --out data/new --tokenizer data/books.tokenizer.json new/

A .py, .txt or .md file is one document, a line of a .jsonl file is one. Documents are shuffled
with a fixed seed, so that a split by range is a random one, and each ends with the end-of-document
token. The outputs are OUT.bin and OUT.idx (format: corpora/token_files.py) and OUT.tokenizer.json.

Texts are read twice, to train the tokenizer and to encode, and are not held in memory.
"""

import argparse
import array
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

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

SUFFIXES = (".py", ".txt", ".md", ".jsonl")
MOST_IDS = 2**22  # of a new tokenizer: more than any text needs, and its trainer allocates them all
TEST_FOLDERS = {"test", "tests", "idle_test"}
BATCH_BYTES = 1 << 22  # text encoded at a time: enough for all cores


class Texts:
    """The documents of some files, in a shuffled order, read when iterated over.

    Only a document's place (file, byte offset) is held in memory: 12 bytes, whatever its length.
    """

    def __init__(self, paths: list[Path], json_key: str, shuffle_seed: int):
        self.paths, self.json_key = paths, json_key
        self.undecodable = self.empty = 0
        lines = [_line_starts(path) if path.suffix == ".jsonl" else [0] for path in paths]
        counts = [len(starts) for starts in lines]
        order = np.random.RandomState(shuffle_seed).permutation(sum(counts))
        self._file = np.repeat(np.arange(len(paths), dtype=np.int32), counts)[order]
        self._offset = np.concatenate([np.asarray(starts, np.int64) for starts in lines])[order]

    def __len__(self) -> int:
        return len(self._file)

    def __iter__(self) -> Iterator[str | None]:
        """Each document's text; None for one that is empty or not UTF-8, which is counted."""
        self.undecodable = self.empty = 0
        for file, offset in zip(self._file, self._offset):
            path = self.paths[file]
            try:
                text = self._read(path, int(offset))
            except UnicodeDecodeError:
                self.undecodable += 1
                yield None
                continue
            self.empty += not text.strip()
            yield text if text.strip() else None

    def _read(self, path: Path, offset: int) -> str:
        if path.suffix != ".jsonl":
            return path.read_bytes().decode("utf-8")
        with open(path, "rb") as file:
            file.seek(offset)
            line = file.readline().decode("utf-8")
        try:
            text = json.loads(line)[self.json_key]
        except json.JSONDecodeError as error:
            raise UserError(f"{_place(path, offset)} is not JSON: {error}") from None
        except (KeyError, TypeError):
            raise UserError(f"{_place(path, offset)} has no key {self.json_key!r}") from None
        if not isinstance(text, str):
            kind = type(text).__name__
            raise UserError(f"{_place(path, offset)}: {self.json_key!r} is a {kind}, not a text")
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
    with open(path, "rb") as file:
        line = file.read(offset).count(b"\n") + 1
    return f"{path}:{line}"


def find_files(paths: list[str], stdlib: bool) -> list[Path]:
    """The text files named by `paths` or in folders of them, sorted; UserError if there is none."""
    found = set()
    for path in map(Path, paths):
        if path.is_dir():
            found.update(_walk(path, skip=set()))
        elif not path.exists():
            raise UserError(f"{path} does not exist")
        elif path.suffix not in SUFFIXES:
            raise UserError(f"{path} is not one of {', '.join(SUFFIXES)}")
        else:
            found.add(path.resolve())
    if stdlib:
        skip = TEST_FOLDERS | {"site-packages", "dist-packages"}
        library = _walk(Path(sysconfig.get_path("stdlib")), skip)
        found.update(path for path in library if path.suffix == ".py")
    if not found:
        raise UserError(f"no {', '.join(SUFFIXES)} file in {' '.join(paths)}")
    return sorted(found)


def _walk(folder: Path, skip: set[str]) -> Iterator[Path]:
    """Text files below a folder, except in hidden folders (.git, .venv)."""
    for base, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        for name in files:
            path = Path(base, name)
            if path.suffix in SUFFIXES and path.is_file():
                yield path.resolve()


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
    total, size, batch = 0, 0, []

    def flush() -> None:
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            writer.add_document(np.append(encoding.ids, end))
        batch.clear()

    for text in progress.track(texts, len(texts), description="encoding"):
        if text is None:
            continue
        batch.append(text)
        size += len(text.encode())
        if size >= BATCH_BYTES:
            flush()
            total, size = total + size, 0
    flush()
    return total + size


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; UserError if options do not go together."""
    parser = Parser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help=f"files or folders of {', '.join(SUFFIXES)}")
    add("--out", required=True, metavar="PREFIX", help="write PREFIX.bin, .idx, .tokenizer.json")
    add("--stdlib", action="store_true", help="add Python's standard library, without its tests")
    add("--vocab-size", type=int, metavar="N", help="ids of the new tokenizer (default: 8192)")
    add("--tokenizer", metavar="FILE", help="use this tokenizer and train none")
    add("--tokenizer-mb", type=float, default=100, metavar="MB", help="text to train it on (100)")
    add("--end-token", default="<|endoftext|>", help="ends every document (<|endoftext|>)")
    add("--json-key", default="text", help="key of the text in .jsonl lines (text)")
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
    begin = time.perf_counter()
    texts = Texts(find_files(options.paths, options.stdlib), options.json_key, options.shuffle_seed)
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
            # An older corpus of this name must not remain beside the new tokenizer.
            Path(options.out + ".idx").unlink(missing_ok=True)
            tokenizer.save(options.out + ".tokenizer.json")
    seconds = time.perf_counter() - begin
    print(
        f"{options.out}: {writer.documents:,} documents, {writer.tokens:,} tokens, "
        f"{size / writer.tokens:.2f} bytes/token, {seconds:.1f} s; "
        f"skipped {texts.undecodable} not in UTF-8, {texts.empty} empty"
    )
    print(f"train with: --data {options.out} --vocab-size {vocab_size}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        exit_with(error)
    except OSError as error:  # a file that cannot be read, a disk that is full
        exit_with(UserError(str(error)))
