"""Errors in the user's input: one printed line, exit status 2, never a traceback.

Everything that reads input of the user (flags, files, data) raises `UserError`; the entry points
print it with `exit_with`. `printable`, `nearest` and `number_ranges` are for the words of errors.

Programs import this module first: it exits under a Python that is too old for other modules. The
code before that exit runs under Python 3.6 too. Then a program calls `begin_program`, from which on
Ctrl-C ends it without a traceback, after its `finally` blocks. Who only imports modules, as a
notebook does, calls nothing, and keeps the hooks, signals and streams of the process.

Modules make half a million objects, torch's most of them, and keep them. A collection of garbage
while they are imported finds nothing, nor does that at the end of Python: together they took a
quarter of the processor time of a start. `installed` and the end of a program do without them.
"""

import atexit
import contextlib
import difflib
import errno
import gc
import json
import os
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from base.console import as_typed

# Numbers of the errors of writing to a file on a full disk, or to a pipe that no process reads.
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)
# Those of a file that only a full or read-only disk keeps from being written.
FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Texts of the errors of a full disk: no space left, disk quota exceeded.
NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
# Characters that turn the direction of a text (Unicode Bidirectional Algorithm, UAX 9, 2.1 to 2.4).
TURNS_TEXT = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
# The environment variable with the file into which a rank writes how it ends (`leave_end`).
END_FILE = "TRINE_END_FILE"
# What installs the packages that programs need: in a clone, and where `pip install` has put them.
SET_UP = "run `bash scripts/setup.sh`, then start programs with .venv/bin/python"
PLOTS = "a picture needs matplotlib, `pip install matplotlib`"
if __name__.startswith("trine."):
    SET_UP = "`pip install 'trine[train]'`"
    PLOTS = "a picture needs matplotlib, `pip install 'trine[plots]'`"

if sys.version_info < (3, 11):  # noqa: UP036
    is_old = f"error: Trine needs Python 3.11 or newer, and {sys.executable} is"
    sys.stderr.write(f"{is_old} {sys.version.split()[0]}: {SET_UP}\n")
    sys.exit(2)


def _print_exception(kind: Any, error: Any, trace: Any) -> None:
    """Print an exception that nothing has caught; nothing for Ctrl-C, after which Python ends."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def _end_by_interrupt(unraisable: Any) -> None:
    """Report an exception that Python ignores, as in a destructor; Ctrl-C ends the process."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.__unraisablehook__(unraisable)


def begin_program() -> None:
    """Prepare this process to be a program: hooks for Ctrl-C, streams that are open, a fast end.

    Each program calls it first of all, in its `if __name__ == "__main__":`, and no module does.
    """
    for stream in ("stdin", "stdout", "stderr"):
        # A stream is None if the shell closed it (>&-). The next opened file would get its
        # descriptor number, and so what is printed. /dev/null takes this number.
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "r+"))  # noqa: SIM115 (stays open on purpose)
    # Ctrl-C may come at any moment, in the imports too: it is no error with a traceback.
    sys.excepthook = _print_exception
    sys.unraisablehook = _end_by_interrupt
    atexit.register(gc.freeze)  # the first to be registered is the last to run


class UserError(Exception):
    """An error that the user can correct, with one sentence.

    status: the program's exit status. code: the kind of mistake, a word that stays: programs read
    it, of an object of --json (`answer`), and docs/faults.md lists all. The class itself is for
    mistakes in options, and in what goes together.
    """

    status = 2
    code = "option"

    def said(self, sentence: str) -> "UserError":
        """Return an error of the same kind with another sentence."""
        other = type(self).__new__(type(self), sentence)
        vars(other).update(vars(self))
        return other


class FileError(UserError):
    """A file that is not there, cannot be read or written, or is none of its kind."""

    code = "file"


class PackageError(UserError):
    """A package or a compiler is missing."""

    code = "package"


class ModelError(UserError):
    """A model's preset or config.json cannot be read, or cannot be trained."""

    code = "model"


class CorpusError(UserError):
    """A corpus, its tokenizer, or texts of which one is made."""

    code = "corpus"


class CheckpointError(UserError):
    """A checkpoint, or weights in transformers' format."""

    code = "checkpoint"


class LayoutError(UserError):
    """A layout does not divide the ranks, the model or the batch; or no layout can run."""

    code = "layout"


class TooLittleMemory(UserError):
    """The run needs more memory than there is."""

    code = "memory"


class RunError(UserError):
    """The folder of a run lacks what was asked, or contradicts itself."""

    code = "run"


class ProgramError(UserError):
    """The user's own code: a program or module that check.py reads, or a change of the engine."""

    code = "program"


