"""Exports weights to folders of Hugging Face transformers, and imports weights from these.

    export_weights(checkpoint_folder, target)     writes config.json, safetensors, tokenizer
    import_weights(source, target)                writes a checkpoint at step 0 with weights only

"Ours" are the tensors of Trine, "theirs" those of transformers. A `Rule` converts one of our
tensors to one or more of theirs, and back; `rule.name` is the name of ours, `rule.theirs` the names
of theirs. The model may be larger than memory: an export holds the tensors of one output
file and one tensor as it was saved; an import holds one tensor.

    rules(model)                 a rule for each tensor of the model, for both directions
    hf_config(model, dtype)      their config.json for our shape
    model_shape(config, where)   our shape for their config.json
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from architecture import families
from architecture.families import Family
from architecture.shape import MIXERS, ModelShape
from architecture.tensors import canonical_shapes, check_shapes, compare
from base.errors import CheckpointError
from checkpointing import file_format, hf_mixers, model_record
from checkpointing.hf_buffers import check_buffers, is_buffer, largest_difference
from checkpointing.hf_scales import folding
from checkpointing.index import Index
from checkpointing.model_record import ModelRecord
from checkpointing.weights_only import Contents, new_folder, write_checkpoint, write_json
from config.command_line import make_model

# ---- Rules ---------------------------------------------------------------------------------------

# A conversion "to ours" takes their tensors and returns ours; "to theirs" takes ours and returns a
# tuple. architecture/families.toml has their names for each family of models.


@dataclass(frozen=True)
class Rule:
    """The conversion of one tensor.

    name: the name of our tensor. theirs: the names of their tensors. to_ours: takes their tensors,
    in this order, and returns ours; to_theirs: takes our tensor and returns theirs in this order.
    exact: their tensor is in fp32 whatever the type of the other weights is. part: our tensor is
    some rows of their only one, whose other rows are those of other rules.
    copies: so many of the last names are of copies of the first tensor.
    """

    name: str
    theirs: tuple[str, ...]
    to_ours: Callable[..., Tensor]
    to_theirs: Callable[[Tensor], tuple[Tensor, ...]]
    exact: bool = False
    part: hf_mixers.Part | None = None
    copies: int = 0


def rules(model: ModelShape, name: str | None = None) -> list[Rule]:
    """Return the rules for all tensors of the model.

    name: the name of the model's family; None: the first family that has the model. Raise UserError
    if that family, or every family, does not have the model.
    """
    family = families.family_of(model, name)
    return [
        _in_predictor(_rule(name, model, family), model, family) for name in canonical_shapes(model)
    ]


def _in_predictor(rule: Rule, model: ModelShape, family: Family) -> Rule:
    """Return the rule with the names that blocks of multi-token prediction have in the family."""
    number = re.match(r"blocks\.(\d+)\.(?!mtp\.)", rule.name)
    if number is None or int(number[1]) < model.layers or not family.predictors:
        return rule
    here = family.inner.replace("*", number[1])
    depth = int(number[1]) - model.layers
    of_block = family.predictors[1]
    there = here if of_block == family.inner else of_block.replace("*", str(depth))
    return dataclasses.replace(rule, theirs=tuple(n.replace(here, there, 1) for n in rule.theirs))


def _copies(model: ModelShape, family: Family, depth: int) -> dict[str, str]:
    """Return the names of a predictor's copies of the embedding's and the head's matrix, by name of
    the tensor that they equal.

    depth: the predictor's number, from 0 on.
    """
    block = str(model.layers + depth)
    head = "embedding.tokens" if model.tied else "head"
    found = {}
    for part, original in (("embedding", "embedding.tokens"), ("head", head)):
        if names := family.modules.get(f"blocks.*.mtp.{part}"):
            copy = f"{names[0]}.weight".replace("*", block)
            found[copy] = f"{family.modules[original][0]}.weight"
    return found


def _with_copies(all_rules: list[Rule], model: ModelShape, family: Family) -> list[Rule]:
    """Return the rules of an export, which write the predictors' copies of the model's matrices."""
    copies: dict[str, list[str]] = {}
    for depth in range(model.mtp_depth):
        for copy, original in _copies(model, family, depth).items():
            copies.setdefault(original, []).append(copy)

    def with_copies(rule: Rule) -> Rule:
        """Return the rule, which also writes the copies of its tensor if there are any."""
        names = copies.get(rule.theirs[0], []) if rule.theirs else []
        if not names:
            return rule

        def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
            (theirs,) = rule.to_theirs(ours)
            return theirs, *(theirs.clone() for _ in names)

        theirs = (*rule.theirs, *names)
        return dataclasses.replace(rule, theirs=theirs, to_theirs=to_theirs, copies=len(names))

    return [with_copies(rule) for rule in all_rules]


def _rule(name: str, model: ModelShape, family: Family) -> Rule:
    """Return the rule for our tensor `name`, such as "blocks.3.mlp.up.weight".

    In this example `module` is "blocks.3.mlp.up", `kind` is "weight", and `general` is
    "blocks.*.mlp.up", under which families.toml has the names of their modules.
    """
    module, _, kind = name.rpartition(".")
    number = re.search(r"\d+", module)
    layer = number[0] if number else "*"
    general = re.sub(r"\d+", "*", module, count=1)
    if name.endswith((".router.bias", ".router.load")):
        initial = 1.0 if kind == "load" else 0.0
        their_names = family.modules.get(f"{general}.{kind}", ())  # most families have none
        theirs = tuple(their_name.replace("*", layer) for their_name in their_names)
        return _rule_of_router(name, theirs, model, initial)
    mixer, _, tensor = name.removeprefix(f"blocks.{layer}.").partition(".")
    if mixer in MIXERS:
        their_names = family.modules[f"blocks.*.{mixer}.{tensor}"]
        theirs = tuple(their_name.replace("*", layer) for their_name in their_names)
        if rows := hf_mixers.part(mixer, tensor, model):
            return Rule(name, theirs, rows.to_ours, rows.to_theirs, part=rows)
        return Rule(name, theirs, *hf_mixers.conversions(mixer, tensor, model, family))
    their_modules = family.modules[general]
    if number and "attention" not in model.mixers_of(int(layer)):
        # The norms of such a block may have other names than those of a block with attention.
        their_modules = family.modules.get(f"{general} beside a mixer", their_modules)
    theirs = tuple(f"{m}.{kind}".replace("*", layer) for m in their_modules)
    if family.stacked_experts and general.startswith(("blocks.*.mlp.", "blocks.*.attention")):
        stacked = _rule_of_stack(name, general, kind, theirs[0].removesuffix(f".{kind}"))
        if stacked is not None:
            return stacked
    if "#" in their_modules[0]:  # in their names, "#" stands for the number of the expert
        return _rule_of_experts(name, theirs, model.experts)
    part = general.removeprefix("blocks.*.")
    to_ours, to_theirs = _conversions(part, model, family, len(theirs))
    # Some families, such as GPT-2, keep the matrices of their blocks as (in, out), where ours are
    # (out, in).
    is_matrix_of_block = general != module and kind == "weight" and "norm" not in part
    if family.transposed and is_matrix_of_block:
        return Rule(
            name,
            theirs,
            lambda *tensors: to_ours(*(t.t() for t in tensors)),
            lambda ours: tuple(t.t() for t in to_theirs(ours)),
        )
    return Rule(name, theirs, to_ours, to_theirs)


def _conversions(
    part: str, model: ModelShape, family: Family, count: int
) -> tuple[Callable, Callable]:
    """Return the conversions (to ours, to theirs) of a part of the model, without experts.

    part: the part's name in a block, such as "attention.qkv", or outside of the blocks, such as
    "embedding.positions". count: the number of their tensors.
    """
    if part == "attention.qkv":
        return _qkv(model, family, count)
    if part in ("attention.q", "attention.q_b", "attention.kv_b", "attention.kv_a"):
        return _latent(part, model)
    if part in ("attention.q_norm", "attention.k_norm") and model.qk_norm == "full":
        # The scales of the norm: ours are (heads, head size), theirs are flat.
        return lambda t: t.unflatten(0, (-1, model.head_size)), _as_tuple(torch.flatten)
    if part in ("mlp.up", "mlp.shared.up") and model.up_matrices == 2 and count == 1:
        # Their single matrix has the rows of the gate first: ours has both, (2, width, hidden).
        return lambda t: t.unflatten(0, (2, -1)), _as_tuple(lambda t: t.flatten(0, 1))
    if (
        part == "mlp.experts.up" and model.up_matrices == 2 and count == 1
    ):  # the same of each expert
        return lambda t: t.unflatten(1, (2, -1)), _as_tuple(lambda t: t.flatten(1, 2))
    if count == 2:  # the two matrices of SwiGLU: ours has both, (2, width, hidden)
        return lambda gate, up: torch.stack([gate, up]), torch.unbind
    if part == "embedding.positions" and family.skipped_rows:
        # Their matrix has this number of rows before the row of position 0, which ours leaves out.
        rows = family.skipped_rows
        pad = (0, 0, rows, 0)
        return lambda t: t[rows:], _as_tuple(lambda t: F.pad(t, pad))
    return lambda t: t, _as_tuple(lambda t: t)


def _as_tuple(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return a conversion to theirs for a single tensor: the result of `convert`, in a tuple."""
    return lambda t: (convert(t),)


