"""Multi-head latent attention (MLA, arXiv 2405.04434): keys and values come from a small latent.

    x (s, b, h) --q_a--> latent of queries --norm, q_b--> q of each head: q_nope | q_rope
                --kv_a-> latent of keys and values | k_rope, one for all heads
                         the latent --norm, kv_b--> k_nope | v of each head

A head's query and key are a part that positions do not turn (n columns) and a part that they turn
(r columns, qk_rope_head_dim; not in blocks without positions); that part of the key is shared by
all heads. Without
q_lora_rank the queries come from x by one matrix, `q`. Attention is then that of
layers/attention.py.

Tensor parallelism divides q, q_b, kv_b and the output's matrix by heads, like ordinary attention.
The matrices to the latents, q_a and kv_a, are whole on every tensor rank. What a rank's heads
contribute to the gradients of the latents and of k_rope is summed over tp once, behind the norms:
by q_b and kv_b for the latents (operator f of a column-parallel layer), by `spread_to_tp` for
k_rope. So the gradients of q_a, kv_a and the norms are equal on the tensor ranks; with sequence
parallelism they are of this rank's tokens, and ParamFactory has them summed with the norms'.

With --cp over heads (distributed/context_parallel.py) the latents and the turned k_rope of all
tokens are gathered, and each rank computes keys and values of its heads from them: only queries and
results travel by heads. So a rank multiplies all tokens by its heads' part of kv_b instead of its
own tokens by all of it. The sum over the ranks that every weight's gradient needs is the same.

Decoding caches the normalised latent and the turned k_rope, kv_lora_rank + r numbers for a token,
and multiplies by the halves of kv_b on the queries' and the results' side instead (the paper's
"absorbed" form): the same products in another order.

Joined matrices: kv_a has the latent's rows, then those of k_rope. kv_b has for each head the rows
of its key, then of its value. q and q_b have for each head the n rows, then the r rows.
Shapes at line ends as in layers/attention.py. Read layers/attention.py first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architecture.shape import ModelShape
from distributed.collectives import Group, spread_to_tp
from distributed.context_parallel import exchange_heads, gather_tokens, to_tokens
from layers.attention import KeyValueCache, attend, core_attention, rotate
from layers.attention_masks import Mask
from parallel import ColumnLinear, Matrices, ParamFactory, RowLinear, linear, linear_by_part

# The epsilon of the latents' norms. It is fixed in DeepSeek's code and in transformers, whatever
# the epsilon of the blocks' norms is.
LATENT_EPS = 1e-6


class WholeLinear(nn.Module):
    """y = x W^T with the whole W, (outputs, inputs), on every tensor rank: (s, b, in or out).

    With sequence parallelism x is this rank's tokens, and W's gradient is summed over tp.
    """

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        inputs: int,
        outputs: int,
        matrices: Matrices,
        role: str = "hidden",
    ):
        """Make W; name: the beginning of its name. matrices: how W divides into matrices. role: of
        W for muP.
        """
        super().__init__()
        self.factory = factory
        shape = (outputs, inputs)
        self.weight = factory.parameter(
            f"{name}.weight", shape, std=factory.std, decay=True, matrices=matrices, role=role
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T, (s, b, outputs)."""
        factory = self.factory
        return linear(x, self.weight, None, factory.deferred, compile=factory.compile)


