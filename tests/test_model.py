"""The model's parts: if this failed, slopes or kernels would not be those that are printed."""

import pytest
import torch
from compare import assert_close

from architecture.shape import GATED, ModelShape
from base.errors import UserError
from checkpointing.hf_export import hf_config
from config import schema as configuration
from config.run_options import Training
from data import Batch
from distributed.mesh import Mesh
from layers.attention import attention_kernel
from layers.attention_masks import alibi_slopes
from model import ACTIVATIONS, Stage
from parallel import ParamFactory
from schedules import partition

transformers = pytest.importorskip("transformers")

V = 131


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 112])
def test_alibi_slopes_equal_transformers(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert_close(alibi_slopes(heads), theirs, 2e-6)


def test_an_exported_gpt2_keeps_all_its_learned_positions():
    shape = ModelShape(1, 8, 2, seq_length=16, max_positions=32, vocab_size=20)
    assert hf_config(shape, torch.float32)["n_positions"] == 32


# Formulas of activations without a gate, in x; with one, in the gate x and in up.
FORMULAS = {
    "gelu": lambda x: x * (1 + (x / 2**0.5).erf()) / 2,  # arXiv 1606.08415
    "gelu_tanh": lambda x: x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()) / 2,
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x**2 * (x > 0),  # arXiv 2109.08668
    "swiglu": lambda x, up: x / (1 + (-x).exp()) * up,  # arXiv 2002.05202
    "geglu": lambda x, up: FORMULAS["gelu_tanh"](x) * up,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_its_formula(name):
    """All other tests compare runs with one another, and would have the same mistake twice."""
    x = torch.linspace(-4, 4, 40, dtype=torch.float64).view(2, 20).requires_grad_()
    parts = x.chunk(2, -1) if name in GATED else (x,)
    expected, found = FORMULAS[name](*parts), ACTIVATIONS[name](x)
    assert_close(found, expected, 1e-12)
    weights = torch.linspace(1, 2, found.numel(), dtype=torch.float64).view_as(found)
    gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected)]
    assert_close(*gradients, 1e-12)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("positions", ["learned", "alibi"])
def test_the_attention_kernel_that_is_printed_is_asked_for_as_in_training(
    kv_heads, positions, monkeypatch
):
    """torch chooses by these facts. It was asked for a batch of one, no gradient, equal heads."""
    asked = []

    def facts(q, k, v, enable_gqa, attn_mask=None, is_causal=False):
        of_mask = None if attn_mask is None else (attn_mask.shape, attn_mask.stride())
        # Of the strides the kernels look at the last one alone.
        of = [(t.shape, t.stride()[-1], t.dtype, t.requires_grad) for t in (q, k, v)]
        asked.append((of, of_mask, is_causal, enable_gqa))

    real, choose = torch.nn.functional.scaled_dot_product_attention, torch._fused_sdp_choice
    for module, name, run in (
        (torch.nn.functional, "scaled_dot_product_attention", real),
        (torch, "_fused_sdp_choice", choose),
    ):
        monkeypatch.setattr(
            module, name, lambda *qkv, run=run, **o: (facts(*qkv, **o), run(*qkv, **o))[1]
        )
    model = ModelShape(
        1, 32, 4, kv_heads=kv_heads, seq_length=16, vocab_size=V, positions=positions
    )
    factory, layout = ParamFactory(Mesh()), configuration.Layout(micro_batch_size=3)
    (spec,) = partition.stage_specs(model, layout, partition.BLOCKS_ALONE)
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    Stage(factory, model, layout, spec)(tokens, Batch(tokens, tokens, 48)).backward()
    kernel = attention_kernel(model, factory, 3)
    assert len(asked) == 2
    assert asked[0] == asked[1]
    assert asked[0][0][0][3], "a gradient is asked for"
    assert kernel == f"torch scaled_dot_product_attention, {kernel.split()[-1]}"


@pytest.mark.parametrize(("head_size", "dtype"), [(8, torch.float16), (16, torch.float64)])
def test_masks_that_flex_attention_does_not_take_are_one_sentence(head_size, dtype):
    """On a GPU the first step would else end with an error of the compiler."""
    model = ModelShape(layers=1, hidden=64, heads=4, head_size=head_size, seq_length=16)
    on_cpu, on_gpu = (
        ParamFactory(Mesh(), dtype, torch.device(device), Training(seed=1), False, None)
        for device in ("cpu", "cuda")
    )
    kernel = attention_kernel(model, on_cpu, 1, masked=True)
    assert kernel == "torch scaled_dot_product_attention, of masks"
    with pytest.raises(UserError, match=rf"no fp64 .here: {dtype}.* head-size.{head_size}."):
        attention_kernel(model, on_gpu, 1, masked=True)
