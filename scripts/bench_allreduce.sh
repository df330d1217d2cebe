#!/usr/bin/env bash
# Bus bandwidth of all ranks and of a layout's groups, alpha and beta, a calibration for plan.py.
#
#     bash scripts/bench_allreduce.sh                     8 ranks of this machine's CPU, 1 to 2 minutes
#     bash scripts/bench_allreduce.sh --out FOLDER        the same with arguments of allreduce.py
#     bash scripts/bench_allreduce.sh srun -n 48 ...      a launcher and its arguments, then --,
#         -- --tp 8 --pp 6 --line-rate 400                then arguments of benchmarks/network/allreduce.py
#
# Writes runs/allreduce/: allreduce.csv, pairs.csv, calibration.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
PATH="$PWD/.venv/bin:$PATH"
if [ $# = 0 ] || [[ $1 == -* && $1 != -- ]]; then # no launcher
    exec mpirun -n 8 python benchmarks/network/allreduce.py --device cpu --tp 2 --pp 2 --gpu cpu --rates \
        --pairs --max-bytes $((16 * 1024 * 1024)) --factor 8 --seconds 0.5 "$@"
fi
launcher=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    launcher+=("$1")
    shift
done
[ "${1:-}" = -- ] && shift
exec "${launcher[@]}" python benchmarks/network/allreduce.py "$@"
