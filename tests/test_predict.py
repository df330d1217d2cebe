"""If this failed, a predicted step would not be that of its kernels, collectives and schedule."""

import dataclasses
import math
import random
import statistics

import handmade_schedules as handmade
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from architecture.model_stats import parameters
from architecture.shape import ModelShape
from config.schema import Layout, Training
from config.spelling import preset
from costs import distances, hardware, op_costs, risk, step_time, time_terms
from costs.job import Job
from schedules import long_schedule as long_schedules
from schedules import orders, schedule, simulation
from schedules.interleaved import Interleaved
from schedules.long_schedule import LongSchedule
from tools.planner import engines

A100 = hardware.load("a100-80")


def program(machine, engine):
    """A machine with a program of tools/planner/engines.toml."""
    facts = engines.programs()[engine]["software"]
    return engines.on(hardware.load(machine), facts)


def software(machine, **changes):
    return dataclasses.replace(machine, software=dataclasses.replace(machine.software, **changes))


JEAN_ZAY = program("jean-zay-a100", "megatron-deepspeed-2022")


def training(batch: int, **rest) -> Training:
    return Training(global_batch_size=batch, **({"precision": "fp16"} | rest))


# ------------------------------------------------------------------------------------------------
# Kernels
# ------------------------------------------------------------------------------------------------


def test_ring_all_reduce_is_alpha_beta():
    link = hardware.Link(1e-5, 100e9, 0.5)
    seconds = op_costs.all_reduce(link, 8, 1e9)
    assert seconds == pytest.approx(2 * 7 * 1e-5 + 2 * 7 / 8 * 1e9 / 50e9)
    assert op_costs.all_reduce(link, 1, 1e9) == 0


def test_rings_take_the_right_link():
    inside = op_costs.ring(A100, 8, 1)
    assert (inside.speed, inside.latency) == (A100.nvlink.speed, A100.nvlink.latency)
    across = op_costs.ring(A100, 12, 8)  # a data group of tp 8: eight groups share the network
    assert across.speed == pytest.approx(A100.network.speed / 8)
    assert op_costs.ring(A100, 2, 4).speed == A100.nvlink.speed
    crossing = op_costs.ring(JEAN_ZAY, 16, 4)
    assert crossing.speed == pytest.approx(JEAN_ZAY.network.speed / 4 * JEAN_ZAY.crossing)


# ------------------------------------------------------------------------------------------------
# Pipelines
# ------------------------------------------------------------------------------------------------


def simulated(order: schedule.Schedule, seconds, transfer: float) -> float:
    """The end of the last action, by definition."""
    return max(row[-1].end for row in simulation.simulate(order, seconds, transfer))


@st.composite
def durations(draw, stages: int) -> dict[tuple[str, int], float]:
    """Seconds of every kind of action on every stage, from alike to far apart."""
    seconds = st.floats(0.1, draw(st.sampled_from([0.1, 0.2, 5.0])))
    return {(kind, stage): draw(seconds) for kind in "FBW" for stage in range(stages)}


@settings(max_examples=150)
@given(
    st.data(),
    st.sampled_from(list(orders.ORDERS)),
    st.integers(1, 8),
    st.integers(1, 40),
    st.floats(0, 1),
)
def test_a_named_schedule_is_the_one_that_is_built(data, name, ranks, count, transfer):
    """The memory is the same, and so is the end as long as no round is left out."""
    virtual = data.draw(st.integers(1, 3)) if name == "interleaved" else 1
    order = orders.build(name, ranks, count, virtual)
    priced = LongSchedule(name, ranks, count, virtual)
    sizes = [1.0 + stage for stage in range(order.stages)]
    assert priced.most_held(sizes) == pytest.approx(order.most_held(sizes))
    assert priced.most_held([1] * order.stages) == order.peak
    if priced.shortened().micro_batches < count:
        return
    near = st.floats(0.95, 1.05)
    seconds = {(kind, stage): data.draw(near) for kind in "FBW" for stage in range(order.stages)}
    expected = simulated(order, seconds, transfer)
    assert priced.makespan(seconds, transfer) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", orders.ORDERS)
