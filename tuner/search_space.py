"""The layouts that a search chooses from, each as a whole run of train.py, and why not the others.

    found, rejected = candidates(config, machine, ranks=384, given={"zero": [1]})
    to_cli_args(found[0].config)              # what to type after train.py

Every value of the axes below is tried, unless it is given. Layouts that run the same program (two
schedules without a pipeline, two partitions with equal stages) are listed once.
"""

import hashlib
import itertools
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from config.command_line import to_words
from config.messages import UserError
from config.run_options import Run
from config.schema import GROUPS, Config, Layout
from config.validation import check_any_length
from planner import layouts
from planner.hardware import Machine
from planner.layouts import Rejected
from planner.search import recomputations
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
SAME = "runs the same program as another layout"
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
        training = replace(self.config.training, **FULL_BATCH)
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
        parts += ["sp"] * bool(layout.sequence_parallel)
        parts += [layout.schedule] * (layout.pp > 1 and layout.schedule != "1f1b")
        parts += [layout.partition] * (layout.pp > 1 and layout.partition != "balanced")
        return " ".join(parts)


def to_cli_args(config: Config) -> list[str]:
    """The arguments that make train.py run `config`: every option that is not at its default."""
    return [word for group in GROUPS for word in to_words(getattr(config, group))]


def candidates(
    config: Config, machine: Machine, ranks: int, given: dict[str, list]
) -> tuple[list[Candidate], list[Rejected]]:
    """All runs of `config`'s model on that many ranks, fastest predicted first; and the rest.

    `given` lists the values to try of some AXES; of the others all values are tried. Other layout
    options, dp too, keep `config`'s values. UserError if the model itself is impossible.
    """
    layout_options = asdict(config.layout)
    fixed = {name: value for name, value in layout_options.items() if name not in AXES}
    fixed |= {name: given[name] for name in ("tp", "pp", "micro_batch_size") if name in given}
    # Of two layouts that run the same program, the first is kept.
    seen: set[tuple] = set()
    found, rejected = [], []

    def refusal(layout: Layout) -> str:
        """Why the layout is not tried, or nothing."""
        program = _program(config, layout)
        if program in seen:
            return SAME
        seen.add(program)
        try:
            check_any_length(replace(config, layout=layout), ranks)
        except UserError as error:
            return str(error)
        return ""

    axes, every = (*OUTER_AXES, "recompute"), {"recompute": recomputations(machine)}
    tried = [given.get(axis) or every.get(axis) or choices(axis) for axis in axes]
    for values in itertools.product(*tried):
        one = fixed | dict(zip(axes, values, strict=True))
        question = config.model, config.training, machine, ranks, one, refusal
        ranked, refused = layouts.rank(*question, accepted=1.0)
        found += [Candidate(replace(config, layout=r.layout), r.prediction) for r in ranked]
        rejected += [entry for entry in refused if entry.reason != SAME]
    once = {(*sorted(entry.layout.items()), entry.reason): entry for entry in rejected}
    return sorted(found, key=lambda c: c.prediction.seconds), list(once.values())


def without_risk(found: list[Candidate], most: float) -> tuple[list[Candidate], list[Rejected]]:
    """Those whose probability of running out of memory is at most `most`; and the rest, why not."""
    safe = [c for c in found if c.prediction.risk <= most]
    said = "of running out of memory is above --risk"
    return safe, [
        Rejected({"layout": c.label}, f"the risk({c.prediction.risk:.0%}) {said}({most:.0%})")
        for c in found
        if c.prediction.risk > most
    ]


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
    same = replace(a, micro_batch_size=b.micro_batch_size, recompute=b.recompute) == b
    kept = RECOMPUTE_BY_MEMORY.index(a.recompute) >= RECOMPUTE_BY_MEMORY.index(b.recompute)
    return same and kept and a.micro_batch_size >= b.micro_batch_size