def _qkv(model: ModelShape, family: Family, count: int) -> tuple[Callable, Callable]:
    """Return the conversions (to ours, to theirs) of weights or biases of queries, keys and values.

    count: the number of their tensors: 3 for queries (a d, ...), keys and values (g d, ...), or 1
    with all of their rows. Our tensor is (g, a/g + 2, d, ...): for each of g key/value heads its
    queries, its key, its value and with attention_gate a gate of each query; a: heads, d: head
    size. With gates, their queries' tensor has of each head its query, then its gate.
    """
    g = model.kv_heads
    d = model.head_size
    queries = model.heads // model.kv_heads
    parts = [queries, 1, 1]
    if model.attention_gate:
        return _gated_qkv(g, queries, d)
    if family.interleaved:
        return _halves(model, *_qkv(model, dataclasses.replace(family, interleaved=False), count))
    # Three tensors: queries become (g, a/g, d, ...), keys and values (g, 1, d, ...), joined along
    # the second dimension, and back.
    if count == 3:
        return (
            lambda *three: torch.cat([t.unflatten(0, (g, -1, d)) for t in three], 1),
            lambda t: tuple(part.flatten(0, 2) for part in t.split(parts, 1)),
        )
    if family.qkv == "head":  # the rows of their single tensor are in our order already
        return lambda t: t.unflatten(0, (g, queries + 2, d)), _as_tuple(lambda t: t.flatten(0, 2))
    # Their single tensor has the queries of all heads first, then all keys, then all values.
    rows = [part * g * d for part in parts]
    return (
        lambda t: torch.cat([part.unflatten(0, (g, -1, d)) for part in t.split(rows)], 1),
        _as_tuple(lambda t: torch.cat([part.flatten(0, 2) for part in t.split(parts, 1)])),
    )


