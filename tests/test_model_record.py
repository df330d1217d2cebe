"""What a model is beyond its shape: if this failed, a model would be limited or end otherwise."""

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
from public_models import BOS, EOS, MODELS, TURN, V, write
from test_sample import run_here

import checkpoint
import sample
from architecture import families
from architecture.block_attention import flags_of
from architecture.shape import ModelShape
from base.errors import UserError
from checkpointing import hf_export, model_record
from config.command_line import make_model, parse
from corpora.encoder import Encoder
from corpora.tokenizer_files import load_tokenizer, read_settings

transformers = pytest.importorskip("transformers")
PROMPT = [5, 17, 60, 40]

# ---- Missing fields ------------------------------------------------------------------------------

# Sizes that no default has and no derived value is, so that a wrong default shows.
NEW = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 96}
OLD = {"n_embd": 48, "n_layer": 2, "n_head": 6}
SIZES = dict.fromkeys(families.FAMILIES, NEW) | {
    "gpt2": OLD,
    "gpt_neox": NEW | {"num_attention_heads": 6},
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 6},
    # As many heads as there are key/value heads by default, and a block with experts.
    "deepseek_v3": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 128},
    "glm4_moe": NEW | {"hidden_size": 768},  # half of a head's columns are even
    "bamba": NEW | {"hidden_size": 768},
    "kimi_linear": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 32},
    "deepseek_v2": NEW | {"num_experts_per_tok": 3},
}


def shape_in(config: dict) -> tuple[dict, list[str]]:
    options, lacks = families.from_config(config, "config.json")
    return dataclasses.asdict(make_model(options, "config.json")), lacks


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_missing_field_is_what_transformers_takes_for_it(name):
    """Every field of the family, left out and null; its file of transformers 4 and of 5."""
    config_class = transformers.AutoConfig.for_model(name).__class__
    full = config_class(vocab_size=131, **SIZES[name]).to_dict()
    full.pop("layer_types", None)
    family, tried = families.FAMILIES[name], 0
    fields = {field for names in family.fields.values() for field in names}
    fields |= {*families.TOKENS, "sliding_window", "use_sliding_window", "max_window_layers"}
    for field in sorted(fields | {"rope_parameters"}):
        for changes in ({field: "gone"}, {field: None}, {field: "gone", "rope_parameters": "gone"}):
            given = {k: v for k, v in (full | changes).items() if v != "gone"}
            kept = {k: v for k, v in given.items() if k != "model_type"}
            try:
                whole = config_class(**json.loads(json.dumps(kept))).to_dict()
            except Exception:  # it refuses a null, with exceptions of several kinds
                continue
            try:
                found, expected = shape_in(given), shape_in(whole)
            except UserError as error:
                if "has no" in str(error):  # a size that a model cannot do without
                    continue
                raise
            tried += 1
            assert found == expected, (field, changes)
            if field in families.TOKENS:
                ids = families.token_ids(given, "config.json")
                assert ids == {token: whole.get(token) for token in families.TOKENS}
    assert tried > 20


