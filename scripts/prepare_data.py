"""Turn text into a corpus that `train.py --data` reads.

    python scripts/prepare_data.py --out data/stdlib --stdlib
    python scripts/prepare_data.py --out data/books --vocab-size 32000 books/ more.jsonl
    python scripts/prepare_data.py --out data/new --tokenizer data/books.tokenizer.json new/

A .py, .txt or .md file is one document, a line of a .jsonl file and a row of a table are one (all
formats: scripts/text_sources.py; tokenizers: scripts/encoders.py). Documents are shuffled with a
fixed seed, so that a split by range is a random one, and each ends with the end-of-document token.
The outputs are OUT.bin and OUT.idx (format: corpora/token_files.py), OUT.tokenizer.json,
and OUT.sha256 (scripts/corpus.py).

Texts are read twice, to train the tokenizer and to encode, and are not held in memory. What is done
is in OUT.partial.*: after a kill the same command goes on from there. Ctrl-C ends with status 75.
"""

import argparse
import codecs
import os
import re
import signal
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Python puts this script's folder on the path; the modules that it uses are in its parent.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import messages  # first: it ends a Python that is too old

with messages.installed():
    import numpy as np
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from config.messages import Parser, UserError, check_folder
    from scripts.corpus import run
    from scripts.documents import Documents, Found, Reader
    from scripts.encode_documents import Work, chunks, encode_all
    from scripts.encoders import END_TOKEN, Encoder, TokenizersEncoder, load_encoder
    from scripts.journal import Journal
    from scripts.partial_pair import PartialPair, publish
    from scripts.progress import Progress
    from scripts.text_sources import (
        RECORDS,
        SHOWN,
        TOKENS,
        BadTexts,
        Spool,
        is_read_in_place,
        kind_of,
        not_known,
        walk,
    )

# A new tokenizer has at most this number of ids: more than any text needs. Its trainer allocates
# memory for all of them.
MOST_IDS = 2**22
TEST_FOLDERS = {"test", "tests", "idle_test"}
RULE = 1  # version of what this program does: it does not go on from what another one has left


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
            raise not_known(path)
        else:
            found.add(path.resolve())
    if stdlib:
        skip = TEST_FOLDERS | {"site-packages", "dist-packages"}
        library = walk(Path(sysconfig.get_path("stdlib")), skip, Counter())
        found.update(path for path in library if path.suffix == ".py")
    if not found:
        raise UserError(f"no {SHOWN} file in {' '.join(paths)}")
    return sorted(found)


