"""How texts become token ids: one rule for documents, prompts and conversations.

    encoder = Encoder(load_tokenizer(path), read_settings(path), path)
    encoder.encode(["a document"])          without what begins and ends it: `document_begin`, `end`
    encoder.prompts(["what is continued"])  with what begins it
    encoder.conversation(text)              what a chat template has written

Many tokenizers put a token before each text, as Llama 3 does <|begin_of_text|>. Documents of a
corpus begin with it then, and so do prompts, and names of special tokens are in both as its
--special-tokens says: a model sees one form. A chat template writes these tokens itself, so a
conversation is encoded as it is.
"""

import functools
from collections.abc import Iterable

from tokenizers import Encoding, Tokenizer

from base.errors import CorpusError
from config.corpus_record import TEXT, CorpusRecord
from corpora.special_tokens import NameCounts, Names, tokenizer_of_texts
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
    special_tokens: what their names in texts become, TEXT or IDS; None: no corpus has said it, as
    of a model that came from elsewhere. Then they are text in documents and tokens in prompts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: Settings | None = None,
        name: str = "the tokenizer",
        end_token: str | None = None,
        special_tokens: str | None = None,
    ):
        """Find the tokens that begin and end documents; UserError if the tokenizer lacks one.

        settings: of the files beside the tokenizer. name: of the tokenizer, for messages.
        end_token: the token that ends a document, if the user names one. special_tokens: in place
        of what the settings say.
        """
        settings = settings or Settings(name)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        documents = settings.documents
        self.special_tokens = special_tokens or documents.special_tokens
        needed = end_token or documents.end
        ends = [needed] if needed else [END, settings.tokens.get("eos_token")]
        self.end_token = next((e for e in ends if e and tokenizer.token_to_id(e) is not None), None)
        self.end = None if self.end_token is None else tokenizer.token_to_id(self.end_token)
        if needed and self.end is None:
            raise CorpusError(f"{name} has no token {needed!r}; name its --end-token")
        if documents.begin is not None:
            self.begin = self._ids(documents.begin, name)
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
        """Return the ids of tokens; UserError if the tokenizer, called `name`, lacks one."""
        ids = []
        for token in tokens:
            found = self.tokenizer.token_to_id(token)
            if found is None:
                raise CorpusError(f"{name} has no token {token!r}, with which its documents begin")
            ids.append(found)
        return ids

    def begin_tokens(self) -> list[str]:
        """Return the tokens before each prompt, as texts."""
        return [str(self.tokenizer.id_to_token(id)) for id in self.begin]

    @functools.cached_property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer with which texts of documents are encoded."""
        return tokenizer_of_texts(self.tokenizer, self.special_tokens or TEXT, self.end_token)

    @property
    def record(self) -> CorpusRecord:
        """What a corpus of these documents says of itself, but for its largest id."""
        begin = tuple(self.begin_tokens())
        return CorpusRecord(begin, self.end_token, self.end, None, self.special_tokens)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts of documents, without what begins and ends a document.

        Raise UserError if a text has the token that ends a document, which would end there.
        """
        encodings = self.text_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        found = [encoding.ids for encoding in encodings]
        if any(self.end in ids for ids in found):
            raise CorpusError(
                f"{self.end_token!r} ends a document, and the tokenizer makes it from texts too: "
                "name another --end-token"
            )
        return found

    def prompts(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of prompts, each with the tokens that begin a document before it.

        If a prompt already starts with the text of these tokens, such as <|begin_of_text|>, they
        are not added again.
        """
        if self.special_tokens is None:
            self.tokenizer.encode_special_tokens = False
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [self.begun(encoding.ids) for encoding in encodings]
        begin = "".join(self.begin_tokens())
        # With IDS the tokenizer makes a token of its name in a prompt, which `begun` then sees.
        if self.special_tokens == TEXT or self.begin == [self.end]:
            texts = [text.removeprefix(begin) for text in texts]
        return [self.begun(ids) for ids in self.encode(texts)]

    def begun(self, ids: list[int]) -> list[int]:
        """Return the ids after the tokens that begin a document; as they are if they have them."""
        begin = self.begin
        return ids if begin and ids[: len(begin)] == begin else begin + ids

    @functools.cached_property
    def names(self) -> Names:
        """Finds names of special tokens in texts."""
        return Names(self.tokenizer, self.end_token)

    def notes_on(self, texts: Iterable[str], what: str) -> list[str]:
        """Return lines on the special tokens that texts name. what: the texts, as "prompts"."""
        if self.special_tokens is None:
            return []
        counts = NameCounts()
        begin = "".join(self.begin_tokens())
        total = 0
        for text in texts:
            counts.add(self.names.find(text.removeprefix(begin)), self.end_token)
            total += 1
        how = f", as in the corpus (--special-tokens {self.special_tokens})"
        return counts.lines(f"of {total:,} {what}", self.end_token, self.special_tokens, how)

    def conversation(self, text: str) -> Encoding:
        """Encode what a chat template has written, whose special tokens are tokens."""
        self.tokenizer.encode_special_tokens = False
        return self.tokenizer.encode(text, add_special_tokens=False)
