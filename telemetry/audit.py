"""Repeats a micro-batch on all replicas of a stage and compares every product: `--audit-every N`.

After every N-th step, and after the last one, one replica sends its data-parallel group one
micro-batch of the step: the input of each stage, the tokens that the stage reads, and the gradient
of its output. Every replica runs the stage forward and backward on them. All of them have the same
weights, so the results of all products, the stage's output and all gradients must be equal bit for
bit. The gradients go to a scratch buffer: weights and training do not change.

A wrong bit spreads to all later results of its rank, and by the next collective to the ranks of its
tensor and context group. So the first result that differs from the majority names layer and rank.
With two replicas there is no majority, and the finding names both.

The ranks of all stages audit at the same time, and replicas that are not asked would have to wait
in the next step: an audit takes the time of one micro-batch and examines every rank. On a GPU,
torch's deterministic kernels run inside an audit only. Each audit is a row of OUT/audits.jsonl:

    {"iteration": 0}                         # a start of the ranks: the last step before it
    {"iteration": 100, "results": 213, "finding": "", "time": "2026-11-21T20:41:47+0000"}

An audit that found nothing covers the checkpoints of its own step and of earlier steps. After a
finding, rank 0 moves all later checkpoints to another folder, so that a restart does not load them.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from checkpointing import folders
from checkpointing.checkpoints import Checkpoints
from checkpointing.state import Progress, checkpoints_folder
from config.messages import NodeError
from config.schema import Config, coordinates
from data import Batch
from distributed.collectives import MAX, Group
from model import Stage
from parallel import DeferredGradients, ParamFactory
from telemetry.log import Log
from telemetry.replica_check import bit_hash
from telemetry.row_file import RowFile, read_rows
from zero import Optimizer

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_grouped_mm")
EQUAL = 1  # 1, because in a rehearsal every number that is read from a device is 1
DIFFERS = 2


class Results:
    """The hashes of the results of an audit on this rank, with their names, in order."""

    def __init__(self) -> None:
        self.layer = ""
        self.direction = ""
        self.names: list[str] = []
        self.hashes: list[Tensor] = []

    def add(self, result: str, tensor: Tensor) -> None:
        """Add a result; its name is for the finding."""
        self.names.append(result)
        self.hashes.append(bit_hash(tensor.detach().reshape(-1)))

    def enter(self, layer: str, direction: str, *_: Any) -> None:
        """Note that a pass through a layer begins; further arguments are those of torch's hooks."""
        self.layer = layer
        self.direction = direction


class Products(TorchDispatchMode):
    """Adds the result of each matrix product and each attention inside the context to `results`."""

    def __init__(self, results: Results):
        super().__init__()
        self.results = results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would load its compiler, some 50 MB, to exclude this class."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        attention = "attention" in name
        if name in MATRIX_PRODUCTS or attention:
            outputs = output if isinstance(output, tuple) else (output,)
            if attention and "backward" not in name:
                outputs = outputs[:1]  # the others are padded, or no numbers
            for tensor in filter(_is_result, outputs):
                self.results.add(f"{self.results.layer}: {name}{self.results.direction}", tensor)
        return output


