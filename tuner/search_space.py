"""The layouts that a search chooses from, each as a whole run of train.py, and why not the others.

    space = candidates(config, machine, ranks=384, given={"zero": [1]}, accepted=0.05, most=200)
    to_cli_args(space.found[0].config)        # what to type after train.py

They are rows of the planner's table (planner/enumeration.py). Every value of the axes below is
tried, unless it is given; `--schedule auto` only if it is. Layouts that run the same program (two
schedules without a pipeline, two partitions with equal stages) are listed once.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from config.command_line import check_option, to_words
from config.messages import UserError
from config.run_options import Run
from config.schema import GROUPS, Config, Layout
from config.validation import check_any_length
from planner import layouts
from planner.enumeration import Asked, Rejected
from planner.hardware import Machine
from planner.step_time import Prediction
from schedules import partition

# The options that are varied, unless they are given.
AXES = (
    *("tp", "pp", "cp", "micro_batch_size", "recompute", "recompute_layers", "zero"),
    *("sequence_parallel", "schedule", "virtual_stages", "vocab_pp", "partition"),
)
# Options that do not change a run's speed at its full batch.
FULL_BATCH: dict[str, Any] = dict.fromkeys(
    ("steps", "train_samples", "rampup_batch_size", "batch_schedule")
)
RECOMPUTE_BY_MEMORY = ("full", "selective", "none")  # what needs the least memory first
ALL_BLOCKS = 0.1  # of the rows that are predicted, those that recompute all blocks


class Space(NamedTuple):
    """The runs that are possible, the fastest predicted first; the layouts that are not, and why;
    and how many more there are that are likely slower.
    """

    found: "list[Candidate]"
    rejected: list[Rejected]
    slower: int


@dataclass(frozen=True)
class Candidate:
    """One possible run, checked, and the planner's prediction of it."""

    config: Config
    prediction: Prediction

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return math.prod(self.config.layout.axes.values())

    @property
    def key(self) -> str:
        """Hash of the options that a run's speed depends on: all but length, data and folder.

        Options at their defaults are left out: a key stays valid when train.py gets a new one.
        """
        training = replace(self.config.training, **FULL_BATCH)
        place = Run(device=self.config.run.device, backend=self.config.run.backend)
        same = Config(self.config.model, self.config.layout, training, run=place)
        return hashlib.sha256(" ".join(to_cli_args(same)).encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """Such as `tp2 pp4 dp1 mbs4 full zero1 sp`; options at their defaults are left out."""
        layout = self.config.layout
        parts = [f"tp{layout.tp} pp{layout.pp} dp{layout.dp} mbs{layout.micro_batch_size}"]
        parts[0] = parts[0].replace(" dp", f" cp{layout.cp} dp" if layout.cp > 1 else " dp")
        blocks = "" if layout.recompute_layers is None else f" {layout.recompute_layers}"
        parts += [f"{layout.recompute}{blocks}"] * (layout.recompute != "none")
        parts += [f"ep{layout.ep}"] * (layout.ep is not None)
        parts += [f"zero{layout.zero}"] * (layout.dp * layout.cp > 1)
        parts += ["sp"] * bool(layout.sequence_parallel)
        virtual = "" if layout.virtual_stages is None else f" {layout.virtual_stages}"
        parts += [f"{layout.schedule}{virtual}"] * (layout.pp > 1 and layout.schedule != "1f1b")
        parts += ["vocab-pp"] * bool(layout.vocab_pp and layout.pp > 1)
        parts += [layout.partition] * (layout.pp > 1 and layout.partition != "balanced")
        return " ".join(parts)


def to_cli_args(config: Config) -> list[str]:
    """The arguments that make train.py run `config`: every option that is not at its default."""
    return [word for group in GROUPS for word in to_words(getattr(config, group))]


def candidates(
    config: Config,
    machine: Machine,
    ranks: int,
    given: dict[str, list],
    accepted: float = 1.0,
    most: float = math.inf,
) -> Space:
    """All runs of `config`'s model on that many ranks that may run out of memory with a probability
    of at most `accepted`; of more than `most` those that are likely the fastest.

    `given` lists the values to try of some AXES; of the others all values are tried. Other layout
    options, dp too, keep `config`'s values. UserError if the model itself is impossible.
    """

    def refusal(layout: Layout) -> str:
        """Why train.py would not start it, or nothing."""
        try:
            check_any_length(replace(config, layout=layout), ranks)
        except UserError as error:
            return str(error)
        return ""

    runs: dict[tuple, Candidate] = {}  # by what runs: of equal ones the first is kept
    rejected: dict[tuple, Rejected] = {}
    slower = 0
    for fixed, share in _tables(config, given):
        asked = Asked(config.model, config.training, machine, ranks, fixed)
        if fixed.get("schedule") == "auto":
            answer = layouts.rank(asked, refusal, accepted)
        else:
            answer = layouts.rank(asked, refusal, accepted, share * most, every=True)
        slower += answer.slower
        for one in answer.ranked:
            if one.prediction.risk > accepted:
                continue
            run = Candidate(replace(config, layout=one.layout), one.prediction)
            runs.setdefault(_program(config, one.layout), run)
        for entry in answer.rejected:
            rejected[(*sorted(entry.layout.items()), entry.reason)] = entry
    found = sorted(runs.values(), key=lambda c: c.prediction.seconds)
    return Space(found, list(rejected.values()), slower)


def _tables(config: Config, given: dict[str, list]) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield what is fixed in each of the planner's tables that together have all runs, and the
    share of its rows that is predicted.
    """
    fixed = {name: value for name, value in asdict(config.layout).items() if name not in AXES}
    fixed["partition"] = choices("partition")
    fixed |= {name: values[0] if len(values) == 1 else values for name, values in given.items()}
    fixed.pop("recompute_layers", None)
    numbers = given.get("recompute_layers")
    schedules = given.get("schedule", [])
    if "auto" in schedules:
        yield fixed | {"schedule": "auto", "partition": "balanced"}, 1.0
        fixed["schedule"] = [name for name in schedules if name != "auto"]
    if schedules == ["auto"]:
        return
    if numbers:
        yield from ((fixed | {"recompute_layers": number}, 1.0) for number in numbers)
        return
    yield fixed, 1.0  # which recomputes as few blocks as fit
    if "full" in given.get("recompute", ["full"]):
        # All blocks, in case that a run needs more memory than predicted.
        yield fixed | {"recompute": ["full"], "recompute_layers": None}, ALL_BLOCKS


def choices(option: str) -> list:
    """Every value of an option that train.py offers, the default first."""
    if option == "partition":
        return ["balanced", "blocks", "layers"]
    if option == "sequence_parallel":
        return [False, True]
    field = next(f for cls in GROUPS.values() for f in fields(cls) if f.name == option)
    return sorted(field.metadata["choices"], key=lambda value: value != field.default)


def _program(config: Config, layout: Layout) -> tuple:
    """Equal for two layouts that run the same program."""
    blocks = partition.blocks_per_stage(config.model, layout)
    pipeline = layout.pp > 1
    several = config.training.global_batch_size > layout.micro_batch_size * layout.dp
    return (
        (layout.tp, layout.pp, layout.cp, layout.micro_batch_size, layout.recompute),
        tuple(layout.recomputed_blocks(count, stage) for stage, count in enumerate(blocks)),
        layout.zero if layout.dp * layout.cp > 1 else None,
        layout.sequence_parallel if layout.tp > 1 else None,
        layout.schedule if pipeline and several else None,
        bool(layout.vocab_pp) and pipeline,
        tuple(blocks),
    )


def needs_more_memory(candidate: Candidate, other: Candidate) -> bool:
    """Whether a layout surely needs at least the memory of another one.

    That is certain only if they differ in nothing but micro-batch size and recomputation.
    """
    a = candidate.config.layout
    b = other.config.layout
    names = ("micro_batch_size", "recompute", "recompute_layers")
    same = replace(a, **{name: getattr(b, name) for name in names}) == b
    return same and _keeps_more(a, b) and a.micro_batch_size >= b.micro_batch_size


def _keeps_more(a: Layout, b: Layout) -> bool:
    """Whether recomputation surely leaves as much of a layout's memory as of another's, or more."""
    fewer = [math.inf if one.recompute_layers is None else one.recompute_layers for one in (a, b)]
    if a.recompute == b.recompute:
        return fewer[0] <= fewer[1]
    more = RECOMPUTE_BY_MEMORY.index(a.recompute) > RECOMPUTE_BY_MEMORY.index(b.recompute)
    return more and (a.recompute == "none" or fewer[1] == math.inf)


# ---- Values that the user names ------------------------------------------------------------------


def tried_values(texts: list[str]) -> dict[str, list]:
    """The values of each --try AXIS=V,V by axis; UserError for an unknown axis or value."""
    found: dict[str, list] = {}
    for text in texts:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        if name not in AXES or not values or name in found:
            axes = ", ".join(axis.replace("_", "-") for axis in AXES)
            raise UserError(f"--try takes AXIS=V,V with AXIS one of {axes}, once, not {text!r}")
        try:
            found[name] = [_tried_value(name, value) for value in values.split(",")]
        except UserError as error:
            raise UserError(f"--try {text}: {error}") from None
    return found


def _tried_value(option: str, text: str) -> bool | int | str:
    """One value of an option, in its type; UserError if it cannot have that value."""
    value = {"true": True, "false": False}.get(text, int(text) if text.isdecimal() else text)
    check_option(option, value)
    return value
