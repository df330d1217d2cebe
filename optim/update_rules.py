"""Learning rate and update rules: AdamW (torch, apex, 8-bit), SGD, Adafactor, Muon.

A master is the copy of weights in fp32 or fp64 that is updated; the weights are the masters rounded
to the compute precision. An update rule holds the optimizer state of some masters of this rank and
updates the masters by their gradients. Only Muon's communicates; optim/buckets.py makes the masters
and zero.py calls the rule. Parameters belong to four families, and a rule updates masters of one
family:

    plain     AdamW, SGD, and parameters that the rules below do not update: flat sections, which
              may begin anywhere in a parameter
    muon      Muon: flat sections too; their matrices meet at owners (optim/matrix_owners.py)
    blocks    8-bit AdamW: flat sections that begin at a multiple of BLOCK in every parameter
    matrices  Adafactor: whole matrices, each of which has one owner; the matrices of two experts
              are separate

A kind is the name of one state tensor in a checkpoint, for example "exp_avg":
config/optimizers.py has those of each optimizer.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from base.errors import PackageError
from config.schema import Training
from optim import precision
from parallel import ParamSpec

if TYPE_CHECKING:
    from optim.adam8bit import Adam8bit
    from optim.muon import Muon

BLOCK = precision.BLOCK


def family(optimizer: str, spec: ParamSpec) -> str:
    """Return the family of the parameter that `spec` describes: plain, muon, blocks or matrices.

    optimizer: the value of --optimizer. 8-bit AdamW leaves the embedding's matrices and all vectors
    to AdamW with 32 bits. Muon leaves to AdamW all parameters that do not say how they divide into
    matrices: those of embedding and head, norms, biases and routers. Adafactor updates all
    parameters, vectors too, by one rule.
    """
    is_matrix = spec.decay  # weight decay applies to matrices only
    if optimizer == "adamw8bit" and is_matrix and not spec.name.startswith("embedding."):
        return "blocks"
    if optimizer == "muon" and spec.matrices is not None:
        return "muon"
    return "matrices" if optimizer == "adafactor" else "plain"


def rate_factor(training: Training, group: str) -> float:
    """Return the factor of the learning rate for the family `group`: that of --muon-adamw-lr."""
    if training.optimizer != "muon" or group == "muon" or training.muon_adamw_lr is None:
        return 1.0
    return training.muon_adamw_lr / training.lr


def make_rule(
    training: Training,
    group: str,
    masters: list[Tensor],
    decay: bool,
    rate_factor: float = 1.0,
    eps_factor: float = 1.0,
) -> "UpdateRule":
    """Return the rule of --optimizer for master tensors of the family `group`, but Muon's.

    Called once for each update set (zero.py). decay: whether weight decay applies to these tensors.
    rate_factor, eps_factor: those of muP; the decay is divided by the first, so that weights decay
    at one rate whatever the width is. Raise UserError if the optimizer's package is not installed.
    """
    weight_decay = training.weight_decay / rate_factor if decay else 0.0
    betas = (training.adam_beta1, training.adam_beta2)
    # Adam of a weight whose gradients have all been 0 is 0 / (0 + eps): a row of the vocabulary's
    # padding, a token or an expert that no sample had. It does not move with --adam-eps 0 either.
    eps = training.adam_eps * eps_factor or torch.finfo(torch.float32).tiny
    if training.optimizer == "adamw8bit" and group == "blocks":
        from optim.adam8bit import Adam8bit  # imported here: no other optimizer needs this module

        return Adam8bit(masters, betas, eps, weight_decay)
    library = _library(training, group)
    # Only the classes of AdamW, whose state tensors are `_moments`, take these two options.
    adam = {"betas": betas, "eps": eps} if library.kinds is _moments else {}
    return _TorchOptimizerRule(masters, library, weight_decay=weight_decay, **adam)


# ---- Rules that are a torch.optim.Optimizer, or look like one ------------------------------------


class _StateTensor(NamedTuple):
    """A state tensor of a torch optimizer: its key in `optimizer.state[master]`, and its shape.

    shape: None for the shape of the master.
    """

    key: str
    shape: tuple[int, ...] | None = None


class _Library(NamedTuple):
    """An optimizer class, and those of its state tensors that a checkpoint keeps.

    kernel: the optimizer's name in the log. make: returns a torch.optim.Optimizer, or an object
    with the same attributes. kinds: takes a master and returns its state tensors by their names in
    a checkpoint; None for a tensor that this master does not have.
    """

    kernel: str
    make: Callable[..., Any]
    kinds: Callable[[Tensor], dict[str, _StateTensor | None]]


class _TorchOptimizerRule:
    """Update rule that runs an optimizer of torch or apex.

    Its state can be read and written before the first step, although torch makes a state only in
    the first step. kernel: the optimizer's name in the log. steps: number of updates so far.
    """

    def __init__(self, masters: list[Tensor], library: _Library, **options):
        """Make the optimizer of `library` for the masters; options: its arguments, such as betas.

        A rank may own no masters; then there is no optimizer, because torch refuses an empty list.
        """
        self.masters = masters
        self.library = library
        self.kernel = library.kernel
        self.optimizer = library.make(masters, **options) if masters else None
        self.states = self.optimizer.state if self.optimizer else {}
        self.steps = 0

    def update(self, gradients: list[Tensor], lr: float) -> None:
        """Update all master tensors once, by gradients of the same shapes and type.

        The optimizer takes a gradient from `master.grad`, where it is only during the update.
        """
        self.steps += 1
        if self.optimizer is None:
            return
        for master, gradient in zip(self.masters, gradients):
            master.grad = gradient
        for options in self.optimizer.param_groups:
            options["lr"] = lr
            options["step"] = self.steps - 1  # apex reads its step count here
        self.optimizer.step()
        for master in self.masters:
            master.grad = None

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far; called when a checkpoint has been loaded."""
        self.steps = steps
        for state in self.states.values():
            if "step" in state:
                state["step"].fill_(steps)

    def state_bytes(self) -> int:
        """Return the bytes of the state tensors that exist now, without the masters.

        There are none before the first step.
        """
        total = 0
        for state in self.states.values():
            total += sum(value.nbytes for value in state.values() if isinstance(value, Tensor))
        return total

    def read(self, kind: str, index: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a state tensor of master `index`, flat; perhaps a view.

        kind: the tensor's name in a checkpoint. A factor of Adafactor is repeated along its row or
        column. Called when a checkpoint is saved, or when replicas are compared.
        """
        tensor = self._state(kind, index)
        master = self.masters[index]
        if tensor is None:  # this master has no such state: a checkpoint has zeros
            return master.new_zeros(stop - start)
        return tensor.expand(master.shape).reshape(-1)[start:stop]

    def write(self, kind: str, index: int, start: int, values: Tensor) -> None:
        """Set elements of the state tensor `kind` of master `index` from `start` on.

        values: flat, in the order of the master's elements. A factor of Adafactor gets the first
        value of its row or column. Called when a checkpoint is loaded.
        """
        tensor = self._state(kind, index)
        master = self.masters[index]
        if tensor is None:
            return
        if tensor.shape == master.shape:  # not a factor of Adafactor
            tensor.view(-1)[start : start + len(values)] = values
            return
        # A factor is (rows, 1) or (1, columns): it takes the first column or row of the values.
        tensor.copy_(values.view(master.shape)[: len(tensor), : tensor.shape[1]])

    def _state(self, kind: str, index: int) -> Tensor | None:
        """Return torch's state tensor of a kind for master `index`, None if the master has none.

        Before the first step torch has no state: it is made here, as zeros. library: what makes
        torch's optimizer; its `kinds` say which of torch's state tensors is which kind.
        """
        master = self.masters[index]
        kinds = self.library.kinds(master)
        state = self.states[master]
        if not state:
            state.update(_first_state(master, kinds))
        state_tensor = kinds[kind]
        return None if state_tensor is None else state[state_tensor.key]


def _first_state(master: Tensor, kinds: dict[str, _StateTensor | None]) -> dict[str, Tensor]:
    """Return a master's state, all zeros, as torch's optimizers make it at the first step.

    kinds: the state tensors of this master, by their names in a checkpoint.
    """
    state = {"step": torch.zeros((), dtype=torch.float32, device=master.device)}
    for state_tensor in kinds.values():
        if state_tensor is not None:
            state[state_tensor.key] = master.new_zeros(state_tensor.shape or master.shape)
    return state


class _FusedAdamW:
    """torch's fused AdamW kernel, with the attributes of torch.optim.Optimizer that the rule uses.

    It is no torch.optim.Optimizer: making the first object of that class imports torch._dynamo,
    which takes 70 MB and a second on every rank.
    """

    def __init__(self, masters: list[Tensor], **options):
        self.param_groups: list[dict[str, Any]] = [{"params": masters, **options}]
        self.state: dict[Tensor, dict[str, Tensor]] = {master: {} for master in masters}

    def step(self) -> None:
        """Update every master by its `grad`, once; in the first step, make the state first."""
        (options,) = self.param_groups
        masters = options["params"]
        beta1, beta2 = options["betas"]
        states = [self.state[m] or _first_state(m, _moments(m)) for m in masters]
        self.state.update(zip(masters, states))
        adamw(
            masters,
            [master.grad for master in masters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],  # max_exp_avg_sqs, for amsgrad only
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=options["lr"],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
        )


def _moments(master: Tensor) -> dict[str, _StateTensor | None]:
    """Return the state tensors of AdamW by kind: two moments in the shape of the master."""
    return {kind: _StateTensor(kind) for kind in ("exp_avg", "exp_avg_sq")}


def _factors(master: Tensor) -> dict[str, _StateTensor | None]:
    """Return the state tensors of Adafactor by kind: for a matrix one factor for each row and for
    each column; for a vector its variance, which a checkpoint has in place of the row factors.
    """
    if master.dim() < 2:
        return {"row_var": _StateTensor("variance"), "col_var": None}
    shapes = {"row_var": (master.shape[0], 1), "col_var": (1, master.shape[1])}
    return {kind: _StateTensor(kind, shape) for kind, shape in shapes.items()}


def _library(t: Training, group: str) -> _Library:
    """Return the optimizer class that --optimizer uses for the parameters of the family `group`.

    Muon and 8-bit AdamW leave the family plain to AdamW.
    """
    optim = torch.optim
    # The state tensors of SGD, by kind. None: the optimizer keeps no tensor of this kind
    # for these options, and a checkpoint has zeros in its place.
    kinds = dict[str, _StateTensor | None]()
    if t.optimizer == "apex":
        return _Library("NVIDIA apex FusedAdam", _fused_adam(), _moments)
    if t.optimizer == "adafactor":
        return _Library("torch.optim.Adafactor", optim.Adafactor, _factors)
    if t.optimizer == "sgd":
        kinds["momentum_buffer"] = _StateTensor("momentum_buffer") if t.sgd_momentum else None
        make = partial(optim.SGD, momentum=t.sgd_momentum)
        return _Library("torch.optim.SGD", make, lambda master: kinds)
    return _Library("torch.optim.AdamW, fused", _FusedAdamW, _moments)


def _fused_adam() -> Callable[..., Any]:
    """Return a function that makes apex's FusedAdam; UserError if apex cannot be imported.

    FusedAdam keeps its moments in fp32, as AdamW here does, and updates in place. It makes its
    constants on the GPU when it is made: without a GPU, or without apex' CUDA extensions, that
    fails, and the function raises a UserError.
    """
    needs = (
        "--optimizer apex needs a GPU and NVIDIA's apex with its CUDA extensions, built from "
        "github.com/NVIDIA/apex (`pip install apex` installs another project); "
        "--optimizer adamw runs torch's own fused kernel on the same state. Here: "
    )
    try:
        from apex.optimizers import FusedAdam
    except ImportError as error:
        raise PackageError(f"{needs}{error}") from None

    def make(masters: list[Tensor], **options: Any) -> Any:
        """Return a FusedAdam of the masters; UserError without a GPU or apex's extensions."""
        try:
            return FusedAdam(masters, adam_w_mode=True, **options)
        except (RuntimeError, AssertionError) as error:  # no driver, or a build without CUDA
            raise PackageError(f"{needs}{error}") from None

    return make


UpdateRule: TypeAlias = "_TorchOptimizerRule | Adam8bit | Muon"
