"""--precision auto: if this failed, ranks or programs would decide for different precisions."""

import json
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import ROOT, fork_one, start
from test_store import World

import plan
import tune
from config.command_line import parse
from costs import hardware
from optim import precision
from tools.tuner import session

SHAPE = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --steps 1"
RUN = SHAPE.split()
OF_MACHINE = {"v100-32": "fp16", "a100-80": "bf16", "h100": "bf16", "cpu": "fp32"}


def decided(monkeypatch, world: World, has_bf16: list[bool], words: str = "") -> list[tuple]:
    """Return the decision of every rank on these GPUs: its precision, and the sentence on it."""
    here = threading.local()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bf16[here.rank])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")

    def on(rank: int) -> tuple:
        here.rank, device = rank, torch.device("cuda", rank)
        store = world.stores[rank]
        context = SimpleNamespace(device=device, store=store, rank=rank, size=world.size)
        config, sentence = precision.decide(parse([*RUN, *words.split()]), context)
        return config.training.precision, sentence

    return world.run(on)


def test_gpus_that_all_have_bf16_take_it(monkeypatch):
    outcomes = decided(monkeypatch, World(3), [True, True, True])
    assert {name for name, _ in outcomes} == {"bf16"}
    assert all("--precision auto" in sentence for _, sentence in outcomes)


def test_one_gpu_without_bf16_makes_all_ranks_take_fp16_and_is_named(monkeypatch):
    outcomes = decided(monkeypatch, World(3), [True, False, True])
    assert {name for name, _ in outcomes} == {"fp16"}
    assert all("rank 1, GPU 1, has no bf16" in sentence for _, sentence in outcomes)


def test_a_precision_that_was_given_stays_and_nothing_is_exchanged(monkeypatch):
    alone = World(1)
    alone.stores[0] = dist.HashStore()
    alone.stores[0].set_timeout(timedelta(seconds=1))
    for name in ("fp32", "bf16", "fp16", "fp64"):
        assert decided(monkeypatch, alone, [False], f"--precision {name}") == [(name, "")]
    assert decided(monkeypatch, alone, [False], "--precision auto")[0][0] == "fp16"


@pytest.mark.parametrize(("name", "expected"), OF_MACHINE.items())
def test_plan_rehearsal_and_tuner_decide_by_the_machine(name, expected, tmp_path):
    assert hardware.load(name).precision == expected
    for words in ([], ["--precision", "auto"]):
        options, rest = plan.parser().parse_known_args(["layouts", "--gpu", name, *RUN, *words])
        question = plan.question_of(options, rest)
        assert question.config.training.precision == expected
        tuned = [*RUN, "--gpus", "8", "--launch", "true {ranks}", "--out", str(tmp_path)]
        tuned = session.Session(*tune.parser().parse_known_args([*tuned, "--gpu", name, *words]))
        assert tuned.config.training.precision == expected
        row = tuned.command(SimpleNamespace(config=tuned.config, ranks=8))
        assert row[row.index("--precision") + 1] == expected


def test_the_rehearsal_says_which_precision_it_takes(tmp_path):
    words = [*RUN, "--global-batch-size", "1", "--gpu", "v100-32"]
    done = start([sys.executable, "rehearse.py", *words])
    assert done.status == 0, done.err
    assert "1 ranks, tp 1 x pp 1 x dp 1, fp16" in done.out


@pytest.mark.slow
def test_a_run_on_cpus_says_so_and_a_resumed_run_keeps_what_it_had(tmp_path):
    """Unless a precision is given, or only the weights are taken."""

    def trained(out: str, *words: str) -> tuple[str, str]:
        folder = ["--out", str(tmp_path / out), "--device", "cpu"]
        done = fork_one("train.py", *RUN, *folder, "--save-every", "1", *words)
        assert done.status == 0, done.err
        facts = json.loads((tmp_path / out / "run.json").read_text())
        return facts["config"]["training"]["precision"], done.out

    name, said = trained("plain")
    assert name == "fp32"
    assert "precision: fp32 (--precision auto on CPUs)" in said
    assert trained("a", "--precision", "bf16")[0] == "bf16"
    saved = str(tmp_path / "a")
    more = ("--resume", saved, "--steps", "2")
    assert trained("b", *more)[0] == "bf16"
    assert trained("c", *more, "--precision", "auto")[0] == "bf16"
    name, said = trained("d", *more, "--precision", "fp64")
    assert name == "fp64"
    assert "precision bf16 before, fp64 now" in said
    assert trained("e", "--resume", saved, "--load-weights-only")[0] == "fp32"


def test_a_run_of_before_auto_means_what_it_meant():
    words = ["--resume", str(ROOT / "tests" / "data" / "run_189cc1d"), "--steps", "9"]
    assert parse(words).training.precision == "fp32"
