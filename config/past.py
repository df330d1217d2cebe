"""The past of a run, done before this start of it: the one place that knows what is over.

    past = Past(step=20, samples=160)              20 steps and 160 samples are done
    past.consumed(40, BatchSchedule(((0, 2),)))    200: 20 more steps with 2 samples each

A resumed run may have another batch size, ramp-up or number of steps than before. What is over
stays as it was: the total of samples, and with it the learning rate, the time left and the order of
samples, is what was consumed plus what the remaining steps consume. A checkpoint keeps the past of
its run, so several resumes with several batch sizes add up. `Config.past` is the past of a start;
it is empty in a run that begins at step 0.
"""

import json
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from config.batch_schedule import BatchSchedule

RUN = re.compile(r"[0-9a-f]{0,32}")  # Past.run


class BegunPhase(NamedTuple):
    """A phase of --phases that has begun, as it was done.

    name, from_tokens: as the file gave them. step, samples, tokens: those of the run before its
    first step. data: the words of --data. seq_length: the tokens of a sample. blocks: (corpus,
    tokens of a block) for each corpus of the data (corpora/streams.py).
    """

    name: str
    from_tokens: int
    step: int
    samples: int
    tokens: int
    data: tuple[str, ...]
    seq_length: int
    blocks: tuple[tuple[str, int], ...] = ()


class Branch(NamedTuple):
    """Where a run of --branch-from began.

    checkpoint: its folder. run: the name of the run that saved it, "" if it is not known. step,
    samples, tokens: those of that run at the checkpoint. skipped: samples of steps that changed no
    weight.
    """

    checkpoint: str
    run: str
    step: int
    samples: int
    tokens: int
    skipped: int = 0


class Start(NamedTuple):
    """An earlier start of the run.

    step, samples: what was done before it. sizes: the `starts` of its BatchSchedule.
    """

    step: int
    samples: int
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Past:
    """The steps and samples that a run has done before this start.

    step, samples: the numbers of both. starts: the earlier starts, oldest first; a start with the
    batch sizes of the start before it is left out. Empty if a checkpoint from before version 0.3
    was resumed. ordered: for how many samples the order of samples was made, and then continued
    (corpora/corpus_splits.py); empty if the data are not those of the earlier starts. run: a random
    text that all starts of a run share, by which its files are told from those of another run in
    the same folder; empty if it is not known. phases: the phases of --phases that have begun, the
    oldest first; empty without --phases. branch: where the run began as a branch; None: at step 0.
    tokens: the tokens of all samples; -1 if it is not known. skipped: the samples of steps that
    changed no weight.
    """

    step: int = 0
    samples: int = 0
    starts: tuple[Start, ...] = ()
    ordered: tuple[int, ...] = ()
    run: str = ""
    phases: tuple[BegunPhase, ...] = ()
    branch: Branch | None = None
    tokens: int = -1
    skipped: int = 0

    @property
    def last_batch(self) -> int:
        """The samples of the last step that was done; 0 if it is not known."""
        if not self.starts or not self.samples:
            return 0
        return BatchSchedule(self.starts[-1].sizes).batch(self.samples - 1)

    def begun_phases(self, data: tuple[str, ...], seq_length: int) -> tuple[BegunPhase, ...]:
        """Return the phases that have begun; a past without --phases is one.

        data, seq_length: what the run reads now, which is what it has read in such a past.
        """
        if self.phases or not self.step:
            return self.phases
        return (BegunPhase("start", 0, 0, 0, 0, data, seq_length),)

    def consumed(self, steps: int, sizes: BatchSchedule) -> int:
        """Return the samples that the run has consumed after `steps` steps, never fewer than now.

        sizes: the batch sizes of this start.
        """
        return sizes.consumed(max(0, steps - self.step), self.samples)

    def samples_of_iterations(self, count: float, size: int) -> int:
        """Return the samples of `count` iterations, with the global batch size of each start.

        size: --global-batch-size of this start. For options that count iterations, as Megatron-LM's
        do; an iteration of a ramp-up counts as one of the whole batch size, as there.
        """
        starts = [(start.step, start.sizes[-1][1]) for start in self.starts]
        starts.append((self.step if starts else 0, size))
        ends = [step for step, _ in starts[1:]] + [count]
        total = 0.0
        for (begin, batch), end in zip(starts, ends):
            total += max(0.0, min(end, count) - begin) * batch
        return round(total)

    def with_start(self, sizes: BatchSchedule) -> tuple[Start, ...]:
        """Return the earlier starts and this one, whose batch sizes are `sizes`."""
        earlier = tuple(start for start in self.starts if start.step < self.step)
        if earlier and earlier[-1].sizes == sizes.starts:
            return earlier
        if self.step and not earlier:  # from a checkpoint that does not know its starts
            return ()
        return (*earlier, Start(self.step, self.samples, sizes.starts))

    def with_order(self, total: int) -> tuple[int, ...]:
        """Return `ordered` for a run that now has `total` samples in all."""
        if self.ordered and total <= max(self.ordered):
            return self.ordered
        return (*self.ordered, total)


