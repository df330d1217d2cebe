"""Writes torchtitan's command for a model and a layout, and says what torchtitan cannot run.

    words(run, layout, gpus, fp8)      -m torchtitan.train and its options
    refusal(run, layout)               why torchtitan cannot run a layout, or ""
    SAYS                               the options that the command says, or that are refused
    PROGRAM                            all of it, with the facts by which it is planned

The options are those of VERSION: tests/data/torchtitan_options.json has their names, types and
choices, which tests/test_programs.py compares with printed commands. A model of torchtitan is one
of its flavors, FLAVORS; for another shape `notes` says what the new flavor must have.

With one stage torchtitan's FSDP is --zero 3. With several, it keeps gathered weights and reduces
gradients once in a step, which holds and sends what --zero 1 does.
"""

from typing import NamedTuple

from architecture.shape import ModelShape
from config.schema import Config, Layout, Training
from tools.planner.engines import ProgramSoftware
from tools.planner.program import Program

VERSION = "v0.2.2"
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


def words(run: Config, layout: Layout, gpus: int, fp8: bool = False) -> list[str]:
    """Return the words of the command after its launcher: the module and its options."""
    training = run.training
    name, which = flavor(run.model) or ("llama3", "NEW_FLAVOR")
    found = ["-m", "torchtitan.train", "--model.name", name, "--model.flavor", which]
    found += ["--training.seq_len", str(run.model.seq_length)]
    found += ["--training.global_batch_size", str(training.global_batch_size)]
    found += layout_words(run, layout)
    found += ["--training.mixed_precision_param", PRECISIONS[training.precision]]
    found += [*_training_words(training), "--compile.enable"]
    return found + (["--model.converters", "float8"] if fp8 else [])


def _training_words(training: Training) -> list[str]:
    """Return the options of the length, the rate and the optimizer.

    The rate is counted in steps there: parts of it in samples become whole steps.
    """
    batch = training.global_batch_size or 1
    steps = training.steps or STEPS
    numbers: dict[str, float] = {
        "training.steps": steps,
        "training.max_norm": training.clip_grad,
        "optimizer.lr": training.lr,
        "optimizer.weight_decay": training.weight_decay,
        "optimizer.beta1": training.adam_beta1,
        "optimizer.beta2": training.adam_beta2,
        "optimizer.eps": training.adam_eps,
        "lr_scheduler.warmup_steps": -(-training.lr_warmup_samples // batch),
        "lr_scheduler.min_lr_factor": training.final_lr / training.lr if training.lr else 0.0,
        "debug.seed": training.seed,
    }
    schedule = training.lr_schedule
    if schedule == "constant":  # it never begins to decay
        numbers["lr_scheduler.decay_ratio"] = 0.0
    elif schedule == "wsd":
        # By default the decay is the last tenth, as in config/learning_rate.py.
        decay = training.lr_wsd_decay_samples or steps * batch / 10
        numbers["lr_scheduler.decay_ratio"] = min(1.0, decay / (steps * batch))
    style = WSD_DECAYS[training.lr_wsd_decay_style] if schedule == "wsd" else DECAYS[schedule]
    found = [word for name, n in numbers.items() for word in (f"--{name}", f"{n:.12g}")]
    return [*found, "--optimizer.name", "AdamW", "--lr_scheduler.decay_type", style]


def layout_words(run: Config, layout: Layout) -> list[str]:
    """Return the options of the layout: axes, schedule, batch of a rank, recomputation."""
    sizes = {"tensor": layout.tp, "pipeline": layout.pp, "context": layout.cp}
    sizes["expert"] = (layout.ep or 1) if run.model.experts > 1 else 1
    found = ["--parallelism.data_parallel_shard_degree", "-1"]
    for name, size in sizes.items():
        found += [f"--parallelism.{name}_parallel_degree", str(size)] if size > 1 else []
    local = layout.micro_batch_size
    if layout.pp > 1:  # a rank's whole batch goes through the pipeline at once
        local = run.training.global_batch_size // (layout.dp or 1)
        found += ["--parallelism.pipeline_parallel_schedule", SCHEDULES[layout.schedule]]
        micro = str(layout.micro_batch_size)
        found += ["--parallelism.pipeline_parallel_microbatch_size", micro]
        if layout.stages_per_rank > 2:
            parts = str(_parts_per_stage(run.model, layout))
            found += ["--parallelism.pipeline_parallel_layers_per_stage", parts]
    found += ["--training.local_batch_size", str(local)]
    found += ["--activation_checkpoint.mode", layout.recompute]
    if layout.recompute == "selective":
        found += ["--activation_checkpoint.selective_ac_option", "op"]
    return found


def notes(run: Config, layout: Layout) -> list[str]:
    """Return what the command has stand-ins for, as texts of one line."""
    model = run.model
    found = ["--training.dataset is torchtitan's default: give yours, and --model.hf_assets_path"]
    if model.experts > 1:
        found.append("no run of torchtitan with experts was measured: planned as Trine's experts")
    if not flavor(model):
        sizes = f"dim={model.hidden}, n_layers={model.layers}, n_heads={model.heads}"
        sizes += f", n_kv_heads={model.kv_heads}, an MLP of {model.ffn_hidden}"
        sizes += f", vocab_size={model.vocab_size}, rope_theta={model.rotary_base:g}"
        sizes += f", RoPE scaling {model.rotary_scaling}" * (model.rotary_scaling != "none")
        sizes += ", the head tied to the embedding" * model.tied
        found.append(f"torchtitan has no flavor of this shape: NEW_FLAVOR must have {sizes}")
    return found


PROGRAM = Program(
    name="torchtitan",
    version=VERSION,
    newest="0.3.0",
    newest_refuses="(which pip installs) refuses it: its options have other names",
    engine="torchtitan",
    rates="automodel",  # its own rows are of a cluster with another H100
    expert_engine="torchtitan",
    facts={"fused_norms": True, "fused_elementwise": True, "keeps_products": True},  # compiled
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
    words=words,
    layout_words=layout_words,
    notes=notes,
    says=SAYS,
)
