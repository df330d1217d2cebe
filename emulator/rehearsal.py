"""Runs the trainer of the ranks of a world on fake devices: build, two steps, save and the checks.

    run = rehearse(Case(config, world=384, nodes=48, gpu="A100"))
    run.world                       # what matching.py judges
    run.records                     # memory, kernels and stops of the ranks that were run

The trainer is the real one. What is replaced: elements (there are none), the other ranks, the disk,
the store, and the tokens. Numbers that the host reads are ones.

The second step has as many micro-batches as the run's, without gpipe no more than stages + 2: then
every stage has reached its steady state; more would repeat it and hold no more memory. The first
step has two of them at most: it makes the optimizer's state.

Which ranks of a world a rehearsal runs, and as which of them every other rank is taken to do.

    chosen(config)              # the ranks that are run
    taken_as(config, ran)       # for every rank of the world, the one of `ran` that stands for it

What a rank does depends on its stage, on its place among those that gather keys, and on whether it
is first, last or between on an axis of the mesh: the first rank reports and holds what is not
split, the last one holds padding.
"""

import contextlib
import dataclasses
import math
import multiprocessing
import operator
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

import data
import trainer
from checkpointing.save import Checkpointer
from checkpointing.state import Progress, count_elements, saved_types, shards_to_write
from checkpointing.writer import Writer
from config.schema import Config, coordinates
from decoding import Choice, Decoder
from distributed import start_checks
from distributed.placement import allowed_cores
from emulator.fake_devices import fake_devices, replaced
from emulator.matching import World
from emulator.meter import Meter, Peak
from emulator.recording import COPY, READ, Event, RecordingContext, recording_context
from telemetry import replica_check, step_stats

FIRST, BETWEEN, LAST = range(3)
AXES = ("pp", "dp", "cp", "tp")
# Nine ranks by their kind of place on each of AXES. On any two axes each pair of kinds is there
# once: an orthogonal array of strength two, which needs 9 of the 81 combinations.
PAIRS = [
    (stage, replica, (stage + 2 * replica) % 3, (stage + replica) % 3)
    for stage in (FIRST, BETWEEN, LAST)
    for replica in (FIRST, BETWEEN, LAST)
]
# The last ranks of the first and of the last stage.
ENDS = [(stage, LAST, LAST, LAST) for stage in (FIRST, LAST)]


def chosen(config: Config) -> list[int]:
    """The ranks to run: the first one of every stage and place among those that gather keys, and
    those of PAIRS and ENDS.
    """
    sizes = [config.layout.axes[axis] for axis in AXES]
    wanted = set()
    for kinds in (*PAIRS, *ENDS):
        wanted.add(tuple(_position(kind, size) for kind, size in zip(kinds, sizes)))
    places = _places(config)
    ranks = {rank for rank, place in enumerate(places) if place in wanted}
    if config.model.experts > 1:  # two ranks of one group, whose exchanges are compared
        stage_size = len(places) // config.layout.pp
        ranks |= set(range((config.layout.ep or 1) - 1, len(places), stage_size))
    return sorted(ranks | {group[0] for group in _alike(config, places)})


def taken_as(config: Config, ran: Sequence[int]) -> list[int]:
    """For every rank of the world the one of `ran`, which holds all of `chosen`, that does the
    same: of its stage and its place among those that gather keys, with the most axes on which both
    are first, between or last, and of these the lowest.
    """
    places = _places(config)
    kinds = [_kinds(config, place) for place in places]
    own = set(ran)
    found = list(range(len(places)))
    for group in _alike(config, places):
        candidates = [rank for rank in group if rank in own]
        nearest: dict[tuple[int, ...], int] = {}  # by what a rank is on each axis
        for rank in group:
            kind = kinds[rank]
            if kind not in nearest:
                common = [sum(map(operator.eq, kind, kinds[other])) for other in candidates]
                nearest[kind] = candidates[common.index(max(common))]
            if rank not in own:
                found[rank] = nearest[kind]
    return found


def _places(config: Config) -> list[tuple[int, ...]]:
    """Every rank's positions on AXES."""
    axes = config.layout.axes
    found = []
    for rank in range(math.prod(axes.values())):
        at = coordinates(rank, axes)
        found.append(tuple(at[axis] for axis in AXES))
    return found


