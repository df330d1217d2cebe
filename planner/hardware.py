"""Loads machines as data: the rates and sizes of a GPU, its node, its network and its software.

    machine = load("a100-80")                          # hardware/a100-80.toml
    machine = load("a100-80", "measured.toml")         # with rates that were measured there
    machine = load("mine.toml")                        # a file of one's own
    machine = load("A100")                             # a family: machine.note says which member

One TOML file per machine in `hardware/`; `like = "NAME"` starts from another file. Published
numbers have their source there. A name in place of a number is a constant fitted on measured rows:
`hardware/fitted.toml` has its value, unit, meaning and those rows.
"""

import math
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from config.command_line import read_toml
from config.messages import UserError, nearest

FOLDER = Path(__file__).resolve().parent.parent / "hardware"
FITTED, FAMILIES = "fitted", "families"  # the files of the folder that are not a machine


class Kernel(NamedTuple):
    """A flash-attention kernel, relative to FlashAttention-2.

    forward, backward: its rate in long sequences, divided by FlashAttention-2's. half: the sequence
    length in tokens at which it reaches half of this rate.
    """

    forward: float
    backward: float
    half: float


# Assumed after the figures of arXiv 2205.14135, 2307.08691, 2407.08608 and cuDNN's notes: causal
# masks, head size 128; not fitted. flash3 and cudnn are relative to flash2 on an H100.
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
    """Coefficients of the training program; the values are Trine's on GPUs, as its code has it.

    A program that has other terms than Trine is a subclass with a method for each of them: see
    `planner.job.term`, and benchmarks/engines.py for the programs of published rows.
    """

    fp8: bool = False  # whether linear layers of blocks compute in fp8
    # Bytes that the loss moves for each logit: cast, maximum, exponential and sums in FP32. A fused
    # kernel would move 8.
    logit_bytes: float = 26.0
    # The share of the last backward and of the first forward behind which gradient and parameter
    # traffic can hide; at --zero 3 the share of every pass.
    overlap_passes: float = 0.9
    overlap_tensor: float = 0.4  # the share of tensor collectives that is hidden: 4 of a block's 10
    wire_bytes: int = 4  # bytes of one gradient in a reduction between ranks
    fused_accumulation: bool = True  # the weight-gradient GEMM adds to the gradient, below --zero 2
    gradient_bytes: float = 4.0  # bytes of one gradient that is kept, on every replica
    sharded_bytes: float = 12.0  # bytes of a parameter's master weight and Adam's moments
    buffers: float = 2e9  # bytes of communication buffers and buckets of fixed size
    host_per_block: float = 0.0  # seconds the GPU waits for the host, per block and micro-batch
    # Seconds to launch one operation; a pass takes no less than the launches of its operations.
    host_per_operation: float = 8e-6
    per_step: float = 0.05  # seconds of a step that no micro-batch causes


@dataclass(frozen=True)
class Machine:
    """A cluster as it was used. Rates in FLOP/s and bytes/s, sizes in bytes, times in seconds."""

    name: str
    device: str  # a part of the driver's name of the GPU; a calibration must be for the same GPU
    peak: float  # dense half-precision FLOP/s of one GPU's tensor cores
    vector_peak: float  # FP32 FLOP/s outside the tensor cores
    processors: int  # streaming multiprocessors
    memory: float
    bandwidth: float  # the rate of the GPU's memory
    context: float  # the memory that a CUDA context takes before the first tensor
    node: int  # the number of GPUs of a node
    nvlink: Link  # the link of one GPU to the other GPUs of its node
    network: Link  # the link of one node to other nodes
    p2p_fraction: float  # the share of the network's rate that messages between stages reach
    gemm_fraction: float  # the share of the peak that a large, aligned GEMM reaches
    flash_fraction: float  # the share of the peak that FlashAttention-2 reaches in long sequences
    activation_overhead: float  # allocated bytes divided by tensors' bytes, for activations
    kernel: str = "flash2"  # the attention kernel, a name in KERNELS
    # A ring with several ranks on a node reaches this share of the network's rate: each adapter
    # then only sends or only receives.
    crossing: float = 1.0
    ranks_per_core: float = 1.0  # above 1 ranks share CPU cores; all rates are those of all ranks
    # Standard deviations of the logarithm of a measured over a predicted value, for time and for
    # memory, on runs that were not used to fit the constants.
    time_spread: float = 0.12
    memory_spread: float = 0.12
    network_measured: bool = False  # whether the network's rate was measured on this cluster
    slowdown: float = 1.0  # the factor by which a known defect of this machine lengthens each step
    bf16: bool = True  # whether it has bf16 arithmetic
    fp8: float = 0.0  # dense fp8 FLOP/s divided by half-precision FLOP/s; 0: it has no fp8
    watts: float = 0.0  # power of one GPU at its limit, by the datasheet; 0: it is not stated
    note: str = field(default="", compare=False)  # a line to print for a user of this machine
    software: Software = field(default_factory=Software)
    fitted_range: dict[str, list[float]] = field(default_factory=dict, compare=False)
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    def has_device(self, device: str) -> bool:
        """Whether the driver's name `device` is that of this machine's GPU, as a whole word.

        "A10" is not a part of "NVIDIA A100-SXM4-80GB", nor "H200" of "NVIDIA GH200 480GB".
        """
        word = rf"(?<![a-z0-9]){re.escape(self.device.lower())}(?![a-z0-9])"
        return re.search(word, device.lower()) is not None

    @property
    def precision(self) -> str:
        """Return what --precision auto is here; optim/precision.py decides so for a run."""
        if self.device == "CPU":
            return "fp32"
        return "bf16" if self.bf16 else "fp16"


