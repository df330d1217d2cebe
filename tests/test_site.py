"""The pages of the site: if this failed, a link or an option would be missing in them."""

import json
import re
import sys
from dataclasses import fields

import pytest
from ranks import ROOT, start

from base.options import as_typed
from config.schema import GROUPS
from scripts import help_tables, site_pages


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    site_pages.write_pages(folder)
    return folder


def test_the_pages_have_every_option_and_every_linked_file(pages):
    text = (pages / "reference" / "train.md").read_text()
    flags = [as_typed(field) for group in GROUPS.values() for field in fields(group)]
    assert [flag for flag in flags if flag not in text] == []
    listed = re.findall(r": (\S+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), re.MULTILINE)
    assert [name for name in listed if not (pages / name).exists()] == []
    written = {path.stem for path in (pages / "reference").iterdir()}
    assert written == {name.split("/")[1][:-3] for name in listed if name.startswith("reference")}
    assert (pages / "docs/pictures/planner.svg").exists()


def test_every_link_leads_to_a_file_of_the_site(pages):
    """Also to the anchors of options; a folder is no page. mkdocs --strict asks the same."""
    dead = []
    for page in pages.rglob("*.md"):
        for link in site_pages.LINK.findall(page.read_text()):
            if "://" not in link and not (page.parent / link).is_file():
                dead.append((page.name, link))
    assert dead == []
    assert '<a id="tp"></a>`--tp`' in (pages / "reference" / "train.md").read_text()


def test_the_options_of_every_program_are_rows_with_anchors_of_their_own(pages):
    """Also of its commands, and those that only a docstring lists; examples are not options."""
    expected = {
        "plan": ['<a id="layouts-rejected"></a>`--rejected` |', "[layouts](#planpy-layouts)"],
        "rehearse": ['<a id="routing"></a>`--routing` | even\\|one-rank |', "train.md#layout"],
        "runs": ['<a id="diff-run_b"></a>`RUN_B`', '<a id="diff-spikes"></a>`--spikes`'],
        "supervise": ['<a id="spare-nodes"></a>`--spare-nodes` |'],
        "corpus": ["\n    python scripts/corpus.py verify data/books data/news\n"],
    }
    for path in (pages / "reference").iterdir():
        text = path.read_text()
        assert [row for row in expected.get(path.stem, []) if row not in text] == [], path.stem
        anchors = re.findall(r'<a id="([^"]+)"', text)
        assert len(anchors) == len(set(anchors)) > 0, path.stem
        assert "```" not in text, "options are in no box"
        assert not re.search(r"<a id=.*`python ", text), "an example is no option"


def test_help_on_the_next_line_belongs_to_its_option():
    text = "usage: p [-h]\n\nA *b*.\n\noptions:\n  --long-name N|M\n                more <x>\n"
    found = help_tables.read(text + "  -q, --quiet   less\n\n    p --quiet\n")
    assert found.entries == [["--long-name N|M", "more <x>"], ["-q, --quiet", "less"]]
    assert help_tables.page("p", found).split("\n\n") == [
        "# p",
        "Usage: `p [-h]`",
        r"A \*b\*.",
        "| option | values | what it does |\n| --- | --- | --- |\n"
        '| <a id="long-name"></a>`--long-name` | N\\|M | more &lt;x> |\n'
        '| <a id="quiet"></a>`-q, --quiet` |  | less |',
        "    p --quiet\n",
    ]


def test_pictures_have_captions_that_are_visible(pages):
    for page in pages.rglob("*.md"):
        text = page.read_text()
        for found in re.finditer(r"^!\[.+?\]\([^)]+\)\n\n(.)", text, re.MULTILINE):
            assert found.group(1) == "*", (page.name, found.group())


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="needs requirements-docs.txt")
    pytest.importorskip("material", reason="needs requirements-docs.txt")
    site_pages.write_pages(site_pages.PAGES)
    words = ["-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", "-d", str(tmp_path)]
    done = start([sys.executable, *words])
    assert done.status == 0, done.err[-3000:]
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in html(tmp_path)}
    assert {"index.html", "docs/check.html", "reference/train.html"} - set(pages) == set()
    missing = []
    for name, text in pages.items():
        for link in re.findall(r'<(?:img|script|link)[^>]* (?:src|href)="([^"]+)"', text):
            assert not link.startswith(("http", "//")), (name, link)
            file = (tmp_path / name).parent / link.partition("?")[0]
            if not file.exists():
                missing.append((name, link))
    assert missing == [], "pictures, styles and scripts are files of the site"
    index = json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    found = {entry["location"].partition("#")[0] for entry in index}
    assert {"docs/check.html", "recipes/index.html"} - found == set(), "search knows the pages"


def html(folder):
    return [path for path in folder.rglob("*.html") if path.name != "404.html"]


def test_each_page_begins_with_a_task(pages):
    """A command, a question, or what you have and want; results and the README are no pages."""
    without = []
    for page in sorted((pages / "docs").glob("*.md")):
        title, begin = page.read_text().split("\n\n")[:2]
        if not (begin.startswith("    ") or "?" in title + begin or re.search("[Yy]ou", begin)):
            without.append((page.name, begin[:80]))
    assert without == []


def test_every_package_of_the_site_has_an_exact_version():
    names = (ROOT / "requirements-docs.txt").read_text().split()
    exact = (ROOT / "constraints.txt").read_text()
    missing = [name for name in names if f"\n{name.partition('>=')[0]}==" not in exact]
    assert missing == []
