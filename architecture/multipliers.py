"""Factors of a block's results and projections, as muP has them (arXiv 2203.03466, Falcon-H1).

multipliers_of("attention:0.5,mlp:2")       {"attention": 0.5, "mlp": 2.0}
text_of({"attention": 0.5, "gate": 1.0})    "attention:0.5"
"""

from collections.abc import Mapping
from functools import lru_cache

from base.errors import UserError

# What is multiplied: results of attention, mixer and MLP; an MLP's gate before its activation; and
# of the projections of Mamba-2 z, x, b, c and dt.
OF_MIXER = ("z", "x", "b", "c", "dt")
PLACES = ("attention", "mixer", "mlp", "gate", *OF_MIXER)


@lru_cache(maxsize=64)
def multipliers_of(text: str) -> dict[str, float]:
    """Return the factor of each place that a text names; UserError if it is malformed."""
    if text == "none":
        return {}
    found: dict[str, float] = {}
    for part in text.split(","):
        place, _, number = part.partition(":")
        try:
            factor = float(number)
        except ValueError:
            factor = 0.0
        if place not in PLACES or place in found or not 0 < factor < float("inf"):
            raise UserError(
                f"multipliers are none or PLACE:FACTOR with commas, each place once, factors above "
                f"0, places {', '.join(PLACES)}; not {part!a:.40} in {text!a:.80}"
            )
        found[place] = factor
    return found


def text_of(factors: Mapping[str, float]) -> str:
    """Return the text of some factors in the order of PLACES, without those that are 1."""
    kept = [f"{place}:{factors[place]!r}" for place in PLACES if factors.get(place, 1.0) != 1.0]
    return ",".join(kept) or "none"
