"""Model families of Hugging Face transformers: families.toml, and config.json in and out by it.

    options, lacks = read("mistral/config.json")    of ModelShape, and what is not trained here
    name, config = family_of(model), to_config(model)

A model or a config.json that the other side cannot represent exactly is refused, with what prevents
it. `read` takes the shape of a run (run.json) and of its checkpoints too.
"""

import dataclasses
import json
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from config.messages import UserError
from config.schema import ModelShape
from config.validation import ROTARY_SCALING, rotary_scaling

MOST_BYTES = 2**26  # of a JSON file
WINDOW = 4096  # that of Mistral where config.json has no sliding_window
OF_MLP_ALONE = "mlp_only_layers"  # the numbers of the blocks that have no experts
# The values of config.json and ours, by our option. Of several that mean one of ours, the first is
# written.
_VALUES: dict[str, dict[Any, Any]] = {
    "activation": {
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu": "gelu",
        "relu": "relu",
        "silu": "swiglu",
        "swish": "swiglu",
    },
    "block": {True: "parallel", False: "pre-norm"},
}


@dataclass(frozen=True)
class Family:
    """An entry of families.toml, which explains the fields; `options` are lists of what is allowed,
    and `modules` tuples of whole names.
    """

    name: str
    architecture: str
    outer: str
    inner: str
    options: dict[str, list]
    fields: dict[str, list[str]]
    modules: dict[str, tuple[str, ...]]
    defaults: dict[str, Any] = field(default_factory=dict)
    derived: list[str] = field(default_factory=list)
    fixed: dict[str, Any] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    written: dict[str, Any] = field(default_factory=dict)
    window: bool | None = None
    transposed: bool = False
    qkv: str = "head"
    skipped_rows: int = 0

    def obstacles(self, model: ModelShape) -> list[str]:
        """Return what a model has and the family has not, such as `bias True, not False`."""
        free = {"seq_length", *self.fields}
        free |= {"max_positions"} if model.positions == "learned" else set()
        values = {name: getattr(model, name) for name in free}
        for name, allowed in self.options.items():
            own = getattr(model, name)
            values[name] = own if own in allowed else allowed[0]
        nearest = ModelShape(**values)
        found = []
        for name, own in dataclasses.asdict(model).items():
            unused = name.startswith("rotary") and model.positions != "rotary"
            unused |= name == "max_positions" and model.positions != "learned"
            if getattr(nearest, name) != own and not unused:
                needed = self.options.get(name, [getattr(nearest, name)])
                found.append(f"{name} {' or '.join(map(str, needed))}, not {own}")
        return found


def _load() -> dict[str, Family]:
    entries: dict[str, Any] = tomllib.loads(Path(__file__).with_name("families.toml").read_text())
    for name, entry in entries.items():
        base = entries[entry.pop("like")] if "like" in entry else {}
        both = {k: base[k] | v for k, v in entry.items() if isinstance(v, dict) and k in base}
        entries[name] = base | entry | both
    return {name: _family(name, **entry) for name, entry in entries.items()}


def _family(name: str, modules: dict[str, Any], options: dict[str, Any], **rest: Any) -> Family:
    """A family whose options and names are in lists, the names with what they begin with."""
    listed = {
        ours: theirs if isinstance(theirs, list) else [theirs] for ours, theirs in modules.items()
    }
    begin = {
        ours: rest["inner"] if ours.startswith("blocks.") else rest["outer"] for ours in modules
    }
    begin["head"] = ""
    whole = {ours: tuple(begin[ours] + each for each in listed[ours]) for ours in listed}
    allowed = {ours: v if isinstance(v, list) else [v] for ours, v in options.items()}
    return Family(name, modules=whole, options=allowed, **rest)


FAMILIES = _load()


# ---- From our model ------------------------------------------------------------------------------


def family_of(model: ModelShape, name: str | None = None) -> Family:
    """The first family that has the model, or that of this name; UserError with what the nearest
    would need.
    """
    tried = FAMILIES if name is None else {name: FAMILIES[name]}
    found = {family.name: family.obstacles(model) for family in tried.values()}
    name = min(found, key=lambda name: len(found[name]))
    if found[name]:
        raise UserError(f"transformers has no such model: {name} needs {' and '.join(found[name])}")
    return FAMILIES[name]


