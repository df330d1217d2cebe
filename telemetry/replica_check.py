"""Checks that copies are equal, bit for bit: weights and optimizer state over dp, tp, tied pairs.

Every rank hashes its copies; ranks compare hashes only. Where a rank has only some elements of a
tensor, it hashes these: copies of the same elements have the same hash.
"""

from collections import Counter

import torch
from torch import Tensor, nn

from distributed.collectives import Group
from distributed.mesh import Mesh
from parallel import ParamSpec
from zero import Optimizer

HASHED_AT_ONCE = 2**20  # elements: each takes some 60 bytes meanwhile
HASHED_ON_CPU = 2**16  # they stay in a core's cache

# Hash by parameter and kind of tensor: "weight", "master", "exp_avg", ...
Hashes = dict[tuple[ParamSpec, str], Tensor]


def unequal_replicas(stages: nn.Module, optimizer: Optimizer, mesh: Mesh) -> list[str]:
    """One sentence for each tensor that differs in any bit from its copies, with the ranks.

    Compared are weights over dp (and cp), tp and tied pairs; masters and optimizer state over tp
    and tied pairs, and over dp if they are not sharded. Collective over the mesh.
    """
    optimizer.finish_gathering()
    if mesh.replicas.size == mesh.tp.size == mesh.tied.size == 1:
        return []  # this rank has the only copy of everything
    weights: Hashes = {}
    if not optimizer.fully_sharded:
        weights = {(p.spec, "weight"): bit_hash(p.detach().flatten()) for p in stages.parameters()}
    both = weights | _state_hashes(optimizer)
    found = _compare(
        "dp" if mesh.cp.size == 1 else "dp x cp",
        mesh.replicas,
        weights if optimizer.state_sharded else both,
    )
    found += _compare("tp", mesh.tp, {k: v for k, v in both.items() if k[0].dim is None})
    found += _compare("tied", mesh.tied, {k: v for k, v in both.items() if k[0].tied})
    return found


def _state_hashes(optimizer: Optimizer) -> Hashes:
    """Of all parameters in the order of the stages, zero where this rank has no element: all ranks
    must compare the same list.
    """
    names = {"weights": "master"} | {kind: kind for kind in optimizer.state_kinds}
    zero = torch.zeros((), dtype=torch.int64, device=optimizer.device)
    hashes = {(s, name): zero.clone() for s in optimizer.specs for name in names.values()}
    for shard in optimizer.owned():
        for kind, name in names.items():
            values = shard.read(kind, shard.start, shard.stop)
            hashes[shard.spec, name] += bit_hash(values.detach(), shard.start)
    return hashes


def _compare(axis: str, group: Group, hashes: Hashes) -> list[str]:
    """A sentence for each hash that differs over the group: the ranks against the majority's.

    All ranks have the same keys in the same order.
    """
    if group.size == 1 or not hashes:
        return []
    own = torch.stack(list(hashes.values()))
    gathered = own.new_empty(group.size * len(hashes))
    group.at_once.all_gather(gathered, own).wait()
    by_rank = gathered.view(group.size, -1)
    found = []
    for i in group.values((by_rank != own).any(0).nonzero().flatten()):
        spec, kind = list(hashes)[i]
        values = by_rank[:, i].tolist()
        common = Counter(values).most_common(1)[0][0]
        others = [rank for rank, value in zip(group.ranks, values) if value != common]
        rest = [rank for rank, value in zip(group.ranks, values) if value == common]
        ranks = f"{others} {'against' if len(rest) > len(others) else 'and'} {rest}"
        found.append(f"{spec.name} {kind} differs over {axis}: ranks {ranks}")
    return found


def bit_hash(flat: Tensor, start: int = 0) -> Tensor:
    """Sum over the elements, modulo 2^64, of their bits times an odd number for each place."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    at_once = HASHED_AT_ONCE if flat.is_cuda else HASHED_ON_CPU
    for run in flat.contiguous().view(integers).split(at_once):
        bits = run.long()
        places = torch.arange(start, start + len(run), device=flat.device) * 2 + 1
        total += ((bits ^ (bits >> 17)) * (places * -7046029254386353131)).sum()
        start += len(run)
    return total
