"""The ends of a pipeline whose ranks share embedding and output matrix: `--vocab-pp`.

    Pipeline(stages, factory, config, VocabularyEnds)

What the first stage takes, and the gradient that the last stage's backward takes, are sums over all
ranks, of the passes E, S, T and G that schedules/vocabulary.py describes. The collectives of each
kind of pass have a group of their own, and are waited for in the next pass that needs their result.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from data import Batch
from distributed.collectives import Handle
from distributed.mesh import Mesh
from loss import LocalLoss
from pipeline import Ends, Execution
from schedules.schedule import Action


class _Logits(NamedTuple):
    """What pass S leaves for pass T of a micro-batch. x: the last stage's output; edge: of the
    logits of this rank's part, None in an evaluation; every: the sums of all ranks, when `handle`
    has been waited for.
    """

    x: Tensor
    edge: GradientEdge | None
    local: LocalLoss
    every: Tensor
    handle: Handle


class VocabularyEnds(Ends):
    """E, S, T and G on one rank, in one pass through its actions."""

    meet_in_evaluation = True

    def __init__(self, execution: Execution):
        super().__init__(execution)
        self.mesh = execution.mesh
        self.groups = self.mesh.passes
        self.rank = execution.rank
        self.last = execution.schedule.stages - 1
        part = execution.pipeline.stages[self.rank].vocabulary
        assert part is not None  # stages and schedule come from one layout
        self.part = part
        self.passes = {"E": self._embed, "S": self._logits, "T": self._loss, "G": self._add}
        self.batches: dict[int, Batch] = {}
        self.embedded: dict[int, GradientEdge] = {}
        self.logits: dict[int, _Logits] = {}
        # Under way, by kind of pass and micro-batch: a tensor that is received, sent or summed.
        self.moving: dict[tuple[str, int], tuple[Tensor, Handle]] = {}
        self.taken = execution.schedule.gradients_taken

    @staticmethod
    def connect(mesh: Mesh, device: torch.device) -> None:
        """A first collective of a group connects all ranks."""
        for group in mesh.passes.values():
            group.broadcast(torch.zeros(1, device=device), 0).wait()

    # -- what the stages take and give ------------------------------------------------------

    def batch(self, action: Action) -> Batch | None:
        """No stage reads the batch, which pass E has."""
        return None

    def first_input(self, action: Action, batch: Batch | None) -> Tensor:
        """The sum of E."""
        return self._take("E", action.micro_batch).requires_grad_(torch.is_grad_enabled())

    def last_output(self, action: Action, y: Tensor, batch: Batch | None) -> Tensor:
        """All ranks' S take it."""
        self._send("S", action, y)
        return y

    def last_gradient(self, action: Action) -> Tensor:
        """The sum of T."""
        return self._take("T", action.micro_batch)

    def first_gradient(self, action: Action, x: Tensor) -> None:
        """All ranks' G take it."""
        assert x.grad is not None  # it is no tokens
        self._send("G", action, x.grad)

    def post_receive(self, action: Action) -> None:
        """Begin to receive what a pass S or G takes from one rank, unless this rank sends it."""
        kind, _, m = action
        source = {"S": self.last, "G": 0}.get(kind, self.rank)
        if source != self.rank and (kind, m) not in self.moving:
            buffer = self.execution.new_activation()
            self.moving[kind, m] = buffer, self.groups[kind].broadcast(buffer, source)

    def finish(self) -> list[Handle]:
        """What is still being sent."""
        return [handle for _, handle in self.moving.values()]

    # -- messages ---------------------------------------------------------------------------

    def _send(self, kind: str, action: Action, tensor: Tensor) -> None:
        """Give an action's result to all ranks, whose passes of that kind take it."""
        tensor = tensor.detach().contiguous()
        self._start(kind, action, tensor, lambda: self.groups[kind].broadcast(tensor, self.rank))

    def _sum(self, action: Action, tensor: Tensor, to: int) -> None:
        """Sum a pass's result over all ranks, for one of them."""
        tensor = tensor.contiguous()
        kind = action.kind
        self._start(kind, action, tensor, lambda: self.groups[kind].reduce(tensor, to))

    def _start(
        self, kind: str, action: Action, tensor: Tensor, begin: Callable[[], Handle]
    ) -> None:
        later = self.execution.start_later(action, begin)
        self.moving[kind, action.micro_batch] = tensor, later

    def _take(self, kind: str, m: int) -> Tensor:
        """What was received, or summed on this rank."""
        tensor, handle = self.moving.pop((kind, m))
        handle.wait()
        return tensor

    def _release(self, kind: str, m: int) -> None:
        """Free what has been sent and, by what has arrived since, received."""
        if (kind, m) in self.moving:
            self._take(kind, m)

    # -- passes -----------------------------------------------------------------------------

    def _embed(self, action: Action) -> None:
        m = action.micro_batch
        self.mesh.recorder.at("data", m)
        self.batches[m] = self.execution.batches(m)
        self.mesh.recorder.at("E", m)
        rows = self.part(self.batches[m].tokens)
        if torch.is_grad_enabled():
            self.embedded[m] = get_gradient_edge(rows)
        self._sum(action, rows.detach(), 0)

    def _logits(self, action: Action) -> None:
        m = action.micro_batch
        self.mesh.recorder.at("S", m)
        sends = self.rank == self.last
        x = self.moving["S", m][0] if sends else self._take("S", m)
        x = x.detach().requires_grad_(torch.is_grad_enabled())
        part = self.part
        logits = part.logits(x)
        edge = get_gradient_edge(logits) if torch.is_grad_enabled() else None
        labels = self.batches[m].labels.t()
        local = LocalLoss.of(logits.detach(), labels, part.spec, part.factory.compile)
        ranks = self.mesh.vocabulary
        every = local.sums.new_empty(ranks.size, *local.sums.shape)
        handle = self.execution.start_later(action, lambda: ranks.all_gather(every, local.sums))
        self.logits[m] = _Logits(x, edge, local, every, handle)

    def _loss(self, action: Action) -> None:
        m = action.micro_batch
        self.mesh.recorder.at("T", m)
        x, edge, local, every, handle = self.logits.pop(m)
        handle.wait()  # now every rank has done S, and so has what it takes, and E is summed
        self._release("E", m)
        self._release("S", m)
        sent = self.execution.leaving.pop(Action("F", self.rank, m), None)
        if sent is not None:
            sent.wait()
        for done in self.taken[m]:
            self._release("G", done)
        losses, gradient = local.finish(every, self.execution.loss_weight)
        if self.rank == self.last:
            self.execution.loss += losses.sum()
            self.execution.targets += self.batches[m].count
        if edge is None:
            del self.batches[m]
            return
        add_weight_gradients = self.part.deferred.backward(edge, gradient)
        assert x.grad is not None  # of the logits' input
        self._sum(action, x.grad, self.last)
        add_weight_gradients()

    def _add(self, action: Action) -> None:
        m = action.micro_batch
        self.mesh.recorder.at("G", m)
        gradient = self.moving["G", m][0] if self.rank == 0 else self._take("G", m)
        self._release("T", m)
        torch.autograd.backward(self.embedded.pop(m), gradient)
        del self.batches[m]
