"""What a corpus says of its tokens, and what of it a run takes or compares.

    record = read("data/books")                 "documents" of data/books.tokenizer_config.json
    config, notes = with_end_token(config)      --eod-token is that of the corpora
    found = vocabulary(["data/books"])          the size of the vocabulary, and the tokenizer's file

scripts/prepare_data.py and prepare_chats.py write it. A corpus from elsewhere has none, and one of
an earlier version a part of it: what a corpus does not say is not compared.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from architecture.families import read_object
from base.errors import CorpusError, UserError
from config.phases import prefixes_of
from config.run_options import parse_eval_sets
from config.schema import Config

TEXT, IDS = "text", "ids"  # what names of special tokens in a text become: --special-tokens
SETTINGS = ".tokenizer_config.json"


@dataclass(frozen=True)
class CorpusRecord:
    """What a corpus says of its tokens; None: it does not say it.

    begin, end: the tokens with which its documents begin, and the one that ends them. end_id: the
    id of `end`. largest_id: the largest id in the corpus. special_tokens: what names of special
    tokens in its texts have become, TEXT or IDS.
    """

    begin: tuple[str, ...] | None = None
    end: str | None = None
    end_id: int | None = None
    largest_id: int | None = None
    special_tokens: str | None = None

    def facts(self) -> dict[str, Any]:
        """Return the fields that are known, as the file has them."""
        return {name: value for name, value in vars(self).items() if value is not None}


def from_facts(value: Any, where: str) -> CorpusRecord:
    """Return the record in "documents" of a tokenizer_config.json, the file `where`; UserError."""
    if value is None:
        return CorpusRecord()
    facts = value if isinstance(value, dict) else {"begin": None}
    begin, end = facts.get("begin", []), facts.get("end", "")
    if not isinstance(begin, list) or not all(isinstance(word, str) for word in [*begin, end]):
        raise CorpusError(
            f"{where}: documents is {value!r:.80}, without `begin`, a list of tokens, and `end`, "
            "a token"
        )
    for name in ("end_id", "largest_id"):
        number = facts.get(name, 0)
        if type(number) is not int or not 0 <= number < 2**31:
            raise CorpusError(
                f"{where}: documents has {name} {number!r:.40}, not a token id from 0 to "
                f"{2**31 - 1}"
            )
    if facts.get("special_tokens", TEXT) not in (TEXT, IDS):
        form = facts["special_tokens"]
        raise CorpusError(
            f"{where}: documents has special_tokens {form!r:.40}, not {TEXT} or {IDS}"
        )
    known = {name: facts[name] for name in CorpusRecord.__dataclass_fields__ if name in facts}
    return CorpusRecord(**known | {"begin": tuple(begin) if "begin" in facts else None})


def read(prefix: str) -> CorpusRecord:
    """Return what the corpus `prefix` says of itself; UserError if its file cannot be read."""
    path = prefix + SETTINGS
    if not os.path.isfile(path):
        return CorpusRecord()
    return from_facts(read_object(path).get("documents"), path)


def form_of(prefixes: list[str]) -> str | None:
    """Return what names of special tokens become in texts for a model of these corpora.

    Where one corpus has them as tokens, and another, such as one of web pages, as text, the model
    has learned the tokens. None: no corpus says it.
    """
    forms = {read(prefix).special_tokens for prefix in prefixes}
    return next((form for form in (IDS, TEXT) if form in forms), None)


def note_on_form(prefix: str, form: str | None) -> list[str]:
    """Return a note if texts of an evaluated corpus have another form than those of the model.

    form: what names of special tokens are for the model; None: that is not known.
    """
    theirs = read(prefix).special_tokens
    if form is None or theirs is None or theirs == form:
        return []
    become = {TEXT: "text", IDS: "tokens"}
    differ = f"{become[theirs]} in {prefix}, and {become[form]} for the model"
    return [f"names of special tokens are {differ}: prepare it with --special-tokens {form}"]


def _end_id(prefix: str) -> int | None:
    """Return the id of the token that ends documents of a corpus; None: it does not say so."""
    record = read(prefix)
    if record.end is None or record.end_id is not None:
        return record.end_id
    path = f"{prefix}.tokenizer.json"  # a corpus of an earlier version names the token only
    tokenizer = read_object(path) if os.path.isfile(path) else {}
    for token in tokenizer.get("added_tokens") or ():
        if token.get("content") == record.end:
            return int(token["id"])
    return None


def vocabulary(prefixes: Iterable[str]) -> tuple[int, str] | None:
    """Return the tokens of the largest tokenizer beside corpora, and its file.

    None: a corpus has no tokenizer beside it, or one in another form than `tokenizers` writes, so
    that its number of tokens is not known.
    """
    sizes: list[tuple[int, str]] = []
    for prefix in prefixes:
        path = f"{prefix}.tokenizer.json"
        if not os.path.isfile(path):
            return None
        tokenizer = read_object(path)
        model = tokenizer.get("model")
        pieces = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(pieces, dict):
            ids = list(pieces.values())
        elif isinstance(pieces, list):  # of unigrams: a piece's id is its index
            ids = list(range(len(pieces)))
        else:
            return None
        ids += [token.get("id") for token in tokenizer.get("added_tokens") or ()]
        if not ids or not all(type(number) is int and number >= 0 for number in ids):
            return None
        sizes.append((1 + max(ids), path))
    return max(sizes, default=None)


def _prefixes(config: Config) -> Iterator[str]:
    """Yield the corpora of a run: of --data, of its phases and of --eval-data."""
    yield from prefixes_of(config.data.data)
    for phase in config.plan.phases if config.plan else ():
        yield from prefixes_of(phase.data or ())
    for each in parse_eval_sets(config.data.eval_data or ()):
        yield each.prefix


def with_end_token(config: Config) -> tuple[Config, list[str]]:
    """Return the run with the --eod-token of its corpora if its masks need it; and notes.

    Raise UserError if --eod-token is not the token that ends documents of a corpus, or if none is
    given and corpora have several. A run that is resumed goes on with its own, and a note says it.
    """
    data = config.data
    needs_end = data.reset_attention or data.reset_positions or data.mask_eod_loss
    if data.eod_token is None and not needs_end:
        return config, []
    ends = {prefix: _end_id(prefix) for prefix in dict.fromkeys(_prefixes(config))}
    known = {prefix: end for prefix, end in ends.items() if end is not None}
    if data.eod_token is None:
        if not known:
            return config, []
        first, end = next(iter(known.items()))
        config = replace(config, data=replace(data, eod_token=end))
        notes = [f"eod-token {end}, with which documents of {first} end"]
    else:
        first, end, notes = "--eod-token", data.eod_token, []
    for prefix, other in known.items():
        if other == end:
            continue
        differ = f"documents of {prefix} end with the token {other} ({prefix}{SETTINGS})"
        if config.past.samples:
            notes.append(f"eod-token {end} as before, but {differ}: masks do not see their ends")
        elif first == "--eod-token":
            raise UserError(f"--eod-token {end}, but {differ}: give that one, or leave it out")
        else:
            both = f"documents of {first} end with the token {end}, {differ}"
            raise CorpusError(f"{both}: masks of documents need one token; prepare them alike")
    return config, notes
