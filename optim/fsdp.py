"""--zero 3: weights, gradients and state sharded over the replicas, by torch's fully_shard.

In the forward and in the backward pass, torch all-gathers a block's weights before the block runs
and frees them afterwards (reshard_after_forward false: after the backward pass only). It
reduce-scatters the block's gradients in every micro-batch or, with sync_each_batch false, in the
last one of a step: until then each rank holds sums of all its gradients. Each tensor rank's part of
a weight is sharded over the replicas. torch decides when to communicate, but calls the `Group` of
the replicas for it, so that the flight recorder records every all-gather and reduce-scatter.
Source: torch.distributed.fsdp.fully_shard; arXiv 2304.11277 for the idea.

A part below is a module that is sharded by itself: a block, the experts of a block, or a stage.
Read zero.py and optim/buckets.py first: Optimizer has a FullyShardedGroup in place of a Bucket.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from config.schema import Layout, Training
from distributed.collectives import Group, Handle
from distributed.mesh import Mesh
from optim.buckets import Key, ParamGroup, key_of
from optim.precision import DTYPES
from parallel import ParamFactory, exact_dtype


@dataclass
class GroupCollective:
    """A collective of a `Group`, with the methods that fully_shard calls on a custom collective."""

    start: Callable[[Tensor, Tensor], Handle]  # all_gather or reduce_scatter of the group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of `size`, which torch uses as input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> None:
        """Start the collective and wait; torch calls this to gather weights or to sum gradients.

        On a GPU the collective runs on the current stream, and the host does not wait. options:
        torch's process group, operation and async_op. They are ignored, because `start` has a group
        already and always sums.
        """
        self.start(output_tensor, input_tensor).wait()


class FullyShardedGroup(ParamGroup):
    """Parameters of one key; each replica owns some rows of every parameter, in fp32 or fp64.

    The masters are torch's shards themselves: torch casts weights to the compute precision.
    """

    def __init__(self, key: Key, parameters: list, mesh: Mesh) -> None:
        """Record which rows of each parameter this rank owns, and take them as masters.

        parameters: DTensors with the attributes `spec` and `drawn_shape`. drawn_shape: the shape
        of this tensor rank's part of the parameter before it was sharded.
        """
        super().__init__(key, mesh, sharded=True)
        self.parameters = parameters
        for p in parameters:
            master = p.to_local().detach().view(-1)
            replicas = p.device_mesh
            # torch gives every rank this number of rows; the last ranks have fewer rows, or none:
            # 5 rows on 4 ranks are cut into 2, 2, 1 and 0 rows.
            rows_per_rank = -(-p.shape[0] // replicas.size())
            first_row = min(p.shape[0], replicas.get_local_rank() * rows_per_rank)
            start = first_row * p.shape[1:].numel()
            stop = start + master.numel()
            if master.numel():
                index = len(self.masters)
                self.add_shard(p.spec, p.drawn_shape, start, stop, place=(index, 0))
            self.masters.append(master)

    def own_gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's rows, one flat tensor for each parameter.

        torch has summed them over the replicas already. A parameter on which the loss does not
        depend has no gradient, which is a gradient of zeros here.
        """
        return [
            torch.zeros_like(p.to_local()).view(-1)
            if p.grad is None
            else p.grad.to_local().view(-1)
            for p in self.parameters
        ]

    def clear_gradients(self) -> list[Tensor]:
        """Free the gradients after a step. Return no buffers to fill with zeros: none remain."""
        for p in self.parameters:
            p.grad = None
        return []

    def masters_to_round(self) -> list[tuple[Tensor, Tensor]]:
        """Return no pairs for the caller to round: torch rounds weights when it gathers them."""
        return []

    def all_gather_params(self) -> None:
        """Do nothing: torch gathers a block's weights just before the block runs."""


