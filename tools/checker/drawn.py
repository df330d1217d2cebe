"""Runs drawn at random from drawn.toml, for `check.py --random N` and the tests.

words = drawn("1/17")       options of train.py, the same for the same name
"""

import dataclasses
import random
import tomllib
from pathlib import Path
from typing import Any

from architecture.shape import ModelShape
from base.errors import UserError
from config import command_line, validation
from config.examples import examples, needed
from config.run_options import Data, Training
from config.schema import all_options

# For each option, how often it is given, and its values; without values: one of its choices.
Table = dict[str, list[Any]]
TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
NOT_DRAWN = TABLES.pop("not drawn")["names"]
# Options of the model, of training and of data that are in no table are new: they are drawn with
# values that their declarations say.
NAMED = {name.replace("-", "_") for table in TABLES.values() for name in table}
NEW = [
    field
    for group in (ModelShape, Training, Data)
    for field in dataclasses.fields(group)
    if field.name not in NAMED and field.name not in NOT_DRAWN and examples(field)
]
OFTEN = 0.3  # how often a new one is given
TRIES = 1000


def drawn(name: str) -> list[str]:
    """Return the options of the run with that name, which train.py takes on one rank.

    Its data, if any, is named only: the files need not exist.
    """
    chance = random.Random(name)
    for _ in range(TRIES):
        words = _words(chance)
        try:
            validation.check(command_line.parse(words), 1)
        except UserError:
            continue
        return words
    raise UserError(f"of {TRIES} drawn runs none goes together; see {__name__.replace('.', '/')}")


def _words(chance: random.Random) -> list[str]:
    """Return random options, which need not go together."""
    options = _some(chance, TABLES["run"])
    for option, value in list(options.items()):
        options |= _some(chance, TABLES.get(f"{option} {value}", {}))
    keys = _some(chance, TABLES["keys"])
    if "window" in keys:
        keys |= _some(chance, TABLES["keys of windows"])
    if "experts" in options:
        keys |= _some(chance, TABLES["keys of experts"])
    if options.get("positions") == "rotary":
        keys |= _some(chance, TABLES["keys of rotary"])
        if chance.random() < 0.25:
            kept = ("norm_plus_one", "embedding_scaled", "logit_softcap", "embedding_norm")
            keys = {n: v for n, v in keys.items() if n in kept} | _some(
                chance, TABLES["keys of latent"]
            )
            options.pop("kv-heads", None)
    for field in NEW:
        if chance.random() < OFTEN:
            for name, value in needed(field).items():
                _of_kind(name, options, keys).setdefault(_as_given(name), value)
            value = chance.choice(examples(field)[:2])
            _of_kind(field.name, options, keys)[_as_given(field.name)] = value
    words = ["--steps", "1", "--global-batch-size", "12"]
    for option, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        else:
            words += [f"--{option}", *str(value).split()]
    texts = [f"{n}={str(v).lower() if isinstance(v, bool) else v}" for n, v in keys.items()]
    return words + ["--set", *texts] * bool(texts)


def _of_kind(name: str, flags: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Return which of the two an option belongs to."""
    return keys if all_options()[name].metadata["file_only"] else flags


def _as_given(name: str) -> str:
    """Return an option's name as a flag or a key has it."""
    return name if all_options()[name].metadata["file_only"] else name.replace("_", "-")


def _some(chance: random.Random, table: Table) -> dict[str, Any]:
    """Return some options of a table, each with one of its values."""
    found = {}
    for name, (often, *values) in table.items():
        if chance.random() < often:
            choices = all_options()[name.replace("-", "_")].metadata["choices"]
            found[name] = chance.choice(values or choices)
    return found
