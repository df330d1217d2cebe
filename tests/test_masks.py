"""Masks and objectives: if this failed, tokens would see others than the rules say."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from golden_worker import options
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_golden import check_lines
from torch.nn.attention.flex_attention import flex_attention

import data
import trainer
from attention import rotary_tables, rotate
from config import validation
from config.messages import UserError
from config.run_options import Data
from corpora import attention_masks
from corpora.attention_masks import alibi_score, alibi_slopes, visible, visible_blocks
from corpora.objectives import Objective
from corpora.token_files import IndexedDatasetWriter
from distributed.collectives import Group

EOD, S = 3, 16


class Given:
    """One text, whose second half are answers."""

    def __init__(self, text):
        self.text = np.asarray(text, np.int64)

    def sample(self, k):
        return self.text

    def answers(self, k):
        return np.arange(len(self.text)) >= len(self.text) // 2


def row_of(text, k=0, **given):
    return Objective(Data(eod_token=EOD, **given), seed=1).row(Given(text), k)


texts = st.lists(st.integers(0, 5), min_size=2, max_size=40)


def document_of(tokens) -> list[int]:
    """The number of the document of each token: an end is the last of its own."""
    return [sum(token == EOD for token in tokens[:place]) for place in range(len(tokens))]


def seen_by(row) -> np.ndarray:
    """(s, s): whether token q sees token k, from a row's starts and stops."""
    places = np.arange(len(row["tokens"]))
    return (places >= row["starts"][:, None]) & (places < row["stops"][:, None])


def counted_in(row) -> np.ndarray:
    """Which labels of a row count in the loss."""
    return row["labels"] >= 0


# ---- The rules, one token after the other --------------------------------------------------------


@given(texts, st.integers(0, 9), st.booleans(), st.booleans(), st.booleans(), st.booleans())
@example([EOD] * 9, 0, True, True, True, True)
@example([EOD, 1], 0, True, True, True, True)
@settings(max_examples=200, deadline=None)
def test_each_rule_by_its_definition(text, k, attention, positions, eod, prefix):
    given = {"reset_attention": attention, "reset_positions": positions, "mask_eod_loss": eod}
    row = row_of(text, k, objective="prefix" if prefix else "causal", **given)
    tokens, size = text[:-1], len(text) - 1
    documents = document_of(tokens)
    groups = documents if attention else [0] * size
    first = [groups.index(group) for group in groups]
    last = {group: size - 1 - groups[::-1].index(group) for group in groups}
    assert row["tokens"].tolist() == tokens
    assert [b if a == -1 else a for a, b in zip(row["labels"], text[1:])] == text[1:]
    ends = [row["stops"][first[q]] if prefix else first[q] + 1 for q in range(size)]
    if attention or prefix:
        expected = [
            [
                groups[q] == groups[key] and (key <= q or max(q, key) < ends[q])
                for key in range(size)
            ]
            for q in range(size)
        ]
        assert seen_by(row).tolist() == expected
    for q in range(size) if prefix else []:
        tokens_there = last[groups[q]] - first[q] + 1
        assert 1 <= ends[q] - first[q] <= max(1, tokens_there - 1)
    counted = [
        not (eod and tokens[q] == EOD) and (not prefix or q + 1 >= ends[q]) for q in range(size)
    ]
    assert counted_in(row).tolist() == counted
    if positions:
        begin = [documents.index(document) for document in documents]
        assert row["positions"].tolist() == [q - begin[q] for q in range(size)]
    assert "starts" in row or not (attention or prefix)


def test_prefixes_are_of_every_length_and_follow_from_the_sample():
    text = [1] * 9 + [EOD] * 2
    ends = [row_of(text, k, objective="prefix")["stops"][0] for k in range(400)]
    assert sorted(set(ends)) == list(range(1, 10))
    assert ends == [row_of(text, k, objective="prefix")["stops"][0] for k in range(400)]


def test_only_labels_that_are_answers_count():
    row = row_of(range(4, 15), answers_only=True)
    assert counted_in(row).tolist() == [place + 1 >= 5 for place in range(10)]


# ---- Against Megatron's --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def megatron_masks():
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine
        from megatron.core.datasets import gpt_dataset
    return gpt_dataset._get_ltor_masks_and_position_ids


@given(texts, st.booleans(), st.booleans(), st.booleans())
@example([EOD] * 5, True, True, True)
@settings(max_examples=150, deadline=None)
def test_masks_are_megatrons(megatron_masks, text, positions, attention, eod):
    row = row_of(text, reset_attention=attention, reset_positions=positions, mask_eod_loss=eod)
    tokens = torch.tensor(text[:-1])
    hidden, counted, places = megatron_masks(tokens, EOD, positions, attention, eod, True)
    size = len(tokens)
    ours = seen_by(row) if attention else np.tri(size, dtype=bool)
    assert (~hidden[0]).tolist() == ours.tolist()
    assert counted.bool().tolist() == counted_in(row).tolist()
    assert places.tolist() == row.get("positions", np.arange(size)).tolist()


# ---- A dense reference ---------------------------------------------------------------------------


