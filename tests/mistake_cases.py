"""Mistakes that a tired user makes, over all programs; test_mistakes.py says what must follow.

    folder = prepare(tmp_path)                 # files to be wrong with
    outcome = run(CASES[0], folder)            # a process of its own, started in that folder

A line below is `WORDS | what the sentence says`; @ is the repository, and a block's first line are
the words before WORDS. `NAME=VALUE` words at the beginning of WORDS are environment variables.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ranks import ROOT, mpi_command

LIMIT = 60.0  # seconds after which a process counts as hung
IMPORT_LINE = "import time:"  # how Python reports an import

BLOCKS = {
    "train.py": """
@/train.py --layers 4 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --device cpu --steps 2
--tp 3 | x
--pp 6 | x
--dp 2 | x
--hidden 66 | x
--hidden -64 | x
--hidden 64.5 | x
--hidden 6e1 | x
--hidden 10000000 | x
--hidden 99999999999999999999 | x
--layers four | x
--layers 0 | x
--layers 1000000 | x
--heads 5 | x
--kv-heads 3 | x
--hidden 12 --positions rotary | x
--positions relative | x
--vocab-size 1000000000000 | x
--vocab-size 50k | x
--seq-length 1099511627776 | x
--seq-length 1099511627776 --positions rotary | x
--seq-length 0 | x
--max-positions 8 | x
--pad-vocab-multiple 4611686018427387904 | x
--norm-eps nan | x
--norm-eps -1 | x
--rotary-base 0 | x
--init-std inf | x
--lr inf | x
--lr 3e-4x | x
--lr -0.1 | x
--lr 1e-5 --min-lr 1e-3 | x
--adam-beta1 2 | x
--adam-beta2 1 | x
--adam-eps nan | x
--sgd-momentum 1.5 --optimizer sgd | x
--clip-grad -1 | x
--weight-decay nan | x
--initial-loss-scale-power 5000 | x
--min-loss-scale 0 | x
--precision fp8 | x
--precision FP16 | x
--grad-dtype bf16 | x
--optimizer adam | x
--optimizer adamw8bit --precision fp64 | x
--zero 4 | x
--zero 0 --overlap-param-gather | x
--zero 2 --optimizer muon | x
--schedule zigzag | x
--partition 3,2 | x
--partition 2;2 | x
--partition -1,5 | x
--recompute all | x
--recompute-layers 2 | x
--micro-batch-size 0 | x
--micro-batch-size 3 | x
--global-batch-size 5B | x
--global-batch-size 1000000000000 | x
--rampup-batch-size 2 3 | x
--rampup-batch-size 2 4 100 --global-batch-size 8 | x
--rampup-batch-size 2 2 100 --batch-schedule 0:8 | x
--batch-schedule 8:1B | x
--batch-schedule 1B:8 | x
--batch-schedule 0:8 5Q:16 | x
--batch-schedule 0:99999999 | x
--train-samples 100 | x
--lr-schedule cosin | x
--lr-warmup-samples -5 | x
--seed -1 | x
--data nowhere | x
--data only | x
--data only.bin | x
--data 0.5 only 0.5 | x
--data synthetic only | x
--split 95,5,x | x
--split 0,0,0 | x
--split 1,2,3,4 | x
--skip-samples 10-20 | x
--skip-samples 20:10 | x
--skip-samples 0:10 5:15 | x
--eval-samples -1 | x
--steps 0 | x
--steps 1e3 | x
--steps 1000000000000 --data good | x
--out a-file | x
--out a-file/run | x
--out '' | x
--out= | x
--out /proc/run | x
--resume '' | x
--resume nowhere | x
--resume a-file | x
--load-weights-only | x
--save-switch dir | x
--save-switch '' | x
--kill-switch dir | x
--kill-switch a-file | x
--keep-last 2 | x
--keep-every 5 | x
--save-weights-only | x
--save-every -1 | x
--save-every-minutes nan | x
--exit-after-minutes inf | x
--hang-timeout 0 | x
--hang-timeout 60 --no-watchdog | x
--profile-step 50 | x
--log-every 0 | x
--device gpu | x
--backend mpi | x
--model gpt2 | x
--model '' | x
--modle gpt2-124m | x
--tp | x
--tp=two | x
-tp 2 | x
run.toml | x
--config | x
--config nowhere.toml | x
--config dir | x
--config latin1.toml | x
--config utf16.toml | x
--config binary.toml | x
--config huge.toml | x
--config model5.toml | x
--config boolean.toml | x
--config twice.toml | x
--config both.toml | x
--config key.toml | x
--config cut.toml | x
--config inf.toml | x
--config text.toml | x
--config empty.toml | x
--config nul.toml | x
--config list.toml | x
--config none.toml | x
--config nested.toml | x
--config deep.toml | x
--config hex.toml | x
""",
    "launch": """
