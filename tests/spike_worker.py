"""train.py with random tokens in some samples: `python THIS FIRST:STOP,... ARGUMENTS...`.

All other samples count up, so that the loss falls fast: a batch of random tokens is a spike.
"""

import dataclasses
import sys
from typing import Any

import numpy as np

import data
import trainer
from config import validation
from config.command_line import parse
from distributed.launch import discover
from distributed.stop_conditions import Signals


class Planted:
    """The samples of a split with other tokens; everything else is the split's."""

    def __init__(self, samples: Any, planted: list[range], length: int, vocab_size: int):
        self.samples = samples
        self.planted = planted
        self.random = data.Synthetic(vocab_size, length, seed=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.samples, name)

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, k: int) -> np.ndarray:
        if any(k in numbers for numbers in self.planted):
            return self.random.sample(k)
        return np.arange(k, k + self.random.seq_length + 1) % 8


def main() -> None:
    signals, launch = Signals(), discover()
    config = validation.check(parse(sys.argv[2:]), launch.size)
    build = data.build
    planted = [range(*map(int, word.split(":"))) for word in sys.argv[1].split(",")]

    def planting(config):
        splits = build(config)
        shape = config.model.seq_length, config.model.vocab_size
        return dataclasses.replace(splits, train=Planted(splits.train, planted, *shape))

    data.build = planting
    trainer.main(config, launch, signals)


if __name__ == "__main__":
    main()
