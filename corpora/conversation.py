"""A talk with a model: the messages so far, and the token ids that its chat template makes of them.

    lines = Lines()
    with Conversation(template, text) as talk:
        ids = talk.prompt(lines.next(1.0))      the user's message, up to where the answer begins
        print(talk.answer(new_ids))             the model's message

A message of the user is a line of the standard input. This module does not import torch.
"""

import queue
import sys
import threading
from typing import Any

from base.cli import check_decoded
from base.errors import CorpusError
from corpora.chat_templates import ChatTemplate
from corpora.text import Text

END_OF_INPUT = ""  # what Lines.next returns after the last line


class Conversation:
    """The messages of a talk; a context manager, as its template is."""

    def __init__(self, template: ChatTemplate, text: Text, system: str | None = None):
        """Begin a talk.

        text: encodes what the template writes; it has a tokenizer. system: the first message, from
        the system; None: there is none.
        """
        self.template = template
        assert text.encoder is not None
        self.encoder = text.encoder
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """End the process that renders the template."""
        self.template.close()

    def prompt(self, message: str) -> list[int]:
        """Add a message of the user, and return the ids of the whole talk.

        They end where the answer begins. The tokenizer adds no token to what the template writes.
        Raise UserError if the template refuses the talk.
        """
        check_decoded("the message", message)
        self.messages.append({"role": "user", "content": message})
        written = self.template.render(self.messages, add_generation_prompt=True)
        return self.encoder.conversation(written).ids

    def answer(self, ids: list[int]) -> str:
        """Add the model's message, and return its text, without special tokens."""
        text = self.encoder.tokenizer.decode(ids, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
        return text


class Lines:
    """The lines of the standard input that are not blank, read by a thread.

    So the ranks of a job can go on to exchange values while the user types.
    """

    def __init__(self) -> None:
        """Start to read."""
        self._lines: queue.Queue[str] = queue.Queue()
        self._failed: BaseException | None = None  # why reading has ended
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def _read(self) -> None:
        """Put the lines of standard input into the queue until it ends; run by a thread."""
        try:
            for line in sys.stdin:
                if line.strip():
                    self._lines.put(line.rstrip("\r\n"))
        except (OSError, UnicodeDecodeError) as error:
            self._failed = error
        self._lines.put(END_OF_INPUT)

    def next(self, seconds: float) -> str | None:
        """Return the next line, END_OF_INPUT after the last one; None: none came in this time.

        Raise UserError if the standard input cannot be read.
        """
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        if line == END_OF_INPUT and self._failed is not None:
            raise CorpusError(f"cannot read the standard input: {self._failed}")
        return line