def _gated_qkv(g: int, queries: int, d: int) -> tuple[Callable, Callable]:
    """Return the conversions of `_qkv` for three tensors and a model with gates."""

    def to_ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, gate = q.unflatten(0, (g, queries, 2, d)).unbind(2)
        return torch.cat([query, k.unflatten(0, (g, 1, d)), v.unflatten(0, (g, 1, d)), gate], 1)

    def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
        query, k, v, gate = ours.split([queries, 1, 1, queries], 1)
        return torch.stack([query, gate], 2).flatten(0, 3), k.flatten(0, 2), v.flatten(0, 2)

    return to_ours, to_theirs


def _halves(model: ModelShape, to_ours: Callable, to_theirs: Callable) -> tuple[Callable, Callable]:
    """Return conversions of `_qkv` for a family that turns neighbouring columns (2i, 2i + 1).

    Ours turn the columns i and i + r/2 of the first r of a head: of the rows that make them, ours
    has the even ones first. See `_latent`.
    """
    turned = torch.arange(model.rotary_width)
    rest = torch.arange(model.rotary_width, model.head_size)
    order = torch.cat([turned[::2], turned[1::2], rest])
    back = order.argsort()

    def reordered(ours: Tensor, order: Tensor) -> Tensor:
        """Return our tensor with other rows in each query and key, but not in the values."""
        return torch.cat([ours[:, :-1, order], ours[:, -1:]], 1)

    return (
        lambda *theirs: reordered(to_ours(*theirs), order),
        lambda ours: to_theirs(reordered(ours, back)),
    )


def _latent(part: str, model: ModelShape) -> tuple[Callable, Callable]:
    """Return the conversions (to ours, to theirs) of a matrix of latent attention.

    Theirs turn neighbouring columns (2i, 2i + 1) of a head's rope_head_dim columns, ours turn the
    columns i and i + r/2. So of the rows that make these columns, the last r of each head (and of
    kv_a), ours has the even ones first. A score is a sum over the columns of query and key, whose
    order does not change it. Ours have a dimension for the heads, theirs are flat.
    """
    if part == "attention.kv_b":  # of whose columns no position turns one
        rows = model.qk_nope_head_dim + model.v_head_dim
        return lambda t: t.unflatten(0, (-1, rows)), _as_tuple(lambda t: t.flatten(0, 1))
    turned = torch.arange(model.qk_rope_head_dim)
    first = model.kv_lora_rank if part == "attention.kv_a" else model.qk_nope_head_dim
    order = torch.cat([torch.arange(first), first + turned[::2], first + turned[1::2]])
    back = order.argsort()
    if part == "attention.kv_a":
        return lambda t: t[order], _as_tuple(lambda t: t[back])
    return (
        lambda t: t.unflatten(0, (-1, len(order)))[:, order],
        _as_tuple(lambda t: t[:, back].flatten(0, 1)),
    )


