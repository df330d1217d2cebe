"""Spellings of options: Megatron-LM's names, underscores, and suggestions for unknown names.

    found = translate(["--num_layers", "4", "--fp16"])
    found.words      ["--layers", "4", "--precision", "fp16"]
    found.notes      lines to print: how each name was understood
    found.finish(values)    fills in what depends on other options, such as --eval-iters

The names are in other_names.toml.

Models by name: the presets of presets.toml, and what a --model means, a preset or a path.

    preset("gpt2-124m")                            a ModelShape
    means_preset("meta-llama/Meta-Llama-3-8B")     True: preset_name finds llama-3-8b
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config import batch_schedule, families
from config.messages import UserError, nearest
from config.schema import ModelShape

NAMES = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text())
FLAG = re.compile(r"--?[A-Za-z]")  # a negative number is a value


@dataclass
class Translation:
    """A command line in the names of schema.py; see the module's example."""

    words: list[str] = field(default_factory=list)
    ours: dict[str, str] = field(default_factory=dict)  # flag as written -> ours
    instead: list[str] = field(default_factory=list)  # a sentence per option without effect here
    iterations: dict[str, float] = field(default_factory=dict)  # by our option of samples
    warmup_fraction: float | None = None

    @property
    def notes(self) -> list[str]:
        """Lines to print: one on all translated names, one for each option without effect here."""
        names = ", ".join(f"{name} is {ours}" for name, ours in self.ours.items())
        return ([f"Megatron's names: {names}"] if names else []) + self.instead

    def finish(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return `values` (options by name, of flags and file) with options that count samples in
        Trine, and iterations or a share of all samples in Megatron-LM. An iteration counts
        --global-batch-size samples, even during a ramp-up, as in Megatron-LM.
        """
        if not self.iterations and self.warmup_fraction is None:
            return values
        steps = values.get("batch_schedule")
        size = values.get("global_batch_size")
        if size is None:
            size = batch_schedule.parse_steps(tuple(steps))[-1][1] if steps else 8
        found = values | {name: round(count * size) for name, count in self.iterations.items()}
        if self.warmup_fraction is not None:
            total = values.get("train_samples") or values.get("steps", 0) * size
            decay = found.get("lr_decay_samples", total)
            found["lr_warmup_samples"] = round(self.warmup_fraction * decay)
        return found


def translate(words: list[str]) -> Translation:
    """Return a command line in our names; UserError if Trine does not have what an option asks for,
    or if two names of one option have different values.
    """
    found = Translation()
    written = dict[str, tuple[str, list[str]]]()
    for flag, rest in _flags(words):
        name, equals, value = flag.partition("=")
        name = name.replace("_", "-")
        values = [value, *rest] if equals else rest
        own = _own_words(name, values, found) if name.startswith("--") else None
        meaning = [name, *values] if own is None else own or [name]
        target = meaning[0].replace("--no-", "--")
        other, before = written.setdefault(target, (name, meaning))
        if {name, other} & found.ours.keys() and before != meaning:
            raise UserError(f"{other} and {name} are one option, {target}: give one")
        found.words += [name + equals + value] * bool(name) + rest if own is None else own
    return _resumed(found)


def _flags(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words before the next flag; words before the first have flag ''."""
    flag = ""
    values = list[str]()
    for word in words:
        if FLAG.match(word):
            yield flag, values
            flag = word
            values = []
        else:
            values.append(word)
    yield flag, values


def _own_words(flag: str, values: list[str], found: Translation) -> list[str] | None:
    """Return our words for a flag of Megatron-LM, and note it in `found`; None for other flags."""
    name = flag[2:]
    if name in NAMES["instead"]:
        _check_instead(name, values, found)
        return []
    if name in NAMES["iterations"]:
        ours = NAMES["iterations"][name]
        found.iterations[ours.replace("-", "_")] = _number(name, values)
        found.ours[flag] = f"--{ours} (times --global-batch-size)"
        return []
    if name == "lr-warmup-fraction":
        found.warmup_fraction = _number(name, values)
        found.ours[flag] = "--lr-warmup-samples (times --lr-decay-samples)"
        return []
    if name == "tensorboard-dir":  # Trine's folder is fixed
        found.instead.append(f"{flag} {' '.join(values)}: the events are in OUT/tensorboard")
        values = []
    if name in NAMES["words"]:
        found.ours[flag] = NAMES["words"][name]
        return [*NAMES["words"][name].split(), *values]
    if name not in NAMES["same"]:
        return None
    found.ours[flag] = f"--{NAMES['same'][name]}"
    spelled = NAMES["values"].get(name, {})
    return [found.ours[flag], *(spelled.get(value, value) for value in values)]


def _check_instead(name: str, values: list[str], found: Translation) -> None:
    facts = NAMES["instead"][name]
    given = " ".join([f"--{name}", *values])
    if "accepts" not in facts:
        found.instead.append(f"{given}: {facts['text']}")
    elif not values or values[0] not in facts["accepts"]:
        raise UserError(f"{given}: {facts['text']}")
    else:
        found.instead.append(f"{given}: so it is here")


def _number(name: str, values: list[str]) -> float:
    try:
        (value,) = values
        number = float(value)
    except ValueError:
        raise UserError(f"--{name} takes a number, not {' '.join(values)!r}") from None
    if not 0 <= number < 2**53:
        raise UserError(f"--{name} must be at least 0 and below 2^53, not {value}")
    return number


def _resumed(found: Translation) -> Translation:
    """Turn --load into --resume auto if its folder is also that of --save, and return `found`."""
    words = found.words
    if "--load" not in found.ours or "--out" not in words:
        return found
    load = words.index("--resume") + 1
    out = words.index("--out") + 1
    if words[load : load + 1] == words[out : out + 1]:
        words[load] = "auto"
        found.ours["--load"] = "--resume auto"
    return found


def suggestion(name: str, options: Mapping[str, str]) -> str:
    """Return `; did you mean ...?` for an unknown option, or an empty string.

    options: the help text of every option, by its name. The suggestion is, in this order: the
    option for a name that other programs use, an option with almost the same name, or an option
    whose name and help text have all words of `name`.
    """
    plain = name.lstrip("-").partition("=")[0].replace("_", "-")
    dashes = "--" if name.startswith("-") else ""
    known = list(options)
    meant = NAMES["meant"]
    if plain in meant:
        return f"; did you mean {dashes + meant[plain]!r}?"
    close = nearest(plain, known, 0.8)
    if not close and (other := difflib.get_close_matches(plain, meant, 1, 0.8)):
        close = f"; did you mean {meant[other[0]]!r}?"
    if not close:
        parts = set(re.split(r"\W+", plain))
        texts = {each: set(re.findall(r"\w+", f"{each} {text}")) for each, text in options.items()}
        close = next((f"; did you mean {e!r}?" for e in known if parts <= texts[e]), "")
    close = close or nearest(plain, known)
    return close.replace(" '", f" '{dashes}")


# ---- Models by name ------------------------------------------------------------------------------


def _load_presets() -> tuple[dict[str, ModelShape], dict[str, list[str]], dict[str, str]]:
    """Named shapes in the file's order, what is left out of some, and other names for some."""
    tree = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
    shapes = {}
    lacks = {}
    for family in tree["family"]:
        options = _first_options(family.get("name")) | family["shared"]
        for name, sizes in family["models"].items():
            shapes[name] = ModelShape(*sizes, **options)
            lacks[name] = family.get("lacks", [])
    return shapes, lacks, tree["aliases"]


def _first_options(family: str | None) -> dict[str, Any]:
    """Return the options that models of a family in families.toml have by default."""
    options = families.FAMILIES[family].options if family else {}
    return {name: allowed[0] for name, allowed in options.items()}


# LACKS: for each preset, sentences about what of the model train.py cannot train.
PRESETS, LACKS, ALIASES = _load_presets()
# Names of repositories may end in these words, on which the model's shape does not depend.
ENDINGS = re.compile(r"(-(base|hf|chat|instruct|deduped|v0\.1))+$")


def preset_name(name: str) -> str:
    """The name of a preset in lower case, where `name` may be that of a repository, such as
    meta-llama/Meta-Llama-3-8B; of no preset if there is none.
    """
    plain = ENDINGS.sub("", name.lower().rpartition("/")[2].removeprefix("meta-"))
    return ALIASES.get(plain, plain)


def means_preset(name: str) -> bool:
    """Whether a --model is meant as a preset and not as a path: OWNER/MODEL without a folder OWNER,
    or a name that no file or folder has.
    """
    owner = name.rpartition("/")[0]
    path = name.endswith(".json") or "/" in owner or Path(owner or name).exists()
    return not path or name.lower() in {*PRESETS, *ALIASES}


def preset(name: str) -> ModelShape:
    """The shape of that name; UserError with the nearest name if there is none."""
    key = preset_name(name)
    if key not in PRESETS:
        hint = nearest(key, list(PRESETS), 0.5, most=3) or "; train.py --help model lists them"
        no_file = ", and there is no such file" if "/" in name else ""
        raise UserError(f"no preset is called {name!r}{no_file}{hint}")
    return PRESETS[key]


def listed() -> str:
    """The help text of --model."""
    text = f"start from a named shape: {', '.join(PRESETS)}, or a repository's name for one"
    return text + ", or that of a config.json of transformers, a run's folder, a checkpoint"
