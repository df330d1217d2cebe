"""Where a row of a trace belongs: samples, micro-batches and ranks; the operations before it."""

from collections.abc import Iterable
from typing import Any

from config.schema import AXES, Layout, coordinates
from schedules.partition import placement

ATTENTION = "norm, q k v matrix, positions, attention"


class Place:
    """The layout of one run, by a trace's facts and the run's run.json."""

    def __init__(self, about: dict[str, Any], facts: dict[str, Any]):
        self.layout = Layout(**about["layout"])
        self.samples = about["samples"]
        self.bins = about["bins"]
        self.blocks: list[int] = facts.get("blocks_per_stage") or [sum(_blocks(about))]

    def stage(self, name: str) -> int:
        """Return the number of the stage that computes a tensor."""
        part, number = [*name.removeprefix("gradient of ").split("."), ""][:2]
        if part in ("embedding", "tokens"):
            return 0
        if part != "blocks":
            return len(self.blocks) - 1
        last = 0
        for stage, count in enumerate(self.blocks):
            last += count
            if int(number) < last:
                return stage
        return len(self.blocks) - 1

    def samples_of(self, bins: Iterable[int]) -> list[int]:
        """Return the samples of the step's global batch that are in the bins, from 0 on."""
        wanted = set(bins)
        return [i for i in range(self.samples) if i * self.bins // self.samples in wanted]

    def micro_batches(self, samples: Iterable[int]) -> dict[int, list[int]]:
        """Return the micro-batches that hold the samples, by the rank of dp."""
        found: dict[int, set[int]] = {}
        for sample in samples:
            number = sample // self.layout.micro_batch_size
            found.setdefault(number % self.layout.dp, set()).add(number // self.layout.dp)
        return {rank: sorted(numbers) for rank, numbers in sorted(found.items())}

    def ranks(self, name: str, replicas: Iterable[int]) -> list[int]:
        """Return the ranks that compute a tensor for these ranks of dp."""
        axes = self.layout.axes
        pp = placement(self.layout)[self.stage(name)]
        wanted = set(replicas)
        size = 1
        for axis in AXES:
            size *= axes[axis]
        places = [coordinates(rank, axes) for rank in range(size)]
        return [r for r, at in enumerate(places) if at["pp"] == pp and at["dp"] in wanted]


def _blocks(about: dict[str, Any]) -> list[int]:
    return [
        1 for name in about["activations"] if name.startswith("blocks.") and name.count(".") == 1
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers in ascending order as text: 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def title(kind: str, name: str) -> str:
    """Return a row's name in words."""
    if kind == "weights before":
        return f"the weights {name} before the step"
    if kind == "gradient":
        return f"the gradient of {name}, after its reduction"
    if kind == "weights after":
        return f"the update of {name}"
    if kind != "activation":
        return f"the optimizer's {kind} of {name}"
    if name.startswith("gradient of "):
        return f"the gradient of {title(kind, name.removeprefix('gradient of '))}"
    part, number, *inner = [*name.split("."), "", ""]
    if part == "blocks":
        return f"the output of block {number}" + "'s attention" * (inner[0] == "attention")
    words = {"embedding": "the output of the embedding", "head": "the output of the final norm"}
    words |= {"loss": "the losses"}
    return words.get(part, f"the {part}")


def operations(kind: str, name: str, layouts: Iterable[Layout]) -> str:
    """Return in words which operations compute a row from those before it.

    layouts: of both runs; a collective is named if one of them has it.
    """
    has = list(layouts)
    tp = " and its reduction over tp" * any(each.tp > 1 for each in has)
    cp = " (k and v gathered over cp)" * any(each.cp > 1 for each in has)
    dp = "the sum over micro-batches"
    dp += ", the reduction over dp and cp" * any(each.dp * each.cp > 1 for each in has)
    dp += ", over tp for tensors that every tensor rank holds" * any(each.tp > 1 for each in has)
    dp += ", over the first and last stage if tied" * any(each.pp > 1 for each in has)
    if kind == "weights before":
        return "the state from which the runs began, or an earlier step"
    if kind == "gradient":
        return f"the backward product of this layer alone, {dp}"
    if kind != "activation":
        return "clipping and the optimizer's update" + ", ZeRO's all-gather" * (
            kind[-5:] == "after"
        )
    if name.startswith("gradient of "):
        return _backward(name.removeprefix("gradient of "), tp, cp)
    if name in ("tokens", "labels"):
        return "reading the samples: corpus, order, seed, masks, the shares of cp"
    if name == "embedding":
        return f"token rows{tp}, positions, the embedding's norm"
    if name.endswith(".attention"):
        return f"{ATTENTION}{cp}, output matrix{tp}"
    if name.startswith("blocks."):
        return f"norm, MLP up, activation, MLP down{tp} (with experts: router and exchange)"
    if name == "loss":
        return f"the output matrix, the cross-entropy{tp}"
    return "the final norm"


def _backward(name: str, tp: str, cp: str) -> str:
    """Return the operations between an activation's gradient and those computed before it."""
    if name == "head.norm":
        return f"the loss's divisor, the cross-entropy's backward, the output matrix's{tp}"
    if name.endswith(".attention"):
        return f"the MLP's backward: down, activation, up{tp}, norm"
    return f"the next block's backward, or the final norm's: {ATTENTION}{cp}, the sum over tp, norm"
