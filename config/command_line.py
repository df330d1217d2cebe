"""The command line and the TOML file, made from the dataclasses of config/schema.py.

    config = parse(["--model", "gpt2-124m", "--tp", "2", ...])   # flags override --config FILE

Options with `file_only`, fine points that few people change, are keys of the file and have no
flags: --set KEY=VALUE gives one on the command line, as it gives every other key.
Types, choices and limits are checked here; config/validation.py checks what depends on several
options. Given options are those that a flag or the file sets; the others have their defaults.
"Lacks" are sentences on the parts of a --model that the engine cannot train. GROUPS has the five
dataclasses of options by name. Modules that few command lines need (spelling.py, families.py) are
imported where they are used.
"""

import argparse
import contextlib
import dataclasses
import math
import operator
import re
import textwrap
import tomllib
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from architecture.shape import ModelShape
from base.cli import Parser, check_decoded, number, whole_number
from base.errors import FileError, ModelError, UserError, nearest, printable
from base.options import as_typed
from base.regular_files import open_regular
from config import phases, run_lengths
from config.corpus_record import vocabulary, with_end_token
from config.inherited import Inherited, left_out
from config.phases import PhasePlan, prefixes_of
from config.run_options import Run
from config.schema import GROUPS, Config, all_options
from config.validation import check_shape, check_used, unused_rotary

if TYPE_CHECKING:
    from config.spelling import Translation

MOST_BYTES = 2**20  # size of the largest TOML file that is read
SHAPE = {"model", "layers", "hidden", "heads"}  # one of these begins another model
BATCH_SIZES = {"global_batch_size", "batch_tokens"}  # the two options for the global batch size
LENGTHS = {"steps", "train_samples"}  # the two options for the length of a run
# `--precision auto` counts as not given, so a program's default or the resumed run's value holds.
AUTOMATIC = ("precision", "auto")
# The words of error messages for the types of options.
KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
TEXT = re.compile(r"[^\x00-\x1f\x7f]+")  # not empty, and without control characters
# The options that people use first: `--help` without a group shows these alone.
FIRST = (
    *("model", "layers", "hidden", "heads", "seq_length", "vocab_size"),
    *("tp", "pp", "cp", "micro_batch_size", "schedule", "recompute", "zero"),
    *("precision", "global_batch_size", "steps", "lr"),
    *("data", "split"),
    *("out", "resume", "save_every", "eval_every", "device", "compile"),
)
# For each kind of limit: whether a value is within the limit, and the words of the error message.
LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (operator.ge, "at least"),
    "maximum": (operator.le, "at most"),
    "above": (operator.gt, "above"),
    "below": (operator.lt, "below"),
}


def _base_shape(name: str, seq_length: int | None) -> tuple[ModelShape, list[str]]:
    """Return the shape and the lacks of the model that --model names.

    name: the value of --model, a preset or a file. seq_length: the value of --seq-length, if given.
    """
    from architecture import families
    from config import spelling

    if spelling.means_preset(name):
        return spelling.preset(name), spelling.LACKS[spelling.preset_name(name)]
    options, lacks = families.read(name, seq_length)
    return make_model(options, name), lacks


def make_model(values: dict[str, Any], where: str) -> ModelShape:
    """Return the model with these fields; UserError, which names `where`, if a field is wrong."""
    unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(ModelShape)})
    if unknown:
        raise ModelError(f"{where} has unknown fields of a model: {unknown!a:.80}")
    try:
        model = build(values).model
        check_shape(model)
    except UserError as error:
        raise ModelError(f"{where}: {' '.join(str(error).split()):.300}") from None
    return model


@dataclasses.dataclass(frozen=True)
class Request:
    """A configuration, and the names of the options that were given.

    given: option names such as `global_batch_size`, given by flag or by file; `model` for --model.
    notes: lines for the user, such as the meaning of Megatron-LM's names. model: the value of
    --model; None if it was not given. taken: what comes from the checkpoint of --resume.
    """

    config: Config
    given: frozenset[str]
    notes: tuple[str, ...] = ()
    model: str | None = None
    taken: Inherited = dataclasses.field(default_factory=Inherited)