def export_note(model: ModelShape) -> str | None:
    """A sentence if checkpoints of the model cannot be exported."""
    try:
        family_of(model)
    except UserError as error:
        return f"checkpoints of this run cannot be exported: {error}"
    return None


def to_config(model: ModelShape, name: str | None = None) -> dict[str, Any]:
    """The fields of the model's config.json that describe its shape, as `family_of`."""
    family = family_of(model, name)
    config: dict[str, Any] = {"model_type": family.name, "architectures": [family.architecture]}
    config |= family.fixed | family.written
    if family.window is not None:
        config["sliding_window"] = None
    values = dataclasses.asdict(model)
    if model.positions == "learned":
        values["seq_length"] = model.max_positions
    for ours, names in family.fields.items():
        theirs = [name for name, own in _VALUES.get(ours, {}).items() if own == values[ours]]
        config[names[0]] = theirs[0] if theirs else values[ours]
    if OF_MLP_ALONE in config:
        config[OF_MLP_ALONE] = list(range(model.first_dense_layers))
    if model.positions == "rotary":
        config |= _rope_fields(model, family)
    return config


def _rope_fields(model: ModelShape, family: Family) -> dict[str, Any]:
    """The rotary positions as transformers 4 and 5 call them."""
    kind, numbers = rotary_scaling(model.rotary_scaling)
    scaled: dict[str, Any] = {"rope_type": kind if numbers else "default"}
    scaled |= dict(zip(ROTARY_SCALING[kind], numbers))
    if "original_max_position_embeddings" in scaled:
        scaled["original_max_position_embeddings"] = int(numbers[-1])
    rope = scaled | {"rope_theta": model.rotary_base}
    if "rotary_fraction" in family.fields:
        rope["partial_rotary_factor"] = model.rotary_fraction
    return {"rope_parameters": rope, "rope_scaling": scaled if numbers else None}


# ---- To our model --------------------------------------------------------------------------------


