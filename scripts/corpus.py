"""Shows, verifies and joins corpora: pairs PREFIX.bin, PREFIX.idx that `train.py --data` reads.

    python scripts/corpus.py show data/books --seq-length 2048
    python scripts/corpus.py verify data/books data/news
    python scripts/corpus.py merge --out data/all data/books data/news
    python scripts/corpus.py split --out data/part data/books --shares 9,1
    python scripts/corpus.py order --phases months.toml ...      (the options of train.py)

`order` says which epochs of each corpus the phases of a run will read, and which corpora are read
more often than max_epochs of the file says. With --resume it goes on from a checkpoint.

prepare_data.py writes PREFIX.sha256 beside the pair, in the format of sha256sum; `verify` reads
the pair from end to end and compares.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from base import errors  # first: it ends a Python that is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    import numpy as np

    from base.cli import Parser, check_decoded
    from base.errors import CorpusError, UserError, exit_with, printable
    from base.paths import check_folder
    from checkpointing.resumed import inherited_options
    from config.command_line import parse_request
    from config.corpus_record import SETTINGS, CorpusRecord, form_of
    from corpora.sample_order import split_ranges
    from corpora.token_files import IndexedDataset, IndexedDatasetWriter, checksums_of
    from corpora.tokenizer_files import NAME, read_settings, read_text, write_settings


def run(main: Callable[[list[str]], None]) -> None:
    """Run a script's main function on the command line: an error of the user or of a file is one
    sentence and exit status 2.
    """
    try:
        with errors.sentences():
            main(sys.argv[1:])
    except OSError as error:  # a file that cannot be read, a disk that is full
        exit_with(CorpusError(str(error)))


def check_out(prefix: str, example: str = "data/books") -> None:
    """UserError unless files PREFIX.* can be written."""
    check_decoded("--out", prefix)
    if not os.path.basename(prefix):
        raise UserError(f"--out {prefix} is a folder: name a prefix in it, as {example}")
    check_folder("the folder of --out,", os.path.dirname(prefix) or ".")


def note_replaced(prefix: str) -> None:
    """Print a line on stderr if a corpus has this prefix already, before it is written anew."""
    tokens = Path(f"{prefix}.bin")
    if tokens.exists():
        size = f"{tokens.stat().st_size:,} bytes"
        note = f"note: {tokens} is there ({size}): this corpus takes its place when it is complete"
        print(printable(note), file=sys.stderr)


def write_checksums(prefix: str) -> None:
    """Write the file of checksums beside a pair."""
    partial = f"{prefix}.{os.getpid()}.partial.sha256"
    Path(partial).write_bytes(checksums_of(prefix))
    os.replace(partial, prefix + ".sha256")


def verify(prefix: str) -> str:
    """Check a pair from end to end; a line that says what was checked. UserError."""
    dataset = IndexedDataset(prefix)
    sums = Path(prefix + ".sha256")
    if not sums.exists():
        return f"{prefix}: the index fits the tokens; no {sums.name} to compare with"
    wanted = {}
    for line in sums.read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        wanted[name] = digest
    for suffix in (".bin", ".idx"):
        path = prefix + suffix
        expected = wanted.get(os.path.basename(path), "missing")
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            short = f"{found[:16]}..., but {sums} has {expected[:16]}..."
            raise CorpusError(
                f"{path} has the SHA-256 {short}: it has changed since it was written"
            )
    return f"{prefix}: {len(dataset):,} sequences, {dataset.tokens:,} tokens, checksums equal"


def show(prefix: str, seq_length: int) -> str:
    """Print what a corpus holds, and how many samples an epoch of it has."""
    dataset = IndexedDataset(prefix)
    lengths = np.diff(np.append(0, np.cumsum(dataset.lengths, dtype=np.int64))[dataset.documents])
    shown = [0, 0, 0, 0]
    if len(lengths):
        shown = np.percentile(lengths, [0, 50, 90, 100]).astype(int).tolist()
    samples = max(0, dataset.tokens - 1) // seq_length
    return (
        f"{prefix}: {dataset.tokens:,} tokens of type {dataset.token_type}, "
        f"{len(lengths):,} documents, {len(dataset):,} sequences\n"
        f"tokens in a document: {shown[0]:,} to {shown[3]:,}, half have at most {shown[1]:,}, "
        f"nine of ten at most {shown[2]:,}\n"
        f"samples of seq-length {seq_length}: {samples:,} in an epoch"
    )


def refuse_inputs(out: str, prefixes: list[str]) -> None:
    """UserError if writing the pair `out` would write over one of these pairs, also by a link."""
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            written, read = out + suffix, prefix + suffix
            if os.path.exists(written) and os.path.exists(read) and os.path.samefile(written, read):
                raise UserError(
                    f"--out {out} is the input {prefix} itself, and would be written over: name "
                    f"another --out"
                )


def copy(parts: list[tuple[IndexedDataset, range]], out: str) -> str:
    """Write the documents of these ranges, one after the other, as a new pair."""
    types = {part.token_type for part, _ in parts}
    if len(types) > 1:
        kinds = ", ".join(f"{part.prefix} {part.token_type}" for part, _ in parts)
        raise CorpusError(f"these corpora have tokens of different types: {kinds}")
    (kind,) = types
    Path(out + ".sha256").unlink(missing_ok=True)  # an older pair of this name had it
    if kind not in (np.dtype("<u2"), np.dtype("<i4")):
        raise CorpusError(f"tokens of type {kind} cannot be written, only uint16 and int32")
    with IndexedDatasetWriter(out, 65499 if kind.itemsize == 2 else 2**31) as writer:
        writer.vocab_size = 2 ** (16 if kind.itemsize == 2 else 31)
        for part, documents in parts:
            for document in documents:
                sequences = range(*part.documents[document : document + 2].tolist())
                writer.add_document(*(part.get(sequence) for sequence in sequences))
    write_checksums(out)
    lines = [f"{out}: {writer.documents:,} documents, {writer.tokens:,} tokens"]
    lines += _copy_settings([part.prefix for part, _ in parts], out, writer.largest_id)
    return "\n".join(lines)


def _copy_settings(prefixes: list[str], out: str, largest: int) -> list[str]:
    """Write the tokenizer and the settings that these corpora share beside a new pair.

    largest: the largest id of the pair. Return lines on what they do not share.
    """
    settings = [read_settings(f"{prefix}.{NAME}") for prefix in prefixes]
    tokenizers = [read_text(f"{prefix}.{NAME}") for prefix in prefixes]
    paths = [Path(f"{out}{suffix}") for suffix in (f".{NAME}", SETTINGS)]
    for path in paths:  # an older pair of this name had them
        path.unlink(missing_ok=True)
    first, text = settings[0], tokenizers[0]
    if all(each.documents == CorpusRecord() for each in settings) and text is None:
        return []
    if any(other != text for other in tokenizers):
        return [f"{', '.join(prefixes)} have different tokenizers: none is written beside {out}"]
    ends = {(each.documents.begin, each.documents.end) for each in settings}
    if len(ends) > 1:
        both = f"documents of {', '.join(prefixes)} begin or end with different tokens"
        return [f"{both}: neither these nor a tokenizer are written beside {out}"]
    if text is not None:
        paths[0].write_text(text, encoding="utf-8")
    record = replace(first.documents, largest_id=largest, special_tokens=form_of(prefixes))
    write_settings(str(paths[1]), replace(first, documents=record))
    return []


def main(arguments: list[str]) -> None:
    """Do one command; raises UserError."""
    if arguments[:1] == ["order"] and not {"-h", "--help"} & set(arguments):
        config = parse_request(arguments[1:], resumed=inherited_options).config
        from corpora import phase_table  # it imports torch

        print("\n".join(phase_table.table(config)))
        return
    form = argparse.RawDescriptionHelpFormatter
    text, _, usage = (__doc__ or "").partition("\n\n")
    parser = Parser(description=text, epilog=usage, formatter_class=form, allow_abbrev=False)
    parser.add_argument("command", choices=("show", "verify", "merge", "split", "order"))
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX")
    parser.add_argument("--out", metavar="PREFIX", help="output of merge; split adds .0, .1, ...")
    parser.add_argument("--seq-length", type=int, default=2048, help="for show (default: 2048)")
    parser.add_argument("--shares", default="95,5", help="for split, up to three (default: 95,5)")
    options = parser.parse_intermixed_args(arguments)
    if options.seq_length < 1:
        raise UserError(f"--seq-length({options.seq_length}) must be at least 1")
    if options.command in ("show", "verify"):
        for prefix in options.prefixes:
            if options.command == "verify":
                print(printable(verify(prefix)))
            else:
                print(printable(show(prefix, options.seq_length)))
        return
    if not options.out or not os.path.basename(options.out):
        raise UserError(f"{options.command} needs --out PREFIX, as data/books")
    check_out(options.out)
    shares = options.shares.count(",") + 1
    outs = [options.out] + [f"{options.out}.{number}" for number in range(shares)]
    for out in outs:
        refuse_inputs(out, options.prefixes)
    for out in outs[:1] if options.command == "merge" else outs[1:]:
        note_replaced(out)
    parts = [IndexedDataset(prefix) for prefix in options.prefixes]
    every = [(part, range(len(part.documents) - 1)) for part in parts]
    if options.command == "merge":
        print(copy(every, options.out))
        return
    if len(parts) > 1:
        raise UserError(f"split takes one PREFIX, not {len(parts)}")
    for number, documents in enumerate(split_ranges(options.shares, len(every[0][1]))[:shares]):
        print(copy([(parts[0], documents)], f"{options.out}.{number}"))


if __name__ == "__main__":
    run(main)
