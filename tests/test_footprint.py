"""Memory per stage: if this failed, a run would report or predict other bytes than it takes."""

import json
import math
import platform
import sys
from dataclasses import replace

import fake_apex
import pytest
import torch
from ranks import start

import data
import trainer
from config import schema as configuration
from config import validation
from config.command_line import parse
from config.optimizers import OPTIMIZERS
from costs import memory
from distributed.launch import Launch
from telemetry import step_stats
from telemetry.step_stats import StepStats

WORDS = "--layers 4 --hidden 64 --heads 4 --seq-length 32 --vocab-size 512 --steps 2 "


def configure(words: str, ranks: int) -> configuration.Config:
    return validation.check(parse((WORDS + words).split()), ranks)


def stats(peaks: list[float]) -> list[StepStats]:
    return [StepStats(peak, peak / 2, 0.1, 0.0, 0.0) for peak in peaks]


def test_the_fullest_rank_of_every_stage():
    """rank = (pp_rank * dp + dp_rank) * tp + tp_rank."""
    layout = configure("--tp 2 --pp 2", 8).layout
    every = stats([1, 5, 2, 3, 40, 20, 30, 10])
    assert step_stats.per_stage(every, layout) == ([5, 40], [2, 20])


@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZERS} - {"adafactor"}))
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("tied", ["--tied", "--no-tied"])
def test_states_take_what_is_predicted(optimizer, precision, tied, monkeypatch):
    """Every tensor that a run holds between steps, on one rank, but for padding; and of a block the
    norms and biases, which Muon and 8-bit AdamW leave to AdamW. A plan has no bytes for Adafactor's
    factors.
    """
    if optimizer in ("adamw8bit", "apex") and precision == "fp64":
        return  # refused
    for name, module in fake_apex.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    config = configure(f"--optimizer {optimizer} --precision {precision} {tied}", 1)
    pieces = trainer.build(config)
    trainer.step(pieces, data.Synthetic(512, 32, 1), 0, 1e-3)
    pieces.reader.close()
    (parts,) = memory.run_memory(config)
    buckets = pieces.optimizer.buckets
    assert size([b.weights for b in buckets]) == pytest.approx(parts["weights"], rel=0.01)
    assert size([b.gradients for b in buckets]) == pytest.approx(parts["gradients"], rel=0.01)
    state = sum(each.rule.state_bytes() for each in pieces.optimizer.update_sets)
    if precision == "bf16":
        state += size([bucket.flat for bucket in buckets])
    blocks = optimizer in ("muon", "adamw8bit")
    assert state == pytest.approx(parts["optimizer"], rel=0.04 if blocks else 0.01)


def test_a_cpu_in_fp32_needs_no_gradient_of_the_whole_embedding():
    """torch adds rows to the sum; in bf16, and at --zero 2, there is one of the whole matrix."""

    def working(words: str) -> float:
        return memory.run_memory(configure(f"--vocab-size 100000 --pp 2 {words}", 4))[0]["working"]

    matrix = 100000 * 64 * 4
    assert working("--device cpu") < 0.01 * matrix < 0.9 * matrix < working("--device cuda")
    assert working("--device cpu --zero 2") > matrix
    assert working("--device cpu --precision bf16") > 0.9 * matrix / 2


def test_a_tied_matrix_on_one_stage_has_three_gradients_at_the_end_of_a_backward():
    """The head's, the embedding's and their sum are the peak where activations are few. The
    rehearsal of these runs has 1.165 and 1.547 GB of tensors; one gradient less gave 1.080 GB.
    """
    words = "--hidden 1024 --heads 16 --kv-heads 1 --seq-length 1024 --micro-batch-size 2 --cp 4 "
    words += "--global-batch-size 64 --precision bf16 --vocab-size 50257 --device cuda"
    for layers, rehearsed in ((4, 1.165e9), (8, 1.547e9)):
        config = configure(f"{words} --layers {layers}", 4)
        (parts,) = memory.run_memory(config)
        assert sum(parts.values()) == pytest.approx(rehearsed, rel=0.01)


