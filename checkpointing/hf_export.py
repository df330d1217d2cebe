"""Weights out to Hugging Face transformers and in from there.

    export_weights(checkpoint_folder, target)     config.json, safetensors, tokenizer
    import_weights(source, target)                a checkpoint of weights alone, at step 0

families.py says which of their tensors make which of ours, and both ways read it. Tensors pass
one at a time, so a model larger than memory passes too.
"""

import dataclasses
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator

import h5py
import torch
from torch import Tensor

from checkpointing import file_format
from checkpointing.hf_mappings import Rule, hf_config, model_shape, rules
from config.messages import UserError
from config.schema import ModelShape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# safetensors' names of types.
_CODES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDEX = "model.safetensors.index.json"


# ------------------------------------------------------------------------------------------------
# Out
# ------------------------------------------------------------------------------------------------


def export_weights(
    source: str,
    target: str,
    dtype: str | None = None,
    shard_bytes: float = 5e9,
    tokenizer: str | None = None,
) -> list[str]:
    """Write a checkpoint's weights to a new folder for transformers; returns the files' names.

    source: a checkpoint whose files have been checked. dtype: a key of DTYPES, default as saved.
    """
    with file_format.Index(source) as index, _new_folder(target) as folder:
        model = ModelShape(**index.facts("model"))
        saved = torch.from_numpy(index.whole("weights", "head.norm.weight")).dtype
        chosen = DTYPES[dtype] if dtype else saved
        every = rules(model)
        _check_complete(every, index.shapes(), source)
        config = hf_config(model, chosen)
        if tokenizer:
            config |= _copy_tokenizer(tokenizer, folder, model)
        files = _group(every, index.shapes(), chosen.itemsize, shard_bytes)
        where = {}
        for number, group in enumerate(files, 1):
            name = "model.safetensors"
            if len(files) > 1:
                name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            _write_safetensors(os.path.join(folder, name), group, index, chosen)
            where |= {other: name for rule in group for other in rule.theirs}
        if len(files) > 1:
            total = sum(_elements(index.shapes()[r.name]) for r in every) * chosen.itemsize
            _write_json(folder, INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        _write_json(folder, "config.json", config)
        return sorted(os.listdir(folder))


def _check_complete(every: list[Rule], shapes: dict, source: str) -> None:
    missing = [rule.name for rule in every if rule.name not in shapes]
    surplus = sorted(shapes.keys() - {rule.name for rule in every})
    if missing or surplus:
        raise UserError(f"{source} lacks {missing[:5]} or has {surplus[:5]} on top of its model")


def _group(every: list[Rule], shapes: dict, itemsize: int, limit: float) -> list[list[Rule]]:
    """Rules in files of up to `limit` bytes; a tensor that is larger has a file of its own."""
    files, held = [[]], 0
    for rule in every:
        own = _elements(shapes[rule.name]) * itemsize
        if files[-1] and held + own > limit:
            files.append([])
            held = 0
        files[-1].append(rule)
        held += own
    return files


def _elements(shape: tuple[int, ...]) -> int:
    return file_format.size(tuple((0, n) for n in shape))


def _write_safetensors(path: str, group: list[Rule], index: file_format.Index, dtype) -> None:
    """The format is a length, a JSON header and the data; written tensor by tensor."""
    code = next(code for code, kind in _CODES.items() if kind == dtype)
    header, at, shapes = {"__metadata__": {"format": "pt"}}, 0, index.shapes()
    for rule in group:
        for name, like in zip(
            rule.theirs, rule.give(torch.empty(shapes[rule.name], device="meta"))
        ):
            end = at + like.numel() * dtype.itemsize
            header[name] = {"dtype": code, "shape": list(like.shape), "data_offsets": [at, end]}
            at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for rule in group:
            for tensor in rule.give(torch.from_numpy(index.whole("weights", rule.name))):
                flat = tensor.to(dtype).contiguous().view(-1).view(torch.uint8)
                file.write(memoryview(flat.numpy()))
        file.flush()
        os.fsync(file.fileno())


def _copy_tokenizer(tokenizer: str, folder: str, model: ModelShape) -> dict:
    """tokenizer.json beside the weights; the fields of config.json that follow from it."""
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(tokenizer)
    except Exception as error:  # the library raises no kind of its own
        raise UserError(f"cannot read the tokenizer {tokenizer}: {error}") from None
    if loaded.get_vocab_size() > model.vocab_size:
        raise UserError(
            f"{tokenizer} has {loaded.get_vocab_size()} tokens, the model {model.vocab_size}"
        )
    shutil.copy(tokenizer, os.path.join(folder, "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.seq_length,
        "clean_up_tokenization_spaces": False,
    }
    end = loaded.token_to_id("<|endoftext|>")
    if end is not None:
        settings["eos_token"] = "<|endoftext|>"
    _write_json(folder, "tokenizer_config.json", settings)
    return {} if end is None else {"eos_token_id": end}


def _write_json(folder: str, name: str, value: dict) -> None:
    with open(os.path.join(folder, name), "w") as file:
        json.dump(value, file, indent=2)


class _new_folder:
    """A folder that appears under its name only when the block ends well."""

    def __init__(self, target: str):
        self.target, self.partial = target.rstrip("/"), target.rstrip("/") + ".partial"

    def __enter__(self) -> str:
        if os.path.exists(self.target):
            raise UserError(f"{self.target} exists: name a new folder")
        shutil.rmtree(self.partial, ignore_errors=True)
        try:
            os.makedirs(self.partial)
        except OSError as error:
            raise UserError(f"cannot write {self.partial}: {error.strerror}") from None
        return self.partial

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            os.rename(self.partial, self.target)
        else:
            shutil.rmtree(self.partial, ignore_errors=True)


# ------------------------------------------------------------------------------------------------
# In
# ------------------------------------------------------------------------------------------------


def import_weights(source: str, target: str) -> ModelShape:
    """Write the weights of a transformers folder as a checkpoint at step 0 in `target`.

    In fp32, which holds bf16 and fp16 exactly (fp64 stays). Returns the model's shape.
    """
    config = _read_json(source, "config.json")
    model = model_shape(config, os.path.join(source, "config.json"))
    every = rules(model)
    theirs = _Safetensors(source)
    theirs.check(every)
    wide = theirs.dtype(every[0].theirs[0]) == "F64"
    kind = "float64" if wide else "float32"
    shapes = {r.name: tuple(r.take(*theirs.meta(r)).shape) for r in every}

    def runs() -> Iterator:
        for rule in every:
            ours = rule.take(*(theirs.read(name) for name in rule.theirs))
            yield ours.to(torch.float64 if wide else torch.float32).contiguous().numpy()

    with _new_folder(target) as folder:
        hidden = os.path.join(folder, file_format.folder_name(0))
        os.mkdir(hidden)
        name, total = "rank_00000.h5", sum(map(_elements, shapes.values()))
        written = file_format.write_shard(
            os.path.join(hidden, name), total, {"weights": (kind, runs())}
        )
        pieces = [(n, [tuple((0, k) for k in shape)]) for n, shape in shapes.items()]
        shard = file_format.Shard(name, *written, {"weights": kind}, pieces)
        files = {name: written}
        image = file_format.index_image(shapes, [shard])
        files[file_format.INDEX] = file_format.write_index(hidden, image, _facts(model, source))
        file_format.write_manifest(hidden, 0, files)
        if os.path.exists(os.path.join(source, "tokenizer.json")):
            shutil.copy(os.path.join(source, "tokenizer.json"), folder)
    return model


def _facts(model: ModelShape, source: str) -> dict[str, dict]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "model": dataclasses.asdict(model),
        "progress": {"iteration": 0, "consumed_samples": 0, "skipped_samples": 0},
        "optimizer": {"kind": "none"},
        "data": {"seed": 0, "fingerprint": ""},
        "run": {
            "config": json.dumps({"imported_from": os.path.basename(os.path.normpath(source))}),
            "versions": json.dumps(versions | {"h5py": h5py.__version__}),
            "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        },
    }


def _read_json(folder: str, name: str) -> dict:
    path = os.path.join(folder, name)
    try:
        with open(path) as file:
            return json.load(file)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from None


# Buffers and copies that files of these families may hold beside the weights.
_IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "lm_head.weight")


class _Safetensors:
    """The tensors of a folder, in one file or in several with an index, read one at a time."""

    def __init__(self, folder: str):
        try:
            from safetensors import safe_open
        except ImportError:
            raise UserError("import needs the package safetensors: pip install it") from None
        self.folder, single = folder, "model.safetensors"
        names = [single]
        if not os.path.exists(os.path.join(folder, single)):
            names = sorted(set(_read_json(folder, INDEX)["weight_map"].values()))
        self.where = {}
        for name in names:
            try:
                file = safe_open(os.path.join(folder, name), "pt")
            except Exception as error:  # the library's own kind, or OSError
                raise UserError(f"cannot read {folder}/{name}: {error}") from None
            self.where |= dict.fromkeys(file.keys(), file)

    def check(self, every: list[Rule]) -> None:
        """UserError if a tensor is missing, or one is there that no rule takes."""
        wanted = {self.find(name) or name for rule in every for name in rule.theirs}
        missing = sorted(wanted - self.where.keys())
        surplus = sorted(n for n in self.where.keys() - wanted if not n.endswith(_IGNORED))
        if missing or surplus:
            raise UserError(
                f"{self.folder} lacks {len(missing)} tensors of its model {missing[:3]} and has "
                f"{len(surplus)} others {surplus[:3]}"
            )

    def find(self, name: str) -> str | None:
        """The name under which a tensor is there: some files leave out the first word."""
        short = name.split(".", 1)[1]
        return name if name in self.where else short if short in self.where else None

    def dtype(self, name: str) -> str:
        name = self.find(name)
        return self.where[name].get_slice(name).get_dtype()

    def meta(self, rule: Rule) -> list[Tensor]:
        """The rule's tensors without their data."""
        names = [self.find(name) for name in rule.theirs]
        shapes = [self.where[name].get_slice(name).get_shape() for name in names]
        return [torch.empty(shape, device="meta") for shape in shapes]

    def read(self, name: str) -> Tensor:
        name = self.find(name)
        return self.where[name].get_tensor(name)