def test_a_long_schedule_ends_nearly_when_its_full_rounds_are_counted(name):
    """On stages that differ by up to 10 %: 0.1 % in the mean, never more than 1.3 %.

    The cases are the same in every run, because the worst of all cases is not known.
    """
    draw = random.Random(30)
    differences = []
    for _ in range(60):
        ranks = draw.randint(2, 8)
        count = draw.randint(6 * ranks, 12 * ranks)
        virtual = draw.randint(2, 3) if name == "interleaved" else 1
        order = orders.build(name, ranks, count, virtual)
        stages = range(order.stages)
        seconds = {(kind, stage): draw.uniform(0.95, 1.05) for kind in "FBW" for stage in stages}
        transfer = draw.uniform(0, 0.3)
        expected = simulation.makespan(order, seconds, transfer)
        found = LongSchedule(name, ranks, count, virtual).makespan(seconds, transfer)
        differences.append(abs(found / expected - 1))
    assert statistics.mean(differences) < 0.001
    assert max(differences) < 0.0135


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from(["interleaved", "there and back", "1f1b"]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.booleans(),
    st.floats(0, 1),
)
def test_the_makespan_of_any_schedule_is_the_simulated_end(
    data, kind, ranks, count, split, transfer
):
    """Also of several stages a rank and of split backwards."""
    if kind == "interleaved":
        order = handmade.interleaved(ranks, 3, count)
    elif kind == "there and back":
        order = handmade.there_and_back(ranks, count)
    else:
        order = orders.build(kind, ranks, count)
    order = handmade.split(order, count) if split else order
    seconds = data.draw(durations(order.stages))
    expected = simulated(order, seconds, transfer)
    found = simulation.makespan(order, seconds, transfer)
    assert found == pytest.approx(expected, rel=1e-9)


@settings(max_examples=200)
@given(
    st.data(),
    st.sampled_from(long_schedules.ONE_STAGE),
    st.integers(1, 9),
    st.integers(1, 24),
    st.sampled_from([0.0, 0.01, 0.5]),
)
def test_rounds_of_all_ranks_at_once_end_as_the_simulated_actions(
    data, name, ranks, count, transfer
):
    """To rounding: every B of the last rank, and the last action."""
    numbered = orders.numbered(name, ranks, count)
    seconds = data.draw(durations(ranks))
    ends = simulation.ends(numbered, seconds, transfer)
    split = numbered.split
    end, backwards = simulation.ends_by_rounds(ranks, count, seconds, transfer, split)
    assert end == pytest.approx(max(ends), rel=1e-12)
    assert backwards == pytest.approx(numbered.by_kind(ends)["B"][:, -1], rel=1e-12)


@settings(max_examples=100)
@given(
    st.data(),
    st.integers(2, 7),
    st.integers(1, 4),
    st.integers(0, 20),
    st.sampled_from([0.0, 0.01, 0.5]),
)
def test_interleaved_ranks_at_once_end_as_the_simulated_actions(
    data, ranks, virtual, more, transfer
):
    """Bit for bit: the end, and every B of the last stage; groups are equal or not."""
    numbered = orders.numbered("interleaved", ranks, ranks + more, virtual)
    seconds = data.draw(durations(ranks * virtual))
    ends = simulation.ends(numbered, seconds, transfer)
    end, backwards = Interleaved(ranks, virtual, ranks + more).ends(seconds, transfer)
    assert end == max(ends)
    assert backwards == numbered.by_kind(ends)["B"][:, -1].tolist()


@given(st.data(), st.integers(1, 8), st.integers(1, 30), st.floats(0, 1))
def test_the_end_of_gpipe_is_a_formula(data, ranks, count, transfer):
    numbered = orders.numbered("gpipe", ranks, count)
    seconds = data.draw(durations(ranks))
    end = simulation.gpipe_end(ranks, count, seconds, transfer)
    assert end == pytest.approx(max(simulation.ends(numbered, seconds, transfer)), rel=1e-12)


def test_a_slow_start_changes_the_end_little():
    """Seconds of a 176B model on 12 ranks, which repeat only after many rounds."""
    forward = [0.04894, *[0.04782] * 10, 0.04252]
    backward = [0.09061, *[0.08933] * 10, 0.07811]
    seconds = {("F", stage): each for stage, each in enumerate(forward)}
    seconds |= {("B", stage): each for stage, each in enumerate(backward)}
    end = simulated(orders.build("1f1b", 12, 512), seconds, 0.01175)
    found = LongSchedule("1f1b", 12, 512).makespan(seconds, 0.01175)
    assert found == pytest.approx(end, rel=0.004)


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 12), ("zb-v", 8), ("zb-v", 12)])
def test_of_many_micro_batches_few_are_simulated(name, ranks):
    stages = ranks * (2 if name == "zb-v" else 1)
    seconds = {(kind, stage): 1.0 for kind in "FBW" for stage in range(stages)}
    if name == "1f1b":
        seconds["F", ranks - 1] = seconds["B", ranks - 1] = 0.9
    long = LongSchedule(name, ranks, 512)
    assert long.shortened().micro_batches < 7 * ranks
    found = long.makespan(seconds, 0.4)
    whole = max(simulation.ends(orders.numbered(name, ranks, 512), seconds, 0.4))
    assert found == pytest.approx(whole, rel=0.006)


