#!/usr/bin/env bash
# A GPT on Python's own sources, 4 ranks: tp 2 x pp 2. Sets up, makes the corpus, trains, draws.
# Two to four minutes on two cores, set-up in it; the result is in runs/demo.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
PATH="$PWD/.venv/bin:$PATH"
[ -f data/stdlib.idx ] || python scripts/prepare_data.py --stdlib --out data/stdlib --vocab-size 8192
mpirun -n 4 python train.py --config scripts/demo.toml
python scripts/plot_loss.py runs/demo
