"""Mistakes that a tired user makes, over all programs; test_mistakes.py says what must follow.

    folder = prepare(tmp_path)                 # files to be wrong with
    outcomes = run_all(folder, CASES)          # of processes that are started in that folder

mistake_lines.py and mistake_lines_of_files.py have their words.
"""

import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fork_server import NO_TORCH, Forked
from mistake_lines import OF_RUNS
from mistake_lines_of_files import OF_FILES
from ranks import ROOT, mpi_command

LIMIT = 120.0  # seconds after which a process counts as hung
IMPORT_LINE = "import time:.*\n"  # how Python reports an import
# Mistakes that are seen after torch is imported: other ranks meet the rank that sees the mistake,
# or weights of other programs are to be converted.
AFTER_TORCH = ("--out a-file/run", "--hidden 10000000", "import --from hf nowhere new")


@dataclass(frozen=True)
class Case:
    """A command line and what its sentence must say."""

    program: str
    words: str
    sentence: str
    command: tuple[str, ...]
    environment: dict[str, str]

    @property
    def forkable(self) -> bool:
        """Whether a fork tells the same: of a program's file, with no variable of its start."""
        program = self.command[0] == sys.executable and self.command[1].endswith(".py")
        return program and not self.environment and not self.after_torch

    @property
    def after_torch(self) -> bool:
        """Whether torch may have been imported."""
        return self.program in ("mpirun", "checkpoint.py") and self.words in AFTER_TORCH


@dataclass(frozen=True)
class Outcome:
    """How it ended; seconds of the processor; stderr without import times."""

    status: int
    out: str
    err: list[str]
    imported: frozenset[str]
    processor: float


def _cases(program: str, block: str) -> list[Case]:
    start, *lines = block.strip("\n").splitlines()
    python = [sys.executable]
    if start.startswith("%"):
        python, start = [*mpi_command(2), *python], "@" + start[1:]
    found = []
    for line in lines:
        words, _, sentence = line.rpartition("| ")
        shared, first = _variables(shlex.split(start.replace("@", str(ROOT))))
        own, rest = _variables(shlex.split(words))
        if start.endswith("/"):
            first = [first[0] + rest.pop(0)]
        command = (*python, *first, *rest)
        found.append(Case(program, words.strip(), sentence, command, shared | own))
    return found


