"""A resumed run and its past: if this failed, a resume with other options would have a wrong rate,
read wrong samples, or drop options of the run.
"""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_corpora import END, write_chats, write_corpora

import data
from base.errors import UserError
from checkpointing.resumed import has_order_of
from config.command_line import parse_request
from config.inherited import Inherited, changed_constants, inherited
from config.learning_rate import learning_rate
from config.past import Past, from_text, to_text
from config.schema import GROUPS, Config
from config.timeline import Timeline
from config.validation import check
from costs import memory
from costs.run_size import elements_of_run
from telemetry import log_lines
from telemetry.log import Log, Printed

SHAPE = "--layers 1 --hidden 8 --heads 2 --seq-length 16 --vocab-size 61"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder)
    write_chats(folder)
    return folder


def first_start(words: str) -> Config:
    return check(parse_request([*SHAPE.split(), *words.split()]).config, 1)


def resumed(before: Config, steps: int, words: str, ranks: int = 1) -> Config:
    """The configuration of a start that resumes `before` after `steps` steps, through its text."""
    samples = before.past.consumed(steps, Timeline(before).batches)
    text = to_text(before.past.with_start(Timeline(before).batches), Timeline(before).ordered)
    saved = json.loads(json.dumps(before.as_dict()))

    def of_checkpoint(given):
        options = inherited(saved, given)
        return Inherited(options, before.model, from_text(text, steps, samples), "STEP")

    request = parse_request(["--resume", "auto", *words.split()], resumed=of_checkpoint)
    return check(request.config, ranks)


# ------------------------------------------------------------------------------------------------
# Totals, rates and samples
# ------------------------------------------------------------------------------------------------

# Options of the first start beside 40 steps of 8 samples, options of the second start, and what
# the second start's steps, from step 20 on, have in samples: a function of the samples consumed.
CHANGES: dict[str, tuple[str, str, int, object]] = {
    "batch down": ("", "--global-batch-size 2", 40, lambda consumed: 2),
    "batch up": ("", "--global-batch-size 32", 40, lambda consumed: 32),
    "ramp-up longer": (
        "--rampup-batch-size 4 4 80",
        "--rampup-batch-size 4 2 200",
        40,
        lambda consumed: 4 + 2 * min(2, int(consumed / 100)),
    ),
    "ramp-up left out with another batch": (
        "--rampup-batch-size 4 4 80",
        "--global-batch-size 16",
        40,
        lambda consumed: 16,
    ),
    "a schedule": (
        "",
        "--batch-schedule 0:8 3000:24",
        40,
        lambda consumed: 8 if consumed < 3000 // 16 else 24,
    ),
    "more steps": ("", "--steps 64", 64, lambda consumed: 8),
    "fewer steps": ("", "--steps 25", 25, lambda consumed: 8),
    "layout": ("", "--micro-batch-size 2 --zero 0", 40, lambda consumed: 8),
    "data options": ("", "--split 90,10,0", 40, lambda consumed: 8),
    "nothing": ("", "", 40, lambda consumed: 8),
}
DATA = {
    "random": "",
    "corpus": "--data {0}/chats --cache none --split 100,0,0",
    "blend": "--data 3 {0}/chats 1 {0}/c --cache none --split 100,0,0",
    "chats": f"--data {{0}}/chats --cache none --split 100,0,0 --answers-only --eod-token {END}",
}


def expected_rate(schedule: str, done: int, total: int, high=1e-3, low=1e-5) -> float:
    """The rate after `done` of `total` samples, of a run without warm-up."""
    share = done / total
    if schedule == "cosine":
        return low + (high - low) * (1 + math.cos(math.pi * share)) / 2
    if schedule == "linear":
        return high - (high - low) * share
    if schedule == "inverse-square-root":
        return high / math.sqrt(done)
    tail = total // 10  # wsd: a fall over the last tenth
    share = max(0.0, done - (total - tail)) / tail
    return high - (high - low) * (math.sqrt(share) if schedule == "wsd-1-sqrt" else share)


