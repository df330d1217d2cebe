"""One rank of a peer of Trine in benchmarks/peers.py: a GPT in plain PyTorch and torch's own parts.

    RANK=0 WORLD_SIZE=2 python benchmarks/peer_torch.py JSON

plain      a loop on one rank
ddp        DistributedDataParallel; zero1: with ZeroRedundancyOptimizer
dtensor    DTensor
hand       tensor parallelism by hand (peer_by_hand.py)
1f1b, zb   torch.distributed.pipelining; with tp, DTensor inside of a stage

Every peer is written for speed: fused AdamW, gradients freed to None, meta initialisation, the loss
divided before the backward instead of gradients after it, one collective where torch has one.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peer_by_hand import TensorParallelByHand
from peer_worker import CLIP, Answers, Batch, BlockForward, Shape, adamw, batches, fill, serve
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "zb": pipelining.ScheduleInterleavedZeroBubble,
}

EXPERTS = {"hf-eager": "eager", "hf-grouped": "grouped_mm"}  # transformers' experts


# ---- The model -----------------------------------------------------------------------------------


class Block(BlockForward):
    """x + attention(norm(x)), then x + MLP(norm(x)): (b, s, h); q, k and v are rows by heads."""

    def __init__(self, h: int, heads: int):
        super().__init__()
        self.d = h // heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)


class GPT(nn.Module):
    """The blocks of a range, and the ends of the model that this part has; logits at its end."""

    def __init__(self, shape: Shape, blocks: range, first: bool = True, last: bool = True):
        super().__init__()
        h = shape.hidden
        self.tokens = nn.Embedding(shape.vocab, h) if first else None
        self.positions = nn.Embedding(shape.seq, h) if first else None
        self.blocks = nn.ModuleDict({str(i): Block(h, shape.heads) for i in blocks})
        self.norm = nn.LayerNorm(h) if last else None
        self.head = nn.Linear(h, shape.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions.weight
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss over all tokens: logits (b, s, V), labels (b, s)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(model_on_meta: GPT, weights: str) -> GPT:
    """The model with its initial values, in whatever kind of tensor its parameters are."""

    def place(whole: Tensor, p: nn.Parameter) -> Tensor:
        if not isinstance(p.data, DTensor):
            return whole
        return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)

    model = model_on_meta.to_empty(device="cpu")
    fill(model, weights, place)
    return model


def tensor_parallel(model: GPT, mesh: DeviceMesh) -> GPT:
    """The model by DTensor's plans; logits stay cut over the vocabulary."""
    plan: dict = {}
    if model.tokens is not None:
        plan["tokens"] = RowwiseParallel(input_layouts=Replicate())
    if model.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for i in model.blocks:
        plan |= {f"blocks.{i}.{name}": ColwiseParallel() for name in ("qkv", "up")}
        plan |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("out", "down")}
    return parallelize_module(model, mesh, plan)


# ---- Steps ---------------------------------------------------------------------------------------