class LastBackward:
    """Has torch reduce the gradients of a stage in the last backward pass of each step only.

    Made for sync_each_batch false. Until then torch adds up whole gradients in the precision in
    which it reduces them. Source: FSDPModule.set_requires_gradient_sync.
    """

    def __init__(self, stage: Any) -> None:
        """Watch the backward passes of a stage that `shard_fully` has sharded."""
        self.stage = stage
        self.left = 1  # the backward passes that are left in the step
        stage.register_forward_hook(self._watch)

    def begin_step(self, micro_batches: int) -> None:
        """Prepare for the backward passes of a step, one for each micro-batch."""
        self.left = micro_batches

    def _watch(self, stage: nn.Module, inputs: Any, result: Tensor) -> None:
        """Have `_count` called when the backward pass from a stage's result begins."""
        if result.requires_grad:  # not in an evaluation
            result.register_hook(self._count)

    def _count(self, gradient: Tensor) -> None:
        """Have torch reduce in the backward pass that begins now if it is the step's last one."""
        self.left -= 1
        self.stage.set_requires_gradient_sync(self.left == 0)


def block_sharder(
    factory: ParamFactory, training: Training, layout: Layout
) -> Callable[[nn.Module], None]:
    """Return the function that shards a module over the replicas: `ParamFactory.shard`.

    Stage calls this function with each block when the block's weights have been drawn, so that no
    GPU ever holds a whole stage. At last `shard_fully` calls it with the stage, to shard the
    parameters outside of blocks. Experts are sharded over the ranks that hold the same experts, or
    are left as they are if no other rank holds them.
    """
    mesh = factory.mesh
    # None: torch frees the weights of all parts but the outermost one, the stage.
    reshard = None if layout.reshard_after_forward else False
    exact = exact_dtype(factory.dtype)
    sum_dtype = DTYPES["bf16"] if training.grad_dtype == "bf16" else exact
    policy = MixedPrecisionPolicy(factory.dtype, sum_dtype, cast_forward_inputs=False)
    # torch needs a DeviceMesh for each group over which it shards. The two groups may be the same:
    # then the dictionary has one entry. A group of one rank gets none: its parts are not sharded.
    groups = dict.fromkeys((mesh.replicas, mesh.expert_replicas))
    device_meshes = {group: _device_mesh(group, factory) for group in groups if group.size > 1}

    def shard_over(replicas: Group, part: nn.Module) -> None:
        """Shard the parameters of a part that `replicas` hold and that are not sharded yet.

        torch replaces the parameters; the new ones get the attributes `spec` and `drawn_shape`.
        """
        drawn = {}  # for each parameter to shard, by name: its spec, and its shape before sharding
        ignored = set()  # parameters that fully_shard must leave as they are
        for name, p in part.named_parameters():
            if isinstance(p, DTensor):  # it belongs to a part that is sharded already
                continue
            # Leave out the constants of routers, which have no gradients, and the parameters of
            # experts if they are reduced over another group than `replicas`.
            if not p.requires_grad or mesh.group(p.spec.reduce_over[0]) is not replicas:
                ignored.add(p)
                continue
            drawn[name] = (p.spec, tuple(p.shape))
            # torch cuts along the first dimension. To get many rows, and so shards of similar
            # size, a weight of shape (2, f, h) becomes a matrix of 2 f rows.
            p.data = p.data.flatten(0, -2) if p.spec.decay else p.data.flatten()
        device_mesh = device_meshes[replicas]
        part.register_forward_hook(_without_views)
        fully_shard(
            part,
            mesh=device_mesh,
            reshard_after_forward=reshard,
            mp_policy=policy,
            ignored_params=ignored,
        )
        for name, p in part.named_parameters():
            if name in drawn:
                p.spec, p.drawn_shape = drawn[name]
        _communicate_over(replicas, part)

    def shard(part: nn.Module) -> None:
        """Shard a block or a stage: first the experts in it, then its other parameters."""
        whole = [m for m in part.modules() if _has_whole_parameters(m)]
        for module in part.modules():
            parameters = module.parameters(recurse=False)
            has_experts = any(p.spec.is_expert for p in parameters if not isinstance(p, DTensor))
            if has_experts and mesh.expert_replicas in device_meshes:
                shard_over(mesh.expert_replicas, module)
        shard_over(mesh.replicas, part)
        for module in whole:
            _show_as_drawn(module)

    return shard


