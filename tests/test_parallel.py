"""The mesh, the generator of weights and collectives: if this failed, ranks would differ."""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from fake_context import FakeContext
from golden_worker import options as golden_options
from hypothesis import given, settings
from ranks import fork_ranks

from config import validation
from config.schema import Layout
from distributed import collectives
from distributed.collectives import Group
from distributed.mesh import Mesh, mesh_of_run
from parallel import draw_normal
from watchdog.flight_recorder import FlightRecorder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_and_layers_on_ranks(ranks):
    outcome = fork_ranks(ranks, "tests/collectives_worker.py")
    assert outcome.status == 0, outcome.err[-3000:]
    assert outcome.out.startswith("ok ")


def group_on(backend: str, monkeypatch, started: list, blocking: bool = False) -> Group:
    """A group of two over a backend that is not there; `started`: how its sums were started."""

    def all_reduce(tensor, op, group, async_op=False):
        started.append(async_op)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(collectives.dist, "get_backend", lambda handle: backend)
    monkeypatch.setattr(collectives.dist, "all_reduce", all_reduce)
    log = FlightRecorder().group_log("tp", (0, 1))
    return Group((0, 1), 0, object(), log, blocking)


def test_over_nccl_a_wait_that_follows_at_once_takes_the_current_stream(monkeypatch):
    started: list[bool] = []
    group = group_on("nccl", monkeypatch, started)
    handle = group.at_once.all_reduce(torch.ones(3))
    assert started == [], "it starts in its wait, between the events of the flight recorder"
    assert group.group_log.entered == 1
    handle.wait()
    handle.wait()
    assert started == [False]
    group.all_reduce(torch.ones(3)).wait()
    assert started == [False, True]
    assert group.group_log.entered == 2
    blocking = group_on("nccl", monkeypatch, started, blocking=True)
    gloo, alone = group_on("gloo", monkeypatch, started), Group()
    assert all(each.at_once is each for each in (blocking, gloo, alone))


def drawn(name, shape, dim, start, stop, std, seed, device="cpu"):
    """Rows [start, stop) along `dim` of a normal tensor, in float64."""
    local = (*shape[:dim], stop - start, *shape[dim + 1 :])
    out = torch.full(local, torch.nan, dtype=torch.float64, device=device)
    draw_normal(out, name, shape, dim, start, std, seed)
    return out


@settings(max_examples=60)
@given(st.data())
def test_any_slice_is_drawn_by_itself(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim]))
    stop = data.draw(st.integers(start, shape[dim]))
    whole = drawn("w", shape, dim, 0, shape[dim], 0.5, 7)
    part = drawn("w", shape, dim, start, stop, 0.5, 7)
    assert torch.equal(whole.narrow(dim, start, stop - start), part)
    other = drawn("w", shape, 0, 0, shape[0], 0.5, 7)
    assert torch.equal(whole, other), "the split dimension must not matter"


def test_drawn_weights_are_normal_and_unrelated():
    n = 1_000_000
    x = drawn("a", (n,), 0, 0, n, 1.0, 1)
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert abs((x < -1.959964).double().mean() - 0.025) < 5 * (0.025 / n) ** 0.5
    others = (
        drawn("b", (n,), 0, 0, n, 1.0, 1),
        drawn("a", (n,), 0, 0, n, 1.0, 2),
        x.roll(1),
        x.roll(2),
    )
    for other in others:
        assert abs((x * other).mean()) < 5 / n**0.5


def test_first_values_stay_what_they_are():
    """Weights of a seed are part of the interface: a new version must draw the same ones."""
    first = drawn("blocks.0.mlp.up.weight", (2, 2), 0, 0, 2, 0.02, 1234)
    assert first.flatten().tolist() == pytest.approx(FIRST_VALUES, rel=1e-12)


FIRST_VALUES = [
    -0.0008205107437777376,
    -0.018439010210228906,
    -0.006074894312771182,
    0.01773239536730884,
]


def test_rank_order():
    """rank = (pp_rank * dp + dp_rank) * tp + tp_rank, of a mesh on a fake context."""
    layout = Layout(tp=2, pp=3, dp=4)
    ranks = torch.arange(24).view(3, 4, 2)
    for rank in range(24):
        mesh = Mesh(layout.axes, FakeContext(24, rank))
        pp, dp, tp = (mesh.place[axis] for axis in ("pp", "dp", "tp"))
        assert ranks[pp, dp, tp] == rank
        assert (mesh.pp.rank, mesh.dp.rank, mesh.tp.rank) == (pp, dp, tp)
        groups = (ranks[pp, dp], ranks[pp, :, tp], ranks[:, dp, tp])
        found = (mesh.tp.ranks, mesh.dp.ranks, mesh.forward.ranks)
        assert found == tuple(tuple(group.tolist()) for group in groups)
        ends = mesh.forward.ranks[::2]
        assert mesh.tied.ranks == (ends if rank in ends else (rank,))
    with pytest.raises(ValueError, match=r"'dp': 4, .* is not a mesh of 23 ranks"):
        Mesh(layout.axes, FakeContext(23))


def test_no_group_is_made_that_nothing_is_sent_over():
    """A communicator of NCCL takes memory. The ends of a pipeline have one only if they hold copies
    of one matrix.
    """

    def roles(**options) -> set[str]:
        context = FakeContext(4, 1)
        config = golden_options({"pp": 2, "layers": 4} | options)
        mesh = mesh_of_run(validation.check(config, 4), context)
        assert (mesh.pp.rank, mesh.pp.size, mesh.forward.ranks) == (0, 2, (1, 3))
        return {role for role, _ in context.made}

    assert roles(tied=True) == {"tp", "cp", "dp", "forward", "backward", "tied", "world"}
    assert roles(tied=False) == {"tp", "cp", "dp", "forward", "backward", "world"}
    several = roles(tied=False, schedule="interleaved", global_batch_size=8)
    assert several == {"tp", "cp", "dp", "forward", "backward", "world"}
    assert "tied" not in roles(tied=True, schedule="zb-v"), "one rank has both ends"
