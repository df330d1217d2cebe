"""Masks and objectives: if this failed, tokens would see others than the rules say."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from golden_worker import options
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_corpora import END, write_chats
from test_golden import check_lines
from torch.nn.attention.flex_attention import flex_attention

import data
import trainer
from architecture.shape import ModelShape
from base.errors import UserError
from config import validation
from config.run_options import Data
from corpora.objectives import Objective
from corpora.token_files import IndexedDatasetWriter
from data import Batch
from distributed.collectives import Group
from distributed.context_parallel import heads_of_kernel
from distributed.mesh import Mesh
from layers import attention_masks
from layers.attention import attention_kernel
from layers.attention_masks import alibi_score, alibi_slopes, range_mask, visible_blocks
from parallel import ParamFactory

EOD, S = END, 16


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


def seen_by(row) -> np.ndarray:
    """(s, s): whether token q sees token k, from a row's starts and stops."""
    places = np.arange(len(row["tokens"]))
    return (places >= row["starts"][:, None]) & (places < row["stops"][:, None])


def counted_in(row) -> np.ndarray:
    """Which labels of a row count in the loss."""
    return row["labels"] >= 0


# ---- The rules, one token after the other --------------------------------------------------------


@given(texts, st.integers(0, 9), st.booleans(), st.booleans())
@example([EOD] * 9, 0, True, True)
@example([EOD, 1], 0, True, True)
@settings(max_examples=200)
def test_prefixes_by_their_definition(text, k, attention, eod):
    """Masks without prefixes are compared with Megatron's."""
    row = row_of(text, k, objective="prefix", reset_attention=attention, mask_eod_loss=eod)
    tokens, size = text[:-1], len(text) - 1
    # The number of the document of each token: an end is the last of its own.
    documents = [tokens[:place].count(EOD) if attention else 0 for place in range(size)]
    first = [documents.index(document) for document in documents]
    ends = row["stops"][first].tolist()
    assert row["tokens"].tolist() == tokens
    assert [b if a == -1 else a for a, b in zip(row["labels"], text[1:])] == text[1:]
    for q in range(size):
        sees = [documents[q] == documents[n] and n < max(q + 1, ends[q]) for n in range(size)]
        assert seen_by(row)[q].tolist() == sees
        assert 1 <= ends[q] - first[q] <= max(1, documents.count(documents[q]) - 1)
        counted = q + 1 >= ends[q] and not (eod and tokens[q] == EOD)
        assert counted_in(row)[q] == counted


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
@settings(max_examples=150)
def test_masks_are_megatrons(megatron_masks, text, positions, attention, eod):
    row = row_of(text, reset_attention=attention, reset_positions=positions, mask_eod_loss=eod)
    tokens = torch.tensor(text[:-1])
    hidden, counted, places = megatron_masks(tokens, EOD, positions, attention, eod, True)
    size = len(tokens)
    ours = seen_by(row) if attention else np.tri(size, dtype=bool)
    assert (~hidden[0]).tolist() == ours.tolist()
    assert counted.bool().tolist() == counted_in(row).tolist()
    assert places.tolist() == row.get("positions", np.arange(size)).tolist()


# ---- Through a model -----------------------------------------------------------------------------


def batch_of(rows: list[dict]) -> Batch:
    """The rows of a batch, as a stage takes them."""
    names = ("tokens", "labels", "starts", "stops", "positions")
    tensors = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in names}
    return Batch(count=int((tensors["labels"] >= 0).sum()), **tensors)


@pytest.mark.parametrize("objective", ["causal", "prefix"])
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [("gpt2", torch.float64, 1e-12), ("llama", torch.float32, 1e-5)]
)
def test_logits_and_losses_are_those_of_transformers(name, dtype, tolerance, objective):
    """There with the mask written out, (s, s), and with the positions of the tokens."""
    families = pytest.importorskip("test_families")
    theirs = families.their_model(name, dtype)
    stage = families.our_stage(theirs, dtype, masked=True)
    every = {"objective": objective, "reset_attention": True, "reset_positions": True}
    rows = [row_of(torch.randint(9, (families.S + 1,)), k, **every) for k in range(2)]
    batch = batch_of(rows)
    seen = torch.from_numpy(np.stack([seen_by(row) for row in rows]))[:, None]
    bias = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    expected = theirs(batch.tokens, attention_mask=bias, position_ids=batch.positions).logits
    logits = stage.head.logits(stage.hidden_states(batch.tokens, batch)).transpose(0, 1)
    scale = expected.abs().max().item()
    assert_close(logits[..., : families.V], expected, tolerance, scale=scale)
    counted = batch.labels >= 0
    assert 0 < counted.sum() < counted.numel() or objective == "causal"
    wanted = F.cross_entropy(expected[counted], batch.labels[counted], reduction="sum")
    assert_close(stage(batch.tokens, batch), wanted, tolerance)


ALL = {"eod_token": EOD, "reset_attention": True, "mask_eod_loss": True, "vocab_size": 13}


def test_the_loss_is_divided_by_the_targets_of_the_global_batch():
    case = ALL | {"objective": "prefix", "reset_positions": True, "eval_samples": 8}
    case |= {"precision": "fp64", "micro_batch_size": 2}
    config = validation.check(options(case), 1)
    samples, state = data.build(config).train, trainer.build(config)
    objective = Objective(config.data, config.training.seed)
    batch = batch_of([objective.row(samples, k) for k in range(8)])
    assert 0 < batch.count < batch.labels.numel()
    mean = state.stages[0](batch.tokens, batch).item() / batch.count
    assert_close(trainer.evaluate(state, samples, 8), mean, 1e-12)
    assert_close(trainer.step(state, samples, 0, 1.0).loss, mean, 1e-12)
    state.reader.close()


