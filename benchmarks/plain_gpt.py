"""A GPT in plain PyTorch on one device, compiled: what Trine is compared with on one GPU.

    plain = PlainRun(shape, padded_vocabulary, "cuda")
    loss = plain.step(tokens, labels)        # (micro-batches, b, s) each

What one would write who needs no parallelism: nn.Linear, F.scaled_dot_product_attention, fp32
weights under bf16 autocast, fused AdamW, clipping at 1. Compiled block by block and the head with
its loss as one, which leaves each fused as far as inductor goes and compiles in seconds.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config.messages import UserError
from config.schema import ModelShape

WHAT = (
    "plain PyTorch: torch.compile of each block and of head and loss, fp32 weights under bf16 "
    "autocast, fused AdamW, clipping"
)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)): (b, s, h)."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(h, -1)
        q, k, v = (t.view(b, s, self.heads, h // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Head(nn.Module):
    """Final norm, output matrix and mean loss: (b, s, h) and labels (b, s) -> ()."""

    def __init__(self, hidden: int, weight: nn.Parameter):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(hidden), weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(self.norm(x), self.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class GPT(nn.Module):
    """Embedding, blocks, tied head with loss."""

    def __init__(self, shape: ModelShape, vocabulary: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.seq_length, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden) if shape.embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.head = Head(shape.hidden, self.tokens.weight)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(x, labels)


class PlainRun:
    """The model with its optimizer on one device."""

    def __init__(self, shape: ModelShape, vocabulary: int, device: str, backend: str = "inductor"):
        """vocabulary: rows, padding included. UserError for a shape that this GPT has not."""
        kind = (shape.positions, shape.norm, shape.activation, shape.bias, shape.tied)
        kind += (shape.qkv_bias, shape.qk_norm, shape.block, shape.heads * shape.head_size)
        own = ("learned", "layernorm", "gelu_tanh", True, True)
        if kind != (*own, True, "none", "pre-norm", shape.hidden):
            raise UserError(f"the plain GPT has no {kind}")
        torch.manual_seed(0)
        torch.compiler.reset()  # else an earlier run's sizes make this one's dynamic, and slower
        self.device = device
        with torch.device(device):
            self.model = GPT(shape, vocabulary)
        for part in (*self.model.blocks, self.model.head):
            part.compile(backend=backend, dynamic=False)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One optimizer step; the mean loss."""
        total = torch.zeros((), device=self.device)
        for x, y in zip(tokens, labels):
            with torch.autocast(self.device, torch.bfloat16):
                loss = self.model(x, y) / len(tokens)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total.item()
