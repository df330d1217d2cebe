"""What an import leaves out: if this failed, another model than the files' would be trained."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import checkpoint
from architecture import families
from base.errors import UserError
from base.regular_files import open_regular
from checkpointing import hf_export

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

V, S = 131, 40
SHAPE = {
    "vocab_size": V,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "intermediate_size": 80,
    "num_key_value_heads": 6,
}
TOKENS = torch.arange(3, 3 + S)[None]


def folder_of(kind: str, folder: Path, **options) -> Path:
    """A folder of transformers with random weights."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **SHAPE | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.15 + (parameter.dim() == 1)
    model.save_pretrained(folder)
    return folder


def with_tensors(folder: Path, change) -> None:
    """Change the tensors of a folder: `change` takes and changes the dictionary of them."""
    tensors = safetensors.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits(folder: Path) -> torch.Tensor:
    """What transformers computes with a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits


def in_and_out(folder: Path, to: Path) -> tuple[torch.Tensor, list[str]]:
    """transformers' logits of the exported import of a folder, and the lines of the import."""
    lines: list[str] = []
    hf_export.import_weights(str(folder), str(to / "in"), lines.append)
    hf_export.export_weights(str(to / "in/step_00000000"), str(to / "out"))
    return logits(to / "out"), lines


def causal(n: int = 64) -> torch.Tensor:
    return torch.ones(n, n).tril()[None, None]


def plain(dtype=torch.float32, base: float = 10_000.0) -> torch.Tensor:
    """The rotary frequencies of the GPT-NeoX below, with 4 of 8 columns turned."""
    return (base ** (-torch.arange(0, 4, 2) / 4)).to(dtype)


def neox(folder: Path) -> Path:
    return folder_of("gpt_neox", folder, rotary_pct=0.5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float32])
def test_masks_of_any_type_beside_the_weights_are_left_out(dtype, tmp_path):
    folder = neox(tmp_path / "hf")
    expected = logits(folder)

    def add(tensors: dict) -> None:
        for block in range(2):
            attention = f"gpt_neox.layers.{block}.attention"
            tensors[f"{attention}.bias"] = causal().to(dtype)
            tensors[f"{attention}.masked_bias"] = torch.tensor(-1e9)
            tensors[f"{attention}.rotary_emb.inv_freq"] = plain(torch.float16)

    with_tensors(folder, add)
    found, lines = in_and_out(folder, tmp_path)
    assert torch.equal(found, expected)
    assert [line for line in lines if "num_key_value_heads" not in line] == []


WRONG_BUFFERS = {
    "a window": ("attention.bias", causal().triu(-7), "differs from the causal mask in 1,596 of"),
    "no mask": (
        "attention.bias",
        torch.ones(1, 1, 64, 64),
        "differs from the causal mask in 2,016",
    ),
    "a bias": ("attention.bias", torch.ones(144), r"has the shape \(144,\), and is no mask"),
    "a score": ("attention.masked_bias", torch.tensor(-5.0), "is -5, and a masked token's score"),
    "scores": ("attention.masked_bias", torch.full((6,), -1e9), r"has the shape \(6,\)"),
    "a base": (
        "attention.rotary_emb.inv_freq",
        plain(base=500_000.0),
        r"has 0\.00141421 as frequency 1, and rope_theta gives 0\.01",
    ),
    "a width": ("attention.rotary_emb.inv_freq", plain()[:1], r"has the shape \(1,\), and \(2,\)"),
    "a parameter": ("attention.gate.weight", torch.ones(6), "and has 1 others"),
    "codes": ("attention.dense.weight", torch.ones(48, 48).char(), "F32, I8; floats are needed"),
}


@pytest.mark.parametrize("name", WRONG_BUFFERS)
def test_a_tensor_that_is_not_what_its_name_says_is_refused(name, tmp_path):
    folder = neox(tmp_path / "hf")
    end, tensor, message = WRONG_BUFFERS[name]
    with_tensors(folder, lambda tensors: tensors.update({f"gpt_neox.layers.1.{end}": tensor}))
    with pytest.raises(UserError, match=message):
        hf_export.import_weights(str(folder), str(tmp_path / "in"))


