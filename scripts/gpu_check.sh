#!/usr/bin/env bash
# What to run whenever a GPU can be had, on the Python and torch that are already there: the tests
# that need CUDA, the GEMM ceiling, steady tokens/s, MFU and peak memory. Under 8 minutes.
#
#     bash scripts/gpu_check.sh              writes benchmarks/results/gpu-<device>.md
#     bash scripts/gpu_check.sh --rehearse   the same path on a CPU with small shapes, kept nowhere
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ "${1:-}" = --rehearse ]; then
    [ -x .venv/bin/python ] && python=.venv/bin/python
    "$python" -m pytest -m cuda tests/test_cuda.py || [ $? = 5 ]
    exec "$python" benchmarks/gpu.py --device cpu --out "$(mktemp)"
fi
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: torch of $(command -v $python) sees no CUDA device" >&2
    exit 2
}
"$python" -m pytest -m cuda tests/test_cuda.py
"$python" benchmarks/gpu.py
