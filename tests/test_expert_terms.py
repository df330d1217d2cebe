"""If this failed, plans of experts would miss costs, or public rows by more than is written."""

from dataclasses import replace

import engines
import expert_engines
import expert_rows
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import ROOT

from config.schema import Layout, ModelShape, Training
from planner import hardware, op_costs, time_terms
from planner.job import Job

H100 = hardware.load("h100")
MIXTURE = ModelShape(
    4,
    1024,
    8,
    ffn_hidden=512,
    experts=16,
    experts_per_token=4,
    activation="swiglu",
    bias=False,
    seq_length=2048,
)


def job(ep: int = 8, model: ModelShape = MIXTURE, **layout) -> Job:
    training = Training(global_batch_size=64, precision="bf16")
    return Job(model, Layout(**{"dp": 8, "ep": ep} | layout), training, H100)


def seconds(value) -> tuple[float, float]:
    return float(value.forward), float(value.backward)


# ---- Terms of the planner ------------------------------------------------------------------------


def test_a_model_without_experts_has_none_of_their_terms():
    dense = job(1, replace(MIXTURE, experts=1, experts_per_token=1))
    assert seconds(time_terms.routing(dense)) == (0.0, 0.0)
    assert seconds(time_terms.permuted(dense)) == (0.0, 0.0)
    assert time_terms.operations(dense) == time_terms.OPERATIONS


def test_rows_are_read_and_written_as_often_as_experts_py_does():
    assert seconds(time_terms.permuted(job(1))) == (7, 9)
    assert seconds(time_terms.permuted(job(8))) == (11, 13)
    more = (
        time_terms.elementwise_bytes(job(8)).forward - time_terms.elementwise_bytes(job(1)).forward
    )
    assert more == 4 * 4 * 1024 * 2  # four times, of four rows of 1,024 numbers of two bytes


def test_a_router_is_a_product_in_fp32_beside_a_cast():
    bytes_of_token = 6 * 1024 + 24 * 16
    product = op_costs.linear(H100, 2048, 16, 1024, 4).forward
    expected = product + 2048 * bytes_of_token / (3.35e12 * 0.8)
    assert time_terms.router(job()).forward == pytest.approx(expected)


def test_one_rank_with_all_experts_sends_nothing_and_waits_for_the_host():
    alone = job(1)
    assert seconds(time_terms.dispatched(alone)) == (0.0, 0.0)
    assert time_terms.uneven(alone) == 1.0
    forward, backward = seconds(time_terms.routing(alone))
    waits = forward - time_terms.router(alone).forward
    assert waits == pytest.approx(4e-5)
    assert backward == pytest.approx(time_terms.router(alone).backward)


def test_the_busiest_rank_has_a_tenth_more_rows():
    sizes = time_terms.matrices(job(8))[-1]
    rows = 2048 * 4 * 1.1 / 2  # 8,192 rows a rank, of two experts each
    assert sizes == (int(np.ceil(rows / 8)) * 8, 1024, 512, 2)
    assert time_terms.matrices(job(1))[-1] == (512, 1024, 512, 16)


def test_each_expert_is_a_launch_of_two_products():
    few, many = (time_terms.operations(job(ep)) for ep in (8, 1))
    assert few == 20 + 45 + 2 * 2
    assert many - few == 2 * 14


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_more_experts_for_a_token_take_longer(ep, chosen):
    def took(count):
        one = job(ep, replace(MIXTURE, experts_per_token=count))
        return sum(seconds(time_terms.block_seconds(one)))

    assert took(chosen) < took(chosen + 4)


# ---- Programs of public rows ---------------------------------------------------------------------


def on(**facts) -> Job:
    machine = engines.on(H100, facts, kind=expert_engines.ExpertEngine)
    return job()._replace(machine=machine)


def test_a_token_is_sent_once_to_a_rank():
    whole = on(sent_once=False)
    once = on(sent_once=True)
    count = 1.0 * once.activation_bytes
    copies = 8 * (1 - (7 / 8) ** 4)
    expected = count * copies * 7 / 8 / H100.nvlink.speed + H100.nvlink.latency
    assert expert_engines.exchange(once, count, True) == pytest.approx(expected)
    assert expert_engines.exchange(once, count, True) < expert_engines.exchange(whole, count, False)


def test_a_graph_of_the_whole_step_launches_nothing():
    launched = [time_terms.operations(on(graphs=graphs)) for graphs in expert_engines.GRAPHS]
    assert launched[0] > 0
    assert launched[1] > 0
    assert launched[2] == 0
    assert time_terms.counts_wait(on(graphs="full")) == 0.0


def test_a_kernel_of_all_experts_has_no_empty_waves_of_each():
    apart = time_terms.products_alike(job(), 64, 512, 1024, 16)
    together = time_terms.products_alike(on(), 64, 512, 1024, 16)
    assert together.forward < apart.forward / 4


# ---- Public rows ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    return expert_rows.read()


def test_every_row_is_compared_or_set_aside_with_a_reason(rows):
    compared, aside = rows
    names = [row.id for row in compared] + [name for own in aside.values() for name in own]
    assert sorted(names) == sorted(f"M-{number}" for number in range(1, 220))
    assert len(compared) == 152


def test_each_model_held_out_is_as_near_as_the_results_say(rows):
    """benchmarks/results/plan_moe.md was written by this program, with these figures."""
    text = (ROOT / "benchmarks" / "results" / "plan_moe.md").read_text()
    for line in expert_rows.report(*rows):
        assert line in text, line
    for values, off in expert_rows.held_out(rows[0]).values():
        assert set(values) > set(expert_rows.PRIORS)
        assert sum(map(abs, off.values())) / len(off) <= 0.15
