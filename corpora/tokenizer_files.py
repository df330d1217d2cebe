"""The files of a tokenizer: tokenizer.json, and the settings and chat templates beside it.

    tokenizer = load_tokenizer("models/qwen/tokenizer.json")
    settings = read_settings("models/qwen/tokenizer.json")      its tokenizer_config.json and others
    settings.template(), settings.tokens["eos_token"]

Beside a corpus PREFIX they are PREFIX.tokenizer.json and PREFIX.tokenizer_config.json. The latter
also says under "documents" what the corpus is (config/corpus_record.py): with which tokens a
document begins and ends, and what names of special tokens became, which encoder.py decides.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from base.errors import CorpusError
from base.regular_files import MOST_OF_TOKENIZER, read_regular
from config.corpus_record import CorpusRecord, from_facts

NAME = "tokenizer.json"


@dataclass(frozen=True)
class Settings:
    """What the files beside a tokenizer.json say of it.

    path: of tokenizer_config.json, for messages. templates: chat templates by name; "default" is
    the one without a name. tokens: special tokens by name, such as eos_token. documents: what the
    corpus says of its documents. of_corpus: whether the tokenizer is the one beside a corpus.
    """

    path: str
    templates: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    documents: CorpusRecord = field(default_factory=CorpusRecord)
    of_corpus: bool = False

    def template(self, name: str | None = None, tools: Any = None) -> str:
        """Return the template that transformers would take; UserError if there is none.

        name: of one of several. tools: a template called tool_use is taken if there are any.
        """
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name in self.templates:
            return self.templates[name]
        if not self.templates:
            raise CorpusError(
                f"{self.path} has no chat_template of text, and there is no chat_template.jinja "
                "beside it; give a file as --chat-template"
            )
        known = ", ".join(sorted(self.templates))
        raise CorpusError(
            f"{self.path} has no chat template {name!r}, but {known}: name one of them"
        )


def load_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer in the file `path`; UserError if it holds none or cannot be read."""
    text = read_text(path)
    if text is None:
        raise CorpusError(f"cannot read the tokenizer {path}: there is no such file")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library has no exception of its own
        cause = " ".join(str(error).split())
        raise CorpusError(f"cannot read the tokenizer {path}: {cause:.200}") from None


def read_settings(tokenizer: str | os.PathLike) -> Settings:
    """Read the settings beside a tokenizer.json, or beside PREFIX.tokenizer.json of a corpus.

    tokenizer: the path of the file, or of a folder that has one. Templates are taken, as
    transformers does, from chat_template.jinja and additional_chat_templates/NAME.jinja, else from
    tokenizer_config.json, where one may be a text or a list of them with names. Files that are
    missing are no error. Raise UserError for one that cannot be read.
    """
    path = os.fspath(tokenizer)
    if os.path.isdir(path):
        path = os.path.join(path, NAME)
    if not path.endswith(NAME):
        return Settings(path)
    stem = path.removesuffix(NAME)
    about = f"{stem}tokenizer_config.json"
    facts = read_object(about)
    if "added_tokens_decoder" not in facts:  # files of earlier versions of transformers
        facts |= read_object(f"{stem}special_tokens_map.json")
    return Settings(
        path=about,
        templates=_template_files(stem) or _templates_of(facts.get("chat_template"), about),
        tokens=_tokens_of(facts),
        documents=from_facts(facts.get("documents"), about),
        of_corpus=bool(os.path.basename(stem)),
    )


def write_settings(path: str, settings: Settings) -> None:
    """Write the tokenizer_config.json of a corpus: templates, named tokens and documents."""
    end = settings.documents.end
    facts: dict[str, Any] = ({} if end is None else {"eos_token": end}) | settings.tokens
    if list(settings.templates) == ["default"]:
        facts["chat_template"] = settings.templates["default"]
    elif settings.templates:
        named = [{"name": name, "template": text} for name, text in settings.templates.items()]
        facts["chat_template"] = named
    facts["documents"] = settings.documents.facts()
    Path(path).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read_object(path: str) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no such file. UserError for other files."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorpusError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def read_template(path: str) -> str:
    """Return the template in a file; UserError."""
    text = read_text(path)
    if text is None:
        raise CorpusError(f"cannot read {path}: there is no such file")
    return text


def read_text(path: str) -> str | None:
    """Return the text of a regular file; None if there is no file. UserError, also for a pipe."""
    try:
        return read_regular(path, MOST_OF_TOKENIZER).decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CorpusError(f"{path} is not UTF-8") from None


def _template_files(stem: str) -> dict[str, str]:
    """Return the templates that are files of their own; stem: the path before tokenizer.json."""
    templates = {}
    text = read_text(f"{stem}chat_template.jinja")
    if text is not None:
        templates["default"] = text
    if os.path.basename(stem):
        return templates  # PREFIX.tokenizer.json beside others' files
    for path in sorted(Path(stem or ".", "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_template(str(path))
    return templates


def _templates_of(value: Any, where: str) -> dict[str, str]:
    """Return the templates in tokenizer_config.json: a text, or a list of texts with names."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    listed = value if isinstance(value, list) else [value]
    templates = {}
    for entry in listed:
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), str) for key in ("name", "template")
        ):
            raise CorpusError(f"{where}: chat_template is no text and no list of named texts")
        templates[entry["name"]] = entry["template"]
    return templates


def _tokens_of(facts: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that have names, which are those that a template may use."""
    named = facts.get("extra_special_tokens")
    named = named if isinstance(named, dict) else {}
    tokens = {}
    for name, value in (facts | named).items():
        token = value.get("content") if isinstance(value, dict) else value
        if (name.endswith("_token") or name in named) and isinstance(token, str):
            tokens[name] = token
    return tokens
