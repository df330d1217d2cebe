"""Batch sizes by samples consumed: if this failed, a ramp-up would train on other batches."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from config.batch_schedule import Level, by_tokens, ramp
from config.command_line import parse
from config.past import Past
from config.timeline import Timeline
from config.validation import check

BASE = "--layers 4 --hidden 64 --heads 4 --seq-length 100"


def configure(words: str, ranks: int = 1):
    return check(parse(f"{BASE} {words}".split()), ranks)


def megatron(start: int, increment: int, samples: int, target: int, consumed: int) -> int:
    """RampupBatchsizeNumMicroBatchesCalculator.update of megatron/core 0.16, in one line."""
    if consumed > samples:
        return target
    per_level = samples / ((target - start) // increment)
    return start + int(consumed / per_level) * increment


def test_the_ramp_up_of_bloom():
    """megatron.core's own calculator gave these numbers when it was run."""
    schedule = ramp(192, 16, 9_765_625, 2048)
    levels = schedule.levels()
    assert len(levels) == 117
    assert [(v.batch, v.first_step, v.consumed) for v in levels[:4]] == [
        (192, 0, 0),
        (208, 439, 84_288),
        (224, 844, 168_528),
        (240, 1_220, 252_752),
    ]
    assert (levels[-2].batch, levels[-2].first_step, levels[-2].consumed) == (
        2032,
        12_617,
        9_682_496,
    )
    assert levels[-1] == Level(2048, 12_658, 9_765_808, None)
    assert schedule.consumed(12_658) == 9_765_808
    assert schedule.steps(9_765_808) == 12_658
    assert schedule.steps(9_765_807) == 12_657


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 60), st.integers(1, 5000), st.data())
def test_a_ramp_up_is_megatrons(start, increment, count, samples, data):
    target = start + count * increment
    schedule = ramp(start, increment, samples, target)
    consumed = data.draw(st.integers(0, 2 * samples))
    expected = megatron(start, increment, samples, target, consumed)
    assert schedule.batch(consumed) == expected
    # Step by step, as Megatron's loop does it.
    consumed, levels = 0, {}
    for step in range(50):
        assert schedule.consumed(step) == consumed
        assert schedule.steps(consumed) == step
        batch = megatron(start, increment, samples, target, consumed)
        levels.setdefault(batch, (step, consumed))
        consumed += batch
    for level in schedule.levels():
        if level.batch in levels:
            assert (level.first_step, level.consumed) == levels[level.batch]


def test_steps_by_tokens():
    schedule = by_tokens(("0:192", "1.5K:256", "5B:1024"), 100)
    assert schedule.starts == ((0, 192), (15, 256), (50_000_000, 1024))
    assert [schedule.batch(n) for n in (0, 14, 15, 49_999_999, 50_000_000)] == [
        192,
        192,
        256,
        256,
        1024,
    ]
    assert by_tokens(("0:8", "2m:8", "1T:16"), 1).starts == ((0, 8), (10**12, 16))


def test_a_run_has_the_steps_of_its_schedule():
    config = configure("--rampup-batch-size 8 8 64 --global-batch-size 24 --train-samples 130")
    # 4 steps of 8 to 32, 2 of 16 to 64, 2 of 24 to 112; 18 samples are left unread.
    assert [Timeline(config).batches.consumed(n) for n in (4, 6, 8)] == [32, 64, 112]
    assert (Timeline(config).total_steps, Timeline(config).total_samples) == (8, 130)
    resumed = [replace(config, past=Past(*done)) for done in ((6, 64), (100, 0))]
    assert [Timeline(config).total_steps for config in resumed] == [8, 108]
    config = configure("--rampup-batch-size 8 8 64 --global-batch-size 24 --steps 9")
    assert (Timeline(config).total_steps, Timeline(config).total_samples) == (9, 136)
    config = configure("--batch-schedule 0:8 1K:16 --steps 3")
    assert (config.training.global_batch_size, Timeline(config).total_samples) == (16, 32)
