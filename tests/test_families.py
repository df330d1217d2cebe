"""Every family of architecture/families.toml against transformers: same weights, same logits and
gradients, in and out again, config.json read and written; and their layers under real layouts.
"""

import dataclasses
import json

import pytest
import torch
from compare import assert_close
from test_golden import check_lines
from torch.overrides import TorchFunctionMode

from architecture import families, model_stats
from base.errors import UserError
from checkpointing import hf_export
from config import schema, validation
from config.command_line import parse, parse_request
from config.spelling import LACKS, PRESETS, preset
from data import Batch
from distributed.mesh import Mesh
from model import Stage
from parallel import ParamFactory
from schedules import partition

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

V, S = 131, 40
# Sizes as transformers' configurations name them. Six heads: BLOOM's slopes are then not all powers
# of two.
OLD_NAMES = {"n_embd": 48, "n_layer": 2, "n_head": 6}
NEW_NAMES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
NEW_NAMES |= {"max_position_embeddings": S}
LLAMA = NEW_NAMES | {"num_key_value_heads": 2, "intermediate_size": 80}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
OPT = NEW_NAMES | {"ffn_dim": 80, "pad_token_id": None}  # else that token's row has no gradient
# Positions of DeepSeek: the scores grow too.
SCALED_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
SCALED_YARN |= {"mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 8}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONG = {"pad_token_id": None, "rope_scaling": {"type": "longrope"} | FACTORS}
LONG_INSIDE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG_INSIDE |= FACTORS
GEMMA = LLAMA | {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}
GEMMA |= {"pad_token_id": None}
FULL, LOCAL = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
BY_KIND = {
    FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    LOCAL: PLAIN,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
QWEN_MOE = LLAMA | EXPERTS
LINEAR_ATTENTION = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16}
LINEAR_ATTENTION |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_hidden_layers": 4}
LINEAR_ATTENTION |= {"linear_conv_kernel_dim": 3}
KIMI = {k: v for k, v in NEW_NAMES.items() if k != "max_position_embeddings"}
KIMI |= {"num_key_value_heads": 6, "intermediate_size": 80, "num_experts": 8, "v_head_dim": 12}
KIMI |= {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "model_max_length": S}
KIMI |= {"num_experts_per_token": 3, "moe_intermediate_size": 24, "num_shared_experts": 2}
KIMI |= {"num_hidden_layers": 3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
MAMBA = LLAMA | {"pad_token_id": None, "num_hidden_layers": 3, "mamba_n_heads": 12}
FALCON_FACTORS = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.3}
FALCON_FACTORS |= {"attention_in_multiplier": 0.7, "attention_out_multiplier": 0.9}
FALCON_FACTORS |= {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6}
FALCON_FACTORS |= {"mlp_multipliers": [0.8, 0.4], "ssm_multipliers": [0.35, 0.25, 0.5, 0.7, 1.5]}
NEMOTRON = {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}
NEMOTRON |= {"mamba_num_heads": 6, "mamba_head_dim": 10, "ssm_state_size": 12, "n_groups": 2}
NEMOTRON |= {"conv_kernel": 3, "head_dim": 16, "pad_token_id": None}
MAMBA |= {"mamba_d_head": 8, "mamba_d_state": 10, "mamba_d_conv": 3, "mamba_expand": 2}
# DeepSeek's latent attention: sizes that no default has. Values are wider or narrower than keys.
LATENT = NEW_NAMES | {"num_key_value_heads": 6, "intermediate_size": 80, "n_routed_experts": 8}
LATENT |= {"q_lora_rank": None, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6}
LATENT |= {"v_head_dim": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3}
MOONLIGHT = LATENT | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446}
MOONLIGHT |= {"rms_norm_eps": 1e-5, "rope_theta": 5e4, "eos_token_id": None}
CASES = {
    "gpt2": {"n_positions": S} | OLD_NAMES,
    "gpt2 relu": {"n_positions": S, "activation_function": "relu", "n_inner": 80} | OLD_NAMES,
    "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 6, "seq_length": S},
    "llama": LLAMA,
    "llama 3": LLAMA | {"rope_parameters": LLAMA3, "head_dim": 16},
    "llama linear": LLAMA | {"rope_parameters": LINEAR, "tie_word_embeddings": True},
    "granite": LLAMA
    | {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625}
    | {"logits_scaling": 2.0, "tie_word_embeddings": True},
    "glm4": LLAMA | {"pad_token_id": None, "head_dim": 16},
    "glm4 no bias": LLAMA
    | {"pad_token_id": None, "head_dim": 16, "attention_bias": False}
    | {"rope_parameters": YARN | {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "lfm2": LLAMA
    | {"pad_token_id": None, "layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3}
    | {"block_multiple_of": 16},
    "lfm2 attention": LLAMA | {"pad_token_id": None, "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": LLAMA | LINEAR_ATTENTION,
    "qwen3_5_text tied": LLAMA
    | LINEAR_ATTENTION
    | {"full_attention_interval": 3, "tie_word_embeddings": True, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {k: v for k, v in LLAMA.items() if k != "intermediate_size"}
    | EXPERTS
    | LINEAR_ATTENTION
    | {"shared_expert_intermediate_size": 24},
    "glm4_moe": LLAMA
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    | {"use_qk_norm": True, "head_dim": 16, "routed_scaling_factor": 2.5, "num_hidden_layers": 3},
    "glm4_moe air": LLAMA
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    | {"attention_bias": True, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}
    | {"n_shared_experts": 2},
    "minimax_m2": LLAMA
    | {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 4}
    | {"bos_token_id": None, "eos_token_id": None, "head_dim": 8},
    "qwen3_next": LLAMA | EXPERTS | LINEAR_ATTENTION | {"shared_expert_intermediate_size": 40},
    "qwen3_next dense": LLAMA
    | EXPERTS
    | LINEAR_ATTENTION
    | {"mlp_only_layers": [0], "decoder_sparse_step": 2, "head_dim": 12, "num_hidden_layers": 5}
    | {"shared_expert_intermediate_size": 24, "full_attention_interval": 2}
    | {"norm_topk_prob": False, "rope_parameters": PARTIAL},
    "olmo_hybrid": LLAMA
    | LINEAR_ATTENTION
    | {"pad_token_id": None, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    "olmo_hybrid rotary": LLAMA
    | {"pad_token_id": None, "num_hidden_layers": 3, "linear_allow_neg_eigval": False}
    | {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
    | {"tie_word_embeddings": True},
    "bamba": MAMBA
    | {"attn_layer_indices": [1], "mamba_n_groups": 2, "time_step_limit": [1.25, float("inf")]},
    "bamba rotary": MAMBA
    | {"attn_layer_indices": [2], "mamba_conv_bias": False, "tie_word_embeddings": True}
    | {"rope_parameters": PARTIAL | {"partial_rotary_factor": 0.25}, "head_dim": 16},
    "granitemoehybrid": MAMBA
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}
    | {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_groups": 3}
    | {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625}
    | {"logits_scaling": 2.0, "tie_word_embeddings": True},
    "granitemoehybrid dense": MAMBA
    | {"num_local_experts": 0, "shared_intermediate_size": 80, "position_embedding_type": "rope"}
    | {"layer_types": ["mamba", "attention", "mamba"]},
    "granitemoehybrid attention": MAMBA
    | {"num_local_experts": 0, "shared_intermediate_size": 80, "position_embedding_type": "rope"}
    | {"layer_types": ["attention"] * 3},
    "cohere2": LLAMA
    | {"pad_token_id": None, "sliding_window": 9, "logit_scale": 0.3, "num_hidden_layers": 4},
    "cohere2 pattern": LLAMA
    | {"pad_token_id": None, "sliding_window": 9, "layer_types": [FULL, LOCAL, LOCAL]}
    | {"num_hidden_layers": 3, "rope_parameters": LINEAR, "tie_word_embeddings": False}
    | {"logit_scale": 0.5},
    "kimi_linear": KIMI
    | {"layer_types": ["linear_attention", FULL, "linear_attention"], "linear_num_heads": 4}
    | {"linear_head_dim": 10, "linear_conv_kernel_dim": 3},
    "kimi_linear object": KIMI
    | {"q_lora_rank": 28, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}
    | {
        "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 12}
        | {"num_heads": 4, "short_conv_kernel_size": 4},
        "first_k_dense_replace": 2,
    },
    "falcon_h1": MAMBA | {"mamba_d_ssm": 96, "mamba_n_groups": 2} | FALCON_FACTORS,
    "falcon_h1 norm": MAMBA
    | {"mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_norm_before_gate": False}
    | {"tie_word_embeddings": True, "head_dim": 16, "lm_head_multiplier": 0.3},
    "nemotron_h": NEMOTRON | {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]},
    "nemotron_h experts": NEMOTRON
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    | {"moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5, "n_group": 4}
    | {"topk_group": 2, "use_conv_bias": False, "hybrid_override_pattern": "MEM*E-", "head_dim": 8}
    | {"time_step_min": 1.25},
    "mistral": LLAMA | {"sliding_window": S, "head_dim": 10},
    "mistral window": LLAMA | {"sliding_window": 9, "head_dim": 10},
    "ministral": LLAMA | {"head_dim": 10, "sliding_window": 9, "layer_types": [FULL, LOCAL]},
    "qwen2 window": LLAMA
    | {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
    "olmo3": LLAMA | {"pad_token_id": None, "num_hidden_layers": 4, "sliding_window": 9},
    "smollm3": LLAMA | {"pad_token_id": None, "num_hidden_layers": 4},
    "gemma2": GEMMA | {"num_hidden_layers": 3},
    "gemma3_text": GEMMA | {"num_hidden_layers": 7, "rope_parameters": BY_KIND},
    "olmo3 yarn": LLAMA
    | {"pad_token_id": None, "num_hidden_layers": 4, "sliding_window": 9, "rope_scaling": YARN},
    "llama yarn": LLAMA | {"rope_parameters": YARN | {"rope_theta": 1e4, "truncate": False}},
    "gpt_oss": LLAMA
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "head_dim": 16},
    "phi3": LLAMA | {"pad_token_id": None, "sliding_window": 9},
    "phi3 long": LLAMA | LONG | {"original_max_position_embeddings": 16},
    "phi3 short": LLAMA | LONG | {"original_max_position_embeddings": S},
    "smollm3 long": LLAMA
    | {"pad_token_id": None, "no_rope_layers": [0, 1], "rope_parameters": LONG_INSIDE},
    "olmo3 long": LLAMA
    | {"pad_token_id": None, "sliding_window": 9, "layer_types": [LOCAL, FULL]}
    | {"rope_parameters": {FULL: LONG_INSIDE, LOCAL: PLAIN}},
    "qwen2": LLAMA | {"tie_word_embeddings": True},
    "qwen3": LLAMA | {"head_dim": 16},
    "gpt_neox": NEW_NAMES | {"intermediate_size": 80, "rope_parameters": PARTIAL},
    "gpt_neox sequential": NEW_NAMES
    | {"intermediate_size": 80, "use_parallel_residual": False, "hidden_act": "gelu_new"},
    "opt": OPT,
    "opt no bias": OPT | {"enable_bias": False, "activation_function": "gelu"},
    "olmo2": LLAMA | {"pad_token_id": None},
    "mixtral": LLAMA | {"num_local_experts": 4},
    "qwen3_moe": QWEN_MOE | {"norm_topk_prob": True, "head_dim": 16},
    "qwen3_moe no head_dim": QWEN_MOE,
    "qwen3_moe first dense": QWEN_MOE
    | {"mlp_only_layers": [0], "num_hidden_layers": 3, "head_dim": 16},
    "qwen2_moe": QWEN_MOE | {"shared_expert_intermediate_size": 56},
    "qwen2_moe every second": QWEN_MOE
    | {"shared_expert_intermediate_size": 56, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    "olmoe": LLAMA | {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None},
    "deepseek_v2": LATENT,  # as V2-Lite
    "deepseek_v2 scaled": LATENT
    | {"q_lora_rank": 28, "routed_scaling_factor": 1.5, "first_k_dense_replace": 0}
    | {"rope_parameters": LINEAR, "v_head_dim": 24},
    "deepseek_v2 yarn": LATENT | {"rope_parameters": SCALED_YARN},
    "deepseek_v3 yarn": MOONLIGHT | {"rope_parameters": SCALED_YARN | {"mscale": 0.5}},
    "deepseek_v3": LATENT | {"q_lora_rank": 28, "n_group": 4, "topk_group": 2},
    "deepseek_v3 moonlight": MOONLIGHT,
    "deepseek_v3 weights": MOONLIGHT | {"norm_topk_prob": False, "v_head_dim": 16},
}


# Of Granite's experts, the names in memory and in files.
GRANITE_NAMES = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


def their_model(case: str, dtype: torch.dtype = torch.float32, vocab: int = V, **options):
    """transformers' model of a case, with weights, biases and norms drawn."""
    config = transformers.AutoConfig.for_model(case.split()[0], vocab_size=vocab, **CASES[case])
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", **options
    )
    torch.manual_seed(1)
    for p in theirs.parameters():  # their own initialisation would leave biases untried
        p.data = torch.randn_like(p, dtype=dtype) * 0.15 + (p.dim() == 1)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):  # it moves the choice of experts
            buffer.data = torch.randn_like(buffer) * 0.15
            if case.startswith(
                ("minimax_m2", "kimi_linear")
            ):  # transformers loads it in the type of the other weights
                buffer.data = buffer.bfloat16().to(buffer.dtype)
    return theirs.eval()


def shape_of(theirs) -> schema.ModelShape:
    return hf_export.model_shape(theirs.config.to_dict(), "config.json")


def nemotron_names(tensors: dict) -> dict:
    """Of Nemotron-H, the names in files."""
    found = {}
    for name, tensor in tensors.items():
        in_files = name.replace("model.", "backbone.")
        found[in_files] = tensor
        if in_files.endswith((".experts.up_proj", ".experts.down_proj")):
            block, kind = in_files.rsplit(".", 1)
            found |= {f"{block}.{i}.{kind}.weight": each for i, each in enumerate(tensor)}
    return found


def tensors_of(tensors: dict) -> dict:
    """Also by the names that files have: of GPT-NeoX's head, and of each expert by itself."""
    found = {k.replace("lm_head", "embed_out"): v for k, v in tensors.items()} | tensors
    for theirs, in_files in GRANITE_NAMES.items():
        found |= {k.replace(theirs, in_files): v for k, v in tensors.items() if theirs in k}
    if any(name.startswith("model.norm_f.") for name in tensors):
        found |= nemotron_names(tensors)
    for name, tensor in tensors.items():
        block, _, kind = name.partition(".mlp.experts.")
        if kind == "gate_up_proj":
            for i, (gate, up) in enumerate(tensor.unflatten(1, (2, -1))):
                for path, both in (("mlp", "gate_proj up_proj"), ("block_sparse_moe", "w1 w3")):
                    names = [f"{block}.{path}.experts.{i}.{part}.weight" for part in both.split()]
                    found |= dict(zip(names, (gate, up)))
        elif kind == "down_proj":
            found |= {f"{block}.mlp.experts.{i}.down_proj.weight": t for i, t in enumerate(tensor)}
            theirs = f"{block}.block_sparse_moe.experts"
            found |= {f"{theirs}.{i}.w2.weight": t for i, t in enumerate(tensor)}
        elif name.endswith(".linear_attn.conv1d.weight"):  # as transformers saves OLMo Hybrid's
            names = [name.replace("conv1d", f"{part}_conv1d") for part in "qkv"]
            found |= dict(zip(names, tensor.tensor_split(3)))
        elif name.endswith("norm.weight"):  # of OLMo Hybrid's blocks with a mixer
            other = name.replace("post_attention_layernorm", "feedforward_layer_norm")
            found[other.replace("input_layernorm", "attention_layer_norm")] = tensor
        elif ".self_attn.forget_gate." in name:  # Kimi Linear's
            found[name.replace("forget_gate.", "")] = tensor
        elif name.endswith(".self_attn.conv1d.weight"):
            names = [name.replace("conv1d", f"{part}_conv1d") for part in "qkv"]
            found |= dict(zip(names, tensor.tensor_split(3)))
        elif ".mlp.gate." in name or ".mlp.shared_experts." in name or "e_score" in name:
            found[name.replace(".mlp.", ".block_sparse_moe.")] = tensor
    return found


def convert(theirs, tensors: dict) -> dict:
    """Tensors of their model as ours."""
    there = tensors_of(tensors)
    rules = hf_export.rules(shape_of(theirs), theirs.config.model_type)
    return {r.name: r.to_ours(*(there[name] for name in r.theirs)) for r in rules}


def our_stage(theirs, dtype: torch.dtype, recompute="none", masked=False) -> Stage:
    """Our model of the same shape with their weights."""
    shape, layout = shape_of(theirs), schema.Layout(dp=1, recompute=recompute)
    factory = ParamFactory(Mesh(), dtype)
    spec = partition.stage_specs(shape, layout, partition.BLOCKS_ALONE)[0]
    stage = Stage(factory, shape, layout, spec, masked=masked)
    weights = convert(theirs, theirs.state_dict())
    parameters = {p.spec.name: p for p in stage.parameters()}
    assert set(weights) == set(parameters)
    for name, p in parameters.items():
        rows = weights[name].shape[p.spec.dim or 0]
        p.data.narrow(p.spec.dim or 0, 0, rows).copy_(weights[name])
    return stage


class InFp64(TorchFunctionMode):
    """What transformers computes in fp32 whatever the weights (norms, softmax, rotary positions,
    routers) is computed in fp64.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        wider = {torch.float32: torch.float64}
        args = [wider.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = dict(kwargs or {})
        if "dtype" in kwargs:
            kwargs["dtype"] = wider.get(kwargs["dtype"], kwargs["dtype"])
        return function(*args, **kwargs)


@pytest.fixture
def in_fp64():
    torch.set_default_dtype(torch.float64)
    try:
        with InFp64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


# In fp64 the constant of their GELU has 8 digits.
EXACT = {"bloom": 1e-8}
# Seven blocks with four norms each: in fp32 both sides are 2e-5 from the gradients in fp64.
ROUNDED = {"gemma3_text": 6e-5, "gemma2": 3e-5}
# Gated delta nets enlarge roundings: one of fp32 in the weights moves gradients in fp64 by up to
# 5e-4, and the order of sums depends on the processor. In fp32 ours are 1e-4 from those in fp64, as
# transformers' are, but 1e-3 of Qwen3-Next; of the tied Qwen3.5 theirs are 2e-3 from ours.
ROUNDED |= {"qwen3_next": 2e-3, "qwen3_5_text": 2e-3, "qwen3_5_moe_text": 2e-3}
ROUNDED |= {"olmo_hybrid": 5e-5, "qwen3_5_text tied": 4e-3}
ROUNDED |= {"kimi_linear": 5e-5}  # each side is 1e-5 from fp64, and one rounding moves them by 4e-6
ROUNDED_LOGITS = {"qwen3_next": 1e-4, "qwen3_5_text": 3e-4, "qwen3_5_moe_text": 3e-4}
ROUNDED_LOGITS |= {"olmo_hybrid": 2e-5}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers_in_fp64(case, in_fp64):
    """Without the rounding of fp32, which is up to 2e-5 of a gradient's largest element."""
    # Grouped products of experts are for 32 bits at most.
    theirs = their_model(case, torch.float64, experts_implementation="eager")
    for buffer in theirs.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.double()
    stage = our_stage(theirs, torch.float64)
    tolerance = EXACT.get(case, 1e-12)
    check_logits_and_gradients(theirs, stage, tolerance, tolerance)


@pytest.mark.parametrize(
    ("case", "recompute"),
    [(case, "none") for case in CASES]
    + [(case, "full") for case in ("bloom", "gpt_neox", "olmo2")]
    + [(case, "selective") for case in ("gpt2", "llama", "qwen3")],
)
def test_logits_and_gradients_equal_transformers(case, recompute):
    theirs = their_model(case)
    stage = our_stage(theirs, torch.float32, recompute)
    family = case.split()[0]
    of_logits = ROUNDED_LOGITS.get(family, 1e-5)
    of_gradients = ROUNDED.get(case, ROUNDED.get(family, 1e-5))
    check_logits_and_gradients(theirs, stage, of_logits, of_gradients)


def check_logits_and_gradients(theirs, stage: Stage, tolerance: float, of_gradients: float) -> None:
    """of_gradients: the limit of a gradient's difference, over its largest element."""
    tokens = torch.randint(V, (2, S))
    logits = stage.head.logits(stage.hidden_states(tokens)).transpose(0, 1)[..., :V]
    expected = theirs(tokens).logits
    scale = expected.abs().max().item()
    assert scale > 1
    assert_close(logits, expected, tolerance, scale=scale)

    labels = torch.randint(V, (2, S))
    loss = stage(tokens, Batch(tokens, labels, labels.numel()))
    reference = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    assert_close(loss, reference, tolerance)
    loss.backward()
    reference.backward()
    parameters = {p.spec.name: p for p in stage.parameters()}
    gradients = {k: p.grad for k, p in theirs.named_parameters()} | dict(theirs.named_buffers())
    for name, gradient in convert(theirs, gradients).items():
        p = parameters[name]
        if not p.requires_grad:
            continue
        own = p.grad.narrow(p.spec.dim or 0, 0, gradient.shape[p.spec.dim or 0])
        assert_close(own, gradient, of_gradients, name, scale=gradient.abs().max().item())


@pytest.mark.parametrize("case", CASES)
def test_in_and_out_again_is_the_same_model(case, tmp_path):
    """From transformers' own files to ours, to files that transformers reads without a question."""
    theirs = their_model(case, torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf")
    hf_export.import_weights(str(tmp_path / "hf"), str(tmp_path / "in"))
    folder = str(tmp_path / "in/step_00000000")
    hf_export.export_weights(folder, str(tmp_path / "out"), "bf16", family=case.split()[0])
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.randint(V, (2, S))
    assert type(back) is type(theirs)
    for name, tensor in theirs.state_dict().items():
        rows = 2 if "embed_positions" in name else 0  # which no token has
        assert torch.equal(back.state_dict()[name][rows:], tensor[rows:]), name
    # Falcon-H1 has a buffer that is no weight, which transformers loads in bf16.
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager"
    )
    assert torch.equal(back.eval()(tokens).logits, loaded.eval()(tokens).logits)
    # A fresh model of that shape, by the file and by the checkpoint.
    for path in ("hf/config.json", "hf", "out", "in", "in/step_00000000"):
        assert parse(["--model", str(tmp_path / path), "--steps", "1"]).model == shape_of(theirs)


@pytest.mark.parametrize("name", [name for name in PRESETS if not LACKS[name]])
def test_every_preset_is_of_a_family_and_has_its_parameters(name):
    """But the two that normalise the embedding and have learned positions, which none has."""
    shape = preset(name)
    if name == "1b3":
        with pytest.raises(UserError, match="gpt2 needs embedding_norm False, not True"):
            families.family_of(shape)
        return
    config = transformers.AutoConfig.for_model(**families.to_config(shape))
    validation.check_shape(shape)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    there = sum(p.numel() for p in theirs.parameters())
    skipped = families.family_of(shape).skipped_rows * shape.hidden
    assert model_stats.parameters(shape) == there - skipped


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "ministral", "olmo3", "qwen2_moe"])
def test_a_model_without_windows_is_exported_as_one_that_transformers_runs(family):
    """Its classes make the mask of a window even if no block has one."""
    case = CASES[family] | {"layer_types": [FULL] * CASES[family]["num_hidden_layers"]}
    made = transformers.AutoConfig.for_model(family, vocab_size=V, **case).to_dict()
    came = made | {"use_sliding_window": True}
    del came["sliding_window"]
    shape = hf_export.model_shape(came, "config.json")
    assert shape.window == 0
    for written in (families.to_config(shape, family), families.to_config(shape, family, came)):
        check_without_windows(transformers.AutoConfig.for_model(**written), shape)


def check_without_windows(again, shape: schema.ModelShape) -> None:
    assert hf_export.model_shape(again.to_dict(), "config.json") == shape
    theirs = transformers.AutoModelForCausalLM.from_config(again).eval()
    tokens = torch.randint(V, (1, 12))
    with torch.no_grad():
        assert theirs(tokens).logits.isfinite().all()


HYBRID = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
HYBRID |= {"block": "post-norm", "qk_norm": "full", "mixer": "gated_delta_net", "tied": False}
HYBRID |= {"mixer_pre_norm": True, "mixer_norm_eps": 1e-5, "mixer_blocks": "3:1"}


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, None),
        ({"mixer_blocks": "1,1,1,0"}, None),  # the same blocks in another spelling
        ({"rotary_blocks": "none"}, None),
        ({"mixer_blocks": "all"}, "one type; here linear_attention and full_attention"),
        ({"mixer": "kda"}, "mixer gated_delta_net, not kda"),
        ({"mixer_pre_norm": False}, "mixer_pre_norm True, not False"),
        ({"mixer_norm_eps": 0.0}, "mixer_norm_eps 1e-05, not 0.0"),
        ({"rotary_blocks": "1:1"}, "rotary_blocks all, not 1:1"),
        ({"attention_gate": True}, "attention_gate False, not True"),
    ],
)
def test_a_hybrid_that_is_no_olmo_hybrid_says_what_it_needs(changes, needed):
    shape = schema.ModelShape(4, 48, 6, **HYBRID | changes)
    if needed is None:
        assert families.family_of(shape, "olmo_hybrid").name == "olmo_hybrid"
        return
    with pytest.raises(UserError, match=needed):
        families.family_of(shape, "olmo_hybrid")


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("lfm2", {"conv_bias": True}, "conv_bias is True; here it is False"),
        ("lfm2", {"layer_types": ["mamba", FULL, "conv"]}, "layer_types has 'mamba'; here: conv"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias is True; here it is False"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "here it is the first blocks"),
        ("olmo_hybrid", {"layer_types": ["linear_attention"] * 4}, "layer_types has one type"),
        ("granite", {"mlp_bias": True}, "mlp_bias is True; here it is False"),
        ("bamba", {"mamba_proj_bias": True}, "mamba_proj_bias is True; here it is False"),
        ("bamba", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is [0.0, 0.1]; here the seco"),
        ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25; here, as in"),
        ("bamba", {"mamba_expand": 1}, "is not the width of all heads(48)"),
        ("granitemoehybrid", {"num_local_experts": 1}, "num_local_experts is 1; here none, or 2"),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate is True; here the gate"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias is True; here it is False"),
        ("nemotron_h", {"moe_latent_size": 16}, "moe_latent_size is 16; here there is none"),
        ("nemotron_h", {"mamba_d_conv": 3}, "mamba_d_conv is 3; here there is none"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings is True; here it is F"),
        ("nemotron_h", {"layers_block_type": ["mlp"]}, "has no linear_attention; here some blocks"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, "layers_block_type has 'conv'; here: lin"),
        ("cohere2", {"sliding_window": None}, "no block has a sliding window; here some do"),
        ("kimi_linear", {"layer_types": [FULL] * 3}, "layer_types has no linear_attention; here"),
        ("kimi_linear", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "first dense, then"),
    ],
)
def test_what_a_hybrid_here_does_not_have_is_refused_by_name(family, changes, sentence):
    config = CASES[family] | {"model_type": family, "vocab_size": V} | changes
    _, lacks = families.from_config(config, "config.json")
    assert [lack for lack in lacks if sentence in lack]


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("lfm2", {"layer_types": ["conv"]}, "config.json: layer_types is .*, not a list of 3"),
        ("lfm2", {"intermediate_size": "wide"}, "the width of the MLP needs numbers above 0"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval is 0, not a"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, r"ssm_multipliers is \[1.0\], not 5 numbers"),
        ("falcon_h1", {"key_multiplier": -1.0}, "key_multiplier is -1.0, not a number above 0"),
        ("cohere2", {"logit_scale": "x"}, "logit_scale is 'x', not a number above 0"),
        ("bamba", {"attn_layer_indices": 3}, "attn_layer_indices is 3, not a list of blocks"),
        ("nemotron_h", {"layers_block_type": 3}, "layers_block_type is 3, not a list of blocks"),
        ("kimi_linear", {"linear_attn_config": 1}, "linear_attn_config is 1, not an object"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier is 0, not a number above 0"),
        ("minimax_m2", {"rotary_dim": "4"}, "rotary_dim is '4', not a number of columns"),
    ],
)
def test_an_odd_field_of_another_type_is_one_sentence(family, changes, sentence):
    config = CASES[family] | {"model_type": family, "vocab_size": V} | changes
    with pytest.raises(UserError, match=sentence):
        families.from_config(config, "config.json")


def test_a_bloom_that_leaves_a_bias_out_is_refused():
    """With slow_but_exact, transformers adds no bias to its products in slices."""
    fields = CASES["bloom"] | {"model_type": "bloom", "pretraining_tp": 2, "slow_but_exact": True}
    _, lacks = families.from_config(fields | {"vocab_size": V}, "config.json")
    assert lacks == ["slow_but_exact is True; here it is False"]


def test_names_that_gpt_neox_does_not_read_are_refused():
    """transformers reads rotary_pct and rotary_emb_base there, and nothing else."""
    fields = CASES["gpt_neox"] | {"model_type": "gpt_neox", "vocab_size": V}
    del fields["rope_parameters"]
    given = {"partial_rotary_factor": 0.5, "rope_theta": 5e5}
    read = transformers.AutoConfig.for_model(**fields | given).rope_parameters
    assert (read["partial_rotary_factor"], read["rope_theta"]) == (0.25, 1e4)
    _, lacks = families.from_config(fields | given, "config.json")
    assert lacks == [
        "rope_theta is 500000.0; here it is rotary_emb_base(None)",
        "partial_rotary_factor is 0.5; here it is rotary_pct(None)",
    ]
    both = given | {"rotary_pct": 0.5, "rotary_emb_base": 5e5}
    options, lacks = families.from_config(fields | both, "config.json")
    assert (options["rotary_fraction"], options["rotary_base"], lacks) == (0.5, 5e5, [])


def test_a_mistral_whose_blocks_differ_is_read_as_transformers_reads_it(tmp_path):
    config = transformers.MinistralConfig(vocab_size=V, **CASES["ministral"])
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    hf = tmp_path / "hf"
    theirs.save_pretrained(hf)
    fields = json.loads((hf / "config.json").read_text()) | {"model_type": "mistral"}
    (hf / "config.json").write_text(json.dumps(fields))
    assert type(transformers.AutoModelForCausalLM.from_pretrained(hf)) is type(theirs)
    shape = hf_export.import_weights(str(hf), str(tmp_path / "in"))
    assert shape.window_blocks == "0,1"
    folder = str(tmp_path / "in/step_00000000")
    hf_export.export_weights(folder, str(tmp_path / "out"))
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.randint(V, (1, S))
    assert torch.equal(back(tokens).logits, theirs.eval()(tokens).logits)


# ---- config.json, run.json, --model --------------------------------------------------------------


def written(folder, **changes) -> str:
    """The path of a Mistral's config.json with some fields changed."""
    config = transformers.MistralConfig(**CASES["mistral"] | {"vocab_size": V}).to_dict()
    path = folder / "config.json"
    path.write_text(json.dumps(config | changes))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True; here it is False"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; here it is silu or swish"),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]; here it is silu or swish"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rotary positions are scaled by 'dynamic'; here: ",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": 1} | EXPERTS,
            "mlp_only_layers is 1; here it is the first blocks",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [1]} | EXPERTS,
            r"mlp_only_layers is \[1\]; here it is the first blocks",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 5.0, "rope_parameters": None},
            "attn_logit_softcapping is 5.0; here it is 0.0",
        ),
        (
            # transformers' eager attention has this window, its flash attention has none.
            {"model_type": "smollm3", "sliding_window": 8, "layer_types": [FULL, LOCAL]},
            "layer_types has sliding_attention, but use_sliding_window is not true",
        ),
    ],
)
def test_what_the_engine_lacks_is_a_sentence_for_training_and_a_note_for_a_plan(
    changes, sentence, tmp_path
):
    words = ["--model", written(tmp_path, **changes), "--steps", "1", "--seq-length", "32"]
    with pytest.raises(UserError, match=sentence):
        parse(words)
    notes = parse_request(words, plans=True).notes
    assert [note for note in notes if note.startswith("planned, but not trained here: ")]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "whisper"}, "is a 'whisper': docs/models.md lists the "),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_size": "48"}, "--hidden takes a whole number, not '48'"),
        ({"num_key_value_heads": 4}, r"kv-heads\(4\) does not divide heads\(6\)"),
        (
            {"model_type": "olmo3", "rope_parameters": None}
            | {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling has type, which transformers does not read in a olmo3: give rope_type",
        ),
        ({"rope_parameters": 5}, "the rotary positions are 5, not an object"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
            "llama3 need numbers: factor, ",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "with numbers above 0"),
    ],
)
def test_a_wrong_config_is_one_sentence(changes, sentence, tmp_path):
    path = written(tmp_path, **changes)
    for plans in (False, True):
        with pytest.raises(UserError, match=sentence) as caught:
            parse_request(["--model", path], plans=plans)
        assert "\n" not in str(caught.value)


