"""When a run does what: the batch, the length and the phase of each sample, its steps and its end.

    timeline = Timeline(config)
    timeline.batch_at(9000)                          samples of the step that begins there
    timeline.length_at(9000), .tokens_at(9000)       tokens of that sample, and before it
    timeline.phase_at(9000)                          its phase of --phases; None without
    timeline.total_samples, .total_steps             of the whole run
    learning_rate.rate_at(timeline, 9000, 0, 8)      the rate of that step

Batch and length over time are one table, `Timeline.spans`. --global-batch-size,
--rampup-batch-size, --batch-schedule and --phases are four ways to write it.
"""

import bisect
import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from architecture.shape import ModelShape
from base.errors import UserError
from config import batch_schedule
from config.batch_schedule import BatchSchedule, Level
from config.phases import PlacedPhase, place
from config.run_options import Training
from config.schema import Config


class Span(NamedTuple):
    """What holds for the steps that begin after `samples` samples or more, up to the next span.

    samples, tokens: those of the run before the span. batch: the samples of a step. length: the
    tokens of a sample. phase: the phase of --phases; None without.
    """

    samples: int
    tokens: int
    batch: int
    length: int
    phase: PlacedPhase | None = None


@dataclass(frozen=True)
class Timeline:
    """What a run does when, which follows from its options and its past.

    Every answer may be a UserError if --rampup-batch-size, --batch-schedule or --skip-samples are
    malformed, or if the phases contradict what is over.
    """

    config: Config

    # ---- Batch, length and phase of a sample -----------------------------------------------------

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The table of the run, ascending; the first span begins at sample 0."""
        if self.phases:
            return tuple(Span(p.samples, p.tokens, p.batch, p.length, p) for p in self.phases)
        length = self.config.model.seq_length
        starts = batch_sizes(self.config.training, length).starts
        return tuple(Span(first, first * length, batch, length) for first, batch in starts)

    def span_at(self, samples: int) -> Span:
        """Return the span of the sample with this number in the run."""
        later = bisect.bisect_right(self.spans, samples, key=lambda span: span.samples)
        return self.spans[later - 1]

    def batch_at(self, samples: int) -> int:
        """Return the samples of the step that begins after so many samples."""
        return self.span_at(samples).batch

    def length_at(self, samples: int) -> int:
        """Return the tokens of the sample with this number in the run."""
        return self.span_at(samples).length

    def phase_at(self, samples: int) -> PlacedPhase | None:
        """Return the phase of the sample with this number in the run; None without --phases."""
        return self.span_at(samples).phase

    def tokens_at(self, samples: int) -> int:
        """Return the tokens of the run before the sample with this number."""
        span = self.span_at(samples)
        return span.tokens + (samples - span.samples) * span.length

    def model_at(self, samples: int) -> ModelShape:
        """Return the model with the sample length of the step that begins at this sample."""
        model = self.config.model
        length = self.length_at(samples)
        return (
            model if length == model.seq_length else dataclasses.replace(model, seq_length=length)
        )

    # ---- Phases and batch sizes ------------------------------------------------------------------

    @cached_property
    def phases(self) -> tuple[PlacedPhase, ...]:
        """The phases of the run, with their places; () without --phases."""
        config = self.config
        if config.plan is None:
            return ()
        size = config.training.global_batch_size
        return place(config.plan, config.past, config.data.data, config.model.seq_length, size)

    @property
    def phases_left(self) -> tuple[PlacedPhase, ...]:
        """The phases that this start and later ones train; () without --phases."""
        now = self.phase_at(self.config.past.samples)
        return self.phases[self.phases.index(now) :] if now else ()

    @property
    def lengths(self) -> list[int]:
        """The numbers of tokens that samples of this start and later ones have, ascending."""
        return sorted({p.length for p in self.phases_left} or {self.config.model.seq_length})

    @cached_property
    def batches(self) -> BatchSchedule:
        """The sizes of the run's global batches."""
        return batch_schedule.joined([(span.samples, span.batch) for span in self.spans])

    @property
    def levels(self) -> list[Level]:
        """The levels (steps with one batch size) from --begin-at-samples to --stop-at-samples.

        A resumed run has those from its checkpoint on: at least the one there, even if no step is
        left to do.
        """
        run = self.config.run
        past = self.config.past
        levels = [
            dataclasses.replace(level, first_step=level.first_step + past.step)
            for level in self.batches.levels(past.samples)
        ]
        begin, stop = run.begin_at_samples, run.stop_at_samples
        return batch_schedule.between(levels, begin, stop) or levels[:1]

    # ---- Steps that are left out -----------------------------------------------------------------

    @cached_property
    def skipped(self) -> list[tuple[int, int]]:
        """Ranges [A, B) of samples that no step trains on."""
        given = batch_schedule.parse_ranges(self.config.data.skip_samples or ())
        return given + [*self.config.passed_over]

    def passes_over(self, first: int, count: int) -> bool:
        """Return whether the step on `count` samples from sample `first` on has to be skipped."""
        return any(a < first + count and first < b for a, b in self.skipped)

    # ---- The end ---------------------------------------------------------------------------------

    @cached_property
    def total_samples(self) -> int:
        """The samples of the whole run: those of the past, and those of the steps that are left.

        With --train-samples an incomplete last batch is not read.
        """
        training = self.config.training
        if training.steps is not None:
            return self.config.past.consumed(training.steps, self.batches)
        if self._end_tokens is not None:
            return self._samples_of(self._end_tokens)
        return training.train_samples

    @property
    def total_steps(self) -> int:
        """The number of the run's last step; an incomplete last batch is no step."""
        past = self.config.past
        if self.config.training.steps is not None:
            return self.config.training.steps
        return past.step + self.batches.steps(self.total_samples, past.samples)

    @property
    def ordered(self) -> tuple[int, ...]:
        """For how many samples the order of training samples is made, and then continued.

        The last number or one before it is at least `total_samples` (Past.ordered).
        """
        past = self.config.past
        if not self.phases:
            return past.with_order(self.total_samples)
        # Phases do not read in orders of a number of samples, but what a run has read before it had
        # phases is in one, and goes on in it up to the first phase.
        if not past.ordered:
            return ()
        ends = [phase.samples for phase in self.phases[1:2]]
        return past.with_order(min([self.total_samples, *ends]))

    @property
    def _end_tokens(self) -> int | None:
        """The tokens at which a run with --phases ends; None if --train-samples says the end."""
        plan = self.config.plan
        if plan is None or self.config.training.train_samples is not None:
            return None
        return plan.train_tokens

    def _samples_of(self, tokens: int) -> int:
        """Return the samples of a run that ends with its last whole step within `tokens`."""
        last = self.phases[-1]
        begin = last.samples
        if last.is_begun:  # whole steps after those that are done, of whatever size they were
            begin = self.config.past.samples
        left = max(0, tokens - last.tokens_at(begin))
        return begin + left // (last.length * last.batch) * last.batch


def batch_sizes(training: Training, seq_length: int) -> BatchSchedule:
    """Return the batch sizes by the options; UserError if they are inconsistent.

    seq_length: the tokens of a sample, because --batch-schedule counts tokens. Without a ramp-up
    and without --batch-schedule every step has --global-batch-size samples.
    """
    size = training.global_batch_size
    steps = training.batch_schedule
    if training.rampup_batch_size and steps:
        raise UserError("give one of --rampup-batch-size and --batch-schedule; both were given")
    if training.rampup_batch_size:
        start, increment, samples = training.rampup_batch_size
        return batch_schedule.ramp(start, increment, samples, size)
    if not steps:
        return BatchSchedule(((0, size),))
    _, last_size = batch_schedule.parse_steps(steps)[-1]
    if last_size != size:
        raise UserError(
            f"global-batch-size({size}) is not the last of --batch-schedule "
            f"{' '.join(map(str, steps))}: leave it out"
        )
    return batch_schedule.by_tokens(steps, seq_length)
