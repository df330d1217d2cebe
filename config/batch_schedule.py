"""The number of samples in each step, and the samples to skip (--skip-samples). Pure arithmetic.

    schedule = ramp(192, 16, 9_765_625, 2048)
    schedule.batch(consumed)        size of the step that begins after `consumed` samples
    schedule.levels()               each size: when it begins, and for how many steps
    parse_ranges(("96:128",))       [(96, 128)]: steps with any of these samples are skipped

A `BatchSchedule` has starts: (consumed samples, batch size from there on). A `Level` is a number of
consecutive steps with one batch size.

Batch sizes and skipped steps depend on the number of consumed samples alone, so a resumed run,
under any layout, continues as if it had not been interrupted.
"""

import bisect
import math
from dataclasses import dataclass
from itertools import pairwise

from base.errors import UserError

# The most samples in a step. Pipeline schedules list the actions for every micro-batch of a step,
# so a larger step would take too much memory.
LARGEST = 2**20
SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Level:
    """Consecutive steps of one batch size.

    batch: the batch size. first_step, consumed: the numbers of steps and samples before this level.
    """

    batch: int
    first_step: int
    consumed: int
    steps: int | None  # number of steps of this level; None: until training ends


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch size as a function of the consumed samples.

    starts: (consumed samples, batch size from there on), ascending, the first at 0.
    """

    starts: tuple[tuple[int, int], ...]

    def batch(self, consumed: int) -> int:
        """Return the samples in the step that begins after `consumed` samples."""
        # `later` is the index of the first start after `consumed`.
        later = bisect.bisect_right(self.starts, consumed, key=lambda start: start[0])
        _, size = self.starts[later - 1]  # the last start at or before `consumed`
        return size

    def levels(self, consumed: int = 0) -> list[Level]:
        """Return the levels from `consumed` samples on. The last level has no end.

        The step that begins at `consumed` has number 0. The step in which the next start lies has
        the old size, since a size changes only between two steps.
        """
        levels = []
        step = 0
        # Each size `batch` holds up to the next start, at `end` consumed samples.
        for (_, batch), (end, _) in pairwise(self.starts):
            steps = -((consumed - end) // batch)  # (end - consumed) / batch, rounded up
            if steps > 0:
                levels.append(Level(batch, step, consumed, steps))
                step += steps
                consumed += steps * batch
        return [*levels, Level(self.starts[-1][1], step, consumed, None)]

    def consumed(self, steps: int, consumed: int = 0) -> int:
        """Return the samples that a run has consumed `steps` steps after it had `consumed`."""
        level = [level for level in self.levels(consumed) if level.first_step <= steps][-1]
        return level.consumed + (steps - level.first_step) * level.batch

    def steps(self, samples: int, consumed: int = 0) -> int:
        """Return the number of whole batches between `consumed` and `samples` consumed samples.

        Called to get the steps of a run that reads `samples` samples, or those after a resume.
        """
        if samples < consumed:
            return 0
        level = [level for level in self.levels(consumed) if level.consumed <= samples][-1]
        return level.first_step + (samples - level.consumed) // level.batch


def ramp(start: int, increment: int, samples: int, target: int) -> BatchSchedule:
    """Return Megatron's linear ramp-up START INCREMENT SAMPLES to `target` (megatron/core 0.16).

    At `consumed` samples the size is START + int(consumed / (SAMPLES / n)) * INCREMENT, where n is
    the number of increments; after SAMPLES it is `target`. Raise UserError if the increments do not
    end at `target`.
    """
    if min(start, increment, samples) < 1 or target <= start or (target - start) % increment:
        raise UserError(
            f"a ramp-up from {start} by {increment} over {samples} samples does not reach "
            f"global-batch-size({target})"
        )
    increments = (target - start) // increment
    samples_per_size = samples / increments  # a float, as in Megatron, with its rounding errors
    starts = [(0, start)]
    for i in range(1, increments + 1):
        # Find the least number of consumed samples for which Megatron's formula gives increment i.
        # The search begins one too low, because the quotient of floats may be rounded up.
        first = math.ceil(i * samples_per_size) - 1
        while first <= samples and int(first / samples_per_size) < i:
            first += 1
        starts.append((first, start + i * increment))
    return joined(starts)


def by_tokens(words: tuple[str, ...], seq_length: int) -> BatchSchedule:
    """Return the schedule of words TOKENS:SIZE, such as 0:192 5B:1024: SIZE from TOKENS tokens on.

    Tokens are rounded down to whole samples of `seq_length`. Raise UserError for malformed words.
    """
    return joined([(tokens // seq_length, size) for tokens, size in parse_steps(words)])


def between(levels: list[Level], begin: int, stop: int) -> list[Level]:
    """Return the levels that one launch of the run uses, whose batch sizes its layout must divide.

    begin, stop: --begin-at-samples and --stop-at-samples, the consumed samples between which the
    launch trains; stop is 0 if it has no end. A level is used if it ends after `begin` and begins
    before `stop`.
    """
    return [
        level
        for level in levels
        if (not stop or level.consumed < stop)
        and (level.steps is None or level.consumed + level.steps * level.batch > begin)
    ]


def parse_steps(words: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return (tokens, batch size) for each word of --batch-schedule, such as 0:192 5B:1024.

    A size is used from its number of consumed tokens on. K, M, B and T after a number of tokens are
    powers of a thousand. Raise UserError if a word is malformed or the tokens do not ascend from 0.
    """
    text = " ".join(map(str, words))
    steps = []
    for word in words:
        tokens, _, size = str(word).partition(":")
        number = _tokens(tokens)
        if number is None or not size.isdecimal() or not 0 < float(size) <= LARGEST:
            wanted = f"TOKENS:SIZE such as 5B:1024, not {word!r} (SIZE: at most {LARGEST})"
            raise UserError(f"--batch-schedule takes {wanted}")
        steps.append((number, int(size)))
    first_tokens, _ = steps[0]
    if first_tokens != 0:
        raise UserError(f"--batch-schedule {text}: the first size is for 0 tokens, as in 0:192")
    for (before, _), (after, _) in pairwise(steps):
        if after <= before:
            raise UserError(f"--batch-schedule {text}: {after} tokens do not come after {before}")
    return steps


