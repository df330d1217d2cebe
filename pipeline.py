"""Runs a pipeline schedule on one rank's stages: the only file that sends activations.

`Execution` does the schedule's list of actions for this rank in order; a table gives the method for
each kind of pass. schedules/schedule.py explains the lists (F0 F1 B0 ...): read it first.

A receive is started one action before the action that uses it, and a rank does not wait for its
sends, so messages travel while the rank computes. A message is started later than that if its other
rank still waits for this one (Schedule.may_be_ahead, sent_before). Activations and gradients travel
in separate groups (Mesh.channel). schedule.check has made sure that two neighbours send and receive
in the same order within a group, so messages carry no labels. A result for another stage of the
same rank is handed over without a message.

`Ends` gives the first stage its input and takes the last stage's output: tokens and a loss, or with
--vocab-pp the sums that vocabulary.py computes on all pipeline ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from attention import KeyValueCache
from config.schema import Config
from data import Batch
from distributed.collectives import Handle
from distributed.mesh import Mesh
from model import Stage
from parallel import ParamFactory
from schedules.orders import evaluation_of_layout, of_layout
from schedules.partition import placement
from schedules.schedule import Action, Schedule
from watchdog.flight_recorder import FlightRecorder

# Takes the index of a micro-batch in the step and returns the micro-batch, on this rank's device.
Batches = Callable[[int], Batch]


class Ends:
    """Gives the first stage its input and takes the last stage's output, in one execution.

    In this class the first stage's input is the tokens of a micro-batch, and the last stage's
    output is a loss. A subclass may compute the input, or use the output, in further passes of its
    own kinds; `passes` maps each of these kinds to its method.
    """

    # Whether the ranks wait for one another in an evaluation too. If they do, this rank learns that
    # its activations have arrived, although an evaluation sends no gradients back.
    meet_in_evaluation = False

    def __init__(self, execution: "Execution"):
        self.execution = execution
        self.passes: dict[str, Callable[[Action], None]] = {}

    @staticmethod
    def connect(mesh: Mesh, device: torch.device) -> None:
        """Connect all ranks in the groups of the kinds in `passes`; here there is nothing to do."""

    def batch(self, action: Action) -> Batch | None:
        """Return the micro-batch that a forward pass reads, None if its stage reads none.

        The first and the last stage read the micro-batch; with masks every stage does.
        """
        execution = self.execution
        first = action.stage == 0
        if not (first or execution.is_last(action) or execution.pipeline.masked):
            return None
        execution.mesh.recorder.at("data", action.micro_batch)
        return execution.batches(action.micro_batch)

    def first_input(self, action: Action, batch: Batch | None) -> Tensor:
        """Return the input of the first stage's forward pass: the tokens, (b, s)."""
        assert batch is not None  # the first stage reads it
        return batch.tokens

    def last_output(self, action: Action, y: Tensor, batch: Batch | None) -> Tensor:
        """Add the last stage's output, `y`, to the loss of the execution.

        y: the sum of a micro-batch's losses. Return `y` times the loss weight, the scalar from
        which the backward pass starts.
        """
        assert batch is not None  # the last stage reads it
        self.execution.loss += y.detach()
        self.execution.targets += batch.count
        return y * self.execution.loss_weight

    def last_gradient(self, action: Action) -> Tensor | None:
        """Return the gradient of the result of `last_output`; None if that is a scalar loss."""
        return None

    def first_gradient(self, action: Action, x: Tensor) -> None:
        """Called after the first stage's backward pass; does nothing, for tokens have no gradient.

        x: the first stage's input. If a subclass made it in other passes, it has a gradient now.
        """

    def post_receive(self, action: Action) -> None:
        """Start to receive the input of an action of a kind in `passes`, if another rank sends it.

        Called before the action, or one action earlier.
        """

    def finish(self) -> list[Handle]:
        """Return the handles of sends that are not finished; called when all actions are done."""
        return []


