"""transformers' Qwen3-MoE on one rank, with Trine's initial weights: a peer in benchmarks/peers.py.

model = qwen3_moe(shape, weights, "eager")       # or grouped_mm: how experts are computed
losses = model(tokens)                           # logits, (b, s, V)
"""

from pathlib import Path

import numpy as np
import torch
from peer_worker import Shape
from torch import Tensor, nn


class Qwen3Moe(nn.Module):
    """Tokens (b, s) -> logits (b, s, V)."""

    def __init__(self, shape: Shape, implementation: str):
        """implementation: transformers' name of the kernels of the experts."""
        super().__init__()
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        config = Qwen3MoeConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            head_dim=shape.hidden // shape.heads,
            max_position_embeddings=shape.seq,
            num_experts=shape.experts,
            num_experts_per_tok=shape.chosen,
            moe_intermediate_size=shape.ffn,
            norm_topk_prob=True,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
        )
        self.model = Qwen3MoeForCausalLM(config).train()
        self.model.set_experts_implementation(implementation)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def qwen3_moe(shape: Shape, weights: str, implementation: str) -> Qwen3Moe:
    """The model with the initial weights of the folder `weights`, as peer_trine.py writes them."""
    built = Qwen3Moe(shape, implementation)
    built.model.load_state_dict(theirs(shape, Path(weights)))
    return built


def theirs(shape: Shape, folder: Path) -> dict[str, Tensor]:
    """The weights by their names in transformers."""

    def read(name: str) -> Tensor:
        return torch.from_numpy(np.load(folder / f"{name}.npy"))

    d = shape.hidden // shape.heads
    state = {
        "model.embed_tokens.weight": read("tokens.weight"),
        "model.norm.weight": read("norm.weight"),
        "lm_head.weight": read("head.weight"),
    }
    for i in range(shape.layers):
        ours = f"blocks.{i}"
        layer = f"model.layers.{i}"
        qkv = read(f"{ours}.qkv.weight").view(shape.heads, 3, d, shape.hidden)
        up = read(f"{ours}.mlp.experts.up.weight")
        down = read(f"{ours}.mlp.experts.down.weight")
        state |= {
            f"{layer}.input_layernorm.weight": read(f"{ours}.norm1.weight"),
            f"{layer}.post_attention_layernorm.weight": read(f"{ours}.norm2.weight"),
            f"{layer}.self_attn.o_proj.weight": read(f"{ours}.out.weight"),
            f"{layer}.mlp.gate.weight": read(f"{ours}.mlp.router.weight"),
            f"{layer}.mlp.experts.gate_up_proj": up.view(shape.experts, -1, shape.hidden),
            f"{layer}.mlp.experts.down_proj": down.view(shape.experts, shape.hidden, -1),
        }
        for number, kind in enumerate("qkv"):
            rows = qkv[:, number].reshape(-1, shape.hidden)
            state[f"{layer}.self_attn.{kind}_proj.weight"] = rows
        for kind in "qk":
            scale = read(f"{ours}.attention.{kind}_norm.weight")
            state[f"{layer}.self_attn.{kind}_norm.weight"] = scale
    return state
