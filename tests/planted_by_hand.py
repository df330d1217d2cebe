"""Faults written by hand for tests/plants.py, each with what `runs.py diff` must name.

Each takes the built state, the data, an object that undoes its patches, and the Sites, which know
whether the fault is at work in a step and keep where it changed a bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from layers import attention
from model import Head
from optim.buckets import Bucket, ParamGroup

GRADIENT, BEFORE, AFTER = "gradient", "weights before", "weights after"
TOKENS = "embedding.tokens.weight"


@dataclass(frozen=True)
class ByHand:
    """A fault. rows: kinds and names (or their beginnings) of which diff must name one; "" stands
    for the first parameter that the fault notes. operation: what it must print as its cause.
    later: steps from the first altered one to the first in which the trace can show it.
    """

    plant: Callable
    rows: tuple[tuple[str, str], ...]
    operation: str
    layouts: tuple[str, ...]
    later: int = 0


def while_active(patch, sites, owner, name: str, other: Callable) -> None:
    """Replace a function by other(original, *arguments) in the steps in which the fault works."""
    original = getattr(owner, name)

    def called(*arguments, **named):
        if not sites.active():
            return original(*arguments, **named)
        sites.hit(site=f"by hand {name}", detail="")
        return other(original, *arguments, **named)

    patch.setattr(owner, name, called)


def first_block(state, number: int):
    """Return a block of the model if this rank holds it, else None."""
    for stage in state.stages:
        for n, block in enumerate(stage.blocks, stage.spec.first):
            if n == number:
                return block
    return None


# ---- Starts and data -----------------------------------------------------------------------------


def other_seed(state, splits, patch, sites) -> None:
    """One rank draws its matrices with another seed."""
    if state.factory.mesh.rank == sites.plant["rank"]:
        torch.manual_seed(7)
        sites.hits.append({"step": 1, "site": "by hand", "detail": ""})
        for p in state.stages.parameters():
            if p.spec.decay:
                p.data.normal_(std=0.02)


def other_order(state, splits, patch, sites) -> None:
    """Samples 10 and 13, of step 2, are exchanged."""
    exchanged = {10: 13, 13: 10}
    sample = splits.train.sample
    patch.setattr(splits.train, "sample", lambda k: sample(exchanged.get(k, k)))
    sites.hits.append({"step": 2, "site": "by hand", "detail": ""})


def last_label(state, splits, patch, sites) -> None:
    """The last label of every sample is the next token's number."""
    sample = splits.train.sample
    step = sites.plant["step"]

    def changed(k: int):
        tokens = sample(k).copy()
        tokens[-1] = (tokens[-1] + (k >= 8 * (step - 1))) % 61
        return tokens

    patch.setattr(splits.train, "sample", changed)
    sites.hits.append({"step": step, "site": "by hand", "detail": ""})


def vocabulary_off_by_one(state, splits, patch, sites) -> None:
    """One tensor rank looks up the row of the token before."""
    tokens = state.stages[0].embedding
    if tokens is not None:
        while_active(patch, sites, tokens.tokens, "forward", lambda f, x: f((x - 1).clamp(min=0)))


# ---- Layers --------------------------------------------------------------------------------------


def mask_off_by_one(state, splits, patch, sites) -> None:
    """Every token sees the next one too."""

    def seen(attend, q, k, v, is_causal=False, **named):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
        return attend(q, k, v, attn_mask=mask if is_causal else None, **named)

    while_active(patch, sites, F, "scaled_dot_product_attention", seen)


def other_scale(state, splits, patch, sites) -> None:
    """The logits of attention are divided by the size of a head, and not by its root."""

    def scaled(attend, q, *rest, **named):
        return attend(q, *rest, scale=1.0 / q.shape[-1], **named)

    while_active(patch, sites, F, "scaled_dot_product_attention", scaled)


def rotary_halves_swapped(state, splits, patch, sites) -> None:
    """The two halves of a head are turned in the other direction."""

    def swapped(rotate, x, tables):
        cos, sin = tables
        return rotate(x, (cos, -sin))

    while_active(patch, sites, attention, "rotate", swapped)


def rotary_off_by_one(state, splits, patch, sites) -> None:
    """One rank has the rotary tables of the tokens before its own."""
    stage = state.stages[0]
    while_active(
        patch,
        sites,
        stage.positions,
        "rotary",
        lambda rotary, *given: tuple(table.roll(1, 0) for table in rotary(*given)),
    )


