"""What one rank can check by itself, since every layout is compared with it.

    for sentence in findings(config, context): ...     what is wrong; nothing if all is right

A token is changed: the losses of the tokens that cannot see it must stay, and those of the tokens
that can must change. All weights are moved a little: the sum of losses must change by its gradient,
which is compared with the gradient that the optimizer gets.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import data
import trainer
from config import validation
from config.schema import Config
from data import Batch
from distributed.context import Context
from tools.checker.shrink import LEAST_BUCKET

UNCHANGED = 1e-9  # of a loss: less is rounding
UNSEEN = 1e-14  # of a loss: a token that is seen changes it by more
# How far all weights are moved together. If the derivatives of two steps are not the same, there is
# none: a token has gone to another expert.
STEPS = (1e-6, 2e-7)
CLOSE = 1e-4  # between two derivatives, relative to the larger one
SAMPLES = 6  # in which tokens are changed
MOST = 3  # parameters that a sentence names


def findings(config: Config, context: Context) -> Iterator[str]:
    """Yield sentences about what is wrong in a run on one rank. config: small, for one rank."""
    # Auxiliary losses are added to gradients and not to the loss.
    training = dataclasses.replace(config.training, balance="none", router_z_loss=0.0)
    config = validation.check(dataclasses.replace(config, training=training), 1)
    splits = data.build(config)
    state = trainer.build(config, context, LEAST_BUCKET)
    try:
        batches = state.reader.batches(splits.train, 0, state.timeline)
        found = (_visibility_findings(state, batches(index)) for index in range(SAMPLES))
        yield from next(filter(None, map(list, found)), [])
    finally:
        state.reader.close()
    state = trainer.build(config, context, LEAST_BUCKET)
    state.factory.loss_weight.adds_terms = False  # as auxiliary losses, they are not in the loss
    try:
        yield from _gradient_findings(state, splits)
    finally:
        state.reader.close()


# ---- Which tokens a token sees -------------------------------------------------------------------


@torch.no_grad()
def _visibility_findings(state: trainer.TrainState, batch: Batch) -> Iterator[str]:
    """Yield a sentence for the first token that sees too much, and for one that sees too little."""
    (stage,) = state.stages
    vocabulary = state.config.model.vocab_size
    depends, sees_directly = _dependence(state.config, batch)
    before = _losses(stage, batch)
    length = batch.tokens.shape[1]
    for place in (0, length // 2, length - 1):
        tokens = batch.tokens.clone()
        tokens[:, place] = (tokens[:, place] + 1) % vocabulary
        change = (_losses(stage, dataclasses.replace(batch, tokens=tokens)) - before).abs()
        counts = batch.labels >= 0
        may, sees = (seen[:, :, place] for seen in (depends, sees_directly))
        for what, wrong in (
            ("depends on token {}, which it may not see", ~may & (change > UNCHANGED)),
            ("does not depend on token {}, which it sees", sees & (change < UNSEEN)),
        ):
            found = (wrong & counts).nonzero()
            if len(found):
                _, token = found[0].tolist()
                yield f"the loss of token {token} of a sample {what.format(place)}"
                return


def _losses(stage: Any, batch: Batch) -> Tensor:
    """Return the loss of each token, (b, s), as the head returns it in a pass of the stage.

    If the head runs several times, such as for later tokens too, the losses are added.
    """
    returned: list[torch.Tensor] = []
    hook = stage.head.register_forward_hook(lambda head, given, found: returned.append(found))
    try:
        stage(batch.tokens, batch)
    finally:
        hook.remove()
    return torch.stack(returned).sum(0).t()


def _dependence(config: Config, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return whether token q depends on token k: through all blocks, and in one of them.

    Both are (b, q, k), bool.
    """
    samples, length = batch.tokens.shape
    places = torch.arange(length)
    starts = torch.zeros(samples, length, dtype=torch.int64)
    stops = (places + 1).expand(samples, length)
    if batch.starts is not None and batch.stops is not None:
        starts, stops = batch.starts, batch.stops
    depends = torch.eye(length).expand(samples, -1, -1)
    directly = depends > 0
    for block in range(config.model.layers):
        first = starts
        mixers = config.model.mixers_of(block)
        if not mixers:  # an MLP alone
            continue
        if mixers == ("attention",) and (window := config.model.attention_of(block).window):
            first = starts.maximum(places - window + 1)
        if mixers == ("short_conv",):
            first = starts.maximum(places - config.model.mixer_kernel + 1)
        sees = (places >= first[..., None]) & (places < stops[..., None])
        depends = ((sees.float() @ depends + depends) > 0).float()
        directly = directly | sees
    return depends > 0, directly


