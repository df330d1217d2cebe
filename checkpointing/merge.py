"""Merges checkpoints of one model: the weighted mean of their weights, as one new checkpoint.

    shares = shares_of("1-sqrt", 5)            how much each counts, the oldest first
    merge(folders, shares, target)             writes a run folder with weights only

Merging checkpoints of the stable phase stands in for a decay of the learning rate (arXiv
2507.17634, 2505.12082). The layouts and precisions of the runs that saved them may differ.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from architecture.shape import ModelShape
from base.errors import CheckpointError, UserError
from checkpointing import model_record
from checkpointing.folders import folder_name, step_of
from checkpointing.index import Index
from checkpointing.resumed import configuration
from checkpointing.state import Progress
from checkpointing.weights_only import Contents, write_checkpoint
from config.command_line import make_model
from config.inherited import OBJECTIVE, sample_options

EQUAL, LINEAR, SQRT, EMA = "equal", "linear", "1-sqrt", "ema"


def shares_of(text: str, count: int) -> list[float]:
    """Return the weight of each of `count` checkpoints, the oldest first, before normalisation.

    text: a value of --weights:

        equal          1 each. The steps between the checkpoints then fade linearly: it stands in
                       for a linear decay of the learning rate.
        linear         1, 2, ..., count: a newer checkpoint counts more.
        1-sqrt         checkpoint i counts sqrt((i + 1) / count) - sqrt(i / count). Step i between
                       two checkpoints then counts 1 - sqrt(i / count), as in a decay by 1-sqrt
                       (arXiv 2405.18392); the rule is that of arXiv 2507.17634.
        ema:DECAY      an exponential moving average that begins with the oldest: average = DECAY
                       average + (1 - DECAY) next.
        A,B,C,...      a number for each.

    Raise UserError if the text is none of these, if there is another count of numbers, or if a
    number is negative or none is positive.
    """
    if text == EQUAL:
        return [1.0] * count
    if text == LINEAR:
        return [float(i + 1) for i in range(count)]
    if text == SQRT:
        return [math.sqrt((i + 1) / count) - math.sqrt(i / count) for i in range(count)]
    kind, colon, rest = text.partition(":")
    if kind == EMA and colon:
        decay = _number(rest, text)
        if not 0 <= decay < 1:
            raise UserError(f"--weights {text}: the decay({decay:g}) is not from 0 to below 1")
        newer = [(1 - decay) * decay ** (count - 1 - i) for i in range(1, count)]
        return [decay ** (count - 1), *newer]
    numbers = [_number(part, text) for part in text.split(",")]
    if len(numbers) != count:
        raise UserError(f"--weights {text} has {len(numbers)} numbers for {count} checkpoints")
    if min(numbers) < 0 or not 0 < sum(numbers) < math.inf:
        raise UserError(f"--weights {text}: no number may be negative, and one must be positive")
    return numbers


def _number(text: str, option: str) -> float:
    """Return a number in the text of --weights; UserError if it is none."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        names = f"{EQUAL}, {LINEAR}, {SQRT}, {EMA}:DECAY or a number for each checkpoint"
        raise UserError(f"--weights {option}: {text!r} is no number; it takes {names}")
    return number


