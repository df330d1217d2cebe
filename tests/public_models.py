"""Fields of config.json and generation_config.json as public models have them, with small sizes.

A vocabulary has V tokens. The published ids of special tokens are beyond it; here they are ids
below V, as many and in the same fields.
"""

import json
from pathlib import Path

import torch

V = 96
BOS, EOS, TURN, PAD = 90, 91, 92, 93  # <s>, </s>, <turn>, <pad> of `tokenizer`
CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<turn>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SMALL = {"vocab_size": V, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
LLAMA = SMALL | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 128,
    "rope_type": "llama3",
}
MISTRAL = {k: v for k, v in LLAMA.items() if k not in ("pretraining_tp", "attention_bias")} | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
    "rope_theta": 1000000.0,
}
QWEN2 = SMALL | {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": PAD,
    "eos_token_id": TURN,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "rope_scaling": None,
    "sliding_window": None,
}
EXPERTS = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
OLMO2 = {k: v for k, v in LLAMA.items() if k != "pretraining_tp"} | {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
}
NEOX = SMALL | {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 512,
    "model_type": "gpt_neox",
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "use_parallel_residual": True,
}
FULL, LOCAL = "full_attention", "sliding_attention"
OLMO3 = OLMO2 | {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "layer_types": [LOCAL, LOCAL, LOCAL, FULL],
    "num_hidden_layers": 4,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
    },
    "sliding_window": 8,
}
SMOLLM3 = LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "layer_types": [FULL] * 4,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "num_hidden_layers": 4,
    "pad_token_id": PAD,
    "pretraining_tp": 2,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
GRANITE = LLAMA | {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_multiplier": 0.125,
    "bos_token_id": 0,
    "embedding_multiplier": 1.5,  # with 12.0 random weights of this size repeat one token
    "eos_token_id": 0,
    "logits_scaling": 8.0,
    "mlp_bias": False,
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
}
GRANITE.pop("pretraining_tp")
GLM4 = SMALL | {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [EOS, TURN, PAD],
    "head_dim": 16,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "model_type": "glm4",
    "num_key_value_heads": 2,
    "pad_token_id": EOS,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.0.dev0",
    "use_cache": True,
}
LFM2 = SMALL | {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 48,
    "block_ff_dim": 96,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 16,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": BOS,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 48,
    "conv_dim_out": 48,
    "conv_use_xavier_init": True,
    "eos_token_id": TURN,
    "full_attn_idxs": [1, 3],
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_heads": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.0.dev0",
    "use_cache": True,
    "use_pos_enc": True,
}
LINEAR_ATTENTION = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "num_hidden_layers": 4,
}
QWEN35 = (
    SMALL
    | LINEAR_ATTENTION
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "eos_token_id": TURN,
        "full_attention_interval": 4,
        "head_dim": 16,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "intermediate_size": 80,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "max_position_embeddings": 512,
        "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_5_text",
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
    }
)
MAMBA = {
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 12,
    "mamba_proj_bias": False,
}
GRANITE4 = (
    {k: v for k, v in GRANITE.items() if k != "mlp_bias"}
    | MAMBA
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "init_method": "mup",
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "num_experts_per_tok": 0,
        "num_hidden_layers": 4,
        "num_local_experts": 0,
        "output_router_logits": False,
        "pad_token_id": PAD,
        "position_embedding_type": "nope",
        "router_aux_loss_coef": 0.0,
        "shared_intermediate_size": 80,
    }
)
COHERE2 = SMALL | {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "cache_implementation": "hybrid",
    "eos_token_id": EOS,
    "head_dim": 8,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 512,
    "model_type": "cohere2",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "order_of_interleaved_layers": "local_attn_first",
    "pad_token_id": 0,
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 8,
    "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0.dev0",
    "use_cache": True,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
}
FALCON_H1 = (
    {k: v for k, v in LLAMA.items() if k != "pretraining_tp"}
    | MAMBA
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375,
        "attn_layer_indices": None,
        "embedding_multiplier": 5.656854249492381,
        "head_dim": 16,
        "key_multiplier": 0.39062499999999994,
        "lm_head_multiplier": 0.0390625,
        "mamba_d_ssm": 96,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": False,
        "mamba_use_mlp": True,
        "mlp_bias": False,
        "mlp_expansion_factor": 8,
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "model_type": "falcon_h1",
        "num_logits_to_keep": 1,
        "pad_token_id": 0,
        "projectors_bias": False,
        "rope_theta": 100000000000.0,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587,
    }
)
NEMOTRON_H = {k: v for k, v in LLAMA.items() if k not in ("pretraining_tp", "rms_norm_eps")} | {
    "architectures": ["NemotronHForCausalLM"],
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 16,
    "hidden_dropout": 0.0,
    "hybrid_override_pattern": "M-M*-M-",
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 10,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 6,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 2,
    "num_hidden_layers": 7,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 16,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
}
for gone in ("hidden_act", "rope_scaling", "rope_theta"):
    NEMOTRON_H.pop(gone)
