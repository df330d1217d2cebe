"""The cost of GPUs: hours, money and energy.

    rates = rates_of(options, machine)
    rates.of(gpus=64, seconds=86400.0)     # {"gpu_hours": ..., "kwh": ..., "cost": ...}

The energy is the GPUs' alone, at a stated power; hosts, network and cooling are not counted.
"""

from argparse import Namespace
from dataclasses import dataclass

from planner.hardware import Machine

BILLION = 1e9  # of tokens
HEADS = {"kwh": "kWh/Gtok", "cost": "cost/Gtok"}  # of the columns of a table


@dataclass(frozen=True)
class Rates:
    """The price of a GPU for an hour, and its power; None where nothing states it."""

    price: float | None
    watts: float | None
    origin: str  # of the power
    shown: bool  # whether a table has columns of them

    def of(self, gpus: int, seconds: float) -> dict[str, float | None]:
        """GPU hours, kWh and cost of some GPUs for some seconds."""
        hours = gpus * seconds / 3600
        return {
            "gpu_hours": hours,
            "kwh": hours * self.watts / 1000 if self.watts else None,
            "cost": hours * self.price if self.price else None,
        }

    def per_billion(self, gpus: int, tokens_per_second: float) -> dict[str, float | None]:
        """The same of a billion tokens; each name ends in `_per_billion_tokens`."""
        found = self.of(gpus, BILLION / tokens_per_second)
        return {f"{name}_per_billion_tokens": value for name, value in found.items()}

    def cells(self, gpus: int, tokens_per_second: float) -> dict[str, str]:
        """Energy and cost of a billion tokens by the heads of a table's columns, if it has them."""
        if not self.shown:
            return {}
        found = self.of(gpus, BILLION / tokens_per_second)
        return {head: f"{found[name]:,.1f}" for name, head in HEADS.items() if found[name]}

    def sentence(self, gpus: int, seconds: float) -> str:
        """The same as `of`, for people."""
        found = self.of(gpus, seconds)
        parts = [f"{found['gpu_hours']:,.0f} GPU hours"]
        if energy := found["kwh"]:
            power = f"{self.watts:g} W a GPU ({self.origin}), GPUs alone"
            parts.append(f"{energy / 1000:,.1f} MWh at {power}")
        if cost := found["cost"]:
            parts.append(f"{cost:,.0f} at {self.price:g} a GPU hour")
        return "; ".join(parts)


def rates_of(options: Namespace, machine: Machine) -> Rates:
    """--price-per-gpu-hour, and --watts-per-gpu or the power that the machine's file states."""
    price, watts = options.price_per_gpu_hour, options.watts_per_gpu
    return Rates(
        price=price,
        watts=watts or machine.watts or None,
        origin="--watts-per-gpu" if watts else f"the limit in {machine.name}'s datasheet",
        shown=bool(price or watts),
    )
