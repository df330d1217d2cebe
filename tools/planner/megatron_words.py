"""Writes Megatron-LM's command for a model and a layout, and says what Megatron-LM cannot run.

    words(run, layout, gpus, fp8)      pretrain_gpt.py and its options
    refusal(run, layout)               why Megatron-LM cannot run a layout, or ""
    SAYS                               the options that the command says, or that are refused
    program(version)                   all of it, with the facts by which it is planned

The options are those of the releases in releases.toml: tests/data/megatron_options*.json have their
names, types and choices, which tests/test_programs.py compares with printed commands. An option of
the model that Megatron-LM has not is a refusal, never left out; programs.py names given options
that are not in SAYS.
"""

import dataclasses
import itertools

from architecture.shape import ModelShape
from base.options import as_typed
from config.schema import Config, Layout, Training
from costs.partition_costs import part_costs
from schedules.partition import blocks_per_stage
from tools.planner import releases
from tools.planner.expert_engines import ExpertEngine
from tools.planner.program import Program

NEWEST = releases.newest("megatron")
STEPS = 1000  # --train-iters if the user gave no length
# Positions of Llama 3.1's scaling in --use-rope-scaling: low and high factor, old context.
LLAMA3 = ["1", "4", "8192"]

# The options of the model whose words are below, or which `_lacks` refuses. Another one is refused
# where it is not at its default, so that no new option of the model is lost on the way.
MODEL = {
    *("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "seq_length", "max_positions"),
    *("vocab_size", "positions", "norm", "norm_plus_one", "activation", "swiglu_alpha"),
    *("swiglu_limit", "bias", "embedding_norm", "embedding_scaled", "tied", "norm_eps"),
    *("rotary_base", "rotary_fraction", "rotary_scaling", "rotary_blocks", "window"),
    *("window_blocks", "window_rotary_base", "window_rotary_scaling", "sinks"),
    *("attention_softcap", "logit_softcap", "query_scalar", "head_size", "qkv_bias", "qk_norm"),
    *("block", "experts", "experts_per_token", "expert_ffn_hidden", "first_dense_layers"),
    *("expert_interval", "router", "router_normalised", "router_scale", "router_groups"),
    *("router_bias", "router_groups_per_token", "shared_ffn_hidden", "shared_gate"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}
SAYS = frozenset(field.name for field in dataclasses.fields(ModelShape)) | {
    *("tp", "pp", "cp", "dp", "ep", "sequence_parallel", "schedule", "virtual_stages", "partition"),
    *("micro_batch_size", "recompute", "recompute_layers", "zero", "pad_vocab_multiple"),
    *("global_batch_size", "batch_tokens", "rampup_batch_size", "steps", "train_samples"),
    *("precision", "optimizer", "lr", "min_lr", "lr_schedule", "lr_warmup_samples"),
    *("lr_decay_samples", "lr_wsd_decay_samples", "lr_wsd_decay_style", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "loss_scale", "clip_grad"),
    *("init_std", "balance", "balance_rate", "router_z_loss", "z_loss", "seed"),
}
# Activations, and the option of each; GELU is what it has without one.
ACTIVATIONS = {"gelu": "", "gelu_tanh": "", "swiglu": "--swiglu"}
OPTIMIZERS = {"adamw": "adam", "apex": "adam", "sgd": "sgd"}
LR_SCHEDULES = {"wsd": "WSD"}  # those with another name there
WSD_STYLES = {"linear": "linear", "1-sqrt": "minus_sqrt"}
BALANCES = {"none": "none", "bias": "none", "sequence": "seq_aux_loss", "global": "global_aux_loss"}


def refusal(run: Config, layout: Layout) -> str:
    """Return why Megatron-LM cannot run a model with a layout, or ""; dp must be a number."""
    model = run.model
    if lacks := _lacks(model) or _lacks_of_training(run):
        return f"megatron has no {lacks}"
    count = run.training.global_batch_size // (layout.micro_batch_size * (layout.dp or 1))
    if layout.schedule == "interleaved" and count % layout.pp:
        return f"megatron interleaves groups of pp({layout.pp}) micro-batches, not {count}"
    if model.experts > 1 and layout.tp > 1 and not layout.sequence_parallel:
        return "megatron needs sequence parallelism for experts with tp"
    return ""


def _lacks(model: ModelShape) -> str:
    """Return what of a model Megatron-LM has no option for, or ""."""
    scaling = model.rotary_scaling.split(":")
    lacks = {
        "ALiBi": model.positions == "alibi",
        "norm of the embedding": model.embedding_norm,
        f"--block {model.block}": model.block != "pre-norm",
        "qk_norm full": model.qk_norm == "full",
        "softcap": model.attention_softcap > 0 or model.logit_softcap > 0,
        "sinks by this command": model.sinks,
        "window by this command": model.window > 0,
        f"--activation {model.activation} by this command": model.activation not in ACTIVATIONS,
        f"query_scalar({model.query_scalar:g}) other than head_size({model.head_size})": (
            model.query_scalar != model.head_size
        ),
        f"rotary_base {model.rotary_base} that is no whole number": model.rotary_base % 1 != 0,
        # Its --qk-layernorm is the norm of --normalization.
        "qk_norm head with --norm layernorm": model.qk_norm == "head" and model.norm != "rmsnorm",
        "qkv_bias false beside --bias": model.bias and model.qkv_bias is False,
        "rotary_scaling " + model.rotary_scaling: not (
            scaling == ["none"] or (scaling[0] == "llama3" and scaling[2:] == LLAMA3)
        ),
        "rotary_blocks": model.rotary_blocks != "all",
        "bias of the router": model.router_bias,
        "norm_plus_one with LayerNorm": model.norm_plus_one and model.norm != "rmsnorm",
        "embedding_scaled": model.embedding_scaled,
    }
    derived = model.derived()
    for field in dataclasses.fields(model):
        value, default = getattr(model, field.name), derived.get(field.name, field.default)
        if field.name not in MODEL and value != default:
            lacks[f"{as_typed(field)} {value} by this command"] = True
    return next((what for what, is_lacking in lacks.items() if is_lacking), "")


def _lacks_of_training(run: Config) -> str:
    """Return what of a run's training Megatron-LM has no option for, or ""."""
    training, bias = run.training, run.training.balance == "bias"
    lacks = {
        f"--optimizer {training.optimizer} by this command": training.optimizer not in OPTIMIZERS,
        "--z-loss of the output's logits": training.z_loss > 0,
        "--balance bias without --router sigmoid": bias and run.model.router != "sigmoid",
    }
    return next((what for what, is_lacking in lacks.items() if is_lacking), "")


def words(run: Config, layout: Layout, gpus: int, fp8: bool = False) -> list[str]:
    """Return the words of the command after its launcher: pretrain_gpt.py and its options."""
    training = run.training
    found = ["pretrain_gpt.py", *_model_words(run.model), *layout_words(run, layout)]
    found += ["--global-batch-size", str(training.global_batch_size)]
    found += ["--bf16"] if training.precision == "bf16" else []
    found += ["--fp16"] if training.precision == "fp16" else []
    found += ["--fp8-format", "hybrid"] if fp8 else []
    found += _training_words(training, run.model)
    found += ["--transformer-impl", "transformer_engine", "--attention-backend", "auto"]
    return [*found, "--mock-data"]


def _training_words(training: Training, model: ModelShape) -> list[str]:
    """Return the options of the length, the rate, the optimizer and the balance of experts."""
    numbers = {
        "lr": training.lr,
        "min-lr": training.final_lr,
        "clip-grad": training.clip_grad,
        "weight-decay": training.weight_decay,
        "adam-beta1": training.adam_beta1,
        "adam-beta2": training.adam_beta2,
        "adam-eps": training.adam_eps,
        "init-method-std": training.init_std,
        "seed": training.seed,
    }
    found = _length_words(training)
    found += [word for name, n in numbers.items() for word in (f"--{name}", f"{n:.12g}")]
    schedule = training.lr_schedule
    found += ["--lr-decay-style", LR_SCHEDULES.get(schedule, schedule)]
    if schedule == "wsd":
        found += ["--lr-wsd-decay-style", WSD_STYLES[training.lr_wsd_decay_style]]
    found += ["--optimizer", OPTIMIZERS[training.optimizer]]
    if training.optimizer == "sgd":
        found += ["--sgd-momentum", f"{training.sgd_momentum:.12g}"]
    if training.loss_scale:
        found += ["--loss-scale", f"{training.loss_scale:.12g}"]
    if model.experts == 1:
        return found
    rate = f"{training.balance_rate:.12g}"
    found += ["--moe-router-load-balancing-type", BALANCES[training.balance]]
    if training.balance == "bias":
        found += ["--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", rate]
    elif training.balance != "none":
        found += ["--moe-aux-loss-coeff", rate]
    if training.router_z_loss:
        found += ["--moe-z-loss-coeff", f"{training.router_z_loss:.12g}"]
    return found


def _length_words(training: Training) -> list[str]:
    """Return the options that say how long the run and the parts of its rate are.

    Megatron-LM wants all of them in samples if one is, and a ramp-up of the batch with samples.
    """
    samples = {
        "lr-warmup-samples": training.lr_warmup_samples,
        "lr-decay-samples": training.lr_decay_samples,
        "lr-wsd-decay-samples": training.lr_wsd_decay_samples,
    }
    given = {name: n for name, n in samples.items() if n}
    steps = training.steps or STEPS
    total = training.train_samples or steps * (training.global_batch_size or 1)
    if training.lr_schedule == "wsd" and "lr-wsd-decay-samples" not in given:
        # Megatron-LM has no default; here it is the last tenth (config/learning_rate.py).
        given["lr-wsd-decay-samples"] = (training.lr_decay_samples or total) // 10
    if not (given or training.train_samples or training.rampup_batch_size):
        return ["--train-iters", str(steps)]
    found = ["--train-samples", str(total)]
    for name, n in given.items():
        found += [f"--{name}", str(n)]
    if training.rampup_batch_size:
        found += ["--rampup-batch-size", *map(str, training.rampup_batch_size)]
    return found


def layout_words(run: Config, layout: Layout) -> list[str]:
    """Return the options of the layout: axes, schedule, micro-batch, recomputation, ZeRO."""
    sizes = {"tensor-model": layout.tp, "pipeline-model": layout.pp, "context": layout.cp}
    found = []
    for name, size in sizes.items():
        if size > 1 or name != "context":
            found += [f"--{name}-parallel-size", str(size)]
    if run.model.experts > 1:
        found += ["--expert-model-parallel-size", str(layout.ep or 1)]
        found += ["--expert-tensor-parallel-size", "1"]
    if layout.tp > 1 and layout.sequence_parallel:
        found.append("--sequence-parallel")
        if run.model.experts == 1:  # its overlap is counted; it needs one program for each product
            found.append("--tp-comm-overlap")
    found += _stage_words(run, layout)
    found += ["--make-vocab-size-divisible-by", str(layout.pad_vocab_multiple)]
    found += ["--micro-batch-size", str(layout.micro_batch_size)]
    found += ["--overlap-grad-reduce", "--grad-reduce-in-bf16"]
    if layout.zero:
        found += ["--use-distributed-optimizer", "--overlap-param-gather"]
    if layout.recompute == "full":
        number = layout.recompute_layers
        how = ["uniform", "1"] if number is None else ["block", str(number)]
        found += ["--recompute-granularity", "full", "--recompute-method", how[0]]
        found += ["--recompute-num-layers", how[1]]
    return found


def _stage_words(run: Config, layout: Layout) -> list[str]:
    """Return the options that say which blocks each stage has, in the order of stages."""
    if layout.pp == 1:
        return []
    costs = part_costs(run.model, run.training.precision, "cuda")
    blocks = blocks_per_stage(run.model, layout, costs)
    if len(set(blocks)) == 1:
        if layout.schedule != "interleaved":
            return []
        return ["--num-virtual-stages-per-pipeline-rank", str(layout.stages_per_rank)]
    return ["--pipeline-model-parallel-layout", stages_text(blocks)]


def stages_text(blocks: list[int]) -> str:
    """Return the blocks of each stage in Megatron-LM's notation, such as Et*3|(t*4|)*2t*3L.

    E is the embedding, t a block, L the head with the loss; a stage ends at a bar, ()*N repeats.
    """
    first, *middle, last = (f"t*{count}" if count else "" for count in blocks)
    text = f"E{first}|"
    for stage, group in itertools.groupby(middle):
        count = len(list(group))
        text += f"({stage}|)*{count}" if count > 1 else f"{stage}|"
    return f"{text}{last}L"


def _model_words(model: ModelShape) -> list[str]:
    """Return the options of the model."""
    found = ["--use-mcore-models", "--num-layers", str(model.layers)]
    found += ["--hidden-size", str(model.hidden), "--ffn-hidden-size", str(model.ffn_hidden)]
    found += ["--num-attention-heads", str(model.heads)]
    if model.is_latent:
        found += _latent_words(model)
    else:
        if model.kv_heads != model.heads:
            found += ["--group-query-attention", "--num-query-groups", str(model.kv_heads)]
        if model.head_size != model.hidden // model.heads:
            found += ["--kv-channels", str(model.head_size)]
    found += ["--seq-length", str(model.seq_length)]
    positions = max(model.seq_length, model.max_positions or 0)
    found += ["--max-position-embeddings", str(positions)]
    found += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab_size)]
    if model.positions == "rotary":
        found += ["--position-embedding-type", "rope", "--rotary-base", str(int(model.rotary_base))]
        if model.rotary_fraction != 1:
            found += ["--rotary-percent", f"{model.rotary_fraction:g}"]
        if model.rotary_scaling != "none":
            factor = model.rotary_scaling.split(":")[1]
            found += ["--use-rope-scaling", "--rope-scaling-factor", factor]
    else:
        found += ["--position-embedding-type", "learned_absolute"]
    norm = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm]
    found += ["--normalization", norm, "--norm-epsilon", f"{model.norm_eps:g}"]
    switches = {
        ACTIVATIONS[model.activation]: bool(ACTIVATIONS[model.activation]),
        "--apply-layernorm-1p": model.norm_plus_one,
        "--disable-bias-linear": not model.bias,
        "--add-qkv-bias": bool(model.qkv_bias) and not model.bias,
        "--qk-layernorm": model.qk_norm == "head",
        "--untie-embeddings-and-output-weights": not model.tied,
    }
    found += [word for word, is_on in switches.items() if is_on]
    return found + (_expert_words(model) if model.experts > 1 else [])


