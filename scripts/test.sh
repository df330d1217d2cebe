#!/usr/bin/env bash
# Sets up what is missing and runs the tests that a change may break; --all: all tests. Other
# arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh test
# Once, also where PYTHONDONTWRITEBYTECODE is set: each of the processes that tests start would else
# compile our modules, a tenth of a short run.
git ls-files '*.py' 2>/dev/null | .venv/bin/python -m compileall -q -i - || true
exec .venv/bin/python test_all.py "$@"
