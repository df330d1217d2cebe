"""What is said and checked before a model is built: where ranks run, what nodes lack.

    introduce(config, context, "precision: bf16 ...")     every rank's place, warnings, node checks
    check_compiler(kernels, "cuda", "n1")
    check_room(config, context, needed=10**9, say=print)

The checks of nodes are in preflight.py, which a run on one node does not load.
"""

import importlib.util
import os
import shutil

from config.messages import UserError
from config.schema import Config
from distributed import placement
from distributed.context import Context
from distributed.placement import Say


def checks_nodes(config: Config, context: Context) -> bool:
    """--preflight or --no-preflight; without either, whether there are several nodes."""
    given = config.run.preflight
    return len(set(context.nodes)) > 1 if given is None else given


def introduce(config: Config, context: Context, decided: str) -> None:
    """Print where every rank runs, what was decided (a sentence or nothing) and warnings, and check
    the nodes if that is asked for.

    Collective over all ranks; UserError, on every rank, for what cannot work.
    """

    def say(line: str) -> None:
        if context.rank == 0:
            print(line, flush=True)

    if context.size > 1:
        say(placement.table(context.places, config.layout))
    if decided:
        say(decided)
    for sentence in placement.placement_warnings(context.places, config.layout, context.job_nodes):
        say(f"note: {sentence}")
    if checks_nodes(config, context):
        from distributed import preflight

        preflight.check_nodes(config, preflight.Peers(context), say)


def check_room(config: Config, context: Context, needed: int, say: Say) -> None:
    """If nodes are checked, whether memory and disk have room for a checkpoint of so many bytes."""
    if checks_nodes(config, context):
        from distributed import preflight

        preflight.check_room(config, context, needed, say)


def check_compiler(kernels: dict[str, str], device: str, node: str) -> None:
    """UserError if one of these kernels, by kind, is compiled when it is first called, and this
    node lacks what torch.compile calls. device: the type, cpu or cuda.
    """
    if "flex_attention" not in kernels["attention"] and "compiled" not in kernels:
        return
    on_gpu = device == "cuda"
    what = "--compile" if "compiled" in kernels else kernels["attention"]
    variable, usual = ("CC", "gcc") if on_gpu else ("CXX", "g++")
    name = os.environ.get(variable, usual)
    if shutil.which(name) is None:
        raise UserError(
            f"{what} needs a compiler, and {node} has no {name}: install g++ there, load the "
            f"cluster's module of gcc, or give another one in {variable}"
        )
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise UserError(f"{what} needs triton on GPUs, and {node} has none: pip install triton")