def attention_norm(state, splits, patch, sites) -> None:
    """Block 1's attention norm has another constant."""
    block = first_block(state, 1)
    if block is not None:
        while_active(patch, sites, block.attention_norm, "add_and_normalise", _without_eps(block))


def _without_eps(block):
    def other(add_and_normalise, x, y):
        x, normed = add_and_normalise(x, y)
        return x, normed * 1.01

    return other


def mlp_norm(state, splits, patch, sites) -> None:
    """Block 0's MLP norm is scaled."""
    block = first_block(state, 0)
    if block is not None:
        while_active(patch, sites, block.mlp_norm, "add_and_normalise", _without_eps(block))


def final_norm(state, splits, patch, sites) -> None:
    """The final norm is scaled."""
    head = state.stages[-1].head
    if head is not None:
        while_active(patch, sites, head.norm, "forward", lambda f, x: f(x) * 1.01)


def other_activation(state, splits, patch, sites) -> None:
    """Block 1's MLP has GELU's approximation by tanh."""
    block = first_block(state, 1)
    if block is not None:
        while_active(
            patch, sites, block.mlp, "activation", lambda f, x: F.gelu(x, approximate="tanh")
        )


def bias_of_every_rank(state, splits, patch, sites) -> None:
    """Every tensor rank adds block 0's bias of the MLP, which is 0 in step 1."""
    block = first_block(state, 0)
    if block is not None:
        down = block.mlp.down
        tp = state.factory.mesh.tp.size
        while_active(patch, sites, down, "forward", lambda f, x: f(x) + (tp - 1) * down.bias)


def router_scale(state, splits, patch, sites) -> None:
    """Block 0's router gives weights whose sum is not 1."""

    def other(forward, *arguments):
        experts, weights, counts = forward(*arguments)
        return experts, weights * 1.01, counts

    block = first_block(state, 0)
    if block is not None:
        while_active(patch, sites, block.mlp.router, "forward", other)


def labels_shifted(state, splits, patch, sites) -> None:
    """The loss takes the labels of the token before."""
    head = state.stages[-1].head
    if head is not None:
        original = Head.forward

        def shifted(own, x, labels):
            if not sites.active():
                return original(own, x, labels)
            sites.hit(site="by hand Head.forward", detail="")
            return original(own, x, labels.roll(1, 1))

        patch.setattr(Head, "forward", shifted)


# ---- Gradients and updates -----------------------------------------------------------------------


def further(patch, sites, wanted: Callable, times: int) -> None:
    """Reduce the gradients of some groups so many times over tp or the tied ends."""
    once = ParamGroup.reduce_further

    def reduced(group) -> None:
        altered = sites.active() and wanted(group.key)
        if altered and hasattr(group, "places") and group.masters:
            sites.hit(site="by hand", detail=",".join(p.spec.name for p, _ in group.places))
        for _ in range(times if altered else 1):
            once(group)

    patch.setattr(ParamGroup, "reduce_further", reduced)


def tied_counted_twice(state, splits, patch, sites) -> None:
    """The gradients of both ends are summed twice."""
    further(patch, sites, lambda key: "tied" in key.reduce_over, 2)


def norms_not_reduced(state, splits, patch, sites) -> None:
    """Gradients of norms, which are terms of a sum, are not summed over tp."""
    further(patch, sites, lambda key: "tp" in key.reduce_over and key.no_decay, 0)


def wrong_divisor(state, splits, patch, sites) -> None:
    """The losses are divided by half of the targets."""
    while_active(patch, sites, state.optimizer, "begin_step", lambda begin, *of: 2 * begin(*of))


def gradients_kept(state, splits, patch, sites) -> None:
    """The gradients of one pass are still in the buffer when the next one adds its own."""
    kept = {}
    reduce_once = Bucket.reduce

    def reduce(bucket):
        gradients = bucket.gradients.clone()
        if sites.active() and bucket in kept:
            sites.hit(site="by hand Bucket.reduce", detail="")
            bucket.gradients.add_(kept[bucket])
        kept[bucket] = gradients
        return reduce_once(bucket)

    patch.setattr(Bucket, "reduce", reduce)


def decayed_twice(state, splits, patch, sites) -> None:
    """Every update makes all weights smaller by a hundredth."""

    def smaller(each):
        def update(original, *arguments):
            original(*arguments)
            torch._foreach_mul_(each.masters, 0.99)

        return update

    for each in state.optimizer.update_sets:
        while_active(patch, sites, each.rule, "update", smaller(each))


