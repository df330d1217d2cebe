"""The programs for which the planner answers in place of train.py: `plan.py --for megatron`.

    program = programs.of("megatron")          # a tools.planner.program.Program

To add a program: its table in engines.toml, a module like megatron_words.py, which ends with its
`Program` and writes its command, and its line here.
"""

from typing import Any

from base.errors import UserError, nearest
from tools.planner import megatron_words, torchtitan_words
from tools.planner.enumeration import VARIED
from tools.planner.program import Program

PROGRAMS = {each.name: each for each in (megatron_words.PROGRAM, torchtitan_words.PROGRAM)}


def of(name: str) -> Program:
    """Return the program of a name; raise UserError if there is none."""
    if name not in PROGRAMS:
        known = ", ".join(PROGRAMS)
        meant = nearest(name, list(PROGRAMS)) or ""
        raise UserError(f"--for {name!r}: there are {known}{meant}; without --for it is train.py")
    return PROGRAMS[name]


def trials(program: Program) -> dict[str, Any]:
    """Return the values of a program's options as Asked.fixed has them: one value, or a list."""
    return {
        name: values[0] if len(values) == 1 and name not in VARIED else list(values)
        for name, values in program.values.items()
    }
