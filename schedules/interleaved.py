"""The interleaved schedule: its groups of micro-batches, when it ends, and what its ranks hold.

    order = Interleaved(ranks=4, virtual=2, micro_batches=10)
    order.groups                        [(0, 5), (5, 10)]
    order.ends(seconds, transfer)       of all ranks at once, without a list of actions

A rank holds several stages, `ranks` apart, and takes a group of micro-batches through all of them
(arXiv 2104.04473). Its forward passes are numbered in its order: group by group, in a group stage
by stage, in a stage by micro-batch; its backward passes too, with the last stage first. The place
of a stage is its number among the stages of its rank. The n-th passes of all ranks are of the same
micro-batch and the same place, and wait for one another in the order of ranks.
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
    def _places(self) -> np.ndarray:
        """The place of each forward pass of a rank, in order: (passes,).

        The backward pass with the same number has the place `virtual` - 1 less this one.
        """
        places = np.tile(np.arange(self.virtual), len(self.groups))
        return np.repeat(places, np.repeat(self._group_sizes, self.virtual))

    def most_held(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the largest size of activations that each rank holds at once.

        sizes: for each stage, the size of one micro-batch's activations, in any unit.
        """
        of_places = np.reshape(sizes, (self.virtual, self.ranks))
        # What the first passes of each rank add and free together: (passes, ranks).
        added = np.cumsum(of_places[self._places], axis=0)
        freed = np.cumsum(of_places[self.virtual - 1 - self._places], axis=0)
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
        there a pass waits for the pass of the place before, which is a group earlier.
        """
        last = self.ranks - 1
        first = 2 * last + (self.virtual - 1) * self.groups[0][1]
        ranks, steps = np.arange(self.ranks), np.arange(first + len(self._places))
        forward = steps[:, None] - ranks  # the number of each rank's pass in each step
        backward = steps[:, None] - first + ranks
        # When the pass of each rank in each step ends: row t + 1 has step t. The column in front of
        # the first rank has what the last rank sends it for the pass in row t, and the column
        # behind the last rank what the first one sends back.
        forward_ends = np.zeros((len(steps) + 2, self.ranks + 1))
        backward_ends = np.zeros((len(steps) + 2, self.ranks + 1))
        sent_to = self._receiving_step(forward[:, last], steps).tolist()
        sent_back_to = self._receiving_step(backward[:, 0], steps).tolist()
        clocks = np.zeros(self.ranks)  # for each rank, the time at which it is free
        each_step = zip(
            zip(forward_ends[:, :-1], *self._timing("F", forward, seconds, transfer)),
            zip(backward_ends[:, 1:], *self._timing("B", backward, seconds, transfer)),
            forward_ends[1:, 1:],
            backward_ends[1:, :-1],
        )
        for step, (
            (forward_inputs, forward_messages, forward_seconds),
            (backward_inputs, backward_messages, backward_seconds),
            forward_end,
            backward_end,
        ) in enumerate(each_step):
            arrived = forward_inputs + forward_messages
            np.maximum(clocks, arrived, out=arrived)
            np.add(arrived, forward_seconds, out=forward_end)
            forward_ends[sent_to[step], 0] = forward_end[last]
            arrived = backward_inputs + backward_messages
            np.maximum(forward_end, arrived, out=arrived)
            clocks = np.add(arrived, backward_seconds, out=backward_end)
            backward_ends[sent_back_to[step], -1] = backward_end[0]
        passes_of_last_stage = np.flatnonzero(self._places == 0)
        backwards = backward_ends[passes_of_last_stage + first - last + 1, last]
        return clocks.max().item(), backwards.tolist()

    def _timing(
        self, kind: str, numbers: np.ndarray, seconds: Seconds, transfer: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of messages and of passes, both (steps, ranks).

        numbers: the number of each rank's pass in each step. If there is no such pass, or it waits
        for no other rank, the message has come at any time: -inf.
        """
        is_pass = (numbers >= 0) & (numbers < len(self._places))
        places = self._places[np.clip(numbers, 0, len(self._places) - 1)]
        if kind == "B":
            places = self.virtual - 1 - places
        stages = places * self.ranks + np.arange(self.ranks)
        count = self.virtual * self.ranks
        without_input = 0 if kind == "F" else count - 1
        messages = np.where(is_pass & (stages != without_input), transfer, -np.inf)
        of_stages = np.array([seconds[kind, stage] for stage in range(count)])
        return messages, np.where(is_pass, of_stages[stages], 0.0)

    def _receiving_step(self, numbers: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the step in which an end rank's pass is awaited by the other end: (steps,).

        numbers: the number of the pass in each step. It is the number after the last step for a
        pass that has no next place, and where there is no pass.
        """
        counted = np.clip(numbers, 0, len(self._places) - 1)
        is_sent = (numbers == counted) & (self._places[counted] < self.virtual - 1)
        groups = np.repeat(self._group_sizes, self.virtual * self._group_sizes)
        received = steps - (self.ranks - 1) + groups[counted]
        return np.where(is_sent, received, len(steps) + 1)
