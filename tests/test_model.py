"""The model against transformers' GPT-2, BLOOM and Llama: same weights, same logits."""

import pytest
import torch
from compare import assert_close

from checkpointing.hf_mappings import hf_config, rules
from config import model_stats
from config import schema as configuration
from config.command_line import PRESETS, preset
from data import Batch
from distributed.mesh import Mesh
from model import Stage, alibi_slopes, attention_kernel
from parallel import ParamFactory
from schedules import partition

transformers = pytest.importorskip("transformers")

V, H, A, L, S = 131, 48, 6, 3, 40  # six heads: BLOOM's slopes are not all powers of two


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=S, n_embd=H, n_layer=L, n_head=A, attn_implementation="eager"
    )
    shape = configuration.ModelShape(L, H, A, seq_length=S, vocab_size=V)
    return transformers.GPT2LMHeadModel(config), shape


def bloom():
    config = transformers.BloomConfig(
        vocab_size=V, hidden_size=H, n_layer=L, n_head=A, attn_implementation="eager"
    )
    shape = configuration.ModelShape(
        L, H, A, seq_length=S, vocab_size=V, positions="alibi", embedding_norm=True
    )
    return transformers.BloomForCausalLM(config), shape


def llama():
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        num_hidden_layers=L,
        num_attention_heads=A,
        num_key_value_heads=2,
        intermediate_size=80,
        max_position_embeddings=S,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    shape = configuration.ModelShape(
        L,
        H,
        A,
        kv_heads=2,
        ffn_hidden=80,
        seq_length=S,
        vocab_size=V,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied=False,
        norm_eps=1e-6,
    )
    return transformers.LlamaForCausalLM(config), shape


def convert(theirs: dict, shape: configuration.ModelShape) -> dict:
    """Their tensors as ours."""
    return {r.name: r.to_ours(*(theirs[name] for name in r.theirs)) for r in rules(shape)}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        (gpt2, torch.float32, 1e-5),
        (bloom, torch.float32, 1e-5),
        (llama, torch.float32, 1e-5),
        (gpt2, torch.float64, 1e-12),  # the other two compute parts in fp32 whatever the weights
    ],
)
def test_logits_equal_transformers(family, dtype, tolerance, recompute):
    torch.manual_seed(1)
    theirs, shape = family()
    for p in theirs.parameters():  # their own initialisation would leave biases untried
        p.data = torch.randn_like(p, dtype=dtype) * 0.15 + (p.dim() == 1)
    layout = configuration.Layout(dp=1, recompute=recompute)
    stage = Stage(
        ParamFactory(Mesh(), dtype), shape, layout, partition.stage_specs(shape, layout)[0]
    )
    weights = convert(theirs.state_dict(), shape)
    parameters = {p.spec.name: p for p in stage.parameters()}
    assert set(weights) == set(parameters)
    for name, p in parameters.items():
        rows = weights[name].shape[p.spec.dim or 0]
        p.data.narrow(p.spec.dim or 0, 0, rows).copy_(weights[name])

    tokens = torch.randint(V, (2, S))
    logits = stage.head.logits(stage.hidden_states(tokens)).transpose(0, 1)[..., :V]
    expected = theirs.eval()(tokens).logits
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
    gradients = convert({k: p.grad for k, p in theirs.named_parameters()}, shape)
    for name, gradient in gradients.items():
        p = parameters[name]
        own = p.grad.narrow(p.spec.dim or 0, 0, gradient.shape[p.spec.dim or 0])
        assert_close(own, gradient, 20 * tolerance, name, scale=gradient.abs().max().item())


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 112])
def test_alibi_slopes_equal_transformers(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert_close(alibi_slopes(heads), theirs, 1e-6)


@pytest.mark.parametrize("name", [name for name in PRESETS if "gpt2" in name])
def test_presets_have_the_parameters_of_transformers(name):
    """Stage builds them too: it raises if its count is not the planned one."""
    shape, layout = preset(name), configuration.Layout(dp=1)
    config = transformers.GPT2Config(n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads)
    with torch.device("meta"):
        theirs = transformers.GPT2LMHeadModel(config)
    assert model_stats.parameters(shape) == sum(p.numel() for p in theirs.parameters())
    Stage(
        ParamFactory(Mesh(), device=torch.device("meta")),
        shape,
        layout,
        partition.stage_specs(shape, layout)[0],
    )


def test_an_exported_gpt2_keeps_all_its_learned_positions():
    shape = configuration.ModelShape(1, 8, 2, seq_length=16, max_positions=32, vocab_size=20)
    assert hf_config(shape, torch.float32)["n_positions"] == 32


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("positions", ["learned", "alibi"])
def test_the_attention_kernel_that_is_printed_is_asked_for_as_in_training(
    kv_heads, positions, monkeypatch
):
    """torch chooses by these facts. It was asked for a batch of one, no gradient, equal heads."""
    asked = []

    def facts(q, k, v, attn_mask, is_causal, enable_gqa):
        of_mask = None if attn_mask is None else (attn_mask.shape, attn_mask.stride())
        of = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in (q, k, v)]
        asked.append((of, of_mask, is_causal, enable_gqa))

    real, choose = torch.nn.functional.scaled_dot_product_attention, torch._fused_sdp_choice
    for module, name, run in (
        (torch.nn.functional, "scaled_dot_product_attention", real),
        (torch, "_fused_sdp_choice", choose),
    ):
        monkeypatch.setattr(
            module, name, lambda *qkv, run=run, **o: (facts(*qkv, **o), run(*qkv, **o))[1]
        )
    model = configuration.ModelShape(
        1, 32, 4, kv_heads=kv_heads, seq_length=16, vocab_size=V, positions=positions
    )
    factory, layout = ParamFactory(Mesh()), configuration.Layout(micro_batch_size=3)
    (spec,) = partition.stage_specs(model, layout, partition.part_costs(model, "cpu"))
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    Stage(factory, model, layout, spec)(tokens, Batch(tokens, tokens, 48)).backward()
    kernel = attention_kernel(model, factory, 3)
    assert len(asked) == 2
    assert asked[0] == asked[1]
    assert asked[0][0][0][3], "a gradient is asked for"
    assert kernel == f"torch scaled_dot_product_attention, {kernel.split()[-1]}"
