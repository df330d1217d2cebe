#!/usr/bin/env bash
# Everything that needs a GPU, with the Python and torch of the machine: the tests marked cuda, the
# largest GEMM rate, steady tokens/s, MFU and peak memory. Under 8 minutes.
#
#     bash scripts/gpu_check.sh              writes benchmarks/results/gpu-<device>.md
#     bash scripts/gpu_check.sh --rehearse   the same steps on a CPU with small shapes, not written
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
if [ "${1:-}" = --rehearse ]; then
    [ -x .venv/bin/python ] && python=.venv/bin/python
    "$python" -m pytest -m cuda tests/test_cuda.py || [ $? = 5 ]
    exec "$python" benchmarks/gpu.py --device cpu --out "$(mktemp)"
fi
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: torch of $(command -v $python) finds no CUDA device" >&2
    exit 2
}
"$python" -m pytest -m cuda tests/test_cuda.py
"$python" benchmarks/gpu.py