# ---- Gradients -----------------------------------------------------------------------------------


def _gradient_findings(state: trainer.TrainState, splits: data.Splits) -> Iterator[str]:
    """Yield a sentence if gradients are not the derivatives of the loss.

    A derivative is the difference of the losses with weights moved to both sides.
    """
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        """Keep the gradients of this step's passes."""
        for shard in state.optimizer.owned():
            for_all = shard.group.own_gradients()
            if for_all:
                flat = for_all[shard.master].view(-1)
                stop = shard.offset + shard.stop - shard.start
                gradients[_key(shard)] = flat[shard.offset : stop].double().clone()

    state.optimizer.after_reduction.append(keep)
    trainer.run_passes(state, splits.train, 0)
    state.optimizer.discard()
    state.optimizer.after_reduction.remove(keep)
    names = list(gradients)
    found, *expected = _derivatives(state, splits, gradients, names)
    if not _differs(found, expected):
        return
    wrong = []
    for name in names:
        found, *expected = _derivatives(state, splits, gradients, [name])
        if _differs(found, expected):
            wrong.append(f"that of {name} is {found / expected[0]:.4g} times the loss's")
    if wrong:
        of = f"{len(wrong)} of {len(names)} gradients are no derivatives of the loss"
        yield f"{of}: {', '.join(wrong[:MOST])}"


def _key(shard: Any) -> str:
    """Return a shard's name: the parameter's, with its first element if it is not the whole.

    Adafactor's masters are the experts' matrices, several of one parameter.
    """
    return f"{shard.spec.name}[{shard.start}:]" if shard.start else shard.spec.name


def _differs(found: float, expected: list[float]) -> bool:
    """Return whether a derivative by gradients is not that by losses, for both step sizes."""
    largest = max(map(abs, expected))
    if not largest or abs(expected[0] - expected[1]) > CLOSE * largest:
        return False
    return abs(found - expected[0]) > 10 * CLOSE * largest


def _derivatives(
    state: trainer.TrainState,
    splits: data.Splits,
    gradients: dict[str, Tensor],
    names: list[str],
) -> list[float]:
    """Return the derivative of the mean loss along a random direction of some parameters.

    First by the gradients, then by the losses of moved weights, for each of STEPS.
    """
    generator = torch.Generator().manual_seed(0)
    direction = {
        name: torch.randn(len(gradients[name]), generator=generator, dtype=torch.float64)
        for name in names
    }
    size = math.sqrt(sum(float(d.square().sum()) for d in direction.values()))
    by_gradients = sum(float(gradients[n] @ d) for n, d in direction.items()) / size
    tokens = state.timeline.batch_at(0) * state.config.model.seq_length
    derivatives = [by_gradients]
    for step in STEPS:
        sums = []
        for sign in (1.0, -1.0):
            move = {name: d * (sign * step / size) for name, d in direction.items()}
            moved = _moved(state, move, lambda: trainer.run_passes(state, splits.train, 0)[0])
            sums.append(float(moved.sum()))  # with --z-loss there are two sums
        derivatives.append((sums[0] - sums[1]) / (2 * step * tokens))
    return derivatives


def _moved(state: trainer.TrainState, move: dict[str, Tensor], run: Callable[[], Tensor]) -> Tensor:
    """Return what `run` gives with `move` added to weights, which are restored bit for bit.

    move: by the key of a shard.
    """
    optimizer = state.optimizer
    shards = [shard for shard in optimizer.owned() if _key(shard) in move]
    kept = [shard.read("weights", shard.start, shard.stop).clone() for shard in shards]
    for shard, values in zip(shards, kept, strict=True):
        shard.write("weights", shard.start, values + move[_key(shard)])
    optimizer.after_load()
    result = run()
    optimizer.discard()
    for shard, values in zip(shards, kept, strict=True):
        shard.write("weights", shard.start, values)
    optimizer.after_load()
    return result
