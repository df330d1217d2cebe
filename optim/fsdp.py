"""--zero 3: weights, gradients and state sharded over the replicas, by torch's fully_shard.

torch gathers a block's weights before it runs and frees them after, forward and backward, and
reduce-scatters its gradients in every micro-batch. Tensor parallelism stays inside: what is
sharded over the replicas is each tensor rank's own part. Communication is torch's, not
collectives.py. Source: torch.distributed.fsdp.fully_shard; arXiv 2304.11277 for the idea.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from config.schema import Training
from distributed.mesh import Mesh
from optim.buckets import Key, ParamGroup, key_of
from parallel import ParamFactory, ParamSpec


class FullyShardedGroup(ParamGroup):
    """Parameters of one key, each owned by rows: torch holds them in fp32 and casts them itself."""

    def __init__(self, key: Key, parameters: list, mesh: Mesh) -> None:
        """parameters: (sharded parameter, spec, shape of the whole local tensor) of each."""
        super().__init__(key, mesh, sharded=True)
        self.parameters = [p for p, _, _ in parameters]
        for p, spec, shape in parameters:
            flat, replicas = p.to_local().detach().view(-1), p.device_mesh
            rows = -(-p.shape[0] // replicas.size())  # torch gives equal runs, the last ones less
            row = min(p.shape[0], replicas.get_local_rank() * rows)
            start = row * p.shape[1:].numel()
            if flat.numel():
                self.add_shard(spec, shape, start, start + flat.numel(), (len(self.masters), 0))
            self.masters.append(flat)

    def own_gradients(self) -> list[Tensor]:
        """Gradients of this rank's rows, one flat tensor for each parameter."""
        return [p.grad.to_local().view(-1) for p in self.parameters]

    def clear_gradients(self) -> None:
        """Free the gradients."""
        for p in self.parameters:
            p.grad = None

    def all_gather_params(self) -> None:
        """Nothing: torch gathers weights when it needs them."""


def shard_fully(
    stage: nn.Module, factory: ParamFactory, training: Training
) -> list[FullyShardedGroup]:
    """Shard a stage's parameters over the replicas, block by block; collective over these."""
    facts = {}
    for name, p in stage.named_parameters():
        facts[name] = (p.spec, tuple(p.shape))
        # Many rows are cut into shards of similar size: (2, f, h) is one matrix of 2 f rows.
        p.data = p.data.flatten(0, -2) if p.spec.decay else p.data.flatten()
    handle: Any = factory.mesh.replicas.handle  # not None: there are several replicas
    device_mesh = DeviceMesh.from_group(handle, factory.device.type)
    exact = torch.promote_types(factory.dtype, torch.float32)
    sums = torch.bfloat16 if training.grad_dtype == "bf16" else exact
    policy = MixedPrecisionPolicy(factory.dtype, sums, cast_forward_inputs=False)
    for part in (*stage.get_submodule("blocks").children(), stage):
        fully_shard(part, mesh=device_mesh, mp_policy=policy)
    for part in stage.modules():
        if isinstance(part, FSDPModule):  # the loss is divided by the global batch already
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    by_key: dict[Key, list[tuple[nn.Parameter, ParamSpec, tuple[int, ...]]]] = {}
    for name, p in stage.named_parameters():
        spec, shape = facts[name]
        by_key.setdefault(key_of(spec, training.optimizer), []).append((p, spec, shape))
    return [FullyShardedGroup(key, by_key[key], factory.mesh) for key in sorted(by_key)]
