"""Writes Megatron Bridge's command for a model and a layout, and says what it cannot run.

    words(run, layout, gpus, fp8)      run_recipe.py, a recipe and its overrides, key=value
    refusal(run, layout)               why Megatron Bridge cannot run a layout, or ""
    program(version)                   all of it, with the facts by which it is planned

Megatron Bridge runs Megatron Core: what its models and layouts are is said by Megatron-LM's options
(megatron_words.py), and FIELDS has the field of its configuration for each. The recipe is the one
without a model of its own, `vanilla_gpt_pretrain_config`, so that the command has every size.
An option of Megatron-LM without a field is a refusal.
"""

from config.schema import Config, Layout
from tools.planner import megatron_words
from tools.planner.expert_engines import ExpertEngine
from tools.planner.program import Program

RECIPE = ["scripts/training/run_recipe.py", "--recipe", "vanilla_gpt_pretrain_config"]
RECIPE += ["--mode", "pretrain", "--dataset", "mock"]
# By an option of Megatron-LM with a value, the fields that have it.
FIELDS = {
    "--num-layers": ["model.num_layers"],
    "--hidden-size": ["model.hidden_size"],
    "--ffn-hidden-size": ["model.ffn_hidden_size"],
    "--num-attention-heads": ["model.num_attention_heads"],
    "--num-query-groups": ["model.num_query_groups"],
    "--kv-channels": ["model.kv_channels"],
    "--seq-length": ["dataset.seq_length", "model.seq_length"],
    "--vocab-size": ["model.vocab_size", "tokenizer.vocab_size"],
    "--position-embedding-type": ["model.position_embedding_type"],
    "--rotary-base": ["model.rotary_base"],
    "--rotary-percent": ["model.rotary_percent"],
    "--rope-scaling-factor": ["model.rope_scaling_factor"],
    "--normalization": ["model.normalization"],
    "--norm-epsilon": ["model.layernorm_epsilon"],
    "--num-experts": ["model.num_moe_experts"],
    "--moe-router-topk": ["model.moe_router_topk"],
    "--moe-ffn-hidden-size": ["model.moe_ffn_hidden_size"],
    "--moe-token-dispatcher-type": ["model.moe_token_dispatcher_type"],
    "--moe-layer-freq": ["model.moe_layer_freq"],
    "--moe-shared-expert-intermediate-size": ["model.moe_shared_expert_intermediate_size"],
    "--moe-router-score-function": ["model.moe_router_score_function"],
    "--moe-router-topk-scaling-factor": ["model.moe_router_topk_scaling_factor"],
    "--moe-router-num-groups": ["model.moe_router_num_groups"],
    "--moe-router-group-topk": ["model.moe_router_group_topk"],
    "--moe-router-load-balancing-type": ["model.moe_router_load_balancing_type"],
    "--moe-router-bias-update-rate": ["model.moe_router_bias_update_rate"],
    "--moe-aux-loss-coeff": ["model.moe_aux_loss_coeff"],
    "--moe-z-loss-coeff": ["model.moe_z_loss_coeff"],
    "--init-method-std": ["model.init_method_std"],
    "--tensor-model-parallel-size": ["model.tensor_model_parallel_size"],
    "--pipeline-model-parallel-size": ["model.pipeline_model_parallel_size"],
    "--context-parallel-size": ["model.context_parallel_size"],
    "--expert-model-parallel-size": ["model.expert_model_parallel_size"],
    "--expert-tensor-parallel-size": ["model.expert_tensor_parallel_size"],
    "--num-virtual-stages-per-pipeline-rank": ["model.virtual_pipeline_model_parallel_size"],
    "--pipeline-model-parallel-layout": ["model.pipeline_model_parallel_layout"],
    "--make-vocab-size-divisible-by": ["model.make_vocab_size_divisible_by"],
    "--recompute-granularity": ["model.recompute_granularity"],
    "--recompute-method": ["model.recompute_method"],
    "--recompute-num-layers": ["model.recompute_num_layers"],
    "--micro-batch-size": ["train.micro_batch_size"],
    "--global-batch-size": ["train.global_batch_size"],
    "--train-iters": ["train.train_iters"],
    "--train-samples": ["train.train_samples"],
    "--lr": ["optimizer.lr"],
    "--min-lr": ["optimizer.min_lr"],
    "--clip-grad": ["optimizer.clip_grad"],
    "--adam-beta1": ["optimizer.adam_beta1"],
    "--adam-beta2": ["optimizer.adam_beta2"],
    "--adam-eps": ["optimizer.adam_eps"],
    "--sgd-momentum": ["optimizer.sgd_momentum"],
    "--loss-scale": ["optimizer.loss_scale"],
    "--optimizer": ["optimizer.optimizer"],
    # The schedule has a weight decay of its own, which takes the place of the optimizer's.
    "--weight-decay": [
        "optimizer.weight_decay",
        "scheduler.start_weight_decay",
        "scheduler.end_weight_decay",
    ],
    "--lr-decay-style": ["scheduler.lr_decay_style"],
    "--lr-wsd-decay-style": ["scheduler.lr_wsd_decay_style"],
    "--lr-warmup-samples": ["scheduler.lr_warmup_samples"],
    "--lr-decay-samples": ["scheduler.lr_decay_samples"],
    "--lr-wsd-decay-samples": ["scheduler.lr_wsd_decay_samples"],
    "--seed": ["rng.seed"],
}
# By an option without a value, its overrides.
SWITCHES = {
    "--swiglu": ["model.gated_linear_unit=true", "model.activation_func=silu"],
    "--use-rope-scaling": ["model.rope_scaling=true"],
    "--apply-layernorm-1p": ["model.layernorm_zero_centered_gamma=true"],
    "--disable-bias-linear": ["model.add_bias_linear=false"],
    "--add-qkv-bias": ["model.add_qkv_bias=true"],
    "--qk-layernorm": ["model.qk_layernorm=true"],
    "--untie-embeddings-and-output-weights": ["model.share_embeddings_and_output_weights=false"],
    "--moe-grouped-gemm": ["model.moe_grouped_gemm=true"],
    "--moe-shared-expert-gate": ["model.moe_shared_expert_gate=true"],
    "--moe-router-pre-softmax": ["model.moe_router_pre_softmax=true"],
    "--moe-router-enable-expert-bias": ["model.moe_router_enable_expert_bias=true"],
    "--sequence-parallel": ["model.sequence_parallel=true"],
    "--tp-comm-overlap": ["model.tp_comm_overlap=true"],
    "--overlap-grad-reduce": ["ddp.overlap_grad_reduce=true"],
    "--use-distributed-optimizer": ["ddp.use_distributed_optimizer=true"],
    "--overlap-param-gather": ["ddp.overlap_param_gather=true"],
    "--bf16": ["mixed_precision=bf16_mixed"],
    "--fp16": ["mixed_precision=fp16_mixed"],
}
# What is so in the recipe, or in what every override of it says. With `bf16_mixed` gradients are
# reduced in FP32: its precision is a name, of which no override changes a part.
UNSAID = {
    *("--use-mcore-models", "--group-query-attention", "--grad-reduce-in-bf16", "--mock-data"),
}
UNSAID_VALUES = {
    *("--transformer-impl", "--attention-backend", "--max-position-embeddings"),
    "--tokenizer-type",
}
FP8 = "mixed_precision=bf16_with_fp8_delayed_scaling_mixed"
OF_LAYOUT = (
    *("model.tensor", "model.pipeline", "model.context", "model.expert_", "model.sequence"),
    *("model.tp_comm", "model.virtual", "model.recompute", "model.make_vocab"),
    *("ddp.", "optimizer.use_", "train.micro"),
)


