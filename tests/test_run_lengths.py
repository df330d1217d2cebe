"""Lengths beside what a run consumes: if this failed, a rate of another run would be trained."""

import dataclasses
import re

import pytest

from base.errors import UserError
from config import command_line, spelling
from config.learning_rate import learning_rate
from config.past import Past, Start
from config.timeline import Timeline
from config.validation import check

BASE = "--layers 1 --hidden 16 --heads 2 --seq-length 16 --vocab-size 257 --lr 1e-3"


def request(words: str):
    return command_line.parse_request(f"{BASE} {words}".split())


def long_notes(words: str) -> list[str]:
    """The notes of a run that can be trained, without those on names."""
    found = request(words)
    check(found.config, 1)
    return [note for note in found.notes if not note.startswith("Megatron's names")]


SHARES = {
    "--rampup-batch-size 4 4 64 --global-batch-size 16 --steps 20": (216, 0.5, 108),
    "--rampup-batch-size 4 4 1000 --global-batch-size 64 --steps 20": (92, 0.25, 23),
    "--batch-schedule 0:4 320:8 --steps 20": (140, 0.1, 14),
    "--global-batch-size 8 --train-samples 1004": (1004, 0.25, 251),
    "--global-batch-size 8 --steps 20 --lr-decay-samples 100": (160, 0.5, 50),
    "--global-batch-size 8 --train-iters 20 --lr-decay-iters 10": (160, 0.5, 40),
    "--global-batch-size 8 --steps 20 --lr-schedule wsd": (160, 0.05, 8),
}


@pytest.mark.parametrize("words", SHARES)
def test_a_share_counts_the_samples_of_the_run(words):
    total, share, warmup = SHARES[words]
    found = request(f"{words} --lr-warmup-fraction {share}")
    assert Timeline(found.config).total_samples == total
    assert found.config.training.lr_warmup_samples == warmup
    assert "lr_warmup_samples" in found.given


def test_a_share_counts_phases(tmp_path):
    path = tmp_path / "phases.toml"
    path.write_text(
        'train_tokens = 6400\n[[phase]]\nname = "a"\nfrom_tokens = 0\nglobal_batch_size = 4\n'
        '[[phase]]\nname = "b"\nfrom_tokens = 3200\nglobal_batch_size = 8\n'
    )
    found = request(f"--phases {path} --lr-warmup-fraction 0.1")
    assert Timeline(found.config).total_samples == 200 + 25 * 8
    assert found.config.training.lr_warmup_samples == 40


def test_a_share_of_a_run_whose_end_is_not_given_is_none_yet(tmp_path):
    path = tmp_path / "phases.toml"
    path.write_text('[[phase]]\nname = "a"\nfrom_tokens = 0\n')
    for words, warmup in (("", 0), (f"--phases {path}", 0), ("--lr-decay-samples 50", 5)):
        config = request(f"{words} --lr-warmup-fraction 0.1").config
        assert config.training.lr_warmup_samples == warmup


LONG = {
    "--lr-warmup-samples 8000": "warm-up of 8,000 samples .* longer than the run's 20 .*2.5e-06 of",
    "--lr-warmup-iters 2000": "the warm-up of 8,000 samples .* longer than the run's 20 samples",
    "--lr-warmup-samples 20": "the warm-up of 20 samples .* leaves nothing of 20 samples",
    "--lr-schedule constant --lr-warmup-samples 30": "warm-up of 30 samples .* the run's 20",
    "--lr-schedule inverse-square-root --lr-warmup-samples 30": "warm-up of 30 .* the run's 20",
    "--lr-schedule wsd --lr-warmup-samples 12 --set lr_wsd_decay_samples=10": "decay of 10 .* 20",
    "--lr-schedule wsd --set lr_wsd_decay_samples=30": "decay of 30 .* longer than 20 samples",
    "--lr-decay-samples 40": "the decay ends at 40 samples .* after the run's 20 samples",
    "--lr-decay-style cosine --lr-decay-iters 10": "ends at 40 samples .* after the run's 20",
    "--rampup-batch-size 2 1 50": "the batch of 4 begins at 50 samples, and the run's 10 samples",
    "--skip-samples 4:8 40:44": "--skip-samples 40:44 begins after the run's 20 samples",
    "--skip-samples 0:40": "--skip-samples 0:40 has all of the run's 20 samples: no step trains",
    "--eval-samples 4 --eval-every 10": "--eval-every 10 is more than the run's 5 steps",
    "--save-every 6": "--save-every 6 is more than the run's 5 steps: a checkpoint is saved only",
    "--save-interval 6": "--save-every 6 is more than the run's 5 steps",
    "--ema 0.999": "averages over about 1,000 steps, and the run has 5",
}


