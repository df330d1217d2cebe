"""Runs a schedule on a rank's stages: the only place that sends activations.

The executor does what the schedule's list for this rank says. A receive is posted one action ahead
of its use and a send is not waited for, so messages travel while the rank computes. Activations and
their gradients go through groups of their own (Mesh.channel); within each, neighbours have agreed
on the order (schedule.check), so messages need no labels. Between two stages of one rank nothing is
sent.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from config.schema import Config
from data import Batch
from distributed.collectives import Handle
from model import Stage
from parallel import ParamFactory
from schedules.automatic import stage_costs
from schedules.compiler import build
from schedules.partition import placement
from schedules.schedule import Action, Schedule, forward_only

# A micro-batch by its index, on the stage's device.
Batches = Callable[[int], Batch]


class Pipeline:
    """The stages that one rank holds, by their number, ready to run a schedule.

    Micro-batches have one shape for the whole run: (s, b, h), or (s/tp, b, h) with sequence
    parallelism. Their number may change from step to step. masked: every stage reads the batch,
    which says what its attention sees.
    """

    def __init__(self, stages: Mapping[int, Stage], factory: ParamFactory, config: Config):
        layout, model = config.layout, config.model
        self.stages, self.mesh, self.deferred = stages, factory.mesh, factory.deferred
        self.dtype, self.device = factory.dtype, factory.device
        self.masked = config.data.masks_attention or config.data.reset_positions
        split = layout.tp if layout.sequence_parallel else 1
        self.shape = (model.seq_length // split, layout.micro_batch_size, model.hidden)
        self._layout, self._schedules = layout, dict[int, Schedule]()
        self._costs = stage_costs(model, layout, self.device.type)
        self.sending: list[Handle] = []  # the last messages of the last pass
        self._connected: set[tuple[int, ...]] = set()  # `rank_of` of the schedules that ran

    def schedule(self, micro_batches: int) -> Schedule:
        """The configured schedule for that many micro-batches; the last one is kept."""
        if micro_batches not in self._schedules:
            name, virtual = self._layout.schedule, self._layout.stages_per_rank
            built = build(name, self.mesh.pp.size, micro_batches, virtual, self._costs)
            self._schedules = {micro_batches: built}
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
        return self.run(forward_only(placement(self._layout), micro_batches), batches)

    def run(
        self, schedule: Schedule, batches: Batches, loss_weight: float = 1.0
    ) -> tuple[Tensor, int]:
        """Do all of this rank's actions in order; returns what `train` does."""
        if schedule.rank_of not in self._connected:
            self._connect(schedule.rank_of)
        self.finish_sending()
        execution = Execution(self, schedule, batches, loss_weight)
        for _ in execution:
            pass
        if self.mesh.tp.rank > 0:
            return torch.zeros_like(execution.loss), 0
        return execution.loss, execution.targets

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
        message, rank = torch.zeros(1, dtype=self.dtype, device=self.device), self.mesh.pp.rank
        for a, b in pairs:
            for kind, sender, receiver in (("F", a, b), ("B", b, a)):
                group = self.mesh.channel(kind, sender, receiver)
                if rank == sender:
                    group.send(message, receiver).wait()
                elif rank == receiver:
                    group.receive(message, sender).wait()


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
        self.pipeline, self.mesh, self.schedule = pipeline, pipeline.mesh, schedule
        self.rank, self.actions = pipeline.mesh.pp.rank, schedule.ranks[pipeline.mesh.pp.rank]
        # The action whose result one takes, and its rank; none at the pipeline's ends.
        needed = {action: schedule.input_of(action) for action in self.actions}
        self.sources = {a: (of, schedule.rank_of[of.stage]) for a, of in needed.items() if of}
        self.batches, self.loss_weight = batches, loss_weight
        # Of forwards whose backward is to come: the input, and the node that made the output. The
        # output itself is freed when it has been sent.
        self.held: dict[tuple[int, int], tuple[Tensor, GradientEdge]] = {}
        self.left: dict[tuple[int, int], Callable[[], None]] = {}  # weight gradients to compute
        self.handed: dict[Action, Tensor] = {}  # results for another stage of this rank
        self.arriving: dict[Action, tuple[Tensor, Handle]] = {}  # by the neighbour's action
        self.leaving: dict[Action, Handle] = {}  # by this rank's action
        neighbours = {rank for _, rank in self.sources.values() if rank != self.rank}
        self.place = {a: i for rank in neighbours for i, a in enumerate(schedule.ranks[rank])}
        self.passed = dict.fromkeys(neighbours, 0)  # actions known to be finished
        self.loss = torch.zeros((), dtype=torch.float64, device=pipeline.device)
        self.targets = 0

    def __iter__(self) -> Iterator[Action]:
        run = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}
        for position, action in enumerate(self.actions):
            for upcoming in self.actions[position : position + 2]:
                self._post_receive(upcoming)
            run[action.kind](action)
            yield action
        self.pipeline.sending += self.leaving.values()

    def _forward(self, action: Action) -> None:
        stage, last = self.pipeline.stages[action.stage], self._is_last(action)
        x, batch = self._inputs(action, last)
        y = stage(x, batch)
        if last and batch:
            self.loss += y.detach()
            self.targets += batch.count
            y = y * self.loss_weight
        else:
            self._pass_on(y.detach(), action, action.stage + 1)
        if torch.is_grad_enabled():
            self.held[action.stage, action.micro_batch] = (x, get_gradient_edge(y))

    def _inputs(self, action: Action, last: bool) -> tuple[Tensor, Batch | None]:
        """What the stage's forward takes: without masks only the first and the last stage read the
        batch.
        """
        batch = None
        if action.stage == 0 or last or self.pipeline.masked:
            self.mesh.recorder.at("data", action.micro_batch)
            batch = self.batches(action.micro_batch)
        self.mesh.recorder.at("F", action.micro_batch)
        if batch and action.stage == 0:
            return batch.tokens, batch
        return self._take_input(action).requires_grad_(torch.is_grad_enabled()), batch

    def _backward(self, action: Action) -> None:
        """The whole backward pass, or where the schedule splits it that for inputs."""
        self.mesh.recorder.at("B", action.micro_batch)
        x, output = self.held.pop((action.stage, action.micro_batch))
        gradient = None if self._is_last(action) else self._take_input(action)
        deferred = self.pipeline.deferred
        if deferred is None:
            torch.autograd.backward(output, gradient)
        else:
            self.left[action.stage, action.micro_batch] = deferred.backward(output, gradient)
        if action.stage > 0:
            dx: Tensor = x.grad  # type: ignore[assignment]  # an input of this stage requires it
            self._pass_on(dx, action, action.stage - 1)

    def _weight_gradients(self, action: Action) -> None:
        self.mesh.recorder.at("W", action.micro_batch)
        self.left.pop((action.stage, action.micro_batch))()

    def _is_last(self, action: Action) -> bool:
        return action.stage == self.schedule.stages - 1

    # -- between stages ---------------------------------------------------------------------

    def _post_receive(self, action: Action) -> None:
        needed, rank = self.sources.get(action, (None, self.rank))
        if needed is None or rank == self.rank or needed in self.arriving:
            return
        channel, pipeline = self.mesh.channel(action.kind, rank, self.rank), self.pipeline
        buffer = torch.empty(pipeline.shape, dtype=pipeline.dtype, device=pipeline.device)
        self.arriving[needed] = (buffer, channel.receive(buffer, rank))

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
        if not torch.is_grad_enabled():
            self._wait_for_sends()  # nothing ever comes back that would show an arrival
        channel = self.mesh.channel(action.kind, self.rank, to)
        self.leaving[action] = channel.send(tensor.contiguous(), to)

    def _release_received(self, neighbour: int, finished: Action) -> None:
        """Free the messages that a neighbour received before it finished an action.

        Without this, every activation sent would be held until the step ends.
        """
        before, now = self.passed[neighbour], self.place[finished] + 1
        for action in self.schedule.ranks[neighbour][before:now]:
            used = self.schedule.input_of(action)
            if used in self.leaving:
                self.leaving.pop(used).wait()
        self.passed[neighbour] = max(before, now)

    def _wait_for_sends(self) -> None:
        for handle in self.leaving.values():
            handle.wait()
        self.leaving.clear()
