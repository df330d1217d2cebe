#!/usr/bin/env bash
# Tunes a small GPT on 8 ranks of this machine's CPU: calibration, search, table, report.
# Under five minutes after set-up on two cores; results are in runs/tune-demo.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
PATH="$PWD/.venv/bin:$PATH"
out=runs/tune-demo
[ -f $out/calibration.toml ] || mpirun -n 8 python benchmarks/network/allreduce.py --device cpu --tp 2 --pp 2 \
    --gpu cpu --rates --operations all-reduce --max-bytes $((2 * 1024 * 1024)) --factor 8 \
    --seconds 0.3 --out $out
exec python tune.py --gpu cpu --calibration $out/calibration.toml --gpus 8 \
    --launch "python scripts/forkrun.py {ranks}" --device cpu \
    --layers 8 --hidden 128 --heads 8 --seq-length 128 --vocab-size 2048 --global-batch-size 16 \
    --schedule 1f1b --partition balanced --recompute none --try micro-batch-size=1,2,4 --zero 1 \
    --budget 3m --time-limit 90 --out $out "$@"