def parse(arguments: list[str], description: str = "Train a GPT.") -> Config:
    """Return the configuration of `arguments` and of the --config file, not yet validated.

    Raises UserError on an unknown flag, key, preset or value; `--help` prints and exits 0.
    """
    return parse_request(arguments, description).config


def parse_request(
    arguments: list[str],
    description: str = "Train a GPT.",
    defaults: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda given: {},
    plans: bool = False,
    resumed: Callable[[Mapping[str, Any]], Inherited] = lambda given: Inherited(),
) -> Request:
    """Return the configuration of `arguments` and of the --config file, and what was given in it.

    A flag overrides the file. defaults: a function from the given options to the program's values
    for other options. plans: if True, a part of the --model that the engine cannot train makes a
    note, not a UserError. resumed: a function from the given options to what the run takes from the
    checkpoint of --resume. `--help` prints the options that people use first, `--help GROUP ...`
    the options of these groups, `--help all` every option; each of them ends the program.
    """
    if not {"-h", "--help"}.isdisjoint(arguments):
        _print_help(description, arguments[1:])
    parser = _parser(description)
    flags, unknown = parser.parse_known_args(arguments)
    translation: Translation | None = None  # the arguments in our names, if some are not ours
    if unknown or _has_other_values(vars(flags)):  # perhaps by Megatron-LM's names
        from config import spelling

        translation = spelling.translate(arguments)
        flags, unknown = parser.parse_known_args(translation.words)
        if unknown:
            names = [word for word in unknown if spelling.FLAG.match(word)]
            if not names:
                hint = "give it by --config" if unknown[0].endswith(".toml") else "an option has --"
                raise UserError(f"unknown argument {unknown[0]!r}: {hint}")
            raise UserError(_unknown("argument", names))
    by_flags = vars(flags)
    by_set = by_flags.pop("set", ())
    by_flags |= _set_keys(by_set, by_flags)
    file = by_flags.pop("config", None)
    by_file = _options_of_file(file) if file else {}
    for either in (BATCH_SIZES, LENGTHS):
        if either & by_flags.keys():  # a flag for one of the two overrides both in the file
            by_file = {name: value for name, value in by_file.items() if name not in either}
    given = by_file | by_flags
    given = {name: value for name, value in given.items() if (name, value) != AUTOMATIC}
    # A branch that was begun goes on, as by --resume auto.
    if "branch_from" in given and given.setdefault("resume", "auto") != "auto":
        both = f"--branch-from {given['branch_from']} and --resume {given['resume']}"
        raise UserError(f"give one of {both}")
    plan = _read_plan(given)
    taken = resumed(given) if "resume" in given else Inherited()
    base = taken.model if given.keys().isdisjoint(SHAPE) else None
    left = "" if taken.folder else _left_of_resumed(given)
    if base is None and not taken.folder:
        given = _with_resumed(given)  # with model and precision in its run.json
        if taken.problem and given.keys().isdisjoint({"model", *SHAPE}):
            raise UserError(taken.problem)  # that the model is not given follows from it
    if given.keys() >= BATCH_SIZES:
        raise UserError("give one of --global-batch-size and --batch-tokens; both were given")
    if "batch_tokens" in given:  # the model is built to know its seq_length
        tokens = given.pop("batch_tokens")
        check_option("batch_tokens", tokens)
        model = build(defaults(given) | given, [] if plans else None, base).model
        given["global_batch_size"] = samples_of(tokens, model.seq_length)
    if translation:
        finished = translation.finish({**taken.options, **given}, taken.past)
        given |= {n: v for n, v in finished.items() if v != taken.options.get(n)}
    lacks: list[str] = []
    values = {**defaults(given), **taken.options, **given}
    plan = plan or taken.plan
    if plan:
        plan, values = _with_plan(plan, values, given)
    values, notes_on_corpora = _with_vocabulary(values, taken)
    config = build(values, lacks if plans else None, base)
    config = dataclasses.replace(config, past=taken.past, plan=plan)
    if translation:  # a share of the run, whose length is known only now
        config, given = translation.with_warmup(config, given)
    config, notes_on_end = with_end_token(config)
    check_used(config, given)  # UserError if a given option has no effect
    if translation:
        translation.check_meaning(config.model, given)
    notes = translation.notes if translation else []
    notes += [f"planned, but not trained here: {part}" for part in lacks]
    notes += _note_on_model(given.get("model", ""))
    notes += [*notes_on_corpora, *notes_on_end]
    if unused := unused_rotary(config):
        positions = f"--positions {config.model.positions}"
        notes.append(f"{' '.join(unused)} of the model changes nothing with {positions}")
    notes += [note for note in (taken.note, left) if note]
    notes += run_lengths.notes(config, given)
    # Notes may have texts of a model's or a checkpoint's files.
    shown = tuple(map(printable, notes))
    return Request(config, frozenset(given), shown, given.get("model"), taken)


