"""Tokens of texts by their words: a word that has been met before is not encoded again.

    cache = WordCache(encoder)           if splits_at_spaces(encoder)
    cache.encode(["a text", "a word"])   the ids of each as bytes, int32

Most words of a text have come before, and to look one up takes a tenth of the time to encode it. A
cut before a single space between two other characters is always the end of a token if the
tokenizer splits texts as PATTERNS do: nothing that they match goes on from a character that is no
space into one, and what they look ahead for follows spaces only.
"""

import array
import json
import re

from tokenizers import models

from scripts.encoders import Encoder, TokenizersEncoder

BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")  # Python has more kinds of spaces
# The share of a batch's characters that may be in new words. In texts without spaces the share is
# larger, and then the cache does not pay.
MOST_NEW = 0.75
MOST_COST, COST = 1 << 24, 100  # a word costs its characters and so much; about 40 MB
# How published tokenizers split texts, besides ByteLevel's own pattern: Llama 3, Qwen 2.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = [_WORDS + numbers + _OTHERS for numbers in (r"\p{N}{1,3}", r"\p{N}")]


def splits_at_spaces(encoder: Encoder | None) -> bool:
    """Whether texts may be cut before single spaces: a BPE that splits them in a known way."""
    if type(encoder) is not TokenizersEncoder:
        return False
    tokenizer = encoder.tokenizer
    model, added = tokenizer.model, tokenizer.get_added_tokens_decoder().values()
    if not isinstance(model, models.BPE) or model.dropout or tokenizer.pre_tokenizer is None:
        return False
    # Special tokens are not looked for in texts; NFC joins nothing with a space before it.
    normalizer = tokenizer.normalizer and json.loads(tokenizer.normalizer.__getstate__())["type"]
    if normalizer not in (None, "NFC") or not all(token.special for token in added):
        return False
    splitter = json.loads(tokenizer.pre_tokenizer.__getstate__())
    if splitter["type"] == "ByteLevel":
        return splitter.get("use_regex", True)
    if splitter["type"] != "Sequence" or len(splitter["pretokenizers"]) != 2:
        return False
    first, second = splitter["pretokenizers"]
    known = [{"Regex": pattern} for pattern in PATTERNS]
    isolated = first.get("behavior") == "Isolated" and not first.get("invert")
    bytes_only = second["type"] == "ByteLevel" and not second.get("use_regex", True)
    no_prefix = not second.get("add_prefix_space", True)
    return first.get("pattern") in known and isolated and bytes_only and no_prefix


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
