"""Special tokens in texts: if this failed, a model would be asked in a form it has not learned."""

import json
from collections import Counter

import pytest
from test_encoder import documents
from test_prepare_data import prepare
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import train
from base.errors import UserError
from config.command_line import parse
from config.corpus_record import IDS, TEXT, form_of, note_on_form, read
from config.run_options import TaskFile
from corpora.special_tokens import NameCounts, Names, tokenizer_of_texts
from corpora.tasks import encode_tasks
from corpora.text import Text, text_of_run
from scripts import eval_texts
from scripts.encoders import load_encoder

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
CHAT = f"{START}user\nhi{STOP}\n{START}assistant\nmorning{STOP}\n"
TEXTS = [CHAT, f"{FIM[0]}a{FIM[1]}c{FIM[2]}b", f"a page on {END} alone", "plain words"]


def tokenizer() -> Tokenizer:
    """A byte-level BPE with special tokens, and with added tokens that are not special."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [END, START, STOP, *FIM]
    trainer = trainers.BpeTrainer(
        vocab_size=290, show_progress=False, initial_alphabet=alphabet, special_tokens=special
    )
    made.train_from_iterator(["good morning to you"], trainer)
    made.add_tokens(["<think>"])
    made.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
    return made


@pytest.fixture
def folder(tmp_path):
    tokenizer().save(str(tmp_path / "tok.json"))
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "t.jsonl").write_text("".join(lines))
    return tmp_path


def prepared(folder, form: str, *more) -> None:
    words = ["--tokenizer", folder / "tok.json", "--special-tokens", form, *more]
    prepare(folder / form, *words, folder / "t.jsonl")


@pytest.mark.parametrize("form", [TEXT, IDS])
def test_documents_prompts_and_tasks_have_one_form(form, folder, capsys):
    prepared(folder, form)
    found = documents(folder / form)
    text = Text(str(folder / f"{form}.tokenizer.json"), 400)
    assert read(str(folder / form)).special_tokens == form
    end = text.end
    for each in TEXTS:
        assert [*text.encode(each), end] in found
    assert all(end not in ids[:-1] for ids in found), "the end is never made from text"
    special = set(range(1, 6))
    named = [ids for ids in found if special & set(ids)]
    assert len(named) == (2 if form == IDS else 0)
    if form == IDS:
        own = tokenizer().encode(CHAT, add_special_tokens=False).ids
        assert [*own, end] in found, "as the library makes it"
    printed = capsys.readouterr().out
    becomes = "text; --special-tokens ids makes them tokens" if form == TEXT else "tokens"
    listed = f"2 of 4 documents name {START} (2 times), {STOP} (2 times), {FIM[0]} (once), "
    assert f"{listed}{FIM[1]} (once) and 1 more: they are {becomes}\n" in printed
    assert f"1 of 4 documents name {END} (once): it ends documents, and is never made" in printed
    row = {"context": f"{START}user\n", "continuations": ["hi", "no"], "answer": 0}
    (folder / "task.jsonl").write_text(json.dumps(row))
    tasks = encode_tasks([TaskFile("t", str(folder / "task.jsonl"), None)], text, 64)
    assert tasks.requests[0].ids == text.encode(f"{START}user\nhi")
    becomes = becomes.partition(";")[0]
    named = f"2 of 4 texts of the task t name {START} (2 times): they are {becomes}"
    assert f"{named}, as in the corpus (--special-tokens {form})" in tasks.notes


def test_long_documents_are_not_cut_within_a_name(folder, monkeypatch, capsys):
    """The counts are of whole documents, whatever part of them is encoded at a time."""
    from scripts import documents as copied

    long = "word " * 500 + CHAT
    (folder / "t.jsonl").write_text(3 * (json.dumps({"text": long * 3}) + "\n"))
    prepared(folder, IDS)
    whole = documents(folder / IDS)
    monkeypatch.setattr(copied, "PART", 2048)
    monkeypatch.setattr(copied, "BLOCK", 1000)
    prepared(folder, IDS)
    assert documents(folder / IDS) == whole
    assert whole[0].count(1) == 6
    assert capsys.readouterr().out.count(f"3 of 3 documents name {START} (18 times)") == 2
    encoder = load_encoder(str(folder / "tok.json"), None, TEXT)
    for place in range(len(CHAT)):
        cut = any(
            CHAT.startswith(name, place - k)
            for name in (START, STOP)
            for k in range(1, len(name))
            if place - k >= 0
        )
        assert encoder.names.are_cut(CHAT, place) == cut


def unigram() -> Tokenizer:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<x>", 0.0), ("\u2581", -2.0)]
    made = Tokenizer(models.Unigram([*pieces, *((c, -5.0) for c in "</s>xab")], 0, False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens(["</s>", "<x>"])
    return made


def words(kind) -> Tokenizer:
    vocabulary = {"[UNK]": 0, "</s>": 1, "<x>": 2, "a": 3}
    made = Tokenizer(kind(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[UNK]", "</s>", "<x>"])
    return made


def merges_ignored() -> Tokenizer:
    vocabulary = {c: i for i, c in enumerate("</s>xa")} | {"<x>": 9, "</s>": 8}
    made = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>", "<x>"])
    return made


MADE = {
    "unigram": unigram,
    "words": lambda: words(models.WordLevel),
    "word pieces": lambda: words(models.WordPiece),
    "BPE that looks up words": merges_ignored,
}


@pytest.mark.parametrize("name", MADE)
def test_a_vocabulary_does_not_find_the_end_in_a_text(name):
    """Of these the library finds a special token in a text also when it is told to hide them."""
    made = MADE[name]()
    made.encode_special_tokens = True
    end, other = made.token_to_id("</s>"), made.token_to_id("<x>")
    text = "a </s> <x> a"
    assert end in made.encode(text, add_special_tokens=False).ids
    for form in (TEXT, IDS):
        found = tokenizer_of_texts(made, form, "</s>").encode(text, add_special_tokens=False).ids
        assert end not in found
        assert (other in found) == (form == IDS)
        assert found.count(made.token_to_id("a")) == 2


@pytest.mark.parametrize("form", [TEXT, IDS])
def test_added_tokens_of_other_forms(form, folder):
    """One that is not special is a word of the vocabulary, but for the end; one that takes the
    spaces around it takes them.
    """
    of_texts = tokenizer_of_texts(tokenizer(), form, END)
    think, mask = tokenizer().token_to_id("<think>"), tokenizer().token_to_id("<mask>")
    ids = of_texts.encode("a <mask> b<think>", add_special_tokens=False).ids
    assert think in ids
    assert (ids[1] == mask and len(ids) == 4) == (form == IDS)
    hidden = tokenizer_of_texts(tokenizer(), form, "<think>")
    assert think not in hidden.encode("b<think>", add_special_tokens=False).ids
    (folder / "t.jsonl").write_text(json.dumps({"text": "a <mask> b<think> c"}))
    prepared(folder, form, "--end-token", "<think>")
    (document,) = documents(folder / form)
    assert document.count(think) == 1


def test_an_end_that_every_text_has_is_refused(folder):
    """A piece of the vocabulary, such as a letter, cannot be hidden."""
    with pytest.raises(UserError, match="'a' ends a document, and the tokenizer makes it from tex"):
        prepared(folder, TEXT, "--end-token", "a")


def test_a_document_that_spells_its_beginning_has_it_once(folder):
    hf = folder / "hf"
    hf.mkdir()
    made = tokenizer()
    from tokenizers.processors import TemplateProcessing

    start = made.token_to_id(START)
    made.post_processor = TemplateProcessing(single=f"{START} $A", special_tokens=[(START, start)])
    made.save(str(hf / "tokenizer.json"))
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in (CHAT, "ab")))
    for form in (TEXT, IDS):
        prepare(
            folder / "c",
            "--tokenizer",
            hf / "tokenizer.json",
            "--special-tokens",
            form,
            folder / "t.jsonl",
        )
        text = Text(str(folder / "c.tokenizer.json"), 400)
        found = documents(folder / "c")
        assert all(ids[0] == start for ids in found)
        assert [*text.encode("ab"), text.end] in found
        assert text.encode(START + "ab") == text.encode("ab")
        if form == IDS:
            assert [*text.encode(CHAT), text.end] in found
            assert all(ids[1] != start for ids in found)


def test_a_run_on_several_corpora_has_the_form_of_that_with_tokens(folder):
    prepared(folder, TEXT)
    prepared(folder, IDS)
    both = [str(folder / TEXT), str(folder / IDS)]
    assert form_of(both) == form_of(both[::-1]) == IDS
    assert form_of(both[:1]) == TEXT
    assert form_of([str(folder / "none")]) is None
    shape = [
        "--layers",
        "1",
        "--hidden",
        "8",
        "--heads",
        "2",
        "--seq-length",
        "8",
        "--vocab-size",
        "400",
        "--steps",
        "1",
    ]
    start = tokenizer().token_to_id(START)
    for prefixes, expected in ((both, True), (both[:1], False)):
        ids = text_of_run(parse([*shape, "--data", *prefixes])).encode(START)
        assert (ids == [start]) == expected


def test_a_corpus_of_another_form_is_noted(folder, capsys):
    prepared(folder, IDS)
    capsys.readouterr()
    again = ["--tokenizer", folder / "ids.tokenizer.json", folder / "t.jsonl"]
    prepare(folder / "valid", *again)
    assert (
        "--special-tokens text, but the corpus of this tokenizer has ids" in capsys.readouterr().err
    )
    assert documents(folder / "valid") != documents(folder / IDS)
    (note,) = note_on_form(str(folder / "valid"), IDS)
    assert "are text in" in note
    assert note.endswith("and tokens for the model: prepare it with --special-tokens ids")
    assert note_on_form(str(folder / "valid"), TEXT) == note_on_form("none", IDS) == []
    shape = ["--layers", "1", "--hidden", "8", "--heads", "2", "--seq-length", "8", "--steps", "1"]
    words = ["--data", f"{folder}/ids", "--eval-data", f"x={folder}/valid", "--vocab-size", "400"]
    train.check_data(parse([*shape, *words]))
    assert note in capsys.readouterr().err


def test_corpora_and_models_without_the_record_are_as_they_were(folder):
    """Documents have names as text, and prompts as tokens, also that of the end."""
    prepared(folder, TEXT)
    about = folder / "text.tokenizer_config.json"
    facts = json.loads(about.read_text())
    for name in ("special_tokens", "largest_id", "end_id"):
        del facts["documents"][name]
    about.write_text(json.dumps(facts))
    text = Text(str(folder / "text.tokenizer.json"), 400)
    expected = tokenizer().encode(CHAT + END, add_special_tokens=False).ids
    assert text.encode(CHAT + END) == expected
    assert text.notes_on([CHAT], "prompts") == []
    assert Text(str(folder / "tok.json"), 400).encode(CHAT + END) == expected


def test_lm_eval_has_the_form_of_the_corpus(folder, capsys):
    transformers = pytest.importorskip("transformers")
    for form in (TEXT, IDS):
        prepared(folder, form)
        exported = folder / f"exported_{form}"
        exported.mkdir()
        (exported / "tokenizer.json").write_bytes((folder / "tok.json").read_bytes())
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (exported / "tokenizer_config.json").write_text(json.dumps(settings))
        eval_texts.main([str(folder / f"{form}.tokenizer.json"), "--exported", str(exported)])
        hf = transformers.AutoTokenizer.from_pretrained(exported)
        text = Text(str(folder / f"{form}.tokenizer.json"), 400)
        assert hf(CHAT)["input_ids"] == text.encode(CHAT)


def test_names_are_counted_by_text_and_by_name():
    names = Names(tokenizer(), END)
    counts = NameCounts()
    for text in (CHAT, CHAT, END, "none"):
        counts.add(names.find(text), END)
    assert (counts.texts, counts.with_end) == (2, 1)
    assert counts.times == Counter({START: 4, STOP: 4, END: 1})
    assert Names(Tokenizer(models.BPE()), None).find("a") == Counter()
