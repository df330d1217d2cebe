"""A GPT in plain PyTorch on one device, compiled: what Trine is compared with on one GPU.

    loop = plain_loop(shape, padded_vocabulary, "cuda")
    loss, norm = loop.step(batches)        # tokens and labels of each micro-batch, (b, s)

What one would write who needs no parallelism: nn.Linear, F.scaled_dot_product_attention, fp32
weights under bf16 autocast, fused AdamW, clipping at 1. Compiled block by block and the head with
its loss as one, which leaves each fused as far as inductor goes and compiles in seconds.
"""

import torch
from torch import Tensor, nn

from architecture.shape import ModelShape
from base.errors import UserError
from benchmarks.peers.peer_worker import GPT, Loop, Shape, mean_loss

WHAT = (
    "plain PyTorch: torch.compile of each block and of head and loss, fp32 weights under bf16 "
    "autocast, fused AdamW, clipping"
)


def plain_loop(shape: ModelShape, vocabulary: int, device: str, backend: str = "inductor") -> Loop:
    """The model with its optimizer on one device; vocabulary: rows, padding included.

    UserError for a shape that this GPT has not.
    """
    kind = (shape.positions, shape.norm, shape.activation, shape.bias, shape.tied)
    kind += (shape.qkv_bias, shape.qk_norm, shape.block, shape.heads * shape.head_size)
    own = ("learned", "layernorm", "gelu_tanh", True, True)
    if kind != (*own, True, "none", "pre-norm", shape.hidden):
        raise UserError(f"the plain GPT has no {kind}")
    torch.manual_seed(0)
    torch.compiler.reset()  # else an earlier run's sizes make this one's dynamic, and slower
    size = Shape(shape.layers, shape.hidden, shape.heads, vocabulary, shape.seq_length, 1, 1)
    with torch.device(device):
        model = GPT(size, range(shape.layers))
        model.embedding_norm = nn.LayerNorm(shape.hidden) if shape.embedding_norm else nn.Identity()
    model.head.weight = model.tokens.weight
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.02)
    for block in model.blocks.values():
        block.compile(backend=backend, dynamic=False)

    @torch.compile(backend=backend, dynamic=False)
    def head_loss(x: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(model.head(model.norm(x)).float(), labels)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            x = model.embedding_norm(model.tokens(tokens) + model.positions.weight)
            for block in model.blocks.values():
                x = block(x)
            return head_loss(x, labels)

    def total_norm(parameters: list[nn.Parameter]) -> Tensor:
        return nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)

    return Loop(model, loss, total_norm)