def train_tokenizer(
    documents: Documents, reader: Reader, options: argparse.Namespace, bad: BadTexts
) -> TokenizersEncoder:
    """A byte-level BPE of at most --vocab-size ids, trained on the first --tokenizer-mb of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end_token = options.end_token or END_TOKEN
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=[end_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    limit, found = int(options.tokenizer_mb * 1e6), Found()
    with Progress("tokenizer", min(limit, documents.size)) as progress:

        def sample() -> Iterator[str]:
            """The first texts, of about --tokenizer-mb together."""
            read = 0
            for text in _texts(documents, reader, found):
                bad.add_all(found.bad)
                yield text
                size = len(text.encode())
                progress.advance(size)
                read += size
                if read >= limit:
                    return
            bad.add_all(found.bad)

        tokenizer.train_from_iterator(sample(), trainer)
    return TokenizersEncoder(tokenizer, end_token)


def _texts(documents: Documents, reader: Reader, found: Found) -> Iterator[str]:
    """Every text; a long one in parts that end before a space or at the end of a line."""
    for first in range(0, len(documents), 1000):
        places, begin = documents.places(first, first + 1000), 0
        for row in [*reader.long_ones(places), len(places)]:
            yield from (t for t in reader.read(places[begin:row], found) if isinstance(t, str))
            if row < len(places):
                yield from _parts(reader, places[row], found)
            begin = row + 1


def _parts(reader: Reader, place: np.ndarray, found: Found) -> Iterator[str]:
    if reader.is_tokens(place) or not reader.check_long(place, found):
        return
    decoder, text = codecs.getincrementaldecoder("utf-8")(), ""
    for block in reader.parts(place):
        text += decoder.decode(block)
        spaces = [match.start() for match in re.finditer(r"\s(?=\S)", text[-1000:])]
        end = max(0, len(text) - 1000) + (spaces[-1] if spaces else 1000)
        yield text[:end]
        text = text[end:]
    yield text


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; UserError if options do not go together."""
    parser = Parser.described(__doc__)
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help=f"files or folders of {SHOWN}; - for stdin")
    add("--out", required=True, metavar="PREFIX", help="write PREFIX.bin, .idx, .tokenizer.json")
    add("--stdlib", action="store_true", help="add Python's standard library, without its tests")
    add("--vocab-size", type=int, metavar="N", help="ids of the new tokenizer (default: 8192)")
    add("--tokenizer", metavar="NAME", help="use this one, and train none: a file, a folder, ...")
    add("--tiktoken-pattern", metavar="NAME", help="gpt2, cl100k or a pattern, of FILE.tiktoken")
    add("--tokenizer-mb", type=float, default=100, metavar="MB", help="text to train it on (100)")
    add("--end-token", help="ends every document (that of the tokenizer, or <|endoftext|>)")
    add("--json-key", default="text", help="key of the text in .jsonl lines (text)")
    add("--hdf5-key", default="tokens", help="array of tokens in .h5 files (tokens)")
    add("--processes", type=int, default=1, help="that encode (1, with threads of the tokenizer)")
    add("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad lines or rows (0)")
    add("--shuffle-seed", type=int, default=1234, help="seed of the documents' order (1234)")
    options = parser.parse_args(arguments)
    if not options.paths and not options.stdlib:
        raise UserError("nothing to prepare: name files or folders, or give --stdlib")
    if options.tokenizer and options.vocab_size is not None:
        raise UserError("--vocab-size is for a new tokenizer; --tokenizer has its own")
    options.vocab_size_given = options.vocab_size is not None
    if options.vocab_size is None:
        options.vocab_size = 8192
    if options.vocab_size < 257:
        raise UserError(f"--vocab-size({options.vocab_size}) must hold 256 bytes and the end token")
    if not 1 <= options.processes <= 1024:
        raise UserError(f"--processes({options.processes}) must be in 1..1024")
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
    """Read texts, train or load the tokenizer, write the corpus; raises UserError.

    SystemExit with status 75 if a signal has stopped it: the same command goes on.
    """
    options, began = parse(arguments), time.perf_counter()
    unknown = Counter[str]()
    paths = find_files(options.paths, options.stdlib, unknown)
    if unknown:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in sorted(unknown.items()))
        print(f"not read, because their kind is not known: {kinds}", flush=True)
    journal = Journal(options.out, _facts(options, paths))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare(journal, paths, options, began)
        journal.remove()
    except UserError:
        journal.remove()
        raise
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on from {options.out}.partial.*", flush=True)
        sys.exit(75)
    finally:
        signal.signal(signal.SIGTERM, before)
        journal.close()


def _facts(options: argparse.Namespace, paths: list[Path]) -> dict:
    """Return what determines the result: the journal of another job is of no use."""
    names = "end_token", "json_key", "hdf5_key", "tiktoken_pattern"
    facts = {name: getattr(options, name) for name in names}
    facts |= {"rule": RULE, "tokenizer": options.tokenizer, "vocab_size": options.vocab_size}
    facts |= {"megabytes": options.tokenizer_mb, "seed": options.shuffle_seed}
    named = Path(options.tokenizer or "")
    own = sorted(named.iterdir()) if options.tokenizer and named.is_dir() else [named]
    facts["files"] = []
    for path in [*paths, *own]:
        if path.is_file():
            about = path.stat()
            facts["files"].append([str(path), about.st_size, about.st_mtime_ns])
        elif str(path) == "-":  # nobody knows whether it is the same
            facts["files"].append(["-", os.getpid(), time.time()])
    return facts


def prepare(journal: Journal, paths: list[Path], options: argparse.Namespace, began: float) -> None:
    """All of it, from where the journal ends; began: on the clock of what it prints."""
    if journal.entries:
        print(f"going on from {journal.path}", flush=True)
    if not journal.last("published"):
        bad = BadTexts(options.skip_bad)
        paths = copy_streams(journal, paths, options, bad)
        documents = Documents(paths, options.shuffle_seed, options.hdf5_key)
        reader = Reader(paths, options.json_key, options.hdf5_key)
        encoder = find_encoder(journal, documents, reader, options, bad)
        work = Work(reader, encoder, encoder.vocab_size if encoder else options.vocab_size)
        pair = encode(journal, documents, work, options.processes, bad)
        if bad.found:
            bad.write(journal.partial("bad.txt"))
        pair.finish(_summary(options, pair, bad, work.vocab_size))
    publish(journal)
    summary, _, advice = journal.last("published")["summary"].partition("\n")
    print(f"{summary}; {time.perf_counter() - began:.1f} s\n{advice}")