@pytest.mark.parametrize("name", [n for n, f in families.FAMILIES.items() if f.window])
def test_the_window_is_that_of_transformers(name):
    """And the blocks that have it, by any of the fields that say so."""
    config_class = transformers.AutoConfig.for_model(name).__class__
    small = {"vocab_size": 131, "intermediate_size": 40, **NEW, "num_attention_heads": 6}
    small["num_experts_per_tok"] = 2
    small |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4}
    for window in (16, None, "gone"):
        for used in (True, False, "gone"):
            for layers in (0, 1, 2, 28, "gone"):
                given = {"sliding_window": window, "use_sliding_window": used}
                given |= {"max_window_layers": layers}
                given = small | {k: v for k, v in given.items() if v != "gone"}
                try:
                    theirs = config_class(**given)
                except Exception:  # a window of null that is used
                    continue
                kinds = getattr(theirs, "layer_types", None)
                expected = theirs.sliding_window or None
                if kinds is not None and "sliding_attention" not in kinds:
                    expected = None
                own = families.window(given | {"model_type": name}, "config.json")
                assert own == expected, given
                saved = families.window(theirs.to_dict(), "config.json")
                assert saved == expected, given
                if expected and kinds is not None:
                    ours, _ = families.from_config(given | {"model_type": name}, "config.json")
                    flags = [kind == "sliding_attention" for kind in kinds]
                    assert list(flags_of(ours["window_blocks"], len(flags))) == flags, given


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"is_causal": False}, "is_causal is False; here it is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .* here there is none"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; here it is 1.0"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3]}}, "have 'mrope_section'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "have 'full_attention'"),
        ({"model_type": "opt", "word_embed_proj_dim": 24, "ffn_dim": 80}, "word_embed_proj_dim is"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', and no id of a token"),
        ({"num_hidden_layers": 2, "model_type": "gpt2", "n_layer": 3}, "they are one field"),
    ],
)
def test_a_field_that_changes_numbers_is_refused_by_name(changes, sentence, tmp_path):
    config = MODELS["TinyLlama-1.1B-Chat"][0] | {"n_embd": 48, "n_head": 6} | changes

    def read() -> None:
        hf_export.model_shape(config, "config.json")
        families.token_ids(config, "config.json")

    with pytest.raises(UserError, match=sentence):
        read()


def test_the_nearest_family_of_a_model_with_experts_has_experts():
    note = families.export_note(ModelShape(2, 48, 6, experts=8, experts_per_token=2))
    assert note is not None
    needs = note.partition("such model: ")[2].split()[0]
    assert "experts" in families.FAMILIES[needs].fields


# ---- Kept through training -----------------------------------------------------------------------


def command(*words) -> None:
    checkpoint.run_command([str(word) for word in words])


