"""How another program cuts its tensors: which elements of the whole a rank has.

    place = place_of(built, layout, rank)               {"tp": (1, 2)}: coordinate and size
    for shard in shards_of(built, program, layout, place, shapes):
        shard.name, shard.elements                      flat indices in the whole tensor
    owned_by(optimizers, parameter)                     the part that a distributed optimizer keeps
    state_of(optimizers, parameter)                     its state, by kind

It is read from what programs leave on their tensors: a DTensor's placements (torchtitan, FSDP 2),
Megatron's attributes `tensor_model_parallel`, `partition_dim` and `partition_stride`, the ranges of
its distributed optimizer. A tensor of one rank's shape is a replica. What cannot be read is asked
for by the tensor's name.
"""

import fnmatch
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from base.errors import ProgramError
from tools.checker.programs import Built, Program, ProgramLayout

Place = dict[str, tuple[int, int]]  # the rank's coordinate on each axis, and the axis's size
PARALLEL_STATE = "megatron.core.parallel_state"
# Axes, and what Megatron's parallel_state calls them.
OF_MEGATRON = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "dp": "data_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
}


@dataclass
class Shard:
    """A parameter of this rank. elements: of the whole tensor of one rank, for each local one.

    name: in the whole program. shape: of the whole.
    """

    name: str
    parameter: Tensor
    elements: np.ndarray
    shape: tuple[int, ...]

    @property
    def local(self) -> Tensor:
        """The values that this rank holds, which may be written to."""
        return local_of(self.parameter.detach())


def local_of(x: Tensor) -> Tensor:
    """Return the values of a tensor that this rank holds."""
    return x.to_local() if isinstance(x, DTensor) else x


def parameters_of(built: Built) -> Iterator[tuple[str, Tensor]]:
    """Yield the global names and the parameters of this rank, each once.

    A parameter of one of several modules has the module's number before its local name: "1.".
    """
    for number, model in enumerate(built.models):
        prefix = f"{number}." if len(built.models) > 1 else ""
        for local, parameter in model.named_parameters():
            yield built.names(f"{prefix}{local}"), parameter


def place_of(built: Built, layout: ProgramLayout, rank: int) -> Place:
    """Return where this rank is on the axes of a layout, as far as the program says it."""
    sizes = layout.axes
    if built.place is not None:
        return {
            axis: (built.place[axis], size) for axis, size in sizes.items() if axis in built.place
        }
    found: Place = {}
    state = sys.modules.get(PARALLEL_STATE)
    if state is not None and state.model_parallel_is_initialized():
        for axis, name in OF_MEGATRON.items():
            size = getattr(state, f"get_{name}_world_size")()
            found[axis] = (getattr(state, f"get_{name}_rank")(), size)
        return {axis: pair for axis, pair in found.items() if pair[1] > 1}
    for _, parameter in parameters_of(built):
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            names, place = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
            found |= {n: (p, mesh.size(i)) for i, (n, p) in enumerate(zip(names, place))}
    if not found and len(sizes) == 1:
        ((axis, size),) = sizes.items()
        found = {axis: (rank, size)} if size == layout.ranks else {}
    return found


