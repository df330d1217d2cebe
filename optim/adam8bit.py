"""AdamW whose moments have 8 bits; update_rules.py makes it for --optimizer adamw8bit."""

import importlib.util
import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from base.errors import LayoutError, PackageError
from optim.precision import BLOCK


class Adam8bit:
    """AdamW with both moments in 8 bits, one scale per BLOCK (arXiv 2110.02861), by bitsandbytes.

    It has the attributes and methods of the rules in update_rules.py. Masters are flat and have a
    multiple of BLOCK elements. A moment is stored as an 8-bit code, the index of one of 256 levels
    from -1 to 1 (self.maps). The moment is that level times the scale of its block, which is the
    largest absolute value in the block. The levels of the signed map are made symmetric: then the
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
        """Make zero 8-bit moments of the masters; UserError if bitsandbytes is not installed."""
        if importlib.util.find_spec("bitsandbytes") is None:
            package = "the package bitsandbytes: pip install bitsandbytes"
            raise PackageError(f"--optimizer adamw8bit needs {package}")
        # Silence a warning about an unused 4-bit kernel on CPUs.
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
        import bitsandbytes
        from bitsandbytes import functional

        self.kernel = f"bitsandbytes {bitsandbytes.__version__} 8-bit AdamW on the matrices"
        self.library: Any = functional  # Any: its annotations lack arguments that are used here
        self.masters = masters
        self.steps = 0
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        device = masters[0].device if masters else torch.device("cpu")
        signed = functional.create_dynamic_map(signed=True)
        # A block's values are divided by its largest absolute value, so both 1 and -1 must be
        # levels. The library's highest level is 1, but its lowest is above -1.
        signed[0] = -1.0
        unsigned = functional.create_dynamic_map(signed=False)
        self.maps = {"exp_avg": signed.to(device), "exp_avg_sq": unsigned.to(device)}
        # By kind of moment, for each master: `codes` has the number of a level of `maps` for each
        # element, and `scales` the factor of the levels for each block.
        self.codes: dict[str, list[Tensor]] = {}
        self.scales: dict[str, list[Tensor]] = {}
        for kind in self.maps:
            self.codes[kind] = [self._zero_codes(master, kind) for master in masters]
            self.scales[kind] = [master.new_zeros(master.numel() // BLOCK) for master in masters]

    def _zero_codes(self, master: Tensor, kind: str) -> Tensor:
        """Return the codes of a moment that is zero, uint8, one for each element of the master.

        A code is the number of a level in `maps`. kind: "exp_avg" or "exp_avg_sq"; the two have
        different levels, and so another code for 0.
        """
        zero = int((self.maps[kind] == 0).nonzero()[0])
        return torch.full((master.numel(),), zero, dtype=torch.uint8, device=master.device)

    def update(self, gradients: list[Tensor], lr: float) -> None:
        """Update every master once, by bitsandbytes' blockwise kernel.

        gradients: in the shapes of the masters, fp32. lr: the learning rate of this step.
        """
        self.steps += 1
        beta1, beta2 = self.betas
        for i, (master, gradient) in enumerate(zip(self.masters, gradients)):
            self.library.optimizer_update_8bit_blockwise(
                "adam",
                gradient,
                master,
                self.codes["exp_avg"][i],
                self.codes["exp_avg_sq"][i],
                beta1,
                beta2,
                0.0,  # beta3, which Adam does not use
                0.0,  # alpha, which Adam does not use
                self.eps,
                self.steps,
                lr,
                self.maps["exp_avg"],
                self.maps["exp_avg_sq"],
                self.scales["exp_avg"][i],
                self.scales["exp_avg_sq"][i],
                weight_decay=self.weight_decay,
            )

    def set_steps(self, steps: int) -> None:
        """Set the number of updates so far, which Adam's bias correction needs.

        Called when a checkpoint has been loaded.
        """
        self.steps = steps

    def state_bytes(self) -> int:
        """Return the bytes of the optimizer's state: the moments' codes, and their scales."""
        tensors = [*self.codes.values(), *self.scales.values()]
        return sum(tensor.nbytes for tensors_of_kind in tensors for tensor in tensors_of_kind)

    def read(self, kind: str, index: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a moment of master `index`: flat, in fp32.

        kind: "exp_avg" or "exp_avg_sq". Whole blocks are decoded: those that contain these
        elements. Called when a checkpoint is saved, or when replicas are compared.
        """
        first_block = start // BLOCK
        stop_block = -(-stop // BLOCK)
        first = first_block * BLOCK
        values = self.library.dequantize_blockwise(
            self.codes[kind][index][first : stop_block * BLOCK],
            absmax=self.scales[kind][index][first_block:stop_block],
            code=self.maps[kind],
            blocksize=BLOCK,
        )
        return values[start - first : stop - first]

    def write(self, kind: str, index: int, start: int, values: Tensor) -> None:
        """Encode `values`, flat, as elements of a moment of master `index` from `start` on.

        kind: "exp_avg" or "exp_avg_sq". Called when a checkpoint is loaded. Raise ValueError if no
        block begins at `start`.
        """
        if start % BLOCK:
            raise ValueError(f"8-bit state is written in blocks of {BLOCK}, not from {start} on")
        count = -(-len(values) // BLOCK) * BLOCK  # with the padding of the last block
        blocks = F.pad(values, (0, count - len(values))).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        # The library's own quantisation sometimes takes a code beside the nearest. Here the middles
        # between the levels are the borders, so each value gets the code of the nearest level.
        levels = self.maps[kind]
        middles = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(blocks / scales.clamp(min=1e-38)[:, None], middles)
        self.codes[kind][index][start : start + count] = codes.view(-1).to(torch.uint8)
        self.scales[kind][index][start // BLOCK : (start + count) // BLOCK] = scales


def check_blocks(p: Any) -> None:
    """Raise UserError if tensor parallelism cuts the parameter `p` inside a block of 8-bit state.

    Such a block would have other weights, and so another scale, than with another --tp. Called for
    each matrix with 8-bit state when the buckets are made.
    """
    spec = p.spec
    if spec.dim is None:
        return
    is_cut = p.shape[spec.dim] < spec.cut_shape[spec.dim]
    # Weights that are adjacent here and in the whole matrix, in which they may begin at any row if
    # the rows are not equal parts.
    run = math.prod(p.shape[spec.dim + (spec.rows is not None) :])
    if is_cut and run % BLOCK:
        raise LayoutError(
            f"--optimizer adamw8bit: tp cuts {spec.name} {spec.shape} into runs of {run} weights, "
            f"which is no multiple of its blocks of {BLOCK}; use a smaller --tp"
        )
