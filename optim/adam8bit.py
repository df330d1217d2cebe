"""AdamW whose moments have 8 bits; update_rules.py makes it for --optimizer adamw8bit."""

import importlib.util
import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from config.messages import UserError
from optim.precision import BLOCK


class Adam8bit:
    """AdamW with both moments in 8 bits, one scale per BLOCK (arXiv 2110.02861), by bitsandbytes.

    Attributes and methods are those of the rules of update_rules.py. Masters are flat and have a
    multiple of BLOCK elements. A moment is stored as an 8-bit code, whose level (self.maps) is
    multiplied by the block's scale. The levels of the signed map are made symmetric: then the
    largest moment of a block always has level 1 or -1, and a moment that is written to a checkpoint
    in fp32 and read back gets the same bits.
    """

    def __init__(
        self,
        masters: list[Tensor],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ):
        if importlib.util.find_spec("bitsandbytes") is None:
            package = "the package bitsandbytes: pip install bitsandbytes"
            raise UserError(f"--optimizer adamw8bit needs {package}")
        # Silence a warning about an unused 4-bit kernel on CPUs.
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
        import bitsandbytes
        from bitsandbytes import functional

        self.kernel = f"bitsandbytes {bitsandbytes.__version__} 8-bit AdamW on the matrices"
        self.library: Any = functional  # Any: its annotations list too few arguments
        self.masters = masters
        self.steps = 0
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        device = masters[0].device if masters else torch.device("cpu")
        signed = functional.create_dynamic_map(signed=True)
        signed[0] = -1.0
        unsigned = functional.create_dynamic_map(signed=False)
        self.maps = {"exp_avg": signed.to(device), "exp_avg_sq": unsigned.to(device)}
        self.codes = {k: [self._zero_codes(m, k) for m in masters] for k in self.maps}
        self.scales = {k: [m.new_zeros(m.numel() // BLOCK) for m in masters] for k in self.maps}

    def _zero_codes(self, master: Tensor, kind: str) -> Tensor:
        """Return the codes of zero moments, uint8, one for each element of the master."""
        zero = int((self.maps[kind] == 0).nonzero()[0])
        return torch.full((master.numel(),), zero, dtype=torch.uint8, device=master.device)

    def update(self, gradients: list[Tensor], lr: float) -> None:
        """Update every master once, by bitsandbytes' blockwise kernel."""
        self.steps += 1
        for i, (master, gradient) in enumerate(zip(self.masters, gradients)):
            codes = [of_kind[i] for of_kind in self.codes.values()]
            scales = [of_kind[i] for of_kind in self.scales.values()]
            unused = (0.0, 0.0)  # beta3 and alpha belong to another optimizer
            numbers = (*self.betas, *unused, self.eps, self.steps, lr)
            states = (*self.maps.values(), *scales)
            self.library.optimizer_update_8bit_blockwise(
                "adam",
                gradient,
                master,
                *codes,
                *numbers,
                *states,
                weight_decay=self.weight_decay,
            )

    def set_steps(self, steps: int) -> None:
        self.steps = steps

    def state_bytes(self) -> int:
        parts = [*self.codes.values(), *self.scales.values()]
        return sum(t.nbytes for tensors in parts for t in tensors)

    def read(self, kind: str, index: int, start: int, stop: int) -> Tensor:
        first = start // BLOCK
        last = -(-stop // BLOCK)
        codes = self.codes[kind][index][first * BLOCK : last * BLOCK]
        scales = self.scales[kind][index][first:last]
        decode = self.library.dequantize_blockwise
        levels = self.maps[kind]
        values = decode(codes, absmax=scales, code=levels, blocksize=BLOCK)
        return values[start - first * BLOCK :][: stop - start]

    def write(self, kind: str, index: int, start: int, values: Tensor) -> None:
        """Encode `values` from `start` on; raise ValueError if no block begins at `start`."""
        if start % BLOCK:
            raise ValueError(f"8-bit state is written in blocks of {BLOCK}, not from {start} on")
        count = -(-len(values) // BLOCK) * BLOCK
        blocks = F.pad(values, (0, count - len(values))).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        # The library's quantisation sometimes misses the nearest code by one: find the nearest.
        levels = self.maps[kind]
        middles = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(blocks / scales.clamp(min=1e-38)[:, None], middles)
        self.codes[kind][index][start : start + count] = codes.view(-1).to(torch.uint8)
        self.scales[kind][index][start // BLOCK : (start + count) // BLOCK] = scales


def check_blocks(p: Any) -> None:
    """Raise UserError if tensor parallelism cuts a matrix inside a block of 8-bit state."""
    spec = p.spec
    run = math.prod(p.shape[spec.dim or 0 :])
    if spec.dim is not None and run % BLOCK and p.shape[spec.dim] < spec.shape[spec.dim]:
        raise UserError(
            f"--optimizer adamw8bit: tp cuts {spec.name} {spec.shape} into runs of {run} weights, "
            f"which is no multiple of its blocks of {BLOCK}; use a smaller --tp"
        )
