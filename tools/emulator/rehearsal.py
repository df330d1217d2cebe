"""Runs the trainer of some ranks of a large run on fake GPUs: build, two steps, save, the checks.

    with processes(most=8, gpu="A100") as pool:
        run = rehearse(RehearsalCase(config, world=384, nodes=48, gpu="A100"), pool)
    run.world                       # the operations of all ranks, for matching.py
    run.records                     # memory and stops of the ranks that were run

The trainer is the real one. Replaced are the tensors' elements (there are none), the other ranks,
the disk, the store, and the tokens. Every number that the host reads is 1.

The second step has as many micro-batches as a step of the run, or the fewest with which every stage
reaches its steady state and each rank holds as much as in the run: see `enough_micro_batches`. The
first step, which makes the optimizer's state, has at most two micro-batches.

A rehearsal runs only some ranks of the world; each other rank is assumed to do what one of them
does.

    chosen(config)              # the ranks that are run
    represented_by(config, ran) # for every rank of the world, the rank of `ran` that represents it

The actions of a rank depend on its stage, on its key place, and on whether it is first, last or
between on an axis of the mesh: the first rank reports and holds the tensors that are not split, the
last rank holds padding. The key place is the rank's position among the cp ranks that gather the
keys of a sample; cp ranks that split the heads have the same key place.
"""

import contextlib
import dataclasses
import math
import multiprocessing
import operator
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

import data
import trainer
from architecture import dispatch
from checkpointing.save import Checkpointer
from checkpointing.state import Progress
from checkpointing.writer import Writer
from config.mesh_axes import coordinates
from config.schema import Config, Layout
from config.timeline import Timeline
from distributed import preflight
from distributed.parent_death import end_with_parent
from distributed.placement import allowed_cores, nodes_sent_once
from inference.decoding import Decoder, SamplingParams
from schedules.long_schedule import long_layout
from telemetry import replica_check, step_stats
from tools.emulator.fake_devices import fake_devices, replaced
from tools.emulator.matching import RunTraces
from tools.emulator.meter import Meter, Peak
from tools.emulator.recording import Event, RecordingContext, recording_context

FIRST, BETWEEN, LAST = range(3)
AXES = ("pp", "dp", "cp", "tp")
# Nine ranks, each given by its kind of position (FIRST, BETWEEN or LAST) on each axis of AXES. On
# any two axes each pair of kinds occurs once: an orthogonal array of strength two, which needs 9 of
# the 81 combinations.
PAIRS = [
    (stage, replica, (stage + 2 * replica) % 3, (stage + replica) % 3)
    for stage in (FIRST, BETWEEN, LAST)
    for replica in (FIRST, BETWEEN, LAST)
]
# Two more ranks that are run, by their kinds of position on (pp, dp, cp, tp): the last rank of the
# first stage and the last rank of the last stage.
ENDS = [(stage, LAST, LAST, LAST) for stage in (FIRST, LAST)]


