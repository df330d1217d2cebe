"""Layouts that cover every pair of axes and options that a run could take on a few ranks.

    chosen = cover(config, ranks=4)                  a list of Layouts, the simplest first
    layout = read("tp 2 pp 2 zero 2", config)        one, as a user writes it
    few = some(config, 4, 2, "1/17")                 random ones
    layout = with_options(config, {"tp": 2})         one, the other options plain; None if refused

An option counts in a layout only if it does something there: sequence parallelism with tp above 1,
ZeRO with replicas. Pairs are covered greedily (D. M. Cohen et al., "The AETG system", 1997), by the
layout that adds most pairs for its time. What goes together is not written here: validation.check
refuses the rest.
"""

import dataclasses
import math
import random
import shlex
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

from base.errors import LayoutError, UserError
from config import command_line, validation
from config.examples import examples
from config.schema import SCHEDULES, Config, Layout
from tools.checker.programs import ProgramLayout

AXES = ("tp", "pp", "cp", "dp")
# Values of each option beside its plain one, which is first.
VALUES: dict[str, tuple[Any, ...]] = {
    "ep": (1, 2, 3, 4),
    "zero": (1, 0, 2, 3),
    "schedule": ("1f1b", *(name for name in SCHEDULES if name not in ("1f1b", "auto"))),
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "full"),
    "recompute_layers": (None, 1),
    "micro_batch_size": (2, 1, 3),  # 2 takes half the passes of 1
    "overlap_param_gather": (False, True),
    "sync_each_batch": (True, False),
    "reshard_after_forward": (True, False),
    "partition": ("balanced", "blocks"),
    "pad_vocab_multiple": (1, 4),
}
# Not varied: what follows from the others, and lists with a number for each stage.
NOT_VARIED = ("virtual_stages", "recompute_blocks", *AXES)
# An option that is new has the values that its declaration says.
VALUES |= {
    field.name: (field.default, *examples(field)[:2])
    for field in dataclasses.fields(Layout)
    if field.name not in (*VALUES, *NOT_VARIED)
}
POOL = 2000  # random layouts from which the cover is taken
DRAWS = 1200  # of them at a time; if these have few new ones, there are no more
TRIES = 12  # for a pair that is in none of them
TRIES_ALONE = 60  # and then among layouts that have little else
NEEDED = ("recompute", "zero", "schedule")
LARGEST = 4  # ranks of an axis: three have a middle rank, and four are two times two
Setting = tuple[str, Any]
AnyLayout = Layout | ProgramLayout


def ranks_of(layout: AnyLayout) -> int:
    """Return the number of ranks of a layout, whose dp is filled in."""
    if isinstance(layout, ProgramLayout):
        return layout.ranks
    return layout.tp * layout.pp * layout.cp * (layout.dp or 1)


def axes_of(layout: AnyLayout) -> dict[str, int]:
    """Return the sizes of a layout's axes that are above 1."""
    if isinstance(layout, ProgramLayout):
        return layout.axes
    sizes = {axis: getattr(layout, axis) or 1 for axis in ("tp", "cp", "dp", "pp", "ep")}
    return {axis: size for axis, size in sizes.items() if size > 1}


def name_of(layout: AnyLayout) -> str:
    """Return a layout as a user writes it: its axes above 1 and the options that are not plain."""
    if isinstance(layout, ProgramLayout):
        return layout.name
    words = []
    for name in (*AXES, *VALUES, "virtual_stages"):
        value = getattr(layout, name)
        plain = 1 if name in AXES else VALUES.get(name, (None,))[0]
        if value is None or value == plain:
            continue
        words.append(_setting(name, value))
    return " ".join(words) or "one rank"


