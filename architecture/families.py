"""Models as Hugging Face's config.json describes them, read and written by families.toml.

    options, lacks = read("mistral/config.json")
    family = family_of(model)
    config = to_config(model)

options: values of ModelShape's fields, by field name. lacks: sentences on what the file's model has
and the engine cannot train. A model that transformers cannot represent exactly is a UserError.
`read` takes the run.json of a run too. "Ours" are names and values of ModelShape, "theirs" those
in config.json. Of a `Family`, `options` has the values that our options may have, `fields` the
names that our other options have in config.json; families.toml explains all fields.
"""

import dataclasses
import json
import math
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from architecture.block_attention import flags_of, pattern_of
from architecture.hybrid_families import ODD
from architecture.multipliers import multipliers_of
from architecture.mup import without_mup
from architecture.odd_families import NoPositions, OddFamily
from architecture.rotary_scaling import ROTARY_SCALING, rotary_scaling
from architecture.shape import ModelShape
from base.errors import ModelError, UserError, nearest
from base.regular_files import MOST_OF_OBJECT, open_regular

# The width of the shared MLP over that of an expert, by the names of two families.
SHARED = ("n_shared_experts", "num_shared_experts")
# Some options have other values in config.json than here. For each of these options the table has
# our value for each of theirs. If several of theirs mean the same, the first of them is written.
_VALUES: dict[str, dict[Any, Any]] = {
    "activation": {
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu": "gelu",
        "relu": "relu",
        "relu2": "relu2",
        "silu": "swiglu",
        "swish": "swiglu",
    },
    "block": {True: "parallel", False: "pre-norm"},
    "qk_norm": {True: "head", False: "none"},
}
# Options that are 0 here where config.json has null.
_NULL_IS_ZERO = ("attention_softcap", "logit_softcap", "shared_ffn_hidden")
# The fields with the ids of special tokens, in the order of a family's `tokens`. The id of the end
# may be a list of ids, each of which ends a text.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# The fields with a model's sliding window and the blocks that have it.
WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
PERIOD = (
    "sliding_window_pattern"  # every block of this number has no window, in families that say so
)
# The fields of rotary positions. The last two may stand beside or inside of the first two.
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
FULL = "full_attention"  # in layer_types
LOCAL = "sliding_attention"  # a block with a window
ORIGINAL = "original_max_position_embeddings"  # beside or inside of the fields of ROPE
# Fields that a config.json of any family may have: the values that they must have if present,
FIXED = {"is_causal": True, "add_cross_attention": False, "is_encoder_decoder": False}
# must be null, empty or missing,
ABSENT = ("quantization_config", "pruned_heads", "per_layer_config")
# and those that are kept, but that no logit depends on.
UNUSED = {
    *("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version"),
    *("dtype", "torch_dtype", "use_cache", "initializer_range", "attention_dropout"),
    *("is_decoder", "id2label", "label2id", "problem_type", "task_specific_params", "num_labels"),
    *("chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict"),
    *("tokenizer_class", "finetuning_task", "do_sample", "max_length", "gradient_checkpointing"),
}


@dataclass(frozen=True)
class Family:
    """An entry of families.toml; that file explains the fields.

    Here `options` has lists of the allowed values, and `modules` has tuples of whole names.
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
    same: dict[str, str] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[Any, ...] = ("none", "none", "none")
    unused: list[str] = field(default_factory=list)
    window: tuple[str, int] | None = None
    window_switch: bool = False
    window_period: bool = False
    rope_by_kind: tuple[str, float] | None = None
    scalings: list[str] = field(default_factory=list)
    odd: OddFamily = ODD["nothing"]
    default_rope: dict[str, Any] = field(default_factory=dict)
    stacked_experts: bool = False
    values: dict[str, dict[Any, Any]] = field(default_factory=dict)
    transposed: bool = False
    qkv: str = "head"
    skipped_rows: int = 0
    interleaved: bool = False
    rows: dict[str, list[str]] = field(default_factory=dict)
    predictors: list[Any] = field(default_factory=list)

    @property
    def has_rotary(self) -> bool:
        """Whether the family's positions are rotary."""
        return "rotary_base" in self.fields

    @property
    def counts_shared(self) -> bool:
        """Whether the field of the shared MLP has its width over that of an expert."""
        return any(name in SHARED for name in self.fields.get("shared_ffn_hidden", ()))

    @property
    def may_have_experts(self) -> bool:
        """Whether a model of the family has experts, or may have them."""
        return "experts" in self.fields or self.odd.may_have_experts

    def obstacles(self, model: ModelShape) -> list[str]:
        """Return a text for each option that keeps a model out of the family.

        A text shows the value that the family needs, then the model's: `bias True, not False`. The
        family's model that is most like `model` is made, and the two models are compared.
        """
        copied = {"seq_length", *self.fields}  # options that may have any value in the family
        if model.positions == "learned":
            copied.add("max_positions")
        if self.window is not None:
            copied.add("window")
            if self.window[0] != "all":
                copied.add("window_blocks")
        if self.rope_by_kind is not None:
            copied |= {"window_rotary_base", "window_rotary_scaling"}
        if "kv_lora_rank" in self.fields and rotary_scaling(model.rotary_scaling)[1]:
            copied.add("query_scalar")  # by mscale_all_dim
        if self.predictors and model.mtp_depth <= self.predictors[0]:
            copied.add("mtp_depth")
        values = {name: getattr(model, name) for name in copied}
        for name, allowed in self.options.items():  # a value is kept if the family allows it
            value = getattr(model, name)
            values[name] = value if value in allowed else allowed[0]
        config = _plain_fields(model, self)
        config |= self.odd.write(model, config)
        lacks: list[str] = []
        values |= self.odd.read(config, values, lacks)
        nearest = ModelShape(**values)  # the family's model that is most like `model`
        texts = [f"other fields ({'; '.join(lacks)})"] if lacks else []
        scalings = {model.rotary_scaling}
        if self.rope_by_kind is None and model.window:
            scalings.add(model.window_rotary_scaling)
        kinds = {rotary_scaling(text)[0] for text in scalings}
        if self.scalings and not kinds <= set(self.scalings):
            texts.append(f"rotary_scaling {' or '.join(self.scalings)}, not {min(kinds)}")
        for name, value in dataclasses.asdict(model).items():
            # An option of a kind of positions, or of another part, that the model does not have has
            # no effect, and may differ.
            unused = "rotary" in name and model.positions != "rotary"
            unused |= name.startswith("rotary") and model.rotary_blocks == "none" != value
            unused |= name == "max_positions" and model.positions != "learned"
            unused |= name.startswith("window_") and not model.window
            unused |= name.startswith("swiglu_") and model.activation != "clamped_swiglu"
            if not unused and not _is_same(name, value, getattr(nearest, name), model.layers):
                needed = self.options.get(name, [getattr(nearest, name)])
                texts.append(f"{name} {' or '.join(map(str, needed))}, not {value}")
        return texts + self._least(model)

    def _least(self, model: ModelShape) -> list[str]:
        """Return a text for each option of experts and latents that is 0 or 1 but must be more."""
        texts = []
        if "experts" in self.fields and model.experts == 1:
            texts.append("experts above 1, not 1")
        if "kv_lora_rank" in self.fields and not model.is_latent:
            texts.append("kv_lora_rank above 0, not 0")
        shared = model.shared_ffn_hidden
        if self.counts_shared:
            width = model.expert_ffn_hidden
            if shared == 0 or shared % width:
                texts.append(f"shared_ffn_hidden a multiple of {width}, not {shared}")
        return texts


