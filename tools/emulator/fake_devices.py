"""Lets torch run on fake GPUs: tensors of device cuda without elements, on a machine without a GPU.

    device_guard.load()                        # before torch is imported
    with fake_devices(context, "NVIDIA H100") as meter:
        state = trainer.build(config, context)

Functions of torch and of this program that need a GPU, or the elements of a tensor, are replaced
inside the `with` only. A replacement allocates the tensors that the function would allocate on a
GPU, and tells the rank's meter (meter.py) where the host would wait for the device.
"""

import contextlib
import math
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
from architecture.dispatch import TopK, nodes_of_token
from distributed import node_dispatch, token_exchange
from distributed.collectives import Group
from layers import attention_masks, local_attention
from layers.attention_masks import visible_blocks
from parallel import DRAWN_AT_ONCE
from telemetry import replica_check
from telemetry.replica_check import HASHED_AT_ONCE
from tools.emulator.meter import Meter
from tools.emulator.recording import RecordingContext

# A rehearsal hashes at most this many elements of a tensor. Weights are hashed by chunks, and after
# two chunks the memory has reached its peak.
HASHED = 2 * HASHED_AT_ONCE
# What torch reports as the capability of a GPU, by a part of its name; the first that fits counts.
# Of AMD's GPUs it is the number of the architecture. All others, an MI250X too, say (9, 0).
CAPABILITIES = {
    "V100": (7, 0),
    "A100": (8, 0),
    "A10": (8, 6),
    "A6000": (8, 6),
    "3090": (8, 6),
    "L4": (8, 9),
    "4090": (8, 9),
    "5090": (12, 0),
    "B300": (10, 3),
    "B200": (10, 0),
    "MI300X": (9, 4),
    "MI35": (9, 5),
}
LOWER_RIGHT = object()  # stands in for the mask of torch.nn.attention.bias.causal_lower_right


