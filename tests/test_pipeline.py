"""The executor, all stages in one process: gradients, and what is held while messages travel.

On real ranks it runs in test_golden and test_train.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Pipeline, _Execution
from schedules import schedule
from watchdog.flight_recorder import FlightRecorder

WIDTH = 3


class Wires:
    """Messages between stages that run in one process, in the order of a simulated schedule."""

    def __init__(self):
        self.boxes, self.held, self.peak = {}, 0, 0

    def group(self, kind: str, stage: int):
        return End(self, kind, stage)


class End:
    """One stage's end of the wires of one direction."""

    def __init__(self, wires: Wires, kind: str, stage: int):
        self.wires, self.kind, self.stage = wires, kind, stage

    def send(self, tensor, to):
        self.wires.boxes.setdefault((self.kind, self.stage, to), []).append(tensor)
        return Sent(self.wires)

    def receive(self, tensor, source):
        return Arriving(self.wires, (self.kind, source, self.stage), tensor)


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


class FakeMesh:
    def __init__(self, wires, stage, stages):
        self.pp = type("Pipeline", (), {"rank": stage, "size": stages})()
        self.first_stage, self.last_stage = stage == 0, stage == stages - 1
        self.forward, self.backward = wires.group("F", stage), wires.group("B", stage)
        self.tp, self.recorder = type("Alone", (), {"rank": 0})(), FlightRecorder()


class Scale(torch.nn.Module):
    """A stage of one weight: x * w, and on the last stage the sum of it."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last
        self.weight = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x, labels=None):
        x = x * self.weight
        return (x * labels).sum() if self.last else x


def stepwise(pipeline, order, batches):
    """A generator that runs one stage's actions one at a time."""
    execution = _Execution(pipeline, order, batches, 10, lambda: None)
    for position, action in enumerate(execution.actions):
        for upcoming in execution.actions[position : position + 2]:
            execution._post_receive(upcoming)
        (execution._forward if action.kind == "F" else execution._backward)(action)
        yield execution
    execution._wait_for_sends()


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 5), st.integers(1, 30))
def test_gradients_equal_one_stage_and_sends_are_let_go(name, stages, micro_batches):
    order = schedule.build(name, stages, micro_batches).stages
    wires = Wires()
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(micro_batches, 2, WIDTH, generator=generator, dtype=torch.float64)
    runs, modules = [], []
    for s in range(stages):
        pipeline = Pipeline.__new__(Pipeline)
        pipeline.mesh = FakeMesh(wires, s, stages)
        pipeline.stage = Scale(s == 0, s == stages - 1)
        pipeline.shape, pipeline.dtype, pipeline.device = (WIDTH,), torch.float64, "cpu"
        modules.append(pipeline.stage)
        runs.append(stepwise(pipeline, order, lambda m: (data[m, 0], data[m, 1])))
    slots = [(slot, s) for s, row in enumerate(schedule.simulate(order)) for slot in row]
    last = {}
    for _, s in sorted(slots, key=lambda pair: (pair[0].end, pair[1])):
        last[s] = next(runs[s])
    for run in runs:
        next(run, None)
    weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    loss = (data[:, 0] * weight**stages * data[:, 1]).sum()
    (loss / 10).backward()
    assert last[stages - 1].loss.item() == pytest.approx(loss.item())
    for module in modules:
        assert module.weight.grad.item() == pytest.approx(weight.grad.item() / stages)
    assert not any(wires.boxes.values())
    assert wires.held == 0
    # A stage holds no more messages than micro-batches are on their way between two stages.
    if name == "1f1b":
        assert wires.peak <= 2 * stages * (stages + 1)
