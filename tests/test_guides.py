"""Runs of docs/guide_train.md: if this failed, a reader would copy a command that fails.

The blocks of the sections on experts, Muon and blocks that differ are run as they are printed, in
one shell and a copy of the repository, with runs of STEPS steps.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from ranks import ROOT, start
from test_readme import copy_of_repository

TEXT = (ROOT / "docs" / "guide_train.md").read_text()
SECTIONS = (
    "7. Train a model with experts",
    "8. Train with Muon",
    "9. Train a model whose blocks differ",
)
STEPS = 6
# By the folder of a run: words of its options, and of a line that it prints.
RUNS = {
    "runs/mla_moe": ("kv_lora_rank", "busiest expert"),
    "runs/muon": ("muon", "Newton-Schulz"),
    "runs/windows": ("window", "windows in 5 of 6 blocks"),
}


def commands() -> list[str]:
    """The indented blocks of the sections that begin with a command."""
    found = []
    for section in SECTIONS:
        (text,) = re.findall(
            rf"^## {re.escape(section)}\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL
        )
        for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE):
            lines = "\n".join(line[4:] for line in block.splitlines())
            if lines.split()[0] in ("python", "mpirun", "mkdir"):
                found.append(lines)
    return found


def test_each_run_has_its_command_and_its_picture():
    text = "\n".join(commands())
    for folder in RUNS:
        assert f"--out {folder}" in text
        assert f"scripts/plot_loss.py {folder}" in text
    pictures = re.findall(r"\]\((pictures/\w+\.png)\)", TEXT)
    assert len(pictures) >= 1 + len(RUNS)
    assert all((ROOT / "docs" / path).is_file() for path in pictures)


@pytest.mark.slow
def test_the_runs_end_as_they_are_printed(tmp_path):
    folder = copy_of_repository(tmp_path / "trine")
    lines = [block for block in commands() if "plan.py" not in block and "demo.sh" not in block]
    commanded = re.sub(r"--steps \d+", f"--steps {STEPS}", "\n".join(lines))
    variables = {"PIP_NO_INDEX": "1", "PYTHONPATH": ""}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = start(["bash", "-c", f"cd {folder}\nset -e\nexec 2>&1\n" + commanded], 900, **variables)
    assert done.status == 0, done.out[-4000:]
    for run, (option, line) in RUNS.items():
        rows = (folder / run / "metrics.jsonl").read_text().splitlines()
        steps = [row for row in map(json.loads, rows) if "loss" in row]
        assert len(steps) == STEPS
        assert option in (folder / run / "run.json").read_text()
        assert line in done.out
        assert (folder / run / "loss.png").stat().st_size > 10_000
