"""Runs a schedule on a rank's stages: the only place that sends activations.

The executor does what the schedule's list for this rank says. A receive is started one action ahead
of its use and a send is not waited for, so messages travel while the rank computes; but neither is
started while the other side still waits for this rank (Schedule.may_be_ahead, sent_before). Groups
of their own carry activations and gradients (Mesh.channel); within each, neighbours have agreed on
the order (schedule.check), so messages need no labels. Stages of one rank send nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from attention import KeyValueCache
from config.schema import Config
from data import Batch
from distributed.collectives import Handle
from loss import LocalLoss
from model import Stage
from parallel import ParamFactory
from schedules.layout_orders import of_layout
from schedules.orders import forward_only
from schedules.partition import placement
from schedules.schedule import VOCABULARY, Action, Schedule
from watchdog.flight_recorder import FlightRecorder

# A micro-batch by its index, on the stage's device.
Batches = Callable[[int], Batch]


class Pipeline:
    """The stages that one rank holds, by their number, ready to run a schedule.

    Activations are (s, b, h), or (s/tp, b, h) with sequence parallelism, of this rank's tokens; s
    and the number of micro-batches may change from step to step. masked: every stage reads the
    batch, which says what its attention sees.
    """

    def __init__(self, stages: Mapping[int, Stage], factory: ParamFactory, config: Config):
        layout, model = config.layout, config.model
        self.stages, self.mesh, self.deferred = stages, factory.mesh, factory.deferred
        self.dtype, self.device = factory.dtype, factory.device
        self.masked = config.data.masks_attention or config.data.reset_positions
        self._model, self._layout, self._schedules = model, layout, dict[int, Schedule]()
        self.set_length(model.seq_length)
        self.sending: list[Handle] = []  # the last messages of the last pass
        self.last_rank = placement(layout)[-1]  # of the pipeline, the last stage's
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
            about = self._model, self._layout, micro_batches, self.device.type
            self._schedules = {micro_batches: of_layout(*about)}
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
        rank_of = placement(self._layout)
        schedule = forward_only(rank_of, micro_batches, bool(self._layout.vocab_pp))
        return self.run(schedule, batches)

    @torch.no_grad()
    def decode(self, tokens: Tensor, cache: KeyValueCache) -> Tensor | None:
        """Logits of what follows the tokens (b, s), which follow the cache: (b, V/tp), this rank's.

        None but on the ranks of the last stage. Every rank has the tokens; no sequence parallelism.
        """
        self.finish_sending()
        cache.begin(tokens.shape[1])
        x, rank, rank_of = tokens, self.mesh.pp.rank, placement(self._layout)
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
            if schedule.vocabulary:
                for group in self.mesh.passes.values():  # a first one connects all ranks
                    group.broadcast(torch.zeros(1, device=self.device), 0).wait()
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


class Later:
    """A message or collective that is started later than its input is there.

    It is recorded as an operation of the action that made its input.
    """

    def __init__(self, begin: Callable[[], Handle], recorder: FlightRecorder):
        """begin: called once; it holds the input until then."""
        self._begin, self._recorder, self._place = begin, recorder, recorder.place
        self.handle: Handle | None = None  # when it has been started

    def start(self) -> None:
        """Start it."""
        now, self._recorder.place = self._recorder.place, self._place
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
        self.leaving: dict[Action, Later] = {}  # by this rank's action
        self.unsent: dict[int, list[Later]] = {}  # by the place before which they are started
        neighbours = {rank for _, rank in self.sources.values() if rank != self.rank}
        self.place = {a: i for rank in neighbours for i, a in enumerate(schedule.ranks[rank])}
        self.passed = dict.fromkeys(neighbours, 0)  # actions known to be finished
        self.loss = torch.zeros((), dtype=torch.float64, device=pipeline.device)
        self.targets = 0
        self.vocabulary = VocabularyPasses(self) if schedule.vocabulary else None

    def __iter__(self) -> Iterator[Action]:
        run = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}
        if self.vocabulary:
            run |= dict.fromkeys(VOCABULARY, self.vocabulary.run)
        for position, action in enumerate(self.actions):
            self._post_receive(action)
            for upcoming in self.actions[position + 1 : position + 2]:
                if self.schedule.may_be_ahead(upcoming):
                    self._post_receive(upcoming)
            run[action.kind](action)
            for message in self.unsent.pop(position + 1, ()):
                message.start()
            yield action
        self.pipeline.sending += self.leaving.values()
        if self.vocabulary:
            self.pipeline.sending += self.vocabulary.finish()

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
        reads = action.stage == 0 or last or self.pipeline.masked
        if reads and not self.vocabulary:
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
        outermost = self._is_last(action) and not self.vocabulary
        gradient = None if outermost else self._take_input(action)
        deferred = self.pipeline.deferred
        if deferred is None:
            torch.autograd.backward(output, gradient)
        else:
            self.left[action.stage, action.micro_batch] = deferred.backward(output, gradient)
        if action.stage > 0 or self.vocabulary:
            dx: Tensor = x.grad  # type: ignore[assignment]  # an input of this stage requires it
            self._pass_on(dx, action, action.stage - 1)

    def _weight_gradients(self, action: Action) -> None:
        self.mesh.recorder.at("W", action.micro_batch)
        self.left.pop((action.stage, action.micro_batch))()

    def _is_last(self, action: Action) -> bool:
        return action.stage == self.schedule.stages - 1

    # -- between stages ---------------------------------------------------------------------

    def start_later(self, action: Action, begin: Callable[[], Handle]) -> Later:
        """Have `begin` send the result of an action when the schedule says."""
        message = Later(begin, self.mesh.recorder)
        self.unsent.setdefault(self.schedule.sent_before(action), []).append(message)
        return message

    def _post_receive(self, action: Action) -> None:
        if self.vocabulary:
            self.vocabulary.post_receive(action)
        needed, rank = self.sources.get(action, (None, self.rank))
        if needed is None or rank == self.rank or needed in self.arriving:
            return
        channel, pipeline = self.mesh.channel(action.kind, rank, self.rank), self.pipeline
        buffer = torch.empty(pipeline.shape, dtype=pipeline.dtype, device=pipeline.device)
        self.arriving[needed] = (buffer, channel.receive(buffer, rank))

    def _take_input(self, action: Action) -> Tensor:
        """The neighbouring stage's result, or that of the vocabulary's passes, when it is there."""
        if action not in self.sources and self.vocabulary:
            return self.vocabulary.take("E" if action.kind == "F" else "T", action.micro_batch)
        needed, rank = self.sources[action]
        if rank == self.rank:
            return self.handed.pop(needed)
        buffer, handle = self.arriving.pop(needed)
        handle.wait()
        self._release_received(rank, needed)
        return buffer

    def _pass_on(self, tensor: Tensor, action: Action, to_stage: int) -> None:
        """Give an action's result to the neighbouring stage, or the ranks, that take it."""
        if self.vocabulary and not 0 <= to_stage < self.schedule.stages:
            self.vocabulary.send(action, tensor)
            return
        to = self.schedule.rank_of[to_stage]
        if to == self.rank:
            self.handed[action] = tensor
            return
        if not torch.is_grad_enabled() and not self.vocabulary:
            self._wait_for_sends()  # nothing ever comes back that would show an arrival
        channel = self.mesh.channel(action.kind, self.rank, to)
        tensor = tensor.contiguous()
        self.leaving[action] = self.start_later(action, lambda: channel.send(tensor, to))

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
        for action in [action for action, sent in self.leaving.items() if sent.handle]:
            self.leaving.pop(action).wait()


