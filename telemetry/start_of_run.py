"""Finds out, when a run starts, what it has done before, and what model it has built.

    config, chosen, lines = find_past(config, context)        before anything is built
    tensors = find_tensors(optimizer, mesh, context)          when the model is built
    about = about_model(tensors, config.model)                what is known of it, for run.json

The first two are collective over all ranks.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from architecture import model_stats
from architecture.shape import ModelShape
from architecture.tensors import compare
from checkpointing.folders import Chosen
from checkpointing.state import global_tensors
from config.past import Past, new_run
from config.schema import Config
from distributed.context import Context
from distributed.mesh import Mesh
from distributed.store import StoreExchange
from telemetry.parts import run_of
from zero import Optimizer


def find_past(config: Config, context: Context) -> tuple[Config, Chosen | None, list[str]]:
    """Return the run's configuration with its past, the checkpoint of --resume, and log lines.

    The past is the one that rank 0 reads for all ranks: another node may not see the newest
    checkpoint yet. Without --resume the checkpoint is None, and only the run's name is in the past.
    """
    exchange = StoreExchange(context.store, context.rank, context.size, "past", context.recorder)
    if not config.run.resume:
        name = exchange.agree(new_run(), lambda names: names[0])
        return replace(config, past=Past(run=name)), None, []
    from checkpointing import resumed  # imported here: a run from step 0 needs no h5py

    lines: list[str] = []
    chosen = resumed.choose(config.run, exchange, lines.append)
    # A start that found no checkpoint is of the run that has used the folder last.
    name = run_of(Path(config.run.out, "run.json")) if config.run.resume == "auto" else ""
    past = resumed.past_of(chosen, config, exchange, name)
    return replace(config, past=past), chosen, lines


def find_tensors(
    optimizer: Optimizer, mesh: Mesh, context: Context
) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return the global shape of each tensor of the model, and whether it is trained, by name.

    Collective over all ranks. The optimizer is told the number of elements, by which saves need
    room.
    """
    exchange = StoreExchange(context.store, context.rank, context.size, "model", context.recorder)
    found = global_tensors(optimizer.parameters, mesh, exchange)
    optimizer.model_elements = sum(math.prod(shape) for shape, _ in found.values())
    return found


def about_model(
    tensors: dict[str, tuple[tuple[int, ...], bool]], model: ModelShape
) -> dict[str, Any]:
    """Return what run.json says of a model: its parameters, and what its options do not describe.

    tensors: what `find_tensors` returns. "unknown" is there if code was changed so that the model
    has other parameters than its options say: in words, and the elements of the difference.
    """
    total = sum(math.prod(shape) for shape, trained in tensors.values() if trained)
    about: dict[str, Any] = {"parameters": total}
    difference = compare({name: shape for name, (shape, _) in tensors.items()}, model)
    planned = model_stats.parameters(model)
    if difference or total != planned:
        text = difference.text() or "counted otherwise"
        about["unknown"] = {"tensors": text, "elements": total - planned}
    return about