def test_scaled_frequencies_are_those_of_the_model_too(tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    folder = folder_of("llama", tmp_path / "hf", num_key_value_heads=2, rope_parameters=scaling)
    frequencies = 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    for factor, is_right in ((1.0, True), (4.0, True), (2.0, False)):
        scaled = {name: frequencies / factor}
        with_tensors(folder, lambda tensors, scaled=scaled: tensors.update(scaled))
        target = str(tmp_path / f"in_{factor:g}")
        if is_right:
            hf_export.import_weights(str(folder), target)
            continue
        with pytest.raises(UserError, match=r"has 0\.5 as frequency 0"):
            hf_export.import_weights(str(folder), target)


# ---- A tied head ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "gpt_neox", "opt", "gemma2"])
def test_a_head_that_differs_from_the_embedding_is_kept(kind, tmp_path):
    options = {"head_dim": 8} if kind == "gemma2" else {}
    folder = folder_of(kind, tmp_path / "hf", tie_word_embeddings=True, **options)
    torch.manual_seed(9)
    name = "embed_out.weight" if kind == "gpt_neox" else "lm_head.weight"
    with_tensors(folder, lambda tensors: tensors.update({name: torch.randn(V, 48) * 0.15}))
    expected = logits(folder)
    found, lines = in_and_out(folder, tmp_path)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert [line for line in lines if "imported with a head of its own" in line]
    exported = json.loads((tmp_path / "out/config.json").read_text())
    assert exported["tie_word_embeddings"] is False


def test_an_equal_head_stays_tied_and_one_of_another_size_is_refused(tmp_path):
    folder = folder_of("qwen2", tmp_path / "hf", tie_word_embeddings=True)
    expected = logits(folder)
    embedding = "model.embed_tokens.weight"
    with_tensors(folder, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    found, lines = in_and_out(folder, tmp_path)
    assert torch.equal(found, expected)
    assert lines == []
    with_tensors(folder, lambda t: t.update({"lm_head.weight": t[embedding][:-1].clone()}))
    with pytest.raises(UserError, match=r"tied, have the shapes \[\[131, 48\], \[130, 48\]\]"):
        hf_export.import_weights(str(folder), str(tmp_path / "other"))


def test_a_tied_matrix_may_have_the_name_of_the_head_alone(tmp_path):
    folder = folder_of("qwen2", tmp_path / "hf", tie_word_embeddings=True)
    expected = logits(folder)
    name = "model.embed_tokens.weight"
    with_tensors(folder, lambda t: t.update({"lm_head.weight": t.pop(name)}))
    assert torch.equal(logits(folder), expected)
    found, _ = in_and_out(folder, tmp_path)
    assert torch.equal(found, expected)


# ---- Positions before the scaling ----------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0}
OUTSIDE = {
    "llama yarn": ("llama", YARN, {}),
    "llama yarn, both": ("llama", YARN | {families.ORIGINAL: 32}, {}),
    "llama llama3": ("llama", LLAMA3 | {families.ORIGINAL: 32}, {}),
    "llama longrope": ("llama", LONGROPE, {}),
    "qwen3 yarn": ("qwen3", YARN, {"head_dim": 8}),
    "mistral yarn": ("mistral", YARN, {}),
    "gpt_neox llama3": ("gpt_neox", LLAMA3 | {families.ORIGINAL: 32}, {"rotary_pct": 1.0}),
    "olmoe yarn": ("olmoe", YARN, {"num_experts": 8}),
    "gemma3, blocks of two kinds": ("gemma3_text", YARN, {"head_dim": 8}),
    "llama linear": ("llama", {"rope_type": "linear", "factor": 4.0}, {}),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_original_positions_beside_the_scaling_are_as_in_transformers(name, tmp_path):
    kind, scaling, options = OUTSIDE[name]
    folder = folder_of(kind, tmp_path / "hf", num_key_value_heads=2, **options)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters")
    config |= {"rope_scaling": scaling, families.ORIGINAL: 16}
    config |= {"rotary_emb_base" if kind == "gpt_neox" else "rope_theta": 1e4}
    path.write_text(json.dumps(config))
    expected = logits(folder)
    shape = families.read(str(path))[0]
    found, lines = in_and_out(folder, tmp_path)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    is_read = kind != "gemma3_text" and scaling["rope_type"] != "linear"
    assert is_read == (":16" in shape["rotary_scaling"].replace("longrope:16", "x:16"))
    assert is_read != any(families.ORIGINAL in line for line in lines)


def test_blocks_with_options_of_their_own_are_refused_by_name(tmp_path):
    folder = folder_of("llama", tmp_path / "hf")
    path = folder / "config.json"
    fields = {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UserError, match=r"per_layer_config is .*; here there is none"):
        hf_export.import_weights(str(folder), str(tmp_path / "in"))


def test_a_field_that_the_family_does_not_read_is_named(tmp_path):
    for kind, name, value in (("llama", "sliding_window", 8), ("gpt2", "rope_theta", 5e5)):
        config = transformers.AutoConfig.for_model(kind).to_dict() | {name: value}
        assert name in families.unread(config, "config.json")


# ---- Casts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (7e4, "fp16", "largest number of float16, 65,504; the largest is 70,000"),
        (-65_520.0, "fp16", "the largest is 65,520"),
        (3.4e38, "bf16", "largest number of bfloat16, 3.38953e"),
        (65_504.0, "fp16", ""),
        (7e4, "bf16", ""),
    ],
)
def test_a_number_beyond_the_type_of_an_export_is_refused(value, dtype, message, tmp_path):
    folder = folder_of("llama", tmp_path / "hf", num_key_value_heads=2)
    name = "model.layers.1.mlp.down_proj.weight"

    def spike(tensors: dict) -> None:
        tensors[name][3, 5] = value

    with_tensors(folder, spike)
    command = ["import", "--from", "hf", str(folder), str(tmp_path / "in")]
    checkpoint.run_command(command)
    command = ["export", "--to", "hf", "--dtype", dtype, str(tmp_path / "in"), str(tmp_path / "o")]
    if not message:
        checkpoint.run_command(command)
        assert safetensors.load_file(tmp_path / "o/model.safetensors")[name].isfinite().all()
        return
    with pytest.raises(UserError, match=f"1 of 3,840 values of {name} .*{message}"):
        checkpoint.run_command(command)
    assert not list(tmp_path.glob("o*"))


# ---- Files ---------------------------------------------------------------------------------------

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 166029852\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named_as_one(name, tmp_path):
    folder = folder_of("llama", tmp_path / "hf")
    (folder / name).write_text(POINTER)
    with pytest.raises(UserError, match=f"{name}: it is a pointer of Git LFS of .* `git lfs pull`"):
        hf_export.import_weights(str(folder), str(tmp_path / "in"))


def test_pointers_are_no_data_in_any_reader(tmp_path):
    texts = {"a.txt": POINTER, "b.bin": "/annex/objects/MD5E-s20--0123.bin\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(OSError, match=r"it is a pointer of [Gg]it"):
            open_regular(tmp_path / name)
    (tmp_path / "c.txt").write_text("version 1 of a text\n")
    with open_regular(tmp_path / "c.txt") as file:
        assert file.read() == b"version 1 of a text\n"


def test_a_page_in_place_of_weights_is_shown_by_its_begin(tmp_path):
    folder = folder_of("llama", tmp_path / "hf")
    (folder / "model.safetensors").write_text("<!DOCTYPE html><html>" + "x" * 100)
    with pytest.raises(UserError, match="it begins with '<!DOCTYPE html><html>xxxxxxxxxxx'"):
        hf_export.import_weights(str(folder), str(tmp_path / "in"))


def test_files_of_weights_that_are_not_read_are_named(tmp_path):
    folder = folder_of("llama", tmp_path / "hf")
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    lines: list[str] = []
    hf_export.import_weights(str(folder), str(tmp_path / "in"), lines.append)
    assert lines == [f"not taken from {folder}: adapter_model.safetensors"]


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = folder_of("llama", tmp_path / "hf")
    os.rename(folder / "model.safetensors", folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    names = safetensors.load_file(folder / "a.safetensors")
    files = {name: "ab"[number % 2] + ".safetensors" for number, name in enumerate(names)}
    index = {"weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"b\.safetensors has .*, which another file of .* has too"):
        hf_export.import_weights(str(folder), str(tmp_path / "in"))
