"""A module of a user's file as a program: one rank against tp, cp and dp.

    program = read_module("my_layer.py:GatedThing", {})

The module trains on the sum of its outputs times numbers that are drawn. Its ranks of tp are a
DTensor plan, `plan` in the file, or what it does with a group that it takes; ranks of dp have their
samples, ranks of cp their positions in one piece, and both add up gradients.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from base.errors import ProgramError, UserError, nearest
from tools.checker.cuts import local_of
from tools.checker.programs import Program, ProgramLayout, load

BATCH = 4  # samples: ranks of dp have two each
RATE = 0.01
# The arguments with which a module takes its groups of ranks, by axis.
GROUPS = {"tp": ("tp_group", "group"), "cp": ("cp_group",)}


def read_module(text: str, changed: Mapping[str, str]) -> Program:
    """Return the program that trains a module. UserError for a mistake.

    text: FILE:CLASS. changed: names of the file that get another value (--set).
    """
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise UserError(f"--module is FILE:CLASS, such as my_layer.py:GatedThing, not {text!r}")
    program, module = load(Path(file), changed, "--module")
    known = [n for n, x in vars(module).items() if isinstance(x, type) and issubclass(x, nn.Module)]
    cls = getattr(module, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        has = f"{program.path.name} has {', '.join(known) or 'none'}"
        raise ProgramError(
            f"--module {text}: {name} is no torch module; {has}{nearest(name, known)}"
        )
    inputs = getattr(module, "inputs", None) or getattr(cls, "inputs", None)
    if not callable(inputs):
        raise ProgramError(
            f"{program.path.name} has no function inputs(batch), which returns the module's input "
            f"for so many samples: a tensor whose first dimension they are, or a tuple of such"
        )
    trained = _Trained(
        make=getattr(module, "make", None) or cls,
        inputs=inputs,
        plan=getattr(module, "plan", None),
        sequence_dim=getattr(module, "sequence_dim", 1),
    )
    program.make = trained.build
    program.layouts = [ProgramLayout(tuple(x.items())) for x in trained.layouts()]
    return program


class _Trained:
    """A module that trains in layouts."""

    def __init__(self, make: Any, inputs: Any, plan: Any, sequence_dim: int):
        """Keep how it is made. make: returns the module. sequence_dim: of positions, for cp."""
        self.make, self.inputs, self.plan = make, inputs, plan
        self.sequence_dim = sequence_dim
        try:
            taken = set(inspect.signature(make).parameters)
        except (TypeError, ValueError):
            taken = set()
        self.takes = {
            axis: next((word for word in words if word in taken), None)
            for axis, words in GROUPS.items()
        }

    def layouts(self) -> list[dict[str, int]]:
        """Return the layouts that the module can have."""
        has_tp = self.plan is not None or self.takes["tp"] is not None
        found: list[dict[str, int]] = [{}, {"dp": 2}]
        if has_tp:
            found += [{"tp": 2}, {"tp": 4}, {"tp": 2, "dp": 2}]
        if self.takes["cp"] is not None:
            found += [{"cp": 2}, {"cp": 4}] + [{"tp": 2, "cp": 2}] * has_tp
        return found

    def build(self, layout: dict[str, Any]) -> dict[str, Any]:
        """Return what build() of a --program file returns, for the module on a rank of a layout.

        layout: ranks by axis, such as {"tp": 2}.
        """
        sizes = {axis: layout.get(axis, 1) for axis in ("dp", "cp", "tp")}
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        place = {axis: mesh.get_local_rank(axis) for axis in sizes}
        groups = {
            word: mesh.get_group(axis) if sizes[axis] > 1 else None
            for axis, word in self.takes.items()
            if word is not None
        }
        module = self.make(**groups).to(device)
        if self.plan is not None and sizes["tp"] > 1:
            plan = self.plan() if callable(self.plan) else self.plan
            module = parallelize_module(module, mesh["tp"], plan)
        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
        summed = [mesh.get_group(axis) for axis in ("dp", "cp") if sizes[axis] > 1]

        def here(x: Any) -> Any:
            """Return this rank's samples and positions of a tensor of the whole batch."""
            if not isinstance(x, Tensor):
                return x
            x = x.chunk(sizes["dp"], 0)[place["dp"]].to(device)
            return x.chunk(sizes["cp"], self.sequence_dim)[place["cp"]] if sizes["cp"] > 1 else x

        def step(number: int) -> Tensor:
            """Train on the inputs of a step and return the loss of all ranks."""
            torch.manual_seed(number)
            made = self.inputs(BATCH)
            given = made if isinstance(made, tuple) else (made,)
            optimizer.zero_grad()
            losses = [
                (local * here(_loss_weights(local, sizes, self.sequence_dim)).to(local)).sum()
                / BATCH
                for local in _outputs(module(*map(here, given)))
            ]
            loss = torch.stack(losses).sum()
            loss.backward()
            total = loss.detach().clone()
            for group in summed:
                dist.all_reduce(total, group=group)
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(local_of(parameter.grad), group=group)
            optimizer.step()
            return total

        return {"model": module, "optimizer": optimizer, "step": step, "place": place}


def _outputs(made: Any) -> list[Tensor]:
    """Return the tensors of numbers that a module returned, whole over tp."""
    every = made if isinstance(made, tuple | list) else [made]
    tensors = [x for x in every if isinstance(x, Tensor) and x.is_floating_point()]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]


def _loss_weights(local: Tensor, sizes: dict[str, int], sequence_dim: int) -> Tensor:
    """Return random weights for a module's output of the whole batch; the loss is the weighted sum.

    They are the same on all ranks and in all layouts. local: this rank's part of the output. sizes:
    ranks on each axis. sequence_dim: the dimension of positions, which cp cuts.
    """
    shape = list(local.shape)
    shape[0] *= sizes["dp"]
    if sizes["cp"] > 1:
        shape[sequence_dim] *= sizes["cp"]
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))
