"""What hybrid families of transformers have that no plain field says; read odd_families.py first.

ODD["nemotron_h"]      the class of that name in families.toml, also of a family without mixers
"""

import math
from typing import Any, ClassVar

from architecture.block_attention import pattern_of
from architecture.multipliers import OF_MIXER, text_of
from architecture.odd_families import (
    MOST_LAYERS,
    Cohere2,
    FirstDense,
    Glm4,
    Granite,
    MiniMaxM2,
    NoPositions,
    OddFamily,
    layers_in,
)
from architecture.shape import ModelShape
from base.errors import ModelError

# Types of blocks by the names that files of transformers 4 have.
OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


class Hybrid(OddFamily):
    """A list of the types of blocks says which have a mixer in the place of attention.

    mixer: our name of the mixer. block_type: their name of a block with it. sizes: for each of our
    options of the mixer the name of its field, and the value if the file does not say.
    """

    names: ClassVar[tuple[str, ...]] = ("layer_types",)
    mixer: ClassVar[str]
    block_type: ClassVar[str]
    sizes: ClassVar[dict[str, tuple[str, Any]]]

    def types(self, config: dict[str, Any], layers: int) -> list[str]:
        """Return the types of blocks of a file that has no list of them."""
        raise NotImplementedError

    def size(self, ours: str, config: dict[str, Any], found: dict[str, Any]) -> Any:
        """Return an option of the mixer. found: other options of the model, and those before it."""
        name, default = self.sizes[ours]
        return default if config.get(name) is None else config[name]

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the options of the mixer, its blocks and sizes; nothing if no block has it.

        config: the contents of config.json. options: what was read of it so far. lacks: gets what
        Trine does not have.
        """
        layers = layers_in(options)
        if layers is None:
            return {}
        types = config.get("layer_types")
        types = self.types(config, layers) if types is None else types
        if not isinstance(types, list) or len(types) != layers:
            raise ModelError(f"layer_types is {types!a:.80}, not a list of {layers} blocks")
        known = (self.block_type, "full_attention")
        names = [OLDER_TYPES.get(str(name), str(name)) for name in types]
        if unknown := {str(theirs) for theirs, name in zip(types, names) if name not in known}:
            lacks.append(f"layer_types has {min(unknown)!a:.80}; here: {', '.join(known)}")
            return {}
        flags = [name == self.block_type for name in names]
        if not any(flags):
            return {}
        return self.read_sizes(config, options) | {"mixer_blocks": pattern_of(flags)}

    def read_sizes(self, config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        """Return the mixer and its sizes."""
        found: dict[str, Any] = {"mixer": self.mixer}
        for ours in self.sizes:
            found[ours] = self.size(ours, config, options | found)
        return found

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the list of types and the sizes."""
        mixes = [model.has_mixer(block) for block in range(model.layers)]
        types = [self.block_type if flag else "full_attention" for flag in mixes]
        return {"layer_types": types} | (self.write_sizes(model) if any(mixes) else {})

    def write_sizes(self, model: ModelShape) -> dict[str, Any]:
        """Return the sizes of the mixer."""
        return {name: getattr(model, ours) for ours, (name, _) in self.sizes.items()}


