"""muP: if this failed, the best rate of a small model would not be that of a large one.

The factors of tests are written as formulas of the papers that architecture/mup.py names.
"""

import dataclasses
import json
import math

import checkpoint_worker
import golden_worker
import pytest
import torch
from compare import assert_close
from test_export import command
from test_golden import check_lines, single_rank

import trainer
from architecture.mup import EXPONENTS, mup_of
from architecture.shape import ModelShape
from base.errors import UserError
from checkpointing.index import Index
from checkpointing.state import Progress
from config import validation
from config.command_line import make_model
from optim.muon import scale

BASE = {"layers": 2, "hidden": 32, "precision": "fp64", "global_batch_size": 4, "steps": 3}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "positions": "rotary"}
WIDE = BASE | LLAMA | {"hidden": 64, "heads": 8, "mup": 16, "seq_length": 16}
MOE = {"experts": 4, "experts_per_token": 2, "shared_ffn_hidden": 32, "shared_gate": True}


@pytest.mark.slow
def test_every_layout_equals_the_single_rank_run(tmp_path):
    check_lines("mup", tmp_path)


def built(options: dict) -> trainer.TrainState:
    """A run of one rank before its first step."""
    return trainer.build(validation.check(golden_worker.options(options), 1))


@pytest.mark.parametrize("more", [{}, {"optimizer": "muon"}, MOE | {"tied": False}])
def test_a_model_that_is_its_base_is_the_model_without_mup(more):
    """To the last bit."""
    at_base = {"mup": 32, "mup_base_layers": 2}
    with_mup = single_rank(json.dumps(BASE | more | at_base))
    without = single_rank(json.dumps(BASE | more))
    assert with_mup == without


def deviations(options: dict) -> dict[str, float]:
    """The root mean square of each tensor as it is drawn."""
    stages = built(options).stages
    return {p.spec.name: p.square().mean().sqrt().item() for p in stages.parameters()}


def test_initial_deviations_are_those_of_the_papers():
    """m is 4 and l is 4; the model has 8 blocks, and its base 2."""
    deep = WIDE | MOE | {"layers": 8, "mup_base_layers": 2, "init_std": 0.04, "hidden": 64}
    found = deviations(deep | {"tied": False, "positions": "learned"})
    expected = {
        "embedding.tokens.weight": 0.04,
        "embedding.positions.weight": 0.04,
        "head.weight": 0.04,
        "blocks.3.attention.qkv.weight": 0.04 / 2,
        "blocks.3.attention.out.weight": 0.04 / 2 / math.sqrt(2 * 2),
        "blocks.3.mlp.experts.up.weight": 0.04 / 2,
        "blocks.3.mlp.experts.down.weight": 0.04 / 2 / math.sqrt(2 * 2),
        "blocks.3.mlp.shared.down.weight": 0.04 / 2 / math.sqrt(2 * 2),
        "blocks.3.mlp.router.weight": 0.04 / 4,
        "blocks.3.mlp.shared_gate.weight": 0.04 / 4,
        "blocks.3.mlp_norm.weight": 1.0,
    }
    for name, deviation in expected.items():  # a sample of n numbers is off by 1 / sqrt(2 n)
        assert found[name] == pytest.approx(deviation, rel=0.3 if "gate" in name else 0.15), name


def moved(options: dict) -> dict[str, torch.Tensor]:
    """By how much the first step at the rate 1e-3 moves each tensor, over the rate."""
    state = built(options | {"weight_decay": 0.0, "lr": 1e-3, "lr_schedule": "constant"})
    before = {p.spec.name: p.detach().clone() for p in state.stages.parameters()}
    trainer.step(state, trainer.data.build(state.config).train, 0, 1e-3)
    return {
        p.spec.name: (p.detach() - before[p.spec.name]) / 1e-3 for p in state.optimizer.parameters
    }


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_step_of_adam_moves_each_parameter_by_its_rate(tied):
    """Adam's first step is the rate with the sign of the gradient, where there is a gradient."""
    steps = moved(WIDE | MOE | {"tied": tied, "adam_eps": 1e-30, "clip_grad": 0.0})
    rates = {"embedding": 1, "head": 1, "qkv": 1 / 4, "out": 1 / 4, "experts": 1 / 4}
    rates |= {"shared.": 1 / 4, "router": 1 / 4, "shared_gate": 1 / 4, "norm": 1}
    for name, step in steps.items():
        if name.endswith((".bias", ".load")):
            continue
        (rate,) = {
            rate for part, rate in rates.items() if part in name.replace("head.norm", "norm")
        }
        assert step.abs().max().item() == pytest.approx(rate, rel=1e-6), name


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
def test_muons_updates_have_the_spectral_norm_of_the_base(rule):
    """A square matrix at m 4 is moved by as much as at m 1."""
    norms = []
    for hidden in (16, 64):
        width = {"hidden": hidden, "heads": 2, "ffn_hidden": hidden}
        name = "blocks.0.attention.out.weight"
        update = moved(WIDE | width | {"optimizer": "muon", "muon_scale": rule})[name]
        factor = scale(rule, hidden, hidden) * (16 / hidden) ** (0.5 if rule[0] == "m" else 0.0)
        assert torch.linalg.matrix_norm(update, 2).item() == pytest.approx(factor, rel=0.35)
        norms.append(factor)
    assert norms[0] == pytest.approx(norms[1])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_rate_of_decay_stays(optimizer):
    """rate x decay is that of the base for every matrix."""
    options = WIDE | {"optimizer": optimizer, "weight_decay": 0.5, "tied": False}
    sets = built(options).optimizer.update_sets
    seen = set()
    for update_set in sets:
        if update_set.groups[0].key.no_decay:
            continue
        rule = update_set.rule
        decay = (
            rule.weight_decay
            if hasattr(rule, "weight_decay")
            else rule.optimizer.param_groups[0]["weight_decay"]
        )
        assert decay * update_set.rate == pytest.approx(0.5)
        seen.add(update_set.rate)
    assert len(seen) > 1


