"""Errors in what the user gave: one sentence, exit status 2, never a traceback.

Everything that reads input of the user (flags, files, data) raises `UserError`; the entry points
print it with `exit_with`. Every program reads its command line with `Parser`, which has --version.

Programs import this module first: it ends a Python that is too old for the others. Until there it
uses nothing that Python 3.6 lacks.
"""

import argparse
import contextlib
import difflib
import errno
import os
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

VERSION = "0.3.0"  # as in pyproject.toml
# Of an output that is a file on a full disk, or a pipe that nobody reads any more.
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)
# Texts of errors for lack of room on a disk: no space left, disk quota exceeded.
NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
UNITS.update({"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30})
# Characters that turn the direction of a text (Unicode Bidirectional Algorithm, UAX 9, 2.1 to 2.4).
TURNS_TEXT = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
SET_UP = "run `bash scripts/setup.sh`, then start programs with .venv/bin/python"

if sys.version_info < (3, 11):  # noqa: UP036
    is_old = f"error: Trine needs Python 3.11 or newer, and {sys.executable} is"
    sys.stderr.write(f"{is_old} {sys.version.split()[0]}: {SET_UP}\n")
    sys.exit(2)

for stream in ("stdin", "stdout", "stderr"):
    if getattr(sys, stream) is None:  # closed, as by >&-: the next file would get its number
        setattr(sys, stream, open(os.devnull, "r+"))  # noqa: SIM115


class UserError(Exception):
    """An error that the user can correct; its message is one sentence. status: of the program."""

    status = 2


class SaveError(UserError):
    """The result of a finished run cannot be saved. The options are right: the status is 1."""

    status = 1


class NodeError(UserError):
    """An error of some nodes, without which a run may start."""

    def __init__(self, sentence: str, nodes: Iterable[str]):
        super().__init__(sentence)
        self.nodes = sorted(nodes)


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError and, unless it is part of another, has --version.

    Its numbers may have a unit, as 350B or 2k.
    """

    def __init__(self, prog: str | None = None, *, add_help: bool = True, **options: Any) -> None:
        super().__init__(prog, add_help=add_help, **options)
        self.register("type", int, whole_number)
        self.register("type", float, number)
        if add_help:
            version = f"trine {VERSION}"
            text = "print the version and exit"
            self.add_argument("--version", action="version", version=version, help=text)

    @classmethod
    def described(cls, text: str) -> "Parser":
        """That of a program whose docstring this is: its first line above, the rest below."""
        head, _, rest = text.partition("\n\n")
        form = argparse.RawDescriptionHelpFormatter
        return cls(description=head, epilog=rest, formatter_class=form, allow_abbrev=False)

    def add_gpus(self, text: str, default: int | None = None) -> None:
        """Add --gpus, the number of ranks, and its other spellings, which --help does not list."""
        self.add_argument("--gpus", type=int, metavar="N", help=text, default=default)
        for flag in ("--ranks", "--world"):
            hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            self.add_argument(flag, dest="gpus", type=int, **hidden)

    def error(self, message: str) -> NoReturn:
        """Raise the message as a UserError."""
        raise UserError(message + "; see --help" * ("are required" in message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but an empty text, such as --resume "$UNSET", is a UserError."""
        words = sys.argv[1:] if args is None else list(args)
        for before, word in zip(["", *words], words):
            if not word or (word.startswith("--") and word.find("=") == len(word) - 1):
                raise UserError(f"no value, after {word or before!r}: is a variable not set?")
        return super().parse_known_args(words, namespace)


@contextlib.contextmanager
def installed(how: str = SET_UP) -> Iterator[None]:
    """Around imports: a package that is not installed is one sentence, which ends with how to
    install it, and exit status 2.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        exit_with(UserError(f"{sys.executable} has no package {error.name!r}: {how}"))


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Around a program: a UserError, or an output that cannot be written, is one sentence and exit
    status 2; of an output that nobody reads any more (`| head`), only the status.
    """
    try:
        yield
        sys.stdout.flush()
    except UserError as mistake:
        exit_with(mistake)
    except OSError as error:
        if error.errno not in NOT_WRITTEN or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left in the buffer
        read = error.errno != errno.EPIPE
        exit_with(UserError(f"cannot write the output: {error.strerror}"), read, delay=0.0)


def check_decoded(flag: str, text: str) -> None:
    """Raise UserError if Python could not decode a text of the command line by the locale.

    Python then keeps each byte as a surrogate (PEP 383), which no tokenizer or UTF-8 file takes.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        encoding = sys.getfilesystemencoding()
        hint = "write it in UTF-8"
        if encoding != "utf-8":
            hint = "set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        raise UserError(f"{flag} has bytes that are not {encoding}, {text!a}: {hint}")


def check_file(path: str | None) -> None:
    """Raise UserError if a file that a program writes at its end cannot be written; None: no file.

    The file stays as it is: one that is not there is not made, and a pipe is not opened.
    """
    if path is None:
        return
    target = os.path.realpath(path)  # a link may lead to a file that is not there yet
    try:
        if os.path.isfile(target) or os.path.isdir(target):
            with open(target, "ab"):
                pass
        elif not os.path.exists(target):
            tempfile.TemporaryFile(dir=os.path.dirname(target)).close()
            with contextlib.suppress(FileNotFoundError):
                os.stat(target)  # an error for a name that is too long
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def check_folder(flag: str, path: str) -> None:
    """Raise UserError if the folder `path` cannot be made, or if no file can be made in it.

    A nameless temporary file in the deepest folder of `path` that exists is the test.
    """
    found = os.path.abspath(path)
    while not os.path.lexists(found):
        found = os.path.dirname(found)
    try:
        with tempfile.TemporaryFile(dir=found), contextlib.suppress(FileNotFoundError):
            os.stat(path)  # OSError if a name is too long
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot write in {found}: {error.strerror}") from None


def write_file(path: str | None, text: str) -> None:
    """Write a file if a path was given for it; UserError if it cannot be written."""
    try:
        if path is not None:
            Path(path).write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def number(text: str) -> float:
    """A number such as 3e-4, 350B or 2Ki; ValueError if it is none. k is 1000, and Ki is 1024."""
    figures = text.rstrip("kKMGBTi")
    unit = text[len(figures) :]
    if unit and unit not in UNITS:
        raise ValueError(text)
    return float(figures) * UNITS.get(unit, 1)


def whole_number(text: str) -> int:
    """A whole number, as `number`; ValueError if it is not whole."""
    if text.lstrip("+-").isdecimal():
        return int(text)
    found = number(text)
    if not found.is_integer():  # nor is inf, nor nan
        raise ValueError(text)
    return int(found)


def printable(text: str, keep: str = "\n\t") -> str:
    r"""The text with control characters as escapes, such as \x1b, but for those in `keep`.

    Text from elsewhere could otherwise move a terminal's cursor, change its title, or turn the
    direction of what follows.
    """
    if text.isprintable():
        return text
    shown = []
    for character in text:
        controls = unicodedata.category(character) in ("Cc", "Cs")  # control, half of a character
        if (controls or character in TURNS_TEXT) and character not in keep:
            character = character.encode("unicode_escape").decode("ascii")
        shown.append(character)
    return "".join(shown)


def nearest(name: str, known: Iterable[str], at_least: float = 0.6, most: int = 1) -> str:
    """`; did you mean ...?` with at most three known names that have `name` between dashes, or
    the `most` similar ones; or an empty string.
    """
    names = sorted((each for each in known if f"-{name}-" in f"-{each}-"), key=len)
    names = names[:3] or difflib.get_close_matches(name, [*known], most, at_least)
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


def number_ranges(numbers: Iterable[int], between: str = ",") -> str:
    """Whole numbers as 0-3,8, as Slurm and taskset write them; `between` separates the ranges."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return between.join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def exit_with(error: UserError, prints: bool = True, delay: float = 1.0) -> NoReturn:
    """Exit with the error's status; one rank prints the message.

    A launcher ends the whole job when one rank exits with an error, so the other ranks first wait
    `delay` seconds for the one that prints.
    """
    if prints:
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
    else:
        time.sleep(delay)
    sys.exit(error.status)