def test_a_step_is_priced_by_its_schedule():
    """Stages of unequal seconds: the pipeline's time is the built schedule's simulation."""
    model, machine = preset("gpt2-1.5b"), hardware.load("a100-80")
    plain = Layout(pp=4, dp=1, partition="8,13,12,15")
    whole = step_time.action_seconds(Job(model, plain, training(9), machine))
    for name, virtual in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)):
        layout = dataclasses.replace(plain, schedule=name, virtual_stages=virtual)
        if virtual > 1:
            layout = dataclasses.replace(layout, partition="balanced")
        job = Job(model, layout, training(9), machine)
        seconds = step_time.action_seconds(job)
        if name == "zb-h1":
            assert seconds["B", 3] + seconds["W", 3] == pytest.approx(whole["B", 3])
        expected = simulated(orders.build(name, 4, 9, virtual), seconds, 0.25)
        found, _ = step_time.pipeline_time(job, sent=0.25)
        assert found == pytest.approx(expected, rel=1e-9)


def test_outside_the_fitted_range_a_prediction_says_so():
    model, layout = ModelShape(24, 512, 8, seq_length=131072), Layout(dp=8)
    found = step_time.predict(Job(model, layout, training(64), A100)).warnings
    assert any(
        "seq_length 131072 is outside what was fitted on a100-80: 512 to 65536" in w for w in found
    )
    assert any("hidden 512" in w for w in found)
    mi300x = step_time.predict(
        Job(preset("1b3"), layout, training(64), hardware.load("mi300x"))
    ).warnings
    assert "no run on mi300x was measured: predicted by its datasheet" in mi300x


def test_ranks_that_share_cores_lose_nothing_by_a_bubble():
    """Four ranks a core: a stage that waits leaves its core to the others, so work alone counts."""
    model = ModelShape(8, 128, 8, seq_length=128, vocab_size=2048)
    layout = Layout(pp=8, dp=1, micro_batch_size=2)
    at_16 = Training(global_batch_size=16)
    machine = hardware.load("cpu")
    alone, waits = step_time.pipeline_time(Job(model, layout, at_16, machine))
    shared, idle = step_time.pipeline_time(
        Job(model, layout, at_16, dataclasses.replace(machine, ranks_per_core=4))
    )
    assert waits > 0.2
    assert idle == pytest.approx(0.0)
    assert shared == pytest.approx(alone * (1 - waits))
    # With but little sharing the schedule still decides, at the speed of a core for oneself.
    slightly, _ = step_time.pipeline_time(
        Job(model, layout, at_16, dataclasses.replace(machine, ranks_per_core=1.1))
    )
    assert slightly == pytest.approx(alone / 1.1)


# ------------------------------------------------------------------------------------------------
# Kernels, launches, traffic behind passes
# ------------------------------------------------------------------------------------------------


def test_a_tiny_pass_takes_no_less_than_its_launches():
    model, options = preset("1b3"), Training(global_batch_size=8, precision="bf16")
    job = Job(model, Layout(tp=8, dp=1), options, A100)
    free = step_time.block_pass(job)
    slow = step_time.block_pass(job._replace(machine=software(A100, host_per_operation=1e-3)))
    assert slow.forward >= 20e-3 > free.forward
    assert slow.backward == 2 * slow.forward
    # Beside its launches a block takes the host 2 ms, so 8 tensor ranks wait for it.
    fast = job._replace(machine=software(A100, host_of_block=0.0))
    assert free.forward == pytest.approx(24 * 8e-6 + 2e-3 / 3)
    assert step_time.block_pass(fast).forward < free.forward
    large = job._replace(machine=software(A100, host_per_operation=1e-9, host_of_block=0.0))
    assert step_time.block_pass(large) == step_time.block_pass(fast)


