"""The lines that people see of a run: if this failed, some would be missing, torn or wrong."""

import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from ranks import ROOT, mpi_command

import trainer
from config import command_line, validation
from corpora.token_files import IndexedDatasetWriter
from costs import hardware
from distributed.launch import Launch
from telemetry import log_lines

SMALL = (
    "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --global-batch-size 8 "
    "--micro-batch-size 2 --steps 6 --log-every 2 --device cpu --no-watchdog --no-preflight --out "
)
ROW = {
    "iteration": 120,
    "consumed_samples": 960,
    "consumed_tokens": 15360,
    "learning_rate": 3e-4,
    "global_batch_size": 8,
    "seconds": 0.5,
    "grad_norm": 0.81249,
    "loss_scale": 1.0,
    "tokens_per_second": 1000.0,
    "tflops_model": 1.0,
    "tflops_hardware": 1.5,
    "peak_memory_bytes": 23_400_000_000,
    "mfu": 0.4,
}


def test_a_run_without_measured_steps_names_no_question_about_them(tmp_path):
    command = [sys.executable, "train.py", *SMALL.split(), str(tmp_path), "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "plan.py gap" not in done.stdout
    assert not (tmp_path / "times.jsonl").exists()


def test_with_output_in_a_file_the_lines_are_there_and_in_log_txt(tmp_path):
    with open(tmp_path / "out.txt", "wb") as out:
        command = [*mpi_command(2), sys.executable, "train.py", *SMALL.split(), str(tmp_path / "r")]
        subprocess.run(command, cwd=ROOT, stdout=out, stdin=subprocess.DEVNULL, check=True)
    printed = (tmp_path / "out.txt").read_text()
    assert printed.count("\n step ") == 4
    lines = (tmp_path / "r" / "log.txt").read_text().splitlines()
    steps = [line.split("|")[0].strip() for line in lines if line.startswith(" step ")]
    assert steps == ["step 1/6", "step 2/6", "step 4/6", "step 6/6"]
    assert lines[-1].startswith("files: ")
    assert (tmp_path / "r" / "times.jsonl").exists()
    assert "where the time of a step goes: python plan.py gap " in lines[-2]
    rows = [
        json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().split("\n")[:-1]
    ]
    times = [(row["time"], row["elapsed"]) for row in rows]
    assert times == sorted(times)
    assert all(before < after for (_, before), (_, after) in itertools.pairwise(times))
    assert {row["mfu"] for row in rows} == {None}  # no peak is known of a CPU


def steps_of(skipped: int = 0, nan: int = 0) -> log_lines.Steps:
    """Two steps of 16 samples in half a second each, with a mean loss of 3.21043."""
    return log_lines.Steps([16, 16], [2048, 2048], [0.5, 0.5], [3.0, 3.42086], skipped, nan)


LEFT = round(93784.4 * 32)  # samples, at 32 a second


def test_log_lines_say_loss_rate_mfu_memory_and_time_left():
    assert log_lines.step_line(ROW, 500, steps_of(), 2, LEFT) == (
        " step 120/500 | loss 3.2104 | grad norm 0.812 | lr 3.00E-04 | 2,000 tokens/s | "
        "MFU 80.0% | 23.4 GB | 1d 2:03:04 left"
    )
    unknown = log_lines.step_line(ROW | {"mfu": None}, 500, steps_of(2, 1), 2, LEFT)
    assert "MFU" not in unknown
    assert unknown.endswith("left | 2 skipped | 1 nan")


def test_a_line_has_the_epochs_of_one_corpus_and_several_have_a_line_of_their_own():
    one = ROW | {"corpus_tokens": {"a": 960}, "corpus_epochs": {"a": 0.1254}}
    assert log_lines.corpora_line(one) == ""
    assert log_lines.step_line(one, 500, steps_of(), 2, LEFT).endswith(" left | epoch 0.125")
    two = ROW | {"corpus_tokens": {"a": 9, "b": 7}, "corpus_epochs": {"a": 0.5, "b": 1.0}}
    assert (
        log_lines.corpora_line(two) == "\n a: 9 tokens, 0.5000 epochs | b: 7 tokens, 1.0000 epochs"
    )
    assert "epoch" not in log_lines.step_line(two, 500, steps_of(), 2, LEFT)


def printed_steps(out: str) -> list[int]:
    """The steps that have a log line."""
    lines = [line for line in out.splitlines() if line.startswith(" step ") and "grad norm" in line]
    return [int(line.removeprefix(" step ").partition("/")[0]) for line in lines]


@pytest.mark.parametrize("corpora", [1, 2])
@pytest.mark.slow
def test_in_a_pipe_there_is_a_line_by_time_and_a_row_for_every_step(
    tmp_path, monkeypatch, capsys, corpora
):
    """Lines on several corpora follow the 1st, 21st, ... log line and the last one."""
    names = [str(tmp_path / name) for name in "ab"[:corpora]]
    for name in names:
        with IndexedDatasetWriter(name, 64) as writer:
            for _ in range(40):
                writer.add_document(np.arange(33) % 64)
    words = SMALL.replace("--steps 6 --log-every 2", "--steps 23 --eval-samples 4 --split 1,1,0")
    words += f"{tmp_path / 'run'} --cache none --data {' '.join(names)}"

    def run(*more: str) -> str:
        config = validation.check(command_line.parse([*words.split(), *more]), 1)
        trainer.main(config, Launch("python"))
        rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert sum("grad_norm" in row for row in rows) == 23
        return capsys.readouterr().out

    monkeypatch.setattr("telemetry.log.SECONDS_BETWEEN_LINES", 1e9)
    assert printed_steps(run()) == [1, 23]
    assert printed_steps(run("--log-every", "10")) == [1, 10, 20, 23]
    monkeypatch.setattr("telemetry.log.SECONDS_BETWEEN_LINES", 0.0)
    out = run()
    assert printed_steps(out) == list(range(1, 24))
    of_corpora = [line for line in out.splitlines() if " tokens, " in line and " epochs" in line]
    assert len(of_corpora) == (0 if corpora == 1 else 3)  # after the lines 1, 21 and 23
    (evaluated,) = [line for line in out.splitlines() if "validation loss" in line]
    assert re.fullmatch(r" step 23/23 \| validation loss \d\.\d{4} \| perplexity [\d.]+", evaluated)


def test_the_peak_of_a_device_is_that_of_its_name_or_unknown():
    assert hardware.peak_of("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert hardware.peak_of("NVIDIA H100 80GB HBM3", "fp16") == 989.4e12
    assert hardware.peak_of("NVIDIA GH200 480GB", "bf16") == 989.4e12
    assert hardware.peak_of("NVIDIA GeForce RTX 3090", "bf16") == 71e12
    for device, precision in (
        ("NVIDIA H100 PCIe", "bf16"),
        ("NVIDIA A100-SXM4-80GB", "fp32"),
        ("4 CPU cores", "bf16"),
        ("NVIDIA GeForce RTX 2080", "bf16"),
    ):
        assert hardware.peak_of(device, precision) is None