def _rule_of_router(name: str, theirs: tuple[str, ...], model: ModelShape, initial: float) -> Rule:
    """Return the rule of a router's bias or load, (experts,).

    name: the tensor's name, ending in .bias (the biases that --balance bias adds to the scores) or
    .load (how many tokens each expert had in the last step). theirs: the name of their tensor, or
    nothing: most families have no bias and none has a load. Then an import sets every element to
    `initial`, and an export writes nothing, and raises UserError if a bias is not 0: without the
    bias, transformers would send tokens to other experts.
    """
    if theirs:
        return Rule(name, theirs, lambda t: t, _as_tuple(lambda t: t), exact=True)

    def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
        """Return no tensor; UserError if a bias that would be lost is not 0."""
        if name.endswith(".bias") and ours.any():
            raise CheckpointError(
                f"{name} is not 0: the model was trained with --balance bias, and its family in "
                "transformers has no bias of experts"
            )
        return ()

    return Rule(name, (), lambda: torch.full((model.experts,), initial), to_theirs)


def _rule_of_stack(name: str, general: str, kind: str, theirs: str) -> Rule | None:
    """Return the rule of a tensor of gpt-oss whose form is another than in other families, or None.

    transformers has one tensor for all experts, (experts, in, out), in which gate and up alternate.
    Ours is (experts, out, in), or (experts, 2, width, in). name: ours. general: the name without
    its last part, with * for the block. kind: the last part, such as weight. theirs: the module's
    or parameter's name in transformers, for the block.
    """
    if general == "blocks.*.mlp.router" and kind == "logit_bias":
        return Rule(name, (f"{theirs}.bias",), lambda t: t, _as_tuple(lambda t: t))
    if general == "blocks.*.mlp.experts.up" and kind == "weight":
        return Rule(
            name,
            (theirs,),
            lambda t: t.transpose(1, 2).unflatten(1, (-1, 2)).transpose(1, 2),
            _as_tuple(lambda t: t.transpose(1, 2).flatten(1, 2).transpose(1, 2)),
        )
    if general == "blocks.*.mlp.experts.up":
        return Rule(
            name,
            (f"{theirs}_bias",),
            lambda t: t.unflatten(1, (-1, 2)).transpose(1, 2),
            _as_tuple(lambda t: t.transpose(1, 2).flatten(1, 2)),
        )
    if general == "blocks.*.mlp.experts.down" and kind == "weight":
        turn = lambda t: t.transpose(1, 2)  # noqa: E731
        return Rule(name, (theirs,), turn, _as_tuple(turn))
    if general == "blocks.*.mlp.experts.down":
        return Rule(name, (f"{theirs}_bias",), lambda t: t, _as_tuple(lambda t: t))
    return None


def _rule_of_experts(name: str, theirs: tuple[str, ...], experts: int) -> Rule:
    """Return the rule of one tensor of ours with all experts; they have one tensor per expert.

    theirs: the name of an expert's tensor, or the two names of its gate and up, with "#" for the
    expert's number. Our tensor is (experts, ...), or with gate and up (experts, 2, ...). The rule
    lists their tensors in this order: gate and up of expert 0, gate and up of expert 1, ...
    """
    names: list[str] = []
    for expert in range(experts):
        names += [their_name.replace("#", str(expert)) for their_name in theirs]
    count = len(theirs)

    def to_ours(*tensors: Tensor) -> Tensor:
        stacked = torch.stack(tensors)
        return stacked.unflatten(0, (experts, count)) if count > 1 else stacked

    def to_theirs(ours: Tensor) -> tuple[Tensor, ...]:
        return torch.unbind(ours.flatten(0, 1) if count > 1 else ours)

    return Rule(name, tuple(names), to_ours, to_theirs)


# ---- config.json ---------------------------------------------------------------------------------


def hf_config(
    model: ModelShape,
    dtype: torch.dtype,
    name: str | None = None,
    record: ModelRecord | None = None,
) -> dict[str, Any]:
    """Return the contents of a model's config.json; UserError if no family has the model.

    dtype: the type of the exported weights. name: the name of a family; None: that of `record`, or
    else the first that has the model. record: what the model is beyond its shape, if it is known.
    """
    came = record.config if record else {}
    config = families.to_config(model, name, came)
    window = model.window or (record.window if record else None) or None
    if window != families.window(config, "the exported config.json"):
        raise CheckpointError(
            f"the model has a sliding_window({window}), which is lost as a "
            f"{config['model_type']}: --family {came.get('model_type', 'mistral')} keeps it"
        )
    # Without these fields transformers would take the family's default ids, which belong to another
    # tokenizer: the row of a pad token gets no gradient, and its default in OLMo 2 is token 1.
    config |= {token: came.get(token) for token in families.TOKENS}
    if record and model.positions != "learned":
        length = families.FAMILIES[config["model_type"]].fields["seq_length"][0]
        config[length] = max(record.context_length, model.seq_length)
    predictors = families.FAMILIES[config["model_type"]].predictors
    if model.mtp_depth and predictors and predictors[2]:
        config[predictors[2]] = model.mtp_depth
    return config | {"torch_dtype": str(dtype).removeprefix("torch.")}