@dataclass(frozen=True)
class Constant:
    """A fitted number, its meaning and the rows it was fitted on."""

    name: str
    value: float
    unit: str
    meaning: str
    fitted_on: str


def names() -> list[str]:
    """The machines in `hardware/`."""
    return sorted({path.stem for path in FOLDER.glob("*.toml")} - {FITTED, FAMILIES})


def constants() -> list[Constant]:
    """Every fitted constant, as listed by `plan.py constants`."""
    entries = read_toml(FOLDER / f"{FITTED}.toml", FITTED)
    return [Constant(name, **entry) for name, entry in entries.items()]


def of_device(device: str) -> Machine | None:
    """The first machine of `hardware/` with that GPU, by the driver's name for it."""
    machines = map(load, names())
    return next((machine for machine in machines if machine.has_device(device)), None)


def peak_of(device: str, precision: str) -> float | None:
    """Dense FLOP/s of a GPU by the driver's name for it, in fp16 or bf16; None if not known here.

    A PCIe or NVL card has other rates than the SXM module that the files are about.
    """
    if precision not in ("fp16", "bf16") or "PCIe" in device or "NVL" in device:
        return None
    machine = of_device(device)
    return machine.peak if machine and machine.device != "CPU" else None


def load(name: str, calibration: str | None = None, **fitted: float) -> Machine:
    """The machine of that name, or of a user's file; with the rates in the file `calibration`.

    Keyword arguments override fitted constants by name, as fitting them needs. Raises UserError
    for an unknown machine or a calibration of another device.
    """
    values = {c.name: c.value for c in constants()} | fitted
    known = names()
    taken = name if name in known else _member(name, known)
    machine = _build(taken, _merged(taken), values)
    if taken != name:
        others = [other for other in known if other.startswith(name.lower()) and other != taken]
        note = f"{name}: taken as {taken}" + (f"; others: {', '.join(others)}" if others else "")
        machine = replace(machine, note=note)
    return calibrate(machine, calibration) if calibration else machine


def _member(name: str, known: list[str]) -> str:
    """The known machine that another spelling means, such as NVIDIA-A100-SXM4-80GB, or a family of
    GPUs; any other name as it is.
    """
    plain = re.sub(r"-sxm\d?|(?<=\d)gb", "", name.lower()).removeprefix("nvidia-")
    taken = read_toml(FOLDER / f"{FAMILIES}.toml", FAMILIES).get(plain, plain)
    return taken if taken in known else name


def _merged(name: str) -> dict[str, Any]:
    """The entries of a machine's file, over those of the file it is `like`."""
    if name.endswith(".toml"):
        own = _checked(read_toml(name, name), name)
    elif name in names():
        own = read_toml(FOLDER / f"{name}.toml", name)
    else:
        others = f"; there are {', '.join(names())}, and files that end in .toml"
        raise UserError(f"no machine is called {name!r}{nearest(name, names(), 0.8) or others}")
    base = _merged(own.pop("like")) if "like" in own else {}
    tables = {k: base.get(k, {}) | v for k, v in own.items() if isinstance(v, dict)}
    return base | own | tables


def _checked(entries: dict[str, Any], name: str) -> dict[str, Any]:
    """The entries of a user's file; UserError for one that no machine has, or of another type."""
    if "like" not in entries:
        raise UserError(f"{name} needs like = NAME: a machine of hardware/, or another file")
    kinds: dict[str, Any] = {"": Machine, "nvlink": Link, "network": Link, "software": Software}
    for part, kind in kinds.items():
        known = {f.name: f.type for f in fields(kind)} | {"like": str}
        for key, value in (entries.get(part, {}) if part else entries).items():
            wanted = known.get(key)
            if wanted in (int, float):
                right = _is_rate(value, zero=key not in ("node", "memory", "peak", "bandwidth"))
            else:
                right = isinstance(value, wanted if wanted in (str, bool) else dict | list)
            if wanted is None or not right:
                where = f"in [{part}] " if part else ""
                raise UserError(f"{name} has {where}{key} = {value!r}, which no machine has")
    kernel = entries.get("kernel", "flash2")
    if kernel not in KERNELS:
        raise UserError(f"{name} has kernel = {kernel!r}; known are {', '.join(KERNELS)}")
    return entries


