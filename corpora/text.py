"""Turns text into token ids and back, by a tokenizer; without one, texts are numbers.

    text = Text(find_tokenizer(["runs/demo"], ["data/stdlib"]), vocab_size=8192)
    text.decode(text.encode("def main("))

A tokenizer is a file tokenizer.json of the library `tokenizers`, beside a checkpoint, or
PREFIX.tokenizer.json beside the corpus PREFIX. This module does not import torch, so that a wrong
prompt is reported before that import.
"""

import os
import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from base.cli import check_decoded
from base.errors import CorpusError, UserError
from config.corpus_record import SETTINGS, form_of, read
from config.schema import Config
from corpora import token_files
from corpora.blends import parse_blend
from corpora.encoder import Encoder
from corpora.tokenizer_files import load_tokenizer, read_settings

# A prompt of token ids, such as "17 4 250" or "17, 4, 250".
IDS = re.compile(r"\s*\d{1,18}([\s,]+\d{1,18})*\s*")
MOST_SEARCHED = 1 << 26  # bytes of a corpus whose largest id is looked for when a run starts
SAMPLE_TOKENS = 48  # the most tokens generated for a --sample-prompt in training


def find_tokenizer(folders: Iterable[str], prefixes: Iterable[str]) -> str | None:
    """Return the first tokenizer.json in `folders`, else the first PREFIX.tokenizer.json.

    Return None if none of these files exists. folders: of checkpoints. prefixes: of corpora.
    """
    paths = [os.path.join(folder, "tokenizer.json") for folder in folders]
    paths += [f"{prefix}.tokenizer.json" for prefix in prefixes]
    return next(filter(os.path.isfile, paths), None)


class Text:
    """Encodes text as token ids, and decodes ids. Without a tokenizer a text is "17 4 250".

    A prompt begins with the tokens that documents of its corpus begin with (encoder.py). end: the
    id of the token that ends a document; None without a tokenizer, or if it has no such token.
    ends: all ids with which a text may end, also those of a chat's answer.
    """

    def __init__(self, path: str | None, vocab_size: int, special_tokens: str | None = None):
        """Load the tokenizer.json at `path`; None: without a tokenizer.

        special_tokens: what their names in texts become; None: what the files beside it say. Raise
        UserError if the tokenizer has more tokens than the model, which has `vocab_size`.
        """
        self.path = path
        self.vocab_size = vocab_size
        self.encoder: Encoder | None = None
        self.end: int | None = None
        self.ends: tuple[int, ...] = ()
        if path is None:
            return
        tokenizer = load_tokenizer(path)
        size = tokenizer.get_vocab_size()
        if size > vocab_size:
            raise CorpusError(
                f"{path} has {size} tokens, but the model's vocab-size is {vocab_size}: take the "
                f"tokenizer of this model, or train a model with --vocab-size {size} or more"
            )
        settings = read_settings(path)
        self.encoder = Encoder(tokenizer, settings, path, special_tokens=special_tokens)
        self.end = self.encoder.end
        self.ends = self.encoder.ends

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None without one."""
        return None if self.encoder is None else self.encoder.tokenizer

    def encode(self, prompt: str, flag: str = "--prompt") -> list[int]:
        """Return a prompt's token ids. Without a tokenizer, the prompt is a list of token ids.

        flag: the option that gave the prompt, for error messages. Raise UserError if the prompt has
        no token ids, or an id outside the vocabulary.
        """
        check_decoded(flag, prompt)  # refuses bytes that are no text
        if self.encoder is not None:
            (ids,) = self.encoder.prompts([prompt])
            if not ids:
                raise CorpusError(f"{flag} {prompt!r} has no token of {self.path}")
            return self._checked(ids, flag)
        listed = self.numbers(prompt)
        if listed is None:
            # sample.py, whose flag is --prompt, has the option --tokenizer too.
            other_way = "--tokenizer FILE, or " if flag == "--prompt" else ""
            raise CorpusError(
                f"{flag} {prompt!r}: no tokenizer was found beside the checkpoint or the corpus: "
                f"give {other_way}token ids such as '17 4 250'"
            )
        return self._checked(listed, flag)

    def notes_on(self, texts: Sequence[str], what: str) -> list[str]:
        """Return lines on the special tokens that texts name. what: the texts, as "prompts"."""
        return [] if self.encoder is None else self.encoder.notes_on(texts, what)

    def numbers(self, text: str) -> list[int] | None:
        """Return the token ids that a text lists, such as "17 4 250"; None if it lists none."""
        if not IDS.fullmatch(text):
            return None
        return [int(word) for word in re.findall(r"\d+", text)]

    def _checked(self, ids: list[int], flag: str) -> list[int]:
        """Return the ids of the option `flag`; UserError if one is outside of the vocabulary."""
        if max(ids) >= self.vocab_size:
            raise CorpusError(
                f"{flag}: token id {max(ids)} is not below vocab-size({self.vocab_size})"
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special ones included; without a tokenizer, as numbers."""
        if self.encoder is None:
            return " ".join(map(str, ids))
        return self.encoder.tokenizer.decode(ids, skip_special_tokens=False)


