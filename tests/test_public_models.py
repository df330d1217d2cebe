"""Public models in and out again: if this failed, a model would lose a token, a length, a text."""

import json

import pytest
import torch
from public_models import MODELS, V, write
from test_sample import numbers, run_here

import checkpoint
from config.families import TOKENS, unread

transformers = pytest.importorskip("transformers")
PROMPT = [5, 17, 60, 40]
# Fields of config.json that may be written in another way.
REWRITTEN = {"torch_dtype", "dtype", "transformers_version", "rope_scaling", "rope_parameters"}
REWRITTEN |= {"rotary_emb_base", "rotary_pct"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


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
        values.get("rope_parameters", {}).pop("type", None)  # of old files, beside rope_type
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
