"""The lists of planted faults of benchmarks/faults fit the code into which they are planted."""

import subprocess
import sys

import pytest

from base.errors import UserError
from benchmarks.faults.check_faults import BLIND, FAULTS, PUBLIC, ROOT, faults_of, planted

LISTS = {"check": [FAULTS], "public": [FAULTS, PUBLIC], "blind": [FAULTS, BLIND]}


@pytest.mark.parametrize("name", LISTS)
def test_each_fault_has_its_text_once_and_is_python(name, tmp_path):
    """A fault whose text is there no more plants nothing, and its result is that of an old code.

    One whose lines moved to another function or indentation ends the run, and says nothing of
    check.py.
    """
    faults, _ = faults_of(LISTS[name])
    wrong = []
    for number, fault in enumerate(faults):
        try:
            (tmp_path / f"{number}.py").write_text(planted(fault, ROOT))
        except UserError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    undefined = ["check", "--isolated", "--quiet", "--select", "F821,F823", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *undefined], capture_output=True, text=True
    )
    assert not done.returncode, done.stdout  # N.py is the fault of that number


@pytest.mark.parametrize("name", LISTS)
def test_faults_have_names_of_their_own_and_runs_that_are_there(name):
    faults, runs = faults_of(LISTS[name])
    names = [fault["name"] for fault in faults]
    assert len(set(names)) == len(names)
    assert not {fault["run"] for fault in faults if "run" in fault} - set(runs)


def test_public_errors_say_where_they_are_from():
    faults, _ = faults_of(LISTS["public"])
    assert all(fault["thread"] and fault["kind"] for fault in faults)
