"""How an option is declared: a dataclass field that is a flag, a TOML key, its help and its check.

layers: int = option(None, "transformer blocks", minimum=1)
rotary_base: float = option(10_000.0, "base of RoPE", needs=Needs(("positions",), ("rotary",)))
"""

from dataclasses import Field, field
from typing import Any, NamedTuple


class Needs(NamedTuple):
    """What an option has no effect without: one of `options`, as names, with a value that counts.

    values: the values that count. above: those above it do. Without both, all do but 0, an empty
    text and random tokens (--data synthetic). reason: the end of the error's sentence.
    is_key: whether they are keys of a run file, and no flags.
    """

    options: tuple[str, ...]
    values: tuple[str, ...] = ()
    above: float | None = None
    reason: str = ""
    is_key: bool = False

    def is_met_by(self, value: Any) -> bool:
        """Return whether one of the options, with this value, is what is needed."""
        if self.above is not None:
            return value > self.above
        return value in self.values if self.values else bool(value) and value != ("synthetic",)

    def __str__(self) -> str:
        """Return it as the error has it, such as --lr-schedule cosine, linear or wsd."""
        names = self.options
        if not self.is_key:
            names = tuple("--" + name.replace("_", "-") for name in names)
        text = " or ".join(names)
        if self.above is not None:
            text += f" above {self.above:g}"
        if self.values:
            *others, last = self.values
            text += f" {', '.join(others)} or {last}" if others else f" {last}"
        return f"{text}: {self.reason}" if self.reason else text


def option(
    default: Any,
    help: str,
    *,
    choices: tuple = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    nargs: int | str | None = None,
    item: type = str,
    needs: Needs | None = None,
    file_only: bool = False,
    example: Any = None,
    at_each_start: bool = False,
    not_latent: bool = False,
) -> Any:
    """Return a dataclass field that is also a command-line flag and a TOML key of the same name.

    The field's annotation is the type of the option. Numbers must be finite, whole numbers below
    2^63. minimum, maximum: limits that are allowed themselves; above, below: limits that are not.
    nargs: number of values of an option that is a tuple, as in argparse; item: their type. needs:
    what the option has no effect without. file_only: a key of run files, presets and run.json that
    has no flag; --set KEY=VALUE gives it too. example: a value with which tests and `check.py
    --random` try the option, where choices and limits do not say one (examples.py). at_each_start:
    an option of training or data that a resume does not take from the checkpoint. not_latent: an
    option of attention that latent attention (kv_lora_rank) does not have; it is refused there.
    """
    facts = {"help": help, "choices": choices, "nargs": nargs, "item": item, "needs": needs}
    facts |= {"file_only": file_only, "example": example, "at_each_start": at_each_start}
    facts["not_latent"] = not_latent
    limits = {"minimum": minimum, "maximum": maximum, "above": above, "below": below}
    return field(default=default, metadata=facts | limits)


def as_typed(field: Field[Any]) -> str:
    """Return an option's name as messages have it: --micro-batch-size, or the key norm_eps."""
    return field.name if field.metadata["file_only"] else "--" + field.name.replace("_", "-")