def model_shape(config: dict[str, Any], where: str) -> ModelShape:
    """Return the model's shape from the contents of a config.json.

    where: the path of the config.json, for messages. Raise UserError if Trine does not have such a
    model, or cannot train a part of it.
    """
    options, lacks = families.from_config(config, where)
    if lacks:
        raise CheckpointError(f"{where}: {'; '.join(lacks)}")
    return make_model(options, where)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A folder of transformers has its weights in one file of the name SINGLE, or in several files, and
# then the file INDEX names the file of each tensor.
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def export_weights(
    source: str,
    target: str,
    dtype: str | None = None,
    shard_bytes: float = 5e9,
    tokenizer: str | None = None,
    family: str | None = None,
    averaged: bool = False,
) -> list[str]:
    """Write a checkpoint's weights to a new folder for transformers; return the files' names.

    source: a checkpoint whose files have been checked. dtype: a key of DTYPES; None: the type in
    which the weights were saved. shard_bytes: the most bytes of a file, and so of the memory; a
    larger tensor has its own file. tokenizer: path of a tokenizer.json, or a folder with one; None:
    the tokenizer that the checkpoint has, if any. family: a name in families.toml; None: that of
    the imported model, or else the first family that has the model. averaged: whether to export the
    average of --ema in place of the weights. Raise UserError if no family has the model or a tensor
    of it, or if the folder `target` exists. Called by `checkpoint.py export`.
    """
    record = model_record.read(source)
    with Index(source) as index, new_folder(target) as folder:
        trained = make_model(index.attributes("model"), index.path)
        record = record or model_record.without_tokenizer(trained.seq_length)
        came = record.config.get("model_type")
        model = families.exported(trained, family or (came if came in families.FAMILIES else None))
        fold = folding(trained, model)
        if tokenizer:
            record = record.with_tokenizer(tokenizer)
        torch_dtype = DTYPES[dtype] if dtype else getattr(torch, str(index.dtypes["weights"]))
        config = hf_config(model, torch_dtype, family, record)
        all_rules = rules(model, config["model_type"])
        all_rules = _with_copies(all_rules, model, families.FAMILIES[config["model_type"]])
        shapes = index.shapes
        if difference := compare(shapes, model):
            raise CheckpointError(
                f"{source} has tensors that no family in transformers has, and without them it is "
                f"another model: {difference.text()}"
            )
        write_tokenizer(record, folder, model)
        files = _group(all_rules, shapes, torch_dtype.itemsize, shard_bytes)
        count = len(files)
        file_of: dict[str, str] = {}  # for each of their tensors, the name of its file
        for number, group in enumerate(files, 1):
            name = SINGLE
            if count > 1:
                name = f"model-{number:05d}-of-{count:05d}.safetensors"
            path = os.path.join(folder, name)
            kind = index.weights_kind(averaged)
            _write_safetensors(path, group, index, torch_dtype, kind, fold)
            file_of |= {theirs: name for rule in group for theirs in rule.theirs}
        if count > 1:
            total = (
                sum(math.prod(shapes[rule.name]) * (1 + rule.copies) for rule in all_rules)
                * torch_dtype.itemsize
            )
            write_json(folder, INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})
        write_json(folder, "config.json", config)
        if record.generation is not None:
            write_json(folder, model_record.GENERATION, record.generation)
        return sorted(os.listdir(folder))


def _group(all_rules: list[Rule], shapes: dict, itemsize: int, limit: float) -> list[list[Rule]]:
    """Return groups of rules whose tensors together have up to `limit` bytes, one group per file.

    shapes: the shapes of our tensors, by name. itemsize: bytes of an element. A tensor that is
    larger than `limit` has its own file. Rules of parts of one tensor follow one another.
    """
    files: list[list[Rule]] = [[]]
    filled = 0  # bytes of the tensors in the last group
    for rule in all_rules:
        size = math.prod(shapes[rule.name]) * itemsize
        is_begun = rule.part is not None and bool(files[-1]) and files[-1][-1].theirs == rule.theirs
        if files[-1] and filled + size > limit and not is_begun:
            files.append([])
            filled = 0
        files[-1].append(rule)
        filled += size
    return files


