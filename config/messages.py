"""Errors in the user's input: one printed line, exit status 2, never a traceback; and `Parser`.

Everything that reads input of the user (flags, files, data) raises `UserError`; the entry points
print it with `exit_with`. Every program reads its command line with `Parser`, which has --version.

Programs import this module first: it exits under a Python that is too old for other modules. The
code before that exit runs under Python 3.6 too.
"""

import argparse
import contextlib
import difflib
import errno
import json
import os
import re
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

VERSION = "0.3.0"  # the same as in pyproject.toml
# Numbers of the errors of writing to a file on a full disk, or to a pipe that no process reads.
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)
# Texts of the errors of a full disk: no space left, disk quota exceeded.
NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
UNITS.update({"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30})
# Characters that turn the direction of a text (Unicode Bidirectional Algorithm, UAX 9, 2.1 to 2.4).
TURNS_TEXT = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
# The environment variable with the file into which a rank writes how it ends (`leave_end`).
END_FILE = "TRINE_END_FILE"
SET_UP = "run `bash scripts/setup.sh`, then start programs with .venv/bin/python"

if sys.version_info < (3, 11):  # noqa: UP036
    is_old = f"error: Trine needs Python 3.11 or newer, and {sys.executable} is"
    sys.stderr.write(f"{is_old} {sys.version.split()[0]}: {SET_UP}\n")
    sys.exit(2)

for stream in ("stdin", "stdout", "stderr"):
    # A stream is None if the shell closed it (>&-). The next opened file would get its descriptor
    # number, and so what is printed. /dev/null takes this number.
    if getattr(sys, stream) is None:
        setattr(sys, stream, open(os.devnull, "r+"))  # noqa: SIM115 (stays open on purpose)


class UserError(Exception):
    """An error that the user can correct, with one sentence. status: the program's exit status."""

    status = 2


class SaveError(UserError):
    """The result of a finished run cannot be saved; status 1, since the options are right."""

    status = 1


class NetworkError(UserError):
    """Ranks cannot reach one another; status 1, since the options are right: try again."""

    status = 1


class NodeError(UserError):
    """An error after which the supervisor may start the run again, without the named nodes.

    nodes: the nodes that the supervisor leaves out; perhaps none. kind, ranks: the kind of fault
    and its ranks, for the file that the supervisor reads (OUT/hang/case.json).
    """

    def __init__(
        self,
        sentence: str,
        nodes: Iterable[str],
        kind: str = "preflight",
        ranks: Sequence[int] = (),
    ):
        """Keep what the supervisor reads: nodes to leave out, the fault's kind and its ranks."""
        super().__init__(sentence)
        self.nodes = sorted(nodes)
        self.kind = kind
        self.ranks = list(ranks)


# argparse's messages for a word that is no number, and for one that is none of the choices.
WRONG_NUMBER = re.compile(r"argument (\S+): invalid (int|float) value: (.*)", re.DOTALL)
WRONG_CHOICE = re.compile(r"argument \S+: invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
NUMBERS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError and, unless add_help is False, has --version.

    Numbers on the command line may have a unit, such as 350B or 2k.
    """

    def __init__(self, prog: str | None = None, *, add_help: bool = True, **options: Any) -> None:
        """Make a parser whose numbers may have units; it has --version if it has --help."""
        super().__init__(prog, add_help=add_help, **options)
        # Arguments with type=int and type=float are read by these functions, which know units.
        self.register("type", int, whole_number)
        self.register("type", float, number)
        if add_help:
            version = f"trine {VERSION}"
            text = "print the version and exit"
            self.add_argument("--version", action="version", version=version, help=text)

    @classmethod
    def described(cls, text: str) -> "Parser":
        """Return a parser whose help has the first paragraph of `text` above, the rest below.

        text: the docstring of a program.
        """
        head, _, rest = text.partition("\n\n")
        form = argparse.RawDescriptionHelpFormatter
        return cls(description=head, epilog=rest, formatter_class=form, allow_abbrev=False)

    def add_gpus(self, text: str, default: int | None = None) -> None:
        """Add --gpus, the number of ranks, and its spellings --ranks and --world, both hidden.

        text: the help text. default: the value if the option is not given.
        """
        self.add_argument("--gpus", type=int, metavar="N", help=text, default=default)
        for flag in ("--ranks", "--world"):
            hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            self.add_argument(flag, dest="gpus", type=int, **hidden)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a UserError; if options are missing, it names --help.

        A word that is no number, and a word that is none of the choices, get our own sentence.
        """
        wrong_number = WRONG_NUMBER.fullmatch(message)
        if wrong_number:
            name, kind, value = wrong_number.groups()
            raise UserError(f"{name} takes {NUMBERS[kind]}, not {value}")
        wrong_choice = WRONG_CHOICE.fullmatch(message)
        if wrong_choice:
            value, names = wrong_choice.groups()
            message += nearest(value, re.findall(r"[\w-]+", names))
        raise UserError(message + "; see --help" * ("are required" in message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but raise UserError for an empty text, as in --resume "$UNSET".

        The message shows the word before the empty one, or the word itself for --resume="$UNSET".
        """
        words = sys.argv[1:] if args is None else list(args)
        for before, word in zip(["", *words], words):
            if not word or (word.startswith("--") and word.find("=") == len(word) - 1):
                raise UserError(f"no value, after {word or before!r}: is a variable not set?")
        return super().parse_known_args(words, namespace)


@contextlib.contextmanager
def installed(how: str = SET_UP) -> Iterator[None]:
    """In a block with imports, print one error line and exit if a package is not installed.

    The program exits with status 2. how: the end of the line, which tells how to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        exit_with(UserError(f"{sys.executable} has no package {error.name!r}: {how}"))


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """In a block with a whole program, turn a UserError into one error line and its exit status.

    An output that cannot be written is such an error too. If no process reads the output any more
    (`| head`), nothing is printed.
    """
    try:
        yield
        sys.stdout.flush()
    except UserError as mistake:
        exit_with(mistake)
    except OSError as error:
        if error.errno not in NOT_WRITTEN or error.filename is not None:
            raise
        # At its exit Python writes the text that is still buffered, which would fail again: so
        # standard output is led to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        is_read = error.errno != errno.EPIPE  # False: nobody reads the output any more
        unwritten = UserError(f"cannot write the output: {error.strerror}")
        exit_with(unwritten, prints=is_read, delay=0.0)


def check_decoded(flag: str, text: str) -> None:
    """Raise UserError if a text of the command line has bytes that the locale could not decode.

    Python keeps such bytes as surrogates (PEP 383), which no tokenizer or UTF-8 file accepts.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        encoding = sys.getfilesystemencoding()
        hint = "write it in UTF-8"
        if encoding != "utf-8":
            hint = "set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        raise UserError(f"{flag} has bytes that are not {encoding}, {text!a}: {hint}")


def check_file(path: str | None) -> None:
    """Raise UserError if a file that a program writes at its end cannot be written; None: no file.

    The check changes no file: it does not make a missing file, and it does not open a pipe. So a
    program finds a wrong path before its work, and not after it.
    """
    if path is None:
        return
    target = os.path.realpath(path)  # a link may lead to a file that does not exist yet
    try:
        if os.path.isfile(target) or os.path.isdir(target):  # for a folder `open` raises OSError
            with open(target, "ab"):
                pass
        elif not os.path.exists(target):
            # A temporary file without a name shows whether its folder takes files.
            tempfile.TemporaryFile(dir=os.path.dirname(target)).close()
            with contextlib.suppress(FileNotFoundError):
                os.stat(target)  # OSError if a name is too long
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def check_folder(flag: str, path: str) -> None:
    """Raise UserError if the folder `path` cannot be made, or if no file can be made in it.

    The check makes a temporary file without a name in the deepest folder of `path` that exists.
    flag: the option, for the message.
    """
    folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    try:
        with tempfile.TemporaryFile(dir=folder), contextlib.suppress(FileNotFoundError):
            os.stat(path)  # OSError if a name is too long
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot write in {folder}: {error.strerror}") from None


def write_file(path: str | None, text: str) -> None:
    """Write `text` into the file `path`; UserError if it cannot be written. None: do nothing."""
    try:
        if path is not None:
            Path(path).write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def number(text: str) -> float:
    """Return a number such as 3e-4, 350B or 2Ki (k: 1000, Ki: 1024); ValueError for other texts."""
    figures = text.rstrip("kKMGBTi")
    unit = text[len(figures) :]
    if unit and unit not in UNITS:
        raise ValueError(text)
    return float(figures) * UNITS.get(unit, 1)


def whole_number(text: str) -> int:
    """Return a whole number in any form that `number` reads; ValueError if it is not whole."""
    if text.lstrip("+-").isdecimal():
        return int(text)
    value = number(text)
    if not value.is_integer():  # inf and nan are not integers either
        raise ValueError(text)
    return int(value)


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Return the text with control characters, except those in `keep`, as escapes such as \x1b.

    Text from files or models could otherwise move a terminal's cursor, change its title, or change
    the direction of the text that follows.
    """
    if text.isprintable():
        return text
    shown = []
    for character in text:
        is_control = unicodedata.category(character) in ("Cc", "Cs")  # controls, surrogates
        if (is_control or character in TURNS_TEXT) and character not in keep:
            character = character.encode("unicode_escape").decode("ascii")
        shown.append(character)
    return "".join(shown)


def nearest(name: str, known: Iterable[str], at_least: float = 0.6, most: int = 1) -> str:
    """Return `; did you mean ...?` with known names that are like `name`, or an empty string.

    Known names that have `name` between dashes are taken first, the shortest three: for "norm",
    "embedding-norm" and others. If there is none, up to `most` names are taken that have at least
    the similarity `at_least`, difflib's measure from 0 to 1.
    """
    containing = [candidate for candidate in known if f"-{name}-" in f"-{candidate}-"]
    names = sorted(containing, key=len)[:3]
    if not names:
        names = difflib.get_close_matches(name, [*known], most, at_least)
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


def number_ranges(numbers: Iterable[int], between: str = ",") -> str:
    """Return whole numbers as 0-3,8, the form of Slurm and taskset; `between` separates ranges."""
    parts: list[list[int]] = []  # each part is [first, last] of numbers without a gap
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return between.join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def environment_with_end(path: str) -> dict[str, str]:
    """Return this process's environment, in which the ranks write how they end into `path`.

    The supervisor starts the launcher with it.
    """
    return {**os.environ, END_FILE: path}


def leave_end(status: int, error: str = "") -> None:
    """Leave this rank's exit status and error sentence for the supervisor, if there is one.

    Launchers lose both: srun --kill-on-bad-exit makes 143 of a 2, torchrun makes 1 of everything,
    and what a rank prints may go into a file of its own. If the file cannot be written, the status
    of the launcher counts.
    """
    path = os.environ.get(END_FILE)
    if not path:
        return
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{os.getpid()}"
        Path(temporary).write_text(json.dumps({"status": status, "error": error}))
        os.replace(temporary, path)


def exit_with(error: UserError, prints: bool = True, delay: float = 1.0) -> NoReturn:
    """Exit with the error's status, after printing the message if `prints`.

    If several ranks have the same error, only one prints it. A launcher ends the whole job when a
    rank exits with an error, so the other ranks wait `delay` seconds before they exit, in which the
    message is printed.
    """
    if prints:
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        leave_end(error.status, str(error))
    else:
        time.sleep(delay)
    sys.exit(error.status)


def check_paths(config: Any) -> None:
    """Raise UserError if --out, --cache, a switch file or --resume cannot be used as given.

    Called by train.py on rank 0 before training begins. A switch file is a file whose appearance
    stops or saves the run; its folder must exist, or be the run's folder or a folder on the way to
    it, which the run makes.
    """
    run = config.run
    check_folder("--out", run.out)
    # Whether the run reads token files: then it keeps orders of their samples in the cache.
    reads = config.data.data != ("synthetic",) or config.data.eval_data
    if config.data.cache_folder and reads:
        check_folder("--cache", config.data.cache_folder)
    for flag, path in (("--kill-switch", run.kill_switch), ("--save-switch", run.save_switch)):
        if path and os.path.isdir(path):
            raise UserError(f"{flag} {path} is a folder, not a file that may appear")
        folder = os.path.dirname(os.path.abspath(path)) if path else os.sep
        # Both paths get a "/" at their ends, so that `folder` matches whole names only.
        out = os.path.join(os.path.abspath(run.out), "")
        made_by_run = out.startswith(os.path.join(folder, ""))
        if not os.path.isdir(folder) and not made_by_run:
            raise UserError(f"{flag} {path} can never appear: there is no folder {folder}")
    if run.kill_switch and os.path.exists(run.kill_switch):
        raise UserError(f"--kill-switch {run.kill_switch} exists: remove it to train")
    if run.record_routing and run.pin_routing:
        raise UserError(
            "--record-routing and --pin-routing: a run writes the file or takes from it"
        )
    if run.resume not in (None, "auto") and not os.path.isdir(run.resume):
        raise UserError(f"--resume {run.resume}: there is no such folder")