def to_text(
    starts: tuple[Start, ...],
    ordered: tuple[int, ...],
    run: str = "",
    phases: tuple[BegunPhase, ...] = (),
    branch: Branch | None = None,
) -> str:
    """Return the text that a checkpoint keeps of a run's past; `from_text` reads it.

    The arguments are fields of Past.
    """
    values: dict[str, Any] = {"starts": starts, "ordered": ordered, "run": run}
    if phases:
        values["phases"] = phases
    if branch:
        values["branch"] = branch
    return json.dumps(values)


def from_text(text: str, step: int, samples: int, tokens: int = -1, skipped: int = 0) -> Past:
    """Return the past of a run that resumes a checkpoint with this text, after `step` steps.

    samples, tokens: those consumed in these steps. skipped: samples without effect.
    Raise ValueError if the text is damaged.
    """
    try:
        values = json.loads(text)
        starts = []
        for first_step, first_sample, sizes in values["starts"]:
            pairs = tuple((_count(start), _count(size, 1)) for start, size in sizes)
            starts.append(Start(_count(first_step), _count(first_sample), pairs))
        ordered = tuple(_count(number, 1) for number in values["ordered"])
        run = values["run"]
        if not all(start.sizes for start in starts) or not RUN.fullmatch(run):
            raise ValueError("a start has no batch size, or the run no name")
        begun = values.get("phases", values.get("stages", ()))  # "stages" until version 0.3
        phases = tuple(_phase_from(*fields) for fields in begun)
        begins = [(phase.step, phase.samples, phase.tokens) for phase in phases]
        if begins and (begins[0] != (0, 0, 0) or any(a >= b for a, b in pairwise(begins))):
            raise ValueError("its phases do not follow each other from step 0 on")
        branch = values.get("branch")
        if branch is not None:
            folder, name, *counts = branch
            if not isinstance(folder, str) or not RUN.fullmatch(name) or len(counts) != 4:
                raise ValueError("it is no branch")
            branch = Branch(folder, name, *map(_count, counts))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{text:.80} is no past of a run") from None
    return Past(step, samples, tuple(starts), ordered, run, phases, branch, tokens, skipped)


def _phase_from(
    name: Any, first: Any, step: Any, samples: Any, tokens: Any, data: Any, length: Any, blocks: Any
) -> BegunPhase:
    """Return the phase of these values of a text; raise ValueError if one of them is wrong."""
    words = [name, *data, *(prefix for prefix, _ in blocks)]
    if not data or not all(isinstance(word, str) and word.isprintable() for word in words):
        raise ValueError("a phase has no data")
    sizes = tuple((prefix, _count(size, 1)) for prefix, size in blocks)
    return BegunPhase(
        name,
        _count(first),
        _count(step),
        _count(samples),
        _count(tokens),
        tuple(data),
        _count(length, 1),
        sizes,
    )


def new_run() -> str:
    """Return a new `Past.run`, for a run that begins at step 0."""
    return os.urandom(8).hex()


def _count(value: Any, least: int = 0) -> int:
    """Return a whole number from `least` to 2^63 - 1; raise ValueError for any other value."""
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value
