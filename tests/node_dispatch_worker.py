"""Runs an MoE layer with one copy of a token to a node, and with one for each expert.

    mpirun -n 4 python tests/node_dispatch_worker.py jobs.json results.json

A job is a dictionary of `Job`. Every rank draws its own tokens; the result has, over all ranks, the
bytes that went to other nodes and to other ranks of a node, and how far the layer's output and
gradients are from those in fp64 with one copy for each expert.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import golden_worker
import torch
from torch import Tensor

from architecture import dispatch
from architecture.shape import ModelShape
from config.run_options import Training
from distributed.collectives import Group
from distributed.context import Context
from distributed.mesh import Mesh
from layers.experts import ExpertMLP
from model import ACTIVATIONS
from parallel import ParamFactory


class Job(NamedTuple):
    """A layer and where its ranks are. nodes: a letter for each rank, its node. tokens: of each
    rank, in its order. evenly: the experts of tokens are drawn, as by a balanced router.
    """

    nodes: str
    tokens: list[int]
    experts: int = 8
    k: int = 2
    hidden: int = 16
    groups: int = 1
    groups_per_token: int = 1
    precision: str = "float64"
    evenly: bool = False


def model_of(job: Job) -> ModelShape:
    return ModelShape(
        layers=1,
        hidden=job.hidden,
        heads=1,
        experts=job.experts,
        experts_per_token=job.k,
        router_normalised=job.k > 1,  # else the router's gradient is rounding alone
        expert_ffn_hidden=8,
        activation="swiglu",
        bias=False,
        router_groups=job.groups,
        router_groups_per_token=job.groups_per_token,
    )


class Counted:
    """The bytes that this rank has sent, by "across" nodes and "within" its node."""

    def __init__(self, nodes: str, rank: int):
        self.nodes, self.rank = nodes, rank
        self.bytes = {"across": 0, "within": 0}

    @contextmanager
    def all_to_alls(self) -> Iterator[None]:
        """Count those inside the `with`."""
        original = Group.all_to_all

        def counted(group: Group, output: Tensor, source: Tensor, rows=None):
            blocks = rows[1] if rows else [len(source) // group.size] * group.size
            for member, block in zip(group.ranks, blocks, strict=True):
                apart = self.nodes[member] != self.nodes[self.rank]
                if member != self.rank:
                    size = source.shape[1:].numel() * source.itemsize
                    self.bytes["across" if apart else "within"] += block * size
            return original(group, output, source, rows)

        Group.all_to_all = counted
        try:
            yield
        finally:
            Group.all_to_all = original


def run_layer(
    job: Job, context: Context, once: bool, chosen: list[Tensor], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, int], Mesh]:
    """Run a layer forward and backward; return output and gradients, bytes, and the mesh.

    Weights and tokens have values of the job's precision in every `dtype`.
    """
    model, rounded = model_of(job), getattr(torch, job.precision)
    sends_once = partial(dispatch.sends_once, model) if once else lambda nodes: False
    axes = {"pp": 1, "dp": context.size, "cp": 1, "tp": 1}
    mesh = Mesh(axes, context, ep=context.size, sends_once=sends_once)
    factory = ParamFactory(mesh, dtype, training=Training(init_std=0.3))
    layer = ExpertMLP(factory, "mlp", model, 0.3, ACTIVATIONS["swiglu"])
    layer.to(rounded).to(dtype)
    generator = torch.Generator().manual_seed(context.rank)
    shape = (job.tokens[context.rank], 1, job.hidden)
    x, target = (torch.randn(shape, generator=generator).to(rounded).to(dtype) for _ in range(2))
    x.requires_grad_()
    counted = Counted(job.nodes, context.rank)
    with counted.all_to_alls():
        y = layer(x, chosen)
        y.backward(target)
    found = {"output": y.detach(), "input": x.grad, "router": layer.router.weight.grad}
    held = layer.held_experts
    found |= {"up": held.up.grad, "down": held.down.grad}
    return found, counted.bytes, mesh


def drawn_experts(job: Job, rank: int) -> Tensor:
    """Return k experts of random groups for each token, ascending: (tokens, k)."""
    generator = torch.Generator().manual_seed(1000 + rank)
    tokens = job.tokens[rank]
    groups = torch.rand(tokens, job.groups, generator=generator).topk(job.groups_per_token, -1)
    in_groups = torch.zeros(tokens, job.groups).scatter_(-1, groups.indices, 1.0)
    drawn = torch.rand(tokens, job.experts, generator=generator)
    drawn += in_groups.repeat_interleave(job.experts // job.groups, -1)  # others are below 1
    return drawn.topk(job.k, -1).indices.sort(-1).values


def error(found: Tensor, exact: Tensor) -> float:
    """Sum of squares of the differences."""
    return (found.double() - exact.double()).square().sum().item()


def run_job(values: dict, context: Context) -> dict:
    job = Job(**values)
    context.places = [dataclasses.replace(p, node=n) for p, n in zip(context.places, job.nodes)]
    dtype = getattr(torch, job.precision)
    chosen: list[Tensor] = []
    if job.evenly:
        chosen.append(drawn_experts(job, context.rank))
    ways = {
        "once": run_layer(job, context, True, chosen, dtype),
        "again": run_layer(job, context, True, chosen, dtype),
        "often": run_layer(job, context, False, chosen, dtype),
    }
    exact, _, _ = run_layer(job, context, False, chosen, torch.float64)
    mesh = ways["once"][2]
    own: dict = {
        "across": mesh.experts_across.ranks,
        "within": mesh.experts_within.ranks,
        "same_bits": all(torch.equal(x, ways["again"][0][n]) for n, x in ways["once"][0].items()),
        "norms": {name: x.square().sum().item() for name, x in exact.items()},
    }
    for way in ("once", "often"):
        found, sent, _ = ways[way]
        own[way] = sent
        own[f"{way}_errors"] = {name: error(x, exact[name]) for name, x in found.items()}
    every: list = [None] * context.size
    torch.distributed.all_gather_object(every, own)
    return summary(every)


def summary(every: list[dict]) -> dict:
    """Bytes and relative errors (root mean square) over all ranks, and the groups of each rank."""
    result: dict = {name: [of_rank[name] for of_rank in every] for name in ("across", "within")}
    result["same_bits"] = all(of_rank["same_bits"] for of_rank in every)
    norms = {n: sum(of_rank["norms"][n] for of_rank in every) for n in every[0]["norms"]}
    for way in ("once", "often"):
        sides = every[0][way]
        result[way] = {side: sum(of_rank[way][side] for of_rank in every) for side in sides}
        errors = [of_rank[f"{way}_errors"] for of_rank in every]
        result[f"{way}_errors"] = {
            name: (sum(of_rank[name] for of_rank in errors) / max(norm, 1e-300)) ** 0.5
            for name, norm in norms.items()
        }
    return result


if __name__ == "__main__":
    dispatch.LEAST_SPARED = 0.0
    golden_worker.run_jobs(run_job)
