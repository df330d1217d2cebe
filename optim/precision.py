"""The number format of a run: decides --precision auto and checks that the GPUs support a format.

    config, sentence = decide(config, context)    replaces auto by a format; gives a line to print
    check(config, context)                        raises UserError if this rank's GPU lacks it
    dtype = DTYPES[config.training.precision]

costs/hardware.py applies the same rule to the machine that a plan is made for.
"""

import torch

from base.errors import UserError
from config.schema import Config
from distributed.context import Context
from distributed.store import StoreExchange, first_given

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# The number of weights that share a scale in 8-bit AdamW; bitsandbytes' kernels have this number.
BLOCK = 256


def decide(config: Config, context: Context | None) -> tuple[Config, str]:
    """Replace --precision auto by a format that the GPUs of all ranks have.

    Return the new configuration, and a line to print about the decision, which is empty if the user
    gave a precision. Collective over all ranks if they have GPUs. context: this rank's connections
    to the other ranks; None for one rank on the CPU.
    """
    if config.training.precision != "auto":
        return config, ""
    if context is None or context.device.type != "cuda":
        return config.with_precision("fp32"), "precision: fp32 (--precision auto on CPUs)"
    # All ranks must use one format, and nodes may have different GPUs. So each rank tells rank 0
    # the name of its GPU if the GPU has no bf16, or an empty text.
    gpu_without_bf16 = "" if _has_bf16() else torch.cuda.get_device_name(context.device)
    exchange = StoreExchange(context.store, context.rank, context.size, "precision")
    first = exchange.agree(gpu_without_bf16, first_given, "GPUs without bf16")
    if first is None:
        return config.with_precision("bf16"), "precision: bf16 (--precision auto on these GPUs)"
    rank, name = first
    return config.with_precision("fp16"), (
        f"note: precision: fp16 (--precision auto), since the GPU of rank {rank}, {name}, has no "
        f"bf16 arithmetic; the loss is scaled (loss_scale)"
    )


def check(config: Config, context: Context) -> None:
    """Raise UserError if the precision is bf16 and this rank's GPU has no bf16 arithmetic.

    Called when a run or sample.py starts. CPUs are not checked: torch emulates missing arithmetic
    there, slowly. run.json and the start-up lines show the precision.
    """
    if context.device.type != "cuda" or config.training.precision != "bf16":
        return
    if not _has_bf16():
        name = torch.cuda.get_device_name(context.device)
        raise UserError(f"--precision bf16: {name} has no bf16 arithmetic; use fp16 or fp32")


def _has_bf16() -> bool:
    """Return whether this rank's GPU has bf16 arithmetic (Ampere or newer), without emulation."""
    return torch.cuda.is_bf16_supported(including_emulation=False)
