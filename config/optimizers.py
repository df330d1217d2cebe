"""What is known of an update rule without its code: names and bytes of its state, what it divides.

OPTIMIZERS is the one list of names: the choices of --optimizer, the checks of a layout, the memory
of a plan and the kinds of tensors in a checkpoint follow it. optim/update_rules.py has the rules.
"""

from typing import NamedTuple

MOMENTS = ("exp_avg", "exp_avg_sq")


class OptimizerTraits(NamedTuple):
    """The traits of an update rule.

    state: the names of its state tensors in a checkpoint, each with one element for every weight.
    state_bytes: bytes of the state of a parameter that the rule updates, in fp32. elementwise:
    whether it updates each element alone, so that any rank can update any range of a parameter.
    resumes: the name of the whole state in a checkpoint; "" is that of the rule. Rules with one
    name resume from each other's state, and a resume from another name is refused. mup: whether its
    rates keep with the width as AdamW's or Muon's do, so that muP's factors are right for it; a
    rule without them is refused with --mup.
    """

    state: tuple[str, ...] = MOMENTS
    state_bytes: float = 8.0
    elementwise: bool = False
    resumes: str = ""
    mup: bool = False


OPTIMIZERS = {
    "adamw": OptimizerTraits(elementwise=True, mup=True),
    "apex": OptimizerTraits(elementwise=True, resumes="adamw", mup=True),
    # Two bytes, and two fp32 scales for 256 weights. A checkpoint has its moments in fp32.
    "adamw8bit": OptimizerTraits(state_bytes=2.0 + 8 / 256, resumes="adamw", mup=True),
    # A factor for each row and each column of a matrix, which is nothing beside the matrix; a
    # checkpoint repeats it for every weight. Of a vector row_var is the variance, col_var is zeros.
    "adafactor": OptimizerTraits(("row_var", "col_var"), state_bytes=0.0),
    # exp_avg is the momentum of a matrix, whose exp_avg_sq is zeros; AdamW has both of the others.
    "muon": OptimizerTraits(state_bytes=4.0, mup=True),
    "sgd": OptimizerTraits(("momentum_buffer",), state_bytes=4.0, elementwise=True),
}
WITH_MUP = tuple(sorted(name for name, traits in OPTIMIZERS.items() if traits.mup))


def interchangeable(optimizer: str) -> str:
    """Return the name of an optimizer's whole state in a checkpoint; see OptimizerTraits.resumes.

    optimizer: the value of --optimizer.
    """
    return OPTIMIZERS[optimizer].resumes or optimizer
