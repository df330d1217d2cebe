"""--zero 3: weights, gradients and state sharded over the replicas, by torch's fully_shard.

torch gathers a block's weights before it runs and frees them after, forward and backward, and
reduce-scatters its gradients in every micro-batch. Tensor parallelism stays inside: what is
sharded over the replicas is each tensor rank's own part. torch decides when to communicate, and
calls the replicas' `Group` for it: so the flight recorder knows every gather and every sum.
Source: torch.distributed.fsdp.fully_shard; arXiv 2304.11277 for the idea.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from config.schema import Training
from distributed.collectives import Handle
from distributed.mesh import Mesh
from optim.buckets import Key, ParamGroup, key_of
from parallel import ParamFactory


@dataclass
class GroupCollective:
    """A collective of a `Group` in the form in which fully_shard calls one."""

    start: Callable[[Tensor, Tensor], Handle]  # all_gather or reduce_scatter of the group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for an input or an output of that many elements."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> None:
        """Start the collective and wait for it, on a GPU in the stream that is current.

        options: torch's process group, operation (always a sum) and async_op are the group's.
        """
        self.start(output_tensor, input_tensor).wait()


class FullyShardedGroup(ParamGroup):
    """Parameters of one key, each owned by rows: torch holds them in fp32 and casts them itself."""

    def __init__(self, key: Key, parameters: list, mesh: Mesh) -> None:
        """parameters: sharded, each with its `spec` and the whole local tensor's `drawn_shape`."""
        super().__init__(key, mesh, sharded=True)
        self.parameters = parameters
        for p in parameters:
            flat = p.to_local().detach().view(-1)
            replicas = p.device_mesh
            rows = -(-p.shape[0] // replicas.size())  # torch gives equal runs, the last ones less
            row = min(p.shape[0], replicas.get_local_rank() * rows)
            start = row * p.shape[1:].numel()
            if flat.numel():
                place = (len(self.masters), 0)
                self.add_shard(p.spec, p.drawn_shape, start, start + flat.numel(), place)
            self.masters.append(flat)

    def own_gradients(self) -> list[Tensor]:
        """Gradients of this rank's rows, one flat tensor for each parameter."""
        return [p.grad.to_local().view(-1) for p in self.parameters]

    def clear_gradients(self) -> list[Tensor]:
        """Free the gradients; no buffer stays."""
        for p in self.parameters:
            p.grad = None
        return []

    def masters_to_round(self) -> list[tuple[Tensor, Tensor]]:
        """None: torch rounds what it gathers."""
        return []

    def all_gather_params(self) -> None:
        """Nothing: torch gathers weights when it needs them."""


def block_sharder(factory: ParamFactory, training: Training) -> Callable[[nn.Module], None]:
    """What shards a part of a stage over the replicas: each block when it has been drawn, so that
    the whole stage is on no GPU at any time, and in the end the stage with all that is left.
    """
    handle: Any = factory.mesh.replicas.handle  # not None: there are several replicas
    device_mesh = DeviceMesh.from_group(handle, factory.device.type)
    exact = torch.promote_types(factory.dtype, torch.float32)
    sums = torch.bfloat16 if training.grad_dtype == "bf16" else exact
    policy = MixedPrecisionPolicy(factory.dtype, sums, cast_forward_inputs=False)

    def shard(part: nn.Module) -> None:
        """Shard the parameters of a part that are not sharded yet; each keeps its spec."""
        drawn = {}
        for name, p in part.named_parameters():
            if not isinstance(p, DTensor):  # else it is of a block, which is sharded
                drawn[name] = p.spec, tuple(p.shape)
                # Many rows are cut into shards of similar size: (2, f, h) is a matrix of 2 f rows.
                p.data = p.data.flatten(0, -2) if p.spec.decay else p.data.flatten()
        fully_shard(part, mesh=device_mesh, mp_policy=policy)
        for name, p in part.named_parameters():
            if name in drawn:
                p.spec, p.drawn_shape = drawn[name]

    return shard


def shard_fully(
    stage: nn.Module, factory: ParamFactory, training: Training
) -> list[FullyShardedGroup]:
    """The groups of a stage whose blocks `factory.shard` has sharded; the rest is sharded here."""
    if factory.shard is None:
        raise ValueError("the stage's blocks were not sharded when they were drawn")
    factory.shard(stage)
    replicas = factory.mesh.replicas
    # torch declares their type in a module of its own alone.
    all_gather: Any = GroupCollective(replicas.at_once.all_gather)
    reduce_scatter: Any = GroupCollective(replicas.at_once.reduce_scatter)
    for part in stage.modules():
        if isinstance(part, FSDPModule):  # the loss is divided by the global batch already
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_custom_all_gather(all_gather)
            part.set_custom_reduce_scatter(reduce_scatter)
    by_key: dict[Key, list[nn.Parameter]] = {}
    for p in stage.parameters():
        by_key.setdefault(key_of(p.spec, training.optimizer), []).append(p)
    return [FullyShardedGroup(key, by_key[key], factory.mesh) for key in sorted(by_key)]