def _is_same(name: str, value: Any, other: Any, layers: int) -> bool:
    """Return whether two values of an option make the same model.

    Patterns of blocks may have several spellings, and a number may be one that was rounded when the
    file's field, of which it is a function, was written.
    """
    if name.endswith("_blocks"):
        return flags_of(value, layers) == flags_of(other, layers)
    if name == "multipliers":
        return multipliers_of(value) == multipliers_of(other)
    if name in ("query_scalar", "logit_divisor"):
        return math.isclose(value, other, rel_tol=1e-8)
    return bool(value == other)


def _load() -> dict[str, Family]:
    """Return the families of families.toml by name.

    An entry with the key `like` inherits the keys of another entry, which stands before it; a table
    that both entries have is merged key by key, and a key with the value [] is taken away.
    """
    entries: dict[str, Any] = tomllib.loads(Path(__file__).with_name("families.toml").read_text())
    for name, entry in entries.items():
        base = entries[entry.pop("like")] if "like" in entry else {}
        tables = {key: table for key, table in entry.items() if isinstance(table, dict)}
        merged = {
            key: {k: v for k, v in (base[key] | table).items() if v != []}
            for key, table in tables.items()
            if key in base
        }
        whole = base | entry | merged
        entries[name] = {key: value for key, value in whole.items() if value != []}
    return {name: _family(name, **entry) for name, entry in entries.items()}


def _family(
    name: str, modules: dict[str, Any], options: dict[str, Any], **other_fields: Any
) -> Family:
    """Return the Family of an entry of families.toml.

    modules: for each of our module names, the names that the module has in Hugging Face's files,
    or a single name, without the prefix `inner` (in blocks) or `outer` (elsewhere); a name that
    begins with "/" has no prefix. options: for
    each option a list of the allowed values, or a single value.
    """
    whole_names: dict[str, tuple[str, ...]] = {}
    for ours, theirs in modules.items():
        prefix = other_fields["inner"] if ours.startswith("blocks.") else other_fields["outer"]
        if ours == "head":  # in transformers the head is beside the model, and not inside
            prefix = ""
        whole_names[ours] = tuple(
            name.removeprefix("/") if name.startswith("/") else prefix + name
            for name in _as_list(theirs)
        )
    allowed = {ours: _as_list(values) for ours, values in options.items()}
    odd = ODD[other_fields.pop("odd", "nothing")]
    return Family(name, modules=whole_names, options=allowed, odd=odd, **other_fields)


def _as_list(value: Any) -> list:
    """Return a list itself, and any other value in a list of one element.

    families.toml may give a single value where a list is meant.
    """
    return value if isinstance(value, list) else [value]


FAMILIES = _load()


# ---- From our model ------------------------------------------------------------------------------


def family_of(model: ModelShape, name: str | None = None) -> Family:
    """Return the first family that can represent the model exactly.

    name: if given, no other family is tried. Raise UserError if no family can represent the model;
    the message shows which options the nearest family needs.
    """
    candidates = FAMILIES if name is None else {name: FAMILIES[name]}
    if name is None and model.experts > 1:  # a family without experts is never near
        candidates = {key: family for key, family in FAMILIES.items() if family.may_have_experts}
    obstacles = {family.name: family.obstacles(model) for family in candidates.values()}
    # `min` returns the first family without obstacles, if there is one.
    nearest = min(obstacles, key=lambda name: len(obstacles[name]))
    if obstacles[nearest]:
        needed = " and ".join(obstacles[nearest])
        raise ModelError(f"transformers has no such model: {nearest} needs {needed}")
    return FAMILIES[nearest]


