"""The house as the README draws it: every module once, and imports only point down the list."""

import ast
import re

from ranks import ROOT


def listed() -> list[str]:
    """Modules in the order of the README's table."""
    text = (ROOT / "README.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| [")]
    return [name for row in rows for name in re.findall(r"\[(\w+)\.py\]", row)]


def imported(module: str) -> set[str]:
    """What a module imports, inside of functions too."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def test_every_module_is_listed_once():
    assert sorted(listed()) == sorted(path.stem for path in ROOT.glob("*.py"))


def test_imports_point_down_the_list():
    order = listed()
    for place, module in enumerate(order):
        assert not imported(module) & set(order[:place]), module
