"""What a model is beyond its shape: special tokens, context length, window, tokenizer, template.

    record = from_config(config, generation, files, length, where)      when a model is imported
    record = read(checkpoint_folder)             of a checkpoint; None: it has none
    record = record.after_training(record_of_corpora(config))    what the checkpoints of a run hold

A checkpoint holds it as model_record.json (RECORD) and, beside that, the files of the tokenizer as
they came (file_format.TOKENIZER_FILES); the manifest lists them. Runs carry it from checkpoint to
checkpoint, sample.py ends texts and writes chats by it, and an export writes it back. A checkpoint
from before version 0.3 has none, and is read as before. This module does not import torch.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from tokenizers import Tokenizer

from architecture import families
from architecture.shape import ModelShape
from base.errors import CheckpointError
from base.regular_files import open_regular
from checkpointing import file_format, folders
from checkpointing.file_format import RECORD, TEMPLATES, TOKENIZER_FILES, is_tokenizer_file
from config.corpus_record import form_of, from_facts
from config.schema import Config
from corpora.encoder import END, Encoder
from corpora.text import find_tokenizer, prefixes_of
from corpora.tokenizer_files import load_tokenizer, read_object, read_settings

MOST_BYTES = 2**27  # the most bytes that are read of a tokenizer's file
GENERATION = "generation_config.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class ModelRecord:
    """What a model is beyond its shape.

    config: the config.json that an imported model came with, where the ids of special tokens
    (families.TOKENS) are those that transformers takes; of other models these ids only.
    context_length: the tokens of the longest text that the model is made for. generation: the
    generation_config.json that came with the model; None: there was none. files: the contents of
    the tokenizer's files, by name.
    """

    config: dict[str, Any]
    context_length: int
    generation: dict[str, Any] | None = None
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def is_imported(self) -> bool:
        """Whether the model came from transformers, so that its family and its ends are known."""
        return "model_type" in self.config

    @property
    def window(self) -> int | None:
        """The tokens of the sliding window in the config.json that came with the model, or None."""
        if not self.is_imported:
            return None
        return families.window(self.config, RECORD)

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a generated text, each of them, as in transformers' generate()."""
        source = self.config if self.generation is None else self.generation
        return _several(source.get("eos_token_id"))

    def limit(self, model: ModelShape) -> int | None:
        """Return the tokens of the longest text that is computed as the model is meant, or None.

        A version without windows imported models with a window as models without one, which are
        the same up to the window's length.
        """
        return None if model.window else self.window

    def check_length(self, model: ModelShape, length: int, what: str) -> None:
        """Raise UserError if texts of `length` tokens exceed a window that `model` does not have.

        what: what has this length, for the message.
        """
        window = self.limit(model)
        if window is not None and length > window:
            raise CheckpointError(
                f"{what} is longer than the sliding_window({window}) of this model, which was "
                "imported by a version without windows: import it again"
            )

    def after_training(self, of_data: "ModelRecord") -> "ModelRecord":
        """Return the record of this model after it was trained further.

        of_data: the record of the run's corpora. Samples that are longer than the context lengthen
        it. The ids of special tokens and the tokenizer stay, if they are known. A corpus of chats
        brings the template that its conversations were written with, and the token that ends an
        answer there.
        """
        length = max(self.context_length, of_data.context_length)
        record = dataclasses.replace(self, context_length=length)
        if not record.files:
            record = dataclasses.replace(record, files=of_data.files)
        if not any(record.config.get(name) is not None for name in families.TOKENS):
            record = dataclasses.replace(record, config=record.config | of_data.config)
        template = chat_template(of_data.files)
        if template is None:
            return record
        files = dict(record.files)
        if template != chat_template(files):
            files.pop(TEMPLATE, None)
            settings = _settings(files) | {"chat_template": template}
            files[SETTINGS] = json.dumps(settings, indent=2, ensure_ascii=False).encode()
        return dataclasses.replace(record, files=files)._with_ends(of_data.ends)

    def with_tokenizer(self, path: str) -> "ModelRecord":
        """Return this record with another tokenizer, as --tokenizer of an export names it.

        path: a tokenizer.json, or a folder with one. The ids of an imported model stay where they
        are known, and the tokenizer's end is added to those of the model.
        """
        files = tokenizer_files(path)
        ids = ids_of(path)
        if not self.is_imported:
            return dataclasses.replace(self, files=files, config=self.config | ids)
        known = {name: value for name, value in self.config.items() if value is not None}
        record = dataclasses.replace(self, files=files, config=self.config | ids | known)
        return record._with_ends(_several(ids["eos_token_id"]))

    def _with_ends(self, ends: tuple[int, ...]) -> "ModelRecord":
        """Return this record with these ids of ends beside its own."""
        if set(ends) <= set(self.ends):
            return self
        ids = [*dict.fromkeys((*self.ends, *ends))]
        field = _end_field(ids)
        generation = None if self.generation is None else self.generation | field
        return dataclasses.replace(self, config=self.config | field, generation=generation)

    def contents(self) -> dict[str, bytes]:
        """Return the contents of the checkpoint's files of this record, by name."""
        values = {"config": self.config, "context_length": self.context_length}
        values["generation"] = self.generation
        return {RECORD: json.dumps(values, indent=1).encode(), **self.files}


