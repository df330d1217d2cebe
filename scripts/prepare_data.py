"""Turn text into a corpus that `train.py --data` reads.

    python scripts/prepare_data.py --out data/stdlib --stdlib
    python scripts/prepare_data.py --out data/books --vocab-size 32000 books/ more.jsonl
    python scripts/prepare_data.py --out data/new --tokenizer data/books.tokenizer.json new/

A .py, .txt or .md file is one document, a line of a .jsonl file and a row of a table are one (all
formats: corpora/text_sources.py; tokenizers: scripts/encoders.py; --as-text .c adds a kind of one
document in a file). Documents are shuffled with a fixed seed, so that a split by range is a random
one. Each begins with the token that the tokenizer puts before a text, if there is one, and ends
with the end-of-document token. The outputs are OUT.bin and OUT.idx (format:
corpora/token_files.py), OUT.tokenizer.json, OUT.tokenizer_config.json with what the corpus says of
its documents (config/corpus_record.py), and OUT.sha256 (scripts/corpus.py). Names of special tokens
in texts are text, or with --special-tokens ids these tokens.

All texts are first copied into OUT.partial.documents, which needs that much room and is removed at
the end, and are not held in memory. What is done is in OUT.partial.*: after a kill the same command
goes on from there. Ctrl-C ends with status 75.
"""

import argparse
import os
import shlex
import signal
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

# Python puts this script's folder on the path; the modules that it uses are in its parent.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from base import errors  # first: it ends a Python that is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from base.cli import Parser
    from base.errors import CorpusError, FileError, UserError, printable
    from config.corpus_record import IDS, TEXT, CorpusRecord
    from corpora.encoder import END, Encoder
    from corpora.text_sources import (
        BY_STDIN,
        HIDDEN,
        LINES,
        SHOWN,
        TOKENS,
        check_lines,
        check_order_of_rows,
        kind_of,
        not_known,
        open_file,
        walk,
        without_links,
    )
    from corpora.tokenizer_files import Settings, write_settings
    from scripts.corpus import check_out, note_replaced, run
    from scripts.documents import Documents, copy_documents
    from scripts.encode_documents import PartialPair, Source, chunks, encode_all
    from scripts.encoders import load_encoder, settings_of
    from scripts.partial_job import PartialJob
    from scripts.progress import ByteProgress

# Numbers that an option takes. A new tokenizer has an id for each byte and for the end token; its
# trainer allocates memory for all ids that it may have.
LIMITS = {
    "vocab_size": (257, 2**22),
    "tokenizer_mb": (1e-6, 1e9),
    "processes": (1, 1024),
    "skip_bad": (0, 10**9),
    "shuffle_seed": (0, 2**32 - 1),
}
TEST_FOLDERS = {"test", "tests", "idle_test"}
RULE = 4  # version of what this program does: it does not go on from what another one has left


def find_files(
    paths: list[str],
    stdlib: bool,
    unknown: Counter[str] | None = None,
    as_text: Sequence[str] = (),
    json_key: str = "text",
) -> list[Path]:
    """The text files named by `paths` or in folders of them, sorted; UserError if there is none.

    unknown: counts, by their suffix, the files in folders that are not of a known kind. as_text:
    ends of names of files that are one document each. json_key: of the text in JSON lines.
    """
    found, unknown = set(), Counter() if unknown is None else unknown
    for path in map(Path, paths):
        if str(path) == "-":
            found.add(path)
        elif path.is_dir():
            found.update(walk(path, set(), unknown, as_text, json_key))
        elif not path.exists():
            raise FileError(f"{path} does not exist")
        else:
            kind = kind_of(path, as_text)
            if kind is None:
                raise not_known(path)
            open_file(path, BY_STDIN if kind in LINES else "").close()
            check_order_of_rows(path)
            if kind == ".json":
                check_lines(path)
            found.add(without_links(path, as_text))
    if stdlib:
        skip = TEST_FOLDERS | {"site-packages", "dist-packages"}
        library = walk(Path(sysconfig.get_path("stdlib")), skip, Counter(), links=True)
        found.update(path for path in library if path.suffix == ".py")
    if not found:
        raise CorpusError(f"no {SHOWN} file in {' '.join(paths)}")
    return sorted(found)


