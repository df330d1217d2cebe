"""Writes torchtitan's command for a model and a layout, and says what torchtitan cannot run.

    words(run, layout, gpus, fp8, version)      -m torchtitan.train and its options
    refusal(run, layout)                        why torchtitan cannot run a layout, or ""
    SAYS                                        the options that are said, or that are refused
    program(version)                            all of it, with the facts by which it is planned

The names of the options in each release are in releases.toml, their types and choices in
tests/data/torchtitan_options*.json, which tests/test_programs.py compares with printed commands. A
model of torchtitan is one of its flavors, FLAVORS; for another shape `notes` says what the new
flavor must have. From 0.3.0 on a config function has the model and what no option says.

With one stage torchtitan's FSDP is --zero 3. With several, it keeps gathered weights and reduces
gradients once in a step, which holds and sends what --zero 1 does.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from architecture.shape import ModelShape
from config.schema import Config, Layout, Training
from tools.planner import releases
from tools.planner.engines import ProgramSoftware
from tools.planner.program import Program

NEWEST = releases.newest("torchtitan")
NEW_CONFIG = "NEW_CONFIG"  # stands for a config function that a release has not
IN_FP8 = ("llama3_405b",)  # config functions whose linear layers are in fp8
SWITCH = object()  # the value of an option that has none
STEPS = 1000  # --training.steps if the user gave no length
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
}
# A model is a flavor, which has its own RoPE, norms and routers: options of these are not said.
SAYS = frozenset(
    {
        *("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "experts", "seq_length"),
        *("positions", "norm", "activation", "qk_norm"),
        *("tp", "pp", "cp", "dp", "ep", "sequence_parallel", "schedule", "virtual_stages"),
        *("micro_batch_size", "recompute", "zero", "partition"),
        *("global_batch_size", "batch_tokens", "steps", "precision", "optimizer", "lr", "min_lr"),
        *("lr_schedule", "lr_warmup_samples", "lr_wsd_decay_samples", "lr_wsd_decay_style"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "seed"),
    }
)
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
DECAYS = {"linear": "linear", "cosine": "cosine", "constant": "linear", "wsd": "linear"}
WSD_DECAYS = {"linear": "linear", "1-sqrt": "sqrt"}


class Flavor(NamedTuple):
    """The sizes of a flavor: blocks, hidden size, heads, KV heads, MLP width (of a dense MLP)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    experts: int = 1


# By the name of a model of torchtitan, its flavors: torchtitan/models/*/__init__.py.
FLAVORS = {
    "llama3": {
        "8B": Flavor(32, 4096, 32, 8, 14336),
        "70B": Flavor(80, 8192, 64, 8, 28672),
        "405B": Flavor(126, 16384, 128, 8, 53248),
    },
    "qwen3": {
        "0.6B": Flavor(28, 1024, 16, 8, 3072),
        "1.7B": Flavor(28, 2048, 16, 8, 6144),
        "4B": Flavor(36, 2560, 32, 8, 9728),
        "8B": Flavor(36, 4096, 32, 8, 12288),
        "14B": Flavor(40, 5120, 40, 8, 17408),
        "32B": Flavor(64, 5120, 64, 8, 25600),
        "30B-A3B": Flavor(48, 2048, 32, 4, 768, 128),
        "235B-A22B": Flavor(94, 4096, 64, 4, 1536, 128),
    },
    "deepseek_v3": {
        "16B": Flavor(27, 2048, 16, 16, 10944, 64),
        "671B": Flavor(61, 7168, 128, 128, 18432, 256),
    },
}


def refusal(run: Config, layout: Layout) -> str:
    """Return why torchtitan cannot run a layout, or ""; dp must be a number."""
    model, shards = run.model, (layout.dp or 1) * layout.cp
    if layout.pp == 1 and shards > 1 and layout.zero != 3:
        return "torchtitan shards weights with pp 1: that is --zero 3"
    if model.norm != "rmsnorm" or model.activation != "swiglu" or model.positions != "rotary":
        return "torchtitan has models like Llama, Qwen3 and DeepSeek: RMSNorm, SwiGLU and RoPE"
    if lacks := _lacks(model):
        return f"torchtitan's models have no {lacks}"
    training = run.training
    if training.precision not in PRECISIONS:
        return f"torchtitan has no --precision {training.precision}"
    if training.optimizer != "adamw":
        return f"torchtitan has no --optimizer {training.optimizer} by this command"
    if training.lr_schedule not in DECAYS:
        return f"torchtitan has no --lr-schedule {training.lr_schedule}"
    if layout.pp > 1:
        return _stage_refusal(model, layout)
    return ""


