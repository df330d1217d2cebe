"""Seconds of the passes through a block and through the head: `--schedule-costs measured`.

    config, notes = decide_schedule(config, context)         --schedule auto decided
    config = with_measured_costs(config, context, dtype)
    config.layout.schedule_costs                     six times in microseconds, as in run.json

`--schedule auto` chooses a pipeline schedule by the seconds of the passes. Those of the planner are
those of a reference machine. With `measured` every rank times one block and the head instead, with
its tensor-parallel shards and without attention masks, and the slowest rank's times count. A
resumed run reuses the times that run.json has from the start of the run. Read
costs/auto_schedule.py first.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, replace
from itertools import pairwise

import torch

from base.regular_files import read_regular
from config.schema import Config
from costs import auto_schedule
from data import Batch
from distributed.context import Context
from distributed.mesh import Mesh
from distributed.store import StoreExchange
from model import Stage
from optim.precision import DTYPES
from parallel import CPU, DeferredGradients, ParamFactory, exact_dtype
from schedules.partition import BLOCKS_ALONE, StageSpec, stage_specs
from telemetry.row_file import read_object

WARM_UP = 3  # repetitions of the passes that are not timed
TIMED = 7  # repetitions that are timed; the fastest repetition counts


def decide_schedule(config: Config, context: Context | None) -> tuple[Config, list[str]]:
    """Replace --schedule auto by a schedule; return the configuration and lines for the log.

    Called before the model is built. Collective over all ranks with --schedule-costs measured.
    context: None for a world of one rank on the CPU. A configuration with another schedule is
    returned as it is.
    """
    if config.layout.schedule != "auto":
        return config, []
    device_type = CPU.type
    if context:
        config = with_measured_costs(config, context, DTYPES[config.training.precision])
        device_type = context.device.type
    config, chosen = auto_schedule.decide(config, device_type)
    if not chosen:
        return config, []
    return config, [auto_schedule.note(config.layout, chosen)]


def with_measured_costs(config: Config, context: Context, dtype: torch.dtype) -> Config:
    """Return the configuration with `measured` in --schedule-costs replaced by six microseconds.

    Collective over all ranks; called before the model is built. A configuration that needs no
    measured times is returned as it is.
    """
    layout = config.layout
    chooses = layout.schedule == "auto" and layout.pp > 1  # only a choice needs the times
    if layout.schedule_costs != "measured" or not chooses:
        return config
    exchange = StoreExchange(
        context.store, context.rank, context.size, "pass times", context.recorder
    )
    # Rank 0 reads the times in run.json for all ranks, since other nodes may not see the file.
    costs = exchange.agree(_earlier(config), lambda values: values[0])
    if costs is None:
        seconds = _measure(config, context, dtype)
        slowest = exchange.agree(seconds, lambda of_ranks: list(map(max, zip(*of_ranks))))
        costs = ",".join(f"{1e6 * seconds:.3g}" for seconds in slowest)
    return replace(config, layout=replace(layout, schedule_costs=costs))


def _earlier(config: Config) -> str | None:
    """Return the six times that run.json has from an earlier start of this run, or None.

    They are reused if the model and the options that change the duration of a pass are equal.
    """
    if not config.run.resume:
        return None
    # If run.json cannot be read, the passes are measured again.
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        text = read_regular(os.path.join(config.run.out, "run.json"))
        earlier = read_object(text)["config"]
        now = json.loads(json.dumps(asdict(config)))  # JSON turns tuples into lists, as in run.json
        earlier_layout = {"cp": 1} | earlier["layout"]  # older files have no cp
        names = ["tp", "cp", "pp", "micro_batch_size", "sequence_parallel", "recompute"]
        same_layout = all(earlier_layout.get(name) == now["layout"][name] for name in names)
        same_model = earlier["model"] == now["model"]
        costs = earlier_layout["schedule_costs"]
        if same_layout and same_model and costs[0].isdigit():  # numbers, not a word
            return costs
    return None


def _measure(config: Config, context: Context, dtype: torch.dtype) -> list[float]:
    """Return this rank's six times in seconds: three for a block, then three for the head.

    The three times are the seconds of the forward pass, of the inputs' gradients, and of the
    gradients of the weights. Collective over all ranks.
    """
    # This layout has three stages: the embedding, one block, the head.
    layout = replace(config.layout, pp=3, schedule="1f1b", partition="0,1,0")
    if layout.recompute_layers is not None:
        # Only some blocks are recomputed: the choice takes each block's time without recomputation.
        layout = replace(layout, recompute_layers=0)
    config = replace(config, model=replace(config.model, layers=1), layout=layout)
    # The groups of ranks are those of the real layout, in which pp is not 3: a rank measures with
    # the tensor shards that it will have.
    axes = config.layout.axes | {"pp": context.size // (layout.tp * layout.cp * layout.dp)}
    deferred = DeferredGradients()
    device = context.device
    split = layout.sequence_parallel
    mesh = Mesh(axes, context, over_heads=layout.over_heads(config.model))
    # The seed 0 and the standard deviation 0.02 have no influence on the times.
    factory = ParamFactory(mesh, dtype, device, 0, 0.02, split, deferred)
    factory = replace(factory, cp_mixer=config.layout.cp_mixer)
    _, block, head = stage_specs(config.model, layout, BLOCKS_ALONE)
    return [*_seconds(config, factory, block), *_seconds(config, factory, head)]


def _seconds(config: Config, factory: ParamFactory, spec: StageSpec) -> list[float]:
    """Return the seconds of a stage's forward pass, input gradients and weight gradients.

    A time is the least of TIMED repetitions. The activations are (s, b, h), with the sequence
    divided by cp, and by tp with sequence parallelism.
    """
    stage = Stage(factory, config.model, config.layout, spec).to(factory.dtype)
    # Layers add gradients to `main_grad` and then call `gradient_added`, as in training; there is
    # no optimizer here that would make these attributes.
    for p in stage.parameters():
        p.main_grad = torch.zeros_like(p, dtype=exact_dtype(p.dtype))
        p.gradient_added = lambda p: None
    model = config.model
    layout = config.layout
    deferred = factory.deferred
    assert deferred is not None  # _measure has given the factory this list
    s = model.seq_length // layout.cp
    b = layout.micro_batch_size
    rows_of_x = s // layout.tp if layout.sequence_parallel else s
    shape = (rows_of_x, b, model.hidden)
    x = torch.ones(shape, dtype=factory.dtype, device=factory.device, requires_grad=True)
    labels = torch.zeros(b, s, dtype=torch.long, device=factory.device)
    batch = Batch(labels, labels, labels.numel())
    seconds_of_repetitions = []
    for _ in range(WARM_UP + TIMED):
        times = [_now(factory.device)]
        y = stage(x, batch)
        times.append(_now(factory.device))
        # Pass B computes the gradient of x, and returns a function that does pass W.
        compute_weight_gradients = deferred.backward(y, torch.ones_like(y))
        times.append(_now(factory.device))
        compute_weight_gradients()
        times.append(_now(factory.device))
        seconds_of_repetitions.append([after - before for before, after in pairwise(times)])
    timed = seconds_of_repetitions[WARM_UP:]
    return [min(seconds) for seconds in zip(*timed, strict=True)]


def _now(device: torch.device) -> float:
    """Wait until the device has finished its work; return time.perf_counter() in seconds."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