def _alike(config: Config, places: list[tuple[int, ...]]) -> list[list[int]]:
    """Ranks of one stage, at one place among those that gather keys; each group ascends."""
    heads = config.layout.over_heads(config.model)
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, (stage, _, context, _) in enumerate(places):
        groups.setdefault((stage, context // heads), []).append(rank)
    return list(groups.values())


def _position(kind: int, size: int) -> int:
    """A position of that kind on an axis; on a short axis that has none, another one."""
    return (0, size // 2, size - 1)[kind]


def _kinds(config: Config, place: tuple[int, ...]) -> tuple[int, ...]:
    """Whether a rank is first, between or last on each of AXES."""
    found = []
    for axis, position in zip(AXES, place):
        ends = {config.layout.axes[axis] - 1: LAST, 0: FIRST}
        found.append(ends.get(position, BETWEEN))
    return tuple(found)


STEPS = 2
STEADY = ("forward", "backward", "optimizer")  # phases of a step


@dataclass
class RankRecord:
    """A record of one rank. peaks: the most bytes in each phase; for the phases of a step, in the
    second step. stops: how often the host waited in that step, by kind, reason and line. saved:
    bytes of its part of a checkpoint.
    """

    rank: int
    stage: int
    events: list[Event] = field(default_factory=list)
    rows: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    peaks: dict[str, Peak] = field(default_factory=dict)
    stops: dict[tuple[str, str, str], int] = field(default_factory=dict)
    saved: int = 0
    seconds: float = 0.0

    @property
    def step_peak(self) -> int:
        """The most bytes in the second step."""
        return max(self.peaks[phase].bytes for phase in STEADY if phase in self.peaks)

    @property
    def peak(self) -> int:
        """The most bytes of any phase."""
        return max(peak.bytes for peak in self.peaks.values())


@dataclass(frozen=True)
class Rehearsal:
    """A world that was rehearsed. micro_batches: of the second step, of_run: of the run's own;
    seconds: of all ranks that were run, one after the other.
    """

    config: Config
    world: World
    records: list[RankRecord]
    micro_batches: int
    of_run: int
    seconds: float


class Case(NamedTuple):
    """A run to rehearse: a checked configuration, in which the layout's automatic options are
    decided; its ranks and nodes, and the driver's GPU name. routing: of tokens to experts, as in
    fake_devices.ROUTINGS.
    """

    config: Config
    world: int
    nodes: int
    gpu: str
    all_ranks: bool = False
    routing: str = "even"


def rehearse(case: Case, show: Callable[[int], None] = lambda done: None) -> Rehearsal:
    """Run the ranks of `ranks_of` the case, each once, on this machine's cores.

    show: is told how many ranks have ended, whenever one has. Raises what the trainer raises, such
    as UserError.
    """
    config = case.config
    short = shortened(config)
    ranks = ranks_of(case)
    # Each in a forked process, also if there is one: autograd's threads do not survive a fork.
    forked = multiprocessing.get_context("fork")
    workers = min(len(ranks), len(allowed_cores()))
    torch.set_num_threads(1)
    with fake_devices(recording_context(1, 0, 1), case.gpu):
        torch.zeros(1, device="cuda").add_(1)  # imports what fake tensors need, once for all
    with ProcessPoolExecutor(workers, forked) as pool:
        futures = []
        for rank in ranks:
            job = (short, rank, case.world, case.nodes, case.gpu, case.routing)
            futures.append(pool.submit(run_rank, *job))
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()  # raises what the rank raised
            show(done)
        records = [future.result() for future in futures]
    events = {record.rank: record.events for record in records}
    traces = [events[rank] for rank in taken_as(config, list(events))]
    most = max(level.batch for level in config.levels)
    return Rehearsal(
        config,
        World(records[0].rows, traces, frozenset(events)),
        records,
        micro_batches=short.micro_batches(short.training.global_batch_size),
        of_run=config.micro_batches(most),
        seconds=sum(record.seconds for record in records),
    )


def ranks_of(case: Case) -> Sequence[int]:
    """The ranks of a case that are run."""
    return range(case.world) if case.all_ranks else chosen(case.config)


def shortened(config: Config) -> Config:
    """The configuration of a run of two steps with the fewest micro-batches that show it all."""
    layout = config.layout
    training = config.training
    most = config.micro_batches(max(level.batch for level in config.levels))
    ahead = layout.stages + (3 if layout.vocab_pp else 2)
    enough = most if layout.schedule == "gpipe" else min(most, ahead)
    fixed: dict[str, Any] = dict.fromkeys(("rampup_batch_size", "batch_schedule", "train_samples"))
    training = dataclasses.replace(training, **fixed, steps=STEPS)
    few = 2 * layout.micro_batch_size * layout.dp
    few = few if config.data.eval_data else min(config.data.eval_samples, few)
    plain: dict[str, Any] = {"eval_data": None, "data": ("synthetic",), "eval_samples": few}
    evaluated = dataclasses.replace(config.data, **plain)
    # Fake tensors have nothing to compile for: what --compile fuses runs as it is.
    run = dataclasses.replace(config.run, compile=False)
    config = dataclasses.replace(config, training=training, data=evaluated, run=run)
    return _with_micro_batches(config, enough)


def _with_micro_batches(config: Config, count: int) -> Config:
    size = count * config.layout.micro_batch_size * config.layout.dp
    training = dataclasses.replace(config.training, global_batch_size=size)
    return dataclasses.replace(config, training=training)


# ---- One rank ------------------------------------------------------------------------------------


def run_rank(
    config: Config, rank: int, world: int, nodes: int, gpu: str, routing: str = "even"
) -> RankRecord:
    """Run one rank; `config` is `shortened`."""
    began = time.monotonic()
    context = recording_context(world, rank, nodes)
    context.blocking = config.run.blocking
    record = RankRecord(rank, coordinates(rank, config.layout.axes)["pp"])
    with contextlib.ExitStack() as stack:
        if config.layout.zero == 3 and world > 1:
            stack.enter_context(_fake_process_groups(context))
        meter = stack.enter_context(fake_devices(context, gpu, routing))
        state = trainer.build(config, context)
        _classify(state, meter, built=False)
        samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 0)
        if start_checks.warms_up(config, "cuda"):
            trainer.warm_up(state, samples, 0)
        for step in range(1, STEPS + 1):
            record.peaks |= {"build": meter.peaks["build"]} if step == 1 else {}
            meter.start()
            context.recorder.begin_step(step)
            full = config.micro_batches(config.training.global_batch_size)
            state.config = _with_micro_batches(config, full if step > 1 else min(2, full))
            trainer.step(state, samples, 0, config.training.lr)
            _classify(state, meter, built=True)
            mesh = state.factory.mesh  # what ranks tell one another after a step, as the trainer
            step_stats.seconds_since(0.0, context.device, mesh.recorder)
            mesh.recorder.at("statistics")
            own = step_stats.measure(context.device, 0.0)
            step_stats.exchange(own, mesh.world, context.device)
        _after_steps(config, state, samples, context, record)
        record.peaks |= {phase: _named(peak) for phase, peak in meter.peaks.items()}
    record.events = context.trace.events
    record.rows = context.rows
    steady = [e for e in record.events if e.place.startswith(f"step {STEPS},")]
    stops = Counter((e.kind, e.op, e.line) for e in steady if e.kind in (READ, COPY))
    record.stops = dict(stops)
    record.seconds = time.monotonic() - began
    return record


def _after_steps(
    config: Config,
    state: trainer.TrainState,
    samples: data.Samples,
    context: RecordingContext,
    record: RankRecord,
) -> None:
    """Evaluate, check the replicas, sample and save, as at the end of a run."""
    recorder = context.recorder
    if config.data.eval_samples:
        trainer.evaluate(state, samples, config.data.eval_samples)
    if config.run.check_replicas_every:
        recorder.enter("check replicas")
        mesh = state.factory.mesh
        replica_check.check(state.stages, state.optimizer, mesh, STEPS)
    if config.run.sample_every:
        recorder.enter("sample")
        state.optimizer.finish_gathering()
        decoder = Decoder(state.pipeline, state.factory, config.model)
        decoder.generate([0], 2, Choice())  # a pass of a prompt, and one with what it keeps
    disk = SimpleNamespace(free=2**60)  # room for any checkpoint
    with tempfile.TemporaryDirectory() as out, replaced(shutil, "disk_usage", lambda _: disk):
        run = dataclasses.replace(config.run, out=out)
        config = dataclasses.replace(config, run=run)
        mesh = state.factory.mesh
        optimizer = state.optimizer
        checkpoints = Checkpointer(config, mesh, optimizer, print_line=lambda _: None)
        no_writer = SimpleNamespace(write=lambda save, runs: setattr(save, "seconds", 1.0))
        no_writer.folder_of = lambda progress: out
        checkpoints.writer = cast(Writer, no_writer)
        checkpoints.save(Progress(STEPS, 0))
        checkpoints.close()
    shards = shards_to_write(state.optimizer)
    if shards:
        types = saved_types(shards[0], checkpoints.kinds)
        record.saved = count_elements(shards) * sum(each.itemsize for each in types.values())


@contextlib.contextmanager
def _fake_process_groups(context: RecordingContext) -> Iterator[None]:
    """torch's own process groups, which move nothing, for code that takes them."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=context.rank, world_size=context.size)
    context.has_handles = True
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- What holds the bytes ------------------------------------------------------------------------


def _classify(state: trainer.TrainState, meter: Meter, built: bool) -> None:
    """Tell the meter which tensors are weights, gradients and optimizer state."""
    optimizer = state.optimizer
    meter.classify((p.detach() for p in state.stages.parameters()), "weights")
    meter.classify((bucket.gradients for bucket in optimizer.buckets), "gradients")
    meter.classify((m for group in optimizer.groups for m in group.masters), "optimizer")
    if built:  # reading the state before the first step would make it
        kinds = [(s, kind) for s in optimizer.owned() for kind in optimizer.state_kinds]
        meter.classify((s.read(kind, s.start, s.start + 1) for s, kind in kinds), "optimizer")


def _named(peak: Peak) -> Peak:
    """The same, with what held it by the names of the report.

    Activations are what forward passes left, temporaries what the action that ran allocated.
    """
    current = peak.tensor.rpartition("(")[2].rstrip(")").rpartition(", ")[2]
    held = Counter[str]()
    for kind, size in peak.held:
        name = "temporaries"
        if kind.startswith("="):
            name = kind[1:]
        elif kind == "start":
            name = "buffers"
        elif kind.split()[0] in ("F", "E", "S", "data", "evaluate") and kind != current:
            name = "activations"
        held[name] += size
    return peak._replace(held=tuple((name, size) for name, size in held.items() if size))
