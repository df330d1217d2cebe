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

from checkpointing.verification import make_model
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


# ---- The families --------------------------------------------------------------------------------


# The columns of these tables; None: the family has nothing of the kind.
FAMILIES = ("gpt2", "bloom", "llama")
ARCHITECTURES = ("GPT2LMHeadModel", "BloomForCausalLM", "LlamaForCausalLM")
# What the names of a block's modules begin with; * is its number.
_BLOCKS = ("transformer.h.*", "transformer.h.*", "model.layers.*")
# Our module -> theirs, if its tensors have the same shape there, transposed at the most.
_MODULES = {
    "embedding.tokens": ("wte", "word_embeddings", "embed_tokens"),
    "embedding.positions": ("wpe", None, None),
    "embedding.norm": (None, "word_embeddings_layernorm", None),
    "head.norm": ("ln_f", "ln_f", "norm"),
    "blocks.*.attention_norm": ("ln_1", "input_layernorm", "input_layernorm"),
    "blocks.*.attention.out": ("attn.c_proj", "self_attention.dense", "self_attn.o_proj"),
    "blocks.*.mlp_norm": ("ln_2", "post_attention_layernorm", "post_attention_layernorm"),
    "blocks.*.mlp.up": ("mlp.c_fc", "mlp.dense_h_to_4h", None),
    "blocks.*.mlp.down": ("mlp.c_proj", "mlp.dense_4h_to_h", "mlp.down_proj"),
}
# Our field -> its name in config.json, or several: the first is written, all are read.
_FIELDS = {
    "vocab_size": ("vocab_size", "vocab_size", "vocab_size"),
    "tied": ("tie_word_embeddings", "tie_word_embeddings", "tie_word_embeddings"),
    "layers": ("n_layer", "n_layer", "num_hidden_layers"),
    "hidden": ("n_embd", ("hidden_size", "n_embed"), "hidden_size"),
    "heads": ("n_head", ("n_head", "num_attention_heads"), "num_attention_heads"),
    "kv_heads": (None, None, "num_key_value_heads"),
    "ffn_hidden": ("n_inner", None, "intermediate_size"),
    "seq_length": ("n_positions", "seq_length", "max_position_embeddings"),
    "norm_eps": ("layer_norm_epsilon", "layer_norm_epsilon", "rms_norm_eps"),
}
# Our field -> the value that it must have, or several.
_NEEDED = {
    "norm": ("layernorm", "layernorm", "rmsnorm"),
    "bias": (True, True, False),
    "positions": ("learned", "alibi", "rotary"),
    "activation": (("gelu_tanh", "gelu"), "gelu_tanh", "swiglu"),
    "embedding_norm": (False, True, False),
}
# Values of fields that config.json may lack, by our name; other fields are required.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {"ffn_hidden": None, "seq_length": 1024, "norm_eps": 1e-5, "tied": True},
    "bloom": {"seq_length": 2048, "norm_eps": 1e-5, "tied": True},
    "llama": {"kv_heads": None, "seq_length": 2048, "norm_eps": 1e-6, "tied": False},
}
# Values that fields of config.json, by their name, must have if they are there.
_ALLOWED: dict[str, dict[str, tuple]] = {
    "gpt2": {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
    },
    "bloom": {"apply_residual_connection_post_layernorm": (False,)},
    "llama": {"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu", "swish")},
}


def _column(table: dict[str, tuple], family: str) -> dict[str, tuple]:
    """What a table has for a family, each as a tuple."""
    number = FAMILIES.index(family)
    cells = {ours: row[number] for ours, row in table.items() if row[number] is not None}
    return {ours: cell if isinstance(cell, tuple) else (cell,) for ours, cell in cells.items()}


def family(model: ModelShape) -> str:
    """gpt2, bloom or llama; UserError with the fields that each would need."""
    obstacles = []
    for name in FAMILIES:
        fields, needed = _column(_FIELDS, name), _column(_NEEDED, name)
        fixed = {"kv_heads": (model.heads,), "ffn_hidden": (4 * model.hidden,)}
        needed |= {field: values for field, values in fixed.items() if field not in fields}
        wrong = [
            f"{field} {' or '.join(map(str, values))}, not {getattr(model, field)}"
            for field, values in needed.items()
            if getattr(model, field) not in values
        ]
        if not wrong:
            return name
        obstacles.append(f"{name} needs {' and '.join(wrong)}")
    raise UserError(f"transformers has no such model: {'; '.join(obstacles)}")


# ---- Tensors -------------------------------------------------------------------------------------


