"""Spellings of options: Megatron-LM's names, underscores, and suggestions for unknown names.

    translation = translate(["--num_layers", "4", "--fp16"])
    translation.words             ["--layers", "4", "--precision", "fp16"]
    translation.notes             lines to print: how each name was understood
    translation.finish(values)    sets options that depend on others, such as --eval-iters

"Theirs" are names of Megatron-LM, "ours" the names in schema.py; other_names.toml has both.

The second part finds models by name: the presets of presets.toml. A --model is the name of a preset
or a path.

    preset("gpt2-124m")                            a ModelShape
    means_preset("meta-llama/Meta-Llama-3-8B")     True: preset_name returns llama-3-8b
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
    """A command line in the names of schema.py."""

    words: list[str] = field(default_factory=list)  # the command line in our names
    ours: dict[str, str] = field(default_factory=dict)  # our flag for each translated flag
    instead: list[str] = field(default_factory=list)  # a sentence per option without effect here
    # The number of iterations, for our options that count samples, by the name of our option.
    iterations: dict[str, float] = field(default_factory=dict)
    warmup_fraction: float | None = None  # warm-up as a share of the samples of the decay

    @property
    def notes(self) -> list[str]:
        """Lines to print: one on all translated names, one for each option without effect here."""
        names = ", ".join(f"{name} is {ours}" for name, ours in self.ours.items())
        return ([f"Megatron's names: {names}"] if names else []) + self.instead

    def finish(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the options with numbers of samples in place of iterations and shares.

        values: the options of flags and file by name. Some options count iterations in Megatron-LM
        and samples here. An iteration counts --global-batch-size samples, even during a ramp-up, as
        in Megatron-LM.
        """
        if not self.iterations and self.warmup_fraction is None:
            return values
        steps = values.get("batch_schedule")
        size = values.get("global_batch_size")
        if size is None:
            size = batch_schedule.parse_steps(tuple(steps))[-1][1] if steps else 8
        finished = values | {name: round(count * size) for name, count in self.iterations.items()}
        if self.warmup_fraction is not None:
            total = values.get("train_samples") or values.get("steps", 0) * size
            decay = finished.get("lr_decay_samples", total)
            finished["lr_warmup_samples"] = round(self.warmup_fraction * decay)
        return finished


def translate(words: list[str]) -> Translation:
    """Return a command line in our names.

    words: the command line, with theirs and ours. Raise UserError if Trine does not have what an
    option asks for, or if two names of one option have different values.
    """
    translation = Translation()
    first_use = dict[str, tuple[str, list[str]]]()  # by our flag: the name as written, our words
    for flag, values_after in _flags(words):
        name, equals, value = flag.partition("=")
        name = name.replace("_", "-")
        values = [value, *values_after] if equals else values_after
        translated = None
        if name.startswith("--"):
            translated = _our_words(name, values, translation)
        meaning = translated or [name]
        if translated is None:
            meaning = [name, *values]
        our_flag = meaning[0].replace("--no-", "--")
        other_name, other_meaning = first_use.setdefault(our_flag, (name, meaning))
        if {name, other_name} & translation.ours.keys() and other_meaning != meaning:
            raise UserError(f"{other_name} and {name} are one option, {our_flag}: give one")
        if translated is not None:
            translation.words += translated
            continue
        if name:  # empty before the first flag
            translation.words.append(name + equals + value)
        translation.words += values_after
    return _resumed(translation)


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


def _our_words(flag: str, values: list[str], translation: Translation) -> list[str] | None:
    """Return the words of our command line for a flag of Megatron-LM; None for any other flag.

    values: the words after the flag. translation: receives the notes, and the numbers that `finish`
    needs. The result is [] if the flag has no effect here, or if `finish` sets the option.
    """
    name = flag.removeprefix("--")
    if name in NAMES["instead"]:
        _note_missing_option(name, values, translation)
        return []
    if name in NAMES["iterations"]:
        ours = NAMES["iterations"][name]
        translation.iterations[ours.replace("-", "_")] = _number(name, values)
        translation.ours[flag] = f"--{ours} (times --global-batch-size)"
        return []
    if name == "lr-warmup-fraction":
        translation.warmup_fraction = _number(name, values)
        translation.ours[flag] = "--lr-warmup-samples (times --lr-decay-samples)"
        return []
    if name == "tensorboard-dir":  # Trine's folder is fixed
        translation.instead.append(f"{flag} {' '.join(values)}: the events are in OUT/tensorboard")
        values = []
    if name in NAMES["words"]:
        translation.ours[flag] = NAMES["words"][name]
        return [*NAMES["words"][name].split(), *values]
    if name not in NAMES["same"]:
        return None
    translation.ours[flag] = f"--{NAMES['same'][name]}"
    our_values = NAMES["values"].get(name, {})  # our value for each of theirs that differs
    return [translation.ours[flag], *(our_values.get(value, value) for value in values)]


