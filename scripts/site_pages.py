"""Writes the pages of the documentation's site: `python scripts/site_pages.py`.

The pages are every Markdown file of the repository and the files that they link to, at the same
relative paths, and reference/PROGRAM.md with the `--help` of each program. They are not committed,
so they cannot differ from the options. docs/mkdocs.yml makes a site of them.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
SOURCES = ("*.md", "docs/*.md", "hardware/*.md", "benchmarks/data/*.md", "benchmarks/results/*.md")
PROGRAMS = ("train", "plan", "tune", "rehearse", "supervise", "runs", "checkpoint", "sample")
SCRIPTS = ("prepare_data", "prepare_chats", "corpus")
LINK = re.compile(r"\]\(([^)\s#]+)")


def linked_files(page: Path) -> set[Path]:
    """Return the files of the repository to which a page links; folders are left out."""
    targets = [(page.parent / link).resolve() for link in LINK.findall(page.read_text())]
    return {target for target in targets if target.is_file() and target.is_relative_to(ROOT)}


def help_of(path: str) -> str:
    """Return the text of all options of a program; CalledProcessError if the program fails."""
    environment = os.environ | {"COLUMNS": "76", "NO_COLOR": "1"}
    words = [sys.executable, path, "--help"]
    if path == "train.py":  # its --help alone lists the options that people use first
        words.append("all")
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def write_pages(folder: Path) -> None:
    """Write all pages into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {page for pattern in SOURCES for page in ROOT.glob(pattern)}
    linked = {target for page in pages for target in linked_files(page)}
    for path in pages | linked:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    (folder / "reference").mkdir()
    paths = [f"{name}.py" for name in PROGRAMS] + [f"scripts/{name}.py" for name in SCRIPTS]
    for path in paths:
        text = f"# {path}\n\n```text\n{help_of(path).rstrip()}\n```\n"
        (folder / "reference" / f"{Path(path).stem}.md").write_text(text)


if __name__ == "__main__":
    write_pages(PAGES)
    print(f"written: {PAGES.relative_to(ROOT)}")
