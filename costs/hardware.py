"""Loads machines as data: the rates and sizes of a GPU, its node, its network and its software.

    machine = load("a100-80")                          # hardware/a100-80.toml
    machine = load("a100-80", "measured.toml")         # with rates that were measured there
    machine = load("mine.toml")                        # a file of the user
    machine = load("A100")                             # a family: machine.note says which member

The folder `hardware/` has a TOML file for each machine. An entry `like = "NAME"` takes over the
entries of another machine. An entry may have a name in place of a number: then the number is a
constant that was fitted on measured runs, and `hardware/fitted.toml` has its value, unit, meaning
and those runs. A calibration is a file with rates that the user has measured on the machine.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from base.errors import FileError, UserError, nearest
from config.command_line import read_toml

FOLDER = Path(__file__).resolve().parent.parent / "hardware"
FITTED, FAMILIES = "fitted", "families"  # the two files in FOLDER that describe no machine


class Kernel(NamedTuple):
    """A flash-attention kernel, relative to FlashAttention-2.

    forward, backward: its rate in long sequences, divided by FlashAttention-2's. half: the sequence
    length in tokens at which it reaches half of this rate.
    """

    forward: float
    backward: float
    half: float


# The kernels by name: (forward, backward, half). The rates are read off the figures of arXiv
# 2205.14135, 2307.08691 and 2407.08608 and cuDNN's notes, for causal masks and head size 128; they
# are not fitted. The rates of flash3 and cudnn are relative to flash2 on an H100.
KERNELS = {
    "flash": Kernel(1.0, 1.0, 0.0),
    "flash1": Kernel(0.65, 0.55, 300.0),
    "flash2": Kernel(1.1, 0.95, 300.0),
    "triton": Kernel(0.85, 0.5, 300.0),
    "efficient": Kernel(0.5, 0.4, 300.0),
    "flash3": Kernel(1.6, 1.4, 600.0),
    "cudnn": Kernel(1.5, 1.3, 600.0),
}


@dataclass(frozen=True)
class Link:
    """A link between ranks."""

    latency: float  # seconds of a message
    bandwidth: float  # bytes per second in one direction
    fraction: float  # share of the bandwidth that a ring collective of long messages reaches

    @property
    def speed(self) -> float:
        """Bytes per second that a long ring collective achieves."""
        return self.bandwidth * self.fraction


@dataclass(frozen=True)
class Software:
    """Coefficients of the training program; the defaults follow from Trine's code on GPUs.

    Another program, whose formulas differ from Trine's, is a subclass with a method for each such
    formula: see `costs.job.term`, and tools/planner/engines.py for other programs.
    """

    # Bytes of memory traffic of the loss for each logit: several kernels cast it, and compute the
    # maximum, the exponential and sums in FP32. A single fused kernel would move 8.
    logit_bytes: float = 26.0
    # The share of a pass's seconds during which traffic between replicas costs nothing: gradients
    # during the last backward, parameters during the first forward; at --zero 3 in every pass.
    overlap_passes: float = 0.9
    # The share of the seconds of tensor-parallel collectives that other work hides: 4 of the 10
    # collectives of a block, those of its backward that run beside matrix products.
    overlap_tensor: float = 0.4
    wire_bytes: int = 4  # bytes of one gradient in a reduction between ranks
    # Whether the GEMM of a weight's gradient adds its result to the sum over micro-batches itself,
    # so that no further kernel has to (only below --zero 2).
    fused_accumulation: bool = True
    gradient_bytes: float = 4.0  # bytes of one gradient in the sum that every replica keeps
    sharded_bytes: float = 12.0  # bytes of a parameter's master weight and Adam's two moments
    # Bytes outside of the allocator for each communicator: where NCCL chooses the number of its
    # channels, and where that is limited (memory_terms.communicators). They are not measured yet:
    # NCCL's issues 964, 864 and 2363 report 0.5 to 1.6 GB for one communicator without a limit.
    group_bytes: float = 0.5e9
    limited_group_bytes: float = 0.15e9
    buffers: float = 0.0  # bytes of further communication buffers
    host_per_block: float = 0.0  # seconds a GPU waits for the host, for each block and micro-batch
    # Seconds in which the host launches one operation. A pass is never faster than the launches of
    # all its operations.
    host_per_operation: float = 8e-6
    # Seconds of Python and autograd that a block's launches take beside, for one micro-batch,
    # forward and backward together. On an H100's machine the host took 2.5 ms for a small block
    # (benchmarks/results/gpu-h100.md), of which its 3 x 20 launches are 0.5 ms. Larger blocks hide
    # it: nothing is added to a pass that takes longer.
    host_of_block: float = 2e-3
    # Seconds of a step that do not depend on the model or the batch; one GPU had none
    # (benchmarks/results/gpu-h100.md).
    per_step: float = 0.0
    # Whether experts on several nodes get one copy of a token to a node (architecture/dispatch.py).
    one_copy_to_a_node: bool = True


@dataclass(frozen=True)
class Machine:
    """A cluster of equal GPUs. Rates in FLOP/s and bytes/s, sizes in bytes, times in seconds."""

    name: str
    device: str  # words of the driver's name of the GPU, by which a run's GPU is recognised
    peak: float  # dense half-precision FLOP/s of one GPU's tensor cores
    vector_peak: float  # FP32 FLOP/s outside the tensor cores
    processors: int  # the number of streaming multiprocessors of one GPU
    memory: float  # the bytes of one GPU's memory
    bandwidth: float  # the bytes per second of one GPU's memory
    context: float  # the memory that a CUDA context takes before the first tensor
    node: int  # the number of GPUs of a node
    nvlink: Link  # the link of one GPU to the other GPUs of its node
    network: Link  # the link of one node to other nodes
    p2p_fraction: float  # the share of the network's rate that messages between stages reach
    gemm_fraction: float  # the share of the peak that a large, aligned GEMM reaches
    flash_fraction: float  # the share of the peak that FlashAttention-2 reaches in long sequences
    activation_overhead: float  # allocated bytes divided by tensors' bytes, for activations
    kernel: str = "flash2"  # the attention kernel, a name in KERNELS
    # A ring with several ranks on a node reaches only this share of the network's rate, because
    # each network adapter then only sends or only receives.
    crossing: float = 1.0
    # The number of ranks that share a CPU core, for runs on CPUs. The rates are measured while all
    # ranks compute.
    ranks_per_core: float = 1.0
    # The standard deviations of the planner's errors, which are logarithms of measured over
    # predicted seconds and bytes, on runs that were not used to fit the constants (risk.py).
    time_spread: float = 0.12
    memory_spread: float = 0.12
    network_measured: bool = False  # whether the network's rate was measured on this cluster
    slowdown: float = 1.0  # the factor by which a known defect of the machine lengthens a step
    bf16: bool = True  # whether the GPU has bf16 arithmetic
    fp8: float = 0.0  # the GPU's peak rate in fp8 divided by that in half precision; 0 without fp8
    fp8_share: float = 0.85  # products in fp8 are faster by this share of the ratio `fp8`
    watts: float = 0.0  # power of one GPU at its limit, by the datasheet; 0: it is not stated
    # FLOP/s of large GEMMs for each watt, on GPUs whose power limits them: from it follows
    # `gemm_fraction`. 0: the file has gemm_fraction itself.
    gemm_per_watt: float = 0.0
    note: str = field(default="", compare=False)  # a line to print for a user of this machine
    software: Software = field(default_factory=Software)
    # By quantity (Job.fitted_values), the least and the largest value on the runs on which the
    # constants were fitted; outside of this range predictions are less sure.
    fitted_range: dict[str, list[float]] = field(default_factory=dict, compare=False)
    sources: dict[str, str] = field(default_factory=dict, compare=False)  # by entry, its origin

    def has_device(self, device: str) -> bool:
        """Return whether a GPU with the driver's name `device` is the GPU of this machine.

        It is if this machine's own name of the GPU is a whole word in it: "A10" is not a part of
        "NVIDIA A100-SXM4-80GB", nor "H200" of "NVIDIA GH200 480GB".
        """
        word = rf"(?<![a-z0-9]){re.escape(self.device.lower())}(?![a-z0-9])"
        return re.search(word, device.lower()) is not None

    @property
    def kind(self) -> str:
        """The kind of device, as in a run's torch.device: "cpu" or "cuda"."""
        return "cpu" if self.device == "CPU" else "cuda"

    @property
    def precision(self) -> str:
        """The precision that --precision auto stands for in a plan on this machine.

        A run decides in the same way (optim/precision.py).
        """
        if self.kind == "cpu":
            return "fp32"
        return "bf16" if self.bf16 else "fp16"


