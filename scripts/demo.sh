#!/usr/bin/env bash
# Trains a GPT to tell short stories on 4 ranks, tp 2 x pp 2: sets up, writes the stories, makes the
# corpus, trains, draws the loss. Two to five minutes on two cores, with set-up; results are in
# runs/demo.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
PATH="$PWD/.venv/bin:$PATH"
if [ ! -f data/stories.idx ]; then
    python scripts/make_stories.py --out data/stories.jsonl
    python scripts/prepare_data.py --out data/stories --vocab-size 512 data/stories.jsonl
fi
mpirun -n 4 python train.py --config scripts/demo.toml
python scripts/plot_loss.py runs/demo
