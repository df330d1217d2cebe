"""Weights out to Hugging Face transformers and in from there.

    export_weights(checkpoint_folder, target)     config.json, safetensors, tokenizer
    import_weights(source, target)                a checkpoint of weights only, at step 0

hf_rules.py says which of their tensors make which of ours. The model may be larger than memory:
an export holds the tensors of one output file (`shard_bytes`, or its one larger tensor) and one
tensor as it was saved; an import holds one tensor at a time.

    hf_config(model, dtype)      their config.json for our shape
    model_shape(config, where)   our shape for their config.json
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from checkpointing import file_format, folders
from checkpointing.hf_rules import Rule, rules
from checkpointing.index import Index, check_shapes
from checkpointing.state import Progress
from checkpointing.writer import origin
from config import families
from config.command_line import make_model
from config.messages import UserError
from config.schema import ModelShape

# ---- config.json ---------------------------------------------------------------------------------


def hf_config(model: ModelShape, dtype: torch.dtype, name: str | None = None) -> dict[str, Any]:
    """config.json of the model, whose weights have that type; UserError as `rules`."""
    config = families.to_config(model, name) | {"bos_token_id": None, "eos_token_id": None}
    return config | {"torch_dtype": str(dtype).removeprefix("torch.")}


def model_shape(config: dict[str, Any], where: str) -> ModelShape:
    """The shape that a config.json describes; UserError if it is none of ours."""
    options, lacks = families.from_config(config, where)
    if lacks:
        raise UserError(f"{where}: {'; '.join(lacks)}")
    return make_model(options, where)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def export_weights(
    source: str,
    target: str,
    dtype: str | None = None,
    shard_bytes: float = 5e9,
    tokenizer: str | None = None,
    family: str | None = None,
) -> list[str]:
    """Write a checkpoint's weights to a new folder for transformers; returns the files' names.

    source: a checkpoint whose files have been checked. dtype: a key of DTYPES, default as saved.
    shard_bytes: limit of a file, and so of the memory; a larger tensor has a file of its own.
    family: a name of families.toml, default: the first that has the model. Raises UserError if none
    has, or target exists.
    """
    with Index(source) as index, new_folder(target) as folder:
        model = make_model(index.attributes("model"), index.path)
        chosen = DTYPES[dtype] if dtype else getattr(torch, str(index.dtypes["weights"]))
        all_rules = rules(model, family)
        shapes = index.shapes
        config = hf_config(model, chosen, family)
        if tokenizer:
            config |= copy_tokenizer(tokenizer, folder, model)
        files = _group(all_rules, shapes, chosen.itemsize, shard_bytes)
        count = len(files)
        file_of: dict[str, str] = {}
        for number, group in enumerate(files, 1):
            numbered = f"model-{number:05d}-of-{count:05d}.safetensors"
            name = numbered if count > 1 else SINGLE
            _write_safetensors(os.path.join(folder, name), group, index, chosen)
            file_of |= {theirs: name for rule in group for theirs in rule.theirs}
        if count > 1:
            total = sum(math.prod(shapes[rule.name]) for rule in all_rules) * chosen.itemsize
            _write_json(folder, INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})
        _write_json(folder, "config.json", config)
        return sorted(os.listdir(folder))


def _group(all_rules: list[Rule], shapes: dict, itemsize: int, limit: float) -> list[list[Rule]]:
    """Rules in files of up to `limit` bytes; a tensor that is larger has a file of its own."""
    files: list[list[Rule]] = [[]]
    filled = 0
    for rule in all_rules:
        size = math.prod(shapes[rule.name]) * itemsize
        if files[-1] and filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(rule)
        filled += size
    return files


def _write_safetensors(path: str, group: list[Rule], index: Index, dtype: torch.dtype) -> None:
    """One file with the tensors of these rules, which are all in memory meanwhile."""
    tensors = {}
    for rule in group:
        ours = torch.from_numpy(index.read_whole("weights", rule.name)).to(dtype)
        for name, theirs in zip(rule.theirs, rule.to_theirs(ours)):
            tensors[name] = theirs.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    os.chmod(path, 0o666 & ~_umask())  # safetensors writes it for its user alone
    file_format.flush(path)


def _umask() -> int:
    """The mask of modes of new files, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def copy_tokenizer(tokenizer: str, folder: str, model: ModelShape) -> dict:
    """tokenizer.json and chat template beside the weights; the fields of config.json that follow.

    The template and the tokens that it names are those of PREFIX.tokenizer_config.json beside
    PREFIX.tokenizer.json, where prepare_chats.py writes them, or of tokenizer_config.json beside
    tokenizer.json.
    """
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(tokenizer)
    except Exception as error:  # the library has no exception of its own
        raise UserError(f"cannot read the tokenizer {tokenizer}: {error}") from None
    if loaded.get_vocab_size() > model.vocab_size:
        raise UserError(
            f"{tokenizer} has {loaded.get_vocab_size()} tokens, the model {model.vocab_size}"
        )
    shutil.copy(tokenizer, os.path.join(folder, "tokenizer.json"))
    settings = _chat_settings(tokenizer) | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.seq_length,
        "clean_up_tokenization_spaces": False,
    }
    end = loaded.token_to_id("<|endoftext|>")
    if end is not None:  # a chat template may name another token, which ends an answer
        settings.setdefault("eos_token", "<|endoftext|>")
    _write_json(folder, "tokenizer_config.json", settings)
    both = loaded.token_to_id(str(settings.get("eos_token"))), end
    ends = sorted({number for number in both if number is not None})
    if not ends:
        return {}
    return {"eos_token_id": ends if len(ends) > 1 else ends[0]}


