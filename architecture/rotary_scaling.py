"""The values of the option rotary_scaling: for each type of RoPE scaling its parameters."""

import contextlib
import math

from base.errors import UserError

# For each type of rotary_scaling, the names that its parameters have in config.json, in order.
# Those of longrope are two numbers and two lists.
_LENGTH = "original_max_position_embeddings"
ROTARY_SCALING = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": ("factor", "beta_fast", "beta_slow", _LENGTH, "attention_factor", "truncate"),
    "longrope": (_LENGTH, "attention_factor", "short_factor", "long_factor"),
}


def rotary_scaling(text: str) -> tuple[str, list[float]]:
    """Return the type and the parameters of rotary_scaling; UserError if the text is malformed.

    The parameters of longrope are POSITIONS, ATTENTION, then as many short factors as long factors.
    """
    rope_type, *parts = text.split(":")
    with contextlib.suppress(ValueError):
        parameters = [float(value) for part in parts for value in part.split(",")]
        is_known = rope_type in ROTARY_SCALING and len(parts) == len(ROTARY_SCALING[rope_type])
        if rope_type == "longrope" and is_known:
            lengths = [len(part.split(",")) for part in parts]
            is_known = lengths[:2] == [1, 1] and lengths[2] == lengths[3]
        elif is_known:
            is_known = len(parameters) == len(parts)
        above_zero = parameters
        if rope_type == "yarn" and is_known:
            is_known = parameters[-1] in (0, 1)
            above_zero = parameters[:-1]
        if is_known and all(0 < value < math.inf for value in above_zero):
            if rope_type == "llama3" and parameters[1] >= parameters[2]:
                raise UserError(f"rotary_scaling {text}: LOW must be below HIGH")
            return rope_type, parameters
    raise UserError(
        "rotary_scaling is none, linear:FACTOR, llama3:FACTOR:LOW:HIGH:POSITIONS, "
        "yarn:FACTOR:FAST:SLOW:POSITIONS:ATTENTION:TRUNCATE (0 or 1) or longrope:POSITIONS:"
        f"ATTENTION:SHORT,...:LONG,... with numbers above 0 like llama3:8:1:4:8192, not {text!r}"
    )