def _write_safetensors(
    path: str,
    group: list[Rule],
    index: Index,
    dtype: torch.dtype,
    kind: str,
    fold: Callable[[str, Tensor], Tensor],
) -> None:
    """Convert the tensors of a group of rules and write them, as `dtype`, to the file `path`.

    All tensors of the group are in memory at the same time. fold: see hf_scales. Raise UserError if
    a value is beyond the largest of its type.
    """
    tensors: dict[str, Tensor] = {}
    for rule in group:
        ours = fold(rule.name, torch.from_numpy(index.read_whole(kind, rule.name)))
        their_type = torch.promote_types(dtype, torch.float32) if rule.exact else dtype
        ours = _cast(ours, their_type, rule.theirs[0] if rule.theirs else rule.name)
        for name, theirs in zip(rule.theirs, rule.to_theirs(ours)):
            if rule.part is None:
                tensors[name] = theirs.contiguous()
            else:
                rule.part.write(theirs, tensors, name)
    save_file(tensors, path, metadata={"format": "pt"})
    # safetensors gives the file rights for its owner only: set the rights of an ordinary new file.
    os.chmod(path, 0o666 & ~_umask())
    file_format.flush(path)


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor in another type; UserError, with its name, if a value becomes infinite."""
    cast = tensor.to(dtype)
    beyond = cast.isinf() & tensor.isfinite()
    if not beyond.any():
        return cast
    value = float(tensor[beyond].abs().max())
    limit = torch.finfo(dtype).max
    their_type = str(dtype).removeprefix("torch.")
    raise CheckpointError(
        f"{int(beyond.sum()):,} of {tensor.numel():,} values of {name} are beyond the largest "
        f"number of {their_type}, {limit:,.6g}; the largest is {value:,.6g}: export without "
        "--dtype, in the checkpoint's own type, or with --dtype bf16"
    )


def _umask() -> int:
    """Return the process's umask, which can be read only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_tokenizer(record: ModelRecord, folder: str, model: ModelShape) -> None:
    """Write the files of a model's tokenizer, as they came, to the folder of an exported model.

    If they have no tokenizer_config.json that names a class, as the files of a corpus, transformers
    gets one. Raise UserError if the tokenizer has more tokens than the model.
    """
    files = dict(record.files)
    if "tokenizer.json" in files:
        size = model_record.vocabulary(files)
        if size > model.vocab_size:
            raise CheckpointError(
                f"the tokenizer.json has {size} tokens, but the model's vocab-size is "
                f"{model.vocab_size}: give the tokenizer of this model as --tokenizer PATH"
            )
        files |= model_record.complete_settings(files, record.context_length)
    for name, contents in files.items():
        file_format.write_file(folder, name, contents)


def import_weights(
    source: str, target: str, note: Callable[[str], None] = lambda line: None
) -> ModelShape:
    """Write the weights of a transformers folder as a checkpoint at step 0 in `target`.

    The checkpoint has fp32, which represents bf16 and fp16 exactly; fp64 stays fp64. It also holds
    what the model is beyond its shape (model_record.py). Return the model's shape. note: is called
    with lines on what is not read or not kept. Raise UserError if a file is missing, if
    Trine does not have such a model, if a weight is not finite, or if a tensor is left over that is
    not what the model gives it (hf_buffers.py). Called by `checkpoint.py import`.
    """
    config = _read_json(source, "config.json")
    where = os.path.join(source, "config.json")
    model = model_shape(config, where)
    record = _record_of(source, config, where)
    slices, files = _open_tensors(source)
    # A hostile file may give billions of layers: refuse it before `rules` lists their tensors.
    if model.layers > len(slices):
        raise CheckpointError(
            f"{source} has {len(slices)} tensors, too few for {model.layers} layers"
        )
    family = families.family_in(config, where)
    lines = list(_notes(source, config, record, where, files))
    model, line = _with_own_head(source, slices, model, family)
    lines += [line] if line else []
    model = _with_predictors(source, slices, model, family)
    all_rules = rules(model, family.name)
    tensors = _match(source, slices, all_rules)
    check_buffers(source, slices, model)
    types = {tensor.get_dtype() for tensor in tensors.values()}
    if not types <= {"F64", "F32", "F16", "BF16"}:
        raise CheckpointError(
            f"{source} has tensors of {', '.join(sorted(types))}; floats are needed"
        )
    dtype = "float64" if "F64" in types else "float32"

    def shape_of(rule: Rule) -> tuple[int, ...]:
        """Return the shape of our tensor, from the shapes of theirs, without reading weights."""
        shapes = [tensors[name].get_shape() for name in rule.theirs]
        try:
            ours = rule.to_ours(*(torch.empty(shape, device="meta") for shape in shapes))
        except (RuntimeError, TypeError):
            raise CheckpointError(
                f"{source}: {rule.theirs[0]} has another shape: {shapes}"
            ) from None
        return tuple(ours.shape)

    def tensors_of_trine() -> Iterator[np.ndarray]:
        """Read, convert and yield our tensors one by one; UserError if a value is not finite."""
        for rule in all_rules:
            ours = rule.to_ours(*(tensors[name][:] for name in rule.theirs))
            wrong = ours.numel() - int(torch.isfinite(ours).sum())
            if wrong:
                raise CheckpointError(
                    f"{source}: {wrong:,} of {ours.numel():,} values of {rule.theirs[0]} are not "
                    f"finite: these weights cannot be trained"
                )
            yield ours.to(getattr(torch, dtype)).contiguous().numpy()

    shapes = {rule.name: shape_of(rule) for rule in all_rules}
    check_shapes(shapes, model, source)
    imported_from = os.path.basename(os.path.normpath(source))
    contents = Contents(model, shapes, dtype, record, {"imported_from": imported_from})
    write_checkpoint(target, contents, tensors_of_trine())
    for line in lines:
        note(line)
    return model