GEMMA2 = SMALL | {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": BOS,
    "cache_implementation": "hybrid",
    "eos_token_id": EOS,
    "final_logit_softcapping": 30.0,
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "model_type": "gemma2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 8,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
}
GEMMA3 = GEMMA2 | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window_pattern": 6,
}
del GEMMA3["hidden_act"]
GPT_OSS = {k: v for k, v in LLAMA.items() if k not in ("pretraining_tp", "bos_token_id")} | {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 2,
    "head_dim": 16,
    "initial_context_length": 64,
    "layer_types": [LOCAL, FULL],
    "model_type": "gpt_oss",
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "output_router_logits": False,
    "pad_token_id": PAD,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 8,
    "swiglu_limit": 7.0,
}
PHI3 = {k: v for k, v in LLAMA.items() if k not in ("pretraining_tp", "attention_bias")} | {
    "architectures": ["Phi3ForCausalLM"],
    "embd_pdrop": 0.0,
    "model_type": "phi3",
    "original_max_position_embeddings": 512,
    "pad_token_id": PAD,
    "resid_pdrop": 0.0,
    "sliding_window": 7,
}
LONGROPE = {
    "long_factor": [1.08, 2.1, 8.3, 31.4],
    "short_factor": [1.05, 1.1, 1.4, 2.6],
    "type": "longrope",
}
# DeepSeek's fields as its files have them; those that are not here are in every file.
LATENT = SMALL | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "kv_lora_rank": 20,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 24,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 12,
}
KIMI = {
    k: v
    for k, v in LATENT.items()
    if k
    not in (
        *(
            "attention_bias",
            "aux_loss_alpha",
            "max_position_embeddings",
            "n_group",
            "pretraining_tp",
        ),
        *("n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
        *("scoring_func", "seq_aux", "topk_method"),
    )
} | {
    "architectures": ["KimiLinearForCausalLM"],
    "head_dim": 72,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "head_dim": 12,
        "kda_layers": [1, 2, 4],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 512,
    "model_type": "kimi_linear",
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "routed_scaling_factor": 2.446,
    "use_grouped_topk": True,
}
DEEPSEEK_ROPE = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64,
    "type": "yarn",
}
DEEPSEEK_V2 = LATENT | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "rope_scaling": DEEPSEEK_ROPE,
}
DEEPSEEK_V3 = LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "model_type": "deepseek_v3",
    "n_group": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 28,
    "rope_scaling": DEEPSEEK_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
}
MOONLIGHT = DEEPSEEK_V3 | {
    "n_group": 1,
    "n_shared_experts": 2,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
}
ENDS = {"bos_token_id": BOS, "eos_token_id": [EOS, TURN], "do_sample": True, "temperature": 0.6}

