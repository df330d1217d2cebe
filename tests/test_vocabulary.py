"""--vocab-pp: a vocabulary spread over the pipeline's ranks changes neither result nor checkpoint.

Its schedules are checked for made-up costs: no deadlock, little more held than without, and in the
time that equal shares let expect. Then every pair of options against the single-rank run.
"""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from handmade_schedules import check_starts
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import fork_ranks
from test_checkpoint import check_chain
from test_golden import check_lines

from config.schema import Layout, ModelShape, Training
from config.spelling import preset
from distributed.mesh import Mesh
from loss import LocalLoss, cross_entropy
from parallel import ParamSpec
from planner import hardware, step_time
from schedules import orders, schedule
from schedules.long_schedule import LongSchedule
from schedules.partition import pass_costs, stage_specs
from schedules.schedule import Action, Schedule, ScheduleError
from schedules.simulation import bubble, draw, makespan, simulate

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


@settings(deadline=None)
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


@settings(deadline=None)
@given(made())
def test_no_message_is_started_before_what_its_other_end_waits_for(found):
    check_starts(found[0])


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 8), st.integers(1, 60), st.sampled_from([2, 3]))
def test_1f1b_holds_one_or_two_more_micro_batches_and_one_of_logits(ranks, count, backward):
    order = orders.build("1f1b", ranks, count, vocabulary=backward)
    more = 1 if ranks < 5 else 2
    assert order.peak == tuple(min(ranks - rank + more, count) for rank in range(ranks))
    for row in order.ranks:
        passes = [action for action in row if action.kind in "ST"]
        assert [a.kind for a in passes] == ["S", "T"] * count
        assert [a.micro_batch for a in passes] == [m for m in range(count) for _ in "ST"]


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 8), st.integers(1, 80), st.sampled_from(["1f1b", "gpipe"]))
def test_what_many_micro_batches_hold_is_found_from_few(ranks, count, name):
    sizes = [1.0 + stage for stage in range(ranks)]
    whole = orders.build(name, ranks, count, vocabulary=2)
    found = LongSchedule(name, ranks, count, vocabulary=2)
    assert found.most_held(sizes) == pytest.approx(whole.most_held(sizes))


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


@pytest.mark.parametrize(("ranks", "count"), [(2, 100), (4, 97), (6, 120), (8, 200), (12, 131)])
def test_the_end_of_many_micro_batches_is_extrapolated_from_few(ranks, count):
    model = ModelShape(layers=24, hidden=1024, heads=8, seq_length=256, vocab_size=50257)
    seconds = seconds_of(model, ranks, "cuda")
    sent = 0.02 * seconds["F", 0]
    exact = makespan(orders.build("1f1b", ranks, count, vocabulary=2), seconds, sent)
    found = LongSchedule("1f1b", ranks, count, vocabulary=2).makespan(seconds, sent)
    assert found == pytest.approx(exact, rel=0.01)


def test_the_drawing_shows_the_passes():
    order = orders.build("1f1b", 2, 2, vocabulary=2)
    last = draw(simulate(order)).splitlines()[-1].split()
    passes = [cell for cell in last if cell[0] in "FSTB"]
    assert passes == ["F0", "F1", "S0", "T0", "S1", "T1", "B0", "B1"]


