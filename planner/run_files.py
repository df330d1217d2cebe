"""Runs that were measured: their options, from run.json or a checkpoint, and seconds of steps.

options = options_of("runs/a")      # flat: layers, hidden, ..., tp, ..., global_batch_size, ...
run = read("runs/a", machine)       # with the seconds that metrics.jsonl has
"""

import json
import math
import statistics
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from config import families
from config.command_line import build, check_option
from config.messages import UserError
from config.schema import GROUPS, Config, ModelShape
from planner.hardware import Machine
from planner.job import Job
from planner.questions import FULL_BATCH
from planner.step_time import predict
from schedules.choice import decide_layout

OF_RUN = ("model", "layout", "training")  # of GROUPS: what a plan is about
DECIDED = ("schedule", "partition", "recompute_blocks")  # by --schedule auto
WARM_UP_STEPS = 2  # that are not measured
FEWEST_STEPS = 3
LEAST_SPREAD = 0.02  # of a run's seconds: they repeat no better, and formulas are no better
# The standard deviation of a median of normal numbers, times the root of how many they are, over
# the median of their distances from it: 1.4826 * 1.2533.
SPREAD_OF_MEDIAN = 1.86


@dataclass(frozen=True)
class Run:
    """A run that was measured: its job on a machine, median seconds of a step, how sure."""

    path: str
    job: Job
    seconds: float
    steps: int
    spread: float  # of the median: a standard deviation of its logarithm

    @property
    def weight(self) -> float:
        """How much the run counts in a fit: the more, the better its steps repeat."""
        return 1 / max(LEAST_SPREAD, self.spread)

    def predicted(self, machine: Machine) -> float:
        """Seconds of the same run's steps on another machine, as the planner has them."""
        return predict(self.job._replace(machine=machine)).seconds


def is_source(path: str) -> bool:
    """Whether --config names a run's folder, a run.json or a checkpoint, and not a TOML file."""
    return Path(path).is_dir() or path.endswith(".json")


def options_of(path: str) -> dict[str, Any]:
    """The options of a run's folder, a run.json or a checkpoint, without those that follow from
    others. A schedule that was searched is --schedule auto again.

    Raises UserError if it is none of these, or if an option that is not known here was on.
    """
    groups = facts_of(path)["config"]
    found: dict[str, Any] = {}
    for group in OF_RUN:
        values = groups.get(group, {})
        known = {field.name for field in fields(GROUPS[group])}
        # An option of another version that was off had no effect on the run.
        unknown = [name for name, value in values.items() if name not in known and value]
        if unknown:
            raise UserError(f"{path} has {group} options unknown here: {', '.join(unknown)}")
        found |= {name: value for name, value in values.items() if name in known}
    if str(found.get("schedule")).startswith("searched"):
        found |= dict.fromkeys(DECIDED) | {"schedule": "auto"}
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
    """The configuration of a run, with what --schedule auto had decided; UserError as above."""
    config = build(options_of(path))
    if config.layout.schedule != "auto":
        return config
    ran = facts_of(path)["config"].get("layout", {})
    decided = {name: ran[name] for name in DECIDED if name in ran}
    return replace(config, layout=replace(config.layout, **decided))


def facts_of(path: str) -> dict[str, Any]:
    """The contents of a run.json: that file, a run's, or that of the run of a checkpoint."""
    found = families.of_run(path) if Path(path).is_dir() else path
    if found is None:
        raise UserError(f"{path} is no run's folder and no checkpoint of one: there is no run.json")
    facts = families.read_object(found)
    config = facts.get("config")
    objects = [config, facts.get("cluster", {})]
    if isinstance(config, dict):
        objects += [config.get("model"), config.get("layout", {}), config.get("training", {})]
    if not all(isinstance(value, dict) for value in objects):
        raise UserError(f"{found} is no run.json: it has no configuration of a run")
    return facts


def cluster_of(path: str) -> tuple[str, str]:
    """The name of a run's device, and the kind of rank 0's, such as cuda, which is there for a run
    of one rank too; UserError if the run's run.json has none.
    """
    cluster = facts_of(path).get("cluster", {})
    try:
        return str(cluster["device"]), cluster["places"][0]["device"].partition(":")[0]
    except (AttributeError, LookupError, TypeError):
        raise UserError(f"{path}/run.json has no device and places of ranks") from None


def read(path: str, machine: Machine) -> Run:
    """A run's job and the median of its steps of the commonest batch; UserError if it has none.

    Steps with shorter samples and the first steps do not count.
    """
    config = config_of(path)
    device = str(facts_of(path).get("cluster", {}).get("device", ""))
    if not machine.has_device(device):
        there = f"{device or 'no stated device'!r}"
        raise UserError(f"{path} ran on {there}, but {machine.name} has {machine.device!r}")
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    by_batch: dict[int, list[float]] = {0: []}
    rows = rows_of(folder / "metrics.jsonl")
    steps = [row for row in rows if row.keys() >= {"seconds", "global_batch_size"}]
    for row in steps[WARM_UP_STEPS:]:
        if row.get("sample_length") in (None, config.model.seq_length):
            by_batch.setdefault(row["global_batch_size"], []).append(row["seconds"])
    batch, seconds = max(by_batch.items(), key=lambda item: len(item[1]))
    if len(seconds) < FEWEST_STEPS:
        has = f"{len(seconds)} after the first {WARM_UP_STEPS}"
        raise UserError(f"{path}: a median needs {FEWEST_STEPS} steps or more, it has {has}")
    training = replace(config.training, **FULL_BATCH | {"global_batch_size": batch})
    job = Job(config.model, replace(config.layout, dp=config.layout.dp or 1), training, machine)
    layout, _ = decide_layout(job.model, job.layout, job.micro_batches)
    middle = statistics.median(seconds)
    away = statistics.median(abs(one - middle) for one in seconds)
    spread = SPREAD_OF_MEDIAN * away / middle / math.sqrt(len(seconds))
    return Run(path, job._replace(layout=layout), middle, len(seconds), spread)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl or times.jsonl: a run may be writing the last; UserError."""
    try:
        lines = file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not lines of JSON: {error}") from None
