"""What a family of transformers has that no plain field says: its class, `odd` of its entry.

    class Granite(OddFamily):
        names = ("attention_multiplier",)
        def read(self, config, options, lacks): ...    our options, of the fields `names`
        def write(self, model, config): ...            the fields `names`, of our options

architecture/families.py reads and writes the fields of families.toml first, then asks the class.
Those of models with mixers are in hybrid_families.py, and the table of all.
"""

import math
from typing import Any, ClassVar

from architecture.block_attention import flags_of, pattern_of
from architecture.shape import ModelShape
from base.errors import ModelError

MOST_LAYERS = 10_000  # more are refused later, with the limit


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


def layers_in(options: dict[str, Any]) -> int | None:
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
        """Return query_scalar, 1 / attention_multiplier^2 of a Granite's config.json."""
        multiplier = config.get("attention_multiplier")
        multiplier = 1.0 if multiplier is None else multiplier
        if type(multiplier) not in (int, float) or not 0 < multiplier < math.inf:
            raise ModelError(f"attention_multiplier is {multiplier!a:.80}, not a number above 0")
        return {"query_scalar": float(multiplier) ** -2}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the multiplier, in 12 digits if they are exact."""
        exact = model.query_scalar**-0.5
        short = float(f"{exact:.12g}")
        return {"attention_multiplier": short if short**-2 == model.query_scalar else exact}


class Glm4(OddFamily):
    """GLM-4 has three ends of a text if the file has none."""

    null_tokens: ClassVar = {"eos_token_id": [151329, 151336, 151338]}


class Cohere2(OddFamily):
    """Cohere2: logits are multiplied by a number; only blocks with a window have positions."""

    names = ("logit_scale",)

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return logit_divisor, 1 / logit_scale of config.json, and the blocks with RoPE."""
        scale = config.get("logit_scale", 0.0625)
        if type(scale) not in (int, float) or not 0 < scale < math.inf:
            raise ModelError(f"logit_scale is {scale!a:.80}, not a number above 0")
        blocks = options.get("window_blocks", "all") if options.get("window") else "none"
        if blocks == "none":
            lacks.append("no block has a sliding window; here some do, and have positions")
        return {"logit_divisor": 1 / scale, "rotary_blocks": blocks}

    def write(self, model: ModelShape, config: dict[str, Any]) -> dict[str, Any]:
        """Return the factor of logits."""
        return {"logit_scale": 1 / model.logit_divisor}


class NoPositions(OddFamily):
    """SmolLM3: a list or an interval says which blocks have no rotary positions."""

    names = ("no_rope_layers", "no_rope_layer_interval")
    interval = 4  # if the file does not say

    def read(
        self, config: dict[str, Any], options: dict[str, Any], lacks: list[str]
    ) -> dict[str, Any]:
        """Return rotary_blocks."""
        layers = layers_in(options)
        if layers is None:
            return {}
        return {"rotary_blocks": pattern_of(tuple(self.flags(config, layers)))}

    def flags(self, config: dict[str, Any], layers: int) -> list[bool]:
        """Return whether each block has RoPE, by no_rope_layers or no_rope_layer_interval."""
        flags = config.get("no_rope_layers")
        if flags is None:
            interval = config.get("no_rope_layer_interval", self.interval)
            if type(interval) is not int or interval < 1:
                raise ModelError(
                    f"no_rope_layer_interval is {interval!a:.80}, not a number of blocks"
                )
            return [(block + 1) % interval != 0 for block in range(layers)]
        if not isinstance(flags, list) or len(flags) < layers:
            raise ModelError(f"no_rope_layers is {flags!a:.80}, not a list with each block")
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
        """Return rotary_fraction by rotary_dim, unless partial_rotary_factor gives it."""
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        columns, size = config.get("rotary_dim"), options.get("head_size")
        if fraction is not None or columns is None:
            return {}
        if type(columns) is not int or type(size) is not int or size < 1:
            raise ModelError(f"rotary_dim is {columns!a:.80}, not a number of columns")
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
        """Return first_dense_layers by mlp_only_layers, a list of blocks in config.json."""
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
