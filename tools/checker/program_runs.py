"""One run of another program on one rank, and what it has to say.

answer = ProgramWorker(program)(context, ProgramRun(layout))     on every rank of a world

A rank is a fresh process for each run: programs keep their groups in globals. They meet with gloo
on CPUs, or with NCCL on GPUs, before build() is called.
"""

import datetime
import hashlib
import math
import numbers
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from base.errors import ProgramError, UserError
from distributed import local_ranks
from distributed.local_ranks import RankPlace
from tools.checker.compare import Reference, SeenPieces
from tools.checker.cuts import Shard, place_of, shards_of, take_weights
from tools.checker.program_recorder import ProgramRecorder, Types, flipping
from tools.checker.programs import Built, Program, ProgramLayout
from tools.checker.ranks import Failure
from tools.checker.recorder import AFTER
from tools.checker.rounding import growth_of
from tools.checker.runs import RunAnswer

SEED = 1234
MEETING = datetime.timedelta(minutes=10)  # of collectives; the check has a limit of its own


@dataclass(frozen=True)
class ProgramRun:
    """A run to do. draw: with other last bits, in the precision `width`; None: as it is.

    folder: of a checkpoint. save: after this step the state is saved, and the run ends. load: the
    state after this step is loaded, and the run goes on.
    """

    layout: ProgramLayout
    draw: int | None = None
    width: str = "fp64"
    folder: str = ""
    save: int = 0
    load: int = 0


@dataclass
class ProgramAnswer(RunAnswer):
    """What a rank says about a run of another program.

    names, shapes: of its parameters in the whole. width: the lowest precision in which the program
    computes, and `first`: the first operation that does. can_save: whether it has functions to save
    and load.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    width: str = "fp64"
    first: str = ""
    can_save: bool = False
    growth: dict[Any, float] = field(default_factory=dict)
    has_optimizer: bool = False


@dataclass(frozen=True)
class Ranks:
    """A rank among those of its run."""

    rank: int
    size: int


@dataclass(frozen=True)
class Meeting:
    """Lets ranks meet. on_gpus: with NCCL, each on a GPU of its own.

    nodes: of a launcher's ranks, the first of which are the run's; none: they are forks of one
    process. address: of the first rank's node.
    """

    on_gpus: bool = False
    nodes: tuple[str, ...] = ()
    address: str = "127.0.0.1"

    def __call__(self, rank: int, size: int, port: int) -> Ranks:
        """Start torch.distributed on this rank, over NCCL or gloo; collective."""
        nodes = list(self.nodes[:size]) or ["this machine"] * size
        local_ranks.become_rank_of(RankPlace(rank, nodes, self.address, port))
        torch.set_num_threads(1)
        if self.on_gpus:
            torch.cuda.set_device(nodes[:rank].count(nodes[rank]))
        backend = "nccl" if self.on_gpus else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=MEETING)
        return Ranks(rank, size)


@dataclass(frozen=True)
class Comparison:
    """This rank as `SeenPieces.by` takes it: its number, the ranks, its place on each axis."""

    rank: int
    size: int
    place: dict[str, int]


class ProgramWorker:
    """Does runs of a program on a rank, and compares their tensors with those of one rank."""

    def __init__(
        self,
        program: Program,
        reference: Reference | None = None,
        shapes: dict[str, tuple[int, ...]] | None = None,
    ):
        """Keep the tensors and shapes of one rank; None: do the run of one rank, return them."""
        self.program, self.reference, self.shapes = program, reference, shapes

    def __call__(self, context: Ranks, job: ProgramRun) -> ProgramAnswer | Failure:
        """Return the answer of a run on this rank; an error of the program is a Failure.

        Collective over the ranks of the run's layout.
        """
        try:
            return self._run(context, job)
        except UserError:
            raise
        except Exception as error:
            _, lines = self.program.own_lines(error)
            failure = Failure("error", [context.rank], self.program.sentence(error))
            failure.stacks = {context.rank: "\n".join(lines)} if lines else {}
            return failure

    def _run(self, context: Ranks, job: ProgramRun) -> ProgramAnswer:
        """Build the program in a layout, run its steps, and return losses and what was compared."""
        torch.set_default_dtype(self.program.dtype or torch.float64)
        torch.manual_seed(SEED)
        built = self.program.build(job.layout)
        place = place_of(built, job.layout, context.rank)
        shards = shards_of(built, self.program, job.layout, place, self.shapes)
        if self.reference is not None:
            self._give_weights(built, shards)
        flip_weights = None
        if job.draw is not None:
            flip_weights = flipping(built, shards, job.draw, job.width)
        recorder = ProgramRecorder(built, shards)
        answer = ProgramAnswer(shapes={shard.name: shard.shape for shard in shards})
        answer.can_save = built.save is not None and built.load is not None
        answer.has_optimizer = bool(built.optimizers)
        begin = job.load
        if job.load and built.load is not None:
            with self.program.modules:
                built.load(job.folder)
        recorder.state(begin)
        types = Types()
        for step in range(begin + 1, self.program.steps + 1):
            recorder.begin(step)
            if flip_weights is not None:
                flip_weights()
            if self.reference is None:
                with types, self.program.modules:
                    made = built.step(step)
            else:
                with self.program.modules:
                    made = built.step(step)
            loss, norm = _loss_of(made, self.program)
            recorder.end(loss, norm)
            answer.losses.append(math.nan if loss is None else loss)
            answer.norms.append(math.nan if norm is None else norm)
            if step == job.save and built.save is not None:
                with self.program.modules:
                    built.save(job.folder)
                break
        answer.width, answer.first = types.lowest, types.first
        if self.reference is None:
            answer.pieces = recorder.pieces
            return answer
        if job.draw is not None:
            answer.growth = growth_of(self.reference, recorder.pieces)
            return answer
        answer.unequal = _unequal(shards, context)
        at = {axis: coordinate for axis, (coordinate, _) in place.items()}
        ranks = Comparison(context.rank, context.size, at)
        answer.seen = SeenPieces.by(self.reference, recorder.pieces, 1, ranks)
        return answer

    @torch.no_grad()
    def _give_weights(self, built: Built, shards: list[Shard]) -> None:
        """Give this rank's parameters the weights of one rank, which were drawn there."""
        assert self.reference is not None  # the caller has looked
        for shard in shards:
            whole = self.reference.tensors[0, AFTER, shard.name]
            values = torch.from_numpy(whole[shard.elements]).to(shard.local)
            shard.local.copy_(values.reshape(shard.local.shape))
        take_weights(built.optimizers)


