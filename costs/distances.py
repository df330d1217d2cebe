"""How far a layout is from the runs that were measured, and how much longer its step may take then.

    spread(job, block, step)     # a standard deviation of the logarithm of the seconds
    reasons(job, block, step)    # words on what it comes from, for one layout

Predictions of layouts that no run was like are off to one side: they take longer. The quantities by
which a layout is far, where rows end and what held-out errors were beyond are in distances.toml.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from config.command_line import read_toml
from costs.job import Column, Job

FILE = Path(__file__).with_suffix(".toml")


class Distance(NamedTuple):
    """A quantity by which a layout may be far from measured runs: a table of distances.toml.

    start: the value up to which runs were measured. less: whether smaller values are the far ones.
    wider: the standard deviation for each doubling beyond `start`. says: a format of the value.
    """

    name: str
    start: float
    less: bool
    wider: float
    says: str

    def doublings(self, value: Column) -> Column:
        """Return by how many doublings a value is beyond `start`; 0 where it is not."""
        ratio = self.start / value if self.less else value / self.start
        return np.log2(np.maximum(1.0, ratio))


def _over_nodes(job: Job, ranks: Column) -> Column:
    """Return a number of ranks over the GPUs of a node."""
    return ranks / job.machine.node


def _short_blocks(job: Job, block: Column, step: Column) -> Column:
    """Return the milliseconds of a block in which ranks wait for each other, or infinity.

    Infinity also for programs whose host is never late (Megatron-Core), of which short blocks were
    measured.
    """
    waits = np.maximum(np.maximum(job.layout.tp, job.cp), job.ep) > 1
    waits = waits & (job.machine.software.host_per_operation > 0)
    return np.where(waits, 1e3 * block, math.inf)


def _waiting_ranks(job: Job, block: Column, step: Column) -> Column:
    """Return the ranks with the same weights for each second of a step; 0 on one node."""
    return np.where(job.gpus > job.machine.node, job.shards / step, 0.0)


def _cp_tokens(job: Job, block: Column, step: Column) -> Column:
    """Return the tokens of a micro-batch on a rank with cp, or infinity."""
    return np.where(np.greater(job.cp, 1), job.tokens, math.inf)


def _sharded_ranks(job: Job, block: Column, step: Column) -> Column:
    """Return the ranks over which --zero 3 shards weights, or 0."""
    return np.where(np.equal(job.layout.zero, 3), job.shards, 0)


# By the name of a distance, its quantity: of a job, the seconds of a block's forward and of a step.
QUANTITIES: Mapping[str, Callable[[Job, Column, Column], Column]] = MappingProxyType(
    {
        "tp_over_nodes": lambda job, block, step: _over_nodes(job, job.layout.tp),
        "short_blocks": _short_blocks,
        "waiting_ranks": _waiting_ranks,
        "cp": lambda job, block, step: job.cp,
        "cp_tokens": _cp_tokens,
        "experts": lambda job, block, step: 1 + (job.model.experts > 1),
        "ep_over_nodes": lambda job, block, step: _over_nodes(job, job.ep),
        "stages": lambda job, block, step: job.layout.pp,
        "sharded_ranks": _sharded_ranks,
        "schedule": lambda job, block, step: 1 + 1 * job.layout.splits_backward,
    }
)


@cache  # the file is read once
def tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of distances.toml by the name of the distance."""
    return MappingProxyType(read_toml(FILE, FILE.name))


@cache
def distances() -> tuple[Distance, ...]:
    """Return the distances of distances.toml; those without rows have the median of the others."""
    fitted = [table["wider"] for table in tables().values() if table["wider"] != "median"]
    found = []
    for name, table in tables().items():
        wider = statistics.median(fitted) if table["wider"] == "median" else table["wider"]
        start, less = float(table["from"]), bool(table.get("less"))
        found.append(Distance(name, start, less, wider, table["says"]))
    return tuple(found)


def spread(job: Job, block: Column, step: Column) -> Column:
    """Return the standard deviation that distances add above the predicted seconds, or a column.

    block: seconds of a block's forward for one micro-batch. step: seconds of a step. The distances
    are taken as independent causes.
    """
    squares: Column = 0.0
    for one in distances():
        if one.wider:
            beyond = one.doublings(QUANTITIES[one.name](job, block, step))
            squares = squares + (one.wider * beyond) ** 2
    return np.sqrt(squares)


def reasons(job: Job, block: float, step: float) -> list[str]:
    """Return words on each distance of a layout that widens its interval, the largest first."""
    found = []
    for one in distances():
        value = QUANTITIES[one.name](job, block, step)
        if widens := one.wider * float(one.doublings(value)):
            found.append((widens, one.says.format(value=float(value))))
    return [words for _, words in sorted(found, reverse=True)]
