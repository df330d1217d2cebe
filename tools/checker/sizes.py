"""The user's model at several widths and depths, small enough for a CPU.

    ladder = Ladder(config)
    ladder.at(width=128, layers=2)          a run of one rank, with the options that choose code

All widths of a block grow with hidden: those of MLPs, experts and latents, and the number of heads.
Heads keep their size unless the run has mup_base_head_size; then they grow and their number stays.
The smallest model is the base of muP, if the run has muP; without muP nothing scales.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from architecture.block_attention import flags_of
from architecture.mup import SCALES
from architecture.shape import ModelShape
from base.errors import UserError
from config import validation
from config.run_options import Data, Run
from config.schema import Config, Layout
from tools.checker.shrink import parts_in_turn

HEAD = 16  # the size of a head
GROWING_HEADS = 4  # the number of heads, if their size grows
LENGTH, VOCABULARY, BATCH = 32, 128, 8
WINDOW = 12
EXPERTS = 8
LEAST = 2 * HEAD  # the smallest width


@dataclass(frozen=True)
class Ladder:
    """The sizes of a run. width, layers: those of the smallest model, muP's base."""

    config: Config
    width: int
    layers: int

    def at(self, width: int, layers: int, seed: int, **training: Any) -> Config:
        """Return the run with a model of this width and these blocks; training: its options.

        Raise UserError if a width is no multiple of a head's size, or if the blocks are fewer than
        the kinds of hybrid_pattern.
        """
        if width % LEAST:
            raise UserError(f"--widths are multiples of {LEAST}, two heads of {HEAD}: not {width}")
        model = self._model(width, layers)
        given = self.config.training
        changed: dict[str, Any] = {"precision": "fp32", "grad_dtype": "fp32", "loss_scale": 0.0}
        changed |= {"steps": 1000, "train_samples": None, "global_batch_size": BATCH, "ema": 0.0}
        changed |= {"rampup_batch_size": None, "batch_schedule": None, "lr_schedule": "constant"}
        changed |= {"lr_warmup_samples": 0, "lr_decay_samples": None, "min_lr": None, "seed": seed}
        if given.optimizer in ("adamw8bit", "apex"):
            changed["optimizer"] = "adamw"
        options = dataclasses.replace(given, **(changed | training))
        layout = Layout(dp=1, micro_batch_size=options.global_batch_size, zero=0)
        run = Run(device="cpu", watchdog=False, bind_cores=False, preflight=False)
        return validation.check(Config(model, layout, options, Data(), run), 1)

    def shape(self, size: int, by_depth: bool) -> tuple[int, int]:
        """Return the width and the blocks of the model of this size, one of which varies."""
        return (self.width, size) if by_depth else (size, self.layers)

    def _model(self, width: int, layers: int) -> ModelShape:
        """Return the user's model at another hidden size and number of blocks, for a check."""
        was = self.config.model
        size, heads = HEAD, width // HEAD
        if was.mup_base_head_size:
            size, heads = width // GROWING_HEADS, GROWING_HEADS
        shared = min(was.heads // was.kv_heads, 4)  # query heads of each key/value head
        kv_heads = 1 if was.kv_heads == 1 else max(1, heads // shared)
        sizes: dict[str, Any] = {"hidden": width, "layers": layers, "heads": heads}
        sizes |= {"kv_heads": kv_heads, "head_size": size, "ffn_hidden": _part(was.ffn_hidden, was)}
        sizes |= {"seq_length": LENGTH, "max_positions": LENGTH, "vocab_size": VOCABULARY}
        sizes |= {"rotary_scaling": "none", "window_rotary_scaling": "none"}
        sizes["window"] = min(was.window, WINDOW)
        for name in ("rotary_blocks", "window_blocks", "mixer_blocks"):
            sizes[name] = _pattern(getattr(was, name), was.layers, layers)
        sizes["hybrid_pattern"] = _parts(was.hybrid_pattern, layers)
        sizes |= _latent(was, width, size) | _experts(was, layers) | _mixer(was, heads, size)
        for name in ("ffn_hidden", "expert_ffn_hidden", "shared_ffn_hidden"):
            if sizes.get(name):
                sizes[name] = int(sizes[name] * width) // 8 * 8
        return dataclasses.replace(was, **sizes, **self._scales(size))

    def _scales(self, size: int) -> dict[str, Any]:
        """Return the base, and the scales of the forward pass; size: that of a head."""
        was = self.config.model
        derived = was.derived()
        scales = {name: None for name in SCALES if getattr(was, name) == derived[name]}
        if was.query_scalar == was.head_size**2:
            scales["query_scalar"] = float(size**2)  # type: ignore[assignment]
        base: dict[str, Any] = dict(scales)
        base["mup"] = self.width if was.mup else 0
        base["mup_base_layers"] = self.layers if was.mup_base_layers else 0
        if was.mup_base_head_size:
            base["mup_base_head_size"] = self.width // GROWING_HEADS
        return base


def _part(width: int, model: ModelShape, most: float = 4.0) -> float:
    """Return a width of the model as a part of hidden, between a half and `most`."""
    return min(most, max(0.5, width / model.hidden))


def _pattern(text: str, was: int, layers: int) -> str:
    """Return a pattern of blocks for another number of them: a list is repeated."""
    if "," not in text:
        return text
    flags = flags_of(text, was)
    first = flags.index(True) if True in flags else 0  # so that a small model has such a block
    turns = [flags[(first + block) % was] for block in range(layers)]
    return ",".join(str(int(flag)) for flag in turns)


def _parts(pattern: str, layers: int) -> str:
    """Return `parts_in_turn`; raise UserError if the pattern has more kinds than blocks."""
    kinds = "" if pattern == "none" else "".join(dict.fromkeys(pattern))
    if layers < len(kinds):
        raise UserError(
            f"hybrid_pattern has {len(kinds)} kinds of blocks ({kinds}), which a model of "
            f"{layers} blocks cannot have: give --depths of {len(kinds)} or more"
        )
    return parts_in_turn(pattern, layers)


def _latent(was: ModelShape, width: int, size: int) -> dict[str, Any]:
    """Return the sizes of latent attention, whose latents are half as wide as the model."""
    if not was.is_latent:
        return {}
    sizes = {"kv_lora_rank": width // 2, "q_lora_rank": width // 2 if was.q_lora_rank else 0}
    sizes |= {"qk_nope_head_dim": size // 2, "qk_rope_head_dim": size // 2, "v_head_dim": size}
    return sizes | {"kv_heads": width // HEAD if size == HEAD else GROWING_HEADS}


def _experts(was: ModelShape, layers: int) -> dict[str, Any]:
    """Return the options of experts for a small model; widths are shares of hidden.

    was: the user's model. layers: of the small one.
    """
    if was.experts == 1:
        return {}
    experts = min(was.experts, EXPERTS)
    groups = 2 if was.router_groups > 1 else 1
    sizes: dict[str, Any] = {"experts": experts, "router_groups": groups}
    sizes |= {"experts_per_token": min(was.experts_per_token, 2), "router_groups_per_token": 1}
    sizes["expert_ffn_hidden"] = _part(was.expert_ffn_hidden, was, 2.0)
    if was.shared_ffn_hidden:
        sizes["shared_ffn_hidden"] = _part(was.shared_ffn_hidden, was, 2.0)
    sizes["expert_interval"] = min(was.expert_interval, 2)
    sizes["first_dense_layers"] = min(was.first_dense_layers, layers // 2)
    return sizes


def _mixer(was: ModelShape, heads: int, size: int) -> dict[str, Any]:
    """Return the sizes of a mixer in the place of attention."""
    if was.mixer == "attention":
        return {}
    shared = min(was.mixer_value_heads // was.mixer_key_heads, 2)
    keys = 1 if was.mixer_key_heads == 1 else max(1, heads // shared)
    sizes = {"mixer_key_heads": keys, "mixer_value_heads": heads}
    return sizes | {"mixer_key_size": size, "mixer_value_size": size}
