"""The learning rate of every step, as a function of what was done before it. Pure arithmetic.

learning_rate(training, samples, total, batch)     by the options of a run, in samples
rate_at(timeline, consumed, skipped, batch)        the same, or by the phases of the run
"""

import math
from dataclasses import dataclass

from config.phases import PlacedPhase
from config.run_options import Training
from config.timeline import Timeline


@dataclass(frozen=True)
class Curve:
    """A schedule of the rate. All lengths are in one unit, such as samples or tokens.

    peak, low: the highest rate, and the one at `end`. warmup: of linear rise. end: where the fall
    ends. wsd_decay: the length of wsd's fall before `end`; None: a tenth. style: of wsd's fall.
    """

    schedule: str
    peak: float
    low: float
    warmup: int
    end: int
    wsd_decay: int | None = None
    style: str = "linear"

    @property
    def wsd_fall(self) -> int:
        """Where wsd's stable phase ends and the rate falls; before the warmup's end, at that."""
        return self.end - (self.wsd_decay or self.end // 10)

    def rate(self, done: int, step: int) -> float:
        """Return the learning rate of a step of `step` samples that begins after `done` samples."""
        # In the warmup the rate is that of the step's last sample, so that no step has the rate 0.
        if done < self.warmup:
            return self.peak * (done + step) / (self.warmup + step)
        if self.schedule == "constant":
            return self.peak
        if self.schedule == "inverse-square-root":
            return max(self.low, self.peak * math.sqrt(self.warmup / max(1, done)))
        if done >= self.end:
            return self.low
        begin = self.warmup  # where the rate begins to fall
        if self.schedule == "wsd":
            begin = max(begin, self.wsd_fall)
            if done <= begin:  # exactly, so that a stable run and its branches have one rate
                return self.peak
        # How much of the way from `begin` to `end` is done: from 0, at `peak`, to 1, at `low`.
        share = max(0.0, (done - begin) / max(1, self.end - begin))
        if self.schedule == "cosine":
            return self.low + (self.peak - self.low) * 0.5 * (1 + math.cos(math.pi * share))
        if self.schedule == "wsd" and self.style == "1-sqrt":
            share = math.sqrt(share)
        return self.low + (self.peak - self.low) * (1 - share)


def learning_rate(training: Training, samples: int, total: int, batch: int) -> float:
    """Return the learning rate of a step on `batch` samples; called before each step.

    samples: the number of samples trained on before the step. total: the number in the whole run.
    The rate rises linearly for lr_warmup_samples. Then --lr-schedule decides: constant, or a cosine
    or linear fall to the final rate at lr_decay_samples (default: total), or wsd (arXiv
    2404.06395): constant, and then a fall to the final rate over the last lr_wsd_decay_samples
    before lr_decay_samples (default: a tenth of these), which is linear or as 1 - sqrt(share done)
    (arXiv 2405.18392), or inverse-square-root: lr * sqrt(lr_warmup_samples / samples), never below
    the final rate.
    """
    return curve_of_run(training, total, 1).rate(samples, batch)


def curve_of_run(training: Training, total: int, unit: int) -> Curve:
    """Return the schedule of a run's options.

    total: the length of the run. unit: how long a sample of the options is, in the unit of `total`.
    """
    decay = training.lr_wsd_decay_samples
    return Curve(
        training.lr_schedule,
        training.lr,
        training.final_lr,
        training.lr_warmup_samples * unit,
        (training.lr_decay_samples or 0) * unit or total,
        None if decay is None else decay * unit,
        training.lr_wsd_decay_style,
    )


def rate_at(timeline: Timeline, consumed: int, skipped: int, batch: int) -> float:
    """Return the rate of the step on `batch` samples that begins after `consumed` samples.

    skipped: how many of them were in steps that changed no weight; these do not count without
    --phases. With phases, which are at fixed numbers of tokens, all tokens count. A phase with a
    schedule of its own goes by its own tokens; other phases by the run's options, whose samples are
    of --seq-length tokens, over the tokens of the whole run.
    """
    span = timeline.span_at(consumed)
    # With one length of samples for all phases the unit is a sample, and rates are bit for bit
    # those of the run without phases.
    length = timeline.config.model.seq_length
    unit = math.gcd(length, *(other.length for other in timeline.spans))
    step = batch * span.length // unit
    tokens = timeline.tokens_at(consumed)
    if span.phase is not None and span.phase.settings.has_rate:
        curve = _curve_of_phase(timeline, span.phase, unit)
        return curve.rate((tokens - span.tokens) // unit, step)
    if span.phase is None:
        tokens -= skipped * length
    total = timeline.tokens_at(timeline.total_samples) // unit
    curve = curve_of_run(timeline.config.training, total, length // unit)
    return curve.rate(tokens // unit, step)


def _curve_of_phase(timeline: Timeline, phase: PlacedPhase, unit: int) -> Curve:
    """Return the schedule of a phase with keys about the rate. unit: of its lengths, in tokens."""
    training = timeline.config.training
    own = phase.settings
    later = [other.tokens for other in timeline.phases if other.tokens > phase.tokens]
    end = max(min([*later, timeline.tokens_at(timeline.total_samples)]), phase.tokens)
    peak = training.lr if own.lr is None else own.lr
    low = own.min_lr
    if low is None:
        low = training.final_lr if own.lr is None else peak / 10
    decay = own.lr_wsd_decay_tokens
    return Curve(
        own.lr_schedule or "constant",
        peak,
        low,
        (own.lr_warmup_tokens or 0) // unit,
        (end - phase.tokens) // unit,
        None if decay is None else decay // unit,
        own.lr_wsd_decay_style or training.lr_wsd_decay_style,
    )
