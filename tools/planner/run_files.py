"""Reads what a run has written: its options from run.json, and the seconds of its measured steps.

options = options_of("runs/a")      # flat: layers, hidden, ..., tp, ..., global_batch_size, ...
run = read("runs/a", machine)       # with the median seconds of a step from metrics.jsonl

A path names a run's folder, a checkpoint of the run, or a run.json. `plan.py` reads runs for
--config RUN, `gap`, `compare` and `calibrate`.
"""

import json
import math
import statistics
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from architecture import families
from architecture.shape import ModelShape
from base.errors import FileError, RunError, printable
from base.regular_files import MOST_OF_ROWS, read_regular
from config.command_line import build, check_option
from config.run_options import Data, DynamicScale
from config.schema import GROUPS, SCHEDULES, Config
from costs.auto_schedule import decide_layout
from costs.hardware import Machine
from costs.job import Job
from costs.step_time import predict
from tools.planner.questions import FULL_BATCH

OF_RUN = ("model", "layout", "training")  # the groups of options in run.json that a plan uses
DECIDED = ("schedule", "partition", "recompute_blocks")  # options that --schedule auto decided
WARM_UP_STEPS = 2  # a run's first steps are slower and do not count
FEWEST_STEPS = 3  # a run with fewer counted steps has no reliable median and is refused
# The seconds of a run count as uncertain by this share at least: neither does a run repeat more
# exactly, nor are the planner's formulas more exact.
LEAST_SPREAD = 0.02
# The median of n normal numbers has the standard deviation SPREAD_OF_MEDIAN * d / sqrt(n), where d
# is the median of their distances from it: 1.4826 d is their own standard deviation, and a median
# varies 1.2533 times as much as a mean.
SPREAD_OF_MEDIAN = 1.86


@dataclass(frozen=True)
class MeasuredRun:
    """A run that was measured, to compare with the planner's prediction of the same job."""

    path: str  # the run's folder or file, as the user named it
    job: Job  # the run's model, layout and training options, and the machine
    seconds: float  # the median of the counted steps
    steps: int  # the number of counted steps
    spread: float  # the standard deviation of the logarithm of `seconds`

    @property
    def weight(self) -> float:
        """The factor of this run's error in a fit of a machine's constants (calibration.py).

        It is 1 over the standard deviation of the run's median, so a run whose steps repeat well
        counts more; LEAST_SPREAD limits it.
        """
        return 1 / max(LEAST_SPREAD, self.spread)

    def predicted(self, machine: Machine) -> float:
        """Return the predicted seconds of a step of the run's job on a given machine.

        A fit of constants calls this with many variants of the run's machine.
        """
        return predict(self.job._replace(machine=machine)).seconds


def is_source(path: str) -> bool:
    """Return whether the path of --config is a run's folder, a run.json or a checkpoint.

    Otherwise it is a TOML file of options.
    """
    return Path(path).is_dir() or path.endswith(".json")


def options_of(path: str) -> dict[str, Any]:
    """Return the options of a run's model, layout and training by name, as flags would give them.

    Options that are None or have the value that follows from the model's other sizes are left out.
    If an earlier version searched for the run's schedule, `schedule` is `auto` and the options in
    DECIDED are left out. Raise UserError if `path` has no run.json, or if an option was on that
    this version does not know.
    """
    groups = facts_of(path)["config"]
    found: dict[str, Any] = {}
    for group in OF_RUN:
        values = groups.get(group, {})
        known = {field.name for field in fields(GROUPS[group])}
        # An option of another version that was off had no effect on the run.
        # Nor have constants of the loss scale, which were options before, and the costs by which a
        # schedule was chosen.
        other = {name for name, value in values.items() if value} - known
        unknown = sorted(other.difference(DynamicScale._fields, ["schedule_costs"]))
        if unknown:
            raise RunError(f"{path} has {group} options unknown here: {', '.join(unknown)}")
        found |= {name: value for name, value in values.items() if name in known}
    if str(found.get("schedule")).startswith("searched"):
        found |= dict.fromkeys(DECIDED) | {"schedule": "auto"}
    # By name, the values that follow from the model's other sizes, for example kv_heads = heads. An
    # option with this value is left out, so that it follows again if a flag changes the sizes.
    shape = ModelShape(**groups["model"])
    follows = shape.derived() | {"max_positions": shape.seq_length}
    options = {}
    for name, value in found.items():
        if value is None:
            continue
        check_option(name, tuple(value) if isinstance(value, list) else value)
        if follows.get(name) != value:
            options[name] = value
    return options


def config_of(path: str) -> Config:
    """Return the configuration with which a run trained; raise UserError as `options_of` does.

    The layout of a run of an earlier version may have a schedule that this version cannot make
    (`check_schedule`).
    """
    config = build(options_of(path))
    if config.layout.schedule != "auto":
        return config
    ran = facts_of(path)["config"].get("layout", {})
    decided = {name: ran[name] for name in DECIDED if name in ran}
    return replace(config, layout=replace(config.layout, **decided))


