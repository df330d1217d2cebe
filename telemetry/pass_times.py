"""Seconds of the passes through a block and through the head: `--schedule-costs measured`.

    config, notes = decide_schedule(config, context)         --schedule auto decided
    config = with_measured_costs(config, context, dtype)
    config.layout.schedule_costs                     six times in microseconds, as in run.json

`--schedule auto` searches a pipeline schedule from the times of the passes. FLOPs do not give these
times: the speeds of attention, of the loss and of operations limited by memory bandwidth differ
between machines. So every rank times one block and the head with its tensor-parallel shards and
without attention masks, and the slowest rank's times count. A resumed run reuses the times that
run.json has from the start of the run. Read schedules/partition.py first.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, replace
from itertools import pairwise

import torch

from config.schema import Config
from data import Batch
from distributed.context import Context
from distributed.mesh import Mesh
from distributed.store import StoreExchange
from model import Stage
from optim.precision import DTYPES
from parallel import CPU, DeferredGradients, ParamFactory
from schedules import choice
from schedules.partition import StageSpec, stage_specs
from telemetry.row_file import read_object

# Repetitions per block or head: first untimed, then timed ones, of which the fastest counts.
WARM_UP = 3
TIMED = 7


def decide_schedule(config: Config, context: Context | None) -> tuple[Config, list[str]]:
    """Replace --schedule auto by a schedule; return the configuration and lines for the log.

    Called before the model is built. Collective over all ranks with --schedule-costs measured.
    context: None for a world of one rank on the CPU. Other schedules are returned as they are.
    """
    if config.layout.schedule != "auto":
        return config, []
    if context:
        config = with_measured_costs(config, context, DTYPES[config.training.precision])
    config, found = choice.decide(config, context.device.type if context else CPU.type)
    return config, [choice.note(config.layout, found)] if found else []


def with_measured_costs(config: Config, context: Context, dtype: torch.dtype) -> Config:
    """Return the configuration with `measured` replaced by microseconds.

    Collective over all ranks; called before the model is built. Configurations that measure nothing
    are returned as they are.
    """
    layout = config.layout
    if layout.schedule_costs != "measured" or layout.schedule != "auto" or layout.pp == 1:
        return config
    where = context.store, context.rank, context.size
    exchange = StoreExchange(*where, "pass times", context.recorder)
    text = exchange.agree(_earlier(config), lambda values: values[0])
    if text is None:
        rows = exchange.gather("seconds", _measure(config, context, dtype))
        text = ",".join(f"{1e6 * max(column):.3g}" for column in zip(*rows, strict=True))
    return replace(config, layout=replace(layout, schedule_costs=text))


def _earlier(config: Config) -> str | None:
    """Return the times in run.json if the run is resumed with the same parts, else None.

    The parts are the same if the model and the options of `same` below are equal.
    """
    if not config.run.resume:
        return None
    # If run.json cannot be read, the passes are measured again.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        with open(os.path.join(config.run.out, "run.json"), "rb") as file:
            earlier = read_object(file.read())["config"]
        own = json.loads(json.dumps(asdict(config)))
        before = {"cp": 1} | earlier["layout"]
        same = ["tp", "cp", "pp", "micro_batch_size"]
        same += ["sequence_parallel", "recompute"]
        equal = all(before.get(key) == own["layout"][key] for key in same)
        if equal and earlier["model"] == own["model"] and before["schedule_costs"][0].isdigit():
            return before["schedule_costs"]
    return None


def _measure(config: Config, context: Context, dtype: torch.dtype) -> list[float]:
    """Return this rank's six times in seconds: three for a block, then three for the head.

    The three are the forward pass, the gradients of the inputs, and the gradients of the weights.
    """
    layout = replace(config.layout, pp=3, schedule="1f1b", partition="0,1,0", vocab_pp=False)
    if layout.recompute_layers is not None:
        # The search prices every block without recomputation, since not all are recomputed.
        layout = replace(layout, recompute_layers=0)
    config = replace(config, model=replace(config.model, layers=1), layout=layout)
    axes = config.layout.axes | {"pp": context.size // (layout.tp * layout.cp * layout.dp)}
    deferred = DeferredGradients()
    device = context.device
    split = layout.sequence_parallel
    mesh = Mesh(axes, context, over_heads=layout.over_heads(config.model))
    factory = ParamFactory(mesh, dtype, device, 0, 0.02, split, deferred)
    _, block, head = stage_specs(config.model, layout)
    return [*_seconds(config, factory, block), *_seconds(config, factory, head)]


def _seconds(config: Config, factory: ParamFactory, spec: StageSpec) -> list[float]:
    """Return the three times in seconds of one stage, each the least of the TIMED repetitions.

    The activations have shape (s, b, h), with the sequence divided by cp, and by tp under sequence
    parallelism.
    """
    stage = Stage(factory, config.model, config.layout, spec).to(factory.dtype)
    for p in stage.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        p.gradient_added = lambda p: None
    model = config.model
    layout = config.layout
    deferred = factory.deferred
    assert deferred is not None  # _measure has passed it to the factory
    s = model.seq_length // layout.cp
    b = layout.micro_batch_size
    shape = (s // layout.tp if layout.sequence_parallel else s, b, model.hidden)
    x = torch.ones(shape, dtype=factory.dtype, device=factory.device, requires_grad=True)
    labels = torch.zeros(b, s, dtype=torch.long, device=factory.device)
    batch = Batch(labels, labels, labels.numel())
    rows = []
    for _ in range(WARM_UP + TIMED):
        times = [_now(factory.device)]
        y = stage(x, batch)
        times.append(_now(factory.device))
        weight_gradients = deferred.backward(y, torch.ones_like(y))
        times.append(_now(factory.device))
        weight_gradients()
        times.append(_now(factory.device))
        rows.append([after - before for before, after in pairwise(times)])
    return [min(column) for column in zip(*rows[WARM_UP:], strict=True)]


def _now(device: torch.device) -> float:
    """Return the time in seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
