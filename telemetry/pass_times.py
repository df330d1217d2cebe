"""Seconds of the passes through a block and through the head: `--schedule-costs measured`.

    config = with_measured_costs(config, context)      the option is then numbers, as in run.json

FLOPs do not tell how fast a device does each kind of pass: attention, the loss and what moves bytes
differ from machine to machine. So every rank times one block and the head as its tensor rank holds
them, without masks; the slowest rank counts. A run that is resumed keeps what was measured at its
start.
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
from parallel import DeferredGradients, ParamFactory
from schedules.partition import StageSpec, stage_specs
from telemetry.row_file import read_object

WARM_UP, TIMED = 3, 7  # passes of a part; of the timed ones the fastest counts


def with_measured_costs(config: Config, context: Context, dtype: torch.dtype) -> Config:
    """The configuration with `measured` replaced by microseconds; collective over all ranks."""
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
    """What run.json has, if a run is resumed whose parts were the same."""
    if not config.run.resume:
        return None
    # What cannot be read is measured anew.
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
    """Seconds of forward, gradients of inputs and of weights: of a block, then of the head."""
    layout = replace(config.layout, pp=3, schedule="1f1b", partition="0,1,0", vocab_pp=False)
    if layout.recompute_layers is not None:
        # Not all blocks are recomputed, and the search counts none.
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
    """The least that each kind of pass took through one stage of the model."""
    stage = Stage(factory, config.model, config.layout, spec).to(factory.dtype)
    for p in stage.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        p.gradient_added = lambda p: None
    model = config.model
    layout = config.layout
    deferred = factory.deferred
    assert deferred is not None  # _measure gives one
    stage.set_length(model.seq_length)
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
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