def _setting(name: str, value: Any) -> str:
    """Return an option of a layout as a user writes it."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return flag if value else f"no-{flag}"
    return f"{flag} {value}"


def read(text: str, config: Config) -> Layout:
    """Return the layout that a user has written, such as "tp 2 pp 2 zero 2"; UserError if wrong.

    Flags of train.py's layout are read too. config: the run, with which the layout must go.
    """
    words = []
    known = {field.name.replace("_", "-"): field for field in dataclasses.fields(Layout)}
    written = iter(shlex.split(text))
    for word in written:
        plain, _, value = word.removeprefix("--").partition("=")
        field = known.get(plain.removeprefix("no-"))
        if field is None:
            words.append(word)
        elif not field.metadata["file_only"]:
            words.append(f"--{word.removeprefix('--')}")
        elif field.type is bool:
            words += ["--set", f"{field.name}={str(not plain.startswith('no-')).lower()}"]
        else:
            words += ["--set", f"{field.name}={value or next(written, '')}"]
    any_model = ["--layers", "1", "--hidden", "1", "--heads", "1"]  # a command line has a model
    request = command_line.parse_request([*any_model, *words])
    given = request.config.layout
    others = request.given - {field.name for field in dataclasses.fields(Layout)}
    flags = {word.lstrip("-").partition("=")[0] for word in words if word.startswith("--")}
    others -= {"layers", "hidden", "heads"} - flags  # a value of an option may be "heads"
    if others:
        names = ", ".join(sorted(name.replace("_", "-") for name in others))
        raise UserError(f"--layout {text!r} has options that are not of a layout: {names}")
    size = given.micro_batch_size
    if "micro_batch_size" not in request.given:
        divides = config.training.global_batch_size % (2 * (given.dp or 1)) == 0
        size = 2 if divides and not config.training.rampup_batch_size else 1
    layout = dataclasses.replace(
        given,
        micro_batch_size=size,
        dp=given.dp or 1,
        sequence_parallel=bool(given.sequence_parallel),
        overlap_param_gather=bool(given.overlap_param_gather),
        pad_vocab_multiple=given.pad_vocab_multiple if "pad_vocab_multiple" in request.given else 1,
    )
    try:
        validation.check(dataclasses.replace(config, layout=layout), ranks_of(layout))
    except UserError as error:
        raise LayoutError(f"--layout {text!r}, with the sizes of the check: {error}") from None
    return layout


def cover(config: Config, ranks: int, count: int | None = None) -> list[Layout]:
    """Return layouts of 2 to `ranks` ranks: each axis by itself, then those that cover all pairs.

    config: the run, small. count: so many layouts; None: as many as the pairs need.
    """
    chance, second_chance = random.Random(0), random.Random(1)
    known: Known = {}
    singles = _singles(config, ranks)
    pool = {name_of(layout): layout for layout in singles}
    while len(pool) < POOL:
        before = len(pool)
        for _ in range(DRAWS):
            layout = _drawn(config, ranks, chance, {}, known=known)
            if layout is not None:
                pool.setdefault(name_of(layout), layout)
        if len(pool) - before < DRAWS // 20:
            break
    pairs_of = {name: _pairs(layout) for name, layout in pool.items()}
    wanted = set().union(*pairs_of.values())
    for pair in sorted(_possible(config, ranks) - wanted, key=str):
        for number in range(TRIES + TRIES_ALONE):
            of_draw, alone = (chance, False) if number < TRIES else (second_chance, True)
            layout = _drawn(config, ranks, of_draw, dict(pair), alone, known)
            if layout is not None and pair in _pairs(layout):
                pool[name_of(layout)] = layout
                pairs_of[name_of(layout)] = _pairs(layout)
                break
    wanted = set().union(*pairs_of.values())
    chosen = [name_of(layout) for layout in singles]
    for name in chosen:
        wanted -= pairs_of[name]
    cost_of = {name: _cost(layout, config) for name, layout in pool.items()}

    def gain(name: str) -> tuple[float, int, str]:
        """Return a sort key: new pairs for a second of a layout; of equal ones the shortest."""
        return len(pairs_of[name] & wanted) / cost_of[name], -len(name), name

    while wanted and (count is None or len(chosen) < count):
        best = max(pairs_of, key=gain)
        chosen.append(best)
        wanted -= pairs_of[best]
    names = [name for name in pool if name not in set(chosen)]
    if count is not None:
        chosen += chance.sample(names, min(len(names), max(0, count - len(chosen))))
        chosen = chosen[:count]
    return [pool[name] for name in chosen]


def _cost(layout: Layout, config: Config) -> float:
    """Return about how long a layout's ranks compute, in hundredths of a second on a CPU core.

    A rank has work that each layout has, such as building the model and comparing its tensors, and
    as much for each pass of a micro-batch as its collectives need. Fitted to 80 layouts.
    """
    passes = config.training.global_batch_size / ((layout.dp or 1) * layout.micro_batch_size)
    of_pass = 1 + (layout.tp > 1) + (layout.cp > 1) + 2 * (layout.zero == 3)
    return ranks_of(layout) * (10 + passes * of_pass)


# What an option needs to do anything.
COMPANIONS: dict[str, dict[str, Any]] = {
    "zero": {"dp": 2},
    "ep": {"dp": 2},
    "overlap_param_gather": {"dp": 2},
    "schedule": {"pp": 2},
    "virtual_stages": {"pp": 2, "schedule": "interleaved"},
    "partition": {"pp": 2},
    "sequence_parallel": {"tp": 2},
}


def with_given(
    config: Config, ranks: int, chosen: Sequence[Layout], given: dict[str, Any]
) -> tuple[list[Layout], list[str]]:
    """Return as many layouts, in at least half of which each given option is, and lines on it.

    given: options of a layout by name. A number that does not fit the small run, such as tp 8,
    becomes one that does; an option that no layout of the small run can have is named in a line.
    Layouts give way from the end, and those with another value of the option after all others.
    """
    layouts, lines = list(chosen), []
    wanted: dict[str, Any] = {}
    for name, value in given.items():
        together = _fitting(config, ranks, name, value, wanted)
        fitting = _fitting(config, ranks, name, value, {}) if together is None else together
        if fitting is not None:
            wanted[name] = fitting
    alone = [_with(config, {}, {name: value}) for name, value in wanted.items()]
    known = set(map(name_of, layouts))
    new = [x for x in alone if x is not None and name_of(x) not in known and ranks_of(x) <= ranks]
    layouts = [*new, *layouts][: len(layouts)]
    for name in wanted:
        for place in sorted(range(len(layouts)), key=lambda n: _is_other(layouts[n], name, n)):
            has = [layout for layout in layouts if getattr(layout, name) == wanted[name]]
            if 2 * len(has) >= len(layouts):
                break
            if layouts[place] not in has:
                layouts[place] = _changed(config, ranks, layouts, place, name, wanted)
    for name, value in wanted.items():
        has = [layout for layout in layouts if getattr(layout, name) == value]
        is_said = "" if value == given[name] else f" for {name.replace('_', '-')} {given[name]}"
        lines.append(f"{len(has)} of {len(layouts)} have {_setting(name, value)}{is_said}")
    if none := [name.replace("_", "-") for name in given if name not in wanted]:
        lines.append(f"without {', '.join(f'--{name}' for name in none)}: no layout can have it")
    return _in_turn(layouts, wanted), lines


def _fitting(config: Config, ranks: int, name: str, value: Any, others: dict[str, Any]) -> Any:
    """Return a value of an option that the small run can have beside others.

    It is the given one, or a smaller number; None: there is none.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and name != "zero"
    smaller = [n for n in (2, 3, 4) if is_number and 1 < n < value]
    for tried in (value, *smaller):
        layout = _with(config, {}, others | {name: tried})
        if layout is not None and ranks_of(layout) <= ranks:
            return tried
    return None


