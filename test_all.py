"""Runs the tests that a change may break: `python test_all.py`, with any of pytest's arguments.

    python test_all.py               without the tests marked slow
    python test_all.py --all         all tests
    python test_all.py -k WORD       tests with a word in their names, slow ones too

Tests of several ranks start them by mpirun themselves, and by srun beside scripts/slurm_here.sh.
They run in several processes, all of a file in one; tests that are named, or chosen with -k, in
this process alone: each process would first load all files to know what it has to choose from.
"""

import os
import sys
from pathlib import Path

import pytest

MOST_PROCESSES = 3  # each has torch and transformers in memory, and starts up to eight ranks


def names_tests(arguments: list[str]) -> bool:
    """Return whether the arguments name files of tests or single tests."""
    return any("tests" in Path(each.partition("::")[0]).parts for each in arguments)


def selected(arguments: list[str]) -> list[str]:
    """Return pytest's arguments without --all; slow tests are left out unless some are named."""
    rest = [each for each in arguments if each != "--all"]
    chosen = any(each.startswith(("-k", "-m")) for each in rest) or names_tests(rest)
    return rest if chosen or rest != arguments else ["-m", "not slow", *rest]


def in_processes(arguments: list[str]) -> list[str]:
    """Return options of pytest-xdist, unless the arguments name tests or say how to run them."""
    if names_tests(arguments):
        return []
    if any(each.startswith(("-n", "-k", "--pdb", "--collect-only")) for each in arguments):
        return []
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return []
    # Tests mostly wait, for ranks and for limits: three processes keep two cores busy.
    number = min(cores + 1, MOST_PROCESSES)
    return ["-n", str(number), "--dist", "loadfile", "--no-loadscope-reorder"]


if __name__ == "__main__":
    own = ["--rootdir", str(Path(__file__).parent), *in_processes(sys.argv[1:])]
    sys.exit(pytest.main([*own, *selected(sys.argv[1:])]))