def clip(parameters, pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """Clip by the norm over all ranks, which it returns: one norm for each kind of tensor, since
    torch takes no two in one call; pipeline: the ranks that hold other stages.
    """
    kinds: dict[type, list] = {}
    for p in parameters:
        kinds.setdefault(type(p.data), []).append(p)
    square = torch.zeros(())
    for members in kinds.values():
        norm = nn.utils.get_total_norm([p.grad for p in members], foreach=True)
        square += (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    if pipeline is not None:
        dist.all_reduce(square, group=pipeline)
    norm = square.sqrt_()
    for members in kinds.values():
        nn.utils.clip_grads_with_norm_(members, CLIP, norm, foreach=True)
    return norm


class Loop:
    """A model that every rank holds or holds parts of, micro-batch after micro-batch."""

    def __init__(
        self,
        model: nn.Module,
        synchronise: Callable[[bool], object] = bool,
        around: Callable = contextlib.nullcontext,
        optimizer=torch.optim.AdamW,
    ):
        """synchronise: is told before each micro-batch whether it is the last."""
        self.model, self.synchronise, self.around = model, synchronise, around
        self.parameters = list(model.parameters())
        self.optimizer = optimizer(**adamw(self.parameters))

    def step(self, batches: list[Batch]) -> tuple[Tensor, Tensor]:
        """One optimizer step; the mean loss over this rank's batches, and the gradient norm."""
        total = torch.zeros(())
        for i, (tokens, labels) in enumerate(batches):
            self.synchronise(i == len(batches) - 1)
            with self.around():
                loss = loss_of(self.model(tokens), labels) / len(batches)
                loss.backward()
            loss = loss.detach()
            total += loss.to_local() if isinstance(loss, DTensor) else loss
        norm = clip(self.parameters)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm


class PipelineLoop:
    """This rank's stage of torch's pipeline, with tensor parallelism inside if tp > 1."""

    def __init__(self, shape: Shape, weights: str, kind: str, blocks: list[int], tp: int):
        """blocks: of each stage, in the model's order."""
        ranks = dist.get_world_size() // tp
        mesh = init_device_mesh("cpu", (ranks, tp), mesh_dim_names=("pp", "tp"))
        rank, self.group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
        self.first, self.last = rank == 0, rank == ranks - 1
        self.around = loss_parallel if tp > 1 else contextlib.nullcontext
        begin = sum(blocks[:rank])
        with torch.device("meta"):
            model = GPT(shape, range(begin, begin + blocks[rank]), self.first, self.last)
        if tp > 1:
            tensor_parallel(model, mesh["tp"])
        model = build(model, weights)
        self.parameters = list(model.parameters())
        place = rank, ranks, torch.device("cpu")
        stage = pipelining.PipelineStage(model, *place, group=self.group)
        count = shape.micro_batches

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return loss_of(logits, labels) / count

        stages = stage if kind == "1f1b" else [stage]
        self.schedule = SCHEDULES[kind](stages, count, loss_fn=loss, scale_grads=False)
        self.optimizer = torch.optim.AdamW(**adamw(self.parameters))

    def step(self, batches: list[Batch]) -> tuple[Tensor | None, Tensor]:
        """One optimizer step; the mean loss if this rank has the last stage, and the norm."""
        tokens, labels = (torch.cat(part) for part in zip(*batches))
        losses: list[Tensor] = []
        with self.around():
            self.schedule.step(
                *((tokens,) if self.first else ()),
                target=labels if self.last else None,
                losses=losses if self.last else None,
                return_outputs=False,
            )
        norm = clip(self.parameters, self.group)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in losses]
        return torch.stack(parts).detach().sum() if self.last else None, norm


def data_parallel(kind: str, model: GPT) -> Loop:
    """DistributedDataParallel, with ZeroRedundancyOptimizer for zero1."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def synchronise(last: bool) -> None:
        parallel.require_backward_grad_sync = last

    def sharded(params, **more) -> ZeroRedundancyOptimizer:
        wanted = {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True}
        return ZeroRedundancyOptimizer(params, **wanted, **more)

    return Loop(parallel, synchronise, optimizer=sharded if kind == "zero1" else torch.optim.AdamW)


def make(job: dict, shape: Shape):
    """The peer that a job names, ready to step."""
    kind, weights, tp = job["kind"], job["weights"], job["tp"]
    if kind in SCHEDULES:
        return PipelineLoop(shape, weights, kind, job["blocks"], tp)
    if kind == "hand":
        return TensorParallelByHand(shape, weights)
    if kind == "hand-experts":
        from peer_experts import ExpertParallelByHand

        return ExpertParallelByHand(shape, weights)
    if kind in EXPERTS:
        from peer_transformers import qwen3_moe

        return Loop(qwen3_moe(shape, weights, EXPERTS[kind]))
    with torch.device("meta"):
        model = GPT(shape, range(shape.layers))
    if kind == "dtensor":
        tensor_parallel(model, init_device_mesh("cpu", (tp,)))
        return Loop(build(model, weights), around=loss_parallel)
    model = build(model, weights)
    return Loop(model) if kind == "plain" else data_parallel(kind, model)


def main() -> None:
    """Be one rank of the peer."""
    answers, job = Answers(), json.loads(sys.argv[1])
    shape, dp = Shape(**job["shape"]), job["dp"]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if ranks > 1:
        place = {"rank": rank, "world_size": ranks, "init_method": f"file://{job['meeting']}"}
        dist.init_process_group("gloo", **place)
    peer = make(job, shape)
    barrier = dist.barrier if ranks > 1 else int
    serve(answers, peer.step, barrier, lambda step: batches(shape, step, dp, rank % dp))
    os._exit(0)  # gloo's threads abort one exit in eight after DTensor


if __name__ == "__main__":
    main()