def _has_other_values(given: Mapping[str, Any]) -> bool:
    """Return whether an option has a value that is not among its choices.

    given: the values of flags by the option's name.
    """
    options = all_options()
    choices = {name: options[name].metadata["choices"] for name in given.keys() & options.keys()}
    return any(choices[name] and given[name] not in choices[name] for name in choices)


def _read_plan(given: Mapping[str, Any]) -> PhasePlan | None:
    """Return the plan in the file of --phases, or None; UserError if the file is wrong."""
    path = given.get("phases")
    if path is None:
        return None
    check_option("phases", path)
    return phases.from_table(read_toml(path, f"--phases {path}"), path)


def _with_plan(
    plan: PhasePlan, values: dict[str, Any], given: Mapping[str, Any]
) -> tuple[PhasePlan, dict[str, Any]]:
    """Return the plan and the options of a run with phases, where one says what the other does.

    The corpora of the first phase are those of --data, and so of the validation split, if --data is
    not given. An end of the run that is given replaces the one of an earlier start.
    """
    values = dict(values)
    first = plan.phases[0]
    if "data" not in values and first.data:
        values["data"] = first.data
    for name in ("rampup_batch_size", "batch_schedule"):
        if values.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} and --phases: give a phase for each size, global_batch_size")
    ends = [name for name in ("steps", "train_samples") if given.get(name) is not None]
    if plan.train_tokens is None or ("phases" not in given and ends):
        return dataclasses.replace(plan, train_tokens=None), values
    if ends:
        flag = f"--{ends[0].replace('_', '-')} {given[ends[0]]}"
        raise UserError(f"give one of {flag} and train_tokens({plan.train_tokens}) of --phases")
    return plan, {k: v for k, v in values.items() if k not in ("steps", "train_samples")}


def _with_vocabulary(values: dict[str, Any], taken: Inherited) -> tuple[dict[str, Any], list[str]]:
    """Return the options with the --vocab-size of the corpora if no option says it; and notes.

    A run that goes on keeps the vocabulary of its checkpoint. taken: what it takes from there.
    """
    if {"vocab_size", "model"} & values.keys():
        return values, []
    if taken.model is not None:
        return values | {"vocab_size": taken.model.vocab_size}, []
    data = values.get("data")
    if not data or not isinstance(data, list | tuple):
        return values, []
    found = vocabulary(prefixes_of(data))
    if found is None:
        return values, []
    size, path = found
    return values | {"vocab_size": size}, [f"vocab-size {size}, the tokens of {path}"]


def _set_keys(words: Collection[str], flags: Collection[str]) -> dict[str, Any]:
    """Return the values of --set KEY=VALUE ... by key, each a key of run files.

    flags: the names of options that have their own flag on the command line; a key may not be
    given a second time.
    """
    options = all_options()
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        name = key.replace("-", "_")
        if name not in {*options, "model"}:
            raise UserError(f"--set {word!a:.80}: {_unknown('key', [key])}")
        if not equals:
            raise UserError(f"--set takes KEY=VALUE such as norm_eps=1e-6, not {word!r}")
        if name in flags:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} and --set {word} are one option: give one")
        if name in values:
            raise UserError(f"--set gives {name} twice: {values[name]} and {text}")
        values[name] = _value_of(text, options[name]) if name in options else text
    return values


