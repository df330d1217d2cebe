"""Multi-token prediction: if these failed, its modules would learn other tokens than those that
come, or a layout would give them another weight.

The reference is written from the paper (DeepSeek-V3, arXiv 2412.19437, section 2.2), token by
token, over layers of transformers, which itself drops these modules.
"""

import copy
import json
import shutil
from dataclasses import replace

import golden_worker
import pytest
import test_checkpoint
import test_families
import test_ideas
import torch
from compare import assert_close
from ranks import ROOT
from test_families import S, V, in_fp64  # noqa: F401
from test_golden import check_lines

import trainer
from architecture import model_stats, tensors
from base.errors import UserError
from checkpointing import hf_export
from config import schema, validation
from config.command_line import parse
from data import Batch
from distributed.mesh import Mesh
from model import Stage
from parallel import ParamFactory
from schedules import partition
from tools.checker import causes, recorder

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

FAMILIES = {"deepseek_v3": 2, "glm4_moe": 1, "qwen3_next": 1}  # and how many modules are tried


@pytest.mark.slow
def test_layouts_equal_the_single_rank_run(tmp_path):
    check_lines("mtp", tmp_path)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_other_layouts(tmp_path):
    layouts = [{"tp": 2, "zero": 1}, {"pp": 2, "tp": 2}, {"pp": 4}, {"cp": 2, "zero": 2}]
    common = {"mtp_depth": 2, "tied": False, "precision": "fp64", "positions": "rotary"}
    test_checkpoint.check_chain(4, common, layouts, tmp_path)


# ---- Against the paper ---------------------------------------------------------------------------


class Module(torch.nn.Module):
    """The module of one depth, of a layer of transformers and norms of its kind."""

    def __init__(self, theirs):
        super().__init__()
        attends = [layer for layer in theirs.model.layers if hasattr(layer, "self_attn")]
        self.layer = copy.deepcopy(attends[-1])
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(theirs.model.norm) for _ in range(3))
        h = theirs.config.hidden_size
        self.eh_proj = torch.nn.Linear(2 * h, h, bias=False)
        for p in self.parameters():
            p.data = torch.randn_like(p, dtype=torch.float64) * 0.15 + (p.dim() == 1)


def reference(theirs, modules: list[Module], rows: torch.Tensor, counts: torch.Tensor) -> list:
    """The sum of the losses of each depth. rows: (b, s + 1). counts: whether label i counts."""
    tokens = rows[:, :-1]
    s = tokens.shape[1]
    hidden = theirs.model(tokens).last_hidden_state
    places = torch.arange(s)[None]
    rotary = theirs.model.rotary_emb(hidden, places)
    mask = torch.full((s, s), torch.finfo(hidden.dtype).min).triu(1)[None, None]
    sums = []
    for k, module in enumerate(modules, 1):
        later = torch.zeros_like(tokens)
        later[:, : s - k] = tokens[:, k:]
        embedded = theirs.model.embed_tokens(later)
        both = torch.cat([module.enorm(embedded), module.hnorm(hidden)], -1)
        x = module.eh_proj(both)
        x = module.layer(x, attention_mask=mask, position_ids=places, position_embeddings=rotary)
        hidden = module.norm(x[0] if isinstance(x, tuple) else x)
        log_p = theirs.lm_head(hidden).log_softmax(-1)
        total = hidden.new_zeros(())
        for sample in range(len(rows)):
            for i in range(s - k):  # token i + k + 1 is known, and all labels up to it count
                if counts[sample, i : i + k + 1].all():
                    total = total - log_p[sample, i, rows[sample, i + k + 1]]
        sums.append(total)
    return sums


