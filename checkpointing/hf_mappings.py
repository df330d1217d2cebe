"""Which models of Hugging Face transformers are ours: the GPT-2, BLOOM and Llama families.

    rules(model)                 which of their tensors make which of ours, in both directions
    hf_config(model, dtype)      their config.json for our shape
    model_shape(config, where)   our shape for their config.json

A model or a config.json that the other side cannot represent exactly is refused, with the fields
that prevent it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from config.messages import UserError
from config.schema import ModelShape

Convert = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rule:
    """Our tensor `name`, the names of `theirs` that hold it, and the conversion in each direction.

    to_ours takes their tensors in order; to_theirs returns them in the same order.
    """

    name: str
    theirs: tuple[str, ...]
    to_ours: Callable[..., Tensor]
    to_theirs: Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Family:
    """The names that transformers has for one family's modules and fields, and what it supports.

    modules: our module -> theirs, * for a block's number. transposed: whether weights of blocks are
    (in, out). reshaped: rules for the tensors of a block that have another shape there.

    fields: our field -> its names in config.json; the first is written. defaults: values of fields
    that config.json may lack, by our name; other fields are required. ours: the values that our
    fields must have. theirs: the values that fields of config.json must have if they are there.
    """

    architecture: str
    modules: dict[str, str]
    reshaped: Callable[[ModelShape, int], list[Rule]]
    fields: dict[str, tuple[str, ...]]
    defaults: dict[str, Any]
    ours: dict[str, tuple]
    theirs: dict[str, tuple]
    transposed: bool = False


# ------------------------------------------------------------------------------------------------
# Tensors of another shape
# ------------------------------------------------------------------------------------------------


def _gpt2_reshaped(model: ModelShape, block: int) -> list[Rule]:
    """GPT-2: all queries, then all keys, then all values; the matrix is transposed."""
    h, a, d = model.hidden, model.heads, model.head_size

    def to_ours(t: Tensor) -> Tensor:  # (h, 3 h) -> (a, 3, d, h), or (3 h,) -> (a, 3, d)
        return t.t().reshape(3, a, d, *t.shape[:-1]).transpose(0, 1)

    def to_theirs(t: Tensor) -> Tensor:
        return t.transpose(0, 1).reshape(3 * h, *t.shape[3:]).t()

    ours, theirs = f"blocks.{block}.attention.qkv", f"transformer.h.{block}.attn.c_attn"
    return _rules_of_module(ours, theirs, True, to_ours, to_theirs)


def _bloom_reshaped(model: ModelShape, block: int) -> list[Rule]:
    """BLOOM: for each head its query, key and value, as here."""
    h, a, d = model.hidden, model.heads, model.head_size

    def to_ours(t: Tensor) -> Tensor:  # (3 h, h) -> (a, 3, d, h), or (3 h,) -> (a, 3, d)
        return t.reshape(a, 3, d, *t.shape[1:])

    def to_theirs(t: Tensor) -> Tensor:
        return t.reshape(3 * h, *t.shape[3:])

    theirs = f"transformer.h.{block}.self_attention.query_key_value"
    return _rules_of_module(f"blocks.{block}.attention.qkv", theirs, True, to_ours, to_theirs)


def _llama_reshaped(model: ModelShape, block: int) -> list[Rule]:
    """Llama: separate matrices for queries, keys and values, and for gate and up."""
    h, g, d, queries = model.hidden, model.kv_heads, model.head_size, model.heads // model.kv_heads
    ours, theirs = f"blocks.{block}", f"model.layers.{block}"
    return [
        Rule(
            f"{ours}.attention.qkv.weight",
            tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv"),
            lambda q, k, v: torch.cat([t.reshape(g, -1, d, h) for t in (q, k, v)], 1),
            lambda t: tuple(part.reshape(-1, h) for part in t.split([queries, 1, 1], 1)),
        ),
        Rule(
            f"{ours}.mlp.up.weight",
            tuple(f"{theirs}.mlp.{name}_proj.weight" for name in ("gate", "up")),
            lambda gate, up: torch.stack([gate, up]),
            lambda t: (t[0], t[1]),
        ),
    ]


def _keep(t: Tensor) -> Tensor:
    return t


def _rules_of_module(
    ours: str, theirs: str, bias: bool, to_ours: Convert = _keep, to_theirs: Convert = _keep
) -> list[Rule]:
    """One conversion for the weight and, if there is one, the bias of a module."""
    return [
        Rule(f"{ours}.{kind}", (f"{theirs}.{kind}",), to_ours, lambda t: (to_theirs(t),))
        for kind in (("weight", "bias") if bias else ("weight",))
    ]


# ------------------------------------------------------------------------------------------------
# The families
# ------------------------------------------------------------------------------------------------

_LAYERNORM_AND_BIAS = {"norm": ("layernorm",), "bias": (True,)}
FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        modules={
            "embedding.tokens": "transformer.wte",
            "embedding.positions": "transformer.wpe",
            "head.norm": "transformer.ln_f",
            "blocks.*.attention_norm": "transformer.h.*.ln_1",
            "blocks.*.attention.out": "transformer.h.*.attn.c_proj",
            "blocks.*.mlp_norm": "transformer.h.*.ln_2",
            "blocks.*.mlp.up": "transformer.h.*.mlp.c_fc",
            "blocks.*.mlp.down": "transformer.h.*.mlp.c_proj",
        },
        transposed=True,
        reshaped=_gpt2_reshaped,
        fields={
            "layers": ("n_layer",),
            "hidden": ("n_embd",),
            "heads": ("n_head",),
            "ffn_hidden": ("n_inner",),
            "seq_length": ("n_positions",),
            "norm_eps": ("layer_norm_epsilon",),
        },
        defaults={"ffn_hidden": None, "seq_length": 1024, "norm_eps": 1e-5, "tied": True},
        ours=_LAYERNORM_AND_BIAS
        | {
            "positions": ("learned",),
            "activation": ("gelu_tanh", "gelu"),
            "embedding_norm": (False,),
        },
        theirs={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        },
    ),
    "bloom": Family(
        architecture="BloomForCausalLM",
        modules={
            "embedding.tokens": "transformer.word_embeddings",
            "embedding.norm": "transformer.word_embeddings_layernorm",
            "head.norm": "transformer.ln_f",
            "blocks.*.attention_norm": "transformer.h.*.input_layernorm",
            "blocks.*.attention.out": "transformer.h.*.self_attention.dense",
            "blocks.*.mlp_norm": "transformer.h.*.post_attention_layernorm",
            "blocks.*.mlp.up": "transformer.h.*.mlp.dense_h_to_4h",
            "blocks.*.mlp.down": "transformer.h.*.mlp.dense_4h_to_h",
        },
        reshaped=_bloom_reshaped,
        fields={
            "layers": ("n_layer",),
            "hidden": ("hidden_size", "n_embed"),  # BLOOM's own files have the second
            "heads": ("n_head", "num_attention_heads"),
            "seq_length": ("seq_length",),
            "norm_eps": ("layer_norm_epsilon",),
        },
        defaults={"seq_length": 2048, "norm_eps": 1e-5, "tied": True},
        ours=_LAYERNORM_AND_BIAS
        | {"positions": ("alibi",), "activation": ("gelu_tanh",), "embedding_norm": (True,)},
        theirs={"apply_residual_connection_post_layernorm": (False,)},
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        modules={
            "embedding.tokens": "model.embed_tokens",
            "head.norm": "model.norm",
            "blocks.*.attention_norm": "model.layers.*.input_layernorm",
            "blocks.*.attention.out": "model.layers.*.self_attn.o_proj",
            "blocks.*.mlp_norm": "model.layers.*.post_attention_layernorm",
            "blocks.*.mlp.down": "model.layers.*.mlp.down_proj",
        },
        reshaped=_llama_reshaped,
        fields={
            "layers": ("num_hidden_layers",),
            "hidden": ("hidden_size",),
            "heads": ("num_attention_heads",),
            "kv_heads": ("num_key_value_heads",),
            "ffn_hidden": ("intermediate_size",),
            "seq_length": ("max_position_embeddings",),
            "norm_eps": ("rms_norm_eps",),
        },
        defaults={"kv_heads": None, "seq_length": 2048, "norm_eps": 1e-6, "tied": False},
        ours={
            "positions": ("rotary",),
            "norm": ("rmsnorm",),
            "activation": ("swiglu",),
            "bias": (False,),
            "embedding_norm": (False,),
        },
        theirs={"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu", "swish")},
    ),
}
# Fields that every family calls the same.
_COMMON_FIELDS = {"vocab_size": ("vocab_size",), "tied": ("tie_word_embeddings",)}


def family(model: ModelShape) -> str:
    """gpt2, bloom or llama; UserError with the fields that each would need."""
    obstacles = []
    for name, facts in FAMILIES.items():
        needed = dict(facts.ours)
        if "kv_heads" not in facts.fields:
            needed["kv_heads"] = (model.heads,)
        if "ffn_hidden" not in facts.fields:
            needed["ffn_hidden"] = (4 * model.hidden,)
        wrong = [
            f"{field} {' or '.join(map(str, values))}, not {getattr(model, field)}"
            for field, values in needed.items()
            if getattr(model, field) not in values
        ]
        if not wrong:
            return name
        obstacles.append(f"{name} needs {' and '.join(wrong)}")
    raise UserError(f"transformers has no such model: {'; '.join(obstacles)}")


def rules(model: ModelShape) -> list[Rule]:
    """The rules for all tensors of the model; UserError if it is of none of the families."""
    facts, found = FAMILIES[family(model)], []
    for ours, theirs in facts.modules.items():
        in_block = "*" in ours
        bias = model.bias and (in_block or ours.endswith("norm"))
        convert = (torch.t, torch.t) if in_block and facts.transposed else ()
        for i in range(model.layers if in_block else 1):
            names = ours.replace("*", str(i)), theirs.replace("*", str(i))
            found += _rules_of_module(*names, bias, *convert)
    for i in range(model.layers):
        found += facts.reshaped(model, i)
    return found if model.tied else found + _rules_of_module("head", "lm_head", False)


# ------------------------------------------------------------------------------------------------
# config.json
# ------------------------------------------------------------------------------------------------


def hf_config(model: ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the model, whose weights have that type."""
    name = family(model)
    facts = FAMILIES[name]
    config = {
        "model_type": name,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
        "architectures": [facts.architecture],
    }
    fields = _COMMON_FIELDS | facts.fields
    config |= {theirs[0]: getattr(model, ours) for ours, theirs in fields.items()}
    if name == "gpt2":
        config["n_positions"] = model.max_positions
        config["activation_function"] = "gelu_new" if model.activation == "gelu_tanh" else "gelu"
        config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    elif name == "bloom":
        config["apply_residual_connection_post_layernorm"] = False
    else:
        rope = {"rope_type": "default", "rope_theta": model.rotary_base}
        config |= {"rope_theta": model.rotary_base, "rope_parameters": rope}  # transformers 4, 5
        config |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    return config