def _value_of(text: str, field: dataclasses.Field[Any]) -> Any:
    """Return the value that a text stands for, of the field's type; true and false as in TOML.

    Numbers may have units. A list is one of TOML, or words with blanks between them. A text that
    cannot be read is returned: `check_option` refuses it.
    """
    if field.metadata["nargs"]:
        with contextlib.suppress(ValueError):  # tomllib's error is one
            if text.startswith("["):
                return tuple(tomllib.loads(f"list = {text}")["list"])
        return tuple(_one_value(word, field.metadata["item"]) for word in text.split())
    return _one_value(text, field.type)


def _one_value(text: str, kind: Any) -> Any:
    """Return the value of this type that a text stands for, or the text if it cannot be read."""
    readers: dict[Any, Callable[[str], Any]] = {
        bool: lambda word: {"true": True, "false": False}.get(word, word),
        int: whole_number,
        float: number,
    }
    try:
        return readers.get(kind, str)(text)
    except ValueError:
        return text


def _print_help(description: str, groups: Collection[str]) -> NoReturn:
    """Print the help text of these groups, of all options or of those in FIRST; end the program."""
    if "all" in groups:
        text = _parser(description, lists_models=True).format_help()
    elif groups and GROUPS.keys() >= set(groups):
        text = _parser(description.partition("\n")[0], groups, lists_models=True).format_help()
    else:
        text = _parser(description, names=FIRST).format_help()  # no known group is named
    print(text, end="")
    raise SystemExit(0)


def _note_on_model(name: str) -> list[str]:
    """Return a note if --model is the name of a repository that stands for a preset, or a
    config.json with fields that nothing here reads.
    """
    if not name:
        return []
    from architecture import families
    from config import spelling

    if spelling.means_preset(name):
        preset = spelling.preset_name(name)
        return [f"--model {name} is the preset {preset}"] if "/" in name else []
    unread = families.unread_in(name)
    return [f"{name} has fields that change nothing here: {', '.join(unread)}"] if unread else []


def samples_of(tokens: int, length: int) -> int:
    """Return tokens / length, the samples of a batch; UserError unless `length` divides `tokens`.

    The error shows the nearest numbers that would do; for 4M also 4Mi, if that is whole samples.
    """
    samples, remainder = divmod(tokens, length)
    if not remainder:
        return samples
    near = " and ".join(f"{n} x {length} = {n * length}" for n in (samples, samples + 1) if n)
    text = f"--batch-tokens {tokens} is not a whole number of samples of seq-length({length})"
    text += f"; the nearest: {near}"
    for unit, ten, two in (("Mi", 10**6, 2**20), ("Ki", 10**3, 2**10)):
        binary, remainder = divmod(tokens * two, ten * length)  # samples, if 4M is meant as 4Mi
        if not remainder:
            text += f"; or {tokens / ten:g}{unit} = {binary} x {length}"
            break
    raise UserError(text)


def _left_of_resumed(given: Mapping[str, Any]) -> str:
    """Return a line on what a program leaves of the run that --resume names, if it has no past of
    it; "" if it names none.
    """
    if not isinstance(given.get("resume"), str):
        return ""
    from architecture import families

    folder = given.get("out", Run.out) if given["resume"] == "auto" else given["resume"]
    run_file = families.run_file_in(str(folder))
    saved = families.read_object(run_file).get("config") if run_file else None
    return left_out(saved, given, str(run_file)).note if isinstance(saved, dict) else ""


def _with_resumed(given: dict[str, Any]) -> dict[str, Any]:
    """Return the given options, with the model and precision of the run that --resume continues.

    A given shape or precision holds; with --load-weights-only only the model is that run's.
    """
    resume = given.get("resume")
    if not isinstance(resume, str):
        return dict(given)
    from architecture import families

    folder = str(given.get("out", Run.out)) if resume == "auto" else resume
    run_file = families.run_file_in(folder)
    if not run_file:
        return dict(given)
    resumed: dict[str, Any] = {}
    if given.keys().isdisjoint(SHAPE):
        resumed["model"] = run_file
    precision = families.precision_of_run(run_file)
    if precision and not given.get("load_weights_only"):
        resumed["precision"] = precision
    return resumed | given


