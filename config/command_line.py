"""The command line and the TOML file, made from the dataclasses of config/schema.py; presets.

    config = parse(["--model", "gpt2-124m", "--tp", "2", ...])   # flags override --config FILE

Types, choices and minima are checked here; config/validation.py checks what depends on several
options. Models by name are in config/presets.toml.
"""

import argparse
import dataclasses
import tomllib
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from config.messages import Parser, UserError, nearest
from config.schema import GROUPS, Config, ModelShape


def _load_presets() -> tuple[dict[str, ModelShape], dict[str, str]]:
    """Every named shape in the file's order, and other names for some of them."""
    tree = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
    shapes = {
        name: ModelShape(*sizes, **family["shared"])
        for family in tree["family"]
        for name, sizes in family["models"].items()
    }
    return shapes, tree["aliases"]


PRESETS, ALIASES = _load_presets()


def preset(name: str) -> ModelShape:
    """The shape of that name, upper or lower case; UserError names the nearest if there is none."""
    key = ALIASES.get(name.lower(), name.lower())
    if key not in PRESETS:
        raise UserError(f"no preset is called {name!r}{nearest(key, [*PRESETS, *ALIASES])}")
    return PRESETS[key]


@dataclasses.dataclass(frozen=True)
class Request:
    """A configuration, and the names of the options that were given.

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
    groups: dict[str, Any] = {}
    for group, cls in GROUPS.items():
        own = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        groups[group] = reshape(base, own) if group == "model" and base else cls(**own)
    return Config(**groups)


def reshape(base: ModelShape, own: dict[str, Any]) -> ModelShape:
    """A preset with some fields changed; fields that are derived from these are derived again."""
    defaults = {"kv_heads": base.heads, "ffn_hidden": base.default_ffn()}
    derived = {name: None for name, value in defaults.items() if getattr(base, name) == value}
    return dataclasses.replace(base, **(derived | own))


def _options() -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for cls in GROUPS.values() for f in dataclasses.fields(cls)}


def _parser(description: str) -> argparse.ArgumentParser:
    usage, form = "%(prog)s [--config FILE] [--OPTION VALUE ...]", RawDescriptionHelpFormatter
    parser = Parser(description=description, usage=usage, formatter_class=form, allow_abbrev=False)
    absent: dict[str, Any] = {"default": argparse.SUPPRESS}
    parser.add_argument("--config", metavar="FILE", help="TOML file of these options", **absent)
    for group, cls in GROUPS.items():
        section = parser.add_argument_group(group, (cls.__doc__ or "").splitlines()[0])
        if group == "model":
            text = "start from a named shape: " + ", ".join(PRESETS)
            section.add_argument("--model", metavar="PRESET", help=text, **absent)
        for f in dataclasses.fields(cls):
            _add_flag(section, f)
    return parser


def _add_flag(section: Any, f: dataclasses.Field[Any]) -> None:
    meta, name = f.metadata, "--" + f.name.replace("_", "-")
    kind: Any = meta["item"] if meta["nargs"] else f.type
    default = " ".join(f.default) if isinstance(f.default, tuple) else f.default
    text = meta["help"] + ("" if f.default is None else f" (default: {default})")
    keywords = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if kind is bool:
        section.add_argument(name, action=argparse.BooleanOptionalAction, **keywords)
        return
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
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= value if isinstance(value, dict) else {key: value}
    flat = {key.replace("-", "_"): value for key, value in flat.items()}
    known = [*_options(), "model"]
    for key in flat:
        if key not in known:
            raise UserError(f"--config {path} has an unknown key {key!r}{nearest(key, known)}")
    return flat


def _check_value(name: str, value: Any, f: dataclasses.Field[Any]) -> None:
    """Check type, choices and minimum of one option, from a flag or from the file."""
    meta, flag = f.metadata, "--" + name.replace("_", "-")
    kind: Any = f.type
    accepted: Any = (int, float) if kind is float else kind
    if not isinstance(value, accepted):
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
