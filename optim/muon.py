"""Muon: momentum whose every matrix is orthogonalised by a Newton-Schulz iteration.

    momentum <- mu momentum + (1 - mu) gradient
    update   <- (1 - mu) gradient + mu momentum                   Nesterov's
    weights  <- (1 - lr decay) weights - lr scale O(update)       O: nearly the orthogonal factor

Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024,
kellerjordan.github.io/posts/muon); at scale arXiv 2502.16982. torch.optim.Muon has the same
momentum, coefficients and scales, but it computes O in bf16 on the matrices that a rank happens to
hold. Here O is computed in bf16 on GPUs and else in the type of the masters (muon_dtype), on whole
matrices that have a meaning: q, k and v apart, gate and up apart, each expert by itself, and kv_a
and kv_b of latent attention as they are (muon_qkv; parallel.Matrices). So the update does not
depend on the layout. Momentum and weights are kept in flat sections, as AdamW's are;
optim/matrix_owners.py brings the matrices together.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from config.buffer_sizes import ROUND_ELEMENTS
from config.schema import Training
from distributed.mesh import Mesh
from optim.matrix_owners import MatrixOwners, Placed, Section
from optim.precision import DTYPES

# The polynomial a x + b x^3 + c x^5, applied STEPS times, takes singular values from 0.01 to 1 near
# 1: between 0.68 and 1.14. Keller Jordan's coefficients; they grow small values fast and do not
# converge to 1 exactly.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# The smallest norm by which a matrix is divided, torch's value: a gradient that is rounding alone
# is not blown up.
LEAST_NORM = 1e-7


def newton_schulz(x: Tensor) -> Tensor:
    """Return nearly U V^T of each matrix U S V^T of x, in its type: (matrices, rows, columns).

    The iteration works on the smaller side: (rows, rows) if there are fewer rows than columns.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def operations(rows: int, columns: int) -> float:
    """Return the floating-point operations of `newton_schulz` on a matrix, without its sums."""
    small, large = min(rows, columns), max(rows, columns)
    return STEPS * (4.0 * small * small * large + 2.0 * small**3)


def scale(rule: str, rows: int, columns: int) -> float:
    """Return the factor of a whole matrix's orthogonal update. rule: the value of muon_scale.

    original: sqrt(max(1, rows / columns)), Keller Jordan's. match_rms_adamw: 0.2 sqrt(max(rows,
    columns)), with which an update is about as large as AdamW's (arXiv 2502.16982, section 2.2), so
    AdamW's rates and decay fit.
    """
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class FlatBucket(Protocol):
    """What the exchange needs of a bucket (optim/buckets.py).

    places: the parameters and their offsets in its buffers. section: the elements of this rank's
    section. sharded: whether each replica has a section of its own.
    """

    places: list[tuple[Any, int]]
    section: int
    sharded: bool


def make_rule(
    training: Training,
    masters: list[Tensor],
    buckets: Sequence[FlatBucket],
    mesh: Mesh,
    weight_decay: float,
) -> "Muon":
    """Return the rule of an update set. masters: a flat tensor for each of its buckets."""
    of_experts = buckets[0].places[0][0].spec.is_expert
    # No tensor rank cuts the matrices of experts: they are whole on each rank that holds them.
    group = mesh.expert_replicas if of_experts else mesh.stage
    tensor_ranks = 1 if of_experts else mesh.tp.size
    sections = []
    for bucket in buckets:
        placed = [Placed(p.spec, tuple(p.shape), offset) for p, offset in bucket.places]
        sections.append(Section(placed, bucket.section, bucket.sharded))
    owners = MatrixOwners(
        sections, group, tensor_ranks, training.muon_qkv, operations, ROUND_ELEMENTS
    )
    return Muon(masters, training, weight_decay, owners)


class Muon:
    """The update rule of Muon for flat sections of parameters (update_rules.py).

    masters: a flat tensor for each section of `owners`. kernel: the rule's name in the log.
    """

    def __init__(
        self, masters: list[Tensor], training: Training, weight_decay: float, owners: MatrixOwners
    ):
        """Make the rule; its momentum begins at zero."""
        self.masters = masters
        self.training = training
        self.weight_decay = weight_decay
        self.owners = owners
        self.momenta = [torch.zeros_like(master) for master in masters]
        # State tensors by their names in a checkpoint, which has zeros for AdamW's other one.
        self.states = {"exp_avg": self.momenta}
        is_short = training.newton_schulz_dtype(masters[0].is_cuda) == "bf16"
        self.dtype = DTYPES["bf16"] if is_short else masters[0].dtype
        parts = {
            "projection": "each projection a matrix",
            "split": "q, k, v apart, of latent attention too",
            "joint": "q, k, v as one matrix",
            "head": "each head of q, k, v apart",
        }[training.muon_qkv]
        name = str(self.dtype).removeprefix("torch.")
        self.kernel = f"Muon, Newton-Schulz in {name}, {parts}, scale {training.muon_scale}"

    def update(self, gradients: list[Tensor], lr: float) -> None:
        """Update all masters once, by gradients of the same shapes and type, which are overwritten.

        Collective over the ranks that hold parts of the matrices. lr: the learning rate.
        """
        momentum = self.training.muon_momentum
        torch._foreach_lerp_(self.momenta, gradients, 1 - momentum)
        torch._foreach_lerp_(gradients, self.momenta, momentum)
        self.owners.update(gradients, self.orthogonalise)
        if self.weight_decay:
            torch._foreach_mul_(self.masters, 1 - lr * self.weight_decay)
        torch._foreach_add_(self.masters, gradients, alpha=-lr)

    def orthogonalise(self, matrices: list[Tensor]) -> None:
        """Overwrite each whole matrix, (rows, columns), by its scaled orthogonal update.

        matrices: those of a round (optim/matrix_owners.py); those of one shape are one batch.
        """
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
        for (rows, columns), alike in by_shape.items():
            factor = scale(self.training.muon_scale, rows, columns)
            # The iteration has the only reference to its input, which it frees.
            results = newton_schulz(self._stacked(alike))
            torch._foreach_copy_(alike, list(results))
            torch._foreach_mul_(alike, factor)

    def _stacked(self, batch: list[Tensor]) -> Tensor:
        """Return matrices of one shape as one tensor, in the type of the iteration."""
        stacked = batch[0].new_empty(len(batch), *batch[0].shape, dtype=self.dtype)
        torch._foreach_copy_(list(stacked), batch)
        return stacked

    def set_steps(self, steps: int) -> None:
        """Do nothing: the rule does not depend on the number of updates so far."""

    def state_bytes(self) -> int:
        """Return the bytes of the momentum."""
        return sum(tensor.nbytes for state in self.states.values() for tensor in state)

    def read(self, kind: str, index: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a state tensor of master `index`, flat.

        A checkpoint has AdamW's kinds: the momentum is "exp_avg", and "exp_avg_sq" is zeros.
        """
        if kind in self.states:
            return self.states[kind][index][start:stop]
        return self.masters[index].new_zeros(stop - start)

    def write(self, kind: str, index: int, start: int, values: Tensor) -> None:
        """Set elements of the state tensor `kind` of master `index` from `start` on, flat."""
        if kind in self.states:
            self.states[kind][index][start : start + len(values)] = values