def trained(model, out, *more: str, length: int = 8):
    """The status and the output of a step of training from an imported model or a run."""
    words = ["--resume", model, "--load-weights-only", "--seq-length", length, "--steps", "1"]
    words += ["--global-batch-size", "1", "--device", "cpu", "--save-every", "1", "--out", out]
    return ranks.fork_one("train.py", *map(str, words), *more)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A Mistral with a window of 16 tokens, as its folder and imported."""
    folder = tmp_path_factory.mktemp("windowed")
    write("Mistral-7B-v0.1", folder / "hf", PROMPT)
    path = folder / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 16}))
    command("import", "--from", "hf", folder / "hf", folder / "in")
    return folder


def test_a_tuned_model_keeps_all_that_came_with_it(tmp_path):
    """Its checkpoint alone, moved elsewhere, after two runs on short samples."""
    write("Qwen2.5-0.5B-Instruct", tmp_path / "hf", PROMPT)
    further = "additional_chat_templates/tool_use.jinja"
    (tmp_path / "hf" / further).parent.mkdir()
    (tmp_path / "hf" / further).write_text("{{ tools }}")
    command("import", "--from", "hf", tmp_path / "hf", tmp_path / "in")
    assert trained(tmp_path / "in", tmp_path / "a").status == 0
    more = ["--resume", "auto", "--steps", "2", "--global-batch-size", "1", "--save-every", "1"]
    done = ranks.fork_one("train.py", *more, "--out", str(tmp_path / "a"), "--device", "cpu")
    assert done.status == 0, done.err
    shutil.move(tmp_path / "a/checkpoints/step_00000002", tmp_path / "b")
    shutil.rmtree(tmp_path / "in")
    shutil.rmtree(tmp_path / "a")
    command("verify", tmp_path / "b")
    command("export", "--to", "hf", tmp_path / "b", tmp_path / "out")
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("hf", "out"))
    skipped = {"torch_dtype", "transformers_version"}
    assert {k: v for k, v in before.items() if k not in skipped}.items() <= after.items()
    for file in ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"):
        texts = [json.loads((tmp_path / f / file).read_text()) for f in ("hf", "out")]
        assert texts[0] == texts[1], file
    for file in ("tokenizer.json", further):
        assert (tmp_path / "hf" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


def test_an_imported_model_without_an_end_ends_at_no_token_of_its_tokenizer(tmp_path):
    """transformers ends a text at the ids of the configs alone."""
    write("Mistral-7B-v0.1", tmp_path / "hf", PROMPT)
    for file in ("config.json", "generation_config.json"):
        if (path := tmp_path / "hf" / file).exists():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    command("import", "--from", "hf", tmp_path / "hf", tmp_path / "in")
    asked = [str(tmp_path / "in"), "--prompt", "a", "--max-tokens", "2", "--device", "cpu"]
    task = sample.prepare_task(sample.parse(asked), 1)
    assert task.text.ends
    assert task.ends == ()


def test_longer_samples_lengthen_the_context(tmp_path):
    record = model_record.without_tokenizer(32)
    assert record.after_training(model_record.without_tokenizer(8)).context_length == 32
    longer = record.after_training(model_record.without_tokenizer(64))
    shape = ModelShape(1, 8, 1, positions="rotary")
    config = hf_export.hf_config(shape, torch.float32, "gpt_neox", longer)
    assert longer.context_length == 64
    assert config["max_position_embeddings"] == 1024, "the samples of this shape are longer"
    assert config["pad_token_id"] is None


def test_a_model_with_a_window_is_trained_and_sampled_beyond_it(windowed, tmp_path):
    done = trained(windowed / "in", tmp_path / "a", length=48)
    assert done.status == 0, done.err
    assert "windows in 2 of 2 blocks: torch scaled_dot_product_attention" in done.out
    asked = [str(tmp_path / "a"), "--device", "cpu", "--prompt", "abcd", "--max-tokens", "40"]
    assert sample.prepare_task(sample.parse(asked), 1).count == 40
    command("export", "--to", "hf", tmp_path / "a", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["sliding_window"] == 16


def test_an_import_of_a_version_without_windows_keeps_its_limit(windowed):
    record = model_record.read(str(windowed / "in/step_00000000"))
    model = ModelShape(2, 48, 6, window=16)
    record.check_length(model, 17, "a text")
    old = dataclasses.replace(model, window=0)
    record.check_length(old, 16, "a text")
    with pytest.raises(UserError, match=r"a text is longer than the sliding_window\(16\)"):
        record.check_length(old, 17, "a text")


def test_a_window_is_not_lost_by_an_export_as_another_family(windowed, tmp_path):
    with pytest.raises(UserError, match="llama needs window 0, not 16"):
        command("export", "--to", "hf", "--family", "llama", windowed / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_may_be_a_folder_and_its_end_is_added(windowed, tmp_path):
    """The ids of the model stay; a corpus of chats brings the end of its answers."""
    other = tmp_path / "other"
    shutil.copytree(windowed / "hf", other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings |= {"eos_token": "<turn>", "chat_template": "{{ messages }}"}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    (other / "special_tokens_map.json").unlink()
    command("export", "--to", "hf", "--tokenizer", other, windowed / "in", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (BOS, [EOS, TURN])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.chat_template == "{{ messages }}"
    files = model_record.tokenizer_files(str(other))
    of_data = model_record.ModelRecord({"eos_token_id": TURN}, 8, None, files)
    record = model_record.read(str(windowed / "in/step_00000000"))
    tuned = record.after_training(of_data)
    assert tuned.ends == (EOS, TURN)
    assert model_record.chat_template(tuned.files) == "{{ messages }}"
    assert record.after_training(model_record.without_tokenizer(8)) == record


def test_a_model_from_scratch_has_the_tokens_of_its_corpus(windowed, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "abc{i}"}}\n' for i in range(50)))
    prepare = ["scripts/prepare_data.py", "--out", str(tmp_path / "c"), "--tokenizer"]
    done = ranks.fork_one(*prepare, str(windowed / "hf"), str(tmp_path / "a.jsonl"))
    assert done.status == 0, done.err
    words = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --steps 1 --global-batch-size 1"
    words += f" --vocab-size {V} --device cpu --save-every 1 --data {tmp_path}/c --out {tmp_path}/r"
    done = ranks.fork_one("train.py", *words.split())
    assert done.status == 0, done.err
    command("export", "--to", "hf", tmp_path / "r", tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": None}
    assert {name: config[name] for name in ids} == ids
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "</s>"
    # run.json's bytes of a checkpoint have the tokenizer's files, which random tokens do not have.
    without = words.replace(f"{tmp_path}/c", "synthetic").replace(f"{tmp_path}/r", f"{tmp_path}/s")
    assert ranks.fork_one("train.py", *without.split()).status == 0
    stated = [json.loads((tmp_path / f"{run}/run.json").read_text()) for run in "rs"]
    (folder,) = (tmp_path / "r/checkpoints").iterdir()
    copied = [folder / path.name for path in (windowed / "hf").iterdir()]
    bytes_of_files = sum(path.stat().st_size for path in copied if path.is_file())
    more = stated[0]["checkpoint_bytes"] - stated[1]["checkpoint_bytes"]
    assert more >= bytes_of_files > 1000


def test_prompts_of_a_corpus_from_before_begin_as_its_documents(windowed, tmp_path):
    """The tokenizer puts <s> before a text; documents of the corpus do not have it."""
    shutil.copy(windowed / "hf/tokenizer.json", tmp_path / "c.tokenizer.json")
    settings = {"eos_token": "</s>"}
    (tmp_path / "c.tokenizer_config.json").write_text(json.dumps(settings))
    assert encoder_of(tmp_path / "c.tokenizer.json").begin == []
    words = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --steps 1 --global-batch-size 1"
    run = parse(f"{words} --vocab-size {V} --data {tmp_path}/c".split())
    for name, contents in model_record.record_of_corpora(run).files.items():
        (tmp_path / name).write_bytes(contents)
    kept = encoder_of(tmp_path / "tokenizer.json")
    assert (kept.begin, kept.end_token) == ([], "</s>")


def encoder_of(path: Path) -> Encoder:
    return Encoder(load_tokenizer(str(path)), read_settings(str(path)), str(path))


def test_a_checkpoint_without_a_record_is_read_as_before(windowed, tmp_path):
    """As those of older versions: only the shape is known."""
    from checkpointing import folders

    folder = tmp_path / "step_00000000"
    shutil.copytree(windowed / "in/step_00000000", folder)
    files = folders.read_manifest(str(folder))["files"]
    entries = {n: (e["bytes"], e["crc32"]) for n, e in files.items() if n.endswith(".h5")}
    folders.write_manifest(str(folder), 0, entries)
    assert model_record.read(str(folder)) is None
    command("export", "--to", "hf", folder, tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {config[name] for name in families.TOKENS} == {None}
    assert not (tmp_path / "out/tokenizer.json").exists()


@pytest.mark.parametrize(
    "contents",
    [b"", b"[]", b"{}", b'{"config": {}, "context_length": 0}', b'{"config": 3}']
    + [b'{"config": {"model_type": "x"}, "context_length": 8}']
    + [b'{"config": {"eos_token_id": "a"}, "context_length": 8}'],
)
def test_a_damaged_record_is_one_sentence(contents, windowed, tmp_path):
    from checkpointing import file_format, folders

    folder = tmp_path / "step_00000000"
    shutil.copytree(windowed / "in/step_00000000", folder)
    files = folders.read_manifest(str(folder))["files"]
    entries = {name: (e["bytes"], e["crc32"]) for name, e in files.items()}
    record = file_format.RECORD
    entries[record] = file_format.write_file(str(folder), record, contents)
    folders.write_manifest(str(folder), 0, entries)
    for words in (["show", folder], ["export", "--to", "hf", folder, tmp_path / "out"]):
        with pytest.raises(UserError) as caught:
            command(*words)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


def test_pickled_weights_are_refused_with_the_way_to_convert_them(windowed, tmp_path):
    shutil.copytree(windowed / "hf", tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").rename(tmp_path / "hf/pytorch_model.bin")
    sentence = r"only pytorch_model.bin, .*AutoModelForCausalLM.from_pretrained\('.*'\)"
    with pytest.raises(UserError, match=sentence):
        command("import", "--from", "hf", tmp_path / "hf", tmp_path / "in")


# ---- Chats ---------------------------------------------------------------------------------------

TALK = ["What?", "And-then?"]


def expected_talk(folder, count: int) -> list[str]:
    """The answers by transformers: its template, its generate, and the talk so far."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    messages, answers = [{"role": "system", "content": "Short!"}], []
    for line in TALK:
        messages.append({"role": "user", "content": line})
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        asked = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        asked |= {"temperature": None, "top_p": None, "top_k": None}
        asked["attention_mask"] = torch.ones_like(
            ids
        )  # else it leaves out tokens with the pad's id
        new = model.generate(ids, **asked)[0, ids.shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.mark.parametrize("name", ["Llama-3.1-8B-Instruct", "OLMo-2-1124-7B-Instruct"])
def test_a_talk_is_that_of_transformers(name, tmp_path, monkeypatch, capsys):
    """Templates of both forms; each line of the input is a message."""
    write(name, tmp_path / "hf", PROMPT)
    command("import", "--from", "hf", tmp_path / "hf", tmp_path / "in")
    expected = expected_talk(tmp_path / "hf", 40)
    assert any(0 < len(answer) < 40 for answer in expected), "else the end is not tried"
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([TALK[0], "", TALK[1]]) + "\n"))
    capsys.readouterr()
    words = [str(tmp_path / "in"), "--chat", "--system", "Short!", "--temperature", "0"]
    printed = run_here([*words, "--max-tokens", "40", "--device", "cpu"], capsys)[0]
    assert printed.splitlines() == expected