def _record_of(source: str, config: dict[str, Any], where: str) -> ModelRecord:
    """Return what the model of a transformers folder is beyond its shape.

    config: the contents of its config.json, whose path is `where`. Raise UserError if a file is a
    link to elsewhere or holds something else than it should.
    """
    generation = None
    if os.path.lexists(os.path.join(source, model_record.GENERATION)):
        generation = _read_json(source, model_record.GENERATION)

    def opened(path: str) -> BinaryIO:
        return file_format.open_regular(_path_in(source, os.path.relpath(path, source)))

    files = model_record.files_beside(os.path.join(source, ""), opened)
    length = families.context_length(config, where)
    return model_record.from_config(config, generation, files, length, where)


def _notes(
    source: str, config: dict[str, Any], record: ModelRecord, where: str, weights: list[str]
) -> Iterator[str]:
    """Yield lines on what an import keeps without reading, and what it leaves.

    weights: the names of the files whose tensors are read.
    """
    if unread := families.unread(config, where):
        yield f"{where} has fields that are kept and change nothing here: {', '.join(unread)}"
    known = {"config.json", model_record.GENERATION, INDEX, *record.files, *weights}
    known |= {os.path.dirname(name) for name in record.files}
    if others := sorted(name for name in os.listdir(source) if name not in known):
        yield f"not taken from {source}: {', '.join(others)}"


def _path_in(folder: str, name: str) -> str:
    """Return the real path of the regular file `name` in a folder, or in a folder of it.

    Raise UserError if there is no such file, or if it is a link to a file outside the folder. In
    the cache of the Hugging Face hub, files of `snapshots/REVISION` are links to `blobs`.
    """
    real_folder = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(folder, name))
    allowed = [os.path.dirname(os.path.join(real_folder, name))]
    parent = os.path.dirname(real_folder)
    if os.path.basename(parent) == "snapshots":
        allowed.append(os.path.join(os.path.dirname(parent), "blobs"))
    if os.path.dirname(path) not in allowed:
        raise CheckpointError(
            f"{os.path.join(folder, name)} is a link to a file outside the folder"
        )
    try:
        file_format.open_regular(path).close()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    return path


def _read_json(folder: str, name: str) -> dict[str, Any]:
    return families.read_object(_path_in(folder, name), file_format.open_regular)


# Some versions of transformers wrote a tensor under another name: the key is the name in our rules,
# the value the other name.
_OTHER_NAMES = {"embed_out.weight": "lm_head.weight"}
# And some have other names for a part, such as transformers 5.23 in the files that it saves.
_OTHER_PARTS = [
    ("backbone.", "model."),  # Nemotron-H's
    (".mlp.", ".block_sparse_moe."),  # of Kimi Linear's dense blocks
    (".post_attention_layernorm.", ".feedforward_layer_norm."),
    (".feedforward_layer_norm.", ".post_attention_layernorm."),
    (".attention_layer_norm.", ".input_layernorm."),
]


def _spelled(name: str, slices: dict[str, Any]) -> str | None:
    """Return the name by which a folder has their tensor `name`; None if it does not have it."""
    # Some files omit the first component of names, as in h.0.ln_1 for transformer.h.0.ln_1.
    _, _, short_name = name.partition(".")
    spellings = [name, short_name, _OTHER_NAMES.get(name, name)]
    spellings += [name.replace(part, other) for part, other in _OTHER_PARTS if part in name]
    return next((spelling for spelling in spellings if spelling in slices), None)


def _with_own_head(
    source: str, slices: dict[str, Any], model: ModelShape, family: Family
) -> tuple[ModelShape, str]:
    """Return a model whose head is tied in config.json as the tensors have it, and a line about it.

    Many folders have the tied head beside the embedding: an equal one is taken out of `slices`, and
    one without an embedding gets its name there. If both are there and differ, the model has a head
    of its own, as transformers loads it. Raise UserError if they have different shapes. The line is
    empty if nothing is to be said.
    """
    names = [f"{family.modules[part][0]}.weight" for part in ("embedding.tokens", "head")]
    embedding, head = (_spelled(name, slices) for name in names)
    if not model.tied or head is None:
        return model, ""
    if embedding is None:  # the folder has the one matrix by the name of the head
        slices[names[0]] = slices.pop(head)
        return model, ""
    shapes = [slices[name].get_shape() for name in (embedding, head)]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        raise CheckpointError(f"{source}: {embedding} and {head}, tied, have the shapes {shapes}")
    difference = largest_difference(slices[embedding], slices[head])
    if difference == 0:
        del slices[head]
        return model, ""
    return dataclasses.replace(model, tied=False), (
        f"config.json ties the head to the embedding, but {head} differs from {embedding} by up to "
        f"{difference:g}: imported with a head of its own (tied = false), as transformers loads it"
    )


