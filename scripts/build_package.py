"""Builds the package `trine` of the tree: `pip install .` uses it. pyproject.toml names the class.

In a clone the modules are flat: `from layers.attention import Attention`. In the package they are
`trine.layers.attention`, so that no module called `data` or `model` becomes importable, and the
imports in the copies say so (`installed_source`). The names of `import trine` are those of
scripts/library.py, which becomes trine/__init__.py; a clone has none in its root, or tools would
take the clone, under whatever name, for a package.
"""

import ast
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from setuptools.command.build_py import build_py

PACKAGE = "trine"
FACE = "scripts/library.py"
# What works on a clone: builds it, tests it, makes its site.
ONLY_CLONE = (
    "scripts/build_package.py",
    "scripts/help_tables.py",
    "scripts/site_pages.py",
    "test_all.py",
)


class BuildPackage(build_py):
    """Copies the modules, as setuptools does, and rewrites the imports in the copies."""

    def run(self) -> None:
        """Build into the folder that the wheel is made of."""
        if self.editable_mode:  # the commands are the clone's programs; its modules stay flat
            super().run()
            return
        folder = Path(self.build_lib, PACKAGE)
        shutil.rmtree(folder, ignore_errors=True)  # an earlier build may have had other modules
        super().run()
        (folder / FACE).rename(folder / "__init__.py")
        for name in ONLY_CLONE:
            (folder / name).unlink()
        (folder / "py.typed").touch()  # its types are to be read (PEP 561)
        tree = top_level_names(folder)
        for path in folder.rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            path.write_text(installed_source(source, tree, str(path)), encoding="utf-8")


def top_level_names(folder: Path) -> set[str]:
    """Return the names that a clone's modules import one another by: `data`, `layers`, `tools`."""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return modules | {path.parent.name for path in folder.glob("*/__init__.py")} | {"scripts"}


def installed_source(source: str, tree: Collection[str], name: str = "<source>") -> str:
    """Return the text of a module of the tree as it is in the package; all else stays as it is.

    tree: the names of the tree's modules and folders. name: the file, for errors. `import data`
    becomes `from trine import data`, and `from layers.loss import X` names trine.layers.loss. The
    line by which a program finds a clone's modules takes that folder out: without it a forgotten
    import fails, where it would load a second copy of a module. Raise SyntaxError for an import
    that cannot be written in one way in both.
    """
    lines = source.encode().splitlines(keepends=True)  # ast counts columns in bytes
    changes = [change for node in ast.walk(ast.parse(source)) for change in _changes(node, tree)]
    for line, begin, end, text in sorted(changes, reverse=True):
        row = lines[line - 1]
        if end < 0:
            raise SyntaxError(text, (name, line, begin + 1, row.decode()))
        lines[line - 1] = row[:begin] + text.encode() + row[end:]
    return b"".join(lines).decode()


def _changes(node: ast.AST, tree: Collection[str]) -> Iterator[tuple[int, int, int, str]]:
    """Yield (line, first column, column after the last, new text); -1: an error with that text."""
    match node:
        case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] in tree:
            begin = node.col_offset + len("from ")
            yield node.lineno, begin, begin, f"{PACKAGE}."
        case ast.Import(names=names):
            own = [alias.name for alias in names if alias.name.partition(".")[0] in tree]
            if own and (len(names) > 1 or "." in own[0]):
                yield node.lineno, node.col_offset, -1, f"write `from FOLDER import {own[0]}` alone"
            elif own:
                yield node.lineno, node.col_offset, node.col_offset, f"from {PACKAGE} "
        case ast.Expr(value=ast.Call(func=called, args=[ast.Constant(value=0), folder])):
            if ast.unparse(called) == "sys.path.insert" and node.end_col_offset:
                text = f"sys.path[:] = [path for path in sys.path if path != {ast.unparse(folder)}]"
                yield node.lineno, node.col_offset, node.end_col_offset, text
