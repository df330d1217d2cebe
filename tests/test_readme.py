"""README's own commands: if this failed, a newcomer's first hour would end at a command of ours.

The blocks of Start, Check, Plan and Train are run as they are printed, in one shell and a
copy of the repository, with runs of STEPS steps. What README prints as output is compared.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from ranks import ROOT, start

import plan
from config.command_line import parse_request

TEXT = (ROOT / "README.md").read_text()
SECTIONS = ("Start", "Check", "Plan", "Train")
PROGRAMS = ("bash", "python", "mpirun", "source", ".venv/bin/python")
STEPS = 24  # more than the warm-up of the demo
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:E[+-]?\d+)?(?::\d\d)*")


class Block(NamedTuple):
    """An indented block: its section, the text of the paragraph before it, and its lines."""

    section: str
    before: str
    lines: str

    @property
    def is_commands(self) -> bool:
        """Whether it is commands; else it is what the commands before it printed."""
        return self.lines.split()[0] in PROGRAMS

    @property
    def not_here(self) -> str:
        """Why this block is not run, or nothing."""
        if self.before.startswith("On a GPU"):
            return "it is for a GPU"
        if "scripts/test.sh" in self.lines:
            return "it runs the tests"
        if "--program" in self.lines:
            return "tests/test_check_program.py runs it, if megatron-core is installed"
        return ""


def blocks() -> list[Block]:
    """Return README's indented blocks of these sections, in their order."""
    found = []
    for section in SECTIONS:
        (text,) = re.findall(rf"^## {section}\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
        before = ""
        for paragraph in re.split(r"\n\n+", text.strip("\n")):
            if paragraph.startswith("    "):
                lines = "\n".join(line[4:] for line in paragraph.splitlines())
                found.append(Block(section, before, lines))
            else:
                before = paragraph
    return found


COMMANDS = [block for block in blocks() if block.is_commands]
RUN = [block for block in COMMANDS if not block.not_here]


def copy_of_repository(folder: Path) -> Path:
    """Copy what git has, with changes that are not committed; .venv is this Python's."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def shortened(lines: str) -> str:
    """Return commands whose runs have STEPS steps; the demo takes them from the variable."""
    return re.sub(r"--steps \d+", f"--steps {STEPS}", lines)


def is_printed(printed: str, line: str) -> bool:
    """Whether a line is README's but for its numbers; `...` ends one of which README has a part."""
    printed, line = (NUMBER.sub("#", text) for text in (printed, line))
    printed, line = (" ".join(text.split()) for text in (printed, line))
    begin = printed.removesuffix("...").rstrip()
    return line.startswith(begin) if printed.endswith("...") else line == printed


def test_what_is_run_and_what_is_not():
    reasons = [block.not_here for block in COMMANDS]
    assert {block.section for block in RUN} == {"Start", "Check", "Plan", "Train"}
    assert len(RUN) == 4, [block.lines for block in RUN]
    assert sorted(filter(None, reasons)) == [
        "it is for a GPU",
        "it runs the tests",
        "tests/test_check_program.py runs it, if megatron-core is installed",
    ]


def test_the_options_of_blocks_that_are_not_run_exist():
    for block in COMMANDS:
        for command in block.lines.replace("\\\n", " ").splitlines():
            words = shlex.split(command, comments=True)
            if "train.py" in words:
                rest = words[words.index("train.py") + 1 :]
                parse_request(rest)


def test_the_plan_of_the_first_page_is_what_the_planner_prints():
    """Exactly, but for the lines at `...`."""
    ((command, printed),) = re.findall(r"^    \$ (python plan\.py .*)\n((?:    .+\n)+)", TEXT, re.M)
    lines = iter(plan.ask(shlex.split(command)[2:]).text.splitlines())
    for wanted in printed.splitlines():
        if wanted.strip() != "...":
            assert any(line.rstrip() == wanted[4:].rstrip() for line in lines), wanted
    (block,) = [block for block in RUN if block.section == "Plan"]
    first, *others = block.lines.splitlines()
    assert first == command
    for other in others:
        assert plan.ask(shlex.split(other)[2:]).text


@pytest.mark.slow
def test_the_blocks_run_as_they_are_printed(tmp_path):
    """All in one shell, as a reader would type them; each command ends with status 0."""
    folder = copy_of_repository(tmp_path / "trine")
    lines = ["set -e", "exec 2>&1"]
    for number, block in enumerate(RUN):
        lines += [f"echo '=== {number}'", shortened(block.lines)]
    # Nothing is installed: what the set-up of the tests has installed is enough.
    variables = {"STEPS": str(STEPS), "PIP_NO_INDEX": "1", "PYTHONPATH": ""}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-c", f"cd {folder}\n" + "\n".join(lines)]
    done = start(command, 900, **variables)
    assert done.status == 0, done.out[-4000:]
    outputs = re.split(r"^=== \d+\n", done.out, flags=re.MULTILINE)[1:]
    said = dict(zip(RUN, outputs, strict=True))
    for before, block in zip(blocks(), blocks()[1:], strict=False):
        if block.is_commands or before.not_here or not before.is_commands:
            continue
        below = iter(said[before].replace(f" on {platform.node()}:", " on vm:").splitlines())
        for wanted in block.lines.splitlines():
            if wanted.strip() != "...":
                assert any(is_printed(wanted, line) for line in below), (wanted, said[before])
    for made in ("runs/demo/loss.png", "runs/demo/metrics.jsonl", "runs/first/run.json"):
        assert (folder / made).exists()
