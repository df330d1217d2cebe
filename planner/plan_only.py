"""The one thing that can be planned although the engine cannot train it: fp8 arithmetic.

    machine, notes = applied(options, model, machine)

Questions about models with experts are checked here too.
"""

from argparse import Namespace
from dataclasses import replace

from config.messages import UserError
from config.schema import ModelShape
from planner.hardware import Machine

# Questions whose answer does not follow from one shape on given GPUs.
OTHERS = ("largest", "smallest", "shapes", "rampup")


def applied(options: Namespace, model: ModelShape, machine: Machine) -> tuple[Machine, list[str]]:
    """Machine with what --fp8 asks for, and a sentence if the engine lacks it.

    Raises UserError for fp8 where the GPU has none, and for questions that know no experts.
    """
    if options.question in OTHERS and (options.fp8 or model.experts > 1):
        what = "--fp8" if options.fp8 else "a model with experts"
        raise UserError(f"{what} goes with layouts, days and stages, not {options.question}")
    if not options.fp8:
        return machine, []
    if not machine.fp8:
        raise UserError(f"--fp8: {machine.name} has no fp8 arithmetic; h100, h200 and b200 do")
    machine = replace(machine, software=replace(machine.software, fp8=True))
    return machine, ["planned only: train.py cannot train with fp8"]