SCHEDULES = {
    **{name: name for name in ("cosine", "linear", "wsd")},
    "wsd-1-sqrt": "wsd --lr-wsd-decay-style 1-sqrt",
    "inverse-square-root": "inverse-square-root --lr-warmup-samples 1",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("source", DATA)
@pytest.mark.parametrize("change", CHANGES)
def test_a_resumed_run_has_the_rates_and_samples_of_the_formula(change, source, schedule, corpora):
    before, after, steps, size = CHANGES[change]
    words = "--steps 40 --global-batch-size 8 --lr 1e-3 --min-lr 1e-5 "
    words += f"--lr-schedule {SCHEDULES[schedule]} "
    if change == "data options" and source == "random":
        pytest.skip("random tokens have no split")
    first = first_start(words + before + " " + DATA[source].format(corpora))
    begin = Timeline(first).batches.consumed(20)
    second = resumed(first, 20, after)

    sizes = []  # of the steps that are left, counted one by one
    consumed = begin
    for _ in range(20, steps):
        sizes.append(size(consumed))
        consumed += sizes[-1]
    assert (Timeline(second).total_steps, Timeline(second).total_samples) == (steps, consumed)
    assert second.data.answers_only == (source == "chats")
    place = begin
    for batch in sizes:
        assert Timeline(second).batch_at(place) == batch
        rate = learning_rate(second.training, place, Timeline(second).total_samples, batch)
        assert rate == pytest.approx(expected_rate(schedule, place, consumed), rel=1e-9)
        place += batch

    if source == "random" or change == "data options" or schedule != "cosine":
        return
    ours, theirs = (data.build(config).train for config in (second, first))
    for k in range(min(len(ours), len(theirs))):  # no sample is read twice, or passed over
        assert np.array_equal(ours.sample(k), theirs.sample(k)), k
    assert len(ours) >= consumed
    ours.sample(consumed - 1)


def test_the_final_rate_is_a_tenth_unless_the_run_had_another():
    """What a run.json says stands: runs from before had 3e-5 written into it, whatever --lr was."""
    first = first_start("--steps 40 --lr 1e-5")
    assert first.training.final_lr == pytest.approx(1e-6)
    assert resumed(first, 20, "--lr 1e-4").training.final_lr == pytest.approx(1e-5)
    old = first_start("--steps 40 --lr 1e-3 --min-lr 3e-5")
    for words in ("", "--lr 1e-3", "--lr 1e-4"):
        assert resumed(old, 20, words).training.final_lr == 3e-5
    assert resumed(old, 20, "--min-lr 1e-6").training.final_lr == 1e-6


def test_the_sizes_of_several_resumes_add_up():
    run = first_start("--steps 40 --global-batch-size 8")
    for steps, batch in ((10, 2), (15, 32), (16, 4)):
        run = resumed(run, steps, f"--global-batch-size {batch}")
    assert Timeline(run).total_samples == 10 * 8 + 5 * 2 + 1 * 32 + 24 * 4
    starts = [(start.step, start.samples) for start in run.past.starts]
    assert starts == [(0, 0), (10, 80), (15, 90)]
    again = resumed(run, 20, "")
    assert Timeline(again).total_samples == Timeline(run).total_samples
    assert len(again.past.starts) == 4
    assert len(resumed(again, 30, "").past.starts) == 4  # the same sizes are no further start


@pytest.mark.parametrize(("batch", "samples"), [(2, 200), (32, 800)], ids=["down", "up"])
def test_memory_and_time_left_count_the_samples_of_the_run(batch, samples, monkeypatch):
    """Not those of 40 steps with the present batch size, of which 20 had 8 samples."""
    words = "--device cpu --data corpus --cache none"
    run = resumed(first_start(f"--steps 40 --global-batch-size 8 {words}"), 20,
                  f"--global-batch-size {batch}")  # fmt: skip
    # The order of samples is made for the 320 of the first start, and then continued.
    most = max(samples, 320)
    memory.check_fits([], run, memory.ORDER_BYTES * most)
    with pytest.raises(UserError, match=f"the order of {most} samples takes "):
        memory.check_fits([], run, memory.ORDER_BYTES * most - 1)
    alike = replace(run, past=Past(), training=replace(run.training, steps=1, global_batch_size=1))
    assert elements_of_run(run) - elements_of_run(alike) == most - 1

    shown: list[int] = []
    monkeypatch.setattr(log_lines, "step_line", lambda *facts: shown.append(facts[-1]) or "")
    log = SimpleNamespace(config=run, timeline=Timeline(run), printed=Printed(1), note=shown.append)
    log.total, log.steps = 40, None
    for iteration, consumed in ((21, 160 + batch), (39, samples - batch)):
        Log._print_step(log, {"iteration": iteration, "consumed_samples": consumed})
    assert shown == [samples - 160 - batch, "", batch, ""]


@pytest.mark.parametrize("batch", [2, 32])
def test_a_start_that_has_no_step_to_do_has_the_batch_size_of_its_options(batch):
    """It is described and checked as any start is, and ends."""
    run = first_start("--steps 40 --global-batch-size 8")
    over = resumed(run, 40, f"--global-batch-size {batch} --stop-at-samples 320")
    assert [level.batch for level in Timeline(over).levels] == [batch]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(1, 99),
)
def test_any_chain_of_resumes_counts_what_was_consumed(chain, left):
    run = first_start("--steps 999 --global-batch-size 8")
    step = samples = 0
    batch = 8
    for count, size in chain:
        step, samples = step + count, samples + count * batch
        run, batch = resumed(run, step, f"--global-batch-size {size}"), size
    run = replace(run, training=replace(run.training, steps=step + left))
    assert (run.past.samples, Timeline(run).total_samples) == (samples, samples + left * batch)


