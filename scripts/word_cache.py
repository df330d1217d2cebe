"""Tokens of texts by their words: a word that has been met before is not encoded again.

    cache = WordCache(encoder)           if splits_at_spaces(encoder)
    cache.encode(["a text", "a word"])   the ids of each as bytes, int32

Most words of a text have come before, and to look one up takes a tenth of the time to encode it. A
cut before a single space between two other characters is always the end of a token if the
tokenizer splits texts as PATTERNS do: nothing that they match goes on from a character that is no
space into one, and what they look ahead for follows spaces only.
"""

import array
import re
from typing import Any

from tokenizers import Regex, models
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from corpora.encoder import Encoder

BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")  # Python has more kinds of spaces
# The share of a batch's characters that may be in new words. In texts without spaces the share is
# larger, and then the cache does not pay.
MOST_NEW = 0.75
MOST_COST, COST = 1 << 24, 100  # a word costs its characters and so much; about 40 MB
# How published tokenizers split texts, besides ByteLevel's own pattern: Llama 3, Qwen 2.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = [_WORDS + numbers + _OTHERS for numbers in (r"\p{N}{1,3}", r"\p{N}")]


def splits_at_spaces(encoder: Encoder) -> bool:
    """Whether texts may be cut before single spaces: a BPE that splits them in a known way."""
    tokenizer = encoder.text_tokenizer
    if not isinstance(tokenizer.model, models.BPE) or tokenizer.model.dropout:
        return False
    # NFC joins nothing with a space before it. Special tokens are not looked for in texts here; of
    # others, one with a space in it or that takes the space behind it goes over such a cut.
    added = tokenizer.get_added_tokens_decoder().values()
    goes_over = any(not t.special and (t.rstrip or " " in t.content) for t in added)
    if goes_over or _form(tokenizer.normalizer) not in {_form(None), _form(NFC())}:
        return False
    known = [ByteLevel(add_prefix_space=prefix) for prefix in (False, True)]
    bytes_only = ByteLevel(add_prefix_space=False, use_regex=False)
    for pattern in PATTERNS:
        known.append(Sequence([Split(Regex(pattern), "isolated"), bytes_only]))
    return _form(tokenizer.pre_tokenizer) in map(_form, known)


def _form(part: Any) -> bytes:
    """A part of a tokenizer as JSON, without an option that does not change the tokens."""
    return re.sub(rb',?"trim_offsets":\w+', b"", part.__getstate__()) if part else b""


def as_bytes(ids: list[int]) -> bytes:
    """Ids as int32."""
    return array.array("i", ids).tobytes()


class WordCache:
    """The tokens of words that have been met; see the module. Several threads may use it."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self._known: dict[str, bytes] = {}
        self._cost = 0

    def encode(self, texts: list[str]) -> list[bytes]:
        """The ids of each text. Texts that are mostly of new words are encoded as they are."""
        known = self._known  # another thread may begin a new one
        split = [BETWEEN_WORDS.split(text) for text in texts]
        new = list(set().union(*split).difference(known))
        size = sum(map(len, new))
        if size > MOST_NEW * sum(map(len, texts)):
            return [as_bytes(ids) for ids in self.encoder.encode(texts)]
        known.update(zip(new, map(as_bytes, self.encoder.encode(new) if new else [])))
        encoded = [b"".join(map(known.__getitem__, words)) for words in split]
        self._cost += size + COST * len(new)
        if self._cost > MOST_COST:
            self._known, self._cost = {}, 0
        return encoded
