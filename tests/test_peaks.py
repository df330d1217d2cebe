"""Bytes at most: if this failed, building or checking a model would take more than training it."""

import subprocess
import sys
import weakref

import golden_worker
import torch
import torch.distributed as dist
from fake_context import FakeContext
from ranks import ROOT
from test_zero import build
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import trainer
from config import schema, validation
from config.buffer_sizes import BUCKET_ELEMENTS
from distributed.collectives import Group
from distributed.mesh import Mesh
from optim.buckets import make_buckets
from parallel import DRAWN_AT_ONCE, DRAWN_ON_CPU, ParamFactory, draw_normal
from telemetry import replica_check
from telemetry.replica_check import HASHED_ON_CPU


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations return, while they live."""

    def __init__(self):
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            # A DTensor's storage has the whole tensor's size and no memory: its part is counted.
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage):
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            self.peak = max(self.peak, sum(self.live.values()))
            weakref.finalize(storage, self.live.pop, key, None)


def test_drawing_takes_little_beside_the_weights():
    """It took 72 bytes an element where the first dimension is split: 80 GB for a large head. On a
    CPU 105 MB stayed with the process, the most of a small run.
    """
    for shape, dim in (((8192, 1024), 0), ((1024, 8192), 1), ((8, 3, 64, 4096), 0)):
        out = torch.empty(shape)
        assert out.numel() >= 6 * DRAWN_ON_CPU
        with PeakBytes() as bytes_held:
            draw_normal(out, "w", shape, dim, 0, 0.02, 1)
        assert 8 * DRAWN_ON_CPU < bytes_held.peak - out.nbytes <= 100 * DRAWN_ON_CPU


# Draws a weight on a fake GPU; prints the kernels that it launches, and the bytes that it takes.
DRAWS_ON_A_GPU = """
from tools.emulator import device_guard
device_guard.load()
import torch
from tools.emulator.fake_devices import fake_devices
from tools.emulator.recording import recording_context
from parallel import DRAWN_AT_ONCE, draw_normal
with fake_devices(recording_context(1, 0, 1), "GPU") as meter:
    out = torch.empty(4, DRAWN_AT_ONCE, device="cuda")
    draw_normal(out, "w", tuple(out.shape), 0, 0, 0.02, 1)
    (peak,) = meter.peaks.values()
    print(meter.kernels.total(), peak.bytes - out.nbytes)
"""


def test_drawing_on_a_gpu_takes_few_kernels_and_little_memory():
    """Parts of a size for a CPU's cache would take 16 times as many kernels, each for nothing."""
    command = [sys.executable, "-c", DRAWS_ON_A_GPU]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kernels, size = map(int, done.stdout.split())
    parts = 4
    assert kernels <= 50 * parts
    assert 8 * DRAWN_AT_ONCE < size <= 100 * DRAWN_AT_ONCE


def test_the_replica_check_takes_little_beside_the_weights():
    """It took 42 bytes an element of the largest parameter. On a CPU it took 63 MB at the end of a
    run, more than its steps.
    """
    weights = torch.randn(8 * HASHED_ON_CPU).bfloat16()
    with PeakBytes() as bytes_held:
        whole = replica_check.bit_hash(weights, 5)
    assert 8 * HASHED_ON_CPU < bytes_held.peak <= 60 * HASHED_ON_CPU
    cut = 3 * HASHED_ON_CPU + 7
    parts = (
        replica_check.bit_hash(weights[:cut], 5),
        replica_check.bit_hash(weights[cut:], 5 + cut),
    )
    assert whole == sum(parts), "a hash of parts in any cut is the hash of the whole"


def test_buckets_replace_what_was_drawn_one_by_one():
    """Weights in bf16, gradients and masters in fp32 are 10 bytes an element in the end. All that
    was drawn, 4 bytes an element, was copied and kept beside them until the last bucket was made.
    """
    factory = ParamFactory(Mesh(), dtype=torch.bfloat16)
    count, rows = 6, BUCKET_ELEMENTS // 1024
    with PeakBytes() as bytes_held:
        parameters = [factory.parameter(f"{i}", (rows, 1024), decay=True) for i in range(count)]
        training = schema.Training(precision="bf16")
        buckets = make_buckets(parameters, factory.mesh, training, 0, torch.bfloat16)
    assert len(buckets) == count
    elements = count * rows * 1024
    assert 10 * elements <= bytes_held.peak <= (10 + 4.01 / count) * elements


class FakeGroups(FakeContext):
    """With groups of torch's fake backend, in which nothing is sent."""

    def group(self, rows, role):
        made = super().group(rows, role)
        return Group(made.ranks, made.rank, dist.group.WORLD if made.size == self.size else None)


def test_zero_3_shards_each_block_when_it_is_drawn():
    """All of the stage was drawn in fp32 on each GPU before any of it was sharded."""
    dp, layers, block = 4, 12, 12 * 256**2
    options = {"layers": layers, "hidden": 256, "heads": 4, "vocab_size": 64, "zero": 3, "dp": dp}
    config = validation.check(golden_worker.options(options), dp)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dp)
    try:
        with PeakBytes() as bytes_held:
            state = trainer.build(config, FakeGroups(dp))
    finally:
        dist.destroy_process_group()
    assert state.optimizer.fully_sharded
    assert len(state.optimizer.owned()) == len(list(state.stages.parameters()))
    drawn, shards = 4 * layers * block, 4 * layers * block / dp
    # Beside the shards: a block and its shard, embedding and norms, and what drawing takes.
    drawing = 100 * DRAWN_ON_CPU
    assert shards + drawing / 2 < bytes_held.peak < shards + 1.5 * 4 * block + drawing
    assert shards + 1.5 * 4 * block < drawn / 2


def test_the_bytes_of_a_run_are_counted():
    """The count itself: a run's weights are seen."""
    with PeakBytes() as bytes_held:
        run = build()
    assert bytes_held.peak >= sum(p.nbytes for p in run.stages.parameters())
