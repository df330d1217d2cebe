"""Checks that replicas of weights and optimizer state are equal, bit for bit.

Replicas are compared over data-parallel ranks, over tensor-parallel ranks (tensors that are not
sharded over tp) and over tied pairs (embedding and output matrix on two stages). Every rank hashes
its replicas, and ranks exchange the hashes only. A rank that has only a shard of a tensor hashes
the elements of this shard; the same elements on another rank give the same hash.
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

HASHED_AT_ONCE = 2**20  # elements per chunk on a GPU; each needs some 60 bytes while it is hashed
HASHED_ON_CPU = 2**16  # elements per chunk on a CPU, so that the chunk stays in a core's cache
# The supervisor blames the rank that fails first, so the other ranks fail this much later.
SECONDS_FOR_THE_OUTVOTED = 5.0
MOST_SHOWN = 5  # differences in an error
# A rank's verdict on its replicas. EQUAL is 1 because in a rehearsal every number that is read from
# a device is 1.
EQUAL = 1
DIFFERS = 2
OUTVOTED = 3

# The hash (an int64 scalar) of a parameter's tensor; the kind is "weight", "master", "exp_avg", ...
Hashes = dict[tuple[ParamSpec, str], Tensor]


@dataclass(frozen=True)
class Difference:
    """A tensor whose replicas differ, with the text for the error.

    outvoted: the ranks whose replica differs from the majority's; empty if no majority is equal,
    for example with two replicas.
    """

    sentence: str
    outvoted: tuple[int, ...]


def check(stages: nn.Module, optimizer: Optimizer, mesh: Mesh, iteration: int) -> None:
    """Raise RuntimeError on every rank if replicas differ on any rank; collective over the world.

    A rank compares only the replicas in its groups, so all ranks all-reduce their verdicts. The
    outvoted ranks raise first, the others after SECONDS_FOR_THE_OUTVOTED: the case (the evidence of
    a failure that the supervisor reads) names the rank and node that failed first, and the
    supervisor counts failures by node.
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
    """Return the texts of the differences that `differing_replicas` finds."""
    return [each.sentence for each in differing_replicas(stages, optimizer, mesh)]


def differing_replicas(stages: nn.Module, optimizer: Optimizer, mesh: Mesh) -> list[Difference]:
    """Return the tensors that differ in any bit from their replicas, with the ranks.

    Weights are compared over dp (and cp), tp and tied pairs; master weights and optimizer state
    over tp and tied pairs, and over dp if they are not sharded. Collective over the mesh.
    """
    optimizer.finish_gathering()
    if mesh.replicas.size == mesh.tp.size == mesh.tied.size == 1:
        return []  # this rank has the only replica of every tensor
    weights: Hashes = {}
    if not optimizer.fully_sharded:
        weights = {(p.spec, "weight"): bit_hash(p.detach().flatten()) for p in stages.parameters()}
    both = weights | _state_hashes(optimizer)
    found = []
    names = {"replicas": "dp" if mesh.cp.size == 1 else "dp x cp"}
    names["expert_replicas"] = "the replicas of experts"
    for role, name in names.items():
        compared = weights if _shards_state(optimizer, role) else both
        of_role = {k: v for k, v in compared.items() if k[0].reduce_over[0] == role}
        found += _compare(name, mesh.group(role), of_role)
    found += _compare("tp", mesh.tp, {k: v for k, v in both.items() if k[0].dim is None})
    found += _compare("tied", mesh.tied, {k: v for k, v in both.items() if k[0].tied})
    return found


def _shards_state(optimizer: Optimizer, role: str) -> bool:
    """Return whether the ranks of the mesh's group `role` have different parts of the state."""
    return any(group.sharded for group in optimizer.groups if group.key.reduce_over[0] == role)


def _state_hashes(optimizer: Optimizer) -> Hashes:
    """Return the hashes of master weights and optimizer state, for all parameters of this rank.

    The hash is 0 where this rank's shards have no element of a parameter, so that all ranks of a
    group compare the same list in the same order.
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
    """Return the differences between the hashes of the group's ranks; collective over the group.

    axis: the group's name in errors. All ranks pass the same keys in the same order.
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
    """Return a hash of a 1-d tensor: the sum over its elements of bits times a weight, mod 2^64.

    An element's bits are mixed with themselves shifted by 17, and the weight is an odd number that
    depends on the element's place, so that exchanged elements change the hash. start: the place of
    the first element in the whole parameter.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    at_once = HASHED_AT_ONCE if flat.is_cuda else HASHED_ON_CPU
    for run in flat.contiguous().view(integers).split(at_once):
        bits = run.long()
        places = torch.arange(start, start + len(run), device=flat.device) * 2 + 1
        total += ((bits ^ (bits >> 17)) * (places * -7046029254386353131)).sum()
        start += len(run)
    return total