def _with(config: Config, options: dict[str, Any], wanted: dict[str, Any]) -> Layout | None:
    """Return a layout of options with the wanted ones and what they need; None if there is none."""
    options = options | wanted
    for name, value in wanted.items():
        for needed, least in COMPANIONS.get(name, {}).items():
            least = value if name == "ep" else least
            is_number = isinstance(least, int)
            options[needed] = max(options.get(needed, 1), least) if is_number else least
    if not all(options.get(name, True) for name in ("sync_each_batch", "reshard_after_forward")):
        options |= {"zero": 3, "dp": max(options.get("dp", 1), 2)}
    if "recompute_layers" in wanted and options.get("recompute", "none") == "none":
        options["recompute"] = "full"
    made = with_options(config, options)
    is_made = made is not None and all(getattr(made, n) == v for n, v in wanted.items())
    return made if is_made else None


def _is_other(layout: Layout, name: str, place: int) -> tuple[bool, int]:
    """Return a sort key of the layouts that give way: the last first, other values at the end."""
    value = getattr(layout, name)
    plain = 1 if name in AXES else VALUES.get(name, (None,))[0]
    return value not in (None, plain), -place


def _changed(
    config: Config,
    ranks: int,
    layouts: Sequence[Layout],
    place: int,
    name: str,
    wanted: dict[str, Any],
) -> Layout:
    """Return the layout at a place with an option, or else a random one that has it.

    The other wanted options that the layout has stay. If there is no new one, it is as it was.
    """
    known, layout = set(map(name_of, layouts)), layouts[place]
    options = {each: getattr(layout, each) for each in (*AXES, *VALUES)}
    changed = _with(config, options, {name: wanted[name]})
    if changed is None or ranks_of(changed) > ranks or name_of(changed) in known:
        held = {other for other, value in wanted.items() if getattr(layout, other) == value}
        fixed = {other: wanted[other] for other in (name, *held)}
        chance = random.Random(place)
        tries = (_drawn(config, ranks, chance, fixed) for _ in range(TRIES_ALONE))
        fit = (x for x in tries if x and all(getattr(x, o) == v for o, v in fixed.items()))
        changed = next((x for x in fit if name_of(x) not in known), None)
    return changed or layout


