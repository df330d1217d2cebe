"""Tokenizers of several kinds behind one interface, and where long texts may be cut for them.

    --tokenizer books.tokenizer.json        the `tokenizers` library
    --tokenizer FOLDER                      of Hugging Face: tokenizer.json or tokenizer.model in it
    --tokenizer llama.model                 sentencepiece
    --tokenizer tiktoken:cl100k_base        an encoding of tiktoken, by name
    --tokenizer qwen.tiktoken               its file of tokens; --tiktoken-pattern splits the text
    --tokenizer bytes                       ids 0..255 are bytes, 256 ends a document

The packages sentencepiece and tiktoken are needed only for their kinds. The outputs have the
tokenizer beside them: PREFIX.tokenizer.json, .model or .tiktoken.
"""

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from config.messages import UserError
from scripts.text_sources import package_for

END_TOKEN = "<|endoftext|>"
# How published encodings split a text before they merge bytes.
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
}
# Where texts may be cut: between words, lines, after punctuation; and else anywhere.
BOUNDARY = re.compile(r"(?<=\w)(?= \w)|(?<=\S)(?=\n+\S)|(?<=\n)(?=\S)|(?<=[^\w\s])(?=[\w\s])")
CHECKED = 256  # characters on both sides of a cut that are encoded whole and in two
PLACES_TRIED = 100


class Encoder(Protocol):
    """A tokenizer: ids are below `vocab_size`, `end` ends a document; `suffix` of its file."""

    vocab_size: int
    end: int
    suffix: str

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, without the end token; no text makes a special token."""

    def save(self, path: str) -> None:
        """Write its file."""


class TokenizersEncoder:
    """A tokenizer of the `tokenizers` library. UserError if it lacks the end token."""

    suffix = "json"

    def __init__(self, tokenizer: Tokenizer, end_token: str, name: str = "the tokenizer"):
        end = tokenizer.token_to_id(end_token)
        if end is None:
            raise UserError(f"{name} has no token {end_token!r}; name its --end-token")
        self.tokenizer, self.end, self._end_token = tokenizer, end, end_token
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # A text that contains the name of a special token must not end a document.
        tokenizer.encode_special_tokens = True
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps

    def __reduce__(self) -> tuple:
        return TokenizersEncoder, (self.tokenizer, self._end_token)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def save(self, path: str) -> None:
        """Write its file, JSON."""
        self.tokenizer.save(path)


class BytesEncoder(TokenizersEncoder):
    """Bytes as tokens. Its file is that of a byte-level tokenizer that merges none."""

    def __init__(self, end_token: str = END_TOKEN):
        # The library writes bytes as characters: printable ones as they are, others from 256 on.
        own = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in own]
        characters = dict(zip(own, map(chr, own))) | {b: chr(256 + i) for i, b in enumerate(others)}
        vocabulary = {character: byte for byte, character in characters.items()}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([end_token])
        super().__init__(tokenizer, end_token)

    def __reduce__(self) -> tuple:
        return BytesEncoder, (self._end_token,)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The bytes of each text."""
        return [list(text.encode()) for text in texts]


