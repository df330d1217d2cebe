"""One copy of a token to a node: if this failed, experts on several nodes would learn otherwise,
or a plan would not be that of the run.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from compare import assert_within
from fake_context import FakeContext
from ranks import results_of
from test_golden import check_lines

from architecture.dispatch import (
    TopK,
    copies_elsewhere,
    nodes_of_token,
    rows_elsewhere,
    sends_once,
)
from architecture.shape import ModelShape
from config.schema import Layout, Training
from config.spelling import preset
from costs import hardware, memory_terms, time_terms
from costs.job import Columns, Job
from distributed.mesh import Mesh
from distributed.placement import ranks_of_nodes
from tools.planner import engines

H100 = hardware.load("h100")


def test_experts_on_several_nodes_equal_the_single_rank_run(tmp_path):
    check_lines("experts_on_nodes", tmp_path)


@pytest.mark.slow
def test_every_kind_of_run_with_experts_on_several_nodes(tmp_path):
    check_lines("experts_on_more_nodes", tmp_path)


LAYERS = {
    "two nodes": {"nodes": "aabb", "tokens": [9, 5, 7, 3]},
    "a rank of each node": {"nodes": "abcd", "tokens": [9, 5, 7, 3], "k": 3},
    "every expert": {"nodes": "aabb", "tokens": [4, 4, 4, 4], "k": 8},
    "one expert": {"nodes": "aabb", "tokens": [9, 5, 7, 3], "k": 1},
    "a rank has no token": {"nodes": "aabb", "tokens": [0, 5, 0, 3], "k": 4},
    "no rank has a token": {"nodes": "aabb", "tokens": [0, 0, 0, 0], "k": 4},
    "groups": {"nodes": "aabb", "tokens": [9, 5, 7, 3], "groups": 4, "groups_per_token": 2},
    "half precision": {"nodes": "aabb", "tokens": [300] * 4, "k": 6, "hidden": 64},
}
LAYERS["half precision"] |= {"precision": "bfloat16"}


def test_a_layer_gives_what_a_copy_for_each_expert_gives(tmp_path):
    """Output and every gradient, the same bits each time; bf16 is as near to fp64 as before."""
    jobs = list(LAYERS.values())
    results = results_of("tests/node_dispatch_worker.py", 4, jobs, tmp_path)
    for name, job, result in zip(LAYERS, jobs, results, strict=True):
        assert result["same_bits"], name
        apart = job["nodes"] == "abcd"
        across = [[0, 1, 2, 3]] * 4 if apart else [[0, 2], [1, 3]] * 2
        within = [[0], [1], [2], [3]] if apart else [[0, 1]] * 2 + [[2, 3]] * 2
        assert (result["across"], result["within"]) == (across, within), name
        for part, found in result["once_errors"].items():
            limit = 1e-13
            if name == "half precision":
                limit = 1.05 * result["often_errors"][part]
                assert limit > 1e-4, "bf16 rounds"
            assert_within(found, limit, (name, part))


def test_the_bytes_between_nodes_are_those_of_the_plan(tmp_path):
    """Of a router that chooses evenly: rows there and back, forward and backward, and numbers and
    weights beside them.
    """
    hidden, tokens, ranks = 256, 400, 4
    job = {"nodes": "aabb", "tokens": [tokens] * ranks, "experts": 32, "k": 6, "hidden": hidden}
    job |= {"precision": "float32", "evenly": True}
    (result,) = results_of("tests/node_dispatch_worker.py", ranks, [job], tmp_path)
    copies = tokens * ranks * copies_elsewhere(TopK(32, 6), 2)
    rows = tokens * ranks * rows_elsewhere(6, 2)
    counts = 8 * ranks * 16  # int64: rows of each expert of the other node, and copies
    often = 4 * rows * 4 * hidden + counts
    once = 4 * copies * 4 * hidden + 2 * copies * time_terms.BESIDE * 6 + counts + 8 * ranks
    assert result["often"]["across"] == pytest.approx(often, rel=0.02)
    assert result["once"]["across"] == pytest.approx(once, rel=0.02)
    assert result["once"]["across"] < 0.35 * result["often"]["across"]


@pytest.mark.parametrize(
    ("top_k", "nodes"),
    [
        (TopK(16, 4), 4),
        (TopK(16, 1), 4),
        (TopK(16, 16), 4),
        (TopK(16, 4, 4, 2), 4),
        (TopK(16, 4, 8, 4), 2),
        (TopK(12, 3, 3, 2), 4),
        (TopK(12, 2, 2, 1), 3),
    ],
    ids=str,
)
def test_the_nodes_of_a_token_are_those_of_drawn_experts(top_k, nodes):
    """The mean over every choice that a router can make, each as likely as any other."""
    size = top_k.experts // top_k.groups
    visited = []
    for groups in itertools.combinations(range(top_k.groups), top_k.groups_per_token):
        pool = [group * size + i for group in groups for i in range(size)]
        for chosen in itertools.combinations(pool, top_k.k):
            visited.append(len({expert * nodes // top_k.experts for expert in chosen}))
    assert nodes_of_token(top_k, nodes) == pytest.approx(sum(visited) / len(visited))


@pytest.mark.parametrize(
    ("name", "nodes", "once"),
    [
        ("mixtral-8x7b", 2, False),  # 2 of 8 experts: 0.79 rows in place of 1
        ("qwen3-30b-a3b", 2, True),
        ("qwen3-30b-a3b", 1, False),
        ("deepseek-v3", 8, True),
    ],
)
def test_one_copy_is_sent_where_it_spares_a_fifth(name, nodes, once):
    assert sends_once(preset(name), nodes) == once


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [
        ("aabb", range(4), [(0, 1), (2, 3)]),
        ("aabb", range(2), [(0, 1)]),
        ("abcd", range(4), [(0,), (1,), (2,), (3,)]),
        ("abab", range(4), []),
        ("abab", (0, 2), [(0, 2)]),
        ("aaab", range(4), []),
        ("abba", range(4), []),
        ("aabbb", range(5), []),
    ],
)
def test_the_ranks_of_a_group_on_each_node(nodes, ranks, expected):
    assert ranks_of_nodes(ranks, nodes) == expected


def groups_of(nodes: str, rank: int, ep: int) -> tuple[Mesh, dict[str, list]]:
    """The mesh of a rank, and the rows of the groups that were made for experts, by role."""
    context = FakeContext(len(nodes), rank)
    context.nodes = list(nodes)
    axes = {"pp": 1, "dp": len(nodes), "cp": 1, "tp": 1}
    mesh = Mesh(axes, context, ep=ep, sends_once=lambda count: count > 1)
    return mesh, {role: rows for role, rows in context.made if role.startswith("experts")}


def test_the_groups_of_experts_follow_the_nodes():
    """Nothing is sent over a group whose tokens go to nodes first, so it has no communicator."""
    mesh, made = groups_of("aabb", 2, 4)
    assert made == {
        "experts across": [(0, 2), (1, 3)],
        "experts within": [(0, 1), (2, 3)],
    }
    assert (mesh.experts.ranks, mesh.experts.rank) == ((0, 1, 2, 3), 2)
    assert (mesh.experts_across.ranks, mesh.experts_across.rank) == ((0, 2), 1)
    assert (mesh.experts_within.ranks, mesh.experts_within.rank) == ((2, 3), 0)
    # Of three groups one is within a node and one is placed unevenly: they have no others.
    for rank, across in ((1, (1,)), (3, (3,)), (5, (5,)), (8, (8, 10)), (11, (9, 11))):
        mesh, made = groups_of("aaaabbbccddd"[:8] + "eeff", rank, 4)
        assert made["experts"] == [(0, 1, 2, 3), (4, 5, 6, 7)]
        assert made["experts across"] == [(8, 10), (9, 11)]
        assert mesh.experts_across.ranks == across
    assert groups_of("aaaa", 0, 4)[1] == {"experts": [(0, 1, 2, 3)]}


MIXTURE = ModelShape(
    layers=4,
    hidden=1024,
    heads=8,
    experts=128,
    experts_per_token=8,
    expert_ffn_hidden=256,
    activation="swiglu",
    bias=False,
    seq_length=2048,
)
TRAINING = Training(global_batch_size=256, precision="bf16")


def test_the_plan_of_experts_on_several_nodes():
    """The network carries the copies, and a node's links the rows; of one node nothing changes."""
    often = replace(H100, software=replace(H100.software, one_copy_to_a_node=False))
    for ep, tp in ((8, 1), (32, 1), (32, 4)):
        layout = Layout(tp=tp, dp=64, ep=ep)
        ours, theirs = (Job(MIXTURE, layout, TRAINING, machine) for machine in (H100, often))
        assert ours.nodes_with_one_copy == ep // 8
        assert theirs.nodes_with_one_copy == 1
        same = time_terms.dispatched(ours) == time_terms.dispatched(theirs)
        assert same == (ep == 8)
    nodes, k = 4, 8
    row = 2 * 2048 * 1024  # bytes of a micro-batch's tokens
    layout = Layout(dp=64, ep=32)
    job = Job(MIXTURE, layout, TRAINING, H100)
    copies = copies_elsewhere(TopK(128, k), nodes)
    assert copies == pytest.approx(2.722, abs=1e-3)
    copies *= time_terms.busiest_load(128, nodes)
    across = copies * 8 * (2 * row + 8 * k * 2048) / H100.network.speed
    within = 2 * k * time_terms.uneven(job) * row * 7 / 8 / H100.nvlink.speed
    latencies = 2 * H100.network.latency + 2 * H100.nvlink.latency
    assert time_terms.dispatched(job).forward == pytest.approx(across + within + latencies)
    uneven = Job(MIXTURE, Layout(dp=72, ep=24), TRAINING, replace(H100, node=16))
    assert uneven.nodes_with_one_copy == 1, "ranks of a group are not equally many on each node"


