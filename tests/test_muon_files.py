"""Muon on the matrices of published files: if this failed, tuning would differ from public loops.

The reference has each matrix of a folder of transformers as one, and its own momentum, iteration
and decay, all in fp64.
"""

import golden_worker
import pytest
import torch

import data
import trainer
from checkpointing import hf_export
from config import validation
from config.past import Past, Start
from optim import muon

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
LATENT = {
    "hidden": 24,
    "heads": 4,
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tied": False,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "ffn_hidden": 40,
    "experts": 4,
    "experts_per_token": 2,
    "expert_ffn_hidden": 16,
    "shared_ffn_hidden": 32,
    "first_dense_layers": 1,
    "router_normalised": False,
}
MODELS = {
    "latent queries": LATENT | {"q_lora_rank": 10},
    "whole queries": LATENT,
    "ordinary": {
        "hidden": 24,
        "heads": 4,
        "kv_heads": 2,
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "ffn_hidden": 40,
    },
}
TRAINED = {"optimizer": "muon", "precision": "fp64", "steps": 3, "lr": LR, "clip_grad": 0.0}
OLD = "--layers 1 --hidden 16 --heads 2 --steps 8"  # the words of a run of before
TRAINED |= {"weight_decay": DECAY, "lr_schedule": "constant", "muon_adamw_lr": 0.0}


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Keller Jordan's five steps, on the side that has fewer rows."""
    if len(matrix) > len(matrix[0]):
        return orthogonal(matrix.t()).t()
    x = matrix / matrix.norm()
    for _ in range(5):
        square = x @ x.t()
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def in_files(model, ours: dict) -> dict:
    """Our tensors as the matrices of a folder, by their names there."""
    found = {}
    for rule in hf_export.rules(model):
        if rule.name in ours:
            found |= zip(rule.theirs, rule.to_theirs(ours[rule.name]))
    return found


def largest_difference(case: dict, monkeypatch) -> float:
    """Train three steps; the largest difference of a matrix from the reference's, of its size."""
    config = validation.check(golden_worker.options(TRAINED | case), 1)
    model, update = config.model, muon.Muon.update
    gradients: list[dict] = []  # of each step, by our names
    weights: list[dict] = []  # before the first step, and after each

    def opened(rule: muon.Muon, flat: list) -> dict:
        """The tensors in flat sections, by our names."""
        return {
            placed.spec.name: part[placed.offset :][: torch.Size(placed.shape).numel()]
            .view(placed.shape)
            .clone()
            for section, part in zip(rule.owners.sections, flat)
            for placed in section.parameters
        }

    def observed(rule: muon.Muon, flat: list, lr: float) -> None:
        step = len(updates) // sets
        for kept, tensors in ((gradients, flat), (weights, rule.masters)):
            while len(kept) <= step:
                kept.append({})
            kept[step] |= opened(rule, tensors)
        update(rule, flat, lr)
        updates.append(rule)

    state, splits = trainer.build(config), data.build(config)
    sets = sum(isinstance(group.rule, muon.Muon) for group in state.optimizer.update_sets)
    updates: list[muon.Muon] = []
    monkeypatch.setattr(muon.Muon, "update", observed)
    for step in range(3):
        trainer.step(state, splits.train, 8 * step, LR)
    weights.append({})
    for rule in updates[-sets:]:
        weights[-1] |= opened(rule, rule.masters)
    state.reader.close()

    expected = in_files(model, weights[0])
    momenta = {name: torch.zeros_like(matrix) for name, matrix in expected.items()}
    for step in range(3):
        for name, gradient in in_files(model, gradients[step]).items():
            momenta[name] = MOMENTUM * momenta[name] + (1 - MOMENTUM) * gradient
            look = MOMENTUM * momenta[name] + (1 - MOMENTUM) * gradient
            scale = 0.2 * max(gradient.shape) ** 0.5
            expected[name] = (1 - LR * DECAY) * expected[name] - LR * scale * orthogonal(look)
    assert all(matrix.dim() == 2 for matrix in expected.values())
    return max(
        float((matrix - expected[name]).abs().max() / expected[name].abs().max())
        for name, matrix in in_files(model, weights[-1]).items()
    )


@pytest.mark.parametrize("name", MODELS)
def test_each_matrix_of_the_files_is_updated_as_one(name, monkeypatch):
    assert largest_difference(MODELS[name], monkeypatch) < 1e-12


@pytest.mark.parametrize("mode", ["split", "head"])
def test_divided_matrices_of_latent_attention_are_other_updates(mode, monkeypatch):
    case = MODELS["latent queries"] | {"muon_qkv": mode}
    assert largest_difference(case, monkeypatch) > 1e-3


def test_a_resumed_run_keeps_the_division_that_it_had():
    from config.command_line import parse_request
    from config.inherited import Inherited, inherited

    saved = {"training": {"optimizer": "muon", "muon_qkv": "split", "steps": 4}, "data": {}}
    words = ["--resume", "runs/old", *OLD.split()]
    past = Past(4, 32, (Start(0, 0, ((0, 8),)),))

    def resumed(given):
        return Inherited(options=inherited(saved, given), past=past)

    assert parse_request(words, resumed=resumed).config.training.muon_qkv == "split"
    assert golden_worker.options({"optimizer": "muon"}).training.muon_qkv == "projection"