def test_a_window_limits_no_sample_but_that_of_an_old_import_does(tmp_path):
    path = written(tmp_path, sliding_window=16)
    model = parse(["--model", path]).model
    assert (model.seq_length, model.window, model.window_blocks) == (S, 16, "all")
    assert parse(["--model", written(tmp_path, sliding_window=None)]).model.window == 0
    old = {"config": {"model": dataclasses.asdict(model) | {"window": 0}}, "window": 16}
    (tmp_path / "run.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match=r"sliding_window\(16\) is shorter than seq-length\(32\)"):
        parse(["--model", str(tmp_path / "run.json"), "--seq-length", "32"])


def test_a_default_that_follows_from_others_does_not_follow_from_itself():
    """Else a value that a file gives is taken for the default, and lost where it is derived again.

    It was: a file's mixer_value_heads became the model's heads.
    """
    shape = schema.ModelShape(2, 48, 6, mixer="gated_delta_net")
    for name, value in shape.derived().items():
        other = {int: 7, float: 7.0, bool: not value, str: "linear:2"}[type(value)]
        assert dataclasses.replace(shape, **{name: other}).derived()[name] == value, name


def test_a_path_that_is_none_is_one_sentence(tmp_path):
    (tmp_path / "run.json").write_text('{"config": {"layout": {}}}')
    for path, sentence in (
        (f"{tmp_path}/none.json", "there is no such file, and no preset of that name"),
        ("llama-3-8", "no preset is called 'llama-3-8'; did you mean 'llama-3-8b'"),
        (str(tmp_path), r"has no \[config\]\[model\]: it is no run.json"),
        ("/", "it has no config.json, and is no run's: no run.json"),
    ):
        with pytest.raises(UserError, match=sentence):
            parse(["--model", path])


def test_a_run_is_resumed_without_its_shape(tmp_path):
    """Its run.json has it, and so has that of a run whose checkpoint is resumed from."""
    options = {"positions": "rotary", "rotary_scaling": "linear:2", "qk_norm": "full"}
    shape = schema.ModelShape(2, 48, 6, seq_length=16, **options)
    run, checkpoint = tmp_path / "run", tmp_path / "run/checkpoints/step_00000002"
    checkpoint.mkdir(parents=True)
    facts = {"config": {"model": dataclasses.asdict(shape)}}
    (run / "run.json").write_text(json.dumps(facts))
    for words in (["--resume", "auto", "--out", str(run)], ["--resume", str(checkpoint)]):
        assert parse(words).model == shape
        assert parse([*words, "--seq-length", "8"]).model.seq_length == 8
        other = [*words, "--layers", "1", "--hidden", "8", "--heads", "1"]
        assert parse(other).model == schema.ModelShape(1, 8, 1)
    assert parse(["--model", str(run)]).model == shape
    facts["config"]["model"]["wings"] = 2
    (run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"has unknown fields of a model: \['wings'\]"):
        parse(["--resume", str(checkpoint)])


def test_a_shape_that_no_family_has_is_one_sentence_with_the_nearest():
    shape = schema.ModelShape(2, 48, 6, positions="rotary", norm="rmsnorm", bias=False)
    note = families.export_note(shape)
    assert note == (
        "checkpoints of this run cannot be exported: transformers has no such model: llama needs "
        "activation swiglu, not gelu_tanh"
    )
    note = families.export_note(dataclasses.replace(shape, experts=8, experts_per_token=2))
    assert note.endswith(
        "mixtral needs activation swiglu, not gelu_tanh"
    )  # not one without experts


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rotary_scaling": "linear"}, "rotary_scaling is none, linear:FACTOR, llama3:"),
        ({"rotary_scaling": "llama3:8:4:1:512"}, "LOW must be below HIGH"),
        ({"rotary_scaling": "linear:nan"}, "with numbers above 0"),
        ({"positions": "rotary", "rotary_fraction": 0.4}, "is 3$"),
        (
            {"positions": "rotary", "window": 4, "heads": 12}
            | {"rotary_scaling": "longrope:8:1:1,2:3,4"}
            | {"window_rotary_scaling": "longrope:6:1:1,2:3,4"},
            "are longrope of 8 and of 6 positions: the blocks of a model have one length",
        ),
        ({"positions": "rotary", "rotary_fraction": 0.1}, "2 or more: .* is 0"),
        (
            {"heads": 5},
            r"heads\(5\) does not divide hidden\(48\): give --heads 4 or 6, or a head_size",
        ),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(changes, sentence):
    shape = schema.ModelShape(**{"layers": 2, "hidden": 48, "heads": 6} | changes)
    with pytest.raises(UserError, match=sentence):
        validation.check_shape(shape)
    validation.check_shape(schema.ModelShape(2, 48, 5, head_size=8))


# ---- Layouts -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_their_layers_give_the_single_rank_run_in_every_layout(tmp_path):
    check_lines("families", tmp_path)


def test_no_shared_experts_may_be_null_in_a_config():
    """An older file of DeepSeek's own code has null; transformers' default number was taken."""
    config = LATENT | {"model_type": "deepseek_v2", "vocab_size": 64, "n_shared_experts": None}
    options, lacks = families.from_config(config, "config.json")
    assert (options["shared_ffn_hidden"], lacks) == (0, [])


@pytest.mark.parametrize("positions", ["learned", "alibi", "rotary"])
def test_a_model_of_any_positions_is_compared_with_every_family(positions):
    """A run asks for its family when it saves, so each family's class sees models not its own."""
    model = schema.ModelShape(2, 48, 6, seq_length=16, positions=positions)
    differing = {family.name for family in families.FAMILIES.values() if family.obstacles(model)}
    assert {"minimax_m2", "olmo_hybrid", "smollm3"} <= differing