def _chat_settings(tokenizer: str) -> dict[str, Any]:
    """The chat template beside a tokenizer's file, and the tokens that it may name."""
    if not tokenizer.endswith("tokenizer.json"):
        return {}
    beside = tokenizer.removesuffix("tokenizer.json") + "tokenizer_config.json"
    if not os.path.isfile(beside):
        return {}
    settings = families.read_object(beside, file_format.open_regular)
    names = [name for name in settings if name == "chat_template" or name.endswith("_token")]
    return {name: settings[name] for name in names}


def _write_json(folder: str, name: str, value: dict) -> None:
    with open(os.path.join(folder, name), "w") as file:
        json.dump(value, file, indent=2)


@contextlib.contextmanager
def new_folder(target: str) -> Iterator[str]:
    """A folder that appears under its name only if the block ends without an exception.

    UserError if it cannot be written, as on a full disk.
    """
    target = target.rstrip("/")
    partial = target + ".partial"
    if os.path.exists(target):
        raise UserError(f"{target} exists: name a new folder")
    try:
        os.makedirs(partial)
    except FileExistsError:
        why = "another process writes it, or was killed, then remove it"
        raise UserError(f"{partial} exists: {why}") from None
    except OSError as error:
        raise UserError(f"cannot write {partial}: {error.strerror}") from None
    try:
        yield partial
        os.rename(partial, target)
    except (OSError, SafetensorError) as error:
        cause = " ".join((getattr(error, "strerror", None) or str(error)).split())
        raise UserError(f"cannot write {target}: {cause}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def import_weights(source: str, target: str) -> ModelShape:
    """Write the weights of a transformers folder as a checkpoint at step 0 in `target`.

    In fp32, which represents bf16 and fp16 exactly; fp64 stays fp64. Returns the model's shape.
    Raises UserError if a file is missing or the model is none of ours.
    """
    config = _read_json(source, "config.json")
    model = model_shape(config, os.path.join(source, "config.json"))
    there = _open_tensors(source)
    if model.layers > len(there):
        raise UserError(f"{source} has {len(there)} tensors, too few for {model.layers} layers")
    all_rules = rules(model, config["model_type"])
    tensors = _match(source, there, all_rules)
    kind = "float64" if "F64" in {tensor.get_dtype() for tensor in tensors.values()} else "float32"

    def shape_of(rule: Rule) -> tuple[int, ...]:
        shapes = [tensors[name].get_shape() for name in rule.theirs]
        try:
            ours = rule.to_ours(*(torch.empty(shape, device="meta") for shape in shapes))
        except (RuntimeError, TypeError):
            raise UserError(f"{source}: {rule.theirs[0]} has another shape: {shapes}") from None
        return tuple(ours.shape)

    def runs() -> Iterator[np.ndarray]:
        for rule in all_rules:
            ours = rule.to_ours(*(tensors[name][:] for name in rule.theirs))
            wrong = ours.numel() - int(torch.isfinite(ours).sum())
            if wrong:
                raise UserError(
                    f"{source}: {wrong:,} of {ours.numel():,} values of {rule.theirs[0]} are not "
                    f"finite: these weights cannot be trained"
                )
            yield ours.to(getattr(torch, kind)).contiguous().numpy()

    shapes = {rule.name: shape_of(rule) for rule in all_rules}
    check_shapes(shapes, model, source)
    parts = [(name, [tuple((0, size) for size in shape)]) for name, shape in shapes.items()]
    with new_folder(target) as folder:
        hidden, name = os.path.join(folder, folders.folder_name(0)), "rank_00000.h5"
        os.mkdir(hidden)
        count, arrays = sum(map(math.prod, shapes.values())), {"weights": (kind, runs())}
        total, crc = file_format.write_shard(os.path.join(hidden, name), count, arrays)
        shard = file_format.ShardFile(name, total, crc, {"weights": kind}, parts)
        image = file_format.index_image(shapes, [shard])
        index = file_format.write_index(hidden, image, _attributes(model, source))
        folders.write_manifest(hidden, 0, {name: (total, crc), file_format.INDEX: index})
        _write_json(folder, "run.json", {"config": {"model": dataclasses.asdict(model)}})
        if os.path.lexists(os.path.join(source, "tokenizer.json")):
            shutil.copyfile(_path_in(source, "tokenizer.json"), f"{folder}/tokenizer.json")
    return model


def _attributes(model: ModelShape, source: str) -> file_format.Attributes:
    return {
        "model": dataclasses.asdict(model),
        "progress": Progress().counts(),
        "optimizer": {"kind": "none"},
        "data": {"seed": 0, "fingerprint": ""},
        "run": origin({"imported_from": os.path.basename(os.path.normpath(source))}),
    }


def _path_in(folder: str, name: str) -> str:
    """The path of a regular file in a folder; UserError if there is none, or a link leads out.

    In the cache of the Hugging Face hub, files of `snapshots/REVISION` are links to `blobs`.
    """
    real = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(folder, name))
    above = os.path.dirname(real)
    blobs = os.path.join(os.path.dirname(above), "blobs")
    allowed = (real, blobs) if os.path.basename(above) == "snapshots" else (real,)
    if os.path.dirname(path) not in allowed:
        raise UserError(f"{os.path.join(folder, name)} is a link to a file outside the folder")
    try:
        file_format.open_regular(path).close()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return path


