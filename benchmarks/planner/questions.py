"""Answers questions from public threads, each by one command, beside what was said there.

    python benchmarks/planner/questions.py > table.md   # of benchmarks/results/questions.md

Reads benchmarks/data/questions.toml. The first line of an answer is shown, and of a table its first
layout.
"""

import contextlib
import io
import shlex
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import plan
from config.cli import Parser
from config.command_line import read_toml
from config.errors import UserError, sentences

QUESTIONS = ROOT / "benchmarks" / "data" / "questions.toml"


def read() -> list[dict[str, str]]:
    """Return the questions: thread, asked, said, command."""
    return list(read_toml(str(QUESTIONS), QUESTIONS.name)["question"])


def answer(command: str) -> tuple[str, float]:
    """Return a short form of the planner's answer, and its processor seconds."""
    began = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            found = plan.ask(shlex.split(command)).text
        except UserError as error:
            found = f"refused: {error}"
    return short(found.splitlines(), command), time.process_time() - began


def short(lines: list[str], command: str) -> str:
    """Return the first line of an answer, and the rows of its table that tell the layout."""
    rows = [" ".join(line.split()) for line in lines if line[:5].strip()[:2].isdigit() or not line]
    first = " ".join(lines[0].split())
    for head, line in zip(lines, lines[1:], strict=False):
        if head.split()[:1] in (["tp"], ["hidden"]):
            pairs = zip(head.split(), line.split(), strict=False)
            return f"{first}: " + ", ".join(f"{name} {cell}" for name, cell in pairs)
    more = [line for line in lines if line.startswith(("  sum", "out of memory"))]
    kinds = [" ".join(line.split()) for line in lines if "out of memory" in line or "hold" in line]
    return "; ".join([first, *more, *kinds[:1], *kinds[-1:][: len(kinds) > 1], *rows[:0]])


def report() -> list[str]:
    """Return the questions, the commands and the answers as lines of Markdown."""
    lines = []
    for number, row in enumerate(read(), 1):
        text, seconds = answer(row["command"])
        lines += [
            f"{number}. [{row['asked']}]({row['thread']})",
            f"   * `plan.py {row['command']}`",
            f"   * {text} ({seconds:.1f} s)",
            f"   * There: {row['said']}.",
        ]
    return lines


def main(arguments: list[str]) -> None:
    """Print the report."""
    Parser(description=__doc__.splitlines()[0]).parse_args(arguments)
    print("\n".join(report()))


if __name__ == "__main__":
    with sentences():
        main(sys.argv[1:])