def other_rate(state, splits, patch, sites) -> None:
    """The optimizer's rule takes half of the learning rate."""
    for each in state.optimizer.update_sets:
        while_active(patch, sites, each.rule, "update", lambda update, of, lr: update(of, lr / 2))


def clipped_twice(state, splits, patch, sites) -> None:
    """The gradients are made smaller by a tenth before the update."""
    while_active(
        patch,
        sites,
        state.optimizer,
        "_update",
        lambda update, lr, norm, share: update(lr, norm, share * 0.9),
    )


ATTENTION = (("activation", "blocks.0.attention"),)
UPDATE = ((AFTER, TOKENS),)
FAULTS = {
    "other_seed": ByHand(
        other_seed, ((BEFORE, TOKENS),), "the state from which", ("tp", "tp-sp", "tp-dp-z1")
    ),
    "other_order": ByHand(
        other_order,
        (("activation", "tokens"),),
        "reading the samples",
        ("dp-z1", "pp", "cp", "tp-pp", "cp-dp", "dp-z3"),
    ),
    "last_label": ByHand(
        last_label, (("activation", "labels"),), "reading the samples", ("tp", "pp-zbv", "dp-z2")
    ),
    "vocabulary_off_by_one": ByHand(
        vocabulary_off_by_one, (("activation", "embedding"),), "the tokens' rows", ("tp", "tp-pp")
    ),
    "mask_off_by_one": ByHand(
        mask_off_by_one, ATTENTION, "attention with", ("tp-sp", "pp-zbh1", "dp-z3", "tp-pp-dp")
    ),
    "other_scale": ByHand(other_scale, ATTENTION, "attention with", ("tp", "ep-dp", "cp")),
    "rotary_halves_swapped": ByHand(
        rotary_halves_swapped, ATTENTION, "positions", ("tp-rotary", "cp-rotary", "pp-rotary")
    ),
    "rotary_off_by_one": ByHand(
        rotary_off_by_one, ATTENTION, "positions", ("cp-rotary", "cp4-rotary")
    ),
    "attention_norm": ByHand(
        attention_norm,
        (("activation", "blocks.1.attention"),),
        "attention norm",
        ("tp-dp-z1", "pp4", "pp-interleaved"),
    ),
    "mlp_norm": ByHand(mlp_norm, (("activation", "blocks.0"),), "MLP norm", ("cp", "tp-experts")),
    "final_norm": ByHand(final_norm, (("activation", "head.norm"),), "final norm", ("pp", "dp-z0")),
    "other_activation": ByHand(
        other_activation, (("activation", "blocks.1"),), "activation", ("tp-pp", "dp-z2")
    ),
    "bias_of_every_rank": ByHand(
        bias_of_every_rank, (("activation", "blocks.0"),), "MLP down", ("tp", "tp-sp"), 0
    ),
    "router_scale": ByHand(
        router_scale, (("activation", "blocks.0"),), "router", ("ep-dp", "tp-experts")
    ),
    "labels_shifted": ByHand(
        labels_shifted, (("activation", "loss"),), "cross-entropy", ("tp", "pp-zbh1")
    ),
    "tied_counted_twice": ByHand(
        tied_counted_twice, ((GRADIENT, ""),), "both ends of the pipeline", ("pp", "tp-pp", "pp4")
    ),
    "norms_not_reduced": ByHand(
        norms_not_reduced, ((GRADIENT, ""),), "over tp where", ("tp-sp", "tp-sp-dp-z2")
    ),
    "wrong_divisor": ByHand(
        wrong_divisor,
        (("activation", "gradient of head.norm"),),
        "the loss's divisor",
        ("dp-z1", "pp-vocab", "dp-z3", "ep-tp"),
    ),
    "gradients_kept": ByHand(
        gradients_kept, ((GRADIENT, TOKENS),), "the sum over micro-batches", ("dp-z1", "pp")
    ),
    "decayed_twice": ByHand(decayed_twice, UPDATE, "the optimizer's rule", ("dp-z0", "tp", "pp")),
    "other_rate": ByHand(other_rate, UPDATE, "its learning rate", ("dp-z2", "cp-dp")),
    "clipped_twice": ByHand(clipped_twice, (("exp_avg", TOKENS),), "clipping", ("tp-sp", "dp-z3")),
}
