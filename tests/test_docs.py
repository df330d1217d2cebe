"""The documentation: if this failed, it would name files, programs or tests that do not exist."""

import re
import tomllib

import pytest
from ranks import ROOT

from architecture import families
from benchmarks.planner import pictures

FOLDERS = (".", "docs", "hardware", "benchmarks/data", "benchmarks/results")
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))


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


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=name)
def test_programs_exist(page):
    """`python a/b.py`, `bash a/b.sh` and `python -m a.b`; the log names programs of its time."""
    text = page.read_text()
    files = re.findall(r"(?:python|bash|sbatch) ([\w/.]+\.(?:py|sh|slurm))", text)
    files += [
        m.replace(".", "/") + ".py" for m in re.findall(r"python -m ([a-z_]+\.[a-z_]+)", text)
    ]
    gone = ("cluster.py",)  # named in the changelog as what it was
    assert [file for file in files if not (ROOT / file).exists() and file not in gone] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tests_that_are_named_exist(page):
    """`tests/test_a.py::test_b`; docs/security.md rests on them."""
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", page.read_text())
    assert named or page.name != "security.md"
    gone = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists() or f"def {test}(" not in (ROOT / path).read_text()
    ]
    assert gone == []


def test_files_that_the_whole_run_names_exist():
    """`.ci/run` names two files of tests; pytest would end at a name that is gone."""
    named = re.findall(r"\b(?:scripts|tests)/\w+\.(?:py|sh)\b", (ROOT / ".ci/run").read_text())
    assert len(named) >= 3
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_picture_of_schedules_is_what_the_program_draws():
    drawn = pictures.schedules_drawn()
    assert (ROOT / "docs/pictures/schedules.svg").read_text() == drawn
    named = re.findall(r">([\w-]+): (\d+)% of the time idle", drawn)
    assert named == [("1f1b", "27"), ("zb-v", "6")], "as docs/figures.md says"


@pytest.mark.parametrize("page", [ROOT / "docs/code.md", ROOT / "CONTRIBUTING.md"], ids=name)
def test_names_are_in_their_files(page):
    """`[a.py](../a.py) | lines | `name`` in docs/code.md, `a.py` (`name`) or `a.py`: the name in
    `NAME` in CONTRIBUTING: a list to which a name is added.
    """
    text = page.read_text()
    named = re.findall(r"\]\((?:\.\./)?([\w/]+\.py)\) \| [\d,]+ \| `([\w.]+)`", text)
    for path, lists in re.findall(r"`([\w/]+\.py)`: the name in ((?:[^.;`]|`[^`]*`)*)", text):
        named += [(path, name) for name in re.findall(r"`([A-Z_]+)`", lists)]
    named += re.findall(r"`([\w/]+\.py)` \(`(\w+)`", text)
    named += re.findall(r"(tests/\w+\.py) \(`(\w+)`", text)
    assert len(named) >= 3
    missing = []
    for path, wanted in named:
        last = wanted.rpartition(".")[2]
        if not re.search(rf"\b(def|class) {last}\b|^{last}\b", (ROOT / path).read_text(), re.M):
            missing.append((path, wanted))
    assert missing == []


def test_the_table_of_families_has_the_named_shapes():
    """Every family has a row in docs/models.md, with its shapes in presets.toml."""
    presets = tomllib.loads((ROOT / "config" / "presets.toml").read_text())["family"]
    expected = {family: set() for family in families.FAMILIES}
    for family in presets:
        if "name" in family:
            expected[family["name"]] |= set(family["models"])
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\|", (ROOT / "docs" / "models.md").read_text(), re.M)
    found = {family: set(re.findall(r"`([^`]+)`", cell)) for family, cell in rows}
    for family in ("gpt2", "bloom"):  # shapes that are made for trials have no family's name
        expected.pop(family)
    assert {family: found.get(family) for family in expected} == expected
