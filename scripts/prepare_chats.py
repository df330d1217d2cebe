"""Turn conversations into a corpus for `train.py --data PREFIX --answers-only`.

    python scripts/prepare_chats.py --out data/chats --tokenizer FOLDER chats.jsonl more.jsonl.gz
    python train.py --data data/chats --answers-only --reset-attention ...

A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]}, and
may have "tools", "documents" and "chat_template_kwargs" for the template. A message may have a
"weight": with 0 its answer is not trained. The tokenizer's chat
template makes the text of it that transformers' apply_chat_template makes, and the end token ends
it; a conversation is a document. OUT.bin and OUT.idx hold the tokens; the pair OUT.targets.bin and
.idx, of the same lengths, holds 1 for each token of an answer, else 0. Answers are what the
template has in {% generation %}; without that tag, what it writes for a message of the assistant
after the prompt before it. The end token counts if the assistant spoke last.

A template that came with a model is a program: it runs in a process with limits of time and memory.
"""

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from base import errors  # first: it ends a Python that is too old

if __name__ == "__main__":
    errors.begin_program()

with errors.installed():
    import numpy as np

    from base.cli import Parser
    from base.errors import CorpusError, UserError, printable
    from config.corpus_record import IDS
    from corpora.chat_environment import MARKS_ANSWERS, REASONING
    from corpora.chat_templates import ChatTemplate
    from corpora.encoder import END, Encoder
    from corpora.text_sources import BY_STDIN, BadTexts, damage_named, objects_of, open_file
    from corpora.token_files import ANSWERS, IndexedDatasetWriter
    from corpora.tokenizer_files import NAME, Settings, read_settings, read_template, write_settings
    from scripts.corpus import check_out, note_replaced, run, write_checksums
    from scripts.encoders import load_encoder

# Keys of a message that hold no text of it, or that a template has under the name of a variable;
# of the others its template decides which are read.
KEYS = {"role", "content", "name", "tool_call_id", "weight"}
KEYS_OF_LINE = {"messages", "chat_template_kwargs"}
MOST_KEYS = 8  # keys in a line
ROLES = ("system", "developer", "user", "assistant", "tool")
# Tokens that end a document in published tokenizers, where their eos_token ends an answer.
ENDS = (END, "<|end_of_text|>", "<|end▁of▁sentence|>", "<eos>", "</s>")
Conversation = dict[str, Any]  # messages, tools, documents, variables


# ---- Reading -------------------------------------------------------------------------------------


def parse_conversation(found: dict[str, Any], template: str = "") -> Conversation:
    """The keyword arguments of a conversation for its template; UserError if the line has none.

    found: the object of a line. template: its text, which may name further roles.
    """
    listed = found["messages"]
    if not isinstance(listed, list) or not listed:
        raise CorpusError('"messages" is not a list of messages')
    for place, message in enumerate(listed, 1):
        if not isinstance(message, dict) or not _has_content(message):
            raise CorpusError(f"message {place} has no content of text, and no tool_calls")
        weight = message.get("weight")
        if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
            raise CorpusError(
                f'message {place} has the "weight" {json.dumps(weight):.40}: it is 0, not to train '
                "on an answer, or 1"
            )
        role = message.get("role")
        named = isinstance(role, str) and (f"'{role}'" in template or f'"{role}"' in template)
        if role not in ROLES and not named:
            raise CorpusError(f"message {place} has no role of {ROLES}, or that the template names")
    conversation: Conversation = {"messages": listed}
    for name in ("tools", "documents"):
        value = found.get(name)
        if isinstance(value, str):  # some data sets have JSON in a text
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise CorpusError(f'"{name}" is a string that is not JSON') from None
        objects = isinstance(value, list) and all(isinstance(each, dict) for each in value)
        if value is not None and not objects:
            raise CorpusError(f'"{name}" is not a list of objects')
        conversation[name] = value
    variables = found.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict) or {"messages", "tools", "documents"} & variables.keys():
        raise CorpusError('"chat_template_kwargs" is not an object of further names')
    conversation["variables"] = variables
    return conversation


