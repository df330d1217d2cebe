"""Whole runs: if this failed, rows would be lost, or corrupted state be saved."""

import errno
import io
import json
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compare import assert_close
from ranks import fork_one, fork_ranks, mpi_command, mpirun, start

import trainer
from checkpointing import folders
from config import schema as configuration
from config.messages import VERSION
from corpora.token_files import IndexedDatasetWriter
from distributed import garbage, placement
from telemetry import row_file
from telemetry.log import Log

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
    "time",
    "elapsed",
    "mfu",
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
    words += "--rampup-batch-size 4 2 16 --log-every 1"
    one = fork_one("train.py", *words.split(), "--out", str(tmp_path / "one"))
    assert one.status == 0, one.err
    layout = f"--tp 2 --pp 2 --out {tmp_path / 'four'}"
    ranks = ["env", "-u", "OMP_NUM_THREADS", *mpi_command(4), sys.executable]
    four = start([*ranks, "train.py", *words.split(), *layout.split()])
    assert four.status == 0, four.err
    ours, theirs = rows(tmp_path / "one"), rows(tmp_path / "four")
    assert [set(r) for r in ours] == [set(r) for r in theirs]
    steps = [r for r in ours if "loss" in r]
    evaluations = [r for r in ours if "validation_loss" in r]
    assert len(steps) == 12
    assert all(set(r) == ROW | {"corpus_tokens", "corpus_epochs"} for r in steps)
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
    assert "peak memory of a rank, MB (resident); by part: plan.py stages --config" in four.out
    for row in rows(tmp_path / "four"):
        if "loss" in row:
            assert len(row["reserved_memory_bytes_per_stage"]) == 2
            assert max(row["peak_memory_bytes_per_stage"]) == row["peak_memory_bytes"]
    of_steps = [line for line in four.out.splitlines() if "| loss " in line]
    assert len(of_steps) == 12
    facts = json.loads((tmp_path / "four" / "run.json").read_text())
    assert facts["cluster"]["launcher"] == "mpirun"
    cores = placement.physical_cores(placement.allowed_cores())
    assert facts["cluster"]["threads_per_rank"] == max(1, len(cores) // 4)
    assert facts["config"]["layout"]["dp"] == 1
    layout = facts["config"]["layout"]  # the options left to the machine are decided
    assert (layout["sequence_parallel"], layout["overlap_param_gather"]) == (False, False)
    assert facts["flops_formula"] == "megatron-2025"
    assert facts["version"] == VERSION


def test_a_second_run_keeps_the_first(tmp_path):
    words = (SMALL + "--steps 2 --tensorboard --out").split()
    for _ in range(2):
        assert fork_one("train.py", *words, str(tmp_path)).status == 0
    assert {"run.json", "metrics.jsonl", "run.json.1", "metrics.jsonl.1"} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert any((tmp_path / "tensorboard").iterdir())


@pytest.mark.slow
def test_bad_data_is_one_error_on_two_ranks(tmp_path, corpus):
    """The mistake is seen when all ranks have met; test_data.py has the sentences."""
    command = f"{SMALL} --steps 9 --data {corpus} --vocab-size 40 --tp 2 --out {tmp_path / 'x'}"
    outcome = mpirun(2, "train.py", *command.split())
    assert outcome.status == 2
    assert "but vocab-size is 40" in outcome.err
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


def test_garbage_is_collected_at_the_same_steps_on_all_ranks(tmp_path):
    """And between steps: by itself the collector runs when it likes, and the other ranks wait."""
    words = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 32 --steps 21"
    words += f" --global-batch-size 4 --device cpu --save-every 8 --out {tmp_path}"
    words += " --eval-every 8 --eval-samples 4"
    outcome = fork_ranks(2, "tests/order_worker.py", str(tmp_path), *words.split())
    assert outcome.status == 0, outcome.err
    expected = ["pinning", "begin", ["log", 10], ["log", 20], "end", "automatic again"]
    for rank in range(2):
        assert json.loads((tmp_path / f"order_{rank}.json").read_text()) == expected


def test_what_is_compiled_is_frozen(monkeypatch):
    """torch.compile keeps so many objects that each collection would look at them for long."""
    done, loop = [], SimpleNamespace(needs_warm_up=True, state=None, recorder=None)
    loop.splits, loop.device = SimpleNamespace(train=None), torch.device("cpu")
    loop.log = SimpleNamespace(note=lambda line: done.append(line.partition(" ")[0]))
    monkeypatch.setattr(trainer, "warm_up", lambda *_: done.append("warm-up"))
    monkeypatch.setattr(garbage.gc, "freeze", lambda: done.append("frozen"))
    trainer.Trainer._warm_up(loop, 0)
    assert done == ["warm-up", "frozen", "warmed"]


@pytest.mark.slow
def test_a_corrupted_state_is_not_saved_and_a_restart_begins_before_it(tmp_path):
    """The periodic check is far away: the check before each save sees the bit of step 6."""
    words = (
        SMALL + "--zero 0 --check-replicas-every 1000 --save-every 4 --device cpu --resume auto "
    )
    words += f"--steps 12 --out {tmp_path}"
    outcome = fork_ranks(2, "tests/corrupted_worker.py", "drift", "1", "6", *words.split())
    assert outcome.status not in (0, 2, 75)
    assert "after iteration 8 replicas are no longer equal" in outcome.err
    saved = tmp_path / "checkpoints"
    assert [path.name for path in saved.glob("step_*")] == ["step_00000004"]
    assert folders.read_manifest(str(saved / "step_00000004"))["checked"] == ["replicas"]
    outcome = fork_ranks(2, "tests/corrupted_worker.py", "drift", "1", "0", *words.split())
    assert outcome.status == 0, outcome.err
    assert f"resumed from {saved / 'step_00000004'}: step 4, " in outcome.out
    clean = words.replace(str(tmp_path), f"{tmp_path}/clean").split()
    assert fork_ranks(2, "tests/corrupted_worker.py", "drift", "1", "0", *clean).status == 0
    assert rows(tmp_path)[-1]["loss"] == rows(tmp_path / "clean")[-1]["loss"]


@pytest.mark.slow
def test_a_bit_that_makes_the_loss_nan_is_a_fault_of_hardware_and_not_of_training(tmp_path):
    """A highest exponent bit: all losses are NaN then, and the state of before is not intact."""
    words = SMALL + "--zero 0 --save-every 4 --max-nan-steps 2 --steps 12 --device cpu "
    words += f"--out {tmp_path}"
    outcome = fork_ranks(2, "tests/corrupted_worker.py", "huge", "1", "6", *words.split())
    assert outcome.status not in (0, 2, 75), "2 would be a mistake, and the supervisor would stop"
    assert "replicas are no longer equal: embedding.positions.weight weight" in outcome.err
    assert "max-nan-steps" not in outcome.err
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000004"]


@pytest.mark.slow
def test_of_three_copies_the_one_that_differs_names_its_rank(tmp_path):
    """Rank 2 sees the difference last; a supervisor leaves out the node of the rank in the case."""
    words = SMALL + f"--steps 9 --zero 0 --check-replicas-every 4 --device cpu --out {tmp_path} "
    words += "--global-batch-size 6"
    outcome = fork_ranks(3, "tests/late_worker.py", "drift", "2", "3", *words.split())
    assert outcome.status not in (0, 2, 75)
    assert "weight differs over dp: ranks [2] against [0, 1]" in outcome.err
    assert outcome.err.startswith("rank 2 of 3 ")
    assert culprits(tmp_path) == [2]


@pytest.mark.slow
def test_a_stage_whose_copies_are_equal_does_not_call_the_fault_divergence(tmp_path):
    """The second stage sees NaN and equal copies; the first one sees the difference, and later."""
    words = SMALL + f"--steps 12 --zero 0 --pp 2 --max-nan-steps 2 --device cpu --out {tmp_path} "
    words += "--layers 2 --global-batch-size 8"
    outcome = fork_ranks(4, "tests/late_worker.py", "huge", "1", "6", *words.split())
    assert outcome.status not in (0, 2, 75), outcome.err
    assert "max-nan-steps" not in outcome.err
    assert "replicas are no longer equal: embedding.positions.weight weight" in outcome.err
    assert "there is no majority, so nobody can say which copy is wrong" in outcome.err
    assert culprits(tmp_path)[0] in (0, 1)


def culprits(out: Path) -> list[int]:
    """The ranks that the run's case names, once the monitor has written it."""
    case = out / "hang" / "case.json"
    limit = time.monotonic() + 60
    while not (case.exists() and case.read_text().endswith("}")) and time.monotonic() < limit:
        time.sleep(0.05)
    return json.loads(case.read_text())["culprits"]


# ------------------------------------------------------------------------------------------------
# A full disk, which here is a limit of every file's size
# ------------------------------------------------------------------------------------------------

LIMIT = 8000  # bytes: run.json fits, and some rows


def limited(*words: str) -> list[str]:
    """train.py, whose files cannot grow beyond LIMIT; the limit can be raised from outside."""
    return ["prlimit", f"--fsize={LIMIT}:unlimited", sys.executable, "train.py", *words]


def whole_rows(path) -> list[int]:
    """The iterations of the rows; each line must be whole, and the last one ended."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line)["iteration"] for line in text.splitlines()]


def test_a_full_disk_ends_no_run_and_status_0_needs_the_last_save(tmp_path):
    words = SMALL + "--steps 30 --save-every 10 --log-every 1000 --tensorboard "
    command = limited(*words.split(), "--device", "cpu", "--out", str(tmp_path))
    outcome = start(command, PYTHONDONTWRITEBYTECODE="1")
    assert outcome.status == 1, outcome.err  # no mistake of the user
    written = whole_rows(tmp_path / "metrics.jsonl")
    assert 5 < len(written) < 30
    assert written == list(range(1, len(written) + 1))
    assert (tmp_path / "metrics.jsonl").stat().st_size <= LIMIT
    assert outcome.out.count("rows wait in memory") == 1
    lacking = f"metrics.jsonl lacks {30 - len(written)} rows of this run: File too large"
    assert outcome.out.count(lacking) == 1
    assert "tokens per second: " in outcome.out
    assert outcome.out.count("was not saved") == 4
    sentence = "error: training is complete, but step_00000030 could not be saved: there is none"
    assert sentence in outcome.err
    assert outcome.out.count("cannot write tensorboard") == 1
    assert "Traceback" not in outcome.err
    assert (tmp_path / ".lock").read_text() == ""


NO_ROOM = """
import shutil, sys, types
usage = shutil.disk_usage
def full(path):
    return types.SimpleNamespace(free=0) if path.endswith("/checkpoints") else usage(path)
shutil.disk_usage = full
from checkpointing import save
save.SECONDS_FOR_ROOM = 0.0
import train
train.main(sys.argv[1:], train.watch)
"""


def test_a_last_save_that_fails_twice_is_one_error_on_two_ranks(tmp_path):
    words = SMALL + f"--steps 4 --save-every 2 --device cpu --no-preflight --out {tmp_path}"
    outcome = mpirun(2, "-c", NO_ROOM, *words.split())
    assert outcome.status == 1, outcome.err
    assert whole_rows(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    assert outcome.out.count("step_00000002 was not saved in") == 1
    assert outcome.out.count("step_00000004 was not saved in") == 2
    sentence = "training is complete, but step_00000004 could not be saved: there is none yet"
    assert outcome.err.count(f"error: {sentence}") == outcome.err.count("error: ") == 1
    assert "Traceback" not in outcome.err
    assert (tmp_path / ".lock").read_text() == ""


def test_output_that_cannot_be_written_does_not_end_the_run(monkeypatch):
    """A full disk, or a pipe whose reader Ctrl-C has ended as well; another error does."""
    quiet = object.__new__(Log)
    quiet.is_writer, quiet.live, quiet.text = True, None, None

    class Full(io.StringIO):
        def flush(self):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sys, "stdout", Full())
    number = errno.ENOSPC
    quiet.note("a line")
    number = errno.EPIPE
    quiet.note("a line")
    number = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        quiet.note("a line")


def test_a_full_disk_at_the_start_is_a_sentence_and_moves_nothing(tmp_path):
    for name in ("run.json", "metrics.jsonl", "checkpoints/step_00000001/manifest.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    command = [*limited(*SMALL.split(), "--steps", "2", "--out"), str(tmp_path)]
    command[1] = "--fsize=1500"
    outcome = start(command, PYTHONDONTWRITEBYTECODE="1")
    assert outcome.status == 2
    assert outcome.err == f"error: cannot write in {tmp_path}: File too large\n"
    assert (tmp_path / "run.json").read_text() == "{}\n"
    names = {path.name for path in tmp_path.iterdir()}
    assert names - {"run.json.new", ".lock"} == {"run.json", "metrics.jsonl", "checkpoints"}


def test_rows_that_wait_are_bounded(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(row_file, "MOST_ROWS", 3)
    rows = row_file.RowFile(str(tmp_path / "folder/rows.jsonl"), lines.append)
    for i in range(1, 6):
        rows.write({"iteration": i})
    (tmp_path / "folder").mkdir()
    rows.write({"iteration": 6})
    rows.finish()
    assert whole_rows(tmp_path / "folder/rows.jsonl") == [4, 5, 6]
    assert "No such file or directory; rows wait in memory" in lines[0]
    assert lines[1].endswith("rows.jsonl is written again: 3 rows had to wait")
    assert lines[2].endswith("rows.jsonl lacks 3 rows of this run: only 3 can wait")
    assert len(lines) == 3


def test_no_file_without_rows(tmp_path):
    row_file.RowFile(str(tmp_path / "rows.jsonl"), pytest.fail).finish()
    assert list(tmp_path.iterdir()) == []
