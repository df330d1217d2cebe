"""The ends of a pipeline whose ranks share embedding and output matrix: `--vocab-pp`.

    Pipeline(stages, factory, config, VocabularyEnds)

Every pipeline rank holds an equal part of both matrices (model.VocabularyPart) and does four more
passes for each micro-batch:

    E  embed the tokens              reduce to the first rank        -> input of the first stage
    S  logits of the last stage's output, which is broadcast to all  -> all-gather of their sums
    T  losses and gradients          reduce to the last rank         -> gradient of the last stage
    G  add the first stage's input gradient, which is broadcast, to the embedding's rows

Each kind of pass has a group for its broadcasts and reductions, so that kinds do not wait for one
another. A result is waited for in the next pass that needs it. Read pipeline.py (`Ends`) and
schedules/vocabulary.py, which puts the passes in order, before this file.
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
    """The tensors that pass S keeps for pass T of the same micro-batch.

    x: the last stage's output, (s, b, h). edge: the autograd node of this rank's logits; None in
    an evaluation. every: `LocalLoss.sums` of all ranks, complete after `handle.wait()`.
    """

    x: Tensor
    edge: GradientEdge | None
    local: LocalLoss
    every: Tensor
    handle: Handle


class VocabularyEnds(Ends):
    """Does the passes E, S, T and G of one rank during one `Execution` of a schedule."""

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
        # Per (kind of pass, micro-batch): a tensor that is being received, sent or summed, and the
        # handle to wait for before it is used or freed.
        self.moving: dict[tuple[str, int], tuple[Tensor, Handle]] = {}
        self.taken = execution.schedule.gradients_taken

    @staticmethod
    def connect(mesh: Mesh, device: torch.device) -> None:
        """Do one broadcast in each group: NCCL connects a group's ranks in the first collective."""
        for group in mesh.passes.values():
            group.broadcast(torch.zeros(1, device=device), 0).wait()

    # -- inputs and outputs of the stages ---------------------------------------------------

    def batch(self, action: Action) -> Batch | None:
        """Return None: no stage needs the batch, which pass E keeps for S and T."""
        return None

    def first_input(self, action: Action, batch: Batch | None) -> Tensor:
        """Return the first stage's input: the sum over all ranks of pass E's embeddings."""
        return self._take("E", action.micro_batch).requires_grad_(torch.is_grad_enabled())

    def last_output(self, action: Action, y: Tensor, batch: Batch | None) -> Tensor:
        """Broadcast the last stage's output y, which pass S of every rank takes; return y."""
        self._send("S", action, y)
        return y

    def last_gradient(self, action: Action) -> Tensor:
        """Return the gradient of the last stage's output: the sum over all ranks of pass T's."""
        return self._take("T", action.micro_batch)

    def first_gradient(self, action: Action, x: Tensor) -> None:
        """Broadcast the gradient of the first stage's input, which pass G of every rank takes."""
        assert x.grad is not None  # x is a sum of embeddings
        self._send("G", action, x.grad)

    def post_receive(self, action: Action) -> None:
        """Start the receive of the tensor that a pass S or G takes, unless this rank sends it."""
        kind, _, m = action
        source = {"S": self.last, "G": 0}.get(kind, self.rank)
        if source != self.rank and (kind, m) not in self.moving:
            buffer = self.execution.new_activation()
            self.moving[kind, m] = buffer, self.groups[kind].broadcast(buffer, source)

    def finish(self) -> list[Handle]:
        """Return the handles of all tensors that are still being sent."""
        return [handle for _, handle in self.moving.values()]

    # -- messages ---------------------------------------------------------------------------

    def _send(self, kind: str, action: Action, tensor: Tensor) -> None:
        """Broadcast an action's result to all ranks, for their passes of the given kind."""
        tensor = tensor.detach().contiguous()
        self._start(kind, action, tensor, lambda: self.groups[kind].broadcast(tensor, self.rank))

    def _sum(self, action: Action, tensor: Tensor, to: int) -> None:
        """Reduce the result of an action's pass over all ranks, to the rank `to`."""
        tensor = tensor.contiguous()
        kind = action.kind
        self._start(kind, action, tensor, lambda: self.groups[kind].reduce(tensor, to))

    def _start(
        self,
        kind: str,
        action: Action,
        tensor: Tensor,
        begin: Callable[[], Handle],
    ) -> None:
        """Have `begin` start a collective on `tensor` when the schedule says, and keep both."""
        later = self.execution.start_later(action, begin)
        self.moving[kind, action.micro_batch] = tensor, later

    def _take(self, kind: str, m: int) -> Tensor:
        """Wait for a micro-batch's tensor, received or summed here for that kind of pass."""
        tensor, handle = self.moving.pop((kind, m))
        handle.wait()
        return tensor

    def _release(self, kind: str, m: int) -> None:
        """Free a tensor that this rank sent; call it once a later message shows its arrival."""
        if (kind, m) in self.moving:
            self._take(kind, m)

    # -- passes -----------------------------------------------------------------------------

    def _embed(self, action: Action) -> None:
        """Do pass E: embed this rank's tokens and start the sum for the first rank."""
        m = action.micro_batch
        self.mesh.recorder.at("data", m)
        self.batches[m] = self.execution.batches(m)
        self.mesh.recorder.at("E", m)
        rows = self.part(self.batches[m].tokens)
        if torch.is_grad_enabled():
            self.embedded[m] = get_gradient_edge(rows)
        self._sum(action, rows.detach(), 0)

    def _logits(self, action: Action) -> None:
        """Do pass S: compute this rank's logits and start the all-gather of their sums."""
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
        """Do pass T: losses, and in training the gradients of x and of the output matrix."""
        m = action.micro_batch
        self.mesh.recorder.at("T", m)
        x, edge, local, every, handle = self.logits.pop(m)
        # After this wait every rank has done its S: it has received the last stage's output, which
        # depends on the sum of E and on this rank's F. So the tensors of these can be freed.
        handle.wait()
        self._release("E", m)
        self._release("S", m)
        sent = self.execution.leaving.pop(Action("F", self.rank, m), None)
        if sent is not None:
            sent.wait()
        for done in self.taken[m]:  # their G came before this S on every rank
            self._release("G", done)
        losses, gradient = local.finish(every, self.execution.loss_weight)
        if self.rank == self.last:
            self.execution.loss += losses.sum()
            self.execution.targets += self.batches[m].count
        if edge is None:
            del self.batches[m]
            return
        add_weight_gradients = self.part.deferred.backward(edge, gradient)
        assert x.grad is not None  # x is the logits' input
        self._sum(action, x.grad, self.last)
        add_weight_gradients()

    def _add(self, action: Action) -> None:
        """Do pass G: add the embedding's gradient to this rank's rows."""
        m = action.micro_batch
        self.mesh.recorder.at("G", m)
        gradient = self.moving["G", m][0] if self.rank == 0 else self._take("G", m)
        self._release("T", m)
        torch.autograd.backward(self.embedded.pop(m), gradient)
        del self.batches[m]
