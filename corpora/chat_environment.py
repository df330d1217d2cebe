"""Renders chat templates of Hugging Face, in the process that calls it.

    text, spans = render(template, messages, tools=None, eos_token="</s>")

Templates are written for the Jinja environment of transformers. Where transformers is installed
its own function renders them; without it `environment` has the same filters, functions and tags. A
template from elsewhere may loop for ever or fill the memory: programs use chat_templates.py, which
renders in a process with limits. This module is what that process runs (`serve`).

A span is a range of characters of the text, [first, last + 1], that an answer has.
"""

import contextlib
import datetime
import functools
import json
import math
import re
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import jinja2
from jinja2 import nodes, runtime
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

Message = dict[str, Any]
Span = tuple[int, int]
# A template with this tag marks its answers itself.
MARKS_ANSWERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Models' files and clients have called the reasoning of a message by these names.
REASONING = ("reasoning_content", "thinking", "reasoning")
MOST_TEXT = 1 << 22  # characters of a rendered conversation; a tokenizer takes 100 bytes for each


class TemplateError(Exception):
    """A template that cannot be read, or that does not take a conversation; with the reason."""


# ---- The environment -----------------------------------------------------------------------------


class _Generation(Extension):
    """The tag {% generation %} ... {% endgeneration %}, which marks what a model writes itself."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

    def __init__(self, environment: jinja2.Environment):
        """Register the tag in Jinja's environment; spans are kept within `recording` only."""
        super().__init__(environment)
        self.written: list[str] | None = None  # the pieces before the tag, while `recording`
        self.spans: list[Span] = []

    def parse(self, parser: Parser) -> nodes.Node:
        """Make a call of `_note` of the lines between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: runtime.Macro) -> str:
        """Return what the lines between the tags write, and keep its span of characters."""
        text = caller()
        if self.written is not None:
            begin = sum(map(len, self.written))
            self.spans.append((begin, begin + len(text)))
        return text

    @contextlib.contextmanager
    def recording(self, written: list[str]) -> Iterator[list[Span]]:
        """Yield the spans, which grow as the block renders; `written`: its pieces so far."""
        self.written, self.spans = written, []
        try:
            yield self.spans
        finally:
            self.written = None


class _Namespace(Namespace):
    """Jinja's namespace, whose attributes may not begin with an underscore: those are Python's."""

    def __init__(*args: Any, **kwargs: Any):  # `self` may be an attribute's name
        """Take attributes as dict() does; SecurityError for a name that begins with _."""
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"an attribute of a namespace is called {name!r}")


class _Dict:
    """The function `dict` of templates, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        """Make a dictionary with the same value for each key."""
        return dict.fromkeys(*args)