def small(machine: hardware.Machine = A100, **layout) -> Job:
    layout = {"dp": 64} | layout
    return Job(preset("1b3"), Layout(**layout), training(256), machine)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_traffic_hides_behind_passes_and_no_further(zero):
    slow = dataclasses.replace(A100, network=dataclasses.replace(A100.network, bandwidth=1e9))
    near, far = (
        [
            step_time.step_parts(
                small(software(m, overlap_passes=p), zero=zero, micro_batch_size=2)
            )["reduce"]
            for p in (0.0, 0.9)
        ]
        for m in (A100, slow)
    )
    assert 0 < near[1] < near[0]
    job = small(zero=zero, micro_batch_size=2)
    passes = sum(map(sum, step_time.stage_passes(job))) * job.micro_batches
    assert 0 < far[0] - far[1] <= passes


@pytest.mark.parametrize("zero", [1, 2])
def test_what_is_gathered_after_the_step_is_not_hidden(zero):
    default, on, off = (
        step_time.step_parts(small(zero=zero, overlap_param_gather=given))["reduce"]
        for given in (None, True, False)
    )
    assert default == on < off


def test_only_below_zero_2_products_add_up_the_gradients():
    """Over ranks that exchange nothing, so that nothing else takes time."""
    free = dataclasses.replace(A100.nvlink, latency=0.0, bandwidth=1e30)
    machine = dataclasses.replace(A100, nvlink=free)
    seconds = {
        (zero, dp): step_time.step_parts(small(machine, zero=zero, dp=dp))["reduce"]
        for zero, dp in [(1, 8), (2, 8), (2, 1)]
    }
    assert seconds[1, 8] == pytest.approx(0.0, abs=1e-9)
    assert seconds[2, 1] == 0.0
    each = op_costs.moved(machine, time_terms.COLLECTED * parameters(preset("1b3")))
    assert seconds[2, 8] == pytest.approx(256 / 8 * each, rel=0.01)


def test_a_split_backward_hides_no_collective():
    """Its passes for inputs and for weights each wait for their own."""
    names = ("1f1b", "zb-h1")
    jobs = [small(tp=8, pp=2, dp=1, schedule=n) for n in names]
    jobs = [job._replace(machine=software(job.machine, host_of_block=0.0)) for job in jobs]
    plain, split = map(step_time.block_pass, jobs)
    assert split.forward > plain.forward
    assert split.backward > plain.backward


# ------------------------------------------------------------------------------------------------
# Risk
# ------------------------------------------------------------------------------------------------


def test_the_risk_of_running_out_is_log_normal():
    edge = A100.memory
    spread = A100.memory_spread
    assert risk.out_of_memory(A100, edge) == pytest.approx(0.5)
    assert risk.out_of_memory(A100, edge * math.exp(spread)) == pytest.approx(0.8413, abs=1e-4)
    assert risk.out_of_memory(A100, edge * math.exp(-2 * spread)) == pytest.approx(0.0228, abs=1e-4)
    for accepted in (0.01, 0.05, 0.5):
        most = risk.safe_bytes(A100, accepted)
        assert risk.out_of_memory(A100, most) == pytest.approx(accepted)


BLOCK = 0.01  # seconds of a block's forward: long enough to be like those of measured runs


def test_an_interval_holds_the_prediction_and_widens_outside_of_what_was_fitted():
    model, layout = preset("1b3"), Layout(dp=8)
    job = Job(model, layout, training(64), A100)
    low, high = risk.interval(job, 10.0, BLOCK)
    assert low < 10 < high
    assert low * high == pytest.approx(100)
    far = job._replace(model=dataclasses.replace(model, seq_length=2**20))
    assert risk.interval(far, 10.0, BLOCK)[1] > high
    unmeasured = job._replace(machine=hardware.load("mi300x"))
    assert risk.interval(unmeasured, 10.0, BLOCK)[1] > high
    # Of a normal distribution the point of 80 in 100 is 0.8416 deviations up, that of 95 1.645.
    eighty = 10 * (high / 10) ** (0.8416 / 1.645)
    assert risk.quantile(job, 10.0, BLOCK) == pytest.approx(eighty, rel=1e-4)