@pytest.mark.parametrize("words", LONG)
def test_a_length_beyond_the_run_is_a_note_with_both_numbers(words):
    (note,) = long_notes(f"--global-batch-size 4 --steps 5 {words}")
    assert re.search(LONG[words], note), note


def test_a_batch_that_the_schedule_never_reaches_is_named():
    (note,) = long_notes("--batch-schedule 0:4 1K:8 --steps 5")
    assert note == "the batch of 8 begins at 62 samples, and the run's 20 samples end before it"


def test_phases_that_the_run_does_not_reach_or_whose_rate_does_not_fit(tmp_path):
    path = tmp_path / "phases.toml"
    path.write_text(
        '[[phase]]\nname = "a"\nfrom_tokens = 0\nlr_warmup_tokens = 400\nlr_schedule = "constant"\n'
        '[[phase]]\nname = "b"\nfrom_tokens = 3200\n'
    )
    notes = long_notes(f"--phases {path} --global-batch-size 4 --steps 5")
    assert notes == [
        "lr_warmup_tokens and lr_wsd_decay_tokens of phase a are 400 tokens, and it has 320",
        "phase b begins at 3,200 tokens, and the run ends at 320",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--lr-warmup-samples 19",
        "--lr-schedule constant --lr-warmup-samples 20",
        "--lr-schedule wsd --lr-warmup-samples 10 --set lr_wsd_decay_samples=10",
        "--lr-decay-samples 20",
        "--rampup-batch-size 2 1 8",
        "--skip-samples 4:8",
        "--eval-samples 4 --eval-every 5 --save-every 5",
        "--ema 0.8",
    ],
)
def test_what_fits_has_no_note(words):
    assert long_notes(f"--global-batch-size 4 --steps 5 {words}") == []


NEVER = {
    "--lr-warmup-samples 20 --lr-decay-samples 10": r"lr-warmup-samples\(20\) is not below lr",
    "--lr-warmup-iters 5 --lr-decay-iters 5": r"lr-warmup-samples\(20\) is not below .*\(20\)",
    "--lr-schedule wsd --lr-warmup-samples 8 --set lr_wsd_decay_samples=8 --lr-decay-samples 12": (
        r"\(8\) \+ lr-wsd-decay-samples\(8\) = 16 is more than lr-decay-samples\(12\)"
    ),
    "--lr-warmup-fraction 10": "is a share of the run from 0 to 1, not 10",
    "--lr-warmup-fraction 0.1 --lr-warmup-samples 5": "are one option, --lr-warmup-samples: give",
    "--lr-warmup-fraction 0.1 --lr-warmup-iters 5": "are one option, --lr-warmup-samples: give one",
    "--lr-decay-iters 5 --lr-decay-samples 9": "are one option, --lr-decay-samples: give one",
}


@pytest.mark.parametrize("words", NEVER)
def test_a_schedule_that_cannot_be_meant_is_refused(words):
    with pytest.raises(UserError, match=NEVER[words]):
        long_notes(f"--global-batch-size 4 --steps 5 {words}")


def test_a_run_that_has_begun_so_goes_on():
    config = request("--steps 5 --lr-warmup-samples 20 --lr-decay-samples 10").config
    past = Past(2, 16, (Start(0, 0, ((0, 8),)),))
    check(dataclasses.replace(config, past=past), 1)


def test_the_rate_of_a_run_with_a_ramp_up_reaches_its_peak_at_the_share():
    words = "--rampup-batch-size 4 4 64 --global-batch-size 16 --steps 20 --lr-warmup-fraction 0.5"
    config = request(words).config
    rate = learning_rate(config.training, 108, Timeline(config).total_samples, 1)
    assert rate == pytest.approx(1e-3, rel=1e-3)
    assert spelling.translate(["--lr-warmup-fraction", "1"]).warmup_fraction == 1
