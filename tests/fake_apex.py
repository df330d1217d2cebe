"""A module with the interface of NVIDIA's apex.optimizers, in torch: what it checks, and its state.

apex itself needs a GPU and a build for it. Run as a worker, this trains as golden_worker does, with
this module in apex' place: `python tests/fake_apex.py cases.json results.json`.
"""

import sys
import types

import golden_worker
import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW as apex computes it: moments in fp32 made at the first step, the count of steps in the
    group and not in the state, and no other type than fp16, bf16 and fp32.
    """

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
                 adam_w_mode=True, weight_decay=0.0):  # fmt: skip
        assert adam_w_mode
        assert bias_correction
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.dtype not in (torch.float16, torch.bfloat16, torch.float32):
                    raise RuntimeError("FusedAdam only support fp16, bfloat16 and fp32.")
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                _update(p, p.grad, state["exp_avg"], state["exp_avg_sq"], group)


def _update(p, gradient, mean, square, group) -> None:
    beta1, beta2 = group["betas"]
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    first, second = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
    change = (mean / first) / ((square / second).sqrt() + group["eps"])
    p.sub_(group["lr"] * (change + group["weight_decay"] * p))


def modules() -> dict[str, types.ModuleType]:
    """Return the entries of sys.modules that make `from apex.optimizers import FusedAdam` work."""
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam
    return {"apex": types.ModuleType("apex"), "apex.optimizers": optimizers}


if __name__ == "__main__":
    sys.modules.update(modules())
    golden_worker.run_jobs(golden_worker.run_case)