@contextlib.contextmanager
def fake_devices(context: RecordingContext, gpu: str, routing: str = "even") -> Iterator[Meter]:
    """Make torch use fake GPUs, and yield the meter of this rank's GPU.

    gpu: the name that the driver would give the GPU. routing: the distribution of tokens over
    experts, EVEN or ONE_RANK.
    """
    meter = Meter(context.trace)
    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(context, meter, gpu, routing):
            stack.enter_context(replaced(owner, name, value))
        # The meter is entered last, so torch calls it first, and it calls the fake operations.
        stack.enter_context(_Mode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        yield meter


class _Mode(FakeTensorMode):
    """A mode that asks no driver for a device, although torch.cuda.is_available() is true."""

    avoid_device_init = True


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or class inside the `with`, and restore it afterwards."""
    defined_here = name in owner.__dict__  # False if the attribute is inherited
    # The old value is read from __dict__, because getattr would unwrap a staticmethod.
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if defined_here:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _replacements(
    context: RecordingContext,
    meter: Meter,
    gpu: str,
    routing: str,
) -> Iterator[tuple[Any, str, Any]]:
    """Yield everything that is replaced: (module or class, name of the attribute, new value).

    gpu: the name of the GPU. routing: EVEN or ONE_RANK.
    """
    cuda = torch.cuda
    device = context.device

    def peak(*_) -> int:
        return max((peak.bytes for peak in meter.peaks.values()), default=0)

    # The functions of torch.cuda ask a driver; the functions that replace them here ask the meter.
    # One object stands for every stream and every event.
    stream = _Stream(meter)
    cuda_parts = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: context.local.size,
        "current_device": lambda: device.index,
        "set_device": lambda _: None,
        "get_device_name": lambda *_: gpu,
        "get_device_capability": lambda *_: _capability(gpu),
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
    yield torch.version, "hip", "6.4" if gpu.startswith("MI") else None
    # torch 2.11 makes a tensor on the driver's device here, in spite of avoid_device_init.
    yield fake_tensor, "init_gpu_context", lambda device: None
    # These methods read or free the memory of a tensor, which a fake tensor has not.
    yield Tensor, "numpy", _one_number
    yield FakeTensor, "tolist", lambda tensor: meter.values(tensor)
    yield Tensor, "record_stream", lambda tensor, stream: None
    yield torch.UntypedStorage, "resize_", _resize(meter)
    yield DeviceMesh, "from_group", staticmethod(_real_mesh(DeviceMesh.from_group))
    # For these operations torch would choose a CPU's kernels, which allocate other tensors.
    yield F, "scaled_dot_product_attention", attention
    yield F, "rms_norm", rms_norm
    yield attention_masks, "flex", flex
    yield local_attention, "seen_by", seen_by
    yield local_attention, "attend_by_flex", local_flex
    # This mask, a subclass of Tensor, cannot be made in a dispatch mode: a mark stands in for it.
    yield attention_bias, "causal_lower_right", lambda *sizes: LOWER_RIGHT
    draw = parallel.draw_normal
    bit_hash = replica_check.bit_hash
    # Weights are drawn by chunks. The first chunk reaches the peak of memory, so only it is drawn.
    yield (
        parallel,
        "draw_normal",
        lambda out, *options, **more: draw(_start(out, DRAWN_AT_ONCE), *options, **more),
    )
    yield token_exchange, "counts_on_host", counts_of_routing(meter, routing)
    yield node_dispatch, "read_counts", counts_on_nodes(meter, routing)
    yield replica_check, "bit_hash", lambda flat, start=0: bit_hash(flat[:HASHED], start)


# How tokens are routed to experts: as many to each, or all that a group of --ep has to one rank.
EVEN = "even"
ONE_RANK = "one-rank"


def counts_of_routing(meter: Meter, routing: str) -> Callable[[Group, Tensor, int], list]:
    """Return a function that replaces token_exchange.counts_on_host in a rehearsal.

    The replaced function reads how many rows (tokens) each expert gets. Fake tensors have no such
    counts, so this one invents them. EVEN: the rows of any two experts differ by at most 1.
    ONE_RANK: the experts of each group's first rank get all rows. Every rank is assumed to have as
    many rows as this rank.
    """

    def counts(group: Group, tensor: Tensor, rows: int) -> list:
        """Return invented counts, which add up to `rows`, in the shape of `tensor`.

        tensor: this rank's rows by expert, (experts,), or the rows that it sends and the rows that
        it receives, by rank of the group and expert of that rank: (2, ranks, experts of a rank).
        """
        meter.values(tensor)  # records that the host reads the counts
        experts = tensor[0].numel() if tensor.dim() > 1 else len(tensor)
        by_rank = _rows_of_experts(routing, rows, experts, group.size)
        if tensor.dim() == 1:
            return [rows for rank in by_rank for rows in rank]
        sent = by_rank
        # The other ranks do not exist: it is assumed that every rank of the group sends to this
        # rank as many rows as this rank sends to itself.
        received = [sent[group.rank]] * group.size
        return [sent, received]

    return counts


def _rows_of_experts(routing: str, rows: int, experts: int, ranks: int) -> list[list[int]]:
    """Return the rows of each expert by rank: `rows` are divided as `routing` says.

    EVEN: almost equal numbers; of 10 rows, 4 experts get 2, 3, 2, 3. ONE_RANK: only the first
    experts, which are those of the first of the ranks, get rows.
    """
    experts_of_rank = experts // ranks
    used = experts if routing == EVEN else experts_of_rank
    found = [rows * (i + 1) // used - rows * i // used for i in range(used)]
    found += [0] * (experts - used)
    return [found[i : i + experts_of_rank] for i in range(0, experts, experts_of_rank)]


def counts_on_nodes(meter: Meter, routing: str) -> Callable[..., node_dispatch.RowCounts]:
    """Return a function that replaces node_dispatch.read_counts in a rehearsal.

    Every rank is assumed to have as many tokens as this rank, whose rows the experts get as in
    `counts_of_routing`. EVEN: each node gets as many copies as of tokens that choose their experts
    independently. ONE_RANK: the first node gets a copy of each token.
    """

    def counts(
        across: Group, within: Group, tensor: Tensor, tokens: tuple[int, int], experts: int
    ) -> node_dispatch.RowCounts:
        """Return invented counts; the arguments are those of node_dispatch.read_counts."""
        meter.values(tensor)  # records that the host reads the counts
        nodes, ranks = across.size, within.size
        count, chosen = tokens
        by_rank = _rows_of_experts(routing, count * chosen, experts, nodes * ranks)
        share = nodes_of_token(TopK(experts, chosen), nodes) / nodes
        copies = [math.ceil(count * share)] * nodes
        if routing == ONE_RANK:
            copies = [count] + [0] * (nodes - 1)
        # This rank sends on what the ranks with its place on all nodes send to its node.
        here = by_rank[across.rank * ranks : (across.rank + 1) * ranks]
        to_ranks = [nodes * sum(rows) for rows in here]
        arriving = [nodes * rows for rows in here[within.rank]] * ranks
        return node_dispatch.sent_of(copies, [copies[across.rank]] * nodes, to_ranks, arriving)

    return counts


def _one_number(tensor: Tensor, **_: Any) -> np.ndarray:
    """Return a writable array of the tensor's shape that takes the memory of one number.

    It replaces Tensor.numpy: all its elements are the same number, since every stride is 0.
    """
    return as_strided(np.zeros(1, np.float32), tensor.shape, (0,) * tensor.dim())


class _Stream:
    """Stands for the device's only stream, and for every event on it.

    An event has happened as soon as it is recorded, so waiting for an event does nothing.
    """

    stream_id = 0
    device_type = 1

    def __init__(self, meter: Meter):
        self.meter = meter

    def _nothing(self, *_: Any) -> None:
        """Replace record, wait, wait_stream and wait_event: no work runs that they could order."""

    record = wait = wait_stream = wait_event = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def synchronize(self) -> None:
        self.meter.stop("synchronize")


# ---- Operations that allocate other tensors in a CUDA build of torch -----------------------------


def _capability(gpu: str) -> tuple[int, int]:
    """Return what torch reports as the capability of a GPU with this name in its driver's name."""
    return next((number for name, number in CAPABILITIES.items() if name in gpu), (9, 0))


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
    """Replace F.scaled_dot_product_attention: call the kernel that torch would choose on a GPU.

    With 16 bits and without a mask torch chooses the flash kernel, otherwise, and on GPUs before
    Ampere, the memory-efficient kernel. The memory-efficient kernel has no grouped queries, and no
    kernel has fp64: in these cases torch computes attention by matrix products, which store the
    scores.
    """
    if attn_mask is LOWER_RIGHT:  # a causal mask, which is not a tensor but a flag of the kernels
        attn_mask = None
        is_causal = True
    has_flash = torch.cuda.get_device_capability(q.device) >= (8, 0)
    if has_flash and q.dtype in (torch.float16, torch.bfloat16) and attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    if q.dtype == torch.float64 or enable_gqa:
        math_attention = torch.ops.aten._scaled_dot_product_attention_math
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return math_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)[0]
    if attn_mask is not None:
        # The kernel takes a mask of the scores' shape: (batch, heads, queries, keys).
        attn_mask = attn_mask.expand(*q.shape[:2], q.shape[2], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal)[0]


