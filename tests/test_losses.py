"""If this failed, skipped samples would be trained on, or a loss that is not finite be saved."""

import dataclasses
import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from observed_steps import observed_step
from ranks import fork_ranks

import data
import trainer
from checkpointing import save
from checkpointing.state import Progress
from config import schema as configuration
from config import validation
from config.command_line import parse
from config.learning_rate import learning_rate
from corpora.token_files import IndexedDataset, IndexedDatasetWriter
from distributed.launch import Launch
from telemetry import loss_monitor
from telemetry.loss_monitor import LossMonitor
from zero import StepResult

TINY = (
    "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 31 --set pad_vocab_multiple=4 "
    "--global-batch-size 4 --lr 1e-2 --lr-schedule constant --device cpu "
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Models this small are slower on two threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def configure(words: str, ranks: int = 1) -> configuration.Config:
    return validation.check(parse((TINY + words).split()), ranks)


def rows(folder, name="metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


# ------------------------------------------------------------------------------------------------
# Samples that are skipped
# ------------------------------------------------------------------------------------------------


def test_skipped_samples_do_not_change_the_training_on_others(tmp_path):
    """Learning rate and weights depend on the other samples only."""
    words = "--steps 6 --lr-warmup-samples 16 --check-replicas-every 0 --out "
    config = configure(words + f"{tmp_path / 'a'} --skip-samples 6:12")
    trainer.main(config, Launch("python"))
    state = trainer.build(config)
    samples = data.Synthetic(31, 8, config.training.seed)
    expected = []
    for i, first in enumerate((0, 12, 16, 20)):
        lr = learning_rate(config.training, 4 * i, 24, 4)
        expected.append((lr, trainer.step(state, samples, first, lr).loss))
    found = [(r["learning_rate"], r["loss"]) for r in rows(tmp_path / "a") if "loss" in r]
    assert found == expected


# ------------------------------------------------------------------------------------------------
# Spikes
# ------------------------------------------------------------------------------------------------


def log(note, is_writer: bool = True) -> SimpleNamespace:
    """Return the part of a run's log that the monitor uses."""
    return SimpleNamespace(is_writer=is_writer, note=note)


@pytest.fixture
def monitor(tmp_path):
    """A monitor of two corpora that has seen 40 losses around 3; its lines; its file."""
    for name in ("a", "b"):
        with IndexedDatasetWriter(str(tmp_path / name), vocab_size=31) as writer:
            for i in range(20):
                writer.add_document(np.arange(5 + i % 7) % 31)
    corpora = f"--data 0.5 {tmp_path / 'a'} 0.5 {tmp_path / 'b'}"
    config = configure(f"{corpora} --split 100,0,0 --steps 100 --out {tmp_path} --spike-sigma 4")
    samples, lines = data.build(config).train, []
    monitor = LossMonitor(config, samples, None, log(lines.append), Progress())
    random.seed(0)
    for i in range(40):
        see(monitor, i, random.gauss(3.0, 0.1))
    return monitor, lines, tmp_path / "spikes.jsonl"


def see(monitor, i: int, loss: float, skipped: bool = False, norm: float = 1.0) -> None:
    """Give the monitor the loss and the gradient norm of step i + 1."""
    monitor.after_step(observed_step(i + 1), StepResult(norm, loss, skipped))


def test_a_spike_is_recorded_with_its_documents(monitor):
    monitor, lines, path = monitor
    assert not path.exists()
    see(monitor, 40, 3.3)  # 3 sigma
    assert not path.exists()
    see(monitor, 41, 3.7)
    (row,) = rows(path.parent, path.name)
    assert (row["iteration"], row["loss"], row["first_sample"]) == (42, 3.7, 164)
    assert row["mean"] == pytest.approx(3.0, abs=0.05)
    assert row["sigma"] == pytest.approx(0.1, abs=0.04)
    assert [sample["sample"] for sample in row["samples"]] == [164, 165, 166, 167]
    assert "loss spike at step 42: 3.7000 against" in lines[0]
    assert "samples 164 to 167 are in" in lines[0]
    for sample in row["samples"]:  # the text at the recorded places is the sample
        tokens = []
        for piece in sample["text"]:
            dataset = IndexedDataset(piece["prefix"])
            tokens += dataset.get(piece["sequence"], piece["offset"], piece["length"]).tolist()
            first, end = dataset.documents[piece["document"] : piece["document"] + 2]
            assert first <= piece["sequence"] < end
        assert tokens == monitor.samples.sample(sample["sample"]).tolist()


def test_a_spike_of_the_gradient_norm_is_recorded(monitor):
    """With a gradient of 1e34 on one rank, clipping makes the update vanish: the loss is normal."""
    monitor, lines, path = monitor
    for i in range(40, 80):
        see(monitor, i, 3.0, norm=1.0 + 0.1 * (i % 2))
    assert not path.exists()
    see(monitor, 80, 3.0, norm=1.3)
    assert not path.exists(), "so much more is no spike"
    see(monitor, 81, 3.0, norm=1e34)
    (row,) = rows(path.parent, path.name)
    assert (row["iteration"], row["of"], row["grad_norm"], row["loss"]) == (
        82,
        "grad_norm",
        1e34,
        3,
    )
    assert [sample["sample"] for sample in row["samples"]] == [324, 325, 326, 327]
    assert "spike of the gradient norm at step 82: 1e+34 against 1.0" in lines[0]
    see(monitor, 82, 3.0, norm=math.inf)  # the step is skipped, which has a line of its own
    see(monitor, 83, 3.0, norm=0.0)
    assert len(lines) == 1


def test_what_is_no_spike(monitor):
    """In the first steps; below the mean; with --spike-sigma 0; on a rank that writes nothing."""
    old, _, path = monitor
    fresh = LossMonitor(old.config, old.samples, None, log(pytest.fail), Progress())
    for i in range(loss_monitor.MIN_STEPS):
        see(fresh, i, 3.0 + 100 * (i == 20))
    see(fresh, 41, 2.0)
    off = dataclasses.replace(old.config, run=dataclasses.replace(old.config.run, spike_sigma=0.0))
    for config, first in ((off, True), (old.config, False)):
        quiet = LossMonitor(config, old.samples, None, log(pytest.fail, first), Progress())
        for i in range(41):
            see(quiet, i, 4.0 if i == 40 else 3.0)
    assert not path.exists()


def test_a_loss_that_is_not_finite_is_a_spike(monitor):
    monitor, lines, path = monitor
    see(monitor, 40, math.nan, skipped=True)
    assert rows(path.parent, path.name)[0]["loss"] is None
    assert "loss spike at step 41: nan against 2.98" in lines[0]
    assert monitor.good.iteration == 40
    see(monitor, 41, 3.0)
    assert (monitor.good.iteration, monitor.bad) == (42, [])


# ------------------------------------------------------------------------------------------------
# Losses that are not finite
# ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nan_on_one_rank_ends_the_run_and_keeps_the_last_good_state(tmp_path):
    """dp 2, NaN on rank 1 at step 3, then at steps 6 to 8: the run continues, then ends."""
    words = TINY + f"--save-every 2 --keep-last 1 --set max_nan_steps=3 --out {tmp_path} "
    words += "--micro-batch-size 2 --steps 12 "
    outcome = fork_ranks(2, "tests/corrupted_worker.py", "nan", "1", "3,6,7,8", *words.split())
    assert outcome.status == 2, outcome.err
    assert outcome.err.startswith(
        "error: the loss was not finite for 3 steps in a row, up to step 8 (max-nan-steps is 3): "
        f"the state after step 5 is in {tmp_path}/checkpoints; --resume auto --skip-samples 20:32 "
    )
    assert "Traceback" not in outcome.err
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000005"]
    before = rows(tmp_path)
    assert [r["skipped"] for r in before] == [i in (3, 6, 7, 8) for i in range(1, 9)]
    assert [r["iteration"] for r in rows(tmp_path, "spikes.jsonl")] == [3, 6, 7, 8]
    # The run continues with the flags of the message.
    words += "--resume auto --skip-samples 20:32"
    outcome = fork_ranks(2, "tests/corrupted_worker.py", "nan", "1", "0", *words.split())
    assert outcome.status == 0, outcome.err
    after = [r for r in rows(tmp_path) if "loss" in r]
    assert [r["consumed_samples"] for r in after] == [36, 40, 44, 48]
    assert all(math.isfinite(r["loss"]) for r in after)


def test_state_that_is_not_finite_is_never_saved(tmp_path):
    config = configure(f"--steps 3 --save-every 1 --keep-last 1 --out {tmp_path}")
    state, lines = trainer.build(config), []
    saver = save.Checkpointer(config, state.factory.mesh, state.optimizer, print_line=lines.append)
    assert saver.save_now(Progress(1, 4))
    shard = state.optimizer.owned()[0]
    shard.write("weights", shard.start, torch.tensor([math.inf]))
    assert not saver.save_now(Progress(2, 8))
    assert "step_00000002 was not saved" in lines[-1]
    assert "weights holds numbers that are not finite; training goes on" in lines[-1]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
