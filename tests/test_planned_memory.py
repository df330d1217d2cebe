"""If this failed, the memory of a layout would not be that of the published closed forms."""

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from architecture.shape import ModelShape
from base.errors import UserError
from config.command_line import parse
from config.schema import Layout, Training
from config.spelling import preset
from config.validation import check
from costs import hardware, memory, memory_terms, step_time
from costs.job import Job
from distributed.collectives import Group
from distributed.context import most_ctas
from distributed.mesh import mesh_of_run
from schedules import orders
from tools.planner import engines, layouts
from tools.planner.enumeration import Asked
from watchdog.flight_recorder import FlightRecorder

A100 = hardware.load("a100-80")
ENGINES = engines.programs()
JEAN_ZAY = engines.on(
    hardware.load("jean-zay-a100"), ENGINES["megatron-deepspeed-2022"]["software"]
)


def training(batch: int, **rest) -> Training:
    return Training(global_batch_size=batch, **({"precision": "fp16"} | rest))


def test_mixed_precision_costs_18_bytes_and_zero_shards_12():
    model = preset("1b3")
    for dp, zero, each in ((1, 0, 18), (8, 0, 18), (8, 1, 6 + 12 / 8), (64, 1, 6 + 12 / 64)):
        layout = Layout(dp=dp, zero=zero)
        table = memory.stages(Job(model, layout, training(64), A100))[0]
        states = table.weights + table.gradients + table.optimizer
        assert states == pytest.approx(each * table.parameters)


def test_sections_of_whole_matrices_are_as_long_as_the_largest():
    """rehearse.py measured 0.824, 1.648 and 0.206 GB. Muon's sections may cut matrices."""
    model, layout = ModelShape(2, 1024, 16, vocab_size=50257), Layout(dp=8)
    adafactor = training(64, precision="bf16", optimizer="adafactor")
    (found,) = memory.stages(Job(model, layout, adafactor, A100))
    parts = found.weights, found.gradients, found.optimizer
    assert parts == pytest.approx((0.824e9, 1.648e9, 0.206e9), rel=0.005)
    assert found.parameters < 80e6
    (whole,) = memory.stages(Job(model, Layout(dp=8, zero=0), adafactor, A100))
    assert whole.weights == pytest.approx(2 * found.parameters)
    muon = training(64, precision="bf16", optimizer="muon")
    (flat,) = memory.stages(Job(model, layout, muon, A100))
    assert flat.weights == pytest.approx(2 * found.parameters)


def test_all_experts_of_a_block_are_in_one_section():
    """rehearse.py measured 0.159 GB of gradients with Adafactor; Muon's are AdamW's 0.154."""
    model = ModelShape(4, 512, 8, vocab_size=512, bias=False, experts=8, experts_per_token=2)
    for name, gradients in (("adafactor", 0.159e9), ("muon", 0.154e9)):
        options = training(8, precision="bf16", optimizer=name)
        (found,) = memory.stages(Job(model, Layout(dp=8, ep=2), options, A100))
        assert found.gradients == pytest.approx(gradients, rel=0.01), name


def test_the_gradient_of_a_tied_matrix_is_beside_the_logits():
    """The peaks in GB are rehearse.py's. The fullest moment is the head's backward pass."""
    logits, matrix, output = 2048 * 50304, 50304 * 1024, 2048 * 1024
    for words, world, peaks in (
        ("--layers 4", 1, [2.444]),
        ("--layers 4 --precision fp32", 1, [2.828]),
        ("--layers 8 --precision fp32", 1, [4.172]),
        ("--layers 4 --pp 2 --zero 2", 4, [1.910, 1.150]),
        ("--layers 8 --pp 2 --zero 2", 4, [2.431, 1.537]),
        ("--layers 8 --zero 2 --no-tied", 8, [1.680]),
        ("--layers 4 --zero 3", 4, [1.133]),
        ("--layers 8 --zero 3", 4, [1.604]),
    ):
        shape = "--hidden 1024 --heads 16 --seq-length 1024 --precision bf16 --steps 1"
        batch = "--micro-batch-size 2 --global-batch-size 64 --no-sequence-parallel"
        config = check(parse(f"{shape} {batch} {words}".split()), world)
        table = memory.run_memory(config)
        assert [sum(row.values()) / 1e9 for row in table] == pytest.approx(peaks, rel=0.018)
        if "--pp" not in words and "--zero 3" not in words:
            size = 4 if "fp32" in words else 2
            assert table[0]["working"] == pytest.approx(size * (logits + matrix + output), rel=1e-3)


def test_seed_004_reads_22_and_18_gb():
    """18 bytes per parameter, the context of 1,271 MiB, and one checkpoint per block in flight."""
    layout = Layout(
        tp=4, pp=32, dp=1, recompute="full", partition="layers", sequence_parallel=False
    )  # fmt: skip
    model = preset("104b")
    kept = memory_terms.kept_bytes(Job(model, layout, training(2048), A100))
    assert kept == 2 * 2048 * 11600
    context = 1271 * 2**20
    assert (17_157_252_600 + context + 2 * 32 * kept) / 1e9 == pytest.approx(22, abs=0.6)
    assert (14_533_837_200 + context + 2 * 31 * kept) / 1e9 == pytest.approx(18, abs=1)


