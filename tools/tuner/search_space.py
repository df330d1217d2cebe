"""The layouts that a search chooses from, as configurations of train.py, and the rejected layouts.

    space = candidates(config, machine, ranks=384, given={"zero": [1]}, accepted=0.05, most=200)
    to_cli_args(space.found[0].config)        # what to type after train.py

The layouts come from the planner's table of all layouts (tools/planner/enumeration.py). All values
of an option of AXES are tried, unless the user gives values; `--schedule auto` is tried only if the
user gives it. A candidate is a layout that can run, with the other options of the run. Layouts that
run the same program (two schedules without a pipeline, two partitions with equal stages) are listed
once.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from architecture.shape import ModelShape
from base.errors import UserError
from config.command_line import check_option, parse_request, reshape, to_words
from config.run_options import Run
from config.schema import GROUPS, Config, Layout, all_options
from config.validation import refusal
from costs.hardware import Machine
from costs.partition_costs import part_costs
from costs.step_time import Prediction
from schedules.partition import blocks_per_stage
from tools.planner import layouts
from tools.planner.enumeration import Asked, Rejected

OF_ZERO_3 = ("sync_each_batch", "reshard_after_forward")  # options of --zero 3 alone
# A search varies these options of a layout, unless the command line gives them.
AXES = (
    *("tp", "pp", "cp", "micro_batch_size", "recompute", "recompute_layers", "zero"),
    *("sequence_parallel", "schedule", "virtual_stages", "partition"),
    *OF_ZERO_3,
)
# Training options that a trial sets to None: the length of the run and the ramp-up of the batch.
# They do not change the seconds of a step with the full batch.
FULL_BATCH: dict[str, Any] = dict.fromkeys(
    ("steps", "train_samples", "rampup_batch_size", "batch_schedule")
)
# Layouts that recompute all blocks are added, up to this share of the number of other layouts, and
# as many with each further choice of OF_ZERO_3.
ALL_BLOCKS = 0.1


class Space(NamedTuple):
    """All layouts of a model on a number of ranks."""

    found: "list[Candidate]"  # layouts that can run, the fastest predicted first
    rejected: list[Rejected]  # layouts that cannot run, with reasons
    slower: int  # the number of layouts left out unsimulated, as closed forms rank them behind


@dataclass(frozen=True)
class Candidate:
    """A configuration that train.py accepts, with the planner's prediction of its steps."""

    config: Config
    prediction: Prediction
    model: str = ""  # the name of its model, if several are tried

    @property
    def ranks(self) -> int:
        """The number of ranks of the run."""
        return math.prod(self.config.layout.axes.values())

    @property
    def key(self) -> str:
        """A hash of all options on which a run's speed depends: all but length, data and folder.

        By this key the tuner finds the trials of a layout that earlier searches have stored.
        Options at their defaults do not enter the hash, so a stored key stays valid when train.py
        gets a new option.
        """
        training = replace(self.config.training, **FULL_BATCH)
        device_options = Run(device=self.config.run.device, backend=self.config.run.backend)
        hashed = Config(self.config.model, self.config.layout, training, run=device_options)
        text = " ".join(to_cli_args(hashed))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """The layout as text, for example `tp2 pp4 dp1 mbs4 full zero1 sp`.

        The options after mbs are left out at their defaults, and where they have no effect.
        """
        layout = self.config.layout
        pipeline = layout.pp > 1
        recomputes = layout.recompute != "none"
        has_schedule = pipeline and layout.schedule != "1f1b"
        words = [  # pairs: whether the word is shown, and the word
            (bool(self.model), self.model.rpartition("/")[2]),
            (True, f"tp{layout.tp}"),
            (True, f"pp{layout.pp}"),
            (layout.cp > 1, f"cp{layout.cp}"),
            (True, f"dp{layout.dp}"),
            (True, f"mbs{layout.micro_batch_size}"),
            (recomputes, layout.recompute),
            (recomputes and layout.recompute_layers is not None, layout.recompute_layers),
            (layout.ep is not None, f"ep{layout.ep}"),
            (layout.dp * layout.cp > 1, f"zero{layout.zero}"),
            (not layout.sync_each_batch, "once"),
            (not layout.reshard_after_forward, "kept"),
            (layout.sequence_parallel, "sp"),
            (has_schedule, layout.schedule),
            (has_schedule and layout.virtual_stages is not None, layout.virtual_stages),
            (pipeline and layout.partition != "balanced", layout.partition),
        ]
        return " ".join(str(word) for is_shown, word in words if is_shown)


def to_cli_args(config: Config) -> list[str]:
    """Return the command-line words of train.py that give `config`.

    Options at their defaults are left out.
    """
    return [word for group in GROUPS for word in to_words(getattr(config, group))]