def named(theirs, family: str, modules: list[Module]) -> dict:
    """The modules' tensors by the names that published files have."""
    found = {}
    for k, module in enumerate(modules):
        block = f"model.layers.{len(theirs.model.layers) + k}."
        names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}
        names |= {"norm": "shared_head.norm"}
        names = {ours: block + name for ours, name in names.items()}
        if family == "qwen3_next":
            block = "mtp.layers.0."
            names = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
            names |= {"eh_proj": "mtp.fc", "norm": "mtp.norm"}
        for ours, name in names.items():
            found[f"{name}.weight"] = getattr(module, ours).weight
        both = (*module.layer.named_parameters(), *module.layer.named_buffers())
        found |= {block + name: tensor for name, tensor in both}
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("masked", [False, True])
def test_losses_and_gradients_are_those_of_the_paper(family, masked, in_fp64):  # noqa: F811
    depth, factors = FAMILIES[family], (0.4, 0.7)[: FAMILIES[family]]
    theirs = test_families.their_model(family, torch.float64, experts_implementation="eager")
    for buffer in theirs.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.double()
    modules = [Module(theirs) for _ in range(depth)]
    shape = replace(test_families.shape_of(theirs), mtp_depth=depth)
    factory = ParamFactory(Mesh(), torch.float64)
    factory.loss_weight.mtp = factors
    layout = schema.Layout(dp=1)
    (spec,) = partition.stage_specs(shape, layout, partition.BLOCKS_ALONE)
    stage = Stage(factory, shape, layout, spec)
    rules = hf_export.rules(shape, family)

    def ours_of(their_tensors: dict) -> dict:
        there = test_families.tensors_of(their_tensors)
        return {r.name: r.to_ours(*(there[name] for name in r.theirs)) for r in rules}

    parameters = {p.spec.name: p for p in stage.parameters()}
    weights = ours_of(theirs.state_dict() | named(theirs, family, modules))
    assert set(weights) == set(parameters)
    for name, p in parameters.items():
        p.data.narrow(
            p.spec.dim or 0, 0, len(weights[name]) if p.spec.dim == 0 else p.shape[p.spec.dim or 0]
        ).copy_(weights[name].detach())

    rows = torch.randint(V, (2, S + 1))
    labels = rows[:, 1:].clone()
    if masked:
        labels[:, 7::9] = -1
    counts = labels >= 0
    sums = stage(rows[:, :-1], Batch(rows[:, :-1], labels, int(counts.sum())))
    expected = reference(theirs, modules, rows, counts)
    weighted = sum(f * total for f, total in zip(factors, expected, strict=True))
    assert_close(sums[1].detach(), weighted.detach(), 1e-12)
    log_p = theirs(rows[:, :-1]).logits.log_softmax(-1)
    main = -log_p.gather(-1, rows[:, 1:, None])[..., 0][counts].sum()
    assert_close(sums[0].detach(), main.detach(), 1e-12)
    sums.sum().backward()
    (main + weighted).backward()
    gradients = {k: p.grad for k, p in theirs.named_parameters()} | dict(theirs.named_buffers())
    for name, p in named(theirs, family, modules).items():
        gradients[name] = p if p.grad is None else p.grad
    for name, gradient in ours_of(gradients).items():
        p = parameters[name]
        if p.requires_grad:
            own = p.grad.narrow(p.spec.dim or 0, 0, gradient.shape[p.spec.dim or 0])
            assert_close(own, gradient, 1e-11, name, scale=gradient.abs().max().item())


