"""Runs as they were: their options, from run.json or a checkpoint, and the seconds of their steps.

options = options_of("runs/a")      # flat: layers, hidden, ..., tp, ..., global_batch_size, ...
run = read("runs/a")                # with the seconds that metrics.jsonl has
"""

import json
import statistics
from collections import Counter
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
from schedules.choice import decide_layout

OF_RUN = ("model", "layout", "training")  # of GROUPS: what a plan is about
OF_STEP = {"seconds", "global_batch_size"}  # what a row of a step has
WARM_UP_STEPS = 2  # that are not measured
FEWEST_STEPS = 3


@dataclass(frozen=True)
class Run:
    """A run that was measured: its job on a machine, median seconds of a step, how sure."""

    path: str
    job: Job
    seconds: float
    steps: int
    spread: float  # of the median: a standard deviation of its logarithm

    def on(self, machine: Machine) -> Job:
        """The same run on another machine."""
        return self.job._replace(machine=machine)


def is_source(path: str) -> bool:
    """Whether --config names a run's folder, a run.json or a checkpoint, and not a TOML file."""
    return Path(path).is_dir() or path.endswith(".json")


def options_of(path: str) -> dict[str, Any]:
    """Options of a run's folder, a run.json or a checkpoint, but for those that follow from others.
    A schedule that was searched is --schedule auto again.

    Raises UserError if it is none of these, or has options that are not known here.
    """
    groups = facts_of(path)["config"]
    found: dict[str, Any] = {}
    for group in OF_RUN:
        values = groups.get(group, {})
        given = {name: value for name, value in values.items() if value is not None}
        names = {f.name for f in fields(GROUPS[group])}
        if unknown := given.keys() - names:
            raise UserError(f"{path} has {group} options unknown here: {', '.join(unknown)}")
        found |= given
    if str(found.get("schedule")).startswith("searched"):
        decided = ("partition", "recompute_blocks")
        found = {name: value for name, value in found.items() if name not in decided}
        found["schedule"] = "auto"
    for name, value in found.items():
        check_option(name, tuple(value) if isinstance(value, list) else value)
    shape = ModelShape(**groups["model"])
    derived = shape.derived() | {"max_positions": shape.seq_length}
    return {name: value for name, value in found.items() if derived.get(name) != value}


def config_of(path: str) -> Config:
    """The configuration of a run, with what --schedule auto had decided; UserError as above."""
    config, ran = build(options_of(path)), facts_of(path)["config"].get("layout", {})
    if config.layout.schedule != "auto":
        return config
    names = ("schedule", "partition", "recompute_blocks")
    decided = {name: ran[name] for name in names if name in ran}
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
    """A run's job and the median of its steps of the commonest batch; UserError if it has none."""
    facts, config = facts_of(path), config_of(path)
    device = str(facts.get("cluster", {}).get("device", ""))
    if machine.device.lower() not in device.lower():
        there = f"{device or 'no stated device'!r}"
        raise UserError(f"{path} ran on {there}, but {machine.name} has {machine.device!r}")
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    steps = [row for row in rows_of(folder / "metrics.jsonl") if row.keys() >= OF_STEP]
    lengths = None, config.model.seq_length
    measured = [row for row in steps[WARM_UP_STEPS:] if row.get("sample_length") in lengths]
    batches = Counter(row["global_batch_size"] for row in measured)
    batch = max(batches, key=batches.__getitem__, default=0)
    seconds = [row["seconds"] for row in measured if row["global_batch_size"] == batch]
    if len(seconds) < FEWEST_STEPS:
        has = f"{len(seconds)} after the first {WARM_UP_STEPS}"
        raise UserError(f"{path}: a median needs {FEWEST_STEPS} steps or more, it has {has}")
    training = replace(config.training, **FULL_BATCH | {"global_batch_size": batch})
    layout = replace(config.layout, dp=config.layout.dp or 1)
    job = Job(config.model, layout, training, machine)
    job = job._replace(layout=decide_layout(job.model, layout, job.micro_batches)[0])
    middle = statistics.median(seconds)
    away = statistics.median(abs(one - middle) for one in seconds)
    spread = 1.86 * away / middle / len(seconds) ** 0.5  # 1.4826 * 1.2533 of a normal distribution
    return Run(path, job, middle, len(seconds), spread)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl or times.jsonl: a run may be writing the last; UserError."""
    try:
        lines = file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not lines of JSON: {error}") from None
