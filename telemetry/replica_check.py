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

from checkpointing.save import Checkpointer
from distributed.collectives import MAX, Group
from distributed.mesh import Mesh
from parallel import ParamSpec
from telemetry.observer import Observer, Step
from zero import Optimizer

HASHED_AT_ONCE = 2**20  # elements per chunk on a GPU; hashing needs some 60 bytes an element
HASHED_ON_CPU = 2**16  # elements per chunk on a CPU, so that the chunk stays in a core's cache
# The supervisor blames the rank that fails first. So the ranks whose replicas a majority has
# outvoted fail at once, and the others this many seconds later.
SECONDS_FOR_THE_OUTVOTED = 5.0
MOST_SHOWN = 5  # an error names this many tensors
# A rank's verdict on its replicas, or in an audit on its results; the largest verdict of all ranks
# counts. EQUAL is 1 because in a rehearsal every number that is read from a device is 1.
EQUAL = 1
DIFFERS = 2
OUTVOTED = 3  # most of the other replicas are equal to each other, and differ from this rank's

# A parameter's tensor by (its parameter, its kind), as a hash, which is an int64 scalar. The kind
# is "weight", "master", "exp_avg", ...
Hashes = dict[tuple[ParamSpec, str], Tensor]


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor whose replicas differ, with the text for the error.

    outvoted: the ranks whose replica differs from the majority's; empty without a majority of equal
    replicas, for example with two replicas.
    """

    sentence: str
    outvoted: tuple[int, ...]


class ReplicaCheck(Observer):
    """Compares the replicas after every --check-replicas-every steps and after the last one."""

    def __init__(self, every: int, checkpoints: Checkpointer):
        """Check nothing yet. every: the interval in steps.

        checkpoints: does the check, with which each save begins, at most once after a step.
        """
        self.every = every
        self.checkpoints = checkpoints

    def between_steps(self, step: Step) -> None:
        """Raise RuntimeError if replicas differ, if the check is due. Collective."""
        if step.is_last or step.iteration % self.every == 0:
            self.checkpoints.check_replicas(step.iteration)


def check(stages: nn.Module, optimizer: Optimizer, mesh: Mesh, iteration: int) -> None:
    """Raise RuntimeError on every rank if replicas differ on any rank; collective over the world.

    A rank compares only the replicas in its groups, so the largest verdict of all ranks is taken,
    in the order EQUAL, DIFFERS, OUTVOTED. Ranks with this verdict raise at once, the others after
    SECONDS_FOR_THE_OUTVOTED: the supervisor blames the node of the rank that failed first, which
    must be an outvoted rank if there is one.
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
    if more:
        text += f" and {more} more"
    if differences and not any(difference.outvoted for difference in differences):
        text += "; there is no majority, so nobody can say which copy is wrong"
    raise RuntimeError(f"after step {iteration} replicas are no longer equal: {text}")


def differing_replicas(
    stages: nn.Module, optimizer: Optimizer, mesh: Mesh
) -> list[ReplicaDifference]:
    """Return a ReplicaDifference per tensor of this rank whose replicas differ in any bit.

    Weights are compared over dp (and cp), tp and tied pairs; master weights and optimizer state
    over tp and tied pairs, and over dp if they are not sharded. Collective over the mesh.
    """
    optimizer.finish_gathering()
    if mesh.replicas.size == mesh.tp.size == mesh.tied.size == 1:
        return []  # this rank has the only replica of every tensor
    weights: Hashes = {}
    if not optimizer.fully_sharded:
        weights = {(p.spec, "weight"): bit_hash(p.detach().flatten()) for p in stages.parameters()}
    hashes = weights | _state_hashes(optimizer)
    differences = []
    # Each tensor is compared over every group of ranks that must have the same tensor. Over the
    # data-parallel groups only weights are compared if ZeRO shards the state there.
    name_of_replicas = "dp" if mesh.cp.size == 1 else "dp x cp"
    names = {"replicas": name_of_replicas, "expert_replicas": "the replicas of experts"}
    for role, name in names.items():
        groups = [group for group in optimizer.groups if group.key.reduce_over[0] == role]
        shards_state = any(group.sharded for group in groups)
        compared = weights if shards_state else hashes
        # key[0] is a parameter's ParamSpec; its gradient is reduced over the ranks with replicas.
        replicated = {key: compared[key] for key in compared if key[0].reduce_over[0] == role}
        differences += _compare(name, mesh.group(role), replicated)
    # Tensors that are not split are compared over tp, those of key/value heads that several tensor
    # ranks have over these ranks, and tied matrices over their two stages.
    held_by = {"tp": "tp", "kv_copies": "the tensor ranks with the same KV head"}
    held_by["key_copies"] = "the tensor ranks with the same key head of a mixer"
    for role, name in held_by.items():
        held = {key: hashes[key] for key in hashes if key[0].held_by == role}
        differences += _compare(name, mesh.group(role), held)
    tied = {key: hashes[key] for key in hashes if key[0].tied}
    differences += _compare("tied", mesh.tied, tied)
    return differences


