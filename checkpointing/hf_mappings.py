"""Which models of Hugging Face transformers are ours: GPT-2, BLOOM and Llama families.

    rules(model)                 which of their tensors make which of ours, both ways
    hf_config(model, dtype)      their config.json of our shape
    model_shape(config, where)   our shape of their config.json

A model or a config that the other side cannot hold to the letter is refused, with the fields in
the way: an activation that is only nearly right shows after the upload.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from config.messages import UserError
from config.schema import ModelShape

# ------------------------------------------------------------------------------------------------
# Which tensors are which
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Our tensor `name` and theirs that hold it; `take` makes ours of them, `give` them of ours."""

    name: str
    theirs: tuple[str, ...]
    take: Callable[..., Tensor]
    give: Callable[[Tensor], tuple[Tensor, ...]]


def _same(name: str, other: str, kinds: tuple[str, ...] = ("weight", "bias")) -> list[Rule]:
    return [
        Rule(f"{name}.{kind}", (f"{other}.{kind}",), lambda t: t, lambda t: (t,)) for kind in kinds
    ]


def _transposed(name: str, other: str) -> list[Rule]:
    weight = Rule(f"{name}.weight", (f"{other}.weight",), lambda t: t.t(), lambda t: (t.t(),))
    return [weight, *_same(name, other, ("bias",))]


def _head(model: ModelShape) -> list[Rule]:
    return [] if model.tied else _same("head", "lm_head", ("weight",))


