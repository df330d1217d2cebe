"""Counts what one rank does to its fake GPU: bytes allocated, kernels launched, stops of the host.

Bytes are those of the storages that live, each rounded up as torch's caching allocator rounds: what
torch.cuda.max_memory_allocated would say, without the workspaces that kernels take inside.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from config.messages import UserError
from emulator.recording import COPY, LOAD, Trace, calling_line

ROUNDED_TO = 512  # bytes
CPU = torch.device("cpu")
# Phases of the flight recorder, and actions of a training step, by the phase that they count to.
PHASES = {"start": "build", "evaluate": "evaluation", "check replicas": "check", "save": "save"}
ACTIONS = {"data": "forward", "F": "forward", "B": "backward", "W": "backward"}
ACTIONS |= {"E": "forward", "S": "forward", "T": "backward", "G": "backward"}
ATEN = torch.ops.aten
COPIES = (ATEN._to_copy.default, ATEN.copy_.default)
INDEXED = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default)


class Peak(NamedTuple):
    """The most bytes of a phase, what allocated the last of them, and what held them: bytes by
    kind of tensor.
    """

    bytes: int = 0
    tensor: str = ""
    held: tuple[tuple[str, int], ...] = ()


class _Function(NamedTuple):
    """Facts about an operation of torch."""

    view: bool  # it returns other views of its inputs
    launches: bool  # a kernel


class Meter(TorchDispatchMode):
    """Counts while it is entered, inside of a FakeTensorMode.

    peaks: by phase. kernels: how many were launched. Both count since `start`. Stops of the host go
    to the trace.
    """

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace
        self.recorder = trace.recorder
        self.now = 0
        self.peaks = defaultdict[str, Peak](Peak)
        self.kernels = 0
        self.pinned = weakref.WeakSet[Any]()  # storages
        self._live: dict[int, tuple[Any, int, str]] = {}  # reference, bytes, kind
        self._held = Counter[str]()  # bytes by kind
        self._functions: dict[Any, _Function] = {}
        self._lines: dict[int, str] = {}  # of forward operations, by autograd's numbers
        self._loaded: set[tuple] = set()  # kernels: function, types and shapes of its results

    def start(self) -> None:
        """Forget peaks and kernels: count from now."""
        self.peaks.clear()
        self.kernels = 0

    def phase(self) -> str:
        """The phase to which what happens now counts."""
        phase, _, action, _ = self.recorder.place
        return PHASES.get(phase) or ACTIONS.get(action, "optimizer")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:
            return args[0].fake_device  # asked several times for each operation
        kwargs = kwargs or {}
        if function is ATEN._local_scalar_dense.default:
            return self._read_number(args[0])
        if function is ATEN.nonzero.default:
            self.stop("nonzero")
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if function is ATEN._pin_memory.default:
            return self._pin(ATEN.clone.default(args[0]))
        pinned = kwargs.pop("pin_memory", False) and kwargs.get("device") in (None, CPU)
        result = self._run(function, args, kwargs)
        facts = self._functions.get(function) or self._facts(function)
        if pinned:
            self._pin(result)
        if facts.view or (not facts.launches and not isinstance(result, Tensor)):
            return result
        if function in COPIES:
            self._copy(function, result, args, kwargs)
        elif function in INDEXED:
            self._indexed(*args[:2])
        # An operation that works in place on a list of tensors returns nothing.
        self._count(function, facts, args if result is None else result)
        return result

    def _facts(self, function: Any) -> _Function:
        schema = function._schema
        views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
        name = schema.name.partition("::")[2]
        launches = not name.startswith(("empty", "new_empty", "_unsafe_view", "lift_fresh"))
        facts = _Function(bool(views) and all(views), launches)
        self._functions[function] = facts
        return facts

    # -- bytes and kernels ------------------------------------------------------------------

    def _count(self, function: Any, facts: _Function, result: Any) -> None:
        on_device, kernel = False, [function]  # with the types and shapes of its results
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                on_device = True
                kernel += [tensor.dtype, tensor.shape]
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._allocate(storage, function)
        node = torch._C._current_autograd_node()
        if on_device and facts.launches:
            self.kernels += 1
            self._load(tuple(kernel))
            if node is None and torch.is_grad_enabled():
                self._lines[torch.autograd._get_sequence_nr() - 1] = calling_line(3)

    def _load(self, kernel: tuple) -> None:
        """Record that a kernel is loaded if this is its first launch; a copy may take none."""
        if kernel[0] not in COPIES and kernel not in self._loaded:
            self._loaded.add(kernel)
            self.trace.stop(str(kernel[0]), calling_line(4), LOAD)

    def _allocate(self, storage: Any, function: Any) -> None:
        key = storage._cdata
        size = -(-storage.nbytes() // ROUNDED_TO) * ROUNDED_TO
        phase, _, action, micro_batch = self.recorder.place
        kind = phase if phase != "train" else f"{action} {micro_batch}"
        self._live[key] = (weakref.ref(storage, lambda _: self._free(key)), size, kind)
        self.now += size
        self._held[kind] += size
        phase = self.phase()
        if self.now > self.peaks[phase].bytes:
            self.peaks[phase] = Peak(self.now, "", tuple(self._held.items()))
            self.peaks[phase] = self.peaks[phase]._replace(tensor=self._describe(function, size))

    def resized(self, storage: Any) -> None:
        """A storage has another size: it is freed, and allocated anew unless that is 0."""
        if storage._cdata in self._live:
            self._free(storage._cdata)
            self._allocate(storage, "resize_")

    def _free(self, key: int) -> None:
        _, size, kind = self._live.pop(key, (None, 0, ""))
        self.now -= size
        self._held[kind] -= size

    def _describe(self, function: Any, size: int) -> str:
        """Return a line on the allocation that happens now: its size, operation and source line."""
        name = str(function).removesuffix(".default")
        node = torch._C._current_autograd_node()
        line = calling_line(4)
        if not line and node is not None:
            line = f"the backward of {self._lines.get(node._sequence_nr(), node.name())}"
        return f"{size / 1e6:.1f} MB by {name} at {line} ({self.trace.place()})"

    def classify(self, tensors: Iterator[Tensor], kind: str) -> None:
        """Say what tensors that live are; those that were said before stay what they are."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            entry = self._live.get(key)
            if entry and not entry[2].startswith("="):
                self._live[key] = (entry[0], entry[1], f"={kind}")
                self._held[entry[2]] -= entry[1]
                self._held[f"={kind}"] += entry[1]

    # -- stops of the host ------------------------------------------------------------------

    def stop(self, kind: str) -> None:
        """The host waits for the device."""
        self.trace.stop(kind, calling_line(2))

    def values(self, tensor: Tensor) -> Any:
        """Return the value of tensor.tolist(): all ones, which are finite and true."""
        if tensor.is_cuda:
            self.stop("values of the device")
        return np.ones(tuple(tensor.shape), float if tensor.is_floating_point() else int).tolist()

    def _read_number(self, tensor: Tensor) -> float:
        if tensor.is_cuda:
            self.stop("a number of the device")
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1

    def _run(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """The operation; UserError if the shape of its result follows from values."""
        if function is ATEN.addmm.dtype_out:  # torch 2.11 has it on devices alone
            return kwargs["out"]
        try:
            return function(*args, **kwargs)
        except DataDependentOutputException:  # equal, allclose: the host reads it
            if args[0].is_cuda:
                self.stop("a comparison of values")
            return True
        except DynamicOutputShapeException:
            where = f"{function} at {calling_line(2)} gives a shape that follows from values"
            raise UserError(f"{where}: the host waits for them, and a rehearsal has none") from None

    def _indexed(self, tensor: Tensor, indices: Any) -> None:
        """The host counts what a mask selects, and copies its own indices to the device."""
        given = [index for index in indices if index is not None] if tensor.is_cuda else []
        if any(index.is_cuda and index.dtype == torch.bool for index in given):
            self.stop("an index that is a mask")
        if any(not index.is_cuda for index in given):
            self.stop("an index from the host")

    def _copy(self, function: Any, result: Tensor, args: tuple, kwargs: dict) -> None:
        """A copy between host and device: without non_blocking the host waits for the device, and
        else for the copy alone if its memory is not pinned.
        """
        source = args[0] if result is not args[0] else args[1]
        if not isinstance(source, Tensor) or source.is_cuda == result.is_cuda:
            return
        asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if asynchronous and source.is_cuda and function is ATEN._to_copy.default:
            self._pin(result)  # as torch allocates it
        pinned = (result if source.is_cuda else source).untyped_storage() in self.pinned
        if source.is_cuda and not (asynchronous and pinned):
            self.stop("a copy to the host")
        elif not asynchronous:
            self.stop("a copy to the device")
        elif not pinned:
            self.trace.stop("a copy from memory that is not pinned", calling_line(2), COPY)

    def _pin(self, tensor: Tensor) -> Tensor:
        self.pinned.add(tensor.untyped_storage())
        return tensor
