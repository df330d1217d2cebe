"""Names of special tokens in texts: which of them become tokens, and how often they are named.

    texts = tokenizer_of_texts(tokenizer, TEXT, "<|endoftext|>")      encodes texts of documents
    names = Names(tokenizer, "<|endoftext|>")
    counts = NameCounts()
    counts.add(names.find("<|im_start|>user"), "<|endoftext|>")

TEXT: a name is text, so that a page of the web forges no turn of a chat. IDS: it is the token, as
rendered chats and FIM data mean it. The token that ends a document is never made from text. Added
tokens that are not special are words of the vocabulary, and are tokens in both.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from base.errors import CorpusError
from config.corpus_record import TEXT

# Before a piece of a vocabulary that no text may be cut into: no text has this character.
NEVER = "\U0010ffff"
MOST_NAMED = 4  # names in a line


def special_names(tokenizer: Tokenizer) -> list[str]:
    """Return the names of a tokenizer's special tokens, in the order of their ids."""
    added = tokenizer.get_added_tokens_decoder()
    return [token.content for _, token in sorted(added.items()) if token.special]


def tokenizer_of_texts(tokenizer: Tokenizer, special_tokens: str, end: str | None) -> Tokenizer:
    """Return a copy of a tokenizer for texts: names that it hides are text there.

    special_tokens: TEXT hides all special tokens, IDS none. end: the token that ends a document,
    hidden in both. The library hides added tokens that are special; pieces of a Unigram, WordLevel
    or WordPiece vocabulary it finds in any text, so such pieces get another name. Raise UserError
    if the copy has other ids.
    """
    facts = json.loads(tokenizer.to_str())
    hidden = {end} if end else set()
    if special_tokens == TEXT:
        hidden.update(special_names(tokenizer))
    renamed = _rename_pieces(facts["model"], hidden)
    kept = []
    for token in facts["added_tokens"]:
        token["special"] = token["content"] in hidden
        if token["content"] not in renamed:
            kept.append(token)
    facts["added_tokens"] = kept
    copy = Tokenizer.from_str(json.dumps(facts))
    copy.encode_special_tokens = True
    for token in kept:
        if copy.token_to_id(token["content"]) != token["id"]:
            raise CorpusError(f"the tokenizer's added token {token['content']!r} has no fixed id")
    return copy


def _rename_pieces(model: dict[str, Any], hidden: set[str]) -> set[str]:
    """Rename the hidden pieces that this model finds in texts by themselves; return their names."""
    vocabulary = model["vocab"]
    if model["type"] == "Unigram":
        found = {piece for piece, _ in vocabulary} & hidden
        model["vocab"] = [[NEVER + p if p in found else p, score] for p, score in vocabulary]
        return found
    if model["type"] == "BPE" and not model.get("ignore_merges"):
        return set()  # merges make its pieces, and none makes a special token
    found = hidden & vocabulary.keys() - {model.get("unk_token")}
    model["vocab"] = {NEVER + p if p in found else p: id for p, id in vocabulary.items()}
    return found


class Names:
    """Finds names of special tokens in texts."""

    def __init__(self, tokenizer: Tokenizer, end: str | None):
        """Make the pattern that finds them. end: the token that ends a document, if it is known."""
        names = {name for name in [*special_names(tokenizer), end] if name}
        longest_first = sorted(names, key=lambda name: (-len(name), name))
        pattern = "|".join(map(re.escape, longest_first))
        self._pattern = re.compile(pattern) if names else None
        self._longest = max(map(len, names), default=0)

    def find(self, text: str) -> Counter[str]:
        """Return how often a text names each special token."""
        return Counter(self._pattern.findall(text) if self._pattern else ())

    def are_cut(self, text: str, place: int) -> bool:
        """Return whether a cut of a text at a place would divide a name."""
        if self._pattern is None:
            return False
        begin = max(0, place - self._longest)
        around = text[begin : place + self._longest]
        matches = self._pattern.finditer(around)
        return any(match.start() < place - begin < match.end() for match in matches)


@dataclass
class NameCounts:
    """How many texts name special tokens, and the one that ends documents; how often each."""

    texts: int = 0
    with_end: int = 0
    times: Counter[str] = field(default_factory=Counter)

    def add(self, found: Mapping[str, int], end: str | None) -> None:
        """Count the names in a text. end: the token that ends a document."""
        self.texts += bool(found.keys() - {end})
        self.with_end += end in found
        self.times.update(found)

    def lines(self, what: str, end: str | None, form: str | None, how: str = "") -> list[str]:
        """Return sentences on the names.

        what: the texts and how many they are, as "of 40 documents". form: TEXT or IDS; None: there
        is nothing to say. how: the end of the sentence, such as the option that decides it.
        """
        others = Counter({name: count for name, count in self.times.items() if name != end})
        said = []
        if others and form is not None:
            becomes = "text" if form == TEXT else "tokens"
            said.append(f"{self.texts:,} {what} name {_listed(others)}: they are {becomes}{how}")
        if self.with_end and form is not None:
            named = f"{self.with_end:,} {what} name {end} ({_times(self.times[str(end)])})"
            said.append(f"{named}: it ends documents, and is never made from text")
        return said


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _listed(times: Counter[str]) -> str:
    """Return names with how often each was found, the most frequent first."""
    shown = [f"{name} ({_times(count)})" for name, count in times.most_common(MOST_NAMED)]
    more = len(times) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
