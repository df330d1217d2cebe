"""A tokenizer that encodes documents, by --tokenizer, and where long texts may be cut for it.

--tokenizer books.tokenizer.json        a file of the `tokenizers` library
--tokenizer FOLDER                      of Hugging Face, with tokenizer.json in it
--tokenizer bytes                       ids 0..255 are bytes, 256 ends a document
"""

import itertools
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from base.errors import CorpusError, UserError
from config.corpus_record import TEXT
from corpora.encoder import END, Encoder
from corpora.tokenizer_files import NAME, Settings, load_tokenizer, read_settings

# Where texts may be cut: between words, lines, after punctuation; and else anywhere.
BOUNDARY = re.compile(r"(?<=\w)(?= \w)|(?<=\S)(?=\n+\S)|(?<=\n)(?=\S)|(?<=[^\w\s])(?=[\w\s])")
BEFORE_SPACE = re.compile(r"(?<=\S)(?=\s)")
CHECKED = 256  # characters on both sides of a cut that are encoded whole and in two
PLACES_TRIED = 100


def load_encoder(name: str, end_token: str | None, special_tokens: str = TEXT) -> Encoder:
    """The tokenizer that --tokenizer names; UserError if it cannot be read or has no end token.

    special_tokens: what names of special tokens in texts become, TEXT or IDS.
    """
    if name == "bytes":
        return _bytes(end_token or END, special_tokens)
    path = Path(name)
    settings = settings_of(name)
    if path.is_dir():
        end_token = end_token or settings.tokens.get("eos_token")
        path = path / NAME
        if not path.is_file():
            raise CorpusError(
                f"--tokenizer {name} holds no tokenizer.json; transformers writes one of a "
                f"tokenizer that it knows: AutoTokenizer.from_pretrained({name!r})."
                "save_pretrained(...)"
            )
    if not path.exists():
        raise CorpusError(
            f"cannot read --tokenizer {path}: No such file or directory; it is a file or a folder "
            "of this machine, and names of a hub are not fetched"
        )
    try:
        tokenizer = load_tokenizer(str(path))
    except UserError as error:
        raise CorpusError(f"--tokenizer {path} is not a tokenizer: {error}") from None
    encoder = Encoder(tokenizer, settings, f"--tokenizer {path}", end_token, special_tokens)
    if encoder.end is None:
        raise CorpusError(f"--tokenizer {path} has no token {END!r}; name its --end-token")
    return encoder


def settings_of(name: str) -> Settings:
    """What the files beside the tokenizer say that --tokenizer names; UserError."""
    return Settings(name) if name == "bytes" else read_settings(name)


def _bytes(end_token: str, special_tokens: str) -> Encoder:
    """A byte-level tokenizer that merges no bytes."""
    # The library writes bytes as characters: printable ones as they are, others from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end_token])
    return Encoder(tokenizer, end_token=end_token, special_tokens=special_tokens)


def find_cut(text: str, at: int, encoder: Encoder | None) -> tuple[int, int] | None:
    """Where a long text may be cut, at or after `at`: the end of the one part and the beginning of
    the next, which leaves out a space where the tokenizer would add one. None if it finds none.

    The CHECKED characters on both sides give the same tokens whole and in two. So the result is
    that of the whole text, if no token depends on what is further away than that. Without a
    tokenizer a text is cut before a space.
    """
    if encoder is None:
        found = BEFORE_SPACE.search(text, at)
        return (found.start(), found.start()) if found else None
    places = itertools.islice(BOUNDARY.finditer(text, at, len(text) - CHECKED), PLACES_TRIED)
    for match in places:
        end = match.start()
        if encoder.names.are_cut(text, end):
            continue
        before = text[max(0, end - CHECKED) : end]
        after = text[end : end + CHECKED]
        for left_out in range(1 + (text[end] == " ")):
            whole, left, right = encoder.encode([before + after, before, after[left_out:]])
            if whole == [*left, *right]:
                return end, end + left_out
    return None