def size(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_the_table_has_the_peak_and_the_bytes_beside_it():
    config = configure("--pp 2", 2)
    before, after = stats([80e6, 100e6]), stats([200e6, 300e6])
    on_cpu = step_stats.table(config, "cpu", before, after).splitlines()
    assert [line.split() for line in on_cpu[1:]] == [
        ["stage", "measured", "before"],
        ["0", "200.0", "40.0"],
        ["1", "300.0", "50.0"],
    ]
    on_gpu = step_stats.table(config, "cuda", before, after)
    assert "allocated" in on_gpu
    assert on_gpu.splitlines()[1].split() == ["stage", "measured", "reserved"]
    assert on_gpu.splitlines()[2].split() == ["0", "200.0", "100.0"]
    measured = [replace(each, outside=outside) for each, outside in zip(after, (2.5e9, 3e9))]
    assert step_stats.outside_per_stage(measured, config.layout) == [2500000000, 3000000000]
    assert [line.split() for line in step_stats.table(config, "cuda", [], measured).split("\n")][
        1:
    ] == [
        ["stage", "measured", "reserved", "outside"],
        ["0", "200.0", "100.0", "2500.0"],
        ["1", "300.0", "150.0", "3000.0"],
    ]


def test_the_bytes_outside_of_the_allocator_are_what_the_driver_has_and_torch_has_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 27 * 10**9)
    assert step_stats.outside_allocator(torch.device("cuda", 0)) == 3e9
    assert math.isnan(step_stats.outside_allocator(torch.device("cpu")))


@pytest.mark.parametrize("measured", [[2.5e9, 9e9], [math.nan, math.nan]])
def test_a_run_measures_them_once_after_the_first_step(tmp_path, monkeypatch, capsys, measured):
    """run.json, which is written before the first step, then has them too; not that of CPUs."""
    values = iter(measured)
    monkeypatch.setattr(step_stats, "outside_allocator", lambda device: next(values))
    words = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 31 --steps 3 --device cpu"
    words += f" --no-watchdog --global-batch-size 2 --out {tmp_path}"
    trainer.main(validation.check(parse(words.split()), 1), Launch("python"))
    assert next(values) is measured[1]
    facts = json.loads((tmp_path / "run.json").read_text())
    on_gpu = measured[0] == 2.5e9
    assert facts.get("outside_allocator_bytes_per_stage") == ([2500000000] if on_gpu else None)
    assert facts["config"]["training"]["steps"] == 3
    said = capsys.readouterr().out
    assert ("outside" in said, "2500.0" in said) == (on_gpu, on_gpu)


STEP = """
import sys
import golden_worker, trainer, data
from config import validation
pieces = trainer.build(validation.check(golden_worker.options({"recompute": "none"}), 1))
trainer.step(pieces, data.Synthetic(61, 16, 1), 0, 1e-3)
print(sorted({"torch._dynamo", "torch.distributed.fsdp", "sympy"} & sys.modules.keys()))
"""


def test_a_run_loads_no_compiler_and_no_fsdp():
    """The first object of torch.optim imported torch._dynamo, and every run --zero 3: 110 MB."""
    outcome = start([sys.executable, "-c", STEP], PYTHONPATH="tests:.")
    assert (outcome.status, outcome.out.split()) == (0, ["[]"]), outcome.err


THREADS = """
import ctypes, sys, threading
from distributed.heap import share_heap
share_heap()
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
found, here = [], threading.Barrier(4)
def allocate():
    here.wait()
    found.append(malloc(100_000))
    here.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
heap = [line.split()[0].split("-") for line in open("/proc/self/maps") if "[heap]" in line]
print(sum(any(int(a, 16) <= at < int(b, 16) for a, b in heap) for at in found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heaps of glibc")
def test_threads_share_one_heap():
    """Each thread of gloo had its own, and kept there what it had once taken: 30 MB or more."""
    own = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=8"}
    for environment, expected in (({}, 4), ({"MALLOC_ARENA_MAX": "8"}, 0), (own, 0)):
        outcome = start([sys.executable, "-c", THREADS], **environment)
        assert (outcome.status, outcome.out.split()) == (0, [str(expected)]), outcome.err