def train_tokenizer(documents: Documents, options: argparse.Namespace) -> Tokenizer:
    """A byte-level BPE of at most --vocab-size ids, trained on the first --tokenizer-mb of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=[options.end_token or END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    limit = int(options.tokenizer_mb * 1e6)
    progress = ByteProgress("tokenizer", min(limit, documents.bytes))

    def sample() -> Iterator[str]:
        """The first texts, of about --tokenizer-mb together."""
        for piece in documents.pieces(None):
            if isinstance(piece.content, str):
                yield piece.content
                progress.advance(piece.size)
            if progress.done >= limit:
                return

    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; UserError if options do not go together."""
    parser = Parser.described(__doc__)
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", help=f"files or folders of {SHOWN}; - for stdin")
    add("--out", required=True, metavar="PREFIX", help="write PREFIX.bin, .idx, .tokenizer.json")
    add("--stdlib", action="store_true", help="add Python's standard library, without its tests")
    add("--vocab-size", type=int, metavar="N", help="size of the new vocabulary (default: 8192)")
    add("--tokenizer", metavar="NAME", help="use this tokenizer: a file, a folder, ...")
    add("--tokenizer-mb", type=float, default=100, metavar="MB", help="MB to train it on (100)")
    add("--end-token", help="end-of-document token (the tokenizer's, or <|endoftext|>)")
    forms = {"choices": (TEXT, IDS), "default": TEXT}
    add("--special-tokens", **forms, help="what their names in texts become (text)")
    text = "also read files with this ending, such as .c or .1, each as one document"
    add("--as-text", action="append", default=[], metavar="SUFFIX", help=text)
    add("--json-key", default="text", help="key of the text in .jsonl lines (text)")
    add("--hdf5-key", default="tokens", help="array of tokens in .h5 files (tokens)")
    add("--processes", type=int, default=1, help="that tokenize (1, with threads)")
    add("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad lines or rows (0)")
    add("--shuffle-seed", type=int, default=1234, help="seed of the documents' order (1234)")
    options = parser.parse_args(arguments)
    if not options.paths and not options.stdlib:
        raise CorpusError("nothing to prepare: name files or folders, or give --stdlib")
    if options.tokenizer and options.vocab_size is not None:
        raise UserError("--vocab-size is for a new tokenizer; --tokenizer has its own")
    options.vocab_size_given = options.vocab_size is not None
    if options.vocab_size is None:
        options.vocab_size = 8192
    for name, (least, most) in LIMITS.items():
        value = getattr(options, name)
        if not least <= value <= most:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag}({value}) must be in {least}..{most}")
    check_out(options.out)
    return options


def main(arguments: list[str]) -> None:
    """Read texts, train or load the tokenizer, write the corpus; raises UserError.

    SystemExit with status 75 if a signal has stopped it: the same command goes on.
    """
    options = parse(arguments)
    began = time.perf_counter()
    unknown = Counter[str]()
    paths = find_files(options.paths, options.stdlib, unknown, options.as_text, options.json_key)
    if unknown:
        print(printable(_not_read(unknown)), flush=True)
    job = PartialJob(options.out, _facts(options, paths))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if job.goes_on:
            print(f"going on from {job.path}", flush=True)
        if "published" not in job.state:
            note_replaced(options.out)
            prepare(job, paths, options)
        job.publish()
        job.remove()
    except UserError:
        job.remove()
        raise
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on from {options.out}.partial.*", flush=True)
        sys.exit(75)
    finally:
        signal.signal(signal.SIGTERM, before)
        job.close()
    summary, _, advice = job.state["summary"].partition("\n")
    print(f"{summary}; {time.perf_counter() - began:.1f} s\n{advice}")


def _not_read(unknown: Counter[str]) -> str:
    """Return a line on the files of folders that are left out; unknown: see `walk`."""
    counts = [f"{count} {name}" for name, count in sorted(unknown.items()) if name != HIDDEN]
    lines = []
    if counts:
        lines.append(f"not read, because their kind is not known: {', '.join(counts)}")
    if unknown[HIDDEN]:
        lines.append(f"not read, because their names begin with a dot: {unknown[HIDDEN]} files")
    return "\n".join(lines)


def _facts(options: argparse.Namespace, paths: list[Path]) -> dict:
    """Return what determines the result: the files of another job are of no use."""
    irrelevant = ("out", "paths", "stdlib", "processes")
    facts = {name: value for name, value in vars(options).items() if name not in irrelevant}
    named = Path(options.tokenizer or "")
    own = [named, Path(settings_of(options.tokenizer or "bytes").path)]
    if options.tokenizer and named.is_dir():
        own = sorted(named.iterdir())
    files = []
    for path in [*paths, *own]:
        if path.is_file():
            files.append((str(path), path.stat().st_size, path.stat().st_mtime_ns))
    if Path("-") in paths:  # nobody knows whether it is the same
        files.append(("-", os.getpid(), time.time_ns()))
    return facts | {"rule": RULE, "files": files}


