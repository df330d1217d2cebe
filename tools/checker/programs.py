"""A program that is not Trine, as the user's file describes it: its layouts and how it is built.

    program = read_program(Path("my_program.py"), {"bias": False})
    program.layouts                     those of its layouts(), the first is one rank
    built = program.build(layout)       on a rank of that layout, after the ranks have met

The file has two functions and a few names (docs/check_other_programs.md): layouts(), build(layout),
and if needed cut, steps, dtype, loads. Modules of the file's folder may be called as modules of
Trine are, such as `model` or `data`; so each has its own table of modules while it runs.
"""

import ast
import contextlib
import importlib.util
import linecache
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from base.errors import FileError, ProgramError, UserError, nearest

ROOT = Path(__file__).resolve().parents[2]
# Axes by whose sizes the ranks are multiplied; ep is a second view of the others.
MULTIPLIED = ("tp", "pp", "cp", "dp", "fsdp", "dp_replicate", "dp_shard")
AXES = (*MULTIPLIED, "ep", "etp")
STEPS = 3  # drawn weights, those of an update, and those of an update with moments
NAME = "checked_program"  # of the file as a module
LINES = 4  # of the user's own file, that an error shows
PARTS = ("model", "optimizer", "step", "save", "load", "names", "place")


@dataclass(frozen=True)
class ProgramLayout:
    """A layout of another program: names and values, as its layouts() gave them."""

    given: tuple[tuple[str, Any], ...]

    @property
    def values(self) -> dict[str, Any]:
        """What the program's build() gets."""
        return dict(self.given)

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes that are above 1."""
        return {name: size for name, size in self.given if name in AXES and size > 1}

    @property
    def ranks(self) -> int:
        """The number of ranks: the entry `ranks`, or the product of the axes without ep."""
        product = math.prod(size for name, size in self.axes.items() if name in MULTIPLIED)
        return int(self.values.get("ranks", product))

    @property
    def name(self) -> str:
        """The layout as --layout takes it."""
        words = [_word(name, value) for name, value in self.given if self._says(name, value)]
        return " ".join(words) or "one rank"

    @property
    def traits(self) -> list[str]:
        """What it has, by which layouts that differ are told from equal ones."""
        found = [f"{axis} above 1" for axis in self.axes]
        found += [_word(n, v) for n, v in self.given if n not in AXES and self._says(n, v)]
        found += [f"{name} {size}" for name, size in self.axes.items() if size > 2]
        return found + ["more than one rank"] * (self.ranks > 1)

    def _says(self, name: str, value: Any) -> bool:
        """Return whether an entry is more than the plain one of an axis or a flag."""
        return value is not None and value is not False and not (name in AXES and value == 1)


def _word(name: str, value: Any) -> str:
    """Return an entry of a layout as --layout takes it."""
    return name if value is True else f"{name} {value}"


@dataclass
class Built:
    """What build() returned. models: its modules. optimizers: the objects that step, perhaps none.

    names: the global name of a local parameter's name. place: the rank's coordinate on each axis,
    if the file says it.
    """

    models: list[Any]
    optimizers: list[Any]
    step: Callable[[int], Any]
    save: Callable[[str], Any] | None
    load: Callable[[str], Any] | None
    names: Callable[[str], str]
    place: dict[str, int] | None


@dataclass
class Program:
    """The user's program. cut: what cannot be read of its tensors. precision: torch's default type.

    layouts: the first is one rank. steps: of each run. loads: whether what one layout has saved can
    be loaded in another.
    """

    path: Path
    make: Callable[[dict[str, Any]], Any]
    layouts: list[ProgramLayout]
    modules: "OwnModules"
    cut: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    dtype: Any = None
    loads: Callable[[dict[str, Any], dict[str, Any]], bool] = lambda saved_by, layout: True

    def build(self, layout: ProgramLayout) -> Built:
        """Build the program on this rank; the ranks have met. UserError for a mistake of the file.

        An error inside build() is raised as it is.
        """
        with self.modules:
            made = self.make(layout.values)
        return _built(made, self.path.name)

    def own_lines(self, error: BaseException) -> tuple[str, list[str]]:
        """Return where in the user's file an error is from, and the innermost lines of that file.

        The first is "FILE:LINE", and that of another file if no line of this one was running.
        """
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, SyntaxError) and error.filename == str(self.path):
            return f"{self.path.name}:{error.lineno}", [(error.text or "").strip()]
        own = [frame for frame in frames if frame.filename == str(self.path)]
        if not own:
            last = frames[-1]
            return f"{os.path.basename(last.filename)}:{last.lineno}", []
        lines = [
            f"{self.path.name}:{x.lineno} in {x.name}: "
            f"{(x.line or linecache.getline(x.filename, x.lineno or 0)).strip()}"
            for x in own[-LINES:]
        ]
        return f"{self.path.name}:{own[-1].lineno}", lines

    def sentence(self, error: BaseException) -> str:
        """Return an error of the user's code in one line, with the place in the file."""
        where, _ = self.own_lines(error)
        text = (str(error).strip() or "without a text").splitlines()[0]
        return f"{where}: {type(error).__name__}: {text}"

    def chosen(self, texts: Sequence[str], ranks: int) -> list[ProgramLayout]:
        """Return the layouts to run: those of these texts, or all of up to so many ranks."""
        if texts:
            return [self._read(text) for text in texts]
        return [layout for layout in self.layouts[1:] if layout.ranks <= ranks]

    def _read(self, text: str) -> ProgramLayout:
        """Return the layout that a user has written, such as "tp 2 sp"; UserError if wrong."""
        known = {name for layout in self.layouts for name, _ in layout.given} | set(AXES)
        words, given = shlex.split(text), {}
        while words:
            word = words.pop(0)
            if word not in known:
                raise UserError(
                    f"--layout {text!r}: {word!r} is no axis, nor an option of the layouts of "
                    f"{self.path.name}{nearest(word, known)}"
                )
            is_flag = not words or words[0] in known
            given[word] = True if is_flag else _value(words.pop(0))
        return _layout(given, f"--layout {text!r}")