def dense_loss(state: trainer.TrainState, rows: list[dict]) -> tuple[torch.Tensor, int]:
    """Loss sum and targets of some rows, by a GPT that is written out, with an (s, s) mask."""
    model, total = state.config.model, torch.zeros((), dtype=torch.float64)
    w = {p.spec.name: p for p in state.stages.parameters()}
    norm = lambda x, name: F.layer_norm(  # noqa: E731
        x, (model.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], model.norm_eps
    )
    places = torch.arange(model.seq_length)
    tables = rotary_tables(model)
    for row in rows:
        positions = torch.from_numpy(row["positions"]) if "positions" in row else places
        x = w["embedding.tokens.weight"][torch.from_numpy(row["tokens"])]
        if model.positions == "learned":
            x = x + w["embedding.positions.weight"][positions]
        bias = torch.zeros(model.heads, *2 * [model.seq_length], dtype=torch.float64)
        if model.positions == "alibi":
            bias -= alibi_slopes(model.heads)[:, None, None] * (places[:, None] - places).abs()
        bias[:, ~torch.from_numpy(seen_by(row))] = -math.inf
        for i in range(model.layers):
            name = f"blocks.{i}.attention"
            qkv = w[f"{name}.qkv.weight"], w[f"{name}.qkv.bias"]
            y = torch.einsum("sh,gqdh->sgqd", norm(x, f"{name}_norm"), qkv[0]) + qkv[1]
            q, k, v = y[:, :, :-2].flatten(1, 2), y[:, :, -2], y[:, :, -1]
            if model.positions == "rotary":
                turned = tuple(table[positions, 0] for table in tables)
                q, k = rotate(q, turned), rotate(k, turned)
            k, v = (t.repeat_interleave(model.heads // model.kv_heads, 1) for t in (k, v))
            scores = torch.einsum("qad,kad->aqk", q, k) / math.sqrt(model.head_size) + bias
            y = torch.einsum("aqk,kad->qad", scores.softmax(-1), v).flatten(1)
            x = x + F.linear(y, w[f"{name}.out.weight"], w[f"{name}.out.bias"])
            name = f"blocks.{i}.mlp"
            y = F.linear(norm(x, f"{name}_norm"), w[f"{name}.up.weight"], w[f"{name}.up.bias"])
            y = F.gelu(y, approximate="tanh")
            x = x + F.linear(y, w[f"{name}.down.weight"], w[f"{name}.down.bias"])
        logits = F.linear(norm(x, "head.norm"), w["embedding.tokens.weight"])[:, : model.vocab_size]
        counted = torch.from_numpy(counted_in(row))
        labels = torch.from_numpy(row["labels"])[counted]
        total = total + F.cross_entropy(logits[counted], labels, reduction="sum")
    return total, sum(int(counted_in(row).sum()) for row in rows)


ALL = {"eod_token": EOD, "reset_attention": True, "mask_eod_loss": True, "vocab_size": 13}


@pytest.mark.parametrize("objective", ["causal", "prefix"])
@pytest.mark.parametrize("positions", ["learned", "alibi", "rotary"])
def test_a_step_is_that_of_the_dense_reference(positions, objective):
    """Loss, gradients and evaluation; the loss is divided by the targets of the batch."""
    case = ALL | {"positions": positions, "objective": objective, "precision": "fp64"}
    case |= {"reset_positions": positions != "alibi", "kv_heads": 4, "eval_samples": 8}
    case |= {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    config = validation.check(options(case | {"micro_batch_size": 2}), 1)
    samples, state = data.build(config).train, trainer.build(config)
    objectives = Objective(config.data, config.training.seed)
    rows = [objectives.row(samples, k) for k in range(8)]
    assert any(len(set(row["starts"].tolist())) > 1 for row in rows)
    loss, targets = dense_loss(state, rows)
    assert 0 < targets < 8 * S
    mean = loss / targets
    gradients = torch.autograd.grad(mean, list(state.stages.parameters()))
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    assert_close(trainer.evaluate(state, samples, 8), mean.item(), 1e-12)
    before = [p.detach().clone() for p in state.stages.parameters()]
    result = trainer.step(state, samples, 0, 1.0)
    assert_close(result.loss, mean.item(), 1e-12)
    assert_close(result.grad_norm, norm.item(), 1e-10)
    for p, old, gradient in zip(state.stages.parameters(), before, gradients, strict=True):
        assert_close(old - p, gradient, 1e-9, p.spec.name, scale=norm.item())
    state.reader.close()


def test_a_batch_without_targets_changes_nothing():
    """Every token is an end, so no label counts: no update, no NaN, and fp16's scale stays."""
    for precision in ("fp32", "fp16"):
        case = ALL | {"vocab_size": 1, "eod_token": 0, "precision": precision, "eval_samples": 8}
        config = validation.check(options(case), 1)
        samples, state = data.build(config).train, trainer.build(config)
        before = [p.detach().clone() for p in state.stages.parameters()]
        scale = state.optimizer.scale.state()
        result = trainer.step(state, samples, 0, 1e-3)
        assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, True)
        assert all(map(torch.equal, before, state.stages.parameters()))
        assert state.optimizer.updates == 0
        assert trainer.evaluate(state, samples, 8) == 0.0
        after = state.optimizer.scale.state()
        assert after.get("loss_scale") == scale.get("loss_scale")
        state.reader.close()


# ---- Blocks of flex_attention --------------------------------------------------------------------


@st.composite
def intervals(draw):
    """Starts and stops of a batch, from texts with prefixes."""
    size, count = draw(st.integers(1, 70)), draw(st.integers(1, 3))
    rows = [
        row_of(
            draw(st.lists(st.integers(0, 9), min_size=size + 1, max_size=size + 1)),
            k,
            objective=draw(st.sampled_from(["causal", "prefix"])),
            reset_attention=True,
        )
        for k in range(count)
    ]
    return [torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("starts", "stops")]


@given(intervals(), st.sampled_from([4, 16, 128]), st.sampled_from([1, 2, 3]))
@settings(max_examples=100, deadline=None)
def test_blocks_are_those_of_the_dense_mask(bounds, block, cp):
    """A whole block has no hidden pair, and no pair that is seen is in a block that is left out;
    with cp for the queries of one rank, where their number divides.
    """
    batch, size = bounds[0].shape
    places = torch.arange(size)
    group = Group(tuple(range(cp if size % (2 * cp) == 0 else 1)))
    own = group.balanced_shard(places, 0)
    dense = visible(*bounds, None, torch.float64, own).dense[:, 0]
    assert torch.equal(dense, visible(*bounds, None, torch.float64).dense[:, 0, own])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_masks, "BLOCK", block)
        blocks = visible_blocks(*(bound[:, own] for bound in bounds), size)
    for b in range(batch):
        listed = torch.zeros(len(own), size, dtype=torch.bool)
        for q in range(-(-len(own) // block)):
            rows = slice(q * block, (q + 1) * block)
            for whole, numbers, indices in (
                (False, blocks.kv_num_blocks, blocks.kv_indices),
                (True, blocks.full_kv_num_blocks, blocks.full_kv_indices),
            ):
                for k in indices[b, 0, q, : numbers[b, 0, q]].tolist():
                    columns = slice(k * block, (k + 1) * block)
                    assert not listed[rows, columns].any(), "each block once"
                    listed[rows, columns] = True
                    assert dense[b, rows, columns].all() or not whole
        assert not (dense[b] & ~listed).any()
        rows = torch.arange(len(own))[:, None]
        assert torch.equal(blocks.mask_mod(b, 0, rows, places), dense[b])


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("alibi", [False, True])
def test_flex_attention_gives_what_the_dense_mask_does(alibi, cp):
    """By torch's own reference of it, on the CPU, without compiling; with cp a rank's queries."""
    torch.manual_seed(1)
    rows = [
        row_of(torch.randint(60, (201,)), k, objective="prefix", reset_attention=True)
        for k in range(2)
    ]
    bounds = [torch.from_numpy(np.stack([r[name] for r in rows])) for name in ("starts", "stops")]
    q, k, v = torch.randn(2, 4, 200, 16), torch.randn(2, 2, 200, 16), torch.randn(2, 2, 200, 16)
    slopes = alibi_slopes(4) if alibi else None
    own = Group(tuple(range(cp)), cp - 1).balanced_shard(torch.arange(200), 0)
    mask, q = visible(*bounds, slopes, torch.float32, own), q[:, :, own]
    expected = attention_masks.masked_attention(q, k, v, mask)
    score = alibi_score(slopes.float(), own if cp > 1 else None) if alibi else None
    blocks = visible_blocks(*(bound[:, own] for bound in bounds), 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        ours = flex_attention(q, k, v, score, blocks, enable_gqa=True)
    assert_close(ours, expected, 1e-5, scale=1.0)


# ---- Every layout --------------------------------------------------------------------------------


def write_chats(folder) -> None:
    """A pair of random documents, and which of its tokens are answers."""
    random = np.random.default_rng(1)
    with (
        IndexedDatasetWriter(f"{folder}/chats", 61) as tokens,
        IndexedDatasetWriter(f"{folder}/chats.targets", 2) as answers,
    ):
        for size in random.integers(1, 20, size=300):
            tokens.add_document([*random.integers(4, 61, size=size), EOD])
            answers.add_document(random.integers(2, size=size + 1))


def test_masks_and_objectives_do_not_depend_on_the_layout(tmp_path):
    write_chats(tmp_path)
    check_lines("masks", tmp_path, tmp_path)


# ---- Mistakes ------------------------------------------------------------------------------------


def test_answers_of_another_corpus_are_refused(tmp_path):
    write_chats(tmp_path)
    about = {"data": [f"{tmp_path}/chats"], "answers_only": True, "cache": "none"}
    with IndexedDatasetWriter(f"{tmp_path}/chats.targets", 2) as answers:
        answers.add_document([1, 0])
    config = validation.check(options(about), 1)
    message = r"chats: 300 sequences of \d+ tokens, but .*chats.targets has 1 of 2"
    with pytest.raises(UserError, match=message):
        data.build(config)
