"""Runs drawn at random from drawn.toml, for `check.py --random N` and the tests.

words = drawn("1/17")                     options of train.py, the same for the same name
words = drawn("1/17", ["--tied"], {"tied": True})   of runs with an option that is given
"""

import dataclasses
import random
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
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
NOT_DRAWN, CHOICES_NOT_DRAWN = TABLES.pop("not drawn").values()
# Options of the model, of training and of data that are in no table are new: they are drawn with
# values that their declarations say.
NAMED = {name for table in TABLES.values() for name in table}  # and names of places
NEW = [
    field
    for group in (ModelShape, Training, Data)
    for field in dataclasses.fields(group)
    if field.name not in NAMED and field.name not in NOT_DRAWN and examples(field)
]


def new_choices(tables: Mapping[str, Any], option: str) -> list[Any]:
    """Return the choices of an option that no table names, such as a new optimizer.

    The default is not among them: a run that does not draw the option has it. Nor is a choice of an
    option with a row that has no values, which stands for all choices.
    """
    declared = all_options()[option]
    rows = [row[1:] for table in tables.values() if isinstance(row := table.get(option), list)]
    if not rows or not all(rows):
        return []
    known = {declared.default, *CHOICES_NOT_DRAWN.get(option, ())}.union(*rows)
    return [choice for choice in declared.metadata["choices"] or () if choice not in known]


NEW_CHOICES = {option: new_choices(TABLES, option) for option in NAMED & all_options().keys()}
PLACES = TABLES["places of mixers"]  # how often each is drawn
RESETS = ("reset_attention", "eod_token")
OFTEN = 0.3  # how often a new one is given
TRIES = 300
NONE: Mapping[str, Any] = MappingProxyType({})


def drawn(name: str, words: Sequence[str] = (), given: Mapping[str, Any] = NONE) -> list[str]:
    """Return the options of the run with that name, which train.py takes on one rank.

    words: options that every run has, as on a command line; the others are drawn. given: their
    values, by the name of the option. The data of a run, if any, is named only: the files need not
    exist. Raise UserError if no drawn run goes with these options.
    """
    chance = random.Random(name)
    why = ""
    for _ in range(TRIES):
        found = [*_words(chance, given), *words]
        try:
            validation.check(command_line.parse(found), 1)
        except UserError as error:
            why = str(error)
            continue
        return found
    among = f" with {shlex.join(words)}" if words else ""
    raise UserError(f"of {TRIES} drawn runs none goes together{among}; the last one: {why}")


def _words(chance: random.Random, given: Mapping[str, Any]) -> list[str]:
    """Return random options, which need not go together, without those that are given."""
    options = _some(chance, TABLES["run"]) | dict(given)
    for option, value in list(options.items()):
        options |= _some(chance, TABLES.get(f"{option} {value}", {}))
    keys = _some(chance, TABLES["keys"])
    if "window" in keys or "window" in given:
        keys |= _some(chance, TABLES["keys of windows"])
    if mixer := given.get("mixer", keys.get("mixer")):
        keys |= _of_mixer(chance, mixer, options)
    if "experts" in options:
        keys |= _some(chance, TABLES["keys of experts"])
    if options.get("positions") == "rotary":
        keys |= _some(chance, TABLES["keys of rotary"])
        if chance.random() < 0.25 or "kv_lora_rank" in given:
            kept = ("norm_plus_one", "embedding_scaled", "logit_softcap", "embedding_norm")
            keys = {n: v for n, v in keys.items() if n in kept or "mixer" in n or n in RESETS}
            keys |= _some(chance, TABLES["keys of latent"])
            options.pop("kv_heads", None)
    for field in NEW:
        if chance.random() < OFTEN:
            for needed_name, value in needed(field).items():
                options.setdefault(needed_name, value)
            options[field.name] = chance.choice(examples(field)[:2])
    options = {"steps": 1, "global_batch_size": 12} | options | keys
    shape = {field.name for field in dataclasses.fields(ModelShape)} if "model" in given else ()
    return _as_words({n: v for n, v in options.items() if n not in given and n not in shape})


def _of_mixer(chance: random.Random, mixer: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return keys of a mixer, and where it is. options: those of the run, which are made to fit."""
    keys = _some(chance, TABLES["keys of mixers"]) | _some(
        chance, TABLES.get(f"keys of {mixer}", {})
    )
    [place] = chance.choices([*PLACES], [*PLACES.values()])
    keys |= _some(chance, TABLES[f"places {place}"])
    pattern = keys.get("hybrid_pattern", "")
    if pattern:
        options["layers"] = len(pattern)
        options.pop("block", None)
        if "E" in pattern:
            options.setdefault("experts", 4)
        else:
            options.pop("experts", None)
    return keys


def _as_words(options: Mapping[str, Any]) -> list[str]:
    """Return options as a command line has them: flags, then the keys without a flag."""
    words: list[str] = []
    keys: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if all_options()[name].metadata["file_only"]:
            keys.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        elif isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", *str(value).split()]
    return words + ["--set", *keys] * bool(keys)


def _some(chance: random.Random, table: Table) -> dict[str, Any]:
    """Return some options of a table, each with one of its values."""
    found = {}
    for name, (often, *values) in table.items():
        if chance.random() < often:
            values += NEW_CHOICES.get(name, [])
            found[name] = chance.choice(values or all_options()[name].metadata["choices"])
    return found
