"""Text to token ids and back: by the tokenizer of a corpus or a checkpoint, else as numbers.

    text = Text(find_tokenizer(["runs/demo"], ["data/stdlib"]), vocab_size=8192)
    text.decode(text.encode("def main("))

This module does not import torch, so that a wrong prompt is reported before that import.
"""

import os
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from config.messages import UserError, check_decoded
from config.schema import Config
from corpora.blends import parse_blend

END = "<|endoftext|>"  # ends a document, as scripts/prepare_data.py writes it
IDS = re.compile(r"\s*\d{1,18}([\s,]+\d{1,18})*\s*")
SAMPLE_TOKENS = 48  # the most tokens generated for a --sample-prompt in training


def find_tokenizer(folders: Iterable[str], prefixes: Iterable[str]) -> str | None:
    """Return the first tokenizer.json in `folders`, else the first PREFIX.tokenizer.json."""
    paths = [os.path.join(folder, "tokenizer.json") for folder in folders]
    paths += [f"{prefix}.tokenizer.json" for prefix in prefixes]
    return next(filter(os.path.isfile, paths), None)


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer in a file; raise UserError if the file holds none."""
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library has no exception of its own
        cause = " ".join(str(error).split())
        raise UserError(f"cannot read the tokenizer {path}: {cause:.200}") from None


class Text:
    """Encodes text as token ids, and decodes ids. Without a tokenizer texts are ids: `17 4 250`.

    end: the id that ends a document; None without a tokenizer, or if the tokenizer has no END.
    """

    def __init__(self, path: str | None, vocab_size: int):
        """path: of a tokenizer.json. Raise UserError if it has more tokens than the model."""
        self.path = path
        self.vocab_size = vocab_size
        self.tokenizer = load_tokenizer(path) if path else None
        self.end: int | None = None
        if self.tokenizer is None:
            return
        size = self.tokenizer.get_vocab_size()
        if size > vocab_size:
            raise UserError(f"{path} has {size} tokens, the model {vocab_size}")
        self.end = self.tokenizer.token_to_id(END)

    def encode(self, prompt: str, flag: str = "--prompt") -> list[int]:
        """Return a prompt's ids; raise UserError, with the flag that gave it, if it has none."""
        check_decoded(flag, prompt)
        if self.tokenizer is not None:
            ids = self.tokenizer.encode(prompt).ids
            if not ids:
                raise UserError(f"{flag} {prompt!r} has no token of {self.path}")
            return ids
        if not IDS.fullmatch(prompt):
            file = "--tokenizer FILE, or " if flag == "--prompt" else ""  # in sample.py
            raise UserError(
                f"{flag} {prompt!r}: no tokenizer was found beside the checkpoint or the corpus: "
                f"give {file}token ids such as '17 4 250'"
            )
        ids = [int(word) for word in re.findall(r"\d+", prompt)]
        if max(ids) >= self.vocab_size:
            raise UserError(f"{flag}: {max(ids)} is not below vocab-size({self.vocab_size})")
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.decode(ids, skip_special_tokens=False)


# ---- In training ---------------------------------------------------------------------------------


def prefixes_of(data: tuple) -> list[str]:
    """Return the prefixes of the corpora of --data; synthetic tokens have none."""
    return [] if data == ("synthetic",) else parse_blend(data)[0]


def prompts_of_run(config: Config) -> tuple[Text, list[list[int]]]:
    """Return the encoder of a run's corpus, and the ids of every --sample-prompt.

    Raise UserError if a prompt has no ids, unknown ids, or as many as seq-length.
    """
    model = config.model
    given = config.run.sample_prompt or ()
    path = find_tokenizer([], prefixes_of(config.data.data)) if given else None
    text = Text(path, model.vocab_size)
    length = model.seq_length
    prompts = [text.encode(prompt, "--sample-prompt") for prompt in given]
    for count in [len(ids) for ids in prompts if len(ids) >= length]:
        raise UserError(f"--sample-prompt has {count} tokens: seq-length is {length}")
    return text, prompts


def unused_rows(config: Config) -> str | None:
    """Return a note if the model's vocabulary is larger than its corpora's, rounded up.

    Rounded up as padding does. None: it is not larger, or a corpus has no tokenizer beside it. If a
    tokenizer cannot be read, the note is that error.
    """
    multiple = config.layout.pad_vocab_multiple * config.layout.tp
    found = [find_tokenizer([], [prefix]) for prefix in prefixes_of(config.data.data)]
    if not found or None in found:
        return None
    try:
        sizes = {path: load_tokenizer(path).get_vocab_size() for path in found if path}
    except UserError as error:  # training does not need a tokenizer
        return str(error)
    path, size = max(sizes.items(), key=lambda item: item[1])
    ours = config.model.vocab_size
    if ours <= -(-size // multiple) * multiple:
        return None
    return (
        f"the model has a vocabulary of {ours}, but {path} has {size} tokens: {ours - size} rows "
        f"are never used; --vocab-size {size} leaves them out"
    )