# ---- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_are_read_from_published_names_and_written_again(family, tmp_path):
    theirs = test_families.their_model(family, torch.float32)
    modules = [Module(theirs).float() for _ in range(FAMILIES[family])]
    theirs.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    there = safetensors.load_file(path)
    whole = test_families.tensors_of(named(theirs, family, modules))
    fused = ("experts.gate_up_proj", "experts.down_proj", "block_sparse_moe", "conv1d")
    further = {n: t.detach().clone() for n, t in whole.items() if not n.endswith(fused)}
    further = {
        n: t for n, t in further.items() if "block_sparse" not in n and "feedforward" not in n
    }
    further = {n: t for n, t in further.items() if "attention_layer_norm" not in n}
    for k in range(len(modules) if family != "qwen3_next" else 0):
        block = f"model.layers.{len(theirs.model.layers) + k}"
        further[f"{block}.embed_tokens.weight"] = there["model.embed_tokens.weight"].clone()
        further[f"{block}.shared_head.head.weight"] = there["lm_head.weight"].clone()
    safetensors.save_file(there | further, path, {"format": "pt"})
    model = hf_export.import_weights(str(tmp_path / "hf"), str(tmp_path / "in"))
    assert model.mtp_depth == FAMILIES[family]
    hf_export.export_weights(str(tmp_path / "in/step_00000000"), str(tmp_path / "out"))
    back = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert set(back) == set(there | further)
    for name, tensor in (there | further).items():
        assert torch.equal(back[name].float(), tensor.float()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if family != "qwen3_next":
        assert config["num_nextn_predict_layers"] == FAMILIES[family]
        head = f"{block}.shared_head.head.weight"
        safetensors.save_file(there | further | {head: further[head] + 1}, path, {"format": "pt"})
        with pytest.raises(UserError, match=r"shared_head\.head\.weight is not lm_head\.weight"):
            hf_export.import_weights(str(tmp_path / "hf"), str(tmp_path / "other"))


def test_a_family_without_such_modules_is_refused_by_name():
    shape = schema.ModelShape(layers=2, hidden=48, heads=6, positions="rotary", mtp_depth=1)
    with pytest.raises(UserError, match="mtp_depth 0, not 1"):
        hf_export.rules(shape, "llama")


# ---- Counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"experts": 4, "experts_per_token": 2, "bias": False}])
def test_the_counts_are_those_of_the_built_model(more):
    config = validation.check(golden_worker.options({"mtp_depth": 2} | more), 1)
    state = trainer.build(config)
    built = {p.spec.name: p.spec.shape for p in state.stages.parameters()}
    assert built == tensors.canonical_shapes(config.model)
    constants = sum(p.numel() for p in state.stages.parameters() if not p.requires_grad)
    count = sum(torch.Size(shape).numel() for shape in built.values()) - constants
    assert count == model_stats.parameters(config.model)
    assert state.stage_specs[-1].parameters == count


def test_evaluation_and_decoding_are_those_without_the_modules():
    config = validation.check(golden_worker.options({"mtp_depth": 1, "eval_samples": 4}), 1)
    plain = validation.check(golden_worker.options({"eval_samples": 4}), 1)
    losses = []
    for each in (config, plain):
        (stage,) = trainer.build(each).stages
        tokens = torch.arange(16)[None] % 61
        with torch.no_grad():
            losses.append(stage(tokens, Batch(tokens, tokens, 16)))
    assert losses[0].shape == ()
    assert torch.equal(*losses)


# ---- Mistakes of public code ---------------------------------------------------------------------


def off_by_one(batch: Batch, tokens: int) -> torch.Tensor:
    """The labels of a module as if it predicted the token that it is given."""
    return right_labels(batch, tokens - 1)


def not_rolled(batch: Batch, tokens: int) -> torch.Tensor:
    """The labels come later, and their mask stays where it was."""
    rows = torch.where(batch.labels < 0, 0, batch.labels)
    later = torch.cat([rows[:, tokens:], torch.full_like(rows[:, :tokens], -1)], 1)
    return later.masked_fill(batch.labels < 0, -1)


def over_borders(batch: Batch, tokens: int) -> torch.Tensor:
    """A label counts wherever it is itself a label, also of another document."""
    return torch.cat([batch.labels[:, tokens:], torch.full_like(batch.labels[:, :tokens], -1)], 1)


right_labels = Batch.labels_after


@pytest.mark.parametrize("mistake", [off_by_one, not_rolled, over_borders])
def test_a_wrong_target_is_found(mistake, monkeypatch, in_fp64):  # noqa: F811
    monkeypatch.setattr(Batch, "labels_after", mistake)
    with pytest.raises(AssertionError):
        test_losses_and_gradients_are_those_of_the_paper("deepseek_v3", True, None)


RIGHT = """
    mesh.world.at_once.all_reduce(counted).wait()
    return mesh.world.values(counted)
"""
# Each replica divides its sums of the modules' losses by its own targets.
BY_LOCAL_COUNTS = """
    here = mesh.replicas.size * counted
    mesh.world.at_once.all_reduce(counted).wait()
    return [*mesh.world.values(counted)[:1], *mesh.world.values(here)[1:]]
"""


@pytest.mark.slow
def test_check_finds_a_mean_over_the_targets_of_a_replica(tmp_path):
    code = tmp_path / "code"
    left_out = shutil.ignore_patterns(".*", "runs", "tests", "benchmarks", "docs", "data", "site")
    shutil.copytree(ROOT, code, ignore=left_out)
    text = (code / "trainer.py").read_text()
    assert RIGHT in text
    (code / "trainer.py").write_text(text.replace(RIGHT, BY_LOCAL_COUNTS))
    words = "--layers 2 --hidden 32 --heads 4 --seq-length 32 --vocab-size 61 --positions rotary"
    words += " --mtp-depth 1 --eod-token 5 --mask-eod-loss --reset-attention"
    outcome = test_ideas.check(code, words, ("dp 2",))
    assert outcome.status == 1, outcome
    assert "blocks.2" in outcome.out


def test_check_names_the_parts_of_a_module_as_its_parameters():
    """check.py says by these names where a tensor is; a wrong loss of later tokens shows first in
    the gradient of the last norm, in whose line its causes are named.
    """
    options = ["--layers=2", "--hidden=16", "--heads=2", "--seq-length=8", "--vocab-size=31"]
    options += ["--mtp-depth=2", "--no-tied", "--positions=rotary", "--device=cpu", "--steps=1"]
    (stage,) = trainer.build(validation.check(parse(options), 1)).pipeline.stages.values()
    parts = dict(recorder._parts(stage))
    assert {"blocks.2", "blocks.2.mtp.join", "blocks.3.mtp.norm"} <= set(parts)
    for name, part in parts.items():
        if name != "next_tokens":  # the embedding's matrix
            assert {p.spec.name.startswith(f"{name}.") for p in part.parameters()} == {True}, name
    key = (1, "gradient of output", "blocks.3.mtp.norm")
    assert causes._backward(None, key, None) == causes.WORDS["backward"]["predicted"]