@given(st.integers(1, 8), st.integers(1, 20), st.sampled_from(["1f1b", "gpipe"]))
def test_activations_are_those_that_the_schedule_holds(pp, count, name):
    model = ModelShape(2 * pp, 256, 4)
    layout = Layout(pp=pp, dp=1, schedule=name, partition="layers", recompute="full")
    machine = dataclasses.replace(A100, activation_overhead=1.0)
    table = memory.stages(Job(model, layout, training(count), machine))
    kept = 2 * memory_terms.kept_bytes(Job(model, layout, training(count), machine))
    peak = orders.build(name, pp, count).peak
    assert [stage.activations for stage in table] == [held * kept for held in peak]


def test_a_batch_below_one_micro_batch_a_replica_is_a_sentence():
    model, layout = preset("gpt2-124m"), Layout(dp=8, micro_batch_size=2)
    message = r"micro-batch-size\(2\) \* dp\(8\) = 16 is more than global-batch-size\(4\)"
    job = Job(model, layout, training(4), A100)
    with pytest.raises(UserError, match=message):
        step_time.predict(job)
    for ask in (
        step_time.pipeline_time,
        step_time.step_parts,
        memory.stages,
        memory.fullest,
        layouts.does_not_fit,
    ):
        with pytest.raises(UserError, match=message):
            ask(job)
    ranked, rejected, *_ = layouts.rank(Asked(model, training(4), A100, 8, {"tp": 1, "pp": 1}))
    assert ranked == []
    reasons = {r.layout["micro_batch_size"]: r.reason for r in rejected}
    assert "micro-batch-size(2) * dp(8) = 16 does not divide global-batch-size(4)" in reasons[2]


@given(
    st.integers(2, 40),
    st.integers(1, 12),
    st.sampled_from(["balanced", "layers", "blocks"]),
    st.sampled_from(["1f1b", "gpipe"]),
    st.sampled_from(["none", "full"]),
)
def test_the_fullest_stage_is_found_among_few(layers, pp, partition, name, recompute):
    if pp > layers:
        return
    model = ModelShape(layers, 1024, 16, vocab_size=250000)
    layout = Layout(pp=pp, dp=1, partition=partition, schedule=name, recompute=recompute)
    table = memory.stages(Job(model, layout, training(16), A100))
    found = memory.fullest(Job(model, layout, training(16), A100))
    assert found.total == max(stage.total for stage in table)


def test_recomputation_keeps_less():
    model = preset("181b")

    def kept(recompute, machine):
        layout = Layout(tp=8, pp=12, dp=4, recompute=recompute, sequence_parallel=False)
        return memory_terms.kept_bytes(Job(model, layout, training(2048), machine))

    assert kept("full", JEAN_ZAY) < kept("selective", JEAN_ZAY) < kept("none", JEAN_ZAY)
    assert kept("selective", A100) == kept("none", A100)  # flash writes no scores
    # arXiv 2205.05198 equation 2, per tensor rank: s b h (10 + 24/t + 5 a s / (h t))
    s, h, t, a = 2048, 14336, 8, 64
    assert kept("none", JEAN_ZAY) == pytest.approx(s * h * (10 + 24 / t + 5 * a * s / (h * t)))


MIXTURE = {"experts": 16, "experts_per_token": 4, "bias": False, "seq_length": 128}


def test_a_router_keeps_its_input_scores_and_places():
    """An ExpertMLP saved tensors with these bytes a token for its backward on one rank: the input
    in FP32 1,024, scores 64, and for each of four experts 30 of numbers, weights and places.
    """
    model = ModelShape(2, 256, 4, **MIXTURE)
    one = Job(model, Layout(dp=8, ep=1), training(8), A100)
    assert memory_terms.routing_bytes(one) == 128 * (1024 + 64 + 4 * 30 - 512)
    over_ranks = Job(model, Layout(dp=8, ep=8), training(8), A100)
    assert memory_terms.routing_bytes(over_ranks) == memory_terms.routing_bytes(one) + 128 * 64
    shared = dataclasses.replace(model, shared_ffn_hidden=96)
    with_shared = Job(shared, Layout(dp=8, ep=1), training(8), A100)
    assert memory_terms.routing_bytes(with_shared) == 128 * (1024 + 64 + 4 * 30)
    dense = ModelShape(2, 256, 4)
    assert memory_terms.routing_bytes(Job(dense, Layout(dp=8), training(8), A100)) == 0.0


