"""Counts for one rank the bytes allocated on its fake GPU, kernels launched, and stops of the host.

The bytes are the sizes of all living storages, rounded up like sizes in torch's caching allocator.
So they equal torch.cuda.max_memory_allocated, without the workspaces that kernels allocate.

A stop is a place where the host waits for the device; stops are written to the rank's trace
(recording.py). A phase is a part of a run: build, forward, backward, optimizer, evaluation, check
or save. The kind of a storage says what its bytes are: the action that allocated it, such as "F 3",
or "=weights", "=gradients" and "=optimizer" for storages that `classify` has named.
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

from base.errors import ProgramError
from tools.emulator.recording import COPY, LOAD, RankTrace, calling_line

ROUNDED_TO = 512  # sizes are rounded up to a multiple of this many bytes
CPU = torch.device("cpu")
# The meter's phase, by the phase of the flight recorder; for a training step ACTIONS has it.
PHASES = {"start": "build", "evaluate": "evaluation", "check replicas": "check", "save": "save"}
# The meter's phase, by the action of a training step; other actions belong to "optimizer".
ACTIONS = {"data": "forward", "F": "forward", "B": "backward", "W": "backward"}
ACTIONS |= {"E": "forward", "S": "forward", "T": "backward", "G": "backward"}
ATEN = torch.ops.aten
COPIES = (ATEN._to_copy.default, ATEN.copy_.default)
# The file whose operations have as many rows as the router gives them.
EXPERTS = "layers/experts.py"
INDEXED = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default)


class Peak(NamedTuple):
    """The largest number of bytes allocated at once in a phase.

    tensor: a line on the allocation that reached the peak. held: (kind of tensor, bytes).
    """

    bytes: int = 0
    tensor: str = ""
    held: tuple[tuple[str, int], ...] = ()


class _Function(NamedTuple):
    """Facts about an operation of torch."""

    view: bool  # whether all results of the operation are views of its inputs
    launches: bool  # whether the operation launches a kernel


class Meter(TorchDispatchMode):
    """Counts while it is entered as a context manager, inside a FakeTensorMode.

    peaks: the peak of each phase; kernels: the kernels launched in each phase; both since `start`.
    now: bytes that are allocated now. pinned: the pinned storages. Stops of the host go to the
    trace.
    """

    def __init__(self, trace: RankTrace):
        """Begin with an empty GPU; stops of the host are written to `trace`."""
        super().__init__()
        self.trace = trace
        self.recorder = trace.recorder
        self.now = 0  # the bytes that are allocated now
        self.peaks = defaultdict[str, Peak](Peak)  # by phase, since the last `start`
        self.kernels = Counter[str]()  # kernels launched, by phase, since the last `start`
        self.pinned = weakref.WeakSet[Any]()  # the storages in pinned memory of the host
        # The living storages by their address: (weak reference to the storage, bytes, kind).
        self._live: dict[int, tuple[Any, int, str]] = {}
        self._held = Counter[str]()  # bytes allocated now, by the kind of their storage
        self._functions: dict[Any, _Function] = {}  # by operation: the result of `_facts`
        # The source lines of forward operations, by the sequence number that autograd gives to an
        # operation and its backward, so that a backward's allocation can name the forward's line.
        self._lines: dict[int, str] = {}
        # The kernels that were launched before: a function, and its results' types and shapes.
        self._loaded: set[tuple] = set()

    def start(self) -> None:
        """Forget the peaks and the kernels counted so far; called before each step."""
        self.peaks.clear()
        self.kernels.clear()

    def phase(self) -> str:
        """Return the meter's phase in which the rank is now; a new allocation counts there."""
        phase, _, action, _ = self.recorder.place
        return PHASES.get(phase) or ACTIONS.get(action, "optimizer")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run an operation on fake tensors, and count its allocations, its kernel and its stops.

        torch calls this method for every operation while the meter is entered.
        """
        if function is torch.ops.prim.device.default:
            return args[0].fake_device  # a short cut: torch asks this several times per operation
        kwargs = kwargs or {}
        # tensor.item() and nonzero() need elements, which a fake tensor has not: their results are
        # invented here, the number 1 and an empty list of indices.
        if function is ATEN._local_scalar_dense.default:
            return self._read_number(args[0])
        if function is ATEN.nonzero.default:
            self.stop("nonzero")
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        # Fake memory cannot be pinned, so `pinned` has the storages that would be pinned in a run.
        if function is ATEN._pin_memory.default:
            return self._pin(ATEN.clone.default(args[0]))
        pinned = kwargs.pop("pin_memory", False) and kwargs.get("device") in (None, CPU)
        result = self._run(function, args, kwargs)
        facts = self._functions.get(function) or self._facts(function)
        if pinned:
            self._pin(result)
        # A view allocates nothing and launches no kernel. The same holds for an operation that only
        # asks, and has no tensor as its result.
        if facts.view or (not facts.launches and not isinstance(result, Tensor)):
            return result
        if function in COPIES:
            self._copy(function, result, args, kwargs)
        elif function in INDEXED:  # indexing by a tensor may stop the host
            self._indexed(*args[:2])
        # An operation that works in place on a list of tensors returns nothing: then its arguments
        # are counted.
        self._count(function, facts, args if result is None else result)
        return result

    def _facts(self, function: Any) -> _Function:
        """Return whether an operation's results are all views and whether it launches a kernel.

        Both follow from the operation's schema, and are kept in `_functions` for its next call.
        """
        schema = function._schema
        # A result is a view if it aliases an input and the operation does not write to this input.
        views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
        # Operations that only allocate memory, or only reinterpret a tensor, launch no kernel.
        name = schema.name.partition("::")[2]
        launches = not name.startswith(("empty", "new_empty", "_unsafe_view", "lift_fresh"))
        facts = _Function(bool(views) and all(views), launches)
        self._functions[function] = facts
        return facts

    # -- bytes and kernels ------------------------------------------------------------------

    def _count(self, function: Any, facts: _Function, result: Any) -> None:
        """Count the results of an operation: new storages on the GPU, and a kernel launch.

        result: a tensor, or a tuple or list with tensors.
        """
        on_device = False
        # CUDA loads a kernel at its first launch. Each combination of a function and the types and
        # shapes of its results is assumed to be a separate kernel.
        kernel = [function]
        results = result if isinstance(result, (tuple, list)) else (result,)
        for tensor in results:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                on_device = True
                kernel += [tensor.dtype, tensor.shape]
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._allocate(storage, function)
        node = torch._C._current_autograd_node()
        if on_device and facts.launches:
            self.kernels[self.phase()] += 1
            self._load(tuple(kernel), node)
            # A backward operation is reported with the line of its forward operation. In a forward
            # pass, autograd has just given the operation its sequence number, which both have.
            if node is None and torch.is_grad_enabled():  # so this is a forward pass
                last_number = torch.autograd._get_sequence_nr() - 1
                self._lines[last_number] = calling_line(3)

    def _load(self, kernel: tuple, node: Any) -> None:
        """Record that a kernel is loaded, if this is its first launch.

        kernel: its function, then the types and shapes of the results. Copies are left out, since
        some of them launch no kernel. node: the node of autograd that runs now, in a backward pass.
        An expert has as many rows as the router gives it. In a rehearsal they are always equally
        many, in a run any number, so every action in which experts compute may load kernels.
        """
        function = kernel[0]
        if function in COPIES:
            return
        line = calling_line(4)
        if not line and node is not None:
            line = self._lines.get(node._sequence_nr(), "")
        if line.startswith(EXPERTS):
            kernel = (EXPERTS, self.trace.place())  # one load in each action
        if kernel not in self._loaded:
            self._loaded.add(kernel)
            self.trace.stop(str(function), line, LOAD)

    def _allocate(self, storage: Any, function: Any) -> None:
        """Count a new storage until it is freed, and update the peak of the current phase.

        function: the operation that made the storage.
        """
        key = storage._cdata  # the storage's address
        size = -(-storage.nbytes() // ROUNDED_TO) * ROUNDED_TO  # bytes, rounded up
        # A storage's kind is the phase of the flight recorder, in a training step the action.
        kind, _, action, micro_batch = self.recorder.place
        if kind == "train":
            kind = f"{action} {micro_batch}"
        # When torch frees the storage, the weak reference calls `_free`.
        self._live[key] = (weakref.ref(storage, lambda _: self._free(key)), size, kind)
        self.now += size
        self._held[kind] += size
        phase = self.phase()
        if self.now > self.peaks[phase].bytes:
            self.peaks[phase] = Peak(self.now, "", tuple(self._held.items()))
            self.peaks[phase] = self.peaks[phase]._replace(tensor=self._describe(function, size))

    def resized(self, storage: Any) -> None:
        """Count a storage as freed, and as allocated with its new size; called after a resize."""
        if storage._cdata in self._live:
            self._free(storage._cdata)
            self._allocate(storage, "resize_")

    def _free(self, key: int) -> None:
        """Stop counting the storage at the address `key`, which was freed or is resized."""
        _, size, kind = self._live.pop(key, (None, 0, ""))
        self.now -= size
        self._held[kind] -= size

    def _describe(self, function: Any, size: int) -> str:
        """Return a line on the allocation that happens now: its size, operation and source line.

        A backward operation has the source line of its forward operation, which `_lines` has.
        """
        name = str(function).removesuffix(".default")
        node = torch._C._current_autograd_node()
        line = calling_line(4)
        # A backward operation of torch has no line of this project on its stack.
        if not line and node is not None:
            line = f"the backward of {self._lines.get(node._sequence_nr(), node.name())}"
        return f"{size / 1e6:.1f} MB by {name} at {line} ({self.trace.place()})"

    def classify(self, tensors: Iterator[Tensor], kind: str) -> None:
        """Set the kind of the storages of tensors, such as "weights", for the report.

        The first call for a storage counts, since tensors of several kinds may share a storage.
        Tensors outside of the GPU are skipped.
        """
        new_kind = f"={kind}"
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self._live:
                continue
            reference, size, old_kind = self._live[key]
            if not old_kind.startswith("="):  # an earlier call has not classified it
                self._live[key] = (reference, size, new_kind)
                self._held[old_kind] -= size
                self._held[new_kind] += size

    # -- stops of the host ------------------------------------------------------------------

    def stop(self, kind: str) -> None:
        """Record that the host waits for the device; kind: the reason, in words."""
        self.trace.stop(kind, calling_line(2))

    def values(self, tensor: Tensor) -> Any:
        """Return ones in place of tensor.tolist(), nested like the tensor: finite and true values.

        Called for a fake tensor, which has no elements. Reading the device is a stop of the host.
        """
        if tensor.is_cuda:
            self.stop("values of the device")
        number_type = float if tensor.is_floating_point() else int
        return np.ones(tuple(tensor.shape), number_type).tolist()

    def _read_number(self, tensor: Tensor) -> float:
        """Return a number in place of tensor.item() of a fake tensor: 1, or False for a boolean."""
        if tensor.is_cuda:
            self.stop("a number of the device")
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1

    def _run(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Return the result of an operation on fake tensors.

        Raise UserError if the shape of the result depends on the values of the arguments.
        """
        if function is ATEN.addmm.dtype_out:  # torch 2.11 has no fake version of this operation
            return kwargs["out"]
        try:
            return function(*args, **kwargs)
        except DataDependentOutputException:  # torch.equal and allclose: the host reads the result
            if args[0].is_cuda:
                self.stop("a comparison of values")
            return True
        except DynamicOutputShapeException:
            where = f"{function} at {calling_line(2)} gives a shape that follows from values"
            raise ProgramError(
                f"{where}: the host waits for them, and a rehearsal has none"
            ) from None

    def _indexed(self, tensor: Tensor, indices: Any) -> None:
        """Record the stops of indexing a tensor on the GPU.

        The host waits for the number of elements that a mask selects, and for the copy of an index
        tensor from its memory to the device.
        """
        if not tensor.is_cuda:
            return
        tensors = [index for index in indices if index is not None]
        if any(index.is_cuda and index.dtype == torch.bool for index in tensors):
            self.stop("an index that is a mask")
        if any(not index.is_cuda for index in tensors):
            self.stop("an index from the host")

    def _copy(self, function: Any, result: Tensor, args: tuple, kwargs: dict) -> None:
        """Record the stop of a copy between host and device.

        Without non_blocking the host waits for the device. With non_blocking it waits only for the
        copy, if the host memory is not pinned.
        """
        source = args[0] if result is not args[0] else args[1]  # copy_ returns its first argument
        if not isinstance(source, Tensor) or source.is_cuda == result.is_cuda:
            return  # not a copy between host and device
        # The third argument of copy_ is non_blocking.
        asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if asynchronous and source.is_cuda and function is ATEN._to_copy.default:
            self._pin(result)  # torch allocates the result in pinned memory
        on_host = result if source.is_cuda else source
        pinned = on_host.untyped_storage() in self.pinned
        if source.is_cuda and not (asynchronous and pinned):
            self.stop("a copy to the host")
        elif not asynchronous:
            self.stop("a copy to the device")
        elif not pinned:
            self.trace.stop("a copy from memory that is not pinned", calling_line(2), COPY)

    def _pin(self, tensor: Tensor) -> Tensor:
        """Note that the tensor's memory is pinned, and return the tensor."""
        self.pinned.add(tensor.untyped_storage())
        return tensor
