"""The commands of an installed Trine: `trine-train` is `python train.py` of the installed folder.

`pip install .` puts the whole tree into one package, `trine`, and programs find their parts beside
them: nothing called `data` or `model` is importable from elsewhere. Each command becomes its
program (exec), so launchers, signals and exit status are those of the program itself.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "trine-"


def main() -> NoReturn:
    """Become the program that this command is named for; its arguments are passed on."""
    name = Path(sys.argv[0]).stem.removeprefix(PREFIX).replace("-", "_") + ".py"
    folders = (ROOT, ROOT / "scripts")
    program = next(folder / name for folder in folders if (folder / name).exists())
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(program), *sys.argv[1:]])
