"""One rank of Trine in benchmarks/peers/peers.py.

    python benchmarks/peers/peer_trine.py [--write FOLDER] OPTIONS-OF-TRAIN ...

Its step is trainer.step: data, passes, reduction, clipping, update; with the watchdog, as a job has
it, and without log line and checkpoints, which no peer has. --write: write the initial weights, by
the names of the peers' modules, and end.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the project's own modules

import numpy as np
import torch

import data
import trainer
from base.errors import UserError, exit_with
from benchmarks.peers.peer_worker import LR, SEED, Answers, serve
from config import validation
from config.command_line import parse
from config.schema import Config
from distributed.context import Context, start
from distributed.launch import discover

NAMES = (  # Trine's, the peers'
    ("embedding.tokens", "tokens"),
    ("embedding.positions", "positions"),
    ("attention_norm", "norm1"),
    ("attention.qkv", "qkv"),
    ("attention.out", "out"),
    ("mlp_norm", "norm2"),
    ("mlp.up", "up"),
    ("mlp.down", "down"),
    ("head.norm", "norm"),
)


def write_weights(config: Config, folder: Path) -> None:
    """The weights that every side starts with, one file each; q, k and v are rows by heads."""
    for p in trainer.build(config).stages.parameters():
        name, values = peers_name(p.spec.name), p.detach()
        matrix = name.endswith("weight") and values.dim() > 1
        values = values.reshape(-1, values.shape[-1]) if matrix else values.flatten()
        np.save(folder / f"{name}.npy", values.numpy())


def peers_name(name: str) -> str:
    """The name of a tensor in the peers' modules."""
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs)
    return name


def run(config: Config, context: Context, answers: Answers) -> None:
    """Build the run and answer commands until there are no more; collective over all ranks."""
    state, model = trainer.build(config, context), config.model
    samples = data.Synthetic(model.vocab_size, model.seq_length, SEED)
    size = config.training.global_batch_size

    def step(number: int) -> tuple[float, float]:
        result = trainer.step(state, samples, number * size, LR)
        return result.loss, result.grad_norm

    def barrier() -> None:
        state.factory.mesh.world.all_reduce(torch.zeros(1)).wait()

    serve(answers, step, barrier)


def main(words: list[str]) -> None:
    """Write weights, or be a rank."""
    folder = Path(words[1]) if words[:1] == ["--write"] else None
    options = parse(words[2:] if folder else words)
    try:
        launch = discover()
        config = validation.check(options, launch.size)
        if folder:
            return write_weights(config, folder)
        answers = Answers()
        context = start(launch, config.run)
    except UserError as mistake:
        exit_with(mistake)
    with context.failing_loudly():
        run(config, context, answers)
    context.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