def _unknown(what: str, names: list[str]) -> str:
    """Return the error text for unknown names, with suggestions. what: "argument" or "key".

    An option of an earlier version is answered with where it went.
    """
    from config import spelling

    for name in names:
        if sentence := _without_flag(name) or spelling.where_it_went(name):
            return sentence
    dashes = "--" if what == "argument" else ""
    options = {name: dashes + name for name in ("config", "model")}
    for name, field in all_options().items():
        plain = name.replace("_", "-")
        is_set = dashes and field.metadata["file_only"]
        options[plain] = f"--set {name}=VALUE" if is_set else dashes + plain
    if len(names) == 1:
        return f"unknown {what} {names[0]!r}{spelling.suggestion(names[0], options)}"
    texts = []
    for name in names:
        hint = spelling.suggestion(name, options).removeprefix("; ")
        texts.append(f"{name} ({hint})" if hint else name)
    return f"unknown {what}s: {', '.join(texts)}"


def _without_flag(word: str) -> str:
    """Return where to give an option that has no flag, if `word` is such a flag; else ""."""
    flag, _, value = word.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    is_off = name.startswith("no_")
    field = all_options().get(name.removeprefix("no_"))
    if not word.startswith("--") or field is None or not field.metadata["file_only"]:
        return ""
    if field.type is bool:
        value = "false" if is_off else "true"
    kind: Any = field.type
    value = value or kind.__name__.upper()
    in_toml = f'"{value}"' if kind is str else value
    group = next(g for g, cls in GROUPS.items() if field in dataclasses.fields(cls))
    return (
        f"{flag} is a key of [{group}] in a run file: write {field.name} = {in_toml} into the file "
        f"of --config, or give --set {field.name}={value}"
    )


def to_words(
    group: Any,
    without: str = "",
    always: Collection[str] = (),
    only: Collection[str] | None = None,
) -> list[str]:
    """Return the command-line flags with the values of `group`, an instance of a class in GROUPS.

    Options at their defaults, also those that follow from others, and `without` are left out.
    always: options that are written even at their defaults. only: if given, no options but these
    are written.
    """
    words: list[str] = []
    keys: list[str] = []  # KEY=VALUE of the options that have no flag
    follows: dict[str, Any] = {}
    if isinstance(group, ModelShape):
        follows = group.derived() | {"max_positions": group.seq_length}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        name = field.name.replace("_", "-")
        if value is None or field.name == without or (only is not None and field.name not in only):
            continue
        if value == follows.get(field.name, field.default) and field.name not in always:
            continue
        if field.name == "expert_ffn_hidden" and group.experts == 1:  # no effect without experts
            continue
        if field.metadata["file_only"]:
            keys.append(f"{field.name}={_as_in_toml(value)}")
        elif isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words + ["--set", *keys] * bool(keys)


def build(
    values: dict[str, Any], lacks: list[str] | None = None, base: ModelShape | None = None
) -> Config:
    """Return a Config of the options `values`, by name; other options have their defaults.

    The option `model` is a preset or a file, whose shape the other options of the model change.
    lacks: a list that receives sentences about parts of the preset's or file's model which the
    engine cannot train; if the list is None, such a part is a UserError. base: the model whose
    shape the options change if `values` has no `model`; None: there is none.
    """
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    for name, value in values.items():
        check_option(name, value)
    groups: dict[str, Any] = {}
    if "model" in values:
        base, untrained = _base_shape(values["model"], values.get("seq_length"))
        if lacks is not None:
            lacks += untrained
        elif untrained:
            raise ModelError(f"--model {values['model']}: {'; '.join(untrained)}")
    for group, cls in GROUPS.items():
        options = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        groups[group] = reshape(base, options) if group == "model" and base else cls(**options)
    return Config(**groups)


def reshape(base: ModelShape, own: dict[str, Any]) -> ModelShape:
    """Return `base`, the model that --model names, with the fields that other options set (`own`).

    A field at its derived default is derived again: with more `hidden`, GPT-2's ffn_hidden grows.
    A model without biases stays without them, also if it loses its experts.
    """
    defaults = base.derived()
    if not base.bias:
        del defaults["bias"]
    if own.get("positions", base.positions) != "learned":  # no parameter has their number
        defaults["max_positions"] = base.seq_length
    derived = {name: None for name, value in defaults.items() if getattr(base, name) == value}
    return dataclasses.replace(base, **(derived | own))


