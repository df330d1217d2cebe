"""The executor: if this failed, a pipeline would compute wrong gradients, hold too much or hang.

On real ranks it runs in test_golden and test_train.
"""

import weakref
from collections import Counter
from functools import partial

import handmade_schedules as handmade
import pytest
import torch
from compare import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_rules import (
    LoadingRecorder,
    Passing,
    StreamMesh,
    stuck_streams,
)
from test_peaks import PeakBytes

from data import Batch
from parallel import DeferredGradients, linear
from pipeline import Execution, Pipeline
from schedules import orders, schedule
from schedules.simulation import simulate
from watchdog.flight_recorder import FlightRecorder

WIDTH, LOSS_WEIGHT = 3, 0.1


class Wires:
    """Messages between ranks that run in one process, in the order of a simulated schedule."""

    def __init__(self):
        self.boxes, self.held, self.peak = {}, 0, 0


class End:
    """One rank's end of the wires of one direction; `rank` and `size` as those of a group."""

    def __init__(self, wires: Wires, kind: str, rank: int, size: int):
        self.wires, self.kind, self.rank, self.size = wires, kind, rank, size

    def send(self, tensor, to):
        self.wires.boxes.setdefault((self.kind, self.rank, to), []).append(tensor)
        return Sent(self.wires)

    def receive(self, tensor, source):
        return Arriving(self.wires, (self.kind, source, self.rank), tensor)


class Sent:
    def __init__(self, wires):
        self.wires, self.waited = wires, False
        wires.held += 1
        wires.peak = max(wires.peak, wires.held)

    def wait(self):
        self.wires.held -= not self.waited
        self.waited = True


class Arriving:
    def __init__(self, wires, key, tensor):
        self.wires, self.key, self.tensor = wires, key, tensor

    def wait(self):
        self.tensor.copy_(self.wires.boxes[self.key].pop(0))


class OneProcessMesh:
    """The part of a mesh that the pipeline uses."""

    def __init__(self, wires, rank, ranks):
        self.ends = {kind: End(wires, kind, rank, ranks) for kind in "FB"}
        self.pp, self.recorder = self.ends["F"], FlightRecorder()
        self.tp = type("Alone", (), {"rank": 0})()

    def channel(self, kind):
        return self.ends[kind]


class Multiply(torch.nn.Module):
    """A stage of one matrix: x W^T, and on the last stage the sum of its products with labels."""

    def __init__(self, index, last, deferred):
        super().__init__()
        self.last, self.deferred = last, deferred
        generator = torch.Generator().manual_seed(index)
        weight = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x, batch=None):
        x = linear(x, self.weight, None, self.deferred)
        return (x * batch.labels).sum() if self.last else x


def pipeline_of(order, rank, mesh, stage_of, shape=(1, WIDTH), dtype=torch.float32) -> Pipeline:
    """One rank's pipeline, of as many stages as the schedule gives it; not from a configuration.

    stage_of: makes a stage of its number, whether it is the last, and the deferred gradients.
    """
    pipeline = Pipeline.__new__(Pipeline)
    pipeline.losses = ()
    pipeline.masked, pipeline.mesh = False, mesh
    pipeline.deferred = DeferredGradients() if order.split else None
    pipeline._connected, pipeline.sending = set(), []
    pipeline.stages = {
        s: stage_of(s, s == order.stages - 1, pipeline.deferred) for s in order.stages_on(rank)
    }
    pipeline.shape, pipeline.dtype, pipeline.device = shape, dtype, "cpu"
    return pipeline


def make(name: str, ranks: int, micro_batches: int) -> schedule.Schedule:
    if name == "blockwise":
        return handmade.interleaved(ranks, 2, micro_batches)
    if name == "there and back":
        return handmade.there_and_back(ranks, micro_batches)
    if name.startswith("forward"):
        placed = orders.rank_of_stages(name, ranks, 2 if name == "forward interleaved" else 1)
        return orders.forward_only(placed, micro_batches)
    return orders.build(name, ranks, micro_batches, 2 if name == "interleaved" else 1)


def run_together(order, wires, batches) -> tuple[list[Pipeline], list[Execution]]:
    """Run every rank's actions one at a time, in the order of simulated time."""
    ranks = len(order.ranks)
    pipelines = [
        pipeline_of(order, rank, OneProcessMesh(wires, rank, ranks), Multiply, dtype=torch.float64)
        for rank in range(ranks)
    ]
    executions = [Execution(p, order, batches, LOSS_WEIGHT) for p in pipelines]
    steps = [iter(execution) for execution in executions]
    slots = [(slot, rank) for rank, row in enumerate(simulate(order)) for slot in row]
    for slot, rank in sorted(slots, key=lambda pair: (pair[0].end, pair[1])):
        assert next(steps[rank]) == slot.action
    for rest in steps:
        assert next(rest, None) is None
    return pipelines, executions


