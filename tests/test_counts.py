"""Counts: if this failed, parameters, FLOPs and the blocks of stages would not be the published
ones.
"""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import ROOT

from architecture.model_stats import (
    block_parameters,
    embedding_parameters,
    model_flops,
    parameters,
)
from architecture.shape import ModelShape
from benchmarks.planner import published_rows
from config.schema import Layout
from config.spelling import preset
from config.validation import check
from schedules.partition import (
    BLOCKS_ALONE,
    PartCosts,
    balanced,
    blocks_per_stage,
)

ROWS = ROOT / "benchmarks" / "data" / "measured_rows.csv"


def test_every_row_prints_the_tflops_of_its_formula():
    tested = 0
    for row in published_rows.read(str(ROWS)):
        if "invalid" in row["quality"] or not (row["sec_clean"] and row["tflops_clean"]):
            continue
        rate = float(row["tflops_clean"])
        found = published_rows.tflops(
            row, float(row["sec_clean"]), int(row["gbs_clean"]), row["formula"]
        )
        slack = 0.0005 + published_rows.rounding(row["tflops_clean"]) / rate
        slack += published_rows.rounding(row["sec_clean"]) / float(row["sec_clean"])
        nominal = 0.002 if row["formula"] in published_rows.NOMINAL else 0.0
        assert found == pytest.approx(rate, rel=slack + nominal), row["row_id"]
        tested += 1
    assert tested > 110


def test_megatron_2025_is_the_closed_form():
    model = preset("gpt3-175b")
    h, s, layers, vocab = 12288, 2048, 96, 50257
    closed = 72.0 * 1536 * s * layers * h**2 * (1 + s / (12 * h) + vocab / (12 * layers * h))
    assert model_flops(model, 1536) == pytest.approx(closed, rel=1e-12)


# Published numbers of parameters, from the models' pages: a few for each kind of table.
PUBLISHED = {
    "bloom-176b": 176_247_271_424,
    "gpt2-124m": 124_439_808,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "pythia-160m": 162_322_944,
    "opt-125m": 125_237_760,
}


def test_published_sizes():
    assert {name: parameters(preset(name)) for name in PUBLISHED} == PUBLISHED
    bloom = preset("bloom-176b")
    assert block_parameters(bloom) == 2_466_437_120
    assert embedding_parameters(bloom) == 3_596_615_680 + 2 * 14336


def shapes() -> st.SearchStrategy:
    """Random models, dense and gated, with and without biases and tied weights."""

    def build(layers, heads, head, vocab, **rest):
        return ModelShape(layers, heads * head, heads, vocab_size=vocab, **rest)

    return st.builds(
        build,
        st.integers(1, 12),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from([8, 16, 40]),
        st.integers(50, 3000),
        activation=st.sampled_from(["gelu", "swiglu"]),
        bias=st.booleans(),
        tied=st.booleans(),
        positions=st.sampled_from(["learned", "alibi"]),
        norm=st.sampled_from(["layernorm", "rmsnorm"]),
        embedding_norm=st.booleans(),
    )


@settings(max_examples=15)
@given(shapes())
def test_parameters_built_are_parameters_planned(model):
    import golden_worker

    import trainer

    run = golden_worker.options({"pad_vocab_multiple": 1})
    built = trainer.build(check(replace(run, model=model), 1)).stages
    assert sum(math.prod(p.spec.shape) for p in built.parameters()) == parameters(model)


@given(
    st.integers(1, 9),
    st.integers(2, 5),
    st.floats(0, 30),
    st.floats(0.5, 10),
    st.floats(0, 30),
)
def test_balanced_partition_is_as_fast_as_brute_force(layers, pp, embedding, block, head):
    costs = PartCosts(embedding, block, head)

    def slowest(blocks):
        times = [b * block for b in blocks]
        times[0] += embedding
        times[-1] += head
        return max(times)

    found = balanced(layers, tuple(range(pp)), costs)
    every = itertools.product(range(layers + 1), repeat=pp)
    best = min(slowest(blocks) for blocks in every if sum(blocks) == layers)
    assert sum(found) == layers
    assert min(found) >= 0
    assert slowest(found) == pytest.approx(best)


def test_partition_by_layers_and_by_blocks():
    model = preset("bloom-176b")
    assert blocks_per_stage(model, Layout(pp=12, partition="blocks"), BLOCKS_ALONE) == [
        5,
        *[6] * 10,
        5,
    ]
    assert blocks_per_stage(
        ModelShape(7, 64, 1), Layout(pp=2, partition="layers"), BLOCKS_ALONE
    ) == [4, 3]
    assert blocks_per_stage(
        ModelShape(7, 64, 1), Layout(pp=2, partition="blocks"), BLOCKS_ALONE
    ) == [4, 3]
    assert (
        blocks_per_stage(
            ModelShape(42, 64, 1), Layout(pp=16, partition="layers"), BLOCKS_ALONE
        ).count(0)
        == 0
    )
