#!/usr/bin/env bash
# Trains a GPT to tell short stories on 4 ranks, tp 2 x pp 2: sets up, writes the stories, makes the
# corpus, trains, draws the loss. Two to five minutes on two cores, with set-up; results are in
# runs/demo. With --moe each block has 8 experts, which the 4 ranks divide (tp 2 x dp 2, ep 4), and
# results are in runs/demo-moe. STEPS=20 before the command makes a run of 20 steps.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
PATH="$PWD/.venv/bin:$PATH"
if [ ! -f data/stories.idx ]; then
    python scripts/make_stories.py --out data/stories.jsonl
    python scripts/prepare_data.py --out data/stories --vocab-size 512 data/stories.jsonl
fi
steps=(${STEPS:+--steps "$STEPS"})
if [ "${1:-}" = --moe ]; then
    experts=(--experts 8 --ffn-hidden 192 --activation swiglu)
    balance=(--balance bias --balance-rate 0.003)
    mpirun -n 4 python train.py --config scripts/demo.toml --tp 2 --pp 1 --ep 4 \
        "${experts[@]}" "${balance[@]}" "${steps[@]}" --out runs/demo-moe
    python scripts/plot_loss.py runs/demo-moe
else
    mpirun -n 4 python train.py --config scripts/demo.toml "${steps[@]}"
    python scripts/plot_loss.py runs/demo
fi
