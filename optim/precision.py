"""The number format of a run: what --precision auto is on these devices, and what they lack.

    config, sentence = settled(config, context)    no longer auto, and what was decided
    check(config, context)                         UserError if this rank's GPU cannot compute so
    dtype = DTYPES[config.training.precision]

planner/hardware.py has the same rule for a machine that is only planned for.
"""

import torch

from config.messages import UserError
from config.schema import Config
from distributed.context import Context
from distributed.store import StoreExchange

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def settled(config: Config, context: Context | None) -> tuple[Config, str]:
    """The configuration with --precision auto decided, the same on every rank, and a sentence that
    says what was decided; it is empty if a precision was given.

    Collective over all ranks where they have GPUs. context: None for one rank on the CPU.
    """
    if config.training.precision != "auto":
        return config, ""
    if context is None or context.device.type != "cuda":
        return config.with_precision("fp32"), "precision: fp32 (--precision auto on CPUs)"
    lacking = "" if _has_bf16() else torch.cuda.get_device_name(context.device)
    exchange = StoreExchange(context.store, context.rank, context.size, "precision")
    names = exchange.gather("GPUs without bf16", lacking)
    without = [(rank, name) for rank, name in enumerate(names) if name]
    if not without:
        return config.with_precision("bf16"), "precision: bf16 (--precision auto on these GPUs)"
    rank, name = without[0]
    return config.with_precision("fp16"), (
        f"note: precision: fp16 (--precision auto), since the GPU of rank {rank}, {name}, has no "
        f"bf16 arithmetic; the loss is scaled (--loss-scale)"
    )


def check(config: Config, context: Context) -> None:
    """Raise UserError if the GPU has no arithmetic of that precision. torch emulates it on a CPU,
    slowly: run.json and the start-up lines say which precision runs.
    """
    if context.device.type != "cuda" or config.training.precision != "bf16":
        return
    if not _has_bf16():
        name = torch.cuda.get_device_name(context.device)
        raise UserError(f"--precision bf16: {name} has no bf16 arithmetic; use fp16 or fp32")


def _has_bf16() -> bool:
    """Whether this rank's GPU, the current one, computes in bf16 itself: from Ampere on."""
    return torch.cuda.is_bf16_supported(including_emulation=False)
