"""What a family of transformers has that no plain field says: its class, `odd` of its entry.

    class Granite(OddFamily):
        names = ("attention_multiplier",)
        def read(self, config, options, lacks): ...    our options, of the fields `names`
        def write(self, model, config): ...            the fields `names`, of our options

architecture/families.py reads and writes the fields of families.toml first, then asks the class.
"""

import math
from typing import Any, ClassVar

from architecture.block_attention import flags_of, pattern_of
from architecture.shape import ModelShape
from base.errors import UserError

MOST_LAYERS = 10_000  # more are refused later, with the limit
# Types of blocks by the names that files of transformers 4 have.
OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


class OddFamily:
    """A family without anything odd, and the base of the others.

    names: the fields of config.json that the class reads and writes. null_tokens: the ids of
    special tokens that transformers takes if config.json has null. unused_of_rope: fields of the
    object of rotary positions that change nothing. may_have_experts: whether the class reads the
    number of experts, which may be none.
    """

    names: ClassVar[tuple[str, ...]] = ()
    null_tokens: ClassVar[dict[str, Any]] = {}
    unused_of_rope: ClassVar[tuple[str, ...]] = ()
    may_have_experts: ClassVar[bool] = False

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return our options that the fields of a config.json give.

        options: those that the plain fields gave. lacks: receives a sentence on each value that the
        engine does not have. Raise UserError if a field is not of the right type.
        """
        return {}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a model. config: those that plain fields gave."""
        return {}


def _layers(options: dict[str, Any]) -> int | None:
    """Return the number of blocks; None if the file's is none that a model can have."""
    layers = options.get("layers")
    return layers if type(layers) is int and 1 <= layers <= MOST_LAYERS else None


# ---- Dense ---------------------------------------------------------------------------------------


class Granite(OddFamily):
    """Scores are multiplied by a number; ours are divided by the root of query_scalar."""

    names = ("attention_multiplier",)

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return query_scalar."""
        multiplier = config.get("attention_multiplier")
        multiplier = 1.0 if multiplier is None else multiplier
        if type(multiplier) not in (int, float) or not 0 < multiplier < math.inf:
            raise UserError(f"attention_multiplier is {multiplier!a:.80}, not a number above 0")
        return {"query_scalar": float(multiplier) ** -2}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the multiplier, in 12 digits if they are exact."""
        exact = model.query_scalar**-0.5
        short = float(f"{exact:.12g}")
        return {"attention_multiplier": short if short**-2 == model.query_scalar else exact}


class Glm4(OddFamily):
    """GLM-4 has three ends of a text if the file has none."""

    null_tokens: ClassVar = {"eos_token_id": [151329, 151336, 151338]}


class NoPositions(OddFamily):
    """SmolLM3: a list or an interval says which blocks have no rotary positions."""

    names = ("no_rope_layers", "no_rope_layer_interval")
    interval = 4  # if the file does not say

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return rotary_blocks."""
        layers = _layers(options)
        if layers is None:
            return {}
        return {"rotary_blocks": pattern_of(tuple(self.flags(config, layers)))}

    def flags(self, config: dict[str, Any], layers: int) -> list[bool]:
        """Return for each block whether it has rotary positions."""
        flags = config.get("no_rope_layers")
        if flags is None:
            interval = config.get("no_rope_layer_interval", self.interval)
            if type(interval) is not int or interval < 1:
                raise UserError(
                    f"no_rope_layer_interval is {interval!a:.80}, not a number of blocks"
                )
            return [(block + 1) % interval != 0 for block in range(layers)]
        if not isinstance(flags, list) or len(flags) < layers:
            raise UserError(f"no_rope_layers is {flags!a:.80}, not a list with each block")
        return [bool(flag) for flag in flags[:layers]]

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the list."""
        flags = flags_of(model.rotary_blocks, model.layers)
        return {"no_rope_layers": [int(flag) for flag in flags]}


# ---- Experts -------------------------------------------------------------------------------------


class MiniMaxM2(OddFamily):
    """MiniMax-M2: files of transformers 4 have the columns with rotary positions."""

    names = ("rotary_dim",)

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return rotary_fraction, unless the field of transformers 5 gives it."""
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        columns, size = config.get("rotary_dim"), options.get("head_size")
        if fraction is not None or columns is None:
            return {}
        if type(columns) is not int or type(size) is not int or size < 1:
            raise UserError(f"rotary_dim is {columns!a:.80}, not a number of columns")
        return {"rotary_fraction": columns / size}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the columns."""
        return {"rotary_dim": model.rotary_width}


