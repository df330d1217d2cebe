"""Saves of a GPU: if this failed, they would take twice the memory of the host."""

import itertools
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from checkpoint_worker import build_run, make

from checkpointing import save
from checkpointing.state import Progress
from checkpointing.writer import HostBuffers


@pytest.mark.parametrize("count", [1, 700, 2**20, 2**20 + 1, 3 * 2**19 - 5])
def test_pinned_memory_takes_no_more_than_it_must(count, monkeypatch):
    """torch rounds pinned memory up to a power of two: one buffer could take twice its size."""
    asked: list[int] = []
    empty = torch.empty

    def pinned(size, dtype, pin_memory):
        assert pin_memory
        asked.append(size * dtype.itemsize)
        return empty(size, dtype=dtype)

    values = torch.randn(count)
    cuts = [0, count // 3, count // 3, count - count // 5, count]
    runs = [values[a:b] for a, b in itertools.pairwise(cuts)]
    shards = [
        types.SimpleNamespace(start=a, stop=b, read=lambda kind, a, b: values[a:b])
        for a, b in itertools.pairwise(cuts)
    ]
    assert sum(map(len, runs)) == count
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    saver = types.SimpleNamespace(buffers=HostBuffers(torch.device("cuda")))
    saved = types.SimpleNamespace(shards=shards, kinds=("weights",))
    for _ in range(2):  # the second save uses the first one's buffers
        arrays = save.Checkpointer._copy_to_host(saver, saved)["weights"]
    monkeypatch.undo()
    assert np.array_equal(np.concatenate(arrays), values.numpy())
    taken = sum(2 ** (size - 1).bit_length() for size in asked)
    assert sum(asked) == 4 * count
    assert taken <= 4 * count + 2**20


def test_a_save_of_a_gpu_makes_one_run_after_the_other(monkeypatch):
    """Copies for Adafactor and 8-bit AdamW are made one at a time: the GPU may lack memory."""
    made, most, empty = [], [], torch.empty

    def read(kind: str, a: int, b: int) -> torch.Tensor:
        run = torch.arange(a, b, dtype=torch.float32)
        most.append(sum(ref() is not None for ref in made))
        made.append(weakref.ref(run))
        return run

    monkeypatch.setattr(torch, "empty", lambda n, dtype, pin_memory: empty(n, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    shards = [types.SimpleNamespace(start=10 * i, stop=10 * i + 10, read=read) for i in range(9)]
    saver = types.SimpleNamespace(buffers=HostBuffers(torch.device("cuda")))
    saved = types.SimpleNamespace(shards=shards, kinds=("row_var", "col_var"))
    arrays = save.Checkpointer._copy_to_host(saver, saved)
    for kind in saved.kinds:
        assert np.array_equal(np.concatenate(arrays[kind]), np.arange(90, dtype=np.float32))
    assert max(most) <= 1


def test_buffers_are_pinned_ahead_in_a_thread(tmp_path, monkeypatch):
    """Not in the pause of the first save, which would take seconds more."""
    asked: list[tuple[str, int]] = []
    devices: list[torch.device] = []
    empty = torch.empty

    def pinned(size, dtype, pin_memory):
        asked.append((threading.current_thread().name.partition("_")[0], size))
        return empty(size, dtype=dtype)

    checkpoints = build_run(make(tmp_path))[1]
    on_cpu = checkpoints.buffers
    checkpoints.begin_pinning()
    assert on_cpu._pinning is None
    checkpoints.buffers = HostBuffers(torch.device("cuda", 3))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", pinned)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "set_device", devices.append)
        checkpoints.begin_pinning()
        checkpoints.save(Progress(1, 8))
    checkpoints.close()
    assert {thread for thread, _ in asked} == {"pinning"}
    assert devices == [torch.device("cuda", 3)]
    assert (tmp_path / "checkpoints/step_00000001").exists()


def test_memory_that_cannot_be_pinned_is_an_error_of_the_first_save(monkeypatch):
    buffers = HostBuffers(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: 1 / 0)
        buffers.begin_pinning(8, {"weights": torch.float32})
        with pytest.raises(ZeroDivisionError):
            buffers.copy("weights", [torch.ones(8)], 8, torch.float32)
