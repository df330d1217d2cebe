"""`pip install .`: if this failed, installed commands would work in the repository alone."""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy
import pytest
import ranks
from ranks import ROOT

from base import console
from base.cli import VERSION

SMALL = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --steps 2 --device cpu"


def new_environment(folder: Path, packages: str) -> Path:
    """Return the `bin` of a new virtual environment that also finds the packages of a folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "shared.pth").write_text(packages + "\n")
    return folder / "bin"


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words), "--no-deps", "--no-index", "--quiet"]
    done = ranks.start([*command, "--disable-pip-version-check"], 120)
    assert done.status == 0, done.err


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of what a clone has, without tests, documentation and benchmarks."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if name.startswith(("tests/", "docs/", "benchmarks/")) or not (ROOT / name).exists():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    pip("wheel", folder, "--no-build-isolation", "--wheel-dir", folder / "wheels")
    (built,) = (folder / "wheels").glob("trine-*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel, tmp_path_factory):
    """The folder of the commands of an installed Trine; its packages are those of this Python."""
    folder = tmp_path_factory.mktemp("install") / "venv"
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    environment = new_environment(folder, "\n".join(folders))
    pip("--python", environment / "python", "install", wheel)
    return environment


@pytest.fixture(scope="module")
def with_numpy(wheel, tmp_path_factory):
    """The same in an environment whose only package is numpy, as after `pip install .`."""
    folder = tmp_path_factory.mktemp("numpy")
    (folder / "packages").mkdir()
    for path in Path(numpy.__file__).parent.parent.glob("numpy*"):
        (folder / "packages" / path.name).symlink_to(path)
    environment = new_environment(folder / "venv", str(folder / "packages"))
    pip("--python", environment / "python", "install", wheel)
    return environment


@pytest.fixture
def own(tmp_path):
    """A folder of a user with modules of the names that Trine's have in a clone."""
    for name in ("model", "data", "config", "base", "layers", "tools", "trainer"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the user')\n")
    return tmp_path


def run_in(folder, *command, mpi=0):
    """Run a command in a folder, as a user who has set no variable; its status and outputs."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    if mpi:
        command = (*ranks.mpi_command(mpi), *command)
        for path in Path(sys.prefix, "lib").glob("libmpi.so.12"):  # beside this Python
            environment["MPI4PY_LIBMPI"] = str(path)
    found = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    return found.returncode, found.stdout, found.stderr


def test_installed_commands_work_from_any_folder(commands, own):
    def run(name, *words):
        return run_in(own, commands / name, *words)

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
    (own / "a.txt").write_text("a text of words " * 300)
    status, out, err = run(
        "trine-prepare-data", *["--out", "c", "--vocab-size", "300", "a.txt", "a.txt"]
    )
    assert status == 0, err
    words = [*SMALL.split(), "--out", "run", "--log-every", "1"]
    status, out, err = run("trine-train", *words)
    assert status == 0, err
    assert out.count("| loss ") == 2
    assert (own / "run" / "metrics.jsonl").exists()
    assert run("trine-plot-loss", "run")[0] == 0
    assert run("trine-corpus", "show", "c")[0] == 0


@pytest.mark.slow
def test_installed_programs_train_and_sample_under_mpirun(commands, own):
    words = [*SMALL.split(), "--tp", "2", "--out", "run", "--save-every", "2", "--log-every", "1"]
    status, out, err = run_in(own, commands / "trine-train", *words, mpi=2)
    assert status == 0, err
    assert "2 ranks by mpirun" in out
    words = ["run", "--prompt", "1 2", "--temperature", "0", "--max-tokens", "3"]
    alone = run_in(own, commands / "trine-sample", *words)
    both = run_in(own, commands / "trine-sample", *words, "--tp", "2", mpi=2)
    assert alone[0] == both[0] == 0, both[2]
    assert alone[1] == both[1] != ""


# ---- import trine --------------------------------------------------------------------------------

USES = f"""
import os, signal, sys

def state_of_process():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    streams = sys.stdin, sys.stdout, sys.stderr
    return sys.excepthook, sys.unraisablehook, streams, dict(os.environ), handlers

before = state_of_process()
import trine
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert sorted(dir(trine)) == sorted(trine.__all__)
from trine.model import Stage
assert state_of_process() == before

config = trine.parse("{SMALL}")
state, samples = trine.build(config), trine.read_data(config).train
losses = [trine.step(state, samples, consumed, lr).loss for consumed, lr in trine.steps(config)]
assert isinstance(state.stages[0], Stage) and len(losses) == 2 and losses[0] > 3
ranked = trine.plan("layouts --model 176b --gpu a100-80 --nodes 48")["ranked"]
import trine.plan, trine.data
assert trine.plan(["model", "--model", "176b"])["parameters"] > 1.7e11
model = trine.load("run")
text = trine.generate(model, "1 2 3", max_tokens=4, temperature=0)
assert len(text.split()) == 7
assert all(array.any() for array in trine.weights("run").values())
try:
    trine.parse("--layrs 2")
except trine.UserError as error:
    assert "did you mean '--layers'" in str(error)
assert state_of_process() == before
print("losses", losses, ranked[0]["tp"], text)
"""
WORKERS = f"""
import multiprocessing, sys

def work(number):
    import trine
    config = trine.parse("{SMALL}")
    state, samples = trine.build(config), trine.read_data(config).train
    return [trine.step(state, samples, first, lr).loss for first, lr in trine.steps(config)]

if __name__ == "__main__":
    import trine
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        found = pool.map(work, range(2))
    assert found[0] == found[1]
    print("losses", found[0])
"""


@pytest.fixture(scope="module")
def trained(commands, tmp_path_factory):
    """A run with a checkpoint, and the losses of its two steps as the program has written them."""
    folder = tmp_path_factory.mktemp("trained")
    words = [*SMALL.split(), "--save-every", "2", "--out", "run", "--log-every", "1"]
    status, _, err = run_in(folder, commands / "trine-train", *words)
    assert status == 0, err
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return folder / "run", [row["loss"] for row in rows if "loss" in row]


def test_the_library_in_a_folder_with_modules_of_the_same_names(commands, own, trained):
    run, losses = trained
    (own / "run").symlink_to(run)
    (own / "uses.py").write_text(USES)
    status, out, err = run_in(own, commands / "python", "uses.py")
    assert (status, err) == (0, "")
    assert out.startswith(f"losses {losses} ")
    # In the name space of another program, as notebooks and plug-ins run code; without a file.
    (own / "host.py").write_text("exec(compile(open('uses.py').read(), '<cell>', 'exec'), {})")
    assert run_in(own, commands / "python", "host.py") == (0, out, "")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_library_in_workers(method, commands, own, trained):
    (own / "workers.py").write_text(WORKERS)
    status, out, err = run_in(own, commands / "python", "workers.py", method)
    assert (status, out) == (0, f"losses {trained[1]}\n"), err


@pytest.mark.slow
def test_the_library_in_a_kernel_of_jupyter(commands, own, trained):
    """The kernel has an excepthook, streams and signal handlers of its own."""
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("jupyter_client")
    (own / "run").symlink_to(trained[0])
    (own / "kernels" / "own").mkdir(parents=True)
    argv = [str(commands / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    facts = {"argv": argv, "display_name": "own", "language": "python"}
    (own / "kernels" / "own" / "kernel.json").write_text(json.dumps(facts))
    specs = client.kernelspec.KernelSpecManager(kernel_dirs=[str(own / "kernels")])
    manager = client.KernelManager(kernel_name="own", kernel_spec_manager=specs)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    manager.start_kernel(cwd=str(own), env=environment | {"OMP_NUM_THREADS": "1"})
    try:
        kernel = manager.client()
        kernel.start_channels()
        kernel.wait_for_ready(timeout=120)
        printed = []
        reply = kernel.execute_interactive(USES, timeout=120, output_hook=printed.append)
        assert reply["content"]["status"] == "ok", reply["content"]
        texts = "".join(message["content"].get("text", "") for message in printed)
        assert texts.startswith(f"losses {trained[1]} ")
        kernel.stop_channels()
    finally:
        manager.shutdown_kernel(now=True)


WHOLE = """
import importlib, pathlib, sys
import trine
root = pathlib.Path(trine.__file__).parent
names = {name: getattr(trine, name) for name in trine.__all__}
tree = {path.stem for path in [*root.glob("*.py"), *root.glob("*/")]}
for path in sorted(root.rglob("*.py")):
    parts = path.relative_to(root.parent).with_suffix("").parts
    importlib.import_module(".".join(parts).removesuffix(".__init__"))
print(len(sys.modules) > 300, sorted(tree & sys.modules.keys() - {"trine", "__pycache__"}))
print([name for name in names if getattr(trine, name) is not names[name]])
"""


def test_every_installed_module_is_there_once_and_no_name_of_the_package_changes(commands, own):
    """A forgotten import would load the user's module, or a second copy of ours."""
    status, out, err = run_in(own, commands / "python", "-P", "-c", WHOLE)
    assert (status, out) == (0, "True []\n[]\n"), err


@pytest.mark.slow
def test_only_numpy_plans_and_the_others_say_what_to_install(with_numpy, own):
    words = ["layouts", "--model", "176b", "--gpu", "a100-80", "--nodes", "48"]
    status, out, err = run_in(own, with_numpy / "trine-plan", *words)
    assert (status, err) == (0, "")
    assert "layouts fit on 384 GPUs" in out
    assert " trine-train --model 176b " in out
    assert "train.py" not in out + run_in(own, with_numpy / "trine-plan", "layouts", "--help")[1]
    assert run_in(own, with_numpy / "trine-plan", *words, "--sbatch", "a.sbatch")[0] == 0
    (sourced,) = re.findall(r"TRINE_FOLDER=(\S+)", (own / "a.sbatch").read_text())
    assert Path(sourced, "scripts", "slurm_job.sh").exists()
    code = f"import trine; print(trine.plan({words})['ranked'][0]['tp'])"
    assert run_in(own, with_numpy / "python", "-c", code) == (0, "4\n", "")
    install = "`pip install 'trine[train]'`"
    for name in declared():
        found = run_in(own, with_numpy / name, "--version")
        if name == "trine-plan":
            assert found == (0, f"trine {VERSION}\n", "")
        elif found[0]:
            missing = rf"error: \S+ has no package '\w+': {re.escape(install)}\n"
            assert found[:2] == (2, "")
            assert re.fullmatch(missing, found[2])
    code = f"import trine; trine.build(trine.parse({SMALL!r}))"
    status, out, err = run_in(own, with_numpy / "python", "-c", code)
    assert err.splitlines()[-1].endswith(f"has no package 'torch': {install}")
    status, _, err = run_in(own, with_numpy / "trine-plan", *words, "--picture", "a.png")
    assert status == 2
    assert "`pip install 'trine[plots]'`" in err


PAGE = (ROOT / "docs" / "library.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TITLES = ["step", "loop", "weights", "generate", "plan", "ranks"]


@pytest.mark.slow
@pytest.mark.parametrize("title", TITLES)
def test_the_page_as_it_is_printed(title, commands, own, trained):
    (own / "runs").mkdir()
    (own / "runs" / "first").symlink_to(trained[0])
    options = dict(zip(SMALL.replace("--", "").split()[::2], SMALL.split()[1::2]))
    lines = [f"{key} = {value}" for key, value in options.items() if value.isdigit()]
    lines += ["global-batch-size = 8", "steps = 4", "eval-samples = 8"]
    keys = dict(line.split(" = ") for line in lines)
    (own / "tiny.toml").write_text("".join(f"{k} = {v}\n" for k, v in keys.items()))
    block = BLOCKS[TITLES.index(title)]
    assert len(BLOCKS) == len(TITLES)
    assert len(block.strip().splitlines()) <= 12
    (own / "page.py").write_text(block)
    mpi = 2 if title == "ranks" else 0
    status, out, err = run_in(own, commands / "python", "page.py", mpi=mpi)
    assert status == 0, err
    expected = {"step": 4, "loop": 0, "weights": 28, "generate": 1, "plan": 4, "ranks": 2}
    assert len(out.splitlines()) >= expected[title]


@pytest.mark.slow
def test_the_cells_of_the_notebook(commands, own):
    """As a kernel runs them, one after the other in one namespace; no picture is shown."""
    notebook = json.loads((ROOT / "examples/notebook/first_hour.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert len(cells) >= 6
    (own / "cells.json").write_text(json.dumps(cells))
    code = "import json, matplotlib; matplotlib.use('Agg'); names = {'__name__': 'notebook'}\n"
    code += "for cell in json.load(open('cells.json')): exec(cell, names); print('---')"
    status, out, err = run_in(own, commands / "python", "-c", code)
    assert status == 0, err
    plan, steps, *_, weights, text, last = out.split("---\n")
    assert plan.count(" s\n") == 3
    before, after = map(float, steps.split(" -> "))
    assert after < before / 2
    assert "blocks.0.attention.qkv.weight  (4, 3, 16, 64)" in weights
    assert text.startswith("1 2 3 ")
    assert last == ""


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


def test_printed_commands_are_those_that_the_reader_can_type():
    assert {console.PREFIX + name.replace("_", "-") for name in console.COMMANDS} == set(declared())
    typed = {
        "mpirun -n 4 python train.py --tp 2": "mpirun -n 4 trine-train --tp 2",
        "usage: plan.py layouts": "usage: trine-plan layouts",
        "see python tune.py --help": "see trine-tune --help",
        "by scripts/prepare_data.py": "by trine-prepare-data",
        "train.py's own checks": "trine-train's own checks",
        "torchrun -n 8 train.py": "torchrun --no-python -n 8 trine-train",
        "at train.py:246": "at train.py:246",
        "python /code/train.py": "python /code/train.py",
        "python my_train.py": "python my_train.py",
        "python model.py": "python model.py",
        "a train.python": "a train.python",
    }
    for text, is_typed in typed.items():
        assert console.as_typed(text, True) == is_typed
        assert console.as_typed(text) == text  # in a clone


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
