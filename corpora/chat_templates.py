"""Chat templates, rendered in a process with limits of time and memory.

    settings = read_settings("models/qwen/tokenizer.json")          # tokenizer_files.py
    with ChatTemplate(settings.template(), settings.tokens) as template:
        text = template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        text, spans = template.answers(messages, tools=tools)

The text is what `apply_chat_template` of transformers writes (chat_environment.py). A template is a
program that came with a model: it reaches no file and no other object, and its process has at most
SECONDS of a core for a conversation and MEMORY bytes.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from base.errors import CorpusError
from base.module_program import module_program

SECONDS = 5  # of a core, for a conversation
MEMORY = 512 << 20  # bytes, beyond those of the process before it has a template
Span = tuple[int, int]
ROOT = Path(__file__).resolve().parent.parent


class ChatTemplate:
    """A chat template and the process that renders it; a context manager.

    The process starts with the first conversation, and again after one that it did not survive.
    """

    def __init__(self, source: str, tokens: dict[str, str] | None = None):
        """Start no process yet. source: of the template. tokens: variables such as eos_token."""
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
        """Return a conversation's text and spans of answers, which the process has rendered.

        options: of the request beside the variables. Raise UserError if the template fails, or if
        the process has ended.
        """
        request = self.tokens | variables | options
        request |= {"template": self.source, "messages": messages}
        try:
            line = json.dumps(request).encode() + b"\n"
        except RecursionError:
            raise CorpusError("the conversation is nested too deeply") from None
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
            raise CorpusError(self._death(len(messages)))
        found = json.loads(answer)
        if isinstance(found, str):
            raise CorpusError(found)
        text, spans = found
        return text, [(begin, end) for begin, end in spans]

    def _ended(self) -> tuple[int, str]:
        """Wait for the end of the process; return its status and the last line of its stderr."""
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
        """Return the process that renders, which is started if there is none."""
        if self._process is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_ended`)
            program = module_program(
                f"{__package__}.chat_environment", __file__, f"serve({SECONDS}, {MEMORY})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
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
