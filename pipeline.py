"""Runs a schedule on a rank's stages: the only place that sends activations.

The executor does what the schedule's list for this rank says; passes of a kind are looked up in a
table. A receive is started one action ahead of its use and a send is not waited for, so messages
travel while the rank computes; but neither is started while the other side still waits for this
rank (Schedule.may_be_ahead, sent_before). Groups of their own carry activations and gradients
(Mesh.channel); within each, neighbours have agreed on the order (schedule.check), so messages need
no labels. Stages of one rank send nothing.

What the first stage takes and what becomes of the last stage's output is the business of `Ends`:
tokens and a loss, unless other passes make them.
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
from schedules.layout_orders import evaluation_of_layout, of_layout
from schedules.partition import placement
from schedules.schedule import Action, Schedule
from watchdog.flight_recorder import FlightRecorder

# A micro-batch by its index, on the stage's device.
Batches = Callable[[int], Batch]


class Ends:
    """What the first stage takes, and what becomes of the last stage's output, in one execution.

    Here the first stage takes the tokens of a batch and the last one gives a loss. A subclass may
    have other passes make and take these: then it has them in `passes`, by kind.
    """

    # Whether all ranks wait for one another in an evaluation too. Then what they have received is
    # known, although no gradients come back that would show it.
    meet_in_evaluation = False

    def __init__(self, execution: "Execution"):
        self.execution = execution
        self.passes: dict[str, Callable[[Action], None]] = {}

    @staticmethod
    def connect(mesh: Mesh, device: torch.device) -> None:
        """Have all ranks meet in the groups that the passes use, before they are first used."""

    def batch(self, action: Action) -> Batch | None:
        """The batch that a forward reads: without masks that of the first and last stage."""
        execution = self.execution
        first = action.stage == 0
        if not (first or execution.is_last(action) or execution.pipeline.masked):
            return None
        execution.mesh.recorder.at("data", action.micro_batch)
        return execution.batches(action.micro_batch)

    def first_input(self, action: Action, batch: Batch | None) -> Tensor:
        """What the first stage's forward takes."""
        assert batch is not None  # the first stage reads it
        return batch.tokens

    def last_output(self, action: Action, y: Tensor, batch: Batch | None) -> Tensor:
        """Take the last stage's output; returns what its backward begins with."""
        assert batch is not None  # the last stage reads it
        self.execution.loss += y.detach()
        self.execution.targets += batch.count
        return y * self.execution.loss_weight

    def last_gradient(self, action: Action) -> Tensor | None:
        """The gradient of what `last_output` returned; None: it is a loss."""
        return None

    def first_gradient(self, action: Action, x: Tensor) -> None:
        """Take the first stage's input, which has a gradient where it is no tokens."""

    def post_receive(self, action: Action) -> None:
        """Begin to receive what an action takes, if it is one of `passes`."""

    def finish(self) -> list[Handle]:
        """What is still being sent when all actions are done."""
        return []


