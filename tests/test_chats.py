"""Conversations: if this failed, a model would be trained on what is not an answer."""

import json
import os

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import data
from architecture.shape import ModelShape
from base.errors import UserError
from checkpointing import hf_export, model_record
from config.command_line import parse
from corpora.chat_templates import ChatTemplate
from corpora.objectives import NO_TARGET, Objective
from corpora.token_files import IndexedDataset
from scripts import prepare_chats

TEMPLATE = """{%- for m in messages %}
<|{{ m.role }}|>{{ m.content }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
END = "<|endoftext|>"
CHATS = [
    [("system", "Be brief."), ("user", "What is 2+2? é"), ("assistant", "Four: é."), ("user", "?")],
    [("user", "Say nothing"), ("assistant", "")],
    [("user", "a"), ("assistant", "b c"), ("user", "d"), ("assistant", " e\n f")],
]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of bytes with a chat template, as Hugging Face lays it out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, "</s>", *(f"<|{role}|>" for role in prepare_chats.ROLES)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["What is a and what is b"] * 9,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    facts = {"chat_template": TEMPLATE, "eos_token": {"content": "</s>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    lines = [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in CHATS]
    (tmp_path / "c.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path


def prepare(folder, *more):
    words = ["--out", folder / "out", "--tokenizer", folder, folder / "c.jsonl", *more]
    prepare_chats.main([str(word) for word in words])


@pytest.mark.usefixtures("ends")
def test_a_pipe_is_refused_in_favour_of_standard_input(folder):
    os.mkfifo(folder / "pipe.jsonl")
    with pytest.raises(
        UserError, match=r"pipe\.jsonl is a pipe or a device, .*: give - to read JSON"
    ):
        prepare(folder, folder / "pipe.jsonl")


def test_answers_are_what_the_template_writes_for_the_assistant(folder, capsys):
    prepare(folder)
    printed = capsys.readouterr().out
    tokenizer = Tokenizer.from_file(str(folder / "out.tokenizer.json"))
    dataset = IndexedDataset(str(folder / "out"))
    dataset.open_answers()
    end, found = tokenizer.token_to_id(END), {}
    for i in range(len(dataset)):
        tokens, answers = dataset.get(i), dataset.answers.get(i)
        assert tokens[-1] == end
        assert tokenizer.token_to_id("<|assistant|>") in tokens, "roles are special tokens"
        runs = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(answers)) + 1)
        texts = [tokenizer.decode(tokens[r], skip_special_tokens=False) for r in runs]
        found["".join(texts)] = [text for text, r in zip(texts, runs) if answers[r[0]]]
    expected = [["Four: é.</s>"], [f"</s>{END}"], ["b c</s>", f" e\n f</s>{END}"]]
    assert sorted(map(str, found.values())) == sorted(map(str, expected))
    whole = "<|system|>Be brief.</s>\n<|user|>What is 2+2? é</s>\n<|assistant|>Four: é.</s>"
    assert any(whole.replace("\n", "") in text for text in found)
    flags = "--answers-only --reset-attention --reset-positions"
    assert f"{flags} --eod-token {end}" in printed


def test_training_reads_them_aligned(folder):
    """A blend of the corpus with itself: each label counts if it is of an answer."""
    prepare(folder)
    words = "--layers 1 --hidden 8 --heads 1 --seq-length 8 --steps 2 --split 1 --cache none"
    words += (
        f" --vocab-size 400 --answers-only --eod-token 0 --data .5 {folder}/out .5 {folder}/out"
    )
    config = parse(words.split())
    samples = data.build(config).train
    dataset, counted = IndexedDataset(str(folder / "out")), 0
    dataset.open_answers()
    for k in range(16):
        row = Objective(config.data).row(samples, k)
        spans = samples.spans(k)
        tokens = np.concatenate([dataset.get(*span[1:4]) for span in spans]).astype(np.int64)
        marks = np.concatenate([dataset.answers.get(*span[1:4]) for span in spans])
        assert row["tokens"].tolist() == tokens[:-1].tolist()
        assert row["labels"].tolist() == np.where(marks[1:] == 1, tokens[1:], NO_TARGET).tolist()
        counted += marks[1:].sum()
    assert 0 < counted < 16 * 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "c.jsonl:2 has no key 'messages'"),
        ('{"messages": []}', 'c.jsonl:2: "messages" is not a list of messages'),
        ('{"messages": [{"role": "user"}]}', "c.jsonl:2: message 1 has no content of text"),
        ('{"messages": [{"role": "x", "content": ""}]}', "c.jsonl:2: message 1 .* no role of"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(folder, line, message):
    first = (folder / "c.jsonl").read_text().splitlines()[0]
    (folder / "c.jsonl").write_text(f"{first}\n{line}\n")
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match=message):
        prepare(folder)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "the chat template cannot be read"),
        ("{{ raise_exception('no system') }}", "refuses it: no system"),
        ("{{ messages | length }} {{ messages[0].content }}", r"writes message \d in several ways"),
        ("{{ messages.__class__.__mro__ }}", "the chat template refuses it"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(folder, template, message):
    (folder / "t.jinja").write_text(template)
    with pytest.raises(UserError, match=message):
        prepare(folder, "--chat-template", folder / "t.jinja")


def test_an_exported_model_has_the_chat_template_it_was_trained_with(folder):
    """transformers writes the prompt that prepare_chats.py put before an answer."""
    transformers = pytest.importorskip("transformers")
    prepare(folder)
    model = ModelShape(1, 8, 1, vocab_size=400)
    (folder / "hf").mkdir()
    tokenizer = str(folder / "out.tokenizer.json")
    record = model_record.without_tokenizer(64)
    record = record.with_tokenizer(tokenizer)
    hf_export.write_tokenizer(record, str(folder / "hf"), model)
    ends = record.config
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    assert sorted(ends["eos_token_id"]) == sorted(map(theirs.convert_tokens_to_ids, (END, "</s>")))
    messages = [{"role": "user", "content": "What is a?"}]
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with ChatTemplate(TEMPLATE, {"eos_token": "</s>"}) as template:
        assert prompt == template.render(messages, add_generation_prompt=True)
    assert prompt.endswith("<|assistant|>")


# ---- Messages that are not trained, and keys that nothing reads ----------------------------------

MARKED = """{%- for m in messages %}<|{{ m.role }}|>
{%- if m.role == "assistant" %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{%- endfor %}"""


def learned(folder, messages: list[dict], *more, **line) -> list[str]:
    """The texts that are trained in a conversation, each without what ends it."""
    (folder / "c.jsonl").write_text(json.dumps({"messages": messages, **line}))
    prepare(folder, *more)
    tokenizer = Tokenizer.from_file(str(folder / "out.tokenizer.json"))
    dataset = IndexedDataset(str(folder / "out"))
    dataset.open_answers()
    marked = zip(dataset.get(0).tolist(), dataset.answers.get(0).tolist())
    text = tokenizer.decode([t for t, mark in marked if mark], skip_special_tokens=False)
    return [part for part in text.replace(END, "").split("</s>") if part]


def talk(*weights) -> list[dict]:
    """A conversation with an answer a0, a1, ... for each weight; "none": no weight is given."""
    messages = []
    for number, weight in enumerate(weights):
        answer = {"role": "assistant", "content": f"a{number}"}
        answer |= {} if weight == "none" else {"weight": weight}
        messages += [{"role": "user", "content": "q"}, answer]
    return messages


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_answers_of_weight_0_are_not_trained(template, folder, capsys):
    (folder / "t.jinja").write_text(template)
    words = ["--chat-template", folder / "t.jinja"]
    assert learned(folder, talk(0, 1, "none", None, 0.0, 1.0), *words) == ["a1", "a2", "a3", "a5"]
    assert "2 answers of weight 0 are not trained" in capsys.readouterr().out
    assert learned(folder, talk(1, 0), *words) == ["a0"]
    dataset = IndexedDataset(str(folder / "out"))
    dataset.open_answers()
    assert dataset.answers.get(0)[-1] == 0, "nor what ends the conversation after it"


@pytest.mark.parametrize("weight", [0.5, 2, -1, True, False, "0", [0]])
def test_another_weight_is_refused(weight, folder):
    with pytest.raises(UserError, match=r"c\.jsonl:1: message 4 has the .weight. .*: it is 0, not"):
        learned(folder, talk(1, weight))


def test_a_template_that_marks_other_answers_is_refused_with_weights(folder):
    whole = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    (folder / "t.jinja").write_text(whole)
    words = ["--chat-template", folder / "t.jinja"]
    with pytest.raises(UserError, match="marks 1 answers of 2 messages of the assistant"):
        learned(folder, talk(0, 1), *words)
    learned(folder, talk(1, 1), *words)


def test_keys_that_nothing_reads_are_named(folder, capsys):
    messages = talk(1, "none")
    messages[0] |= {"weight": 1, "name": "Ann"}
    messages[1]["train"] = False
    messages[3] |= {"loss_mask": 0, "reasoning_content": "r"}
    more = {"documents": [{"title": "t"}], "tools": None, "chat_template_kwargs": {"think": True}}
    learned(folder, messages, id=7, train=True, **more)
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("keys of")]
    named = line.partition(": ")[2].replace(" (in 1)", "").split(", ")
    of_answers = [f'"{name}" of messages of assistant' for name in ("loss_mask", "train")]
    of_answers.append('"reasoning_content" of messages of assistant')
    others = ['"id"', '"train"', '"documents"', '"think" of chat_template_kwargs']
    others.append('"weight" of messages of user')
    assert sorted(named) == sorted([*of_answers, *others])
    learned(folder, talk(1))
    assert "keys of conversations" not in capsys.readouterr().out


READS = """{{ documents }}{{ think }}
{%- for m in messages %}<|{{ m.role }}|>{{ m.thinking }}{{ m.tool_calls }}{{ m.content }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_keys_that_the_template_names_are_read(folder, capsys):
    (folder / "t.jinja").write_text(READS)
    messages = talk(1)
    messages[1] |= {"reasoning_content": "r", "tool_calls": [{"id": "1"}]}
    more = {"documents": [{"title": "t"}], "chat_template_kwargs": {"think": True}}
    learned(folder, messages, "--chat-template", folder / "t.jinja", **more)
    assert "keys of conversations" not in capsys.readouterr().out


def test_parts_that_a_template_writes_as_python_shows_them_are_refused(folder):
    messages = [{"role": "user", "content": [{"type": "text", "text": "q"}]}, *talk(1)[1:]]
    with pytest.raises(
        UserError, match=r"c\.jsonl:1: message 1 has its content in parts, .*\[{'typ"
    ):
        learned(folder, messages)
    loop = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    (folder / "t.jinja").write_text(loop)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a"}]}
    words = ["--chat-template", folder / "t.jinja"]
    assert learned(folder, [messages[0], answer], *words) == ["a"]