def _state_hashes(optimizer: Optimizer) -> Hashes:
    """Return the hashes of master weights and optimizer state, for all parameters of this rank.

    A parameter without an element in this rank's shards has the hash 0, so that all ranks of a
    group compare the same list in the same order.
    """
    names = {"weights": "master"} | {kind: kind for kind in optimizer.state_kinds}
    zero = torch.zeros((), dtype=torch.int64, device=optimizer.device)
    hashes: Hashes = {}
    for spec in optimizer.specs:
        for name in names.values():
            hashes[spec, name] = zero.clone()
    for shard in optimizer.owned():
        for kind, name in names.items():
            values = shard.read(kind, shard.start, shard.stop)
            # If a parameter has several shards on this rank, their hashes are added.
            hashes[shard.spec, name] += bit_hash(values.detach(), shard.start)
    return hashes


def _compare(axis: str, group: Group, hashes: Hashes) -> list[ReplicaDifference]:
    """Return a ReplicaDifference per tensor whose hashes differ between the group's ranks.

    axis: the group's name in errors. hashes: all ranks pass the same keys in the same order.
    Collective over the group.
    """
    if group.size == 1 or not hashes:
        return []
    hashes_of_rank = torch.stack(list(hashes.values()))
    gathered = hashes_of_rank.new_empty(group.size * len(hashes))
    group.at_once.all_gather(gathered, hashes_of_rank).wait()
    by_rank = gathered.view(group.size, -1)  # (ranks, tensors)
    unequal_columns = (by_rank != hashes_of_rank).any(0).nonzero().flatten()
    differences = []
    for column in group.values(unequal_columns):
        spec, kind = list(hashes)[column]
        values = by_rank[:, column].tolist()
        [(common, _)] = Counter(values).most_common(1)
        with_other_value = [rank for rank, v in zip(group.ranks, values) if v != common]
        with_common_value = [rank for rank, v in zip(group.ranks, values) if v == common]
        # Only a majority tells which ranks are wrong.
        outvoted: tuple[int, ...] = ()
        conjunction = "and"
        if len(with_common_value) > len(with_other_value):
            outvoted = tuple(with_other_value)
            conjunction = "against"
        ranks = f"{with_other_value} {conjunction} {with_common_value}"
        sentence = f"{spec.name} {kind} differs over {axis}: ranks {ranks}"
        differences.append(ReplicaDifference(sentence, outvoted))
    return differences


def bit_hash(flat: Tensor, start: int = 0) -> Tensor:
    """Return a hash of a 1-d tensor, int64 (): the sum over its elements of bits times a weight.

    The sum is modulo 2^64. An element's bits are mixed with themselves shifted by 17, and the
    weight is an odd number that depends on the element's place, so that exchanged elements change
    the hash. start: the place of the first element in the whole parameter.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    chunk_size = HASHED_AT_ONCE if flat.is_cuda else HASHED_ON_CPU
    for chunk in flat.contiguous().view(integers).split(chunk_size):
        bits = chunk.long()
        # The constant is 2^64 over the golden ratio, an odd number: it spreads the places over all
        # 64 bits.
        odd_places = torch.arange(start, start + len(chunk), device=flat.device) * 2 + 1
        total += ((bits ^ (bits >> 17)) * (odd_places * -7046029254386353131)).sum()
        start += len(chunk)
    return total
