#!/usr/bin/env bash
# Sets up what is missing and runs the tests that a change may break; --all: all tests. Other
# arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh test
exec .venv/bin/python test_all.py "$@"
