"""The layouts a search may choose from, each as a whole run of train.py; and why not the others.

    found, rejected = candidates(config, machine, ranks=384, given={"zero": [1]})
    words(found[0].config)                    # what to type after train.py

Every value that config.py offers of the axes below is tried, unless it is given. Layouts that are
the same in all but name (a schedule without a pipeline, two partitions that cut alike) come once.
"""

import dataclasses
import hashlib
import itertools
from dataclasses import dataclass

from config.messages import UserError
from config.schema import GROUPS, Config, Layout, Run
from config.validation import check
from planner import layouts
from planner.hardware import Machine
from planner.layouts import Rejected
from planner.step_time import Prediction
from schedules import partition

# The axes beside tp and pp: those that ranking.rank tries by itself, and those it is asked for.
INNER = ("micro_batch_size", "recompute")
OUTER = ("zero", "sequence_parallel", "schedule", "partition")
# What a run's speed at its full batch does not depend on.
FULL_BATCH = {
    "steps": None,
    "train_samples": None,
    "rampup_batch_size": None,
    "batch_schedule": None,
}
PARTITIONS = ("balanced", "blocks", "layers")


@dataclass(frozen=True)
class Candidate:
    """One run that could be made: checked, with what the planner expects of it."""

    config: Config
    prediction: Prediction

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        layout = self.config.layout
        return layout.tp * layout.pp * layout.dp

    @property
    def key(self) -> str:
        """The same for two runs that differ at most in length, data and folder."""
        return key(self.config)

    @property
    def label(self) -> str:
        """The layout in a few words, for people."""
        return label(self.config.layout)


def key(config: Config) -> str:
    """What identifies a run's speed: its options that are not at their defaults.

    Without its length, data and folder. An option that is added to train.py later changes nothing.
    """
    training = dataclasses.replace(config.training, **FULL_BATCH)
    place = Run(device=config.run.device, backend=config.run.backend)
    same = Config(config.model, config.layout, training, run=place)
    return hashlib.sha256(" ".join(words(same)).encode()).hexdigest()[:12]


def label(layout: Layout) -> str:
    """Such as `tp2 pp4 dp1 mbs4 full zero1 sp`: what is as always is left out."""
    words = [f"tp{layout.tp} pp{layout.pp} dp{layout.dp} mbs{layout.micro_batch_size}"]
    words += [layout.recompute] * (layout.recompute != "none")
    words += [f"zero{layout.zero}"] * (layout.dp > 1)
    words += ["sp"] * layout.sequence_parallel
    words += [layout.schedule] * (layout.pp > 1 and layout.schedule != "1f1b")
    words += [layout.partition] * (layout.pp > 1 and layout.partition != "balanced")
    return " ".join(words)


def words(config: Config) -> list[str]:
    """The arguments that make train.py run `config`: every option that is not at its default."""
    found = []
    for group, cls in GROUPS.items():
        own = getattr(config, group)
        for field in dataclasses.fields(cls):
            value = getattr(own, field.name)
            if value is None or value == field.default:
                continue
            flag = "--" + field.name.replace("_", "-")
            if isinstance(value, bool):
                found.append(flag if value else "--no-" + flag[2:])
            elif isinstance(value, tuple):
                found += [flag, *map(str, value)]
            else:
                found += [flag, str(value)]
    return found


def candidates(
    config: Config,
    machine: Machine,
    ranks: int,
    given: dict[str, list],
) -> tuple[list[Candidate], list[Rejected]]:
    """All runs of `config`'s model on that many ranks, fastest predicted first; and the rest.

    `given` lists the values to try of tp, pp or an axis; of the others all are tried. Raises
    UserError if the model itself is impossible.
    """
    inner = {name: given[name] for name in ("tp", "pp", *INNER) if name in given}
    seen: set[tuple] = set()
    found, rejected = [], {}

    def wanted(layout: Layout) -> bool:
        same = _in_effect(config, layout)
        new = same not in seen
        seen.add(same)
        return new

    for values in itertools.product(*(given.get(axis) or choices(axis) for axis in OUTER)):
        fixed = inner | dict(zip(OUTER, values, strict=True))
        ranked, refused = layouts.rank(config.model, config.training, machine, ranks, fixed, wanted)
        for entry in ranked:
            candidate = _checked(config, entry)
            if isinstance(candidate, Candidate):
                found.append(candidate)
            else:
                refused.append(candidate)
        for entry in refused:
            rejected.setdefault((*sorted(entry.layout.items()), entry.reason), entry)
    return sorted(found, key=lambda c: c.prediction.seconds), list(rejected.values())


def _checked(config: Config, entry: layouts.Ranked) -> Candidate | Rejected:
    """The layout as a run, if train.py would take it and every batch of its ramp-up."""
    layout, training = entry.layout, config.training
    run = dataclasses.replace(config, layout=layout)
    length = dataclasses.replace(training, steps=training.steps or 1, train_samples=None)
    try:
        check(dataclasses.replace(run, training=length), layout.tp * layout.pp * layout.dp)
    except UserError as error:
        names = ("tp", "pp", "dp", *INNER, *OUTER)
        return Rejected({name: getattr(layout, name) for name in names}, str(error))
    return Candidate(run, entry.prediction)


def choices(axis: str) -> list:
    """Every value of an axis that train.py offers."""
    if axis == "partition":
        return list(PARTITIONS)
    if axis == "sequence_parallel":
        return [False, True]
    field = next(f for f in dataclasses.fields(Layout) if f.name == axis)
    values = list(field.metadata["choices"])
    # The default first: of two layouts that are the same in effect, its name is kept.
    return sorted(values, key=lambda value: value != field.default)


def _in_effect(config: Config, layout: Layout) -> tuple:
    """Equal for two layouts that run the same program."""
    several = config.training.global_batch_size > layout.micro_batch_size * layout.dp
    return (
        layout.tp,
        layout.pp,
        layout.micro_batch_size,
        layout.recompute,
        layout.zero if layout.dp > 1 else None,
        layout.sequence_parallel if layout.tp > 1 else None,
        layout.schedule if layout.pp > 1 and several else None,
        tuple(partition.blocks_per_stage(config.model, layout)),
    )
