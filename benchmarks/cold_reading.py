"""Draws functions and comments for a cold reading, by a reader who has not seen the code.

    python benchmarks/cold_reading.py --seed 1

Prints 40 functions and 25 comments of the program, without tests, benchmarks and scripts. Each
stands alone with the first docstring of its file; a comment also with the four lines after it. The
reader says for each what it does and when it is called, and gives a grade: 1 clear at once, 2 read
twice, 3 decoded, 4 not understood. benchmarks/results/cold_reading.md has the grades of each draw.
"""

import ast
import random
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]  # the project's own modules

from config.messages import Parser
from scripts import size

FUNCTIONS = 40
COMMENTS = 25
LINES_AFTER = 4  # a comment is read with the code that follows it


def files() -> list[Path]:
    """The files of the program, without test_all.py."""
    folders = {path.parent for path in ROOT.glob("*/__init__.py")}
    inside = [folder for folder in folders if folder.name not in size.OUTSIDE]
    paths = [path for folder in [ROOT, *inside] for path in folder.glob("*.py")]
    return sorted(path for path in paths if path.stem != "test_all")


def functions(path: Path) -> list[str]:
    """The source of each function of a file with at least three statements or a docstring."""
    text = path.read_text()
    sources = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and (len(node.body) > 2 or ast.get_docstring(node)):
            source = ast.get_source_segment(text, node, padded=True)
            assert source is not None  # the node has a position in the text
            sources.append(source)
    return sources


def comments(path: Path) -> list[str]:
    """Each comment of a file with the lines after it; titles of sections are left out."""
    lines = path.read_text().splitlines()
    with open(path) as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.COMMENT]
    starts = [token.start[0] - 1 for token in tokens if " --" not in token.string]
    first_lines = [n for n in starts if not lines[n - 1].lstrip().startswith("#")]
    pieces = []
    for first in first_lines:
        stop = first + 1
        while stop < len(lines) and lines[stop].lstrip().startswith("#"):
            stop += 1
        pieces.append("\n".join(lines[first : stop + LINES_AFTER]))
    return pieces


def draw(generator: random.Random, kind: str, count: int) -> list[str]:
    """Return `count` functions or comments, each with the docstring of its file, as Markdown."""
    pieces_of = {"function": functions, "comment": comments}[kind]
    pieces = [(path, piece) for path in files() for piece in pieces_of(path)]
    texts = []
    for number, (path, piece) in enumerate(generator.sample(pieces, count), 1):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or "(no docstring)"
        title = f"## {kind} {number}: {path.relative_to(ROOT)}"
        texts.append(
            f"{title}\n\nThe file begins with:\n\n{docstring}\n\n```python\n{piece}\n```\n"
        )
    return texts


def main() -> None:
    """Print a draw."""
    parser = Parser("cold_reading.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    generator = random.Random(parser.parse_args().seed)
    print("\n".join(draw(generator, "function", FUNCTIONS)))
    print("\n".join(draw(generator, "comment", COMMENTS)))


if __name__ == "__main__":
    main()
