"""The command line of every program: `Parser`, its numbers with units, the version.

parser = Parser.described(__doc__)     # has --version; a mistake is a UserError
number("350B")                         350e9
"""

import argparse
import re
import sys
from typing import Any, NoReturn

from base.console import as_typed
from base.errors import UserError, nearest

VERSION = "0.3.0"  # the same as in pyproject.toml
UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
UNITS.update({"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30})
# argparse's messages for a word that is no number, and for one that is none of the choices.
WRONG_NUMBER = re.compile(r"argument (\S+): invalid (int|float) value: (.*)", re.DOTALL)
WRONG_CHOICE = re.compile(r"argument \S+: invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
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

    def format_help(self) -> str:
        """Return the help text, with the names of commands that the reader can type."""
        return as_typed(super().format_help())

    def format_usage(self) -> str:
        """Return the line of the usage, with the name of the command that the reader can type."""
        return as_typed(super().format_usage())

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

        A word that is no number, and a word that is none of the choices, get our own sentence. An
        unknown option gets the name of the option that is like it.
        """
        wrong_number = WRONG_NUMBER.fullmatch(message)
        if wrong_number:
            name, kind, value = wrong_number.groups()
            raise UserError(f"{name} takes {NUMBERS[kind]}, not {value}")
        wrong_choice = WRONG_CHOICE.fullmatch(message)
        if wrong_choice:
            value, names = wrong_choice.groups()
            message += nearest(value, re.findall(r"[\w-]+", names))
        unknown = UNKNOWN.fullmatch(message)
        if unknown:  # the first option among them is the mistake, or the first word
            words = unknown[1].split()
            name = next((word for word in words if word.startswith("--")), words[0])
            message += self._proposal(name.partition("=")[0])
        raise UserError(message + "; see --help" * ("are required" in message))

    def _proposal(self, flag: str) -> str:
        """Return the end of a message about an unknown flag: whose it is, or one that is like it.

        A program with commands gets such a message, and not the command's parser.
        """
        commands: dict[str, Parser] = {}
        for action in self._actions:
            if isinstance(action.choices, dict):  # the parsers of commands, by name
                commands |= action.choices
        owners = [name for name, its in commands.items() if flag in its._option_string_actions]
        if owners:
            return f"; it is an option of {', '.join(owners)}"
        flags = dict.fromkeys(self._option_string_actions)
        for parser in commands.values():
            flags |= dict.fromkeys(parser._option_string_actions)
        return nearest(flag, flags, at_least=0.8)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but raise UserError for an empty text, as in --resume "$UNSET".

        The message shows the word before the empty one, or the word itself for --resume="$UNSET".
        """
        words = sys.argv[1:] if args is None else list(args)
        for before, word in zip(["", *words], words):
            if not word or (word.startswith("--") and word.find("=") == len(word) - 1):
                raise UserError(f"no value, after {word or before!r}: is a variable not set?")
        return super().parse_known_args(words, namespace)


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
