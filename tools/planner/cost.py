"""Computes the cost of GPUs: hours, money and energy.

    rates = rates_of(options, machine)
    rates.of(gpus=64, seconds=86400.0)     # {"gpu_hours": ..., "kwh": ..., "cost": ...}

The rates are the price of a GPU for an hour and its power. The energy is that of the GPUs at this
power; hosts, network and cooling are not counted.
"""

from argparse import Namespace
from dataclasses import dataclass

from costs.hardware import Machine

BILLION = 1e9  # a table shows the costs of a billion tokens
HEADS = {"kwh": "kWh/Gtok", "cost": "cost/Gtok"}  # the heads of a table's columns, by kind of cost


@dataclass(frozen=True)
class Rates:
    """The price of a GPU for an hour, and its power; None if it is not known."""

    price: float | None
    watts: float | None
    origin: str  # a text that says where `watts` comes from
    shown: bool  # whether a table has columns for energy and cost: if the user gave price or watts

    def of(self, gpus: int, seconds: float) -> dict[str, float | None]:
        """Return the GPU hours, the energy in kWh and the cost of `gpus` GPUs for some seconds.

        Energy is None without a known power, cost is None without a price.
        """
        hours = gpus * seconds / 3600
        return {
            "gpu_hours": hours,
            "kwh": hours * self.watts / 1000 if self.watts else None,
            "cost": hours * self.price if self.price else None,
        }

    def per_billion(self, gpus: int, tokens_per_second: float) -> dict[str, float | None]:
        """Return GPU hours, kWh and cost of a billion tokens, for the data of an answer.

        The names are those of `of`, each with `_per_billion_tokens` after it.
        """
        costs = self.of(gpus, BILLION / tokens_per_second)
        return {f"{name}_per_billion_tokens": value for name, value in costs.items()}

    def cells(self, gpus: int, tokens_per_second: float) -> dict[str, str]:
        """Return the printed energy and cost of a billion tokens, by the heads of table columns.

        It is empty if the user gave neither a price nor a power, so that the table has no such
        columns.
        """
        if not self.shown:
            return {}
        costs = self.of(gpus, BILLION / tokens_per_second)
        return {head: f"{costs[name]:,.1f}" for name, head in HEADS.items() if costs[name]}

    def sentence(self, gpus: int, seconds: float) -> str:
        """Return the GPU hours, the energy and the cost of `gpus` GPUs for some seconds as text."""
        costs = self.of(gpus, seconds)
        parts = [f"{costs['gpu_hours']:,.0f} GPU hours"]
        if energy := costs["kwh"]:
            power = f"{self.watts:g} W a GPU ({self.origin}), GPUs alone"
            parts.append(f"{energy / 1000:,.1f} MWh at {power}")
        if cost := costs["cost"]:
            parts.append(f"{cost:,.0f} at {self.price:g} a GPU hour")
        return "; ".join(parts)


def rates_of(options: Namespace, machine: Machine) -> Rates:
    """Return the rates of a question: --price-per-gpu-hour, and the power of a GPU.

    The power is --watts-per-gpu, or else the power in the machine's file.
    """
    price = options.price_per_gpu_hour
    watts = options.watts_per_gpu
    return Rates(
        price=price,
        watts=watts or machine.watts or None,
        origin="--watts-per-gpu" if watts else f"the limit in {machine.name}'s datasheet",
        shown=bool(price or watts),
    )
