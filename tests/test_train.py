"""Whole runs: if this failed, rows would be lost, or corrupted state be saved."""

import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compare import assert_close
from ranks import fork_one, fork_ranks, mpi_command, start

import trainer
from base.cli import VERSION
from checkpointing import folders
from config import schema as configuration
from config.learning_rate import learning_rate
from corpora.token_files import IndexedDatasetWriter
from distributed import garbage, placement

SMALL = (
    "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 8 "
    "--set pad_vocab_multiple=4 --micro-batch-size 2 "
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
    for key in ("loss", "grad_norm", "validation_loss", "learning_rate", "consumed_tokens"):
        values, others = ([row[key] for row in each if key in row] for each in (ours, theirs))
        assert_close(values, others, 1e-10, key)
    steps = [r for r in ours if "loss" in r]
    assert len(steps) == four.out.count("| loss ") == 12
    assert all(set(r) == ROW | {"corpus_tokens", "corpus_epochs"} for r in steps)
    assert [r["iteration"] for r in ours if "validation_loss" in r] == [5, 10, 12]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert [r["global_batch_size"] for r in steps] == [4, 4, 6, 6] + [8] * 8
    assert [r["consumed_samples"] for r in steps[:5]] == [4, 8, 14, 20, 28]
    rates = [r["learning_rate"] / 3e-3 for r in steps[:3]]
    assert rates == pytest.approx([4 / 20, 8 / 20, 14 / 22])
    work = {r["tflops_model"] * r["seconds"] / r["global_batch_size"] for r in steps}
    assert max(work) == pytest.approx(min(work))
    for line in (
        "global batch: 4 from step 1, 6 from step 3, 8 from step 5 (20 samples); 3 sizes, 12 st",
        "micro-batch 2 x 2 to 4,",
        "peak memory of a rank, MB (resident; before: the model was built); by part: python",
    ):
        assert line in four.out
    facts = json.loads((tmp_path / "four" / "run.json").read_text())
    cores = placement.physical_cores(placement.allowed_cores())
    cluster, layout = facts["cluster"], facts["config"]["layout"]
    assert cluster["launcher"] == "mpirun"
    assert cluster["threads_per_rank"] == max(1, len(cores) // 4)
    # The options left to the machine are decided.
    decided = [layout[name] for name in ("dp", "sequence_parallel", "overlap_param_gather")]
    assert decided == [1, False, False]
    assert (facts["flops_formula"], facts["version"]) == ("megatron-2025", VERSION)


def test_the_learning_rate_warms_up_and_falls():
    def rates(**options):
        given = {"steps": 10, "global_batch_size": 10, "lr": 1.0, "min_lr": 0.1} | options
        t = configuration.Training(**given)
        return [learning_rate(t, samples, 1000, 10) for samples in range(0, 1001, 10)]

    warm = rates(lr_warmup_samples=100)
    assert warm[0] > 0
    assert warm[:11] == sorted(warm[:11])
    assert max(warm) == warm[10] == 1.0
    quarter = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    for schedule, options, places, expected in (
        ("cosine", {}, (0, 25, 50, 100), (1.0, quarter, 0.55, 0.1)),
        ("linear", {}, (0, 25, 50, 100), (1.0, 0.775, 0.55, 0.1)),
        ("linear", {"lr_decay_samples": 500}, (25, 50, 100), (0.55, 0.1, 0.1)),
        ("constant", {}, (0, 100), (1.0, 1.0)),
        ("wsd", {"lr_wsd_decay_samples": 200}, (0, 80, 90, 100), (1.0, 1.0, 0.55, 0.1)),
        (
            "wsd",
            {"lr_wsd_decay_samples": 400, "lr_wsd_decay_style": "1-sqrt"},
            (0, 60, 70, 80, 100),
            (1.0, 1.0, 0.55, 0.1 + 0.9 * (1 - math.sqrt(0.5)), 0.1),
        ),
        ("linear", {"min_lr": None}, (0, 50, 100), (1.0, 0.55, 0.1)),
    ):
        found = rates(lr_schedule=schedule, **options)
        assert found == sorted(found, reverse=True)
        assert [found[place] for place in places] == pytest.approx(expected)


def test_the_curves_are_those_of_transformers():
    """Warm-ups differ: ours counts the step's last sample. From its end on the curves are equal."""
    from transformers import get_inverse_sqrt_schedule, get_wsd_schedule

    def theirs(make, **options) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = make(optimizer, num_warmup_steps=10, **options)
        rates = []
        for _ in range(100):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return rates[10:]

    def ours(**options) -> list[float]:
        given = {"global_batch_size": 1, "lr": 1.0, "lr_warmup_samples": 10, "min_lr": 0.0}
        training = configuration.Training(**given | options)
        return [learning_rate(training, step, 100, 1) for step in range(10, 100)]

    inverse = theirs(get_inverse_sqrt_schedule)
    assert ours(lr_schedule="inverse-square-root") == pytest.approx(inverse)
    decay = {"num_stable_steps": 60, "num_decay_steps": 30}
    for style, name in (("linear", "linear"), ("1-sqrt", "1-sqrt")):
        wsd = theirs(get_wsd_schedule, decay_type=name, **decay)
        found = ours(lr_schedule="wsd", lr_wsd_decay_samples=30, lr_wsd_decay_style=style)
        assert found == pytest.approx(wsd), style


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
    assert "after step 8 replicas are no longer equal" in outcome.err
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
    words = SMALL + "--zero 0 --save-every 4 --set max_nan_steps=2 --steps 12 --device cpu "
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
    words = (
        SMALL + f"--steps 12 --zero 0 --pp 2 --set max_nan_steps=2 --device cpu --out {tmp_path} "
    )
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
    sentence = "error: training is complete, but step_00000030 could not be saved: no checkpoint"
    assert sentence in outcome.err
    assert outcome.out.count("cannot write tensorboard") == 1
    assert "Traceback" not in outcome.err
    assert (tmp_path / ".lock").read_text() == ""


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