class OwnModules:
    """While it is entered, the modules of Trine are hidden from imports, and the program's are not.

    `import model` in the user's file means the file beside it, and not Trine's. What is in packages
    both share.
    """

    def __init__(self, folder: Path):
        """Hide nothing yet. folder: of the user's file, first on sys.path when entered."""
        self.folder = folder
        self.theirs: dict[str, ModuleType] = {}
        self.path: list[str] = []
        self.hidden: dict[str, ModuleType] = {}

    def __enter__(self) -> "OwnModules":
        """Remove Trine's modules from sys.modules, and put the user's there and on sys.path."""
        self.hidden = {
            name: module
            for name, module in list(sys.modules.items())
            if name != "__main__" and not name.startswith("trine") and self._is_of_tree(module)
        }
        for name in self.hidden:
            del sys.modules[name]
        sys.modules.update(self.theirs)
        self.path = list(sys.path)
        sys.path[:] = [str(self.folder)] + [p for p in sys.path if not _is_root(p)]
        return self

    def __exit__(self, *of_error: Any) -> None:
        """Put Trine's modules and sys.path back, and keep the user's modules for the next time."""
        sys.path[:] = self.path
        self.theirs = {n: m for n, m in list(sys.modules.items()) if self._is_of_tree(m)}
        self.theirs.pop("__main__", None)
        for name in self.theirs:
            del sys.modules[name]
        sys.modules.update(self.hidden)

    def _is_of_tree(self, module: Any) -> bool:
        """Return whether a module is of Trine or of the folder of the file, and of no package."""
        file = getattr(module, "__file__", None) or next(
            iter(getattr(module, "__path__", None) or []), None
        )
        if not isinstance(file, str) or "site-packages" in file:
            return False
        return file.startswith((f"{ROOT}{os.sep}", f"{self.folder}{os.sep}"))


def _is_root(entry: str) -> bool:
    """Return whether an entry of the path of modules is the folder of Trine."""
    return os.path.realpath(entry or ".") == str(ROOT)


def read_program(path: Path, changed: Mapping[str, str]) -> Program:
    """Return the program that a file describes. UserError for a mistake in it.

    changed: names of the file that get another value, as text (--set).
    """
    program, module = load(path, changed, "--program")
    for name, what in (("layouts", "the list of its layouts"), ("build", "the program")):
        if not callable(getattr(module, name, None)):
            raise ProgramError(f"{path.name} has no function {name}(), which returns {what}")
    program.make = module.build
    with own_errors(program), program.modules:
        every = module.layouts()
    program.layouts = _layouts(every, path.name)
    return program