class Pipeline:
    """The stages that one rank holds, by their number, ready to run a schedule.

    Activations are (s, b, h), or (s/tp, b, h) with sequence parallelism, of this rank's tokens; s
    and the number of micro-batches may change from step to step. masked: every stage reads the
    batch, which says what its attention sees.
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
        self.set_length(config.model.seq_length)
        self.sending: list[Handle] = []  # the last messages of the last pass
        self.last_rank = placement(config.layout)[-1]  # of the pipeline, the last stage's
        self._connected: set[tuple[int, ...]] = set()  # `rank_of` of the schedules that ran

    def set_length(self, length: int) -> None:
        """Tokens of a sample from now on; cp and sequence parallelism must divide them."""
        split = self._layout.cp * (self._layout.tp if self._layout.sequence_parallel else 1)
        self.shape = (length // split, self._layout.micro_batch_size, self._model.hidden)
        for stage in self.stages.values():
            stage.set_length(length)

    def schedule(self, micro_batches: int) -> Schedule:
        """The configured schedule for that many micro-batches; the last one is kept."""
        if micro_batches not in self._schedules:
            found = of_layout(self._model, self._layout, micro_batches, self.device.type)
            self._schedules = {micro_batches: found}
        return self._schedules[micro_batches]

    def train(self, batches: Batches, micro_batches: int, loss_weight: float) -> tuple[Tensor, int]:
        """Forward and backward of one step; returns the loss sum of this replica and the number of
        its targets on the one rank that counts them (last stage, first tensor rank), 0 on others.

        Gradients are those of the sum times `loss_weight`, which `Optimizer.begin_step` gives.
        """
        return self.run(self.schedule(micro_batches), batches, loss_weight)

    @torch.no_grad()
    def evaluate(self, batches: Batches, micro_batches: int) -> tuple[Tensor, int]:
        """The loss sum and targets of that many micro-batches of this replica, forward only."""
        return self.run(evaluation_of_layout(self._layout, micro_batches), batches)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: KeyValueCache) -> Tensor | None:
        """Logits of what follows the tokens (b, s), which follow the cache: (b, V/tp), this rank's.

        None but on the ranks of the last stage. Every rank has the tokens; no sequence parallelism.
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
        """Do all of this rank's actions in order; returns what `train` does."""
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
        """Called when an action of `run` is done; a measurement may replace it."""

    def finish_sending(self) -> None:
        """Wait for the last messages of the last pass. By the next one they have arrived; at its
        end a rank would wait for its neighbour in place of reducing its gradients.
        """
        while self.sending:
            self.sending.pop().wait()

    def _connect(self, rank_of: tuple[int, ...]) -> None:
        """Send one number between every two ranks that will send activations or gradients.

        NCCL connects two ranks at their first message, and blocks both hosts until then. Inside a
        schedule two neighbours could wait for each other in different groups for ever. Here all
        ranks take the pairs in one order, so of those that are left the first can be connected.
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
    """A message or collective that is started later than its input is there.

    It is recorded as an operation of the action that made its input.
    """

    def __init__(self, begin: Callable[[], Handle], recorder: FlightRecorder):
        """begin: called once; it holds the input until then."""
        self._begin = begin
        self._recorder = recorder
        self._place = recorder.place
        self.handle: Handle | None = None  # when it has been started

    def start(self) -> None:
        """Start it."""
        now = self._recorder.place
        self._recorder.place = self._place
        self.handle = self._begin()
        del self._begin
        self._recorder.place = now

    def wait(self) -> None:
        """As of any handle; it must have been started."""
        assert self.handle is not None  # the schedule has what waits after what starts
        self.handle.wait()


class Execution:
    """One pass through a rank's actions, with the messages and activations that it holds.

    Iterating over it does one action at a time and yields it. loss, targets: the loss sum so far,
    and of how many targets.
    """

    def __init__(
        self, pipeline: Pipeline, schedule: Schedule, batches: Batches, loss_weight: float
    ):
        """Raises ValueError if the layers defer weight gradients and the schedule has no W for
        them, or the other way round: gradients would be missing.
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
        self.left: dict[tuple[int, int], Callable[[], None]] = {}  # weight gradients to compute
        # Per action, the neighbouring stage's action whose result it takes, and its rank; none at
        # the pipeline's ends.
        self.sources: dict[Action, tuple[Action, int]] = {}
        for action in self.actions:
            sender = schedule.input_of(action)
            if sender is not None:
                self.sources[action] = sender, schedule.rank_of[sender.stage]
        self.handed: dict[Action, Tensor] = {}  # results for another stage of this rank
        self.arriving: dict[Action, tuple[Tensor, Handle]] = {}  # by the neighbour's action
        self.leaving: dict[Action, Later] = {}  # by this rank's action
        self.unsent: dict[int, list[Later]] = {}  # by the place before which they are started
        neighbours = {rank for _, rank in self.sources.values() if rank != self.rank}
        self.place = {a: i for rank in neighbours for i, a in enumerate(schedule.ranks[rank])}
        self.passed = dict.fromkeys(neighbours, 0)  # actions known to be finished
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
        """Whether an action is one of the last stage."""
        return action.stage == self.schedule.stages - 1

    # -- passes of a stage ------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
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
        """The whole backward pass, or where the schedule splits it that for inputs."""
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
        self.mesh.recorder.at("W", action.micro_batch)
        self.left.pop((action.stage, action.micro_batch))()

    # -- between stages ---------------------------------------------------------------------

    def start_later(self, action: Action, begin: Callable[[], Handle]) -> Later:
        """Have `begin` send the result of an action when the schedule says."""
        message = Later(begin, self.mesh.recorder)
        self.unsent.setdefault(self.schedule.sent_before(action), []).append(message)
        return message

    def _post_receive(self, action: Action) -> None:
        self.ends.post_receive(action)
        needed, rank = self.sources.get(action, (None, self.rank))
        if needed is None or rank == self.rank or needed in self.arriving:
            return
        channel = self.mesh.channel(action.kind, rank, self.rank)
        buffer = self.new_activation()
        self.arriving[needed] = (buffer, channel.receive(buffer, rank))

    def new_activation(self) -> Tensor:
        """Room for one activation between two stages."""
        pipeline = self.pipeline
        return torch.empty(pipeline.shape, dtype=pipeline.dtype, device=pipeline.device)

    def _take_input(self, action: Action) -> Tensor:
        """The neighbouring stage's result, when it is there."""
        needed, rank = self.sources[action]
        if rank == self.rank:
            return self.handed.pop(needed)
        buffer, handle = self.arriving.pop(needed)
        handle.wait()
        self._release_received(rank, needed)
        return buffer

    def _pass_on(self, tensor: Tensor, action: Action, to_stage: int) -> None:
        """Give an action's result to the neighbouring stage that takes it."""
        to = self.schedule.rank_of[to_stage]
        if to == self.rank:
            self.handed[action] = tensor
            return
        if not torch.is_grad_enabled() and not self.ends.meet_in_evaluation:
            self._wait_for_sends()  # nothing ever comes back that would show an arrival
        channel = self.mesh.channel(action.kind, self.rank, to)
        tensor = tensor.contiguous()
        self.leaving[action] = self.start_later(action, lambda: channel.send(tensor, to))

    def _release_received(self, neighbour: int, finished: Action) -> None:
        """Free the messages that a neighbour received before it finished an action.

        Without this, every activation sent would be held until the step ends.
        """
        before = self.passed[neighbour]
        now = self.place[finished] + 1
        for action in self.schedule.ranks[neighbour][before:now]:
            used = self.schedule.input_of(action)
            if used in self.leaving:
                self.leaving.pop(used).wait()
        self.passed[neighbour] = max(before, now)

    def _wait_for_sends(self) -> None:
        for action in [action for action, sent in self.leaving.items() if sent.handle]:
            self.leaving.pop(action).wait()