def _several(ids: Any) -> tuple[int, ...]:
    """Return the ids of a field eos_token_id, which is a number, a list of numbers or null."""
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _end_field(ids: Sequence[int]) -> dict[str, Any]:
    """Return the field eos_token_id with these ids: null, a number or a list of numbers."""
    if len(ids) > 1:
        return {"eos_token_id": [*ids]}
    return {"eos_token_id": ids[0] if ids else None}


# ---- Tokenizers ----------------------------------------------------------------------------------


def _settings(files: dict[str, bytes]) -> dict[str, Any]:
    """Return the contents of the tokenizer_config.json among a tokenizer's files, or nothing."""
    try:
        value = json.loads(files.get(SETTINGS, b"{}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{SETTINGS} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{SETTINGS} holds a {type(value).__name__}, not an object")
    return value


def chat_template(files: dict[str, bytes]) -> str | None:
    """Return the chat template among a tokenizer's files; None if there is none.

    It is chat_template.jinja, as transformers 5 writes it, or else a field of
    tokenizer_config.json: a text, or a list of templates of which one is called "default".
    """
    if TEMPLATE in files:
        return files[TEMPLATE].decode(errors="replace")
    template = _settings(files).get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict)]
        template = next((i.get("template") for i in named if i.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def form_of_texts(folder: str) -> str | None:
    """Return what names of special tokens in texts are for a model; None: its corpora do not say.

    folder: that of a checkpoint. UserError if its record cannot be read.
    """
    record = read(folder)
    settings = {} if record is None else _settings(record.files)
    return from_facts(settings.get("documents"), SETTINGS).special_tokens


def ids_of(tokenizer: str) -> dict[str, Any]:
    """Return the ids of the special tokens (families.TOKENS) by a tokenizer and its settings.

    tokenizer: the path of a tokenizer.json, or of a folder with one. A text ends at the eos_token
    of the settings and at the token that ends a document, if they are two. It begins with the
    bos_token, or with the one token that the tokenizer puts before a text.
    """
    path = os.path.join(tokenizer, "tokenizer.json") if os.path.isdir(tokenizer) else tokenizer
    settings = read_settings(path)
    encoder = Encoder(load_tokenizer(path), settings, path)
    ids = {}
    for name in families.TOKENS:
        text = settings.tokens.get(name.removesuffix("_id"))
        ids[name] = None if text is None else encoder.tokenizer.token_to_id(text)
    if ids["bos_token_id"] is None and len(encoder.begin) == 1:
        ids["bos_token_id"] = encoder.begin[0]
    return ids | _end_field(encoder.ends)


def tokenizer_files(path: str) -> dict[str, bytes]:
    """Return the contents of the files of a user's tokenizer, by their names in a checkpoint.

    path: a folder with a tokenizer.json, the file itself, or the PREFIX.tokenizer.json of a corpus,
    beside which PREFIX.tokenizer_config.json may be. Raise UserError if there is no tokenizer.json,
    or if a file cannot be read.
    """
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    prefix = path.removesuffix("tokenizer.json")
    files = {"tokenizer.json": read_file(path, open_regular)}
    if prefix != path:  # otherwise the file has another name, and nothing stands beside it
        files |= files_beside(prefix, open_regular)
    return files


def files_beside(prefix: str, opened: Callable[[str], BinaryIO]) -> dict[str, bytes]:
    """Return the contents of those files PREFIX + NAME that exist, for each NAME of a tokenizer.

    prefix: the path before the names; that of a folder ends in a slash, and further chat templates
    may be in it. opened: opens a file for reading bytes. Raise UserError if one cannot be read.
    """
    there = [name for name in TOKENIZER_FILES if os.path.lexists(prefix + name)]
    if not os.path.basename(prefix) and os.path.isdir(prefix + TEMPLATES):
        further = [f"{TEMPLATES}/{name}" for name in sorted(os.listdir(prefix + TEMPLATES))]
        there += [name for name in further if is_tokenizer_file(name)]
    return {name: read_file(prefix + name, opened) for name in there}


def _tokenizer(files: dict[str, bytes]) -> Any:
    """Return the Tokenizer of the library `tokenizers` in tokenizer.json; UserError if none."""
    try:
        return Tokenizer.from_buffer(files["tokenizer.json"])
    except Exception as error:  # the library has no exception of its own
        cause = " ".join(str(error).split())
        raise CheckpointError(f"cannot read the tokenizer.json: {cause:.200}") from None


def vocabulary(files: dict[str, bytes]) -> int:
    """Return the number of tokens of a tokenizer; files: the contents of its files, by name."""
    return _tokenizer(files).get_vocab_size()


def complete_settings(files: dict[str, bytes], context_length: int) -> dict[str, bytes]:
    """Return a tokenizer_config.json for transformers, by name; nothing if the files have one.

    files: the contents of the tokenizer's files, by name. The tokenizer_config.json of a corpus
    has only special tokens and the chat template. Without an eos_token there, the token that ends
    a document is one.
    """
    settings = _settings(files)
    if "tokenizer_class" in settings:
        return {}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    if _tokenizer(files).token_to_id(END) is not None:
        settings.setdefault("eos_token", END)
    return {SETTINGS: json.dumps(settings, indent=2, ensure_ascii=False).encode()}


def read_file(path: str, opened: Callable[[str], BinaryIO]) -> bytes:
    """Return the contents of a file of a tokenizer; UserError if it is too large or unreadable."""
    try:
        with opened(path) as file:
            contents = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if len(contents) > MOST_BYTES:
        raise CheckpointError(f"{path} has more than {MOST_BYTES:,} bytes")
    return contents


# ---- Records -------------------------------------------------------------------------------------


def from_config(
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    files: dict[str, bytes],
    context_length: int,
    where: str,
) -> ModelRecord:
    """Return the record of a model that is imported.

    config, generation: the contents of its config.json and generation_config.json. files: those of
    its tokenizer. where: the path of the config.json, for messages.
    """
    config = config | families.token_ids(config, where)
    if generation is not None:
        families.check_token_ids(generation, GENERATION)
    return ModelRecord(config, context_length, generation, files)


def without_tokenizer(context_length: int) -> ModelRecord:
    """Return the record of a model of which only the length of its texts is known."""
    return ModelRecord(dict.fromkeys(families.TOKENS), context_length)


def record_of_corpora(config: Config) -> ModelRecord:
    """Return the record of a model that a run trains from the beginning: that of its corpora.

    The tokenizer is the one beside the corpora; if they have several, none is known, and so are the
    ids of special tokens.
    """
    length = config.model.seq_length
    paths = [find_tokenizer([], [prefix]) or "" for prefix in prefixes_of(config.data.data)]
    paths = [path for path in paths if path]
    found = [tokenizer_files(path) | _old_documents(path) for path in paths]
    if not found or any(files["tokenizer.json"] != found[0]["tokenizer.json"] for files in found):
        return without_tokenizer(length)
    # That with a chat template, if there is one, and else the first.
    best = max(range(len(found)), key=lambda i: (chat_template(found[i]) is not None, -i))
    files = _with_form(found[best], form_of(prefixes_of(config.data.data)))
    return ModelRecord(ids_of(paths[best]), length, None, files)


def _with_form(files: dict[str, bytes], form: str | None) -> dict[str, bytes]:
    """Return a tokenizer's files that say what names of special tokens become in prompts.

    form: that of all corpora of a run, of which the files are those of one.
    """
    settings = _settings(files)
    documents = settings.get("documents")
    if form is None or not isinstance(documents, dict) or documents.get("special_tokens") == form:
        return files
    settings["documents"] = documents | {"special_tokens": form}
    return files | {SETTINGS: json.dumps(settings, indent=2).encode()}


def _old_documents(tokenizer: str) -> dict[str, bytes]:
    """Return the tokenizer_config.json that a corpus from before version 0.3 would have.

    Nothing beside such a corpus says how its documents begin and end. They have no begin token,
    whatever the tokenizer puts before a text; without this file a checkpoint's prompts would have
    it. Empty for other corpora. tokenizer: the path of PREFIX.tokenizer.json.
    """
    settings = read_settings(tokenizer)
    if not settings.of_corpus or settings.documents.begin is not None:
        return {}
    end = Encoder(load_tokenizer(tokenizer), settings, tokenizer).end_token
    if end is None:
        return {}
    facts = read_object(settings.path) | {"documents": {"begin": [], "end": end}}
    return {"tokenizer_config.json": (json.dumps(facts, indent=2) + "\n").encode()}


def read(folder: str, with_files: bool = True) -> ModelRecord | None:
    """Return the record of a checkpoint; None: it has none, as those from before version 0.3.

    folder: the folder of a checkpoint whose files have been checked. with_files: whether the
    tokenizer's files are read too. Raise UserError if the record is not one.
    """
    listed = folders.read_manifest(folder)["files"]
    if RECORD not in listed:
        return None
    path = os.path.join(folder, RECORD)
    values = families.read_object(path, file_format.open_regular)
    config = values.get("config")
    generation = values.get("generation")
    length = values.get("context_length")
    if not isinstance(config, dict) or not isinstance(generation, (dict, type(None))):
        raise CheckpointError(
            f"{path} is damaged: config is a {type(config).__name__}, not an object, or generation "
            f"is a {type(generation).__name__}, not an object or null"
        )
    if type(length) is not int or length < 1:
        raise CheckpointError(
            f"{path} is damaged: context_length is {length!r:.40}, not a number of tokens above 0"
        )
    families.check_token_ids(config, path)
    families.check_token_ids(generation or {}, path)
    names = [name for name in listed if with_files and is_tokenizer_file(name)]
    opened = file_format.open_regular
    files = {name: read_file(os.path.join(folder, name), opened) for name in names}
    record = ModelRecord(config, length, generation, files)
    if "model_type" in config:
        families.window(config, path)  # UserError if the family or the window is none
    return record


def describe(record: ModelRecord) -> Iterable[str]:
    """Yield lines that say, for people, what a record holds."""
    ids = ", ".join(f"{name} {record.config.get(name)}" for name in families.TOKENS)
    yield f"model record: context length {record.context_length}, {ids}"
    if record.window is not None:
        yield f"sliding window: {record.window} tokens"
    template = "with a chat template" if chat_template(record.files) else "no chat template"
    yield f"tokenizer: {', '.join(record.files) or 'none'}; {template}"
