"""Runs on every rank of benchmarks/peers/peers.py, Trine's and its peers': wait, run steps, report.

A rank reads commands from its standard input: a number of steps to run, 0 to forget its peak of
memory, or with a minus that many steps under torch's profiler. It answers each with one line of
JSON. While it waits it uses no processor time, so the sides of a comparison are alive at the same
time and take turns.
"""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
    experts the model is a Qwen3-MoE, else a GPT-2. more: other options of train.py, of a model
    that only Trine and transformers have.
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
    more: str = ""

    def samples(self, dp: int) -> int:
        """Samples of a step."""
        return self.micro_batch * self.micro_batches * dp

    def options(self, dp: int) -> list[str]:
        """The same for train.py."""
        words = (
            f"--layers {self.layers} --hidden {self.hidden} --heads {self.heads} --no-tied "
            f"--vocab-size {self.vocab} --set pad_vocab_multiple=1 --seq-length {self.seq} "
            f"--micro-batch-size {self.micro_batch} --global-batch-size {self.samples(dp)} "
            f"--seed {SEED} --clip-grad {CLIP} --weight-decay {DECAY} --adam-beta1 {BETAS[0]} "
            f"--adam-beta2 {BETAS[1]} --adam-eps {EPS} --steps 1000000 --device cpu"
        )
        if self.experts > 1:
            words += (
                f" --experts {self.experts} --experts-per-token {self.chosen} --ffn-hidden "
                f"{self.ffn} --activation swiglu --norm rmsnorm --positions rotary --no-bias "
                "--set qk_norm=head"
            )
        return [*words.split(), *self.more.split()]


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


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)): (b, s, h); q, k and v are rows by heads.

    column and row make the layers whose matrices tensor parallelism cuts by rows and by columns.
    """

    def __init__(self, h: int, heads: int, column: Callable = nn.Linear, row: Callable = nn.Linear):
        super().__init__()
        self.d = h // heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = column(h, 3 * h), row(h, h)
        self.up, self.down = column(h, 4 * h), row(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.d))
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(-2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """The blocks of a range, and the ends of the model that this part has; logits at its end."""

    def __init__(self, shape: Shape, blocks: range, first: bool = True, last: bool = True):
        super().__init__()
        h = shape.hidden
        self.tokens = nn.Embedding(shape.vocab, h) if first else None
        self.positions = nn.Embedding(shape.seq, h) if first else None
        self.blocks = nn.ModuleDict({str(i): Block(h, shape.heads) for i in blocks})
        self.norm = nn.LayerNorm(h) if last else None
        self.head = nn.Linear(h, shape.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(x) + self.positions.weight
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss over all tokens: logits (b, s, V), labels (b, s)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Loop:
    """Micro-batch after micro-batch, then one clipped update of fused AdamW as Trine runs it."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        total_norm: Callable[[list[nn.Parameter]], Tensor],
        before: Callable[[bool], object] = bool,
        weight: float = 1.0,
        optimizer: Callable = torch.optim.AdamW,
    ):
        """loss: of a micro-batch's tokens and labels. total_norm: of the gradients of all ranks,
        after the reductions that are still to be done. before: is told before each micro-batch
        whether it is the last. weight: that gradients have beside the loss.
        """
        self.model, self.loss, self.total_norm = model, loss, total_norm
        self.before, self.weight = before, weight
        self.parameters = list(model.parameters())
        groups = [
            {"params": members, "weight_decay": DECAY if is_matrix else 0.0}
            for (is_matrix, _), members in by_kind(self.parameters).items()
        ]
        self.optimizer = optimizer(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)

    def step(self, batches: list[Batch]) -> tuple[Tensor | None, Tensor]:
        """One optimizer step; the mean loss over this rank's batches, and the gradient norm."""
        loss = self.passes(batches)
        norm = self.total_norm(self.parameters)
        for members in by_kind(self.parameters).values():
            nn.utils.clip_grads_with_norm_(members, CLIP, norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def passes(self, batches: list[Batch]) -> Tensor | None:
        """Forward and backward of all micro-batches; the mean loss, if this rank knows it."""
        losses = []
        for i, (tokens, labels) in enumerate(batches):
            self.before(i == len(batches) - 1)
            loss = self.loss(tokens, labels) / len(batches)
            (loss if self.weight == 1.0 else loss * self.weight).backward()
            loss = loss.detach()
            losses.append(loss.to_local() if hasattr(loss, "to_local") else loss)
        return torch.stack(losses).sum()


def by_kind(parameters: list[nn.Parameter]) -> dict[tuple, list[nn.Parameter]]:
    """Parameters by whether they are matrices, and by the kind of tensor: torch takes no two kinds
    in one call.
    """
    groups: dict[tuple, list] = {}
    for p in parameters:
        groups.setdefault((p.dim() >= 2, type(p.data)), []).append(p)
    return groups


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
            reset_peak()
        inputs = [prepare(done + i) for i in range(abs(count))]
        barrier()
        profile = profiler() if count < 0 else contextlib.nullcontext()
        with profile:
            began, busy = time.perf_counter(), time.thread_time()
            results = [step(each) for each in inputs]
            busy = time.thread_time() - busy
            barrier()
            seconds = time.perf_counter() - began
        done += abs(count)
        numbers = [(number(loss), number(norm)) for loss, norm in results]
        kernels = seconds_of(profile.events()) if count < 0 else {}
        answers.send(
            seconds=seconds, busy=busy, results=numbers, peak=peak_bytes(), kernels=kernels
        )


# Names of torch's operations, by the begin of the name; the first line that fits counts.
KERNELS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"),
    "attention": ("aten::_scaled_dot", "aten::scaled_dot", "aten::_softmax"),
    "optimizer": ("aten::_fused_adam",),
    "copies": ("aten::copy", "aten::cat", "aten::clone", "aten::stack", "aten::fill", "aten::zero"),
    "collectives": ("c10d", "gloo", "record_param_comms"),
    "others": ("aten::", "aten"),
}


def profiler() -> torch.profiler.profile:
    """torch's profiler of what this thread runs, without shapes and stacks."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def seconds_of(events: Sequence) -> dict[str, float]:
    """Seconds in torch's operations on the thread of the steps, by the kinds of KERNELS.

    An operation counts without those that it calls.
    """
    found = dict.fromkeys(KERNELS, 0.0)
    thread, _ = Counter(event.thread for event in events).most_common(1)[0]
    for event in events:
        names = (kind for kind, begins in KERNELS.items() if event.name.startswith(begins))
        kind = next(names, None)
        if kind and event.thread == thread:
            found[kind] += event.self_cpu_time_total / 1e6
    return found


def number(value) -> float | None:
    """A Python number of a tensor of any kind."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return None if whole is None else float(whole)


def reset_peak() -> None:
    """Begin anew with the most resident memory of this process, see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most resident memory of this process since its start, or since it was reset."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def fill(model: nn.Module, folder: str, place: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
    """Set every parameter to its initial value; place: turns the whole into this rank's part."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(place(weight(folder, name), p))
