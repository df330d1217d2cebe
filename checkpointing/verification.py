"""Checks that a checkpoint is complete and undamaged before any of it is used.

    manifest = check_files(folder)      checks manifest, files, tensors and attributes

Read file_format.py and index.py first.
"""

import json
import math
from typing import Any

from checkpointing import folders
from checkpointing.file_format import INDEX, Shape
from checkpointing.index import Index
from config.command_line import make_model
from config.messages import UserError
from config.schema import ModelShape
from corpora.usage import Usage

COUNTS = ("iteration", "consumed_samples", "skipped_samples", "step")


def check_files(folder: str, contents: bool = True, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """Check a checkpoint and return its manifest.

    Raise UserError for anything that `--resume` or an export could not use. contents: whether to
    compare the files' checksums, or only their sizes. rank, size: of several ranks that call this,
    each checks index.h5 and a part of the other files.
    """
    manifest = folders.read_manifest(folder)
    files = manifest["files"]
    for name in {INDEX: None} | dict.fromkeys(list(files)[rank::size]):
        problem = folders.find_problem(folder, name, files[name], contents)
        if problem:
            raise UserError(problem)
    with Index(folder) as index:
        index.check({name: entry["bytes"] for name, entry in files.items()}, rank, size)
        model = make_model(index.attributes("model"), index.path)
        check_shapes(index.shapes, model, index.path)
        _check_attributes(index, manifest["step"])
    return manifest


def check_shapes(found: dict[str, Shape], model: ModelShape, where: str) -> None:
    """Raise UserError unless `found` has the names and shapes of the model's tensors.

    where: the path that the error names.
    """
    if model.layers > len(found):
        raise UserError(f"{where} has {len(found)} tensors, too few for {model.layers} layers")
    expected = canonical_shapes(model)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            both = f"{found.get(name, 'missing')}, its model has {expected.get(name, 'none')}"
            raise UserError(f"{where}: {name} is {both}")


def canonical_shapes(model: ModelShape) -> dict[str, Shape]:
    """Return the global shape of each of a model's tensors, by name (see file_format.py)."""
    h = model.hidden
    g = model.kv_heads
    d = model.head_size
    f = model.ffn_hidden
    qkv = (g, model.heads // g + 2, d)
    up = (2, f) if model.activation == "swiglu" else (f,)
    linear: dict[str, tuple[Shape, int, bool]] = {"attention.qkv": (qkv, h, model.qkv_bias)}
    linear |= {"attention.out": ((h,), model.attention_width, model.bias)}
    linear |= {"mlp.up": (up, h, model.bias), "mlp.down": ((h,), f, model.bias)}
    scales = {
        "none": {},
        "head": {"q": (d,), "k": (d,)},
        "full": {"q": (model.heads, d), "k": (g, d)},
    }
    norms = ["head.norm"]
    shapes: dict[str, Shape] = {"embedding.tokens.weight": (model.vocab_size, h)}
    if model.positions == "learned":
        shapes["embedding.positions.weight"] = (model.max_positions, h)
    if not model.tied:
        shapes["head.weight"] = (model.vocab_size, h)
    if model.embedding_norm:
        norms.append("embedding.norm")
    for block in (f"blocks.{i}" for i in range(model.layers)):
        norms += [f"{block}.attention_norm", f"{block}.mlp_norm"]
        for name, (outputs, inputs, bias) in linear.items():
            shapes[f"{block}.{name}.weight"] = (*outputs, inputs)
            if bias:
                shapes[f"{block}.{name}.bias"] = outputs
        for name, shape in scales[model.qk_norm].items():
            shapes[f"{block}.attention.{name}_norm.weight"] = shape
    for norm in norms:
        shapes |= {
            f"{norm}.{n}": (h,) for n in ("weight", "bias")[: 1 + (model.norm == "layernorm")]
        }
    return shapes


def _check_attributes(index: Index, step: int) -> None:
    """Raise UserError unless the attributes of index.h5 have the types and values that a resume
    uses: counts >= 0, finite scalars of the optimizer, text that can be read, and this step.
    """
    progress, optimizer, data, run = map(index.attributes, ("progress", "optimizer", "data", "run"))
    text = {"kind": optimizer.pop("kind", None), "fingerprint": data.get("fingerprint")}
    text["config"] = run.get("config")
    counts = {"iteration": None} | progress
    if len(index.kinds) > 1:
        counts["step"] = optimizer.get("step")
    wrong = [(k, v) for k, v in text.items() if not isinstance(v, str) or not v.isprintable()]
    wrong += [(k, v) for k, v in counts.items() if type(v) is not int or k not in COUNTS]
    numbers = (progress | optimizer).items()
    least = {"hysteresis": -(2**63)}  # may be negative: each overflow in a row subtracts one
    wrong += [
        (k, v) for k, v in numbers if isinstance(v, str) or not least.get(k, 0) <= v < math.inf
    ]
    try:
        dict(json.loads(str(text["config"])).get("training", {}))
    except (ValueError, TypeError, AttributeError, RecursionError):
        wrong.append(("config", text["config"]))
    try:
        Usage.from_text(str(data.get("usage", Usage().text())))
    except ValueError:
        wrong.append(("usage", data["usage"]))
    if wrong:
        raise UserError(f"{index.path} has {wrong[0][0]!a} = {wrong[0][1]!a:.80}")
    if progress["iteration"] != step:
        raise UserError(f"{index.path} is of step {progress['iteration']}, its manifest of {step}")