def _lacks(model: ModelShape) -> str:
    """Return what of a model no flavor of torchtitan can have, or ""."""
    lacks = {
        "norm of the embedding": model.embedding_norm,
        "embedding_scaled": model.embedding_scaled,
        "muP (--mup, --mup-base-layers)": bool(model.mup or model.mup_base_layers),
        "embedding_multiplier": model.embedding_multiplier != 1,
        "residual_multiplier": model.residual_multiplier != 1,
        "multipliers": model.multipliers != "none",
        "logit_divisor": model.logit_divisor != 1,
        "norm_plus_one": model.norm_plus_one,
        f"mixer {model.mixer}": model.mixer != "attention",
        "attention_gate": model.attention_gate,
        "mtp_depth": model.mtp_depth > 0,
        f"--block {model.block}": model.block != "pre-norm",
        "qk_norm full": model.qk_norm == "full",
        "softcap": model.attention_softcap > 0 or model.logit_softcap > 0,
        "sinks": model.sinks,
        "window": model.window > 0,
        "rotary_blocks": model.rotary_blocks != "all",
        f"query_scalar({model.query_scalar:g}) other than head_size({model.head_size})": (
            model.query_scalar != model.head_size
        ),
        "biases": model.bias or bool(model.qkv_bias),
    }
    return next((what for what, is_lacking in lacks.items() if is_lacking), "")