class LatentNorm(nn.Module):
    """RMSNorm of a latent, (s, b, width); every tensor rank holds the whole scale."""

    def __init__(self, factory: ParamFactory, name: str, width: int):
        """Make the scale, (width,); name: the beginning of its name."""
        super().__init__()
        self.weight = factory.parameter(f"{name}.weight", (width,), fill=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x, (s, b, width)."""
        return F.rms_norm(x, self.weight.shape, self.weight, LATENT_EPS)


class LatentAttention(nn.Module):
    """Multi-head latent attention, causal unless a mask says what each token sees."""

    def __init__(
        self, factory: ParamFactory, name: str, model: ModelShape, std: float, recompute: bool
    ):
        """Make the matrices and norms. std: for the output matrix. recompute: whether the backward
        pass runs `attend` again.
        """
        super().__init__()
        self.factory = factory
        self.mesh = factory.mesh
        self.recompute = recompute
        self.latent = model.kv_lora_rank
        self.nope = model.qk_nope_head_dim
        self.rope = model.qk_rope_head_dim
        self.value = model.v_head_dim
        h = model.hidden
        heads = model.heads
        self.q_a: WholeLinear | None = None
        self.q_a_norm: LatentNorm | None = None
        if model.q_lora_rank:
            self.q_a = WholeLinear(factory, f"{name}.q_a", h, model.q_lora_rank, Matrices())
            self.q_a_norm = LatentNorm(factory, f"{name}.q_a_norm", model.q_lora_rank)
        q_name = f"{name}.q_b" if model.q_lora_rank else f"{name}.q"
        q_shape = (heads, self.nope + self.rope)
        self.q = ColumnLinear(
            factory,
            q_name,
            model.q_lora_rank or h,
            q_shape,
            dim=0,
            bias=False,
            matrices=Matrices(heads=(0,)),
        )
        # kv_a and kv_b are one matrix each for Muon, as for the optimizers of published models.
        parts = (("latent", self.latent), ("key", self.rope))
        members = Matrices(parts=parts, is_projection=True)
        self.kv_a = WholeLinear(factory, f"{name}.kv_a", h, self.latent + self.rope, members)
        self.kv_a_norm = LatentNorm(factory, f"{name}.kv_a_norm", self.latent)
        kv_shape = (heads, self.nope + self.value)
        parts = (("k", self.nope), ("v", self.value))
        members = Matrices(parts=parts, dim=1, heads=(0,), is_projection=True)
        self.kv_b = ColumnLinear(
            factory, f"{name}.kv_b", self.latent, kv_shape, dim=0, bias=False, matrices=members
        )
        self.out = RowLinear(factory, f"{name}.out", heads * self.value, h, std, model.bias)
        self._heads_of = factory.compile_for_training(_heads_of)
        self._joined = factory.compile_for_training(_joined)
        # attend divides scores by the root of the head size: queries get what is missing.
        self.query_factor = (model.head_size / model.query_scalar) ** 0.5

    def forward(
        self,
        x: Tensor,
        mask: Mask | None,
        rotary: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return attention's output in the shape of x: (s, b, h), or (s/tp, b, h) with sequence
        parallelism. The arguments are those of attention.Attention.
        """
        q_input = x
        if self.q_a is not None and self.q_a_norm is not None:
            q_input = self.q_a_norm(self.q_a(x))
        latent, k_rope = self.kv_a(x).split((self.latent, self.rope), -1)
        latent = self.kv_a_norm(latent)
        q = self.q(q_input)  # s b a(n+r)
        if self.query_factor != 1.0:
            q = q * self.query_factor
        k_rope = spread_to_tp(k_rope, self.mesh.tp, self.factory.sequence_parallel)  # s b r
        if cache is not None:
            return self.out(self._decode(q, latent, k_rope, rotary, cache))
        sizes = self.nope, self.rope, self.value
        ranks = self.mesh.heads  # those of cp that divide the heads
        if ranks.size == 1:
            q, k, v = self._heads_of(q, self.kv_b(latent), k_rope, rotary, sizes)
        else:
            latent = spread_to_tp(latent, self.mesh.tp, self.factory.sequence_parallel)
            k_turned = _turned(k_rope.unsqueeze(2), rotary).squeeze(2)
            latent, k_turned = gather_tokens(latent, k_turned, ranks)
            kv = linear_by_part(latent, self.kv_b.weight, ranks, self.factory)
            q = exchange_heads(_queries(q, rotary, sizes), ranks)
            q, k, v = self._joined(q, kv, k_turned, sizes)
        mixed = core_attention(q, k, v, mask, self.mesh, self.recompute)
        if v.shape[-1] != self.value:  # without the columns of padding
            mixed = mixed.unflatten(-1, (-1, v.shape[-1]))[..., : self.value].flatten(2)
        return self.out(to_tokens(mixed, ranks))

    def _decode(
        self,
        q: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        cache: KeyValueCache,
    ) -> Tensor:
        """Return attention's result for the new tokens, (s, b, a v), by the cached latents.

        The scores q_nope . (W_k c) + q_rope . k_rope are (W_k^T q_nope) . c + q_rope . k_rope, and
        the results are W_v (p c), so all heads attend to one key, c and k_rope side by side, whose
        value is c. q: (s, b, a (n + r)). latent, c: (s, b, kv_lora_rank). k_rope: (s, b, r).
        """
        # (a, n + v, kv_lora_rank); --zero 3 gathers the matrix with its first dimensions joined.
        weight = self.kv_b.weight.view(-1, self.nope + self.value, self.latent)
        of_key, of_value = weight.split((self.nope, self.value), 1)
        q_nope, q_rope = q.unflatten(-1, (len(weight), -1)).split((self.nope, self.rope), -1)
        q_latent = torch.einsum("sban,anc->sbac", q_nope, of_key)
        q = torch.cat([q_latent, _turned(q_rope, rotary)], -1)
        k_rope = _turned(k_rope.unsqueeze(2), rotary)
        latents, k_ropes, mask = cache.extend(self, latent.unsqueeze(2), k_rope)  # of all tokens
        k = torch.cat([latents, k_ropes], -1)
        # attend divides the scores by the square root of the columns that it sees.
        scale = (k.shape[-1] / (self.nope + self.rope)) ** 0.5
        v = F.pad(latents, (0, self.rope))
        mixed = attend(q * scale, k, v, mask, Group()).unflatten(-1, (len(weight), -1))
        mixed = mixed[..., : self.latent]
        return torch.einsum("sbac,avc->sbav", mixed, of_value).flatten(2)


def _turned(x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return x, (s, b, a, r), turned by its positions; without tables, as it is (NoPE)."""
    return x if rotary is None else rotate(x, rotary)


def _heads_of(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    sizes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of this rank's heads, (s, b, a, d) each, with positions turned.

    q: (s, b, a (n + r)). kv: (s, b, a (n + v)). k_rope: (s, b, r). sizes: n, r and v. For d see
    `_joined`.
    """
    k_turned = _turned(k_rope.unsqueeze(2), rotary).squeeze(2)
    return _joined(_queries(q, rotary, sizes), kv, k_turned, sizes)


def _queries(
    q: Tensor, rotary: tuple[Tensor, Tensor] | None, sizes: tuple[int, int, int]
) -> Tensor:
    """Return the queries q, (s, b, a (n + r)), with positions turned: (s, b, a, n + r)."""
    nope, rope, _ = sizes
    q_nope, q_rope = q.unflatten(-1, (-1, nope + rope)).split((nope, rope), -1)
    return torch.cat([q_nope, _turned(q_rope, rotary)], -1)


def _joined(
    q: Tensor, kv: Tensor, k_turned: Tensor, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as attention's kernel takes them, (s, b, a, d) each.

    q: (s, b, a, n + r). kv: (s, b, a (n + v)). k_turned: (s, b, r), with positions turned. sizes:
    n, r and v. d is the larger of n + r and v: torch's flash kernels need values as wide as keys,
    so the narrower ones end in columns of zeros, which change no score and no gradient.
    """
    nope, rope, value = sizes
    k_nope, v = kv.unflatten(-1, (-1, nope + value)).split((nope, value), -1)
    k = torch.cat([k_nope, k_turned.unsqueeze(2).expand(-1, -1, k_nope.shape[2], -1)], -1)
    missing = value - nope - rope
    if missing <= 0:
        return q, k, F.pad(v, (0, -missing)) if missing else v
    # attend divides the scores by the square root of the columns that it sees.
    scale = (value / (nope + rope)) ** 0.5
    return F.pad(q * scale, (0, missing)), F.pad(k, (0, missing)), v
