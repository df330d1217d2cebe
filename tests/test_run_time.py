"""The estimate of a run's time before its first step: if this failed, a first run of a model that
is too large for a laptop would print nothing for hours.
"""

from types import SimpleNamespace

import torch

import trainer
from architecture import model_stats
from config import validation
from config.command_line import parse
from distributed.launch import Launch
from telemetry import run_time

GPT2 = "--model gpt2-124m --steps 1000 --global-batch-size 64 --data synthetic --precision fp32"


def context(device: str, size: int = 4) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device), size=size)


def test_a_long_run_on_cpus_is_announced_with_its_days(monkeypatch):
    monkeypatch.setattr(run_time, "rate_of_products", lambda config: 1e10)
    config = validation.check(parse(GPT2.split()), 4)
    line = run_time.estimate(config, context("cpu"), 64_000, 64)
    seconds = 3 * model_stats.forward_flops(config.model, run_time.FORMULA)[0]  # of one block
    assert seconds * 12 * 1024 * 64_000 / 4e10 > 86_400
    assert "s for a step of 64 samples, " in line
    assert "d " in line.partition("for the run")[0]  # days
    assert "on the CPUs of 4 ranks (40 GFLOP/s" in line


def test_the_time_is_printed_before_the_first_step(tmp_path, monkeypatch, capsys):
    """A resumed run that has a step to do prints it too, one that has none does not."""
    asked = []
    monkeypatch.setattr(
        run_time, "estimate", lambda config, context, *left: asked.append(left) or "TIME"
    )
    words = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 31 --device cpu --steps"
    for steps, is_told in (("2", True), ("2", False), ("3", True)):
        options = [*words.split(), steps, "--global-batch-size", "4", "--save-every", "1"]
        options += ["--resume", "auto", "--no-watchdog", "--out", str(tmp_path)]
        trainer.main(validation.check(parse(options), 1), Launch("python"))
        before_first_step = capsys.readouterr().out.partition("\n step ")[0]
        assert ("TIME" in before_first_step.splitlines()) == is_told
    assert asked == [(8, 4), (4, 4)]


def test_a_short_run_and_a_gpu_print_nothing():
    config = validation.check(parse(GPT2.replace("1000", "1").split()), 1)
    assert run_time.estimate(config, context("cuda"), 64_000, 64) is None
    small = "--layers 2 --hidden 32 --heads 4 --seq-length 32 --vocab-size 99 --steps 3"
    config = validation.check(parse([*small.split(), "--precision", "fp32"]), 1)
    assert run_time.estimate(config, context("cpu", 1), 24, 8) is None
    assert run_time.rate_of_products(config) > 1e6
