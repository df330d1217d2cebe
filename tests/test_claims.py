"""docs/claims.toml: if this failed, README would say of others what nobody read."""

import re
import tomllib

import pytest
from ranks import ROOT

from tools.planner import programs, releases
from tools.planner.programs import PROGRAMS

CLAIMS = tomllib.loads((ROOT / "docs" / "claims.toml").read_text())
OTHERS = ("megatron", "torchtitan", "nanotron")  # README's columns after Trine's


def comparison() -> dict[str, list[str]]:
    """README's table: for each row its cells for the other programs."""
    lines = (ROOT / "README.md").read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("| | Trine |"))
    assert [cell.strip() for cell in lines[begin].split("|")[3:-1]] == [
        CLAIMS["programs"][name]["name"] for name in OTHERS
    ]
    rows = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            return rows
        row, _, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        rows[row] = cells
    raise AssertionError("the table has no end")


def test_readmes_table_says_what_was_read():
    table = comparison()
    claims = {each["row"]: [each[name]["says"] for name in OTHERS] for each in CLAIMS["rows"]}
    assert table == claims


@pytest.mark.parametrize("row", CLAIMS["rows"], ids=lambda row: row["row"])
def test_each_claim_names_where_it_was_seen(row):
    for name in OTHERS:
        assert set(row[name]) == {"says", "seen"}
        assert len(row[name]["seen"]) > 3


@pytest.mark.parametrize("name", OTHERS)
def test_readme_names_the_commits_that_were_read(name):
    program = CLAIMS["programs"][name]
    named = f"{program['name']} {program['commit']} of {program['read']}"
    text = " ".join((ROOT / "README.md").read_text().split())
    assert named in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_answers_and_docs_name_the_newest_release(name):
    claim, program = CLAIMS["programs"][name], programs.of(name)
    assert program.version == claim["newest"]
    assert str(claim["newest_read"]) in program.release
    docs = (ROOT / "docs" / "planning.md").read_text()
    heading = re.search(r"^\| \| Megatron-LM, .*$", docs, flags=re.M)
    assert heading
    said = f"`--for {name}` is {claim['name']} {program.version} "  # a program without a column
    assert program.version in heading[0] or said in docs
    for version in releases.versions(name):
        assert f"`{name}@{version}`" in docs or version == program.version
