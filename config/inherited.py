"""Which options a resumed run takes from its checkpoint if they are not given.

    inherited(saved, given)     {"answers_only": True, "lr": 0.001, ...}

A resumed run is the run that it was: what decides what is trained, and on which samples, is not
given up because a command line leaves it out. What is given holds, and the log names the change.
Every option is of one of four kinds, by its group and its declaration:

    the model             comes from the checkpoint; another shape is refused (load.py)
    `run_option_names`          training and data: from the checkpoint, unless given
    `at_each_start`       such options that a start chooses anew: evaluations, the cache
    layout, run           of a start: where and how it executes, what it checks, saves and writes
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from architecture.shape import ModelShape
from base.options import as_typed
from config.past import Past
from config.phases import PhasePlan
from config.run_options import LOSS_SCALE, Data, Training

# Other spellings of an option, which no finished configuration has.
SPELLINGS = ("batch_tokens",)
# Options of which one replaces the others: if one is given, the others are not taken over.
INSTEAD = (("steps", "train_samples"), ("rampup_batch_size", "batch_schedule"))
# Options that decide what a model sees of a corpus, and which tokens count: a loss of a model is
# another one with others. The seed: which samples of a set are evaluated, and where prefixes end.
OBJECTIVE = (
    *("objective", "answers_only", "mask_eod_loss"),
    *("reset_attention", "reset_positions", "eod_token"),
)
DECIDE_SAMPLES = (*OBJECTIVE, "seed")


@dataclass(frozen=True)
class Inherited:
    """The options, the model and the past that a run takes from the checkpoint that it resumes.

    options: the values of options that were not given, by name. model: the checkpoint's model; None
    if there is no checkpoint. past: what was done before. folder: the checkpoint. changed: options
    of an earlier version that are constants now, where the checkpoint has another value. plan: the
    phases of the run (--phases). problem: why the newest checkpoint cannot be read, if none can.
    left: options of the checkpoint that decide what a sample is, and that are not taken.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    model: ModelShape | None = None
    past: Past = field(default_factory=Past)
    folder: str = ""
    changed: tuple[str, ...] = ()
    plan: PhasePlan | None = None
    problem: str = ""
    left: Mapping[str, Any] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """A line that names the options; "" if there are none but defaults."""
        named, left = _named(self.options), _named(self.left)
        lines = [f"taken from {self.folder}: {', '.join(named)}"] if named else []
        if self.changed:
            lines.append(f"not taken, since they are constants now: {', '.join(self.changed)}")
        if left:
            lines.append(f"not taken from {self.folder}: {', '.join(left)}")
        return "; ".join(lines)


def _named(options: Mapping[str, Any]) -> list[str]:
    """Return the options that are no defaults, as texts."""
    fields = {f.name: f for cls in (Training, Data) for f in dataclasses.fields(cls)}
    named = []
    for name, value in options.items():
        value = tuple(value) if isinstance(value, list) else value
        if value == fields[name].default or name == "precision":
            continue
        values = value if isinstance(value, tuple) else (value,)
        text = "" if value is True else f" {' '.join(map(str, values))}"
        named.append(as_typed(fields[name]).removeprefix("--") + text)
    return named


def run_option_names() -> list[str]:
    """Return the names of the options that belong to a run, and not to one start of it."""
    fields = [field for group in (Training, Data) for field in dataclasses.fields(group)]
    names = [field.name for field in fields if not field.metadata["at_each_start"]]
    return [name for name in names if name not in SPELLINGS]


def inherited(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a resumed run takes from its checkpoint, by name.

    saved: the configuration in the checkpoint, by group; what an older version did not have is left
    out. given: the options that flags and files give.
    """
    theirs: dict[str, Any] = {}
    for group in ("training", "data"):
        values = saved.get(group)
        theirs |= values if isinstance(values, dict) else {}
    left_out = set(given) | _replaced(theirs, given)
    return {
        name: theirs[name]
        for name in run_option_names()
        if theirs.get(name) is not None and name not in left_out
    }


def sample_options(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a checkpoint that decide what a sample of a corpus is, by name.

    saved, given: as for `inherited`. A program that evaluates a checkpoint takes these.
    """
    taken = inherited(saved, given)
    return {name: taken[name] for name in DECIDE_SAMPLES if name in taken}


def left_out(saved: Mapping[str, Any], given: Mapping[str, Any], folder: str) -> Inherited:
    """Return the options that a program without a past leaves: those that say what a sample is."""
    left = {k: v for k, v in sample_options(saved, given).items() if k in OBJECTIVE}
    return Inherited(folder=folder, left=left)


def changed_constants(saved: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the former options that are constants now, where the checkpoint has another value.

    saved: as for `inherited`. Each is a text with both values.
    """
    training = saved.get("training")
    values = training if isinstance(training, dict) else {}
    return tuple(
        f"{name} {values[name]!r:.40} (now {constant})"
        for name, constant in LOSS_SCALE._asdict().items()
        if values.get(name) not in (None, constant)
    )


def _replaced(theirs: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """Return the options that a given option replaces, so that they are not taken over.

    theirs: the options in the checkpoint. The sizes of a ramp-up or a schedule end at
    --global-batch-size: if another size is given, it holds for all steps that are left.
    """
    replaced: set[str] = set()
    for names in INSTEAD:
        if not given.keys().isdisjoint(names):
            replaced.update(names)
    size = given.get("global_batch_size")
    if "batch_schedule" in given:
        replaced.add("global_batch_size")
    elif "batch_tokens" in given or (size is not None and size != theirs.get("global_batch_size")):
        replaced.update(("rampup_batch_size", "batch_schedule", "global_batch_size"))
    return replaced
