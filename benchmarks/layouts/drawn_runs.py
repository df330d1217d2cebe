"""Draws runs of train.py and layouts of 1 to 4 ranks, from the tables of drawn_runs.toml.

    case = drawn("1/17", folder)     # the same for the same name

The folder has what `write_corpora` writes.
"""

import math
import random
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config import command_line, validation
from config.errors import UserError
from corpora.token_files import IndexedDatasetWriter

# The options of a command line by name: a text, or True or False for a switch.
Options = dict[str, Any]
# A table of drawn_runs.toml: for each option, how often it is given, and its values.
Table = dict[str, list[Any]]

VOCAB, EOD = 61, 3  # the corpora have this vocabulary and this token at the end of documents
TABLES: dict[str, Table] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


class Chance(random.Random):
    """Draws options."""

    def some(self, table: Table) -> Options:
        """Some options of a table, and of those that they allow."""
        found = {n: self.choice(v) for n, (often, *v) in table.items() if self.random() < often}
        for name, value in list(found.items()):
            found |= self.some(TABLES.get(f"{name} {value}", {}))
        return found

    def accepted(self, table: Table, ranks: int, others: Options) -> Options:
        """Some options of a table that go with the others, now and then some that do not; {} if
        none were found.
        """
        for _ in range(100):
            found = self.some(table)
            try:
                config = command_line.parse(to_words(others | found))
                for name in ("partition", "recompute-blocks"):
                    if found.get(name) == "list":
                        found[name] = self.numbers(name, config.layout.stages, others["layers"])
                validation.check(command_line.parse(to_words(others | found)), ranks)
                return found
            except UserError:
                if self.random() < 0.001:
                    return found
        return {}

    def layout(self, ranks: int, common: Options) -> Options:
        """A layout of so many ranks: how many are along each axis is as likely as another."""
        while True:
            axes = {axis: self.choice([1, 2, 3, 4]) for axis in ("tp", "pp", "cp")}
            if ranks % math.prod(axes.values()) == 0:
                found = self.accepted(TABLES["layout"], ranks, common | axes)
                if found:
                    return axes | found

    def numbers(self, option: str, stages: int, layers: int) -> str:
        """A number for each stage: blocks to recompute, or all that it has, which may be none."""
        if option != "partition":
            return ",".join(str(self.randint(0, 2)) for _ in range(stages))
        cuts = sorted(self.randint(0, layers) for _ in range(stages - 1))
        return ",".join(str(b - a) for a, b in zip([0, *cuts], [*cuts, layers]))


@dataclass
class Case:
    """A run and the layouts that train it, each with its ranks; all but the last one stop, save
    and leave the rest to the next, the first after `stop` samples.
    """

    common: Options
    layouts: list[tuple[int, Options]]
    stop: int = 0


def drawn(name: str, folder: Path) -> Case:
    """The case of that name; its corpora are in the folder."""
    chance = Chance(name)
    common: Options = {}
    while not common:
        common = chance.accepted(TABLES["common"], 1, {})
    if not common.keys().isdisjoint({"data", "eval-data"}):
        common["cache"] = "none"
    common = {n: v.format(*[folder] * 2) if isinstance(v, str) else v for n, v in common.items()}
    counts = [chance.choice([1, 2, 2, 3, 4, 4, 4]) for _ in range(chance.choice([1, 2, 2, 2]))]
    layouts = [(count, chance.layout(count, common)) for count in counts]
    return Case(common, layouts, chance.randint(1, 40) if len(layouts) > 1 else 0)


def to_words(options: Options) -> list[str]:
    """The words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{name}")
        else:
            words += [f"--{name}", *str(value).split()]
    return words


def write_corpora(folder: Path) -> None:
    """Corpora a and b of random documents, and chats, all with which tokens are answers."""
    random = np.random.default_rng(1)
    for name, count, longest in (("a", 120, 40), ("b", 60, 20), ("chats", 120, 30)):
        answers = IndexedDatasetWriter(f"{folder}/{name}.targets", 2)
        with IndexedDatasetWriter(f"{folder}/{name}", VOCAB) as tokens, answers as targets:
            for size in random.integers(1, longest, size=count):
                tokens.add_document([*random.integers(7, VOCAB, size=size), EOD])
                targets.add_document(random.integers(2, size=size + 1))
