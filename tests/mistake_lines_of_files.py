"""Command lines of the programs of files, for mistake_cases.py, and what their sentences say.

mistake_lines.py says how a line is to be read.
"""

OF_FILES = {
    "sample.py": """
@/sample.py
| the following arguments are required: RUN
--prompt text | the following arguments are required: RUN
nowhere | give one of --prompt, --chat, --eval-data, --eval-tasks; none was given
nowhere --prompt text | nowhere is not a complete checkpoint: there is no such folder
a-file --prompt text | a-file is not a complete checkpoint: it is a file
dir --prompt text | dir is not a complete checkpoint: it has no manifest.json
'' --prompt text | no value, after '': is a variable not set?
cut-manifest --prompt text | cut-manifest/manifest.json is damaged: its contents do not match its
dir dir --prompt text | unrecognized arguments: dir
""",
    "sample.py of a run": """
@/sample.py @/tests/data/run_189cc1d
--prompt text | --prompt 'text': no tokenizer was found beside the checkpoint or the corpus
--prompt '' | no value, after '--prompt': is a variable not set?
--prompt | --prompt: expected one argument
--prompt '1, 61' | --prompt: token id 61 is not below vocab-size(61)
--prompt '1 -2' | --prompt '1 -2': no tokenizer was found beside the checkpoint or the corpus
--prompt 1 --eval-data a=b | --eval-data, --eval-tasks; --prompt and --eval-data were given
--eval-data a=b --seed 5 | --seed goes with --prompt or --chat, not --eval-data
--eval-data a=b --top-p 0.5 --max-tokens 3 | --max-tokens goes with --prompt or --chat, not
--prompt '0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5' | the longest prompt has 16 tokens and --max-tokens
--prompt 1 --max-tokens 16 | the longest prompt has 1 tokens and --max-tokens is 16: together 17
--prompt 1 --max-tokens 0 | --max-tokens must be from 1 to 1048576, not 0
--prompt 1 --max-tokens ten | --max-tokens takes a whole number, not 'ten'
--prompt 1 --max-tokens 1e9 | --max-tokens must be from 1 to 1048576, not 1000000000
--prompt 1 --temperature -1 | --temperature must be at least 0 and finite, not -1.0
--prompt 1 --temperature nan | --temperature must be at least 0 and finite, not nan
--prompt 1 --temperature warm | --temperature takes a number, not 'warm'
--prompt 1 --top-p 0 | --top-p must be above 0 and at most 1, not 0.0
--prompt 1 --top-p 95 | --top-p must be above 0 and at most 1, not 95.0
--prompt 1 --seed -3 | --seed must be at least 0 and below 2^63, not -3
--prompt 1 --tokenizer nowhere | --tokenizer nowhere: there is no such file
--prompt 1 --tokenizer dir | --tokenizer dir/tokenizer.json: there is no such file
--prompt 1 --tokenizer a-file | cannot read the tokenizer a-file: expected ident at line 1 column 2
--prompt 1 --tokenizer binary.toml | binary.toml is not UTF-8
--prompt 1 --max-tokens 5 --tp 2 | tp(2) * pp(1) * dp(?) does not divide 1 rank: start
--prompt 1 --max-tokens 5 --pp 3 | tp(1) * pp(3) * dp(?) does not divide 1 rank: start
--prompt 1 --max-tokens 5 --tp 0 | --tp must be at least 1, not 0
--prompt 1 --max-tokens 5 --precision fp8 | --precision is one of auto, fp64, fp32, bf16, fp16
--prompt 1 --max-tokens 5 --device gpu | --device is one of auto, cpu, cuda, not 'gpu'
--promt 1 | unrecognized arguments: --promt 1; did you mean '--prompt'?
LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 --prompt é | --prompt has bytes that are not ascii
--prompt 1 --greedy | unrecognized arguments: --greedy
--prompt 1 --topp=0.5 | unrecognized arguments: --topp=0.5; did you mean '--top-p'?
--eval-data nowhere | --eval-data takes NAME=PREFIX or NAME=PREFIX:SAMPLES such as books=data/books
--eval-data a=nowhere | nowhere.idx does not exist
--eval-data a=only | only.idx does not exist
--eval-data a=few:7000 | --eval-data a asks for 7000 samples, few has
--eval-data a=b a=c | --eval-data a=c: another set is called a
--eval-data | --eval-data: expected at least one argument
--eval-tasks nowhere | --eval-tasks: cannot read nowhere: No such file or directory
--prompt 1 --scores f | --scores f needs --eval-tasks
--eval-tasks a-file --seed 3 | --seed goes with --prompt or --chat, not --eval-tasks
""",
    "sample.py on two ranks": """
%/sample.py @/tests/data/run_189cc1d
--prompt 1 --max-tokens 5 --tp 3 | tp(3) * pp(1) * dp(?) does not divide 2 ranks
--prompt text --tp 2 | --prompt 'text': no tokenizer was found beside the checkpoint or the corpus
""",
    "checkpoint.py": """
@/checkpoint.py
| the following arguments are required: COMMAND
shwo dir | COMMAND: invalid choice: 'shwo'
show | the following arguments are required: DIR
show nowhere | nowhere is not a complete checkpoint: there is no such folder
show dir | dir is not a complete checkpoint: it has no manifest.json
show a-file | a-file is not a complete checkpoint: it is a file
show '' | no value, after 'show': is a variable not set?
verify cut-manifest | cut-manifest/manifest.json is damaged: its contents do not match its own
export dir new | the following arguments are required: --to
export --to onnx dir new | --to: invalid choice: 'onnx'
export --to hf nowhere new | nowhere is not a complete checkpoint: there is no such folder
export --to hf --dtype int8 dir new | --dtype: invalid choice: 'int8'
export --to hf --family no-such dir new | --family: invalid choice: 'no-such'
import --from hf nowhere new | nowhere/config.json: No such file or directory
""",
    "prepare_data.py": """
@/scripts/prepare_data.py
--out c | nothing to prepare: name files or folders, or give --stdlib
a.txt | the following arguments are required: --out
--out c nowhere.txt | nowhere.txt does not exist
--out c only.bin | only.bin is not one of .py, .txt, .md, .rst
--out c dir | .csv, .parquet, .arrow, .h5, .hdf5 (or with .gz, .bz2, .xz, .zst added, but for
--out '' a.txt | no value, after '--out': is a variable not set?
--out dir/ a.txt | --out dir/ is a folder: name a prefix in it, as data/books
--out a-file/c a.txt | the folder of --out, a-file: cannot write in
--out c --vocab-size 1000000000 a.txt | --vocab-size(1000000000) must be in 257..4194304
--out c --vocab-size 0 a.txt | --vocab-size(0) must be in 257..4194304
--out c --vocab-size 32kk a.txt | --vocab-size takes a whole number, not '32kk'
--out c --vocab-size 300 --tokenizer a.txt a.txt | --vocab-size is for a new tokenizer; --tokenizer
--out c --tokenizer a.txt a.txt | --tokenizer a.txt is not a tokenizer
--out c --tokenizer '' a.txt | no value, after '--tokenizer': is a variable not set?
--out c --tokenizer-mb nan a.txt | --tokenizer-mb(nan) must be in 1e-06..1000000000.0
--out c --tokenizer-mb -1 a.txt | --tokenizer-mb(-1.0) must be in 1e-06..1000000000.0
--out c --shuffle-seed -1 a.txt | --shuffle-seed(-1) must be in 0..4294967295
--out c --json-key body bad.jsonl | bad.jsonl:1 has no key 'body'
--out d latin.txt | none of the 1 documents has text in UTF-8
""",
    "plot_loss.py": """
@/scripts/plot_loss.py
| the following arguments are required: folder
nowhere | nowhere is no folder of a run: cannot read nowhere/run.json: No such file or directory
dir | dir is no folder of a run: cannot read dir/run.json: No such file or directory
a-file | a-file is no folder of a run: cannot read a-file/run.json: Not a directory
binary-run | binary-run is no folder of a run: cannot read binary-run/run.json
garbage-run | garbage-run is no folder of a run: cannot read garbage-run/run.json
empty-run | empty-run/run.json is no run.json: it has no configuration of a run
other-run | other-run/run.json is no run.json: it has no configuration of a run
no-config-run | no-config-run/run.json holds a list, not an object
dir dir | unrecognized arguments: dir
""",
    "benchmarks": """
@/benchmarks/
network/allreduce.py | one rank has nothing to exchange: start this with mpirun or srun
network/allreduce.py --operations all-gahter | --operations are of all-reduce, reduce-scatter
network/allreduce.py --factor 1 | no sizes from 32768 to 17179869184 by factors of 1
network/allreduce.py --seconds nan | --seconds must be a number above 0, not nan
network/allreduce.py --min-bytes 1Q | --min-bytes takes a whole number, not '1Q'
network/allreduce.py --trials 0 | sizes, trials, warm-ups, tp and pp are at least 1
network/allreduce.py --line-rate -5 | --line-rate must be a number above 0, not -5.0
network/allreduce.py --out a-file | --out a-file: cannot write in
planner/check_rows.py | the following arguments are required: file
planner/check_rows.py nowhere.csv | cannot read nowhere.csv: No such file or directory
planner/check_rows.py a-file | a-file has no rows
planner/check_rows.py binary.toml | binary.toml is not a CSV file
planner/plan_accuracy.py --rows nowhere.csv | cannot read nowhere.csv: No such file or directory
planner/plan_accuracy.py --rows binary.toml | binary.toml is not a CSV file
planner/plan_accuracy.py --row x | cannot read x: No such file or directory
planner/tune_replay.py nowhere.csv | cannot read nowhere.csv: No such file or directory
planner/tune_replay.py a-file | a-file has no rows
planner/tune_replay.py --tables binary.toml | --tables needs ROWS.csv
planner/tune_replay.py --gain -1 | --gain must be at least 0 and below 1000, not -1.0
layouts/precision.py | the following arguments are required: folder
layouts/precision.py a-file | FOLDER a-file: cannot write in
""",
    "supervise.py": """
@/supervise.py
| after --, but nothing
-- mpirun -n 2 hostname | after --, but mpirun -n 2 hostname
-- python train.py | a restart continues by --resume auto: give it to train.py
-- python train.py --resume x | give it to train.py, not x
-- torchrun train.py --resume auto | torchrun does not pass on the status
--max-slowdown 2 -- x.py --resume auto | need --gpu NAME
--gpu cpu -- srun x.py --resume auto | --gpu cpu is for other numbers of nodes, which needs a Slurm
--gpu cpu --max-slowdown 0.9 -- srun x.py --resume auto | --max-slowdown must be at least 1 and
--spare-nodes 1 -- python t.py --resume auto | --spare-nodes(1) needs a Slurm job
--spare-nodes -1 -- x.py | --spare-nodes must be at least 0, not -1
--spare-nodes -- x.py | --spare-nodes: expected one argument
-- mpirun -n 2 python train.py --resume auto --out | argument --out: expected one argument
-- mpirun -n 2 python train.py --resume auto --out --tp 2 | argument --out: expected one argument
-- mpirun -n 2 python train.py --out new --resume | argument --resume: expected one argument
-- mpirun -n 2 python train.py --out new --config | argument --config: expected one argument
""",
    "rehearse.py": """
@/rehearse.py --layers 4 --hidden 64 --heads 4 --global-batch-size 8
--gpus 6 --tp 4 | tp(4) * pp(1) * dp(?) does not divide 6 GPUs
--tp 4 | tp(4) * pp(1) * dp(?) does not divide 1 GPU: give --gpus 4
--gpus 8 --nodes 3 | nodes(3) does not divide gpus(8)
--gpus 2305843009213693951 | from 1 to 1000000, not 2305843009213693951
--gpus 0 | --gpus must be from 1 to 1000000, not 0
--gpu h10 --json nowhere/x.json | cannot write nowhere/x.json: No such file
--gpu h10 --json . | cannot write .: Is a directory
--gpu h10 | no machine is called 'h10'
--optimizer adamw8bit | --optimizer adamw8bit is not rehearsed: bitsandbytes' kernels
--optimizer apex | --optimizer apex is not rehearsed: apex' kernels
""",
}
