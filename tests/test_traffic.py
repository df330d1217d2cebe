"""If this failed, the loss would launch more kernels, or move the logits through memory more often.

What fits in the GPU's L2 cache is taken to stay there between kernels.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config.buffer_sizes import LOGITS_AT_ONCE
from distributed.mesh import Mesh
from layers.loss import cross_entropy
from parallel import ParamSpec

# Half of the L2 of an H100, which has 50 MB in two halves: a kernel reads one tensor of that size
# and writes another.
CACHED = 25e6
META = torch.device("meta")
# They read or write one number of a row, or none.
FEW = ("aten::empty", "aten::new_empty", "aten::gather", "aten::scatter")


class Traffic(TorchDispatchMode):
    """Counts the `launches` of operations, and `bytes` that they move of storages above CACHED."""

    bytes = 0
    launches = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        returned = [r.alias_info for r in function._schema.returns]
        view = bool(returned) and all(alias and not alias.is_write for alias in returned)
        if view:
            return result
        self.launches += not function._schema.name.startswith(("aten::empty", "aten::new_empty"))
        if function._schema.name.startswith(FEW):
            return result
        arguments = zip(function._schema.arguments, args)
        written = [value for of, value in arguments if of.alias_info and of.alias_info.is_write]
        # A tensor that is overwritten is returned, too.
        inputs = {name: value for name, value in (kwargs or {}).items() if name != "out"}
        read = [x for x in tree_leaves((args, inputs)) if all(x is not w for w in written)]
        read += written if not function._schema.name.endswith("copy_") else []
        for x in [*read, *tree_leaves(result)]:
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() > CACHED:
                self.bytes += x.numel() * x.element_size()
        return result


def test_the_loss_reads_and_writes_the_logits_a_few_times(monkeypatch):
    """Reads of 2 bytes for the largest and in each pass, fp32 temporaries that are written and read
    two or three times, and the gradient's 2 bytes. In slices that stay in the cache it would be 8
    bytes a number, but 852 more launches.
    """
    monkeypatch.setitem(LOGITS_AT_ONCE, "meta", LOGITS_AT_ONCE["cuda from 9.0"])
    words, spec = 151936, ParamSpec("w", (151936, 1), 0, 0, 151936, True)
    logits = torch.empty(4096, 1, words, dtype=torch.bfloat16, device=META, requires_grad=True)
    labels = torch.empty(4096, 1, dtype=torch.int64, device=META)
    scaled = logits * 1.0
    with Traffic() as traffic:
        losses = cross_entropy(scaled, labels, Mesh().tp, spec)
        torch.autograd.grad(losses.sum(), scaled)
    assert traffic.bytes <= 40 * logits.numel()
    assert traffic.launches <= 110  # 60 of 10 slices, and those of (s, b) numbers
