"""If this failed, a rehearsal would leave out a rank whose code path no other rank has."""

from itertools import combinations, combinations_with_replacement, product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from architecture.shape import ModelShape
from config.mesh_axes import coordinates, rows_along
from config.schema import Layout
from tools.emulator import rehearsal
from tools.emulator.matching import RunTraces, mismatches
from tools.emulator.recording import Event

AXES = rehearsal.AXES
NAMES = ("first", "between", "last")


def world_of(pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, heads: int = 1):
    """A configuration with these axes, `heads` of each tensor rank."""
    model = ModelShape(pp, 8 * tp * heads, tp * heads, kv_heads=tp * heads)
    return SimpleNamespace(layout=Layout(tp=tp, pp=pp, dp=dp, cp=cp), model=model)


def kind(config, axis: str, rank: int) -> str:
    """Whether a rank is first, between or last on an axis."""
    position = coordinates(rank, config.layout.axes)[axis]
    if position == 0:
        return "first"
    return "last" if position == config.layout.axes[axis] - 1 else "between"


sizes = st.integers(1, 6)
worlds = st.builds(world_of, sizes, sizes, sizes, sizes, st.sampled_from((1, 2, 4)))


@given(worlds)
@settings(max_examples=60)
def test_every_stage_and_every_pair_of_places_is_run(config):
    ran = rehearsal.chosen(config)
    axes = config.layout.axes
    size = axes["pp"] * axes["dp"] * axes["cp"] * axes["tp"]
    assert ran == sorted(set(ran))
    assert set(ran) <= set(range(size))
    assert {coordinates(rank, axes)["pp"] for rank in ran} == set(range(axes["pp"]))
    assert len(ran) <= 9 + 2 + axes["pp"] * axes["cp"]
    for one, two in combinations(AXES, 2):
        there = {(kind(config, one, r), kind(config, two, r)) for r in range(size)}
        assert there == {(kind(config, one, r), kind(config, two, r)) for r in ran}


def rehearsed(config, does: dict) -> RunTraces:
    """The world as the ranks that are run do it; does[rank]: whether it enters an all-reduce along
    each axis.
    """
    axes = config.layout.axes
    rows = {axis: rows_along(axes, (axis,)) for axis in AXES}
    own = {}
    for rank in rehearsal.chosen(config):
        events = [Event("all_reduce", role, 1, 4, "float32", "SUM") for role in rows]
        own[rank] = events if does[rank] else []
    return RunTraces(rows, [own[other] for other in rehearsal.represented_by(config, list(own))])


@pytest.mark.parametrize("axes", list(combinations_with_replacement(AXES, 2)))
def test_what_ranks_of_two_places_leave_out_is_found(axes):
    """Wherever a code path depends on two places, such as the first replica's last tensor rank."""
    config = world_of(pp=4, dp=4, cp=1, tp=4)
    ranks = range(64)
    assert mismatches(rehearsed(config, dict.fromkeys(ranks, True))) == []
    for names in product(NAMES, repeat=2):
        places = list(zip(axes, names))
        does = {r: any(kind(config, axis, r) != name for axis, name in places) for r in ranks}
        left_out = 64 - sum(does.values())
        assert bool(mismatches(rehearsed(config, does))) == (0 < left_out < 64), names


def test_ranks_of_experts_that_exchange_with_the_first_are_run():
    """With one copy of a token to a node: the last on its node, and the one in its place on the
    last node. Of groups that are placed otherwise another rank is run.
    """
    model = ModelShape(2, 64, 4, experts=16, experts_per_token=8, activation="swiglu", bias=False)
    config = SimpleNamespace(layout=Layout(dp=24, ep=8), model=model)
    assert {0, 3, 4, 7} <= set(rehearsal.chosen(config, nodes=6))
    # Nodes of 6: the groups are on (6, 2), (4, 4) and (2, 6) ranks of two nodes.
    ran = rehearsal.chosen(config, nodes=4)
    taken = rehearsal.represented_by(config, ran, nodes=4)
    assert {taken[rank] // 8 for rank in range(8, 16)} == {1}
    assert {taken[rank] // 8 for rank in (*range(8), *range(16, 24))} <= {0, 2}


def test_how_many_ranks_of_a_large_world_are_run():
    assert len(rehearsal.chosen(world_of(pp=12, dp=8, tp=4, heads=4))) == 21
    assert rehearsal.chosen(world_of(tp=8)) == [0, 4, 7]
    assert rehearsal.chosen(world_of(dp=2, tp=2, pp=2)) == [0, 3, 4, 5, 6, 7]
