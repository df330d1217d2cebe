"""`pip install .` in a fresh environment: commands that work from any folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib

import pytest
import ranks
from ranks import ROOT

from config import launcher
from config.messages import VERSION

SMALL = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --steps 2 --device cpu"


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """The folder of the commands of an installed Trine; its packages are those of this Python."""
    pytest.importorskip("setuptools", minversion="70.1")
    folder = tmp_path_factory.mktemp("install")
    source, venv = folder / "source", folder / "venv"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if name.startswith(("tests/", "docs/", "benchmarks/")) or not (ROOT / name).exists():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = ["-m", "pip", "--python", str(venv / "bin" / "python"), "install", "--quiet"]
    words += ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = ranks.start([sys.executable, *words, str(source)], 120)
    assert done.status == 0, done.err
    return venv / "bin"


def test_installed_commands_work_from_any_folder(commands, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)

    def run(name, *words):
        command = [str(commands / name), *words]
        found = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        return found.returncode, found.stdout, found.stderr

    for name in declared():
        if name not in ("trine-prepare-data", "trine-plot-loss", "trine-rehearse"):
            assert run(name, "--version") == (0, f"trine {VERSION}\n", "")
    assert run("trine-train", "--layrs", "2")[::2] == (
        2,
        "error: unknown argument '--layrs'; did you mean '--layers'?\n",
    )
    assert (
        "layouts fit on 384 GPUs"
        in run("trine-plan", *["layouts", "--model", "176b", "--nodes", "48"])[1]
    )
    (tmp_path / "a.txt").write_text("a text of words " * 300)
    status, out, err = run(
        "trine-prepare-data", *["--out", "c", "--vocab-size", "300", "a.txt", "a.txt"]
    )
    assert status == 0, err
    words = [*SMALL.split(), "--out", "run", "--log-format", "megatron"]
    status, out, err = run("trine-train", *words)
    assert status == 0, err
    assert out.count("lm loss: ") == 2
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert run("trine-plot-loss", "run")[0] == 0


def declared() -> list[str]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return list(tomllib.load(file)["project"]["scripts"])


def test_every_wing_is_installed_and_every_command_has_its_program():
    with open(ROOT / "pyproject.toml", "rb") as file:
        packages = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {path.parent.name for path in ROOT.glob("*/*.py")} | {"hardware", "scripts"}
    folders -= {"tests", "benchmarks"}
    assert sorted(packages) == sorted(["trine", *(f"trine.{name}" for name in folders)])
    for name in declared():
        stem = name.removeprefix(launcher.PREFIX).replace("-", "_")
        assert (ROOT / f"{stem}.py").exists() or (ROOT / "scripts" / f"{stem}.py").exists()
