"""The pages of the site: if this failed, a link or an option would be missing in them."""

import re

from ranks import ROOT

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


def test_every_package_of_the_site_has_an_exact_version():
    names = (ROOT / "requirements-docs.txt").read_text().split()
    exact = (ROOT / "constraints.txt").read_text()
    missing = [name for name in names if f"\n{name.partition('>=')[0]}==" not in exact]
    assert missing == []
