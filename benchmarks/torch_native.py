"""The same GPT by torch's own parallel parts, as the yardstick of benchmarks/layouts.py.

    torchrun --standalone --nproc-per-node 2 benchmarks/torch_native.py --kind tp --steps 20

tp: DTensor (ColwiseParallel, RowwiseParallel, loss_parallel); pp: torch.distributed.pipelining,
Schedule1F1B; dp: DistributedDataParallel with ZeroRedundancyOptimizer; one: a single rank. Learned
positions, GELU, biases, untied head, fp32, AdamW (fused where the parts allow it), clipping at 1.
Prints the seconds of every step as JSON.
"""

import argparse
import json
import os
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)): (b, s, h)."""

    def __init__(self, h: int, heads: int):
        super().__init__()
        self.d = h // heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.k, self.v, self.out = (nn.Linear(h, h) for _ in range(4))
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        b, s, _ = x.shape
        y = self.norm1(x)
        q, k, v = (m(y).view(b, s, -1, self.d).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """All blocks, or for a pipeline the blocks [first, last) with the ends they touch."""

    def __init__(self, o, first: int, last: int):
        super().__init__()
        self.tokens = nn.Embedding(o.vocab_size, o.hidden) if first == 0 else None
        self.positions = nn.Embedding(o.seq_length, o.hidden) if first == 0 else None
        self.blocks = nn.ModuleList(Block(o.hidden, o.heads) for _ in range(first, last))
        ends = last == o.layers
        self.norm = nn.LayerNorm(o.hidden) if ends else None
        self.head = nn.Linear(o.hidden, o.vocab_size, bias=False) if ends else None

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits, labels):
    """Mean loss over all tokens: logits (b, s, V), labels (b, s)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tensor_parallel(model: GPT, mesh) -> GPT:
    """The model by DTensor's plans; logits stay cut over the vocabulary."""
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(len(model.blocks)):
        plan |= {f"blocks.{i}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("out", "down")}
    return parallelize_module(model, mesh, plan)


def steps(o):
    """Yields a function that does one whole step, for the kind asked for."""
    world = dist.get_world_size() if o.kind != "one" else 1
    mine = o.global_batch_size // (o.micro_batch_size * (world if o.kind == "dp" else 1))
    if o.kind == "pp":
        return pipeline_step(o, mine)
    model = GPT(o, 0, o.layers)
    if o.kind == "tp":
        model = tensor_parallel(model, init_device_mesh("cpu", (world,)))
    if o.kind == "dp":
        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True
        )
    else:  # DTensors and plain tensors cannot share one fused call
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=o.kind == "one")

    def run(batches):
        """One step on this rank's micro-batches, each tokens and labels of (b, s)."""
        for i, (tokens, labels) in enumerate(batches):
            if o.kind == "dp":
                model.require_backward_grad_sync = i == mine - 1
            if o.kind == "tp":
                with loss_parallel():
                    (loss_of(model(tokens), labels) / mine).backward()
            else:
                (loss_of(model(tokens), labels) / mine).backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run, mine


def clip(model) -> None:
    """One norm per kind of tensor: torch refuses DTensors and plain ones in one call."""
    kinds = {}
    for p in model.parameters():
        if p.grad is not None:
            kinds.setdefault(type(p.data), []).append(p)
    for members in kinds.values():
        torch.nn.utils.clip_grad_norm_(members, 1.0)


def pipeline_step(o, mine):
    """A function that does one step of Schedule1F1B, and the micro-batches it takes."""
    rank = dist.get_rank()
    cuts = [0, *[int(cut) for cut in o.cuts.split(",")], o.layers]
    model = GPT(o, cuts[rank], cuts[rank + 1])
    stage = PipelineStage(model, rank, len(cuts) - 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, mine, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run(batches):
        """One step on this rank's micro-batches, each tokens and labels of (b, s)."""
        tokens, labels = (torch.cat(part) for part in zip(*batches))
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels)
        clip(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run, mine


def main() -> None:
    """Time the steps of one kind of parallelism."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("one", "tp", "pp", "dp"), required=True)
    parser.add_argument("--cuts", default="2", help="blocks before each cut of the pipeline")
    sizes = {
        "layers": 4,
        "hidden": 256,
        "heads": 8,
        "seq-length": 256,
        "vocab-size": 8192,
        "micro-batch-size": 2,
        "global-batch-size": 8,
        "steps": 12,
    }
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    o = SimpleNamespace(**vars(parser.parse_args()))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if o.kind != "one":
        dist.init_process_group("gloo")
    run, mine = steps(o)
    seconds = []
    for _ in range(o.steps):
        tokens = torch.randint(o.vocab_size, (mine, o.micro_batch_size, o.seq_length + 1))
        batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
        if o.kind != "one":
            dist.barrier()
        began = time.perf_counter()
        run(batches)
        if o.kind != "one":
            dist.barrier()
        seconds.append(time.perf_counter() - began)
    if o.kind == "one" or dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    if o.kind != "one":
        dist.barrier()
        dist.destroy_process_group()
        os._exit(0)  # gloo's threads abort one exit in eight after DTensor


if __name__ == "__main__":
    main()