@/train.py --layers 2 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --device cpu --steps 2
OMP_NUM_THREADS=abc | x
OMP_NUM_THREADS=0 | x
OMP_NUM_THREADS=4,0 | x
OMP_NUM_THREADS=-2 | x
PMI_RANK=zero PMI_SIZE=2 | x
PMI_SIZE=2 | x
PMI_RANK=2 PMI_SIZE=2 | x
SLURM_NTASKS=many | x
SLURM_STEP_ID=0 SLURM_PROCID=x SLURM_NTASKS=2 | x
SLURM_JOB_NUM_NODES=2(x3) | x
SLURM_CPUS_PER_TASK=all SLURM_STEP_ID=0 | x
TORCHELASTIC_RUN_ID=x | x
TORCHELASTIC_RUN_ID=x LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 RANK=0 WORLD_SIZE=2 | x
TORCHELASTIC_RUN_ID=x LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 RANK=0 WORLD_SIZE=2 MASTER_ADDR=h | x
TORCHELASTIC_RUN_ID=x LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 RANK=one WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1 | x
OMPI_COMM_WORLD_SIZE=two OMPI_COMM_WORLD_RANK=0 | x
""",
    "mpirun": """
%/train.py --layers 2 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --device cpu --steps 2
--tp 3 | x
--out a-file/run | x
--hidden 10000000 | x
OMP_NUM_THREADS=none | x
""",
    "plan.py": """
@/plan.py
 | x
layout | x
layouts | x
layouts --model 176 | x
layouts --model 176b --gpu a100 | x
layouts --model 176b --gpu '' | x
layouts --model 176b --nodes 0 | x
layouts --model 176b --nodes 2 --gpus 16 | x
layouts --model 176b --gpus 10000000000 | x
layouts --model 176b --nodes two | x
layouts --model 176b --top -1 | x
layouts --model 176b --gpu a100-80 --calibration nowhere.toml | x
layouts --model 176b --gpu a100-80 --calibration binary.toml | x
layouts --model 176b --gpu a100-80 --calibration utf16.toml | x
layouts --model 176b --gpu a100-80 --calibration dir | x
layouts --model 176b --gpu a100-80 --calibration model5.toml | x
layouts --model 176b --gpu a100-80 --calibration zero.toml | x
layouts --model 176b --gpu a100-80 --calibration nan.toml | x
layouts --model 176b --gpu a100-80 --calibration word.toml | x
layouts --model 176b --gpu a100-80 --calibration link.toml | x
layouts --model 176b --calibration zero.toml | x
stages --model 176b --tp 7 | x
stages --model 176b --tp 4 --pp 12 --gpus 100 | x
stages --model 176b --pp 100 | x
days --model 176b | x
days --model 176b --tokens 450B | x
days --model 176b --tokens nan | x
days --model 176b --tokens -1 | x
days --model 176b --tokens 1e9 --gpus 1 | x
shapes --size 200B | x
shapes --size inf | x
shapes --size 1e15 | x
rampup | x
rampup --rampup-batch-size 16 16 1000 --global-batch-size 33 | x
timeline --trace nowhere/t.json | x
timeline --pp 2 --steps 3 --train-samples 8 | x
smallest --model 176b --hidden 100000000 | x
model --layers 2 --hidden 30 --heads 4 | x
model --config latin1.toml | x
check rows.csv | x
constants --gpu cpu | x
""",
    "tune.py": """
@/tune.py --layers 4 --hidden 64 --heads 4 --seq-length 16 --vocab-size 100 --gpu cpu
 | x