def rules(model: ModelShape) -> list[Rule]:
    """The rules for all tensors of the model; UserError if it is of none of the families."""
    name = family(model)
    block, found = _BLOCKS[FAMILIES.index(name)], []
    for ours, (theirs,) in _column(_MODULES, name).items():
        in_block = ours.startswith("blocks.")
        theirs = f"{block if in_block else block.split('.')[0]}.{theirs}"
        bias = model.bias and (in_block or ours.endswith("norm"))
        # In GPT-2's blocks, weights are (in, out).
        convert = (torch.t, torch.t) if in_block and name == "gpt2" else ()
        for i in map(str, range(model.layers if in_block else 1)):
            found += _one_to_one(ours.replace("*", i), theirs.replace("*", i), bias, *convert)
    for i in map(str, range(model.layers)):
        found += _RESHAPED[name](model, f"blocks.{i}", block.replace("*", i))
    return found if model.tied else found + _one_to_one("head", "lm_head", False)


# The tensors of a block that have another shape there; their names begin with `ours` and `theirs`.
# a: heads, d: head size, g: key/value heads, h: hidden.


def _gpt2_reshaped(model: ModelShape, ours: str, theirs: str) -> list[Rule]:
    """All queries, then all keys, then all values; the matrix is transposed."""
    h, a, d = model.hidden, model.heads, model.head_size

    return _one_to_one(
        f"{ours}.attention.qkv",
        f"{theirs}.attn.c_attn",
        True,
        # (h, 3 h) -> (a, 3, d, h), or (3 h,) -> (a, 3, d)
        lambda t: t.t().reshape(3, a, d, *t.shape[:-1]).transpose(0, 1),
        lambda t: t.transpose(0, 1).reshape(3 * h, *t.shape[3:]).t(),
    )


def _bloom_reshaped(model: ModelShape, ours: str, theirs: str) -> list[Rule]:
    """For each head its query, key and value, as here."""
    h, a, d = model.hidden, model.heads, model.head_size

    return _one_to_one(
        f"{ours}.attention.qkv",
        f"{theirs}.self_attention.query_key_value",
        True,
        lambda t: t.reshape(a, 3, d, *t.shape[1:]),  # from (3 h, h) or (3 h,)
        lambda t: t.reshape(3 * h, *t.shape[3:]),
    )


def _llama_reshaped(model: ModelShape, ours: str, theirs: str) -> list[Rule]:
    """Separate matrices for queries, keys and values, and for gate and up."""
    h, g, d, queries = model.hidden, model.kv_heads, model.head_size, model.heads // model.kv_heads
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


_RESHAPED = {"gpt2": _gpt2_reshaped, "bloom": _bloom_reshaped, "llama": _llama_reshaped}


def _keep(t: Tensor) -> Tensor:
    return t


def _one_to_one(
    ours: str, theirs: str, bias: bool, to_ours: Convert = _keep, to_theirs: Convert = _keep
) -> list[Rule]:
    """One conversion for the weight and, if there is one, the bias of a module."""
    return [
        Rule(f"{ours}.{kind}", (f"{theirs}.{kind}",), to_ours, lambda t: (to_theirs(t),))
        for kind in (("weight", "bias") if bias else ("weight",))
    ]


# ---- config.json ---------------------------------------------------------------------------------


def hf_config(model: ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the model, whose weights have that type."""
    name = family(model)
    config: dict[str, Any] = {
        "model_type": name,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
        "architectures": [ARCHITECTURES[FAMILIES.index(name)]],
    }
    config |= {names[0]: getattr(model, ours) for ours, names in _column(_FIELDS, name).items()}
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
        raise UserError(f"{where} is a {name!a:.80}; known are {', '.join(FAMILIES)}")
    for field, values in _ALLOWED[name].items():
        if config.get(field, values[0]) not in values:
            wanted = " or ".join(map(str, values))
            raise UserError(f"{where}: {field} is {config[field]!a:.80}; this project has {wanted}")
    shape = {field: values[0] for field, values in _column(_NEEDED, name).items()}
    for ours, names in _column(_FIELDS, name).items():
        found = [config[theirs] for theirs in names if config.get(theirs) is not None]
        if not found and ours not in _DEFAULTS[name]:
            raise UserError(f"{where} has no {names[-1]!r}")
        shape[ours] = found[0] if found else _DEFAULTS[name][ours]
    if name == "gpt2" and config.get("activation_function") == "gelu":
        shape["activation"] = "gelu"
    if name == "llama":
        shape["rotary_base"] = _rotary_base(config, where)
    model = make_model({k: v for k, v in shape.items() if v is not None}, where)
    size = config.get("head_dim")
    if name == "llama" and size not in (None, model.head_size):
        raise UserError(f"{where}: head_dim({size!a:.80}) is not {model.hidden} / {model.heads}")
    return model


def _rotary_base(config: dict[str, Any], where: str) -> float:
    """The base of Llama's rotary frequencies; UserError for positions unlike ours."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{where}: the rotary positions are {rope!a:.80}, not an object")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(
            f"{where}: rotary positions are scaled ({rope!a:.80}), which this project lacks"
        )
    return rope.get("rope_theta", config.get("rope_theta", 10000.0))
