"""muP: what makes the best learning rate of a small model the best one of a wide or deep model.

    mup_of(model).std("hidden")                    factor of the initial standard deviation
    mup_of(model).rate("hidden", "adam")           factor of the learning rate
    EXPONENTS["hidden"]                            the powers that these factors are

A parameter has a role, by which of its dimensions grow with the model. m is hidden / --mup, how
much wider the model is than its base, and l is layers / --mup-base-layers. Each factor is a power
of m:

    role     class        parameters                                      std    rate  divided  eps
    input    input-like   embedding, positions; KDA's decay and gate        0       0        0   -1
    hidden   hidden       matrices of attention, MLP, experts and mixers -1/2      -1        0   -1
    head     output-like  output matrix, also if it is tied                 0       0        1   -1
    readout  output-like  router, gate of the shared expert, KDA's low     -1      -1        0    0
    vector   vector       biases, norms, decays, taps of convolutions       0       0        0   -1

std and rate are those of G. Yang et al., "Tensor Programs V" (arXiv 2203.03466), table 8, for Adam;
readout is the equivalent form of table 3, without a divisor. A matrix that embeds and is the head
too has the same powers in both roles. The rate of weight decay (rate x decay) stays as it is, and
Adam's epsilon falls with the gradients, as in N. Dey et al., "CompleteP" (arXiv 2505.01618), table
1. A router is a readout and experts are hidden (arXiv 2508.09752).

Muon's update has one size whatever the gradient is. It should move each output by as much as at the
base, for which its spectral norm is as sqrt(rows / columns) (G. Yang et al., arXiv 2310.17813). Its
own factor does that in part (muon_scale), and what is left to do is the power in `Exponents`. AdamW
updates the other parameters, by the table.

Depth, with --mup-base-layers: what attention and MLP add to the residual stream is divided by l
(CompleteP's alpha = 1), the matrices that write into it are drawn as at the base (1 / sqrt(2 base
layers)), rates stay, and Adam's epsilon in blocks is divided by l.

All widths inside of a block are taken to grow with hidden: of MLPs, experts and latents, and the
numbers of heads. Heads keep their size; if they grow, mup_base_head_size is that of the base, and
the scores q k are divided by d / sqrt(base) in place of sqrt(d).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from architecture.shape import ModelShape
from base.errors import UserError


class Exponents(NamedTuple):
    """The powers of m for a role.

    kind: the class of the role. std: of the initial deviation. adam: of the rate of Adam's kind.
    match_rms_adamw, original: of Muon's rate with these values of muon_scale. eps: of Adam's
    epsilon. divided: by which power of m the result is divided.
    """

    kind: str
    std: float
    adam: float
    match_rms_adamw: float
    original: float
    eps: float
    divided: float = 0.0


EXPONENTS = {
    "input": Exponents("input-like", 0.0, 0.0, 0.0, 0.0, -1.0),
    "hidden": Exponents("hidden", -0.5, -1.0, -0.5, 0.0, -1.0),
    "head": Exponents("output-like", 0.0, 0.0, 0.0, 0.0, -1.0, divided=1.0),
    "readout": Exponents("output-like", -1.0, -1.0, -1.0, -0.5, 0.0),
    "vector": Exponents("vector", 0.0, 0.0, 0.0, 0.0, -1.0),
}


@dataclass(frozen=True)
class Mup:
    """The factors of a model. width: m. depth: l. Without muP both are 1, and so is each factor."""

    width: float = 1.0
    depth: float = 1.0

    def std(self, role: str) -> float:
        """Return the factor of the standard deviation with which a parameter is drawn."""
        return self.width ** EXPONENTS[role].std

    def rate(self, role: str, rule: str) -> float:
        """Return the factor of the learning rate. rule: adam, or for Muon a value of muon_scale."""
        power: float = getattr(EXPONENTS[role], rule)
        return self.width**power

    def eps(self, role: str, in_block: bool) -> float:
        """Return the factor of Adam's epsilon; in_block: whether the parameter is in a block."""
        return self.width ** EXPONENTS[role].eps / (self.depth if in_block else 1.0)


NO_MUP = Mup()


def mup_of(model: ModelShape) -> Mup:
    """Return the factors of a model, which are 1 without --mup and --mup-base-layers."""
    width = model.hidden / model.mup if model.mup else 1.0
    depth = model.layers / model.mup_base_layers if model.mup_base_layers else 1.0
    return Mup(width, depth)


def role_of(decay: bool) -> str:
    """Return the role of a parameter that names none: a matrix is hidden. decay: if it decays."""
    return "hidden" if decay else "vector"


# The fields of a model that muP derives, and which weights may have in them instead.
SCALES = ("query_scalar", "residual_multiplier", "logit_divisor")


def without_mup(model: ModelShape, keeps_scales: bool) -> ModelShape:
    """Return the model without the options of muP.

    keeps_scales: whether it has muP's scales as fields of its own. If not, it is the same model
    once its weights have them (checkpointing/hf_scales.py). Scales that were given stay fields.
    """
    plain = dataclasses.replace(model, mup=0, mup_base_layers=0, mup_base_head_size=0)
    if keeps_scales:
        return plain
    by_mup, default = model.derived(), plain.derived()
    folded = {name: default[name] for name in SCALES if getattr(model, name) == by_mup[name]}
    return dataclasses.replace(plain, **folded)


def check_mup(model: ModelShape, optimizer: str, with_rates: Sequence[str]) -> None:
    """Raise UserError if muP does not have a part of the model, or the rates of the optimizer.

    with_rates: the optimizers whose rates it has.
    """
    if not model.mup and not model.mup_base_layers:
        return
    flag = f"--mup {model.mup}" if model.mup else f"--mup-base-layers {model.mup_base_layers}"
    if optimizer not in with_rates:
        *others, last = with_rates
        known = f"{', '.join(others)} and {last}"
        raise UserError(f"{flag} has rates for --optimizer {known}, not {optimizer}")
    if model.mup and model.embedding_scaled:
        raise UserError(
            f"{flag}: embedding_scaled multiplies the embedding by the root of hidden, which grows "
            f"with the width: give embedding_scaled=false and an embedding_multiplier, such as "
            f"{model.mup**0.5:.4g} for the root of {model.mup}"
        )
    if model.mup_base_head_size and model.mixer == "kda":
        raise UserError(
            f"mup_base_head_size({model.mup_base_head_size}): the decays and gates of mixer(kda) "
            "read a vector of a head's size, which stays the same with muP"
        )