def exported(model: ModelShape, name: str | None = None) -> ModelShape:
    """Return the model that an export writes: itself, or without the options of muP.

    name: as for family_of. The scales of muP are fields of few families. For others the weights
    have them, and the fields are those of a model without muP.
    """
    if not (model.mup or model.mup_base_layers):
        return model
    with_fields = without_mup(model, keeps_scales=True)
    candidates = FAMILIES.values() if name is None else [FAMILIES[name]]
    if any(not family.obstacles(with_fields) for family in candidates):
        return with_fields
    return without_mup(model, keeps_scales=False)


def export_note(model: ModelShape) -> str | None:
    """Return a warning that checkpoints of the model cannot be exported; None if they can.

    Called at the start of a run that saves checkpoints.
    """
    try:
        family_of(exported(model))
    except UserError as error:
        return f"checkpoints of this run cannot be exported: {error}"
    return None


def to_config(
    model: ModelShape, name: str | None = None, came: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields of a config.json that describe the model's shape.

    name: the name of the family to write; None: that of `came` if it has the model, or else the
    first family that fits. came: the config.json that the model came with, if it was imported: if
    it is of the family to write, its other fields are returned too, such as its sliding window.
    Raise UserError if the model cannot be represented exactly. Called when a checkpoint is
    exported.
    """
    came = came or {}
    if name is None and came.get("model_type") in FAMILIES:
        own = family_in(came, "config.json")
        name = None if own.obstacles(model) else own.name
    family = family_of(model, name)
    config = _plain_fields(model, family)
    odd = _odd_fields(model, family, config, came)
    return config | odd | _fields_that_came(family, model, came)


def _plain_fields(model: ModelShape, family: Family) -> dict[str, Any]:
    """Return the fields of transformers' config.json that families.toml describes, for an export.

    Those that need code, such as RoPE scaling, windows and odd families, are added by others.
    """
    config: dict[str, Any] = {"model_type": family.name, "architectures": [family.architecture]}
    config |= family.fixed | family.written
    values = dataclasses.asdict(model)
    # Learned positions: transformers takes their number for the model's longest sample.
    if model.positions == "learned":
        values["seq_length"] = model.max_positions
    for ours, names in family.fields.items():
        if "rotary" in ours and model.positions != "rotary":
            continue  # there is no object with such fields; the options' own values are not theirs
        translations = _values_of(ours, family).items()
        theirs = [their_value for their_value, value in translations if value == values[ours]]
        config[names[0]] = theirs[0] if theirs else values[ours]
        if ours == "query_scalar" and values[ours] == int(values[ours]):
            config[names[0]] = int(values[ours])  # Gemma's class takes no float
        if ours in _NULL_IS_ZERO and not values[ours]:
            config[names[0]] = None
    if family.counts_shared:
        name = family.fields["shared_ffn_hidden"][0]
        config[name] = model.shared_ffn_hidden // model.expert_ffn_hidden
    if config.get("q_lora_rank") == 0:
        config["q_lora_rank"] = None  # queries without a latent
    if model.positions == "rotary" and family.has_rotary:
        config |= _rope_fields(model, family)
    return config | _window_fields(model, family)


def _odd_fields(
    model: ModelShape, family: Family, config: dict[str, Any], came: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields that the family's class in odd_families.py or hybrid_families.py writes.

    config: the plain fields. Those that the model came with stay as they are if they say the same.
    """
    odd = family.odd
    written = odd.write(model, config)
    if came.get("model_type") not in FAMILIES or family_in(came, "config.json") != family:
        return written
    rope = _rope(came, "config.json")
    if unused := {name: rope[name] for name in odd.unused_of_rope if name in rope}:
        both = config | written
        written |= {"rope_parameters": both["rope_parameters"] | unused}
    kept = {name: came[name] for name in odd.names if name in came}
    if not kept:
        return written
    options = from_config(config | written, "config.json")[0]
    ours, as_written = (odd.read(config | fields, options, []) for fields in (kept, written))
    if ours.keys() == as_written.keys() and all(
        _is_same(name, value, as_written[name], model.layers) for name, value in ours.items()
    ):
        return {name: value for name, value in written.items() if name not in odd.names} | kept
    return written


def _values_of(ours: str, family: Family) -> dict[Any, Any]:
    """Return our value of an option for each of theirs; empty: the values are the same."""
    return family.values.get(ours) or _VALUES.get(ours, {})


def _window_fields(model: ModelShape, family: Family) -> dict[str, Any]:
    """Return the fields of transformers' config.json on sliding windows, for an export."""
    config: dict[str, Any] = {}
    if family.window is not None:
        which, default = family.window
        # Where blocks differ, transformers makes the mask of a window even if no block has one.
        of_none = None if which == "all" else default
        config["sliding_window"] = model.window or of_none or None
        if family.window_switch:
            config["use_sliding_window"] = model.window > 0
        if which != "all":
            kinds = [LOCAL if model.has_window(block) else FULL for block in range(model.layers)]
            config["layer_types"] = kinds
    return config


def _fields_that_came(family: Family, model: ModelShape, came: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an imported model's config.json that do not describe its shape.

    family: the family that is written. model: the model. came: the contents of that config.json. A
    field with another spelling of the same value, such as "gelu_fast", keeps it. Return an empty
    dictionary if `came` is of another family.
    """
    if came.get("model_type") not in FAMILIES or family_in(came, "config.json") != family:
        return {}
    values = dataclasses.asdict(model)
    spelled = {}
    for ours in _VALUES:
        translations = _values_of(ours, family)
        for name in family.fields.get(ours, ())[:1]:
            theirs = came.get(name)
            if isinstance(theirs, (str, bool)) and translations.get(theirs) == values[ours]:
                spelled[name] = theirs
    shape = {name for names in family.fields.values() for name in names}
    of_rope = ROPE if family.has_rotary else ()
    written = {*shape, *of_rope, *family.fixed, *family.odd.names}
    written |= {"model_type", "architectures", "dtype", "torch_dtype"}
    if family.rope_by_kind is not None:
        written.add(family.rope_by_kind[0])
    elif ORIGINAL in _scaling_fields(model.rotary_scaling):
        written.add(ORIGINAL)  # which would hold, and not that of the model's scaling
    # Fields of blocks may say the same in several ways: they stay as they came if they still hold.
    if model.window and _blocks_of(came, family, model.layers, "config.json") != _blocks(model):
        written |= {*WINDOW, PERIOD}
    return {name: value for name, value in came.items() if name not in written} | spelled


def _blocks(model: ModelShape) -> tuple[int | None, tuple[bool, ...]]:
    """Return a model's window and for each block whether it has it."""
    return model.window or None, flags_of(model.window_blocks, model.layers)


def _rope_fields(model: ModelShape, family: Family) -> dict[str, Any]:
    """Return the fields for rotary positions in config.json, for transformers 4 and for 5.

    transformers 4 reads rope_scaling, transformers 5 reads rope_parameters.
    """
    scaling = _scaling_fields(model.rotary_scaling)
    if model.is_latent and scaling.get("factor", 1.0) > 1:
        # m of `_read_score_scale`, and what is said by the attention factor too.
        growth = 0.1 * math.log(scaling["factor"])
        m = (model.head_size / model.query_scalar) ** 0.25
        scaling["mscale_all_dim"] = float(f"{(m - 1) / growth:.9g}")
        if "attention_factor" in scaling:
            above = (scaling["attention_factor"] * m - 1) / growth
            scaling["mscale"] = float(f"{above:.9g}")
    parameters = scaling | {"rope_theta": model.rotary_base}
    if "rotary_fraction" in family.fields:
        parameters["partial_rotary_factor"] = model.rotary_fraction
    if family.rope_by_kind is not None:
        local_base, local_scaling = model.rotary_base, model.rotary_scaling
        if model.window:
            local_base, local_scaling = model.window_rotary_base, model.window_rotary_scaling
        local = _scaling_fields(local_scaling) | {"rope_theta": local_base}
        parameters = {FULL: parameters, LOCAL: local}
    fields: dict[str, Any] = {"rope_parameters": parameters}
    if family.rope_by_kind is not None and family.rope_by_kind[0]:
        fields[family.rope_by_kind[0]] = local["rope_theta"]
    fields["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    if ORIGINAL in scaling and "longrope" in family.scalings:
        fields[ORIGINAL] = scaling[ORIGINAL]
    return fields


def _scaling_fields(text: str) -> dict[str, Any]:
    """Return the fields of an object rope_scaling for a value of --rotary-scaling."""
    kind, numbers = rotary_scaling(text)  # such as "linear", [4.0]; "none", []
    scaling: dict[str, Any] = {"rope_type": kind if numbers else "default"}
    values: list[Any] = [*numbers]
    if kind == "longrope":
        half = len(numbers) // 2 + 1
        values = [*numbers[:2], numbers[2:half], numbers[half:]]
    scaling |= dict(zip(ROTARY_SCALING[kind], values))
    if ORIGINAL in scaling:
        scaling[ORIGINAL] = int(scaling[ORIGINAL])
    if "truncate" in scaling:
        scaling["truncate"] = bool(scaling["truncate"])
    return scaling


# ---- To our model --------------------------------------------------------------------------------


def read(path: str, seq_length: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return the options of ModelShape in a config.json or run.json, and what cannot be trained.

    path: the file, a folder with the file, or a checkpoint of a run. seq_length: the tokens of the
    samples that are to be trained. The second result has a sentence for each part of that model
    which the engine cannot train. The values of the options are not checked. Raise UserError if
    there is no such file, or no known model in it.
    """
    file = _find(path)
    config = _read_json(file)
    if "config" not in config:  # the file is a config.json, not a run.json
        return from_config(config, file)
    model = config["config"].get("model") if isinstance(config["config"], dict) else None
    if not isinstance(model, dict):
        raise ModelError(f"{file} has no [config][model]: it is no run.json")
    # An import of a version without windows has the window beside the model, as a limit.
    limit = None if model.get("window") else config.get("window")
    return model, _beyond(limit, seq_length)


def run_file_in(folder: str) -> str | None:
    """Return the path of the run.json of a run; None if there is none.

    folder: the run's folder, or a checkpoint up to two folders below the run's folder.
    """
    real = os.path.realpath(folder)
    folders = [real, os.path.dirname(real), os.path.dirname(os.path.dirname(real))]
    files = [os.path.join(candidate, "run.json") for candidate in folders]
    return next(filter(os.path.isfile, files), None)


def precision_of_run(path: str) -> str | None:
    """Return the --precision in a run.json; None if the file has no such option.

    The run.json that an import of weights writes describes the model only.
    """
    groups = read_object(path).get("config")
    training = groups.get("training") if isinstance(groups, dict) else None
    precision = training.get("precision") if isinstance(training, dict) else None
    return precision if isinstance(precision, str) else None


def _find(path: str) -> str:
    """Return the file that describes the model at `path`, which is a file or a folder.

    Raise UserError if a folder has no config.json and belongs to no run.
    """
    if not os.path.isdir(path):
        return path
    config_file = os.path.join(path, "config.json")
    if os.path.isfile(config_file):
        return config_file
    file = run_file_in(path)
    if file is None:
        raise ModelError(f"--model {path}: it has no config.json, and is no run's: no run.json")
    return file


def _read_json(path: str) -> dict[str, Any]:
    """Return the object in a JSON file; UserError, which names --model, if there is no file."""
    if not os.path.isfile(path):
        raise ModelError(f"--model {path}: there is no such file, and no preset of that name")
    return read_object(path)


def read_object(path: str, opened: Callable[[str], BinaryIO] = open_regular) -> dict[str, Any]:
    """Return the object in a JSON file; UserError if the file is no JSON or holds no object.

    opened: a function that opens the file for reading bytes.
    """
    try:
        with opened(path) as file:
            value = json.loads(file.read(MOST_OF_OBJECT))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def from_config(config: dict[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the options of ModelShape in a config.json, and sentences on what cannot be trained.

    config: the contents of the file. where: the file's name in messages. A field that is missing
    has the value that transformers gives it. Raise UserError if the family is unknown, if a field
    that the family needs is missing, or if two names of one field have different values.
    """
    family = family_in(config, where)
    # An option that config.json does not give has the first value that the family allows.
    options = {ours: allowed[0] for ours, allowed in family.options.items()}
    lacks = _lacks(config, family)
    rope = _rope(config, where) or dict(family.default_rope)
    local_rope: dict[str, Any] | None = None  # of the blocks with a window, if they have their own
    if family.rope_by_kind is not None:
        rope, local_rope = _ropes_by_kind(config, rope, family, where)
    # transformers 5 has the base and the fraction inside of rope_parameters. `named` is the config
    # with these two under the names that they have in transformers 4.
    named = dict(config)
    for ours, key in (("rotary_base", "rope_theta"), ("rotary_fraction", "partial_rotary_factor")):
        if ours in family.fields and rope.get(key) is not None:
            named |= dict.fromkeys(family.fields[ours], rope[key])
    fraction = named.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
    if "rotary_fraction" not in family.fields and fraction not in (None, 1.0):
        lacks.append(f"partial_rotary_factor is {fraction!a:.80}; here it is 1.0")
    # An option has the value in the file, or the family's default, or is derived from others later.
    for ours, names in family.fields.items():
        given = [name for name in names if named.get(name) is not None]  # the names in this file
        other = next((name for name in given if named[name] != named[given[0]]), None)
        if other:
            raise ModelError(
                f"{where}: {given[0]} is {named[given[0]]!a:.80}, but {other} is "
                f"{named[other]!a:.80}, and they are one field"
            )
        is_null = any(name in named for name in names) and not given
        if ours == "rotary_scaling":
            _read_scaling(ours, rope, config, family, options, lacks, where)
        elif is_null and ours in _NULL_IS_ZERO:
            options[ours] = 0
        elif given:
            name = given[0]
            _take(ours, name, named[name], family, options, lacks)
        elif ours in family.defaults and not (is_null and ours in family.derived):
            options[ours] = family.defaults[ours]
        elif ours not in family.derived:
            raise ModelError(f"{where} has no {names[0]!r}")
    if local_rope is not None:
        options["window_rotary_base"] = local_rope["rope_theta"]
        name = "window_rotary_scaling"
        _read_scaling(name, local_rope, config, family, options, lacks, where)
        options.setdefault(name, "none")
    _read_blocks(config, family, options, lacks, where)
    try:
        options |= family.odd.read(config, dict(options), lacks)
    except UserError as error:
        raise ModelError(f"{where}: {error}") from None
    if family.counts_shared:
        width, count = options.get("expert_ffn_hidden"), options.get("shared_ffn_hidden")
        if isinstance(width, int) and isinstance(count, int):  # other types are refused later
            options["shared_ffn_hidden"] = count * width
    if "kv_lora_rank" in family.fields:
        _read_score_scale(rope, options, where)
    return options, lacks


def _read_score_scale(rope: dict[str, Any], options: dict[str, Any], where: str) -> None:
    """Set query_scalar of latent attention, whose scores DeepSeek scales with the rotary positions.

    Scores are multiplied by m^2, m = 0.1 mscale_all_dim ln(factor) + 1: the division by the root of
    the head size d becomes one by the root of d / m^4. Raise UserError if one is no number.
    """
    scale = rope.get("mscale_all_dim")
    widths: list[Any] = [options.get("qk_nope_head_dim"), options.get("qk_rope_head_dim")]
    if not scale or options.get("rotary_scaling", "none") == "none" or None in widths:
        return
    numbers = (scale, rope.get("factor"), *widths)
    if not all(isinstance(n, (int, float)) and n > 0 for n in numbers):
        raise ModelError(
            f"{where}: mscale_all_dim and factor need numbers above 0: {numbers!a:.80}"
        )
    options["query_scalar"] = sum(widths) / _score_growth(scale, rope["factor"]) ** 4


def _score_growth(scale: float, factor: float) -> float:
    """Return m of `_read_score_scale`; a factor up to 1 changes nothing."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _read_blocks(
    config: dict[str, Any], family: Family, options: dict[str, Any], lacks: list[str], where: str
) -> None:
    """Set the options of windows.

    options: receives our values. lacks: receives a sentence on what the engine does not have.
    Raise UserError, which names the file `where`, if a field is not of the right kind.
    """
    kinds = config.get("layer_types")
    if family.window is None and "layer_types" in family.odd.names:
        return  # of mixers
    if isinstance(kinds, list) and (unknown := {str(kind) for kind in kinds} - {FULL, LOCAL}):
        lacks.append(f"layer_types has {min(unknown)!a:.80}; here: {FULL}, {LOCAL}")
        return
    layers = options.get("layers")
    if type(layers) is not int or not 1 <= layers <= 10_000:  # refused later, with its limits
        return
    tokens, flags = _blocks_of(config, family, layers, where)
    is_off = family.window_switch and tokens is None and config.get("sliding_window")
    if is_off and isinstance(kinds, list) and LOCAL in kinds:
        # transformers' eager attention would take the window, its flash attention none.
        lacks.append(f"layer_types has {LOCAL}, but use_sliding_window is not true")
        return
    if tokens is not None:
        options["window"] = tokens
        options["window_blocks"] = pattern_of(flags)
    else:
        for name in ("window_rotary_base", "window_rotary_scaling"):
            options.pop(name, None)


def _ropes_by_kind(
    config: dict[str, Any], rope: dict[str, Any], family: Family, where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects of rotary positions of blocks without a window, and of those with one.

    transformers 5 writes both in rope_parameters, by the names in layer_types. In transformers 4,
    rope_theta and rope_scaling are of the blocks without a window, and the base of the others has a
    field of its own, or in OLMo 3 none.
    """
    name, default = family.rope_by_kind or ("", 0.0)
    written = config.get("rope_parameters") or {}
    whole: Any = written.get(FULL) or {}
    local: Any = written.get(LOCAL) or {}
    if not isinstance(whole, dict) or not isinstance(local, dict):
        raise ModelError(f"{where}: the rotary positions of a kind of blocks are not an object")
    if not set(written) <= {FULL, LOCAL} and not config.get("rope_scaling"):
        raise ModelError(
            f"{where}: rope_parameters has {', '.join(map(str, written)):.80}, not {FULL} and "
            f"{LOCAL}"
        )
    scaling = config.get("rope_scaling") or {}
    if isinstance(scaling, dict) and "type" in scaling and "rope_type" not in scaling:
        raise ModelError(
            f"{where}: rope_scaling has type, which transformers does not read in a {family.name}: "
            "give rope_type"
        )
    whole = {"rope_theta": config.get("rope_theta")} | whole | scaling
    whole = {key: value for key, value in whole.items() if value is not None}
    local = {"rope_theta": config.get(name) or default} | local
    return whole, local


def _blocks_of(
    config: dict[str, Any], family: Family, layers: int, where: str
) -> tuple[int | None, tuple[bool, ...]]:
    """Return the tokens of a model's window and which blocks have it; None if no block has one."""
    tokens = window(config, where)
    if tokens is None or family.window is None:
        return None, (True,) * layers
    flags = _window_flags(config, family, family.window[0], layers, where)
    return tokens, tuple(flags)


def family_in(config: dict[str, Any], where: str) -> Family:
    """Return the family of a config.json; UserError, which names the file `where`, if unknown.

    As in transformers, a Mistral that says which blocks have a window is a Ministral.
    """
    name = config.get("model_type")
    if name == "mistral" and "layer_types" in config:
        name = "ministral"
    family = FAMILIES.get(str(name))
    if family is None:
        hint = nearest(str(name), FAMILIES, 0.6)
        known = f"docs/models.md lists the {len(FAMILIES)} model types that are read"
        raise ModelError(f"{where} is a {name!a:.80}: {known}{hint}")
    return family


def _lacks(config: dict[str, Any], family: Family) -> list[str]:
    """Return a sentence for each field of a config.json whose value the engine does not have."""
    lacks = [
        f"{name} is {config[name]!a:.80}; here it is {value}"
        for name, value in (FIXED | family.fixed).items()
        if config.get(name, value) != value and (config[name] is not None or value is not False)
    ]
    lacks += [
        f"{name} is {config[name]!a:.80}; here there is none"
        for name in (*ABSENT, *family.absent)
        if config.get(name) not in (None, {})
    ]
    lacks += [
        f"{name} is {config[name]!a:.80}; here it is {other}({config.get(other)!a:.80})"
        for name, other in family.same.items()
        if config.get(name) is not None and config[name] != config.get(other)
    ]
    return lacks


def _rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the object with the numbers of rotary positions in a config.json, or an empty one.

    transformers 4 writes it as rope_scaling, transformers 5 as rope_parameters; if a file has both,
    transformers takes the first. Raise UserError, which names the file `where`, if it is no object.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{where}: the rotary positions are {rope!a:.80}, not an object")
    return rope


def unread(config: dict[str, Any], where: str) -> list[str]:
    """Return the names of the fields of a config.json that nothing here knows, sorted.

    transformers ignores such fields too unless a model's own code reads them. where: the file's
    name in messages. Raise UserError if the family is unknown.
    """
    family = family_in(config, where)
    known = {*UNUSED, *FIXED, *ABSENT, *TOKENS, *family.unused}
    known |= {*family.fixed, *family.absent, *family.written, *family.same}
    known |= {*WINDOW} if family.window else set()
    known |= {*ROPE} if family.has_rotary else set()
    known |= {PERIOD} if family.window_period else set()
    known |= {*family.odd.names}
    known |= {family.rope_by_kind[0]} if family.rope_by_kind else set()
    rope = _rope(config, where) or family.default_rope
    known |= {ORIGINAL} if family.has_rotary and _original_outside(rope, config, family) else set()
    known |= {name for names in family.fields.values() for name in names}
    return sorted(config.keys() - known)


def unread_in(path: str) -> list[str]:
    """Return the result of `unread` for the config.json at a path; [] for a run.json.

    path: as of `read`.
    """
    file = _find(path)
    config = _read_json(file)
    return [] if "config" in config else unread(config, file)


def context_length(config: dict[str, Any], where: str) -> int:
    """Return the tokens of the longest text that a model is made for, by its config.json.

    A sliding window does not shorten it. where: the file's name in messages.
    """
    family = family_in(config, where)
    names = family.fields["seq_length"]
    found = next((config[name] for name in names if config.get(name) is not None), None)
    length = family.defaults["seq_length"] if found is None else found
    if type(length) is not int or length < 1:
        raise ModelError(f"{where}: {names[0]} is {length!a:.80}, not a number of tokens")
    return length


def token_ids(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the ids of a model's special tokens by the names in TOKENS, as transformers has them.

    config: the contents of a config.json; an id that it does not give is that of transformers'
    class. An id is a number or None, and that of the end may be a list of numbers. Raise UserError,
    which names the file `where`, if the family is unknown or an id is something else.
    """
    family = family_in(config, where)
    defaults = dict(zip(TOKENS, family.tokens, strict=True))
    ids = {
        name: config.get(name, None if default == "none" else default)
        for name, default in defaults.items()
    }
    ids |= {name: value for name, value in family.odd.null_tokens.items() if ids[name] is None}
    check_token_ids(ids, where)
    return ids


def check_token_ids(ids: dict[str, Any], where: str) -> None:
    """Raise UserError if an id of a special token is neither a number nor null.

    ids: the contents of a config.json or generation_config.json, in which the end may have a list
    of numbers. where: the file's name in messages.
    """
    for name in TOKENS:
        value = ids.get(name)
        several = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if value is not None and not all(type(token) is int for token in several):
            raise ModelError(f"{where}: {name} is {value!a:.80}, and no id of a token")


def window(config: dict[str, Any], where: str) -> int | None:
    """Return the tokens of a model's sliding attention window; None if no block has a window.

    config: the contents of a config.json. A block with a window of W tokens reads no token that is
    W or more positions before the present one. Raise UserError, which names the file `where`, if
    the window is no number of tokens.
    """
    family = family_in(config, where)
    if family.window is None:
        return None
    which, default = family.window
    if family.window_switch and not config.get("use_sliding_window", False):
        return None
    tokens = config.get("sliding_window", default)
    if not tokens:  # null, or 0, which transformers writes for Qwen2-MoE
        return None
    if type(tokens) is not int or tokens < 0:
        raise ModelError(f"{where}: sliding_window is {tokens!a:.80}, not a number of tokens")
    layers = next((config[n] for n in family.fields["layers"] if config.get(n) is not None), 0)
    if type(layers) is not int:
        raise ModelError(f"{where}: the number of layers is {layers!a:.80}")
    layers = min(layers, 10_000)
    return tokens if any(_window_flags(config, family, which, layers, where)) else None


def _window_flags(
    config: dict[str, Any], family: Family, which: str, layers: int, where: str
) -> list[bool]:
    """Return for each block whether it has a window, in a family that gives some blocks windows.

    which: "all"; "every"; a pattern of blocks, such as 3:1; "no rope": the blocks without rotary
    positions; "from": the blocks from max_window_layers on; "every second": the even blocks before
    max_window_layers. But where the family has some blocks with a window, those of the field
    layer_types have it, if it is there.
    """
    if which == "all":
        return [True] * layers
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            raise ModelError(f"{where}: layer_types is {kinds!a:.80}, not a list")
        if len(kinds) != layers:
            raise ModelError(f"{where}: layer_types has {len(kinds)} blocks of {layers}")
        return [kind != FULL for kind in kinds]
    if which == "every":
        return [True] * layers
    if which == "no rope":
        return [not rotary for rotary in NoPositions().flags(config, layers)]
    if ":" in which:
        if not family.window_period or PERIOD not in config:
            return list(flags_of(which, layers))
        period = config[PERIOD]
        if type(period) is not int or period < 1:
            raise ModelError(f"{where}: {PERIOD} is {period!a:.80}, not a number of blocks")
        return [(block + 1) % period != 0 for block in range(layers)]
    first = config.get("max_window_layers", 28)
    if type(first) is not int:
        raise ModelError(f"{where}: max_window_layers is {first!a:.80}, not a number of blocks")
    if which == "every second":
        return [block % 2 == 0 and block < first for block in range(layers)]
    return [block >= first for block in range(layers)]


def _take(
    ours: str, name: str, value: Any, family: Family, options: dict[str, Any], lacks: list[str]
) -> None:
    """Set the option `ours` to the value of a field of config.json.

    name, value: the field's name and value. options: receives our value. lacks: receives a sentence
    instead if the engine or the family has no value like this one.
    """
    known = _values_of(ours, family)  # our value for each of theirs; empty: the values are the same
    if known:
        value_here = known.get(value) if isinstance(value, (str, bool)) else None
    else:
        value_here = value
    allowed = family.options.get(ours)
    if value_here is None or (allowed and value_here not in allowed):
        # The message names the values of this field that the family may have.
        ours_by_theirs = known or {choice: choice for choice in allowed or ()}
        wanted = [
            str(their_value)
            for their_value, our_value in ours_by_theirs.items()
            if not allowed or our_value in allowed
        ]
        lacks.append(f"{name} is {value!a:.80}; here it is {' or '.join(wanted)}")
        return
    options[ours] = value_here


def _scaling_of(rope: dict[str, Any], family: Family) -> Any:
    """Return the form of rotary scaling in an object of ROPE, as ROTARY_SCALING names it."""
    form = rope.get("rope_type", rope.get("type", "default"))
    if "longrope" in family.scalings and form in ("su", "yarn"):
        return "longrope"  # older names in Phi-3
    return "none" if form == "default" else form


def _original_outside(rope: dict[str, Any], config: dict[str, Any], family: Family) -> bool:
    """Return whether the field ORIGINAL beside the object `rope` holds, and not the one inside.

    transformers' rule for all families: it does, if it is there, for each scaling that reads it,
    where blocks have no rotary positions of their own. Phi-3 always has the field: if its file does
    not, with the class's default.
    """
    form = _scaling_of(rope, family)
    if family.rope_by_kind is not None or ORIGINAL not in ROTARY_SCALING.get(str(form), ()):
        return False
    return ORIGINAL in config or "longrope" in family.scalings


def _read_scaling(
    ours: str,
    rope: dict[str, Any],
    config: dict[str, Any],
    family: Family,
    options: dict[str, Any],
    lacks: list[str],
    where: str,
) -> None:
    """Set the option `ours`, a rotary scaling, by the fields for rotary positions in a config.json.

    rope: the field rope_parameters or rope_scaling, or its part for a kind of blocks. config: the
    whole file. options: receives our value. lacks: receives a sentence instead if the engine has no
    such scaling. Raise UserError, which names the file `where`, if a number is missing.
    """
    kind = _scaling_of(rope, family)
    if not isinstance(kind, str) or kind not in ROTARY_SCALING:
        lacks.append(
            f"rotary positions are scaled by {kind!a:.80}; here: {', '.join(ROTARY_SCALING)}"
        )
        return
    if family.scalings and kind not in family.scalings:
        there = ", ".join(family.scalings)
        lacks.append(f"rotary positions are scaled by {kind}; {family.name} has {there}")
        return
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim"}
    known |= {name for names in ROTARY_SCALING.values() for name in names}
    known |= {*family.odd.unused_of_rope}
    unknown = sorted(rope.keys() - known)
    if unknown:
        lacks.append(
            f"rotary positions have {', '.join(map(ascii, unknown)):.80}; here they do not"
        )
    if family.rope_by_kind and kind == "yarn" and rope.get("truncate") is False:
        lacks.append("truncate is False; here, as in transformers for blocks of two kinds, True")
    try:
        text = [_number_text(value) for value in _scaling_numbers(kind, rope, config, family)]
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        needed = ", ".join(ROTARY_SCALING[kind])
        raise ModelError(
            f"{where}: rotary positions of type {kind} need numbers: {needed}"
        ) from None
    if text:  # the numbers of the scaling; a model without scaling (kind "none") has no numbers
        options[ours] = ":".join([kind, *text])


def _scaling_numbers(
    kind: str, rope: dict[str, Any], config: dict[str, Any], family: Family
) -> list[Any]:
    """Return the numbers (and for longrope lists) of a kind of scaling, as in ROTARY_SCALING.

    Those that the file does not give are as transformers has them. If the file has no number of
    positions before scaling, the model's whole length is meant.
    """
    names = family.fields["seq_length"]
    length = next((config[n] for n in names if config.get(n) is not None), None)
    length = family.defaults["seq_length"] if length is None else length
    numbers: dict[str, Any] = {ORIGINAL: length} | rope
    if _original_outside(rope, config, family):
        numbers[ORIGINAL] = config.get(ORIGINAL, family.defaults["seq_length"])
    original = float(numbers[ORIGINAL])
    if kind in ("yarn", "longrope") and numbers.get("factor") is None:
        numbers["factor"] = float(length) / original
    if numbers.get("attention_factor") is None and kind in ("yarn", "longrope"):
        factor = float(numbers["factor"])
        numbers["attention_factor"] = 1.0
        if factor > 1 and kind == "longrope":
            numbers["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
        elif factor > 1:
            scales = numbers.get("mscale") or 0.0, numbers.get("mscale_all_dim") or 0.0
            above, below = scales if all(scales) else (1.0, 0.0)
            growth = 0.1 * math.log(factor)
            numbers["attention_factor"] = (growth * above + 1) / (growth * below + 1)
    if kind == "yarn":
        numbers["beta_fast"] = numbers.get("beta_fast") or 32
        numbers["beta_slow"] = numbers.get("beta_slow") or 1
        truncates = True if family.rope_by_kind else numbers.get("truncate", True)
        numbers["truncate"] = int(bool(truncates))
    return [numbers[name] for name in ROTARY_SCALING[kind]]


def _number_text(value: Any) -> str:
    """Return a number, or a list of numbers with commas, as --rotary-scaling has it."""
    if isinstance(value, list):
        return ",".join(map(_number_text, value))
    number = float(value)
    short = f"{number:.12g}"
    return short if float(short) == number else repr(number)


def _beyond(tokens: Any, seq_length: int | None) -> list[str]:
    """Return a sentence if samples of --seq-length tokens exceed a window of so many tokens.

    tokens: None if there is no window. seq_length: None if --seq-length is not given.
    """
    if not isinstance(tokens, int) or seq_length is None or seq_length <= tokens:
        return []
    return [f"sliding_window({tokens}) is shorter than seq-length({seq_length})"]