def copy_streams(
    journal: Journal, paths: list[Path], options: argparse.Namespace, bad: BadTexts
) -> list[Path]:
    """Copy what cannot be read in place to one file beside the output; the files to read then."""
    streams = [path for path in paths if not is_read_in_place(path)]
    if not streams:
        return paths
    target, done = journal.partial(RECORDS.rpartition(".")[2]), 0
    for entry in journal.entries:
        done += "copied" in entry
        bad.add_all(entry.get("bad_of_copy", {}))
    spool = Spool(target, journal.last("copied").get("copied", 0))
    try:
        with Progress("copying", sum(_size(path) for path in streams)) as progress:
            for path in streams[done:]:
                known = len(bad.found)
                size = spool.copy(path, options.json_key, bad)
                own = dict(list(bad.found.items())[known:])
                journal.add({"copied": size, "bad_of_copy": own})
                progress.advance(_size(path))
    finally:
        spool.close()
    return [path for path in paths if is_read_in_place(path)] + [Path(target)]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def find_encoder(
    journal: Journal,
    documents: Documents,
    reader: Reader,
    options: argparse.Namespace,
    bad: BadTexts,
) -> Encoder | None:
    """The tokenizer: named, of a killed run, or trained now; saved beside the output.

    None if all documents are tokens already and it is not named. UserError if some are, and a
    tokenizer would be trained.
    """
    arrays = [path for path, kind in zip(reader.paths, documents.kinds) if kind in TOKENS]
    if arrays and not options.tokenizer:
        if len(arrays) < len(reader.paths):
            raise UserError(f"{arrays[0]} holds tokens: name their tokenizer with --tokenizer")
        if not options.vocab_size_given:
            raise UserError(f"{arrays[0]} holds tokens: give their --vocab-size or --tokenizer")
        return None
    if options.tokenizer:
        encoder = load_encoder(options.tokenizer, options.end_token, options.tiktoken_pattern)
    elif journal.last("trained"):
        trained = journal.partial("tokenizer.json")
        return load_encoder(trained, options.end_token, None)
    else:
        encoder = train_tokenizer(documents, reader, options, bad)
    encoder.save(journal.partial(f"tokenizer.{encoder.suffix}"))
    journal.add({"trained": True})
    return encoder


def encode(
    journal: Journal, documents: Documents, work: Work, processes: int, bad: BadTexts
) -> PartialPair:
    """Write every document; UserError if there is none, or more bad ones than are to be skipped."""
    pair = PartialPair(journal, work.vocab_size)
    bad.add_all(pair.found.bad)
    try:
        passed = documents.bytes_before(pair.next[0]) + pair.next[1]
        with Progress("encoding", documents.size, passed) as progress:
            every = chunks(documents, work.reader, work.encoder, pair.next)
            for chunk, encoded in encode_all(every, work, processes):
                bad.add_all(encoded.found.bad)
                pair.add(chunk, encoded)
                progress.advance(chunk.size)
        pair.save()
    finally:
        pair.close()
    if not pair.documents:
        raise UserError(f"none of the {len(documents)} documents has text in UTF-8")
    return pair


def _summary(options: argparse.Namespace, pair: PartialPair, bad: BadTexts, vocab_size: int) -> str:
    """Return two lines: what was made, and how to train with it."""
    found = pair.found
    parts = [f"{options.out}: {pair.documents:,} documents, {pair.tokens:,} tokens"]
    if found.size:
        parts[0] += f", {found.size / pair.tokens:.2f} bytes/token"
    parts += [f"skipped {found.undecodable} not in UTF-8, {found.empty} empty"]
    if bad.found:
        parts[1] += f", {len(bad.found)} bad ({options.out}.bad.txt)"
    if found.forced:
        parts += [f"{found.forced} cuts of long documents where a token may differ"]
    return f"{'; '.join(parts)}\ntrain with: --data {options.out} --vocab-size {vocab_size}"


if __name__ == "__main__":
    run(main)