def _stage_refusal(model: ModelShape, layout: Layout) -> str:
    """Return why torchtitan cannot split a model into the layout's stages, or ""."""
    parts, stages = model.layers + 2, layout.stages  # embedding and head count as a block each
    if layout.stages_per_rank > 2 and -(-parts // _parts_per_stage(model, layout)) != stages:
        return f"torchtitan cannot make {stages} stages of {parts} blocks, embedding and head"
    if parts // stages < 1:
        return f"torchtitan has a block, embedding or head in each of {stages} stages, not {parts}"
    return ""


def _parts_per_stage(model: ModelShape, layout: Layout) -> int:
    """Return the blocks of a stage, where embedding and head count as a block each."""
    return -(-(model.layers + 2) // layout.stages)


def flavor(model: ModelShape) -> tuple[str, str] | None:
    """Return the name and the flavor of torchtitan that a model is, or None."""
    for name, flavors in FLAVORS.items():
        if (name == "qwen3") != (model.qk_norm == "head"):
            continue
        for which, sizes in flavors.items():
            found = Flavor(*(getattr(model, field) for field in Flavor._fields))
            if found == sizes and (name == "deepseek_v3") == model.is_latent:
                return name, which
    return None


def words(
    run: Config, layout: Layout, gpus: int, fp8: bool = False, version: str = NEWEST
) -> list[str]:
    """Return the words of the command after its launcher: the module and its options."""
    name, which = flavor(run.model) or ("llama3", "NEW_FLAVOR")
    options = releases.options("torchtitan", version)
    quantities: dict[str, Any] = {"model": name, "flavor": which}
    quantities["config"] = _config(name, which, version)
    quantities |= {"seq_length": run.model.seq_length}
    quantities |= _batch_quantities(run) | _layout_quantities(run, layout)
    quantities["precision"] = PRECISIONS[run.training.precision]
    quantities |= _training_quantities(run.training) | {"compile": SWITCH}
    quantities |= {"fp8": "float8"} if fp8 else {}
    return ["-m", "torchtitan.train", *_as_words(quantities, options)]


def _as_words(quantities: dict[str, Any], options: Mapping[str, str]) -> list[str]:
    """Return the words of some quantities: those for which a release has an option.

    options: by quantity, the option, or the format of a word of its own, which comes last.
    """
    found: list[str] = []
    last: list[str] = []
    for name, value in quantities.items():
        option = options[name]
        if "{}" in option:
            last.append(option.format(value))
        elif option:
            text = f"{value:.12g}" if isinstance(value, float) else str(value)
            found += [option] if value is SWITCH else [option, text]
    return found + last


def _config(name: str, which: str, version: str) -> str:
    """Return the config function of a flavor in a release, or NEW_CONFIG if it has none."""
    function = f"{name}_{which}".lower().replace(".", "_").replace("-", "_")
    return function if function in releases.release("torchtitan", version).configs else NEW_CONFIG


def _batch_quantities(run: Config) -> dict[str, Any]:
    """Return the batch of a step, in samples and in tokens."""
    batch = run.training.global_batch_size
    return {"global_batch": batch, "global_tokens": (batch or 0) * run.model.seq_length}


def _training_quantities(training: Training) -> dict[str, Any]:
    """Return the length, the rate and the optimizer.

    The rate is counted in steps there: parts of it in samples become whole steps.
    """
    batch = training.global_batch_size or 1
    steps = training.steps or STEPS
    found: dict[str, Any] = {
        "steps": steps,
        "clip": float(training.clip_grad),
        "lr": float(training.lr),
        "weight_decay": float(training.weight_decay),
        "beta1": float(training.adam_beta1),
        "beta2": float(training.adam_beta2),
        "eps": float(training.adam_eps),
        "warmup": -(-training.lr_warmup_samples // batch),
        "min_lr": training.final_lr / training.lr if training.lr else 0.0,
        "seed": training.seed,
    }
    schedule = training.lr_schedule
    if schedule == "constant":  # it never begins to decay
        found["decay"] = 0.0
    elif schedule == "wsd":
        # By default the decay is the last tenth, as in config/learning_rate.py.
        decay = training.lr_wsd_decay_samples or steps * batch / 10
        found["decay"] = min(1.0, decay / (steps * batch))
    style = WSD_DECAYS[training.lr_wsd_decay_style] if schedule == "wsd" else DECAYS[schedule]
    return found | {"optimizer": "AdamW", "decay_type": style}


def layout_words(run: Config, layout: Layout, version: str = NEWEST) -> list[str]:
    """Return the options of the layout: axes, schedule, batch of a rank, recomputation."""
    return _as_words(_layout_quantities(run, layout), releases.options("torchtitan", version))


def _layout_quantities(run: Config, layout: Layout) -> dict[str, Any]:
    """Return the axes, the schedule, the batch of a rank and the recomputation.

    Every axis is said, also if it is 1: a config function may have another.
    """
    ep = (layout.ep or 1) if run.model.experts > 1 else 1
    found: dict[str, Any] = {"shards": -1}
    found |= {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": ep}
    local = micro = layout.micro_batch_size
    if layout.pp > 1:  # a rank's whole batch goes through the pipeline at once
        local = (run.training.global_batch_size or 0) // (layout.dp or 1)
        found |= {"schedule": SCHEDULES[layout.schedule], "stage_micro_batch": micro}
        found["stage_micro_batches"] = local // micro
        if layout.stages_per_rank > 2:
            found["stage_parts"] = _parts_per_stage(run.model, layout)
    found |= {"local_batch": local, "micro_batch_tokens": micro * run.model.seq_length}
    if layout.pp > 1 or ep > 1:  # neither works with its CUDA graphs
        found["no_graphs"] = SWITCH
    if layout.recompute == "selective":
        found["selective"] = "op"
    return found | {"recompute": layout.recompute}


def notes(run: Config, layout: Layout, fp8: bool = False, version: str = NEWEST) -> list[str]:
    """Return what the user must change or know before running the command, as lines."""
    model = run.model
    options = releases.options("torchtitan", version)
    data = "--model.hf_assets_path" if options["flavor"] else "--hf_assets_path"
    found = [f"the dataset is torchtitan's default: give yours, and {data}"]
    if model.experts > 1:
        found.append("no run of torchtitan with experts was measured: planned as Trine's experts")
    known = flavor(model)
    if not known:
        sizes = f"dim={model.hidden}, n_layers={model.layers}, n_heads={model.heads}"
        sizes += f", n_kv_heads={model.kv_heads}, an MLP of {model.ffn_hidden}"
        sizes += f", vocab_size={model.vocab_size}, rope_theta={model.rotary_base:g}"
        sizes += f", RoPE scaling {model.rotary_scaling}" * (model.rotary_scaling != "none")
        sizes += ", the head tied to the embedding" * model.tied
        found.append(f"torchtitan has no flavor of this shape: NEW_FLAVOR must have {sizes}")
    if options["config"]:
        found += _config_notes(run, known, fp8, version)
    return found


def _config_notes(run: Config, known: tuple[str, str] | None, fp8: bool, version: str) -> list[str]:
    """Return what the config function of a release must have, since no option says it."""
    training = run.training
    name = _config(*known, version) if known else NEW_CONFIG
    found = []
    if name == NEW_CONFIG:
        where = f"{known[0]} {known[1]}" if known else "this shape"
        found.append(f"{version} has no config function of {where}: NEW_CONFIG is yours")
    optimizer = f"lr={training.lr:g}, betas=({training.adam_beta1:g}, {training.adam_beta2:g})"
    optimizer += f", eps={training.adam_eps:g}, weight_decay={training.weight_decay:g}"
    found.append(f"{name} must have optimizer=default_adamw({optimizer}): no option says it")
    if fp8 and name not in IN_FP8:
        found.append(f"{name} must have a Float8LinearConverter.Config: no option says it")
    if not fp8 and name in IN_FP8:
        found.append(f"{name} has a Float8LinearConverter.Config: take it out")
    return found


def program(version: str) -> Program:
    """Return what the planner needs to know of a release of torchtitan."""
    return Program(
        name="torchtitan",
        version=version,
        engine="torchtitan",
        rates="automodel",  # its own rows are of a cluster with another H100
        expert_engine="torchtitan",
        # compiled
        facts={"fused_norms": True, "fused_elementwise": True, "keeps_products": True},
        expert_kind=ProgramSoftware,  # no run with experts was measured: Trine's formulas
        expert_facts={},
        values={
            "schedule": ["1f1b", "gpipe", "interleaved", "zb-v"],
            "virtual_stages": [2, 4],
            "zero": [1, 3],
            "recompute": ["none", "selective", "full"],
            "recompute_layers": [None],
            "sequence_parallel": [True],
            "partition": ["blocks"],
        },
        refusal=refusal,
        words=partial(words, version=version),
        layout_words=partial(layout_words, version=version),
        notes=partial(notes, version=version),
        says=SAYS,
    )