def read(path: str, seq_length: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Options of ModelShape in a config.json or run.json, and sentences about what they leave out:
    what that model has and the engine cannot train.

    path: the file, a folder with it, or a checkpoint of a run. seq_length: that is to be trained.
    The values of the options are not checked. UserError if there is no known model.
    """
    found = _find(path)
    config = _read_json(found)
    if "config" not in config:
        return from_config(config, found, seq_length)
    model = config["config"].get("model") if isinstance(config["config"], dict) else None
    if not isinstance(model, dict):
        raise UserError(f"{found} has no [config][model]: it is no run.json")
    return model, []


def of_run(folder: str) -> str | None:
    """The run.json of a run's folder, or of that of a checkpoint, if there is one."""
    real = os.path.realpath(folder)
    places = [real, os.path.dirname(real), os.path.dirname(os.path.dirname(real))]
    files = [os.path.join(place, "run.json") for place in places]
    return next(filter(os.path.isfile, files), None)


def precision_of_run(path: str) -> str | None:
    """The --precision in a run.json; None if it has a model alone, as an imported one."""
    groups = read_object(path).get("config")
    training = groups.get("training") if isinstance(groups, dict) else None
    precision = training.get("precision") if isinstance(training, dict) else None
    return precision if isinstance(precision, str) else None


def _find(path: str) -> str:
    if not os.path.isdir(path):
        return path
    own = os.path.join(path, "config.json")
    found = own if os.path.isfile(own) else of_run(path)
    if found is None:
        raise UserError(f"--model {path}: it has no config.json, and is no run's: no run.json")
    return found


def _read_json(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise UserError(f"--model {path}: there is no such file, and no preset of that name")
    return read_object(path)


def _open(path: str) -> BinaryIO:
    return open(path, "rb")


def read_object(path: str, opened: Callable[[str], BinaryIO] = _open) -> dict[str, Any]:
    """The object in a JSON file; UserError if there is none. opened: opens it for reading."""
    try:
        with opened(path) as file:
            value = json.loads(file.read(MOST_BYTES))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def from_config(
    config: dict[str, Any], where: str, seq_length: int | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return what `read` does, for the contents of a config.json, which messages call `where`."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        name = config.get("model_type")
        raise UserError(f"{where} is a {name!a:.80}; known are {', '.join(FAMILIES)}")
    options = {ours: allowed[0] for ours, allowed in family.options.items()}
    lacks = [
        f"{name} is {config[name]!a:.80}; here it is {value}"
        for name, value in family.fixed.items()
        if config.get(name, value) != value
    ]
    lacks += [
        f"{name} is {config[name]!a:.80}; here there is none"
        for name in family.absent
        if config.get(name) is not None
    ]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{where}: the rotary positions are {rope!a:.80}, not an object")
    named = dict(config)
    for ours, key in (("rotary_base", "rope_theta"), ("rotary_fraction", "partial_rotary_factor")):
        if ours in family.fields and rope.get(key) is not None:
            named[family.fields[ours][0]] = rope[key]
    for ours, names in family.fields.items():
        found = [(name, named[name]) for name in names if named.get(name) is not None]
        if ours == "rotary_scaling":
            _read_scaling(rope, options, lacks, where)
        elif found:
            _take(ours, *found[0], family, options, lacks)
        elif ours in family.defaults:
            options[ours] = family.defaults[ours]
        elif ours not in family.derived:
            raise UserError(f"{where} has no {names[0]!r}")
    _limit_length(config, family, options, lacks, seq_length)
    return options, lacks


def _take(
    ours: str, name: str, value: Any, family: Family, options: dict[str, Any], lacks: list[str]
) -> None:
    """Set our option by a field of config.json, or say why that is not possible."""
    if name == OF_MLP_ALONE:
        if not isinstance(value, list) or value != list(range(len(value))):
            lacks.append(f"{name} is {value!a:.80}; here it is the first blocks")
            return
        value = len(value)
    known = _VALUES.get(ours)
    if known is not None:
        value_here = known.get(value) if isinstance(value, (str, bool)) else None
    else:
        value_here = value
    allowed = family.options.get(ours)
    if value_here is None or (allowed and value_here not in allowed):
        names = known or {each: each for each in allowed or ()}
        wanted = [str(each) for each in names if not allowed or names[each] in allowed]
        lacks.append(f"{name} is {value!a:.80}; here it is {' or '.join(wanted)}")
        return
    options[ours] = value_here


def _read_scaling(
    rope: dict[str, Any],
    options: dict[str, Any],
    lacks: list[str],
    where: str,
) -> None:
    """Set the scaling of rotary positions, or say that it is none of ours."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "none" if kind == "default" else kind
    if not isinstance(kind, str) or kind not in ROTARY_SCALING:
        lacks.append(
            f"rotary positions are scaled by {kind!a:.80}; here: {', '.join(ROTARY_SCALING)}"
        )
        return
    numbers: dict[str, Any] = {"original_max_position_embeddings": options.get("seq_length")}
    numbers |= rope
    try:
        text = [f"{float(numbers[name]):.12g}" for name in ROTARY_SCALING[kind]]
    except (KeyError, TypeError, ValueError):
        needed = ", ".join(ROTARY_SCALING[kind])
        raise UserError(
            f"{where}: rotary positions of type {kind} need numbers: {needed}"
        ) from None
    if text:
        options["rotary_scaling"] = ":".join([kind, *text])


def _limit_length(
    config: dict[str, Any],
    family: Family,
    options: dict[str, Any],
    lacks: list[str],
    seq_length: int | None,
) -> None:
    """Take samples as long as the attention's window at the most: within it, there is none."""
    window = config.get("sliding_window", WINDOW) if family.window is not None else None
    if not isinstance(window, int) or not config.get("use_sliding_window", family.window):
        return
    if seq_length is not None and seq_length > window:
        lacks.append(f"sliding_window({window}) is shorter than seq-length({seq_length})")
    if isinstance(options["seq_length"], int):
        options["seq_length"] = min(options["seq_length"], window)
