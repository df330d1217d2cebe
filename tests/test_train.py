"""Whole runs from the command line, and the files that they write."""

import json
import math
import sys

import golden_worker
import numpy as np
import pytest
import torch
from compare import assert_close
from ranks import mpirun, start

import data
import trainer
from config import schema as configuration
from config import validation
from config.messages import VERSION
from corpora.token_files import IndexedDatasetWriter

SMALL = (
    "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 8 "
    "--pad-vocab-multiple 4 --micro-batch-size 2 "
)
ROW = {
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "seconds",
    "loss",
    "grad_norm",
    "learning_rate",
    "global_batch_size",
    "loss_scale",
    "skipped",
    "tokens_per_second",
    "tflops_model",
    "tflops_hardware",
    "peak_memory_bytes",
    "peak_memory_bytes_per_stage",
    "reserved_memory_bytes_per_stage",
}


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    """Two hundred documents that count upwards, which a small model learns in a few steps."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "counting")
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, vocab_size=64) as writer:
        for _ in range(200):
            writer.add_document((random.integers(64) + np.arange(random.integers(20, 60))) % 64)
    return prefix


@pytest.mark.slow
def test_layouts_of_the_command_line_agree(tmp_path, corpus):
    """A ramp-up on files, with evaluation, on one rank and on tp 2 x pp 2: the same rows."""
    words = SMALL + f"--steps 12 --data {corpus} --split 90,10,0 --eval-samples 16 --eval-every 5 "
    words += "--check-replicas-every 4 --lr 3e-3 --precision fp64 --lr-warmup-samples 16 "
    words += "--rampup-batch-size 4 2 16"
    one = start([sys.executable, "train.py", *words.split(), "--out", str(tmp_path / "one")])
    assert one.status == 0, one.err
    four = mpirun(
        4, "train.py", *words.split(), *f"--tp 2 --pp 2 --out {tmp_path / 'four'}".split()
    )
    assert four.status == 0, four.err
    ours, theirs = rows(tmp_path / "one"), rows(tmp_path / "four")
    assert [set(r) for r in ours] == [set(r) for r in theirs]
    steps = [r for r in ours if "loss" in r]
    evaluations = [r for r in ours if "validation_loss" in r]
    assert len(steps) == 12
    assert all(set(r) == ROW for r in steps)
    assert [r["iteration"] for r in evaluations] == [5, 10, 12]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    for key in ("loss", "grad_norm", "validation_loss", "learning_rate", "consumed_tokens"):
        values, others = ([row[key] for row in each if key in row] for each in (ours, theirs))
        assert_close(values, others, 1e-10, key)
    assert [r["global_batch_size"] for r in steps] == [4, 4, 6, 6] + [8] * 8
    assert [r["consumed_samples"] for r in steps[:5]] == [4, 8, 14, 20, 28]
    rates = [r["learning_rate"] / 3e-3 for r in steps[:3]]
    assert rates == pytest.approx([4 / 20, 8 / 20, 14 / 22])
    work = {r["tflops_model"] * r["seconds"] / r["global_batch_size"] for r in steps}
    assert max(work) == pytest.approx(min(work))
    line = "global batch: 4 from step 1, 6 from step 3, 8 from step 5 (20 samples); 3 sizes, 12 st"
    assert line in four.out
    assert "micro-batch 2 x 2 to 4," in four.out
    assert "bubble" in four.out
    assert "stage 1" in four.out
    assert "peak memory of a rank, MB (resident); predicted by memory.py: weights +" in four.out
    for row in rows(tmp_path / "four"):
        if "loss" in row:
            assert len(row["reserved_memory_bytes_per_stage"]) == 2
            assert max(row["peak_memory_bytes_per_stage"]) == row["peak_memory_bytes"]
    assert four.out.count("elapsed time per iteration") == 12
    facts = json.loads((tmp_path / "four" / "run.json").read_text())
    assert facts["cluster"]["launcher"] == "mpirun"
    assert facts["config"]["layout"]["dp"] == 1
    layout = facts["config"]["layout"]  # what was left to the machine is decided
    assert (layout["sequence_parallel"], layout["overlap_param_gather"]) == (False, False)
    assert facts["flops_formula"] == "megatron-2025"
    assert facts["version"] == VERSION


def test_a_second_run_keeps_the_first(tmp_path):
    words = (SMALL + "--steps 2 --tensorboard --out").split()
    for _ in range(2):
        assert start([sys.executable, "train.py", *words, str(tmp_path)]).status == 0
    assert {"run.json", "metrics.jsonl", "run.json.1", "metrics.jsonl.1"} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert any((tmp_path / "tensorboard").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--data nowhere", "nowhere.idx does not exist"),
        ("--data {corpus} --vocab-size 40", "but vocab-size is 40"),
        ("--data {corpus} --seq-length 100000 --positions alibi", "but one sample takes"),
    ],
)
def test_bad_data_is_one_error_on_two_ranks(tmp_path, corpus, words, sentence):
    command = SMALL + "--steps 9 " + words.format(corpus=corpus)
    outcome = mpirun(2, "train.py", *command.split(), "--tp", "2", "--out", str(tmp_path / "x"))
    assert outcome.status == 2
    assert sentence in outcome.err
    assert outcome.err.count("error: ") == 1
    assert "Traceback" not in outcome.err


def test_a_device_that_is_not_there(tmp_path):
    words = (SMALL + "--steps 2 --device cuda --out").split()
    outcome = start([sys.executable, "train.py", *words, str(tmp_path)], CUDA_VISIBLE_DEVICES="")
    assert outcome.status == 2
    assert outcome.err == "error: --device cuda: torch sees no CUDA device on this node\n"


def training(**options) -> configuration.Training:
    return configuration.Training(steps=10, global_batch_size=10, lr=1.0, min_lr=0.1, **options)


def test_the_learning_rate_warms_up_and_falls():
    def rates(**options):
        t = training(**options)
        return [trainer.learning_rate(t, samples, 1000, 10) for samples in range(0, 1001, 10)]

    warm = rates(lr_warmup_samples=100)
    assert warm[0] > 0
    assert warm[:11] == sorted(warm[:11])
    assert max(warm) == warm[10] == 1.0
    for schedule in ("cosine", "linear"):
        rate = rates(lr_schedule=schedule)
        assert rate[0] == 1.0
        assert rate == sorted(rate, reverse=True)
        assert rate[50] == pytest.approx(0.55)
        assert rate[-1] == pytest.approx(0.1)
    cosine = rates(lr_schedule="cosine")
    assert cosine[25] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates(lr_schedule="constant") == [1.0] * 101
    wsd = rates(lr_schedule="wsd", lr_wsd_decay_samples=200)
    assert wsd[:81] == [1.0] * 81
    assert wsd[90] == pytest.approx(0.55)
    assert wsd[100] == pytest.approx(0.1)
    early = rates(lr_decay_samples=500)
    assert early[50:] == [0.1] * 51


@pytest.mark.slow
def test_a_replica_that_drifts_ends_the_run(tmp_path):
    """One bit of one weight, on rank 1 after step 3; optimizer_worker.py has every other copy."""
    words = SMALL + f"--steps 9 --zero 0 --check-replicas-every 2 --device cpu --out {tmp_path}"
    outcome = mpirun(2, "tests/corrupted_worker.py", "drift", "1", "3", *words.split())
    assert outcome.status not in (0, 75)
    assert [row["iteration"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    sentence = "after iteration 4 replicas are no longer equal: embedding.positions.weight weight"
    assert sentence + " differs over dp: ranks [1] and [0]" in outcome.err


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_no_bit(recompute):
    def weights(kind):
        options = golden_worker.options({"recompute": kind, "positions": "alibi"})
        state = trainer.build(validation.check(options, 1))
        results = [trainer.step(state, data.Synthetic(61, 16, 1), 8 * i, 1e-3) for i in range(4)]
        return results, torch.cat([p.detach().flatten() for p in state.stages.parameters()])

    plain, again = weights("none"), weights(recompute)
    assert plain[0] == again[0]
    assert torch.equal(plain[1], again[1])
