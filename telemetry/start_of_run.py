"""Finds out, when a run starts, what it has done before.

    config, chosen, lines = find_past(config, context)

Collective over all ranks; trainer.py calls it before it builds anything.
"""

from dataclasses import replace
from pathlib import Path

from checkpointing.folders import Chosen
from config.past import Past, new_run
from config.schema import Config
from distributed.context import Context
from distributed.store import StoreExchange
from telemetry.parts import run_of


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