def data_of(path: str) -> Data:
    """Return the options of the data that a run read; raise UserError as `facts_of` does.

    Options of another version that this one does not know are left out.
    """
    values = facts_of(path)["config"].get("data", {})
    known = {field.name for field in fields(Data)} & values.keys()
    options: dict[str, Any] = {}
    for name in known:
        options[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
    return Data(**options)


def check_schedule(path: str, config: Config) -> None:
    """Raise UserError if a run's schedule is an order that an earlier version searched for."""
    name = config.layout.schedule
    if name not in SCHEDULES:
        raise RunError(
            f"{path} has the schedule {name!r}, which an earlier version searched for: this "
            f"version has {', '.join(SCHEDULES)}, so it cannot price the run's passes"
        )


def facts_of(path: str) -> dict[str, Any]:
    """Return the contents of a run.json; raise UserError if there is none or it has other contents.

    path: the run.json itself, the folder of the run, or a checkpoint of the run.
    """
    found = families.run_file_in(path) if Path(path).is_dir() else path
    if found is None:
        raise RunError(f"{path} is no run's folder and no checkpoint of one: there is no run.json")
    facts = families.read_object(found)
    config = facts.get("config")
    # Every part that the functions of this file read must be an object of JSON.
    objects = [config, facts.get("cluster", {})]
    if isinstance(config, dict):
        objects += [config.get("model"), config.get("layout", {}), config.get("training", {})]
    if not all(isinstance(value, dict) for value in objects):
        raise RunError(f"{found} is no run.json: it has no configuration of a run")
    return facts


def note_of_unknown(path: str) -> str | None:
    """Return what the planner does not know of a run's model, as a sentence; None: it knows all.

    Code that was changed may have given the model other parameters than its options describe.
    Raise UserError if run.json says it in another way than a run writes it.
    """
    unknown = facts_of(path).get("unknown")
    if unknown is None:
        return None
    try:
        text, elements = str(unknown["tensors"]), int(unknown["elements"])
    except (LookupError, TypeError, ValueError):
        raise RunError(
            f"{path}/run.json: `unknown` is {unknown!r:.80}, not an object with `tensors` and "
            "`elements`, a whole number"
        ) from None
    return (
        f"{path} has a model with {elements:+,} parameters beside those that its options describe, "
        f"which the plan leaves out: {printable(text)}"
    )


def cluster_of(path: str) -> tuple[str, str]:
    """Return the name of a run's device and its kind: ("NVIDIA H100 80GB HBM3", "cuda").

    The name is the driver's, by which hardware.of_device finds the machine. The kind is that of
    rank 0's device. Raise UserError if run.json lacks them.
    """
    cluster = facts_of(path).get("cluster", {})
    try:
        return str(cluster["device"]), cluster["places"][0]["device"].partition(":")[0]
    except (AttributeError, LookupError, TypeError):
        raise RunError(
            f"{path}/run.json does not say on which device the run was: `cluster` lacks `device` "
            "or the `device` of its first place"
        ) from None


def read(path: str, machine: Machine) -> MeasuredRun:
    """Return a run with its job and the median seconds of a step, for `plan.py calibrate`.

    With a ramp-up the steps of the most frequent batch size count. Steps with shorter samples and
    the first WARM_UP_STEPS steps do not count. Raise UserError if fewer than FEWEST_STEPS steps
    remain, or if the run's device is not that of the machine.
    """
    config = config_of(path)
    check_schedule(path, config)
    device = str(facts_of(path).get("cluster", {}).get("device", ""))
    if not machine.has_device(device):
        there = f"{device or 'no stated device'!r}"
        raise RunError(f"{path} ran on {there}, but {machine.name} has {machine.device!r}")
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    # By batch size, the seconds of the counted steps; {0: []} so that `max` finds an entry.
    by_batch: dict[int, list[float]] = {0: []}
    rows = rows_of(folder / "metrics.jsonl")
    steps = [row for row in rows if row.keys() >= {"seconds", "global_batch_size"}]
    for row in steps[WARM_UP_STEPS:]:
        if row.get("sample_length") in (None, config.model.seq_length):
            by_batch.setdefault(row["global_batch_size"], []).append(row["seconds"])
    batch, seconds = max(by_batch.items(), key=lambda item: len(item[1]))
    if len(seconds) < FEWEST_STEPS:
        has = f"{len(seconds)} after the first {WARM_UP_STEPS}"
        raise RunError(f"{path}: a median needs {FEWEST_STEPS} steps or more, it has {has}")
    # The job has this batch size without a ramp-up, and the schedule that the run had.
    training = replace(config.training, **FULL_BATCH | {"global_batch_size": batch})
    job = Job(config.model, replace(config.layout, dp=config.layout.dp or 1), training, machine)
    layout, _ = decide_layout(job)
    middle = statistics.median(seconds)
    away = statistics.median(abs(one - middle) for one in seconds)
    spread = SPREAD_OF_MEDIAN * away / middle / math.sqrt(len(seconds))
    return MeasuredRun(path, job._replace(layout=layout), middle, len(seconds), spread)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl or times.jsonl, one JSON object a line.

    A last line without its end is left out: the run may be writing it now. Raise UserError if the
    file cannot be read or is not JSON.
    """
    try:
        lines = read_regular(file, MOST_OF_ROWS).splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file} is not lines of JSON: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise RunError(f"{file} has lines that are no JSON objects")
    return rows
