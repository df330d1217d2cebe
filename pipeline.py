"""Runs a schedule on a stage: the only place that sends activations.

The executor does what the schedule's list says. A receive is posted one action ahead of its use
and a send is not waited for, so messages travel while the stage computes. Activations go through
the mesh's forward group, their gradients through its backward group; within each, neighbours
have agreed on the order (schedule.check), so messages need no labels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from config.schema import Config
from distributed.collectives import Group, Handle
from model import Stage
from parallel import ParamFactory
from schedules import schedule as schedules
from schedules.schedule import Action

# Tokens and labels of a micro-batch by its index: (b, s) each, on the stage's device.
Batches = Callable[[int], tuple[Tensor, Tensor]]


class Pipeline:
    """One stage of the pipeline, ready to run the configured schedule or an evaluation.

    Micro-batches have one shape for the whole run: (s, b, h), or (s/tp, b, h) with sequence
    parallelism. Their number may change from step to step.
    """

    def __init__(self, stage: Stage, build: ParamFactory, config: Config):
        layout, model = config.layout, config.model
        self.stage, self.mesh = stage, build.mesh
        self.dtype, self.device = build.dtype, build.device
        split = layout.tp if layout.sequence_parallel else 1
        self.shape = (model.seq_length // split, layout.micro_batch_size, model.hidden)
        self._name, self._schedule = layout.schedule, None

    def train(
        self,
        batches: Batches,
        micro_batches: int,
        divisor: float,
        before_backward: Callable[[bool], None],
    ) -> Tensor:
        """Forward and backward of one step; returns the loss sum of this replica on the one rank
        that counts it (last stage, first tensor rank), 0 on the others.

        Gradients are those of the sum divided by `divisor`: the tokens of the whole global batch
        over the loss scale. `before_backward` is called before each backward pass, and told
        whether it is the last.
        """
        order = self._order(micro_batches)
        return _Execution(self, order, batches, divisor, before_backward).run()

    @torch.no_grad()
    def evaluate(self, batches: Batches, micro_batches: int) -> Tensor:
        """The loss sum over that many micro-batches of this replica, forward only."""
        order = schedules.build("forward", self.mesh.pp.size, micro_batches).stages
        return _Execution(self, order, batches, 1.0, lambda last: None).run()

    def _order(self, micro_batches: int):
        """The schedule's actions for that many micro-batches, kept while their number stays."""
        if self._schedule is None or self._schedule[0] != micro_batches:
            built = schedules.build(self._name, self.mesh.pp.size, micro_batches)
            self._schedule = (micro_batches, built.stages)
        return self._schedule[1]


class _Execution:
    """One pass through a stage's action list, with what is in flight meanwhile."""

    def __init__(self, pipeline: Pipeline, order, batches, divisor, before_backward):
        self.pipeline, self.mesh, self.stage = pipeline, pipeline.mesh, pipeline.stage
        self.order, self.actions = order, order[self.mesh.pp.rank]
        self.batches, self.divisor, self.before_backward = batches, divisor, before_backward
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # input and output of each forward
        self.arriving: dict[Action, tuple[Tensor, Handle]] = {}
        self.leaving: dict[tuple[int, Action], Handle] = {}  # by receiving stage, and its action
        self.passed: dict[int, int] = {}  # actions that a neighbour is known to have finished
        self.loss = torch.zeros((), dtype=torch.float64, device=pipeline.device)

    def run(self) -> Tensor:
        """Do all actions in order; the loss sum on the one rank that counts it, 0 on the others."""
        backwards = sum(action.kind == "B" for action in self.actions)
        for position, action in enumerate(self.actions):
            for upcoming in self.actions[position : position + 2]:
                self._post_receive(upcoming)
            if action.kind == "F":
                self._forward(action)
                continue
            backwards -= 1
            self.before_backward(backwards == 0)
            self._backward(action)
        self._wait_for_sends()
        return self.loss if self.mesh.tp.rank == 0 else torch.zeros_like(self.loss)

    def _forward(self, action: Action) -> None:
        x, labels = self._inputs(action)
        y = self.stage(x, labels)
        if self.mesh.last_stage:
            self.loss += y.detach()
            y = y / self.divisor
        else:
            self._send(self.mesh.forward, y.detach(), action, self.mesh.pp.rank + 1)
        if torch.is_grad_enabled():
            self.held[action.micro_batch] = (x, y)

    def _inputs(self, action: Action) -> tuple[Tensor, Tensor | None]:
        """What the stage's forward takes: only the first and the last stage read the batch."""
        tokens = labels = None
        if self.mesh.first_stage or self.mesh.last_stage:
            self.mesh.recorder.at("data", action.micro_batch)
            tokens, labels = self.batches(action.micro_batch)
        self.mesh.recorder.at("F", action.micro_batch)
        if self.mesh.first_stage:
            return tokens, labels
        return self._take(action).requires_grad_(torch.is_grad_enabled()), labels

    def _backward(self, action: Action) -> None:
        self.mesh.recorder.at("B", action.micro_batch)
        x, y = self.held.pop(action.micro_batch)
        gradient = None if self.mesh.last_stage else self._take(action)
        torch.autograd.backward(y, gradient)
        if not self.mesh.first_stage:
            self._send(self.mesh.backward, x.grad, action, self.mesh.pp.rank - 1)

    # -- messages ---------------------------------------------------------------------------

    def _source(self, action: Action) -> int:
        """The stage that sends what this stage's action needs; outside the pipeline if none."""
        return self.mesh.pp.rank + (-1 if action.kind == "F" else 1)

    def _post_receive(self, action: Action) -> None:
        source = self._source(action)
        if not 0 <= source < self.mesh.pp.size or action in self.arriving:
            return
        group = self.mesh.forward if action.kind == "F" else self.mesh.backward
        buffer = torch.empty(
            self.pipeline.shape, dtype=self.pipeline.dtype, device=self.pipeline.device
        )
        self.arriving[action] = (buffer, group.receive(buffer, source))

    def _take(self, action: Action) -> Tensor:
        buffer, handle = self.arriving.pop(action)
        handle.wait()
        self._release(self._source(action), action)
        return buffer

    def _send(self, group: Group, tensor: Tensor, action: Action, to: int) -> None:
        if not torch.is_grad_enabled():
            self._wait_for_sends()  # nothing ever comes back that would tell of an arrival
        self.leaving[to, action] = group.send(tensor.contiguous(), to)

    def _release(self, neighbour: int, action: Action) -> None:
        """Let go of what a neighbour must have received before it did `action`.

        Without this, every activation sent would be held until the step ends.
        """
        actions = self.order[neighbour]
        done = self.passed.get(neighbour, 0)
        while actions[done] != action:
            if (neighbour, actions[done]) in self.leaving:
                self.leaving.pop((neighbour, actions[done])).wait()
            done += 1
        self.passed[neighbour] = done

    def _wait_for_sends(self) -> None:
        for handle in self.leaving.values():
            handle.wait()
        self.leaving.clear()
