#!/usr/bin/env bash
# All that a borrowed GPU should be used for, with the Python and torch of the machine, in calls of at
# most 9 minutes. DIR gets gpu-day.md, gpu-day.json, gpu-day.log, calibration.toml and machine.toml; with
# --call and --parts it keeps what it has of other parts.
#
#     bash scripts/gpu_day.sh --out DIR --call 1     is anything fast? facts, train.py as it is and with
#                                                    --compile, models against a plain compiled loop, a
#                                                    profile of one step
#     bash scripts/gpu_day.sh --out DIR --call 2     is it right? CUDA tests, NCCL tests of two ranks
#     bash scripts/gpu_day.sh --out DIR --parts nccl,models --tests 'cp or zb-v'     call 3: what was red
#     bash scripts/gpu_day.sh --out DIR --call 4     ceilings, a calibration, runs of other shapes for the
#                                                    planner, what was asked beside what was seen, NCCL
#                                                    tests of four ranks
#     bash scripts/gpu_day.sh --out DIR --rehearse   everything on a CPU, with small shapes
#
# --seconds 540 limits all parts together. The limits of single parts hold where several are asked for.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
case " $* " in
*" --rehearse "*) [ ! -x .venv/bin/python ] || python=.venv/bin/python ;;
esac
exec "$python" benchmarks/gpu_day.py "$@"
