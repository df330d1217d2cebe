"""Runs a schedule on a stage: the only place that sends activations.

The executor does what the schedule's list says. A receive is posted one action ahead of its use
and a send is not waited for, so messages travel while the stage computes. Activations go through
the mesh's forward group, their gradients through its backward group; within each, neighbours
have agreed on the order (schedule.check), so messages need no labels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import schedule as schedules
from collectives import Group
from config import Config
from model import Stage
from parallel import Builder
from schedule import Action

# Tokens and labels of a micro-batch by its index: (b, s) each, on the stage's device.
Batches = Callable[[int], tuple[Tensor, Tensor]]


class Pipeline:
    """One stage of the pipeline, ready to run the configured schedule or an evaluation.

    Micro-batches have one shape for the whole run: (s, b, h), or (s/tp, b, h) with sequence
    parallelism.
    """

    def __init__(self, stage: Stage, build: Builder, config: Config):
        layout, model = config.layout, config.model
        self.stage, self.mesh = stage, build.mesh
        self.dtype, self.device = build.dtype, build.device
        split = layout.tp if layout.sequence_parallel else 1
        self.shape = (model.seq_length // split, layout.micro_batch_size, model.hidden)
        self.schedule = schedules.build(layout.schedule, layout.pp, config.micro_batches)

    def train(self, batches: Batches, tokens: int, before_last_backward: Callable) -> Tensor:
        """Forward and backward of one step; returns the loss sum of this replica on the one rank
        that counts it (last stage, first tensor rank), 0 on the others.

        Gradients are those of the sum divided by `tokens`, the count of the whole global batch.
        `before_last_backward` is called when only one backward pass is left.
        """
        actions = self.schedule.stages[self.mesh.pp_rank]
        return _Execution(self, actions, batches, tokens, before_last_backward).run()

    @torch.no_grad()
    def evaluate(self, batches: Batches, micro_batches: int) -> Tensor:
        """The loss sum over that many micro-batches of this replica, forward only."""
        order = schedules.build("forward", self.mesh.pp, micro_batches)
        actions = order.stages[self.mesh.pp_rank]
        return _Execution(self, actions, batches, 1, lambda: None).run()


class _Execution:
    """One pass through a stage's action list, with what is in flight meanwhile."""

    def __init__(self, pipeline: Pipeline, actions, batches, tokens, before_last_backward):
        self.pipeline, self.mesh = pipeline, pipeline.mesh
        self.stage, self.actions, self.batches = pipeline.stage, actions, batches
        self.tokens, self.before_last_backward = tokens, before_last_backward
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # input and output of each forward
        self.arriving: dict[Action, tuple[Tensor, object]] = {}
        self.leaving: list = []
        self.loss = torch.zeros((), dtype=torch.float64, device=pipeline.device)

    def run(self) -> Tensor:
        backwards = sum(action.kind == "B" for action in self.actions)
        for position, action in enumerate(self.actions):
            for upcoming in self.actions[position : position + 2]:
                self._post_receive(upcoming)
            if action.kind == "F":
                self._forward(action)
                continue
            backwards -= 1
            if backwards == 0:
                self.before_last_backward()
            self._backward(action)
        for handle in self.leaving:
            handle.wait()
        return self.loss if self.mesh.tp.rank == 0 else torch.zeros_like(self.loss)

    def _forward(self, action: Action) -> None:
        x, labels = self._inputs(action)
        y = self.stage(x, labels)
        if self.mesh.last_stage:
            self.loss += y.detach()
            y = y / self.tokens
        else:
            self._send(self.mesh.forward, y.detach(), self.mesh.pp_rank + 1)
        if torch.is_grad_enabled():
            self.held[action.micro_batch] = (x, y)

    def _inputs(self, action: Action) -> tuple[Tensor, Tensor | None]:
        """What the stage's forward takes: only the first and the last stage read the batch."""
        tokens = labels = None
        if self.mesh.first_stage or self.mesh.last_stage:
            tokens, labels = self.batches(action.micro_batch)
        if self.mesh.first_stage:
            return tokens, labels
        return self._take(action).requires_grad_(torch.is_grad_enabled()), labels

    def _backward(self, action: Action) -> None:
        x, y = self.held.pop(action.micro_batch)
        gradient = None if self.mesh.last_stage else self._take(action)
        if y.requires_grad:  # a first stage with nothing trainable has no graph
            torch.autograd.backward(y, gradient)
        if not self.mesh.first_stage:
            self._send(self.mesh.backward, x.grad, self.mesh.pp_rank - 1)

    def _post_receive(self, action: Action) -> None:
        mesh, forward = self.mesh, action.kind == "F"
        at_end = mesh.first_stage if forward else mesh.last_stage
        if at_end or action in self.arriving:
            return
        group, source = (mesh.forward, -1) if forward else (mesh.backward, 1)
        buffer = torch.empty(
            self.pipeline.shape, dtype=self.pipeline.dtype, device=self.pipeline.device
        )
        self.arriving[action] = (buffer, group.receive(buffer, mesh.pp_rank + source))

    def _take(self, action: Action) -> Tensor:
        buffer, handle = self.arriving.pop(action)
        handle.wait()
        return buffer

    def _send(self, group: Group, tensor: Tensor, to: int) -> None:
        self.leaving.append(group.send(tensor.contiguous(), to))
