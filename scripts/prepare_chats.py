"""Turn conversations into a corpus for `train.py --data PREFIX --answers-only`.

    python scripts/prepare_chats.py --out data/chats --tokenizer FOLDER chats.jsonl
    python train.py --data data/chats --answers-only --reset-attention --eod-token ID ...

A line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]}. The
tokenizer's chat template makes a text of it, and the end token ends it; a conversation is a
document. OUT.bin and OUT.idx hold the tokens; the pair OUT.targets.bin and .idx, of the same
lengths, holds 1 for each token that begins in an assistant's message, as the template writes it,
else 0. The end token counts if the assistant spoke last.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import messages  # first: it ends a Python that is too old

with messages.installed():
    import jinja2
    import numpy as np
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from config.messages import Parser, UserError
    from corpora.token_files import ANSWERS, IndexedDatasetWriter
    from scripts.corpus import check_out, run, write_checksums
    from scripts.encoders import Encoder, load_encoder

ROLES = ("system", "user", "assistant", "tool")


class Template:
    """A chat template, in a sandbox that reaches no file and no other object."""

    def __init__(self, text: str, tokens: dict[str, str]):
        """tokens: what the template may name, as eos_token. UserError if it cannot be parsed."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self.source = text
        self.tokens = tokens
        try:
            self.template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template cannot be read: {error}") from None

    def text(self, conversation: list[dict], prompt: bool = False) -> str:
        """Its text; prompt: with what the template puts before an answer. UserError if it fails."""
        try:
            return self.template.render(
                messages=conversation, add_generation_prompt=prompt, **self.tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"the chat template refuses it: {error}") from None

    def answers(self, conversation: list[dict]) -> tuple[str, list[tuple[int, int]]]:
        """The whole text, and where the assistant's messages are in it; UserError if the template
        writes the start of a conversation in another way once it goes on.
        """
        whole, spans = self.text(conversation), []
        for place, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            before = self.text(conversation[:place], prompt=True)
            after = self.text(conversation[: place + 1])
            if not (after.startswith(before) and whole.startswith(after)):
                raise UserError(f"the chat template writes message {place + 1} in several ways")
            spans.append((len(before), len(after)))
        return whole, spans


def _refuse(reason: str) -> None:
    """Raise an error: the function that templates call `raise_exception`."""
    raise jinja2.TemplateError(reason)


def parse_conversation(line: str) -> list[dict[str, Any]]:
    """The messages of a line; UserError if it has none, or other things in their place."""
    try:
        found = json.loads(line)["messages"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError('no JSON object with "messages"') from None
    if not isinstance(found, list) or not found:
        raise UserError('"messages" is not a list of messages')
    for place, message in enumerate(found, 1):
        fine = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not fine or message.get("role") not in ROLES:
            raise UserError(f"message {place} has no content of text, or no role of {ROLES}")
    return found


def load_template(file: str | None, folder: Path) -> Template:
    """The template of a file, else that of the tokenizer's folder, which names the tokens that a
    template may use; UserError.
    """
    about = folder / "tokenizer_config.json"
    try:
        facts = json.loads(about.read_text(encoding="utf-8")) if about.exists() else {}
        text = Path(file).read_text(encoding="utf-8") if file else facts.get("chat_template")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file or about}: {error}") from None
    if not isinstance(text, str):
        raise UserError(f"{about} has no chat_template of text; give a file as --chat-template")
    tokens = {}
    for name, value in facts.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return Template(text, tokens)


def encode(
    encoder: Encoder, template: Template, conversation: list[dict]
) -> tuple[list[int], np.ndarray]:
    """The tokens of a conversation with its end token, and 1 for each that is of an answer."""
    text, spans = template.answers(conversation)
    encoding = encoder.tokenizer.encode(text, add_special_tokens=False)
    begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
    answers = np.zeros(len(begins) + 1, np.int64)
    for begin, stop in spans:
        answers[:-1] |= (begins >= begin) & (begins < stop)
    answers[-1] = conversation[-1]["role"] == "assistant"
    return [*encoding.ids, encoder.end], answers


def write(options: argparse.Namespace) -> str:
    """Write both pairs; a line that says what was written. UserError with FILE:LINE."""
    source = Path(options.tokenizer)
    path = source / "tokenizer.json" if source.is_dir() else source
    encoder = load_encoder(str(path), options.end_token)
    encoder.tokenizer.encode_special_tokens = False  # those in the template's text are encoded
    template = load_template(options.chat_template, path.parent)
    names = (options.out, options.out + ANSWERS)
    marks = IndexedDatasetWriter(names[1], 2)
    learned = 0
    with marks, IndexedDatasetWriter(options.out, encoder.vocab_size) as writer:
        for place, line in _lines(options.paths, options.shuffle_seed):
            try:
                tokens, answers = encode(encoder, template, parse_conversation(line))
            except UserError as error:
                raise UserError(f"{place}: {error}") from None
            writer.add_document(tokens)
            marks.add_document(answers)
            learned += int(answers.sum())
        # An older corpus of this name must not remain beside the new marks.
        for name in names:
            for suffix in (".idx", ".sha256"):
                Path(name + suffix).unlink(missing_ok=True)
        encoder.tokenizer.save(options.out + ".tokenizer.json")
        settings = {"chat_template": template.source, **template.tokens}
        Path(options.out + ".tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    for name in names:
        write_checksums(name)
    return (
        f"{options.out}: {writer.documents:,} conversations, {writer.tokens:,} tokens, "
        f"{learned:,} of answers\ntrain with: --data {options.out} --answers-only "
        f"--reset-attention --reset-positions --eod-token {encoder.end} --vocab-size "
        f"{encoder.vocab_size}"
    )


def _lines(paths: list[str], seed: int) -> Iterator[tuple[str, str]]:
    """Every line that is not blank, with its FILE:LINE, in an order that follows from the seed.

    Only the lines' places are held in memory.
    """
    places = []
    for path in paths:
        offset = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    places.append((path, offset, number))
                offset += len(line)
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(open(path, "rb")) for path in paths}
        for index in np.random.RandomState(seed).permutation(len(places)):
            path, offset, number = places[index]
            files[path].seek(offset)
            yield f"{path}:{number}", files[path].readline().decode(errors="replace")


def main(arguments: list[str]) -> None:
    """Write the corpus that the arguments say; raises UserError."""
    parser = Parser.described(__doc__)
    add = parser.add_argument
    add("paths", nargs="+", metavar="FILE", help="JSON lines")
    add("--out", required=True, metavar="PREFIX", help="write PREFIX.bin, .idx and .targets.*")
    add("--tokenizer", required=True, help="a Hugging Face folder, or a tokenizer.json")
    add("--chat-template", metavar="FILE", help="a Jinja template (that of the tokenizer's folder)")
    add("--end-token", default="<|endoftext|>", help="ends every conversation (<|endoftext|>)")
    add("--shuffle-seed", type=int, default=1234, help="seed of the conversations' order (1234)")
    options = parser.parse_args(arguments)
    if not 0 <= options.shuffle_seed < 2**32:
        raise UserError(f"--shuffle-seed({options.shuffle_seed}) must be in 0..{2**32 - 1}")
    check_out(options.out, "data/chats")
    print(write(options))


if __name__ == "__main__":
    run(main)