def _has_whole_parameters(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own that are not sharded yet."""
    return any(not isinstance(p, DTensor) for p in module.parameters(recurse=False))


def _show_as_drawn(module: nn.Module) -> None:
    """Have a module see its parameters as it made them while it runs forward: shape and spec.

    torch shards along the first dimension, for which `shard_over` has joined dimensions, and it
    gathers into parameters of its own. In the place of each the module has an attribute of its
    name, a view of the gathered tensor.
    """
    drawn = {}
    for name, p in module.named_parameters(recurse=False):
        if isinstance(p, DTensor):
            drawn[name] = (p.spec, p.drawn_shape)

    def show(module: nn.Module, inputs: Any) -> None:
        """Set the views of the gathered tensors, before the module's forward pass."""
        for name, (spec, shape) in drawn.items():
            view: Any = getattr(module, name).view(shape)
            view.spec = spec
            vars(module)[name] = view

    def hide(module: nn.Module, inputs: Any, result: Any) -> None:
        for name in drawn:
            vars(module).pop(name, None)

    module.register_forward_pre_hook(show)
    # Recomputation ends a forward pass by an exception as soon as it has what it needs.
    module.register_forward_hook(hide, always_call=True)


def _without_views(part: nn.Module, inputs: Any, result: Any) -> Any:
    """Return a part's result, a tensor or a tuple of them, as tensors that are not views.

    A part's forward pass ends with this hook. A linear layer with a bias returns a view. torch puts
    a hook on each tensor, which gathers the weights for the backward pass, and warns of a view,
    since an operation in place on a view would drop the hook.
    """
    if isinstance(result, tuple):
        return tuple(_without_views(part, inputs, tensor) for tensor in result)
    return torch.ops.aten._unsafe_view(result, result.shape)


def _device_mesh(group: Group, factory: ParamFactory) -> DeviceMesh:
    """Return torch's mesh of the ranks of a group, which fully_shard takes in place of a group.

    The group has at least two ranks.
    """
    handle: Any = group.handle  # torch's process group; None only in a group of one rank
    return DeviceMesh.from_group(handle, factory.device.type)


def _communicate_over(replicas: Group, part: Any) -> None:
    """Have a sharded part call this project's collectives over `replicas` in place of torch's own.

    Gradients are summed over the replicas, not averaged: each loss was already divided by the
    number of targets in the whole batch. Called for each part of a stage when --zero 3 shards it.
    """
    part.set_gradient_divide_factor(1.0)
    part.set_force_sum_reduction_for_comms(True)
    part.set_custom_all_gather(GroupCollective(replicas.at_once.all_gather))
    part.set_custom_reduce_scatter(GroupCollective(replicas.at_once.reduce_scatter))


def forget_gathered(stage: Any) -> None:
    """Free the gathered weights of a stage's parts, so that the next pass gathers them anew.

    Called when the shards have been changed outside of an update: torch keeps the weights of the
    last part that ran in a forward pass.
    """
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def shard_fully(
    stage: nn.Module,
    factory: ParamFactory,
    training: Training,
) -> list[FullyShardedGroup]:
    """Shard the parameters of a stage outside its blocks; return the stage's groups, one per key.

    Called when Optimizer is made with --zero 3. The stage has sharded its blocks by `factory.shard`
    already. Raise ValueError if the factory has no such function.
    """
    if factory.shard is None:
        raise ValueError("the stage's blocks were not sharded when they were drawn")
    factory.shard(stage)
    parameters_of: dict[Key, list[nn.Parameter]] = {}
    for p in stage.parameters():
        if isinstance(p, DTensor):
            key = key_of(p.spec, training, factory.mup)
            parameters_of.setdefault(key, []).append(p)
    groups = sorted(parameters_of.items())
    return [FullyShardedGroup(key, parameters, factory.mesh) for key, parameters in groups]
