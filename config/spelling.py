"""Spellings of options: Megatron-LM's names, underscores, and suggestions for unknown names.

    translation = translate(["--num_layers", "4", "--fp16"])
    translation.words             ["--layers", "4", "--precision", "fp16"]
    translation.notes             lines to print: how each name was understood
    translation.finish(values)    sets options that depend on others, such as --eval-iters

"Theirs" are names of Megatron-LM, "ours" the names in schema.py; other_names.toml has both, in
NAMES here: "same" has options with another name, "words" switches that are an option with a value
here, "iterations" options that count samples here, "instead" options without effect, "values" our
names of values, "meant" our options for names that other programs use, "earlier" our options that
had another name, "gone" where options of earlier versions went.

The second part finds models by name: the presets of presets.toml. A --model is the name of a preset
or a path.

    preset("gpt2-124m")                            a ModelShape
    means_preset("meta-llama/Meta-Llama-3-8B")     True: preset_name returns llama-3-8b
"""

import argparse
import dataclasses
import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from architecture import families
from architecture.shape import ModelShape
from base.cli import Parser
from base.errors import ModelError, UserError, nearest
from config import batch_schedule
from config.past import Past
from config.run_lengths import has_end
from config.schema import Config
from config.timeline import Timeline

NAMES = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text())
# A word of the command line that begins so is a flag; a negative number, such as -1, is a value.
FLAG = re.compile(r"--?[A-Za-z]")