def _raise_exception(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it was read: Jinja's own filter sorts keys, and escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment in which transformers renders chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


# ---- Rendering -----------------------------------------------------------------------------------


def own_render(
    template: str, messages: list[Message], marks: bool, variables: dict[str, Any]
) -> tuple[str, list[Span]]:
    """Render without transformers. marks: whether to return the spans of {% generation %}."""
    compiled = _compiled(template)
    values = variables | {"messages": [_with_reasoning(message) for message in messages]}
    if not marks:
        return compiled.render(values), []
    pieces: list[str] = []
    tag = compiled.environment.extensions[_Generation.identifier]
    assert isinstance(tag, _Generation)
    with tag.recording(pieces) as spans:
        pieces.extend(compiled.generate(values))
    return "".join(pieces), spans


def _with_reasoning(message: Message) -> Message:
    """Give the reasoning of a message the two names that templates read."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


@functools.cache
def _render_of_transformers() -> Any:
    """Return transformers' function that renders templates; None where there is none."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        return None
    return render_jinja_template


def _render_once(
    template: str, messages: list[Message], marks: bool, variables: dict[str, Any]
) -> tuple[str, list[Span]]:
    """Return the text of a conversation and, with `marks`, the spans in {% generation %}.

    transformers renders it where it is installed. Raise TemplateError for more than MOST_TEXT
    characters.
    """
    theirs = _render_of_transformers()
    if theirs is None:
        text, spans = own_render(template, messages, marks, variables)
    else:
        texts, found = theirs(
            [messages],
            chat_template=template,
            return_assistant_tokens_mask=marks,
            **variables,
        )
        text, spans = texts[0], [tuple(span) for span in found[0]] if marks else []
    if len(text) > MOST_TEXT:
        raise TemplateError(
            f"the chat template writes {len(text):,} characters, more than {MOST_TEXT:,}"
        )
    return text, spans


def render(
    template: str,
    messages: list[Message],
    *,
    tools: list | None = None,
    documents: list | None = None,
    add_generation_prompt: bool = False,
    answers: bool = False,
    **variables: Any,
) -> tuple[str, list[Span]]:
    """Return the text of a conversation, as `apply_chat_template(tokenize=False)` writes it.

    messages, tools, documents: values of JSON. variables: what else the template may name, such as
    eos_token. answers: also return the spans of the assistant's answers, else none. Raise
    TemplateError if the template cannot be read or does not take the conversation.
    """
    with _reasons():
        # As transformers does: to many templates a key without a value is not a missing key.
        messages = [{k: v for k, v in each.items() if v is not None} for each in messages]
        given = {"tools": tools, "documents": documents}
        plain = variables | given | {"add_generation_prompt": add_generation_prompt}
        if not answers:
            return _render_once(template, messages, False, plain)
        if MARKS_ANSWERS.search(template):
            return _render_once(template, messages, True, plain)
        return _answers_by_prefixes(template, messages, variables | given)


def _answers_by_prefixes(
    template: str, messages: list[Message], variables: dict[str, Any]
) -> tuple[str, list[Span]]:
    """Find the answers of a template that does not mark them.

    An answer is what the text of a conversation has more than the prompt before the answer.
    """

    def text_of(count: int, prompt: bool = False) -> str:
        also = variables | {"add_generation_prompt": prompt}
        return _render_once(template, messages[:count], False, also)[0]

    whole = text_of(len(messages))
    spans = []
    for place, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = text_of(place, prompt=True)
        after = text_of(place + 1)
        if not (after.startswith(before) and whole.startswith(after)):
            raise TemplateError(
                f"the chat template writes message {place + 1} in several ways: mark the answers "
                "in it by {% generation %} ... {% endgeneration %}"
            )
        spans.append((len(before), len(after)))
    return whole, spans


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Turn what a template may raise into TemplateError."""
    try:
        yield
    except TemplateError:
        raise
    except jinja2.TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
        raise TemplateError(f"the chat template cannot be read: {reason}") from None
    except RecursionError:
        raise TemplateError("the chat template is nested too deeply, or calls itself") from None
    except MemoryError:
        raise TemplateError("the chat template needs too much memory") from None
    except Exception as error:  # a template may raise any exception of Python's own functions
        reason = str(error) or type(error).__name__
        raise TemplateError(f"the chat template refuses it: {reason}") from None


# ---- The process with limits ---------------------------------------------------------------------


def serve(seconds: int, size: int) -> None:
    """Answer requests, a line of JSON each, until standard input ends.

    A request has the keyword arguments of `render`; an answer is [text, spans] or the text of a
    TemplateError. The process ends by a signal if a request takes `seconds` of a core; memory
    beyond `size` bytes above what the process has at the start is refused.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program that has started it says what ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _render_of_transformers()  # imported before the limits
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin.buffer:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit = math.ceil(usage.ru_utime + usage.ru_stime) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
        answer: Any
        try:
            answer = render(**json.loads(line))
        except TemplateError as error:
            answer = str(error)
        except MemoryError:
            answer = "the conversation needs too much memory"
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
