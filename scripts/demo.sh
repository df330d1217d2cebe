#!/usr/bin/env bash
# Trains a GPT on the sources of Python's library on 4 ranks, tp 2 x pp 2: sets up, makes the
# corpus, trains, draws the loss. Three to seven minutes on two cores, with set-up; results are in
# runs/demo.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
PATH="$PWD/.venv/bin:$PATH"
[ -f data/stdlib.idx ] || python scripts/prepare_data.py --stdlib --out data/stdlib --vocab-size 8192
mpirun -n 4 python train.py --config scripts/demo.toml
python scripts/plot_loss.py runs/demo