def options_help(*groups: str) -> str:
    """Return the help text of the options in `groups`, keys of GROUPS; for plan.py's help."""
    text = _parser("", groups, lists_models=True).format_help()
    return text[text.index("  --config") :]  # options only: cut off usage and description


def _parser(
    description: str,
    groups: Collection[str] = tuple(GROUPS),
    names: Collection[str] | None = None,
    lists_models: bool = False,
) -> argparse.ArgumentParser:
    """Return the parser of the options in `groups`, all of them or those in `names`.

    description: the first text of --help. lists_models: whether the help text lists the presets.
    """
    usage = "%(prog)s [--config FILE] [--OPTION VALUE ...]"
    form = RawDescriptionHelpFormatter
    parser = Parser(description=description, usage=usage, formatter_class=form, allow_abbrev=False)
    parser.epilog = "Numbers may have a unit: 350B, 2k (2000), 2Ki (2048). Names of Megatron-LM's"
    parser.epilog += " options are understood. --help GROUP lists the options of a group: "
    parser.epilog += f"{', '.join(GROUPS)}. --help all lists every option."
    absent: dict[str, Any] = {"default": argparse.SUPPRESS}  # an option not given has no attribute
    parser.add_argument("--config", metavar="FILE", help="TOML file of these options", **absent)
    for group, cls in GROUPS.items():
        if group not in groups:
            continue
        section = parser.add_argument_group(group, (cls.__doc__ or "").splitlines()[0])
        if group == "model":
            text = "a preset (--help model lists them), a config.json, a run or a checkpoint"
            if lists_models:
                from config import spelling  # imported here: few command lines need this module

                text = spelling.listed()
            section.add_argument("--model", metavar="PRESET|PATH", help=text, **absent)
        fields = [f for f in dataclasses.fields(cls) if names is None or f.name in names]
        for f in fields:
            if not f.metadata["file_only"]:
                _add_flag(section, f)
    if names is None:
        text = _keys_help(groups) if lists_models else ""
        section = parser.add_argument_group("keys of a run file that have no flag", text)
        text = "any option, by its key in a run file, such as norm_eps=1e-6"
        section.add_argument(
            "--set", nargs="+", action="extend", metavar="KEY=VALUE", help=text, **absent
        )
    return parser


def _keys_help(groups: Collection[str]) -> str:
    """Return the lines of help of the options without a flag in `groups`, keys of GROUPS."""
    lines = []
    for group, cls in GROUPS.items():
        fields = [f for f in dataclasses.fields(cls) if f.metadata["file_only"]]
        if not fields or group not in groups:
            continue
        lines.append(f"[{group}]")
        for f in fields:
            kind: Any = f.type
            values = "|".join(map(str, f.metadata["choices"])) or kind.__name__.upper()
            lines.append(f"{f.name}={values}")
            default = "" if f.default is None else f" (default: {_as_in_toml(f.default)})"
            indent = " " * 4
            lines.append(
                textwrap.fill(
                    f.metadata["help"] + default,
                    76,
                    initial_indent=indent,
                    subsequent_indent=indent,
                )
            )
    return "\n".join(lines)


def _as_in_toml(value: Any) -> Any:
    """Return a value as a run file and --set have it: true and false for a bool."""
    return str(value).lower() if isinstance(value, bool) else value


def add_options(parser: argparse.ArgumentParser, names: Collection[str], title: str) -> None:
    """Add the flags of some options to the parser of another program; an option not given is absent
    in its result. title: of the group in the help text.
    """
    section = parser.add_argument_group(title)
    for name in names:
        _add_flag(section, all_options()[name])


def _add_flag(section: Any, f: dataclasses.Field[Any]) -> None:
    """Add the flag of the option with field `f` to `section`; for a bool also --no-OPTION."""
    meta = f.metadata
    name = "--" + f.name.replace("_", "-")
    kind: Any = meta["item"] if meta["nargs"] else f.type
    default = " ".join(f.default) if isinstance(f.default, tuple) else f.default
    text = meta["help"] + ("" if f.default in (None, ()) else f" (default: {default})")
    keywords = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if kind is bool:
        section.add_argument(name, action=argparse.BooleanOptionalAction, **keywords)
        return
    metavar = "|".join(map(str, meta["choices"])) or kind.__name__.upper()
    section.add_argument(name, type=kind, nargs=meta["nargs"], metavar=metavar, **keywords)