def chosen(config: Config, nodes: int = 1) -> list[int]:
    """Return the ranks to run, ascending; nodes: on so many the ranks are, equally many on each.

    They are the ranks of PAIRS and ENDS, and the first rank of each stage and key place.
    """
    sizes = [config.layout.axes[axis] for axis in AXES]
    wanted = set()
    for kinds in (*PAIRS, *ENDS):
        wanted.add(tuple(_position(kind, size) for kind, size in zip(kinds, sizes)))
    all_positions = _positions(config)
    ranks = {rank for rank, positions in enumerate(all_positions) if positions in wanted}
    if config.model.experts > 1:
        # In each stage, ranks of the first group of --ep are run too, so that their exchanges can
        # be compared with those of the group's first rank: the last rank of the group and of its
        # first node, and the first rank of its last node.
        stage_size = len(all_positions) // config.layout.pp  # the ranks of a stage are adjacent
        ep = config.layout.ep or 1
        of_node = min(ep, len(all_positions) // nodes)
        for place in (ep - 1, of_node - 1, ep - of_node):
            ranks |= set(range(place, len(all_positions), stage_size))
    return sorted(ranks | {group[0] for group in _similar_ranks(config, all_positions, nodes)})


def represented_by(config: Config, ran: Sequence[int], nodes: int = 1) -> list[int]:
    """Return for every rank of the world the rank that was run and does the same: (world,).

    A rank is represented by one with the same pipeline stage and the same position among the cp
    ranks that gather keys, whose experts get tokens in the same way. Among several it is the one
    that is first, last or between on as many axes as possible like it; among equals the lowest.
    ran: the ranks that were run, at least those of `chosen`; they represent themselves. nodes: as
    for `chosen`.
    """
    all_positions = _positions(config)
    kinds = [_kinds(config, positions) for positions in all_positions]
    ran_ranks = set(ran)
    representatives = list(range(len(all_positions)))
    for group in _similar_ranks(config, all_positions, nodes):
        candidates = [rank for rank in group if rank in ran_ranks]
        nearest: dict[tuple[int, ...], int] = {}  # by kinds of position, the representing rank
        for rank in group:
            kind = kinds[rank]
            if kind not in nearest:
                # For each candidate, on how many axes it has the same kind of position as the rank.
                common = [sum(map(operator.eq, kind, kinds[other])) for other in candidates]
                nearest[kind] = candidates[common.index(max(common))]
            if rank not in ran_ranks:
                representatives[rank] = nearest[kind]
    return representatives


def _positions(config: Config) -> list[tuple[int, ...]]:
    """Return, by rank, its positions on AXES: (pp, dp, cp, tp)."""
    axes = config.layout.axes
    all_positions = []
    for rank in range(math.prod(axes.values())):
        position_on = coordinates(rank, axes)
        all_positions.append(tuple(position_on[axis] for axis in AXES))
    return all_positions


def _similar_ranks(
    config: Config, all_positions: list[tuple[int, ...]], nodes: int
) -> list[list[int]]:
    """Return the ranks in groups that have the same stage and the same key place, and are all in
    groups of --ep that send one copy of a token to a node, or all in others.

    all_positions: see `_positions`. nodes: the number of nodes. The ranks of each group ascend.
    """
    heads = config.layout.over_heads(config.model)  # adjacent cp ranks with the same key place
    per_node = len(all_positions) // nodes
    node_of = [str(rank // per_node) for rank in range(len(all_positions))]
    ep = config.layout.ep or 1
    sends_once = partial(dispatch.sends_once, config.model)
    groups: dict[tuple[int, int, bool], list[int]] = {}
    for rank, (stage, _, context, _) in enumerate(all_positions):
        first = rank // ep * ep
        once = bool(nodes_sent_once(range(first, first + ep), node_of, sends_once))
        groups.setdefault((stage, context // heads, once), []).append(rank)
    return list(groups.values())


def _position(kind: int, size: int) -> int:
    """Return a position that is FIRST, BETWEEN or LAST (`kind`) on an axis with `size` ranks.

    With size 1 or 2 no position is BETWEEN, and the last position is returned for it.
    """
    return {FIRST: 0, BETWEEN: size // 2, LAST: size - 1}[kind]


def _kinds(config: Config, positions: tuple[int, ...]) -> tuple[int, ...]:
    """Return whether a rank is FIRST, BETWEEN or LAST on each of AXES, from its positions."""
    kinds = []
    for axis, position in zip(AXES, positions):
        # On an axis of one rank both keys are 0, and the later one counts: the rank is FIRST.
        kind_of_end = {config.layout.axes[axis] - 1: LAST, 0: FIRST}
        kinds.append(kind_of_end.get(position, BETWEEN))
    return tuple(kinds)


TICK = 5.0  # seconds after which `rehearse` shows that it goes on
STEPS = 2  # the steps that a rehearsal runs
STEADY = ("forward", "backward", "optimizer")  # the phases of a step, as the meter names them


@dataclass
class RankRecord:
    """The results of running one rank.

    events: its trace. rows: the ranks of every group, by role. peaks: the most bytes in each phase;
    for the phases of a step (STEADY), in the second step. kernels: those launched in each phase of
    the second step. seconds: the time that this took.
    """

    rank: int
    stage: int
    events: list[Event] = field(default_factory=list)
    rows: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    peaks: dict[str, Peak] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def step_peak(self) -> int:
        """The most bytes that were allocated at once in the phases of the second step."""
        return max(self.peaks[phase].bytes for phase in STEADY if phase in self.peaks)

    @property
    def peak(self) -> int:
        """The most bytes that were allocated at once in any phase."""
        return max(peak.bytes for peak in self.peaks.values())


@dataclass(frozen=True)
class Rehearsal:
    """The result of `rehearse`.

    config: the configuration of the run. world: the traces of all ranks. records: one for each rank
    that was run. micro_batches: their number in the second step; of_run: the largest number in a
    step of the run. routing: the case's. node: the ranks of a node.
    seconds: the sum over the ranks that were run.
    """

    config: Config
    world: RunTraces
    records: list[RankRecord]
    micro_batches: int
    of_run: int
    routing: str
    node: int
    seconds: float


class RehearsalCase(NamedTuple):
    """A run to rehearse.

    config: a checked configuration, without automatic options. world, nodes: the numbers of ranks
    and of nodes. gpu: the name that the driver gives the GPU. all_ranks: whether every rank is run.
    routing: how tokens are routed to experts, EVEN or ONE_RANK of fake_devices.py.
    """

    config: Config
    world: int
    nodes: int
    gpu: str
    all_ranks: bool = False
    routing: str = "even"


def processes(most: int, gpu: str) -> ProcessPoolExecutor:
    """Return forked processes that run ranks of a case with the GPU `gpu`; at most one per core.

    Even a single rank runs in such a process: a pass in this one would start autograd's threads,
    which later forks would lack. A process that has run other cases is faster, by torch's caches.
    The processes end with this one.
    """
    torch.set_num_threads(1)
    with fake_devices(recording_context(1, 0, 1), gpu):
        # The first operation on fake tensors imports modules of torch: once here for all processes.
        torch.zeros(1, device="cuda").add_(1)
    workers = min(most, len(allowed_cores()))
    forks = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(workers, forks, _begin_worker, (os.getpid(),))


def _begin_worker(parent: int) -> None:
    """Prepare a forked process that runs ranks, and end it with the process `parent`.

    A fork has torch's thread pool of its parent, which torch replaces at the first call that sets
    the number of threads. Autograd starts a thread for each device, and each makes this call: two
    at once end the process with "Invalid thread pool". So this thread makes the call before them.
    """
    end_with_parent(parent)
    torch.set_num_threads(1)


def rehearse(
    case: RehearsalCase, pool: ProcessPoolExecutor, show: Callable[[int], None] = lambda done: None
) -> Rehearsal:
    """Run the ranks that `ranks_of(case)` returns, in the processes of a pool of `processes`.

    show: called with the number of ranks that have ended, when some end and every few seconds
    (TICK). Raise every exception of the trainer, such as UserError.
    """
    config = case.config
    short = shortened(config)
    where = (case.world, case.nodes, case.gpu, case.routing)
    futures = [pool.submit(run_rank, short, rank, *where) for rank in ranks_of(case)]
    running = set(futures)
    while running:
        ended, running = wait(running, TICK, FIRST_COMPLETED)
        for future in ended:
            future.result()  # raises the exception of the rank
        show(len(futures) - len(running))
    records = [future.result() for future in futures]
    events = {record.rank: record.events for record in records}
    # A rank that was not run gets the trace of the rank that represents it.
    traces = [events[rank] for rank in represented_by(config, list(events), case.nodes)]
    largest_batch = max(level.batch for level in Timeline(config).levels)
    return Rehearsal(
        config,
        RunTraces(records[0].rows, traces, frozenset(events)),
        records,
        micro_batches=short.layout.micro_batches(short.training.global_batch_size),
        of_run=config.layout.micro_batches(largest_batch),
        routing=case.routing,
        node=case.world // case.nodes,
        seconds=sum(record.seconds for record in records),
    )


def ranks_of(case: RehearsalCase) -> Sequence[int]:
    """Return the ranks of a case that are run: all with --all-ranks, else those of `chosen`."""
    return range(case.world) if case.all_ranks else chosen(case.config, case.nodes)


def shortened(config: Config) -> Config:
    """Return the configuration of two steps, with the fewest micro-batches that reach the peak."""
    layout = config.layout
    training = config.training
    largest_batch = max(level.batch for level in Timeline(config).levels)
    micro_batches = enough_micro_batches(layout, layout.micro_batches(largest_batch))
    # Both steps have the same batch size, so the options of a growing batch are cleared; the run
    # ends after STEPS steps, so a number of samples is cleared too.
    constant: dict[str, Any] = {"rampup_batch_size": None, "batch_schedule": None}
    constant["train_samples"] = None
    training = dataclasses.replace(training, **constant, steps=STEPS)
    # An evaluation reaches its peak with two micro-batches on each replica.
    eval_samples = 2 * layout.micro_batch_size * layout.dp
    if not config.data.eval_data:
        eval_samples = min(config.data.eval_samples, eval_samples)
    synthetic: dict[str, Any] = {"eval_data": None, "eval_tasks": None, "data": ("synthetic",)}
    synthetic_data = dataclasses.replace(config.data, **synthetic, eval_samples=eval_samples)
    # Fake tensors have no kernels to compile: operations that --compile fuses run one by one.
    quiet: dict[str, Any] = {"compile": False, "after_save": None}
    run = dataclasses.replace(config.run, **quiet)
    config = dataclasses.replace(config, training=training, data=synthetic_data, run=run)
    return _with_micro_batches(config, micro_batches)


def enough_micro_batches(layout: Layout, micro_batches: int) -> int:
    """Return the fewest micro-batches with which each rank holds as much as with `micro_batches`.

    With two more than there are stages, all stages reach the steady state. What is held then is
    read from the order of the schedule itself: GPipe keeps all micro-batches, so it needs them all,
    and an interleaved schedule holds the most while a group of the run's size passes.
    """
    held = _held(layout, micro_batches)
    steady = layout.stages + 2
    # The groups of an interleaved schedule recur after `pp` micro-batches.
    for count in range(steady, min(steady + 2 * layout.pp, micro_batches)):
        if _held(layout, count) == held:
            return count
    return micro_batches


def _held(layout: Layout, micro_batches: int) -> list[tuple[float, ...]]:
    """Return what each rank holds at most: of stages of one size, and of growing and falling ones.

    Three sizes, because a rank with several stages may hold as many activations of other stages.
    """
    order = long_layout(layout, micro_batches)
    growing = range(1, layout.stages + 1)
    return [order.most_held(sizes) for sizes in ([1] * layout.stages, growing, growing[::-1])]


def _with_micro_batches(config: Config, count: int) -> Config:
    """Return the configuration with a global batch of `count` micro-batches on each replica."""
    size = count * config.layout.micro_batch_size * config.layout.dp
    training = dataclasses.replace(config.training, global_batch_size=size)
    return dataclasses.replace(config, training=training)


# ---- One rank ------------------------------------------------------------------------------------


def run_rank(
    config: Config, rank: int, world: int, nodes: int, gpu: str, routing: str = "even"
) -> RankRecord:
    """Run one rank on a fake GPU, in this process, and return its record.

    config: the result of `shortened`. The other arguments are as in `RehearsalCase`.
    """
    began = time.monotonic()
    context = recording_context(world, rank, nodes)
    context.blocking = config.run.blocking
    record = RankRecord(rank, coordinates(rank, config.layout.axes)["pp"])
    with contextlib.ExitStack() as stack:
        if config.layout.zero == 3 and world > 1:
            stack.enter_context(_fake_process_groups(context))
        meter = stack.enter_context(fake_devices(context, gpu, routing))
        state = trainer.build(config, context)
        _classify(state, meter, built=False)  # the first step makes the optimizer's state
        samples = data.Synthetic(config.model.vocab_size, config.model.seq_length, 0)
        if preflight.warms_up(config, "cuda"):
            trainer.warm_up(state, samples, 0)
        for step in range(1, STEPS + 1):
            if step == 1:
                record.peaks["build"] = meter.peaks["build"]  # `meter.start` would forget it
            meter.start()  # forgets the peaks so far, so that those of the second step remain
            context.recorder.begin_step(step)
            micro_batches = config.layout.micro_batches(config.training.global_batch_size)
            if step == 1:  # the first step only has to make the optimizer's state
                micro_batches = min(2, micro_batches)
            state.timeline = Timeline(_with_micro_batches(config, micro_batches))
            trainer.step(state, samples, 0, config.training.lr)
            _classify(state, meter, built=True)
            # The ranks exchange statistics after a step, as in the trainer's loop. The values have
            # no meaning here: the exchange is made for its collective.
            mesh = state.factory.mesh
            step_stats.seconds_since(0.0, context.device, mesh.recorder)
            mesh.recorder.at("statistics")
            statistics = step_stats.measure(context.device, 0.0)
            step_stats.exchange(statistics, mesh.world, context.device)
        record.kernels = {phase: meter.kernels[phase] for phase in STEADY}
        _after_steps(config, state, samples, context)
        record.peaks |= {phase: _named(peak) for phase, peak in meter.peaks.items()}
    record.events = context.trace.events
    record.rows = context.rows
    record.seconds = time.monotonic() - began
    return record


def _after_steps(
    config: Config,
    state: trainer.TrainState,
    samples: data.Samples,
    context: RecordingContext,
) -> None:
    """Evaluate, check the replicas and generate text if the run's options ask for it, and save."""
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
        decoder = Decoder(state.pipeline, state.factory, config)
        # Two tokens take a pass over the prompt, and a pass that uses its cached keys and values.
        decoder.generate([0], 2, SamplingParams())
    # The save does all but writing: the disk has room for any checkpoint, and the writer, which
    # would store the tensors, only sets the seconds that the save has taken.
    disk = SimpleNamespace(free=2**60)
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


@contextlib.contextmanager
def _fake_process_groups(context: RecordingContext) -> Iterator[None]:
    """Inside this context, torch.distributed has process groups that transfer nothing.

    torch's FSDP, which does --zero 3, needs process groups of torch: with `has_handles` the
    context makes one for each group of the mesh.
    """
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
    """Tell the meter which tensors are weights, gradients and optimizer state.

    Called after the build and after each step. built: whether the optimizer's state exists, which
    the first step makes.
    """
    optimizer = state.optimizer
    meter.classify((p.detach() for p in state.stages.parameters()), "weights")
    meter.classify((bucket.gradients for bucket in optimizer.buckets), "gradients")
    meter.classify((m for group in optimizer.groups for m in group.masters), "optimizer")
    if built:
        # `owned` gives this rank's shards of all parameters. Reading one element of a shard's state
        # returns a view of the state tensor, by which the meter finds and names the whole storage.
        kinds = [(s, kind) for s in optimizer.owned() for kind in optimizer.state_kinds]
        meter.classify((s.read(kind, s.start, s.start + 1) for s, kind in kinds), "optimizer")


def _named(peak: Peak) -> Peak:
    """Return the peak with the bytes that it holds under the names of the report.

    The meter's kinds of tensors become these names. Tensors that earlier forward passes allocated
    are activations. Tensors of the action in which the peak was reached are temporaries.
    """
    # The description of the last tensor ends with its place, "... (step 2, F 3)". `current`, F 3
    # here, is the action in which the peak was reached.
    _, _, place = peak.tensor.rpartition("(")
    _, _, current = place.rstrip(")").rpartition(", ")
    held = Counter[str]()
    for kind, size in peak.held:
        name = "temporaries"
        if kind.startswith("="):  # the meter was told: "=weights", "=gradients" or "=optimizer"
            name = kind[1:]
        elif kind == "start":  # allocated by the build, and not classified
            name = "buffers"
        elif kind.split()[0] in ("F", "E", "S", "data", "evaluate") and kind != current:
            name = "activations"
        held[name] += size
    return peak._replace(held=tuple((name, size) for name, size in held.items() if size))
