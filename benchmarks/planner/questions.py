"""Answers questions from public threads, each by one command, beside what was said there.

    python benchmarks/planner/questions.py > table.md   # of benchmarks/results/questions.md

Reads benchmarks/data/questions.toml. The first line of an answer is shown, and of a table its first
layout.
"""

import contextlib
import io
import itertools
import re
import shlex
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import plan
from base.cli import Parser
from base.errors import UserError, sentences
from config.command_line import read_toml

ONE_CELL = re.compile(r"\b(interleaved|full|selective) (\d+)|(?<=\d) (?=B\b)")  # of two words
LEFT_OUT = ("90%", "bubble", "risk", "sp", "80%", "waves", "products", "attn", "why")
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
    return short(found.splitlines()), time.process_time() - began


def short(lines: list[str]) -> str:
    """Return the first line of an answer, and the first row of its table or why nothing fits."""
    words = [ONE_CELL.sub(_one_cell, line).split() for line in lines]
    first = " ".join(words[0])
    for head, row in itertools.pairwise(words):
        if head[:1] in (["tp"], ["hidden"]):
            pairs = zip(_heads(head), row, strict=False)
            cells = (f"{name} {cell}" for name, cell in pairs if name not in LEFT_OUT)
            return f"{first}: {', '.join(cells)}"
    reasons = [" ".join(line) for line in words if {"memory:", "hold", "sum"} & set(line)]
    return "; ".join([first, *reasons[:2]])


def _one_cell(found: re.Match[str]) -> str:
    """Return a cell of two words as one."""
    return "" if found[1] is None else f"{found[1]}-{found[2]}"


def _heads(head: list[str]) -> list[str]:
    """Return the heads of a table, each of which is one word; "90 %" is one head."""
    return " ".join(head).replace("90 %", "90%").split()


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