def load(path: Path, changed: Mapping[str, str], flag: str) -> tuple[Program, Any]:
    """Return a program without layouts, and the module of its file. UserError for a mistake in it.

    changed: see `read_program`. flag: the option that named the file.
    """
    path = path.resolve()
    if not path.is_file():
        raise FileError(f"{flag} {path}: there is no such file")
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise ProgramError(f"{flag} {path}: a file of Python, whose name ends in .py, is needed")
    module = importlib.util.module_from_spec(spec)
    program = Program(path, lambda layout: None, [], OwnModules(path.parent))
    with own_errors(program), program.modules:
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
    for name, text in changed.items():
        if not hasattr(module, name):
            raise UserError(f"--set {name}={text}: {path.name} has no {name!r} at its top")
        setattr(module, name, _value(text))
    program.cut = dict(getattr(module, "cut", {}))
    program.steps = _steps(getattr(module, "steps", STEPS), path.name)
    program.dtype = getattr(module, "dtype", None)
    program.loads = getattr(module, "loads", program.loads)
    return program, module


@contextlib.contextmanager
def own_errors(program: Program) -> Iterator[None]:
    """Turn an error of the user's code into a UserError with the lines of the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        _, lines = program.own_lines(error)
        raise ProgramError("\n  ".join([program.sentence(error), *lines])) from error


def _layouts(every: Any, name: str) -> list[ProgramLayout]:
    """Return the layouts that layouts() of the user's file has returned.

    name: of the file, for messages. Raise UserError if they are none, or one rank is not first.
    """
    is_list = isinstance(every, list | tuple) and all(isinstance(x, Mapping) for x in every)
    if not is_list or not every:
        raise ProgramError(
            f"{name}: layouts() returns a list of layouts, such as [{{}}, {{'tp': 2}}], not "
            f"{every!r:.80}"
        )
    layouts = [_layout(each, f"{name}: layouts() has {each!r}:") for each in every]
    if layouts[0].ranks != 1:
        raise ProgramError(
            f"{name}: the first of layouts() is one rank, such as {{}}, with which the others are "
            f"compared; it is {layouts[0].name!r}, {layouts[0].ranks} ranks"
        )
    return layouts


def _layout(given: Mapping[str, Any], where: str) -> ProgramLayout:
    """Return a layout; UserError, which begins with `where`, if a size is none."""
    for name, value in given.items():
        is_size = name in (*AXES, "ranks")
        if is_size and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ProgramError(f"{where} {name} is a number of ranks from 1, not {value!r}")
    return ProgramLayout(tuple(given.items()))


def _steps(steps: Any, name: str) -> int:
    """Return the number of steps of a run."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ProgramError(f"{name}: steps is a number from 1, not {steps!r}")
    return steps


def _value(text: str) -> Any:
    """Return a value that was typed: a number, True, False, None, a list; else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text, text)


def _built(made: Any, name: str) -> Built:
    """Return what build() of the user's file has returned, as a Built.

    name: of the file, for messages. Raise UserError if a part is missing or of another type.
    """
    parts = dict(made) if isinstance(made, Mapping) else _attributes(made)
    for part in ("model", "step"):
        if parts.get(part) is None:
            raise ProgramError(
                f"{name}: what build() returns has no {part!r}; it has {_list(parts)}"
            )
    models = parts["model"]
    models = list(models) if isinstance(models, list | tuple) else [models]
    for model in models:
        if not hasattr(model, "named_parameters"):
            raise ProgramError(
                f"{name}: model of build() is a torch module or a list of them, not a "
                f"{type(model).__name__}"
            )
    for part in ("step", "save", "load"):
        if parts.get(part) is not None and not callable(parts[part]):
            raise ProgramError(f"{name}: {part} of build() is a function, not {parts[part]!r:.80}")
    optimizers = parts.get("optimizer")
    if not isinstance(optimizers, list | tuple):
        optimizers = [] if optimizers is None else [optimizers]
    names = parts.get("names") or {}
    if callable(names):
        of_name = names
    elif isinstance(names, Mapping):
        of_name = _by_table(names)
    else:
        raise ProgramError(f"{name}: names of build() is a dict or a function, not {names!r:.80}")
    return Built(
        models,
        list(optimizers),
        parts["step"],
        parts.get("save"),
        parts.get("load"),
        of_name,
        parts.get("place"),
    )


def _by_table(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function of a local name that gives the global one; others stay as they are."""
    return lambda local: names.get(local, local)


def _attributes(made: Any) -> dict[str, Any]:
    """Return the parts of a program that are attributes of an object."""
    return {part: getattr(made, part) for part in PARTS if hasattr(made, part)}


def _list(parts: Mapping[str, Any]) -> str:
    """Return the names of what there is."""
    return ", ".join(map(repr, parts)) or "nothing"