def flex(q, k, v, mask):
    """Replace flex_attention by a kernel that allocates the same tensors.

    The mask has no influence on the tensors' sizes. q: (batch, heads, sequence, head size); k, v:
    the same with the number of kv heads.
    """
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.dtype == torch.float32:
        # In fp32 `attention` calls a kernel in which each query head needs its own kv head: the
        # kv heads are repeated.
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return attention(q, k, v, is_causal=True)


def seen_by(starts, stops, places, keys, slopes, _):
    """Replace local_attention.seen_by, which may read the bounds of spans: fake tensors have none.

    So blocks with windows, softcaps or sinks run as by flex_attention on every fake GPU.
    """
    return local_attention.VisibleKeys(places, slopes, visible_blocks(starts, stops, keys), [])


def local_flex(q, k, v, sinks, softcap, seen, _):
    """Replace local_attention.attend_by_flex by a kernel that allocates the same tensors."""
    mixed = flex(q, k, v, seen.blocks)
    if sinks is None:
        return mixed
    share = (mixed.new_zeros(q.shape[:3], dtype=torch.float32) - sinks[None, :, None]).sigmoid()
    return mixed * share.to(mixed.dtype)[..., None]


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with one kernel in each direction and the tensors that the GPU's kernels allocate.

    A CPU build of torch computes it by many operations.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        """Allocate the output, and for the backward pass one fp32 number per row, as on a GPU."""
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        """Allocate the gradients of `x` and `weight`; fake tensors have no values to compute."""
        x, weight, _ = ctx.saved_tensors
        return torch.zeros_like(x), None if weight is None else torch.zeros_like(weight)


def rms_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Replace F.rms_norm by a function that allocates the same tensors as the GPU's kernel.

    The elements are not computed, because fake tensors have none; so the arguments `shape` and
    `eps` of F.rms_norm are not used. x: (..., h), weight: (h,) or None.
    """
    return _RMSNorm.apply(x, weight)


def _resize(meter: Meter) -> Callable:
    """Return a function that replaces UntypedStorage.resize_ and tells the meter the new size.

    torch's FSDP, which does --zero 3, frees gathered weights by a resize to 0 bytes.
    """
    resize = torch.UntypedStorage.resize_

    def counted(storage: Any, size: int) -> Any:
        """Replace storage.resize_(size): resize the storage, and tell the meter its new bytes."""
        result = resize(storage, size)
        meter.resized(storage)
        return result

    return counted


def _real_mesh(from_group: Callable) -> Callable:
    """Return a function that calls DeviceMesh.from_group outside of the fake tensors' mode.

    torch computes a mesh from the elements of a tensor of ranks, so this tensor must be real.
    """

    def real(*args: Any, **options: Any) -> DeviceMesh:
        with _disable_current_modes():
            return from_group(*args, **options)

    return real


def _start(tensor: Tensor, elements: int) -> Tensor:
    """Return the first rows of a tensor that together have at least `elements` elements.

    A tensor with fewer elements is returned whole.
    """
    rows = -(-elements * len(tensor) // max(1, tensor.numel()))  # the number of rows, rounded up
    return tensor[:rows]
