"""Prints, as JSON, how often the host stops in each of CASES, on a fake GPU."""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

# Name: an expression, and the stops of the host in it, by what is done; WAITS for the device, or
# for the COPY alone. x: 4 x 4 on the device, m: a mask there, i: indices there, c: on the host.
WAITS, COPY = "host read", "copy"
CASES = {
    "item": ("x.sum().item()", [(WAITS, "a number of the device")]),
    "truth": ("bool((x > 0).any())", [(WAITS, "a number of the device")]),
    "a list of numbers": ("x.tolist()", [(WAITS, "values of the device")]),
    "index by a number": ("x[i[0]]", [(WAITS, "a number of the device")]),
    "slice by a number": ("x[: i[0]]", [(WAITS, "a number of the device")]),
    "equal": ("torch.equal(x, x)", [(WAITS, "a comparison of values")]),
    "allclose": ("torch.allclose(x, x)", [(WAITS, "a comparison of values")]),
    "nonzero": ("x.nonzero()", [(WAITS, "nonzero")]),
    "where": ("torch.where(m)", [(WAITS, "nonzero")]),
    "write to a mask": ("x.__setitem__(m, 0.0)", [(WAITS, "an index that is a mask")]),
    "index of the host": ("x[torch.tensor([0, 1])]", [(WAITS, "an index from the host")]),
    "to the host": ("x.cpu()", [(WAITS, "a copy to the host")]),
    "into memory of the host": ("c.copy_(x, non_blocking=True)", [(WAITS, "a copy to the host")]),
    "to the device": ("c.to('cuda')", [(WAITS, "a copy to the device")]),
    "pinned, waiting": ("c.pin_memory().to('cuda')", [(WAITS, "a copy to the device")]),
    "a scalar": ("torch.tensor(1.0, device='cuda')", [(WAITS, "a copy to the device")]),
    "a list": ("torch.tensor([1, 2], device='cuda')", [(WAITS, "a copy to the device")]),
    "not pinned": (
        "c.to('cuda', non_blocking=True)",
        [(COPY, "a copy from memory that is not pinned")],
    ),
    "synchronize": ("torch.cuda.synchronize()", [(WAITS, "synchronize")]),
    "stream": ("torch.cuda.current_stream().synchronize()", [(WAITS, "synchronize")]),
    "event": ("torch.cuda.Event().synchronize()", [(WAITS, "synchronize")]),
    "shape by values": ("x[m]", "aten.index.Tensor at tests/stops_worker.py"),
    "unique": ("torch.unique(x)", "aten._unique2.default at tests/stops_worker.py"),
    # These operations do not stop the host.
    "pinned": ("c.pin_memory().to('cuda', non_blocking=True)", []),
    "to pinned memory": ("x.to('cpu', non_blocking=True)", []),
    "gather": ("x[i] + x.index_select(0, i)", []),
    "fill": ("x.masked_fill(m, 0.0) + torch.full((4,), 2.0, device='cuda')", []),
    "number of the host": ("x * torch.tensor(2.0) + 3.0", []),
    "norm": ("torch.nn.utils.clip_grad_norm_([x], 1.0)", []),
    # In torch 2.11 fake tensors refuse the first, and builds for CUDA ask the driver in the second.
    "product in fp32": ("torch.addmm(x, *[x.bfloat16()] * 2, out_dtype=x.dtype, out=x)", []),
    "first tensor": ("torch._subclasses.fake_tensor.init_gpu_context(x.device)", []),
    "sort": ("x.sort(), x.topk(2), x.isfinite().all()", []),
}


def main() -> None:
    """Evaluate every expression; where its shape follows from values, how the error begins."""
    from tools.emulator import device_guard

    device_guard.load()
    import torch

    from base.errors import UserError
    from tools.emulator.fake_devices import fake_devices
    from tools.emulator.recording import recording_context

    found = {}
    for name, (expression, _) in CASES.items():
        context = recording_context(1, 0, 1)
        with fake_devices(context, "GPU"):
            x, c = torch.zeros(4, 4, device="cuda"), torch.zeros(4, 4)
            names = {"torch": torch, "x": x, "c": c, "m": x > 0, "i": x[0].long()}
            try:
                eval(expression, names)
                stops = [(event.kind, event.op) for event in context.trace.events]
                found[name] = [stop for stop in stops if stop[0] in (WAITS, COPY)]
            except UserError as error:
                found[name] = str(error).partition(":")[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