def test_a_batch_without_targets_changes_nothing():
    """Every token is an end, so no label counts: no update, no NaN, and fp16's scale stays."""
    case = ALL | {"vocab_size": 1, "eod_token": 0, "precision": "fp16", "eval_samples": 8}
    config = validation.check(options(case), 1)
    samples, state = data.build(config).train, trainer.build(config)
    before = [p.detach().clone() for p in state.stages.parameters()]
    scale = state.optimizer.scale.value
    result = trainer.step(state, samples, 0, 1e-3)
    assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, True)
    assert all(map(torch.equal, before, state.stages.parameters()))
    assert (state.optimizer.updates, state.optimizer.scale.value) == (0, scale)
    assert trainer.evaluate(state, samples, 8) == 0.0
    state.reader.close()


# ---- Blocks of flex_attention --------------------------------------------------------------------


def bounds_of(texts: list, objective: str) -> list[torch.Tensor]:
    """Starts and stops, (b, s) each, of a batch of texts."""
    rows = [
        row_of(text, k, objective=objective, reset_attention=True) for k, text in enumerate(texts)
    ]
    return [torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("starts", "stops")]


@given(st.data(), st.integers(1, 70), st.integers(1, 3), st.sampled_from(["causal", "prefix"]))
@settings(max_examples=100)
def test_blocks_are_those_of_the_dense_mask(draws, size, batch, objective):
    """A whole block has no hidden pair, and no pair that is seen is in a block that is left out;
    with cp for the queries of one rank, where their number divides.
    """
    text = st.lists(st.integers(0, 9), min_size=size + 1, max_size=size + 1)
    bounds = bounds_of([draws.draw(text) for _ in range(batch)], objective)
    block, cp = draws.draw(st.sampled_from([4, 16, 128])), draws.draw(st.integers(1, 3))
    places = torch.arange(size)
    own = Group(tuple(range(cp if size % (2 * cp) == 0 else 1))).balanced_shard(places, 0)
    dense = range_mask(*bounds, None, torch.float64, own).dense[:, 0]
    assert torch.equal(dense, range_mask(*bounds, None, torch.float64).dense[:, 0, own])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_masks, "BLOCK", block)
        blocks = visible_blocks(*(bound[:, own] for bound in bounds), size)
    listed = torch.zeros(batch, len(own), size, dtype=torch.int64)
    for whole, numbers, indices in (
        (False, blocks.kv_num_blocks, blocks.kv_indices),
        (True, blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ):
        for b, _, q in np.ndindex(*numbers.shape):
            for k in indices[b, 0, q, : numbers[b, 0, q]].tolist():
                place = b, slice(q * block, (q + 1) * block), slice(k * block, (k + 1) * block)
                listed[place] += 1
                assert dense[place].all() or not whole
    assert listed.max() <= 1, "each block once"
    assert not (dense & (listed == 0)).any()
    for b in range(batch):
        rows = torch.arange(len(own))[:, None]
        assert torch.equal(blocks.mask_mod(b, 0, rows, places), dense[b])


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("alibi", [False, True])
def test_flex_attention_gives_what_the_dense_mask_does(alibi, cp):
    """By torch's own reference of it, on the CPU, without compiling; with cp a rank's queries."""
    torch.manual_seed(1)
    bounds = bounds_of(list(torch.randint(60, (2, 201))), "prefix")
    q, k, v = torch.randn(2, 4, 200, 16), torch.randn(2, 2, 200, 16), torch.randn(2, 2, 200, 16)
    slopes = alibi_slopes(4) if alibi else None
    own = Group(tuple(range(cp)), cp - 1).balanced_shard(torch.arange(200), 0)
    mask, q = range_mask(*bounds, slopes, torch.float32, own), q[:, :, own]
    expected = attention_masks.masked_attention(q, k, v, mask)
    score = alibi_score(slopes.float(), own if cp > 1 else None) if alibi else None
    blocks = visible_blocks(*(bound[:, own] for bound in bounds), 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        ours = flex_attention(q, k, v, score, blocks, enable_gqa=True)
    assert_close(ours, expected, 1e-5, scale=1.0)


@pytest.mark.parametrize(("capability", "flex"), [((7, 0), False), ((7, 5), False), ((8, 0), True)])
def test_gpus_before_ampere_take_a_bias_and_the_efficient_kernel(monkeypatch, capability, flex):
    """Triton has no tensor-core code for them. There a query head needs a key head of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert attention_masks.takes_flex(64, torch.float16, device) == flex
    model = ModelShape(layers=1, hidden=64, heads=4, seq_length=16)
    factory = ParamFactory(Mesh(), torch.float16, device)
    kernel = "flex_attention" if flex else "scaled_dot_product_attention"
    assert attention_kernel(model, factory, 1, masked=True) == f"torch {kernel}, of masks"
    q = SimpleNamespace(is_cuda=True, device=device, dtype=torch.float16, shape=(1, 4, 8, 64))
    k = torch.randn(1, 2, 8, 64)
    for keys in heads_of_kernel(q, k, k):
        assert torch.equal(keys, k if flex else k[:, [0, 0, 1, 1]])


# ---- Every layout --------------------------------------------------------------------------------


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