def refusal(run: Config, layout: Layout) -> str:
    """Return why Megatron Bridge cannot run a model with a layout, or ""; dp must be a number."""
    if reason := megatron_words.refusal(run, layout):
        return reason.replace("megatron ", "bridge ", 1)
    if run.model.is_latent:
        return "bridge has no multi-head latent attention by this command"
    if run.training.rampup_batch_size:
        return "bridge has no --rampup-batch-size with samples"
    if run.training.precision not in ("bf16", "fp16"):
        return f"bridge has no --precision {run.training.precision} by this command"
    options = [word for word in megatron_words.words(run, layout, 1) if word.startswith("--")]
    known = FIELDS.keys() | SWITCHES.keys() | UNSAID | UNSAID_VALUES
    lacking = [word for word in options if word not in known]
    return f"bridge has no {lacking[0]} by this command" if lacking else ""


def words(run: Config, layout: Layout, gpus: int, fp8: bool = False) -> list[str]:
    """Return the words of the command after its launcher: run_recipe.py and its overrides."""
    found = _overrides(megatron_words.words(run, layout, gpus), run, layout)
    if fp8:
        found = [FP8 if word.startswith("mixed_precision=") else word for word in found]
    return [*RECIPE, *found]


def layout_words(run: Config, layout: Layout) -> list[str]:
    """Return the overrides of the layout: axes, schedule, micro-batch, recomputation, ZeRO."""
    found = _overrides(megatron_words.layout_words(run, layout), run, layout)
    return [word for word in found if word.startswith(OF_LAYOUT)]