class Lfm2(Hybrid):
    """LFM2: short convolutions; the MLP's width is derived from a field."""

    names = (
        *("layer_types", "full_attn_idxs", "conv_L_cache", "intermediate_size", "block_ff_dim"),
        *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
        *("tie_word_embeddings", "tie_embedding"),
    )
    mixer = "short_conv"
    block_type = "conv"
    sizes: ClassVar = {"mixer_kernel": ("conv_L_cache", 3)}

    def types(self, config: dict[str, Any], layers: int) -> list[str]:
        """Return attention in the blocks of a list of numbers; without it, in all."""
        attends = config.get("full_attn_idxs")
        attends = range(layers) if attends is None else attends
        if not isinstance(attends, (list, range)):
            raise ModelError(f"full_attn_idxs is {attends!a:.80}, not a list of blocks")
        return ["full_attention" if n in attends else "conv" for n in range(layers)]

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the mixer, the MLP's width, and whether the head is tied."""
        tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
        width = {"ffn_hidden": self.width(config), "tied": tied}
        return super().read(config, options, lacks) | width

    def width(self, config: dict[str, Any]) -> int:
        """Return the width of the MLP: two thirds of the field's, rounded up."""
        width = config.get("block_ff_dim", config.get("intermediate_size", 12288))
        if not config.get("block_auto_adjust_ff_dim", True):
            return width
        factor = config.get("block_ffn_dim_multiplier", 1.0)
        multiple = config.get("block_multiple_of", 256)
        for number in (width, multiple, *(() if factor is None else (factor,))):
            if type(number) not in (int, float) or not 0 < number < 2**53:
                raise ModelError(f"the width of the MLP needs numbers above 0, not {number!a:.80}")
        width = int(2 * width / 3)
        if factor is None:
            return width
        width = int(factor * width)
        return multiple * ((width + multiple - 1) // multiple)

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the types of blocks, and the MLP's own width."""
        width = {"intermediate_size": model.ffn_hidden, "block_auto_adjust_ff_dim": False}
        return super().write(model, config) | width | {"tie_word_embeddings": model.tied}


class Qwen35(Hybrid):
    """Qwen3.5: gated delta nets. Positions of images, in sections, are equal for a text."""

    names: ClassVar[tuple[str, ...]] = (
        *("layer_types", "full_attention_interval", "linear_conv_kernel_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim"),
    )
    unused_of_rope: ClassVar[tuple[str, ...]] = ("mrope_section", "mrope_interleaved")
    mixer = "gated_delta_net"
    block_type = "linear_attention"
    sizes: ClassVar = {
        "mixer_kernel": ("linear_conv_kernel_dim", 4),
        "mixer_key_heads": ("linear_num_key_heads", 16),
        "mixer_value_heads": ("linear_num_value_heads", 32),
        "mixer_key_size": ("linear_key_head_dim", 128),
        "mixer_value_size": ("linear_value_head_dim", 128),
    }

    def types(self, config: dict[str, Any], layers: int) -> list[str]:
        """Return attention in each block of an interval."""
        interval = config.get("full_attention_interval", 4)
        if type(interval) is not int or interval < 1:
            raise ModelError(f"full_attention_interval is {interval!a:.80}, not a number of blocks")
        types = [self.block_type, "full_attention"]
        return [types[(block + 1) % interval == 0] for block in range(layers)]


class Qwen3Next(Qwen35):
    """Qwen3-Next: gated delta nets, and the first blocks without experts."""

    names = (*Qwen35.names, *FirstDense.names)
    unused_of_rope = ()

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the options of the mixer, and first_dense_layers."""
        dense = FirstDense().read(config, options, lacks)
        return super().read(config, options, lacks) | dense

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the types of blocks, and the blocks without experts."""
        return super().write(model, config) | FirstDense().write(model, config)


class OlmoHybrid(Hybrid):
    """OLMo Hybrid: gated delta nets in blocks with norms before, attention without positions."""

    names = (
        *("layer_types", "linear_conv_kernel_dim", "linear_allow_neg_eigval"),
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim"),
    )
    mixer = "gated_delta_net"
    block_type = "linear_attention"
    sizes: ClassVar = {
        "mixer_kernel": ("linear_conv_kernel_dim", 4),
        "mixer_negative": ("linear_allow_neg_eigval", True),
        "mixer_key_heads": ("linear_num_key_heads", None),
        "mixer_value_heads": ("linear_num_value_heads", None),
        "mixer_key_size": ("linear_key_head_dim", None),
        "mixer_value_size": ("linear_value_head_dim", None),
    }

    def types(self, config: dict[str, Any], layers: int) -> list[str]:
        """Return attention in every fourth block, or in the last one of fewer."""
        types = [self.block_type] * 3 + ["full_attention"]
        found = [types[block % 4] for block in range(layers)]
        return found if layers > 3 else [*found[:-1], "full_attention"]

    def size(self, ours: str, config: dict[str, Any], found: dict[str, Any]) -> Any:
        """Return an option of the mixer; those that the file does not give follow from others."""
        value = super().size(ours, config, found)
        if value is not None:
            return value
        hidden, key_heads = found.get("hidden"), found.get("mixer_key_heads", found.get("heads"))
        if ours.endswith("_heads"):
            return found.get("heads")
        if ours == "mixer_value_size" and type(found["mixer_key_size"]) is int:
            return 2 * found["mixer_key_size"]
        if type(hidden) is not int or type(key_heads) is not int or key_heads < 1:
            return None  # refused later, by the option's name
        return int(0.75 * hidden / key_heads)

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the options of the mixer and its norms, and the blocks with RoPE."""
        found = super().read(config, options, lacks)
        if found.get("mixer_blocks", "all") == "all":
            lacks.append("layer_types has one type; here linear_attention and full_attention")
        rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 1.0)}
        has_positions = not isinstance(rope, dict) or rope.get("rope_theta", 1.0) is not None
        blocks = "all" if has_positions else "none"
        return found | {"rotary_blocks": blocks, "mixer_pre_norm": True, "mixer_norm_eps": 1e-5}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the types of blocks, and rotary positions without a base if there are none."""
        fields = super().write(model, config)
        if model.rotary_blocks == "none":
            fields["rope_parameters"] = {"rope_theta": None, "rope_type": "default"}
        return fields


INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it


def least_step(config: dict[str, Any], lacks: list[str]) -> float:
    """Return the least step of Mamba-2. lacks: receives a sentence if there is a largest one."""
    limits = config.get("time_step_limit", [0.0, math.inf])
    if isinstance(limits, (list, tuple)) and len(limits) == 2:
        least, most = limits
        if type(least) in (int, float) and 0 <= least < math.inf and most in (math.inf, INFINITY):
            return float(least)
    lacks.append(f"time_step_limit is {limits!a:.80}; here the second is infinity")
    return 0.0


class Mamba(Hybrid):
    """Bamba and Granite 4: Mamba-2, whose heads together are a multiple of the hidden size."""

    names: ClassVar[tuple[str, ...]] = (
        *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
        *("mamba_conv_bias", "mamba_expand", "time_step_limit"),
    )
    mixer = "mamba2"
    block_type = "linear_attention"
    sizes: ClassVar = {
        "mixer_kernel": ("mamba_d_conv", 4),
        "mixer_conv_bias": ("mamba_conv_bias", True),
        "mixer_key_heads": ("mamba_n_groups", 1),
        "mixer_key_size": ("mamba_d_state", 256),
        "mixer_value_heads": ("mamba_n_heads", 128),
        "mixer_value_size": ("mamba_d_head", "auto"),
    }

    def size(self, ours: str, config: dict[str, Any], found: dict[str, Any]) -> Any:
        """Return an option of the mixer; the width of a head may follow from all heads'."""
        value = super().size(ours, config, found)
        if value != "auto":
            return value
        columns, heads = self.columns(config, found), found["mixer_value_heads"]
        return columns // heads if columns and type(heads) is int and heads > 0 else None

    def columns(self, config: dict[str, Any], found: dict[str, Any]) -> int | None:
        """Return the columns of all heads; None if a field is no number, which is refused later."""
        expand, hidden = config.get("mamba_expand", 2), found.get("hidden")
        if type(expand) not in (int, float) or type(hidden) is not int:
            return None
        return int(expand * hidden)

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the mixer, its blocks and sizes."""
        found = super().read(config, options, lacks)
        if "mixer" in found:
            self.check(config, options, found, lacks)
        return found

    def check(
        self,
        config: dict[str, Any],
        options: dict[str, Any],
        found: dict[str, Any],
        lacks: list[str],
    ) -> None:
        """Add the least step to what was found, and sentences to `lacks` on what is not here."""
        found["mixer_step_min"] = least_step(config, lacks)
        heads, size = found.get("mixer_value_heads"), found.get("mixer_value_size")
        columns = self.columns(config, options)
        if type(heads) is int and type(size) is int and heads * size != columns:
            lacks.append(
                f"mamba_n_heads({heads}) * mamba_d_head({size}) is not the width of all heads("
                f"{columns})"
            )

    def write_sizes(self, model: ModelShape) -> dict[str, Any]:
        """Return the sizes, and the columns over the hidden size."""
        columns = model.mixer_value_heads * model.mixer_value_size
        sizes = super().write_sizes(model) | {"mamba_expand": max(1, columns // model.hidden)}
        steps = {"time_step_limit": [model.mixer_step_min, INFINITY]}
        return sizes | (steps if model.mixer_step_min else {})


class Bamba(Mamba):
    """Bamba: a list has the blocks with attention; half of a head's columns have positions."""

    names = ("attn_layer_indices", "partial_rotary_factor", *Mamba.names)

    def types(self, config: dict[str, Any], layers: int) -> list[str]:
        """Return attention in the blocks of the list."""
        attends = config.get("attn_layer_indices") or []
        if not isinstance(attends, list):
            raise ModelError(f"attn_layer_indices is {attends!a:.80}, not a list of blocks")
        return ["full_attention" if n in attends else self.block_type for n in range(layers)]

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the mixer, and the share of a head with positions.

        transformers takes a half whatever partial_rotary_factor beside the object of rotary
        positions is; inside of that it is read.
        """
        found = super().read(config, options, lacks)
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        beside = config.get("partial_rotary_factor")
        if not isinstance(rope, dict) or rope.get("partial_rotary_factor") is not None:
            return found
        if beside not in (None, 0.5):
            lacks.append(f"partial_rotary_factor is {beside!a:.80}; here, as in transformers, 0.5")
        return found | {"rotary_fraction": 0.5}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the blocks with attention and the sizes."""
        fields = super().write(model, config)
        types = fields.pop("layer_types")
        attends = [n for n, name in enumerate(types) if name != self.block_type]
        return fields | {"attn_layer_indices": attends}


class GraniteHybrid(Mamba):
    """Granite 4: Mamba-2, experts beside an MLP or that MLP alone, and attention with or without
    positions.
    """

    names = (
        *("layer_types", "layers_block_type", "position_embedding_type", "num_local_experts"),
        *("num_experts_per_tok", "intermediate_size", "shared_intermediate_size"),
        *Mamba.names,
        *Granite.names,
    )
    may_have_experts = True

    def types(self, config: dict[str, Any], layers: int) -> list[str]:
        """Return the list by its other name, or Mamba-2 in all blocks."""
        return config.get("layers_block_type") or [self.block_type] * layers

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the mixer, the MLPs, and whether attention has positions."""
        found = super().read(config, options, lacks) | Granite().read(config, options, lacks)
        positions = config.get("position_embedding_type")
        found["rotary_blocks"] = "all" if positions == "rope" else "none"
        return found | self.mlps(config, lacks)

    def mlps(self, config: dict[str, Any], lacks: list[str]) -> dict[str, Any]:
        """Return the options of the MLPs' widths and of the experts, from a config.json."""
        shared = config.get("shared_intermediate_size", 1024)
        experts = config.get("num_local_experts", 8)
        if not experts:
            return {"ffn_hidden": shared}
        if experts == 1:
            lacks.append("num_local_experts is 1; here none, or 2 and more")
        width = config.get("intermediate_size", 11008)
        chosen = config.get("num_experts_per_tok", 2)
        widths = {"ffn_hidden": width, "expert_ffn_hidden": width, "shared_ffn_hidden": shared}
        return widths | {"experts": experts, "experts_per_token": chosen}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of config.json of mixer, MLPs, experts and positions."""
        experts, width, shared = 0, model.ffn_hidden, model.ffn_hidden
        if model.experts > 1:
            experts, width = model.experts, model.expert_ffn_hidden
            shared = model.shared_ffn_hidden
        chosen = model.experts_per_token if experts else 0
        mlps = {"num_local_experts": experts, "num_experts_per_tok": chosen}
        mlps |= {"intermediate_size": width, "shared_intermediate_size": shared}
        positions = {"position_embedding_type": "rope" if model.rotary_blocks == "all" else None}
        fields = super().write(model, config) | Granite().write(model, config)
        return fields | mlps | positions


class FalconH1(Mamba):
    """Falcon-H1: Mamba-2 beside attention, and factors of what both read and give.

    Those of attention's input and keys are one of its scores, and with those of its result another;
    that of Mamba-2's input is one of each of its projections.
    """

    names = (
        *("mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate", "lm_head_multiplier"),
        *("mlp_multipliers", "key_multiplier", "attention_in_multiplier"),
        *("attention_out_multiplier", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier"),
        *Mamba.names,
    )

    def columns(self, config: dict[str, Any], found: dict[str, Any]) -> int | None:
        """Return the columns of all heads, which may have a field."""
        width = config.get("mamba_d_ssm", 1024)
        if width is None:
            return super().columns(config, found)
        return width if type(width) is int else None

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the options of the mixer, its sizes, and the factors of muP (multipliers)."""
        found = self.read_sizes(config, options)
        self.check(config, options, found, lacks)
        has_norm = bool(config.get("mamba_rms_norm", False))
        if has_norm and config.get("mamba_norm_before_gate", True):
            lacks.append("mamba_norm_before_gate is True; here the gate is before the norm: False")
        factors = self.factors(config)
        source, key = factors["attention_in_multiplier"][0], factors["key_multiplier"][0]
        found |= {"mixer_beside": True, "mixer_norm": has_norm}
        found["logit_divisor"] = 1 / factors["lm_head_multiplier"][0]
        heads = options.get("heads"), options.get("hidden")
        size = options.get("head_size")
        if size is None and all(type(n) is int and n > 0 for n in heads):
            size = heads[1] // heads[0]  # type: ignore[operator]
        if type(size) is int:
            found["query_scalar"] = size / (source**2 * key) ** 2
        of_mlp, of_mixer = factors["mlp_multipliers"], factors["ssm_multipliers"]
        before = factors["ssm_in_multiplier"][0]
        places = dict(zip(OF_MIXER, (before * factor for factor in of_mixer), strict=True))
        places |= {"gate": of_mlp[0], "mlp": of_mlp[1]}
        places |= {"attention": source * factors["attention_out_multiplier"][0]}
        places |= {"mixer": factors["ssm_out_multiplier"][0]}
        return found | {"multipliers": text_of(places)}

    def factors(self, config: dict[str, Any]) -> dict[str, list[float]]:
        """Return the factors of each field; UserError if one is no number above 0."""
        counts = {"mlp_multipliers": 2, "ssm_multipliers": 5}
        found = {}
        for name in (name for name in self.names if "multiplier" in name):
            count = counts.get(name, 1)
            value = config.get(name)
            values = [1.0] * count if value is None else value if count > 1 else [value]
            are_numbers = isinstance(values, list) and all(
                type(n) in (int, float) and 0 < n < math.inf for n in values
            )
            if not are_numbers or len(values) != count:
                what = "a number" if count == 1 else f"{count} numbers"
                raise ModelError(f"{name} is {value!a:.80}, not {what} above 0")
            found[name] = [float(n) for n in values]
        return found

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of config.json of the mixer's sizes and of all factors."""
        columns = model.mixer_value_heads * model.mixer_value_size
        fields = self.write_sizes(model) | {
            "mamba_d_ssm": columns,
            "mamba_rms_norm": model.mixer_norm,
        }
        key = (model.head_size / model.query_scalar) ** 0.5
        return fields | {
            "mamba_norm_before_gate": False,
            "lm_head_multiplier": 1 / model.logit_divisor,
            "mlp_multipliers": [model.multiplier(place) for place in ("gate", "mlp")],
            "key_multiplier": key,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": model.multiplier("attention"),
            "ssm_multipliers": [model.multiplier(place) for place in OF_MIXER],
            "ssm_in_multiplier": 1.0,
            "ssm_out_multiplier": model.multiplier("mixer"),
        }


class NemotronH(Hybrid):
    """Nemotron-H: a list or a text has the one part of each block; attention has no positions."""

    names: ClassVar[tuple[str, ...]] = (
        *("layers_block_type", "layer_types", "hybrid_override_pattern", "num_hidden_layers"),
        *("conv_kernel", "use_conv_bias", "n_groups", "ssm_state_size", "mamba_num_heads"),
        *("mamba_head_dim", "time_step_limit", "time_step_min", "n_routed_experts"),
        "num_local_experts",
        *("num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
        *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
    )
    may_have_experts = True
    mixer = "mamba2"
    sizes: ClassVar = {
        "mixer_kernel": ("conv_kernel", 4),
        "mixer_conv_bias": ("use_conv_bias", True),
        "mixer_key_heads": ("n_groups", 8),
        "mixer_key_size": ("ssm_state_size", 128),
        "mixer_value_heads": ("mamba_num_heads", 128),
        "mixer_value_size": ("mamba_head_dim", 64),
        "mixer_step_min": ("time_step_min", 0.001),
    }
    letters: ClassVar = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    experts: ClassVar = {
        "experts": ("n_routed_experts", 8),
        "experts_per_token": ("num_experts_per_tok", 2),
        "expert_ffn_hidden": ("moe_intermediate_size", 7688),
        "shared_ffn_hidden": ("moe_shared_expert_intermediate_size", 7688),
        "router_normalised": ("norm_topk_prob", True),
        "router_scale": ("routed_scaling_factor", 1.0),
        "router_groups": ("n_group", 1),
        "router_groups_per_token": ("topk_group", 1),
    }

    def pattern(self, config: dict[str, Any], lacks: list[str]) -> str:
        """Return the letter of each block; "" if a block is of a type that is not here."""
        types = config.get("layers_block_type", config.get("layer_types"))
        text = config.get("hybrid_override_pattern")
        if types is None and text is not None:
            if not isinstance(text, str) or not set(text) <= {*self.letters.values()}:
                lacks.append(f"hybrid_override_pattern is {text!a:.80}; here of M, *, - and E")
                return ""
            return text
        types = ["linear_attention", "moe", "full_attention", "mlp"] if types is None else types
        if not isinstance(types, list) or not 0 < len(types) <= MOST_LAYERS:
            raise ModelError(f"layers_block_type is {types!a:.80}, not a list of blocks")
        types = [OLDER_TYPES.get(str(name), str(name)) for name in types]
        if unknown := {*types} - {*self.letters}:
            known = ", ".join(self.letters)
            lacks.append(f"layers_block_type has {min(unknown)!a:.80}; here: {known}")
            return ""
        return "".join(self.letters[name] for name in types)

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the blocks, the mixer and its sizes, and the experts if there are any."""
        pattern = self.pattern(config, lacks)
        least_step(config, lacks)  # which transformers does not read, but other programs do
        if pattern and "M" not in pattern:
            lacks.append("layers_block_type has no linear_attention; here some blocks have it")
        if "M" not in pattern:
            return {"layers": max(1, len(pattern))}
        found = self.read_sizes(config, options)
        found |= {"layers": len(pattern), "hybrid_pattern": pattern}
        if "E" not in pattern:
            return found
        for ours, (name, default) in self.experts.items():
            found[ours] = default if config.get(name) is None else config[name]
        if config.get("num_local_experts") is not None:
            found["experts"] = config["num_local_experts"]
        if found["experts"] == 1:
            lacks.append("n_routed_experts is 1; here 2 or more")
        return found | {"router": "sigmoid"}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of blocks, as a list and as a text, the sizes and the experts."""
        pattern = "" if model.hybrid_pattern == "none" else model.hybrid_pattern
        names = {letter: name for name, letter in self.letters.items()}
        fields: dict[str, Any] = {"layers_block_type": [names[letter] for letter in pattern]}
        fields |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        if not pattern:
            return {}
        if "E" in pattern:
            fields |= {name: getattr(model, ours) for ours, (name, _) in self.experts.items()}
        return fields | self.write_sizes(model)


class KimiLinear(Hybrid):
    """Kimi Linear: KDA, and latent attention without positions; sizes in an object or beside it."""

    names = (
        *("layer_types", "mlp_layer_types", "linear_attn_config", "first_k_dense_replace"),
        *("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"),
    )
    mixer = "kda"
    block_type = "linear_attention"
    sizes: ClassVar = {
        "mixer_kernel": ("linear_conv_kernel_dim", 4),
        "mixer_value_heads": ("linear_num_heads", 32),
        "mixer_value_size": ("linear_head_dim", 128),
    }
    inside: ClassVar = {
        "linear_conv_kernel_dim": "short_conv_kernel_size",
        "linear_num_heads": "num_heads",
        "linear_head_dim": "head_dim",
    }

    def of_object(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the object with the sizes of files of transformers 4; empty if there is none."""
        found = config.get("linear_attn_config") or {}
        if not isinstance(found, dict):
            raise ModelError(f"linear_attn_config is {found!a:.80}, not an object")
        return found

    def size(self, ours: str, config: dict[str, Any], found: dict[str, Any]) -> Any:
        """Return an option of the mixer: that of the object, if it has it."""
        inside = self.of_object(config).get(self.inside[self.sizes[ours][0]])
        return super().size(ours, config, found) if inside is None else inside

    def types(self, config: dict[str, Any], layers: int) -> list[str]:
        """Return attention in the blocks of a list, which counts from 1, or in every fourth one."""
        inside = self.of_object(config)
        attends, mixes = inside.get("full_attn_layers"), inside.get("kda_layers")
        if attends is None or mixes is None:
            types = [self.block_type, "full_attention"]
            return [types[n > 0 and n % 4 == 0] for n in range(layers)]
        if not isinstance(attends, list) or not isinstance(mixes, list):
            raise ModelError(
                f"full_attn_layers({attends!a:.40}) and kda_layers({mixes!a:.40}) of "
                "linear_attn_config are not both lists of layer numbers"
            )
        if sorted(map(str, attends + mixes)) != sorted(map(str, range(1, layers + 1))):
            raise ModelError(
                f"{len(attends + mixes)} numbers in full_attn_layers and kda_layers are not the "
                f"layers 1 to {layers}, each once"
            )
        return ["full_attention" if n + 1 in attends else self.block_type for n in range(layers)]

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the options of the mixer, and first_dense_layers."""
        found = super().read(config, options, lacks)
        if "mixer" not in found and layers_in(options) is not None:
            lacks.append("layer_types has no linear_attention; here some blocks have it")
        for ours in ("heads", "size"):
            if f"mixer_value_{ours}" in found:
                found[f"mixer_key_{ours}"] = found[f"mixer_value_{ours}"]
        return found | self.dense(config, options, lacks)

    def dense(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return first_dense_layers, from mlp_layer_types or first_k_dense_replace."""
        types, layers = config.get("mlp_layer_types"), layers_in(options)
        if types is None or layers is None:
            first = config.get("first_k_dense_replace", 1)
            return {"first_dense_layers": first}
        first = types.count("dense") if isinstance(types, list) else 0
        if types != ["dense"] * first + ["sparse"] * (layers - first):
            lacks.append(f"mlp_layer_types is {types!a:.80}; here it is first dense, then sparse")
        return {"first_dense_layers": first}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the types of blocks and of their MLPs, and the sizes."""
        experts = [model.has_experts(block) for block in range(model.layers)]
        types = ["sparse" if flag else "dense" for flag in experts]
        first = {"first_k_dense_replace": model.first_dense_layers}
        return super().write(model, config) | {"mlp_layer_types": types} | first


ODD: dict[str, OddFamily] = {
    "nothing": OddFamily(),
    "granite": Granite(),
    "cohere2": Cohere2(),
    "glm4": Glm4(),
    "no_positions": NoPositions(),
    "first_dense": FirstDense(),
    "minimax_m2": MiniMaxM2(),
    "lfm2": Lfm2(),
    "olmo_hybrid": OlmoHybrid(),
    "bamba": Bamba(),
    "falcon_h1": FalconH1(),
    "granite_hybrid": GraniteHybrid(),
    "kimi_linear": KimiLinear(),
    "nemotron_h": NemotronH(),
    "qwen3_5": Qwen35(),
    "qwen3_next": Qwen3Next(),
}