def _with_predictors(
    source: str, slices: dict[str, Any], model: ModelShape, family: Family
) -> ModelShape:
    """Return the model with as many modules of multi-token prediction as the folder has.

    transformers saves none, whatever config.json says of their number. Their copies of the
    embedding's and the head's matrix are taken out of `slices`. Raise UserError if one of them is
    not equal: here they share the model's.
    """
    if not family.predictors:
        return model
    name = f"{family.modules['blocks.*.mtp.join'][0]}.weight"
    depth = 0
    while depth < family.predictors[0]:
        if _spelled(name.replace("*", str(model.layers + depth)), slices) is None:
            break
        for copy, original in _copies(model, family, depth).items():
            found, same = _spelled(copy, slices), _spelled(original, slices)
            if found is None or same is None:
                continue
            shapes = [slices[key].get_shape() for key in (found, same)]
            if shapes[0] != shapes[1] or largest_difference(slices[found], slices[same]) != 0:
                raise CheckpointError(
                    f"{source}: {found} is not {same}: a module of multi-token prediction has the "
                    "embedding and the head of the model here, and none of its own"
                )
            del slices[found]
        depth += 1
    return dataclasses.replace(model, mtp_depth=depth)


def _open_tensors(folder: str) -> tuple[dict[str, Any], list[str]]:
    """Return the tensors of a folder by name, slices that read when indexed, and their files.

    The weights are in a single file, or in several files with an index. Raise UserError if a file
    is missing or damaged, or if two files have a tensor of the same name.
    """
    files = [SINGLE]
    if not os.path.lexists(os.path.join(folder, SINGLE)):
        _check_no_pickles(folder)
        weight_map = _read_json(folder, INDEX).get("weight_map")  # the file of each tensor
        files = list(weight_map.values()) if isinstance(weight_map, dict) else []
        valid = [isinstance(n, str) and re.fullmatch(r"[\w.-]+\.safetensors", n) for n in files]
        if not files or not all(valid):
            raise CheckpointError(f"{folder}/{INDEX} has no weight_map to files of this folder")
    files = sorted(set(files))
    slices: dict[str, Any] = {}
    for name in files:
        path = _path_in(folder, name)
        try:
            file = safe_open(path, "pt")
            # `file` is no dictionary: only the list `keys()` of its tensors' names can be iterated.
            found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"cannot read {path}: {reason}; it begins with {_begin(path)}"
            ) from None
        if twice := sorted(slices.keys() & found.keys()):
            raise CheckpointError(f"{path} has {twice[0]}, which another file of {folder} has too")
        slices |= found
    return slices, files


def _begin(path: str) -> str:
    """Return the first bytes of a file, as an error shows what it is instead of tensors."""
    with file_format.open_regular(path) as file:
        return repr(file.read(32))[1:]


def _check_no_pickles(folder: str) -> None:
    """Raise UserError if a folder has weights as pickled files (.bin) and no safetensors.

    The sentence says how transformers converts them: unpickling a file of a stranger may execute
    anything, so it is not done here.
    """
    if os.path.lexists(os.path.join(folder, INDEX)):
        return
    pickled = sorted(name for name in os.listdir(folder) if name.endswith((".bin", ".pt", ".pth")))
    if pickled:
        raise CheckpointError(
            f"{folder} has no {SINGLE}, only {', '.join(pickled[:3])}, which are not read here, as "
            "a pickled file may execute anything; transformers converts them: "
            f"AutoModelForCausalLM.from_pretrained({folder!r}).save_pretrained(NEW_FOLDER), and "
            "the same with AutoTokenizer"
        )


def _match(folder: str, slices: dict[str, Any], all_rules: list[Rule]) -> dict[str, Any]:
    """Return the tensors that the rules need, by their names in the rules.

    slices: all tensors, by their names in the files; the tensors that are needed are removed. Raise
    UserError if a tensor is missing, or if one is left that is no buffer.
    """
    tensors = {}
    missing = []
    for name in sorted({name for rule in all_rules for name in rule.theirs}):
        name_in_file = _spelled(name, slices)
        if name_in_file is None:
            missing.append(name)
        else:
            tensors[name] = slices.pop(name_in_file)
    surplus = sorted(name for name in slices if not is_buffer(name))
    if missing or surplus:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors of its model {missing[:3]} and has "
            f"{len(surplus)} others {surplus[:3]}"
        )
    return tensors