def read_toml(path: str | Path, name: str) -> dict[str, Any]:
    """Return the contents of a TOML file, which messages call `name`; UserError if not TOML."""
    try:
        with open_regular(path) as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise UserError(f"{name} is not TOML: it has more than {MOST_BYTES:,} bytes")
        return tomllib.loads(text.decode())
    except OSError as error:
        raise FileError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise UserError(f"{name} is not TOML: line {line} is not UTF-8") from None
    except (ValueError, RecursionError) as error:  # not TOML, or far too many digits or brackets
        raise UserError(f"{name} is not TOML: {error}") from None


def _options_of_file(path: str) -> dict[str, Any]:
    """Return the values of a TOML file by option name; its tables only group keys for readers."""
    entries = []  # each entry is (where the key stands, key, value)
    for key, value in read_toml(path, f"--config {path}").items():
        if not isinstance(value, dict):
            entries.append(("at the top", key, value))
        elif key in GROUPS:
            entries += [(f"in [{key}]", *item) for item in value.items()]
        else:
            names = ", ".join(f"[{name}]" for name in GROUPS)
            raise UserError(f"--config {path} has an unknown table [{key}]: there are {names}")
    from config import spelling

    known = {*all_options(), "model"}
    unknown = [key for _, key, _ in entries if spelling.present_name(key) not in known]
    if unknown:
        article = "an " if len(unknown) == 1 else ""
        raise UserError(f"--config {path} has {article}{_unknown('key', unknown)}")
    options: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place, key, value in entries:
        name = spelling.present_name(key)
        if name in options:  # in two tables, once with "-" and once with "_", or by an earlier name
            where = f"{places[name]} and {place}"
            raise UserError(f"--config {path} gives {key!r} twice: {where}")
        places[name] = place
        options[name] = tuple(value) if isinstance(value, list) else value
        try:
            check_option(name, options[name])
        except UserError as error:
            raise UserError(f"--config {path}: {error}") from None
    return options


def check_option(name: str, value: Any) -> None:
    """Raise UserError if an option's value has a wrong type or is outside the option's limits."""
    if name == "model":
        return _checked("--model", str, value)
    field = all_options()[name]
    flag = as_typed(field)
    meta = field.metadata
    if meta["nargs"]:
        return _check_list(flag, meta, value)
    _checked(flag, field.type, value)
    if meta["choices"] and value not in meta["choices"]:
        choices = ", ".join(map(str, meta["choices"]))
        near = nearest(str(value).lower(), [str(choice) for choice in meta["choices"]])
        raise UserError(f"{flag} is one of {choices}, not {value!r}{near}")
    for limit, (is_within, words) in LIMITS.items():
        if meta[limit] is not None and not is_within(value, meta[limit]):
            raise UserError(f"{flag} must be {words} {meta[limit]}, not {value}")


def _check_list(flag: str, meta: Mapping[str, Any], value: Any) -> None:
    """Raise UserError unless the value is a tuple of items as the field's metadata `meta` asks."""
    if not isinstance(value, tuple) or not value or meta["nargs"] not in ("+", len(value)):
        shown = repr(list(value)) if isinstance(value, tuple) else repr(value)
        count = "one or more" if meta["nargs"] == "+" else meta["nargs"]
        raise UserError(f"{flag} takes a list of {count} values, not {shown}")
    for item in value:
        # The weights of --data are texts on the command line, but may be numbers in TOML.
        is_weight = flag == "--data" and isinstance(item, (int, float))
        _checked(flag, float if is_weight else meta["item"], item)


def _checked(flag: str, kind: Any, value: Any) -> None:
    """Raise UserError unless the value is of type `kind`, and a finite number or printable text."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UserError(f"{flag} must be below 2^63, not a number of {value.bit_length()} bits")
    accepted: Any = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{flag} takes {KINDS[kind]}, not {value!r}")
    if isinstance(value, str):
        check_decoded(flag, value)
    if isinstance(value, str) and not TEXT.fullmatch(value):
        raise UserError(f"{flag} is empty or has control characters: {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{flag} must be a finite number, not {value}")