def _latent_words(model: ModelShape) -> list[str]:
    """Return the options of multi-head latent attention."""
    sizes = {
        "q-lora-rank": model.q_lora_rank,
        "kv-lora-rank": model.kv_lora_rank,
        "qk-head-dim": model.qk_nope_head_dim,
        "qk-pos-emb-head-dim": model.qk_rope_head_dim,
        "v-head-dim": model.v_head_dim,
    }
    found = ["--multi-latent-attention", "--rope-type", "rope"]
    for name, size in sizes.items():
        found += [f"--{name}", str(size)] if size else []
    return found


def _expert_words(model: ModelShape) -> list[str]:
    """Return the options of experts and their router."""
    found = ["--num-experts", str(model.experts), "--moe-router-topk", str(model.experts_per_token)]
    found += ["--moe-ffn-hidden-size", str(model.expert_ffn_hidden), "--moe-grouped-gemm"]
    found += ["--moe-token-dispatcher-type", "alltoall"]
    if model.first_dense_layers or model.expert_interval > 1:
        sparse = model.layers - model.first_dense_layers
        pattern = f"[0]*{model.first_dense_layers}+[1]*{sparse}"
        if model.expert_interval > 1:
            pattern = str(model.expert_interval)
        found += ["--moe-layer-freq", pattern]
    if model.shared_ffn_hidden:
        found += ["--moe-shared-expert-intermediate-size", str(model.shared_ffn_hidden)]
    found += ["--moe-shared-expert-gate"] if model.shared_gate else []
    found += ["--moe-router-score-function", model.router]
    if model.router == "softmax" and not model.router_normalised:
        found.append("--moe-router-pre-softmax")
    if model.router_scale != 1:
        found += ["--moe-router-topk-scaling-factor", f"{model.router_scale:g}"]
    if model.router_groups > 1:
        found += ["--moe-router-num-groups", str(model.router_groups)]
        found += ["--moe-router-group-topk", str(model.router_groups_per_token)]
    return found


def notes(run: Config, layout: Layout, fp8: bool = False) -> list[str]:
    """Return what the user must change or know before running the command, as lines."""
    found = ["--mock-data and NullTokenizer are stand-ins for --data-path and your tokenizer"]
    if layout.tp > 1 or layout.cp > 1:
        found.append("set CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs before Blackwell")
    return found


def program(version: str) -> Program:
    """Return what the planner needs to know of Megatron-LM with a release of Megatron Core."""
    return Program(
        name="megatron",
        version=version,
        engine="nemo-2025",
        rates="nemo-2025",
        expert_engine="megatron-experts",
        facts={},
        expert_kind=ExpertEngine,
        expert_facts={"sent_once": False},  # of the dispatcher that the command names
        values={
            "schedule": ["1f1b", "interleaved"],
            "virtual_stages": [2, 3, 4, 5, 6, 8, 10],  # those of published runs
            "zero": [1, 0],
            "recompute": ["none", "full"],
            "sequence_parallel": [True, False],
            "partition": ["balanced"],
        },
        refusal=refusal,
        words=words,
        layout_words=layout_words,
        notes=notes,
        says=SAYS,
    )
