"""Weights to and from Hugging Face: if this failed, a model would change on the way, or be lost."""

import json
import math
import os
import re
import resource
import shutil
from pathlib import Path

import checkpoint_worker as worker
import h5py
import pytest
import torch

import checkpoint
import sample
from base.errors import UserError
from checkpointing import hf_export

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SHAPE = {"layers": 3, "hidden": 48, "heads": 6, "vocab_size": 131, "seq_length": 40}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "positions": "rotary"}
MODELS = {
    "gpt2": {"positions": "learned"},
    "gpt2 untied": {"positions": "learned", "tied": False, "activation": "gelu", "ffn_hidden": 80},
    "bloom": {"positions": "alibi", "embedding_norm": True},
    "llama": LLAMA | {"kv_heads": 2, "ffn_hidden": 80, "tied": False, "norm_eps": 1e-6},
    "llama tied": LLAMA | {"rotary_base": 5e5},
}


def save(out: Path, extra: dict):
    """A checkpoint of random weights: its folder, and the run's TrainState."""
    state = worker.save_random(out, 0.15, **SHAPE, **extra)
    return out / "checkpoints/step_00000001", state


def command(*arguments) -> None:
    """Run a sub-command of checkpoint.py in this process."""
    checkpoint.run_command([str(one) for one in arguments])


