"""Repeats a micro-batch on all replicas of a stage and compares every product: `--audit-every N`.

After every N-th step, and after the last one, one replica sends its data-parallel group one
micro-batch of the step: the input of each stage, the tokens that the stage reads, and the gradient
of its output. Every replica runs the stage forward and backward on them. All results (of matrix
products and attention, the output, the gradients) must be equal bit for bit, since all replicas
have the same weights. The gradients go to a scratch buffer: training does not change.

A wrong bit spreads to all later results of its rank, and by the next collective to the ranks of its
tensor and context group. So the first result that differs from the majority names layer and rank.
With two replicas there is no majority, and the finding names both.

The ranks of all stages audit at the same time, so an audit takes the time of one micro-batch. On a
GPU, deterministic kernels run inside an audit only. Each audit is a row of OUT/audits.jsonl:

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

from base.errors import NodeError
from base.regular_files import MOST_OF_ROWS, read_regular
from checkpointing import folders
from checkpointing.save import Checkpointer
from checkpointing.state import Progress, checkpoints_folder
from config.mesh_axes import coordinates
from config.schema import Config
from data import Batch
from distributed.collectives import MAX, Group
from distributed.store import StoreExchange
from model import Stage
from parallel import DeferredGradients, ParamFactory
from telemetry.log import Log
from telemetry.observer import Observer, Step
from telemetry.replica_check import DIFFERS, EQUAL, bit_hash
from telemetry.row_file import RowFile, read_rows
from zero import Optimizer, StepResult

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_grouped_mm")


class Results:
    """The names and hashes of the results of one audit on this rank, in the order of computing."""

    def __init__(self) -> None:
        """Begin without results."""
        self.layer = ""  # the layer that is running now
        self.direction = ""  # " in the backward pass", or empty in the forward pass
        self.names: list[str] = []  # the name of each result: layer, operation and direction
        self.hashes: list[Tensor] = []  # the hash of each result's bits: an int64 scalar

    def add(self, result: str, tensor: Tensor) -> None:
        """Add the hash of a tensor of any shape; `result` is the tensor's name in messages."""
        self.names.append(result)
        self.hashes.append(bit_hash(tensor.detach().reshape(-1)))

    def enter(self, layer: str, direction: str, *_: Any) -> None:
        """Note that a pass through `layer` begins; torch's hooks pass further arguments."""
        self.layer = layer
        self.direction = direction


class Products(TorchDispatchMode):
    """Adds the result of each matrix product and each attention inside the context to `results`."""

    def __init__(self, results: Results):
        super().__init__()
        self.results = results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch would load its compiler, to keep it out of this mode."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run any operation; add the outputs of matrix products and attention to the results."""
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_attention = "attention" in name
        if name not in MATRIX_PRODUCTS and not is_attention:
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        if is_attention and "backward" not in name:
            outputs = outputs[:1]  # attention's other outputs are undefined or are no results
        result = f"{self.results.layer}: {name}{self.results.direction}"
        for tensor in filter(_is_float_tensor, outputs):
            self.results.add(result, tensor)
        return output


