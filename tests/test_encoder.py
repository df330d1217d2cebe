"""One encoder: if this failed, a model would be asked in another form than it has learned."""

import gzip
import json

import pytest
from test_prepare_data import prepare
from tokenizers import Tokenizer, models
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

from base.errors import UserError
from corpora.encoder import END, Encoder
from corpora.text import Text
from corpora.token_files import IndexedDataset
from corpora.tokenizer_files import read_settings
from scripts import eval_texts, prepare_chats
from scripts.encoders import load_encoder

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
TEXTS = ["ab", "Grüße 🎲", f"names {BOS} and {EOS}"]


def tokenizer_of(single: str | None) -> Tokenizer:
    """Ids 0 to 255 are bytes; `single`: what its processing makes of a text, as "BOS $A"."""
    tokenizer = load_encoder("bytes", END).tokenizer
    tokenizer.add_special_tokens([BOS, EOS])
    if single is not None:
        single = single.replace("BOS", BOS).replace("EOS", EOS).replace("END", END)
        ids = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS, END)]
        template = TemplateProcessing(single=single, special_tokens=ids)
        tokenizer.post_processor = Sequence([ByteLevel(trim_offsets=False), template])
    return tokenizer


def folder_of(tmp_path, single: str | None, eos: str = EOS):
    """A folder of Hugging Face with that tokenizer, and a file of texts."""
    folder = tmp_path / "hf"
    folder.mkdir()
    tokenizer_of(single).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "t.jsonl").write_text("".join(lines))
    return folder


def documents(prefix) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return sorted(dataset.get(i).tolist() for i in range(len(dataset)))


@pytest.mark.parametrize("single", [None, "$A", "BOS $A", "BOS $A EOS", "BOS BOS $A", "END $A"])
def test_documents_and_prompts_begin_as_transformers_begins_texts(single, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path, single)
    prepare(tmp_path / "c", "--tokenizer", folder, tmp_path / "t.jsonl")
    hf = transformers.AutoTokenizer.from_pretrained(folder)
    end = hf.convert_tokens_to_ids(EOS)
    expected = []
    for text in TEXTS:
        ids = hf(text, split_special_tokens=True)["input_ids"]
        expected.append(ids if ids[-1] == end else [*ids, end])
    assert documents(tmp_path / "c") == sorted(expected)
    of_corpus = Text(str(tmp_path / "c.tokenizer.json"), 300)
    of_folder = Text(str(folder / "tokenizer.json"), 300)
    for text in TEXTS[:2]:
        (document,) = [ids for ids in expected if hf.decode(ids).count(text)]
        assert of_corpus.encode(text) == of_folder.encode(text) == document[:-1]
    assert of_corpus.end == end
    assert end in of_folder.ends
    if single in ("BOS $A", "BOS $A EOS"):
        assert of_corpus.encode(BOS + "ab") == of_corpus.encode("ab"), "not doubled"