def test_with_a_number_of_samples_the_steps_follow_from_the_past():
    first = first_start("--train-samples 320 --global-batch-size 8")
    second = resumed(first, 20, "--global-batch-size 2")
    assert (Timeline(second).total_samples, Timeline(second).total_steps) == (320, 20 + 80)
    assert [(v.batch, v.first_step, v.consumed) for v in Timeline(second).levels] == [(2, 20, 160)]
    # Steps beyond the first guess can be traced, and the batches before need not divide.
    assert resumed(first, 20, "--global-batch-size 2 --trace-numerics 90").run.trace_numerics
    assert resumed(first, 20, "--global-batch-size 12 --tp 1", 4).layout.dp == 4


def test_a_longer_run_continues_the_order_by_whole_epochs(corpora):
    """One corpus of 12 samples an epoch: 40 steps of 1 sample, then 80, each epoch once."""
    words = f"--data {corpora}/a --cache none --split 1 --global-batch-size 1"
    first = first_start(f"{words} --steps 40")
    order = data.build(first).train
    second = resumed(first, 20, "--steps 80")
    assert Timeline(second).ordered == (40, 80)
    longer = data.build(second).train
    rest = first_start(f"{words} --seed 1235 --steps {80 - len(order)}")
    further = data.build(rest).train
    samples = [longer.sample(k) for k in range(80)]
    assert all(np.array_equal(samples[k], order.sample(k)) for k in range(len(order)))
    for k in range(len(order), 80):
        assert np.array_equal(samples[k], further.sample(k - len(order)))
    assert longer.count_by_corpus(0, 80) == {f"{corpora}/a": 80}
    third = resumed(second, 60, "--steps 70")  # fewer again: the same order
    assert Timeline(third).ordered == (40, 80)


def test_other_data_have_an_order_of_their_own(corpora):
    first = first_start(f"--data {corpora}/a --steps 40")
    saved = json.loads(json.dumps(first.as_dict()))
    assert has_order_of(saved, first)
    for words in ("--seed 5", "--split 90,10,0", f"--data {corpora}/b", "--order stable"):
        assert not has_order_of(saved, resumed(first, 20, words))


def test_iterations_of_megatrons_names_count_the_batch_that_each_start_had():
    first = first_start("--train-iters 40 --lr-warmup-iters 25 --global-batch-size 8")
    assert first.training.lr_warmup_samples == 200
    second = resumed(first, 20, "--lr-warmup-iters 25 --global-batch-size 2")
    assert second.training.lr_warmup_samples == 20 * 8 + 5 * 2
    assert resumed(first, 20, "--global-batch-size 2").training.lr_warmup_samples == 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"starts": [], "ordered": [0], "run": ""}',
        '{"starts": [], "ordered": [], "run": "../x"}',
        '{"starts": [[0, 0, []]], "ordered": [], "run": ""}',
        '{"starts": [[0, 0, [[0, 0]]]], "ordered": [], "run": ""}',
        '{"starts": [[0, -1, [[0, 8]]]], "ordered": [], "run": ""}',
        '{"starts": [[0, 0.5, [[0, 8]]]], "ordered": [], "run": ""}',
        '{"starts": 3, "ordered": [], "run": ""}',
        "[" * 10**5,
    ],
)
def test_a_damaged_past_is_refused(text):
    with pytest.raises(ValueError, match="is no past of a run"):
        from_text(text, 1, 8)


# ------------------------------------------------------------------------------------------------
# Options
# ------------------------------------------------------------------------------------------------