def _in_turn(layouts: Sequence[Layout], wanted: dict[str, Any]) -> list[Layout]:
    """Return the layouts in their order, those with a wanted option and those without in turn."""
    having: list[Layout] = []
    others: list[Layout] = []
    for layout in layouts:
        has = any(getattr(layout, name) == value for name, value in wanted.items())
        (having if has else others).append(layout)
    having.sort(key=lambda layout: (ranks_of(layout), len(name_of(layout))))
    pairs = [pair for both in zip(having, others) for pair in both]
    shorter = min(len(having), len(others))
    return [*pairs, *having[shorter:], *others[shorter:]]


def some(config: Config, ranks: int, count: int, name: str) -> list[Layout]:
    """Return random layouts of 2 to `ranks` ranks, the same for the same name; perhaps fewer."""
    chance = random.Random(name)
    found: dict[str, Layout] = {}
    for _ in range(TRIES * TRIES * count):
        layout = _drawn(config, ranks, chance, {})
        if layout is not None and ranks_of(layout) > 1:
            found.setdefault(name_of(layout), layout)
        if len(found) == count:
            break
    return list(found.values())


def _singles(config: Config, ranks: int) -> list[Layout]:
    """Return the layouts of one axis of two ranks, and the plain options on one rank."""
    found: list[dict[str, Any]] = [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}]
    found += [{"cp": 2}, {"dp": 2, "zero": 0}, {"dp": 2}, {"dp": 2, "zero": 2}]
    found += [{"dp": 2, "zero": 3}, {"dp": 2, "ep": 2}, {"micro_batch_size": 3}]
    found += [{"recompute": "full"}, {"tp": 2, "cp": 2}, {"pp": 2, "schedule": "zb-h1"}]
    layouts = [with_options(config, options) for options in found]
    seen: dict[str, Layout] = {}
    for layout in layouts:
        if layout is not None and ranks_of(layout) <= ranks:
            seen.setdefault(name_of(layout), layout)
    return list(seen.values())


# Of a run: the layout, or None, by the options that a caller has asked for before.
Known = dict[frozenset[tuple[str, Any]], Layout | None]