def test_uneven_rows_fill_a_gpu_until_its_room_is_reached():
    """Rows are activations and gradients of experts: their bytes grow with the rows of the GPU."""
    model = ModelShape(4, 256, 4, activation="swiglu", vocab_size=64, **MIXTURE)
    job = Job(model, Layout(dp=8, ep=4), training(8), A100)
    totals = [memory.fullest(job._replace(rows_over_mean=rows)).total for rows in (1.0, 2.0, 4.0)]
    h, f = model.hidden, model.expert_ffn_hidden
    kept = 2 * 128 * 4 * (h + 4 * f)  # bf16; up has 2 f columns, SiLU and the product f each
    working = 2 * 128 * 4 * 2 * h
    more = 4 * kept + working  # four blocks keep rows; one of them runs backward
    assert totals[1] - totals[0] == pytest.approx(more)
    assert totals[2] - totals[1] == pytest.approx(2 * more)
    rows = memory.most_rows(job, (totals[1] + totals[2]) / 2)
    assert rows == pytest.approx(3.0, abs=0.005)
    assert memory.most_rows(job, totals[2]) == 4.0, "all rows of the four ranks"


def test_dense_blocks_keep_no_more_if_experts_get_more_rows():
    model = ModelShape(4, 256, 4, activation="swiglu", vocab_size=64, **MIXTURE)
    mixed = dataclasses.replace(model, first_dense_layers=2)
    added = []
    for shape in (model, mixed):
        job = Job(shape, Layout(dp=8, ep=4), training(8), A100)
        kept = [
            memory_terms.block_activations(job._replace(rows_over_mean=rows), True)
            for rows in (1.0, 4.0)
        ]
        added.append(kept[1] - kept[0])
    assert added[1] == pytest.approx(added[0] / 2), "two of four blocks have experts"


def test_a_run_whose_ep_is_not_given_holds_all_experts():
    words = "--layers 2 --hidden 256 --heads 4 --experts 16 --experts-per-token 2 --no-bias"
    words += " --steps 1 --precision bf16 --global-batch-size 8"
    tables = [memory.run_memory(check(parse(f"{words} {ep}".split()), 8)) for ep in ("", "--ep 1")]
    assert tables[0] == tables[1]


# ------------------------------------------------------------------------------------------------
# Recomputation and communicators
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bloom-176b", "llama-2-7b", "olmoe-1b-7b", "gpt2-124m"])
def test_recomputing_never_needs_more_than_keeping(name):
    """`selective` keeps nearly all that `none` keeps: it was planned with 71.6 GB for 64.4."""
    model = preset(name)
    for tp, pp, micro_batch in ((1, 1, 1), (4, 4, 2), (2, 2, 4)):
        needed = []
        for recompute in ("none", "selective", "full"):
            layout = Layout(tp=tp, pp=pp, dp=2, micro_batch_size=micro_batch, recompute=recompute)
            needed.append(memory.fullest(Job(model, layout, training(64), A100)).total)
        assert needed[0] >= needed[1] >= needed[2]


class Communicators:
    """A context that counts the groups of several ranks, of which each has a communicator."""

    def __init__(self, size: int):
        self.rank, self.size, self.recorder, self.roles = 0, size, FlightRecorder(), []
        self.nodes = [str(rank // A100.node) for rank in range(size)]

    def group(self, rows, role):
        own = next((row for row in rows if self.rank in row), (self.rank,))
        self.roles += [role] * (len(own) > 1)
        return Group(own, own.index(self.rank))


def test_the_communicators_of_the_plan_are_those_of_the_mesh():
    """For every axis, schedule and kind of model: those with a limit of channels, and others."""
    layouts_of = [
        {"dp": 8},
        {"tp": 8},
        {"tp": 4, "pp": 12, "dp": 8},
        {"pp": 4, "schedule": "interleaved", "virtual_stages": 2, "dp": 2},
        {"pp": 4, "schedule": "zb-v"},
        {"cp": 8, "dp": 2},
        {"cp": 2, "tp": 2},
        {"tp": 2, "cp": 4, "dp": 2, "pp": 2},
    ]
    for fields in layouts_of:
        layout = Layout(**{"dp": 1} | fields)
        for name in ("bloom-176b", "llama-3-8b", "olmoe-1b-7b"):
            for ep in (None, 2) if name == "olmoe-1b-7b" else (None,):
                model = preset(name)
                config = parse(["--data", "synthetic", "--model", name, "--steps", "1"])
                own = replace(layout, ep=ep or 1) if model.experts > 1 else layout
                if ep and layout.dp * layout.cp * layout.tp % ep:
                    continue
                size = own.tp * own.pp * own.cp * own.dp
                context = Communicators(size)
                mesh_of_run(replace(config, layout=own), context)
                free, limited = memory_terms.communicators(Job(model, own, training(64), A100))
                assert free + limited == len(context.roles), (fields, name, ep, context.roles)
                muon = replace(config.training, optimizer="muon")  # its ranks of a stage meet
                with_muon = Communicators(size)
                mesh_of_run(replace(config, layout=own, training=muon), with_muon)
                planned = Job(model, own, training(64, optimizer="muon"), A100)
                assert sum(memory_terms.communicators(planned)) == len(with_muon.roles)
                unlimited = {"tp", "cp", "heads", "kv", "experts"}
                assert free == len([role for role in context.roles if role in unlimited])
                for role in {*context.roles, "world"}:
                    assert (most_ctas(role) is None) == (role in unlimited), role