def test_a_layout_that_no_run_was_like_takes_longer_at_the_upper_end_alone():
    model = dataclasses.replace(preset("llama-3-8b"), seq_length=8192)
    machine = dataclasses.replace(A100, fitted_range={})
    plain = Job(model, Layout(tp=2, dp=4), training(64), machine)
    low, high = risk.interval(plain, 10.0, BLOCK)
    cases = {
        "tp 2 times": Layout(tp=16, dp=4),
        "blocks of 1 ms": plain.layout,
        "ranks reduce": Layout(tp=2, dp=8192),
        "cp 8": Layout(tp=2, cp=8, dp=1),
        "tokens a rank": Layout(tp=2, cp=4, dp=1),
        "pp 128": Layout(tp=2, pp=128, dp=1),
        "--zero 3 over 1,024": Layout(tp=2, dp=1024, zero=3),
        "a schedule": Layout(tp=2, pp=4, dp=1, schedule="zb-h1"),
    }
    for words, layout in cases.items():
        job, block = plain._replace(layout=layout), 1e-3 if "1 ms" in words else BLOCK
        found = risk.interval(job, 10.0, block)
        assert found[0] == pytest.approx(low), words
        assert found[1] > 1.02 * high, words
        assert any(words in each for each in distances.reasons(job, block, 10.0)), words
    assert not distances.reasons(plain, BLOCK, 10.0)
    megatron = engines.on(machine, {"host_per_operation": 0.0})  # its short blocks were measured
    assert not distances.reasons(plain._replace(machine=megatron), 1e-3, 10.0)


def test_every_distance_has_a_quantity_and_says_where_its_rows_are():
    assert [one.name for one in distances.distances()] == list(distances.QUANTITIES)
    for name, table in distances.tables().items():
        assert set(table) - {"less"} == {"of", "from", "wider", "says", "rows"}, name
    widths = {one.name: one.wider for one in distances.distances()}
    stated = [t["wider"] for t in distances.tables().values() if t["wider"] != "median"]
    assert widths["stages"] == statistics.median(stated)
    # Otherwise a quantile might fall while the seconds grow, and a bound be none (closed_form.py).
    assert widths["waiting_ranks"] * risk.BETS / math.log(2) < 1


# ------------------------------------------------------------------------------------------------
# What other programs do
# ------------------------------------------------------------------------------------------------


def test_gradients_that_are_sharded_within_nodes_cross_the_network_once():
    """All-reduced in a node of 8, then each rank's eighth over 16 nodes, in 2 bytes."""
    facts = {"shard_in_node": True, "all_reduce_gradients": True, "wire_bytes": 2}
    job = Job(preset("1b3"), Layout(dp=128, zero=1), training(128), engines.on(A100, facts))
    inside = time_terms.ring_seconds(job, 8, 1, 2e9)
    between = time_terms.ring_seconds(job, 16, 8, 2e9 / 8)
    assert time_terms.reduce_seconds(job, 1e9, 0.0) == pytest.approx(inside + between)


def test_broadcasts_of_single_ranks_cost_time_over_several_nodes_alone():
    for dp, count in ((8, 0), (128, 128)):
        found = []
        for seconds in (0.0, 1e-3):
            machine = engines.on(A100, {"seconds_per_shard": seconds})
            job = Job(preset("1b3"), Layout(dp=dp), training(128), machine)
            found.append(time_terms.gather_seconds(job, 1e9, 0.0))
        assert found[1] - found[0] == pytest.approx(count * 1e-3)


def test_a_model_without_experts_has_one_ring_of_gradients_and_one_of_weights():
    job = Job(preset("1b3"), Layout(dp=512, zero=1), training(512), A100)
    ring = time_terms.ring_seconds(job, 512, 1, 4e9) / 2
    assert time_terms.reduce_seconds(job, 1e9, 0.0) == pytest.approx(ring, rel=1e-9)
    assert time_terms.gather_seconds(job, 1e9, 0.0) < ring
    plain = job._replace(layout=Layout(dp=512, zero=0))
    assert time_terms.reduce_seconds(plain, 1e9, 0.0) == pytest.approx(2 * ring, rel=1e-9)


# ------------------------------------------------------------------------------------------------
# The network
# ------------------------------------------------------------------------------------------------


def test_without_a_measured_network_the_interval_reaches_to_a_third_of_its_rate():
    job = small(dp=256, zero=3)
    plain = step_time.predict(job)
    found = step_time.with_networks(plain, job)
    third = hardware.at_share_of_network(A100, 1 / 3)
    slow = step_time.predict(job._replace(machine=third))
    assert found.at_networks == pytest.approx((plain.seconds, slow.seconds))
    assert plain.seconds < slow.seconds
    assert found.interval == (plain.interval[0], slow.interval[1])
    assert found.quantile == slow.quantile > plain.quantile
