"""Mixers against the layers of transformers: if this failed, a hybrid model that somebody continues
would be another one here.

transformers computes in fp32 inside; with float32 replaced by float64 its plain torch forms are
exact references.
"""

import importlib
import itertools

import pytest
import torch
from compare import assert_within
from test_mixers import mixer_of, offsets_of, shape, tokens

transformers = pytest.importorskip("transformers")

LENGTH = 100  # two chunks, the second one not full


class Exact:
    """torch, in which fp32 is fp64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    for family in ("qwen3_next", "kimi_linear", "bamba", "nemotron_h", "lfm2"):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        monkeypatch.setattr(module, "torch", Exact())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def layer_of(family: str, name: str, **options) -> torch.nn.Module:
    """A layer of transformers with random weights, in fp64."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config_name = name.removesuffix(next(s for s in ENDS if name.endswith(s))) + "Config"
    config = getattr(transformers, config_name)(hidden_size=24, rms_norm_eps=1e-5, **options)
    torch.manual_seed(0)
    layer = getattr(module, name)(config, 0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


ENDS = ("GatedDeltaNet", "DeltaAttention", "Mixer", "Mamba2Mixer", "ShortConv")[::-1]


def rows(*parts: torch.Tensor, heads: int) -> torch.Tensor:
    """Matrices with rows of each head, joined head by head: (heads, rows of a head, h)."""
    return torch.cat([part.detach().unflatten(0, (heads, -1)) for part in parts], 1)


def load(mixer: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Load weights by the ends of the names of a mixer's parameters, all of them."""
    own = {p.spec.name.removeprefix("blocks.0.mixer."): p for p in mixer.parameters()}
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name].detach().view(parameter.shape))


def gated_delta_net():
    theirs = layer_of(
        "qwen3_next",
        "Qwen3NextGatedDeltaNet",
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=5,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    qkvz, ba = theirs.in_proj_qkvz.weight, theirs.in_proj_ba.weight
    q, k, v = theirs.conv1d.weight.squeeze(1).split([16, 16, 30])
    return theirs, {
        "in.weight": rows(qkvz, ba, heads=2),
        "conv": rows(q, k, v, heads=2),
        "a_log": theirs.A_log,
        "dt_bias": theirs.dt_bias,
        "norm.weight": theirs.norm.weight,
        "out.weight": theirs.out_proj.weight,
    }


def kda():
    theirs = layer_of(
        "kimi_linear",
        "KimiLinearDeltaAttention",
        linear_num_heads=6,
        linear_head_dim=5,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
    )
    forget = theirs.forget_gate
    parts = [theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.b_proj]
    return theirs, {
        "in.weight": rows(*(part.weight for part in parts), heads=6),
        "low.weight": torch.cat([forget.f_a_proj.weight, theirs.g_a_proj.weight]),
        "decay.weight": forget.f_b_proj.weight,
        "gate.weight": theirs.g_b_proj.weight,
        "conv": rows(*theirs.conv1d.weight.squeeze(1).chunk(3), heads=6),
        "a_log": forget.A_log,
        "dt_bias": forget.dt_bias,
        "norm.weight": theirs.o_norm.weight,
        "out.weight": theirs.o_proj.weight,
    }


def mamba2(theirs: torch.nn.Module):
    values = 6 * theirs.head_dim
    z, x, b, c, dt = theirs.in_proj.weight.split([values, values, 16, 16, 6])
    taps_x, taps_b, taps_c = theirs.conv1d.weight.squeeze(1).split([values, 16, 16])
    bias_x, bias_b, bias_c = theirs.conv1d.bias[:, None].split([values, 16, 16])
    return theirs, {
        "in.weight": rows(z, x, dt, heads=6),
        "keys.weight": rows(b, c, heads=2),
        "conv": taps_x,
        "conv_keys": rows(taps_b, taps_c, heads=2),
        "conv_bias": bias_x,
        "conv_keys_bias": rows(bias_b, bias_c, heads=2),
        "a_log": theirs.A_log,
        "dt_bias": theirs.dt_bias,
        "d": theirs.D,
        "norm.weight": theirs.norm.weight,
        "out.weight": theirs.out_proj.weight,
    }


def bamba():
    return mamba2(
        layer_of(
            "bamba",
            "BambaMixer",
            mamba_n_heads=6,
            mamba_d_head=4,
            mamba_d_state=8,
            mamba_n_groups=2,
            mamba_expand=1,
            mamba_chunk_size=64,
            num_hidden_layers=1,
        )
    )


def nemotron_h():
    return mamba2(
        layer_of(
            "nemotron_h",
            "NemotronHMamba2Mixer",
            mamba_num_heads=6,
            mamba_head_dim=5,
            ssm_state_size=8,
            n_groups=2,
            chunk_size=64,
            layer_norm_epsilon=1e-5,
            layers_block_type=["mamba"],
        )
    )


def short_conv():
    theirs = layer_of(
        "lfm2",
        "Lfm2ShortConv",
        conv_L_cache=4,
        conv_bias=False,
        layer_types=["conv"],
        num_hidden_layers=1,
    )
    return theirs, {
        "in.weight": theirs.in_proj.weight,
        "conv": theirs.conv.weight,
        "out.weight": theirs.out_proj.weight,
    }


CASES = {
    "gated_delta_net": (gated_delta_net, {}),
    "kda": (kda, {"mixer": "kda", "mixer_key_size": 5}),
    "bamba": (bamba, {"mixer": "mamba2", "mixer_value_size": 4}),
    "nemotron_h": (nemotron_h, {"mixer": "mamba2"}),
    "short_conv": (short_conv, {"mixer": "short_conv", "mixer_conv_bias": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mixer_is_the_layer_of_transformers(case):
    make, options = CASES[case]
    theirs, weights = make()
    mixer = mixer_of(shape(seq_length=LENGTH, **options))
    load(mixer, weights)
    x = tokens(shape(seq_length=LENGTH)).requires_grad_()
    ours = mixer(x, None, None)
    expected = theirs(x.transpose(0, 1)).transpose(0, 1)
    assert_close(ours, expected)
    scale = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = [torch.autograd.grad((y * scale).sum(), x)[0] for y in (ours, expected)]
    assert_close(*gradients)


@pytest.mark.parametrize("case", CASES)
def test_a_packed_sample_is_its_documents_alone_in_transformers(case):
    make, options = CASES[case]
    theirs, weights = make()
    mixer = mixer_of(shape(seq_length=LENGTH, **options))
    load(mixer, weights)
    x = tokens(shape(seq_length=LENGTH), samples=1)
    cuts = [0, 1, 3, 63, 66, LENGTH]
    ours = mixer(x, offsets_of(cuts[:-1], LENGTH, 1), None)
    documents = [x[a:b].transpose(0, 1) for a, b in itertools.pairwise(cuts)]
    assert_close(ours, torch.cat([theirs(part).transpose(0, 1) for part in documents]))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.dtype == torch.float64
    assert_within(((ours - theirs).abs().max() / theirs.abs().max()).item(), 1e-12)
