"""Checkpoints and weights from strangers: refused in one sentence, and nothing else is opened."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from hostile_checkpoints import make_cases
from hostile_files import FILES, NAME, sign
from ranks import ROOT, fork_ranks, mpirun, start

INTACT = Path(ROOT) / "tests/data/run_189cc1d/checkpoints" / NAME
USES = ("show", "verify", "export", "resume")
SEED = 20261121


def traced(command: list[str], trace: Path) -> list[str]:
    """The command under strace, or as it is where strace is missing or may not trace.

    Each process has a file of its own in the folder `trace`, in which no other's lines cut its own.
    With --seccomp-bpf, which an older strace lacks, no other system call stops the process.
    """
    trace.mkdir()
    options = ["-ff", "-y", "-e", "trace=open,openat,openat2", "-o", str(trace / "of")]
    if shutil.which("strace"):
        for strace in (["strace", "--seccomp-bpf", *options], ["strace", *options]):
            if subprocess.run([*strace, "true"], capture_output=True).returncode == 0:
                return [*strace, *command]
    return command


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> tuple[dict[str, str], dict, Path]:
    """Folders and results of all cases, and the traces of the processes that used them."""
    folder = tmp_path_factory.mktemp("hostile")
    cases = {"intact": INTACT} | make_cases(folder / "cases", INTACT, SEED)
    cases = {name: str(path) for name, path in cases.items()}
    listed, results, trace = folder / "cases.json", folder / "results.json", folder / "trace"
    listed.write_text(json.dumps(cases))
    command = [sys.executable, "tests/hostile_worker.py", str(listed), str(results)]
    done = start(traced(command, trace), timeout=900, OMP_NUM_THREADS="1")
    assert done.status == 0, done.err[-4000:]
    return cases, json.loads(results.read_text()), trace


def is_wrong(sentence: str | None, folder: str) -> bool:
    """Whether this is not one sentence about that folder."""
    if sentence is None or "\n" in sentence or folder not in sentence or len(sentence) > 500:
        return True
    return bool(re.match(r"\w*(Error|Exception|Hang|Iteration|left)\b", sentence))


@pytest.mark.slow
def test_every_hostile_checkpoint_is_refused_in_one_sentence(outcome):
    cases, results, _ = outcome
    assert set(results["intact"].values()) == {None}
    refused = {name: found for name, found in results.items() if name != "intact"}
    wrong = []
    for name, found in refused.items():
        assert found.keys() >= set(USES)
        for use, sentence in found.items():
            # `show` compares sizes only.
            unseen = use == "show" and sentence is None and name.startswith("damage")
            # Code that was changed may have made other tensors than those of the options: it is
            # said, and who loads or exports them compares (tests/test_ideas.py).
            of_options = name.startswith(("model/", "a tensor too", "two tensors exchanged"))
            unseen |= of_options and use in ("show", "verify", "weights") and sentence is None
            no_family = of_options and use == "export" and "transformers has" in str(sentence)
            if not (unseen or no_family) and is_wrong(sentence, cases[name]):
                wrong.append((name, use, sentence))
    assert wrong == []
    assert len(refused) >= 300
    assert sum(len(found) > len(USES) for found in refused.values()) >= 50
    print(f"{len(refused)} checkpoints, each refused in a sentence by {', '.join(USES)}")


@pytest.mark.slow
def test_no_file_outside_of_a_checkpoint_is_opened(outcome):
    cases, _, trace = outcome
    if not list(trace.iterdir()):
        pytest.skip("strace is not installed, or may not trace here")
    text = "".join(path.read_text(errors="replace") for path in trace.iterdir())
    found = re.findall(r'"([^"]*)", [^=]*= (?:\d+<([^>]*)>|-1)', text)
    opened = {path for pair in found for path in pair if path}
    assert opened >= {str(INTACT / name) for name in FILES}
    inside = str(Path(cases["manifest: step -1"]).parents[1])
    names = {p.removeprefix(inside) for p in opened if p.startswith(inside + "/")}
    form = rf"/\d+/{NAME}(/({'|'.join(map(re.escape, FILES))}))?"  # the folder itself is listed
    assert sorted(name for name in names if not re.fullmatch(form, name)) == []
    assert len(names) > 300
    assert sorted(path for path in opened if "secret/" in path) == []
    assert sorted(path for path in opened if ".." in path and path.endswith(".h5")) == []
    assert not opened & {"/dev/zero", "/etc/hostname"}


OPTIONS = (
    "--layers 2 --hidden 16 --heads 4 --seq-length 16 --vocab-size 61 --set pad_vocab_multiple=4 "
    "--global-batch-size 4 --steps 8 --lr 1e-3 --device cpu --tp 2"
)


def test_two_ranks_take_the_next_older_one_or_refuse(tmp_path):
    """In each newer one a tensor is in no shard: one that rank 0 checks, and one of rank 1."""
    parent = tmp_path / "checkpoints"
    shutil.copytree(INTACT, parent / NAME)
    for step, name in ((6, "blocks.0.attention.out.bias"), (7, "blocks.0.attention.out.weight")):
        folder = parent / f"step_{step:08d}"
        shutil.copytree(INTACT, folder)
        with h5py.File(folder / "index.h5", "r+", libver="latest") as file:
            file["progress"].attrs["iteration"] = step
            del file[f"exp_avg/{name}"]
            file[f"exp_avg/{name}"] = np.zeros(16, "f4")
        sign(folder, step=step)
    words = ["train.py", *OPTIONS.split(), "--out", str(tmp_path)]
    done = mpirun(2, *words, "--resume", str(folder), timeout=120, OMP_NUM_THREADS="1")
    assert done.status == 2, done.err[-4000:]
    assert done.err.count("error: ") == 1
    problem = f"cannot read {folder}/index.h5: exp_avg/'{name}' is not in the shards"
    assert f"error: {problem}\n" in done.err
    assert "Traceback" not in done.err
    done = fork_ranks(2, *words, "--resume", "auto", timeout=120)
    assert done.status == 0, done.err[-4000:]
    assert f"step_00000007 cannot be loaded: {problem}\n" in done.out
    assert "step_00000006 cannot be loaded: cannot read " in done.out
    assert f"resumed from {parent / NAME}: step 4" in done.out


@pytest.mark.parametrize(("crash", "status"), [("SIGSEGV", 2), ("SIGKILL", 128 + 9)])
def test_a_crash_of_a_library_is_a_sentence(crash, status):
    code = f"""
import os, runpy, signal, sys
from checkpointing import index
index.check_files = lambda *a, **k: os.kill(os.getpid(), signal.{crash})
sys.argv = ["checkpoint.py", "verify", "tests/data/run_189cc1d"]
runpy.run_path("checkpoint.py", run_name="__main__")
"""
    outcome = start([sys.executable, "-c", code])
    assert outcome.status == status
    sentence = "error: SIGSEGV in a library that reads these files: they are damaged\n"
    assert outcome.err == (sentence if status == 2 else "")