--ranks 8 | x
--ranks 8 --launch mpirun | x
--ranks 8 --launch 'mpirun -n {rank}' | x
--ranks 8 --launch "mpirun -n {ranks} 'x" | x
--ranks 8 --launch 'no-such-mpirun -n {ranks}' | x
--ranks eight --launch 'env {ranks}' | x
--ranks 0 --launch 'env {ranks}' | x
--ranks 8 --launch 'env {ranks}' --try tp=x | x
--ranks 8 --launch 'env {ranks}' --try micro-batch-size=0 | x
--ranks 8 --launch 'env {ranks}' --try tp | x
--ranks 8 --launch 'env {ranks}' --try shoes=1 | x
--ranks 8 --launch 'env {ranks}' --try zero=9 | x
--ranks 8 --launch 'env {ranks}' --try tp=1,,2 | x
--ranks 8 --launch 'env {ranks}' --try tp=1 --try tp=2 | x
--ranks 8 --launch 'env {ranks}' --try hidden=32,64 | x
--ranks 8 --launch 'env {ranks}' --try sequence-parallel=yes | x
--ranks 8 --launch 'env {ranks}' --sweep width | x
--ranks 8 --launch 'env {ranks}' --sweep zero --max-params | x
--ranks 8 --launch 'env {ranks}' --sweep heads --try heads=four | x
--ranks 8 --launch 'env {ranks}' --budget=-1 | x
--ranks 8 --launch 'env {ranks}' --budget soon | x
--ranks 8 --launch 'env {ranks}' --budget nanm | x
--ranks 8 --launch 'env {ranks}' --budget 2h | x
--ranks 8 --launch 'env {ranks}' --budget '' | x
--ranks 8 --launch 'env {ranks}' --time-limit nan | x
--ranks 8 --launch 'env {ranks}' --time-limit 10m | x
--ranks 8 --launch 'env {ranks}' --timed 0 | x
--ranks 8 --launch 'env {ranks}' --gain nan | x
--ranks 8 --launch 'env {ranks}' --reference-every -1 | x
--ranks 8 --launch 'env {ranks}' --tokens -5 | x
--ranks 8 --launch 'env {ranks}' --out a-file | x
--ranks 8 --launch 'env {ranks}' --out a-file/tune | x
--ranks 8 --launch 'env {ranks}' --out trials | x
--ranks 8 --launch 'env {ranks}' --out binary-trials | x
--ranks 8 --launch 'env {ranks}' --models 1b3 176x | x
--ranks 8 --launch 'env {ranks}' --models 1b3 --min-ranks | x
--ranks 8 --launch 'env {ranks}' --calibration binary.toml | x
--ranks 7 --launch 'env {ranks}' --out new | x
--ranks 8 --launch 'env {ranks}' --gpu h1000 | x
--ranks 8 --launch 'env {ranks}' --budgett 5 | x
""",
    "checkpoint.py": """
@/checkpoint.py
 | x
shwo dir | x
show | x
show nowhere | x
show dir | x
show a-file | x
show '' | x
verify cut-manifest | x
export dir new | x
export --to onnx dir new | x
export --to hf nowhere new | x
export --to hf --dtype int8 dir new | x
import --from hf nowhere new | x
import --from hf dir new | x
""",
    "prepare_data.py": """
@/scripts/prepare_data.py
--out c | x
a.txt | x
--out c nowhere.txt | x
--out c only.bin | x
--out c dir | x
--out '' a.txt | x
--out dir/ a.txt | x
--out a-file/c a.txt | x
--out c --vocab-size 1000000000 a.txt | x
--out c --vocab-size 0 a.txt | x
--out c --vocab-size 32k a.txt | x
--out c --vocab-size 300 --tokenizer a.txt a.txt | x
--out c --tokenizer a.txt a.txt | x
--out c --tokenizer '' a.txt | x
--out c --tokenizer-mb nan a.txt | x
--out c --tokenizer-mb -1 a.txt | x
--out c --shuffle-seed -1 a.txt | x
--out c --json-key body bad.jsonl | x
--out c latin.txt | x
""",
    "plot_loss.py": """
@/scripts/plot_loss.py
 | x
nowhere | x
dir | x
a-file | x
binary-run | x
garbage-run | x
empty-run | x
other-run | x
no-config-run | x
dir dir | x
""",
    "hang_report": """
-m watchdog.hang_report
 | x
nowhere | x
dir | x
a-file | x
cut-hang | x
binary-hang | x
empty-hang | x
folder-hang | x
""",
    "benchmarks": """
