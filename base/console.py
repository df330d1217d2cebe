"""The commands of an installed Trine: `trine-train` is `python train.py` of the installed folder.

`pip install .` puts the whole tree into one package, `trine`, and programs import modules from
their folder: no module called `data` or `model` can be imported from elsewhere. Each command
becomes its program (exec), so launchers and signals reach that program, and its status is returned.

What programs print has `python train.py`, the command of a clone; `as_typed` makes of it what the
reader can type. Help and error lines pass through it in base/cli.py and base/errors.py.
"""

import os
import re
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "trine-"
IS_INSTALLED = __name__.startswith("trine.")  # scripts/build_package.py gives modules this prefix
COMMANDS = (
    *("train", "plan", "tune", "rehearse", "supervise", "check", "checkpoint", "runs", "sample"),
    *("prepare_data", "plot_loss", "eval_tasks", "corpus", "prepare_chats"),
)
# A program's file as a word of a command or of a sentence, but not in a path, and not with a line.
PROGRAM = re.compile(
    rf"(?<![\w./-])(?:python )?(?:scripts/)?({'|'.join(COMMANDS)})\.py(?![\w:/])(?!\.\w)"
)

TORCHRUN = re.compile(rf"\btorchrun (?=[^\n]*\b{PREFIX})")  # it starts Python files by itself


def as_typed(text: str, is_installed: bool = IS_INSTALLED) -> str:
    """Return a text in which `python plan.py` is trine-plan, if Trine is an installed package."""
    if not is_installed:
        return text
    typed = PROGRAM.sub(lambda found: PREFIX + found[1].replace("_", "-"), text)
    return TORCHRUN.sub("torchrun --no-python ", typed)


def is_program(word: str) -> bool:
    """Return whether a word of a command names a Python program or an installed Trine command."""
    name = Path(word).name.removeprefix(PREFIX).replace("-", "_")
    return word.endswith(".py") or (Path(word).name.startswith(PREFIX) and name in COMMANDS)


def main() -> NoReturn:
    """Replace this process by the program NAME.py of the command trine-NAME, with its arguments.

    The program is in the root or in scripts/ of the installed folder.
    """
    name = Path(sys.argv[0]).stem.removeprefix(PREFIX).replace("-", "_") + ".py"
    folders = (ROOT, ROOT / "scripts")
    program = next(folder / name for folder in folders if (folder / name).exists())
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(program), *sys.argv[1:]])