def _build(name: str, entries: dict[str, Any], values: dict[str, float]) -> Machine:
    def filled(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {key: filled(value) for key, value in entry.items()}
        return values.get(entry, entry) if isinstance(entry, str) else entry

    entries = filled(entries)
    for link in ("nvlink", "network"):
        entries[link] = Link(**entries[link])
    entries["software"] = Software(**entries.get("software", {}))
    return Machine(name=name, **entries)


# ---- Calibration ---------------------------------------------------------------------------------

RATES = ("gemm_fraction", "flash_fraction", "bandwidth", "memory", "node", "ranks_per_core")
CALIBRATED = (*RATES, "context", "host_per_block")


def calibrate(machine: Machine, path: str) -> Machine:
    """The machine with measured rates.

    Raises UserError if the file is of another device, cannot be read or has other entries than
    `device` (as torch.cuda.get_device_name() has it) and, each optional:

        the names in CALIBRATED    as in Machine; `memory` and `node` are those of the ranks, where
                                   several share a host; host_per_block is that of Software
        [nvlink] alpha, beta       seconds and one GPU's bytes/s: an all-reduce of n ranks takes
                                   2 (n-1) alpha + 2 (n-1)/n bytes / beta
        [network] alpha, beta      the same between nodes, bytes/s of one node
    """
    entries, file = read_toml(path, path), f"the calibration {path}"
    device = str(entries.pop("device", ""))
    if not machine.has_device(device):
        where = f"{device or 'no stated device'!r}, but {machine.name} has {machine.device!r}"
        raise UserError(f"{file} was measured on {where}")
    changes: dict[str, Any] = {}
    for key, entry in entries.items():
        if key in ("nvlink", "network"):
            changes[key] = _calibrated_link(file, key, entry, machine)
        elif key not in CALIBRATED or not _is_rate(entry, zero=key not in RATES):
            known = ", ".join((*CALIBRATED, "nvlink", "network"))
            raise UserError(f"{file} says {key} = {entry!r}; it may have {known}")
        elif key == "host_per_block":
            changes["software"] = replace(machine.software, host_per_block=float(entry))
        else:
            changes[key] = int(entry) if key == "node" else float(entry)
    measured = machine.network_measured or "network" in entries
    return replace(machine, network_measured=measured, **changes)


def with_network(machine: Machine, rate: float) -> Machine:
    """The machine with a measured network: bytes/s of one node, one way, in rings of long messages
    over all ranks. No message between two nodes is faster, and rings of fewer ranks are as fast.
    """
    latency, messages = machine.network.latency, machine.network.bandwidth * machine.p2p_fraction
    return replace(
        machine,
        network=Link(latency, rate, 1.0),
        crossing=1.0,
        p2p_fraction=min(1.0, messages / rate),
        network_measured=True,
    )


def with_fp8(machine: Machine) -> Machine:
    """The machine with blocks' linear layers in fp8, which the engine lacks; UserError without."""
    if not machine.fp8:
        raise UserError(f"--fp8: {machine.name} has no fp8 arithmetic; h100, h200 and b200 do")
    return replace(machine, software=replace(machine.software, fp8=True))


def at_share_of_network(machine: Machine, share: float) -> Machine:
    """The machine with a network of a share of its rate."""
    link = replace(machine.network, bandwidth=machine.network.bandwidth * share)
    return replace(machine, network=link)


def _is_rate(entry: Any, zero: bool = False) -> bool:
    """Whether it is a finite number above 0, or 0 itself if that is allowed."""
    number = isinstance(entry, (int, float)) and not isinstance(entry, bool)
    return number and (0 < entry < math.inf or (zero and entry == 0))


def _calibrated_link(file: str, key: str, entry: Any, machine: Machine) -> Link:
    if not isinstance(entry, dict) or set(entry) != {"alpha", "beta"}:
        raise UserError(f"{file} needs alpha and beta in [{key}], not {entry!r}")
    alpha, beta = entry["alpha"], entry["beta"]
    if not _is_rate(alpha, zero=True) or not _is_rate(beta):
        raise UserError(f"{file} has [{key}] alpha = {alpha}, beta = {beta}")
    bandwidth = getattr(machine, key).bandwidth
    return Link(float(alpha), bandwidth, beta / bandwidth)
