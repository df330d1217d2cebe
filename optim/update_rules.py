"""Learning rate and update rules: AdamW (torch, apex, 8-bit), SGD, Adafactor, Muon.

A rule holds the state of some master tensors of this rank and updates them by their gradients. It
does not depend on ranks. A family is the set of parameters that one rule can take together:

    plain     AdamW, SGD, what other rules leave out: any flat section of any parameters
    blocks    8-bit AdamW: flat sections that begin at multiples of BLOCK in every parameter
    matrices  Adafactor and Muon: whole matrices, each of which has one owner
"""

import importlib.util
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

from config.messages import UserError
from config.schema import Training
from parallel import ParamSpec

# Weights that share a scale in 8-bit AdamW: what bitsandbytes' kernels are built for.
BLOCK = 256
# Newton-Schulz in bf16 and this momentum are torch's defaults, those of Muon's author.
MUON_MOMENTUM = 0.95


def learning_rate(training: Training, samples: int, total: int, batch: int) -> float:
    """The rate of a step on `batch` samples that starts when `samples` of `total` are trained on.

    Linear warm-up, then cosine, linear, constant, or WSD (arXiv 2404.06395: constant, and a
    linear fall at the end), to min_lr at lr_decay_samples.
    """
    peak = training.lr
    low = training.min_lr
    end = training.lr_decay_samples or total
    if samples < training.lr_warmup_samples:
        return peak * (samples + batch) / (training.lr_warmup_samples + batch)
    if training.lr_schedule == "constant":
        return peak
    if samples >= end:
        return low
    begin = training.lr_warmup_samples
    if training.lr_schedule == "wsd":
        begin = max(begin, end - (training.lr_wsd_decay_samples or end // 10))
    done = max(0.0, (samples - begin) / max(1, end - begin))
    if training.lr_schedule == "cosine":
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * done))
    return low + (peak - low) * (1 - done)


def family(optimizer: str, spec: ParamSpec) -> str:
    """The family of a parameter under that --optimizer."""
    if optimizer == "adamw8bit" and spec.decay and not spec.name.startswith("embedding."):
        return "blocks"
    if optimizer == "muon" and spec.decay and spec.name.startswith("blocks."):
        return "matrices"
    return "matrices" if optimizer == "adafactor" else "plain"


def state_kinds(optimizer: str) -> tuple[str, ...]:
    """The optimizer's tensors in a checkpoint, each with one element for every weight.

    Of muon's matrices exp_avg is the momentum, and they have no exp_avg_sq: zeros. 8-bit moments
    are written out in fp32, so that a run may continue with adamw, and vice versa. Adafactor's
    factors are written once for every weight of their row or column; of vectors row_var is the
    variance and col_var zeros.
    """
    if optimizer == "adafactor":
        return ("row_var", "col_var")
    return ("momentum_buffer",) if optimizer == "sgd" else ("exp_avg", "exp_avg_sq")


def interchangeable(optimizer: str) -> str:
    """The name under which a checkpoint keeps the state: equal for those that can take it over."""
    return "adamw" if optimizer in ("adamw", "apex", "adamw8bit") else optimizer


def make_rule(training: Training, group: str, masters: list[Tensor], decay: bool) -> "UpdateRule":
    """The rule of --optimizer for master tensors of one family and one weight-decay rule.

    Raises UserError if the package that it needs is not installed.
    """
    weight_decay = training.weight_decay if decay else 0.0
    betas = (training.adam_beta1, training.adam_beta2)
    eps = training.adam_eps
    if training.optimizer == "adamw8bit" and group == "blocks":
        return _Adam8bit(masters, betas, eps, weight_decay)
    library = _library(training, group)
    adam = {"betas": betas, "eps": eps} if library.kinds is _moments else {}
    return _TorchOptimizerRule(masters, library, weight_decay=weight_decay, **adam)


# ---- Rules that are a torch.optim.Optimizer, or look like one ------------------------------------


class _StateTensor(NamedTuple):
    """A state tensor of torch's: its key, and its shape if that is not the master's."""

    key: str
    shape: tuple[int, ...] | None = None


class _Library(NamedTuple):
    """An optimizer class, and what a checkpoint keeps of a master's state, by the checkpoint's
    name: one element for every weight, None for what this master has not.
    """

    kernel: str
    make: Callable[..., Any]  # a torch.optim.Optimizer, or what looks like one
    kinds: Callable[[Tensor], dict[str, _StateTensor | None]]


