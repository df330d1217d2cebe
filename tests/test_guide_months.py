"""The commands of docs/guide_months.md: if this failed, a reader's run would end at one."""

import os
import re
import sys
from pathlib import Path

import pytest
from ranks import ROOT, start
from test_readme import copy_of_repository

TEXT = (ROOT / "docs" / "guide_months.md").read_text()
TIMES_SHORTER = 50


def commands() -> list[str]:
    return blocks_of(TEXT)


def blocks_of(text: str) -> list[str]:
    """The indented blocks of a page, which may have empty lines inside."""
    found, lines = [], []
    for line in [*text.splitlines(), "end"]:
        if line.startswith("    ") or (lines and not line):
            lines.append(line[4:])
        elif lines:
            found.append("\n".join(lines).strip("\n"))
            lines = []
    return found


def shortened(text: str) -> str:
    """A block with a fiftieth of the tokens and samples, and few steps between saves."""
    text = re.sub(r"\b(\d+)K\b", lambda m: str(int(m[1]) * 1000 // TIMES_SHORTER), text)
    text = text.replace("102400", "10240").replace("--save-every 50", "--save-every 4")
    text = text.replace("warmup-samples 200", "warmup-samples 20")
    return text.replace("--eval-every 100", "--eval-every 10").replace("samples 64", "samples 16")


def test_the_blocks_are_all_commands():
    assert len(commands()) == 8
    assert "[[phase]]" in shortened(commands()[1])
    assert 'train_tokens = "24000"' in shortened(commands()[1])


@pytest.mark.slow
def test_the_guide_in_short_form(tmp_path: Path):
    """All blocks in one shell, as a reader would type them; each command ends with status 0."""
    folder = copy_of_repository(tmp_path / "trine")
    lines = ["set -e", "exec 2>&1", f"cd {folder}"]
    for block in commands():
        lines += [f"echo '=== {block.split()[0]}'", shortened(block)]
    variables = {"PYTHONPATH": ""}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = start(["bash", "-c", "\n".join(lines)], 900, **variables)
    assert done.status == 0, done.out[-4000:]
    assert " phase 3 of 3, long: from step" in done.out
    assert re.search(r"└ decayed \(step \d+\)", done.out)
    assert (folder / "months.html").stat().st_size > 1000