def _variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The NAME=VALUE words at the beginning, and the others."""
    variables = {}
    while words and re.match("[A-Z0-9_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words


BLOCKS = OF_RUNS | OF_FILES
CASES = [case for name, block in BLOCKS.items() for case in _cases(name, block)]


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
# config.json of --model: what each has in place of LLAMA's; None takes the key out.
SHAPES: dict[str, dict[str, Any]] = {
    "other": {"model_type": "no-such-family"},
    "none": {"model_type": None},
    "missing": {"num_hidden_layers": None},
    "words": {"hidden_size": "many"},
    "huge": {"vocab_size": 2**70},
    "text": {"rms_norm_eps": "inf"},
    "negative": {"num_hidden_layers": -2},
    "kv": {"num_key_value_heads": 3},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "bias": {"mlp_bias": True},
    "relu6": {"hidden_act": "relu6"},
    "window": {"model_type": "mistral", "sliding_window": "long"},
    "chunks": {"model_type": "olmo3", "layer_types": ["chunked_attention", "full_attention"]},
}


def _shape_files() -> dict[str, bytes | str]:
    """The files of SHAPES by name."""
    found: dict[str, bytes | str] = {}
    for name, changes in SHAPES.items():
        config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
        found[f"shapes/{name}/config.json"] = json.dumps(config)
    return found


# Files to be wrong with, by name.
FILES: dict[str, bytes | str] = {
    "a-file": "text\n",
    "a.txt": "a text",
    "latin.txt": "Zürich".encode("latin-1"),
    "only.bin": b"\0" * 64,
    # 100 tokens of 2 bytes in one sequence, and marks of 50 tokens.
    "few.bin": b"\0" * 200,
    "few.idx": struct.pack("<9sQBQQiqqq", b"MMIDIDX", 1, 8, 1, 2, 100, 0, 0, 1),
    "cut.bin": b"\0" * 200,
    "cut.idx": struct.pack("<9sQBQQiqqq", b"MMIDIDX", 1, 8, 1, 2, 100, 0, 0, 1),
    "cut.targets.bin": b"\0" * 50,
    "cut.targets.idx": struct.pack("<9sQBQQiqqq", b"MMIDIDX", 1, 1, 1, 2, 50, 0, 0, 1),
    "bad.jsonl": '{"text": "a"}\n{"tex',
    "latin1.toml": "[layout]\ntp = 1\n# Zürich\n".encode("latin-1"),
    "utf16.toml": "[layout]\ntp = 1\n".encode("utf-16"),
    "binary.toml": bytes(range(128, 256)) * 8,
    "model5.toml": "model = 5\n",
    "boolean.toml": "tp = true\n",
    "twice.toml": "[layout]\ntp = 1\n[training]\ntp = 2\n",
    "both.toml": "tp = 1\nglobal-batch-size = 8\nglobal_batch_size = 16\n",
    "key.toml": "[layout]\ntensor-parallel = 2\n",
    "table.toml": "[layout]\ntp = 1\n[mesh]\n",
    "keys.toml": "tensor-parallel = 2\nfoo = 1\n",
    "again.toml": "tp = 1\ntp = 2\n",
    "layers.toml": "layers = true\n",
    "string.toml": 'data = "a"\n',
    "items.toml": "data = [[1]]\n",
    "cut.toml": "[layout]\ntp = ",
    "inf.toml": "lr = inf\n",
    "text.toml": 'log-every = "100"\n',
    "empty.toml": 'resume = ""\n',
    "nul.toml": 'out = "a\\u0000b"\n',
    "list.toml": "tp = [1, 2]\n",
    "none.toml": "data = []\n",
    "nested.toml": "[layout.tp]\nsize = 2\n",
    "deep.toml": "x = " + "[" * 100_000,
    "hex.toml": "log-every = 0x" + "f" * 5000,
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
    "dir/nothing": "",
    "shapes/cut/config.json": '{"model_type": "lla',
    "shapes/binary/config.json": bytes(range(256)),
    "shapes/list/config.json": "[1]",
}


def prepare(folder: Path) -> Path:
    """Files to be wrong with; the folder itself."""
    files = FILES | _shape_files()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def run_all(folder: Path, cases: list[Case]) -> list[Outcome]:
    """The outcomes of several cases, in their order, four at a time.

    The first case of a program has a process of its own, and so have those that a fork would
    change. Others are forks of a process that has the programs' imports before torch: a fork takes
    a tenth of the processor time of a whole start.
    """
    first = {case.program: case for case in reversed(cases)}
    forked = [case.forkable and case is not first[case.program] for case in cases]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(_run, cases, forked, [folder] * len(cases)))


def _run(case: Case, forked: bool, folder: Path) -> Outcome:
    """Run a case in that folder to its end; a hung one is killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
    environment |= case.environment
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = out.fileno(), err.fileno()
        if forked:
            process = Forked(list(case.command[1:]), environment, *files, NO_TORCH, folder)
        else:
            process = _Started(case.command, environment, *files, folder)
        timer = threading.Timer(LIMIT, os.kill, (process.pid, signal.SIGKILL))
        timer.start()
        status = process.wait()
        timer.cancel()
        out.seek(0)
        err.seek(0)
        printed, text = out.read().decode(), err.read().decode()
    # One rank's line may come between another rank's sentence and the end of that line.
    imports = {line.rpartition("|")[2].strip() for line in re.findall(IMPORT_LINE, text)}
    said = re.sub(IMPORT_LINE, "", text).splitlines()
    return Outcome(status, printed, said, frozenset(imports), process.processor)


class _Started:
    """A process of its own, with the interface of Forked."""

    processor = 0.0

    def __init__(self, command, environment, out: int, err: int, folder: Path):
        nowhere = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=nowhere, stdout=out, stderr=err
        )
        self.pid = self.process.pid

    def wait(self) -> int:
        """Wait for the exit status, and note the seconds of processor time."""
        _, status, usage = os.wait4(self.pid, 0)
        self.processor = usage.ru_utime + usage.ru_stime
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder with its size and the time of its last change."""
    paths = (path for path in folder.rglob("*"))
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}
