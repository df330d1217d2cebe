"""Makes Markdown of the text that a program prints for --help, with its options as tables.

    reference("scripts/corpus.py")      the page of a program and of all its commands

argparse writes an option on a line, and what it does behind two spaces or on the next line, further
to the right. Options that a docstring lists in this form are read too. What is not an option stays
text, before or below the table; indented lines stay code.
"""

import os
import re
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADING = re.compile(r"([a-z][a-z ]*):")
ARGUMENTS = ("positional arguments", "options")
FLAGS = re.compile(r"((?:--?[\w-]+, )*--?[\w-]+) ?(.*)")  # the spellings of an option, its value
FURTHER = 6  # a line that is indented by so many spaces more than an option belongs to it
ROWS = ["| option | values | what it does |", "| --- | --- | --- |"]


@dataclass
class Help:
    """The parts of a help text."""

    usage: str = ""
    above: list[str] = field(default_factory=list)  # prose and indented code before the options
    below: list[str] = field(default_factory=list)  # the same, behind the first option
    entries: list[list[str]] = field(default_factory=list)  # an argument, and what it does
    commands: list[str] = field(default_factory=list)  # the names of the program's commands
    elsewhere: list[str] = field(default_factory=list)  # groups of options of another page


def read(text: str, groups: Collection[str] = ()) -> Help:
    """Return the parts of a help text; it must be printed so wide that no line is broken.

    groups: the headings of options that have a page of their own.
    """
    found = Help()
    usage, _, rest = text.partition("\n\n")
    found.usage = usage.removeprefix("usage: ")
    heading = ""
    indent = 0  # of the last argument
    for line in rest.splitlines():
        words = line.strip()
        spaces = len(line) - len(words)
        title = HEADING.fullmatch(line)
        if title and title[1] in (*ARGUMENTS, *groups):
            heading = title[1]
            indent = 0
            if heading in groups:
                found.elsewhere.append(heading)
        elif heading in groups and (spaces or not words):
            continue
        elif not spaces:  # prose, or an empty line, ends a list of arguments
            heading = ""
            indent = 0
            (found.below if found.entries else found.above).append(line)
        elif indent and spaces >= indent + FURTHER:  # more of the last argument
            found.entries[-1][1] = f"{found.entries[-1][1]} {words}".strip()
        elif heading or words.startswith("-"):
            name, _, help_text = words.partition("  ")
            if heading == ARGUMENTS[0] and spaces == 4:
                found.commands.append(name)
            found.entries.append([name, help_text.strip()])
            indent = spaces
        else:
            (found.below if found.entries else found.above).append(line)
    return found


def escaped(text: str) -> str:
    """Return text as Markdown that shows each of its characters; options in it become code.

    What is in backticks is code already.
    """
    parts = re.split(r"(`[^`]+`)", text)
    for index in range(0, len(parts), 2):
        part = re.sub(r"([\\*_|\[\]])", r"\\\1", parts[index])
        part = part.replace("<", "&lt;")
        parts[index] = re.sub(
            r"(?<![\w-])--[a-z][\w-]*(=\S+)?", lambda found: f"`{found[0]}`", part
        )
    return "".join(parts)


def prose(lines: list[str]) -> str:
    """Return lines of prose and of indented code as Markdown."""
    text = "\n".join(line if line.startswith(" ") else escaped(line) for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def page(name: str, found: Help, level: int = 1) -> str:
    """Return a help text as Markdown: its usage, its prose, and a table with an anchor per option.

    name: the program, and its command. level: of the heading; below the first, anchors begin with
    the command, as #layouts-gpu.
    """
    parts = ["#" * level + f" {name}", f"Usage: `{found.usage}`", prose(found.above)]
    rows = list(ROWS)
    anchors = set()
    for argument, text in found.entries:
        if argument in found.commands:
            target = f"{name} {argument}".lower().replace(" ", "-").replace(".", "")
            rows.append(f"| [{argument}](#{target}) | | {escaped(text)} |")
            continue
        flag = FLAGS.fullmatch(argument)
        names, value = flag.groups() if flag else (argument, "")
        anchor = re.sub(r"\W+", "-", names.split(", ")[-1]).strip("-").lower()
        if level > 1:
            anchor = f"{name.split()[-1]}-{anchor}"
        if anchor in anchors:  # --config, which a program and train.py's options have
            continue
        anchors.add(anchor)
        code = f"`{names}`".replace("|", "&#124;")
        rows.append(f'| <a id="{anchor}"></a>{code} | {escaped(value)} | {escaped(text)} |')
    parts.append("\n".join(rows))
    parts.append(prose(found.below))
    if found.elsewhere:
        links = ", ".join(f"[{group}](train.md#{group})" for group in found.elsewhere)
        parts.append(f"And the options of [train.py](train.md): {links}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def help_of(words: list[str]) -> str:
    """Return the text of a program's --help, no line broken; words: its path, and a command.

    Raise CalledProcessError if the program fails.
    """
    environment = os.environ | {"COLUMNS": "100000", "NO_COLOR": "1"}
    command = [sys.executable, *words, "--help"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def reference(path: str, groups: Collection[str]) -> str:
    """Return the page of a program: its own options, and below it those of each command.

    groups: the headings of options that are on the page of train.py.
    """
    found = read(help_of([path]), groups)
    parts = [page(path, found)]
    for command in found.commands:
        below = read(help_of([path, command]), groups)
        parts.append(page(f"{path} {command}", below, level=2))
    return "\n".join(parts)
