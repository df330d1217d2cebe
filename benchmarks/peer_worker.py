"""Runs on every rank of benchmarks/peers.py, Trine's and its peers': wait, run steps, report.

A rank reads commands from its standard input: a number of steps to run, or 0 to forget its peak of
memory. It answers each with one line of JSON. While it waits it uses no processor time, so the
sides of a comparison are alive at the same time and take turns.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED, LR, CLIP = 1234, 3e-4, 1.0
DECAY, BETAS, EPS = 0.1, (0.9, 0.95), 1e-8
Batch = tuple[Tensor, Tensor]  # tokens and labels of a micro-batch, (b, s) each


@dataclass(frozen=True)
class Shape:
    """The model and the batch of a comparison; micro_batches: of one replica in a step.

    experts: of a block, each with an MLP of width ffn, of which a token takes `chosen`. With
    experts the model is a Qwen3-MoE, else a GPT-2.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    micro_batch: int
    micro_batches: int
    experts: int = 1
    chosen: int = 1
    ffn: int = 0

    def samples(self, dp: int) -> int:
        """Samples of a step."""
        return self.micro_batch * self.micro_batches * dp

    def options(self, dp: int) -> list[str]:
        """The same for train.py."""
        words = (
            f"--layers {self.layers} --hidden {self.hidden} --heads {self.heads} --no-tied "
            f"--vocab-size {self.vocab} --pad-vocab-multiple 1 --seq-length {self.seq} "
            f"--micro-batch-size {self.micro_batch} --global-batch-size {self.samples(dp)} "
            f"--seed {SEED} --clip-grad {CLIP} --weight-decay {DECAY} --adam-beta1 {BETAS[0]} "
            f"--adam-beta2 {BETAS[1]} --adam-eps {EPS} --steps 1000000 --device cpu"
        )
        if self.experts > 1:
            words += (
                f" --experts {self.experts} --experts-per-token {self.chosen} --ffn-hidden "
                f"{self.ffn} --activation swiglu --norm rmsnorm --positions rotary --no-bias "
                "--qk-norm head"
            )
        return words.split()


# ---- What peers of Trine have in common ----------------------------------------------------------


def batches(shape: Shape, step: int, dp: int = 1, replica: int = 0) -> list[Batch]:
    """A replica's micro-batches of a step: the samples that Trine takes (data.Synthetic)."""
    found = []
    for m in range(shape.micro_batches):
        first = step * shape.samples(dp) + (m * dp + replica) * shape.micro_batch
        rows = []
        for k in range(first, first + shape.micro_batch):
            random = np.random.default_rng((SEED, 0, k))
            rows.append(random.integers(shape.vocab, size=shape.seq + 1))
        tokens = torch.from_numpy(np.stack(rows))
        found.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return found


class BlockForward(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)): (b, s, h), of a block's layers and its d."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.d))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(-2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def adamw(parameters, **more) -> dict:
    """Arguments of AdamW as Trine runs it: matrices decay; kinds that no one call takes apart."""
    groups: dict[tuple, list] = {}
    for p in parameters:
        groups.setdefault((p.dim() >= 2, type(p.data)), []).append(p)
    rows = [
        {"params": params, "weight_decay": DECAY if matrix else 0.0}
        for (matrix, _), params in groups.items()
    ]
    return {"params": rows, "lr": LR, "betas": BETAS, "eps": EPS, "fused": True, **more}


def weight(folder: str, name: str) -> Tensor:
    """The initial value of a parameter, whole."""
    return torch.from_numpy(np.load(Path(folder) / f"{name}.npy"))


# ---- Commands ------------------------------------------------------------------------------------


class Answers:
    """The standard output of this rank, for answers alone: what others print goes to stderr."""

    def __init__(self) -> None:
        self.file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def send(self, **values) -> None:
        """One answer."""
        print(json.dumps(values), file=self.file, flush=True)


def serve(
    answers: Answers,
    step: Callable[[object], tuple[float | None, float]],
    barrier: Callable[[], object],
    prepare: Callable[[int], object] = int,
) -> None:
    """Answer commands until standard input ends.

    step: takes what `prepare` made of the step's number, outside of the time; gives the loss as
    this rank knows it, if it does, and the gradient norm. Seconds are from barrier to barrier.
    """
    done = 0
    answers.send(ready=os.getpid())
    for line in sys.stdin:
        count = int(line)
        if count == 0:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: forget VmHWM
        inputs = [prepare(done + i) for i in range(count)]
        barrier()
        began = time.perf_counter()
        results = [step(each) for each in inputs]
        barrier()
        seconds = time.perf_counter() - began
        done += count
        numbers = [(number(loss), number(norm)) for loss, norm in results]
        answers.send(seconds=seconds, results=numbers, peak=peak_bytes())


def number(value) -> float | None:
    """A Python number of a tensor of any kind."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return None if whole is None else float(whole)


def peak_bytes() -> int:
    """The most resident memory of this process since its start, or since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def fill(model: nn.Module, folder: str, place: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
    """Set every parameter to its initial value; place: turns the whole into this rank's part."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(place(weight(folder, name), p))
