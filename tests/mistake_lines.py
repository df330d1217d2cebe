"""Command lines of train.py, plan.py and tune.py for mistake_cases.py, and their sentences.

A line is `WORDS | what the sentence says`. The first line of a block has the words before WORDS: @
is the repository, % starts two ranks with mpirun. Words NAME=VALUE at the beginning are environment
variables.
"""

OF_RUNS = {
    "train.py": """
@/train.py --layers 4 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --device cpu --steps 2
--tp 3 | tp(3) * pp(1) * dp(?) does not divide 1 rank: start
--hidden 10000000 | a rank of stage 0 needs, in GB, weights 19,200,007.8, gradients 19,200,007.8
--vocab-size 1000000000000 | a rank of stage 0 needs, in GB, weights 256,000.0, gradients
--seq-length 1099511627776 | a rank of stage 0 needs, in GB, weights 281,475.0, gradients
--seq-length 1099511627776 --positions rotary | a rank of stage 0 needs, in GB, weights 0.0
--set pad_vocab_multiple=4611686018427387904 | a rank of stage 0 needs, in GB, weights
--lr inf | --lr must be a finite number, not inf
--recompute full --recompute-layers 5 | --recompute-layers 5 is more than the model has: layers(4)
--recompute full --set recompute_blocks=5 | recompute_blocks 5 recomputes 5 blocks, but layers is 4
--objective prefix --seq-length 1 | samples need 2 tokens or more, not 1
--data nowhere | nowhere.idx does not exist; a corpus is named by the PREFIX
--data only | only.idx does not exist; a corpus is named by the PREFIX
--data only.bin | only.bin.idx does not exist; a corpus is named by the PREFIX
--data 0.5 only 0.5 | --data 0.5 only 0.5: give a weight before every prefix, or before none
--data synthetic only | --data synthetic must be alone: random tokens do not mix with files
--data only --split 95,5,x | --split takes up to three shares such as 95,5,0, not '95,5,x'
--data only --split 0,0,0 | --split takes up to three shares such as 95,5,0, not '0,0,0'
--data only --split 1,2,3,4 | --split takes up to three shares such as 95,5,0, not '1,2,3,4'
--data few --answers-only | --answers-only: few has no few.targets.bin and .idx, which mark answers
--data cut --answers-only | cut has 100 tokens, but cut.targets has marks of 50
--data cut --answers-only --eval-data a=few | --answers-only: few has no few.targets.bin and .idx
--eval-data a=few:7 | --eval-data a asks for 7 samples, few has 6 of 16 tokens
--eval-tasks nowhere.jsonl | --eval-tasks: cannot read nowhere.jsonl: No such file or directory
--eval-tasks t=a-file | a-file:1 is not JSON
--eval-tasks dir/.jsonl | --eval-tasks dir/.jsonl: '' is no name: give NAME=dir/.jsonl
--after-save true | --after-save true needs --save-every or --save-every-minutes: nothing is saved
--eval-data a=few --seq-length 100 | --eval-data a: few holds 100 tokens, but one sample takes
--data only --eval-data a=few:999999999999 | --eval-data a asks for 999999999999 samples, few has 6
--steps 1000000000000 --data only | the order of 8,000,000,000,000 samples takes 96,000.0 GB or more
--data only --eval-samples 800000000000 | the order of 800,000,000,000 samples takes 9,600.0 GB
--out a-file | --out a-file: cannot write in
--out a-file/run | --out a-file/run: cannot write in
--out '' | no value, after '--out': is a variable not set?
--out= | no value, after '--out=': is a variable not set?
--out /proc/run | --out /proc/run: cannot write in /proc
--resume '' | no value, after '--resume': is a variable not set?
--resume nowhere | --resume nowhere: there is no such folder
--resume a-file | --resume a-file: there is no such folder
--save-switch dir | --save-switch dir is a folder, not a file that may appear
--save-switch nowhere/x/stop | --save-switch nowhere/x/stop can never appear: there is no folder
--kill-switch nowhere/x/stop | --kill-switch nowhere/x/stop can never appear: there is no folder
--save-switch '' | no value, after '--save-switch': is a variable not set?
--kill-switch dir | --kill-switch dir is a folder, not a file that may appear
--kill-switch a-file | --kill-switch a-file exists: remove it to train
--experts 2 --experts-per-token 2 --no-bias --record-routing f --pin-routing g | --record-routing
LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 --sample-every 2 --sample-prompt é | are not ascii
--sample-every 2 --sample-prompt '' | no value, after '--sample-prompt': is a variable not set?
--sample-every 2 --sample-prompt text | --sample-prompt 'text': no tokenizer was found beside
--sample-every 2 --sample-prompt 1,x | --sample-prompt '1,x': no tokenizer was found beside
--sample-every 2 --sample-prompt 100 | --sample-prompt: token id 100 is not below vocab-size(100)
--sample-every 2 --sample-prompt '1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7' | --sample-prompt has 16 tokens:
--model gpt9 | no preset is called 'gpt9'
--model '' | no value, after '--model': is a variable not set?
--model dir | --model dir: it has no config.json, and is no run's: no run.json
--model shapes/cut/config.json | shapes/cut/config.json is not JSON: Unterminated string starting at
--model shapes/binary/config.json | shapes/binary/config.json is not JSON
--model shapes/list/config.json | shapes/list/config.json holds a list, not an object
--model shapes/other/config.json | shapes/other/config.json is a 'no-such-family': docs
--model shapes/none/config.json | shapes/none/config.json is a None: docs/models.md lists
--model shapes/missing/config.json | shapes/missing/config.json has no 'num_hidden_layers'
--model shapes/words/config.json | shapes/words/config.json: --hidden takes a whole number, not
--model shapes/huge/config.json | --vocab-size must be below 2^63, not a number of 71 bits
--model shapes/text/config.json | shapes/text/config.json: norm_eps takes a number, not 'inf'
--model shapes/negative/config.json | shapes/negative/config.json: --layers must be at least 1, not
--model shapes/kv/config.json | shapes/kv/config.json: kv-heads(3) does not divide heads(4)
--model shapes/dynamic/config.json | rotary positions are scaled by 'dynamic'; here: none, linear
--model shapes/bias/config.json | shapes/bias/config.json: mlp_bias is True; here it is False
--model shapes/relu6/config.json | hidden_act is 'relu6'; here it is silu or swish
--model shapes/window/config.json | sliding_window is 'long', not a number of tokens
--model shapes/chunks/config.json | layer_types has 'chunked_attention'; here: full_attention
--wandb '' | no value, after '--wandb': is a variable not set?
--load nowhere | --resume nowhere: there is no such folder
--tp | --tp: expected one argument
run.toml | unknown argument 'run.toml'
--config nowhere.toml | cannot read --config nowhere.toml: No such file or directory
--config dir | cannot read --config dir: Is a directory
--config /dev/zero | cannot read --config /dev/zero: it is not a regular file
--config latin1.toml | --config latin1.toml is not TOML: line 3 is not UTF-8
--config utf16.toml | --config utf16.toml is not TOML: line 1 is not UTF-8
--config binary.toml | --config binary.toml is not TOML: line 1 is not UTF-8
--config model5.toml | --config model5.toml: --model takes a text, not 5
--config boolean.toml | --config boolean.toml: --tp takes a whole number, not True
--config twice.toml | --config twice.toml gives 'tp' twice: in [layout] and in [training]
--config both.toml | --config both.toml gives 'global_batch_size' twice: at the top and at the top
--config key.toml | --config key.toml has an unknown key 'tensor-parallel'
--config cut.toml | --config cut.toml is not TOML
--config table.toml | --config table.toml has an unknown table [mesh]: there are [model], [layout]
--config keys.toml | has unknown keys: tensor-parallel (did you mean 'tp'?), foo
--config again.toml | --config again.toml is not TOML: Cannot overwrite a value (at line 2
--config layers.toml | --config layers.toml: --layers takes a whole number, not True
--config string.toml | --config string.toml: --data takes a list of one or more values, not 'a'
--config items.toml | --config items.toml: --data takes a text, not [1]
--config inf.toml | --config inf.toml: --lr must be a finite number, not inf
--config text.toml | --config text.toml: --log-every takes a whole number, not '100'
--config empty.toml | --config empty.toml: --resume is empty or has control
--config nul.toml | --config nul.toml: --out is empty or has control
--config list.toml | --config list.toml: --tp takes a whole number, not (1, 2)
--config none.toml | --config none.toml: --data takes a list of one or more values, not []
--config nested.toml | --config nested.toml: --tp takes a whole number, not {'size': 2}
--config deep.toml | --config deep.toml is not TOML
--config hex.toml | --config hex.toml: --log-every must be below 2^63, not a number of 20000 bits
""",
    "launch": """
@/train.py --layers 2 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --device cpu --steps 2
OMP_NUM_THREADS=abc | OMP_NUM_THREADS is 'abc', not a number of threads above 0
OMP_NUM_THREADS=0 | OMP_NUM_THREADS is '0', not a number of threads above 0
OMP_NUM_THREADS=4,0 | OMP_NUM_THREADS is '4,0', not a number of threads above 0
OMP_NUM_THREADS=-2 | OMP_NUM_THREADS is '-2', not a number of threads above 0
PMI_RANK=zero PMI_SIZE=2 | the environment variable PMI_RANK is 'zero', not a whole number
PMI_SIZE=2 | the launcher has set some of its variables, but not PMI_RANK
PMI_RANK=2 PMI_SIZE=2 | PMI_RANK is 2, which is not below PMI_SIZE, 2
SLURM_NTASKS=many | the environment variable SLURM_NTASKS is 'many', not a whole number
SLURM_STEP_ID=0 SLURM_PROCID=x SLURM_NTASKS=2 | the environment variable SLURM_PROCID is 'x', not a
SLURM_JOB_NUM_NODES=2(x3) | the environment variable SLURM_JOB_NUM_NODES is '2(x3)', not a whole
SLURM_CPUS_PER_TASK=all SLURM_STEP_ID=0 | the environment variable SLURM_CPUS_PER_TASK is 'all'
OMPI_COMM_WORLD_SIZE=two OMPI_COMM_WORLD_RANK=0 | the environment variable OMPI_COMM_WORLD_SIZE is
""",
    "torchrun": """
TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 @/train.py --model 1b3
| the launcher has set some of its variables, but not MASTER_PORT
MASTER_PORT=1 | MASTER_ADDR is not set, where the ranks meet
MASTER_ADDR=h MASTER_PORT=http | the environment variable MASTER_PORT is 'http', not a whole number
MASTER_ADDR=h MASTER_PORT=1 RANK=one | the environment variable RANK is 'one', not a whole number
MASTER_ADDR=h MASTER_PORT=1 RANK=2 | RANK is 2, which is not below WORLD_SIZE, 2
MASTER_ADDR=h MASTER_PORT=1 WORLD_SIZE= | the environment variable WORLD_SIZE is '', not a whole
MASTER_ADDR=h MASTER_PORT=1 LOCAL_RANK=2 | LOCAL_RANK is 2, which is not below LOCAL_WORLD_SIZE, 2
""",
    "mpirun": """
%/train.py --layers 2 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --device cpu --steps 2
--tp 3 | tp(3) * pp(1) * dp(?) does not divide 2 ranks
--out a-file/run | --out a-file/run: cannot write in
--hidden 10000000 | a rank of stage 0 needs, in GB, weights 9,600,006.8, gradients 9,600,006.8
OMP_NUM_THREADS=none | OMP_NUM_THREADS is 'none', not a number of threads above 0
""",
    "plan.py": """
@/plan.py
| the following arguments are required: QUESTION; see --help
layout | QUESTION: invalid choice: 'layout'
layouts | the model has no --layers, --hidden, --heads: give them, or --model PRESET
layouts --model 176 | no preset is called '176'
layouts --model 176b --gpu b100 | no machine is called 'b100'
layouts --model 176b --gpu '' | no value, after '--gpu': is a variable not set?
layouts --model 176b --nodes 0 | --nodes must be above 0, not 0
layouts --model 176b --nodes 2 --gpus 16 | give --nodes(2) or --gpus(16), not both
layouts --model 176b --gpus 10000000000 | --gpus must be below 1e+06, not 1e+10
layouts --model 176b --nodes two | --nodes takes a whole number, not 'two'
layouts --model 176b --top -1 | --top must be above 0, not -1
layouts --model 176b --calibration zero.toml | --calibration needs --gpu: which machine was it
stages --model 176b --tp 9 | tp(9) does not divide heads(112)
stages --model 176b --tp 4 --pp 12 --gpus 1 | does not divide 1 GPU: give --gpus 48
stages --model 176b --tp 4 --pp 12 --gpus 100 | tp(4) * pp(12) * dp(?) does not divide 100 GPUs
stages --model 176b --pp 100 | pp(100) is more stages than there are parts to place: 70 blocks +
days --model 176b | how many tokens? give --tokens, such as --tokens 450e9
days --model 176b --tokens 450Q | --tokens takes a number, not '450Q'
days --model 176b --tokens nan | --tokens must be above 0, not nan
days --model 176b --tokens -1 | --tokens must be above 0, not -1
model --model 176b --risk 0.2 | --risk goes with layouts, stages, days, budget, shapes, largest,
days --model 176b --tokens 1e9 --gpus 1 | a100-80: out of memory: stage 0 needs 3195.7 GB with
smallest --model 176b --gpus 8 | --gpus goes with layouts, stages, days, budget, shapes, largest,
largest --gpus 8 --tp 2 | --tp: largest tries every tp and pp at micro-batch 1, full recomputation
days --model 176b --tokens 200BB | --tokens takes a number, not '200BB'
model --model 176b --tokens 1e9 | --tokens goes with days, not model
model --model 176b --trace t.json | --trace goes with timeline, not model
days --model 176b --tokens inf | --tokens must be below 1e+18, not inf
rampup | which ramp-up? give --rampup-batch-size START INCREMENT SAMPLES, such as 192 16 9765625
rampup --rampup-batch-size 16 16 1600 --submit x | --submit needs --jobs FILE
rampup --rampup-batch-size 16 16 1600 --jobs x | --jobs needs --nodes-by-batch BATCH:NODES
rampup --rampup-batch-size 16 16 1600 --nodes-by-batch 16:1 --gpus 12 | leave out --gpus
rampup --rampup-batch-size 16 16 1600 --nodes-by-batch 16 | takes BATCH:NODES, such as 192:18
rampup --rampup-batch-size 16 16 1600 --nodes-by-batch 16:1 | how long is the run? give --train-
layouts --model 176b --nodes-by-batch 3:1 | --nodes-by-batch goes with rampup, not layouts
rampup --rampup-batch-size 16 16 1600 --deadline 3 | --deadline is gone: name the segments yourself
rampup --rampup-batch-size 16 16 1000 --global-batch-size 33 | a ramp-up from 16 by 16 over 1000
timeline --trace nowhere/t.json | cannot write nowhere/t.json: No such file or directory
timeline --schedule auto --pp 8 --layers 32 --trace nowhere/t.json | cannot write nowhere/t.json
rampup --rampup-batch-size 16 16 1600 --jobs dir | cannot write dir: Is a directory
calibrate nowhere --gpu a100-80 --write nowhere/m.toml | cannot write nowhere/m.toml: No such file
gap nowhere --json | cannot read nowhere: No such file or directory
timeline --pp 2 --steps 3 --train-samples 8 | give one of --steps and --train-samples; both were
smallest --model 176b --hidden 100000000 | heads(112) does not divide hidden(100000000)
model --layers 2 --hidden 30 --heads 4 | heads(4) does not divide hidden(30)
model --config latin1.toml | --config latin1.toml is not TOML: line 3 is not UTF-8
constants --gpu cpu | unknown argument '--gpu': see plan.py constants --help
""",
    "plan.py, calibration": """
@/plan.py layouts --model 176b --gpu a100-80
--calibration nowhere.toml | cannot read nowhere.toml: No such file or directory
--calibration binary.toml | binary.toml is not TOML: line 1 is not UTF-8
--calibration utf16.toml | utf16.toml is not TOML: line 1 is not UTF-8
--calibration dir | cannot read dir: Is a directory
--calibration model5.toml | the calibration model5.toml was measured on 'no stated device', but
--calibration zero.toml | the calibration zero.toml says bandwidth = 0
--calibration nan.toml | the calibration nan.toml says memory = nan
--calibration word.toml | the calibration word.toml says memory = '80 GB'
--calibration link.toml | the calibration link.toml needs alpha and beta in [network], not
""",
    "tune.py": """
@/tune.py --layers 4 --hidden 64 --heads 4 --gpu cpu --gpus 8 --launch 'env {ranks}'
--launch mpirun | --launch 'mpirun' has no {ranks}, as in 'mpirun -n {ranks}'
--launch 'mpirun -n {rank}' | --launch 'mpirun -n {rank}' has no {ranks}, as in 'mpirun -n {ranks}'
--launch "mpirun -n {ranks} 'x" | is not a command
--launch 'no-such-mpirun -n {ranks}' | cannot start 'no-such-mpirun' of --launch
--gpus eight | --gpus takes a whole number, not 'eight'
--gpus 0 | --gpus must be above 0, below 1e+18, not 0
--gpus -8 | --gpus must be above 0, below 1e+18, not -8
--try tp=x | --try tp=x: --tp takes a whole number, not 'x'
--try micro-batch-size=0 | --try micro-batch-size=0: --micro-batch-size must be at least 1, not 0
--try tp | --try takes AXIS=V,V with AXIS one of model, tp, pp, cp, micro-batch-size
--try shoes=1 | --try takes AXIS=V,V with AXIS one of model, tp, pp, cp, micro-batch-size
--try zero=9 | --try zero=9: --zero is one of 0, 1, 2, 3, not 9
--try tp=1,,2 | --try tp=1,,2: --tp takes a whole number, not ''
--try tp=1 --try tp=2 | --try takes AXIS=V,V with AXIS one of model, tp, pp, cp, micro-batch-size
--try hidden=32,64 | --try takes AXIS=V,V with AXIS one of model, tp, pp, cp, micro-batch-size
--try sequence-parallel=yes | --try sequence-parallel=yes: --sequence-parallel takes true or false
--try zero=four | --try zero=four: --zero takes a whole number, not 'four'
--budget=-1 | --budget is a number of trials or minutes above 0, as 12 or 90m, not '-1'
--budget soon | --budget is a number of trials or minutes above 0, as 12 or 90m, not 'soon'
--budget nanm | --budget is a number of trials or minutes above 0, as 12 or 90m, not 'nanm'
--budget 2h | --budget is a number of trials or minutes above 0, as 12 or 90m, not '2h'
--budget '' | no value, after '--budget': is a variable not set?
--time-limit nan | --time-limit must be above 0, below 1e+18, not nan
--time-limit 10m | --time-limit takes a number, not '10m'
--timed 0 | --timed must be above 0, below 1e+18, not 0
--gain nan | --gain must be at least 0 and below 1e+18, not nan
--out a-file | --out a-file: cannot write in
--out a-file/tune | --out a-file/tune: cannot write in
--out trials | trials/trials.jsonl, line 1, is no trial
--out binary-trials | cannot read the trials in binary-trials/trials.jsonl
--gain 5 --all | --gain is of a search: leave it out, or --all
--calibration binary.toml | binary.toml is not TOML: line 1 is not UTF-8
--gpus 7 --out new | no layout can run on 7 ranks: see the reasons above
--gpu h1000 | no machine is called 'h1000'
--budgett 5 | unknown argument '--budgett'
""",
    "tune.py, what it needs": """
@/tune.py --layers 4 --hidden 64 --heads 4 --gpu cpu
| give --launch: see python tune.py --help
--gpus 8 | give --launch: see python tune.py --help
--launch 'env {ranks}' | give --gpus: see python tune.py --help
""",
}