def prepare(job: PartialJob, paths: list[Path], options: argparse.Namespace) -> None:
    """All of it but the names of the outputs, from where the job's state ends."""
    vocab_size = check_tokens(paths, options)
    source = None
    encoder = None
    settings = Settings("")
    if options.tokenizer:
        source = Source(options.tokenizer, options.end_token, options.special_tokens)
        encoder = load_encoder(*source)
        vocab_size = encoder.vocab_size
        encoder.tokenizer.save(job.partial("tokenizer.json"))
        settings = settings_of(options.tokenizer)
        theirs = settings.documents.special_tokens
        if theirs not in (None, options.special_tokens):
            differ = f"{options.special_tokens}, but the corpus of this tokenizer has {theirs}"
            print(printable(f"note: --special-tokens {differ}"), file=sys.stderr, flush=True)
    copy_documents(job, paths, options, vocab_size)
    documents = Documents(job, options.shuffle_seed)
    try:
        if source is None and not documents.are_tokens:
            new = job.partial("tokenizer.json")
            source = Source(new, options.end_token, options.special_tokens)
            if not job.state.get("trained"):
                train_tokenizer(documents, options).save(source.name)
                job.save(trained=True)
            encoder = load_encoder(*source)
            vocab_size = encoder.vocab_size
        pair = encode(job, documents, source, encoder, vocab_size, options.processes)
    finally:
        documents.close()
    bad = job.state["copied"]["bad"]
    if bad:
        lines = [f"{place} {reason}\n" for place, reason in bad.items()]
        path = Path(job.partial("bad.txt"))
        path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    record = encoder.record if encoder else CorpusRecord()
    record = replace(record, largest_id=pair.largest)
    write_settings(job.partial("tokenizer_config.json"), replace(settings, documents=record))
    pair.finish(_summary(options, pair, documents, vocab_size, record))


def check_tokens(paths: list[Path], options: argparse.Namespace) -> int:
    """The number of ids; UserError if files hold tokens, and it is not known of which tokenizer."""
    arrays = [path for path in paths if kind_of(path, options.as_text) in TOKENS]
    if arrays and not options.tokenizer:
        if len(arrays) < len(paths):
            raise CorpusError(f"{arrays[0]} holds tokens: name their tokenizer with --tokenizer")
        if not options.vocab_size_given:
            raise CorpusError(f"{arrays[0]} holds tokens: give their --vocab-size or --tokenizer")
    return options.vocab_size


def encode(
    job: PartialJob,
    documents: Documents,
    source: Source | None,
    encoder: Encoder | None,
    vocab_size: int,
    processes: int,
) -> PartialPair:
    """Write every document; UserError if there is none."""
    pair = PartialPair(job, vocab_size, encoder and encoder.end_token)
    try:
        progress = ByteProgress("encoding", documents.bytes, documents.bytes_before(pair.next))
        every = chunks(documents.pieces(encoder, pair.next))
        for chunk, encoded in encode_all(every, source, processes):
            pair.add(chunk, encoded)
            progress.advance(chunk.size)
        pair.save()
    finally:
        pair.close()
    if not pair.documents:
        copied = job.state["copied"]
        count = copied["empty"] + copied["undecodable"]
        raise CorpusError(f"none of the {count} documents has text in UTF-8")
    return pair


def _summary(
    options: argparse.Namespace,
    pair: PartialPair,
    documents: Documents,
    vocab_size: int,
    record: CorpusRecord,
) -> str:
    """Return lines: what was made, which special tokens texts name, and how to train with it."""
    copied = pair.job.state["copied"]
    made = f"{options.out}: {pair.documents:,} documents, {pair.tokens:,} tokens"
    if documents.text_bytes:
        made += f", {documents.text_bytes / pair.tokens:.2f} bytes/token"
    made += f"; skipped {copied['undecodable']} not in UTF-8, {copied['empty']} empty"
    if copied["bad"]:
        made += f", {len(copied['bad'])} bad ({options.out}.bad.txt)"
    if pair.forced:
        made += f"; {pair.forced} cuts of long documents where a token may differ"
    form = record.special_tokens
    other = f"; --special-tokens {IDS} makes them tokens" if form == TEXT else ""
    lines = pair.named.lines(f"of {pair.documents:,} documents", record.end, form, other)
    lines = [printable(line) for line in lines]
    train = f"train with: --data {shlex.quote(options.out)} --vocab-size {vocab_size}"
    return "\n".join([made, *lines, train])


if __name__ == "__main__":
    run(main)
