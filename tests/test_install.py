"""`pip install .`: if this failed, installed commands would work in the repository alone."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import ranks
from ranks import ROOT

from base import console
from base.cli import VERSION

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
    words = [*SMALL.split(), "--out", "run", "--log-every", "1"]
    status, out, err = run("trine-train", *words)
    assert status == 0, err
    assert out.count("| loss ") == 2
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert run("trine-plot-loss", "run")[0] == 0
    assert run("trine-corpus", "show", "c")[0] == 0
    status, out, err = run("python", "-c", "import trine; print(trine.__version__)")
    assert (status, out) == (0, f"{VERSION}\n"), err


def test_lm_eval_of_texts_or_what_it_needs(tmp_path):
    """With the packages of requirements-lm-eval.txt the script runs, a small task from a file."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "a text of words " * 40}) + "\n")

    def run(*words):
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        return ranks.start([str(word) for word in words], OMP_NUM_THREADS="1", PATH=path)

    script = ["bash", "scripts/lm_eval.sh", tmp_path / "run", tmp_path / "c.tokenizer.json"]
    if any(importlib.util.find_spec(name) is None for name in ("lm_eval", "accelerate")):
        done = run(*script, texts)
        assert (done.status, done.out) == (2, "")
        assert "has lm_eval: pip install -r requirements-lm-eval.txt" in done.err
        assert (ROOT / "requirements-lm-eval.txt").exists()
        return
    words = ["--out", tmp_path / "c", "--vocab-size", "300", texts, texts]
    assert run(sys.executable, "scripts/prepare_data.py", *words).status == 0
    words = [*SMALL.split(), "--vocab-size", "300", "--steps", "1", "--save-every", "1"]
    assert run(sys.executable, "train.py", *words, "--out", tmp_path / "run").status == 0
    script[2] = tmp_path / "run/checkpoints/step_00000001"
    done = run(*script, texts, "--device", "cpu", "--output_path", tmp_path / "results")
    assert done.status == 0, done.err
    (found,) = (tmp_path / "results").rglob("*.json")
    bits = json.loads(found.read_text())["results"]["texts"]["bits_per_byte,none"]
    assert 0.5 < bits < 9.0, "random weights: log2(300) = 8.2 bits for a token of one byte or more"
    assert run(*script, tmp_path / "none.jsonl").status == 2


def declared() -> list[str]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return list(tomllib.load(file)["project"]["scripts"])


def test_every_folder_is_installed_and_every_command_has_its_program():
    with open(ROOT / "pyproject.toml", "rb") as file:
        packages = tomllib.load(file)["tool"]["setuptools"]["packages"]
    found = {path.parent for path in [*ROOT.glob("*/*.py"), *ROOT.glob("tools/*/*.py")]}
    folders = {".".join(folder.relative_to(ROOT).parts) for folder in found}
    folders = folders - {"tests", "benchmarks"} | {"hardware", "scripts"}
    assert sorted(packages) == sorted(["trine", *(f"trine.{name}" for name in folders)])
    for name in declared():
        stem = name.removeprefix(console.PREFIX).replace("-", "_")
        assert (ROOT / f"{stem}.py").exists() or (ROOT / "scripts" / f"{stem}.py").exists()


def test_every_program_that_the_pages_name_has_a_command():
    """But for benchmarks, which are not installed, and programs for those who work on Trine."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text() for page in pages if page.name not in ("log.md", "code.md"))
    named = set(re.findall(r"python (?:scripts/)?(\w+)\.py", text))
    named |= set(re.findall(r"python -m watchdog\.(\w+)", text)) - {"monitor"}
    without = {"size", "test_all"}
    missing = {f"{console.PREFIX}{name.replace('_', '-')}" for name in named - without}
    assert missing - set(declared()) == set()


BENCH = [
    ("", "mpirun -n 8 python benchmarks/network/allreduce.py --device cpu --tp 2 .* --seconds 0.5"),
    (
        "--out a --tp 4",
        "mpirun -n 8 python benchmarks/network/allreduce.py .* --seconds 0.5 --out a --tp 4",
    ),
    (
        "srun -n 48 -- --tp 8 --out a",
        "srun -n 48 python benchmarks/network/allreduce.py --tp 8 --out a",
    ),
    ("srun -n 48", "srun -n 48 python benchmarks/network/allreduce.py"),
    ("-- --device cpu", "python benchmarks/network/allreduce.py --device cpu"),
]


@pytest.mark.parametrize(("words", "command"), BENCH)
def test_the_bandwidth_script_with_and_without_a_launcher(words, command, tmp_path):
    """In a copy whose launchers print how they were called."""
    for name in ("scripts", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "bench_allreduce.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "setup.sh").write_text("exit 0\n")
    for name in ("mpirun", "srun", "python"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    done = ranks.start(["bash", str(tmp_path / "scripts" / "bench_allreduce.sh"), *words.split()])
    assert done.status == 0, done.err
    assert re.fullmatch(command, done.out.strip())


# A Python that notes how it is called, and says which library mpi4py loads.
PYTHON = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in *Get_library_version*) echo "$LIBRARY" ;; esac
"""


def test_what_a_run_installs_has_exact_versions_and_no_beta():
    """All that requirements.txt needs in the end, as it is installed here."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    lines = [line.partition("==") for line in (ROOT / "constraints.txt").read_text().split()]
    exact = {name.lower().replace("_", "-"): Version(found) for name, _, found in lines if found}
    needed: set[str] = set()
    left = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().split()]
    while left:
        requirement = left.pop()
        name = requirement.name.lower().replace("_", "-")
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        # Python brings setuptools, and a torch for GPUs names the versions of its libraries itself.
        is_of_torch = name.startswith(("nvidia", "cuda", "triton"))
        if name in needed or not wanted or is_of_torch or name == "setuptools":
            continue
        needed.add(name)
        left += map(Requirement, importlib.metadata.requires(name) or [])
    assert len(needed) > 20
    assert [name for name in needed if name not in exact] == []
    assert [name for name in needed if exact[name].is_prerelease] == []


@pytest.mark.parametrize(
    ("mpirun", "library", "is_built"),
    [
        ("mpirun (Open MPI) 4.1.4", "MPICH Version: 5.0.2", True),
        ("mpirun (Open MPI) 4.1.4", "Open MPI v4.1.4, package: Debian", False),
        ("HYDRA build details: Version: 4.2", "MPICH Version: 4.2", False),
        ("HYDRA build details: Version: 4.2", "Open MPI v5.0.11", True),
    ],
)
def test_set_up_builds_mpi4py_for_the_machines_mpi(mpirun, library, is_built, tmp_path):
    """In a copy with stand-ins for Python and the machine's MPI: it may be newer than .venv."""
    for name in ("scripts", ".venv/bin", "machine"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    for name in ("requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = {".venv/bin/python": PYTHON, "machine/mpicc": "#!/bin/sh\n"}
    programs |= {"machine/mpirun": f"#!/bin/sh\necho '{mpirun}'\n"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path / 'machine'}:{os.environ['PATH']}"
    words = {"PATH": path, "CALLS": str(tmp_path / "calls"), "LIBRARY": library}
    done = ranks.start(["bash", str(tmp_path / "scripts" / "setup.sh")], **words)
    assert done.status == 0, done.err
    calls = (tmp_path / "calls").read_text()
    assert ("--no-binary mpi4py" in calls) == is_built
    assert ("uninstall" in calls) == is_built
