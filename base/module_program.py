"""A module of this tree as the program of a process of its own, in a clone and installed.

    [sys.executable, "-c", module_program(__name__, __file__), "argument"]

`python -m` would not find the module of a clone if PYTHONSAFEPATH is set, because Python does not
search the current folder then.
"""

from pathlib import Path


def module_program(module: str, file: str, call: str = "main()") -> str:
    """Return a program for `python -c` that calls a function of a module of this tree.

    module, file: the module's `__name__`, and its `__file__` or that of a module in its folder.
    The program searches the folder that the module's name begins in: a clone's before all others,
    since `config` is a common name; site-packages, with `trine`, after Python's own.
    """
    folder = Path(file).resolve().parents[module.count(".")]
    position = "len(sys.path)" if module.startswith("trine.") else "0"
    function = call.partition("(")[0]
    return (
        f"import sys; sys.path.insert({position}, {str(folder)!r}); "
        f"from {module} import {function}; {call}"
    )
