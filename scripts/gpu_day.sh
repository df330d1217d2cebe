#!/usr/bin/env bash
# All that one GPU should be used for, with the Python and torch of the machine. Several GPUs and nodes are tried by
# `srun python check.py --cluster` (docs/clusters.md), which trains the model of the part `train` on all of them. DIR gets gpu-day.md,
# gpu-day.json, gpu-day.log, calibration.toml and machine.toml; with --parts it keeps what it has of other
# parts.
#
#     bash scripts/gpu_day.sh --out DIR --first      ten minutes: is new code right over NCCL, and its launches
#     bash scripts/gpu_day.sh --out DIR --second     ten minutes: its figures beside those of before
#     bash scripts/gpu_day.sh --out DIR              all parts; the four lines below are the same in pieces
#     bash scripts/gpu_day.sh --out DIR --parts facts,train,train-compile,llama,models,profile   is it fast?
#     bash scripts/gpu_day.sh --out DIR --parts cuda,nccl          is it right? CUDA tests, NCCL tests
#     bash scripts/gpu_day.sh --out DIR --parts nccl,models --tests 'cp or zb-v'     again, what was red
#     bash scripts/gpu_day.sh --out DIR --parts ceilings,calibration,runs,asked,nccl4     for the planner
#     bash scripts/gpu_day.sh --out DIR --rehearse                 everything on a CPU, with small shapes
#
# --seconds 540 limits all parts together. The limits of single parts hold where several are asked for.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
case " $* " in
*" --rehearse "*) [ ! -x .venv/bin/python ] || python=.venv/bin/python ;;
esac
exec "$python" benchmarks/gpu/gpu_day.py "$@"
