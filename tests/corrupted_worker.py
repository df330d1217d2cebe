"""A training run in which a fault is planted on one rank, without its knowledge.

    mpirun -n 2 python tests/corrupted_worker.py nan RANK STEP,STEP,... train.py's arguments
    mpirun -n 2 python tests/corrupted_worker.py drift RANK STEP,STEP,... train.py's arguments
    mpirun -n 2 python tests/corrupted_worker.py huge RANK STEP,STEP,... train.py's arguments

nan: the rank's activations are NaN in these steps. drift: the last bit of the first element of its
first weight is flipped after these steps; huge: its highest bit of the exponent. flip:KIND:BIT: a
bit of the first element of the first tensor of that kind that this rank has: weight, norm (a weight
of one), split (a weight that is split over tensor ranks), gradient, or the name of an optimizer's
state such as exp_avg.
"""

import itertools
import sys

import torch

import model
import trainer
import zero
from config import validation
from config.command_line import parse
from distributed.launch import discover


def plant_nan(steps: list[int]) -> None:
    """Make this rank's stage return NaN in these steps, if it does one forward pass in each."""
    forward, count = model.Stage.forward, itertools.count(1)

    def poisoned(self, x, batch):
        y = forward(self, x, batch)
        return y * float("nan") if next(count) in steps else y

    model.Stage.forward = poisoned


def plant_drift(steps: list[int], bit: int = 0) -> None:
    """Flip a bit of the first element of this rank's first parameter after these steps."""
    step, count = trainer.step, itertools.count(1)

    def drifting(state, *arguments):
        result = step(state, *arguments)
        if next(count) in steps:
            weight = next(state.stages.parameters()).detach()
            weight.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)
        return result

    trainer.step = drifting


WEIGHTS = {
    "weight": lambda spec: True,
    "norm": lambda spec: "norm" in spec.name,
    "split": lambda spec: spec.dim is not None,
}


def plant_flip(kind: str, bit: int, steps: list[int]) -> None:
    """Flip a bit of a weight or of optimizer state after these steps, of a gradient in them."""
    step, update, count = trainer.step, zero.Optimizer.step, itertools.count(1)
    now: list = [0, None]

    def flip(values: torch.Tensor) -> None:
        values.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)

    def stepping(state, *arguments):
        now[:] = next(count), state
        result = step(state, *arguments)
        if now[0] in steps and kind in WEIGHTS:
            weights = (p for p in state.stages.parameters() if WEIGHTS[kind](p.spec))
            flip(next(weights).detach())
        elif now[0] in steps and kind != "gradient":
            shard = state.optimizer.owned()[0]
            values = shard.read(kind, shard.start, shard.stop).clone()
            flip(values)
            shard.write(kind, shard.start, values)
        return result

    def updating(self, *arguments, **options):
        if now[0] in steps and kind == "gradient":
            flip(next(now[1].stages.parameters()).main_grad)
        return update(self, *arguments, **options)

    trainer.step, zero.Optimizer.step = stepping, updating


def main() -> None:
    kind, _, what = sys.argv[1].partition(":")
    tensor, _, bit = what.partition(":")
    plant = {
        "nan": plant_nan,
        "drift": plant_drift,
        "huge": lambda steps: plant_drift(steps, bit=30),
        "flip": lambda steps: plant_flip(tensor, int(bit), steps),
    }[kind]
    rank, steps = int(sys.argv[2]), [int(step) for step in sys.argv[3].split(",")]
    launch = discover()
    if launch.rank == rank:
        plant(steps)
    trainer.main(validation.check(parse(sys.argv[4:]), launch.size), launch)


if __name__ == "__main__":
    main()