def by_hand(rows: list[str]) -> Schedule:
    ranks = [[Action(w[0], rank, int(w[1:])) for w in row.split()] for rank, row in enumerate(rows)]
    return Schedule("by hand", tuple(map(tuple, ranks)), tuple(range(len(rows))))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["E0 F0 S0 T0 B0 G0", "E0 F0 S0 B0 T0 G0"], "rank 1 waits at B0 of stage 1"),
        (["E0 F0 T0 S0 B0 G0", "E0 F0 S0 T0 B0 G0"], "rank 0 waits at T0 of stage 0"),
        (["E0 F0 S0 T0 B0 G0", "E0 F0 S0 T0 B0"], "rank 1 does E0 F0 S0 T0 B0, not each of"),
        (["E0 F0 S0 T0 G0 B0", "E0 F0 S0 T0 B0 G0"], "rank 0 waits at G0 of stage 0"),
        (["E0 F0 S0 T0 B0 G0", "F0 S0 T0 B0 E0 G0"], "rank 0 waits at F0 of stage 0"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(rows, message):
    with pytest.raises(ScheduleError) as caught:
        schedule.check(by_hand(rows), 1, backward=True)
    assert message in str(caught.value)


def test_ranks_that_enter_collectives_in_another_order_are_refused():
    right = "E0 E1 F0 F1 S0 T0 S1 T1 B0 B1 G0 G1"
    schedule.check(by_hand([right, right]), 2, backward=True)
    wrong = right.replace("E0 E1", "E1 E0")
    with pytest.raises(ScheduleError, match="rank 1 does E1 E0, not in the order of micro-batches"):
        schedule.check(by_hand([right, wrong]), 2, backward=True)


# ------------------------------------------------------------------------------------------------
# What it is made of
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_the_loss_of_parts_is_that_of_the_whole(parts):
    """61 words in parts of equal rows; the last ones are padding, of four parts a whole one too."""
    words, rows = 61, {1: 64, 3: 24, 4: 21}[parts]
    generator = torch.Generator().manual_seed(1)
    logits = 9 * torch.randn(5, 2, rows * parts, generator=generator, dtype=torch.float64)
    labels = torch.randint(words, (5, 2), generator=generator)
    labels[3, 1] = -1  # no target
    whole = logits[..., :words].clone().requires_grad_()
    expected = F.cross_entropy(
        whole.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-1
    )
    (0.3 * expected).sum().backward()
    found = []
    for part, own in enumerate(logits.split(rows, -1)):
        start, stop = (min(words, n * rows) for n in (part, part + 1))
        spec = ParamSpec("w", (words, 1), 0, start, stop, True)
        found.append(LocalLoss.of(own.clone(), labels, spec))  # it takes the logits' memory
    every = torch.stack([local.sums for local in found])
    finished = [local.finish(every.clone(), 0.3) for local in found]
    for losses, _ in finished:
        assert_close(losses.flatten(), expected.detach(), 1e-12)
    gradient = torch.cat([gradient for _, gradient in finished], -1)
    assert_close(gradient[..., :words], whole.grad, 1e-12, scale=1.0)
    assert not gradient[..., words:].any()
    alone = cross_entropy(logits, labels, Mesh().tp, ParamSpec("w", (words, 1), 0, 0, words, True))
    assert_close(alone, finished[0][0], 1e-12)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [1000, 8192])
def test_every_word_is_on_one_stage(vocab, tied):
    model = ModelShape(layers=8, hidden=64, heads=4, vocab_size=vocab, tied=tied)
    specs = stage_specs(model, Layout(pp=4, tp=2, dp=1, vocab_pp=True))
    assert sum(spec.vocabulary for spec in specs) == vocab
    assert [spec.blocks for spec in specs] == [2, 2, 2, 2]
    assert sum(spec.share for spec in specs) == pytest.approx(1.0)
    if vocab == 8192:
        assert max(s.parameters for s in specs) - min(s.parameters for s in specs) < 80_000
    assert not any(spec.tied for spec in specs)


def test_the_planner_says_when_it_pays():
    """A head of nine blocks pays, BLOOM's does not: there the partition balances it."""
    machine, seconds = hardware.load("a100-80"), {}
    large = preset("bloom-176b")
    small = ModelShape(layers=24, hidden=2048, heads=16, seq_length=2048, vocab_size=250_000)
    for name, model, tp, pp in (("1b3", small, 1, 8), ("bloom", large, 4, 12)):
        for spread in (False, True):
            layout = Layout(tp=tp, pp=pp, dp=1, vocab_pp=spread, recompute="full")
            training = Training(global_batch_size=64, precision="bf16", steps=1)
            found = step_time.predict(model, layout, training, machine)
            seconds[name, spread] = found.seconds
            if spread and name == "1b3":
                held = [stage.weights for stage in found.memory]
                assert max(held) < 1.1 * min(held)
    assert seconds["1b3", True] < 0.7 * seconds["1b3", False]
    assert seconds["bloom", True] > seconds["bloom", False]


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
