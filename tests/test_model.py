"""The model against transformers' GPT-2, BLOOM and Llama: same weights, same logits."""

import pytest
import torch

import config as configuration
import plan
from model import Stage, alibi_slopes
from parallel import Builder, Mesh
from presets import PRESETS, preset

transformers = pytest.importorskip("transformers")

V, H, A, L, S = 131, 48, 6, 3, 40  # six heads: BLOOM's slopes are not all powers of two


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=S, n_embd=H, n_layer=L, n_head=A, attn_implementation="eager"
    )
    shape = configuration.ModelShape(L, H, A, seq_length=S, vocab_size=V)
    return transformers.GPT2LMHeadModel(config), shape, from_gpt2


def bloom():
    config = transformers.BloomConfig(
        vocab_size=V, hidden_size=H, n_layer=L, n_head=A, attn_implementation="eager"
    )
    shape = configuration.ModelShape(
        L, H, A, seq_length=S, vocab_size=V, positions="alibi", embedding_norm=True
    )
    return transformers.BloomForCausalLM(config), shape, from_bloom


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
    return transformers.LlamaForCausalLM(config), shape, from_llama


def from_gpt2(theirs: dict) -> dict:
    """GPT-2 keeps matrices transposed, and q, k, v one after the other."""
    t = {k.removeprefix("transformer."): v for k, v in theirs.items()}
    ours = {
        "embedding.tokens.weight": t["wte.weight"],
        "embedding.positions.weight": t["wpe.weight"],
    }
    ours |= pair("head.norm", t, "ln_f")
    for i in range(L):
        a, b = f"blocks.{i}", f"h.{i}"
        ours |= pair(f"{a}.attention_norm", t, f"{b}.ln_1")
        ours |= pair(f"{a}.mlp_norm", t, f"{b}.ln_2")
        weight, bias = t[f"{b}.attn.c_attn.weight"].t(), t[f"{b}.attn.c_attn.bias"]
        ours[f"{a}.attention.qkv.weight"] = weight.reshape(3, A, H // A, H).transpose(0, 1)
        ours[f"{a}.attention.qkv.bias"] = bias.reshape(3, A, H // A).transpose(0, 1)
        names = (
            ("attention.out", "attn.c_proj"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        )
        for name, other in names:
            ours[f"{a}.{name}.weight"] = t[f"{b}.{other}.weight"].t()
            ours[f"{a}.{name}.bias"] = t[f"{b}.{other}.bias"]
    return ours


def from_bloom(theirs: dict) -> dict:
    """BLOOM interleaves q, k, v by head, as here."""
    t = {k.removeprefix("transformer."): v for k, v in theirs.items()}
    ours = {"embedding.tokens.weight": t["word_embeddings.weight"]}
    ours |= pair("embedding.norm", t, "word_embeddings_layernorm") | pair("head.norm", t, "ln_f")
    for i in range(L):
        a, b = f"blocks.{i}", f"h.{i}"
        ours |= pair(f"{a}.attention_norm", t, f"{b}.input_layernorm")
        ours |= pair(f"{a}.mlp_norm", t, f"{b}.post_attention_layernorm")
        qkv = pair("", t, f"{b}.self_attention.query_key_value")
        ours[f"{a}.attention.qkv.weight"] = qkv[".weight"].reshape(A, 3, H // A, H)
        ours[f"{a}.attention.qkv.bias"] = qkv[".bias"].reshape(A, 3, H // A)
        ours |= pair(f"{a}.attention.out", t, f"{b}.self_attention.dense")
        ours |= pair(f"{a}.mlp.up", t, f"{b}.mlp.dense_h_to_4h")
        ours |= pair(f"{a}.mlp.down", t, f"{b}.mlp.dense_4h_to_h")
    return ours


def from_llama(theirs: dict) -> dict:
    """Llama has q, k, v and gate, up as matrices of their own."""
    t = {k.removeprefix("model."): v for k, v in theirs.items()}
    ours = {
        "embedding.tokens.weight": t["embed_tokens.weight"],
        "head.norm.weight": t["norm.weight"],
        "head.weight": t["lm_head.weight"],
    }
    for i in range(L):
        a, b, d = f"blocks.{i}", f"layers.{i}", H // A
        ours[f"{a}.attention_norm.weight"] = t[f"{b}.input_layernorm.weight"]
        ours[f"{a}.mlp_norm.weight"] = t[f"{b}.post_attention_layernorm.weight"]
        q, k, v = (t[f"{b}.self_attn.{n}_proj.weight"].reshape(2, -1, d, H) for n in "qkv")
        ours[f"{a}.attention.qkv.weight"] = torch.cat([q, k, v], 1)
        ours[f"{a}.attention.out.weight"] = t[f"{b}.self_attn.o_proj.weight"]
        gate, up = t[f"{b}.mlp.gate_proj.weight"], t[f"{b}.mlp.up_proj.weight"]
        ours[f"{a}.mlp.up.weight"] = torch.stack([gate, up])
        ours[f"{a}.mlp.down.weight"] = t[f"{b}.mlp.down_proj.weight"]
    return ours


def pair(name: str, theirs: dict, other: str) -> dict:
    return {f"{name}.{kind}": theirs[f"{other}.{kind}"] for kind in ("weight", "bias")}


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
    theirs, shape, convert = family()
    for p in theirs.parameters():  # their own initialisation would leave biases untried
        p.data = torch.randn_like(p, dtype=dtype) * 0.15 + (p.dim() == 1)
    layout = configuration.Layout(dp=1, recompute=recompute)
    stage = Stage(Builder(Mesh(), dtype), shape, layout, plan.stages(shape, layout)[0])
    weights = convert(theirs.state_dict())
    parameters = {p.spec.name: p for p in stage.parameters()}
    assert set(weights) == set(parameters)
    for name, p in parameters.items():
        rows = weights[name].shape[p.spec.dim or 0]
        p.data.narrow(p.spec.dim or 0, 0, rows).copy_(weights[name])

    tokens = torch.randint(V, (2, S))
    logits = stage.head.logits(stage.hidden_states(tokens)).transpose(0, 1)[..., :V]
    expected = theirs.eval()(tokens).logits
    scale = expected.abs().max()
    assert scale > 1
    assert (logits - expected).abs().max() <= tolerance * scale

    labels = torch.randint(V, (2, S))
    loss = stage(tokens, labels)
    reference = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    assert loss.item() == pytest.approx(reference.item(), rel=tolerance)
    loss.backward()
    reference.backward()
    gradients = convert({k: p.grad for k, p in theirs.named_parameters()})
    for name, gradient in gradients.items():
        p = parameters[name]
        own = p.grad.narrow(p.spec.dim or 0, 0, gradient.shape[p.spec.dim or 0])
        assert (own - gradient).abs().max() <= 20 * tolerance * gradient.abs().max(), name


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 112])
def test_alibi_slopes_equal_transformers(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(alibi_slopes(heads).float(), theirs)


@pytest.mark.parametrize("name", [name for name in PRESETS if "gpt2" in name])
def test_presets_have_the_parameters_of_transformers(name):
    """And Stage, which refuses to build another count than the plan's, builds them."""
    shape, layout = preset(name), configuration.Layout(dp=1)
    config = transformers.GPT2Config(n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads)
    with torch.device("meta"):
        theirs = transformers.GPT2LMHeadModel(config)
    assert plan.parameters(shape) == sum(p.numel() for p in theirs.parameters())
    Stage(Builder(Mesh(), device="meta"), shape, layout, plan.stages(shape, layout)[0])
