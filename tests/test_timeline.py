"""The timeline of a run: if this failed, a command of an earlier version would be another run.

`OldArithmetic` is what version 0.3 computed, with a formula for each spelling of a batch that
grows; `Timeline` has one table for all of them.
"""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config import batch_schedule
from config.batch_schedule import BatchSchedule
from config.command_line import build
from config.learning_rate import Curve, learning_rate, rate_at
from config.past import Past
from config.phases import from_table, place
from config.schema import Config
from config.timeline import Timeline

LENGTH = 16
SHAPE = {"layers": 1, "hidden": 8, "heads": 2, "seq_length": LENGTH, "vocab_size": 61}


class OldArithmetic:
    """The methods of `Config` and the function `rate_at` of version 0.3, word for word."""

    def __init__(self, config: Config):
        self.config = config
        self.past, self.plan = config.past, config.plan
        self.placed = ()
        if config.plan is not None:
            size = config.training.global_batch_size
            self.placed = place(config.plan, config.past, config.data.data, LENGTH, size)
        self.batches = self._batches()

    def _batches(self) -> BatchSchedule:
        training = self.config.training
        if self.placed:
            return batch_schedule.joined([(one.samples, one.batch) for one in self.placed])
        size, steps = training.global_batch_size, training.batch_schedule
        if training.rampup_batch_size:
            return batch_schedule.ramp(*training.rampup_batch_size, size)
        if steps:
            return batch_schedule.by_tokens(steps, LENGTH)
        return BatchSchedule(((0, size),))

    def phase_at(self, samples: int):
        found = [one for one in self.placed if one.samples <= samples]
        return found[-1] if found else None

    def length_at(self, samples: int) -> int:
        phase = self.phase_at(samples)
        return phase.length if phase else LENGTH

    def tokens_at(self, samples: int) -> int:
        phase = self.phase_at(samples)
        return phase.tokens_at(samples) if phase else samples * LENGTH

    @property
    def levels(self):
        run, past = self.config.run, self.past
        levels = [
            dataclasses.replace(level, first_step=level.first_step + past.step)
            for level in self.batches.levels(past.samples)
        ]
        found = batch_schedule.between(levels, run.begin_at_samples, run.stop_at_samples)
        return found or levels[:1]

    @property
    def end_tokens(self) -> int | None:
        if self.plan is None or self.config.training.train_samples is not None:
            return None
        return self.plan.train_tokens

    @property
    def total_samples(self) -> int:
        training = self.config.training
        if training.steps is not None:
            return self.past.consumed(training.steps, self.batches)
        if self.end_tokens is not None:
            last = self.placed[-1]
            steps = max(0, self.end_tokens - last.tokens) // (last.length * last.batch)
            begin = last.samples
            if last.is_begun:
                begin = self.past.samples
                left = max(0, self.end_tokens - last.tokens_at(begin))
                steps = left // (last.length * last.batch)
            return begin + steps * last.batch
        return training.train_samples

    @property
    def total_steps(self) -> int:
        if self.config.training.steps is not None:
            return self.config.training.steps
        return self.past.step + self.batches.steps(self.total_samples, self.past.samples)

    @property
    def ordered(self) -> tuple[int, ...]:
        if self.plan is not None:
            if not self.past.ordered:
                return ()
            ends = [one.samples for one in self.placed[1:2]]
            return self.past.with_order(min([self.total_samples, *ends]))
        return self.past.with_order(self.total_samples)

    def rate_at(self, consumed: int, skipped: int, batch: int) -> float:
        training = self.config.training
        phase = self.phase_at(consumed)
        if phase is None:
            return learning_rate(training, consumed - skipped, self.total_samples, batch)
        unit = math.gcd(LENGTH, *(other.length for other in self.placed))
        step = batch * phase.length // unit
        total = self.tokens_at(self.total_samples)
        if not phase.settings.has_rate:
            per_sample = LENGTH // unit
            decay = training.lr_wsd_decay_samples
            curve = Curve(
                training.lr_schedule,
                training.lr,
                training.final_lr,
                training.lr_warmup_samples * per_sample,
                (training.lr_decay_samples or 0) * per_sample or total // unit,
                None if decay is None else decay * per_sample,
                training.lr_wsd_decay_style,
            )
            return curve.rate(self.tokens_at(consumed) // unit, step)
        own = phase.settings
        later = [other.tokens for other in self.placed if other.tokens > phase.tokens]
        end = max(min([*later, total]), phase.tokens)
        peak = training.lr if own.lr is None else own.lr
        low = own.min_lr
        if low is None:
            low = training.final_lr if own.lr is None else peak / 10
        curve = Curve(
            own.lr_schedule or "constant",
            peak,
            low,
            (own.lr_warmup_tokens or 0) // unit,
            (end - phase.tokens) // unit,
            None if own.lr_wsd_decay_tokens is None else own.lr_wsd_decay_tokens // unit,
            own.lr_wsd_decay_style or training.lr_wsd_decay_style,
        )
        return curve.rate((self.tokens_at(consumed) - phase.tokens) // unit, step)


# ---- Options -------------------------------------------------------------------------------------


@st.composite
def rates(draw) -> dict[str, Any]:
    """Options of the learning rate."""
    found: dict[str, Any] = {"lr": 1e-2, "min_lr": 1e-3}
    found["lr_schedule"] = draw(st.sampled_from(["constant", "linear", "cosine", "wsd"]))
    lengths = {"lr_warmup_samples": (0, 60), "lr_decay_samples": (1, 900)}
    if found["lr_schedule"] == "wsd":
        lengths["lr_wsd_decay_samples"] = (1, 200)
    for name, (least, most) in lengths.items():
        if draw(st.booleans()):
            found[name] = draw(st.integers(least, most))
    return found


@st.composite
def sizes(draw) -> dict[str, Any]:
    """Options of a batch that is constant, ramps up, or follows a schedule."""
    way = draw(st.sampled_from(["constant", "ramp", "schedule"]))
    start, increment = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    if way == "constant":
        return {"global_batch_size": start}
    if way == "ramp":
        target = start + increment * draw(st.integers(1, 8))
        ramp = (start, increment, draw(st.integers(1, 500)))
        return {"global_batch_size": target, "rampup_batch_size": ramp}
    starts = [0, *sorted(draw(st.sets(st.integers(1, 9000), min_size=1, max_size=4)))]
    chosen = [draw(st.integers(1, 30)) for _ in starts]
    words = tuple(f"{tokens}:{size}" for tokens, size in zip(starts, chosen))
    return {"global_batch_size": chosen[-1], "batch_schedule": words}


@st.composite
def tables(draw) -> tuple[list[dict[str, Any]], int]:
    """The [[phase]] tables of a file, and its train_tokens."""
    found, tokens = [], draw(st.sampled_from([0, 0, 700]))
    for number in range(draw(st.integers(1, 4))):
        table: dict[str, Any] = {"name": f"p{number}", "from_tokens": tokens}
        if draw(st.booleans()):
            table["seq_length"] = draw(st.sampled_from([4, 8, 12, 16]))
        if draw(st.booleans()):
            table["global_batch_size"] = draw(st.integers(1, 12))
        if draw(st.booleans()):
            table["lr_schedule"] = draw(st.sampled_from(["constant", "linear", "cosine", "wsd"]))
            table["lr_warmup_tokens"] = draw(st.integers(0, 500))
        if table.get("lr_schedule") == "wsd":
            table["lr_wsd_decay_tokens"] = draw(st.integers(1, 900))
        found.append(table)
        # A phase has a step of at most 12 samples of 16 tokens, and so has the one before the file.
        tokens += draw(st.integers(300, 2500))
    return found, tokens


def check_equal(config: Config, chance: st.DataObject) -> None:
    """Every answer of the timeline is that of the old arithmetic, to the bit."""
    old, timeline = OldArithmetic(config), Timeline(config)
    assert timeline.phases == old.placed
    assert timeline.batches == old.batches
    assert timeline.levels == old.levels
    assert timeline.total_samples == old.total_samples
    assert timeline.total_steps == old.total_steps
    assert timeline.ordered == old.ordered
    most = max(old.total_samples, 1)
    samples = {0, config.past.samples, most, *(one.samples for one in old.placed)}
    samples |= set(chance.draw(st.lists(st.integers(0, 2 * most), max_size=8)))
    for sample in sorted(samples):
        batch = old.batches.batch(sample)
        assert timeline.batch_at(sample) == batch
        assert timeline.length_at(sample) == old.length_at(sample)
        assert timeline.tokens_at(sample) == old.tokens_at(sample)
        assert timeline.phase_at(sample) == old.phase_at(sample)
        assert timeline.model_at(sample).seq_length == old.length_at(sample)
        skipped = sample // 3
        assert rate_at(timeline, sample, skipped, batch) == old.rate_at(sample, skipped, batch)


@settings(max_examples=100, deadline=None)
@given(st.data(), sizes(), rates(), st.sampled_from(["steps", "train_samples"]))
def test_batches_by_options_are_those_of_version_0_3(chance, batch, rate, end):
    """Without a past, and after some steps of an earlier start that had another batch size."""
    config = build(SHAPE | batch | rate | {end: chance.draw(st.integers(1, 1500))})
    check_equal(config, chance)
    earlier = BatchSchedule(((0, chance.draw(st.integers(1, 9))),))
    step = chance.draw(st.integers(1, 40))
    samples = earlier.consumed(step)
    starts, order = Past().with_start(earlier), Past().with_order(samples + 5)
    past = Past(step, samples, starts, order, tokens=samples * LENGTH)
    check_equal(dataclasses.replace(config, past=past), chance)


@settings(max_examples=100, deadline=None)
@given(st.data(), tables(), rates(), st.sampled_from(["train_tokens", "steps", "train_samples"]))
def test_phases_are_those_of_version_0_3(chance, phases, rate, end):
    """Without a past, and after some steps."""
    file: dict[str, Any] = {"phase": phases[0]}
    options = SHAPE | rate | {"global_batch_size": chance.draw(st.integers(1, 8))}
    if end == "train_tokens":
        file["train_tokens"] = phases[1]
    else:
        options[end] = chance.draw(st.integers(1, 300))
    config = dataclasses.replace(build(options), plan=from_table(file, "months.toml"))
    check_equal(config, chance)
    timeline = Timeline(config)
    step = chance.draw(st.integers(1, 60))
    samples = timeline.batches.consumed(step)
    past = Past(
        step,
        samples,
        Past().with_start(timeline.batches),
        phases=tuple(one.begun() for one in timeline.phases if one.samples < samples),
        tokens=timeline.tokens_at(samples),
    )
    check_equal(dataclasses.replace(config, past=past), chance)


# ---- One table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "growing",
    [
        {"rampup_batch_size": (4, 4, 96), "global_batch_size": 16},
        {"batch_schedule": ("0:4", "512:8", "1024:12", "1536:16"), "global_batch_size": 16},
    ],
    ids=["ramp-up", "schedule"],
)
def test_a_growing_batch_and_phases_that_say_the_same_are_one_table(growing):
    """Every step has the same samples and the same rate, whichever option says the sizes."""
    common = SHAPE | {"lr_schedule": "cosine", "lr": 1e-2, "train_samples": 200}
    by_options = Timeline(build(common | growing))
    sizes = [(span.samples, span.batch) for span in by_options.spans]
    assert sizes == [(0, 4), (32, 8), (64, 12), (96, 16)]
    phases = [
        {"name": str(batch), "from_tokens": first * LENGTH, "global_batch_size": batch}
        for first, batch in sizes
    ]
    plan = from_table({"phase": phases}, "months.toml")
    by_phases = Timeline(dataclasses.replace(build(common), plan=plan))
    assert by_phases.total_steps == by_options.total_steps
    sample = 0
    for _ in range(by_options.total_steps):
        batch = by_options.batch_at(sample)
        assert by_phases.batch_at(sample) == batch
        assert rate_at(by_phases, sample, 0, batch) == rate_at(by_options, sample, 0, batch)
        sample += batch
