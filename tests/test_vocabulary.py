"""--vocab-pp: a vocabulary spread over the pipeline's ranks changes neither result nor checkpoint.

Its schedules are checked for made-up costs: no deadlock, little more held than without, and in the
time that equal shares let expect. Then every pair of options against the single-rank run.
"""

import itertools
import json

import pytest
import torch
from compare import assert_close
from handmade_schedules import check_starts
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import fork_ranks
from test_checkpoint import check_chain
from test_golden import check_lines

from config.schema import ModelShape
from loss import LocalLoss
from parallel import ParamSpec
from schedules import orders
from schedules.long_schedule import LongSchedule
from schedules.partition import pass_costs
from schedules.schedule import Action
from schedules.simulation import bubble, makespan, simulate

# ------------------------------------------------------------------------------------------------
# Schedules
# ------------------------------------------------------------------------------------------------

COSTS = st.floats(0.0, 4.0)


@st.composite
def made(draw):
    """A schedule with the vocabulary's passes, its number of micro-batches, and some costs."""
    ranks, count = draw(st.integers(2, 7)), draw(st.integers(1, 20))
    name, backward = draw(st.sampled_from(["1f1b", "gpipe"])), draw(st.booleans())
    kinds = "FBESTG" if backward else "FEST"
    seconds = {(kind, s): draw(COSTS) for kind in kinds for s in range(ranks)}
    if backward:
        order = orders.build(name, ranks, count, vocabulary=draw(st.sampled_from([2, 3])))
        return order, count, seconds
    return orders.forward_only(tuple(range(ranks)), count, vocabulary=True), count, seconds


@given(made(), st.floats(0, 1))
def test_every_pass_runs_once_and_after_what_it_needs(found, transfer):
    order, count, seconds = found
    slots = simulate(order, seconds, transfer)
    ends = {slot.action: slot.end for row in slots for slot in row}
    ranks = range(order.stages)
    assert len(ends) == len({kind for kind, _ in seconds}) * order.stages * count
    assert makespan(order, seconds, transfer) == max(ends.values())
    for slot in itertools.chain(*slots):
        kind, stage, m = slot.action
        needed = {"S": [Action("F", ranks[-1], m)], "G": [Action("B", 0, m)]}.get(kind, [])
        everyone = {"T": "S"} | ({"F": "E"} if stage == 0 else {})
        everyone |= {"B": "T"} if stage == ranks[-1] else {}
        needed += [Action(everyone[kind], rank, m) for rank in ranks if kind in everyone]
        for one in needed:
            assert slot.start >= ends[one] + transfer * (one.stage != stage)


@given(made())
def test_no_message_is_started_before_what_its_other_end_waits_for(found):
    check_starts(found[0])


@settings(max_examples=40)
@given(st.integers(2, 8), st.integers(1, 60), st.sampled_from([2, 3]))
def test_1f1b_holds_one_or_two_more_micro_batches_and_one_of_logits(ranks, count, backward):
    order = orders.build("1f1b", ranks, count, vocabulary=backward)
    more = 1 if ranks < 5 else 2
    assert order.peak == tuple(min(ranks - rank + more, count) for rank in range(ranks))
    for row in order.ranks:
        passes = [action for action in row if action.kind in "ST"]
        assert [a.kind for a in passes] == ["S", "T"] * count
        assert [a.micro_batch for a in passes] == [m for m in range(count) for _ in "ST"]


def seconds_of(model: ModelShape, ranks: int, device: str) -> dict[tuple[str, int], float]:
    """FLOPs of the passes, with blocks in equal numbers and equal parts of the vocabulary."""
    embedding, block, head = pass_costs(model, device)
    blocks = model.layers // ranks
    each = {
        "F": blocks * block.forward,
        "B": blocks * (block.inputs + block.weights),
        "S": head.forward / ranks,
        "T": (head.inputs + head.weights) / ranks,
        "E": embedding.forward,
        "G": embedding.inputs,
    }
    return {(kind, stage): cost for kind, cost in each.items() for stage in range(ranks)}


@pytest.mark.parametrize("ranks", [4, 5, 8, 16])
def test_the_ranks_are_busy_for_as_long_as_equal_shares_let_expect(ranks):
    """The bubble of 1F1B with equal stages is (p - 1) / (m + p - 1)."""
    for vocab, count in itertools.product((8192, 32768, 131072), (2 * ranks, 4 * ranks)):
        model = ModelShape(layers=2 * ranks, hidden=1024, heads=8, seq_length=256, vocab_size=vocab)
        order = orders.build("1f1b", ranks, count, vocabulary=2)
        idle = bubble(simulate(order, seconds_of(model, ranks, "cpu")))
        assert idle < (ranks - 1) / (count + ranks - 1) + 0.02


