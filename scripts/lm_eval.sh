#!/usr/bin/env bash
# Runs tasks of lm-evaluation-harness on a checkpoint, by exporting it to transformers.
#
#     bash scripts/lm_eval.sh CHECKPOINT TOKENIZER TASKS [OPTIONS of lm_eval]
#     bash scripts/lm_eval.sh runs/demo/checkpoints/step_00000180 data/stories.tokenizer.json arc_easy
#
# TOKENIZER: a tokenizer.json or a folder with one; - is that of the checkpoint. TASKS: names with
# commas between them, whose data that program downloads; or FILE.jsonl (also .json, .jsonl.gz and so
# on), whose lines have a "text": perplexity by word and by byte, without a network. Texts begin with
# the token that documents of the corpus begin with, if there is one. The Python is the one on PATH,
# or that of .venv, that has the packages of requirements-lm-eval.txt.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
fi
root="$(cd "$(dirname "$0")/.." && pwd)"
for python in python3 "$root/.venv/bin/python" none; do
    [ "$python" != none ] || {
        echo "error: neither $(command -v python3) nor .venv has lm_eval: pip install" \
            "-r requirements-lm-eval.txt -c constraints.txt" >&2
        exit 2
    }
    "$python" -c 'import accelerate, lm_eval, torch, transformers' 2>/dev/null && break
done
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
tasks="$3"
texts=()
if [[ "$3" =~ \.(jsonl|ndjson|json)(\.(gz|bz2|xz|zst))?$ ]]; then
    [ -f "$3" ] || { echo "error: $3: there is no such file" >&2; exit 2; }
    texts=("$3" "$folder/texts.jsonl")
    tasks="$folder/texts.yaml"
    export TQDM_DISABLE=1 # a bar for each text
    cat >"$tasks" <<YAML
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: "$folder/texts.jsonl"}, cache_dir: "$folder/cache"}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
YAML
fi
tokenizer=(--tokenizer "$2")
settings="$2"
if [ "$2" = - ]; then
    tokenizer=()
    settings="$folder/hf"
fi
"$python" "$root/checkpoint.py" export --to hf ${tokenizer[@]+"${tokenizer[@]}"} "$1" "$folder/hf"
# Whether texts begin with a token, as the documents of the corpus do; and a check of the texts.
# Names of special tokens are text where they are text in the corpus.
begins="$("$python" "$root/scripts/eval_texts.py" "$settings" ${texts[@]+"${texts[@]}"} \
    --exported "$folder/hf")"
"$python" -m lm_eval run --model hf --model_args "pretrained=$folder/hf,add_bos_token=$begins" \
    --tasks "$tasks" "${@:4}"
