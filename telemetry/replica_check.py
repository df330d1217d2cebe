"""Copies must be equal, bit for bit: weights and optimizer state over dp, tp and tied pairs.

Every copy is hashed where it is; ranks compare hashes only. A tensor of which a rank has some
elements only is hashed by these: copies of the same elements have the same sum.
"""

from collections import Counter

import torch
from torch import Tensor, nn

from distributed.collectives import Group
from distributed.mesh import Mesh
from parallel import ParamSpec
from zero import Optimizer


def unequal_replicas(stage: nn.Module, optimizer: Optimizer, mesh: Mesh) -> list[str]:
    """What differs in any bit from its copies: one sentence each, with the odd ranks.

    Compared are weights over dp, tp and tied pairs; masters and optimizer state over tp and tied
    pairs, and over dp where every replica has all of them. Collective over the mesh.
    """
    optimizer.finish_gathering()
    weights = {} if optimizer.fully_sharded else _weight_hashes(stage)
    state = _state_hashes(optimizer)
    over_dp = weights if optimizer.state_sharded else weights | state
    both = weights | state
    found = _compare("dp", mesh.dp, over_dp)
    found += _compare("tp", mesh.tp, {k: v for k, v in both.items() if k[0].dim is None})
    found += _compare("tied", mesh.tied, {k: v for k, v in both.items() if k[0].tied})
    return found


# A tensor's hash by the parameter it belongs to and what of it: "weight", "master", "exp_avg", ...
Hashes = dict[tuple[ParamSpec, str], Tensor]


def _weight_hashes(stage: nn.Module) -> Hashes:
    return {(p.spec, "weight"): _bit_hash(p.detach().flatten(), 0) for p in stage.parameters()}


def _state_hashes(optimizer: Optimizer) -> Hashes:
    """By parameter in the stage's order, also of those of which nothing is here: ranks compare
    the same list.
    """
    kinds = ("weights", *optimizer.state_kinds)
    zero = torch.zeros((), dtype=torch.int64, device=optimizer.device)
    names = {"weights": "master"}
    hashes = {(s, names.get(k, k)): zero.clone() for s in optimizer.specs for k in kinds}
    for piece in optimizer.owned():
        for kind in kinds:
            values = piece.read(kind, piece.start, piece.stop)
            hashes[piece.spec, names.get(kind, kind)] += _bit_hash(values.detach(), piece.start)
    return hashes


def _compare(axis: str, group: Group, hashes: Hashes) -> list[str]:
    """What differs over a group, whose members have the same keys in the same order."""
    if group.size == 1 or not hashes:
        return []
    own = torch.stack(list(hashes.values()))
    every = own.new_empty(group.size * len(hashes))
    group.all_gather(every, own).wait()
    every = every.view(group.size, -1)
    found = []
    for i in group.values((every != own).any(0).nonzero().flatten()):
        spec, what = list(hashes)[i]
        found.append(f"{spec.name} {what} differs over {axis}: {_odd_ones(every[:, i], group)}")
    return found


def _odd_ones(hashes: Tensor, group: Group) -> str:
    """Which ranks differ from the most common value."""
    values = hashes.tolist()
    common, count = Counter(values).most_common(1)[0]
    odd = [rank for rank, value in zip(group.ranks, values) if value != common]
    rest = [rank for rank, value in zip(group.ranks, values) if value == common]
    if 2 * count > len(values):
        return f"ranks {odd} against {rest}"
    return f"ranks {odd} and {rest}"


def _bit_hash(flat: Tensor, start: int) -> Tensor:
    """A 64-bit sum of the elements' bits times odd numbers that depend on their places."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.contiguous().view(integers).long()
    places = torch.arange(start, start + len(bits), device=bits.device) * 2 + 1
    return ((bits ^ (bits >> 17)) * (places * -7046029254386353131)).sum()
