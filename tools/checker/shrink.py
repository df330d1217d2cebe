"""The user's run at small sizes that take the same paths through the code.

    small, lines = shrink(config, folder)
    lines += unsaid(config, small, given, lines)

Options that choose code stay: windows, latent attention, experts and their balance, the optimizer,
a ramp-up, masks of documents. Sizes become small, and such that they do not divide evenly where the
user's may not. An option that this file does not know stays as the user gave it.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from architecture.block_attention import flags_of
from architecture.mup import SCALES
from architecture.rotary_scaling import rotary_scaling
from architecture.shape import ModelShape
from base.options import as_typed
from config.run_options import Run, Training
from config.schema import GROUPS, Config, Layout
from tools.checker.corpora import small_data

LAYERS, LENGTH, VOCABULARY, EXPERTS = 4, 24, 61, 12
HEADS = 6  # KV heads: tp 2 and 3 divide them, and cp 4 only in part
LEAST_BUCKET = 4000  # gradients: several buckets, each with several parameters, as in a large model
OFTEN = 13  # tokens of a vocabulary, one of which ends a document
CLIP = 0.02  # below every gradient norm of a small model: each step is clipped
BATCH = 12  # samples in a step: dp 1 to 4, and micro-batches of 1 to 3
# The first step has the weights as drawn, the second those of an update, which were gathered, the
# third an update with moments; later ones do nothing that is new.
STEPS = 3
WINDOW = 5
# Taps of a convolution: it looks back further than a segment of cp 4 is long, which has 3 tokens.
TAPS = LENGTH // 8 + 2
LATENT = {"kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}


def shrink(config: Config, folder: Path, on_gpus: bool = False) -> tuple[Config, list[str]]:
    """Return the small run and lines that say what was changed.

    folder: of the files of the small run, which are not written yet. on_gpus: in bf16 on GPUs, and
    not in fp64 on CPUs. The run has the layout of one rank.
    """
    model = _model(config.model)
    if config.data.eod_token is not None and config.data.data == ("synthetic",):
        fewer = min(model.vocab_size, OFTEN)  # so that documents of random tokens end often
        model = dataclasses.replace(model, vocab_size=fewer)
    training, said = _training(config.training)
    if on_gpus:
        training = dataclasses.replace(training, precision="bf16")
    data, said_of_data = small_data(config.data, model, folder)
    if config.run.compile:
        said.append("--compile: in layouts of its own, whose code runs without being compiled")
    device = "cuda" if on_gpus else "cpu"
    out = str(folder / "run")
    run = Run(
        out=out,
        device=device,
        watchdog=False,
        bind_cores=False,
        preflight=False,
        async_save=config.run.async_save,
        blocking=config.run.blocking,
    )
    layout = Layout(dp=1, pad_vocab_multiple=1)
    small = Config(model=model, layout=layout, training=training, data=data, run=run)
    return small, [*_lines(config, small), *said, *said_of_data]


def _lines(config: Config, small: Config) -> list[str]:
    """Return a line with the sizes of the model and of the training that became smaller."""
    names: tuple[str, ...] = (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_size",
        "seq_length",
        "vocab_size",
    )
    names += ("experts", "experts_per_token", "window", "kv_lora_rank", "mixer_blocks")
    names += ("mixer_key_heads", "mixer_value_heads", "mixer_key_size", "mixer_value_size")
    names += ("mixer_kernel",)
    changed = []
    for name in names:
        was, now = getattr(config.model, name), getattr(small.model, name)
        if was != now:
            changed.append(f"{name.replace('_', '-')} {was} -> {now}")
    was, now = config.training.global_batch_size, small.training.global_batch_size
    if was != now:
        changed.append(f"global-batch-size {was} -> {now}")
    return [", ".join(changed)] if changed else []


def unsaid(
    config: Config, small: Config, given: Collection[str], lines: Collection[str]
) -> Iterator[str]:
    """Yield lines on the given options that the small run has not, and that `lines` do not name.

    given: names of options of `config`, the user's run. small: the run that was made of it.
    """
    text = " ".join(lines)
    changed, without = [], []
    for group, cls in GROUPS.items():
        was, now = getattr(config, group), getattr(small, group)
        for field in (field for field in dataclasses.fields(cls) if field.name in given):
            name, typed = field.name, as_typed(field)
            flag = typed.removeprefix("--")
            is_said = re.search(rf"(?<![\w-]){flag}(?![\w-])", text)
            if is_said or group == "layout" or getattr(was, name) == getattr(now, name):
                continue
            values = [getattr(each, name) for each in (was, now)]
            if group == "run" or values[1] is None:
                without.append(typed)
                continue
            texts = [_text(value) for value in values]
            changed.append(f"{flag} {texts[0]} -> {texts[1]}")
    if changed:
        yield ", ".join(changed)
    if without:
        yield f"without {', '.join(without)}"


def _text(value: Any) -> str:
    """Return the value of an option as a command line has it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _model(model: ModelShape) -> ModelShape:
    """Return the model with fewer and narrower blocks that run the same code."""
    layers = min(model.layers, LAYERS)
    kv_heads = min(model.kv_heads, HEADS)
    if HEADS > kv_heads > 3:
        kv_heads = 2  # cp 4, and cp 2 with tp 2, then divide heads in part, and gather keys in part
    heads = kv_heads * min(model.heads // model.kv_heads, 2)
    length = min(model.seq_length, LENGTH)
    sizes: dict[str, Any] = {"layers": layers, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"seq_length": length, "vocab_size": min(model.vocab_size, VOCABULARY)}
    if model.is_latent:
        sizes |= {n: v for n, v in LATENT.items() if getattr(model, n)}
        keys = model.qk_nope_head_dim + model.qk_rope_head_dim
        sizes["v_head_dim"] = 14 if model.v_head_dim > keys else LATENT["qk_nope_head_dim"]
        sizes["head_size"] = LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]
        hidden = 36
    else:
        # A head is as small as its rotated columns allow, which are an even number.
        rotated = int(4 * model.rotary_fraction)
        sizes["head_size"] = 4 if rotated and rotated % 2 == 0 else 8
        hidden = heads * sizes["head_size"]
        if model.heads * model.head_size != model.hidden:
            hidden += 2 * HEADS
    sizes["hidden"] = hidden
    sizes["ffn_hidden"] = 36
    if model.query_scalar == model.head_size:
        sizes["query_scalar"] = float(sizes["head_size"])
    sizes |= _mup(model, hidden, layers)
    has_more = model.max_positions > model.seq_length
    sizes["max_positions"] = length + (6 if has_more else 0)
    if 0 < model.window < model.seq_length:
        sizes["window"] = min(model.window, WINDOW)
    sizes |= _blocks(model, layers) | _experts(model, layers) | _mixer(model, layers, kv_heads)
    scaling = {"rotary_scaling": model.rotary_scaling}
    if model.window_rotary_scaling != model.rotary_scaling:
        scaling["window_rotary_scaling"] = model.window_rotary_scaling
    width = int(sizes["head_size"] * model.rotary_fraction)
    width = LATENT["qk_rope_head_dim"] if model.is_latent else width
    for name, text in scaling.items():
        sizes[name] = _scaling(text, width, model.seq_length, length)
    sizes.setdefault("window_rotary_scaling", sizes["rotary_scaling"])
    return dataclasses.replace(model, **sizes)


