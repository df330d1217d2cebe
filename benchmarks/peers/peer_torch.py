"""One rank of a peer of Trine in peers.py: a GPT in plain PyTorch and torch's own parts.

    RANK=0 WORLD_SIZE=2 python benchmarks/peers/peer_torch.py JSON

plain      a loop on one rank
ddp        DistributedDataParallel; zero1: with ZeroRedundancyOptimizer
dtensor    DTensor
hand       tensor parallelism by hand (peer_by_hand.py)
1f1b, zb   torch.distributed.pipelining; with tp, DTensor inside of a stage

Every peer is written for speed: fused AdamW, gradients freed to None, meta initialisation, the loss
divided before the backward instead of gradients after it, one collective where torch has one.
"""

import contextlib
import functools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.peers import peer_by_hand, peer_experts, peer_transformers
from benchmarks.peers.peer_worker import (
    GPT,
    Answers,
    Batch,
    Loop,
    Shape,
    batches,
    by_kind,
    fill,
    mean_loss,
    serve,
)

SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "zb": pipelining.ScheduleInterleavedZeroBubble,
}

# Transformers' models, and its kernels of their experts.
TRANSFORMERS = {"hf": None, "hf-eager": "eager", "hf-grouped": "grouped_mm"}


# ---- The model -----------------------------------------------------------------------------------


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


def norm_over_stages(
    parameters: list[nn.Parameter], pipeline: dist.ProcessGroup | None = None
) -> Tensor:
    """The norm over all ranks; pipeline: the ranks that hold other stages."""
    square = torch.zeros(())
    for members in by_kind(parameters).values():
        norm = nn.utils.get_total_norm([p.grad for p in members], foreach=True)
        square += (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    if pipeline is not None:
        dist.all_reduce(square, group=pipeline)
    return square.sqrt_()


def loop(model: nn.Module, **options) -> Loop:
    """The loop of a model that gives logits."""

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(model(tokens), labels)

    return Loop(model, loss, norm_over_stages, **options)


class PipelineLoop(Loop):
    """This rank's stage of torch's pipeline, with tensor parallelism inside if tp > 1."""

    def __init__(self, shape: Shape, weights: str, kind: str, blocks: list[int], tp: int):
        """blocks: of each stage, in the model's order."""
        ranks = dist.get_world_size() // tp
        mesh = init_device_mesh("cpu", (ranks, tp), mesh_dim_names=("pp", "tp"))
        rank = mesh["pp"].get_local_rank()
        group = mesh["pp"].get_group()
        self.first = rank == 0
        self.last = rank == ranks - 1
        begin = sum(blocks[:rank])
        with torch.device("meta"):
            model = GPT(shape, range(begin, begin + blocks[rank]), self.first, self.last)
        if tp > 1:
            tensor_parallel(model, mesh["tp"])
        model = build(model, weights)
        self.around = loss_parallel if tp > 1 else contextlib.nullcontext
        count = shape.micro_batches

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            return mean_loss(logits, labels) / count

        stage = pipelining.PipelineStage(model, rank, ranks, torch.device("cpu"), group=group)
        stages = stage if kind == "1f1b" else [stage]
        self.schedule = SCHEDULES[kind](stages, count, loss_fn=loss, scale_grads=False)
        super().__init__(model, loss, functools.partial(norm_over_stages, pipeline=group))

    def passes(self, batches: list[Batch]) -> Tensor | None:
        """All passes of the schedule; the mean loss if this rank has the last stage."""
        tokens, labels = (torch.cat(part) for part in zip(*batches))
        losses: list[Tensor] = []
        ends = {"target": labels, "losses": losses} if self.last else {}
        with self.around():
            self.schedule.step(*([tokens] * self.first), return_outputs=False, **ends)
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in losses]
        return torch.stack(parts).detach().sum() if self.last else None


def data_parallel(kind: str, model: GPT) -> Loop:
    """DistributedDataParallel, with ZeroRedundancyOptimizer for zero1."""
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def before(last: bool) -> None:
        parallel.require_backward_grad_sync = last

    sharded = functools.partial(
        ZeroRedundancyOptimizer,
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
    )
    return loop(
        parallel, before=before, optimizer=sharded if kind == "zero1" else torch.optim.AdamW
    )


def make(job: dict, shape: Shape) -> Loop:
    """The peer that a job names, ready to step."""
    kind, weights, tp = job["kind"], job["weights"], job["tp"]
    if kind in SCHEDULES:
        return PipelineLoop(shape, weights, kind, job["blocks"], tp)
    if kind == "hand":
        return peer_by_hand.tensor_parallel_loop(shape, weights)
    if kind == "hand-experts":
        return peer_experts.expert_parallel_loop(shape, weights)
    if kind in TRANSFORMERS:
        return loop(peer_transformers.transformers_model(shape, weights, TRANSFORMERS[kind]))
    with torch.device("meta"):
        model = GPT(shape, range(shape.layers))
    if kind == "dtensor":
        tensor_parallel(model, init_device_mesh("cpu", (tp,)))
        made = loop(build(model, weights))
        made.passes = loss_parallel()(made.passes)
        return made
    model = build(model, weights)
    return loop(model) if kind == "plain" else data_parallel(kind, model)


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