def _is_float_tensor(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()


class Captured:
    """A micro-batch of a stage: copies of input and output's gradient, and the tokens read."""

    def __init__(self, x: Tensor, batch: Batch | None):
        """Copy the stage's input `x`; `batch`: None if the stage reads no tokens."""
        self.x = x.detach().clone()
        self.batch = batch
        self.gradient: Tensor | None = None  # of the stage's output, from `take_gradient`

    def take_gradient(self, gradient: Tensor) -> None:
        """Copy the gradient of the stage's output; autograd calls this hook."""
        self.gradient = gradient.detach().clone()

    def broadcast(self, source: int, replicas: Group) -> None:
        """Overwrite all tensors, also the tokens, by the tensors of rank `source`. Collective."""
        batch_values = vars(self.batch).values() if self.batch else ()
        batch_tensors = filter(torch.is_tensor, batch_values)
        for tensor in (self.x, *batch_tensors, self.gradient):
            assert tensor is not None  # the stage's backward pass has called `take_gradient`
            replicas.broadcast(tensor, source).wait()


class Audit(Observer):
    """The audits of one run."""

    def __init__(
        self,
        state: Any,
        checkpoints: Checkpointer,
        exchange: StoreExchange,
        log: Log,
        done: Progress,
        last: int,
    ):
        """Register the hooks that capture micro-batches; on rank 0, open audits.jsonl.

        state: the trainer's TrainState. exchange: passes values between all ranks. done: the
        progress so far. last: the run's last step.
        """
        self.config: Config = state.config
        self.factory: ParamFactory = state.factory
        self.optimizer: Optimizer = state.optimizer
        self.mesh = self.factory.mesh
        self.stages: dict[int, Stage] = state.pipeline.stages
        self.checkpoints = checkpoints
        self.exchange = exchange
        self.log = log
        self.last = last
        self.rows: RowFile | None = None
        if self.mesh.rank == 0:
            path = Path(self.config.run.out, "audits.jsonl")
            self.rows = RowFile(str(path), log.note)
            # An audit has covered the checkpoints up to this step; later ones may be wrong.
            checkpoints.writer.covered = last_clean(path, done.iteration)
            self.rows.write({"iteration": done.iteration})
        self.micro_batch = -1  # number of the micro-batch to capture in this step; -1: none
        self.passes: Counter[int] = Counter()  # by stage, the forward passes so far in this step
        self.captured: dict[int, Captured] = {}  # by stage, the chosen micro-batch
        for index, stage in self.stages.items():
            stage.register_forward_hook(partial(self._capture, index))

    def before_step(self, step: Step) -> None:
        """Choose the micro-batch to capture in the step."""
        self.passes.clear()
        self.captured.clear()
        self.micro_batch = -1
        if self._is_due(step.iteration):
            # The next audit takes the next replica; when all have had a turn, the next micro-batch.
            count = self.config.layout.micro_batches(step.batch)
            self.micro_batch = self._round(step.iteration) // self.mesh.dp.size % count

    def _is_due(self, iteration: int) -> bool:
        """Return whether a step is followed by an audit."""
        return iteration % self.config.run.audit_every == 0 or iteration == self.last

    def _round(self, iteration: int) -> int:
        """Return the number of a step's audit: with --audit-every 100, it is 2 for step 150."""
        return -(-iteration // self.config.run.audit_every)  # chooses replica and micro-batch

    def _capture(self, index: int, stage: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Capture the chosen micro-batch; torch calls this hook after a stage's forward passes."""
        if self.micro_batch < 0 or not output.requires_grad:
            return  # the step is not audited, or this is an evaluation
        if self.passes[index] == self.micro_batch:
            x, batch = inputs
            self.captured[index] = Captured(x, batch)
            output.register_hook(self.captured[index].take_gradient)
        self.passes[index] += 1

    def after_step(self, step: Step, result: StepResult) -> None:
        """Audit a step if it is due; raise NodeError on all ranks if results differ. Collective."""
        iteration = step.iteration
        if not self._is_due(iteration):
            return
        self.mesh.recorder.enter("audit")
        self.micro_batch = -1  # -1: the passes that the audit repeats are not captured
        results = Results()
        source = self._round(iteration) % self.mesh.dp.size  # the replica whose micro-batch is sent
        self.optimizer.finish_gathering()
        with self._apart(results), _deterministic(self.factory.device):  # gradients to `results`
            for index, captured in sorted(self.captured.items()):
                captured.broadcast(source, self.mesh.dp)
                self._repeat(self.stages[index], captured, results)
        self.captured.clear()
        differing = self._differing(results)
        # All ranks must know whether any rank has a wrong result, since all raise the same error.
        worst = torch.tensor([EQUAL if differing is None else DIFFERS], device=self.factory.device)
        self.mesh.world.at_once.all_reduce(worst, MAX).wait()
        if self.mesh.world.values(worst)[0] == EQUAL:
            self._note(iteration, len(results.names), "")
            return
        self._end(iteration, results, differing)  # raises NodeError

    def _repeat(self, stage: Stage, captured: Captured, results: Results) -> None:
        """Run a stage forward and backward on a captured micro-batch, and add all results."""
        x = captured.x
        if x.is_floating_point():  # else the stage's input is tokens, which have no gradient
            x.requires_grad_()
        # With a schedule that has passes W, layers put weight gradients off, into this list.
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
        """Inside this context gradients go to `results`; the optimizer does not count them.

        A parameter's main_grad is the optimizer's sum of gradients. It is replaced by a scratch
        buffer, and restored afterwards. At --zero 2 the gradient is in p.grad, without main_grad.
        """
        parameters: list[Any] = [p for stage in self.stages.values() for p in stage.parameters()]
        sums = [(p, p.main_grad) for p in parameters if hasattr(p, "main_grad")]
        scratch = torch.empty(0)  # replaces each main_grad; `take` zeroes it after each gradient
        if sums:
            _, largest = max(sums, key=lambda pair: pair[1].numel())
            scratch = torch.zeros_like(largest).flatten()
        for p, _ in sums:
            _set_gradient(p, scratch[: p.numel()].view(p.shape))

        def take(p: Any) -> None:
            """Add a gradient to the results and clear it; the optimizer calls this function."""
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
            self.optimizer.balance.discard()  # the repeated passes have counted tokens per expert

    def _differing(self, results: Results) -> tuple[int, bool] | None:
        """Return the index of this rank's first wrong result, and whether no majority decides.

        None: no result is wrong. Collective over the dp group: `vote` compares all hashes.
        """
        group = self.mesh.dp
        device = self.factory.device
        number_of_hashes = len(results.hashes)
        longest = torch.tensor([number_of_hashes], device=device)
        group.at_once.all_reduce(longest, MAX).wait()
        # A wrong choice of experts can change the number of products, so hashes are padded with 0.
        count = max(number_of_hashes, int(group.values(longest)[0]))
        hashes = torch.zeros(count, dtype=torch.int64, device=device)
        if results.hashes:
            hashes[:number_of_hashes] = torch.stack(results.hashes)
        gathered = hashes.new_empty(group.size * count)
        group.at_once.all_gather(gathered, hashes).wait()
        by_rank = gathered.view(group.size, -1)  # (replicas, results)
        unequal_columns = (by_rank != hashes).any(0).nonzero().flatten()
        places = group.values(unequal_columns)  # the indices of results that replicas differ in
        if not places:
            return None
        wrong_members = vote(by_rank[:, unequal_columns].t().tolist())
        if group.rank not in wrong_members:
            return None
        row, tied = wrong_members[group.rank]
        return places[row], tied

    def _note(self, iteration: int, results: int, finding: str) -> None:
        """Write an audit's row on rank 0; results: their number; finding: "" if all are equal."""
        if self.rows is None:
            return
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        row = {"iteration": iteration, "results": results, "finding": finding, "time": when}
        self.rows.write(row)
        if not finding:  # checkpoints up to this step count as right
            self.checkpoints.writer.covered = iteration

    def _end(self, iteration: int, results: Results, differing: tuple[int, bool] | None) -> None:
        """Set uncovered checkpoints aside and raise NodeError with the finding. Collective.

        differing: index of this rank's first wrong result and whether it is a tie, or None.
        """
        report = None
        if differing is not None:
            place, tied = differing
            # A place after the last name is padding: another rank has computed more products.
            names = [*results.names, "the number of matmuls"]
            report = place, tied, names[min(place, len(results.names))]
        axes = self.config.layout.axes
        found = self.exchange.agree(report, lambda reports: named(reports, axes), "audit")
        culprits = {rank: name for rank, _, name in found}  # by rank, its first wrong result
        nodes = self.log.context.nodes
        descriptions = [f"rank {rank} on {nodes[rank]} ({name})" for rank, name in culprits.items()]
        ranks = " and ".join(descriptions)
        finding = f"the audit after step {iteration} found wrong bits on {ranks}"
        if any(tied for _, tied, _ in found):
            finding = f"in the audit after step {iteration} the results differ between {ranks}"
            finding += "; there is no majority, so nobody can say which is wrong"
        self.checkpoints.close()  # a running save ends before later checkpoints are moved away
        if self.rows is not None:
            self._note(iteration, len(results.names), finding)
            self.rows.finish()
            parent = checkpoints_folder(self.config)
            why = f"the audit after step {iteration} found wrong results"
            line = folders.set_aside(parent, self.checkpoints.writer.covered, why, wrong=True)
            self.log.note(line or "all checkpoints are covered by audits")
        # Wait for rank 0's files: the launcher ends all ranks when one rank ends.
        self.exchange.agree(None, lambda answers: None, "audited")
        raise NodeError(finding, {nodes[rank] for rank in culprits}, "audit", list(culprits))


def _set_gradient(p: Any, total: Tensor) -> None:
    """Let linear layers and autograd add a parameter's gradients to `total`, of its shape."""
    p.main_grad = total  # linear layers add their gradients here
    if p.grad is not None:
        p.grad = total  # autograd adds its gradients here


def vote(rows: Sequence[Sequence[int]]) -> dict[int, tuple[int, bool]]:
    """Return, by member with wrong results, the member's first wrong row, and whether it is a tie.

    A tie is a row without a majority: any of the members named for it may be wrong. rows: for each
    result, the hashes of all members of a data-parallel group, (results, members). A member that
    was outvoted in a row has no vote in later rows.
    """
    voters = list(range(len(rows[0]))) if rows else []
    wrong: dict[int, tuple[int, bool]] = {}
    for number, row in enumerate(rows):
        common, votes = Counter(row[member] for member in voters).most_common(1)[0]
        if votes == len(voters):
            continue  # all voters have the same result
        if 2 * votes <= len(voters):  # a tie: no later row can tell which member is wrong
            return wrong | dict.fromkeys(voters, (number, True))
        outvoted = [member for member in voters if row[member] != common]
        for member in outvoted:
            wrong[member] = (number, False)
            voters.remove(member)
    return wrong


def named(reports: Sequence[Any], axes: dict[str, int]) -> list[tuple[int, bool, str]]:
    """Return the ranks that computed a wrong result themselves, and their first wrong results.

    A rank has (rank, whether its first wrong result is a tie, the result's name).

    reports: by rank, the place of its first wrong result, whether it is a tie, and the result's
    name; None if no result is wrong. A rank's wrong bits spread later to other ranks of its stage
    and replica, so of these ranks only those with the earliest wrong result are named.
    """
    replicas: dict[tuple[int, int], list[int]] = {}  # by (stage, replica): ranks that report
    for rank, report in enumerate(reports):
        if report is not None:
            place = coordinates(rank, axes)
            replicas.setdefault((place["pp"], place["dp"]), []).append(rank)
    culprits = []
    for ranks in replicas.values():
        earliest = min(reports[rank][0] for rank in ranks)
        for rank in ranks:
            place, tied, result = reports[rank]
            if place == earliest:
                culprits.append((rank, tied, result))
    return culprits


@contextmanager
def observed(stage: Stage, results: Results) -> Iterator[None]:
    """Inside this context, `results` notes which layer of `stage` runs, and in which direction."""
    handles = []
    results.enter(f"stage {stage.spec.index}", "")
    for name, part in _layers(stage):
        enter_forward = partial(results.enter, name, "")
        handles.append(part.register_forward_pre_hook(enter_forward))
        enter_backward = partial(results.enter, name, " in the backward pass")
        handles.append(part.register_forward_hook(partial(_observe_gradient, enter_backward)))
    yield
    for handle in handles:
        handle.remove()


def _observe_gradient(
    entered: Callable[..., None], part: nn.Module, inputs: tuple, output: Tensor
) -> None:
    """Let autograd call `entered`, which notes the layer's name, when it reaches the output."""
    if output.requires_grad:
        output.register_hook(lambda _: entered())


def _layers(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """Yield each layer of a stage: its name, with the block's number in the model, and module."""
    if stage.embedding is not None:
        yield "embedding", stage.embedding
    blocks: Iterable[tuple[int, Any]] = stage.numbered_blocks()
    for number, block in blocks:
        for name, mixer in block.mixers():
            yield f"blocks.{number}.{name}", mixer
        if block.has_mlp:
            yield f"blocks.{number}.mlp", block.mlp
    if stage.head is not None:
        yield "head", stage.head


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Inside this context a GPU runs only kernels that give the same bits for the same inputs."""
    if device.type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def last_clean(path: Path, begin: int) -> int:
    """Return the last step up to `begin` whose audit found nothing, or -1 without such a step.

    path: the file audits.jsonl, which may be missing. begin: the step after which the run goes on.
    A row without the key "finding" marks a start of the ranks from the row's step: audits of later
    steps that stand above this row were made before the run went back, so they do not count.
    """
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        rows = read_rows(read_regular(path, MOST_OF_ROWS))
    clean = [-1]  # the steps whose audits found nothing
    for row in [*rows, {"iteration": begin}]:  # the last row stands for the start that begins now
        step = row.get("iteration")
        if not isinstance(step, int):
            continue
        if "finding" not in row:
            clean = [earlier for earlier in clean if earlier <= step]
        elif row["finding"] == "":
            clean.append(step)
    return clean[-1]
