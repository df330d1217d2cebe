"""Chat templates: if this failed, a model would be tuned on another text than it meets in use."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from ranks import ROOT
from test_chats import END, folder, prepare  # noqa: F401 (a fixture)
from tokenizers import Tokenizer

from base.errors import UserError
from corpora import chat_environment, chat_templates
from corpora.chat_templates import ChatTemplate
from corpora.token_files import IndexedDataset
from corpora.tokenizer_files import read_settings

transformers = pytest.importorskip("transformers")

TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"q": {"type": "string", "a": "<ü> & 'x'"}}},
    }
]
CALL = {"name": "find", "arguments": {"q": "Tom's <b> & café", "a": [1, 2.5, None, True]}}
CHATS = {
    "plain": [
        {"role": "system", "content": "Sei knapp — ä"},
        {"role": "user", "content": "Grüße 🎲?"},
        {"role": "assistant", "content": " Ja.\n "},
    ],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "why 🎲"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "🎲"},
    ],
    "tools": [
        {"role": "user", "content": "find it"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]},
        {"role": "tool", "content": '{"found": "Köln"}', "name": "find"},
        {"role": "assistant", "content": "Köln"},
    ],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "p1"}, {"type": "text", "text": "é"}],
        },
        {"role": "assistant", "content": "x", "name": None},
    ],
}
# Short ones of our own, each with something that published templates use.
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES = {
    "tojson": """{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>
{{ c.function.arguments | tojson(separators=(',', ':'), sort_keys=true) }}{% endfor %}
{{ eos_token }}{% endfor %}"""
    + PROMPT,
    "loops": """{{ bos_token }}{% set ns = namespace(n=0, last='') %}{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}{% if ns.n > 3 %}{% break %}{% endif %}
<|{{ m['role'] }}|>{{ m.content | string | trim }}{{ m.reasoning_content | default('') }}
{{ dict(a=1, b=ns.n) | tojson }}{% endfor %}"""
    + PROMPT,
    "generation": """{% for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ m.thinking }}{{ eos_token }}
{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
    + PROMPT,
    "documents": """{{ documents | tojson }}
{% for d in documents or [] %}[{{ d.title }}]{% endfor %}
{% for m in messages %}{{ loop.index0 }}{{ m.role }}: {{ m.content }}
{%- if not loop.last %}, {% endif %}
{% endfor %}{{ strftime_now('%Y') }}{% if unknown is defined %}?{% endif %}{{ extra }}""",
    "macros": """{%- macro show(m) -%}<{{ m.role }}>{% if m.content is string %}{{ m.content }}
{%- else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endif %}{%- endmacro -%}
{% for m in messages[::-1] %}{{ show(m) }}{% endfor %}
{{ messages | map(attribute='role') | list }}""",
}


@pytest.fixture(scope="module")
def theirs():
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(
            json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}})
        ),
        bos_token="<s>",
        eos_token="</s>",
    )
    return made


@pytest.mark.parametrize("own", [False, True], ids=["transformers'", "own"])
def test_texts_are_those_of_apply_chat_template(theirs, own):
    """In the environment of transformers, and in ours, which is used where there is none."""
    documents = [{"title": "Über", "text": "x<y"}]
    for name, template in TEMPLATES.items():
        for chat in CHATS.values():
            for more in ({}, {"tools": TOOLS}, {"documents": documents, "extra": "é"}):
                given = dict(more, add_generation_prompt=True)
                expected = theirs.apply_chat_template(
                    chat, chat_template=template, tokenize=False, **given
                )
                given |= {"bos_token": "<s>", "eos_token": "</s>"}
                if own:
                    plain = [{k: v for k, v in m.items() if v is not None} for m in chat]
                    variables = {"tools": None, "documents": None} | given
                    found, _ = chat_environment.own_render(template, plain, False, variables)
                else:
                    found, _ = chat_environment.render(template, chat, **given)
                assert found == expected, name


def test_answers_are_marked_as_transformers_marks_them(theirs):
    template, tokens = TEMPLATES["generation"], {"eos_token": "</s>"}
    for chat in CHATS.values():
        plain = [{k: v for k, v in m.items() if v is not None} for m in chat]
        text, spans = chat_environment.render(template, chat, answers=True, **tokens)
        variables = {"tools": None, "documents": None, "add_generation_prompt": False} | tokens
        assert chat_environment.own_render(template, plain, True, variables) == (text, spans)
        begins = [text[begin:end] for begin, end in spans]
        assert len(begins) == sum(m["role"] == "assistant" for m in chat)
        assert all(begin.endswith("</s>\n") for begin in begins)


