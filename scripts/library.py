"""Trine as a library: it trains GPTs in any layout, and plans the fastest.

    import trine

    config = trine.parse("--model gpt2-124m --steps 10 --global-batch-size 8 --device cpu")
    state = trine.build(config)
    samples = trine.read_data(config).train
    for consumed, lr in trine.steps(config):
        print(trine.step(state, samples, consumed, lr).loss)

    trine.plan("layouts --model 176b --gpu a100-80 --nodes 48")["ranked"][0]
    trine.weights("runs/demo")["head.weight"].shape
    trine.generate(trine.load("runs/demo"), "Once upon a time")

All other modules are here under their names: `from trine.model import Stage`. To import this one
loads no package; a function that needs torch imports it. Nothing that is imported sets a hook, a
signal or a stream. A mistake of the caller is a `UserError` with one sentence. What a run does
between its steps (log, save, evaluate, watch) is done by the program, trine-train.

The pages are docs/library.md. In a clone this file is scripts/library.py.
"""

import argparse
import dataclasses
import math
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from base import errors
from base.cli import VERSION as __version__
from base.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from config.schema import Config
    from corpora.text import Text
    from data import Samples, Splits
    from distributed.context import Context
    from sample import OpenedCheckpoint
    from trainer import ModelState, TrainState
    from zero import StepResult

__all__ = [
    "LoadedModel",
    "UserError",
    "__version__",
    "build",
    "evaluate",
    "generate",
    "load",
    "parse",
    "plan",
    "read_data",
    "start",
    "step",
    "steps",
    "weights",
]

# Options that a loop of one's own would not follow, and what does.
NOT_HERE = {
    "resume": "trine.load has the weights of a checkpoint, and trine-train goes on with a run",
    "branch_from": "trine-train begins a branch of a run",
    "stages": "trine-train trains in stages",
    "phases": "trine-train trains in phases",
}


def plan(question: str | Sequence[str]) -> Any:
    """Return the answer to a question of trine-plan as data: dictionaries, lists, numbers, texts.

    question: the arguments of trine-plan, such as "layouts --model 176b --gpu a100-80 --nodes 48".
    Its `--json` prints the same. Needs numpy, and no torch.
    """
    with errors.installed("planning needs no other, `pip install numpy`"):
        from plan import ask

    return ask(_arguments(question)).data


def parse(options: str | Sequence[str], ranks: int = 1) -> "Config":
    """Return the configuration of a run, checked; all of trine-train's options are taken.

    options: such as "--layers 2 --hidden 64 --tp 2", also "--config run.toml". ranks: how many
    ranks the run has (dp follows). What trine-train would print as a note is a warning.
    """
    from config import command_line, validation

    request = command_line.parse_request(_arguments(options))
    for name in sorted(request.given & NOT_HERE.keys()):
        flag = f"--{name.replace('_', '-')}"
        raise UserError(f"{flag} is not for trine.parse: {NOT_HERE[name]}")
    for note in request.notes:
        warnings.warn(note, stacklevel=2)
    return validation.check(request.config, ranks)


def start(config: "Config") -> "Context":
    """Return this process's device and connections to the other ranks; collective over all ranks.

    A model on a GPU, or on the several ranks of mpirun, srun or torchrun, needs it; call it once,
    before anything that uses torch. Alone, a process gets no watchdog.
    """
    from distributed import context, launch

    found = launch.discover()
    run = config.run
    if found.size == 1:
        run = dataclasses.replace(run, watchdog=False)
    with errors.installed():
        context.prepare(run, config.layout.pp, config.model.experts)
        return context.start(found, run)


def read_data(config: "Config") -> "Splits":
    """Return the samples of a run: `train`, `validation`, `test` and `eval_sets`."""
    with errors.installed():
        import data

    return data.build(config)


def build(config: "Config", context: "Context | None" = None) -> "TrainState":
    """Return this rank's model, pipeline, batch reader and optimizer; collective over all ranks.

    config: of `parse`. context: of `start`; None for one rank on the CPU.
    """
    with errors.installed():
        import trainer

    _check_device(config, context)
    config, _, notes = trainer.decide(config, context)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return trainer.build(config, context)


def steps(config: "Config") -> Iterator[tuple[int, float]]:
    """Yield (consumed, lr) for each step of a run: its first sample's number, its learning rate."""
    from config.learning_rate import rate_at
    from config.timeline import Timeline

    timeline = Timeline(config)
    consumed = 0
    while consumed < timeline.total_samples:
        batch = timeline.batch_at(consumed)
        if not timeline.passes_over(consumed, batch):
            yield consumed, rate_at(timeline, consumed, 0, batch)
        consumed += batch


