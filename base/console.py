"""The commands of an installed Trine: `trine-train` is `python train.py` of the installed folder.

`pip install .` puts the whole tree into one package, `trine`, and programs import modules from
their folder: no module called `data` or `model` can be imported from elsewhere. Each command
becomes its program (exec), so launchers and signals reach that program, and its status is returned.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "trine-"


def main() -> NoReturn:
    """Replace this process by the program NAME.py of the command trine-NAME, with its arguments.

    The program is in the root or in scripts/ of the installed folder.
    """
    name = Path(sys.argv[0]).stem.removeprefix(PREFIX).replace("-", "_") + ".py"
    folders = (ROOT, ROOT / "scripts")
    program = next(folder / name for folder in folders if (folder / name).exists())
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(program), *sys.argv[1:]])
