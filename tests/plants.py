"""Faults that are planted into the ranks of a run: at a call site of a collective, or by hand.

    sites = Sites(state, patch, plant)     before the first step, on every rank
    sites.seen                             the call sites of the run, with the layer that called
    sites.hits                             where the plant changed a bit, in the first step it did

A call site is the chain of functions from the method of distributed.collectives.Group to the first
one outside distributed/ and parallel.py, with the line of the call. `detail` is the layer: a block,
a weight, the parameters of a bucket, or a pass of a stage. A plant is a dictionary:

    site, detail    the calls that are altered, by a part of the site; without detail: all layers
    change          "left out", "doubled", "scaled" or "stale": the result of the step before
    step            from which on; rank: the only one with the fault, None: all
    by_hand         in place of the first three: the name of a function of tests/planted_by_hand.py

The collective itself is always done, so that no rank waits; then its result is replaced.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from distributed.collectives import Group
from model import Block
from optim.buckets import Bucket

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
METHODS += ("receive",)
CHANGES = ("left out", "doubled", "scaled", "stale")
ROLES = (
    "tp",
    "cp",
    "heads",
    "kv",
    "kv_copies",
    "key_copies",
    "dp",
    "replicas",
    "experts",
    "expert_replicas",
    "tied",
    "world",
)
DEEPEST = 80  # frames that are searched for the layer
BETWEEN = ("distributed/", "parallel.py")  # files that a call site passes through
UNALTERED = ("connect", "_send.")  # first messages, and the senders' side of a broadcast


class Sites:
    """The calls of Group's methods during the steps of one run on this rank."""

    def __init__(self, state, patch, plant: dict | None = None):
        """state: of trainer.build. patch: undoes the changes."""
        self.mesh = state.factory.mesh
        self.plant = plant or {}
        self.seen: dict[tuple, str] = {}  # (site, detail, method, role): the type of the tensor
        self.hits: list[dict] = []
        self.kept: dict[tuple, Tensor] = {}
        self.blocks = {}
        for stage in state.stages:
            self.blocks |= {id(b): n for n, b in enumerate(stage.blocks, stage.spec.first)}
        self.groups: dict[int, str] = {}
        for role in reversed(ROLES):
            self.groups[id(getattr(self.mesh, role))] = role
        for method in METHODS:
            patch.setattr(Group, method, self._wrapped(method, getattr(Group, method)))

    @property
    def step(self) -> int:
        """The number of the step that runs, 0 before the first one."""
        return self.mesh.recorder.place[1] or 0

    def active(self) -> bool:
        """Whether the plant is at work on this rank in this step."""
        own = self.plant.get("rank") in (None, self.mesh.rank)
        return own and self.step >= max(1, self.plant.get("step", 1))

    def hit(self, **where) -> None:
        """Note where the fault changed a bit; only those of the first such step are kept."""
        if self.hits and self.hits[0]["step"] < self.step:
            return
        found = {"step": self.step, **where}
        if found not in self.hits:
            self.hits.append(found)

    def _wrapped(self, method: str, original):
        def called(group, tensor, *rest, **named):
            chain = None
            if self.step and group.size > 1:
                chain, detail = self._place(sys._getframe(1))
            if not chain:
                return original(group, tensor, *rest, **named)
            role = self.groups.get(id(group), "pp")
            self.seen[chain, detail, method, role] = str(tensor.dtype)
            site = self.plant.get("site")
            wanted = site and site in chain and self.plant.get("detail") in (None, detail)
            if not (wanted and self.active()):
                return original(group, tensor, *rest, **named)
            source = rest[0] if isinstance(rest[0] if rest else None, Tensor) else tensor
            missing = _left_out(method, group, tensor, source)
            handle = original(group, tensor, *rest, **named)
            if method == "broadcast" and rest[0] == group.rank:
                return handle  # the sender's own tensor
            if method == "reduce" and rest[0] != group.rank:
                return handle  # whose result is not defined
            where = {
                "owner": sys._getframe(1).f_locals.get("self"),
                "site": chain,
                "detail": detail,
                "method": method,
                "role": role,
            }
            return _Altered(handle, lambda: self._alter(tensor, missing, where))

        return called

    def _alter(self, result: Tensor, missing: Tensor, where: dict) -> None:
        right = result.clone()
        owner = where.pop("owner")
        own = result[:0]
        if isinstance(owner, Bucket) and where["method"] == "all_gather":
            own = result[owner.start : owner.start + owner.section]  # which is not received
        kept_own = own.clone()
        change = self.plant["change"]
        if change == "left out":
            result.copy_(missing)
        elif change == "doubled":
            result.mul_(2)
        elif change == "scaled":
            result.mul_(1.01)
        else:
            key = (where["site"], where["detail"], tuple(result.shape))
            step_before = self.kept.get((*key, self.step - 1), right)
            result.copy_(step_before)
            self.kept[*key, self.step] = right
        own.copy_(kept_own)
        altered = (result != right).flatten().nonzero().flatten()
        if len(altered) and isinstance(owner, Bucket) and result.dim() == 1:
            first = 0 if where["method"] == "all_gather" or not owner.sharded else owner.start
            spans = [(p.spec.name, at - first, at - first + p.numel()) for p, at in owner.places]
            names = [n for n, a, b in spans if bool(((altered >= a) & (altered < b)).any())]
            where = where | {"detail": ",".join(names) or where["detail"]}
        if len(altered):
            self.hit(**where)

    def _place(self, frame) -> tuple[str, str]:
        """Return the call site and the layer; "" for a call that is no part of the training."""
        chain: list[str] = []
        detail = ""
        ended = False
        for _ in range(DEEPEST):
            if frame is None:
                break
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and ".venv" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                if name.startswith(("telemetry/", "tests/")):
                    break
                if not ended:
                    line = "" if chain else f":{frame.f_lineno}"
                    chain.append(f"{name}{line} {frame.f_code.co_qualname}")
                    ended = not name.startswith(BETWEEN)
                detail = detail or self._detail(frame.f_locals)
            frame = frame.f_back
        if chain and any(word in chain[0] for word in UNALTERED):
            return "", ""
        return " < ".join(chain), detail

    def _detail(self, local: dict) -> str:
        """Return the layer that a function's local variables tell, or ""."""
        weight = local.get("weight")
        if isinstance(weight, Tensor) and weight._base is not None:
            weight = weight._base  # the matrix of a weight with more dimensions
        if hasattr(weight, "spec"):
            return weight.spec.name
        owner = local.get("self")
        if isinstance(owner, Block):
            return f"blocks.{self.blocks[id(owner)]}"
        if isinstance(owner, Bucket):
            return ",".join(p.spec.name for p, _ in owner.places)
        action = local.get("action")
        return f"{action.kind}{action.stage}" if hasattr(action, "stage") else ""


def _left_out(method: str, group: Group, output: Tensor, source: Tensor) -> Tensor:
    """Return the output of a rank that does not communicate."""
    if method in ("all_reduce", "reduce"):
        return output.clone()
    if method == "reduce_scatter":
        return source.reshape(group.size, -1)[group.rank].reshape(output.shape).clone()
    if method == "all_gather":
        shared = source.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        if shared:  # weights: those of the step before
            return output.clone()
        return source.flatten().repeat(group.size).view(output.shape)
    if method == "all_to_all" and source.shape == output.shape:
        return source.clone()
    return torch.zeros_like(output)


class _Altered:
    """A handle whose wait replaces the result."""

    def __init__(self, handle, alter):
        self.handle = handle
        self.alter = alter

    def wait(self) -> None:
        self.handle.wait()
        if self.alter is not None:
            self.alter()
        self.alter = None