def with_options(
    config: Config, options: dict[str, Any], known: Known | None = None
) -> Layout | None:
    """Return the layout with these options, the others plain; None if a run cannot have it.

    Where micro-batches of the plain size do not divide the batch, they have one sample. known: of
    the same config, filled here: four of five draws have been drawn before.
    """
    if "micro_batch_size" not in options:
        plain = VALUES["micro_batch_size"][0]
        layout = with_options(config, options | {"micro_batch_size": plain}, known)
        return layout or with_options(config, options | {"micro_batch_size": 1}, known)
    values = {name: of[0] for name, of in VALUES.items()} | dict.fromkeys(AXES, 1) | options
    tp, replicas = values["tp"], values["dp"] * values["cp"]
    if config.model.experts == 1:
        values["ep"] = None
    if tp == 1:
        values["sequence_parallel"] = False
    if replicas == 1:
        values |= {"zero": 1, "overlap_param_gather": False}
    if values["zero"] != 3:
        values |= {"sync_each_batch": True, "reshard_after_forward": True}
    if values["recompute"] == "none":
        values["recompute_layers"] = None
    if values["pp"] == 1:
        values |= {"schedule": "1f1b", "partition": "balanced"}
    known = {} if known is None else known
    asked = frozenset(values.items())
    if asked not in known:
        known[asked] = _valid(config, _with_effect(config, Layout(**values)))
    return known[asked]


def _valid(config: Config, layout: Layout) -> Layout | None:
    """Return a layout, or None if a run cannot have it."""
    try:
        validation.check(dataclasses.replace(config, layout=layout), ranks_of(layout))
    except UserError:
        return None
    return layout


def _with_effect(config: Config, layout: Layout) -> Layout:
    """Return a layout in which options are plain that lack what their declaration needs."""
    whole = dataclasses.replace(config, layout=layout)
    plain = {}
    for field in dataclasses.fields(Layout):
        needs = field.metadata["needs"]
        given = field.name in VALUES and getattr(layout, field.name) != VALUES[field.name][0]
        if given and needs is not None and not validation.is_met(whole, needs):
            plain[field.name] = VALUES[field.name][0]
    if not any(map(config.model.has_mixer, range(config.model.layers))):
        plain["cp_mixer"] = VALUES["cp_mixer"][0]
    return dataclasses.replace(layout, **plain)


def _drawn(
    config: Config,
    ranks: int,
    chance: random.Random,
    fixed: dict[str, Any],
    alone: bool = False,
    known: Known | None = None,
) -> Layout | None:
    """Return a random layout with the `fixed` options, or None if the run cannot have it.

    alone: other options are plain, but for those without which others do nothing (NEEDED). known:
    see with_options.
    """
    axes = {axis: fixed.get(axis, 0) for axis in AXES}
    free = [axis for axis in AXES if not axes[axis]]
    chance.shuffle(free)
    for axis in free:
        most = ranks // math.prod(size or 1 for size in axes.values())
        axes[axis] = chance.choice(range(1, max(1, most) + 1))
    if math.prod(axes.values()) > ranks:
        return None
    options: dict[str, Any] = dict(axes)
    for name, values in VALUES.items():
        # A plain option is more likely than another one: with all at once few layouts are valid.
        plain, *others = values
        is_plain = alone and name not in NEEDED
        options[name] = plain if is_plain else chance.choice([plain, chance.choice(others)])
    return with_options(config, options | fixed, known)


def _settings(layout: Layout) -> list[Setting]:
    """Return the settings of a layout that do something: axes above 1, options not plain."""
    found: list[Setting] = []
    for name in AXES:
        if getattr(layout, name) > 1:
            found.append((name, getattr(layout, name)))
    for name, values in VALUES.items():
        value = getattr(layout, name)
        if value is not None and value != values[0]:
            found.append((name, value))
    return found


def _pairs(layout: Layout) -> set[tuple[Setting, Setting]]:
    """Return the pairs of settings of a layout; a setting by itself is a pair with itself."""
    settings = _settings(layout)
    return set(combinations(settings, 2)) | {(setting, setting) for setting in settings}