def shards_of(
    built: Built,
    program: Program,
    layout: ProgramLayout,
    place: Place,
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> list[Shard]:
    """Return this rank's parameters. shapes: those of one rank; None: this is the run on one rank.

    Raise UserError for a tensor of which nothing says how it is cut.
    """
    shards = []
    for name, parameter in parameters_of(built):
        local = tuple(local_of(parameter.detach()).shape)
        shape = tuple(parameter.shape)
        if shapes is not None:
            if name not in shapes:
                raise ProgramError(
                    f"one rank has no parameter {name!r}, which {layout.name} has: say in `names` "
                    f"of build() what its name is there"
                )
            shape = shapes[name]
        elements = _elements(name, parameter, local, shape, place, program, layout)
        shards.append(Shard(name, parameter, elements, shape))
    return shards


def _elements(
    name: str,
    parameter: Tensor,
    local: tuple[int, ...],
    shape: tuple[int, ...],
    place: Place,
    program: Program,
    layout: ProgramLayout,
) -> np.ndarray:
    """Return the index in the whole tensor, flat, of each element of a rank's parameter.

    local, shape: the shape on this rank, and on one rank. place: this rank's coordinate and the
    size of each axis. Raise UserError if nothing says how it is cut, or wrongly.
    """
    whole = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    asked = f"the parameter {name!r} is {local} in {layout.name}, and {shape} on one rank"
    pattern = next((p for p in program.cut if fnmatch.fnmatchcase(name, p)), None)
    if pattern is not None and local != shape:
        cuts = _given_cuts(program.cut[pattern], local, shape, place, asked)
        found = _cut(whole, cuts, place)
        if found is None or found.shape != local:
            parts = "nothing" if found is None else str(found.shape)
            raise ProgramError(
                f"{asked}; by cut = {{{pattern!r}: {program.cut[pattern]!r}}} it were {parts}"
            )
        return found.reshape(-1)
    if isinstance(parameter, DTensor) and tuple(parameter.shape) == shape:
        return _of_placements(parameter, whole)
    if local == shape:
        return whole.reshape(-1)
    cuts = _of_megatron(parameter, local, shape, place)
    found = _cut(whole, cuts, place) if cuts else None
    if found is None or found.shape != local:
        dims = [dim for dim, (a, b) in enumerate(zip(shape, local)) if a != b]
        dim = dims[0] if dims else 0
        where = "" if place or layout.ranks == 1 else ", and in `place` of build() where a rank is"
        raise ProgramError(
            f"{asked}, and nothing on the tensor says how it is cut: write "
            f"cut = {{{name!r}: {dim}}} into {program.path.name}, the dimension that tp cuts, or "
            f"{{'dp': {dim}}} for another axis{where}"
        )
    return found.reshape(-1)


def _of_placements(parameter: DTensor, whole: np.ndarray) -> np.ndarray:
    """Return the elements that a DTensor has on this rank: those of its placements."""
    placements = [Replicate() if p.is_partial() else p for p in parameter.placements]
    numbers = torch.from_numpy(whole).to(parameter.device)
    placed = distribute_tensor(numbers, parameter.device_mesh, placements, src_data_rank=None)
    return placed.to_local().cpu().numpy().reshape(-1).copy()


def _of_megatron(
    parameter: Any, local: tuple[int, ...], shape: tuple[int, ...], place: Place
) -> dict[str, tuple[int, int]]:
    """Return by axis the dimension and the stacked matrices that Megatron's attributes name."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return {}
    is_of_experts = not getattr(parameter, "allreduce", True)
    axis = "etp" if is_of_experts and "etp" in place else "tp"
    dim = parameter.partition_dim % len(shape)
    return {axis: (dim, max(1, parameter.partition_stride))}


def _given_cuts(
    value: Any, local: tuple[int, ...], shape: tuple[int, ...], place: Place, asked: str
) -> dict[str, tuple[int, int]]:
    """Return what an entry of the file's `cut` means, by axis: (dimension, stacked)."""
    entries = value if isinstance(value, Mapping) else {None: value}
    found = {}
    for axis, entry in entries.items():
        pair = tuple(entry) if isinstance(entry, list | tuple) else (entry, 1)
        if len(pair) != 2 or not all(isinstance(n, int) for n in pair) or pair[0] >= len(shape):
            raise ProgramError(
                f"{asked}; cut has {value!r}: a dimension, or (dimension, stacked parts)"
            )
        dim = pair[0] % len(shape)
        if axis is None:
            axis = _axis_of(shape[dim] / max(local[dim], 1), place)
        if axis is not None and axis not in place:
            if len(entries) == 1:
                raise ProgramError(
                    f"{asked}; cut names {axis!r}: say in `place` of build() where a rank is"
                )
            continue
        if axis is None:
            raise ProgramError(
                f"{asked}; cut has {value!r}: write the axis too, such as {{'ep': {dim}}}, and in "
                f"`place` of build() where a rank is"
            )
        found[axis] = (dim, pair[1])
    return found


def _axis_of(ratio: float, place: Place) -> str | None:
    """Return the axis that cuts a dimension into so many parts: tp, or the only one of the size."""
    fitting = [axis for axis, (_, size) in place.items() if size == math.ceil(ratio)]
    if "tp" in fitting:
        return "tp"
    return fitting[0] if len(fitting) == 1 else None


def _cut(whole: np.ndarray, cuts: Mapping[str, tuple[int, int]], place: Place) -> np.ndarray | None:
    """Return the part of a tensor that a rank has; None if it does not know where it is.

    Of `stacked` matrices that are stacked along a dimension each is cut by itself. The last rank
    has fewer rows if the ranks do not divide them, as with torch.chunk.
    """
    for axis, (dim, stacked) in cuts.items():
        if axis not in place or whole.shape[dim] % stacked:
            return None
        rank, size = place[axis]
        parts = []
        for part in np.split(whole, stacked, dim):
            rows = math.ceil(part.shape[dim] / size)
            index = np.arange(part.shape[dim])[rank * rows : (rank + 1) * rows]
            parts.append(np.take(part, index, dim))
        whole = np.concatenate(parts, dim)
    return whole


# ---- Optimizers ----------------------------------------------------------------------------------


def every_optimizer(optimizers: Sequence[Any]) -> list[Any]:
    """Return optimizers and those in them; of Megatron's chains and of containers only these."""
    found: list[Any] = []
    waiting = list(optimizers)
    while waiting:
        each = waiting.pop(0)
        if each is None or any(each is other for other in found):
            continue
        held = getattr(each, "chained_optimizers", None) or getattr(each, "optimizers", None)
        if held:
            waiting += list(held)
            continue
        found.append(each)
        waiting.append(getattr(each, "optimizer", None))
    return found


def owned_by(optimizers: Sequence[Any], parameter: Tensor) -> slice:
    """Return the part of the flat local parameter whose gradient and state this rank keeps.

    A distributed optimizer of Megatron has a range; with all others it is the whole.
    """
    for each in every_optimizer(optimizers):
        if not hasattr(each, "model_param_gbuf_map"):
            continue
        if parameter in each.model_param_gbuf_map:
            kept = each._get_model_param_range_map(parameter)["param"]
            return slice(kept.start, kept.end)
        if any(parameter in buffer.param_index_map for buffer in each.buffers):
            return slice(0, 0)
    return slice(None)


def state_of(optimizers: Sequence[Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimizer's state of a parameter by its kind, of the part that this rank keeps.

    A parameter that the optimizer keeps in another precision is a kind too: "main weights".
    """
    found: dict[str, Tensor] = {}
    for each in every_optimizer(optimizers):
        main = _main_of(each, parameter)
        state = getattr(each, "state", None)
        if main is not None:
            found["main weights"] = main
        for key in (parameter, main):
            if key is not None and isinstance(state, Mapping) and key in state:
                entries = state[key]
                tensors = {k: v for k, v in entries.items() if isinstance(v, Tensor) and v.dim()}
                found |= {f"{kind}": local_of(values) for kind, values in tensors.items()}
        if main is not None and (inner := getattr(each, "optimizer", None)) is not None:
            entries = inner.state.get(main, {})
            found |= {k: v for k, v in entries.items() if isinstance(v, Tensor) and v.dim()}
    return found


def _main_of(optimizer: Any, parameter: Any) -> Tensor | None:
    """Return the tensor that one of Megatron's optimizers updates in the place of a parameter."""
    places = getattr(optimizer, "model_param_group_index_map", None)
    if places is not None and parameter in places:
        group, number = places[parameter]
        main: Tensor = optimizer.optimizer.param_groups[group]["params"][number]
        return main
    kept = getattr(parameter, "main_param", None)
    has_inner = getattr(optimizer, "optimizer", None) is not None
    return kept if has_inner and places is None and isinstance(kept, Tensor) else None


def take_weights(optimizers: Sequence[Any]) -> None:
    """Have optimizers that keep weights of their own take those that were written to the model."""
    for each in optimizers:
        if hasattr(each, "reload_model_params"):
            each.reload_model_params()
