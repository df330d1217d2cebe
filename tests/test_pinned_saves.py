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

EMPTY = torch.empty


def copied(monkeypatch, runs: list[torch.Tensor], read=None) -> tuple[np.ndarray, list[int]]:
    """The weights that two saves of these runs copy to the host, and the bytes of the buffers."""
    asked: list[int] = []

    def pinned(size, dtype, pin_memory):
        assert pin_memory
        asked.append(size * dtype.itemsize)
        return EMPTY(size, dtype=dtype)

    ends = [*itertools.accumulate(map(len, runs), initial=0)]
    values = torch.cat(runs)
    shards = [
        types.SimpleNamespace(start=a, stop=b, read=read or (lambda kind, a, b: values[a:b]))
        for a, b in itertools.pairwise(ends)
    ]
    saver = types.SimpleNamespace(buffers=HostBuffers(torch.device("cuda")))
    saved = types.SimpleNamespace(shards=shards, kinds=("weights",))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", pinned)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        for _ in range(2):  # the second save uses the first one's buffers
            arrays = save.Checkpointer._copy_to_host(saver, saved)["weights"]
    return np.concatenate(arrays), asked


@pytest.mark.parametrize("count", [1, 700, 2**20, 2**20 + 1, 3 * 2**19 - 5])
def test_pinned_memory_takes_no_more_than_it_must(count, monkeypatch):
    """torch rounds pinned memory up to a power of two: one buffer could take twice its size."""
    values = torch.randn(count)
    sizes = [count // 3, 0, count - count // 5 - count // 3, count // 5]
    array, asked = copied(monkeypatch, list(values.split(sizes)))
    assert np.array_equal(array, values.numpy())
    assert sum(asked) == 4 * count
    assert sum(2 ** (size - 1).bit_length() for size in asked) <= 4 * count + 2**20


def test_a_save_of_a_gpu_makes_one_run_after_the_other(monkeypatch):
    """Copies for Adafactor and 8-bit AdamW are made one at a time: the GPU may lack memory."""
    made, alive = [], []

    def read(kind: str, a: int, b: int) -> torch.Tensor:
        run = torch.arange(a, b, dtype=torch.float32)
        alive.append(sum(ref() is not None for ref in made))
        made.append(weakref.ref(run))
        return run

    array, _ = copied(monkeypatch, list(torch.arange(90.0).split(10)), read)
    assert np.array_equal(array, np.arange(90, dtype=np.float32))
    assert max(alive) <= 1


def test_buffers_are_pinned_ahead_in_a_thread(tmp_path, monkeypatch):
    """Not in the pause of the first save, which would take seconds more."""
    asked: list[tuple[str, int]] = []
    devices: list[torch.device] = []

    def pinned(size, dtype, pin_memory):
        asked.append((threading.current_thread().name.partition("_")[0], size))
        return EMPTY(size, dtype=dtype)

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