class _TorchOptimizerRule:
    """Runs a library's optimizer, and makes its state before the first step, to load into.

    kernel: what runs. steps: updates so far.
    """

    def __init__(self, masters: list[Tensor], library: _Library, **options):
        self.masters = masters
        self.library = library
        self.kernel = library.kernel
        self.optimizer = library.make(masters, **options) if masters else None
        self.states = self.optimizer.state if self.optimizer else {}
        self.steps = 0

    def update(self, gradients: list[Tensor], lr: float) -> None:
        """One step on all master tensors, by gradients of their shapes and type."""
        self.steps += 1
        if self.optimizer is None:
            return
        for master, gradient in zip(self.masters, gradients):
            master.grad = gradient
        for options in self.optimizer.param_groups:
            options["lr"] = lr
            options["step"] = self.steps - 1  # where apex counts
        self.optimizer.step()
        for master in self.masters:
            master.grad = None

    def set_steps(self, steps: int) -> None:
        """Go on as after so many updates."""
        self.steps = steps
        for state in self.states.values():
            if "step" in state:
                state["step"].fill_(steps)

    def state_bytes(self) -> int:
        """Bytes of the state that exists now, masters not counted."""
        tensors = [t for s in self.states.values() for t in s.values() if isinstance(t, Tensor)]
        return sum(t.nbytes for t in tensors)

    def read(self, kind: str, index: int, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a state tensor of master `index`, flat; maybe a view."""
        tensor = self._state(kind, index)
        master = self.masters[index]
        if tensor is None:
            return master.new_zeros(stop - start)
        return tensor.expand(master.shape).reshape(-1)[start:stop]

    def write(self, kind: str, index: int, start: int, values: Tensor) -> None:
        """Set elements from `start` on; state of one number a row or column takes it from them."""
        tensor = self._state(kind, index)
        master = self.masters[index]
        if tensor is None:
            return
        if tensor.shape == master.shape:
            tensor.view(-1)[start : start + len(values)] = values
            return
        tensor.copy_(values.view(master.shape)[: len(tensor), : tensor.shape[1]])

    def _state(self, kind: str, index: int) -> Tensor | None:
        """torch's state tensor of that kind; as before the first step if there is none yet."""
        master = self.masters[index]
        kinds = self.library.kinds(master)
        state = self.states[master]
        if not state:
            state.update(_first_state(master, kinds))
        wanted = kinds[kind]
        return None if wanted is None else state[wanted.key]


def _first_state(master: Tensor, kinds: dict[str, _StateTensor | None]) -> dict[str, Tensor]:
    """What torch's optimizers have of a master before the first step."""
    step = torch.zeros((), dtype=torch.float32, device=master.device)
    found = filter(None, kinds.values())
    return {"step": step, **{one.key: master.new_zeros(one.shape or master.shape) for one in found}}


class _FusedAdamW:
    """torch's fused AdamW, of torch.optim.Optimizer only what the rule takes: the first object of
    that class would import torch._dynamo, 70 MB and a second on every rank.
    """

    def __init__(self, masters: list[Tensor], **options):
        self.param_groups: list[dict[str, Any]] = [{"params": masters, **options}]
        self.state: dict[Tensor, dict[str, Tensor]] = {master: {} for master in masters}

    def step(self) -> None:
        """Update every master by its `grad`."""
        (options,) = self.param_groups
        masters, (beta1, beta2) = options["params"], options["betas"]
        kinds = ("exp_avg", "exp_avg_sq", "step")
        states = [self.state[m] or _first_state(m, _moments(m)) for m in masters]
        self.state.update(zip(masters, states))
        means, squares, steps = ([state[kind] for state in states] for kind in kinds)
        numbers = {name: options[name] for name in ("lr", "eps", "weight_decay")}
        numbers |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
        gradients = [master.grad for master in masters]
        adamw(masters, gradients, means, squares, [], steps, fused=True, **numbers)


def _moments(master: Tensor) -> dict[str, _StateTensor | None]:
    return {kind: _StateTensor(kind) for kind in ("exp_avg", "exp_avg_sq")}


def _factors(master: Tensor) -> dict[str, _StateTensor | None]:
    if master.dim() < 2:
        return {"row_var": _StateTensor("variance"), "col_var": None}
    shapes = {"row_var": (master.shape[0], 1), "col_var": (1, master.shape[1])}
    return {kind: _StateTensor(kind, shape) for kind, shape in shapes.items()}


def _library(t: Training, group: str) -> _Library:
    """The library's optimizer for one family of parameters."""
    optim = torch.optim
    kinds = dict[str, _StateTensor | None]()
    if t.optimizer == "apex":
        return _Library("NVIDIA apex FusedAdam", partial(_apex(), adam_w_mode=True), _moments)
    if t.optimizer == "adafactor":
        return _Library("torch.optim.Adafactor", optim.Adafactor, _factors)
    if t.optimizer == "sgd":
        kinds["momentum_buffer"] = _StateTensor("momentum_buffer") if t.sgd_momentum else None
        make = partial(optim.SGD, momentum=t.sgd_momentum)
        return _Library("torch.optim.SGD", make, lambda master: kinds)
    if group == "matrices":
        kinds |= {"exp_avg": _StateTensor("momentum_buffer"), "exp_avg_sq": None}
        muon = partial(optim.Muon, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
        return _Library("torch.optim.Muon on the blocks' matrices", muon, lambda master: kinds)
    return _Library("torch.optim.AdamW, fused", _FusedAdamW, _moments)


def _apex() -> Callable[..., torch.optim.Optimizer]:
    """apex's optimizer; UserError with the import's error if it cannot be imported."""
    try:
        from apex.optimizers import FusedAdam
    except ImportError as error:
        raise UserError(
            "--optimizer apex needs NVIDIA's apex with its CUDA extensions, built from "
            "github.com/NVIDIA/apex; the package that `pip install apex` brings is another "
            f"project's. --optimizer adamw runs torch's own fused kernel. Here: {error}"
        ) from None
    return FusedAdam


# ---- 8-bit AdamW ---------------------------------------------------------------------------------


class _Adam8bit:
    """AdamW with both moments in 8 bits, one scale per BLOCK (arXiv 2110.02861), by bitsandbytes.

    Its attributes and methods are those of _TorchOptimizerRule.
    Masters are flat, of a multiple of BLOCK elements. The codes of the signed map are made
    symmetric: then the largest of a block is always code 1 or -1, and a moment that was written
    out in fp32 is read back to the same bits.
    """

    def __init__(self, masters, betas: tuple[float, float], eps: float, weight_decay: float):
        if importlib.util.find_spec("bitsandbytes") is None:
            package = "the package bitsandbytes: pip install bitsandbytes"
            raise UserError(f"--optimizer adamw8bit needs {package}")
        # Silence a warning about an unused 4-bit kernel on CPUs.
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
        import bitsandbytes
        from bitsandbytes import functional

        self.kernel = f"bitsandbytes {bitsandbytes.__version__} 8-bit AdamW on the matrices"
        self.library: Any = functional  # its annotations are of fewer arguments
        self.masters = masters
        self.steps = 0
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        device = masters[0].device if masters else torch.device("cpu")
        signed = functional.create_dynamic_map(signed=True)
        signed[0] = -1.0
        unsigned = functional.create_dynamic_map(signed=False)
        self.maps = {"exp_avg": signed.to(device), "exp_avg_sq": unsigned.to(device)}
        self.codes = {k: [self._zero_codes(m, k) for m in masters] for k in self.maps}
        self.scales = {k: [m.new_zeros(m.numel() // BLOCK) for m in masters] for k in self.maps}

    def _zero_codes(self, master: Tensor, kind: str) -> Tensor:
        zero = int((self.maps[kind] == 0).nonzero()[0])
        return torch.full((master.numel(),), zero, dtype=torch.uint8, device=master.device)

    def update(self, gradients: list[Tensor], lr: float) -> None:
        """One step by bitsandbytes' blockwise kernel."""
        self.steps += 1
        for i, (master, gradient) in enumerate(zip(self.masters, gradients)):
            codes = [of_kind[i] for of_kind in self.codes.values()]
            scales = [of_kind[i] for of_kind in self.scales.values()]
            unused = (0.0, 0.0)  # beta3 and alpha belong to another optimizer
            numbers = (*self.betas, *unused, self.eps, self.steps, lr)
            states = (*self.maps.values(), *scales)
            self.library.optimizer_update_8bit_blockwise(
                "adam", gradient, master, *codes, *numbers, *states, weight_decay=self.weight_decay
            )

    def set_steps(self, steps: int) -> None:
        self.steps = steps

    def state_bytes(self) -> int:
        parts = [*self.codes.values(), *self.scales.values()]
        return sum(t.nbytes for tensors in parts for t in tensors)

    def read(self, kind: str, index: int, start: int, stop: int) -> Tensor:
        first = start // BLOCK
        last = -(-stop // BLOCK)
        codes = self.codes[kind][index][first * BLOCK : last * BLOCK]
        scales = self.scales[kind][index][first:last]
        decode = self.library.dequantize_blockwise
        levels = self.maps[kind]
        values = decode(codes, absmax=scales, code=levels, blocksize=BLOCK)
        return values[start - first * BLOCK :][: stop - start]

    def write(self, kind: str, index: int, start: int, values: Tensor) -> None:
        """ValueError if `start` is not the start of a block."""
        if start % BLOCK:
            raise ValueError(f"8-bit state is written in blocks of {BLOCK}, not from {start} on")
        count = -(-len(values) // BLOCK) * BLOCK
        blocks = F.pad(values, (0, count - len(values))).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        # The library's own quantisation is off by one code now and then; the nearest is wanted.
        levels = self.maps[kind]
        middles = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(blocks / scales.clamp(min=1e-38)[:, None], middles)
        self.codes[kind][index][start : start + count] = codes.view(-1).to(torch.uint8)
        self.scales[kind][index][start // BLOCK : (start + count) // BLOCK] = scales


UpdateRule = _TorchOptimizerRule | _Adam8bit