@dataclass
class Translation:
    """A command line in the names of schema.py."""

    words: list[str] = field(default_factory=list)  # the command line in our names
    ours: dict[str, str] = field(default_factory=dict)  # our flag for each translated flag
    instead: list[str] = field(default_factory=list)  # a sentence per option without effect here
    # Numbers of iterations that `finish` turns into samples, by the name of our option.
    iterations: dict[str, float] = field(default_factory=dict)
    # The warm-up as a share, for `with_warmup`; None: it was not given.
    warmup_fraction: float | None = None

    @property
    def notes(self) -> list[str]:
        """Lines to print: one on all translated names, one for each option without effect here."""
        names = ", ".join(f"{name} is {ours}" for name, ours in self.ours.items())
        return ([f"Megatron's names: {names}"] if names else []) + self.instead

    def finish(self, values: dict[str, Any], past: Past) -> dict[str, Any]:
        """Return the options with numbers of samples in place of iterations.

        values: the options by name. Some options count iterations in Megatron-LM and samples here.
        An iteration counts --global-batch-size samples, even during a ramp-up, as in Megatron-LM.
        past: what a resumed run has done before; an iteration of an earlier start counts the size
        that the run had then.
        """
        if "--num-experts" in self.ours and "bias" not in values:
            values = values | {"bias": True}  # as theirs; experts here have none, which is refused
        if not self.iterations:
            return values
        steps = values.get("batch_schedule")
        size = values.get("global_batch_size")
        if size is None:  # the default: the last size of --batch-schedule, or 8
            size = batch_schedule.parse_steps(tuple(steps))[-1][1] if steps else 8
        samples = {n: past.samples_of_iterations(i, size) for n, i in self.iterations.items()}
        return values | samples

    def with_warmup(self, config: Config, given: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
        """Return the run and the given options with the warm-up that --lr-warmup-fraction asks for.

        It is a share of --lr-decay-samples, or of the samples that the run consumes.
        """
        if self.warmup_fraction is None:
            return config, given
        length = config.training.lr_decay_samples
        if length is None:
            length = Timeline(config).total_samples if has_end(config) else 0
        warmup = round(self.warmup_fraction * length)
        training = dataclasses.replace(config.training, lr_warmup_samples=warmup)
        return dataclasses.replace(config, training=training), given | {"lr_warmup_samples": warmup}

    def check_meaning(self, model: ModelShape, given: Collection[str]) -> None:
        """Note, or refuse, translated options that mean something else beside other options.

        model: the run's model, from whatever it was given by. given: the names of given options.
        Raise UserError for --qk-layernorm in a model without RMSNorm.
        """
        if "--qk-layernorm" in self.ours and model.norm != "rmsnorm":
            raise UserError(
                "--qk-layernorm is a LayerNorm in Megatron-LM without --normalization RMSNorm, and "
                "--set qk_norm=head is an RMSNorm in any model: give one of these"
            )
        width = int(4 * model.hidden * 2 / 3 / 64) * 64
        if "--swiglu" in self.ours and "ffn_hidden" not in given and width != model.ffn_hidden:
            self.instead.append(
                f"--swiglu without --ffn-hidden-size: Megatron-LM's MLP has {width} columns, and "
                f"this one {model.ffn_hidden}"
            )


def translate(words: list[str]) -> Translation:
    """Translate a command line that has options of Megatron-LM.

    words: the command line, with names of theirs and of ours. In the translation, the words that
    were ours already come first. Raise UserError if Trine does not have what an option asks for, or
    if an option is given by two names. Called if a command line has an unknown flag or value.
    """
    # This parser knows only Megatron-LM's options. parse_known_args returns the words that it does
    # not know as the list `ours`: they are flags of Trine and their values.
    parser = Parser(add_help=False, allow_abbrev=False)
    theirs = ["lr-warmup-fraction"]
    for table in ("same", "keys", "words", "iterations", "instead", "earlier"):
        theirs += NAMES[table]
    # Each option takes any number of values. `given` has only those on the command line.
    for name in theirs:
        parser.add_argument(f"--{name}", nargs="*", default=argparse.SUPPRESS)
    given, ours = parser.parse_known_args(list(map(_with_dashes, words)))
    translation = Translation(ours)
    # For each of our options that is given, such as --bias, the flag that gave it: --no-bias or
    # --disable-bias-linear. A second flag for the same option is an error that shows both. First
    # come the flags of Trine, then the translated options of Megatron-LM.
    names = {}
    for word in filter(FLAG.match, ours):
        flag = word.partition("=")[0]
        names[flag.replace("--no-", "--")] = flag
    for attribute, values in vars(given).items():
        name = attribute.replace("_", "-")
        our_words = _our_words(name, values, translation)
        option = our_words[0].replace("--no-", "--") if our_words else _counted(name)
        if not option:  # it has no effect here
            continue
        if option == "--set":
            option = our_words[1].partition("=")[0]
        if option in names:
            raise UserError(f"{names[option]} and --{name} are one option, {option}: give one")
        names[option] = f"--{name}"
        translation.words += our_words
    return _resumed(translation)


def _counted(name: str) -> str:
    """Return our flag that `finish` or `with_warmup` sets by one of theirs; "" for another name."""
    ours = NAMES["iterations"].get(name, "")
    ours = "lr-warmup-samples" if name == "lr-warmup-fraction" else ours
    return ours and f"--{ours}"


def _with_dashes(word: str) -> str:
    """Return a word of the command line with dashes for underscores in the name of a flag.

    A flag's value, and a word that is no flag, stay as they are.
    """
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _our_words(name: str, values: list[str], translation: Translation) -> list[str]:
    """Return the words of our command line for an option of Megatron-LM.

    name: the option without its two dashes. values: the words after it. translation: receives the
    notes, and the numbers that `finish` needs. The result is [] if the option has no effect here,
    or if `finish` sets the option. Raise UserError if the option asks for something that Trine does
    not do.
    """
    flag = f"--{name}"
    written = " ".join([flag, *values])
    if name in NAMES["instead"]:
        entry = NAMES["instead"][name]
        # With one of these values the foreign option asks for what Trine does anyway; any other
        # value is a mistake. None: every value is taken, and a note says what there is instead.
        accepted = entry.get("accepts")
        if accepted is None:
            translation.instead.append(f"{written}: {entry['text']}")
        elif values and values[0] in accepted:
            translation.instead.append(f"{written}: so it is here")
        else:
            raise UserError(f"{written}: {entry['text']}")
        return []
    if name in NAMES["earlier"]:
        ours = NAMES["earlier"][name]
        translation.instead.append(f"{flag} is called --{ours} now")
        return [f"--{ours}", *values]
    if name in NAMES["iterations"]:  # `finish` sets our option, to a number of samples
        ours = NAMES["iterations"][name]
        translation.iterations[ours.replace("-", "_")] = _number(name, values)
        translation.ours[flag] = f"--{ours} (times --global-batch-size)"
        return []
    if name == "lr-warmup-fraction":
        translation.warmup_fraction = _number(name, values)
        if translation.warmup_fraction > 1:
            raise UserError(f"{flag} is a share of the run from 0 to 1, not {' '.join(values)}")
        translation.ours[flag] = "--lr-warmup-samples (times --lr-decay-samples, or the run's)"
        return []
    if name in NAMES["words"]:  # such as fp16, which is "--precision fp16" here
        translation.ours[flag] = NAMES["words"][name]
        if name == "tensorboard-dir":  # Trine always writes to OUT/tensorboard
            translation.instead.append(f"{written}: the events are in OUT/tensorboard")
            values = []
        return [*NAMES["words"][name].split(), *values]
    if name in NAMES["keys"]:
        key = NAMES["keys"][name]
        translation.ours[flag] = key
        if len(values) > 1:
            raise UserError(f"{flag} takes one value, not {' '.join(values)}")
        return ["--set", f"{key}={''.join(values) or 'true'}"]
    our_flag = f"--{NAMES['same'][name]}"
    translations = NAMES["values"].get(name, {})  # our value for each of theirs that differs
    our_values = [translations.get(value, value) for value in values]
    if our_flag != flag:
        translation.ours[flag] = our_flag
    elif our_values != values:  # only the value has another name
        translation.ours[written] = " ".join([our_flag, *our_values])
    return [our_flag, *our_values]


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

    With both options, the first start in Megatron-LM begins at step 0. Here --resume FOLDER would
    be an error, because FOLDER has no checkpoint yet; --resume auto begins at step 0. --load was
    translated to --resume before, and --save to --out.
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


def present_name(key: str) -> str:
    """Return the name that a key of a file, such as `stages`, has in this version, with "_"."""
    return NAMES["earlier"].get(key.replace("_", "-"), key).replace("-", "_")


def where_it_went(name: str) -> str:
    """Return a sentence if `name`, a flag or a TOML key, was an option of an earlier version."""
    plain = name.lstrip("-").partition("=")[0].replace("_", "-").removeprefix("no-")
    sentence = NAMES["gone"].get(plain, "")
    return sentence and f"{name} is gone: {sentence}"


def suggestion(name: str, options: Mapping[str, str]) -> str:
    """Return `; did you mean ...?` for an unknown option, or an empty string.

    options: how every option is written, by its name. Names that other programs use lead to our
    option.
    """
    plain = name.lstrip("-").partition("=")[0].replace("_", "-")
    meant = NAMES["meant"]  # our option for each name of other programs
    alike = difflib.get_close_matches(plain, meant, 1, 0.8)
    close = nearest(plain, list(options), 0.8)
    # Another program's name counts if it was given exactly, or if it is the only similar name.
    if plain in meant or (alike and not close):
        close = f"; did you mean {meant[alike[0]]!r}?"
    # If no name has the similarity 0.8, a less similar one will do.
    text = close or nearest(plain, list(options))
    return re.sub("'(.*?)'", lambda found: repr(options[found[1]]), text)


# ---- Models by name ------------------------------------------------------------------------------


class _Presets(NamedTuple):
    """Dictionaries of presets.toml."""

    shapes: dict[str, ModelShape]
    lacks: dict[str, list[str]]
    aliases: dict[str, str]
    missing: dict[str, str]


def _load_presets() -> _Presets:
    """Return four dictionaries of presets.toml: shapes, lacks, aliases and missing.

    Shapes and lacks have a value for each preset, by its name, in the file's order: its ModelShape,
    and sentences about parts that the engine cannot train. The aliases have the name of the preset
    for each other name. The last one has what is missing for models whose names begin so.
    """
    tree = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
    shapes = {}
    lacks = {}
    for family in tree["family"]:
        options = _first_options(family.get("name")) | family["shared"]
        for name, sizes in family["models"].items():
            # `sizes` are the first fields of ModelShape: layers, hidden, heads, ...
            shapes[name] = ModelShape(*sizes, **options)
            lacks[name] = family.get("lacks", [])
    return _Presets(shapes, lacks, tree["aliases"], tree["missing"])


def _first_options(family: str | None) -> dict[str, Any]:
    """Return the options that models of a family in families.toml have by default."""
    options = families.FAMILIES[family].options if family else {}
    return {name: allowed[0] for name, allowed in options.items()}


# LACKS has, for each preset, sentences about parts of the model that train.py cannot train.
PRESETS, LACKS, ALIASES, MISSING = _load_presets()
# Names of repositories may end in these words, on which the model's shape does not depend.
ENDINGS = re.compile(r"(-(base|hf|chat|instruct|deduped|it|pt|v0\.1))+$")


def preset_name(name: str) -> str:
    """Return the name of the preset that `name` stands for: llama-3-8b, for example.

    name: the preset's name, or a repository such as meta-llama/Meta-Llama-3-8B. If there is no such
    preset, the result is the repository's name in lower case.
    """
    repository = name.lower().rpartition("/")[2]
    plain = ENDINGS.sub("", repository.removeprefix("meta-"))
    return ALIASES.get(plain, plain)


def means_preset(name: str) -> bool:
    """Return whether the value of --model is a name, which presets may have, and not a path.

    The value is a name if no file or folder has that name; for OWNER/MODEL, if there is no folder
    OWNER. The exact name of a preset always means the preset.
    """
    owner = name.rpartition("/")[0]
    is_path = name.endswith(".json") or "/" in owner or Path(owner or name).exists()
    return not is_path or name.lower() in {*PRESETS, *ALIASES}


def preset(name: str) -> ModelShape:
    """Return the shape of a preset; raise UserError with the nearest names if there is none.

    name: see `preset_name`.
    """
    key = preset_name(name)
    if key not in PRESETS:
        for begin, missing in MISSING.items():
            if key.startswith(begin):
                raise ModelError(f"{name!r} cannot be expressed here: it has {missing}")
        hint = nearest(key, list(PRESETS), 0.5, most=3) or "; train.py --help model lists them"
        no_file = ", and there is no such file" if "/" in name else ""
        raise ModelError(f"no preset is called {name!r}{no_file}{hint}")
    return PRESETS[key]


def listed() -> str:
    """Return the help text of --model, with the names of all presets."""
    text = f"start from a named shape: {', '.join(PRESETS)}, or its name on Hugging Face"
    return text + "; or a config.json of transformers, a run's folder, or a checkpoint"
