"""Imports without effects, and the sources of the package.

If this failed, a notebook that imports one module would lose Ctrl-C or its output, or the modules
of the package could not import one another.
"""

import subprocess
import sys
import tomllib

import pytest
from ranks import ROOT
from test_imports import files, outside_files

from scripts import library
from scripts.build_package import installed_source, top_level_names

# Imports the modules that are its arguments, one after the other, in a fresh Python.
IMPORTS = """
import atexit, gc, importlib, os, signal, sys, threading

root, *names = sys.argv[1:]
sys.path.insert(0, root)
registered = []
plain_register = atexit.register

def register(function, *args, **options):
    if sys._getframe(1).f_code.co_filename.startswith(root + os.sep):
        registered.append(function)
    return plain_register(function, *args, **options)

atexit.register = register

def state():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook
    streams = sys.stdin, sys.stdout, sys.stderr
    return hooks, streams, handlers, masked, len(registered), gc.isenabled(), os.getcwd()

def environment():
    return dict(os.environ)

try:  # what packages of others set is not ours
    import matplotlib.pyplot, h5py, tensorboard, torch._dynamo, torch._inductor.utils
    import torch.distributed.fsdp, tokenizers, transformers
except ModuleNotFoundError:
    pass
before, variables, frozen = state(), environment(), gc.get_freeze_count()
for name in names:
    importlib.import_module(name)
    changed = [(old, new) for old, new in zip(before, state()) if old != new]
    changed += sorted(variables.items() ^ environment().items())
    if changed or gc.get_freeze_count() != frozen:
        print(name, changed, gc.get_freeze_count())
    before, variables, frozen = state(), environment(), gc.get_freeze_count()
"""


def names_of_all() -> list[str]:
    scripts = [f"scripts.{p.stem}" for p in outside_files() if p.parent == ROOT / "scripts"]
    return [*files(), *scripts]


@pytest.mark.slow
def test_no_import_changes_the_process():
    """Hooks, signal handlers, functions at exit, streams, variables, collections of garbage."""
    command = [sys.executable, "-c", IMPORTS, str(ROOT), *names_of_all()]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("name", ["base.errors", "plan", "config.schema", "checkpoint"])
def test_an_import_with_closed_streams_opens_none(name):
    code = f"import os, sys, importlib; importlib.import_module({name!r}); "
    code += "sys.exit(sys.stdin is not None or sys.stdout is not None)"
    command = f'exec "$0" -c "{code}" <&- >&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_every_program_begins_as_one():
    """Each calls `begin_program` where it is started, before its other imports."""
    programs = [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py"), *ROOT.glob("tools/*/*.py")]
    apart = {"test_all", "forkrun"}  # use nothing of the tree, or run a program that calls it
    for path in programs:
        text = path.read_text()
        if '__name__ == "__main__"' in text and path.stem not in apart:
            main = text.index('if __name__ == "__main__":\n    errors.begin_program()')
            imports = "errors.installed(" if "errors.installed(" in text else "\ndef "
            assert main < text.index(imports), path


# ---- The sources of the package ------------------------------------------------------------------

TREE = top_level_names(ROOT)
REWRITTEN = [
    ("import data", "from trine import data"),
    ("import data as d  # why", "from trine import data as d  # why"),
    ("from layers.loss import X, Y", "from trine.layers.loss import X, Y"),
    ("from base import errors, paths", "from trine.base import errors, paths"),
    ("if True:\n    from model import (\n        Stage,\n    )", None),
    ("def f():\n\timport trainer", "def f():\n\tfrom trine import trainer"),
    ("x = 'é'; from zero import Optimizer", "x = 'é'; from trine.zero import Optimizer"),
    ("text = 'from model import Stage'", "text = 'from model import Stage'"),
    (
        '"""\nimport data\nfrom model import Stage\n"""',
        '"""\nimport data\nfrom model import Stage\n"""',
    ),
    ("# import data", "# import data"),
    ("import data_of_others, os", "import data_of_others, os"),
    ("from database import model", "from database import model"),
    ("from torch import data, optim", "from torch import data, optim"),
    ("import torch.optim", "import torch.optim"),
    ("from . import data", "from . import data"),
    ("from trine.model import Stage", "from trine.model import Stage"),
    ("model.data = data.model", "model.data = data.model"),
]


@pytest.mark.parametrize(("source", "expected"), REWRITTEN)
def test_only_imports_of_the_tree_are_rewritten(source, expected):
    expected = expected or source.replace("from model", "from trine.model")
    assert installed_source(source, TREE) == expected
    assert installed_source(expected, TREE) == expected


@pytest.mark.parametrize("source", ["import optim.fsdp", "import os, data", "import data, model"])
def test_imports_that_cannot_be_the_same_in_both_end_the_build(source):
    with pytest.raises(SyntaxError, match="from FOLDER import"):
        installed_source(source, TREE, "x.py")


def test_a_program_of_the_package_does_not_find_modules_by_their_bare_names():
    source = 'import sys\nsys.path.insert(0, "/tree")\nprint(sys.path == [])\n'
    space = {}
    exec(installed_source(source, TREE).replace("print(", "found = ("), space)
    assert "/tree" not in sys.path
    assert space["found"] is False


def test_names_of_the_library_are_written_once_and_documented():
    page = (ROOT / "docs" / "library.md").read_text()
    assert sorted(library.__all__) == sorted(dir(library))
    for name in {*library.__all__} - {"__version__", "LoadedModel"}:
        assert f"| `{name}" in page, name
        assert getattr(library, name).__doc__


# ---- pyproject.toml ------------------------------------------------------------------------------


def test_requirements_are_those_of_the_package_with_its_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = (ROOT / "requirements.txt").read_text().split()
    assert sorted(listed) == sorted(project["dependencies"] + extras["train"] + extras["plots"])


def test_the_citation_has_the_version_and_templates_ask_for_the_check():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version} " in (ROOT / "CITATION.cff").read_text()
    templates = [*(ROOT / ".github").glob("*.md"), *(ROOT / ".github").glob("ISSUE_TEMPLATE/*.md")]
    assert len(templates) == 3
    assert [path.name for path in templates if "check.py" not in path.read_text()] == []