NAMES = [*orders.ORDERS, "blockwise", "there and back"]


@settings(max_examples=60)
@given(st.sampled_from(NAMES), st.booleans(), st.integers(1, 5), st.integers(1, 20))
def test_gradients_equal_one_stage_and_messages_are_freed(name, split, ranks, micro_batches):
    order = make(name, ranks, micro_batches)
    if split and not order.split:
        order = handmade.split(order, micro_batches)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(micro_batches, 2, WIDTH, generator=generator, dtype=torch.float64)
    wires = Wires()
    pipelines, executions = run_together(
        order, wires, lambda m: Batch(data[m, :1].clone().requires_grad_(), data[m, 1:], 1)
    )
    ours = {s: stage.weight for p in pipelines for s, stage in p.stages.items()}
    theirs = [ours[s].detach().clone().requires_grad_() for s in range(order.stages)]
    x = data[:, 0]
    for weight in theirs:
        x = x @ weight.t()
    loss = (x * data[:, 1]).sum()
    (loss * LOSS_WEIGHT).backward()
    last = executions[order.rank_of[-1]]
    assert_close([last.loss.item()], [loss.item()], 1e-9)
    for s, weight in enumerate(theirs):
        assert_close(ours[s].grad, weight.grad, 1e-9, s, scale=weight.grad.abs().max().item())
    assert not any(wires.boxes.values())
    for pipeline in pipelines:
        pipeline.finish_sending()
    assert wires.held == 0
    # A rank holds no more messages than micro-batches are on their way between two stages.
    if name == "1f1b":
        assert wires.peak <= 2 * ranks * (ranks + 1)


def recording_pipeline(order, rank: int, mesh=None, shape=(1, WIDTH)) -> Pipeline:
    """A rank's pipeline of stages without matrices, over groups that only write messages down."""
    mesh = mesh or StreamMesh(rank, len(order.ranks), FlightRecorder())
    return pipeline_of(order, rank, mesh, lambda number, last, deferred: Passing(last), shape)


def test_an_output_is_freed_when_it_has_been_sent():
    """Only its place in the graph is needed for the backward pass, not its data."""
    count, size = 8, 2**16
    order = make("gpipe", 2, count)
    inputs = torch.ones(size)
    with PeakBytes() as bytes_held:
        recording_pipeline(order, 0, shape=(size,)).run(order, lambda m: Batch(inputs, inputs, 1))
    assert 4 * size <= bytes_held.peak <= 4 * size * 4 < 4 * size * count


# ---- Under NCCL's rules --------------------------------------------------------------------------


FORWARD = ["forward", "forward interleaved", "forward zb-v"]


def streams(
    order,
    steps: int = 2,
    loads: bool = False,
    connect: bool = True,
    every: bool = False,
):
    """The meshes of all ranks after some steps: what every rank's host launches, and what its
    compute stream waits for.

    loads: the first action of each kind loads a kernel; with `every` each action does. connect:
    whether the ranks connect first.
    """
    meshes, ones = [], torch.ones(1, WIDTH)
    for rank in range(len(order.ranks)):
        recorder = LoadingRecorder(every) if loads else FlightRecorder()
        mesh = StreamMesh(rank, len(order.ranks), recorder)
        if loads:
            recorder.events = mesh.events
        pipeline = recording_pipeline(order, rank, mesh)
        if not connect:
            pipeline._connected.add(order.rank_of)
        for step in range(steps):
            recorder.begin_step(step)
            pipeline.run(order, lambda m: Batch(ones.clone().requires_grad_(), ones, 1))
        pipeline.finish_sending()
        meshes.append(mesh)
    return meshes


@pytest.mark.parametrize("name", [*NAMES, *FORWARD])
def test_no_stream_waits_for_ever_if_a_send_ends_only_with_its_receive(name):
    """NCCL connects at the first message of two ranks and blocks both hosts until then."""
    for ranks in (2, 3, 7):
        for micro_batches in (1, 2, 3, 8):
            order = make(name, ranks, micro_batches)
            with torch.set_grad_enabled(name not in FORWARD):
                meshes = streams(order)
            assert stuck_streams(meshes) is None, (ranks, micro_batches)
            assert all(mesh.events for mesh in meshes)


@pytest.mark.parametrize("name", [*NAMES, *FORWARD])
def test_no_kernel_that_is_loaded_waits_for_a_message_that_waits_for_it(name):
    """Loading a kernel waits until nothing runs on the device: no receive or send either."""
    for ranks in (2, 3, 7):
        for micro_batches in (1, 2, 3, 8):
            order = make(name, ranks, micro_batches)
            with torch.set_grad_enabled(name not in FORWARD):
                meshes = streams(order, loads=True)
            assert stuck_streams(meshes) is None, (ranks, micro_batches)