@pytest.mark.parametrize(("ranks", "count"), [(2, 100), (4, 97), (6, 120), (12, 131)])
def test_many_micro_batches_are_priced_from_few(ranks, count):
    model = ModelShape(layers=24, hidden=1024, heads=8, seq_length=256, vocab_size=50257)
    seconds = seconds_of(model, ranks, "cuda")
    sent = 0.02 * seconds["F", 0]
    whole = orders.build("1f1b", ranks, count, vocabulary=2)
    priced = LongSchedule("1f1b", ranks, count, vocabulary=2)
    sizes = [1.0 + stage for stage in range(ranks)]
    assert priced.most_held(sizes) == pytest.approx(whole.most_held(sizes))
    exact = makespan(whole, seconds, sent)
    assert priced.makespan(seconds, sent) == pytest.approx(exact, rel=0.01)


# ------------------------------------------------------------------------------------------------
# What it is made of
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "rows"), [(1, 64), (3, 24), (4, 21)])
def test_the_loss_of_parts_is_that_of_the_whole(parts, rows):
    """61 words in parts of equal rows; the last ones are padding, of four parts a whole one too."""
    words, generator = 61, torch.Generator().manual_seed(1)
    logits = 9 * torch.randn(5, 2, rows * parts, generator=generator, dtype=torch.float64)
    labels = torch.randint(words, (5, 2), generator=generator)
    labels[3, 1] = -1  # no target
    whole = logits[..., :words].clone().requires_grad_()
    plain = torch.nn.CrossEntropyLoss(reduction="none", ignore_index=-1)
    expected = plain(whole.flatten(0, 1), labels.flatten())
    (0.3 * expected).sum().backward()
    local = []
    for start, part in zip(range(0, rows * parts, rows), logits.split(rows, -1), strict=True):
        place = min(words, start), min(words, start + rows)
        spec = ParamSpec("w", (words, 1), 0, *place, True)
        local.append(LocalLoss.of(part.clone(), labels, spec))  # it takes the logits' memory
    every = torch.stack([part.sums for part in local])
    losses, gradients = zip(*(part.finish(every.clone(), 0.3) for part in local))
    for found in losses:
        assert_close(found.flatten(), expected.detach(), 1e-12)
    gradient = torch.cat(gradients, -1)
    assert_close(gradient[..., :words], whole.grad, 1e-12, scale=1.0)
    assert not gradient[..., words:].any()


# ------------------------------------------------------------------------------------------------
# On four ranks and six
# ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_equals_the_single_rank_run(tmp_path):
    check_lines("vocabulary", tmp_path)


@pytest.mark.slow
def test_a_checkpoint_does_not_know_of_it(tmp_path):
    """Saved with it and continued without, and the other way, over six layouts."""
    common = {"save_every": 2, "precision": "fp64", "tied": False}
    layouts = [
        {"pp": 2, "vocab_pp": True},
        {"pp": 2, "zero": 2},
        {"pp": 2, "tp": 2, "vocab_pp": True},
        {"tp": 2},
        {"pp": 4, "vocab_pp": True, "schedule": "gpipe"},
        {"tp": 4},
    ]
    check_chain(4, common, layouts, tmp_path)


@pytest.mark.slow
def test_an_evaluation_ends_where_the_first_ranks_could_run_far_ahead(tmp_path):
    """All blocks are on the last of four ranks; the loss is that of the single-rank run."""
    words = "--layers 2 --hidden 32 --heads 4 --seq-length 32 --vocab-size 61 --steps 1 --data "
    words += "synthetic --global-batch-size 4 --eval-samples 24 --precision fp64 --out "
    found = []
    for ranks, more in ((4, " --pp 4 --vocab-pp --partition 0,0,0,2"), (1, "")):
        out = tmp_path / str(ranks)
        outcome = fork_ranks(ranks, "train.py", *f"{words}{out}{more}".split())
        assert outcome.status == 0, outcome.err[-4000:]
        rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        found.append(
            [v for row in rows for k, v in row.items() if "loss" in k and "scale" not in k]
        )
    assert len(found[0]) >= 2
    assert_close(found[0], found[1], 1e-10)
