#!/usr/bin/env bash
# Runs tasks of lm-evaluation-harness on a checkpoint, by exporting it to transformers.
#
#     bash scripts/lm_eval.sh CHECKPOINT TOKENIZER TASKS [OPTIONS of lm_eval]
#     bash scripts/lm_eval.sh runs/demo/checkpoints/step_00000110 data/stdlib.tokenizer.json arc_easy
#
# TASKS: names with commas between them; tasks are downloaded by that program.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
fi
root="$(cd "$(dirname "$0")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python=python3
if ! "$python" -c 'import lm_eval, transformers' 2>/dev/null; then
    echo "error: $python has no lm_eval or no transformers:" \
        "install them with \`$python -m pip install lm_eval transformers\`" >&2
    exit 2
fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"$python" "$root/checkpoint.py" export --to hf --tokenizer "$2" "$1" "$folder/hf"
"$python" -m lm_eval --model hf --model_args "pretrained=$folder/hf" --tasks "$3" "${@:4}"
