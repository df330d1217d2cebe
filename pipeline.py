"""Runs a pipeline schedule on one rank's stages: the only file that sends activations.

`Execution` does the schedule's list of actions for this rank in order. An action is one pass of one
micro-batch through one stage: F forward, B backward, W weight gradients if B leaves them out.
schedules/schedule.py explains the lists (F0 F1 B0 ...): read it first. `mesh.recorder.at` tells the
flight recorder which pass this rank is in, for the report of a hang.

A receive is started one action before the action that uses it, and a rank does not wait for its
sends, so messages travel while the rank computes. Schedule.may_be_ahead and Schedule.sent_before
name the messages that start later, because their other rank still waits for this rank, and
Schedule.turn the order of messages that start between the same two actions. Activations
and gradients travel in separate groups (Mesh.channel). schedule.check has made sure that two
neighbours send and receive in the same order within a group, so messages carry no labels. A result
for another stage of the same rank is handed over without a message.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from config.schema import Config
from data import Batch
from distributed.collectives import DelayedStart, Handle
from layers.attention import KeyValueCache
from model import Stage
from parallel import ParamFactory
from schedules.orders import evaluation_of_layout, schedule_for
from schedules.partition import placement
from schedules.schedule import Action, Schedule

# A function that returns the micro-batch with an index in the step, on this rank's device.
Batches = Callable[[int], Batch]


class Pipeline:
    """The stages that one rank holds, by their number in the pipeline, and the schedules they run.

    Activations are (s, b, h), or (s/tp, b, h) with sequence parallelism; s is the number of this
    rank's tokens of a sample, 1/cp of all. The number of micro-batches may change from step to
    step. masked: whether every stage reads the micro-batch, for attention masks or positions.
    """

    def __init__(self, stages: Mapping[int, Stage], factory: ParamFactory, config: Config):
        """Begin without a schedule. stages: this rank's, by number."""
        self.stages = stages
        self.mesh = factory.mesh
        self.deferred = factory.deferred  # puts weight gradients off until W; None: no passes W
        self.dtype = factory.dtype
        self.device = factory.device
        self.masked = config.data.masks_attention or config.data.reset_positions
        self._model = config.model
        self._layout = config.layout
        self._schedules: dict[int, Schedule] = {}  # by the number of micro-batches
        self.set_length(config.model.seq_length)
        # The shape of a micro-batch's sum of losses in training: with --z-loss or --mtp-depth there
        # are several.
        further = bool(config.training.z_loss) + bool(config.model.mtp_depth)
        self.losses = (1 + further,) if further else ()
        self.sending: list[Handle] = []  # sends that the last `run` did not wait for
        self.last_rank = placement(config.layout)[-1]  # pipeline rank that holds the last stage
        # Schedule.rank_of, the ranks of the stages, of schedules whose ranks have been connected.
        self._connected: set[tuple[int, ...]] = set()

    def set_length(self, length: int) -> None:
        """Send and receive activations of samples of `length` tokens from now on."""
        ranks_of_sequence = self._layout.cp  # ranks among which a sample's tokens are divided
        if self._layout.sequence_parallel:
            ranks_of_sequence *= self._layout.tp
        local_length = length // ranks_of_sequence
        self.shape = (local_length, self._layout.micro_batch_size, self._model.hidden)  # s b h

    def schedule(self, micro_batches: int) -> Schedule:
        """Return the layout's schedule for this number of micro-batches; cache the last result."""
        if micro_batches not in self._schedules:
            schedule = schedule_for(self._layout, micro_batches)
            self._schedules = {micro_batches: schedule}
        return self._schedules[micro_batches]

    def train(self, batches: Batches, micro_batches: int, loss_weight: float) -> tuple[Tensor, int]:
        """Run the forward and backward passes of one step on this rank.

        Return the sum of losses (a scalar; with --z-loss or --mtp-depth also those that
        Stage.forward adds, (n,)) and the number of targets of the replica on the rank that holds
        the last stage and is first in its tensor group; 0 and 0 on all other ranks. The losses are
        multiplied by `loss_weight` for the gradients; Optimizer.begin_step returns it.
        """
        return self.run(self.schedule(micro_batches), batches, loss_weight)

    @torch.no_grad()
    def evaluate(self, batches: Batches, micro_batches: int) -> tuple[Tensor, int]:
        """Run the forward passes of an evaluation on this rank.

        Return the replica's sum of losses (a scalar) and number of targets on the rank that holds
        the last stage and is first in its tensor group; 0 and 0 on all other ranks.
        """
        return self.run(evaluation_of_layout(self._layout, micro_batches), batches)

    @torch.no_grad()
    def score(
        self, batches: Batches, micro_batches: int, take: Callable[[Batch, Tensor], None]
    ) -> None:
        """Run the forward passes of micro-batches whose continuations are scored.

        take: called with each micro-batch and its Head.scores, on the ranks of the last stage.
        """
        schedule = evaluation_of_layout(self._layout, micro_batches)
        self._execute(Scoring(self, schedule, batches, take))

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: KeyValueCache) -> Tensor | None:
        """Return the logits of the token after `tokens` on the ranks of the last stage.

        They are (b, V/tp): this rank's part of the vocabulary. Return None on the other ranks.
        tokens: (b, s), equal on every rank; they continue the tokens in the cache, and their keys
        and values are added to it. Works without sequence parallelism only.
        """
        self.finish_sending()
        cache.begin(tokens.shape[1])
        cache.new_tokens = tokens
        x = tokens
        rank = self.mesh.pp.rank
        # Every rank goes through all stages, and computes, sends or receives where it takes part.
        rank_of = placement(self._layout)
        next_rank_of = [*rank_of[1:], rank_of[-1]]  # the last stage's output is sent to no rank
        for stage, (sender, receiver) in enumerate(zip(rank_of, next_rank_of)):
            if rank == sender:
                x = self.stages[stage](x, cache=cache)
            if sender == receiver:
                continue
            channel = self.mesh.channel("F")
            if rank == sender:
                channel.send(x.contiguous(), receiver).wait()
            elif rank == receiver:
                shape = (tokens.shape[1], len(tokens), self._model.hidden)
                x = torch.empty(shape, dtype=self.dtype, device=self.device)
                channel.receive(x, sender).wait()
        return x if rank == self.last_rank else None

    def run(
        self, schedule: Schedule, batches: Batches, loss_weight: float = 1.0
    ) -> tuple[Tensor, int]:
        """Do this rank's actions of a schedule in order; return what `train` returns."""
        execution = Execution(self, schedule, batches, loss_weight)
        self._execute(execution)
        # All ranks of a tensor group have the same loss. The caller sums over ranks: one counts it.
        if self.mesh.tp.rank > 0:
            return torch.zeros_like(execution.loss), 0
        return execution.loss, execution.targets

    def _execute(self, execution: "Execution") -> None:
        """Do all actions of an execution."""
        rank_of = execution.schedule.rank_of
        if rank_of not in self._connected:
            self._connect(rank_of)
        self.finish_sending()
        for _ in execution:
            continue  # each turn of the iterator does one action

    def finish_sending(self) -> None:
        """Wait for the sends that the last `run` left unfinished; called before the next `run`.

        By then the messages have arrived. A wait at the end of the last `run` could be for a slower
        neighbour, and would delay the reduction of this rank's gradients.
        """
        while self.sending:
            self.sending.pop().wait()

    def _connect(self, rank_of: tuple[int, ...]) -> None:
        """Send one number between every two ranks that will send activations or gradients.

        Called before the first run of a schedule. NCCL connects two ranks at their first message
        and blocks both hosts until they are connected. Inside a schedule two neighbours could block
        in different groups and wait for each other for ever. Here all ranks go through the pairs in
        one order, so the two ranks of the first unconnected pair always meet.
        """
        self._connected.add(rank_of)
        pairs = sorted(set(pairwise(rank_of)))  # the ranks of neighbouring stages
        message = torch.zeros(1, dtype=self.dtype, device=self.device)
        rank = self.mesh.pp.rank
        for lower, upper in pairs:
            if lower == upper:
                continue
            for kind, sender, receiver in (("F", lower, upper), ("B", upper, lower)):
                group = self.mesh.channel(kind)
                if rank == sender:
                    group.send(message, receiver).wait()
                elif rank == receiver:
                    group.receive(message, sender).wait()


