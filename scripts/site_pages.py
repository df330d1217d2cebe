"""Writes the pages of the documentation's site: `python scripts/site_pages.py`.

The pages are every Markdown file of the repository and the files that they link to, at the same
relative paths, and reference/PROGRAM.md with the options of each program in tables, with an anchor
for each: those of train.py from their definition, of the others from what `--help` prints. They are
not committed, so they cannot differ from the options. docs/mkdocs.yml makes a site of them. A link
to a folder, which is no page of the site, is left as text; a picture gets its alternative text as a
caption.
"""

import dataclasses
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from base import errors

if __name__ == "__main__":
    errors.begin_program()

from base.options import as_typed
from config.schema import GROUPS
from scripts import help_tables

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
SOURCES = ("*.md", "docs/*.md", "hardware/*.md", "benchmarks/data/*.md", "benchmarks/results/*.md")
SOURCES += ("recipes/*.md", "recipes/*/*.md")
PROGRAMS = ("train", "plan", "tune", "rehearse", "supervise", "runs", "checkpoint", "sample")
SCRIPTS = ("prepare_data", "prepare_chats", "corpus")
LINK = re.compile(r"\]\(([^)\s#]+)")
TEXT_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)[^)]*\)")
PICTURE = re.compile(r"^(!\[([^\]]+)\]\([^)]+\))$(?!\n\n\*)", re.MULTILINE)  # without a caption


def linked_files(page: Path) -> set[Path]:
    """Return the files of the repository to which a page links; folders are left out."""
    targets = [(page.parent / link).resolve() for link in LINK.findall(page.read_text())]
    return {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}


def page_text(page: Path) -> str:
    """Return the text of a page for the site: no links to folders, and captions under pictures."""

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        return text if (page.parent / target).is_dir() else found.group()

    return PICTURE.sub(r"\1\n\n*\2*", TEXT_LINK.sub(link, page.read_text()))


def option_tables() -> str:
    """Return the options of train.py as Markdown: a table for each group, an anchor for each."""
    parts = [
        "# train.py",
        "Options are flags, and keys of the TOML file that `--config` names. A name without dashes "
        "is a key alone; `--set KEY=VALUE` gives it on the command line.",
    ]
    for name, group in GROUPS.items():
        rows = ["| option | values | what it does | default |", "| --- | --- | --- | --- |"]
        for field in dataclasses.fields(group):
            flag = field.name.replace("_", "-")
            facts = field.metadata
            kind = facts["item"] if facts["nargs"] else field.type
            values = ", ".join(map(str, facts["choices"])) or kind.__name__
            default = "" if field.default is None else f"`{field.default}`"
            text = help_tables.escaped(facts["help"])
            rows.append(
                f'| <a id="{flag}"></a>`{as_typed(field)}` | {values} | {text} | {default} |'
            )
        parts += [f"## {name}", (group.__doc__ or "").splitlines()[0], "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def write_pages(folder: Path) -> None:
    """Write all pages into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {page for pattern in SOURCES for page in ROOT.glob(pattern)}
    linked = {target for page in pages for target in linked_files(page)}
    for path in pages | linked:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path in pages:
            copy.write_text(page_text(path))
        else:
            shutil.copyfile(path, copy)
    shutil.copyfile(ROOT / "docs" / "site.css", folder / "site.css")
    (folder / "reference").mkdir()
    paths = [f"{name}.py" for name in PROGRAMS] + [f"scripts/{name}.py" for name in SCRIPTS]
    for path in paths:
        text = option_tables() if path == "train.py" else help_tables.reference(path, GROUPS)
        (folder / "reference" / f"{Path(path).stem}.md").write_text(text)


if __name__ == "__main__":
    write_pages(PAGES)
    print(f"written: {PAGES.relative_to(ROOT)}")
