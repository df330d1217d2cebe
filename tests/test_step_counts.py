"""A rank's step: if this failed, launches, stops, messages or memory could grow unseen."""

import subprocess
import sys

import pytest

PROGRAM = [sys.executable, "benchmarks/costs/counts.py"]


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=900)


def test_no_count_of_eight_runs_has_grown():
    """A change that makes one grow writes the file: benchmarks/costs/counts.py --write."""
    done = run()
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "changed", "sentence"),
    [
        ("kernels forward", 0.96, "kernels forward is"),
        ("host stops", 0, "host stops is"),
        ("dp all_gather MB", 0.96, "dp all_gather MB is"),
        ("peak optimizer GB", 0.96, "peak optimizer GB is"),
        ("kernels forward", 0.98, ""),
        ("tp broadcast", None, "tp broadcast is gone"),
    ],
)
def test_a_count_that_grows_is_named(tmp_path, name, changed, sentence):
    lines = []
    with open("benchmarks/data/counts.toml") as file:
        for line in file:
            key, _, value = line.partition(" = ")
            if key == f'"{name}"' and changed is not None:
                line = f"{key} = {float(value) * changed}\n"
            lines.append(line)
            if line == '["dense, zero 1"]\n' and changed is None:
                lines.append(f'"{name}" = 2\n')
    planted = tmp_path / "counts.toml"
    planted.write_text("".join(lines))
    done = run("--only", "dense, zero 1", "--file", str(planted))
    assert done.returncode == bool(sentence), done.stderr
    assert done.stdout.startswith(f"dense, zero 1: {sentence}" if sentence else "")
    assert bool(done.stdout) == bool(sentence)
