"""The tensors of a model, by name and global shape, as they stand in a checkpoint.

    canonical_shapes(model)          of a model with these options, without building it
    compare(found, model)            which tensors of a model or checkpoint are others

A person who adds a parameter to a layer need not add it here: the model that is built decides what
is trained, saved and resumed. What is listed here is what can be known of a model from its options
alone: an export and an import need it, and `compare` says what it does not know.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from architecture import mixer_stats
from architecture.shape import ModelShape
from base.errors import ModelError

Shape: TypeAlias = tuple[int, ...]
NAMED = 4  # the most kinds of tensors that a sentence names


@dataclass(frozen=True)
class TensorDifference:
    """The tensors by which a model differs from the one that its options describe.

    added, missing: names and shapes of the tensors that only the model, or only the options have.
    reshaped: names of tensors that both have, with both shapes: (the model's, the options').
    """

    added: dict[str, Shape]
    missing: dict[str, Shape]
    reshaped: dict[str, tuple[Shape, Shape]]

    def __bool__(self) -> bool:
        """Return whether there is any difference."""
        return bool(self.added or self.missing or self.reshaped)

    @property
    def elements(self) -> int:
        """The elements that the model has more than its options say; below 0: fewer."""
        more = sum(map(math.prod, self.added.values())) - sum(map(math.prod, self.missing.values()))
        return more + sum(math.prod(a) - math.prod(b) for a, b in self.reshaped.values())

    def text(self) -> str:
        """Return the differences in words, tensors of different blocks together."""
        found = []
        if self.added:
            found.append(f"beyond its options: {_list(self.added)}")
        if self.missing:
            found.append(f"of its options it lacks: {_list(self.missing)}")
        if self.reshaped:
            shapes = {name: f"{a} for {b}" for name, (a, b) in self.reshaped.items()}
            found.append(f"of another shape: {_list(shapes)}")
        return "; ".join(found)


def _list(shapes: Mapping[str, object]) -> str:
    """Return names with shapes as text: "blocks.*.attention.gate.weight (4, 32) in 2 blocks"."""
    counts: dict[tuple[str, str], int] = {}
    for name, shape in shapes.items():
        kind = re.sub(r"^blocks\.\d+\.", "blocks.*.", name), str(shape)
        counts[kind] = counts.get(kind, 0) + 1
    words = []
    for (name, shape), count in counts.items():
        where = f" in {count} blocks" if count > 1 else ""
        words.append(f"{name} {shape}{where}")
    more = f" and {len(words) - NAMED} other kinds" if len(words) > NAMED else ""
    return ", ".join(words[:NAMED]) + more


def compare(found: Mapping[str, Shape], model: ModelShape) -> TensorDifference:
    """Return how the tensors of a model or a checkpoint differ from those of its options.

    found: the global shapes by name; constants of routers, which have no gradient, too.
    """
    expected = canonical_shapes(model)
    added = {name: tuple(found[name]) for name in found if name not in expected}
    missing = {name: shape for name, shape in expected.items() if name not in found}
    both = [name for name in found if name in expected]
    reshaped = {
        name: (tuple(found[name]), expected[name])
        for name in both
        if tuple(found[name]) != expected[name]
    }
    return TensorDifference(added, missing, reshaped)


def check_count(found: Mapping[str, Shape], model: ModelShape, where: str) -> None:
    """Raise UserError if a file has fewer tensors than its model has layers.

    A hostile file may give billions of layers: refuse it before a loop lists their tensors.
    """
    if model.layers > len(found):
        raise ModelError(f"{where} has {len(found)} tensors, too few for {model.layers} layers")


def check_shapes(found: Mapping[str, Shape], model: ModelShape, where: str) -> None:
    """Raise UserError unless `found` has the names and shapes of the model's tensors.

    where: the path that the error names.
    """
    check_count(found, model, where)
    expected = canonical_shapes(model)
    for name in sorted(expected.keys() | found.keys()):
        shape = found.get(name, "missing")
        expected_shape = expected.get(name, "none")
        if shape != expected_shape:
            raise ModelError(f"{where}: {name} is {shape}, its model has {expected_shape}")


def canonical_shapes(model: ModelShape) -> dict[str, Shape]:
    """Return the global shape of each tensor of a model, by name, before tp or ZeRO divide it."""
    h = model.hidden
    g = model.kv_heads
    d = model.head_size
    f = model.ffn_hidden
    up = (2, f) if model.up_matrices == 2 else (f,)
    # Linear layers: (shape of the outputs, number of inputs, whether there is a bias).
    linear = {f"attention.{name}": sizes for name, sizes in _attention_shapes(model).items()}
    dense_mlp = {"mlp.up": (up, h, model.bias), "mlp.down": ((h,), f, model.bias)}
    qk_norms: dict[str, dict[str, Shape]] = {
        "none": {},
        "head": {"q": (d,), "k": (d,)},
        "full": {"q": (model.heads, d), "k": (g, d)},
    }
    widths = {"q_a": model.q_lora_rank, "kv_a": model.kv_lora_rank}
    latents: dict[str, Shape] = {name: (width,) for name, width in widths.items() if width}
    norms = ["head.norm"]
    shapes: dict[str, Shape] = {"embedding.tokens.weight": (model.vocab_size, h)}
    if model.positions == "learned":
        shapes["embedding.positions.weight"] = (model.max_positions, h)
    if not model.tied:
        shapes["head.weight"] = (model.vocab_size, h)
    if model.embedding_norm:
        norms.append("embedding.norm")
    experts = _expert_shapes(model)
    for i in range(model.layers + model.mtp_depth):
        block = f"blocks.{i}"
        if i >= model.layers:  # of a module of multi-token prediction
            norms += [f"{block}.mtp.{name}" for name in ("embedding_norm", "hidden_norm", "norm")]
            shapes[f"{block}.mtp.join.weight"] = (h, 2 * h)
        attends = "attention" in model.mixers_of(i)
        has_mlp_norm = model.has_mlp(i) and model.block != "shared-norm"
        parts = ["attention"] * bool(model.mixers_of(i)) + ["mlp"] * has_mlp_norm
        norms += [f"{block}.{part}_norm" for part in parts]
        if model.block == "sandwich":
            norms += [f"{block}.attention_post_norm", f"{block}.mlp_post_norm"]
        if model.has_mixer(i):
            of_mixer = mixer_stats.tensors(model)
            shapes |= {f"{block}.{model.mixer}.{name}": t.shape for name, t in of_mixer.items()}
        if attends and model.sinks:
            shapes[f"{block}.attention.sinks"] = (model.heads,)
        sparse = model.has_experts(i)
        has_dense = model.has_mlp(i) and not sparse
        linear_of_block = (dense_mlp if has_dense else {}) | (linear if attends else {})
        for name, (outputs, inputs, bias) in linear_of_block.items():
            shapes[f"{block}.{name}.weight"] = (*outputs, inputs)
            if bias:
                shapes[f"{block}.{name}.bias"] = outputs
        if sparse:
            shapes |= {f"{block}.mlp.{name}": shape for name, shape in experts.items()}
        scales = qk_norms[model.qk_norm] | latents if attends else {}
        for name, shape in scales.items():
            shapes[f"{block}.attention.{name}_norm.weight"] = shape
    for norm in norms:
        shapes[f"{norm}.weight"] = (h,)
        if model.norm == "layernorm" and model.norm_bias:
            shapes[f"{norm}.bias"] = (h,)
    return shapes


def _attention_shapes(model: ModelShape) -> dict[str, tuple[Shape, int, bool]]:
    """Return (shape of the outputs, number of inputs, whether there is a bias) of the matrices of a
    block's attention, by name.
    """
    h = model.hidden
    heads = model.heads
    out: dict[str, tuple[Shape, int, bool]] = {"out": ((h,), model.attention_width, model.bias)}
    if not model.is_latent:
        g = model.kv_heads
        gates = heads // g if model.attention_gate else 0
        qkv = (g, heads // g + 2 + gates, model.head_size)
        return {"qkv": (qkv, h, model.qkv_bias)} | out
    latent = model.kv_lora_rank
    queries: dict[str, tuple[Shape, int, bool]]
    if rank := model.q_lora_rank:
        queries = {"q_a": ((rank,), h, False), "q_b": ((heads, model.head_size), rank, False)}
    else:
        queries = {"q": ((heads, model.head_size), h, False)}
    kv_a = (latent + model.qk_rope_head_dim,)
    kv_b = (heads, model.qk_nope_head_dim + model.v_head_dim)
    return queries | {"kv_a": (kv_a, h, False), "kv_b": (kv_b, latent, False)} | out


def _expert_shapes(model: ModelShape) -> dict[str, Shape]:
    """Return the shapes of a block's router, experts and shared expert, by name in the block."""
    count = model.experts
    columns = (2,) if model.up_matrices == 2 else ()  # gate and up are one tensor
    h = model.hidden
    f = model.expert_ffn_hidden
    shared = model.shared_ffn_hidden
    shapes: dict[str, Shape] = {
        "router.weight": (count, h),
        "router.bias": (count,),
        "router.load": (count,),
        "experts.up.weight": (count, *columns, f, h),
        "experts.down.weight": (count, h, f),
    }
    if model.router_bias:
        shapes["router.logit_bias"] = (count,)
    if model.bias:
        shapes["experts.up.bias"] = (count, *columns, f)
        shapes["experts.down.bias"] = (count, h)
    if shared:
        shapes["shared.up.weight"] = (*columns, shared, h)
        shapes["shared.down.weight"] = (h, shared)
    if shared and model.bias:
        shapes["shared.up.bias"] = (*columns, shared)
        shapes["shared.down.bias"] = (h,)
    if model.shared_gate:
        shapes["shared_gate.weight"] = (1, h)
    return shapes