class SentencePieceEncoder:
    """A model of sentencepiece. UserError if it cannot be read or lacks the end token."""

    suffix = "model"

    def __init__(self, path: str, end_token: str | None):
        self.path, self._end_token = path, end_token
        package = package_for("sentencepiece", f"--tokenizer {path}")
        self._model = package.SentencePieceProcessor()
        try:
            self._model.LoadFromFile(path)
        except (OSError, RuntimeError) as error:
            raise UserError(f"--tokenizer {path} is not of sentencepiece: {error}") from None
        self.vocab_size = self._model.get_piece_size()
        self.end = self._model.eos_id() if end_token is None else self._id_of(end_token)
        if self.end < 0:
            raise UserError(f"--tokenizer {path} has no end of a text; name its --end-token")

    def _id_of(self, token: str) -> int:
        found = self._model.piece_to_id(token)
        return found if self._model.id_to_piece(found) == token else -1

    def __reduce__(self) -> tuple:
        return SentencePieceEncoder, (self.path, self._end_token)

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text."""
        return self._model.encode(texts, out_type=int)

    def save(self, path: str) -> None:
        """Copy the model."""
        shutil.copyfile(self.path, path)


class TiktokenEncoder:
    """An encoding of tiktoken: one that it knows by name, or a file of tokens and a pattern.

    UserError if it cannot be had, or lacks the end token. The end token of a file is the id after
    the last one.
    """

    suffix = "tiktoken"

    def __init__(self, name: str, pattern: str | None, end_token: str):
        self._about = name, pattern, end_token
        package = package_for("tiktoken", f"--tokenizer {name}")
        load = package_for("tiktoken.load", f"--tokenizer {name}")
        try:
            if name.startswith("tiktoken:"):
                encoding = package.get_encoding(name.partition(":")[2])
            else:
                if not pattern:
                    names = ", ".join(PATTERNS)
                    raise UserError(f"{name} needs --tiktoken-pattern, {names} or a pattern")
                ranks = load.load_tiktoken_bpe(name)
                special = {end_token: max(ranks.values()) + 1}
                encoding = package.Encoding(
                    Path(name).name,
                    pat_str=PATTERNS.get(pattern, pattern),
                    mergeable_ranks=ranks,
                    special_tokens=special,
                )
            self._encoding = encoding
            self.end = encoding.encode_single_token(end_token)
        except KeyError:
            raise UserError(f"--tokenizer {name} has no token {end_token!r}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"--tokenizer {name} cannot be read: {error}") from None
        self.vocab_size = encoding.max_token_value + 1

    def __reduce__(self) -> tuple:
        return TiktokenEncoder, self._about

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text."""
        return self._encoding.encode_ordinary_batch(texts)

    def save(self, path: str) -> None:
        """Write its tokens and their numbers, in the format of tiktoken."""
        rank = self._encoding.encode_single_token
        tokens = [(rank(token), token) for token in self._encoding.token_byte_values()]
        lines = [f"{base64.b64encode(token).decode()} {n}\n" for n, token in sorted(tokens)]
        Path(path).write_text("".join(lines))


def load_encoder(name: str, end_token: str | None, pattern: str | None) -> Encoder:
    """The tokenizer that --tokenizer names; UserError if it cannot be read or has no end token."""
    path = Path(name)
    if name == "bytes":
        return BytesEncoder(end_token or END_TOKEN)
    if name.startswith("tiktoken:") or path.suffix == ".tiktoken":
        return TiktokenEncoder(name, pattern, end_token or END_TOKEN)
    if path.is_dir():
        return _load_folder(path, end_token)
    if path.suffix == ".model":
        return SentencePieceEncoder(name, end_token)
    return _load_file(name, end_token or END_TOKEN)


def _load_file(name: str, end_token: str) -> Encoder:
    try:
        tokenizer = Tokenizer.from_str(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read --tokenizer {name}: {error.strerror}; it is a file or a folder of this "
            "machine, and names of a hub are not fetched"
        ) from None
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"--tokenizer {name} is not a tokenizer: {error}") from None
    return TokenizersEncoder(tokenizer, end_token, f"--tokenizer {name}")


def _load_folder(path: Path, end_token: str | None) -> Encoder:
    """A folder as transformers saves it; the end token is the one that it names."""
    about = path / "tokenizer_config.json"
    if end_token is None and about.is_file():
        try:
            named: Any = json.loads(about.read_bytes()).get("eos_token")
        except (ValueError, AttributeError, RecursionError):
            raise UserError(f"{about} is not JSON that describes a tokenizer") from None
        end_token = named.get("content") if isinstance(named, dict) else named
    if (path / "tokenizer.json").is_file():
        return _load_file(str(path / "tokenizer.json"), end_token or END_TOKEN)
    if (path / "tokenizer.model").is_file():
        return SentencePieceEncoder(str(path / "tokenizer.model"), end_token)
    raise UserError(f"--tokenizer {path} holds neither tokenizer.json nor tokenizer.model")


def find_cut(text: str, at: int, encoder: Encoder) -> tuple[int, int] | None:
    """Where a long text may be cut, at or after `at`: the end of the one part and the beginning of
    the next, which leaves out a space where the tokenizer would add one. None if it finds none.

    The CHECKED characters on both sides give the same tokens whole and in two. So the result is
    that of the whole text, if no token depends on what is further away than that.
    """
    for tried, match in enumerate(BOUNDARY.finditer(text, at, len(text) - CHECKED)):
        if tried == PLACES_TRIED:
            return None
        end = match.start()
        before, after = text[max(0, end - CHECKED) : end], text[end : end + CHECKED]
        for left_out in range(1 + (text[end] == " ")):
            whole, left, right = encoder.encode([before + after, before, after[left_out:]])
            if [*whole] == [*left, *right]:
                return end, end + left_out
    return None