@/benchmarks/
allreduce.py | x
allreduce.py --operations all-gahter | x
allreduce.py --factor 1 | x
allreduce.py --seconds nan | x
allreduce.py --min-bytes 1K | x
allreduce.py --trials 0 | x
allreduce.py --line-rate -5 | x
allreduce.py --rates --host | x
allreduce.py --out a-file | x
check_rows.py | x
check_rows.py nowhere.csv | x
check_rows.py a-file | x
check_rows.py binary.toml | x
plan_accuracy.py --rows nowhere.csv | x
plan_accuracy.py --rows binary.toml | x
plan_accuracy.py --machine a100 | x
plan_accuracy.py --row x | x
tune_replay.py nowhere.csv | x
tune_replay.py a-file | x
tune_replay.py --tables binary.toml | x
tune_replay.py --gain -1 | x
layouts.py --rounds 0 | x
layouts.py --against dir | x
gpu.py --device tpu | x
faults.py many | x
faults.py 0 | x
precision.py | x
precision.py a-file | x
checkpoint.py | x
""",
}


@dataclass(frozen=True)
class Case:
    """A command line and what its sentence must say."""

    program: str
    words: str
    sentence: str
    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Outcome:
    """How it ended; seconds of the clock and of the processor; stderr without import times."""

    status: int
    out: str
    err: list[str]
    imported: frozenset[str]
    wall: float
    processor: float


def _cases(program: str, block: str) -> list[Case]:
    start, *lines = block.strip("\n").splitlines()
    python = [sys.executable]
    if start.startswith("%"):
        python, start = [*mpi_command(2), *python], "@" + start[1:]
    found = []
    for line in lines:
        words, _, sentence = line.rpartition("| ")
        parts = shlex.split(words)
        variables = []
        while parts and parts[0].partition("=")[0].isupper() and "=" in parts[0]:
            variables.append(parts.pop(0).split("=", 1))
        prefix = shlex.split(start.replace("@", str(ROOT)))
        if start.endswith("/"):
            prefix = [prefix[0] + parts.pop(0)]
        command = (*python, *prefix, *parts)
        found.append(Case(program, words.strip(), sentence, command, dict(variables)))
    return found


CASES = [case for name, block in BLOCKS.items() for case in _cases(name, block)]


def prepare(folder: Path) -> Path:
    """Files to be wrong with; the folder itself."""
    toml = "[layout]\ntp = 1\n"
    files: dict[str, bytes | str] = {
        "a-file": "text\n",
        "a.txt": "a text",
        "latin.txt": "Zürich".encode("latin-1"),
        "only.bin": b"\0" * 64,
        "good.bin": b"\0" * 64,
        "good.idx": b"\0" * 64,
        "bad.jsonl": '{"text": "a"}\n{"tex',
        "latin1.toml": "[layout]\ntp = 1\n# Zürich\n".encode("latin-1"),
        "utf16.toml": toml.encode("utf-16"),
        "binary.toml": bytes(range(128, 256)) * 8,
        "huge.toml": b"#" * 2_000_000,
        "model5.toml": "model = 5\n",
        "boolean.toml": "tp = true\n",
        "twice.toml": "[layout]\ntp = 1\n[mesh]\ntp = 2\n",
        "both.toml": "tp = 1\nglobal-batch-size = 8\nglobal_batch_size = 16\n",
        "key.toml": "[layout]\ntensor-parallel = 2\n",
        "cut.toml": "[layout]\ntp = ",
        "inf.toml": "lr = inf\n",
        "text.toml": 'steps = "100"\n',
        "empty.toml": 'resume = ""\n',
        "nul.toml": 'out = "a\\u0000b"\n',
        "list.toml": "tp = [1, 2]\n",
        "none.toml": "data = []\n",
        "nested.toml": "[layout.tp]\nsize = 2\n",
        "deep.toml": "x = " + "[" * 100_000,
        "hex.toml": "steps = 0x" + "f" * 5000,
        "zero.toml": 'device = "A100"\nbandwidth = 0\n',
        "nan.toml": 'device = "A100"\nmemory = nan\n',
        "word.toml": 'device = "A100"\nmemory = "80 GB"\n',
        "link.toml": 'device = "A100"\n[network]\nalpha = 1e-6\n',
        "trials/trials.jsonl": '{"key": 1}\n',
        "binary-trials/trials.jsonl": b"\xff\xfe\n",
        "cut-manifest/manifest.json": '{"format": "trine checkpoint", "ver',
        "binary-run/metrics.jsonl": b"\xff\xfe\n",
        "garbage-run/metrics.jsonl": "loss 1.0\n",
        "empty-run/metrics.jsonl": "",
        "empty-run/run.json": '{"config": {}}',
        "other-run/metrics.jsonl": '{"loss": "low", "step": 1}\n',
        "other-run/run.json": '{"config": {"layout": 5}}',
        "no-config-run/metrics.jsonl": '{"loss": 1.0}\n',
        "no-config-run/run.json": "[]",
        "cut-hang/hang/report.txt": "=" * 80 + "\nHANG: rank",
        "binary-hang/hang/report.txt": bytes(range(256)),
        "empty-hang/hang/report.txt": "",
        "folder-hang/hang/report.txt/x": "",
        "dir/nothing": "",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder with its size and the time of its last change."""
    paths = (path for path in folder.rglob("*"))
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def run(case: Case, folder: Path) -> Outcome:
    """Start a case in that folder and wait for its end; a hung one is killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.monotonic()
        process = subprocess.Popen(
            case.command,
            cwd=folder,
            env={**environment, **case.environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
        timer = threading.Timer(LIMIT, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        wall = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        printed, lines = out.read().decode(), err.read().decode().splitlines()
    imports = {line.rpartition("|")[2].strip() for line in lines if line.startswith(IMPORT_LINE)}
    said = [line for line in lines if not line.startswith(IMPORT_LINE)]
    processor = usage.ru_utime + usage.ru_stime
    return Outcome(process.returncode, printed, said, frozenset(imports), wall, processor)