def test_a_corpus_from_before_the_note_goes_on_as_it_was(tmp_path):
    """Its documents have no begin token, whatever its tokenizer does; so have its prompts."""
    folder = folder_of(tmp_path, "BOS $A")
    prepare(tmp_path / "new", "--tokenizer", folder, tmp_path / "t.jsonl")
    (tmp_path / "old.tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    old = Text(str(tmp_path / "old.tokenizer.json"), 300)
    assert old.encode("ab") == [97, 98]
    prepare(tmp_path / "more", "--tokenizer", tmp_path / "old.tokenizer.json", tmp_path / "t.jsonl")
    assert [97, 98, old.tokenizer.token_to_id(END)] in documents(tmp_path / "more")
    bos, eos = map(old.tokenizer.token_to_id, (BOS, EOS))
    assert [bos, 97, 98, eos] in documents(tmp_path / "new")
    prepare(
        tmp_path / "again", "--tokenizer", tmp_path / "new.tokenizer.json", tmp_path / "t.jsonl"
    )
    assert documents(tmp_path / "again") == documents(tmp_path / "new")
    settings = read_settings(tmp_path / "new.tokenizer.json")
    assert (settings.documents.begin, settings.documents.end) == ((BOS,), EOS)
    transformers = pytest.importorskip("transformers")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hf" / name).write_bytes((tmp_path / f"new.{name}").read_bytes())
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (loaded.bos_token, loaded.eos_token) == (BOS, EOS)


def test_where_the_end_is_the_beginning_it_is_written_once(tmp_path):
    """As with OPT: the end of the document before begins the next one, and a prompt too."""
    folder = folder_of(tmp_path, "END $A", eos=END)
    prepare(tmp_path / "c", "--tokenizer", folder, tmp_path / "t.jsonl")
    text = Text(str(tmp_path / "c.tokenizer.json"), 300)
    assert [97, 98, text.end] in documents(tmp_path / "c")
    assert text.encode("ab") == [text.end, 97, 98]


@pytest.mark.parametrize("written", [True, False])
def test_conversations_begin_as_their_template_says(written, tmp_path):
    """A begin token is not doubled, and not added; prompts follow the conversations."""
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path, "BOS $A")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" * written + template)
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": chat}))
    words = ["--out", tmp_path / "c", "--tokenizer", folder, tmp_path / "c.jsonl"]
    prepare_chats.main([str(word) for word in words])
    hf = transformers.AutoTokenizer.from_pretrained(folder)
    ids = hf.apply_chat_template(chat)["input_ids"]
    assert documents(tmp_path / "c") == [[*ids, hf.convert_tokens_to_ids(EOS)]]
    prompt = Text(str(tmp_path / "c.tokenizer.json"), 300).encode("ab")
    assert prompt == ids[: len(prompt)]


def test_a_prompt_is_not_cut_by_the_tokenizer(tmp_path):
    tokenizer = tokenizer_of(None)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Text(str(tmp_path / "tokenizer.json"), 300).encode("x" * 50) == [120] * 50


def test_ends_and_mistakes(tmp_path):
    folder = folder_of(tmp_path, None)
    text = Text(str(folder / "tokenizer.json"), 300)
    assert text.ends == tuple(map(text.tokenizer.token_to_id, (END, EOS)))
    prepare(tmp_path / "c", "--tokenizer", folder, "--end-token", BOS, tmp_path / "t.jsonl")
    assert Text(str(tmp_path / "c.tokenizer.json"), 300).end == text.tokenizer.token_to_id(BOS)
    about = tmp_path / "c.tokenizer_config.json"
    facts = json.loads(about.read_text())
    for documents_note, message in (
        (7, "documents is 7, without `begin`, a list of tokens"),
        (
            {"begin": ["<gone>"], "end": EOS},
            "has no token '<gone>', with which its documents begin",
        ),
        ({"begin": [], "end": "<gone>"}, "has no token '<gone>'"),
    ):
        about.write_text(json.dumps(facts | {"documents": documents_note}))
        with pytest.raises(UserError, match=message):
            Text(str(tmp_path / "c.tokenizer.json"), 300)
    assert Encoder(Tokenizer(models.BPE())).end is None


def test_evaluations_take_texts_as_a_corpus_does(tmp_path, capsys):
    """What lm_eval.sh asks: whether texts have a begin token, and the texts of its file."""
    folder = folder_of(tmp_path, "BOS $A")
    prepare(tmp_path / "new", "--tokenizer", folder, tmp_path / "t.jsonl")
    (tmp_path / "old.tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    capsys.readouterr()
    packed = tmp_path / "t.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "t.jsonl").read_bytes()))
    out = tmp_path / "out.jsonl"
    for name, expected in (("new.tokenizer.json", "True\n"), ("old.tokenizer.json", "False\n")):
        eval_texts.main([str(tmp_path / name), str(packed), str(out)])
        assert capsys.readouterr().out == expected
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == TEXTS
    packed.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "\xfc"}\n'))
    with pytest.raises(UserError, match=r"t\.json\.gz:2 is not UTF-8"):
        eval_texts.main([str(folder / "tokenizer.json"), str(packed), str(out)])