def _tokens(text: str) -> int | None:
    """Return a number of tokens, such as 5000000000 for 5B; None if the text is not a number."""
    factor = SUFFIXES.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    try:
        number = float(digits) * factor
    except ValueError:
        return None
    return round(number) if 0 <= number < math.inf else None


def joined(starts: list[tuple[int, int]]) -> BatchSchedule:
    """Return the schedule of these starts, without starts that have no effect.

    A start has no effect if the next start is at the same sample, or if its size is the size
    before it. starts: (consumed samples, batch size from there on), ascending.
    """
    kept: list[tuple[int, int]] = []
    for start, batch in starts:
        if kept and kept[-1][0] == start:  # this start replaces another at the same sample
            kept.pop()
        # A start is left out if the batch size before it is the same already.
        if not kept or kept[-1][1] != batch:
            kept.append((start, batch))
    return BatchSchedule(tuple(kept))


def parse_ranges(words: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the ranges [A, B) of samples of --skip-samples, ascending.

    words: texts A:B. Raise UserError if a word is malformed or two ranges overlap.
    """
    ranges = []
    for word in words:
        first, _, end = str(word).partition(":")
        if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
            raise UserError(
                f"--skip-samples takes A:B, from sample A up to but not including B, not {word!r}"
            )
        ranges.append((int(first), int(end)))
    ranges.sort()
    for (start, stop), (next_start, next_stop) in pairwise(ranges):
        if next_start < stop:
            text = f"{start}:{stop} and {next_start}:{next_stop} overlap"
            raise UserError(f"--skip-samples: {text}")
    return ranges