# ---- In training ---------------------------------------------------------------------------------


def prefixes_of(data: tuple) -> list[str]:
    """Return the prefixes of the corpora of --data; an empty list for --data synthetic.

    A corpus's tokenizer is found by its prefix. data: the words of the option.
    """
    if data == ("synthetic",):
        return []
    prefixes, _ = parse_blend(data)
    return prefixes


def text_of_run(config: Config) -> Text:
    """Return the encoder of a run's corpus; without one, texts are numbers. Raise UserError."""
    prefixes = prefixes_of(config.data.data)
    path = find_tokenizer([], prefixes)
    return Text(path, config.model.vocab_size, form_of(prefixes) if path else None)


def prompts_of_run(config: Config) -> tuple[Text, list[list[int]]]:
    """Return the encoder of a run's corpus, and the token ids of every --sample-prompt.

    Called before torch is imported, to refuse wrong prompts early, and again when the run makes its
    samples of text. Raise UserError if a prompt has no ids, an unknown id, or seq-length ids or
    more: there must be room for the first generated token.
    """
    prompts = config.run.sample_prompt or ()
    text = text_of_run(config) if prompts else Text(None, config.model.vocab_size)
    length = config.model.seq_length
    encoded = [text.encode(prompt, "--sample-prompt") for prompt in prompts]
    for ids in encoded:
        if len(ids) >= length:
            raise CorpusError(f"--sample-prompt has {len(ids)} tokens: seq-length is {length}")
    return text, encoded


def check_ids(prefix: str, vocab_size: int) -> list[str]:
    """Raise UserError if a corpus has token ids that the model, with `vocab_size`, has not.

    Return a note if that is not known: the corpus does not say its largest id, its tokenizer has
    more tokens than the model or is not there, and it is too large to be read now.
    """
    largest = read(prefix).largest_id
    said = f" ({prefix}{SETTINGS})"
    tokenizer = find_tokenizer([], [prefix])
    if largest is None and tokenizer:
        vocabulary = load_tokenizer(tokenizer).get_vocab()
        if max(vocabulary.values(), default=0) < vocab_size:
            return []
    if largest is None:
        largest, said = token_files.largest_id(prefix, vocab_size, MOST_SEARCHED), ""
    if largest is None:
        unknown = f"the largest token id of {prefix} is not known"
        return [f"{unknown}: one above {vocab_size - 1} would end the run"]
    if largest >= vocab_size:
        raise CorpusError(
            f"{prefix} has the token id {largest}{said}, but vocab-size is {vocab_size}: give "
            f"--vocab-size {largest + 1} or more, or prepare it by the model's tokenizer"
        )
    return []


def unused_rows(config: Config) -> str | None:
    """Return a note for the log if the model's vocabulary has rows that no corpus can use.

    The number of tokens of the corpora's largest tokenizer is first rounded up, as the padding of
    the model's vocabulary does. Return None if the model's vocabulary is not larger, or if a corpus
    has no tokenizer beside it. If a tokenizer cannot be read, the note is the error message.
    """
    multiple = config.layout.pad_vocab_multiple * config.layout.tp
    paths = [find_tokenizer([], [prefix]) for prefix in prefixes_of(config.data.data)]
    if not paths or None in paths:
        return None
    try:
        sizes = {path: load_tokenizer(path).get_vocab_size() for path in paths if path}
    except UserError as error:  # only a note, because training does not need a tokenizer
        return str(error)
    path, size = max(sizes.items(), key=lambda item: item[1])
    ours = config.model.vocab_size
    padded_size = -(-size // multiple) * multiple
    if ours <= padded_size:
        return None
    return (
        f"the model has a vocabulary of {ours}, but {path} has {size} tokens: {ours - size} rows "
        f"are never used; --vocab-size {size} leaves them out"
    )
