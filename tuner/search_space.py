"""The layouts that a search chooses from, each as a whole run of train.py, and why not the others.

    found, rejected = candidates(config, machine, ranks=384, given={"zero": [1]})
    to_cli_args(found[0].config)              # what to type after train.py

Every value of the axes below is tried, unless it is given. Layouts that run the same program (two
schedules without a pipeline, two partitions with equal stages) are listed once.
"""

import dataclasses
import hashlib
import itertools
import math
from dataclasses import dataclass
from typing import Any

from config.messages import UserError
from config.schema import GROUPS, Config, Layout, Run
from config.validation import check_any_length
from planner import layouts
from planner.hardware import Machine
from planner.layouts import Rejected
from planner.step_time import Prediction
from schedules import partition

# The axes beside tp and pp: those that layouts.rank varies by itself, and those varied around it.
INNER_AXES = ("micro_batch_size", "recompute")
OUTER_AXES = ("zero", "sequence_parallel", "schedule", "partition")
AXES = ("tp", "pp", *INNER_AXES, *OUTER_AXES)
# Options that do not change a run's speed at its full batch.
FULL_BATCH: dict[str, Any] = dict.fromkeys(
    ("steps", "train_samples", "rampup_batch_size", "batch_schedule")
)
RECOMPUTE_BY_MEMORY = ("full", "selective", "none")  # what needs the least memory first


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
        training = dataclasses.replace(self.config.training, **FULL_BATCH)
        place = Run(device=self.config.run.device, backend=self.config.run.backend)
        same = Config(self.config.model, self.config.layout, training, run=place)
        return hashlib.sha256(" ".join(to_cli_args(same)).encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """Such as `tp2 pp4 dp1 mbs4 full zero1 sp`; options at their defaults are left out."""
        layout = self.config.layout
        parts = [f"tp{layout.tp} pp{layout.pp} dp{layout.dp} mbs{layout.micro_batch_size}"]
        parts += [layout.recompute] * (layout.recompute != "none")
        parts += [f"zero{layout.zero}"] * (layout.dp > 1)
        parts += ["sp"] * layout.sequence_parallel
        parts += [layout.schedule] * (layout.pp > 1 and layout.schedule != "1f1b")
        parts += [layout.partition] * (layout.pp > 1 and layout.partition != "balanced")
        return " ".join(parts)


def to_cli_args(config: Config) -> list[str]:
    """The arguments that make train.py run `config`: every option that is not at its default."""
    found = []
    for group, cls in GROUPS.items():
        for field in dataclasses.fields(cls):
            value = getattr(getattr(config, group), field.name)
            name = field.name.replace("_", "-")
            if isinstance(value, bool) and value != field.default:
                found.append(f"--{name}" if value else f"--no-{name}")
            elif value is not None and value != field.default:
                found += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return found


def candidates(
    config: Config, machine: Machine, ranks: int, given: dict[str, list]
) -> tuple[list[Candidate], list[Rejected]]:
    """All runs of `config`'s model on that many ranks, fastest predicted first; and the rest.

    `given` lists the values to try of dp or one of AXES; of the other axes all values are tried.
    Layout options that are no axis keep `config`'s values. Raises UserError if the model itself is
    impossible.
    """
    layout_options = dataclasses.asdict(config.layout)
    fixed = {k: v for k, v in layout_options.items() if k not in (*AXES, "dp")}
    fixed |= {name: given[name] for name in ("tp", "pp", *INNER_AXES) if name in given}
    seen: set[tuple] = set()
    found, rejected = [], []

    def wanted(layout: Layout) -> bool:
        tp, pp, dp = layout.tp, layout.pp, given.get("dp", [layout.dp])[0]
        if dp != layout.dp:
            reason = f"tp({tp}) * pp({pp}) * dp({dp}) = {tp * pp * dp} is not {ranks} ranks"
            rejected.append(Rejected({"tp": tp, "pp": pp}, reason))
            return False
        program = _program(config, layout)
        new = program not in seen
        seen.add(program)
        return new

    for values in itertools.product(*(given.get(axis) or choices(axis) for axis in OUTER_AXES)):
        outer = dict(zip(OUTER_AXES, values, strict=True))
        question = config.model, config.training, machine, ranks
        ranked, refused = layouts.rank(*question, fixed | outer, wanted)
        for entry in ranked:
            try:
                found.append(Candidate(with_layout(config, entry.layout), entry.prediction))
            except UserError as error:
                names = ("tp", "pp", "dp", *INNER_AXES, *OUTER_AXES)
                place = {name: getattr(entry.layout, name) for name in names}
                refused.append(Rejected(place, str(error)))
        rejected += refused
    once: dict[tuple, Rejected] = {}
    for refusal in rejected:
        once.setdefault((*sorted(refusal.layout.items()), refusal.reason), refusal)
    return sorted(found, key=lambda c: c.prediction.seconds), list(once.values())


def with_layout(config: Config, layout: Layout) -> Config:
    """A run with that layout, dp filled in; UserError if it or its ramp-up cannot be trained."""
    run = dataclasses.replace(config, layout=layout)
    check_any_length(run, math.prod(layout.axes.values()))
    return run


def choices(axis: str) -> list:
    """Every value of an axis that train.py offers."""
    if axis == "partition":
        return ["balanced", "blocks", "layers"]
    if axis == "sequence_parallel":
        return [False, True]
    field = next(f for f in dataclasses.fields(Layout) if f.name == axis)
    values = list(field.metadata["choices"])
    # The default first: of two layouts that run the same program, the first is kept.
    return sorted(values, key=lambda value: value != field.default)


def _program(config: Config, layout: Layout) -> tuple:
    """Equal for two layouts that run the same program."""
    several = config.training.global_batch_size > layout.micro_batch_size * layout.dp
    return (
        (layout.tp, layout.pp, layout.micro_batch_size, layout.recompute),
        layout.zero if layout.dp > 1 else None,
        layout.sequence_parallel if layout.tp > 1 else None,
        layout.schedule if layout.pp > 1 and several else None,
        tuple(partition.blocks_per_stage(config.model, layout)),
    )


def needs_more_memory(candidate: Candidate, other: Candidate) -> bool:
    """Whether a layout surely needs at least the memory of another one.

    That is certain only if they differ in nothing but micro-batch size and recomputation.
    """
    a, b = candidate.config.layout, other.config.layout
    same = dataclasses.replace(a, micro_batch_size=b.micro_batch_size, recompute=b.recompute) == b
    kept = RECOMPUTE_BY_MEMORY.index(a.recompute) >= RECOMPUTE_BY_MEMORY.index(b.recompute)
    return same and kept and a.micro_batch_size >= b.micro_batch_size