def _mup(model: ModelShape, hidden: int, layers: int) -> dict[str, Any]:
    """Return the base of the small model, a third as wide and half as deep; {} without muP."""
    sizes: dict[str, Any] = {}
    if model.mup:
        sizes |= {"mup": max(1, hidden // 3)}
    if model.mup_base_layers:
        sizes |= {"mup_base_layers": max(1, layers // 2)}
    if model.mup_base_head_size:
        sizes |= {"mup_base_head_size": 2}
    if sizes:  # scales that follow from the base follow from the small one
        by_mup = model.derived()
        sizes |= {name: None for name in SCALES if getattr(model, name) == by_mup[name]}
    return sizes


def _scaling(text: str, width: int, was: int, length: int) -> str:
    """Return a rotary scaling for `width` rotated columns; longrope has a factor for each pair.

    was, length: the tokens of a sample before and now. Samples that were longer than the original
    length, which have the long factors, still are.
    """
    kind, numbers = rotary_scaling(text)
    if kind != "longrope":
        return text
    count = (len(numbers) - 2) // 2
    short, long = numbers[2 : 2 + count], numbers[2 + count :]
    places = [i * count // (width // 2) for i in range(width // 2)]
    original = length // 2 if was > numbers[0] else 2 * length
    lists = [",".join(f"{factors[i]:g}" for i in places) for factors in (short, long)]
    return f"longrope:{original}:{numbers[1]:g}:{lists[0]}:{lists[1]}"


def _blocks(model: ModelShape, layers: int) -> dict[str, str]:
    """Return the patterns of blocks with windows and with rotary positions.

    Every combination of the two that the model's blocks have is in the small model, in turn.
    """
    windows = flags_of(model.window_blocks, model.layers)
    rotary = flags_of(model.rotary_blocks, model.layers)
    kinds = list(dict.fromkeys(zip(windows, rotary, strict=True)))
    if len(kinds) == 1:
        return {"window_blocks": "all" if windows[0] else "none"} | {
            "rotary_blocks": "all" if rotary[0] else "none"
        }
    turns = [kinds[block % len(kinds)] for block in range(layers)]
    names = ("window_blocks", "rotary_blocks")
    return {name: ",".join(str(int(kind[i])) for kind in turns) for i, name in enumerate(names)}


def _mixer(model: ModelShape, layers: int, heads: int) -> dict[str, Any]:
    """Return the small sizes of a mixer in the place of attention; nothing if there is none.

    heads: KV heads, which tp divides, and so its key heads. If the model has attention too, both
    are in the small model, and attention has its windows and rotary positions in turn.
    """
    if model.mixer == "attention":
        return {}
    shared = min(model.mixer_value_heads // model.mixer_key_heads, 2)
    values = heads * shared
    if model.mixer == "mamba2" and model.mixer_key_heads < heads:  # tensor ranks share a group
        heads = 1 if model.mixer_key_heads == 1 else 2
    mixes = flags_of(model.mixer_blocks, model.layers)
    pattern = "all" if all(mixes) else ",".join(str(1 - block % 2) for block in range(layers))
    return {
        "mixer_blocks": pattern,
        "hybrid_pattern": parts_in_turn(model.hybrid_pattern, layers),
        "mixer_key_heads": heads,
        "mixer_value_heads": values,
        "mixer_kernel": max(model.mixer_kernel, TAPS) if model.mixer_kernel > 1 else 1,
        "mixer_key_size": 4 if model.mixer_key_size == model.mixer_value_size else 6,
        "mixer_value_size": 4,
    }


def parts_in_turn(pattern: str, layers: int) -> str:
    """Return a hybrid_pattern for another number of blocks, with its kinds of blocks in turn."""
    if pattern == "none":
        return pattern
    kinds = list(dict.fromkeys(pattern))
    return "".join(kinds[block % len(kinds)] for block in range(layers))


def _experts(model: ModelShape, layers: int) -> dict[str, int]:
    """Return the small numbers of experts, groups and widths; nothing for a dense model."""
    if model.experts == 1:
        return {"expert_ffn_hidden": 36}
    experts = min(model.experts, EXPERTS)
    groups = max(n for n in range(1, min(model.router_groups, 4) + 1) if experts % n == 0)
    best = min(model.router_groups_per_token, groups)
    chosen = min(model.experts_per_token, 3, best * (experts // groups))
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_ffn_hidden": 20,
        "router_groups": groups,
        "router_groups_per_token": best,
        "shared_ffn_hidden": 24 if model.shared_ffn_hidden else 0,
        "first_dense_layers": min(model.first_dense_layers, 1),
        "expert_interval": min(model.expert_interval, 2),
    }


def _training(training: Training) -> tuple[Training, list[str]]:
    """Return a training of a few steps in fp64, and lines about what cannot be kept in fp64."""
    said = []
    changed: dict[str, Any] = {"steps": STEPS, "train_samples": None, "global_batch_size": BATCH}
    changed |= {"precision": "fp64", "grad_dtype": "fp32", "loss_scale": 0.0}
    if training.optimizer in ("adamw8bit", "apex"):
        changed["optimizer"] = "adamw"
        said.append(f"--optimizer {training.optimizer} has no fp64: checked as adamw")
    if training.muon_dtype == "bf16":
        changed["muon_dtype"] = "master"
        said.append("muon_dtype bf16: in layouts with 16 bits, in others as its masters")
    if training.rampup_batch_size:
        changed["rampup_batch_size"] = (BATCH // 2, BATCH // 2, BATCH)
    if training.batch_schedule:
        changed["batch_schedule"] = ("0:6", f"{BATCH * LENGTH}:{BATCH}")
    # Rates that are too small would hide an update that is wrong.
    changed["lr"] = max(training.lr, 1e-3) if training.lr else 0.0
    changed["clip_grad"] = min(training.clip_grad, CLIP)
    for name in ("lr_warmup_samples", "lr_wsd_decay_samples"):
        if getattr(training, name):
            changed[name] = min(getattr(training, name), BATCH)
    if training.lr_decay_samples:
        changed["lr_decay_samples"] = STEPS * BATCH
    return dataclasses.replace(training, **changed), said
