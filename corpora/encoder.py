"""How texts become token ids: one rule for documents, prompts and conversations.

    encoder = Encoder(load_tokenizer(path), read_settings(path), path)
    encoder.encode(["a document"])          without what begins and ends it: `document_begin`, `end`
    encoder.prompt("what is continued")     with what begins it
    encoder.conversation(text)              what a chat template has written

Many tokenizers put a token before each text, as Llama 3 does <|begin_of_text|>. Documents of a
corpus begin with it then, and so do prompts: a model sees both in the same form. A chat template
writes that token itself, so a conversation is encoded as it is.
"""

import functools
from collections.abc import Iterable

from tokenizers import Encoding, Tokenizer

from base.errors import UserError
from corpora.tokenizer_files import Settings

END = "<|endoftext|>"  # ends a document, unless the tokenizer or the user names another token


def begin_of(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that a tokenizer's own processing puts before each text, as `encode` does."""
    encoding = tokenizer.encode("a")
    own = encoding.special_tokens_mask
    return encoding.ids[: own.index(0)] if 0 in own else []


class Encoder:
    """A tokenizer with the tokens that begin and end documents.

    begin: the ids before each prompt. document_begin: those before each document, none where the
    end of the document before is that token. end, end_token: the token that ends a document; None
    if there is none. ends: the ids with which a text may end, also those of an answer in a chat.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: Settings | None = None,
        name: str = "the tokenizer",
        end_token: str | None = None,
    ):
        """settings: of the files beside the tokenizer. name: for messages. end_token: that the user
        has named; UserError if the tokenizer lacks it, or a token that the settings name.
        """
        settings = settings or Settings(name)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        needed = end_token or settings.end
        ends = [needed] if needed else [END, settings.tokens.get("eos_token")]
        self.end_token = next((e for e in ends if e and tokenizer.token_to_id(e) is not None), None)
        self.end = None if self.end_token is None else tokenizer.token_to_id(self.end_token)
        if needed and self.end is None:
            raise UserError(f"{name} has no token {needed!r}; name its --end-token")
        if settings.begin is not None:
            self.begin = self._ids(settings.begin, name)
        elif settings.of_corpus:
            self.begin = []  # corpora from before there was such a note
        else:
            self.begin = begin_of(tokenizer)
        self.document_begin = [] if self.begin == [self.end] else self.begin
        named = [self.end_token, settings.tokens.get("eos_token")]
        found = {tokenizer.token_to_id(token) for token in named if token}
        self.ends = tuple(sorted(id for id in found if id is not None))

    @functools.cached_property
    def vocab_size(self) -> int:
        """A number above every id; ids may have gaps."""
        return max(self.tokenizer.get_vocab().values(), default=-1) + 1

    def _ids(self, tokens: Iterable[str], name: str) -> list[int]:
        ids = []
        for token in tokens:
            found = self.tokenizer.token_to_id(token)
            if found is None:
                raise UserError(f"{name} has no token {token!r}, with which its documents begin")
            ids.append(found)
        return ids

    def begin_tokens(self) -> list[str]:
        """Return the tokens before each prompt, as texts."""
        return [str(self.tokenizer.id_to_token(id)) for id in self.begin]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts of documents, without what begins and ends a document.

        The name of a special token in a text is a text: it must not end a document.
        """
        self.tokenizer.encode_special_tokens = True
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, which begins as a document does.

        Special tokens that it names are tokens; one that begins a document is not doubled.
        """
        return self.prompts([text])[0]

    def prompts(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of several prompts; see `prompt`."""
        self.tokenizer.encode_special_tokens = False
        begin = self.begin
        found = []
        for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            found.append(ids if begin and ids[: len(begin)] == begin else begin + ids)
        return found

    def conversation(self, text: str) -> Encoding:
        """Encode what a chat template has written, whose special tokens are tokens."""
        self.tokenizer.encode_special_tokens = False
        return self.tokenizer.encode(text, add_special_tokens=False)
