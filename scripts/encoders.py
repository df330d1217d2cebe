"""A tokenizer that encodes documents, and where long texts may be cut for it.

--tokenizer books.tokenizer.json        a file of the `tokenizers` library
--tokenizer FOLDER                      of Hugging Face, with tokenizer.json in it
--tokenizer bytes                       ids 0..255 are bytes, 256 ends a document
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from config.messages import UserError

END_TOKEN = "<|endoftext|>"
# Where texts may be cut: between words, lines, after punctuation; and else anywhere.
BOUNDARY = re.compile(r"(?<=\w)(?= \w)|(?<=\S)(?=\n+\S)|(?<=\n)(?=\S)|(?<=[^\w\s])(?=[\w\s])")
BEFORE_SPACE = re.compile(r"(?<=\S)(?=\s)")
CHECKED = 256  # characters on both sides of a cut that are encoded whole and in two
PLACES_TRIED = 100


class Encoder:
    """A tokenizer whose ids are below `vocab_size`, and whose id `end` ends a document. UserError
    if it lacks the end token; name: of the tokenizer in that message.
    """

    def __init__(self, tokenizer: Tokenizer, end_token: str, name: str = "the tokenizer"):
        end = tokenizer.token_to_id(end_token)
        if end is None:
            raise UserError(f"{name} has no token {end_token!r}; name its --end-token")
        self.tokenizer = tokenizer
        self.end = end
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # A text that contains the name of a special token must not end a document.
        tokenizer.encode_special_tokens = True
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, without the end token."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def load_encoder(name: str, end_token: str | None) -> Encoder:
    """The tokenizer that --tokenizer names; UserError if it cannot be read or has no end token."""
    path = Path(name)
    if name == "bytes":
        return _bytes(end_token or END_TOKEN)
    if not path.is_dir():
        return _load_file(path, end_token or END_TOKEN)
    about = path / "tokenizer_config.json"
    if end_token is None and about.is_file():
        try:
            named: Any = json.loads(about.read_bytes()).get("eos_token")
        except (ValueError, AttributeError, RecursionError):
            raise UserError(f"{about} is not JSON that describes a tokenizer") from None
        end_token = named.get("content") if isinstance(named, dict) else named
    if not (path / "tokenizer.json").is_file():
        raise UserError(
            f"--tokenizer {path} holds no tokenizer.json; transformers writes one of a tokenizer "
            f"that it knows: AutoTokenizer.from_pretrained({name!r}).save_pretrained(...)"
        )
    return _load_file(path / "tokenizer.json", end_token or END_TOKEN)


def _load_file(path: Path, end_token: str) -> Encoder:
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read --tokenizer {path}: {error.strerror}; it is a file or a folder of this "
            "machine, and names of a hub are not fetched"
        ) from None
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"--tokenizer {path} is not a tokenizer: {error}") from None
    return Encoder(tokenizer, end_token, f"--tokenizer {path}")


def _bytes(end_token: str) -> Encoder:
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
    return Encoder(tokenizer, end_token)


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
        before = text[max(0, end - CHECKED) : end]
        after = text[end : end + CHECKED]
        for left_out in range(1 + (text[end] == " ")):
            whole, left, right = encoder.encode([before + after, before, after[left_out:]])
            if whole == [*left, *right]:
                return end, end + left_out
    return None
