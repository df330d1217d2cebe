"""GPUs that are not there: torch runs on fake tensors of device cuda, which have no elements.

    device_guard.load()                        # before torch is imported
    with fake_devices(context, "NVIDIA H100") as meter:
        state = trainer.build(config, context)

Everything that is replaced in torch is replaced inside of the `with` only.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import bias as attention_bias
from torch.utils._python_dispatch import _disable_current_modes

import parallel
from corpora import attention_masks
from distributed import token_exchange
from distributed.collectives import Group
from emulator.meter import Meter
from emulator.recording import RecordingContext
from parallel import DRAWN_AT_ONCE
from telemetry import replica_check
from telemetry.replica_check import HASHED_AT_ONCE

# Weights are drawn, and hashed, by chunks: those that follow the first ones take no more memory.
HASHED = 2 * HASHED_AT_ONCE
LOWER_RIGHT = object()  # stands in for the mask of torch.nn.attention.bias.causal_lower_right


@contextlib.contextmanager
def fake_devices(context: RecordingContext, gpu: str, routing: str = "even") -> Iterator[Meter]:
    """Make torch see GPUs of that name, all of them fake, and meter what happens on them.

    routing: how many tokens each expert gets, one of ROUTINGS.
    """
    meter = Meter(context.trace)
    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(context, meter, gpu, routing):
            stack.enter_context(replaced(owner, name, value))
        stack.enter_context(_Mode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        yield meter


class _Mode(FakeTensorMode):
    """Never asks a driver for a device, although torch.cuda.is_available() is true."""

    avoid_device_init = True


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a module or class is another inside of the `with`."""
    own = name in owner.__dict__
    before = owner.__dict__[name] if own else None  # as it is there: it may be a staticmethod
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _replacements(
    context: RecordingContext,
    meter: Meter,
    gpu: str,
    routing: str,
) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, value) of everything that is replaced."""
    cuda = torch.cuda
    device = context.device

    def peak(*_) -> int:
        return max((peak.bytes for peak in meter.peaks.values()), default=0)

    stream = _Stream(meter)
    cuda_parts = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: context.local.size,
        "current_device": lambda: device.index,
        "set_device": lambda _: None,
        "get_device_name": lambda *_: gpu,
        "get_device_capability": lambda *_: (7, 0) if "V100" in gpu else (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "max_memory_allocated": peak,
        "memory_reserved": peak,
        "memory_allocated": lambda *_: meter.now,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: meter.stop("synchronize"),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "Stream": lambda *_, **__: stream,
        "Event": lambda *_, **__: stream,
    }
    yield from ((cuda, name, value) for name, value in cuda_parts.items())
    # It would ask the driver for a real tensor, which torch 2.11 does not leave to _Mode.
    yield fake_tensor, "init_gpu_context", lambda device: None
    yield Tensor, "numpy", _one_number
    yield FakeTensor, "tolist", lambda tensor: meter.values(tensor)
    yield Tensor, "record_stream", lambda tensor, stream: None
    yield torch.UntypedStorage, "resize_", _resize(meter)
    yield DeviceMesh, "from_group", staticmethod(_real_mesh(DeviceMesh.from_group))
    yield F, "scaled_dot_product_attention", attention
    yield F, "rms_norm", rms_norm
    yield attention_masks, "flex", flex
    # Its class of tensors cannot be made where operations are counted.
    yield attention_bias, "causal_lower_right", lambda *sizes: LOWER_RIGHT
    draw = parallel.draw_normal
    bit_hash = replica_check.bit_hash
    yield parallel, "draw_normal", lambda out, *rest: draw(_start(out, DRAWN_AT_ONCE), *rest)
    yield token_exchange, "counts_on_host", counts_of_routing(meter, routing)
    yield replica_check, "bit_hash", lambda flat, start=0: bit_hash(flat[:HASHED], start)


EVEN, ONE_RANK = ROUTINGS = ("even", "one-rank")


def counts_of_routing(meter: Meter, routing: str) -> Callable[[Group, Tensor, int], list]:
    """Return a function that stands for token_exchange.counts_on_host, with counts of that routing.

    EVEN: each expert gets as many rows as another, or one row less. ONE_RANK: the experts of each
    group's first rank get all rows. All ranks are taken to have as many rows as this one.
    """

    def counts(group: Group, tensor: Tensor, rows: int) -> list:
        meter.values(tensor)  # the host reads the counts
        count = tensor[0].numel() if tensor.dim() > 1 else len(tensor)
        held = count // group.size
        used = count if routing == EVEN else held
        of_expert = [rows * (i + 1) // used - rows * i // used for i in range(used)]
        of_expert += [0] * (count - used)
        if tensor.dim() == 1:
            return of_expert
        leaving = [of_expert[i : i + held] for i in range(0, count, held)]
        return [leaving, [leaving[group.rank]] * group.size]

    return counts


def _one_number(tensor: Tensor, **_: Any) -> np.ndarray:
    """An array of the tensor's shape, to read and write, whose elements share their memory."""
    return as_strided(np.zeros(1, np.float32), tensor.shape, (0,) * tensor.dim())


class _Stream:
    """The device's only stream; and an event of it, which has happened as soon as it is recorded.

    It waits for no other stream, there being none, nor for an event of its own.
    """

    stream_id = 0
    device_type = 1

    def __init__(self, meter: Meter):
        self.meter = meter

    def _nothing(self, *_: Any) -> None:
        """To do."""

    record = wait = wait_stream = wait_event = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        self.meter.stop("synchronize")


# ---- What CUDA builds do inside of one operation -------------------------------------------------


def attention(
    q,
    k,
    v,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """The kernel that torch would take on a GPU: flash; with a mask or in fp32, the efficient one.

    The latter has no grouped queries, nor any kernel fp64: torch then writes the scores.
    """
    if attn_mask is LOWER_RIGHT:  # kernels have it as they have the other causal mask
        attn_mask = None
        is_causal = True
    if q.dtype in (torch.float16, torch.bfloat16) and attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    if q.dtype == torch.float64 or enable_gqa:
        options = (attn_mask, dropout_p, is_causal)
        more = {"scale": scale, "enable_gqa": enable_gqa}
        return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, *options, **more)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:2], q.shape[2], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal)[0]


def flex(q, k, v, mask):
    """The kernel of flex_attention, by what it allocates: as flash, the keys read by groups."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.dtype == torch.float32:  # flash takes groups, the other kernel does not
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return attention(q, k, v, is_causal=True)


class _RMSNorm(torch.autograd.Function):
    """One kernel each way, as on GPUs, by what they allocate; a CPU build of torch takes many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    """torch's, on a GPU."""
    return _RMSNorm.apply(x, weight)


def _resize(meter: Meter) -> Callable:
    """The resizing of storages, by which --zero 3 frees what it gathered."""
    resize = torch.UntypedStorage.resize_

    def counted(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        meter.resized(storage)
        return result

    return counted


def _real_mesh(from_group: Callable) -> Callable:
    """torch's meshes of ranks, which it computes with tensors: these have elements."""

    def real(*args: Any, **options: Any) -> DeviceMesh:
        with _disable_current_modes():
            return from_group(*args, **options)

    return real


def _start(tensor: Tensor, elements: int) -> Tensor:
    """The first rows, of so many elements or a few more."""
    return tensor[: -(-elements * len(tensor) // max(1, tensor.numel()))]