def candidates(
    config: Config,
    machine: Machine,
    ranks: int,
    given: dict[str, list],
    accepted: float = 1.0,
    most: float = math.inf,
) -> Space:
    """Return the layouts in which `config`'s model can run on `ranks` ranks, and those rejected.

    given: by the name of an option in AXES, the values to try; an option that is not there is tried
    with all values. The layout's other options keep the values of `config`. accepted: the highest
    probability of running out of memory. most: only so many layouts are predicted, those that are
    likely the fastest. Raise UserError if the model itself is impossible.
    """

    def refused(layout: Layout) -> str:
        """Return train.py's error for a layout, or an empty text."""
        return refusal(replace(config, layout=layout), ranks)

    # By program, since two layouts with the same program run equally fast and need one trial.
    runs: dict[tuple, Candidate] = {}
    # By layout and reason, so that a layout which several tables reject is listed once.
    rejected: dict[tuple, Rejected] = {}
    slower = 0
    main = list(_questions(config, given))
    further = list(_zero_3_questions(config, given))
    for number, (fixed, share) in enumerate(main + further):
        asked = Asked(config.model, config.training, machine, ranks, fixed)
        # With --schedule auto only the fastest layout of each tp, pp and micro-batch size is taken;
        # otherwise all layouts, up to a share of `most`.
        if fixed.get("schedule") == "auto":
            answer = layouts.rank(asked, refused, accepted)
        else:
            answer = layouts.rank(asked, refused, accepted, share * most, every=True)
        slower += answer.slower
        for ranked in answer.ranked:
            if ranked.prediction.risk > accepted:
                continue
            run = Candidate(replace(config, layout=ranked.layout), ranked.prediction)
            runs.setdefault(_program(config, ranked.layout), run)
        if number >= len(main):  # what it refuses runs with the first choice, or is rejected there
            continue
        for entry in answer.rejected:
            rejected[(*sorted(entry.layout.items()), entry.reason)] = entry
    fastest_first = sorted(runs.values(), key=lambda run: run.prediction.seconds)
    return Space(fastest_first, list(rejected.values()), slower)


def _questions(config: Config, given: dict[str, list]) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the questions to the planner whose answers together have all layouts to search in.

    Several questions are needed because a question has only one value of --recompute-layers, and
    `--schedule auto` cannot be mixed with other schedules. A question is a pair: the options of the
    layout that are fixed, each to a value or a list of values; and the share of the argument `most`
    of `candidates` that the planner may predict. given: values to try, by option.
    """
    # Fixed are the options that a search does not vary, and the values that the user gave.
    fixed = _fixed(config, given)
    # The number of recomputed blocks is fixed below, once for each number that the user gave.
    fixed.pop("recompute_layers", None)
    numbers_of_blocks = given.get("recompute_layers")
    schedules = given.get("schedule", [])
    if "auto" in schedules:  # a question of its own; auto chooses the partition
        yield fixed | {"schedule": "auto", "partition": "balanced"}, 1.0
        fixed["schedule"] = [name for name in schedules if name != "auto"]
    if schedules == ["auto"]:
        return
    if numbers_of_blocks:  # the user gave numbers of recomputed blocks: a question for each
        for number in numbers_of_blocks:
            yield fixed | {"recompute_layers": number}, 1.0
        return
    # With these options the planner recomputes the fewest blocks with which a layout fits. The
    # second value is a share of the largest number of layouts to predict: here all of it.
    yield fixed, 1.0
    if "full" in given.get("recompute", ["full"]):
        # Layouts that recompute all blocks, in case that a run needs more memory than predicted.
        yield fixed | {"recompute": ["full"], "recompute_layers": None}, ALL_BLOCKS


def _fixed(config: Config, given: dict[str, list]) -> dict[str, Any]:
    """Return the options of a layout that are fixed, each to a value or to a list of values.

    Of each option of OF_ZERO_3 it is the first value; `_zero_3_questions` has the others.
    """
    fixed = {name: value for name, value in asdict(config.layout).items() if name not in AXES}
    fixed["partition"] = choices("partition")  # the planner itself would try only one partition
    for name, values in given.items():
        fixed[name] = values[0] if len(values) == 1 or name in OF_ZERO_3 else values
    return fixed


def _zero_3_questions(
    config: Config, given: dict[str, list]
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield questions to the planner about --zero 3 with other values of its own options.

    The questions have the form of `_questions`, whose questions have the first value of each option
    in OF_ZERO_3 (true unless the user gives another). Here there is one question for each other
    combination of their values. --zero 3 needs pp 1; if the search has no --zero 3 or no pp 1,
    there is none.
    """
    if 3 not in given.get("zero", [3]) or 1 not in given.get("pp", [1]):
        return
    _, *others = product(*(given.get(name, [True, False]) for name in OF_ZERO_3))
    fixed = _fixed(config, given) | {"zero": 3, "pp": 1}
    schedules = [name for name in given.get("schedule", []) if name != "auto"]
    fixed["schedule"] = schedules or ["1f1b"]  # they are the same without a pipeline
    for values in others:
        yield fixed | dict(zip(OF_ZERO_3, values, strict=True)), ALL_BLOCKS


