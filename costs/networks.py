"""Networks between nodes that people have, by name: networks.toml.

network = networks.load("ndr-8x400")     # what a ring all-reduce reached on it, and where
networks.names()                         # all of them, the slowest first
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from config.command_line import read_toml

FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Network:
    """A network: bytes/s out of a node that long rings reach (busbw) and by its datasheet (line).

    seen: where the busbw was seen, or what it was assumed from.
    """

    name: str
    says: str
    line: float
    busbw: float
    seen: str

    @property
    def note(self) -> str:
        """What is said to a user who names the network."""
        of = f"{self.busbw / 1e9:g} of {self.line / 1e9:g} GB/s a node"
        return f"--network {self.name}: {self.says}, {of}; {self.seen}"


@cache  # the file is read once
def _tables() -> Mapping[str, Any]:
    """Return the tables of the file."""
    return MappingProxyType(read_toml(FILE, FILE.name))


def names() -> tuple[str, ...]:
    """Return the names of all networks, the slowest first."""
    return tuple(sorted(_tables(), key=lambda name: float(_tables()[name]["busbw"])))


def load(name: str) -> Network:
    """Return the network of a name in `names`."""
    return Network(name, **_tables()[name])
