"""The ideas of examples/ideas: if this failed, a person who adds a parameter, a loss term or
an update rule would be stopped by the code, or would train another model in some layout.

Each patch is applied to a copy of the code. check.py says that the right one is equal in every
layout, and finds the same idea with a sum left out.
"""

import itertools
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import Forked
from ranks import ROOT, Outcome

IDEAS = {path.stem: path.read_text() for path in (ROOT / "examples" / "ideas").glob("*.patch")}
# A wrong version of each: options of the run that has the idea, file, what is there, what is wrong.
WRONG = tomllib.loads((ROOT / "examples" / "ideas" / "wrong.toml").read_text())
# Those that the slow test runs; benchmarks/faults/ideas.py runs all.
RUN = ("gated_attention", "normuon", "second_next_token")
LAYOUTS = ("tp 2 dp 2 zero 2", "pp 2 cp 2 schedule zb-v recompute full")
SHAPE = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --device cpu"
WITH_SUM = ("tp 2", "dp 2 micro-batch-size 2")  # in one of them the sum that was left out is needed


def hunks_of(diff: str) -> Iterator[tuple[str, list[str]]]:
    """The hunks of a diff: a file, and the hunk's lines with their signs."""
    path = ""
    for part in re.split(r"^(?=\+\+\+ |--- |@@ )", diff, flags=re.MULTILINE):
        if part.startswith("+++ b/"):
            path = part.removeprefix("+++ b/").strip()
        elif part.startswith("@@"):
            yield path, part.splitlines(keepends=True)[1:]


def applied(text: str, lines: list[str]) -> str | None:
    """The text with a hunk; None if its lines are not there once.

    As patch does, the hunk is placed without its first or last lines if others were written there.
    """
    above = len(list(itertools.takewhile(lambda line: line[0] == " ", lines)))
    below = len(list(itertools.takewhile(lambda line: line[0] == " ", lines[::-1])))
    trims = itertools.product(range(above + 1), range(below + 1))
    for first, last in sorted(trims, key=sum):
        kept = lines[first : len(lines) - last]
        old = "".join(line[1:] for line in kept if line[0] in " -")
        if old and text.count(old) == 1:
            return text.replace(old, "".join(line[1:] for line in kept if line[0] in " +"))
    return None


def copy_with(name: str, folder: Path) -> Path:
    """A copy of the code with an idea."""
    left_out = shutil.ignore_patterns(".*", "runs", "tests", "benchmarks", "docs", "data", "site")
    code = folder / "code"
    shutil.copytree(ROOT, code, ignore=left_out)
    for path, lines in hunks_of(IDEAS[name]):
        text = applied((code / path).read_text(), lines)
        assert text is not None, (
            f"{path} has no longer, or more than once, the lines around this change of `{name}` "
            f"in examples/ideas: write it there with those that are there now\n{''.join(lines)}"
        )
        (code / path).write_text(text)
    return code


def run(code: Path, *words: str) -> Outcome:
    """Run a program of the copy, forked from a process that has imported torch and none of ours."""
    program, out, err = str(code / words[0]), code / "program.out", code / "program.err"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(code)}
    with open(out, "w") as file, open(err, "w") as other:
        files = file.fileno(), other.fileno()
        process = Forked([program, *words[1:]], environment, *files, ("torch._dynamo",), code)
        status = process.wait(900)
    return Outcome(status, out.read_text(), err.read_text())


def check(code: Path, options: str, layouts: tuple[str, ...]) -> Outcome:
    """check.py in the copy, of these layouts."""
    words = [word for layout in layouts for word in ("--layout", layout)]
    return run(code, "check.py", *options.split(), *words)


def test_there_are_ten_ideas_of_forty_lines_and_a_wrong_version_of_each():
    assert set(IDEAS) == set(WRONG)
    assert len(IDEAS) == 10
    for name, diff in IDEAS.items():
        lines = diff.splitlines()
        assert len(lines) <= 60, name
        files = [line for line in lines if line.startswith("+++ ")]
        assert len(files) <= (2 if "architecture/shape.py" in diff else 1), name


@pytest.mark.parametrize("name", WRONG)
def test_an_idea_has_its_place_also_beside_a_line_of_others(name):
    for path, lines in hunks_of(IDEAS[name]):
        text = (ROOT / path).read_text()
        assert applied(text, lines) is not None, f"{path}: write its patch in examples/ideas again"
        old = "".join(line[1:] for line in lines if line[0] in " -")
        if old not in text:  # there is such a line
            continue
        above = "".join(line[1:] for line in itertools.takewhile(lambda li: li[0] == " ", lines))
        beside = text.replace(old, above + "    # theirs\n" + old.removeprefix(above))
        found = applied(beside, lines)
        assert found is not None, lines
        assert found.count("# theirs") == 1
        assert all(line[1:] in found for line in lines if line[0] == "+")


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_an_idea_wrong_is_there_once(name):
    text = (ROOT / WRONG[name]["file"]).read_text()
    for path, lines in hunks_of(IDEAS[name]):
        if path == WRONG[name]["file"]:
            text = applied(text, lines) or ""
    assert text.count(WRONG[name]["right"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [RUN[0], *(pytest.param(x, marks=pytest.mark.long) for x in RUN[1:])]
)
def test_an_idea_is_equal_in_every_layout_and_its_missing_sum_is_found(name, tmp_path):
    case = WRONG[name]
    options, path = case.get("options", ""), case["file"]
    code = copy_with(name, tmp_path)
    found = check(code, options, LAYOUTS)
    assert found.status == 0, found.out + found.err
    text = (code / path).read_text()
    (code / path).write_text(text.replace(case["right"], case["wrong"]))
    found = check(code, options, WITH_SUM)
    assert found.status == 1, found.out + found.err
    assert "DIFFERS" in found.out


@pytest.mark.slow
def test_a_run_says_what_it_does_not_know_and_goes_on(tmp_path):
    """Parameters that the options do not describe: counted, saved, resumed; no export drops them,
    and no code without them resumes from there.
    """
    code, out = copy_with("value_embeddings", tmp_path), tmp_path / "run"
    words = [
        "train.py",
        *SHAPE.split(),
        "--global-batch-size",
        "2",
        "--save-every",
        "2",
        "--out",
        str(out),
    ]
    begun = run(code, *words, "--steps", "2")
    assert begun.status == 0, begun.err
    sentence = "+4,098 beside those that its options describe: beyond its options: "
    sentence += "blocks.*.attention.idea_values (4, 64, 8) in 2 blocks"
    assert sentence in begun.out
    facts = json.loads((out / "run.json").read_text())
    assert facts["unknown"]["elements"] == 4098
    assert facts["unknown"]["tensors"].startswith("beyond its options")
    resumed = run(code, *words, "--steps", "4", "--resume", "auto")
    assert resumed.status == 0, resumed.err
    assert "resumed from" in resumed.out
    assert sentence.rpartition(": ")[2] in run(code, "checkpoint.py", "show", str(out)).out
    refused = run(code, "checkpoint.py", "export", "--to", "hf", str(out), str(tmp_path / "hf"))
    assert refused.status == 2
    assert "another model: beyond its options: blocks.*.attention." in refused.err
    assert sentence.rpartition(": ")[2] in run(code, "plan.py", "layouts", "--config", str(out)).err
    # The code without the idea: it does not resume as if nothing were missing.
    shutil.copy(ROOT / "layers" / "attention.py", code / "layers")
    other = run(code, *words, "--steps", "6", "--resume", "auto")
    assert other.status == 2
    assert "not in this model: blocks.0.attention.idea_share" in other.err