@pytest.mark.slow
def test_a_talk_on_two_ranks_and_its_mistakes(windowed, tmp_path):
    shutil.copytree(windowed / "hf", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 16}))
    command("import", "--from", "hf", tmp_path / "hf", tmp_path / "in")
    words = ["sample.py", str(tmp_path / "in"), "--device", "cpu"]
    with pytest.raises(UserError, match="has no chat_template of text"):
        sample.prepare_task(sample.parse([*words[1:], "--chat"]), 1)
    for more, sentence in (
        (["--chat", "--prompt", "a"], "--eval-data, --eval-tasks; --prompt and"),
        (["--system", "a", "--prompt", "a"], "--system goes with --chat, not --prompt"),
        ([], "none was given"),
    ):
        with pytest.raises(UserError, match=sentence):
            sample.prepare_task(sample.parse([*words[1:], *more]), 1)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "in.txt").write_text("a\nbc\n" + "d" * 20 + "\n")
    command_line = [*words, "--chat", "--chat-template", str(tmp_path / "t.jinja"), "--tp", "2"]
    started = ranks.mpi_command(2) + [sys.executable, *command_line, "--max-tokens", "2"]
    with open(tmp_path / "in.txt") as lines:
        done = subprocess.run(
            started, stdin=lines, capture_output=True, text=True, timeout=200, cwd=ranks.ROOT
        )
    assert done.returncode == 2, done.stderr
    assert len(done.stdout.splitlines()) == 2, done.stderr
    sentence = r"the conversation has \d\d tokens, and the texts of this model 16 at most"
    assert re.search(sentence, done.stderr), done.stderr