def test_adams_epsilon_falls_with_the_gradients():
    """CompleteP, table 1: 1 / m, and in blocks 1 / (m l)."""
    options = WIDE | {"layers": 4, "mup_base_layers": 2, "adam_eps": 1e-6, "tied": False}
    found = {}
    for update_set in built(options).optimizer.update_sets:
        for group in update_set.groups:
            for p, _ in group.places:
                found[p.spec.name] = update_set.rule.optimizer.param_groups[0]["eps"]
    assert found["embedding.tokens.weight"] == pytest.approx(1e-6 / 4)
    assert found["blocks.0.attention.qkv.weight"] == pytest.approx(1e-6 / 8)
    assert found["blocks.0.mlp_norm.weight"] == pytest.approx(1e-6 / 8)


def test_scales_of_the_model_follow_from_its_base():
    model = ModelShape(8, 64, 4, vocab_size=64, mup=16, mup_base_layers=2, mup_base_head_size=4)
    assert (model.logit_divisor, model.residual_multiplier) == (4.0, 0.25)
    assert model.query_scalar == 16**2 / 4  # scores are divided by 16 / sqrt(4)
    given = dataclasses.replace(model, logit_divisor=3.0)
    assert given.logit_divisor == 3.0, "a value that is given holds"
    assert mup_of(model).width == 4.0
    assert mup_of(model).depth == 4.0


def test_each_role_has_a_class_and_each_class_a_role():
    kinds = {each.kind for each in EXPONENTS.values()}
    assert kinds == {"input-like", "hidden", "output-like", "vector"}


# ---- Exports -------------------------------------------------------------------------------------

SHAPE = {"layers": 4, "hidden": 48, "heads": 6, "vocab_size": 61, "seq_length": 16}
MUP = {"mup": 12, "mup_base_layers": 2}
LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
EXPORTED = {
    "gpt2": MUP,
    "bloom": MUP | {"positions": "alibi", "embedding_norm": True},
    "llama": MUP | LLAMA | {"kv_heads": 2, "tied": False, "mup_base_head_size": 4},
    "granite": MUP | LLAMA | {"mup_base_head_size": 4},
    "qwen3": MUP | LLAMA | {"qk_norm": "head", "mup_base_head_size": 4, "norm_eps": 1e-6},
    "olmo2": MUP | LLAMA | {"block": "post-norm", "qk_norm": "full", "mup_base_head_size": 2},
    "mixtral": MUP | LLAMA | {"experts": 4, "experts_per_token": 2, "tied": False},
    "deepseek_v3": MUP
    | LLAMA
    | MOE
    | LATENT
    | {"shared_gate": False, "router": "sigmoid"}
    | {"shared_ffn_hidden": 128},
    "gemma3_text": LLAMA
    | {"mup_base_layers": 2, "query_scalar": 8, "block": "sandwich", "norm_plus_one": True}
    | {"activation": "geglu", "embedding_scaled": True, "qk_norm": "head", "norm_eps": 1e-6},
}


def save(out, options: dict):
    """A checkpoint of random weights: its folder, and the run's TrainState."""
    config = checkpoint_worker.make(out, save_weights_only=True, **(SHAPE | options))
    state, checkpoints = checkpoint_worker.build_run(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in state.stages.parameters():
            rows = p.spec.stop - p.spec.start if p.spec.dim == 0 else p.shape[0]
            if p.requires_grad:
                p[:rows].normal_(p.mean().round().item(), 0.15, generator=generator)
    checkpoints.after_step(Progress(1, checkpoint_worker.BATCH))
    checkpoints.close()
    return out / "checkpoints/step_00000001", state


@pytest.mark.parametrize("family", EXPORTED)
def test_an_export_computes_the_same_logits(family, tmp_path):
    """In transformers, with scales in weights but for granite, which has fields for them."""
    transformers = pytest.importorskip("transformers")
    folder, state = save(tmp_path, EXPORTED[family])
    command("export", "--to", "hf", "--family", family, folder, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (getattr(theirs.config, "logits_scaling", 1.0) == 4.0) == (family == "granite")
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(3))
    (stage,) = state.stages
    state.optimizer.finish_gathering()
    with torch.no_grad():
        logits = stage.head.logits(stage.hidden_states(tokens)).transpose(0, 1)[..., :61]
        expected = theirs.eval()(tokens).logits
    assert_close(logits, expected, 2e-5, scale=expected.abs().max().item())


def test_an_export_of_scales_that_are_given_is_refused_by_name(tmp_path):
    """Without muP nothing is folded: the field is named, as before."""
    folder, _ = save(tmp_path, LLAMA | {"logit_divisor": 2.0})
    with pytest.raises(UserError, match=r"needs logit_divisor 1.0, not 2.0"):
        command("export", "--to", "hf", "--family", "llama", folder, tmp_path / "hf")


def test_a_checkpoint_keeps_the_base(tmp_path):
    folder, _ = save(tmp_path, MUP)
    with Index(str(folder)) as index:
        model = make_model(index.attributes("model"), index.path)
    assert (model.mup, model.mup_base_layers, model.logit_divisor) == (12, 2, 4.0)
