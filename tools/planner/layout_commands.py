"""Writes the command that trains on a layout: of train.py, or of the program of --for.

    shlex.join([*launcher(question), *command(question, layout)])

stand_ins(question, layout) says what the command has that the user did not give.
"""

import shlex
from dataclasses import replace

from base.console import as_typed
from base.errors import UserError
from config import schema
from config.command_line import to_words
from config.schema import Config
from tools.planner.questions import Question, flags

PMI = "--mpi=pmi2 starts MPICH and its kin; Open MPI needs --launch 'srun --mpi=pmix -n {ranks}'"
STEPS = 1000  # the value of --steps in the printed command, if the user gives no length of the run


def command(question: Question, layout: schema.Layout) -> list[str]:
    """Return the words of the command, without its launcher, that trains on a layout.

    It is a command of train.py, or of the program of --for.

    The command can be run as it is: if the user gave no data or no length, it has synthetic data or
    STEPS steps.
    """
    run = question.config
    if program := question.program:
        return program.words(run, layout, question.gpus, bool(question.options.fp8))
    words = train_arguments(question, layout)
    if "--data" not in words:
        words += ["--data", "synthetic"]
    if not _has_length(run):
        words += ["--steps", str(STEPS)]
    return [*as_typed("python train.py").split(), *words]


def train_arguments(question: Question, layout: schema.Layout) -> list[str]:
    """Return train.py's words for a layout, with all that the user gave and nothing in its place.

    If the user gave --model, they have --model too, and of the options of the model only those that
    the user gave in addition; otherwise they have all the model's sizes.
    """
    run = replace(question.config, layout=layout)
    name = question.options.model
    # Random tokens are the default; who has asked for them gets them in a batch file too.
    always = {"data"}.intersection(question.given)
    words = []
    for group in schema.GROUPS:
        words += to_words(getattr(run, group), "dp", always=always)
    if name:
        # The words of the model's sizes are the first of `words`, as `model` is the first group.
        # They are replaced by --model and the options that the user gave in addition.
        size_words = to_words(run.model)
        given = question.given
        model_words = ["--model", name, *to_words(run.model, always=given, only=given)]
        words[: len(size_words)] = model_words
    return words


def launcher(question: Question) -> list[str]:
    """Return the words that start the ranks: none on one GPU, mpirun on one node, else srun.

    --launch replaces them; raise UserError if its words cannot be read.
    """
    if given := question.options.launch:
        try:
            return shlex.split(given.replace("{ranks}", str(question.gpus)))
        except ValueError as error:
            raise UserError(f"--launch {given!r}: {error}") from None
    if question.program:
        nodes, node = _whole_nodes(question)
        return ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(node)]
    if question.gpus == 1:
        return []
    if question.gpus <= question.machine.node:
        return ["mpirun", "-n", str(question.gpus)]
    return ["srun", "--mpi=pmi2", "-n", str(question.gpus)]


def _whole_nodes(question: Question) -> tuple[int, int]:
    """Return the nodes of the question's GPUs, and the GPUs of each that are used."""
    node = min(question.machine.node, question.gpus)
    return -(-question.gpus // node), node


def _has_length(run: Config) -> bool:
    """Return whether the user gave the length of the run, in steps or samples."""
    return bool(run.training.steps or run.training.train_samples)


def stand_ins(question: Question, layout: schema.Layout) -> list[str]:
    """Return a line on what `command` chose for the user, and on the release it is for."""
    run = question.config
    missing: list[str] = []
    if question.program:
        fp8 = bool(question.options.fp8)
        missing += [question.program.release, *question.program.notes(run, layout, fp8)]
    elif run.data.data == ("synthetic",):
        missing.append("--data synthetic is random tokens: give the prefix of your corpus")
    if not _has_length(run) and not question.program:
        missing.append(f"--steps {STEPS} is an example: give your length")
    if question.has_default_batch:
        missing.append(f"{question.batch}: give --global-batch-size or --batch-tokens")
    lines = [f"  {'; '.join(missing)}"] if missing else []
    launched = question.options.launch or question.program
    if not launched and question.gpus > question.machine.node:
        lines.append(f"  {PMI}")
    return lines


def layout_flags(layout: schema.Layout, question: Question) -> list[str]:
    """Return the command-line words of a layout: train.py's, or those of --for."""
    if program := question.program:
        return program.layout_words(question.config, layout)
    return flags(layout)


def flags_text(layout: schema.Layout, question: Question) -> str:
    """Return the command-line flags of a layout as printed text: train.py's, or those of --for."""
    return " ".join(layout_flags(layout, question)) or "(train.py's defaults)"