def _read_json(folder: str, name: str) -> dict[str, Any]:
    return families.read_object(_path_in(folder, name), file_format.open_regular)


# Buffers and copies that files of these families may contain in addition to the weights.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_IGNORED = (*_BUFFERS, ".rotary_emb.inv_freq", "lm_head.weight", "embed_out.weight")
# Other names of tensors in files that other versions of transformers wrote.
_OTHER_NAMES = {"embed_out.weight": "lm_head.weight"}


def _open_tensors(folder: str) -> dict[str, Any]:
    """The tensors of one file, or of several with an index, as slices by name. UserError."""
    files = [SINGLE]
    if not os.path.lexists(os.path.join(folder, SINGLE)):
        weight_map = _read_json(folder, INDEX).get("weight_map")
        files = list(weight_map.values()) if isinstance(weight_map, dict) else []
        plain = [isinstance(n, str) and re.fullmatch(r"[\w.-]+\.safetensors", n) for n in files]
        if not files or not all(plain):
            raise UserError(f"{folder}/{INDEX} has no weight_map to files of this folder")
    there: dict[str, Any] = {}
    for name in sorted(set(files)):
        path = _path_in(folder, name)
        try:
            file = safe_open(path, "pt")
            there |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    types = {tensor.get_dtype() for tensor in there.values()}
    if not types <= {"F64", "F32", "F16", "BF16"}:
        raise UserError(f"{folder} has tensors of {', '.join(sorted(types))}; floats are needed")
    return there


def _match(folder: str, there: dict[str, Any], all_rules: list[Rule]) -> dict[str, Any]:
    """The tensors by the names of the rules.

    UserError if a tensor is missing, or if no rule takes one that is there.
    """
    found = {}
    missing = []
    for name in sorted(name for rule in all_rules for name in rule.theirs):
        # Some files omit the first component.
        spelled = [name, name.split(".", 1)[1], _OTHER_NAMES.get(name, name)]
        known = next((each for each in spelled if each in there), None)
        if known is None:
            missing.append(name)
        else:
            found[name] = there.pop(known)
    surplus = sorted(name for name in there if not name.endswith(_IGNORED))
    if missing or surplus:
        raise UserError(
            f"{folder} lacks {len(missing)} tensors of its model {missing[:3]} and has "
            f"{len(surplus)} others {surplus[:3]}"
        )
    return found
