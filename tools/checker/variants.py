"""The runs of a check: the small run in many layouts, and in some with other types or sizes.

    plan = plan_of(small, config, ranks=4)
    plan.layouts, plan.others, plan.resumes()

What a type or a size decides is in no layout of a run that has another one. A 16-bit run has
masters and sums of their own, tensor ranks that do not divide the tokens share them unevenly, and
with few key/value heads more ranks of cp gather keys.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from architecture.shape import ModelShape
from base.errors import UserError
from config import validation
from config.schema import Config, Layout
from tools.checker.layouts import cover, not_covered, ranks_of, read, to_resume, with_options

SIXTEEN_BITS = ("bf16", "fp16")
# Layouts of a 16-bit run: masters that ZeRO cuts, gradients that are summed in another type.
OF_PRECISION: tuple[dict[str, Any], ...] = (
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2, "ep": 2},
    {"dp": 2, "zero": 3, "sync_each_batch": False},
    {"micro_batch_size": 1},
    {"tp": 2, "cp": 2, "micro_batch_size": 3, "sequence_parallel": True},
    {"pp": 2, "schedule": "zb-h1", "recompute": "full"},
)
# The same with gradients in the lower precision.
OF_SUMS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2, "micro_batch_size": 1},
    {"dp": 2, "zero": 3},
    {"tp": 2, "sequence_parallel": True},
)
# Layouts with --compile: what one kernel of torch.compile does, which a check runs uncompiled.
OF_COMPILE: tuple[dict[str, Any], ...] = (
    {"micro_batch_size": 1},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "schedule": "zb-h1"},
    {"dp": 2, "zero": 3},
)
TOKENS = 23  # of a sample: neither 2 nor 3 divides them
OF_TOKENS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "micro_batch_size": 1},
    {"tp": 3},
    {"pp": 2},
)
# The same with experts, to whose ranks tensor ranks send unequal shares.
OF_TOKENS_OF_EXPERTS: tuple[dict[str, Any], ...] = (
    *OF_TOKENS,
    {"tp": 2, "dp": 2, "micro_batch_size": 1, "zero": 2, "ep": 4},
)
KV_HEADS = 4  # tp 4 cuts them, and of cp 3 all three ranks gather keys
OF_HEADS: tuple[dict[str, Any], ...] = (
    {"cp": 3, "micro_batch_size": 3, "zero": 3},
    {"tp": 4, "micro_batch_size": 3, "sequence_parallel": True},
    {"tp": 4, "micro_batch_size": 3, "recompute": "selective"},
)
FEW_HEADS = 2  # tp 4 has each of them twice
OF_FEW_HEADS: tuple[dict[str, Any], ...] = (
    {"tp": 4},
    {"tp": 4, "sequence_parallel": True, "recompute": "selective"},
)
MOST_RESUMED = 3  # of the layouts that a user names
SHARE = 8  # of so many layouts that a user asks for, each variant has one


@dataclass(frozen=True)
class Variant:
    """A run of the check and its layouts.

    name: of the run. sizes: the name of the run on one rank with which it is compared; "" for the
    small run's, with which other types are compared too.
    """

    name: str
    sizes: str
    config: Config
    layouts: list[Layout]


@dataclass(frozen=True)
class Resume:
    """A run that is saved in a layout and goes on in others; variant: its types, None: its own."""

    saved_by: Layout
    going_on: list[Layout]
    variant: Variant | None = None


@dataclass(frozen=True)
class CheckPlan:
    """What a check runs.

    layouts: of the small run. others: the variants. ranks: the most of a layout. is_named: whether
    the user has named the layouts; is_limited: whether so many layouts were asked for.
    """

    small: Config
    layouts: list[Layout]
    others: list[Variant]
    ranks: int
    is_named: bool
    is_limited: bool = False

    @property
    def every(self) -> list[Layout]:
        """The layouts of the small run, and then those of the variants."""
        return [*self.layouts, *(layout for each in self.others for layout in each.layouts)]

    def introduction(self) -> Iterator[str]:
        """Yield what is checked, and what so many ranks leave out."""
        every = self.every
        going_on = [layout for resume in self.resumes() for layout in resume.going_on]
        count, most = len(every) + len(going_on), max(map(ranks_of, [*every, *going_on]))
        number = f"{count} layouts" if count > 1 else "1 layout"
        parts = [f"{len(self.layouts)} in {self.small.training.precision}"] * bool(self.layouts)
        parts += [f"{len(each.layouts)} with {each.name}" for each in self.others]
        parts += [f"{len(going_on)} resumed"] * bool(going_on)
        yield f"{number} of up to {most} ranks, each against one rank: {', '.join(parts)}"
        if self.is_limited:
            pairs = f"all of up to {self.ranks} ranks are"
            yield f"not covered: most pairs of axes; without --layouts {pairs}"
        elif not self.is_named:
            yield not_covered(every, self.ranks)

    def resumes(self) -> list[Resume]:
        """Return the runs that are saved and go on; of 16-bit runs one, for scale and masters."""
        of_types = [each for each in self.others if each.config.training != self.small.training]
        if self.is_named:
            of_named = [(self.layouts, None)] + [(each.layouts, each) for each in self.others]
            layouts, variant = next(pair for pair in of_named if pair[0])
            resumed = [Resume(layouts[0], layouts[:MOST_RESUMED], variant)]
            return resumed + [Resume(x.layouts[0], x.layouts[:1], x) for x in of_types[:1]]
        found = []
        if (pair := to_resume(self.small, self.ranks)) is not None:
            found.append(Resume(*pair))
        for each in of_types[:1]:
            if (pair := to_resume(each.config, min(2, self.ranks))) is not None:
                found.append(Resume(pair[0], pair[1][:1], each))
        return found


def plan_of(
    small: Config,
    user: Config,
    ranks: int,
    count: int | None = None,
    named: Sequence[str] = (),
) -> CheckPlan:
    """Return what a check of the small run does.

    user: the run of which the small one was made. count: so many layouts, None: all. named: the
    layouts that the user names; every run that can have one has it, and UserError if none can.
    """
    if named:
        return CheckPlan(small, *_named(small, user, named), ranks, True)
    few = None if count is None else max(1, count // SHARE)
    others = []
    for name, sizes, config, wanted in _possible(small, user):
        made = [with_options(config, options) for options in wanted]
        layouts = [layout for layout in made if layout is not None and ranks_of(layout) <= ranks]
        if layouts:
            others.append(Variant(name, sizes, config, layouts[:few]))
    return CheckPlan(small, cover(small, ranks, count), others, ranks, False, count is not None)


def _named(small: Config, user: Config, named: Sequence[str]) -> tuple[list[Layout], list[Variant]]:
    """Return the user's layouts of the small run, and the variants with the user's layouts of each.

    named: the layouts as the user writes them, such as "tp 2 pp 2"; user: the run that was made
    small. A variant has other types or sizes than the small run, so it may have layouts that the
    small run cannot have. Raise UserError for a layout that none of these runs can have.
    """
    variants = [Variant(*each[:3], []) for each in _possible(small, user)]
    layouts = []
    for text in named:
        is_in_a_variant = False
        for variant in variants:
            layout = _read_if_possible(text, variant.config)
            if layout is not None:
                variant.layouts.append(layout)
                is_in_a_variant = True
        # Of a layout that no run can have, `read` raises the error of the small run.
        if not is_in_a_variant or _read_if_possible(text, small) is not None:
            layouts.append(read(text, small))
    return layouts, [variant for variant in variants if variant.layouts]


def _possible(
    small: Config, user: Config
) -> Iterator[tuple[str, str, Config, Sequence[dict[str, Any]]]]:
    """Yield name, sizes, config and wanted layouts of each variant that is valid on one rank."""
    for name, config, wanted in _types(small, user):
        if _is_possible(config):
            yield name, "", config, wanted
    for name, config, wanted in _sizes(small, user):
        if _is_possible(config):
            yield name, name, config, wanted


def _types(small: Config, user: Config) -> Iterator[tuple[str, Config, Sequence[dict[str, Any]]]]:
    """Yield the names, runs and layouts in 16 bits and with --compile, if the user's run has them.

    Others than fp32 and fp64 are 16 bits: without --precision a run on GPUs is.
    """
    training, precision = small.training, user.training.precision
    if user.run.compile:
        run = dataclasses.replace(small.run, compile=True)
        yield "compile", dataclasses.replace(small, run=run), OF_COMPILE
    has_bits = precision in ("auto", *SIXTEEN_BITS) or user.training.muon_dtype == "bf16"
    if small.run.device != "cpu" or not has_bits:
        return
    of_user = precision if precision in SIXTEEN_BITS else "fp16"  # with a loss scale
    changed = dataclasses.replace(training, precision=of_user)
    yield of_user, dataclasses.replace(small, training=changed), OF_PRECISION
    if precision == "fp16":
        return
    changed = dataclasses.replace(training, precision="bf16", grad_dtype="bf16")
    if training.optimizer == "muon":
        changed = dataclasses.replace(changed, muon_dtype="bf16")
    yield "gradients in bf16", dataclasses.replace(small, training=changed), OF_SUMS


def _sizes(small: Config, user: Config) -> Iterator[tuple[str, Config, Sequence[dict[str, Any]]]]:
    """Yield the names, runs and layouts in other sizes, which the user's run has too."""
    model = small.model
    if model.seq_length > TOKENS:
        changed = dataclasses.replace(model, seq_length=TOKENS)
        wanted = OF_TOKENS if model.experts == 1 else OF_TOKENS_OF_EXPERTS
        yield f"{TOKENS} tokens", dataclasses.replace(small, model=changed), wanted
    queries = model.heads // model.kv_heads
    wanted_of = {KV_HEADS: OF_HEADS}
    if queries > 1:  # else tensor ranks that share a key/value head have no query heads
        wanted_of[FEW_HEADS] = OF_FEW_HEADS
    for count, wanted in wanted_of.items():
        if user.model.kv_heads >= count and model.kv_heads != count:
            changed = dataclasses.replace(model, heads=count * queries, kv_heads=count)
            changed = dataclasses.replace(changed, **_mixer_heads(model, count))
            yield f"{count} kv-heads", dataclasses.replace(small, model=changed), wanted


def _mixer_heads(model: ModelShape, keys: int) -> dict[str, Any]:
    """Return the heads of a mixer of which tp 4 has equal shares; it has key heads in common where
    attention has key/value heads in common.
    """
    if model.mixer == "attention":
        return {}
    values = KV_HEADS * (model.mixer_value_heads // model.mixer_key_heads)
    keys = values if model.mixer == "kda" else min(keys, model.mixer_key_heads)
    return {"mixer_key_heads": keys, "mixer_value_heads": values}


def _is_possible(config: Config) -> bool:
    """Return whether one rank can do a run."""
    try:
        validation.check(config, 1)
    except UserError:
        return False
    return True


def _read_if_possible(text: str, config: Config) -> Layout | None:
    """Return the layout that a text such as "tp 2" names, or None if the run cannot have it."""
    try:
        return read(text, config)
    except UserError:
        return None
