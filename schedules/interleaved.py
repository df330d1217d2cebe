"""The interleaved schedule: its groups of micro-batches, when it ends, and what its ranks hold.

    order = Interleaved(ranks=4, virtual=2, micro_batches=10)
    order.groups                        [(0, 5), (5, 10)]
    order.ends(seconds, transfer)       of all ranks at once, without a list of actions

A rank holds several stages, `ranks` apart, and takes a group of micro-batches through all of them
(arXiv 2104.04473). Its forward passes are numbered in its order: group by group, in a group stage
by stage, in a stage by micro-batch; its backward passes too, with the last stage first. The model
chunk of a stage is its number among the stages of its rank. The n-th passes of all ranks are of the
same micro-batch and the same chunk, and wait for one another in the order of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from schedules.actions import Seconds


@dataclass(frozen=True)
class Interleaved:
    """An interleaved schedule; virtual: the stages of each rank."""

    ranks: int
    virtual: int
    micro_batches: int

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """The groups of micro-batches, each from a first one to before a last one.

        They are of nearly equal size. A group has at least as many micro-batches as there are
        ranks, or it has all micro-batches. With 4 ranks and 10 micro-batches they are (0, 5) and
        (5, 10).
        """
        rounds = max(1, self.micro_batches // self.ranks)
        ends = [-(-number * self.micro_batches // rounds) for number in range(rounds + 1)]
        return list(pairwise(ends))

    def ahead(self, rank: int) -> int:
        """Return the number of a rank's forward passes before its first backward pass.

        They are the first group in all of the rank's stages but the last, and two for each later
        rank, because the first micro-batch goes through that rank forward and backward before its
        gradient arrives.
        """
        return 2 * (self.ranks - 1 - rank) + (self.virtual - 1) * self.groups[0][1]

    @cached_property
    def _group_sizes(self) -> np.ndarray:
        """The number of micro-batches of each group: (groups,)."""
        return np.array([end - begin for begin, end in self.groups])

    @cached_property
    def _chunks(self) -> np.ndarray:
        """The model chunk of each forward pass of a rank, in order: (passes,).

        The backward pass with the same number is of the chunk `virtual` - 1 less this one.
        """
        chunks = np.tile(np.arange(self.virtual), len(self.groups))
        return np.repeat(chunks, np.repeat(self._group_sizes, self.virtual))

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the largest size of activations that each rank holds at once.

        sizes: for each stage, the size of one micro-batch's activations, in any unit.
        """
        by_chunk = np.reshape(sizes, (self.virtual, self.ranks))
        # What the first passes of each rank add and free together: (passes, ranks).
        added = np.cumsum(by_chunk[self._chunks], axis=0)
        freed = np.cumsum(by_chunk[self.virtual - 1 - self._chunks], axis=0)
        most = []
        for rank in range(self.ranks):
            # A rank holds the most after one of its forward passes: after the last of those ahead,
            # or of those that follow, between which a backward pass frees something.
            ahead = min(self.ahead(rank), len(added))
            begin = max(0, ahead - 1)
            held = added[begin:, rank].copy()
            later = held[ahead + 1 - begin :]
            later -= freed[: len(later), rank]
            most.append(held.max().item())
        return tuple(most)

    def ends(self, seconds: Seconds, transfer: float) -> tuple[float, list[float]]:
        """Return when the last action ends, and when each B of the last stage ends.

        The times are those of `simulation.ends`, faster, as all ranks are computed at once. There
        must be several ranks, and at least as many micro-batches. seconds: the duration of an
        action by (kind, stage). transfer: the time of one message.

        In step t = 0, 1, ... rank r does its forward pass t - r. Its backward pass n comes after
        the forward pass n + `ahead`, which is in step n + first - r. So every pass waits for one of
        an earlier step. That also holds where the stages go from the last rank to the first one:
        there a pass waits for the pass of the chunk before, which is a group earlier.
        """
        passes, last = len(self._chunks), self.ranks - 1
        first = 2 * last + (self.virtual - 1) * self.groups[0][1]
        steps = first + passes
        ranks = np.arange(self.ranks)
        forward_timing = self._in_steps("F", steps, ranks, seconds, transfer)
        backward_timing = self._in_steps("B", steps, first - ranks, seconds, transfer)
        # When the pass of each rank in each step ends: row t + 1 has step t. The column in front of
        # the first rank has what the last rank sends it for the pass in row t, and the column
        # behind the last rank what the first one sends back. A last row takes what is not sent.
        forward_ends = np.zeros((steps + 2, self.ranks + 1))
        backward_ends = np.zeros((steps + 2, self.ranks + 1))
        awaited = np.arange(passes) + np.repeat(self._group_sizes, self.virtual * self._group_sizes)
        is_sent = self._chunks < self.virtual - 1
        sent_to, sent_back_to = np.full((2, steps), steps + 1)
        sent_to[last : last + passes][is_sent] = awaited[is_sent]
        sent_back_to[first:][is_sent] = awaited[is_sent] + first - last
        clocks = np.zeros(self.ranks)  # for each rank, the time at which it is free
        of_steps = zip(
            zip(forward_ends[:, :-1], *forward_timing, forward_ends[1:, 1:], sent_to.tolist()),
            zip(
                backward_ends[:, 1:],
                *backward_timing,
                backward_ends[1:, :-1],
                sent_back_to.tolist(),
            ),
        )
        for forward, backward in of_steps:
            inputs, messages, durations, ended, receiver = forward
            arrived = inputs + messages
            np.maximum(clocks, arrived, out=arrived)
            clocks = np.add(arrived, durations, out=ended)
            forward_ends[receiver, 0] = clocks[last]
            inputs, messages, durations, ended, receiver = backward
            arrived = inputs + messages
            np.maximum(clocks, arrived, out=arrived)
            clocks = np.add(arrived, durations, out=ended)
            backward_ends[receiver, -1] = clocks[0]
        of_last_stage = np.flatnonzero(self._chunks == 0) + first - last
        return clocks.max().item(), backward_ends[of_last_stage + 1, last].tolist()

    def _in_steps(
        self, kind: str, steps: int, begins: np.ndarray, seconds: Seconds, transfer: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of each rank's messages and passes in each step, (steps, ranks) both.

        begins: the step of each rank's first pass of this kind. If there is no pass, or it waits
        for no other rank, the message has come at any time: -inf.
        """
        stages = range(self.virtual * self.ranks)
        by_chunk = np.reshape([seconds[kind, stage] for stage in stages], (-1, self.ranks))
        if kind == "B":  # a rank's last stage comes first
            by_chunk = by_chunk[::-1]
        messages = np.full((steps, self.ranks), -np.inf)
        durations = np.zeros((steps, self.ranks))
        for rank, begin in enumerate(begins):
            of_rank = slice(begin, begin + len(self._chunks))
            messages[of_rank, rank] = transfer
            durations[of_rank, rank] = by_chunk[self._chunks, rank]
        end_rank = 0 if kind == "F" else self.ranks - 1
        begin = begins[end_rank]
        messages[begin : begin + len(self._chunks), end_rank][self._chunks == 0] = -np.inf
        return messages, durations
