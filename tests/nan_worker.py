"""A training run in which one rank's activations are NaN at some of its steps.

mpirun -n 2 python tests/nan_worker.py RANK STEP,STEP,... train.py's arguments
"""

import itertools
import sys

import model
import trainer
from config import validation
from config.command_line import parse
from distributed.launch import discover


def plant(steps: list[int]) -> None:
    """Make this rank's stage return NaN in these steps, if it does one forward pass in each."""
    forward, count = model.Stage.forward, itertools.count(1)

    def poisoned(self, x, labels):
        y = forward(self, x, labels)
        return y * float("nan") if next(count) in steps else y

    model.Stage.forward = poisoned


def main() -> None:
    rank, steps = int(sys.argv[1]), [int(step) for step in sys.argv[2].split(",")]
    launch = discover()
    if launch.rank == rank:
        plant(steps)
    trainer.main(validation.check(parse(sys.argv[3:]), launch.size), launch)


if __name__ == "__main__":
    main()