def model_shape(config: dict[str, Any], where: str) -> ModelShape:
    """The shape that a config.json describes; UserError if it is none of ours."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise UserError(f"{where} is a {name!r}; known are {', '.join(FAMILIES)}")
    facts = FAMILIES[name]
    for field, values in facts.theirs.items():
        if config.get(field, values[0]) not in values:
            wanted = " or ".join(map(str, values))
            raise UserError(f"{where}: {field} is {config[field]}; this project has {wanted}")
    shape = {field: values[0] for field, values in facts.ours.items()}
    for ours, theirs in (_COMMON_FIELDS | facts.fields).items():
        shape[ours] = _read_field(config, theirs, ours, facts.defaults, where)
    if name == "gpt2" and config.get("activation_function") == "gelu":
        shape["activation"] = "gelu"
    if name == "llama":
        shape["rotary_base"] = _rotary_base(config, where)
    return ModelShape(**shape)


def _read_field(
    config: dict[str, Any], names: tuple[str, ...], ours: str, defaults: dict[str, Any], where: str
) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if ours not in defaults:
        raise UserError(f"{where} has no {names[-1]!r}")
    return defaults[ours]


def _rotary_base(config: dict[str, Any], where: str) -> float:
    """The base of Llama's rotary frequencies; UserError for heads or positions unlike ours."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config.get("head_dim") not in (None, hidden // heads):
        raise UserError(f"{where}: head_dim({config['head_dim']}) is not {hidden} / {heads}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{where}: rotary positions are scaled ({rope}), which this project lacks")
    return rope.get("rope_theta", config.get("rope_theta", 10000.0))