class Execution:
    """One run of a rank's list of actions, with its messages and kept activations.

    An iteration over the execution does the actions. loss: the sum of the losses so far, float64,
    in training also the further ones of Stage.forward, (n,); targets: the number of targets in that
    sum.
    """

    def __init__(
        self, pipeline: Pipeline, schedule: Schedule, batches: Batches, loss_weight: float
    ):
        """Prepare to do the actions; `loss_weight` multiplies the loss for the gradients.

        Raise ValueError if the layers defer weight gradients but the schedule has no W passes, or
        the other way round: gradients would be missing.
        """
        if torch.is_grad_enabled() and schedule.split != (pipeline.deferred is not None):
            raise ValueError(f"layers and schedule {schedule.name} disagree on a split backward")
        self.pipeline = pipeline
        self.mesh = pipeline.mesh
        self.schedule = schedule
        self.rank = pipeline.mesh.pp.rank
        self.actions = schedule.ranks[self.rank]
        self.batches = batches
        self.masked = pipeline.masked  # whether every stage reads the micro-batch
        self.loss_weight = loss_weight
        shape = pipeline.losses if torch.is_grad_enabled() else ()
        self.loss = torch.zeros(shape, dtype=torch.float64, device=pipeline.device)
        self.targets = 0
        # Per (stage, micro-batch): the stage's input and the autograd node of its output, kept
        # until the backward pass. The output itself is freed when it has been sent.
        self.for_backward: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = {}
        # Per (stage, micro-batch): the function that computes the weight gradients, for pass W.
        self.for_weights: dict[tuple[int, int], Callable[[], None]] = {}
        # Per action: the neighbouring stage's action whose result is its input, and the rank that
        # does it. The first stage's F and the last stage's B have no entry.
        self.sources: dict[Action, tuple[Action, int]] = {}
        for action in self.actions:
            source = schedule.input_of(action)
            if source is not None:
                self.sources[action] = (source, schedule.rank_of[source.stage])
        # Results of this rank's actions that are inputs of another stage on this rank.
        self.local_results: dict[Action, Tensor] = {}
        # Running receives, by the action of the neighbour that sends; sends, by this rank's action.
        self.receives: dict[Action, tuple[Tensor, Handle]] = {}
        self.sends: dict[Action, DelayedStart] = {}
        # Sends that have not been started, and the messages to start before each action.
        self.sends_due: dict[Action, DelayedStart] = {}
        self.messages = self._messages_by_index()
        neighbours = {rank for _, rank in self.sources.values() if rank != self.rank}
        # Each neighbour's actions: the index of an action in the list of the neighbour's actions.
        self.index_of = {a: i for rank in neighbours for i, a in enumerate(schedule.ranks[rank])}
        # Per neighbour, the number of its actions that are known to be finished.
        self.finished = dict.fromkeys(neighbours, 0)
        self.passes = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}

    def __iter__(self) -> Iterator[Action]:
        """Do and yield this rank's actions in order; leave unfinished sends to the pipeline."""
        self._start_messages(0)
        for index, action in enumerate(self.actions):
            self.passes[action.kind](action)
            self._start_messages(index + 1)
            yield action
        self.pipeline.sending += self.sends.values()

    def is_last(self, action: Action) -> bool:
        """Return whether an action belongs to the last stage of the pipeline."""
        return action.stage == self.schedule.stages - 1

    # -- passes of a stage ------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        """Do action F: the forward pass of a micro-batch through one stage."""
        stage = action.stage
        micro_batch = action.micro_batch
        batch: Batch | None = None
        # Tokens, labels or masks; or a layer of the stage reads the tokens.
        reads = getattr(self.pipeline.stages[stage], "reads_tokens", False)
        if stage == 0 or self.is_last(action) or self.masked or reads:
            self.mesh.recorder.at("data", micro_batch)
            batch = self.batches(micro_batch)
        self.mesh.recorder.at("F", micro_batch)
        if stage > 0:
            x = self._take_input(action).requires_grad_(torch.is_grad_enabled())
        elif batch is not None:
            x = batch.tokens
        y = self.pipeline.stages[stage](x, batch)
        if self.is_last(action) and batch is not None:
            self.take_result(batch, y.detach())
            total = y.sum() if y.dim() else y  # with the further losses
            y = total * self.loss_weight  # from here the backward pass starts
        else:
            self._pass_on(y.detach(), action, stage + 1)
        if torch.is_grad_enabled():
            self.for_backward[stage, micro_batch] = (x, get_gradient_edge(y))

    def take_result(self, batch: Batch, y: Tensor) -> None:
        """Add y, the sum of a micro-batch's losses, and its targets to those so far."""
        self.loss += y
        self.targets += batch.count

    def _backward(self, action: Action) -> None:
        """Do action B: a stage's backward pass, or only its input's gradient if W does the rest."""
        stage = action.stage
        micro_batch = action.micro_batch
        self.mesh.recorder.at("B", micro_batch)
        x, output = self.for_backward.pop((stage, micro_batch))
        gradient = None if self.is_last(action) else self._take_input(action)
        deferred = self.pipeline.deferred
        if deferred is None:  # B computes all gradients
            torch.autograd.backward(output, gradient)
        else:
            self.for_weights[stage, micro_batch] = deferred.backward(output, gradient)
        if stage > 0:  # tokens have no gradient
            # x.grad is not None: `_forward` made x require its gradient.
            dx: Tensor = x.grad  # type: ignore[assignment]
            self._pass_on(dx, action, stage - 1)

    def _weight_gradients(self, action: Action) -> None:
        """Do action W: compute the weight gradients that B of the same micro-batch deferred."""
        self.mesh.recorder.at("W", action.micro_batch)
        compute_weight_gradients = self.for_weights.pop((action.stage, action.micro_batch))
        compute_weight_gradients()

    # -- between stages ---------------------------------------------------------------------

    def _messages_by_index(self) -> dict[int, list[tuple[int, str, Action]]]:
        """Return the messages that start before each action, by the action's index in the list.

        Each is (its turn, "send" or "receive", the action of this rank that sends or takes it).
        Where several start before one action, they start in their turns (Schedule.turn).
        """
        messages: dict[int, list[tuple[int, str, Action]]] = {}
        for index, action in enumerate(self.actions):
            turn = self.schedule.turn(action)
            if turn is not None:
                before = self.schedule.sent_before(action)
                messages.setdefault(before, []).append((turn, "send", action))
            source, source_rank = self.sources.get(action, (None, self.rank))
            if source is not None and source_rank != self.rank:
                # The next input travels while this rank computes, if it can be sent by then.
                ahead = index > 0 and self.schedule.may_be_ahead(action)
                turn = self.schedule.turn(source) or 0
                messages.setdefault(index - ahead, []).append((turn, "receive", action))
        return {index: sorted(started) for index, started in messages.items()}

    def _start_messages(self, index: int) -> None:
        """Start the messages that are due before the action with this index in the list."""
        for _, kind, action in self.messages.get(index, ()):
            if kind == "send":
                self.sends_due.pop(action).start()
            else:
                source, source_rank = self.sources[action]
                channel = self.mesh.channel(action.kind)
                buffer = self.new_activation()
                self.receives[source] = (buffer, channel.receive(buffer, source_rank))

    def new_activation(self) -> Tensor:
        """Return an uninitialised buffer for one activation, or its gradient, between stages."""
        pipeline = self.pipeline
        return torch.empty(pipeline.shape, dtype=pipeline.dtype, device=pipeline.device)

    def _take_input(self, action: Action) -> Tensor:
        """Wait for the neighbouring stage's result that is an action's input, and return it."""
        source, source_rank = self.sources[action]
        if source_rank == self.rank:
            return self.local_results.pop(source)
        buffer, handle = self.receives.pop(source)
        handle.wait()
        self._free_received(source_rank, source)
        return buffer

    def _pass_on(self, result: Tensor, action: Action, to_stage: int) -> None:
        """Send an action's result to the neighbouring stage `to_stage`, or keep it for that stage
        if this rank holds the stage too.
        """
        to_rank = self.schedule.rank_of[to_stage]
        if to_rank == self.rank:
            self.local_results[action] = result
            return
        if not torch.is_grad_enabled():
            # In training, `_free_received` frees sent tensors when a gradient comes back. An
            # evaluation has no gradients, so this rank waits for its earlier sends here.
            self._wait_for_sends()
        channel = self.mesh.channel(action.kind)
        message = result.contiguous()
        send = DelayedStart(lambda: channel.send(message, to_rank), self.mesh.recorder)
        self.sends[action] = self.sends_due[action] = send

    def _free_received(self, neighbour: int, finished: Action) -> None:
        """Free the sent messages that a neighbour must have received to finish an action.

        Called when the result of that action arrives: all actions before it in the neighbour's list
        are done too, so their inputs have arrived. Else all sent tensors were kept until step end.
        """
        first = self.finished[neighbour]
        stop = self.index_of[finished] + 1
        for action in self.schedule.ranks[neighbour][first:stop]:
            used = self.schedule.input_of(action)
            if used in self.sends:
                self.sends.pop(used).wait()
        self.finished[neighbour] = max(first, stop)

    def _wait_for_sends(self) -> None:
        """Wait for all sends that have been started, and free the sent tensors."""
        started = [action for action, send in self.sends.items() if send.handle]
        for action in started:
            self.sends.pop(action).wait()


class Scoring(Execution):
    """Forward passes of micro-batches whose continuations are scored; every stage has masks."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        batches: Batches,
        take: Callable[[Batch, Tensor], None],
    ):
        """Prepare to do the actions. take: called with each micro-batch and its Head.scores."""
        super().__init__(pipeline, schedule, batches, loss_weight=1.0)
        self.masked = True
        self._take = take

    def take_result(self, batch: Batch, y: Tensor) -> None:
        """Pass a micro-batch and its Head.scores on."""
        self._take(batch, y)