class Pipeline:
    """The stages that one rank holds, by stage number, and the schedules that they run.

    Activations are (s, b, h), or (s/tp, b, h) with sequence parallelism; s counts this rank's
    tokens of a sample (1/cp of them). s and the number of micro-batches may change from step to
    step. masked: every stage reads the micro-batch, which holds attention masks or positions.
    """

    ends: type[Ends] = Ends

    def __init__(
        self,
        stages: Mapping[int, Stage],
        factory: ParamFactory,
        config: Config,
        ends: type[Ends] = Ends,
    ):
        self.stages = stages
        self.mesh = factory.mesh
        self.deferred = factory.deferred
        self.dtype = factory.dtype
        self.device = factory.device
        self.masked = config.data.masks_attention or config.data.reset_positions
        self.ends = ends
        self._model = config.model
        self._layout = config.layout
        self._schedules: dict[int, Schedule] = {}
        split = config.layout.cp
        if config.layout.sequence_parallel:
            split *= config.layout.tp
        local_length = config.model.seq_length // split
        # The shape of a stage's activations, (s, b, h).
        self.shape = (local_length, config.layout.micro_batch_size, config.model.hidden)
        self.sending: list[Handle] = []  # sends that the last `run` did not wait for
        self.last_rank = placement(config.layout)[-1]  # pipeline rank that holds the last stage
        self._connected: set[tuple[int, ...]] = set()  # `rank_of` of the schedules that ran

    def schedule(self, micro_batches: int) -> Schedule:
        """Return the layout's schedule for this number of micro-batches; the last one is cached."""
        if micro_batches not in self._schedules:
            found = of_layout(self._model, self._layout, micro_batches, self.device.type)
            self._schedules = {micro_batches: found}
        return self._schedules[micro_batches]

    def train(self, batches: Batches, micro_batches: int, loss_weight: float) -> tuple[Tensor, int]:
        """Run the forward and backward passes of one step on this rank.

        Return the replica's sum of losses and its number of targets on the rank that holds the last
        stage and is first in its tensor group; 0 and 0 on all other ranks. Gradients are those of
        the sum times `loss_weight`, which `Optimizer.begin_step` returns.
        """
        return self.run(self.schedule(micro_batches), batches, loss_weight)

    @torch.no_grad()
    def evaluate(self, batches: Batches, micro_batches: int) -> tuple[Tensor, int]:
        """Run the forward passes of an evaluation; return sum of losses and targets as `train`."""
        return self.run(evaluation_of_layout(self._layout, micro_batches), batches)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: KeyValueCache) -> Tensor | None:
        """Return the logits of the token after `tokens`: (b, V/tp), this rank's part of the
        vocabulary, on the ranks of the last stage; None on the others.

        tokens: (b, s), equal on every rank, the continuation of the tokens in the cache. Their keys
        and values are added to the cache. Without sequence parallelism only.
        """
        self.finish_sending()
        cache.begin(tokens.shape[1])
        x = tokens
        rank = self.mesh.pp.rank
        rank_of = placement(self._layout)
        for stage, (here, to) in enumerate(zip(rank_of, [*rank_of[1:], rank_of[-1]])):
            if rank == here:
                x = self.stages[stage](x, cache=cache)
            if rank == here != to:
                self.mesh.channel("F", here, to).send(x.contiguous(), to).wait()
            elif rank == to != here:
                shape = (tokens.shape[1], len(tokens), self._model.hidden)
                x = torch.empty(shape, dtype=self.dtype, device=self.device)
                self.mesh.channel("F", here, to).receive(x, here).wait()
        return x if rank == self.last_rank else None

    def run(
        self, schedule: Schedule, batches: Batches, loss_weight: float = 1.0
    ) -> tuple[Tensor, int]:
        """Do all of this rank's actions in order; return loss sum and targets as `train` does."""
        if schedule.rank_of not in self._connected:
            self._connect(schedule.rank_of)
        self.finish_sending()
        execution = Execution(self, schedule, batches, loss_weight)
        for action in execution:
            self.after(action)
        if self.mesh.tp.rank > 0:
            return torch.zeros_like(execution.loss), 0
        return execution.loss, execution.targets

    def after(self, action: Action) -> None:
        """Called by `run` after each action; the emulator replaces it to time the actions."""

    def finish_sending(self) -> None:
        """Wait for the sends that the last `run` left unfinished; called before the next `run`.

        By then they have arrived. At the end of a run, this wait for a slower neighbour would delay
        the reduction of this rank's gradients.
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
        pairs = sorted({(a, b) for a, b in pairwise(rank_of) if a != b})
        message = torch.zeros(1, dtype=self.dtype, device=self.device)
        rank = self.mesh.pp.rank
        for a, b in pairs:
            for kind, sender, receiver in (("F", a, b), ("B", b, a)):
                group = self.mesh.channel(kind, sender, receiver)
                if rank == sender:
                    group.send(message, receiver).wait()
                elif rank == receiver:
                    group.receive(message, sender).wait()
        self.ends.connect(self.mesh, self.device)


class Later:
    """A send or collective that is started only some actions after its input was computed.

    The flight recorder records the operation under the action that computed its input.
    """

    def __init__(self, begin: Callable[[], Handle], recorder: FlightRecorder):
        """begin: starts the operation; called once, and it keeps the input alive until then."""
        self._begin = begin
        self._recorder = recorder
        self._place = recorder.place
        self.handle: Handle | None = None  # None until the operation is started

    def start(self) -> None:
        """Start the operation."""
        now = self._recorder.place
        self._recorder.place = self._place
        self.handle = self._begin()
        del self._begin
        self._recorder.place = now

    def wait(self) -> None:
        """Wait for the operation, as `Handle.wait` does; `start` must have been called."""
        assert self.handle is not None  # in a schedule the start comes before every wait for it
        self.handle.wait()


class Execution:
    """One run of a rank's list of actions, with its messages and kept activations.

    Each step of an iteration over the execution does one action and yields it. loss: the sum of
    losses so far, float64; targets: the number of targets in that sum.
    """

    def __init__(
        self, pipeline: Pipeline, schedule: Schedule, batches: Batches, loss_weight: float
    ):
        """Raise ValueError if the layers defer weight gradients but the schedule has no W passes,
        or the other way round: gradients would be missing.
        """
        if torch.is_grad_enabled() and schedule.split != (pipeline.deferred is not None):
            raise ValueError(f"layers and schedule {schedule.name} disagree on a split backward")
        self.pipeline = pipeline
        self.mesh = pipeline.mesh
        self.schedule = schedule
        self.rank = pipeline.mesh.pp.rank
        self.actions = schedule.ranks[self.rank]
        self.batches = batches
        self.loss_weight = loss_weight
        self.loss = torch.zeros((), dtype=torch.float64, device=pipeline.device)
        self.targets = 0
        # Per (stage, micro-batch): the stage's input and the autograd node of its output, kept
        # until the backward pass. The output itself is freed when it has been sent.
        self.held: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = {}
        # Per (stage, micro-batch): the function that computes the weight gradients, for pass W.
        self.left: dict[tuple[int, int], Callable[[], None]] = {}
        # Per action: the neighbouring stage's action whose result is its input, and the rank that
        # does it. Actions whose input comes from `ends` have no entry.
        self.sources: dict[Action, tuple[Action, int]] = {}
        for action in self.actions:
            sender = schedule.input_of(action)
            if sender is not None:
                self.sources[action] = sender, schedule.rank_of[sender.stage]
        self.handed: dict[Action, Tensor] = {}  # results for another stage of this rank
        # Receives by the neighbour's action that computes the message, sends by this rank's action.
        self.arriving: dict[Action, tuple[Tensor, Handle]] = {}
        self.leaving: dict[Action, Later] = {}
        # Sends by index i: they are started after actions[i - 1], before actions[i].
        self.unsent: dict[int, list[Later]] = {}
        neighbours = {rank for _, rank in self.sources.values() if rank != self.rank}
        # The index of each neighbour's action in that neighbour's list.
        self.place = {a: i for rank in neighbours for i, a in enumerate(schedule.ranks[rank])}
        # Per neighbour, the number of its actions that are known to be finished.
        self.passed = dict.fromkeys(neighbours, 0)
        self.ends = pipeline.ends(self)
        self.passes = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}
        self.passes |= self.ends.passes

    def __iter__(self) -> Iterator[Action]:
        for position, action in enumerate(self.actions):
            self._post_receive(action)
            for upcoming in self.actions[position + 1 : position + 2]:
                if self.schedule.may_be_ahead(upcoming):
                    self._post_receive(upcoming)
            self.passes[action.kind](action)
            for message in self.unsent.pop(position + 1, ()):
                message.start()
            yield action
        self.pipeline.sending += self.leaving.values()
        self.pipeline.sending += self.ends.finish()

    def is_last(self, action: Action) -> bool:
        """Return whether an action belongs to the last stage of the pipeline."""
        return action.stage == self.schedule.stages - 1

    # -- passes of a stage ------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        """Do F: the forward pass of a micro-batch through one stage."""
        stage = action.stage
        micro_batch = action.micro_batch
        batch = self.ends.batch(action)
        self.mesh.recorder.at("F", micro_batch)
        if stage == 0:
            x = self.ends.first_input(action, batch)
        else:
            x = self._take_input(action).requires_grad_(torch.is_grad_enabled())
        y = self.pipeline.stages[stage](x, batch)
        if self.is_last(action):
            y = self.ends.last_output(action, y, batch)
        else:
            self._pass_on(y.detach(), action, stage + 1)
        if torch.is_grad_enabled():
            self.held[stage, micro_batch] = (x, get_gradient_edge(y))

    def _backward(self, action: Action) -> None:
        """Do B: the whole backward pass, or, if the schedule has W, only the input's gradient."""
        stage = action.stage
        micro_batch = action.micro_batch
        self.mesh.recorder.at("B", micro_batch)
        x, output = self.held.pop((stage, micro_batch))
        if self.is_last(action):
            gradient = self.ends.last_gradient(action)
        else:
            gradient = self._take_input(action)
        deferred = self.pipeline.deferred
        if deferred is None:
            torch.autograd.backward(output, gradient)
        else:
            self.left[stage, micro_batch] = deferred.backward(output, gradient)
        if stage == 0:
            self.ends.first_gradient(action, x)
        else:
            dx: Tensor = x.grad  # type: ignore[assignment]  # an input of this stage requires it
            self._pass_on(dx, action, stage - 1)

    def _weight_gradients(self, action: Action) -> None:
        """Do W: compute the weight gradients that pass B of the same micro-batch left."""
        self.mesh.recorder.at("W", action.micro_batch)
        self.left.pop((action.stage, action.micro_batch))()

    # -- between stages ---------------------------------------------------------------------

    def start_later(self, action: Action, begin: Callable[[], Handle]) -> Later:
        """Have `begin` send an action's result before the action at index Schedule.sent_before."""
        message = Later(begin, self.mesh.recorder)
        self.unsent.setdefault(self.schedule.sent_before(action), []).append(message)
        return message

    def _post_receive(self, action: Action) -> None:
        """Start to receive an action's input, unless that is started or this rank computes it."""
        self.ends.post_receive(action)
        needed, rank = self.sources.get(action, (None, self.rank))
        if needed is None or rank == self.rank or needed in self.arriving:
            return
        channel = self.mesh.channel(action.kind, rank, self.rank)
        buffer = self.new_activation()
        self.arriving[needed] = (buffer, channel.receive(buffer, rank))

    def new_activation(self) -> Tensor:
        """Return an uninitialised buffer for one activation, or its gradient, between stages."""
        pipeline = self.pipeline
        return torch.empty(pipeline.shape, dtype=pipeline.dtype, device=pipeline.device)

    def _take_input(self, action: Action) -> Tensor:
        """Wait for the neighbouring stage's result that is an action's input, and return it."""
        needed, rank = self.sources[action]
        if rank == self.rank:
            return self.handed.pop(needed)
        buffer, handle = self.arriving.pop(needed)
        handle.wait()
        self._release_received(rank, needed)
        return buffer

    def _pass_on(self, tensor: Tensor, action: Action, to_stage: int) -> None:
        """Send an action's result to the neighbouring stage `to_stage`, or keep it for that stage
        if this rank holds the stage too.
        """
        to = self.schedule.rank_of[to_stage]
        if to == self.rank:
            self.handed[action] = tensor
            return
        if not torch.is_grad_enabled() and not self.ends.meet_in_evaluation:
            self._wait_for_sends()  # no gradient comes back that would show that they arrived
        channel = self.mesh.channel(action.kind, self.rank, to)
        tensor = tensor.contiguous()
        self.leaving[action] = self.start_later(action, lambda: channel.send(tensor, to))

    def _release_received(self, neighbour: int, finished: Action) -> None:
        """Free the sent messages that a neighbour must have received to finish an action.

        Called when a result of that action arrives. Without this, every activation sent would be
        held until the step ends.
        """
        before = self.passed[neighbour]
        now = self.place[finished] + 1
        for action in self.schedule.ranks[neighbour][before:now]:
            used = self.schedule.input_of(action)
            if used in self.leaving:
                self.leaving.pop(used).wait()
        self.passed[neighbour] = max(before, now)

    def _wait_for_sends(self) -> None:
        """Wait for all sends that have been started, and free the sent tensors."""
        for action in [action for action, sent in self.leaving.items() if sent.handle]:
            self.leaving.pop(action).wait()
