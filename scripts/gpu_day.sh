#!/usr/bin/env bash
# All that a borrowed GPU should be used for, with the Python and torch of the machine, in 9 minutes:
# facts, CUDA tests, NCCL tests, models against a plain compiled loop, ceilings, a calibration, runs of
# other shapes for the planner, what was asked beside what was seen, a profile of one step, emulator
# against plan. DIR gets gpu-day.md, gpu-day.json, gpu-day.log, calibration.toml and machine.toml; with
# --parts it keeps what it has of other parts.
#
#     bash scripts/gpu_day.sh --out DIR [--seconds 540]
#     bash scripts/gpu_day.sh --out DIR --parts nccl,asked --tests 'cp or zb-v'
#     bash scripts/gpu_day.sh --out DIR --rehearse        the same on a CPU, with small shapes
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
case " $* " in
*" --rehearse "*) [ ! -x .venv/bin/python ] || python=.venv/bin/python ;;
esac
exec "$python" benchmarks/gpu_day.py "$@"
