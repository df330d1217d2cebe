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
from schedules.automatic import settled_layout

OF_RUN = ("model", "layout", "training")  # of GROUPS: what a plan is about
OF_STEP = {"seconds", "global_batch_size"}  # what a row of a step has
WARM_UP_STEPS = 2  # that are not measured
FEWEST_STEPS = 3
LARGEST_NUMBER = 1e15  # microseconds in times.jsonl: 30 years
# What a plan reads of run.json: a dictionary has these keys and may have others, a list has any
# number of such values.
CLUSTER = {"device": str, "places": [{"device": str}]}
NAMES = {dict: "an object", list: "a list", str: "a text", float: "a number of at most 15 digits"}


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
        values, names = groups.get(group, {}), {f.name for f in fields(GROUPS[group])}
        if unknown := set(values) - names:
            raise UserError(f"{path} has {group} options unknown here: {', '.join(unknown)}")
        found |= {name: value for name, value in values.items() if value is not None}
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
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise UserError(f"{found} is no run.json: it has no configuration of a run")
    groups = {group: dict for group in OF_RUN if group in config}
    there = {"config": groups} | ({"cluster": dict} if "cluster" in facts else {})
    check_shape(facts, there, found)
    return facts


def cluster_of(path: str) -> tuple[str, str]:
    """The name of a run's device, and the kind of rank 0's, such as cuda, which is there for a run
    of one rank too; UserError if the run's run.json has none.
    """
    facts = facts_of(path)
    check_shape(facts, {"cluster": CLUSTER}, f"{path}/run.json")
    places = facts["cluster"]["places"]
    if not places:
        raise UserError(f"{path}/run.json has no places of ranks in its cluster")
    return facts["cluster"]["device"], places[0]["device"].partition(":")[0]


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Raise UserError, which says where, unless a value of JSON is as `shape` says; see ROW."""
    if isinstance(shape, dict | list):
        check_shape(value, type(shape), where)
    if isinstance(shape, dict):
        for key, part in shape.items():
            check_shape(value.get(key), part, f"{where}: {key}")
    elif isinstance(shape, list):
        for each in value:
            check_shape(each, shape[0], where)
    elif shape is float:
        # NaN is not below anything; true and false are whole numbers for Python.
        fits = type(value) in (int, float) and abs(value) < LARGEST_NUMBER
        if not fits:
            raise UserError(f"{where} has {value!a:.60}, not {NAMES[float]}")
    elif not isinstance(value, shape):
        raise UserError(f"{where} has {value!a:.60}, not {NAMES[shape]}")


def read(path: str, machine: Machine) -> Run:
    """A run's job and the median of its steps of the commonest batch; UserError if it has none."""
    facts, config = facts_of(path), config_of(path)
    device = str(facts.get("cluster", {}).get("device", ""))
    if machine.device.lower() not in device.lower():
        there = f"{device or 'no stated device'!r}"
        raise UserError(f"{path} ran on {there}, but {machine.name} has {machine.device!r}")
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    rows = [r for r in rows_of(folder / "metrics.jsonl") if r.keys() >= OF_STEP][WARM_UP_STEPS:]
    rows = [r for r in rows if r.get("sample_length") in (None, config.model.seq_length)]
    batch = Counter(r["global_batch_size"] for r in rows).most_common(1)[0][0] if rows else 0
    seconds = [r["seconds"] for r in rows if r["global_batch_size"] == batch]
    if len(seconds) < FEWEST_STEPS:
        has = f"{len(seconds)} after the first {WARM_UP_STEPS}"
        raise UserError(f"{path}: a median needs {FEWEST_STEPS} steps or more, it has {has}")
    training = replace(config.training, **FULL_BATCH | {"global_batch_size": batch})
    layout = replace(config.layout, dp=config.layout.dp or 1)
    job = Job(config.model, layout, training, machine)
    job = job._replace(layout=settled_layout(job.model, layout, job.micro_batches)[0])
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
