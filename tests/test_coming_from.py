"""The options of other programs beside ours: if this failed, a newcomer's first command would."""

import re

from ranks import ROOT

from config.schema import all_options
from config.spelling import NAMES

TEXT = (ROOT / "docs" / "coming_from.md").read_text()
FLAG = re.compile(r"`--([a-z0-9_-]+)")


def rows() -> list[list[str]]:
    """The cells of the table of options, without its two head lines."""
    (table,) = re.findall(r"^\| Trine \| Megatron-LM .*\n\|[ |-]+\n((?:\|.*\n)+)", TEXT, re.M)
    return [
        [cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()
    ]


def test_each_option_of_ours_exists():
    ours = {name.replace("_", "-") for name in all_options()}
    found = [name for row in rows() for name in FLAG.findall(row[0])]
    assert len(found) >= 20
    assert set(found) <= ours


def test_each_option_of_megatron_is_understood():
    ours = {name.replace("_", "-") for name in all_options()}
    found = [name for row in rows() for name in FLAG.findall(row[1])]
    assert len(found) >= 18
    tables = ("same", "keys", "words", "iterations", "instead")
    assert set(found) <= ours.union(*(NAMES[name] for name in tables))