@dataclass(frozen=True)
class Constant:
    """A number that was fitted on measured runs, its meaning and these runs (`fitted_on`)."""

    name: str
    value: float
    unit: str
    meaning: str
    fitted_on: str


@cache  # the folder is read once
def names() -> tuple[str, ...]:
    """Return the names of the machines in `hardware/`, sorted."""
    return tuple(sorted({path.stem for path in FOLDER.glob("*.toml")} - {FITTED, FAMILIES}))


def constants() -> list[Constant]:
    """Return every fitted constant of `hardware/fitted.toml`, which `plan.py constants` prints."""
    entries = read_toml(FOLDER / f"{FITTED}.toml", FITTED)
    return [Constant(name, **entry) for name, entry in entries.items()]


@cache  # a program that fits them loads many machines
def fitted_values() -> Mapping[str, float]:
    """Return the value of every fitted constant, by name."""
    return MappingProxyType({constant.name: constant.value for constant in constants()})


def machine_with_device(device: str) -> Machine | None:
    """Return the first machine of `hardware/` that has a given GPU, or None.

    device: the driver's name of the GPU, such as "NVIDIA H100 80GB HBM3".
    """
    machines = map(load, names())
    return next((machine for machine in machines if machine.has_device(device)), None)


def peak_of(device: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU in fp16 or bf16, by the driver's name of the GPU.

    The log of a run computes its MFU from this. It is None for another precision or an unknown GPU,
    and for PCIe and NVL cards, which are slower than the SXM modules that `hardware/` describes.
    """
    if precision not in ("fp16", "bf16") or "PCIe" in device or "NVL" in device:
        return None
    machine = machine_with_device(device)
    return machine.peak if machine and machine.device != "CPU" else None


def load(name: str, calibration: str | None = None, **fitted: float) -> Machine:
    """Return the machine with a name, or of a user's TOML file.

    calibration: the path of a file with measured rates, which replace the machine's. fitted: values
    that override fitted constants, by name; a program that fits them tries values so. Raise
    UserError for an unknown machine, or a calibration that was measured on another device.
    """
    values = {**fitted_values(), **fitted}
    known = names()
    taken = name if name in known else _member(name, known)
    machine = _build(taken, _merged(taken), values)
    if taken != name:  # the user is told which machine was taken, and the family's other members
        others = [other for other in known if other.startswith(name.lower()) and other != taken]
        note = f"{name}: taken as {taken}" + (f"; others: {', '.join(others)}" if others else "")
        machine = replace(machine, note=note)
    return calibrate(machine, calibration) if calibration else machine


def _member(name: str, known: Sequence[str]) -> str:
    """Return the known machine that is meant by a name which is not the name of a machine.

    The name may be another spelling, such as NVIDIA-A100-SXM4-80GB, or a family of GPUs, such as
    A100 (hardware/families.toml). Any other name is returned as it is; `_merged` then reads it as
    the path of a user's file, or raises an error. known: the names of the machines in `hardware/`.
    """
    # Leave out the maker, the form of the module, and GB after the size, so that
    # NVIDIA-A100-SXM4-80GB becomes a100-80.
    plain = re.sub(r"-sxm\d?|(?<=\d)gb", "", name.lower()).removeprefix("nvidia-")
    taken = read_toml(FOLDER / f"{FAMILIES}.toml", FAMILIES).get(plain, plain)
    return taken if taken in known else name


def _merged(name: str) -> dict[str, Any]:
    """Return the entries of a machine's file, with all that it takes over by its entry `like`.

    An entry of the file itself replaces the entry taken over; in a table, such as [network], each
    key is replaced alone. Raise UserError for an unknown machine. name: a machine in `hardware/`,
    or the path of a user's file.
    """
    if name.endswith(".toml"):
        own = _checked(read_toml(name, name), name)
    elif name in names():
        own = read_toml(FOLDER / f"{name}.toml", name)
    else:
        raise UserError(f"no machine is called {name!r}{_others(name)}")
    base = _merged(own.pop("like")) if "like" in own else {}
    if "device" in own:  # another GPU: a note on whose rates it has is on the GPU it is like
        base.pop("note", None)
    if "gemm_fraction" in own:
        base.pop("gemm_per_watt", None)
    tables = {k: base.get(k, {}) | v for k, v in own.items() if isinstance(v, dict)}
    return base | own | tables


def _others(name: str) -> str:
    """Return the end of an error about an unknown machine: what else --gpu takes.

    Of a machine with a like name it says the memory and the rate, since another letter is another
    GPU: gb300 is no b300.
    """
    own = "for another GPU write a FILE.toml: hardware/README.md"
    known = names()
    if not (meant := nearest(name, known, 0.8)):
        return f"; there are {', '.join(known)}, and files that end in .toml; {own}"
    facts = []
    for other in known:
        if repr(other) in meant:
            found = load(other)
            rate = f"{found.peak / 1e12:.0f} TFLOP/s"
            facts.append(f"{other} has {found.memory / 1e9:.0f} GB and {rate} a GPU")
    return f"{meant} {'; '.join(facts)}; {own}"


def _checked(entries: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the entries of a user's machine file as they are, if they are valid.

    Raise UserError for an entry that no machine has, a value of a wrong type, or no entry `like`.
    name: the path of the file.
    """
    if "like" not in entries:
        raise FileError(f"{name} needs like = NAME: a machine of hardware/, or another file")
    kinds: dict[str, Any] = {"": Machine, "nvlink": Link, "network": Link, "software": Software}
    for part, kind in kinds.items():
        known = {f.name: f.type for f in fields(kind)} | {"like": str}
        for key, value in (entries.get(part, {}) if part else entries).items():
            # `right` says whether the value has the type of the field: a number, which may be 0 for
            # some fields, a text, a boolean, or a table or list for the other fields.
            wanted = known.get(key)
            if wanted in (int, float):
                right = _is_rate(value, zero=key not in ("node", "memory", "peak", "bandwidth"))
            else:
                right = isinstance(value, wanted if wanted in (str, bool) else dict | list)
            if wanted is None or not right:
                where = f"in [{part}] " if part else ""
                raise FileError(f"{name} has {where}{key} = {value!r}, which no machine has")
    kernel = entries.get("kernel", "flash2")
    if kernel not in KERNELS:
        raise UserError(f"{name} has kernel = {kernel!r}; known are {', '.join(KERNELS)}")
    return entries


def _build(name: str, entries: dict[str, Any], values: dict[str, float]) -> Machine:
    """Return a machine of a file's entries; values: the fitted constants, by name.

    A text that is the name of a fitted constant is replaced by the constant's value.
    """

    def filled(entry: Any) -> Any:
        """Return an entry with its constants' values in place of their names, also in tables."""
        if isinstance(entry, dict):
            return {key: filled(value) for key, value in entry.items()}
        return values.get(entry, entry) if isinstance(entry, str) else entry

    entries = filled(entries)
    if per_watt := entries.get("gemm_per_watt"):
        entries["gemm_fraction"] = per_watt * entries["watts"] / entries["peak"]
    for link in ("nvlink", "network"):
        entries[link] = Link(**entries[link])
    entries["software"] = Software(**entries.get("software", {}))
    return Machine(name=name, **entries)


# ---- Calibration ---------------------------------------------------------------------------------

# The names that a calibration may have, beside `device` and the links. The values of RATES must be
# above 0; the other two may be 0.
RATES = ("gemm_fraction", "flash_fraction", "bandwidth", "memory", "node", "ranks_per_core")
CALIBRATED = (*RATES, "context", "host_per_block")


def calibrate(machine: Machine, path: str) -> Machine:
    """Return the machine with the rates of a calibration, the file `path`.

    Raise UserError if the file was measured on another device, cannot be read, or has other entries
    than `device` (the result of torch.cuda.get_device_name()) and the following, all optional:

        the names in CALIBRATED    as in Machine, and host_per_block as in Software; if several
                                   ranks share a host, `memory` and `node` count for the ranks
        [nvlink] alpha, beta       seconds and one GPU's bytes/s: an all-reduce of n ranks takes
                                   2 (n-1) alpha + 2 (n-1)/n bytes / beta
        [network] alpha, beta      the same between nodes, with the bytes/s of one node
    """
    entries, file = read_toml(path, path), f"the calibration {path}"
    device = str(entries.pop("device", ""))
    if not machine.has_device(device):
        where = f"{device or 'no stated device'!r}, but {machine.name} has {machine.device!r}"
        raise FileError(f"{file} was measured on {where}")
    changes: dict[str, Any] = {}
    for key, entry in entries.items():
        if key in ("nvlink", "network"):
            changes[key] = _calibrated_link(file, key, entry, machine)
        elif key not in CALIBRATED or not _is_rate(entry, zero=key not in RATES):
            known = ", ".join((*CALIBRATED, "nvlink", "network"))
            raise FileError(f"{file} says {key} = {entry!r}; it may have {known}")
        elif key == "host_per_block":
            changes["software"] = replace(machine.software, host_per_block=float(entry))
        else:
            changes[key] = int(entry) if key == "node" else float(entry)
    measured = machine.network_measured or "network" in entries
    return replace(machine, network_measured=measured, **changes)


def with_network(machine: Machine, rate: float) -> Machine:
    """Return the machine with the measured rate of --network, in bytes/s of one node, one way.

    The user has measured it in rings of long messages over all ranks. Rings of fewer ranks are
    assumed to be as fast, so the shares `fraction` and `crossing` are 1. Messages between stages
    keep their rate, but are no faster than this.
    """
    latency, messages = machine.network.latency, machine.network.bandwidth * machine.p2p_fraction
    return replace(
        machine,
        network=Link(latency, rate, 1.0),
        crossing=1.0,
        p2p_fraction=min(1.0, messages / rate),
        network_measured=True,
    )


def at_share_of_network(machine: Machine, share: float) -> Machine:
    """Return the machine with a network that has only a share of its rate.

    Used to predict the slowest case if nobody has measured the network's rate (step_time.py).
    """
    link = replace(machine.network, bandwidth=machine.network.bandwidth * share)
    return replace(machine, network=link)


def _is_rate(entry: Any, zero: bool = False) -> bool:
    """Return whether an entry is a finite number above 0; zero: whether 0 is allowed too."""
    number = isinstance(entry, (int, float)) and not isinstance(entry, bool)
    return number and (0 < entry < math.inf or (zero and entry == 0))


def _calibrated_link(file: str, key: str, entry: Any, machine: Machine) -> Link:
    """Return the link of a calibration's table [nvlink] or [network], which is `key`.

    entry: the table, with alpha (latency in seconds) and beta (bytes/s that a ring reaches). A link
    has its rate as a share of the datasheet's bandwidth. Raise UserError for any other table.
    """
    if not isinstance(entry, dict) or set(entry) != {"alpha", "beta"}:
        raise FileError(f"{file} needs alpha and beta in [{key}], not {entry!r}")
    alpha, beta = entry["alpha"], entry["beta"]
    if not _is_rate(alpha, zero=True) or not _is_rate(beta):
        raise FileError(
            f"{file} has [{key}] alpha = {alpha}, beta = {beta}: alpha is seconds, 0 or more, and "
            "beta is bytes/s above 0"
        )
    bandwidth = getattr(machine, key).bandwidth
    return Link(float(alpha), bandwidth, beta / bandwidth)
