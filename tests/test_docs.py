"""The documentation: links lead somewhere, programs that it names exist, limits agree."""

import re

import pytest
import test_house
from ranks import ROOT

from scripts import line_counts

FOLDERS = (".", "docs", "hardware", "benchmarks/data", "benchmarks/results")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
MOST_README_LINES = 220


def headings(text: str) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in found}


def name(page) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in headings(target.read_text())):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_programs_exist(page):
    """`python a/b.py`, `bash a/b.sh` and `python -m a.b`; the log names programs of its time."""
    text = page.read_text()
    files = re.findall(r"(?:python|bash|sbatch) ([\w/.]+\.(?:py|sh|slurm))", text)
    files += [
        m.replace(".", "/") + ".py" for m in re.findall(r"python -m ([a-z_]+\.[a-z_]+)", text)
    ]
    gone = ("cluster.py",)  # named in the changelog as what it was
    assert [file for file in files if not (ROOT / file).exists() and file not in gone] == []


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES


def test_line_counts_are_those_of_the_house():
    found = line_counts.count()
    assert found["engine"] == sum(test_house.lines_of(ROOT / f"{n}.py") for n in test_house.ENGINE)
    assert line_counts.total(found) <= test_house.MOST_LINES
    assert line_counts.ENGINE_LIMIT == test_house.MOST_ENGINE_LINES
    assert line_counts.TOTAL_LIMIT == test_house.MOST_LINES
    assert set(line_counts.OUTSIDE) == set(test_house.OUTSIDE)
