"""The folders and the imports between them: if this failed, engine and tools would grow together.

A place is a Python file of the root, or a folder of modules. Everything is read from the source by
`ast`: imports inside of functions and under TYPE_CHECKING count too.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from ranks import ROOT, start_ranks

# From the top to the bottom: a place imports only from rows below its own.
PROGRAMS = (
    ("train",),
    ("check",),
    ("tune",),
    ("rehearse",),
    ("plan",),
    ("supervise",),
    ("runs",),
    ("checkpoint", "sample"),
)
TOOLS = (
    ("tools.checker",),
    ("tools.tuner", "tools.emulator", "tools.numerics"),
    ("tools.supervisor",),
    ("tools.planner",),
    ("tools.report",),
)
ENGINE = (
    ("trainer",),
    ("inference",),
    ("telemetry",),
    ("checkpointing",),
    ("pipeline",),
    ("zero",),
    ("optim",),
    ("model",),
    ("layers",),
    ("parallel",),
    ("data",),
    ("corpora",),
    ("distributed",),
    ("costs",),
    ("schedules",),
    ("watchdog",),
    ("config",),
    ("architecture",),
    ("base",),
)
ROWS = PROGRAMS + TOOLS + ENGINE
ROW_OF = {place: number for number, row in enumerate(ROWS) for place in row}
ENGINE_PLACES = {place for row in ENGINE for place in row}
ENTRIES = {entry for row in PROGRAMS for entry in row}
WITHOUT_TORCH = (
    "architecture",
    "base",
    "config",
    "costs",
    "schedules",
    "watchdog",
    "tools.planner",
    "tools.report",
    "tools.tuner",
    "tools.numerics",
    "tools.supervisor",
)
READ_THE_ENVIRONMENT = {"distributed", "config", "base"}
OUTSIDE = ("tests", "benchmarks", "scripts")  # import from every place; no place imports them
APART = {"test_all"}  # a file of the root that nothing imports
# Packages that take seconds or hundreds of MB, each needed by one feature.
HEAVY = (
    "h5py",
    "pyarrow",
    "matplotlib",
    "transformers",
    "tensorboard",
    "torch.nn.attention.flex_attention",
    "torch.distributed.fsdp",
)


@cache
def folders() -> dict[str, Path]:
    """Folders of Python modules by their names in an import: `optim`, `tools.planner`."""
    found = {path.parent for path in [*ROOT.glob("*/*.py"), *ROOT.glob("tools/*/*.py")]}
    names = {".".join(folder.relative_to(ROOT).parts): folder for folder in sorted(found)}
    return {name: path for name, path in names.items() if name not in (*OUTSIDE, "tools")}


@cache
def files() -> dict[str, Path]:
    """Every module by its name: `zero`, `optim.buckets`, `tools.planner.gap`; without __init__."""
    found = {path.stem: path for path in sorted(ROOT.glob("*.py")) if path.stem not in APART}
    for name, folder in folders().items():
        paths = sorted(folder.glob("*.py"))
        found |= {f"{name}.{path.stem}": path for path in paths if path.stem != "__init__"}
    return found


@cache
def outside_files() -> list[Path]:
    return [path for folder in OUTSIDE for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def place_of(module: str) -> str:
    """The place of a module: `zero`, `optim`, `tools.planner`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "tools" else parts[0]


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Every import of a file, wherever it stands: a module, and the name taken from it if any."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((module, alias.name) for alias in node.names)


def imported_modules(path: Path) -> set[str]:
    """The modules of the tree that a file imports."""
    found = set()
    for module, name in imports(path):
        candidates = (module, f"{module}.{name}")
        found |= {candidate for candidate in candidates if candidate in files()}
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ------------------------------------------------------------------------------------------------
# Places
# ------------------------------------------------------------------------------------------------


def test_every_place_has_a_row():
    assert {place_of(module) for module in files()} <= set(ROW_OF)