def _possible(config: Config, ranks: int) -> set[tuple[Setting, Setting]]:
    """Return the pairs of settings of different options, whether a run can have them or not."""
    settings: list[Setting] = [(axis, n) for axis in AXES for n in range(2, ranks + 1)]
    for name, values in VALUES.items():
        if name != "ep" or config.model.experts > 1:
            settings += [(name, value) for value in values[1:]]
    return {(a, b) for a, b in combinations(settings, 2) if a[0] != b[0]}


def to_resume(config: Config, ranks: int) -> tuple[Layout, list[Layout]] | None:
    """Return a layout that saves a run, and others that go on with it; None if there is none.

    The first shards the optimizer's state over replicas and cuts tensors, and writes those that
    several ranks have in parts. The others, as few as possible, load that state in all ways that
    the run could have on so many ranks: cut by tp, in stages, by experts, and in sections of ZeRO.
    """
    saves: list[dict[str, Any]] = [{"tp": 2, "dp": 2, "zero": 1}, {"dp": 2, "zero": 1}]
    saves += [{"tp": 2}, {"pp": 2}, {"cp": 2}]
    loads: list[dict[str, Any]] = [
        {"pp": 2, "dp": 2, "zero": 2},
        {"cp": 2, "dp": 2, "zero": 3},
        {"tp": 2, "dp": 2, "ep": 2, "zero": 1},
        {"tp": 2, "pp": 2},
        {"cp": 2, "dp": 2, "ep": 4, "zero": 2},
        {"pp": 2},
        {"cp": 2},
        {"tp": 2},
        {"dp": 2, "ep": 2, "zero": 2},
    ]

    def possible(wanted: list[dict[str, Any]]) -> list[Layout]:
        """Return the layouts of these that the run can have on so many ranks."""
        made = [with_options(config, options) for options in wanted]
        return [layout for layout in made if layout is not None and ranks_of(layout) <= ranks]

    going_on: list[Layout] = []
    covered: set[str] = set()
    for layout in possible(loads):
        loaded_by = {name for name, _ in _settings(layout) if name in (*AXES, "ep", "zero")}
        if not loaded_by <= covered:
            going_on.append(layout)
            covered |= loaded_by
    saved_by = possible(saves)
    return (saved_by[0], going_on) if saved_by and going_on else None


def not_covered(chosen: Sequence[Layout], ranks: int) -> str:
    """Return what layouts of up to so many ranks leave out, as a sentence.

    chosen: all layouts that are to run. Their pairs of axes have no more than `ranks` ranks; which
    of these pairs, and which sizes of an axis, the sizes of the run refuse is named.
    """
    met = set().union(*(_pairs(layout) for layout in chosen))
    axes = [(axis, size) for axis in AXES for size in range(2, min(ranks, LARGEST) + 1)]
    refused = [_in_words(axis) for axis in axes if (axis, axis) not in met]
    for one, other in combinations(axes, 2):
        fits = one[0] != other[0] and one[1] * other[1] <= ranks
        if fits and (one, other) not in met and {(one, one), (other, other)} <= met:
            refused.append(f"{_in_words(one)} with {_in_words(other)}")
    of_axis = range(2, max(2, ranks) + 1)
    larger = min(a * b for a, b in product(of_axis, of_axis) if a * b > ranks)
    small = max(n for n in range(2, larger) if larger % n == 0 and n * n <= larger)
    text = f"two axes of more ranks together, such as tp {larger // small} with cp {small}"
    if ranks < 2**3:
        text += ", or three axes above 1"
    if refused:
        text += f"; {', '.join(refused)} (the run's sizes refuse that)"
    return f"not covered with {ranks} rank{'s' * (ranks > 1)}: {text}"


def _in_words(setting: Setting) -> str:
    """Return a setting as a user writes it, such as "tp 3"."""
    return f"{setting[0]} {setting[1]}"
