"""Checks and printed lines before step 1: where ranks run, and whether nodes lack something.

    introduce(config, context, "precision: bf16 ...")     every rank's place, warnings, node checks
    check_compiler(kernels, "cuda", "n1")                 before a kernel is compiled
    warms_up(config, "cuda")                              whether passes come before step 1
    check_room(config, context, needed=10**9, say=print)  memory and disk for checkpoints

The checks of nodes are in preflight.py. A run on one node does not load that file unless
--preflight is given. The names of a run's kernels tell which code does a part of the step, such as
attention, where several can do it; torch.compile makes some of these kernels.
"""

import math
from collections.abc import Iterable
from typing import Any

from config.schema import Config
from distributed import placement
from distributed.context import Context
from distributed.placement import Say
from schedules.partition import StageSpec

# The parts that --compile compiles, as a text for the log and run.json.
COMPILED = (
    "norms with the sums before them, heads with rotary positions, SwiGLU (in evaluations and "
    "samples these run as they are), and the loss; by torch.compile"
)


def checks_nodes(config: Config, context: Context) -> bool:
    """Return whether nodes are checked before step 1: by default if there are several nodes.

    --preflight and --no-preflight override the default.
    """
    if config.run.preflight is None:
        return len(set(context.nodes)) > 1
    return config.run.preflight


def introduce(config: Config, context: Context, decided: str) -> None:
    """Print where every rank runs, and warnings; then run the pre-flight checks, if wanted.

    decided: a line for automatic decisions, such as the precision; may be empty. Called once before
    the model is built; collective over all ranks. Raise UserError, on every rank, if a check fails.
    """

    def say(line: str) -> None:
        """Print a line on rank 0."""
        if context.rank == 0:
            print(line, flush=True)

    if context.size > 1:
        say(placement.table(context.places))
    if decided:
        say(decided)
    for sentence in placement.placement_warnings(context.places, config.layout, context.job_nodes):
        say(f"note: {sentence}")
    pp = config.layout.pp
    if context.device.type == "cuda":
        if config.run.blocking and pp > 1:
            say(f"note: --blocking: with pp({pp}) it does not wait for every CUDA kernel")
        if not config.run.compile:
            say("note: on one H200 --compile made steps 8 to 72 % faster (docs/training.md)")
    if checks_nodes(config, context):
        from distributed import preflight

        preflight.check_nodes(config, preflight.Peers(context), say)


def check_room(config: Config, context: Context, needed: int, say: Say) -> None:
    """Check that memory and disk have room for a checkpoint, in a run whose nodes are checked.

    needed: bytes of a checkpoint, on rank 0. say: prints a line on rank 0. Collective over all
    ranks; raise UserError if the run is to save checkpoints and has no room for them.
    """
    if checks_nodes(config, context):
        from distributed import preflight

        preflight.check_room(config, context, needed, say)


def check_compiler(kernels: dict[str, str], device: str, node: str) -> None:
    """Raise UserError if a kernel needs torch.compile and this node lacks a compiler or triton.

    kernels: a text about the chosen kernels by kind: "attention", and with --compile "compiled".
    Attention by torch's flex_attention is compiled too. device: cpu or cuda. node: the name of this
    node, for the message. Without this check the run would fail in the first step.
    """
    if "flex_attention" not in kernels["attention"] and "compiled" not in kernels:
        return
    from distributed import compiler  # here, since most runs compile nothing

    compiler.check(kernels, device, node)


def kernel_names(config: Config, optimizer: str, attention: str, source: str) -> dict[str, str]:
    """Return the names of a run's kernels by kind, for the log and run.json.

    optimizer, attention: the names of the kernels that the trainer has chosen. source: the text
    about how samples are read.
    """
    kernels = {"optimizer": optimizer, "attention": attention, "data": source}
    if config.run.compile:
        kernels["compiled"] = COMPILED
    return kernels


def check_parameter_count(
    spec: StageSpec,
    parameters: Iterable[Any],
    counted_elsewhere: Iterable[Any],
) -> None:
    """Raise ValueError unless a stage has the number of parameters that was planned for it.

    Memory plans and FLOPs come from the planned numbers: they would be wrong without an error.
    spec: the stage as it was planned. parameters: the parameters of the stage as it was built.
    counted_elsewhere: the parameters that were planned for another stage.
    """
    skipped = {id(p) for p in counted_elsewhere}
    built = 0
    for p in parameters:
        if p.requires_grad and id(p) not in skipped:
            # The plan counts whole parameters; this tensor rank may hold only a shard of `p`.
            built += math.prod(p.spec.shape)
    if built != spec.parameters:
        planned = f"{spec.parameters} were planned"
        raise ValueError(f"stage {spec.index} built {built} parameters, but {planned}")


def warms_up(config: Config, device: str) -> bool:
    """Return whether the run does a warm-up, a pass with one micro-batch, before step 1.

    It does with --compile, so that step 1 does not contain the compilation, and on GPUs with
    several pipeline ranks: a GPU loads a CUDA kernel at its first launch, and that launch waits
    until nothing runs on the device. A message to another rank is a running kernel too, until that
    rank receives it, so each first launch would delay the neighbours. Nothing waits for ever,
    though, in any action (Schedule.may_be_ahead).

    device: cpu or cuda. trainer.warm_up does the pass.
    """
    return config.run.compile or (device == "cuda" and config.layout.pp > 1)