class FirstDense(OddFamily):
    """Qwen: a list has the numbers of the blocks without experts, which are the first ones here."""

    names = ("mlp_only_layers",)

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return first_dense_layers."""
        blocks = config.get("mlp_only_layers")
        if blocks is None:
            return {"first_dense_layers": 0}
        if not isinstance(blocks, list) or blocks != list(range(len(blocks))):
            lacks.append(f"mlp_only_layers is {blocks!a:.80}; here it is the first blocks")
            return {}
        return {"first_dense_layers": len(blocks)}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the list."""
        return {"mlp_only_layers": list(range(model.first_dense_layers))}


# ---- Hybrids -------------------------------------------------------------------------------------


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
        """Return the mixer, its blocks and sizes; nothing if no block has it."""
        layers = _layers(options)
        if layers is None:
            return {}
        types = config.get("layer_types")
        types = self.types(config, layers) if types is None else types
        if not isinstance(types, list) or len(types) != layers:
            raise UserError(f"layer_types is {types!a:.80}, not a list of {layers} blocks")
        types = [OLDER_TYPES.get(str(name), name) for name in types]
        known = (self.block_type, "full_attention")
        if unknown := {str(name) for name in types} - {*known}:
            lacks.append(f"layer_types has {min(unknown)!a:.80}; here: {', '.join(known)}")
            return {}
        flags = [name == self.block_type for name in types]
        if not any(flags):
            return {}
        found: dict[str, Any] = {"mixer": self.mixer, "mixer_blocks": pattern_of(flags)}
        for ours in self.sizes:
            found[ours] = self.size(ours, config, options | found)
        return found

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the list of types and the sizes."""
        mixes = [model.mixer_of(block) != "attention" for block in range(model.layers)]
        types = [self.block_type if flag else "full_attention" for flag in mixes]
        sizes = {name: getattr(model, ours) for ours, (name, _) in self.sizes.items()}
        return {"layer_types": types} | (sizes if any(mixes) else {})


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
            raise UserError(f"full_attn_idxs is {attends!a:.80}, not a list of blocks")
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
                raise UserError(f"the width of the MLP needs numbers above 0, not {number!a:.80}")
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
            raise UserError(f"full_attention_interval is {interval!a:.80}, not a number of blocks")
        types = [self.block_type, "full_attention"]
        return [types[(block + 1) % interval == 0] for block in range(layers)]


class Qwen3Next(Qwen35):
    """Qwen3-Next: gated delta nets, and the first blocks without experts."""

    names = (*Qwen35.names, *FirstDense.names)
    unused_of_rope = ()

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return the mixer, and the number of first blocks without experts."""
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
        """Return the mixer, its norms, and whether attention has positions."""
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


def check_steps(config: dict[str, Any], lacks: list[str]) -> None:
    """Add a sentence to `lacks` if Mamba-2's steps have other limits than 0 and infinity."""
    limits = config.get("time_step_limit", [0.0, math.inf])
    # transformers 5 writes infinity as an object.
    if limits not in ([0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}]):
        lacks.append(f"time_step_limit is {limits!a:.80}; here it is 0 and infinity")


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
        check_steps(config, lacks)
        heads, size = found.get("mixer_value_heads"), found.get("mixer_value_size")
        columns = self.columns(config, options)
        if type(heads) is int and type(size) is int and heads * size != columns:
            lacks.append(
                f"mamba_n_heads({heads}) * mamba_d_head({size}) is not mamba_expand * hidden_size("
                f"{columns})"
            )
        return found

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the types of blocks, the sizes, and the columns over the hidden size."""
        columns = model.mixer_value_heads * model.mixer_value_size
        mixes = model.mixer != "attention"
        expand = {"mamba_expand": max(1, columns // model.hidden)} if mixes else {}
        return super().write(model, config) | expand


class Bamba(Mamba):
    """Bamba: a list has the blocks with attention; half of a head's columns have positions."""

    names = ("attn_layer_indices", "partial_rotary_factor", *Mamba.names)

    def types(self, config: dict[str, Any], layers: int) -> list[str]:
        """Return attention in the blocks of the list."""
        attends = config.get("attn_layer_indices") or []
        if not isinstance(attends, list):
            raise UserError(f"attn_layer_indices is {attends!a:.80}, not a list of blocks")
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
        """Return the widths of the MLPs and the numbers of experts."""
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
        """Return all fields of the class."""
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


ODD: dict[str, OddFamily] = {
    "nothing": OddFamily(),
    "granite": Granite(),
    "glm4": Glm4(),
    "no_positions": NoPositions(),
    "first_dense": FirstDense(),
    "minimax_m2": MiniMaxM2(),
    "lfm2": Lfm2(),
    "olmo_hybrid": OlmoHybrid(),
    "bamba": Bamba(),
    "granite_hybrid": GraniteHybrid(),
    "qwen3_5": Qwen35(),
    "qwen3_next": Qwen3Next(),
}