def _loss_of(made: Any, program: Program) -> tuple[float | None, float | None]:
    """Return the loss and the norm that a step returned; None: this rank has none.

    UserError if it is no number.
    """
    pair = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    found: list[float | None] = []
    for value, what in zip(pair, ("loss", "norm"), strict=True):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().item()
        if value is not None and not isinstance(value, numbers.Real | np.number):
            raise ProgramError(
                f"{program.path.name}: step() returns the loss of the global batch, a number, or "
                f"the pair (loss, norm); its {what} is {value!r:.80}"
            )
        found.append(None if value is None else float(value))
    return found[0], found[1]


def _unequal(shards: list[Shard], context: Ranks) -> list[str]:
    """Return sentences on replicas of weights that are not equal bit for bit; collective.

    Replicas are tensors, or parts, of several ranks that are the same elements of the whole.
    """
    mine = []
    for shard in shards:
        values = shard.local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        where = hashlib.sha1(shard.elements.tobytes()).hexdigest()
        mine.append((shard.name, where, hashlib.sha1(values).hexdigest()))
    every: list[Any] = [None] * context.size
    dist.all_gather_object(every, mine)
    if context.rank:
        return []
    found: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, tensors in enumerate(every):
        for name, where, values in tensors:
            found[name, where][values].append(rank)
    sentences = []
    for (name, _), ranks in found.items():
        if len(ranks) > 1:
            groups = " and ".join(str(group[0]) for group in ranks.values())
            sentences.append(f"the weights {name} of ranks {groups} are not equal bit for bit")
    return sentences