def unread_keys(found: dict[str, Any], template: str) -> set[str]:
    """The keys of a line and of its messages that nothing reads, as "train" in messages.

    found: the object of a line. template: its text, which may name further keys.
    """
    by_template = {name for name in ("tools", "documents") if _names(template, name)}
    given = {name for name, value in found.items() if value is not None}
    keys = {json.dumps(name) for name in given - KEYS_OF_LINE - by_template}
    variables = found.get("chat_template_kwargs") or {}
    others = {name for name in variables if not _names(template, name)}
    keys |= {f"{json.dumps(name)} of chat_template_kwargs" for name in others}
    for message in found["messages"]:
        given = {name for name, value in message.items() if value is not None}
        others = {name for name in given - KEYS if not _reads(template, name)}
        if message.get("weight") and message["role"] != "assistant":
            others.add("weight")
        keys |= {f"{json.dumps(name)} of messages of {message['role']}" for name in others}
    return keys


def _reads(template: str, name: str) -> bool:
    """Whether a template names a key of messages, or another name of the same reasoning."""
    names = REASONING if name in REASONING else (name,)
    return any(_names(template, each) for each in names)


def _names(template: str, name: str) -> bool:
    """Whether a template names a key or a variable."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _has_content(message: dict[str, Any]) -> bool:
    """Whether a message has a text, parts of one, or calls of tools in its place."""
    content = message.get("content")
    if isinstance(content, list):
        return bool(content) and all(isinstance(part, dict) for part in content)
    calls = message.get("tool_calls")
    return isinstance(content, str) or (content is None and isinstance(calls, list) and bool(calls))


class ChatLines:
    """The conversations of all files, copied into a temporary file and read in any order.

    Only their places are held in memory.
    """

    def __init__(self, paths: list[str], folder: str, template: str, for_tools: str | None):
        """Copy and check every line; UserError with FILE:LINE. folder: of the temporary file.

        template, for_tools: the text of the template, and of that for conversations with tools.
        """
        self.names: list[str] = []
        self.unread = Counter[str]()  # lines with keys that nothing reads
        self._starts = [0]
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (see `close`)
        for path in map(Path, paths):
            with damage_named(path):
                if str(path) != "-":
                    open_file(path, BY_STDIN).close()
                for place, found in objects_of(path, "messages", BadTexts()):
                    try:
                        conversation = parse_conversation(found, template)
                    except UserError as error:
                        raise CorpusError(f"{place}: {error}") from None
                    chosen = template if found.get("tools") is None else for_tools or template
                    self.unread.update(unread_keys(found, chosen))
                    self._file.write(json.dumps(conversation).encode())
                    self._starts.append(self._file.tell())
                    self.names.append(place)
        self._file.flush()

    def close(self) -> None:
        """Remove the temporary file."""
        self._file.close()

    def shuffled(self, seed: int) -> Iterator[tuple[str, Conversation]]:
        """Every conversation with its FILE:LINE, in an order that follows from the seed."""
        for index in np.random.RandomState(seed).permutation(len(self.names)):
            begin, end = self._starts[index], self._starts[index + 1]
            raw = os.pread(self._file.fileno(), end - begin, begin)
            yield self.names[index], json.loads(raw)


# ---- Encoding ------------------------------------------------------------------------------------


def chat_settings(name: str) -> Settings:
    """What the files beside the tokenizer say that --tokenizer names; UserError."""
    path = Path(name)
    if name == "bytes":
        return Settings(name)
    return read_settings(path if path.is_dir() or name.endswith(NAME) else path.parent / NAME)


def load_template(options: argparse.Namespace, settings: Settings) -> tuple[str, str | None]:
    """The template for conversations, and the one for those with tools if it is another; UserError.

    options: --chat-template, a file or the name of one of several templates.
    """
    named = options.chat_template
    if named is None:
        plain = settings.template()
        return plain, settings.templates.get("tool_use")
    if named in settings.templates:
        return settings.templates[named], None
    return read_template(named), None


def end_of_documents(name: str, end_token: str | None, settings: Settings, template: str) -> str:
    """The token that ends a conversation: --end-token, else that of the tokenizer's folder.

    Where the template writes that token within a conversation, as the end of an answer, another one
    of ENDS that it does not name is taken if the tokenizer has it: the end token also says to
    --reset-attention where a conversation ends.
    """
    if end_token is not None:
        return end_token
    encoder = load_encoder(name, None)
    own = str(encoder.end_token)
    by_name = settings.tokens.get("eos_token") == own and "eos_token" in template
    if own not in template and not by_name:
        return own
    others = [end for end in ENDS if end != own and end not in template]
    known = (end for end in others if encoder.tokenizer.token_to_id(end) is not None)
    return next(known, own)


def encode(
    encoder: Encoder, template: ChatTemplate, conversation: Conversation
) -> tuple[list[int], np.ndarray]:
    """The tokens of a conversation with its end token, and 1 for each that is of an answer.

    An answer of weight 0 is none. UserError if it is not known which answer that is.
    """
    text, spans = template.answers(
        conversation["messages"],
        tools=conversation["tools"],
        documents=conversation["documents"],
        **conversation["variables"],
    )
    check_contents(conversation, text)
    weights = weights_of(conversation)
    if 0 in weights and len(spans) != len(weights):
        raise CorpusError(
            f"the chat template marks {len(spans)} answers of {len(weights)} messages of the "
            'assistant: it is not known which has the "weight" 0'
        )
    spans = [span for number, span in enumerate(spans) if weights[number:][:1] != [0]]
    encoding = encoder.conversation(text)
    ids = list(encoding.ids)
    answers = np.zeros(len(ids) + 1, np.int64)
    if MARKS_ANSWERS.search(template.source):
        for begin, stop in spans:  # as transformers marks them, by the first and last character
            inside = [encoding.char_to_token(place) for place in range(begin, stop)]
            tokens = [token for token in inside if token is not None]
            if tokens:
                answers[tokens[0] : tokens[-1] + 1] = 1
    else:
        begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
        for begin, stop in spans:
            answers[:-1] |= (begins >= begin) & (begins < stop)
    if ids and ids[-1] == encoder.end:
        return ids, answers[:-1]  # the template has ended it with that token
    answers[-1] = conversation["messages"][-1]["role"] == "assistant" and weights[-1] != 0
    return [*ids, encoder.end], answers


def check_contents(conversation: Conversation, text: str) -> None:
    """Raise UserError if the text of a conversation has the parts of a content as Python shows
    them, "[{'type': 'text', ...": a template without a loop over parts writes that.
    """
    for place, message in enumerate(conversation["messages"], 1):
        content = message.get("content")
        if isinstance(content, list) and str(content) in text:
            raise CorpusError(
                f"message {place} has its content in parts, of which the chat template writes "
                f"{content!s:.40}...: give it as one text"
            )


def weights_of(conversation: Conversation) -> list[int]:
    """The weight of each message of the assistant, 0 or 1."""
    answers = [m for m in conversation["messages"] if m["role"] == "assistant"]
    return [1 if m.get("weight") is None else int(m["weight"]) for m in answers]


class Counts:
    """What the summary says of the conversations that were written."""

    def __init__(self, encoder: Encoder, settings: Settings):
        self.learned = 0  # tokens of answers
        self.cut = 0  # conversations with the end token before their end
        self.left = 0  # answers of weight 0
        self._end = encoder.end
        bos = encoder.tokenizer.token_to_id(settings.tokens.get("bos_token") or "")
        # What all conversations may begin with, so that prompts begin with it too.
        self.begin = encoder.begin or ([] if bos is None else [bos])
        self._encoder = encoder

    def add(self, tokens: list[int], answers: np.ndarray, conversation: Conversation) -> None:
        """Count a conversation."""
        self.left += weights_of(conversation).count(0)
        self.learned += int(answers.sum())
        self.cut += self._end in tokens[:-1]
        if tokens[: len(self.begin)] != self.begin:
            self.begin = []

    def begin_tokens(self) -> list[str]:
        """The tokens that all conversations begin with."""
        return [str(self._encoder.tokenizer.id_to_token(id)) for id in self.begin]


# ---- Writing -------------------------------------------------------------------------------------


def write(options: argparse.Namespace) -> str:
    """Write both pairs; lines that say what was written. UserError with FILE:LINE."""
    settings = chat_settings(options.tokenizer)
    plain, for_tools = load_template(options, settings)
    end = end_of_documents(options.tokenizer, options.end_token, settings, plain)
    encoder = load_encoder(options.tokenizer, end, IDS)
    names = (options.out, options.out + ANSWERS)
    counts = Counts(encoder, settings)
    target = os.path.dirname(options.out) or "."
    os.makedirs(target, exist_ok=True)
    lines = ChatLines(options.paths, target, plain, for_tools)
    marks = IndexedDatasetWriter(names[1], 2)
    templates = [ChatTemplate(plain, settings.tokens)]
    if for_tools is not None:
        templates.append(ChatTemplate(for_tools, settings.tokens))
    try:
        with marks, IndexedDatasetWriter(options.out, encoder.vocab_size) as writer:
            for place, conversation in lines.shuffled(options.shuffle_seed):
                template = templates[0 if conversation["tools"] is None else -1]
                try:
                    tokens, answers = encode(encoder, template, conversation)
                except UserError as error:
                    raise CorpusError(f"{place}: {error}") from None
                writer.add_document(tokens)
                marks.add_document(answers)
                counts.add(tokens, answers, conversation)
            # An older corpus of this name must not remain beside the new marks.
            for name in names:
                for suffix in (".idx", ".sha256"):
                    Path(name + suffix).unlink(missing_ok=True)
            encoder.tokenizer.save(options.out + ".tokenizer.json")
            used = {"default": plain} | ({"tool_use": for_tools} if for_tools else {})
            begin = tuple(counts.begin_tokens())
            record = replace(encoder.record, begin=begin, largest_id=writer.largest_id)
            kept = Settings("", used, settings.tokens, record)
            write_settings(options.out + ".tokenizer_config.json", kept)
    finally:
        lines.close()
        for each in templates:
            each.close()
    for name in names:
        write_checksums(name)
    resets = "--reset-attention --reset-positions "
    note = f"\n{counts.left:,} answers of weight 0 are not trained" if counts.left else ""
    if lines.unread:
        named = [f"{key} (in {count:,})" for key, count in lines.unread.most_common(MOST_KEYS)]
        more = len(lines.unread) - len(named)
        named += [f"{more} more"] if more > 0 else []
        note += printable(f"\nkeys of conversations that nothing reads: {', '.join(named)}")
    if counts.cut:
        resets = ""
        note += (
            f"\nnote: {encoder.end_token} ends the conversations, and is also within "
            f"{counts.cut:,} of them: with --reset-attention each part of these would be alone; "
            "--end-token names another one"
        )
    return (
        f"{options.out}: {writer.documents:,} conversations, {writer.tokens:,} tokens, "
        f"{counts.learned:,} of answers{note}\ntrain with: --data {shlex.quote(options.out)} "
        f"--answers-only "
        f"{resets}--eod-token {encoder.end} --vocab-size {encoder.vocab_size}"
    )


def main(arguments: list[str]) -> None:
    """Write the corpus that the arguments say; raises UserError."""
    parser = Parser.described(__doc__)
    add = parser.add_argument
    add("paths", nargs="+", metavar="FILE", help="JSON lines, also compressed; - for stdin")
    add("--out", required=True, metavar="PREFIX", help="write PREFIX.bin, .idx and .targets.*")
    add("--tokenizer", required=True, help="a Hugging Face folder, or a tokenizer.json")
    text = "a Jinja template, or the name of one of the tokenizer's (that of the tokenizer)"
    add("--chat-template", metavar="FILE", help=text)
    text = "ends every conversation (the tokenizer's eos_token, or <|endoftext|> where the template"
    add("--end-token", help=f"{text} writes the eos_token itself)")
    add("--shuffle-seed", type=int, default=1234, help="seed of the conversations' order (1234)")
    options = parser.parse_args(arguments)
    if not 0 <= options.shuffle_seed < 2**32:
        raise UserError(f"--shuffle-seed({options.shuffle_seed}) must be in 0..{2**32 - 1}")
    check_out(options.out, "data/chats")
    note_replaced(options.out)
    print(write(options))


if __name__ == "__main__":
    run(main)