@pytest.mark.parametrize("name", MODELS)
def test_out_and_in_again_is_the_same_checkpoint(name, tmp_path):
    folder, _ = save(tmp_path, MODELS[name])
    command("export", "--to", "hf", "--shard-gb", "0.00005", folder, tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 3
    command("import", "--from", "hf", tmp_path / "hf", tmp_path / "back")
    command("verify", tmp_path / "back")
    back = tmp_path / "back/step_00000000/index.h5"
    with h5py.File(folder / "index.h5") as ours, h5py.File(back) as other:
        assert dict(ours["model"].attrs) == dict(other["model"].attrs)
        assert ours["weights"].keys() == other["weights"].keys()
        for key in ours["weights"]:
            assert (ours["weights"][key][...] == other["weights"][key][...]).all(), key


def test_names_of_the_hubs_gpt2_are_understood(exported, tmp_path):
    """They are short, and there are buffers among them."""
    shutil.copytree(exported / "one", tmp_path / "hf")
    path = tmp_path / "hf/model.safetensors"
    first = safetensors.load_file(path)
    short = {k.removeprefix("transformer."): v for k, v in first.items()}
    safetensors.save_file(short | {"h.0.attn.bias": torch.ones(1)}, path)
    command("import", "--from", "hf", tmp_path / "hf", tmp_path / "in")
    command("export", "--to", "hf", tmp_path / "in", tmp_path / "out")
    second = safetensors.load_file(tmp_path / "out/model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(("layers", "message"), [(4, "lacks 12 tensors"), (2, "12 others")])
def test_another_number_of_tensors_is_refused(layers, message, exported, tmp_path):
    shutil.copytree(exported / "one", tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_layer": layers}))
    check_import_refused(tmp_path / "hf", message)


# ------------------------------------------------------------------------------------------------
# Hostile folders, full disks
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder with `one` exported file, `several`, and a `secret` copy of the first."""
    base = tmp_path_factory.mktemp("exported")
    folder, _ = save(base / "run", MODELS["gpt2"])
    command("export", "--to", "hf", folder, base / "one")
    command("export", "--to", "hf", "--shard-gb", "0.00005", folder, base / "several")
    shutil.copytree(base / "one", base / "secret")
    return base


def check_import_refused(folder: Path, *parts: str) -> None:
    with pytest.raises(UserError) as caught:
        command("import", "--from", "hf", folder, folder.parent / "in")
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 500
    assert str(folder) in sentence
    for part in parts:
        assert part in sentence
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_import_opens_only_regular_files_of_its_folder(name, exported, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(exported / "one", folder)
    path = folder / name
    for target in (exported / "secret/config.json", "/dev/zero", os.path.relpath(exported, folder)):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        check_import_refused(folder, f"{name} is a link to a file outside the folder")
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to(name)):
        path.unlink() if path.is_symlink() or path.is_fifo() else None
        make(path)
        check_import_refused(folder, "it is not a regular file")
        path.rmdir() if path.is_dir() else None


@pytest.mark.parametrize(
    "weight_map",
    [None, 5, [], {}, {"a": 5}, {"a": "../secret/model.safetensors"}, {"a": "/dev/zero"}]
    + [{"a": ".."}, {"a": "x\0.safetensors"}, {"a": "model.safetensors/"}, {"a": ["b"]}],
)
def test_a_weight_map_names_files_of_its_folder(weight_map, exported, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(exported / "several", folder)
    (folder / hf_export.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    check_import_refused(folder, "has no weight_map to files of this folder")


def test_links_of_the_hubs_cache_are_followed(exported, tmp_path):
    snapshot, blobs = tmp_path / "hub/snapshots/0123abcd", tmp_path / "hub/blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(exported / "one", blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    command("import", "--from", "hf", snapshot, tmp_path / "in")
    command("verify", tmp_path / "in")
    shutil.rmtree(blobs)
    blobs.symlink_to(exported / "secret")
    with pytest.raises(UserError, match="is a link to a file outside the folder"):
        command("import", "--from", "hf", snapshot, tmp_path / "other")


WRONG_FILES = {
    "config.json": (b"", b"[]", b"3", b"[" * 10**6, b"\xff\xfe\xff", b'{"model_type": "gpt2"}'),
    "model.safetensors": (b"", b"\xff" * 100, b"\0\0\0\0\0\0\0@{}", b"\2" + bytes(7) + b"{}"),
}
HUGE = 10**30
WRONG_FIELDS = {
    "model_type": (None, 5, ["gpt2"], "x" * 10**6, "a\nb"),
    "n_layer": ("3", 0, -1, 10**12, [3], {}, 2.5, float("inf"), "a\nb"),
    "n_embd": ("48", 0, -48, HUGE, 49, [0] * 10**5),
    "n_head": ("6", 0, 5, {}),
    "vocab_size": ("x", 0, 130, 132, HUGE),
    "n_positions": ("x", 0, 39, HUGE),
    "layer_norm_epsilon": ("x", []),
    "n_inner": ("x", 0, 191),
    "activation_function": (5, ["gelu"], "a\nb"),
    "tie_word_embeddings": ("yes", 0, False),
}


def test_a_damaged_import_is_one_sentence(exported, tmp_path):
    folder = tmp_path / "hf"
    for name, contents in WRONG_FILES.items():
        for content in contents:
            shutil.copytree(exported / "one", folder)
            (folder / name).write_bytes(content)
            check_import_refused(folder)
            shutil.rmtree(folder)
    shutil.copytree(exported / "one", folder)
    config = json.loads((folder / "config.json").read_text())
    for name, values in WRONG_FIELDS.items():
        for value in values:
            (folder / "config.json").write_text(json.dumps(config | {name: value}))
            check_import_refused(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.int(), "has tensors of F32, I32; floats are needed"),
        (lambda t: t[:, :-1], "has another shape"),
        (lambda t: t[None], "has another shape"),
        (lambda t: torch.zeros(()), "has another shape"),
        (lambda t: torch.zeros(0, 144), "blocks.0.attention.qkv.weight is (6, 3, 8, 0)"),
    ],
)
def test_a_tensor_of_another_shape_is_not_imported(change, message, exported, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(exported / "one", folder)
    tensors = safetensors.load_file(folder / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    tensors[name] = change(tensors[name]).contiguous()
    safetensors.save_file(tensors, folder / "model.safetensors")
    check_import_refused(folder, message)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(exported, tmp_path, capsys):
    """A limit of the size of files, which fails writes as a full disk does; output is in memory."""
    folder = exported / "run/checkpoints/step_00000001"
    uses = [("import", "--from", "hf", exported / "one"), ("export", "--to", "hf", folder)]
    uses.append(("export", "--to", "hf", "--shard-gb", "0.00005", folder))
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for use in uses:
        for limit in (0, 100, 5000, 20000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                with pytest.raises(UserError, match=r"cannot write .*/out: .*too large") as caught:
                    command(*use, tmp_path / "out")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
            assert "\n" not in str(caught.value)
            assert list(tmp_path.iterdir()) == []


def test_two_exports_to_one_folder_do_not_mix(tmp_path):
    target, refused = str(tmp_path / "hf"), r"hf\.partial exists: another process writes it"
    with hf_export.new_folder(target) as first:
        Path(first, "a").touch()
        with pytest.raises(UserError, match=refused), hf_export.new_folder(target):
            pytest.fail("it begins")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["a"]


def test_an_exported_folder_can_be_read_by_others(exported, tmp_path):
    folder = exported / "run/checkpoints/step_00000001"
    before = os.umask(0o022)
    try:
        command("export", "--to", "hf", folder, tmp_path / "hf")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()}
    assert modes == dict.fromkeys(modes, 0o644)
    assert "model.safetensors" in modes


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_imported(bad, exported, tmp_path):
    shutil.copytree(exported / "one", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = safetensors.load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith("mlp.c_fc.weight"))
    tensors[name][0, :2] = bad
    safetensors.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"2 of [\d,]+ values of {re.escape(name)} are not finite"):
        command("import", "--from", "hf", tmp_path / "hf", tmp_path / "back")
    assert not list(tmp_path.glob("back*"))


def test_a_folder_of_hugging_face_says_how_it_becomes_a_checkpoint(exported):
    folder = exported / "one"
    how = f"`python checkpoint.py import --from hf {folder} NEW_FOLDER` makes one of it"
    for program in (
        lambda: command("show", folder),
        lambda: sample.prepare_task(sample.parse([str(folder), "--prompt", "a"]), 1),
    ):
        with pytest.raises(UserError, match=re.escape(how)):
            program()