class LossError(UserError):
    """The run has diverged."""

    code = "loss"


class ClusterError(UserError):
    """Launcher, nodes, GPUs or ports are not as the ranks need them."""

    code = "cluster"


class SaveError(UserError):
    """The result of a finished run cannot be saved; status 1, since the options are right."""

    status = 1
    code = "save"


class NetworkError(UserError):
    """Ranks cannot reach one another; status 1, since the options are right: try again."""

    status = 1
    code = "network"


class NodeError(UserError):
    """An error after which the supervisor may start the run again, without the named nodes.

    nodes: the nodes that the supervisor leaves out; perhaps none. kind, ranks: the kind of fault
    and its ranks, for the file that the supervisor reads (OUT/hang/case.json).
    """

    code = "node"

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


def error_of(sentence: str, code: str) -> UserError:
    """Return the error with a code, of another process. code: of a class with a sentence alone."""
    classes: list[type[UserError]] = [UserError, *UserError.__subclasses__()]
    kinds = {kind.code: kind for kind in classes}
    return kinds[code](sentence)


@contextlib.contextmanager
def installed(how: str = SET_UP) -> Iterator[None]:
    """In a block with imports, print one error line and exit if a package is not installed.

    The program exits with status 2. how: the end of the line, which tells how to install. Ctrl-C
    ends the process at once: a package may make an error of its own of a KeyboardInterrupt. Garbage
    is not collected in the block, and no later collection looks at what the block has made.

    In a process that is no program of ours (`begin_program`), such as a notebook, nothing of the
    process changes, and the error is raised, a ModuleNotFoundError with that line.
    """
    if sys.excepthook is not _print_exception:
        try:
            yield
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(_missing(error, how), name=error.name) from error
        return
    collects = gc.isenabled()
    gc.disable()
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    is_default = is_main and handler is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    except ModuleNotFoundError as error:
        exit_with(PackageError(_missing(error, how)))
    finally:
        gc.freeze()
        if collects:
            gc.enable()
        # The block may have installed a handler of its own, as train.py does.
        if is_default and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, handler)


def _missing(error: ModuleNotFoundError, how: str) -> str:
    return f"{sys.executable} has no package {error.name!r}: {how}"


@contextlib.contextmanager
def sentences(beside: Mapping[str, Any] | None = None) -> Iterator[None]:
    """In a block with a whole program, turn a UserError into one error line and its exit status.

    An output that cannot be written is such an error too. If no process reads the output any more
    (`| head`), nothing is printed. beside: further keys of the object that `--json` answers with.
    """
    try:
        yield
        sys.stdout.flush()
    except UserError as mistake:
        exit_with(mistake, beside=beside)
    except OSError as error:
        if error.filename is not None and error.errno in FULL_OR_READ_ONLY:
            unwritten = FileError(f"cannot write {error.filename}: {error.strerror}")
            exit_with(unwritten, beside=beside)
        if error.errno not in NOT_WRITTEN or error.filename is not None:
            raise
        # At its exit Python writes the text that is still buffered, which would fail again: so
        # standard output is led to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        is_read = error.errno != errno.EPIPE  # False: nobody reads the output any more
        unwritten = FileError(f"cannot write the output: {error.strerror}")
        exit_with(unwritten, prints=is_read, delay=0.0, beside=beside)


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


def answer(error: UserError, beside: Mapping[str, Any] | None = None) -> str:
    """Return an error as the object that a program reads: error, code, status, and `beside`."""
    sentence = as_typed(printable(str(error)))
    facts = {"error": sentence, "code": error.code, "status": error.status}
    return json.dumps(facts | dict(beside or {}))


def exit_with(
    error: UserError,
    prints: bool = True,
    delay: float = 1.0,
    beside: Mapping[str, Any] | None = None,
) -> NoReturn:
    """Exit with the error's status, after printing the message if `prints`.

    If several ranks have the same error, only one prints it. A launcher ends the whole job when a
    rank exits with an error, so the other ranks wait `delay` seconds before they exit, in which the
    message is printed. With --json the `answer` is on standard output too; the option is looked for
    in the words, since the error may be that they cannot be read.
    """
    if prints:
        if any(word.partition("=")[0] == "--json" for word in sys.argv[1:]):
            with contextlib.suppress(OSError):  # the message is still printed, and the status is
                print(answer(error, beside), flush=True)
        print(f"error: {as_typed(printable(str(error)))}", file=sys.stderr, flush=True)
        leave_end(error.status, str(error))
    else:
        time.sleep(delay)
    sys.exit(error.status)