def merge(
    sources: Sequence[str], shares: Sequence[float], target: str, averaged: bool = False
) -> list[str]:
    """Write the weighted mean of checkpoints as a new folder; return lines on what was merged.

    sources: folders of checkpoints whose files have been checked. shares: how much each counts;
    the mean is their sum of products in fp64, divided by the sum of shares and rounded once to the
    widest type in which a source was saved. One tensor is in memory at a time.
    averaged: whether to merge the averages of --ema in place of the weights. The new checkpoint
    has the tokenizer, special tokens and step of the source with the largest step. Raise UserError
    if the models differ, if a mean is not finite, or if `target` exists.
    """
    with ExitStack() as stack:
        indices = [stack.enter_context(Index(folder)) for folder in sources]
        newest = max(range(len(sources)), key=lambda i: step_of(sources[i]))
        model = _common_model(indices, newest)
        record = model_record.read(sources[newest])
        if record is None:
            record = model_record.without_tokenizer(model.seq_length)
        progress = Progress(**indices[newest].attributes("progress"))
        merged_from = [
            {"checkpoint": folder, "share": share / sum(shares)}
            for folder, share in zip(sources, shares)
        ]
        dtype = max((index.dtypes["weights"] for index in indices), key=lambda d: d.itemsize)
        shapes = indices[newest].shapes
        options = [configuration(index) for index in indices]
        source = {"merged_from": merged_from, **_sample_options(options[newest])}
        contents = Contents(model, shapes, str(dtype), record, source, progress)
        write_checkpoint(target, contents, _means(indices, shares, contents, averaged))
    lines = [f"{each['share']:.4f} of {each['checkpoint']}" for each in merged_from]
    lines += _other_samples(sources, options, newest)
    return [*lines, f"{target}/{folder_name(progress.iteration)}: their mean, in {dtype}"]


def _sample_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's options, by group, by which its checkpoint is evaluated."""
    taken = sample_options(options, {})
    data = {name: value for name, value in taken.items() if name in OBJECTIVE}
    return {"data": data, "training": {"seed": taken.get("seed", 0)}} if data else {}


def _other_samples(
    sources: Sequence[str], options: Sequence[Mapping[str, Any]], newest: int
) -> list[str]:
    """Return a line for each source whose samples were others than those of the newest one."""
    own = _sample_options(options[newest]).get("data", {})
    lines = []
    for folder, each in zip(sources, options):
        theirs = _sample_options(each).get("data", {})
        names = [name for name in OBJECTIVE if theirs.get(name) != own.get(name)]
        if names:
            differ = ", ".join(f"{n} {theirs.get(n)} against {own.get(n)}" for n in names)
            lines.append(f"{folder} had other samples than {sources[newest]}: {differ}")
    return lines


def _common_model(indices: Sequence[Index], newest: int) -> ModelShape:
    """Return the shape of the model that all checkpoints have; UserError if two differ.

    The lengths of samples may differ: no weight depends on them with rotary positions. Those of the
    checkpoint number `newest` are returned.
    """
    models = [make_model(index.attributes("model"), index.path) for index in indices]
    first = dataclasses.asdict(models[newest])
    for index, model in zip(indices, models):
        other = dataclasses.asdict(model)
        lengths = (
            ("seq_length", "max_positions") if model.positions == "rotary" else ("seq_length",)
        )
        different = [
            f"{name} {first[name]} against {other[name]}"
            for name in first
            if first[name] != other[name] and name not in lengths
        ]
        if not different and index.shapes != indices[newest].shapes:
            names = sorted(index.shapes.items() ^ indices[newest].shapes.items())
            different = [f"{name} {shape} in one of them only" for name, shape in names[:4]]
        if different:
            both = f"{indices[newest].folder} and {index.folder}"
            raise CheckpointError(f"{both} are of different models: {', '.join(different)}")
    return models[newest]


def _means(
    indices: Sequence[Index], shares: Sequence[float], contents: Contents, averaged: bool
) -> Iterator[np.ndarray]:
    """Yield the mean of each tensor, flat; UserError if a mean is not finite."""

    def read(index: Index, name: str) -> np.ndarray:
        return index.read_whole(index.weights_kind(averaged), name)

    total = math.fsum(shares)
    for name, shape in contents.shapes.items():
        mean = np.zeros(math.prod(shape), np.float64)
        for index, share in zip(indices, shares):
            mean += share * read(index, name).reshape(-1).astype(np.float64)
        mean /= total
        if wrong := mean.size - int(np.isfinite(mean).sum()):
            raise CheckpointError(
                f"{wrong:,} of {mean.size:,} values of the mean of {name} are not finite: leave "
                "out the checkpoints in which they are not"
            )
        yield mean.astype(contents.dtype)
