"""The releases of other programs that commands are written for: releases.toml.

releases.newest("torchtitan")                    # "0.3.0", for --for torchtitan
releases.options("torchtitan", "0.2.2")["tp"]    # the option of a quantity, or ""
releases.says("torchtitan", "0.2.2")             # what an answer says of the release
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
class Release:
    """A release: the day it was made, and the names of its config functions, if it has such."""

    version: str
    date: str
    configs: tuple[str, ...]


@cache  # the file is read once
def _programs() -> Mapping[str, Any]:
    """Return the tables of all programs."""
    return MappingProxyType(read_toml(FILE, FILE.name))


def versions(program: str) -> tuple[str, ...]:
    """Return the releases of a program, the newest first."""
    return tuple(_programs()[program]["releases"])


def newest(program: str) -> str:
    """Return the newest release of a program that was known when the file was written."""
    return versions(program)[0]


def package(program: str) -> str:
    """Return the name of a program on the package index."""
    return str(_programs()[program]["package"])


def release(program: str, version: str) -> Release:
    """Return a release; its config functions are those of the release that it is like."""
    table = _programs()[program]["releases"][version]
    configs = table.get("configs")
    if configs is None and "like" in table:
        configs = release(program, table["like"]).configs
    return Release(version, str(table["date"]), tuple(configs or ()))


@cache
def options(program: str, version: str) -> Mapping[str, str]:
    """Return by quantity the option of a release, "" where it has none."""
    table = _programs()[program]["releases"][version]
    base = options(program, table["like"]) if "like" in table else {}
    return MappingProxyType({**base, **table.get("options", {})})


def says(program: str, version: str) -> str:
    """Return the words of an answer about a release: its date, and which others there are."""
    known = versions(program)
    text = f"for {program} {version} of {release(program, version).date}"
    seen = _programs()[program]["seen"]
    if version == known[0]:
        others = ", ".join(f"{program}@{other}" for other in known[1:])
        other = f"; --for {others} for another" if others else ""
        return f"{text}, the newest on {seen}{other}"
    return f"{text}; the newest on {seen} was {known[0]}: --for {program}"
