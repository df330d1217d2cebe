#!/usr/bin/env bash
# All that a borrowed GPU should be used for, with the Python and torch of the machine, in 9 minutes:
# facts, CUDA tests, NCCL tests, models against a plain compiled loop, ceilings, emulator against
# plan, a profile of one step, a calibration. DIR gets gpu-day.md, .json, .log, calibration.toml.
#
#     bash scripts/gpu_day.sh --out DIR                   [--parts facts,nccl] [--seconds 540]
#     bash scripts/gpu_day.sh --out DIR --rehearse        the same on a CPU, with small shapes
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
case " $* " in
*" --rehearse "*) [ ! -x .venv/bin/python ] || python=.venv/bin/python ;;
esac
exec "$python" benchmarks/gpu_day.py "$@"
