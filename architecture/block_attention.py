"""What attention does in each block of a model whose blocks differ, and the patterns that say so.

    flags_of("5:1", 8)                  (True, True, True, True, True, False, True, True)
    pattern_of((True, False, True))     "1:1"
    model.attention_of(3)               a BlockAttention (schema.py)

A pattern says which blocks have a property, such as a window: all, none, N:M (N blocks have it,
then M do not, and so on), or a list such as 1,1,0 with a 1 or a 0 for each block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from base.errors import UserError

SPAN = 128  # the most queries that attend at once where flex_attention does not run


@dataclass(frozen=True)
class BlockAttention:
    """The attention of one block.

    window: a token sees so many tokens, itself and those before it; 0: all before it. rotary:
    whether queries and keys are rotated (NoPE: not). rotary_base, rotary_scaling: of the rotary
    frequencies, as the options of the same names. softcap: scores x become
    softcap * tanh(x / softcap); 0: they stay. sinks: whether the softmax has a learned logit of
    each head beside the scores, whose probability is dropped.
    """

    window: int
    rotary: bool
    rotary_base: float
    rotary_scaling: str
    softcap: float
    sinks: bool

    @property
    def is_plain(self) -> bool:
        """Whether torch's kernels for causal attention compute it as it is."""
        return not (self.window or self.softcap or self.sinks)


@lru_cache(maxsize=64)
def flags_of(pattern: str, layers: int) -> tuple[bool, ...]:
    """Return for each block whether it has the property; UserError if the pattern is malformed."""
    if pattern in ("all", "none"):
        return (pattern == "all",) * layers
    having, colon, lacking = pattern.partition(":")
    if colon and having.isdecimal() and lacking.isdecimal() and int(having) and int(lacking):
        period = int(having) + int(lacking)
        return tuple(block % period < int(having) for block in range(layers))
    flags = pattern.split(",")
    if colon or not set(flags) <= {"0", "1"}:
        raise UserError(
            f"a pattern of blocks is all, none, N:M such as 5:1, or a list such as 1,1,0, not "
            f"{pattern!r}"
        )
    if len(flags) != layers:
        raise UserError(f"the pattern {pattern} has {len(flags)} blocks, but layers is {layers}")
    return tuple(flag == "1" for flag in flags)


def pattern_of(flags: Sequence[bool]) -> str:
    """Return the shortest pattern of blocks that has or has not the property, as `flags` says."""
    if all(flags):
        return "all"
    if not any(flags):
        return "none"
    having = list(flags).index(False)
    rest = list(flags[having:])
    lacking = rest.index(True) if True in rest else len(rest)
    pattern = f"{having}:{lacking}"
    if having and flags_of(pattern, len(flags)) == tuple(flags):
        return pattern
    return ",".join("1" if flag else "0" for flag in flags)