def _overrides(options: list[str], run: Config, layout: Layout) -> list[str]:
    """Return Megatron Bridge's overrides, FIELD=VALUE, for options of Megatron-LM's command."""
    found = ["model.should_pad_vocab=true"]
    rest = iter(options)
    for option in rest:
        if not option.startswith("--") or option in UNSAID:
            continue  # pretrain_gpt.py
        if option in SWITCHES:
            found += SWITCHES[option]
            continue
        value = next(rest)
        found += [f"{field}={_value(field, value)}" for field in FIELDS.get(option, [])]
    if layout.schedule == "interleaved" and layout.pp > 1:
        stages = f"model.virtual_pipeline_model_parallel_size={layout.stages_per_rank}"
        found += [stages] if stages not in found else []
    # The recipe has a sharded optimizer with replicas that are not, and a warm-up of 500 steps.
    found.append(f"optimizer.use_distributed_optimizer={str(bool(layout.zero)).lower()}")
    if any(word.startswith("train.train_samples=") for word in found):
        found.append("train.train_iters=null")
    return [*found, "scheduler.lr_warmup_iters=0"]


def _value(field: str, value: str) -> str:
    """Return a value of an option as an override has it."""
    if field == "model.moe_layer_freq" and "+" in value:  # [0]*1+[1]*26, a list in Python
        counts = [int(part.partition("*")[2]) for part in value.split("+")]
        return f"[{','.join(['0'] * counts[0] + ['1'] * counts[1])}]"
    if field == "model.pipeline_model_parallel_layout":  # `|`, `*` and `(` are no plain value
        return f"'{value}'"
    return value


def notes(run: Config, layout: Layout, fp8: bool = False) -> list[str]:
    """Return what the user must change or know before running the command, as lines."""
    found = [
        "in Megatron Bridge's folder; --dataset mock and NullTokenizer are stand-ins for yours"
    ]
    found.append("gradients are reduced in FP32, as its precisions by name have it")
    if layout.tp > 1 or layout.cp > 1:
        found.append("set CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs before Blackwell")
    return found


def program(version: str) -> Program:
    """Return what the planner needs to know of a release of Megatron Bridge."""
    same = megatron_words.program(version)
    return Program(
        name="bridge",
        version=version,
        engine=same.engine,
        rates=same.rates,
        expert_engine=same.expert_engine,
        facts={"wire_bytes": 4, "gradient_bytes": 4},
        expert_kind=ExpertEngine,
        expert_facts=same.expert_facts,
        values=same.values,
        refusal=refusal,
        words=words,
        layout_words=layout_words,
        notes=notes,
        says=same.says - {"rampup_batch_size"},
    )