def step(state: "TrainState", samples: "Samples", consumed: int, lr: float) -> "StepResult":
    """Do one optimizer step on the global batch that begins at sample `consumed`; collective.

    Return its `loss`, `grad_norm` and whether it was `skipped`.
    """
    import trainer

    return trainer.step(state, samples, consumed, lr)


def evaluate(state: "ModelState", samples: "Samples", count: int) -> float:
    """Return the mean loss per token, in nats, of the first `count` samples; collective."""
    import trainer

    return trainer.evaluate(state, samples, count)


def weights(run: str, *, ema: bool = False) -> "dict[str, np.ndarray]":
    """Return the whole tensors of a checkpoint by name, whatever layout it was saved in.

    run: the folder of a checkpoint, or of a run, whose newest is taken. ema: their average
    (--ema). Each is fp32 or fp64, as it was saved. Checksums are compared first. Needs h5py.
    """
    with errors.installed():
        from checkpointing import folders
        from checkpointing.index import Index, check_files

    folder = folders.find_checkpoints(run)[0]
    check_files(folder)
    with Index(folder) as index:
        kind = index.weights_kind(ema)
        return {name: index.read_whole(kind, name) for name in index.shapes}


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint's model, ready to be evaluated (`state`) and to continue texts."""

    state: "ModelState"
    text: "Text"
    checkpoint: "OpenedCheckpoint"


def load(
    run: str, options: str | Sequence[str] = (), context: "Context | None" = None
) -> LoadedModel:
    """Return the model of a checkpoint, without an optimizer; collective over all ranks.

    run: as of `weights`. options: --ema, --tokenizer, --tp, --pp, --precision and --device of
    trine-sample; fp32 by default. context: of `start`; None for one rank on the CPU.
    """
    with errors.installed():
        import sample

    given = sample.parse([run, *_arguments(options)])
    asked = {"prompt", "chat", "eval_data", "eval_tasks", "scores", *sample.PROMPT_DEFAULTS}
    for name in sorted(asked - {"tokenizer"}):
        if getattr(given, name, None):
            raise UserError(f"--{name.replace('_', '-')} is not for trine.load: it loads a model")
    opened = sample.open_checkpoint(run, given.ema)
    taken = sample.taken_from(opened, given)
    config = sample.make_config(given, opened.model, context.size if context else 1, taken)
    _check_device(config, context)
    text = opened.text(getattr(given, "tokenizer", None))
    state = sample.load_model(config, opened.folder, given.ema, context)
    return LoadedModel(state, text, opened)


def generate(
    model: LoadedModel,
    prompt: str,
    *,
    max_tokens: int | None = None,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 1234,
) -> str:
    """Return the prompt and its continuation, as trine-sample prints it; collective.

    max_tokens: the most new tokens; None: 100, or what the model's context has left. temperature:
    0 takes the likeliest token. top_p: nucleus sampling.
    """
    import sample
    import trainer
    from inference.decoding import Decoder, SamplingParams

    numbers = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sample.check_numbers(argparse.Namespace(**numbers, tokenizer=None))
    ids = model.text.encode(prompt, "the prompt")
    count = model.checkpoint.new_tokens(len(ids), max_tokens)
    state = model.state
    length = state.length
    trainer.set_length(state, len(ids) + count)  # of the tables for positions
    decoder = Decoder(state.pipeline, state.factory, state.config)
    how = SamplingParams(temperature, top_p, seed)
    new = decoder.generate(ids, count, how, model.checkpoint.ends(model.text))
    trainer.set_length(state, length)
    return model.text.decode(ids + new)


def _arguments(options: str | Sequence[str]) -> list[str]:
    """Return the arguments of a command line; one text is split as a shell does."""
    try:
        found = shlex.split(options) if isinstance(options, str) else [*map(str, options)]
    except ValueError as error:  # a quote that does not end
        raise UserError(f"{options!r}: {error}") from None
    if not {"-h", "--help"}.isdisjoint(found):
        raise UserError("--help is of the programs: `trine-train --help all`, `trine-plan --help`")
    return found


def _check_device(config: "Config", context: "Context | None") -> None:
    """Raise UserError if the options ask for a GPU, or several ranks, and there is no context."""
    import torch

    if context is not None:
        return
    ranks = math.prod(config.layout.axes.values())
    if ranks > 1:
        raise UserError(f"{ranks} ranks need a context: trine.start(config)")
    asked = config.run.device
    if asked == "cuda" or (asked == "auto" and torch.cuda.is_available()):
        raise UserError(
            f"--device {asked}: a model on the GPU needs a context, trine.start(config); "
            "--device cpu builds it on the CPU"
        )


class _Package(ModuleType):
    """This module: `trine.plan` stays the function when the module trine/plan.py is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [*__all__]


sys.modules[__name__].__class__ = _Package