@pytest.mark.parametrize("folder", folders())
def test_a_folders_init_is_a_docstring_that_names_its_modules(folder):
    source = folders()[folder] / "__init__.py"
    docstring = ast.get_docstring(tree(source))
    assert docstring
    assert len(tree(source).body) == 1, "a docstring and no code"
    modules = [module.rpartition(".")[2] for module in files() if place_of(module) == folder]
    assert modules
    assert [name for name in modules if not re.search(rf"\b{name}\b", docstring)] == []


def test_the_page_of_the_code_names_every_place():
    text = (ROOT / "docs/code.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = " ".join(cell for row in rows for cell in row.split("|")[1:3])
    places = {place_of(module) for module in files()}
    forms = {p: f"{p}.py" if p in files() else p.replace(".", "/") + "/" for p in places}
    missing = [form for form in forms.values() if not re.search(rf"\b{form}", cells)]
    assert missing == []


def test_the_pages_numbers_of_lines_are_those_of_the_files():
    """Within a tenth. A folder's number leaves out a file that has a row of its own."""
    text = (ROOT / "docs/code.md").read_text()
    rows = re.findall(r"^\| \[([\w/.]+)\].* \| ([\d,]+) \| ", text, re.M)
    stated = {name: int(number.replace(",", "")) for name, number in rows}
    assert len(stated) > 15

    def counted(name: str) -> int:
        paths = [ROOT / name] if name.endswith(".py") else [*(ROOT / name).glob("*.py")]
        kept = [path for path in paths if name.endswith(".py") or name_of(path) not in stated]
        return sum(len(path.read_text().splitlines()) for path in kept)

    wrong = {name: (stated[name], counted(name)) for name in stated}
    assert {k: v for k, v in wrong.items() if abs(v[0] - v[1]) > 0.1 * v[1]} == {}


# ------------------------------------------------------------------------------------------------
# Arrows
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", files())
def test_imports_point_down(module):
    own = place_of(module)
    places = {place_of(other) for other in imported_modules(files()[module])} - {own}
    assert sorted(place for place in places if ROW_OF[place] <= ROW_OF[own]) == []
    assert sorted(places & ENTRIES) == [], "an entry is started as a process, not imported"


@pytest.mark.parametrize("module", [m for m in files() if place_of(m) in {*ENGINE_PLACES, "train"}])
def test_the_engine_imports_no_tool(module):
    tools = {name for name, _ in imports(files()[module]) if name.split(".")[0] == "tools"}
    assert sorted(tools) == []


@pytest.mark.parametrize("module", files())
def test_nothing_imports_what_is_outside(module):
    outside = {*OUTSIDE, *APART, *(path.stem for path in outside_files())} - set(ROW_OF)
    assert sorted({place_of(name) for name, _ in imports(files()[module])} & outside) == []


def test_files_import_in_no_circle():
    arrows = {module: imported_modules(path) for module, path in files().items()}
    while bare := [module for module, others in arrows.items() if not others & set(arrows)]:
        for module in bare:
            del arrows[module]
    assert sorted(arrows) == [], "each of these imports another of them, or is imported by two"


@pytest.mark.parametrize("path", [*files().values(), *outside_files()], ids=name_of)
def test_a_folder_is_entered_through_its_modules(path):
    """`from costs import hardware` or `from costs.hardware import load`; nothing else."""
    wrong = []
    for module, name in imports(path):
        if place_of(module) in folders() and module not in files():
            if name is None or f"{module}.{name}" not in files():
                wrong.append((module, name))
        elif module.startswith("."):
            wrong.append((module, name))
    assert wrong == []


def private_names(path: Path) -> set[str]:
    """Underscore names of other modules of the tree: imported, or taken as an attribute."""
    bound = {}
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if f"{node.module}.{alias.name}" in files():
                    bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                elif node.module in files() and alias.name.startswith("_"):
                    found.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            bound |= {a.asname or a.name: a.name for a in node.names if a.name in files()}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = ast.unparse(node.value)
            if owner in bound and not node.attr.startswith("__"):
                found.add(f"{bound[owner]}.{node.attr}")
    return found


@pytest.mark.parametrize(
    "path",
    [*files().values(), *(p for p in outside_files() if p.parent.name != "tests")],
    ids=name_of,
)
def test_nobody_uses_anothers_private_names(path):
    assert sorted(private_names(path)) == []


@pytest.mark.parametrize("folder", WITHOUT_TORCH)
def test_folders_without_torch(folder):
    """Transitively: imported into a fresh Python, no module of the folder brings torch along."""
    modules = [module for module in files() if place_of(module) == folder]
    program = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


# ------------------------------------------------------------------------------------------------
# What a plain run loads
# ------------------------------------------------------------------------------------------------


PLAIN_RUN = """
import runpy, sys
runpy.run_path("train.py", run_name="__main__")
print("\\n".join(f"loaded {name}" for name in list(sys.modules)))
"""


def test_a_plain_run_loads_nothing_heavy_that_it_does_not_use(tmp_path):
    """1F1B on two stages, ZeRO-1, synthetic tokens, no checkpoint."""
    words = "--layers 2 --hidden 32 --heads 4 --seq-length 16 --vocab-size 64 --steps 3 --pp 2 "
    words += f"--global-batch-size 8 --device cpu --out {tmp_path}"
    outcome = start_ranks(2, "-c", PLAIN_RUN, *words.split(), PYTHONPATH=str(ROOT))
    assert outcome.status == 0, outcome.err
    loaded = {line.split()[1] for line in outcome.out.splitlines() if line.startswith("loaded ")}
    assert "train" in loaded or "trainer" in loaded, "the names are those of modules"
    assert sorted(loaded & set(HEAVY)) == []
    assert sorted(name for name in loaded if name.startswith("tools")) == []


def test_the_engine_trains_without_the_tools(tmp_path):
    """README says which folders may be deleted, and the other programs in the root too."""
    readme = (ROOT / "README.md").read_text()
    gone = re.findall(r"`(\w+)/`", readme.split("Delete ")[1].split(" and the other programs")[0])
    assert {"tools", "benchmarks", "tests", "docs", "scripts"} <= {*gone}
    programs = ("plan.py", "tune.py", "check.py", "rehearse.py", "runs.py", "supervise.py")
    programs += ("sample.py", "checkpoint.py", "test_all.py")
    left_out = shutil.ignore_patterns(".*", *gone, *programs, "data", "runs")
    shutil.copytree(ROOT, tmp_path / "engine", ignore=left_out)
    words = "--layers 1 --hidden 16 --heads 2 --seq-length 8 --vocab-size 32 --steps 2 --device cpu"
    words += f" --save-every 2 --eval-every 2 --eval-samples 4 --out {tmp_path / 'run'}"
    command = [sys.executable, "train.py", *words.split()]
    done = subprocess.run(command, cwd=tmp_path / "engine", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout


# ------------------------------------------------------------------------------------------------
# State that nobody passed
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", files())
def test_no_hidden_state(module):
    """No `global` statement; environment variables in distributed/ and config/ only.

    `{**os.environ, ...}`, the environment of a process to start, reads none.
    """
    found, copies = [], set()
    for node in ast.walk(tree(files()[module])):
        if isinstance(node, ast.Global):
            found.append(f"{node.lineno}: global {', '.join(node.names)}")
        if place_of(module) in READ_THE_ENVIRONMENT:
            continue
        if isinstance(node, ast.Dict):
            copies |= {value for key, value in zip(node.keys, node.values) if key is None}
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if text in ("os.environ", "os.getenv", "os.putenv") and node not in copies:
            found.append(f"{node.lineno}: {text}")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [f"{node.lineno}: {a.name}" for a in node.names if "env" in a.name]
    assert found == []