def test_the_plan_has_the_groups_of_the_mesh_on_nodes():
    for node in (1, 2, 4, 8):
        context = FakeContext(8, 0)
        context.nodes = [str(rank // node) for rank in range(8)]
        mesh = Mesh(
            {"pp": 1, "dp": 8, "cp": 1, "tp": 1},
            context,
            ep=8,
            sends_once=lambda nodes: sends_once(MIXTURE, nodes),
        )
        assert (mesh.experts_across.size > 1) == (node < 8)
        made = [role for role, rows in context.made if len(rows[0]) > 1]
        job = Job(MIXTURE, Layout(dp=8, ep=8), TRAINING, replace(H100, node=node))
        assert sum(memory_terms.communicators(job)) == len(made), (node, made)


def test_other_programs_send_what_they_send():
    """Trine's way is not theirs: their plans have a copy for each expert, or their own formula."""
    for name in ("torchtitan", "megatron-deepspeed-2022"):
        machine = engines.on(H100, engines.programs()[name]["software"])
        assert Job(MIXTURE, Layout(dp=64, ep=32), TRAINING, machine).nodes_with_one_copy == 1


def test_layouts_in_a_column_are_planned_as_each_by_itself():
    """An ep is at most the ranks of a stage: with these dp, experts are on 1, 1, 2, 4, 8 nodes."""
    sizes = [1, 8, 16, 32, 64]
    column = Job(
        MIXTURE,
        Columns(dp=np.array(sizes), ep=64, sequence_parallel=False, overlap_param_gather=False),
        TRAINING,
        H100,
    )
    assert column.nodes_with_one_copy.tolist() == [1, 1, 2, 4, 8]
    for i, dp in enumerate(sizes):
        layout = Layout(dp=dp, ep=64, sequence_parallel=False, overlap_param_gather=False)
        job = Job(MIXTURE, layout, TRAINING, H100)
        for of in (time_terms.dispatched, time_terms.permuted):
            for many, one in zip(of(column), of(job), strict=True):
                assert np.broadcast_to(many, 5)[i] == pytest.approx(float(one))
        for term in (memory_terms.routing_bytes, memory_terms.results_over_mean):
            assert term(column)[i] == pytest.approx(float(term(job)))
