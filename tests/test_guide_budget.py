"""docs/guide_budget.md: if this failed, a reader would copy commands that fail or differ."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from ranks import ROOT, start
from test_guide_months import blocks_of
from test_readme import copy_of_repository

import plan

TEXT = (ROOT / "docs" / "guide_budget.md").read_text()
PROGRAMS = ("python", "mpirun", "for", "sed")
PART = 25  # of the samples of each run in the short form


def commands() -> list[str]:
    return [block for block in blocks_of(TEXT) if block.split()[0] in PROGRAMS]


def test_the_commands_and_lines_are_those_of_the_budget(tmp_path):
    """The ladder's options, its rates, and each printed line but its numbers of seconds."""
    (budget,) = [line for line in commands() if "plan.py budget" in line]
    words = budget.split("plan.py ")[1].replace("run.toml", str(tmp_path / "run.toml"))
    printed = plan.ask(shlex.split(words)).text.replace(str(tmp_path / "run.toml"), "run.toml")
    rungs = re.findall(r"ladder \d: .*?train.py (.*)", printed)
    typed = re.findall(r"train.py (--config run.toml --layers .*)", TEXT)
    typed = [*dict.fromkeys(typed)]  # the first one is in both loops over rates
    assert len(rungs) == len(typed) == 3
    for rung, line in zip(rungs, typed, strict=True):
        given = set(line.split()) - {"--lr", "$rate", "--out", "runs/rates/$rate"}
        assert given <= set(rung.split())
        assert set(rung.split()) - given <= {"--out", "runs/ladder/1"}
    rates = re.findall(r"for rate in (.*); do", TEXT)[0]
    low, middle, high = rates.split()
    assert f"--lr {low}, {middle} and {high};" in printed
    (answer,) = [block for block in blocks_of(TEXT) if "parameters for" in block]
    for line in answer.splitlines():
        assert line.strip() == "..." or line.strip() in printed, line


def fewer_samples(words: re.Match) -> str:
    """A part of a run's samples, in whole batches."""
    return f"--train-samples {int(words[1]) // PART // 16 * 16}"


@pytest.mark.long
@pytest.mark.slow
def test_the_guide_in_short_form(tmp_path: Path):
    """All blocks in one shell with few samples; each command ends with status 0."""
    folder = copy_of_repository(tmp_path / "trine")
    lines = ["set -e", "exec 2>&1", f"cd {folder}"]
    for block in commands():
        text = re.sub(r"--train-samples (\d+)", fewer_samples, block)
        text = re.sub(r"--lr-warmup-samples \d+", "--lr-warmup-samples 32", text)
        lines.append(re.sub(r"--global-batch-size \d+", "--global-batch-size 16", text))
        lines[-1] = lines[-1].replace("micro-batch-size 16", "micro-batch-size 8")
        lines[-1] = lines[-1].replace("--out runs/large", "--out runs/large --stop-at-samples 128")
    variables = {"PYTHONPATH": ""}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = start(["bash", "-c", "\n".join(lines) + " || test $? = 75"], 900, **variables)
    assert done.status == 0, done.out[-4000:]
    assert "9 of 10 cases" in done.out
    assert (folder / "expected.json").exists()
