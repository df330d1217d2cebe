"""Checks that copies are equal, bit for bit: weights and optimizer state over dp, tp, tied pairs.

Every rank hashes its copies; ranks compare hashes only. Where a rank has only some elements of a
tensor, it hashes these: copies of the same elements have the same hash.
"""

import time
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distributed.collectives import MAX, Group
from distributed.mesh import Mesh
from parallel import ParamSpec
from zero import Optimizer

HASHED_AT_ONCE = 2**20  # elements: each takes some 60 bytes meanwhile
HASHED_ON_CPU = 2**16  # they stay in a core's cache
# The rank that fails first is the one that the case names: the others wait so long.
SECONDS_FOR_THE_OUTVOTED = 5.0
MOST_SHOWN = 5  # differences in an error
# What a rank sees of its copies. Equal is 1, which a rehearsal has for every number of a device.
EQUAL = 1
DIFFERS = 2
OUTVOTED = 3

# Hash by parameter and kind of tensor: "weight", "master", "exp_avg", ...
Hashes = dict[tuple[ParamSpec, str], Tensor]


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies differ. outvoted: the ranks that the majority of the copies speaks
    against; empty without a majority, as with two copies.
    """

    sentence: str
    outvoted: tuple[int, ...]


def check(stages: nn.Module, optimizer: Optimizer, mesh: Mesh, iteration: int) -> None:
    """Raise RuntimeError on every rank if copies differ on any of them; collective over the world.

    Each rank sees its own copies only, and could call the same fault something else, so all agree.
    The outvoted ranks fail first: the case of the run names the rank and the node that failed
    first, and the supervisor counts failures by node.
    """
    differences = differing_replicas(stages, optimizer, mesh)
    verdict = DIFFERS if differences else EQUAL
    if any(mesh.rank in difference.outvoted for difference in differences):
        verdict = OUTVOTED
    worst = torch.tensor([verdict], device=optimizer.device)
    mesh.world.at_once.all_reduce(worst, MAX).wait()
    worst_verdict = int(mesh.world.values(worst)[0])
    if worst_verdict == EQUAL:
        return
    if verdict < worst_verdict:
        time.sleep(SECONDS_FOR_THE_OUTVOTED)
    sentences = [difference.sentence for difference in differences[:MOST_SHOWN]]
    text = "; ".join(sentences) or "those of other ranks"
    more = len(differences) - len(sentences)
    text += f" and {more} more" if more else ""
    if differences and not any(difference.outvoted for difference in differences):
        text += "; there is no majority, so nobody can say which copy is wrong"
    raise RuntimeError(f"after iteration {iteration} replicas are no longer equal: {text}")


def unequal_replicas(stages: nn.Module, optimizer: Optimizer, mesh: Mesh) -> list[str]:
    """The sentences of `differing_replicas`."""
    return [each.sentence for each in differing_replicas(stages, optimizer, mesh)]


def differing_replicas(stages: nn.Module, optimizer: Optimizer, mesh: Mesh) -> list[Difference]:
    """Each tensor that differs in any bit from its copies, with the ranks.

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


def _compare(axis: str, group: Group, hashes: Hashes) -> list[Difference]:
    """Each hash that differs over the group: the ranks against the majority's.

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
        majority = len(rest) > len(others)
        ranks = f"{others} {'against' if majority else 'and'} {rest}"
        sentence = f"{spec.name} {kind} differs over {axis}: ranks {ranks}"
        found.append(Difference(sentence, tuple(others) if majority else ()))
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
