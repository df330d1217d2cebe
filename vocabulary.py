"""The ends of a pipeline whose ranks share embedding and output matrix: `--vocab-pp`.

    Pipeline(stages, factory, config, VocabularyEnds)

Every pipeline rank holds an equal part of both matrices (model.VocabularyPart) and does four more
passes for each micro-batch:

    E  embed the tokens              reduce to the first rank        -> input of the first stage
    S  logits of the last stage's output, which is broadcast to all  -> all-gather of their sums
    T  losses and gradients          reduce to the last rank         -> gradient of the last stage
    G  add the first stage's input gradient, which is broadcast, to the embedding's rows

Each kind of pass has a group for its broadcasts and reductions, so that kinds do not wait for one
another. A result is waited for in the next pass that needs it. F and B are the forward and the
backward pass of a stage. Read pipeline.py (`Ends`) and schedules/vocabulary.py, which puts the
passes in order, before this file.
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
    """The results of pass S that pass T of the same micro-batch needs.

    x: the last stage's output, (s, b, h). edge: the autograd node of this rank's logits; None in
    an evaluation. local_loss: this rank's part of the losses. sums_of_ranks: `LocalLoss.sums` of
    all ranks, complete after `handle.wait()`.
    """

    x: Tensor
    edge: GradientEdge | None
    local_loss: LocalLoss
    sums_of_ranks: Tensor
    handle: Handle


class VocabularyEnds(Ends):
    """Does the passes E, S, T and G of one rank during one `Execution` of a schedule."""

    # Pipeline needs no other sign that its sends have arrived: in pass S all ranks exchange sums,
    # in an evaluation too, and the exchange for a micro-batch ends only after every forward pass of
    # this micro-batch, so after the arrival of its activations.
    shows_arrivals = True

    def __init__(self, execution: Execution):
        """Prepare for one execution; with --vocab-pp, stage r is on pipeline rank r."""
        super().__init__(execution)
        self.mesh = execution.mesh
        self.groups = self.mesh.passes  # by kind of pass, the group of its collectives
        self.rank = execution.rank
        self.last_rank = execution.schedule.stages - 1
        part = execution.pipeline.stages[self.rank].vocabulary
        assert part is not None  # with --vocab-pp every stage has a VocabularyPart
        self.part = part
        self.passes = {
            "E": self._embed,
            "S": self._compute_logits,
            "T": self._compute_loss,
            "G": self._add_embedding_gradient,
        }
        # Three dictionaries by micro-batch. A pass adds the entry, and the last pass that needs the
        # entry removes it.
        self.batches: dict[int, Batch] = {}  # tokens and labels, from E on
        self.embeddings: dict[int, GradientEdge] = {}  # autograd's node of E's result, until G
        self.logits: dict[int, _Logits] = {}  # results of S, until T
        # By kind of pass and micro-batch: a tensor that is being received, sent or summed, and the
        # handle to wait for before the tensor is used or freed. E and T: the sum of their results;
        # S and G: their input, which is broadcast to them.
        self.messages: dict[tuple[str, int], tuple[Tensor, Handle]] = {}
        # By micro-batch m: the earlier micro-batches whose pass G every rank has done when pass T
        # of m begins. Then T frees the tensors that were broadcast for these passes G.
        self.finished_by = execution.schedule.gradients_taken

    @staticmethod
    def connect(mesh: Mesh, device: torch.device) -> None:
        """Do one broadcast in each group; called before the first schedule of a run.

        NCCL connects ranks in the first collective of a group and blocks their hosts meanwhile, so
        that inside a schedule ranks could wait for each other for ever.
        """
        for group in mesh.passes.values():
            group.broadcast(torch.zeros(1, device=device), 0).wait()

    # -- inputs and outputs of the stages ---------------------------------------------------

    def batch(self, action: Action) -> Batch | None:
        """Return None: a stage reads no tokens and labels; the passes E, S and T read them."""
        return None

    def first_input(self, action: Action, batch: Batch | None) -> Tensor:
        """Return the first stage's input, (s, b, h): the sum of all ranks' results of pass E."""
        return self._take("E", action.micro_batch).requires_grad_(torch.is_grad_enabled())

    def last_output(self, action: Action, y: Tensor, batch: Batch | None) -> Tensor:
        """Broadcast the last stage's output y, (s, b, h), to pass S of every rank; return y."""
        self._broadcast("S", action, y)
        return y

    def last_gradient(self, action: Action) -> Tensor:
        """Return the gradient of the last stage's output: the sum of all ranks' results of T."""
        return self._take("T", action.micro_batch)

    def first_gradient(self, action: Action, x: Tensor) -> None:
        """Broadcast the gradient of the first stage's input x to pass G of every rank."""
        assert x.grad is not None  # x: the first stage's input, which `first_input` made a leaf
        self._broadcast("G", action, x.grad)

    def post_receive(self, action: Action) -> None:
        """Start to receive the tensor that a pass S or G needs, unless this rank sends it.

        The execution calls this up to twice for an action: one action earlier if the schedule
        allows, and just before the action. The second call does nothing.
        """
        kind, _, micro_batch = action
        senders = {"S": self.last_rank, "G": 0}  # by kind of pass, the rank that broadcasts to it
        sender = senders.get(kind, self.rank)  # E and T get no broadcast: nothing to receive
        if sender != self.rank and (kind, micro_batch) not in self.messages:
            buffer = self.execution.new_activation()
            handle = self.groups[kind].broadcast(buffer, sender)
            self.messages[kind, micro_batch] = (buffer, handle)

    def finish(self) -> list[Handle]:
        """Return the handles of all tensors that are still being sent.

        Execution calls this after the last action; the pipeline waits for them before its next run.
        """
        return [handle for _, handle in self.messages.values()]

    # -- messages ---------------------------------------------------------------------------

    def _broadcast(self, kind: str, action: Action, result: Tensor) -> None:
        """Broadcast an action's result to all pipeline ranks, for their passes of kind `kind`."""
        tensor = result.detach().contiguous()
        self._start(kind, action, tensor, lambda: self.groups[kind].broadcast(tensor, self.rank))

    def _reduce(self, action: Action, result: Tensor, to_rank: int) -> None:
        """Sum all pipeline ranks' results of an action; only `to_rank` gets the sum."""
        tensor = result.contiguous()
        kind = action.kind
        self._start(kind, action, tensor, lambda: self.groups[kind].reduce(tensor, to_rank))

    def _start(
        self,
        kind: str,
        action: Action,
        tensor: Tensor,
        begin: Callable[[], Handle],
    ) -> None:
        """Have `begin` start a collective on `tensor` when the schedule says.

        The tensor and the collective's handle are kept for the passes of kind `kind`.
        """
        handle = self.execution.start_later(action, begin)
        self.messages[kind, action.micro_batch] = (tensor, handle)

    def _take(self, kind: str, micro_batch: int) -> Tensor:
        """Wait for the tensor that is received or summed for a pass of kind `kind`; return it."""
        tensor, handle = self.messages.pop((kind, micro_batch))
        handle.wait()
        return tensor

    def _free(self, kind: str, micro_batch: int) -> None:
        """Free a tensor that this rank has sent, if any; called when it must have arrived.

        kind: the kind of pass that the tensor is for (`messages`).
        """
        if (kind, micro_batch) in self.messages:
            self._take(kind, micro_batch)

    # -- passes -----------------------------------------------------------------------------

    def _embed(self, action: Action) -> None:
        """Do pass E: embed the tokens that this rank's rows have, and start the sum of all ranks'
        results for the first rank.
        """
        micro_batch = action.micro_batch
        self.mesh.recorder.at("data", micro_batch)
        batch = self.execution.batches(micro_batch)
        self.batches[micro_batch] = batch
        self.mesh.recorder.at("E", micro_batch)
        embeddings = self.part(batch)
        if torch.is_grad_enabled():
            self.embeddings[micro_batch] = get_gradient_edge(embeddings)
        self._reduce(action, embeddings.detach(), to_rank=0)

    def _compute_logits(self, action: Action) -> None:
        """Do pass S: compute this rank's columns of the logits, (s, b, V/n), and start the
        all-gather of the sums that the loss needs.
        """
        micro_batch = action.micro_batch
        self.mesh.recorder.at("S", micro_batch)
        if self.rank == self.last_rank:
            x, _ = self.messages["S", micro_batch]  # this rank's own output, which it broadcasts
        else:
            x = self._take("S", micro_batch)
        # Autograd stops at this x: pass T sends its gradient to the last stage, for that stage's B.
        x = x.detach().requires_grad_(torch.is_grad_enabled())
        part = self.part
        logits = part.logits(x)
        # Pass T starts autograd's backward pass at this edge, the logits' node in the graph. So the
        # logits themselves need not be kept, and LocalLoss may overwrite them.
        edge = get_gradient_edge(logits) if torch.is_grad_enabled() else None
        labels = self.batches[micro_batch].labels.t()
        local_loss = LocalLoss.of(logits.detach(), labels, part.spec, part.factory.compile)
        group = self.mesh.vocabulary
        sums = local_loss.sums
        sums_of_ranks = sums.new_empty(group.size, *sums.shape)
        handle = self.execution.start_later(action, lambda: group.all_gather(sums_of_ranks, sums))
        self.logits[micro_batch] = _Logits(x, edge, local_loss, sums_of_ranks, handle)

    def _compute_loss(self, action: Action) -> None:
        """Do pass T: compute the losses, and in training the gradients of the last stage's output
        and of this rank's rows of the output matrix.
        """
        micro_batch = action.micro_batch
        self.mesh.recorder.at("T", micro_batch)
        x, edge, local_loss, sums_of_ranks, handle = self.logits.pop(micro_batch)
        # After this wait every rank has done its S: it has received the last stage's output, which
        # depends on the sum of E and on this rank's F. So three messages of this rank have arrived,
        # and can be freed: its part of E's sum, the last stage's output, and what its F has sent.
        handle.wait()
        self._free("E", micro_batch)
        self._free("S", micro_batch)
        send_of_forward = self.execution.sends.pop(Action("F", self.rank, micro_batch), None)
        if send_of_forward is not None:
            send_of_forward.wait()
        # Every rank has done G of these micro-batches, so rank 0's broadcasts for G have arrived.
        for finished in self.finished_by[micro_batch]:
            self._free("G", finished)
        losses, gradient = local_loss.finish(sums_of_ranks, self.execution.loss_weight)
        if self.rank == self.last_rank:
            self.execution.loss += losses.sum()
            self.execution.targets += self.batches[micro_batch].count
        if edge is None:  # an evaluation has no backward pass, so it needs no gradients
            del self.batches[micro_batch]
            return
        # First the gradient of the input x, for which the last rank waits. It is sent while this
        # rank computes the gradient of its rows of the output matrix (add_weight_gradients).
        add_weight_gradients = self.part.deferred.backward(edge, gradient)
        assert x.grad is not None  # x: the last stage's output, which pass S made a leaf
        self._reduce(action, x.grad, self.last_rank)
        add_weight_gradients()

    def _add_embedding_gradient(self, action: Action) -> None:
        """Do pass G: add the gradient of the embeddings to this rank's rows of the embedding.

        It is the gradient of the first stage's input, which rank 0 broadcasts.
        """
        micro_batch = action.micro_batch
        self.mesh.recorder.at("G", micro_batch)
        if self.rank == 0:
            gradient, _ = self.messages["G", micro_batch]  # this rank broadcasts it
        else:
            gradient = self._take("G", micro_batch)
        # This gradient has come back through all stages. It began as the sum of the ranks' results
        # of T, so this rank's result has arrived at the last rank, and is freed.
        self._free("T", micro_batch)
        torch.autograd.backward(self.embeddings.pop(micro_batch), gradient)
        del self.batches[micro_batch]
