"""The command line and the TOML file, made from the dataclasses of config/schema.py.

    config = parse(["--model", "gpt2-124m", "--tp", "2", ...])   # flags override --config FILE

Types, choices and minima are checked here; config/validation.py checks what depends on several
options.
"""

import argparse
import dataclasses
import tomllib
from collections.abc import Callable, Collection
from typing import Any

from config.messages import Parser, UserError, nearest
from config.presets import PRESETS, preset
from config.schema import GROUPS, Config, ModelShape


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for: the configuration, and the names of the options that were given.

    given: option names (`global_batch_size`, and `model` for a preset), by flag or by file.
    """

    config: Config
    given: frozenset[str]


def parse(arguments: list[str], description: str = "Train a GPT.") -> Config:
    """The configuration of `arguments` and of the file named by --config, not yet validated.

    Raises UserError on an unknown flag, key, preset or value; `--help` prints and exits 0.
    """
    return parse_request(arguments, description).config


def parse_request(
    arguments: list[str],
    description: str = "Train a GPT.",
    defaults: Callable[[Collection[str]], dict[str, Any]] = lambda given: {},
) -> Request:
    """As `parse`, with the names of what was given; flags override the file.

    defaults: a program's own values for options that neither a flag nor the file gives, as a
    function of the names that were given; what was given is never overridden.
    """
    flags, unknown = _parser(description).parse_known_args(arguments)
    values = vars(flags)
    if unknown:
        names = ["--" + name.replace("_", "-") for name in [*_options(), "config", "model"]]
        raise UserError(f"unknown argument {unknown[0]!r}{nearest(unknown[0], names)}")
    file = values.pop("config", None)
    given = (_read_toml(file) if file else {}) | values
    return Request(build(defaults(frozenset(given)) | given), frozenset(given))


def build(values: dict[str, Any]) -> Config:
    """A Config from flat option names; `model`, if given, names the preset to start from."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    base = preset(values.pop("model")) if "model" in values else None
    options = _options()
    for name, value in values.items():
        _check_value(name, value, options[name])
    groups = {}
    for group, cls in GROUPS.items():
        own = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        groups[group] = reshape(base, own) if group == "model" and base else cls(**own)
    return Config(**groups)


def reshape(base: ModelShape, own: dict[str, Any]) -> ModelShape:
    """A preset with some fields changed; fields that are derived from these are derived again."""
    derived = {}
    if base.kv_heads == base.heads:
        derived["kv_heads"] = None
    if base.ffn_hidden == base.default_ffn():
        derived["ffn_hidden"] = None
    return dataclasses.replace(base, **(derived | own))


def _options() -> dict[str, dataclasses.Field]:
    return {f.name: f for cls in GROUPS.values() for f in dataclasses.fields(cls)}


def _parser(description: str) -> argparse.ArgumentParser:
    parser = Parser(
        description=description,
        usage="%(prog)s [--config FILE] [--OPTION VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file of these options"
    )
    for group, cls in GROUPS.items():
        section = parser.add_argument_group(group, (cls.__doc__ or "").splitlines()[0])
        if group == "model":
            section.add_argument(
                "--model",
                metavar="PRESET",
                default=argparse.SUPPRESS,
                help="start from a named shape: " + ", ".join(PRESETS),
            )
        for f in dataclasses.fields(cls):
            _add_flag(section, f)
    return parser


def _add_flag(section, f: dataclasses.Field) -> None:
    meta = f.metadata
    name = "--" + f.name.replace("_", "-")
    default = " ".join(f.default) if isinstance(f.default, tuple) else f.default
    text = meta["help"] + ("" if f.default is None else f" (default: {default})")
    keywords = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if f.type is bool:
        section.add_argument(name, action=argparse.BooleanOptionalAction, **keywords)
        return
    kind = meta["item"] if meta["nargs"] else f.type
    metavar = "|".join(map(str, meta["choices"])) or kind.__name__.upper()
    section.add_argument(name, type=kind, nargs=meta["nargs"], metavar=metavar, **keywords)


def _read_toml(path: str) -> dict[str, Any]:
    """Flat option values of a TOML file; tables such as [layout] only group keys for the reader."""
    try:
        with open(path, "rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise UserError(f"cannot read --config {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--config {path} is not TOML: {error}") from None
    flat = {}
    for key, value in tree.items():
        flat |= value if isinstance(value, dict) else {key: value}
    flat = {key.replace("-", "_"): value for key, value in flat.items()}
    known = [*_options(), "model"]
    for key in flat:
        if key not in known:
            raise UserError(f"--config {path} has an unknown key {key!r}{nearest(key, known)}")
    return flat


def _check_value(name: str, value: Any, f: dataclasses.Field) -> None:
    """Check type, choices and minimum of one option, from a flag or from the file."""
    meta, flag = f.metadata, "--" + name.replace("_", "-")
    kind = f.type
    if not isinstance(value, (int, float) if kind is float else kind):
        raise UserError(f"{flag} takes a {kind.__name__}, not {value!r}")
    if isinstance(meta["nargs"], int):
        wrong = [each for each in value if not isinstance(each, meta["item"])]
        if wrong or len(value) != meta["nargs"]:
            words = " ".join(map(str, value))
            raise UserError(f"{flag} takes {meta['nargs']} {meta['item'].__name__}s, not {words}")
    if meta["choices"] and value not in meta["choices"]:
        choices = ", ".join(map(str, meta["choices"]))
        raise UserError(f"{flag} is one of {choices}, not {value!r}")
    if meta["minimum"] is not None and not value >= meta["minimum"]:
        raise UserError(f"{flag} must be at least {meta['minimum']}, not {value}")
