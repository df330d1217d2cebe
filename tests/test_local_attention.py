"""Windows, softcaps and sinks of single blocks: if this failed, tokens would see others than their
block says, in one layout or kernel.
"""

import subprocess
import sys
from dataclasses import replace

import golden_worker
import pytest
import torch
from compare import assert_close
from ranks import ROOT
from test_golden import check_lines
from torch.nn.attention.flex_attention import flex_attention

import trainer
from architecture import model_stats
from architecture.block_attention import flags_of, pattern_of
from architecture.shape import ModelShape
from base.errors import UserError
from config import validation
from config.schema import Layout, Training
from costs import hardware, memory_terms, op_costs
from costs.hardware import load
from costs.job import Job
from data import Batch
from distributed.mesh import Mesh
from layers import local_attention
from layers.attention import KeyValueCache, attention_kernel
from layers.local_attention import attend_by_flex, attend_by_spans, seen_by
from model import Stage
from parallel import ParamFactory
from schedules.partition import BLOCKS_ALONE, stage_specs

S, V = 40, 61
WINDOWED = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "seq_length": S,
    "vocab_size": V,
    "positions": "rotary",
    "window": 7,
    "window_blocks": "1:1",
}
KINDS = {
    "plain": {"window": 0},
    "windows": {},
    "sinks": {"sinks": True},
    "softcaps": {"attention_softcap": 2.0, "logit_softcap": 3.0},
    "without positions": {"rotary_blocks": "3:1"},
    "all of it": {"sinks": True, "attention_softcap": 2.0, "rotary_blocks": "0,1,1,0"},
    "alibi": {"positions": "alibi", "sinks": True},
}


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        ("all", "1111"),
        ("none", "0000"),
        ("5:1", "11111011"),
        ("1:1", "10101"),
        ("0,1,1,0", "0110"),
        ("2:3", "11000"),
    ],
)
def test_a_pattern_says_which_blocks(pattern, flags):
    expected = tuple(flag == "1" for flag in flags)
    assert flags_of(pattern, len(flags)) == expected
    assert flags_of(pattern_of(expected), len(flags)) == expected


@pytest.mark.parametrize("pattern", ["", "5:", "0:1", "1,2", "1,1,0", "5:1:2", "some"])
def test_a_wrong_pattern_is_one_sentence(pattern):
    with pytest.raises(UserError, match="pattern"):
        flags_of(pattern, 4)


# ---- Kernels -------------------------------------------------------------------------------------