def choices(option: str) -> list:
    """Return all values of a layout's option that train.py offers, the default first."""
    if option == "partition":
        return ["balanced", "blocks", "layers"]
    if option == "sequence_parallel":
        return [False, True]
    field = all_options()[option]
    return sorted(field.metadata["choices"], key=lambda value: value != field.default)


def _program(config: Config, layout: Layout) -> tuple:
    """Return a tuple that is equal for two layouts that run the same program.

    It has everything that decides what the ranks do. An option that has no effect in a layout, such
    as the schedule without a pipeline, is None or False, whatever its value.
    """
    kind = "cpu" if config.run.device == "cpu" else "cuda"
    costs = part_costs(config.model, config.training.precision, kind)
    blocks = blocks_per_stage(config.model, layout, costs)
    pipeline = layout.pp > 1
    sharded = layout.dp * layout.cp > 1
    several_micro_batches = config.training.global_batch_size > layout.micro_batch_size * layout.dp
    return (
        (layout.tp, layout.pp, layout.cp, layout.micro_batch_size, layout.recompute),
        tuple(layout.recomputed_blocks(count, stage) for stage, count in enumerate(blocks)),
        layout.zero if sharded else None,
        layout.sync_each_batch or not (sharded and several_micro_batches),
        layout.reshard_after_forward or not sharded,
        layout.sequence_parallel if layout.tp > 1 else None,
        layout.schedule if pipeline and several_micro_batches else None,
        tuple(blocks),
    )


def needs_more_memory(candidate: Candidate, other: Candidate) -> bool:
    """Return whether a candidate surely needs at least as much memory as the other candidate.

    When the other candidate has run out of memory, the tuner does not try such a candidate. It is
    certain if their layouts differ only in micro-batch size and recomputation, the micro-batch is
    not smaller, and the candidate recomputes as the other one does, or nothing.
    """
    if candidate.config.model != other.config.model:
        return False
    a = candidate.config.layout
    b = other.config.layout
    recomputation = ("recompute", "recompute_layers")
    keeps_as_much = a.recompute == "none" or all(
        getattr(a, name) == getattr(b, name) for name in recomputation
    )
    names = ("micro_batch_size", *recomputation)
    others_are_equal = replace(a, **{name: getattr(b, name) for name in names}) == b
    return keeps_as_much and others_are_equal and a.micro_batch_size >= b.micro_batch_size


# ---- Values that the user names ------------------------------------------------------------------


def tried_values(texts: list[str]) -> dict[str, list]:
    """Return the values of all --try AXIS=V,V options, by the option's name with underscores.

    The texts ["tp=1,2", "zero=1"] give {"tp": [1, 2], "zero": [1]}; for the axis `model` see
    `tried_models`. Raise UserError for an unknown
    or repeated axis, and for a value that the option cannot have.
    """
    values_of_axes: dict[str, list] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        if name == "model" and values:
            continue
        if name not in AXES or not values or name in values_of_axes:
            axes = ", ".join(["model", *(axis.replace("_", "-") for axis in AXES)])
            raise UserError(f"--try takes AXIS=V,V with AXIS one of {axes}, once, not {text!r}")
        try:
            values_of_axes[name] = [_tried_value(name, value) for value in values.split(",")]
        except UserError as error:
            raise UserError(f"--try {text}: {error}") from None
    return values_of_axes


# A shape as `plan.py shapes` names it: blocks, hidden size, heads and MLP width.
SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?")


def tried_models(texts: list[str]) -> list[str]:
    """Return the names of the models in --try model=A,B; empty if there is none.

    Raise UserError if the axis is given twice or has no name.
    """
    values = [text.removeprefix("model=") for text in texts if text.startswith("model=")]
    if len(values) > 1 or (any(not name for name in ",".join(values).split(",")) and values):
        given = " ".join(f"model={value}" for value in values)
        raise UserError(
            f"--try model=A,B takes one list of models, in which no name is empty, not {given!r}"
        )
    return values[0].split(",") if values else []


def model_of(name: str, base: ModelShape) -> ModelShape:
    """Return the model of a name in --try: a preset, a path, or blocks x hidden x heads x MLP.

    base: the model of the run, whose other options such a shape has.
    """
    if found := SHAPE.fullmatch(name):
        sizes = [int(number) if number else None for number in found.groups()]
        own = dict(zip(("layers", "hidden", "heads", "ffn_hidden"), sizes, strict=True))
        shared = base.heads // base.kv_heads  # query heads of a key head
        hidden, heads = int(found[2]), int(found[3])
        own |= {"kv_heads": heads // math.gcd(heads, shared), "head_size": hidden // heads}
        return reshape(base, {key: value for key, value in own.items() if value is not None})
    return parse_request(["--model", name], plans=True).config.model


def _tried_value(option: str, text: str) -> bool | int | str:
    """Return the text of a value as a bool, int or str; UserError if the option cannot have it."""
    value: bool | int | str = text
    if text in ("true", "false"):
        value = text == "true"
    elif text.isdecimal():
        value = int(text)
    check_option(option, value)
    return value
