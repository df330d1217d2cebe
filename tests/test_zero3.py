"""--zero 3: if this failed, reducing once a step, or keeping gathered weights, would train another
model, or communicate as often as before.
"""

import json
from dataclasses import replace

import pytest
from ranks import fork_ranks
from test_golden import check_lines

from architecture.model_stats import parameters
from base.errors import UserError
from config.command_line import parse
from config.schema import Layout, Training
from config.spelling import preset
from config.validation import check
from costs import hardware, memory, step_time
from costs.job import Job

A100 = hardware.load("a100-80")


@pytest.mark.slow
def test_every_setting_equals_one_rank(tmp_path):
    check_lines("zero3", tmp_path)


def test_gradients_are_reduced_once_a_step_and_weights_gathered_once_a_micro_batch():
    """Two blocks and the stage around them, and four micro-batches. torch gathers the stage's own
    weights once a micro-batch, as it keeps them for the backward pass.
    """
    outcome = fork_ranks(2, "tests/zero3_worker.py")
    assert outcome.status == 0, outcome.err[-3000:]
    default, once, kept, both = json.loads(outcome.out.splitlines()[-1])
    parts, micro_batches = 3, 4
    assert default["reduce_scatter"] == kept["reduce_scatter"] == parts * micro_batches
    assert once["reduce_scatter"] == both["reduce_scatter"] == parts
    again = parts - 1  # gathered in the backward pass too
    assert default["all_gather"] == once["all_gather"] == (parts + again) * micro_batches
    assert kept["all_gather"] == both["all_gather"] == parts * micro_batches
    for found in (once, kept, both):
        assert found["loss"] == pytest.approx(default["loss"], rel=1e-6)


@pytest.mark.parametrize("key", ["sync_each_batch", "reshard_after_forward"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_choices_are_refused_below_zero_3(key, zero):
    words = f"--layers 2 --hidden 16 --heads 2 --steps 1 --zero {zero} --set {key}=false"
    with pytest.raises(UserError, match=f"{key} false needs --zero 3, not {zero}"):
        check(parse(words.split()), 2)


def job(machine=A100, **options) -> Job:
    layout = Layout(dp=8, zero=3, sequence_parallel=False, **options)
    training = Training(global_batch_size=256, steps=1, precision="bf16")
    return Job(preset("1b3"), layout, training, machine)


def test_the_plan_counts_whole_sums_and_kept_weights():
    count = parameters(preset("1b3"))
    (default,) = memory.stages(job())
    (once,) = memory.stages(job(sync_each_batch=False))
    (kept,) = memory.stages(job(reshard_after_forward=False))
    assert once.gradients - default.gradients == pytest.approx(4 * count * 7 / 8, rel=0.01)
    assert kept.weights == pytest.approx(2 * count, rel=0.01)
    assert default.weights < kept.weights / 3
    # One micro-batch has nothing to sum first.
    one = {"micro_batch_size": 32}
    (single,) = memory.stages(job(sync_each_batch=False, **one))
    assert single.gradients == memory.stages(job(**one))[0].gradients


def test_the_plan_counts_fewer_collectives():
    """On a network that is too slow for a pass to hide them."""
    slow = replace(A100, nvlink=replace(A100.nvlink, bandwidth=1e9))

    def seconds(**options) -> float:
        return step_time.step_parts(job(slow, micro_batch_size=2, **options))["reduce"]

    once, kept = {"sync_each_batch": False}, {"reshard_after_forward": False}
    assert seconds(**once, **kept) < min(seconds(**once), seconds(**kept))
    assert max(seconds(**once), seconds(**kept)) < seconds()
