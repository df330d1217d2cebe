"""The programs for which the planner answers in place of train.py: `plan.py --for megatron`.

    program = programs.of("megatron")             # a tools.planner.program.Program
    program = programs.of("torchtitan@0.2.2")     # of a release in releases.toml; else the newest

To add a program: its tables in engines.toml and releases.toml, a module like megatron_words.py,
which ends with a function `program` and writes its command, and its line here.
"""

from collections.abc import Callable
from typing import Any

from base.errors import UserError, nearest
from tools.planner import bridge_words, megatron_words, releases, torchtitan_words
from tools.planner.enumeration import VARIED
from tools.planner.program import Program

PROGRAMS: dict[str, Callable[[str], Program]] = {
    "bridge": bridge_words.program,
    "megatron": megatron_words.program,
    "torchtitan": torchtitan_words.program,
}


def of(name: str) -> Program:
    """Return the program of NAME or NAME@VERSION; raise UserError if there is none."""
    program, _, version = name.partition("@")
    if program not in PROGRAMS:
        known = ", ".join(PROGRAMS)
        meant = nearest(program, list(PROGRAMS)) or ""
        raise UserError(f"--for {name!r}: there are {known}{meant}; without --for it is train.py")
    versions = releases.versions(program)
    version = version.removeprefix("core_").removeprefix("v") or versions[0]
    if version not in versions:
        known = ", ".join(f"{program}@{each}" for each in versions)
        raise UserError(f"--for {name!r}: there are {known}")
    return PROGRAMS[program](version)


def trials(program: Program) -> dict[str, Any]:
    """Return the values of a program's options as Asked.fixed has them: one value, or a list."""
    return {
        name: values[0] if len(values) == 1 and name not in VARIED else list(values)
        for name, values in program.values.items()
    }
