"""The choice of --schedule auto: the fastest named schedule within 1F1B's memory, on every rank."""

import subprocess
import sys
from dataclasses import replace

import golden_worker
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ranks import ROOT

from architecture.shape import ModelShape
from config import validation
from config.schema import Layout, Training
from config.spelling import preset
from costs import auto_schedule, memory, time_terms
from costs.auto_schedule import MOST_HELD, decide, decide_layout, fastest
from costs.hardware import load
from costs.job import Job
from costs.partition_costs import REFERENCE, blocks_of, part_costs, reference, specs_of
from costs.step_time import action_seconds, passes_of, pipeline_time
from schedules import orders
from schedules.simulation import makespan

SHAPE = ModelShape(11, 256, 8, vocab_size=8192, seq_length=256)
LAYOUT = Layout(pp=4, dp=1, schedule="auto")


def job_of(shape: ModelShape, layout: Layout, micro_batches: int, kind: str = "cuda") -> Job:
    batch = micro_batches * layout.micro_batch_size * layout.dp
    return Job(shape, layout, Training(global_batch_size=batch), reference(kind))


@st.composite
def jobs(draw):
    """A small model on a pipeline, also on CPUs, with tp and recomputation."""
    tp, pp = draw(st.sampled_from([1, 2])), draw(st.integers(2, 5))
    layers = draw(st.integers(1, 12))
    assume(pp <= layers + 2)
    shape = ModelShape(
        layers,
        draw(st.sampled_from([256, 2048])),
        8,
        vocab_size=draw(st.sampled_from([1024, 50304])),
        seq_length=draw(st.sampled_from([256, 2048])),
        tied=draw(st.booleans()),
    )
    recompute = draw(st.sampled_from(["none", "full"]))
    layout = Layout(tp=tp, pp=pp, dp=1, schedule="auto", recompute=recompute)
    kind = draw(st.sampled_from(["cuda", "cpu"]))
    return job_of(shape, layout, draw(st.integers(1, 12)), kind)


@settings(max_examples=40)
@given(jobs())
def test_the_choice_is_the_fastest_named_schedule_by_the_planners_prices(job):
    """Each priced as a layout with this schedule is: same seconds, same simulation, same memory."""
    layout, choice = decide_layout(job)
    named = {}
    for name, virtual in auto_schedule.TRIED:
        if name != "1f1b" and job.layout.pp * virtual > job.model.layers + 2:
            continue
        stages = virtual if name == "interleaved" else None
        tried = replace(job.layout, schedule=name, virtual_stages=stages)
        priced = job._replace(layout=tried)
        most = max(one.activations + one.working for one in memory.stages(priced))
        named[name, virtual] = pipeline_time(priced)[0], most
    limit = MOST_HELD * named["1f1b", 1][1]
    within = {key: one[0] for key, one in named.items() if key[0] == "1f1b" or one[1] <= limit}
    if job.micro_batches > job.layout.pp:  # GPipe is not tried
        within = {key: seconds for key, seconds in within.items() if key[0] != "gpipe"}
    assert choice.seconds == min(within.values())
    assert choice.plain.seconds == named["1f1b", 1][0]
    assert choice.name in str(choice)
    # What is priced is what is executed, by the same order.
    assert list(choice.blocks) == blocks_of(job._replace(layout=layout))
    order = orders.schedule_for(layout, job.micro_batches)
    sent = float(time_terms.message_seconds(job))
    ended = makespan(order, action_seconds(job._replace(layout=layout)), sent)
    if job.machine.ranks_per_core == 1:
        assert choice.seconds == pytest.approx(ended, rel=0.02)  # many rounds are extrapolated


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-2-7b", "olmoe-1b-7b"])
def test_blocks_are_shared_out_by_the_planners_seconds(name):
    """They are those of one sample on the reference machine, for a plan and a run alike."""
    shape = preset(name)
    for machine, kind in (("h100", "cuda"), ("v100-32", "cuda"), ("cpu", "cpu")):
        job = Job(shape, Layout(pp=4, dp=2), Training(precision="fp16"), load(machine))
        costs = part_costs(shape, "fp16", kind)
        training = Training(global_batch_size=1, precision="fp16")
        passes = passes_of(Job(shape, Layout(dp=1), training, load(REFERENCE[kind])))
        assert costs.head == pytest.approx(float(sum(passes.head)))
        assert costs.embedding == pytest.approx(float(sum(passes.embedding)))
        assert costs.block <= float(sum(passes.block)) * (1 + 1e-9)  # that is launched by the host
        assert sum(spec.share for spec in specs_of(job)) == pytest.approx(1.0)


def test_the_log_names_a_faster_schedule_that_holds_too_much(monkeypatch):
    job = job_of(preset("llama-2-7b"), Layout(pp=8, dp=1, schedule="auto"), 16)
    monkeypatch.setattr(auto_schedule, "MOST_HELD", 0.1)
    choice = fastest(job)
    assert choice.name == "1f1b"
    assert choice.faster.seconds < choice.seconds
    assert f"; {choice.faster.title} would take" in str(choice)
    held = f"hold {choice.faster.held:.2f} times the activations of 1F1B's fullest rank"
    assert held in str(choice)


def test_a_partition_that_is_given_is_kept():
    shape = ModelShape(8, 1024, 8)
    layout, choice = decide_layout(job_of(shape, replace(LAYOUT, partition="1,3,3,1"), 12))
    assert choice.blocks == (1, 3, 3, 1)
    assert layout.partition == "1,3,3,1"


def test_a_schedule_is_decided_once():
    job = job_of(SHAPE, LAYOUT, 12, "cpu")
    layout, _ = decide_layout(job)
    assert decide_layout(job._replace(layout=layout)) == (layout, None)


def test_a_plan_on_any_gpu_chooses_what_a_run_chooses():
    """The run does not know the machine of the plan."""
    job = job_of(preset("llama-2-7b"), replace(LAYOUT, pp=8), 32)
    chosen = {decide_layout(job._replace(machine=load(name)))[0] for name in ("h100", "v100-32")}
    assert chosen == {decide_layout(job)[0]}


PROGRAM = """
from test_choice import LAYOUT, SHAPE, decide_layout, job_of, orders
layout, choice = decide_layout(job_of(SHAPE, LAYOUT, 12))
order = orders.schedule_for(layout, 12)
print(layout.schedule, layout.partition, [list(map(str, row)) for row in order.ranks])
"""


def test_every_process_finds_the_same():
    """Ranks need not tell one another: whatever Python's hash seed."""
    seen = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout)
    assert len(seen) == 1


def test_a_run_without_a_pipeline_has_nothing_to_choose():
    config = validation.check(golden_worker.options({"schedule": "auto"}), 1)
    found, choice = decide(config, "cpu")
    assert (found.layout.schedule, choice) == ("1f1b", None)