# What a resume takes over if it is not given, and what not. A new option follows its declaration.
FROM_THE_CHECKPOINT = [
    "global_batch_size",
    "rampup_batch_size",
    "batch_schedule",
    "steps",
    "train_samples",
    "precision",
    "grad_dtype",
    "optimizer",
    "lr",
    "min_lr",
    "lr_schedule",
    "lr_warmup_samples",
    "lr_decay_samples",
    "lr_wsd_decay_samples",
    "lr_wsd_decay_style",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "ema",
    "sgd_momentum",
    "muon_momentum",
    "muon_qkv",
    "muon_scale",
    "muon_dtype",
    "muon_adamw_lr",
    "loss_scale",
    "clip_grad",
    "init_std",
    "balance",
    "balance_rate",
    "router_z_loss",
    "z_loss",
    "seed",
    "data",
    "split",
    "order",
    "skip_samples",
    "objective",
    "eod_token",
    "reset_attention",
    "reset_positions",
    "mask_eod_loss",
    "answers_only",
]
OF_THE_START = ["eval_every", "eval_samples", "eval_data", "eval_tasks", "eval_ema", "cache"]
OF_THE_START += ["phases"]  # its contents are taken over


def test_a_resume_takes_each_option_as_its_declaration_says():
    saved: dict[str, dict[str, str]] = {"training": {}, "data": {}}
    declared = {}
    for group in saved:
        for field in fields(GROUPS[group]):
            saved[group][field.name] = f"x{field.name}"
            declared[field.name] = not field.metadata["at_each_start"]
    found = inherited(saved, {})
    assert found.keys() == {name for name, kept in declared.items() if kept} - {"batch_tokens"}
    assert found.keys() >= {*FROM_THE_CHECKPOINT}
    assert found.keys().isdisjoint(OF_THE_START)
    for name in found:
        assert name not in inherited(saved, {name: "given"})
    layout_and_run = {field.name for group in ("layout", "run") for field in fields(GROUPS[group])}
    everything = {group: {field.name: 1 for field in fields(GROUPS[group])} for group in GROUPS}
    assert inherited(everything, {}).keys().isdisjoint(layout_and_run)


REPLACED = [
    ({"steps": 5}, {"train_samples": 9}, {}),
    ({"train_samples": 5}, {"steps": 9}, {}),
    ({"batch_schedule": ["0:4"]}, {"rampup_batch_size": [1, 1, 4], "global_batch_size": 8}, {}),
    ({"global_batch_size": 4}, {"rampup_batch_size": [1, 1, 4], "global_batch_size": 8}, {}),
    ({"batch_tokens": 4}, {"batch_schedule": ["0:8"], "global_batch_size": 8}, {}),
    (
        {"global_batch_size": 8},
        {"rampup_batch_size": [1, 1, 4], "global_batch_size": 8},
        {"rampup_batch_size": [1, 1, 4]},
    ),
    ({"rampup_batch_size": (2, 2, 4)}, {"global_batch_size": 8}, {"global_batch_size": 8}),
    ({"lr": 1.0}, {"lr": 2.0, "skip_samples": None, "new_option": 3}, {}),
]


@pytest.mark.parametrize(("given_options", "saved", "taken"), REPLACED)
def test_a_given_option_replaces_those_that_it_excludes(given_options, saved, taken):
    assert inherited({"training": saved}, given_options) == taken


def test_a_note_names_what_comes_from_the_checkpoint(corpora):
    words = f"--data {corpora}/chats --answers-only --eod-token {END} --reset-attention --lr 1e-3"
    first = first_start(f"{words} --steps 9")
    saved = json.loads(json.dumps(first.as_dict()))
    options = inherited(saved, {"data": first.data.data, "steps": 12})
    note = Inherited(options, folder="STEP").note
    named = f"lr 0.001, eod-token {END}, reset-attention, answers-only"
    assert note == f"taken from STEP: global-batch-size 8, {named}"
    assert Inherited().note == ""
    saved["training"] |= {"loss_scale_window": 500, "min_loss_scale": 1.0, "max_overflows": None}
    changed = changed_constants(saved)
    assert changed == ("loss_scale_window 500 (now 1000)",)
    note = Inherited(folder="STEP", changed=changed).note
    assert note == "not taken, since they are constants now: loss_scale_window 500 (now 1000)"
    off = resumed(first, 4, "--no-answers-only --no-reset-attention")
    assert not off.data.answers_only
    assert off.data.eod_token == END


def test_a_past_of_a_run_from_the_beginning_is_empty():
    assert first_start("--steps 3").past == Past()
    assert Timeline(first_start("--steps 3")).ordered == (24,)
