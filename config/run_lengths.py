"""The lengths that options give, each compared with what the run consumes. Pure arithmetic.

    check_rate(config)        UserError for a schedule of the rate that can never be meant
    notes(config, given)      lines on what begins or ends only after the run

What a run consumes is `Timeline.total_samples`, and nothing else. A length beyond it is no mistake
by itself: a run may be extended later, and then its schedule holds. It is one if no longer run
would have a use for it, such as a decay that ends before the warm-up; but a run that is resumed has
begun with its schedule, and goes on.
"""

import contextlib
from collections.abc import Collection, Iterator

from base.errors import UserError
from config.learning_rate import rate_at
from config.schema import Config
from config.timeline import Timeline

# Options that count steps between two events, and what comes of one longer than the run.
PERIODS = {
    "eval_every": "the run is evaluated only when it ends",
    "save_every": "a checkpoint is saved only when it ends",
    "sample_every": "no text is sampled",
    "audit_every": "nothing is audited",
}


def check_rate(config: Config) -> None:
    """Raise UserError if the decay that the options give ends before it can begin."""
    training = config.training
    end = training.lr_decay_samples
    if end is None or config.past.step:
        return
    warmup = training.lr_warmup_samples
    fall = training.lr_wsd_decay_samples or 0
    if warmup >= end:
        raise UserError(
            f"lr-warmup-samples({warmup}) is not below lr-decay-samples({end}), which is counted "
            "from the run's begin: the rate would fall from its peak at once"
        )
    if warmup + fall > end:
        raise UserError(
            f"lr-warmup-samples({warmup}) + lr-wsd-decay-samples({fall}) = {warmup + fall} is more "
            f"than lr-decay-samples({end}), which is counted from the run's begin"
        )


def notes(config: Config, given: Collection[str]) -> list[str]:
    """Return a line for each length that the run's end comes before; [] if it has no end yet.

    given: the names of options that flags or a file give.
    """
    # A contradiction of batch sizes and phases is reported by config/validation.py.
    with contextlib.suppress(UserError):
        if has_end(config):
            timeline = Timeline(config)
            return [*_rate_notes(timeline), *_batch_notes(timeline), *_step_notes(timeline, given)]
    return []


def has_end(config: Config) -> bool:
    """Return whether the options say how long the run is."""
    training = config.training
    by_plan = config.plan is not None and config.plan.train_tokens is not None
    return by_plan or training.steps is not None or training.train_samples is not None


def _rate_notes(timeline: Timeline) -> Iterator[str]:
    """Yield a line if the schedule of the rate does not fit into the run."""
    training = timeline.config.training
    # With --phases samples have several lengths, and those of the options have --seq-length tokens.
    total = timeline.tokens_at(timeline.total_samples) // timeline.config.model.seq_length
    run = f"the run's {total:,} samples"
    warmup = training.lr_warmup_samples
    name = f"the warm-up of {warmup:,} samples (--lr-warmup-samples)"
    falls = training.lr_schedule in ("cosine", "linear", "wsd")
    end = training.lr_decay_samples or total
    fall = 0
    if training.lr_schedule == "wsd":
        fall = training.lr_wsd_decay_samples or end // 10
    if warmup > total:
        yield f"{name} is longer than {run}: {_last_rate(timeline)}"
    elif warmup and falls and warmup >= end:
        yield f"{name} leaves nothing of {end:,} samples to the decay: {_last_rate(timeline)}"
    elif warmup + fall > end:
        yield (
            f"{name} and wsd's decay of {fall:,} (lr_wsd_decay_samples) are longer than {end:,} "
            f"samples: the decay begins at the warm-up's end; {_last_rate(timeline)}"
        )
    elif falls and end > total:
        yield f"the decay ends at {end:,} samples (--lr-decay-samples), after {run}: " + (
            _last_rate(timeline)
        )


def _last_rate(timeline: Timeline) -> str:
    """Return the rate of the run's last step beside the peak."""
    total = timeline.total_samples
    batch = timeline.batches.batch(max(0, total - 1))
    rate = rate_at(timeline, max(0, total - batch), 0, batch)
    return f"the last rate is {rate:.3g} of --lr {timeline.config.training.lr:.3g}"


def _batch_notes(timeline: Timeline) -> Iterator[str]:
    """Yield a line for batch sizes, skipped samples and phases that the run does not reach."""
    total = timeline.total_samples
    run = f"the run's {total:,} samples"
    if timeline.config.plan is None:
        later = [(start, size) for start, size in timeline.batches.starts if start >= total > 0]
        if later:
            start, size = later[-1]
            yield f"the batch of {size} begins at {start:,} samples, and {run} end before it"
    for first, end in timeline.skipped:
        if first >= total:
            yield f"--skip-samples {first}:{end} begins after {run}"
        elif first == 0 and end >= total:
            yield f"--skip-samples {first}:{end} has all of {run}: no step trains"
    ends = [phase.samples for phase in timeline.phases[1:]] + [total]
    for phase, end in zip(timeline.phases, ends):
        own = phase.settings
        length = (min(end, total) - phase.samples) * phase.length
        rate = (own.lr_warmup_tokens or 0) + (own.lr_wsd_decay_tokens or 0)
        if phase.samples >= total:
            both = f"{phase.tokens:,} tokens, and the run ends at {timeline.tokens_at(total):,}"
            yield f"phase {phase.name} begins at {both}"
        elif rate > length:
            both = "lr_warmup_tokens and lr_wsd_decay_tokens"
            yield f"{both} of phase {phase.name} are {rate:,} tokens, and it has {length:,}"


def _step_notes(timeline: Timeline, given: Collection[str]) -> Iterator[str]:
    """Yield a line for options that count steps, and more of them than the run has."""
    steps = timeline.total_steps
    values = vars(timeline.config.data) | vars(timeline.config.run)
    for name, result in PERIODS.items():
        if name in given and values[name] > steps:
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} {values[name]} is more than the run's {steps:,} steps: {result}"
    ema = timeline.config.training.ema
    average = round(1 / (1 - ema))
    if average > steps > 0:
        yield (
            f"--ema {ema:g} averages over about {average:,} steps, and the run "
            f"has {steps:,}: the average is still near the first weights"
        )
