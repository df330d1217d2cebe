"""The lists of planted faults of benchmarks/faults fit the code into which they are planted."""

import ast

import pytest

from benchmarks.faults.check_faults import BLIND, FAULTS, PUBLIC, ROOT, edits, faults_of

LISTS = {"check": [FAULTS], "public": [FAULTS, PUBLIC], "blind": [FAULTS, BLIND]}


@pytest.mark.parametrize("name", LISTS)
def test_each_fault_has_its_text_once_and_is_python(name):
    """A fault whose text is there no more plants nothing, and its result is that of an old code."""
    faults, _ = faults_of(LISTS[name])
    wrong = []
    for fault in faults:
        text = (ROOT / fault["file"]).read_text()
        for find, replace in edits(fault):
            if (times := text.count(find)) != 1:
                wrong.append(f"{fault['name']}: {fault['file']} has its text {times} times")
            text = text.replace(find, replace)
        ast.parse(text)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", LISTS)
def test_faults_have_names_of_their_own_and_runs_that_are_there(name):
    faults, runs = faults_of(LISTS[name])
    names = [fault["name"] for fault in faults]
    assert len(set(names)) == len(names)
    assert not {fault["run"] for fault in faults if "run" in fault} - set(runs)


def test_public_errors_say_where_they_are_from():
    faults, _ = faults_of(LISTS["public"])
    assert all(fault["thread"] and fault["kind"] for fault in faults)
