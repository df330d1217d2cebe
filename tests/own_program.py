"""A program of a user for check.py --program: tensor and data parallelism by hand, with faults.

`fault` (--set fault=...) plants one; "" is right. tests/test_check_program.py has the list.
"""

import torch
import torch.distributed as dist
from torch import nn

fault = ""
cut = {"blocks.*.up.*": 0, "blocks.*.down.weight": 1}


def layouts():
    """One rank, each axis, and both."""
    return [{}, {"tp": 2}, {"dp": 2}, {"tp": 2, "dp": 2}]


class CopyToAll(torch.autograd.Function):
    """The input of a matrix that tp cuts by rows: its gradient is a sum over tp."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if fault != "no backward sum":
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOfAll(torch.autograd.Function):
    """The output of a matrix that tp cuts by columns."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        if fault != "no sum":
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self, tp, group):
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32 // tp)
        self.down = nn.Linear(32 // tp, 8, bias=False)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        y = CopyToAll.apply(self.norm(x), self.group)
        y = self.down(torch.relu(self.up(y)))
        if fault == "bias on each rank":
            return x + SumOfAll.apply(y + self.bias, self.group)
        return x + SumOfAll.apply(y, self.group) + self.bias


def build(layout):
    tp, dp = layout.get("tp", 1), layout.get("dp", 1)
    rank = dist.get_rank()
    tp_rank, dp_rank = rank % tp, rank // tp
    tp_groups = [dist.new_group(list(range(d * tp, d * tp + tp))) for d in range(dp)]
    dp_groups = [dist.new_group(list(range(t, tp * dp, tp))) for t in range(tp)]
    tp_group, dp_group = tp_groups[dp_rank], dp_groups[tp_rank]
    model = nn.Sequential()
    model.embed = nn.Embedding(16, 8)
    model.blocks = nn.Sequential(*(Block(tp, tp_group) for _ in range(2)))
    model.head = nn.Linear(8, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(number):
        generator = torch.Generator().manual_seed(number)
        share = 0 if fault == "another's samples" else dp_rank
        batch = torch.randint(0, 16, (2, 8, 6), generator=generator)
        tokens, labels = batch.chunk(dp, 1)[share]
        if not (fault == "not cleared" and tp > 1):
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / dp
        loss.backward()
        for parameter in model.parameters():
            if fault != "no sum over dp":
                dist.all_reduce(parameter.grad, group=dp_group)
            if fault == "average":
                parameter.grad /= dp
        if fault == "own norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if fault == "drift" and rank == 1:
            with torch.no_grad():
                model.embed.weight.mul_(1 + 1e-13)
        total = loss.detach().clone()
        dist.all_reduce(total, group=dp_group)
        return total

    def dim_of(name):
        return 0 if ".up." in name else 1 if ".down." in name else None

    def save(folder):
        whole = {}
        for name, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            for kind, x in (
                ("w", parameter.data),
                ("m", state["exp_avg"]),
                ("v", state["exp_avg_sq"]),
            ):
                if tp > 1 and dim_of(name) is not None:
                    parts = [torch.empty_like(x) for _ in range(tp)]
                    dist.all_gather(parts, x.contiguous(), group=tp_group)
                    x = torch.cat(parts, dim_of(name))
                whole[name, kind] = x.clone()
        if rank == 0:
            torch.save(whole, f"{folder}/state.pt")

    def load(folder):
        whole = torch.load(f"{folder}/state.pt")
        for name, parameter in model.named_parameters():
            w, m, v = (whole[name, kind] for kind in "wmv")
            if dim_of(name) is not None:
                w, m, v = (x.chunk(tp, dim_of(name))[tp_rank].clone() for x in (w, m, v))
            if fault == "a moment is not loaded":
                v = torch.zeros_like(v)
            parameter.data.copy_(w)
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": m, "exp_avg_sq": v}

    place = {"tp": tp_rank, "dp": dp_rank}
    return {
        "model": model,
        "optimizer": optimizer,
        "step": step,
        "save": save,
        "load": load,
        "place": place,
    }
