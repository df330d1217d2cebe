"""Options that have no effect without another option; to give them without it is an error.

    check_used(config, {"sgd_momentum"})     UserError unless --optimizer is sgd

The declaration of an option names what it needs, for example `needs=("--optimizer sgd",)`:

    --resume                 another value than 0, an empty text or random tokens
    --experts above 1        a larger number
    --on-spike skip or rollback
    --eval-samples or --eval-data: nothing is evaluated      one of two; the reason after the colon

Only options that a flag or a --config file gives are checked. Options of a preset, or of the
run.json of an earlier run, may have no effect, and so may options that are given at their defaults.
"""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from config.errors import UserError
from config.run_options import as_typed
from config.schema import Config

# The options of the model that change nothing unless --positions is rotary.
ROTARY = ("rotary_base", "rotary_fraction", "rotary_scaling")


def check_used(config: Config, given: Collection[str]) -> None:
    """Raise UserError if a given option has no effect in this run.

    given: the names of the options that flags or a file give. Called when a command line is parsed.
    """
    for field, value in _changed(config):
        for need in field.metadata["needs"]:
            if field.name in given and not is_met(config, need):
                raise UserError(f"{_with_value(field, value)} needs {need}")


def is_met(config: Config, need: str) -> bool:
    """Return whether a run has what an option needs.

    need: a text such as "--lr-schedule cosine, linear or wsd", as the declarations of options have
    it; see the top of this file. Raise ValueError if there is no such option.
    """
    condition, _, _ = need.partition(":")  # the reason after the colon is for people
    return any(_holds(config, part) for part in condition.removeprefix("--").split(" or --"))


def _holds(config: Config, condition: str) -> bool:
    """Return whether an option has a value that `condition` names.

    condition: an option without its dashes, and perhaps values: `lr-schedule wsd`, `on-spike skip
    or rollback`, `experts above 1`. Without values any value will do but 0, False, an empty text
    and random tokens (`--data synthetic`).
    """
    flag, *wanted = condition.replace(",", "").split()
    name = flag.replace("-", "_")
    [value] = [getattr(group, name) for group in _groups(config) if hasattr(group, name)]
    if "above" in wanted:
        return value > float(wanted[-1])
    if wanted:
        return _as_text(value) in wanted
    return bool(value) and value != ("synthetic",)


def unused_rotary(config: Config) -> list[str]:
    """Return the rotary options that a model without rotary positions sets, with their values.

    Such options of a preset are no error: the user gets a note that they change nothing.
    """
    if config.model.positions == "rotary":
        return []
    changed = _changed(config)
    return [_with_value(field, value) for field, value in changed if field.name in ROTARY]


def _groups(config: Config) -> tuple[Any, ...]:
    """Return the groups of options that may need others."""
    return config.model, config.training, config.data, config.run


def _changed(config: Config) -> Iterator[tuple[dataclasses.Field, Any]]:
    """Yield the options that are not at their defaults, with their values."""
    for group in _groups(config):
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            # The default of max_positions is not in its declaration: it depends on seq_length.
            default = config.model.seq_length if field.name == "max_positions" else field.default
            if value != default:
                yield field, value


def _with_value(field: dataclasses.Field, value: Any) -> str:
    """Return an option with its value, as messages have it."""
    flag = as_typed(field)
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-")
    values = value if isinstance(value, tuple) else (value,)
    return f"{flag} {' '.join(map(_as_text, values))}"


def _as_text(value: Any) -> str:
    """Return a value as the user would write it."""
    return f"{value:g}" if isinstance(value, float) else str(value)