def by_definition(q, k, v, starts, stops, sinks, softcap):
    """Attention of every head in fp64, with the mask and the sink's column written out."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(k.shape[2])
    seen = (keys >= starts[..., None]) & (keys < stops[..., None])
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_spans_and_flex_are_attention_by_its_definition(monkeypatch, softcap, with_sinks, cp):
    """Windows and documents, of all queries or those of the last rank of cp; and gradients."""
    monkeypatch.setattr(local_attention, "SPAN", 16)
    torch.manual_seed(0)
    places = torch.arange(S)
    if cp == 2:
        places = torch.cat(places.chunk(4)[1:3])
    of_documents = torch.tensor([[0] * 13 + [13] * 27, [0] * 30 + [30] * 10])[:, places]
    starts = of_documents.maximum(places - 7 + 1)
    stops = (places + 1).repeat(2, 1)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    q = torch.randn(2, 4, len(places), 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, S, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = [q, k, v] + ([sinks] if with_sinks else [])
    expected = by_definition(q, k, v, starts, stops, sinks, softcap)
    gradients = torch.autograd.grad(expected.square().sum(), inputs)
    in_spans = seen_by(starts, stops, places, S, None, False)
    mixed = attend_by_spans(q, k, v, sinks, softcap, in_spans)
    assert_close(mixed, expected, 1e-12, scale=1.0)
    for own, reference in zip(torch.autograd.grad(mixed.square().sum(), inputs), gradients):
        assert_close(own, reference, 1e-12, scale=reference.abs().max().item())
    in_blocks = seen_by(starts, stops, places, S, None, True)
    q, k, v = (t.detach() for t in (q, k, v))  # on a CPU flex_attention has no backward pass
    sinks = None if sinks is None else sinks.detach()
    mixed = attend_by_flex(q, k, v, sinks, softcap, in_blocks, flex_attention)
    assert_close(mixed, expected, 1e-12, scale=1.0)


def stage_of(kind: str, masked: bool = False, **more) -> Stage:
    shape, layout = ModelShape(**WINDOWED | KINDS[kind] | more), Layout(dp=1)
    spec = stage_specs(shape, layout, BLOCKS_ALONE)[0]
    return Stage(
        ParamFactory(Mesh(), torch.float64, training=Training(init_std=0.2)),
        shape,
        layout,
        spec,
        masked=masked,
    )


@pytest.mark.parametrize("flex", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_no_document_sees_another(monkeypatch, kind, flex):
    """A token of document 1 is changed: no position of document 2 moves, to the bit."""
    stage = stage_of(kind, masked=True)
    if flex and kind != "plain":
        stage.positions.flex = True
        monkeypatch.setattr(local_attention, "compiled_flex", lambda: flex_attention)
    tokens = torch.randint(V, (2, S), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0] * 13 + [13] * 27).repeat(2, 1)
    stops = torch.arange(1, S + 1).repeat(2, 1)

    def states(tokens):
        with torch.no_grad():
            return stage.hidden_states(tokens, Batch(tokens, tokens, 1, starts, stops))

    before = states(tokens)
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % V
    after = states(changed)
    assert torch.equal(before[13:], after[13:])
    assert not torch.equal(before[12], after[12])


@pytest.mark.parametrize("kind", ["windows", "sinks", "all of it"])
def test_with_windows_in_all_blocks_a_token_reaches_no_farther_than_they_do(kind):
    stage = stage_of(kind, window_blocks="all", window=3)
    tokens = torch.randint(V, (1, S), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % V
    with torch.no_grad():
        moved = (stage.hidden_states(tokens) != stage.hidden_states(changed)).any(-1)[:, 0]
    assert moved.nonzero().flatten().tolist() == list(range(5, 5 + 4 * 2 + 1))


# ---- Memory -------------------------------------------------------------------------------------

WIDE = {"hidden": 128, "heads": 8, "seq_length": 512, "layers": 1, "vocab_size": 64, "bias": False}
WIDE |= {"positions": "rotary", "norm": "rmsnorm"}


def kept_and_planned(changes: dict) -> tuple[int, float]:
    """The bytes that a block keeps for its backward pass on a CPU, and those of the plan."""
    config = validation.check(golden_worker.options(WIDE | changes), 1)
    [stage] = trainer.build(config).stages
    [(seen, tables)] = stage.positions.inputs_by_block(None, None, 1)
    masks = [span.mask for span in getattr(seen, "spans", [])]
    shared = [*stage.parameters(), *tables, *masks]  # of all micro-batches
    kept = {t.untyped_storage().data_ptr(): 0 for t in shared}
    alive = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        alive.append(t)  # so that no other tensor gets its place
        kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
        return t

    x = torch.randn(512, config.layout.micro_batch_size, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        stage.blocks[0](x, None, seen, tables)
    job = Job(config.model, config.layout, config.training, hardware.load("cpu"))
    return sum(kept.values()), memory_terms.kept_bytes(job)


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 64},
        {"window": 64, "micro_batch_size": 2},
        {"window": 64, "kv_heads": 2},
        {"attention_softcap": 5.0},
        {"sinks": True},
        {"sinks": True, "attention_softcap": 5.0, "window": 64},
        {"sinks": True, "attention_softcap": 5.0, "window": 64, "recompute": "selective"},
    ],
    ids=str,
)
def test_the_plan_counts_the_scores_that_a_block_keeps(changes):
    """What it keeps more than a plain block, to a 30th of all that it keeps."""
    names = ("micro_batch_size", "kv_heads", "recompute")
    plain = kept_and_planned({k: v for k, v in changes.items() if k in names})
    kept, planned = kept_and_planned(changes)
    more = kept - plain[0]
    assert abs(more - (planned - plain[1])) < kept / 30
    selective = changes.get("recompute") == "selective"
    assert selective or more > 0.05 * plain[0]


def test_a_flex_kernel_keeps_no_scores():
    model = golden_worker.options(WIDE | {"attention_softcap": 5.0}).model
    for machine, keeps in (("a100-80", False), ("v100-32", True), ("cpu", True)):
        job = Job(model, Layout(dp=1), Training(), hardware.load(machine))
        assert bool(memory_terms.span_bytes(job)) == keeps


# ---- Layouts -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_layout_equals_the_single_rank_run(tmp_path):
    check_lines("attention_kinds", tmp_path)


def test_a_plain_model_loads_none_of_it():
    program = (
        "import sys, torch; from model import Stage; from parallel import ParamFactory;"
        "from distributed.mesh import Mesh; from config.schema import Layout, ModelShape;"
        "from schedules.partition import BLOCKS_ALONE, stage_specs;"
        "shape, layout = ModelShape(2, 16, 2, seq_length=8, positions='rotary'), Layout(dp=1);"
        "spec = stage_specs(shape, layout, BLOCKS_ALONE)[0];"
        "stage = Stage(ParamFactory(Mesh()), shape, layout, spec);"
        "stage.hidden_states(torch.zeros(1, 8, dtype=torch.int64));"
        "print(sorted({'local_attention', 'rotary_scaling'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.stdout == "[]\n", done.stderr


def test_the_log_names_the_kernels():
    shape, factory = ModelShape(**WINDOWED), ParamFactory(Mesh())
    assert attention_kernel(shape, factory, 1) == (
        "torch scaled_dot_product_attention, flash_attention; windows in 2 of 4 blocks: "
        "torch scaled_dot_product_attention, 128 queries at a time"
    )
    shape = replace(shape, sinks=True)
    kernel = "windows and sinks in 4 of 4 blocks: matmuls and softmax, 128 queries at a time"
    assert attention_kernel(shape, factory, 1) == kernel


# ---- Decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_token_by_token_is_the_whole_text_and_keeps_no_more_than_the_window(kind):
    stage = stage_of(kind)
    tokens = torch.randint(V, (1, S), generator=torch.Generator().manual_seed(0))
    slopes = getattr(stage.positions, "slopes", None)
    cache = KeyValueCache(S, slopes, torch.device("cpu"))
    found = []
    with torch.no_grad():
        expected = stage.head.logits(stage.hidden_states(tokens))
        for part in tokens.split([10] + [1] * (S - 10), 1):
            cache.begin(part.shape[1])
            found.append(stage.head.logits(stage.hidden_states(part, cache=cache)))
            for block in stage.blocks:
                keys, _ = cache._keys_and_values[block.attention, 0]
                window = block.attention.block.window
                assert len(keys) <= (window - 1 if window else S)
    assert_close(torch.cat(found), expected, 1e-12, scale=expected.abs().max().item())


# ---- Counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 7, 39, 40, 100])
def test_flops_of_windows_are_those_of_a_count(window):
    shape = ModelShape(**WINDOWED | {"window": window, "window_blocks": "3:1"})
    plain = replace(shape, window=0)
    pairs = sum(min(q + 1, window) for q in range(S))  # that see each other in a windowed block
    whole = S * (S + 1) / 2
    saved = 3 * (whole - pairs) * 4 * shape.attention_width  # in 3 of 4 blocks, FLOPs forward
    own = model_stats.model_flops(plain, 1) - model_stats.model_flops(shape, 1)
    # The formula leaves out the half of the diagonal, as causal attention's does.
    diagonal = 3 * S * 4 * shape.attention_width
    assert abs(own / 3 - saved) <= diagonal
    machine = load("a100-80")
    seconds = [
        op_costs.attention(machine, S, 32, 64.0, 2, model_stats.seen_tokens(m)).forward
        for m in (replace(shape, window_blocks="all"), plain)
    ]
    assert (seconds[0] < seconds[1]) == (window < S)
