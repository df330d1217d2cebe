"""The layouts that a search chooses from, each as a whole run of train.py, and why not the others.

    found, rejected = candidates(config, machine, ranks=384, given={"zero": [1]})
    to_cli_args(found[0].config)              # what to type after train.py

Every value of the axes below is tried, unless it is given. Layouts that run the same program (two
schedules without a pipeline, two partitions with equal stages) are listed once.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from config.command_line import to_words
from config.messages import UserError
from config.run_options import Run
from config.schema import GROUPS, Config, Layout
from config.validation import check_any_length
from planner import layouts, risk
from planner.enumeration import LONG, RECOMPUTATIONS, Rejected, divisors
from planner.hardware import Machine
from planner.step_time import Prediction
from schedules import partition

# The axes beside tp and pp: those that layouts.rank varies by itself, and those varied around it.
INNER_AXES = ("micro_batch_size", "recompute")
PLAIN_AXES = ("zero", "sequence_parallel", "schedule", "partition")
PARTIAL_AXES = ("cp", "virtual_stages", "recompute_layers", "vocab_pp")  # that go with some others
OUTER_AXES = (*PLAIN_AXES, *PARTIAL_AXES)
FEWEST = "fewest"  # --recompute-layers: as few as fit
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
        parts[0] = parts[0].replace(" dp", f" cp{layout.cp} dp" if layout.cp > 1 else " dp")
        blocks = "" if layout.recompute_layers is None else f" {layout.recompute_layers}"
        parts += [f"{layout.recompute}{blocks}"] * (layout.recompute != "none")
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

    for one in _combinations(config, machine, ranks, given):
        accepted = 1.0
        if one["recompute_layers"] == FEWEST:  # so that what is found is no risk
            one.pop("recompute_layers")
            accepted = risk.DEFAULT
        question = config.model, config.training, machine, ranks, fixed | one, refusal
        ranked, refused, _ = layouts.rank(*question, accepted=accepted)
        found += [Candidate(replace(config, layout=r.layout), r.prediction) for r in ranked]
        rejected += [entry for entry in refused if entry.reason != SAME]
    once = {(*sorted(entry.layout.items()), entry.reason): entry for entry in rejected}
    return sorted(found, key=lambda c: c.prediction.seconds), list(once.values())


def _combinations(
    config: Config, machine: Machine, ranks: int, given: dict[str, list]
) -> Iterator[dict[str, Any]]:
    """A value of each axis that `layouts.rank` does not vary by itself."""
    axes, every = (*PLAIN_AXES, "recompute"), {"recompute": RECOMPUTATIONS}
    tried = [given.get(axis) or every.get(axis) or choices(axis) for axis in axes]
    for values in itertools.product(*tried):
        one = dict(zip(axes, values, strict=True))
        partial = [given.get(axis) or _partial(axis, one, config, ranks) for axis in PARTIAL_AXES]
        for others in itertools.product(*partial):
            yield one | dict(zip(PARTIAL_AXES, others, strict=True))


def _partial(axis: str, one: dict[str, Any], config: Config, ranks: int) -> list:
    """The values of one of PARTIAL_AXES that go with the others, that of `config` first."""
    own, length = getattr(config.layout, axis), config.model.seq_length
    balanced = one["partition"] == "balanced"
    more: dict[str, list] = {
        "cp": [n for n in divisors(ranks) if length % (2 * n) == 0 and n > 1],
        "virtual_stages": [3, 4],
        "recompute_layers": [FEWEST],
        "vocab_pp": [True],
    }
    goes = {
        "cp": length >= LONG and balanced,
        "virtual_stages": one["schedule"] == "interleaved" and balanced,
        "recompute_layers": one["recompute"] == "full" and balanced,
        "vocab_pp": one["schedule"] in ("1f1b", "gpipe") and balanced,
    }
    return [own, *(value for value in more[axis] if value != own)] if goes[axis] else [own]


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
    blocks, pipeline = partition.blocks_per_stage(config.model, layout), layout.pp > 1
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
    a, b = candidate.config.layout, other.config.layout
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