@pytest.mark.parametrize("name", [*NAMES, *FORWARD])
def test_all_actions_may_wait_for_the_whole_device(name):
    """The kernels of an expert depend on its rows, so that any action may load one; and with little
    memory the allocator waits in any action, too."""
    for ranks in range(2, 9):
        for micro_batches in (1, 2, 3, 4, 5, 7, 8, 16):
            order = make(name, ranks, micro_batches)
            with torch.set_grad_enabled(name not in FORWARD):
                meshes = streams(order, loads=True, every=True)
            assert stuck_streams(meshes) is None, (ranks, micro_batches)


@settings(max_examples=60)
@given(
    st.sampled_from([*NAMES, *FORWARD]),
    st.integers(2, 6),
    st.integers(1, 20),
    st.integers(1, 3),
    st.booleans(),
)
def test_so_they_may_with_more_stages_a_rank_and_a_split_backward(name, ranks, count, more, split):
    order = make(name, ranks, count)
    if name == "interleaved":
        order = orders.build(name, ranks, count, more)
    if split and not order.split and name not in FORWARD:
        order = handmade.split(order, count)
    with torch.set_grad_enabled(name not in FORWARD):
        meshes = streams(order, loads=True, every=True)
    assert stuck_streams(meshes) is None


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v"])
def test_two_neighbours_that_both_receive_ahead_would_wait_for_ever(name, monkeypatch):
    """In the steady state each receives what the other sends only after its next action."""
    first = orders.build(name, 4, 8, 2 if name == "interleaved" else 1)
    monkeypatch.setattr(schedule.Schedule, "may_be_ahead", lambda order, action: True)
    meshes = streams(first, loads=True, every=True)
    assert stuck_streams(meshes).startswith("deadlock: rank")


def test_messages_are_hidden_where_they_can_be():
    """1F1B receives every activation ahead, zb-h1 nearly all gradients too, gpipe all of both."""
    for name, ranks, count, gradients in (
        ("1f1b", 4, 32, 0),
        ("zb-h1", 4, 32, 90),
        ("gpipe", 4, 32, 93),
    ):
        order = orders.build(name, ranks, count)
        ahead = Counter(
            action.kind for row in order.ranks for action in row if order.may_be_ahead(action)
        )
        assert ahead["F"] == (ranks - 1) * (count - 1)  # all but the first of each rank
        assert ahead["B"] >= gradients


@pytest.mark.parametrize("name", NAMES)
def test_a_receive_started_ahead_of_what_sends_its_message_would_wait_for_ever(name, monkeypatch):
    """Why the schedule says which receives are started ahead."""
    monkeypatch.setattr(schedule.Schedule, "may_be_ahead", lambda order, action: True)
    order = make(name, 4, 1)
    stuck = stuck_streams(streams(order, loads=True))
    assert stuck is not None
    assert "receive" in stuck
    if order.stages == 4:  # else a rank sends both ways in one group
        assert stuck_streams(streams(order)) is None, "no kernel is loaded"


def test_a_send_started_before_what_its_receiver_waits_for_would_wait_for_ever(monkeypatch):
    """Why the schedule says when results are sent: in a V the first stage runs far ahead."""
    order = make("zb-v", 2, 3)
    at_once = {action: i + 1 for row in order.ranks for i, action in enumerate(row)}
    monkeypatch.setattr(schedule.Schedule, "sent_before", lambda order, action: at_once[action])
    assert "send" in stuck_streams(streams(order, loads=True))


class Counting(torch.nn.Module):
    """A stage whose every forward is counted until nothing holds what it saved any more."""

    def __init__(self, alive: Counter, number: int, last: bool, deferred):
        super().__init__()
        self.last, self.deferred, self.alive = last, deferred, alive
        self.weight = torch.nn.Parameter(torch.eye(WIDTH))

    def forward(self, x, batch=None):
        x = x * 1.0  # saved by the product alone
        self.alive["now"] += 1
        self.alive["most"] = max(self.alive["most"], self.alive["now"])
        weakref.finalize(x, self.alive.subtract, ["now"])
        y = linear(x, self.weight, None, self.deferred)
        return y.sum() if self.last else y


@pytest.mark.parametrize("name", NAMES)
def test_live_activations_are_as_many_as_the_schedule_says(name):
    """Counted as tensors: what a stage saved is freed by the last pass that needs it."""
    order, ones = make(name, 3, 6), torch.ones(1, WIDTH)
    for rank in range(3):
        alive = Counter()
        mesh = StreamMesh(rank, 3, FlightRecorder())
        pipeline = pipeline_of(order, rank, mesh, partial(Counting, alive))
        pipeline.run(order, lambda m: Batch(ones.clone().requires_grad_(), ones, 1))
        assert alive["most"] == order.peak[rank]
        assert alive["now"] == 0