def _note_missing_option(name: str, values: list[str], translation: Translation) -> None:
    """Note that Trine lacks an option of Megatron-LM, or that it always has the given value.

    Raise UserError if the option asks, with these values, for something that Trine does not do.
    """
    entry = NAMES["instead"][name]  # text: what Trine does; accepts: the values that mean the same
    written = " ".join([f"--{name}", *values])
    if "accepts" not in entry:
        translation.instead.append(f"{written}: {entry['text']}")
    elif not values or values[0] not in entry["accepts"]:
        raise UserError(f"{written}: {entry['text']}")
    else:
        translation.instead.append(f"{written}: so it is here")


def _number(name: str, values: list[str]) -> float:
    """Return the single value of an option, a number from 0 up to 2^53; UserError for any other."""
    try:
        (value,) = values
        number = float(value)
    except ValueError:
        raise UserError(f"--{name} takes a number, not {' '.join(values)!r}") from None
    if not 0 <= number < 2**53:
        raise UserError(f"--{name} must be at least 0 and below 2^53, not {value}")
    return number


def _resumed(translation: Translation) -> Translation:
    """Turn --load FOLDER into --resume auto if --save has the same folder; return the translation.

    --load was translated to --resume, and --save to --out.
    """
    words = translation.words
    if "--load" not in translation.ours or "--out" not in words:
        return translation
    load = words.index("--resume") + 1
    out = words.index("--out") + 1
    if words[load : load + 1] == words[out : out + 1]:  # slices, since the values may be missing
        words[load] = "auto"
        translation.ours["--load"] = "--resume auto"
    return translation


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
        for option, text in options.items():
            if parts <= set(re.findall(r"\w+", f"{option} {text}")):
                close = f"; did you mean {option!r}?"
                break
    close = close or nearest(plain, known)
    return close.replace(" '", f" '{dashes}")


# ---- Models by name ------------------------------------------------------------------------------


def _load_presets() -> tuple[dict[str, ModelShape], dict[str, list[str]], dict[str, str]]:
    """Return three dictionaries of presets.toml: shapes, lacks and aliases.

    Shapes and lacks are by the preset's name, in the file's order; the keys of the aliases are
    other names of presets.
    """
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
    """Return the name of the preset that `name` stands for: llama-3-8b, for example.

    name: the preset's name, or a repository such as meta-llama/Meta-Llama-3-8B. If there is no such
    preset, the result is the repository's name in lower case.
    """
    repository = name.lower().rpartition("/")[2]
    plain = ENDINGS.sub("", repository.removeprefix("meta-"))
    return ALIASES.get(plain, plain)


def means_preset(name: str) -> bool:
    """Return whether a --model is the name of a preset and not a path.

    It is if no file or folder has that name; for OWNER/MODEL, if there is no folder OWNER. The name
    of a preset always means the preset.
    """
    owner = name.rpartition("/")[0]
    is_path = name.endswith(".json") or "/" in owner or Path(owner or name).exists()
    return not is_path or name.lower() in {*PRESETS, *ALIASES}


def preset(name: str) -> ModelShape:
    """Return the shape of a preset; UserError with the nearest names if there is none."""
    key = preset_name(name)
    if key not in PRESETS:
        hint = nearest(key, list(PRESETS), 0.5, most=3) or "; train.py --help model lists them"
        no_file = ", and there is no such file" if "/" in name else ""
        raise UserError(f"no preset is called {name!r}{no_file}{hint}")
    return PRESETS[key]


def listed() -> str:
    """Return the help text of --model, with the names of all presets."""
    text = f"start from a named shape: {', '.join(PRESETS)}, or a repository's name for one"
    return text + ", or that of a config.json of transformers, a run's folder, a checkpoint"
