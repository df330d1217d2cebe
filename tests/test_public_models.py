"""Public models in and out again: if this failed, a model would lose a token, a length, a text."""

import json

import pytest
import torch
from public_models import MODELS, V, write
from test_sample import numbers, run_here

import checkpoint
from architecture.families import TOKENS, from_config, unread
from base.errors import UserError
from config.command_line import make_model, parse_request

transformers = pytest.importorskip("transformers")
PROMPT = [5, 17, 60, 40]
# Fields of config.json that may be written in another way.
REWRITTEN = {"torch_dtype", "dtype", "transformers_version", "rope_scaling", "rope_parameters"}
REWRITTEN |= {"rotary_emb_base", "rotary_pct"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


DERIVED = {"attention_factor", "truncate"}


def ropes_of(config: dict) -> list[dict]:
    """The objects with the numbers of rotary positions, of each kind of blocks."""
    rope = config.get("rope_parameters") or {}
    return [rope[key] for key in sorted(rope) if isinstance(rope[key], dict)] or [rope]


def generated(model) -> list[int]:
    """The greedy continuation of PROMPT by transformers, with its end if it comes to one."""
    asked = {"max_new_tokens": 20, "do_sample": False, "temperature": None, "top_p": None}
    asked |= {"top_k": None, "pad_token_id": 0}
    return model.generate(torch.tensor([PROMPT]), **asked)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_in_and_out_again_nothing_is_lost(name, tmp_path, capsys):
    hf, ours, out = tmp_path / "hf", tmp_path / "in", tmp_path / "out"
    theirs = write(name, hf, PROMPT)
    checkpoint.run_command(["import", "--from", "hf", str(hf), str(ours)])
    checkpoint.run_command(["export", "--to", "hf", str(ours), str(out)])
    back = transformers.AutoModelForCausalLM.from_pretrained(out).eval()

    # Every id, length and other field, in the file and as transformers reads it.
    before, after = (json.loads((f / "config.json").read_text()) for f in (hf, out))
    assert {k: v for k, v in before.items() if k not in REWRITTEN} == {
        k: after.get(k, "missing") for k in before if k not in REWRITTEN
    }
    assert all(token in after for token in TOKENS)
    read, again = theirs.config.to_dict(), back.config.to_dict()
    for values in (read, again):
        (values.get("rope_parameters") or {}).pop("type", None)  # of old files, beside rope_type
    # Values that transformers would derive are written: the logits below are the same to the bit.
    for written, given in zip(ropes_of(again), ropes_of(read), strict=True):
        for derived in DERIVED - given.keys():
            written.pop(derived, None)
    # A null stands for a value that transformers derives, and that is written.
    different = {k for k in read if read[k] is not None and read[k] != again.get(k)}
    assert different <= {"dtype", "transformers_version", "_name_or_path"}

    # The tokenizer's files, both forms of a chat template, and how to generate.
    for file in hf.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            kept = (out / file.name).read_bytes()
            is_equal = kept == file.read_bytes() or json.loads(kept) == json.loads(file.read_text())
            assert is_equal, file.name
    text = transformers.AutoTokenizer.from_pretrained(out)
    original = transformers.AutoTokenizer.from_pretrained(hf)
    assert text.chat_template == original.chat_template
    assert text.special_tokens_map == original.special_tokens_map

    # The same numbers, and an end at the same place: by the export, and by sample.py.
    tokens = torch.randint(V, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, theirs(tokens).logits)
    expected = generated(theirs)
    assert len(expected) < 20, "else the end is not tried"
    assert generated(back) == expected
    capsys.readouterr()
    for file in TOKENIZER:
        (hf / file).unlink()  # so that sample.py reads and prints ids
    checkpoint.run_command(["import", "--from", "hf", str(hf), str(tmp_path / "bare")])
    words = [str(tmp_path / "bare"), "--prompt", " ".join(map(str, PROMPT)), "--temperature", "0"]
    capsys.readouterr()
    printed = run_here([*words, "--max-tokens", "20", "--device", "cpu"], capsys)[0]
    assert numbers(printed)[0] == PROMPT + expected[:-1]


def test_fields_that_nothing_reads_are_named(tmp_path):
    config = MODELS["SmolLM2-135M-Instruct"][0]
    assert unread(config, "config.json") == [
        "is_llama_config",
        "rope_interleaved",
        "transformers.js_config",
    ]
    path = tmp_path / "config.json"
    for fields in (config, MODELS["TinyLlama-1.1B-Chat"][0]):
        path.write_text(json.dumps(fields))
        (*notes,) = parse_request(["--model", str(path), "--steps", "1"]).notes
        named = [
            note for note in notes if "that change nothing here: is_llama_config, rope" in note
        ]
        assert len(notes) == len(named) == ("is_llama_config" in fields)


# ---- Every field that changes numbers ------------------------------------------------------------

# Fields that have no place in a model's numbers in this test: names, types, and the vocabulary's.
SKIPPED = {"architectures", "model_type", "torch_dtype", "transformers_version", *TOKENS}


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits differ by rounding alone."""
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


def changes_of(value) -> list:
    """Other values for a field of config.json."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2]
    if isinstance(value, float):
        return [value * 1.5 + 0.01, 2.0]
    if isinstance(value, str):
        return ["gelu", "relu", "gelu_new"]
    if isinstance(value, list):
        return [value[::-1], value[:1] * len(value)] if value else [[0], [1]]
    if isinstance(value, dict):
        further = [{**value, k: v} for k in value for v in changes_of(value[k])]
        return further + [{k: v for k, v in value.items() if k != gone} for gone in value]
    return [3, True, 5.0, {"rope_type": "linear", "factor": 2.0}]


def logits_of(config: dict, tokens) -> torch.Tensor | None:
    """transformers' logits with weights that depend on their shapes; None: it has no model."""
    model_type = config["model_type"]
    try:
        config = json.loads(json.dumps({k: v for k, v in config.items() if k != "model_type"}))
        made = transformers.AutoConfig.for_model(model_type, **config)
        model = transformers.AutoModelForCausalLM.from_config(
            made, attn_implementation="eager", dtype=torch.float32
        ).eval()
        generator = torch.Generator().manual_seed(0)
        for _, p in sorted(model.named_parameters()):
            p.data = torch.randn(p.shape, generator=generator) * 0.3 + (p.dim() == 1)
        with torch.no_grad():
            return model(tokens).logits
    except Exception:  # a value that transformers refuses, with exceptions of several kinds
        return None


def keys_of(config: dict) -> dict:
    """Every field that transformers' class has, with its value; those of the file as they are."""
    model_type = config["model_type"]
    given = {k: v for k, v in config.items() if k != "model_type"}
    made = transformers.AutoConfig.for_model(model_type, **given).to_dict()
    return made | vars(transformers.AutoConfig.for_model(model_type)) | config


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_field_that_changes_numbers_is_honoured_or_refused_by_name(name):
    """Each field is changed, also those that the file does not have but transformers' class does:
    if transformers' logits move, so does our shape, or it is refused.
    """
    config = MODELS[name][0] | {"vocab_size": V}
    tokens = torch.randint(V, (1, 32), generator=torch.Generator().manual_seed(0))
    expected = logits_of(config, tokens)
    own, lacks = from_config(config, "config.json")
    assert expected is not None
    assert not lacks
    model, moved = make_model(own, "config.json"), 0
    silent = []
    every = keys_of(config)
    for field in sorted(every.keys() - SKIPPED):
        for value in changes_of(every[field]):
            changed = config | {field: value}
            theirs = logits_of(changed, tokens)
            if theirs is None or (theirs.shape == expected.shape and is_near(theirs, expected)):
                continue
            moved += 1
            try:
                options, lacks = from_config(changed, "config.json")
                is_other = make_model(options, "config.json") != model
            except UserError:
                continue
            if not is_other and not lacks:
                silent.append((field, value))
    assert not silent
    assert moved > 10
