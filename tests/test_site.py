"""The pages of the site: if this failed, a link or an option would be missing in them."""

import re
import sys

import pytest
from ranks import ROOT, start

from config.schema import GROUPS
from scripts import site_pages


def test_the_pages_have_every_option_and_every_linked_file(tmp_path):
    site_pages.write_pages(tmp_path)
    text = (tmp_path / "reference" / "train.md").read_text()
    options = [name for group in GROUPS.values() for name in group.__dataclass_fields__]
    flags = [f"--{name.replace('_', '-')}" for name in options]
    assert [flag for flag in flags if flag not in text] == []
    listed = re.findall(r": (\S+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), re.MULTILINE)
    assert [name for name in listed if not (tmp_path / name).exists()] == []
    written = {path.stem for path in (tmp_path / "reference").iterdir()}
    assert written == {name.split("/")[1][:-3] for name in listed if name.startswith("reference")}
    assert (tmp_path / "docs/pictures/planner.svg").exists()


def test_every_link_leads_to_a_file_of_the_site(tmp_path):
    """Also to the anchors of options; a folder is no page. mkdocs --strict asks the same."""
    site_pages.write_pages(tmp_path)
    dead = []
    for page in tmp_path.rglob("*.md"):
        for link in site_pages.LINK.findall(page.read_text()):
            if "://" not in link and not (page.parent / link).is_file():
                dead.append((page.name, link))
    assert dead == []
    assert '<a id="tp"></a>`--tp`' in (tmp_path / "reference" / "train.md").read_text()


def test_pictures_have_captions_that_are_visible(tmp_path):
    site_pages.write_pages(tmp_path)
    for page in tmp_path.rglob("*.md"):
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


def test_every_package_of_the_site_has_an_exact_version():
    names = (ROOT / "requirements-docs.txt").read_text().split()
    exact = (ROOT / "constraints.txt").read_text()
    missing = [name for name in names if f"\n{name.partition('>=')[0]}==" not in exact]
    assert missing == []