# ---- The vocabulary's passes, where all ranks share it -------------------------------------------


class VocabularyPasses:
    """E, S, T and G of schedules/vocabulary.py on one rank, in one pass through its actions.

    The collectives of each kind of pass have a group of their own, and are waited for in the next
    pass that needs their result.
    """

    def __init__(self, execution: "Execution"):
        pipeline, schedule = execution.pipeline, execution.schedule
        self.execution, self.mesh, self.stage = execution, pipeline.mesh, schedule.stages - 1
        part = pipeline.stages[pipeline.mesh.pp.rank].vocabulary
        assert part is not None  # stages and schedule come from one layout
        self.part = part
        self.groups, self.rank = pipeline.mesh.passes, pipeline.mesh.pp.rank
        self.batch: dict[int, Batch] = {}
        self.embedded: dict[int, GradientEdge] = {}
        self.losses: dict[int, tuple] = {}
        # Under way, by kind of pass and micro-batch: a tensor that is received, sent or summed.
        self.moving: dict[tuple[str, int], tuple[Tensor, Handle]] = {}
        self.taken = schedule.gradients_taken

    def run(self, action: Action) -> None:
        """Do one pass."""
        kind, _, m = action
        if kind == "E":
            self.mesh.recorder.at("data", m)
            self.batch[m] = self.execution.batches(m)
        self.mesh.recorder.at(kind, m)
        {"E": self._embed, "S": self._logits, "T": self._loss, "G": self._add}[kind](m)

    def post_receive(self, action: Action) -> None:
        """Begin to receive what a pass S or G takes from one rank, unless this rank sends it."""
        kind, _, m = action
        source = {"S": self.stage, "G": 0}.get(kind, self.rank)
        if source != self.rank and (kind, m) not in self.moving:
            pipeline = self.execution.pipeline
            buffer = torch.empty(pipeline.shape, dtype=pipeline.dtype, device=pipeline.device)
            self._start(kind, m, buffer, self.groups[kind].broadcast(buffer, source))

    def send(self, action: Action, tensor: Tensor) -> None:
        """Give all ranks what their S takes, the last stage's output, or their G, a gradient."""
        kind, tensor = {"F": "S", "B": "G"}[action.kind], tensor.detach().contiguous()
        broadcast = partial(self.groups[kind].broadcast, tensor, self.rank)
        later = self.execution.start_later(action, broadcast)
        self._start(kind, action.micro_batch, tensor, later)

    def take(self, kind: str, m: int) -> Tensor:
        """The sum of E, on the first stage's rank, or of T, on the last one's."""
        tensor, handle = self.moving.pop((kind, m))
        handle.wait()
        return tensor

    def _start(self, kind: str, m: int, tensor: Tensor, handle: Handle) -> None:
        self.moving[kind, m] = tensor, handle

    def _sum(self, kind: str, m: int, tensor: Tensor, to: int) -> None:
        tensor = tensor.contiguous()
        reduce = partial(self.groups[kind].reduce, tensor, to)
        later = self.execution.start_later(Action(kind, self.rank, m), reduce)
        self._start(kind, m, tensor, later)

    def _release(self, kind: str, m: int) -> None:
        """Free what has been sent and, by what has arrived since, received."""
        if (kind, m) in self.moving:
            self.take(kind, m)

    def _embed(self, m: int) -> None:
        rows = self.part(self.batch[m].tokens)
        if torch.is_grad_enabled():
            self.embedded[m] = get_gradient_edge(rows)
        self._sum("E", m, rows.detach(), 0)

    def _logits(self, m: int) -> None:
        sends = self.rank == self.stage
        x = self.moving["S", m][0] if sends else self.take("S", m)
        x = x.detach().requires_grad_(torch.is_grad_enabled())
        logits = self.part.logits(x)
        edge = get_gradient_edge(logits) if torch.is_grad_enabled() else None
        labels, part = self.batch[m].labels.t(), self.part
        local = LocalLoss.of(logits.detach(), labels, part.spec, part.factory.compile)
        every = local.sums.new_empty(self.mesh.vocabulary.size, *local.sums.shape)
        gather = partial(self.mesh.vocabulary.all_gather, every, local.sums)
        handle = self.execution.start_later(Action("S", self.rank, m), gather)
        self.losses[m] = x, edge, local, every, handle

    def _loss(self, m: int) -> None:
        x, edge, local, every, handle = self.losses.pop(m)
        handle.wait()  # now every rank has done S, and so has what it takes, and E is summed
        self._release("E", m)
        self._release("S", m)
        sent = self.execution.leaving.pop(Action("F", self.rank, m), None)
        if sent is not None:
            sent.wait()
        for done in self.taken[m]:
            self._release("G", done)
        losses, gradient = local.finish(every, self.execution.loss_weight)
        if self.rank == self.stage:
            self.execution.loss += losses.sum()
            self.execution.targets += self.batch[m].count
        if edge is None:
            del self.batch[m]
            return
        add_weight_gradients = self.part.deferred.backward(edge, gradient)
        self._sum("T", m, x.grad, self.stage)
        add_weight_gradients()

    def _add(self, m: int) -> None:
        gradient = self.moving["G", m][0] if self.rank == 0 else self.take("G", m)
        self._release("T", m)
        torch.autograd.backward(self.embedded.pop(m), gradient)
        del self.batch[m]

    def finish(self) -> list[Handle]:
        """What is still being sent."""
        return [handle for _, handle in self.moving.values()]
