"""Values of an option that its declaration allows, for tests and for `check.py --random`.

    examples(field)         ("gelu", "relu", ...)         values beside the default
    needed(field)           {"lr_schedule": "wsd"}        what the option has no effect without

A new option is tried with these values, so nobody has to write a list of them. A text or a tuple,
or a number that other limits bind, names its own: `option(..., example=VALUE)`.
"""

from dataclasses import Field
from typing import Any

from base.errors import UserError
from config.schema import all_options

# Numbers that are tried beside the default, as factors of it and by themselves.
FACTORS, NUMBERS = (2, 0.5), (1, 2, 4, 0.5)


def examples(field: Field[Any]) -> tuple[Any, ...]:
    """Return values of an option beside its default; () if its declaration does not say one.

    They are the other choices, the other of two truth values, the `example`, or numbers inside the
    limits, of which each may still contradict another option.
    """
    facts: Any = field.metadata
    default: Any = field.default
    if facts["choices"]:
        return tuple(choice for choice in facts["choices"] if choice != default)
    if field.type is bool:
        return (True, False) if default is None else (not default,)
    if facts["example"] is not None:
        return (facts["example"],)
    if field.type not in (int, float):
        return ()
    numbers = [factor * default for factor in FACTORS if default] + [*NUMBERS]
    if field.type is int:
        numbers = [number for number in numbers if number == int(number)]
    typed = dict.fromkeys(map(field.type, numbers))  # in this order, each once
    return tuple(number for number in typed if number != default and _is_inside(number, facts))


def needed(field: Field[Any]) -> dict[str, Any]:
    """Return options, with values, without which this one has no effect; {} if there are none.

    UserError if the declaration of an option that is needed has no example of such a value.
    """
    needs = field.metadata["needs"]
    if needs is None:
        return {}
    for name in needs.options:
        other = all_options()[name]
        for value in needs.values or (other.default, *examples(other)):
            if value is not None and needs.is_met_by(value):
                return needed(other) | {name: value}
    names = ", ".join(needs.options)
    raise UserError(
        f"{field.name} needs {needs}, and no declaration of {names} has such an example"
    )


def _is_inside(number: float, facts: Any) -> bool:
    """Return whether a number is inside an option's limits."""
    limits = (facts[name] for name in ("minimum", "maximum", "above", "below"))
    minimum, maximum, above, below = limits
    return not (
        (minimum is not None and number < minimum)
        or (maximum is not None and number > maximum)
        or (above is not None and number <= above)
        or (below is not None and number >= below)
    )