def test_masks_are_those_of_transformers(folder):  # noqa: F811
    """Token by token, with characters of several tokens at the ends."""
    (folder / "chat_template.jinja").write_text(TEMPLATES["generation"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    chats = [CHATS["plain"], CHATS["turns"]]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (folder / "c.jsonl").write_text("\n".join(lines))
    prepare(folder)
    hf = transformers.AutoTokenizer.from_pretrained(folder)
    expected = {}
    for chat in chats:
        made = hf.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        expected[tuple(made["input_ids"])] = list(made["assistant_masks"])
    dataset = IndexedDataset(str(folder / "out"))
    dataset.open_answers()
    end = hf.convert_tokens_to_ids(END)
    for i in range(2):
        *ids, last = dataset.get(i).tolist()
        *marks, learned = dataset.answers.get(i).tolist()
        assert (last, learned) == (end, 1)
        assert expected.pop(tuple(ids)) == marks
    assert not expected


def test_templates_are_found_where_transformers_finds_them(folder):  # noqa: F811
    """A text, a list with names, files; all of them as `get_chat_template` chooses."""
    about = folder / "tokenizer_config.json"
    facts = json.loads(about.read_text())
    for templates in ("A", {"default": "A", "tool_use": "B"}, {"x": "A"}):
        for as_files in (False, True):
            hf = transformers.PreTrainedTokenizerFast(
                tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>"
            )
            hf.chat_template = templates
            target = folder / f"saved-{as_files}-{len(templates)}-{type(templates).__name__}"
            hf.save_pretrained(target, save_jinja_files=as_files)
            loaded = transformers.AutoTokenizer.from_pretrained(target)
            for tools in (None, TOOLS):
                settings = read_settings(target)
                assert settings.tokens["eos_token"] == "</s>"
                try:
                    expected = loaded.get_chat_template(tools=tools)
                except ValueError:
                    with pytest.raises(UserError, match="has no chat template 'default', but x"):
                        settings.template(tools=tools)
                else:
                    assert settings.template(tools=tools) == expected
    about.write_text(json.dumps({k: v for k, v in facts.items() if k != "chat_template"}))
    with pytest.raises(
        UserError, match=r"tokenizer_config\.json has no chat_template of text, and"
    ):
        prepare(folder)


# ---- Limits --------------------------------------------------------------------------------------

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
HOSTILE = {
    "endless loops": (NESTED.replace("BODY", ""), r"takes more than \d+ s"),
    "endless text": (NESTED.replace("BODY", "x" * 99), "needs too much memory|takes more than"),
    "a huge text": ("{{ 'x' * 10 ** 10 }}", "needs too much memory"),
    "a text for which a tokenizer has no memory": (
        "{{ 'x' * 5_000_000 }}",
        r"writes 5,000,000 characters, more than 4,194,304",
    ),
    "a huge text of a message": ("{{ messages[0].content * 10 ** 10 }}", "needs too much memory"),
    "a text that doubles": (
        "{% set n = namespace(x='aa') %}"
        "{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "needs too much memory",
    ),
    "a macro that calls itself": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "nested too deeply, or calls itself",
    ),
    "parentheses": ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "nested too deeply"),
    "a format": ("{{ '%1000000000000d' % 1 }}", "memory|refuses it"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_ends_with_a_sentence(case, folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(chat_templates, "SECONDS", 1)
    template, message = HOSTILE[case]
    (folder / "t.jinja").write_text(template)
    (folder / "c.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "ab"}]}))
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match=rf"c\.jsonl:1: the chat template .*({message})"):
        prepare(folder, "--chat-template", folder / "t.jinja")
    assert sorted(folder.iterdir()) == before


def test_a_conversation_without_end_ends_with_a_sentence(monkeypatch):
    """The template does not mark answers, so it is rendered for each of them."""
    monkeypatch.setattr(chat_templates, "SECONDS", 1)
    chat = [{"role": role, "content": "x"} for role in ("user", "assistant")] * 100_000
    text = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    with ChatTemplate(text + PROMPT.replace("<|assistant|>", "assistant")) as template:
        with pytest.raises(UserError, match=r"takes more than 1 s for its 200,000 messages"):
            template.answers(chat)
        assert template.render(chat[:2]) == "userxassistantx", "another process"


MEASURED = """
import re, resource, sys
from pathlib import Path
from corpora.chat_templates import ChatTemplate
from base.errors import UserError
try:
    with ChatTemplate(sys.argv[1]) as template:
        template.render([{"role": "user", "content": "ab"}])
except UserError:
    pass
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.parametrize("case", ["endless text", "a text that doubles"])
def test_a_template_takes_little_memory(case):
    command = [sys.executable, "-c", MEASURED, HOSTILE[case][0]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1_000_000  # kB


def test_many_conversations_share_a_process():
    with ChatTemplate("{{ messages[0].content }}") as template:
        texts = [template.render([{"role": "user", "content": f"é{i}"}]) for i in range(50)]
        process = template._process
        assert texts == [f"é{i}" for i in range(50)]
        template.render([{"role": "user", "content": ""}])
        assert template._process is process
    assert process.poll() is not None


# ---- Lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ('{"messages": [{"role": "user", "content": "café"}]}'.encode("latin-1"), "is not UTF-8"),
        (
            b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            r"has half of a character, U\+D83D",
        ),
        (b'{"messages": [{"role": "user", "content": "' + b"[" * 9 + b'"}', "is not JSON"),
        (b'{"a": ' + b"[" * 100_000, ".*nested too deeply"),
        (b'{"messages": [{"role": "user", "content": null}]}', "message 1 has no content of text"),
        (b'{"messages": [{"role": "user", "content": ""}], "tools": 7}', '"tools" is not a list'),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "json"])
def test_lines_are_checked_as_those_of_texts_are(raw, message, suffix, folder):  # noqa: F811
    import gzip

    import zstandard

    pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(suffix[-3:].strip("."), bytes)
    good = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    (folder / f"d.{suffix}").write_bytes(pack(good + b"\n\n" + raw + b"\n"))
    (folder / "c.jsonl").write_text("")
    with pytest.raises(UserError, match=rf"d\.{re.escape(suffix)}:3:? {message}"):
        prepare(folder, folder / f"d.{suffix}")


def test_a_mark_of_bytes_and_compressed_chats_are_read(folder):  # noqa: F811
    import gzip

    lines = (folder / "c.jsonl").read_bytes()
    prepare(folder)
    plain = (folder / "out.bin").read_bytes()
    for name, raw in (("c.jsonl", b"\xef\xbb\xbf" + lines), ("d.json.gz", gzip.compress(lines))):
        (folder / "c.jsonl").write_bytes(b"")
        (folder / name).write_bytes(raw)
        prepare(folder, folder / name) if name != "c.jsonl" else prepare(folder)
        assert (folder / "out.bin").read_bytes() == plain


# ---- Ends and begins -----------------------------------------------------------------------------


def test_the_end_of_a_conversation_is_not_the_end_of_an_answer(folder, capsys):  # noqa: F811
    """As prepare_data.py the eos_token, but another one where the template writes that itself."""
    about = folder / "tokenizer_config.json"
    facts = json.loads(about.read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def end_with(template: str, *more) -> int:
        about.write_text(json.dumps(facts | {"chat_template": template}))
        prepare(folder, *more)
        return IndexedDataset(str(folder / "out")).get(0)[-1]

    plain = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + PROMPT
    assert end_with(plain) == tokenizer.token_to_id("</s>")
    assert end_with(plain.replace("{% endfor", "</s>{% endfor")) == tokenizer.token_to_id(END)
    assert "note:" not in capsys.readouterr().out
    turns = plain.replace("{% endfor", "{{ eos_token }}{% endfor")
    assert end_with(turns, "--end-token", "</s>") == tokenizer.token_to_id("</s>")
    printed = capsys.readouterr().out
    assert "note: </s> ends the conversations, and is also within 3 of them" in printed
    assert "--reset-attention --reset-positions" not in printed
    dataset = IndexedDataset(str(folder / "out"))
    end = tokenizer.token_to_id("</s>")
    for i in range(len(dataset)):
        assert (np.flatnonzero(dataset.get(i) == end)[-2:].tolist())[-1] == len(dataset.get(i)) - 1
        assert dataset.get(i)[-2] != end, "not doubled"