# name: (config.json, generation_config.json or None, where the chat template is, if anywhere)
MODELS: dict[str, tuple[dict, dict | None, str | None]] = {
    "Llama-3.2-1B": (
        LLAMA
        | {
            "head_dim": 8,
            "mlp_bias": False,
            "rope_scaling": LLAMA3_ROPE | {"factor": 32.0},
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        {"_from_model_config": True, "bos_token_id": BOS, "eos_token_id": EOS},
        None,
    ),
    "Llama-3.1-8B-Instruct": (
        LLAMA
        | {
            "eos_token_id": [EOS, PAD, TURN],
            "mlp_bias": False,
            "rope_scaling": LLAMA3_ROPE,
            "rope_theta": 500000.0,
        },
        ENDS | {"eos_token_id": [EOS, PAD, TURN], "top_p": 0.9},
        "tokenizer_config.json",
    ),
    "Llama-2-7b-32k": (
        LLAMA | {"pad_token_id": 0, "rope_scaling": {"factor": 8.0, "type": "linear"}},
        None,
        None,
    ),
    "SmolLM2-135M-Instruct": (
        LLAMA
        | {
            "bos_token_id": BOS,
            "eos_token_id": TURN,
            "pad_token_id": TURN,
            "is_llama_config": True,
            "rope_interleaved": False,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
        {"bos_token_id": BOS, "eos_token_id": TURN, "pad_token_id": TURN},
        "chat_template.jinja",
    ),
    "TinyLlama-1.1B-Chat": (
        LLAMA,
        {"bos_token_id": BOS, "eos_token_id": EOS, "max_length": 2048, "pad_token_id": 0},
        "tokenizer_config.json",
    ),
    "Qwen2.5-0.5B-Instruct": (
        QWEN2,
        {
            "bos_token_id": PAD,
            "pad_token_id": PAD,
            "do_sample": True,
            "eos_token_id": [TURN, PAD],
            "repetition_penalty": 1.0,
            "temperature": 0.7,
            "top_k": 20,
        },
        "tokenizer_config.json",
    ),
    "Qwen2.5-7B": (
        QWEN2 | {"eos_token_id": PAD, "tie_word_embeddings": False, "use_mrope": False},
        {"bos_token_id": PAD, "do_sample": False, "eos_token_id": PAD, "max_new_tokens": 2048},
        "tokenizer_config.json",
    ),
    "Qwen3-0.6B": (
        QWEN3,
        {
            "bos_token_id": PAD,
            "do_sample": True,
            "eos_token_id": [TURN, PAD],
            "pad_token_id": PAD,
            "top_p": 0.95,
        },
        "tokenizer_config.json",
    ),
    "granite-3.3-2b-base": (
        GRANITE,
        {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
        None,
    ),
    "granite-4.0-h-tiny": (
        GRANITE4
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
        | {"shared_intermediate_size": 40},
        {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD},
        None,
    ),
    "granite-4.0-h-micro": (GRANITE4, {"eos_token_id": EOS, "pad_token_id": PAD}, None),
    "granite-4.0-micro": (
        GRANITE4 | {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
        {"eos_token_id": EOS, "pad_token_id": PAD},
        None,
    ),
    "Bamba-9B-v2": (
        {k: v for k, v in LLAMA.items() if k not in ("pretraining_tp", "rope_scaling")}
        | MAMBA
        | {
            "architectures": ["BambaForCausalLM"],
            "attn_layer_indices": [1, 3],
            "mlp_bias": False,
            "model_type": "bamba",
            "num_hidden_layers": 4,
            "num_logits_to_keep": 1,
            "pad_token_id": PAD,
            "z_loss_coefficient": 0.0001,
        },
        {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
        None,
    ),
    "c4ai-command-r7b-12-2024": (COHERE2, {"eos_token_id": EOS, "pad_token_id": 0}, None),
    "Falcon-H1-0.5B-Instruct": (FALCON_H1, {"eos_token_id": EOS, "pad_token_id": 0}, None),
    "Nemotron-H-8B-Base-8K": (NEMOTRON_H, {"eos_token_id": EOS, "pad_token_id": 0}, None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        NEMOTRON_H
        | {
            "hybrid_override_pattern": "MEM*E",
            "intermediate_size": 24,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
            "topk_group": 1,
        },
        {"eos_token_id": EOS, "pad_token_id": 0},
        None,
    ),
    "Kimi-Linear-48B-A3B-Instruct": (KIMI, {"eos_token_id": EOS, "pad_token_id": 0}, None),
    "GLM-4-9B-0414": (GLM4, {"eos_token_id": [EOS, TURN, PAD], "pad_token_id": EOS}, None),
    "LFM2-1.2B": (
        LFM2,
        {"bos_token_id": BOS, "eos_token_id": TURN, "pad_token_id": 0},
        "chat_template.jinja",
    ),
    "Olmo-Hybrid-7B": (
        {k: v for k, v in OLMO2.items() if k not in ("rope_theta", "rope_scaling")}
        | LINEAR_ATTENTION
        | {
            "architectures": ["OlmoHybridForCausalLM"],
            "bos_token_id": None,
            "layer_types": [*["linear_attention"] * 3, FULL],
            "linear_allow_neg_eigval": True,
            "model_type": "olmo_hybrid",
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
        },
        {"eos_token_id": EOS, "pad_token_id": PAD},
        None,
    ),
    "Qwen3-Next-80B-A3B-Instruct": (
        {k: v for k, v in QWEN3.items() if k not in ("max_window_layers", "sliding_window")}
        | EXPERTS
        | LINEAR_ATTENTION
        | {
            "architectures": ["Qwen3NextForCausalLM"],
            "full_attention_interval": 4,
            "mlp_only_layers": [],
            "model_type": "qwen3_next",
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "shared_expert_intermediate_size": 40,
            "tie_word_embeddings": False,
        },
        {"bos_token_id": PAD, "eos_token_id": [TURN, PAD], "pad_token_id": PAD},
        "tokenizer_config.json",
    ),
    "Qwen3.5-9B, text": (QWEN35, {"eos_token_id": [TURN, PAD], "pad_token_id": PAD}, None),
    "Qwen3.5-35B-A3B, text": (
        {k: v for k, v in QWEN35.items() if k != "intermediate_size"}
        | {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 24,
        },
        {"eos_token_id": [TURN, PAD], "pad_token_id": PAD},
        None,
    ),
    "GLM-4.5": (
        {k: v for k, v in GLM4.items() if k != "rms_norm_eps"}
        | {
            "architectures": ["Glm4MoeForCausalLM"],
            "first_k_dense_replace": 1,
            "model_type": "glm4_moe",
            "moe_intermediate_size": 24,
            "n_group": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 3,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000,
            "routed_scaling_factor": 2.5,
            "topk_group": 1,
            "use_qk_norm": True,
        },
        {"eos_token_id": [EOS, TURN, PAD], "pad_token_id": EOS},
        None,
    ),
    "MiniMax-M2": (
        {k: v for k, v in MISTRAL.items() if k not in ("rope_scaling", "sliding_window")}
        | {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "head_dim": 16,
            "model_type": "minimax_m2",
            "num_experts_per_tok": 3,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rotary_dim": 8,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
        },
        {"bos_token_id": BOS, "eos_token_id": EOS},
        None,
    ),
    "Mistral-7B-v0.1": (MISTRAL | {"sliding_window": 128, "rope_theta": 10000.0}, None, None),
    "Mistral-7B-Instruct-v0.3": (
        MISTRAL,
        {"_from_model_config": True, "bos_token_id": BOS, "eos_token_id": EOS},
        "tokenizer_config.json",
    ),
    "Mistral-Nemo-Base": (MISTRAL | {"head_dim": 16}, None, None),
    "Mixtral-8x7B-v0.1": (
        {k: v for k, v in MISTRAL.items() if k != "attention_bias"}
        | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.02,
        },
        {"_from_model_config": True, "bos_token_id": BOS, "eos_token_id": EOS},
        None,
    ),
    "OLMo-2-1124-7B": (OLMO2, {"eos_token_id": EOS, "pad_token_id": PAD}, None),
    "OLMo-2-1124-7B-Instruct": (
        OLMO2 | {"torch_dtype": "bfloat16"},
        {"_from_model_config": True, "eos_token_id": EOS, "pad_token_id": PAD},
        "chat_template.jinja",
    ),
    "OLMo-3-1025-7B": (OLMO3, {"eos_token_id": EOS, "pad_token_id": PAD}, None),
    "SmolLM3-3B": (SMOLLM3, {"eos_token_id": EOS, "pad_token_id": PAD}, "chat_template.jinja"),
    "gemma-2-2b": (GEMMA2, {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0}, None),
    "gemma-3-1b-it": (
        GEMMA3,
        {"bos_token_id": BOS, "eos_token_id": [EOS, TURN], "pad_token_id": 0, "top_k": 64},
        "tokenizer_config.json",
    ),
    "gpt-oss-20b": (GPT_OSS, {"eos_token_id": EOS, "pad_token_id": PAD}, None),
    "Phi-3-mini-4k-instruct": (PHI3 | {"attention_bias": False}, ENDS, None),
    "Phi-3-mini-128k-instruct": (
        PHI3
        | {
            "original_max_position_embeddings": 12,
            "rope_scaling": LONGROPE,
            "sliding_window": 262144,
        },
        ENDS,
        None,
    ),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2, {"bos_token_id": BOS, "eos_token_id": EOS}, None),
    "DeepSeek-V3": (DEEPSEEK_V3, None, None),
    "Moonlight-16B-A3B": (MOONLIGHT, {"eos_token_id": EOS}, "tokenizer_config.json"),
    "OLMoE-1B-7B-0924": (
        LLAMA
        | {
            "architectures": ["OlmoeForCausalLM"],
            "clip_qkv": None,
            "eos_token_id": EOS,
            "intermediate_size": 40,
            "model_type": "olmoe",
            "norm_topk_prob": False,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "output_router_logits": False,
            "pad_token_id": 1,
            "router_aux_loss_coef": 0.01,
        },
        {"eos_token_id": EOS, "pad_token_id": 1},
        None,
    ),
    "Qwen1.5-MoE-A2.7B": (
        QWEN2
        | EXPERTS
        | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "eos_token_id": PAD,
            "model_type": "qwen2_moe",
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 56,
            "tie_word_embeddings": False,
        },
        {"bos_token_id": PAD, "eos_token_id": PAD, "max_new_tokens": 2048},
        None,
    ),
    "Qwen3-30B-A3B": (
        QWEN3
        | EXPERTS
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        {"bos_token_id": PAD, "eos_token_id": [TURN, PAD], "pad_token_id": PAD},
        "tokenizer_config.json",
    ),
    "pythia-160m": (NEOX, None, None),
    "pythia-1.4b-deduped": (NEOX | {"use_parallel_residual": True, "rotary_pct": 0.5}, None, None),
    "gpt-neox-20b": (
        NEOX
        | {"attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0},
        {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 0},
        None,
    ),
    "gpt2": (
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": EOS,
            "embd_pdrop": 0.1,
            "eos_token_id": EOS,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 64,
            "n_embd": 48,
            "n_head": 6,
            "n_layer": 2,
            "n_positions": 64,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": V,
        },
        {"_from_model_config": True, "bos_token_id": EOS, "eos_token_id": EOS},
        None,
    ),
    "bloom-560m": (
        {
            "apply_residual_connection_post_layernorm": False,
            "architectures": ["BloomForCausalLM"],
            "attention_dropout": 0.0,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 3,
            "unk_token_id": 0,
            "hidden_dropout": 0.0,
            "hidden_size": 48,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "masked_softmax_fusion": True,
            "model_type": "bloom",
            "n_head": 6,
            "n_inner": None,
            "n_layer": 2,
            "offset_alibi": 100,
            "pretraining_tp": 1,
            "seq_length": 512,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "use_cache": True,
            "vocab_size": V,
        },
        None,
        None,
    ),
    "opt-125m": (
        {
            "_name_or_path": "facebook/opt-125m",
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "architectures": ["OPTForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 2,
            "do_layer_norm_before": True,
            "dropout": 0.1,
            "eos_token_id": 2,
            "ffn_dim": 80,
            "hidden_size": 48,
            "init_std": 0.02,
            "layerdrop": 0.0,
            "max_position_embeddings": 64,
            "model_type": "opt",
            "num_attention_heads": 6,
            "num_hidden_layers": 2,
            "pad_token_id": 1,
            "prefix": "</s>",
            "torch_dtype": "float16",
            "use_cache": True,
            "vocab_size": V,
            "word_embed_proj_dim": 48,
        },
        {"_from_model_config": True, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
        None,
    ),
}


def tokenizer():
    """A tokenizer of 90 characters and four special tokens; it puts <s> before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    characters = [chr(code) for code in range(33, 123)]
    made = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="!"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<s>", "</s>", "<turn>", "<pad>"])
    special = [("<s>", BOS)]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=special
    )
    return made


def write_tokenizer(folder: Path, template_in: str | None) -> None:
    """Write tokenizer.json and its settings; template_in: the file that gets the chat template."""
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False, "special": True, "__type": "AddedToken"},
        "pad_token": None,
        "model_max_length": 131072,
    }
    if template_in == "chat_template.jinja":
        (folder / template_in).write_text(CHAT)
    elif template_in:
        settings["chat_template"] = CHAT
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))


def write(name: str, folder: Path, prompt: list[int], seed: int = 1):
    """Write a model of these fields with random weights; return transformers' model.

    Its greedy continuation of `prompt` comes to the last of its ends: the row of a token that it
    chooses and the row of that end are exchanged.
    """
    import transformers

    config, generation, template_in = MODELS[name]
    folder.mkdir(parents=True)
    for file, value in (("config.json", config), ("generation_config.json", generation)):
        if value is not None:
            (folder / file).write_text(json.dumps(value, indent=2))
    write_tokenizer(folder, template_in)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for p in theirs.parameters():
        spread = 0.5 if p.dim() > 1 else 0.15
        p.data = torch.randn(p.shape, generator=generator) * spread + (p.dim() == 1)
    ends = (generation or {}).get("eos_token_id", config["eos_token_id"])
    end = ends[-1] if isinstance(ends, list) else ends
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    new = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, **greedy)[0, len(prompt) :]
    known = {*prompt, *range(4), *range(BOS, V)}
    token = next(t for t in new.tolist()[4:] if t not in known)
    matrices = [theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight]
    for matrix in {id(m): m for m in matrices}.values():
        matrix.data[[token, end]] = matrix.data[[end, token]]
    published = (folder / "config.json").read_bytes()
    made = (folder / "generation_config.json").read_bytes() if generation is not None else None
    # transformers does not save some that it has read.
    theirs.generation_config = transformers.GenerationConfig()
    theirs.save_pretrained(folder)
    (folder / "config.json").write_bytes(published)
    (folder / "generation_config.json").unlink()
    if made is not None:
        (folder / "generation_config.json").write_bytes(made)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