def _gpt2(model: ModelShape) -> list[Rule]:
    """GPT-2 keeps matrices transposed, and q, k, v one after the other."""
    h, a, d = model.hidden, model.heads, model.head_size
    rules = _same("embedding.tokens", "transformer.wte", ("weight",))
    rules += _same("embedding.positions", "transformer.wpe", ("weight",))
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        rules += _same(f"{ours}.attention_norm", f"{theirs}.ln_1")
        rules += _same(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        qkv, other = f"{ours}.attention.qkv", f"{theirs}.attn.c_attn"
        rules += [
            Rule(
                f"{qkv}.weight",
                (f"{other}.weight",),
                lambda t: t.t().reshape(3, a, d, h).transpose(0, 1),
                lambda t: (t.transpose(0, 1).reshape(3 * h, h).t(),),
            ),
            Rule(
                f"{qkv}.bias",
                (f"{other}.bias",),
                lambda t: t.reshape(3, a, d).transpose(0, 1),
                lambda t: (t.transpose(0, 1).reshape(3 * h),),
            ),
        ]
        rules += _transposed(f"{ours}.attention.out", f"{theirs}.attn.c_proj")
        rules += _transposed(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc")
        rules += _transposed(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj")
    return rules + _same("head.norm", "transformer.ln_f") + _head(model)


def _bloom(model: ModelShape) -> list[Rule]:
    """BLOOM interleaves q, k, v by head, as here."""
    h, a, d = model.hidden, model.heads, model.head_size
    rules = _same("embedding.tokens", "transformer.word_embeddings", ("weight",))
    rules += _same("embedding.norm", "transformer.word_embeddings_layernorm")
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        rules += _same(f"{ours}.attention_norm", f"{theirs}.input_layernorm")
        rules += _same(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm")
        qkv, other = f"{ours}.attention.qkv", f"{theirs}.self_attention.query_key_value"
        rules += [
            Rule(
                f"{qkv}.weight",
                (f"{other}.weight",),
                lambda t: t.reshape(a, 3, d, h),
                lambda t: (t.reshape(3 * h, h),),
            ),
            Rule(
                f"{qkv}.bias",
                (f"{other}.bias",),
                lambda t: t.reshape(a, 3, d),
                lambda t: (t.reshape(3 * h),),
            ),
        ]
        rules += _same(f"{ours}.attention.out", f"{theirs}.self_attention.dense")
        rules += _same(f"{ours}.mlp.up", f"{theirs}.mlp.dense_h_to_4h")
        rules += _same(f"{ours}.mlp.down", f"{theirs}.mlp.dense_4h_to_h")
    return rules + _same("head.norm", "transformer.ln_f") + _head(model)


def _llama(model: ModelShape) -> list[Rule]:
    """Llama has q, k, v and gate, up as matrices of their own."""
    h, g, d, queries = model.hidden, model.kv_heads, model.head_size, model.heads // model.kv_heads

    def join(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([t.reshape(g, -1, d, h) for t in (q, k, v)], 1)

    def part(t: Tensor) -> tuple[Tensor, ...]:
        return tuple(p.reshape(-1, h) for p in t.split([queries, 1, 1], 1))

    weight = ("weight",)
    rules = _same("embedding.tokens", "model.embed_tokens", weight)
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        rules += _same(f"{ours}.attention_norm", f"{theirs}.input_layernorm", weight)
        rules += _same(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", weight)
        qkv = tuple(f"{theirs}.self_attn.{n}_proj.weight" for n in "qkv")
        rules.append(Rule(f"{ours}.attention.qkv.weight", qkv, join, part))
        rules += _same(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", weight)
        up = tuple(f"{theirs}.mlp.{n}_proj.weight" for n in ("gate", "up"))
        rules.append(
            Rule(
                f"{ours}.mlp.up.weight",
                up,
                lambda gate, up: torch.stack([gate, up]),
                lambda t: (t[0], t[1]),
            )
        )
        rules += _same(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", weight)
    return rules + _same("head.norm", "model.norm", weight) + _head(model)


_RULES = {"gpt2": _gpt2, "bloom": _bloom, "llama": _llama}


def rules(model: ModelShape) -> list[Rule]:
    """The rules of the model's family; UserError if none of the three is its family."""
    return _RULES[family(model)](model)


# ------------------------------------------------------------------------------------------------
# Which models are which
# ------------------------------------------------------------------------------------------------


def _demands(model: ModelShape) -> dict[str, dict[str, tuple]]:
    """By family, the values that its code in transformers can have, by field."""
    plain = {"norm": ("layernorm",), "bias": (True,), "kv_heads": (model.heads,)}
    return {
        "gpt2": plain
        | {
            "positions": ("learned",),
            "activation": ("gelu_tanh", "gelu"),
            "embedding_norm": (False,),
        },
        "bloom": plain
        | {
            "positions": ("alibi",),
            "activation": ("gelu_tanh",),
            "embedding_norm": (True,),
            "ffn_hidden": (4 * model.hidden,),
        },
        "llama": {
            "positions": ("rotary",),
            "norm": ("rmsnorm",),
            "activation": ("swiglu",),
            "bias": (False,),
            "embedding_norm": (False,),
        },
    }


def family(model: ModelShape) -> str:
    """gpt2, bloom or llama; UserError with what stands in the way of each."""
    obstacles = []
    for name, demands in _demands(model).items():
        wrong = [
            f"{field} {' or '.join(map(str, values))}, not {getattr(model, field)}"
            for field, values in demands.items()
            if getattr(model, field) not in values
        ]
        if not wrong:
            return name
        obstacles.append(f"{name} needs {' and '.join(wrong)}")
    raise UserError(f"transformers has no such model: {'; '.join(obstacles)}")


def hf_config(model: ModelShape, dtype: torch.dtype) -> dict:
    """config.json of the model."""
    kind = family(model)
    common = {
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "gpt2":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": model.layers,
            "n_embd": model.hidden,
            "n_head": model.heads,
            "n_inner": model.ffn_hidden,
            "n_positions": model.max_positions,
            "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
            "layer_norm_epsilon": model.norm_eps,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    if kind == "bloom":
        return common | {
            "architectures": ["BloomForCausalLM"],
            "n_layer": model.layers,
            "hidden_size": model.hidden,
            "n_head": model.heads,
            "seq_length": model.seq_length,
            "layer_norm_epsilon": model.norm_eps,
            "apply_residual_connection_post_layernorm": False,
        }
    return common | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn_hidden,
        "max_position_embeddings": model.seq_length,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rotary_base,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},  # 5
        "attention_bias": False,
        "mlp_bias": False,
    }


# What must be so in a config.json, if it is there at all, for the model to be one of ours.
_HF_DEMANDS = {
    "gpt2": {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
    },
    "bloom": {"apply_residual_connection_post_layernorm": (False,)},
    "llama": {"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu", "swish")},
}


def model_shape(config: dict, where: str) -> ModelShape:
    """The shape that a config.json describes; UserError if it is none of ours."""
    kind = config.get("model_type")
    if kind not in _HF_DEMANDS:
        raise UserError(f"{where} is a {kind!r}; known are {', '.join(_HF_DEMANDS)}")
    for field, values in _HF_DEMANDS[kind].items():
        if config.get(field, values[0]) not in values:
            wanted = " or ".join(map(str, values))
            raise UserError(f"{where}: {field} is {config[field]}; this project has {wanted}")
    try:
        return _SHAPES[kind](config, where)
    except KeyError as error:
        raise UserError(f"{where} has no {error}") from None


def _gpt2_shape(config: dict, where: str) -> ModelShape:
    activation = config.get("activation_function", "gelu_new")
    return ModelShape(
        config["n_layer"],
        config["n_embd"],
        config["n_head"],
        ffn_hidden=config.get("n_inner"),
        seq_length=config.get("n_positions", 1024),
        vocab_size=config["vocab_size"],
        activation="gelu" if activation == "gelu" else "gelu_tanh",
        tied=config.get("tie_word_embeddings", True),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )


def _bloom_shape(config: dict, where: str) -> ModelShape:
    return ModelShape(
        config["n_layer"],
        config.get("hidden_size") or config["n_embed"],  # BLOOM's own files have the second
        config.get("n_head") or config["num_attention_heads"],
        seq_length=config.get("seq_length", 2048),
        vocab_size=config["vocab_size"],
        positions="alibi",
        embedding_norm=True,
        tied=config.get("tie_word_embeddings", True),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )


def _llama_shape(config: dict, where: str) -> ModelShape:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config.get("head_dim") not in (None, hidden // heads):
        raise UserError(f"{where}: head_dim({config['head_dim']}) is not {hidden} / {heads}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{where}: rotary positions are scaled ({rope}), which this project lacks")
    return ModelShape(
        config["num_hidden_layers"],
        hidden,
        heads,
        kv_heads=config.get("num_key_value_heads"),
        ffn_hidden=config["intermediate_size"],
        seq_length=config.get("max_position_embeddings", 2048),
        vocab_size=config["vocab_size"],
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied=config.get("tie_word_embeddings", False),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rotary_base=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
    )


_SHAPES = {"gpt2": _gpt2_shape, "bloom": _bloom_shape, "llama": _llama_shape}