def _is_result(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()


class Captured:
    """The input of a stage and the gradient of its output, copied, and the tokens that it read."""

    def __init__(self, x: Tensor, batch: Batch | None):
        self.x = x.detach().clone()
        self.batch = batch
        self.gradient: Tensor | None = None

    def take_gradient(self, gradient: Tensor) -> None:
        """Hook that autograd calls with the gradient of the stage's output."""
        self.gradient = gradient.detach().clone()

    def broadcast(self, source: int, replicas: Group) -> None:
        """Overwrite all tensors by those of the rank `source`; collective over the group.

        The step is over: nothing else reads the tokens of this micro-batch again.
        """
        tokens = vars(self.batch).values() if self.batch else ()
        for tensor in (self.x, *filter(torch.is_tensor, tokens), self.gradient):
            assert tensor is not None  # every forward pass of a step has its backward pass
            replicas.broadcast(tensor, source).wait()


class Audit:
    """The audits of one run; every rank has one and calls the same methods."""

    def __init__(self, state: Any, checkpoints: Checkpoints, log: Log, done: Progress, last: int):
        """state: the trainer's. done: how far the run is. last: its last step."""
        self.config: Config = state.config
        self.factory: ParamFactory = state.factory
        self.optimizer: Optimizer = state.optimizer
        self.mesh = self.factory.mesh
        self.stages: dict[int, Stage] = state.pipeline.stages
        self.checkpoints = checkpoints
        self.log = log
        self.last = last
        self.rows: RowFile | None = None
        if self.mesh.rank == 0:
            path = Path(self.config.run.out, "audits.jsonl")
            self.rows = RowFile(str(path), log.note)
            checkpoints.covered = last_clean(path, done.iteration)
            self.rows.write({"iteration": done.iteration})
        self.micro_batch = -1  # the one to capture; -1: none
        self.passes: Counter[int] = Counter()  # forward passes of the step, by stage
        self.captured: dict[int, Captured] = {}
        state.before_passes.append(self.begin_passes)
        for index, stage in self.stages.items():
            stage.register_forward_hook(partial(self._capture, index))

    # -- during the passes of a step --------------------------------------------------------

    def begin_passes(self, consumed: int, length: int) -> None:
        """Prepare to capture a micro-batch, if this step is audited; called before its passes."""
        self.passes.clear()
        self.captured.clear()
        self.micro_batch = -1
        iteration = self.mesh.recorder.place[1]
        if self._is_due(iteration):
            count = self.config.micro_batches(self.config.batches.batch(consumed))
            self.micro_batch = self._round(iteration) // self.mesh.dp.size % count

    def _is_due(self, iteration: int) -> bool:
        return iteration % self.config.run.audit_every == 0 or iteration == self.last

    def _round(self, iteration: int) -> int:
        """Return the number of the audit, from which replica and micro-batch follow."""
        return -(-iteration // self.config.run.audit_every)

    def _capture(self, index: int, stage: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Hook that is called after each forward pass of a stage."""
        if self.micro_batch < 0 or not output.requires_grad:
            return
        if self.passes[index] == self.micro_batch:
            x, batch = inputs
            self.captured[index] = Captured(x, batch)
            output.register_hook(self.captured[index].take_gradient)
        self.passes[index] += 1

    # -- after a step -----------------------------------------------------------------------

    def after(self, iteration: int) -> None:
        """Audit if the step is due. Raise NodeError on every rank if results differ. Collective."""
        if not self._is_due(iteration):
            return
        self.mesh.recorder.enter("audit")
        self.micro_batch = -1
        results = Results()
        source = self._round(iteration) % self.mesh.dp.size
        self.optimizer.finish_gathering()
        with self._apart(results), _deterministic(self.factory.device):
            for index, captured in sorted(self.captured.items()):
                captured.broadcast(source, self.mesh.dp)
                self._repeat(self.stages[index], captured, results)
        self.captured.clear()
        differing = self._differing(results)
        worst = torch.tensor([EQUAL if differing is None else DIFFERS], device=self.factory.device)
        self.mesh.world.at_once.all_reduce(worst, MAX).wait()
        if self.mesh.world.values(worst)[0] == EQUAL:
            self._note(iteration, len(results.names), "")
            return
        self._end(iteration, results, differing)

    def _repeat(self, stage: Stage, captured: Captured, results: Results) -> None:
        """Run a stage forward and backward on a captured micro-batch."""
        x = captured.x
        if x.is_floating_point():
            x.requires_grad_()
        deferred = self.factory.deferred or DeferredGradients()
        with observed(stage, results), Products(results):
            y = stage(x, captured.batch)
            results.add(f"output of stage {stage.spec.index}", y)
            results.direction = " in the backward pass"
            compute_weight_gradients = deferred.backward(y, captured.gradient)
        if x.grad is not None:
            results.add(f"gradient of the input of stage {stage.spec.index}", x.grad)
        compute_weight_gradients()

    @contextmanager
    def _apart(self, results: Results) -> Iterator[None]:
        """Inside, gradients go to `results`, and what training counts stays as it is.

        A parameter's gradient is complete when the optimizer is told, so one buffer, as large as
        the largest parameter, serves all of them.
        """
        parameters: list[Any] = [p for s in self.stages.values() for p in s.parameters()]
        sums = [(p, p.main_grad) for p in parameters if hasattr(p, "main_grad")]
        largest = max(sums, key=lambda pair: pair[1].numel(), default=None)
        scratch = torch.zeros_like(largest[1]).flatten() if largest else torch.empty(0)
        for p, _ in sums:
            _set_gradient(p, scratch[: p.numel()].view(p.shape))

        def take(p: Any) -> None:
            gradient = getattr(p, "main_grad", p.grad)
            results.add(f"gradient of {p.spec.name}", gradient)
            gradient.zero_()
            if not hasattr(p, "main_grad"):
                p.grad = None

        self.optimizer.gradient_taker = take
        yield
        self.optimizer.gradient_taker = None
        for p, total in sums:
            _set_gradient(p, total)
        if self.optimizer.balance:
            self.optimizer.balance.discard()  # the step's counts have been used already

    def _differing(self, results: Results) -> tuple[int, bool] | None:
        """Return what `vote` says about this rank; collective over the data-parallel group."""
        group = self.mesh.dp
        device = self.factory.device
        longest = torch.tensor([len(results.hashes)], device=device)
        group.at_once.all_reduce(longest, MAX).wait()
        # A wrong choice of experts can change the number of products.
        count = max(len(results.hashes), int(group.values(longest)[0]))
        own = torch.zeros(count, dtype=torch.int64, device=device)
        if results.hashes:
            own[: len(results.hashes)] = torch.stack(results.hashes)
        gathered = own.new_empty(group.size * count)
        group.at_once.all_gather(gathered, own).wait()
        by_rank = gathered.view(group.size, -1)
        differ = (by_rank != own).any(0).nonzero().flatten()
        places = group.values(differ)
        found = vote(by_rank[:, differ].t().tolist()) if places else {}
        if group.rank not in found:
            return None
        row, tied = found[group.rank]
        return places[row], tied

    # -- the finding ------------------------------------------------------------------------

    def _note(self, iteration: int, results: int, finding: str) -> None:
        """Write the row of an audit; on rank 0."""
        if self.rows is None:
            return
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        row = {"iteration": iteration, "results": results, "finding": finding, "time": when}
        self.rows.write(row)
        if not finding:
            self.checkpoints.covered = iteration

    def _end(self, iteration: int, results: Results, differing: tuple[int, bool] | None) -> None:
        """Set uncovered checkpoints aside and raise NodeError with the finding. Collective."""
        own = None
        if differing is not None:
            place, tied = differing
            names = [*results.names, "the number of products"]
            own = place, tied, names[min(place, len(results.names))]
        reports = self.checkpoints.exchange.gather("audit", own)
        culprits = named(reports, self.config.layout.axes)
        nodes = self.log.context.nodes
        what = " and ".join(
            f"rank {rank} on {nodes[rank]} ({name})" for rank, name in culprits.items()
        )
        tied = any(reports[rank][1] for rank in culprits)
        finding = f"the audit after iteration {iteration} found wrong bits on {what}"
        if tied:
            finding = f"in the audit after iteration {iteration} the results differ between {what}"
            finding += "; there is no majority, so nobody can say which is wrong"
        self.checkpoints.close()
        if self.rows is not None:
            self._note(iteration, len(results.names), finding)
            self.rows.finish()
            parent = checkpoints_folder(self.config)
            line = folders.set_aside(parent, self.checkpoints.covered)
            self.log.note(line or "all checkpoints are covered by audits")
        self.checkpoints.exchange.gather("audited", None)  # the files are there before a rank ends
        raise NodeError(finding, {nodes[rank] for rank in culprits}, "audit", list(culprits))


def _set_gradient(p: Any, total: Tensor) -> None:
    """Have the gradients of a parameter added to `total`, by autograd too if it did that before."""
    p.main_grad = total
    if p.grad is not None:
        p.grad = total


def vote(rows: Sequence[Sequence[int]]) -> dict[int, tuple[int, bool]]:
    """Return the members with wrong results: by member, its first wrong row, and whether there was
    no majority, so that any of the named members may be wrong.

    rows: for each result, the hashes of all members. A member that was outvoted in a row has no
    vote in later rows.
    """
    voters = list(range(len(rows[0]))) if rows else []
    found: dict[int, tuple[int, bool]] = {}
    for number, row in enumerate(rows):
        common, votes = Counter(row[member] for member in voters).most_common(1)[0]
        if votes == len(voters):
            continue
        if 2 * votes <= len(voters):
            return found | dict.fromkeys(voters, (number, True))
        for member in [member for member in voters if row[member] != common]:
            found[member] = (number, False)
            voters.remove(member)
    return found


def named(reports: Sequence[Any], axes: dict[str, int]) -> dict[int, str]:
    """Return the ranks whose own products are wrong, and the name of the first one of each.

    reports: of every rank, the place of its first wrong result, whether nobody was outvoted, and
    the result's name; None if it has none. The other ranks of a replica get the wrong bits of one
    rank later, by a collective. So the rank with the earliest result is named.
    """
    replicas: dict[tuple[int, int], list[int]] = {}
    for rank, report in enumerate(reports):
        if report is not None:
            place = coordinates(rank, axes)
            replicas.setdefault((place["pp"], place["dp"]), []).append(rank)
    found: dict[int, str] = {}
    for ranks in replicas.values():
        first = min(reports[rank][0] for rank in ranks)
        found |= {rank: reports[rank][2] for rank in ranks if reports[rank][0] == first}
    return found


# ---- Contexts of the repeated passes -------------------------------------------------------------


@contextmanager
def observed(stage: Stage, results: Results) -> Iterator[None]:
    """Inside, `results.layer` is the layer of the stage that runs, forward or backward."""
    handles = []
    results.enter(f"stage {stage.spec.index}", "")
    for name, part in _layers(stage):
        entered = partial(results.enter, name, "")
        handles.append(part.register_forward_pre_hook(entered))
        back = partial(results.enter, name, " in the backward pass")
        handles.append(part.register_forward_hook(partial(_observe_gradient, back)))
    yield
    for handle in handles:
        handle.remove()


def _observe_gradient(
    entered: Callable[..., None], part: nn.Module, inputs: tuple, output: Tensor
) -> None:
    """Have `entered` called when the backward pass reaches a layer's output."""
    if output.requires_grad:
        output.register_hook(lambda _: entered())


def _layers(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a stage with their names in the whole model."""
    if stage.embedding is not None:
        yield "embedding", stage.embedding
    blocks: Iterable[Any] = stage.blocks
    for number, block in enumerate(blocks, stage.spec.first):
        yield f"blocks.{number}.attention", block.attention
        yield f"blocks.{number}.mlp", block.mlp
    if stage.head is not None:
        yield "head", stage.head


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Inside, a GPU runs only kernels that give the same bits for the same inputs."""
    if device.type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def last_clean(path: Path, begin: int) -> int:
    """Return the last step whose audit found nothing and that led to the step `begin`, after which
    the run goes on; -1: there is none.

    path: audits.jsonl, which may be missing. A row without a finding is that of a start of the
    ranks: audits of later steps belong to another course of the run.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        rows = read_rows(path.read_bytes())
    clean = [-1]
    for row in [*rows, {"iteration": begin}]:
        step = row.get("iteration")
        if not isinstance(step, int):
            continue
        if "finding" not in row:
            clean = [earlier for earlier in clean if earlier <= step]
        elif row["finding"] == "":
            clean.append(step)
    return clean[-1]
