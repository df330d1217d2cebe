"""Counts how much program there is, and how tightly it is packed: `python scripts/size.py`.

A node is a node of Python's syntax tree; docstrings are not counted. Squeezing code into fewer
lines does not lower the number of nodes, and room to read does not raise it. "Per line" divides by
the lines of the file, "per statement" by the lines that `ast.unparse` needs for the same program,
which gives the size of the average statement. tests/test_house.py enforces the limits.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = (
    "train",
    "trainer",
    "data",
    "pipeline",
    "model",
    "attention",
    "experts",
    "loss",
    "parallel",
    "zero",
)
OUTSIDE = ("benchmarks", "tests", "scripts")  # folders that the total leaves out

# These limits may only fall, except for what an issue adds to the program.
MOST_NODES = 255_500
MOST_ENGINE_NODES = 24_330
MOST_NODES_PER_LINE = 6.5
MOST_NODES_PER_STATEMENT = 11.0

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Size:
    """Files, lines of text, syntax nodes, and lines as `ast.unparse` writes the same program."""

    files: int = 0
    lines: int = 0
    nodes: int = 0
    statements: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(
            self.files + other.files,
            self.lines + other.lines,
            self.nodes + other.nodes,
            self.statements + other.statements,
        )

    @property
    def per_line(self) -> float:
        return self.nodes / max(1, self.lines)

    @property
    def per_statement(self) -> float:
        return self.nodes / max(1, self.statements)


def measure(path: Path) -> Size:
    """The size of one file."""
    text = path.read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    nodes = sum(1 for _ in ast.walk(tree))
    return Size(1, len(text.splitlines()), nodes, len(ast.unparse(tree).splitlines()))


def measure_all() -> dict[str, Size]:
    """Sizes by place: the engine, the entries (the other files of the root), and each folder."""
    sizes: dict[str, Size] = {}
    folders = sorted({path.parent.name for path in ROOT.glob("*/__init__.py")} | set(OUTSIDE))
    for path in sorted(ROOT.glob("*.py")):
        place = "engine" if path.stem in ENGINE else "entries"
        sizes[place] = sizes.get(place, Size()) + measure(path)
    for folder in folders:
        place = f"{folder}/"
        for path in sorted((ROOT / folder).glob("*.py")):
            sizes[place] = sizes.get(place, Size()) + measure(path)
    return sizes


def total(sizes: dict[str, Size]) -> Size:
    """The size of everything that the limits are about."""
    inside = [size for place, size in sizes.items() if place.rstrip("/") not in OUTSIDE]
    return sum(inside, Size())


def main() -> None:
    """Print one row for each place, then both totals with their limits."""
    sizes = measure_all()
    whole = total(sizes)
    print(f"{'place':16}{'files':>6}{'lines':>9}{'nodes':>9}{'per line':>10}{'per statement':>15}")
    for place, size in [*sizes.items(), ("total", whole)]:
        print(
            f"{place:16}{size.files:6}{size.lines:9,}{size.nodes:9,}"
            f"{size.per_line:10.2f}{size.per_statement:15.2f}"
        )
    print(f"the engine: {sizes['engine'].nodes:,} nodes of at most {MOST_ENGINE_NODES:,}")
    print(
        f"without {', '.join(OUTSIDE)}: {whole.nodes:,} nodes of at most {MOST_NODES:,}, "
        f"{whole.per_line:.2f} per line of at most {MOST_NODES_PER_LINE}, "
        f"{whole.per_statement:.2f} per statement of at most {MOST_NODES_PER_STATEMENT}"
    )


if __name__ == "__main__":
    main()
