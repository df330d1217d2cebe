"""Training runs with audits in which a rank's products are wrong.

    mpirun -n 4 python tests/audit_worker.py FAULT train.py's arguments

FAULT is JSON: {"rank", "product", "element", "bit", "from": the first step with the fault,
"chance": of each execution, default 1}; "null": none. product: the number of the product in the
passes of a micro-batch through this rank's stages. Its element (modulo their number) has that bit
flipped whenever it is computed. With "node" the rank has the fault on this node of Slurm alone.
Without it, the node is taken as replaced after a finding, if there is OUT/hang/case.json.
"""

import json
import os
import random
import sys
from typing import Any

from base import errors

with errors.installed():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import model
    import trainer
    from config import validation
    from config.command_line import parse
    from distributed.launch import discover

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linear", "matmul")
PRODUCTS += ("_scaled_dot_product_flash_attention_for_cpu",)
PRODUCTS += ("_scaled_dot_product_flash_attention_for_cpu_backward",)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class WrongProducts(TorchDispatchMode):
    """Counts the products of each micro-batch, and flips a bit of one of them."""

    def __init__(self, fault: dict) -> None:
        super().__init__()
        self.fault = fault
        self.count = 0  # products since the last forward pass of the rank's first stage began
        self.step = 0
        self.random = random.Random(fault.get("seed", 0))
        self.flips = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None):
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in PRODUCTS:
            return output
        self.count += 1
        fault = self.fault
        if self.count - 1 != fault["product"] or self.step < fault.get("from", 0):
            return output
        if self.random.random() < fault.get("chance", 1.0):
            result = output[0] if isinstance(output, tuple) else output
            if result.numel():  # an expert may have no tokens
                self.flips += 1
                flip(result, fault)
        return output


def flip(result: torch.Tensor, fault: dict) -> None:
    """Flip a bit of an element of a result, in its own memory."""
    bits = result.detach().view(INTEGERS[result.element_size()])
    where = []
    place = fault["element"] % result.numel()
    for size in reversed(result.shape):
        where.append(place % size)
        place //= size
    bits[tuple(reversed(where))] ^= 1 << fault["bit"] % (8 * result.element_size() - 1)


def plant(fault: dict) -> WrongProducts:
    """Make this rank's products wrong from now on."""
    mode = WrongProducts(fault)
    forward, step = model.Stage.forward, trainer.step

    def counted(stage, *inputs, **options):
        mode.count = 0
        return forward(stage, *inputs, **options)

    def stepping(state, *arguments):
        mode.step = state.factory.mesh.recorder.place[1]
        return step(state, *arguments)

    model.Stage.forward, trainer.step = counted, stepping
    return mode


def main() -> None:
    fault = json.loads(sys.argv[1])
    launch = discover()
    config = validation.check(parse(sys.argv[2:]), launch.size)
    replaced = os.path.exists(os.path.join(config.run.out, "hang", "case.json"))
    if fault and "node" in fault:
        replaced = os.environ["SLURMD_NODENAME"] != fault["node"]
    if not fault or launch.rank != fault["rank"] or replaced:
        trainer.main(config, launch)
        return
    with plant(fault):
        trainer.main(config, launch)


if __name__ == "__main__":
    main()
