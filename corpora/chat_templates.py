"""Chat templates: where a tokenizer has them, and rendering them in a process with limits.

    settings = read_settings("models/qwen/tokenizer.json")
    with ChatTemplate(settings.template(), settings.tokens) as template:
        text = template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        text, spans = template.answers(messages, tools=tools)

The text is what `apply_chat_template` of transformers writes (chat_environment.py). A template is a
program that came with a model: it reaches no file and no other object, and its process has at most
SECONDS of a core for a conversation and MEMORY bytes.
"""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from config.messages import UserError

SECONDS = 5  # of a core, for a conversation
MEMORY = 512 << 20  # bytes, beyond those of the process before it has a template
MOST_BYTES = 1 << 26  # of a file of settings or a template
Span = tuple[int, int]
ROOT = Path(__file__).resolve().parent.parent
SERVE = "import sys; sys.path.insert(0, '.'); from corpora.chat_environment import serve; "
# Special tokens by the names that transformers gives to templates.
_EXTRA = "extra_special_tokens"


# ---- The files of a tokenizer --------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What the files beside a tokenizer.json say of it.

    templates: chat templates by name; "default" is the one without a name. tokens: special tokens
    by name, such as eos_token. begins: whether documents begin with the tokens that the tokenizer
    puts before a text (`add_bos_token`), None if no file says so. path: of the file, for messages.
    """

    path: str
    templates: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    begins: bool | None = None

    def template(self, name: str | None = None, tools: Any = None) -> str:
        """Return the template that transformers would take; UserError if there is none.

        name: of one of several. tools: a template called tool_use is taken if there are any.
        """
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name in self.templates:
            return self.templates[name]
        if not self.templates:
            raise UserError(
                f"{self.path} has no chat_template of text, and there is no chat_template.jinja "
                "beside it; give a file as --chat-template"
            )
        known = ", ".join(sorted(self.templates))
        raise UserError(f"{self.path} has no chat template {name!r}, but {known}: name one of them")


def read_settings(tokenizer: str | os.PathLike) -> Settings:
    """Read the settings beside a tokenizer.json, or beside PREFIX.tokenizer.json of a corpus.

    tokenizer: the path of the file, or of a folder that has one. Templates are taken, as
    transformers does, from chat_template.jinja and additional_chat_templates/NAME.jinja, else from
    tokenizer_config.json, where one may be a text or a list of them with names. Raise UserError for
    a file that cannot be read.
    """
    path = os.fspath(tokenizer)
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    stem = path.removesuffix("tokenizer.json")
    if stem == path:
        return Settings(path)
    about = f"{stem}tokenizer_config.json"
    facts = read_object(about)
    if "added_tokens_decoder" not in facts:  # files of earlier versions
        facts |= read_object(f"{stem}special_tokens_map.json")
    begins = facts.get("add_bos_token")
    return Settings(
        path=about,
        templates=_template_files(stem) or _templates_of(facts.get("chat_template"), about),
        tokens=_tokens_of(facts),
        begins=begins if isinstance(begins, bool) else None,
    )


def read_object(path: str) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no such file. UserError for other files."""
    text = _read(path)
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def read_template(path: str) -> str:
    """Return the template in a file; UserError."""
    text = _read(path)
    if text is None:
        raise UserError(f"cannot read {path}: there is no such file")
    return text


def _read(path: str) -> str | None:
    """Return the text of a regular file; None if there is none. A pipe is an error at once."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                raise UserError(f"cannot read {path}: it is not a regular file")
            raw = f.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(raw) > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES:,} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8") from None


def _template_files(stem: str) -> dict[str, str]:
    """Return the templates that are files of their own; stem: the path before tokenizer.json."""
    templates = {}
    text = _read(f"{stem}chat_template.jinja")
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
            raise UserError(f"{where}: chat_template is no text and no list of named texts")
        templates[entry["name"]] = entry["template"]
    return templates


def _tokens_of(facts: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that have names, which are those that a template may use."""
    named = facts.get(_EXTRA) if isinstance(facts.get(_EXTRA), dict) else {}
    tokens = {}
    for name, value in (facts | named).items():
        token = value.get("content") if isinstance(value, dict) else value
        if (name.endswith("_token") or name in named) and isinstance(token, str):
            tokens[name] = token
    return tokens


# ---- Rendering -----------------------------------------------------------------------------------


class ChatTemplate:
    """A chat template and the process that renders it; a context manager.

    The process starts with the first conversation, and again after one that it did not survive.
    """

    def __init__(self, source: str, tokens: dict[str, str] | None = None):
        """source: the text of the template. tokens: what it may name, such as eos_token."""
        self.source = source
        self.tokens = dict(tokens or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None  # what the process says when it fails

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
        self._ended()

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list | None = None,
        documents: list | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation.

        messages, tools, documents, variables: values of JSON, as for `apply_chat_template`.
        add_generation_prompt: with what the template puts before an answer. Raise UserError if the
        template cannot be read, does not take the conversation, or goes beyond its limits.
        """
        text, _ = self._ask(
            messages,
            variables,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
        )
        return text

    def answers(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list | None = None,
        documents: list | None = None,
        **variables: Any,
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the ranges of characters that answers have.

        They are those in {% generation %} where the template has that tag. Else an answer is what
        the template adds for a message of the assistant to the prompt before it. Raise UserError,
        also if the template writes the start of a conversation in another way once it goes on.
        """
        return self._ask(messages, variables, tools=tools, documents=documents, answers=True)

    def _ask(
        self, messages: list[dict[str, Any]], variables: dict[str, Any], **options: Any
    ) -> tuple[str, list[Span]]:
        """Have the process render a conversation; UserError."""
        request = self.tokens | variables | options
        request |= {"template": self.source, "messages": messages}
        try:
            line = json.dumps(request).encode() + b"\n"
        except RecursionError:
            raise UserError("the conversation is nested too deeply") from None
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            raise UserError(self._death(len(messages)))
        found = json.loads(answer)
        if isinstance(found, str):
            raise UserError(found)
        text, spans = found
        return text, [(begin, end) for begin, end in spans]

    def _ended(self) -> tuple[int, str]:
        """Forget the process when it has ended; return its status and its last words."""
        process, errors = self._process, self._errors
        self._process = self._errors = None
        if process is None or errors is None:
            return 0, ""
        process.communicate()
        with errors:
            errors.seek(0)
            last = errors.read(1 << 16).decode(errors="replace").strip().splitlines()[-1:]
        return process.returncode, " ".join(last)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_ended`)
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{SERVE}serve({SECONDS}, {MEMORY})"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        return self._process

    def _death(self, count: int) -> str:
        """Return why the process ended during a conversation with `count` messages."""
        status, words = self._ended()
        if status == -signal.SIGXCPU:
            return f"the chat template takes more than {SECONDS} s for its {count:,} messages"
        if status < 0:
            name = signal.Signals(-status).name
            return f"the chat template has ended the process that renders it ({name})"
        return f"the process that renders chat templates has ended: {words or status}"


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    tools: list | None = None,
    add_generation_prompt: bool = False,
    **tokens: Any,
) -> str:
    """Return the text of one conversation; a process starts and ends for it.

    See `ChatTemplate.render`. tokens: what the template may name, such as eos_token="</s>".
    """
    with contextlib.closing(ChatTemplate(template)) as made:
        return made.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **tokens
        )
