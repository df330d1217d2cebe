"""Transformers' own model beside Trine on one rank, of any architecture that Trine exports.

It is loaded from a folder as an export writes it: `hf_config`, and the rules of each tensor.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from architecture.tensors import canonical_shapes
from benchmarks.peers.peer_trine import peers_name
from benchmarks.peers.peer_worker import Shape
from checkpointing import hf_export
from config import validation
from config.command_line import parse


class TransformersModel(nn.Module):
    """Tokens (b, s) -> logits (b, s, V)."""

    def __init__(self, folder: str, experts: str | None):
        """folder: of config and weights. experts: transformers' name of their kernels."""
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        self.model.config.use_cache = False
        if experts:
            self.model.set_experts_implementation(experts)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def transformers_model(shape: Shape, weights: str, experts: str | None = None) -> TransformersModel:
    """The model with the initial weights of the folder `weights`, as peer_trine.py writes them."""
    model = validation.check(parse(shape.options(1)), 1).model
    shapes = canonical_shapes(model)
    state: dict[str, Tensor] = {}
    for rule in hf_export.rules(model):
        ours = np.load(Path(weights) / f"{peers_name(rule.name)}.npy").reshape(shapes[rule.name])
        theirs = rule.to_theirs(torch.from_numpy(ours))
        state |= {name: part.clone() for name, part in zip(rule.theirs, theirs, strict=True)}
    with tempfile.TemporaryDirectory() as name:
        config = hf_export.hf_config(model, torch.float32)
        Path(name, "config.json").write_text(json.dumps(config))
        save_file(state, Path(name, hf_export.SINGLE), metadata={"format": "pt"})
        return TransformersModel(name, experts)
