"""Runs all tests: `python test_all.py`, with any of pytest's arguments.

Tests of several ranks start them by mpirun themselves, and by srun beside scripts/slurm_here.sh.
"""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["--rootdir", str(Path(__file__).parent), *sys.argv[1:]]))
