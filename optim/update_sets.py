"""The update of the masters of several groups at once: one update rule for each set of groups.

    sets = make_update_sets(groups, training)
    for update_set in sets:
        update_set.update(factor, lr)     updates the masters, and starts to gather the weights

Read zero.py and optim/buckets.py first.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from config.schema import BUCKET_ELEMENTS, Training
from optim import update_rules
from optim.buckets import ParamGroup

SETS_OF_KEY = 4  # most update sets of a key; with more sets, the first weights are gathered sooner


class UpdateSet:
    """Groups whose masters one rule updates together, with as many kernels as for one group.

    masters: the masters of all groups, in order; rule: the update rule that was made with them.
    """

    def __init__(self, groups: list[ParamGroup], training: Training):
        """Make the rule of the groups, which have one key; UserError if its package is missing."""
        self.groups = groups
        key = groups[0].key
        self.masters: list[Tensor] = []
        for group in groups:
            group.first = len(self.masters)
            self.masters += group.masters
        self.rule = update_rules.make_rule(training, key.family, self.masters, not key.no_decay)
        for group in groups:
            group.rule = self.rule

    def update(self, factor: float, lr: float) -> None:
        """Update the masters by the gradients times `factor`, and start to gather the weights.

        lr: the learning rate of this step.
        """
        gradients = [g for group in self.groups for g in group.own_gradients()]
        if gradients and gradients[0].dtype != self.masters[0].dtype:
            exact_gradients = [torch.empty_like(g, dtype=self.masters[0].dtype) for g in gradients]
            torch._foreach_copy_(exact_gradients, gradients)
            gradients = exact_gradients
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.rule.update([g.view_as(m) for g, m in zip(gradients, self.masters)], lr)
        gather_weights(self.groups)


def gather_weights(groups: Sequence[ParamGroup]) -> None:
    """Round the masters of the groups to weights, and start the all-gather of the weights."""
    pairs = [pair for group in groups for pair in group.masters_to_round()]
    if pairs:
        weights, masters = zip(*pairs)
        torch._foreach_copy_(weights, masters)
    for group in groups:
        group.all_gather_params()


def make_update_sets(groups: Sequence[ParamGroup], training: Training) -> list[UpdateSet]:
    """Return the update sets, the first layers first: the forward pass needs their weights first.

    A key has up to SETS_OF_KEY sets, because the weights of a set are gathered while the next set
    is updated. With --grad-dtype bf16 a set has about the size of a bucket, because its gradients
    are copied to fp32.
    """
    sets: list[UpdateSet] = []
    for _, groups_of_key in groupby(reversed(groups), key=lambda group: group.key):
        members = list(groups_of_key)
        set_size = -(-sum(map(_master_elements, members)) // SETS_OF_KEY)  # elements, rounded up
        if training.grad_dtype == "bf16":
            set_size = min(set_size, BUCKET_ELEMENTS)
        groups_of_set: dict[int, list[ParamGroup]] = {}
        elements_before = 0
        for group in members:
            set_number = elements_before // max(1, set_size)
            groups_of_set.setdefault(set_number, []).append(group)
            elements_before += _master_elements(group)
        sets += [UpdateSet(groups_here, training) for groups_here in groups_of_set.values()]
    return sets


def _master_elements(group: ParamGroup) -> int:
    """Return the number of elements of this rank's masters of a group."""
    return sum(master.numel() for master in group.masters)
