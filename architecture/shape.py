"""`ModelShape`: the options that say what model it is, with the numbers that follow from them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from architecture.block_attention import BlockAttention, flags_of
from architecture.multipliers import multipliers_of
from base.errors import UserError
from base.options import Needs, option

# What options of experts, and of rotary positions, need.
EXPERTS = Needs(("experts",), above=1)
ROTARY = Needs(("positions",), ("rotary",))

# Mixers of tokens that may be in the place of attention, and what their options need.
MIXERS = ("gated_delta_net", "kda", "mamba2", "short_conv")
MIXER = Needs(("mixer",), MIXERS, is_key=True)

# Activations of MLPs with a gate, which have two matrices that read the input.
GATED = ("swiglu", "geglu", "clamped_swiglu")


@dataclass(frozen=True)
class ModelShape:
    """A GPT's architecture: all that determines its parameters and FLOPs.

    Fields left at None are derived from the others, so no field of a finished shape is None.
    """

    layers: int = option(None, "transformer blocks", minimum=1, maximum=10_000)
    hidden: int = option(None, "width of the residual stream", minimum=1)
    heads: int = option(None, "attention heads", minimum=1)
    kv_heads: int = option(None, "KV heads (GQA), default: heads", minimum=1)
    ffn_hidden: int = option(None, "MLP width, default: 4 x hidden, SwiGLU 8/3 x hidden", minimum=1)
    seq_length: int = option(1024, "tokens in a sample", minimum=1)
    max_positions: int = option(
        None,
        "learned positions, default: seq-length",
        minimum=1,
        needs=Needs(("positions",), ("learned",)),
        file_only=True,
    )
    vocab_size: int = option(
        50257,
        "tokens in the vocabulary, before padding; not given: those of --data's tokenizer",
        minimum=1,
    )
    positions: str = option(
        "learned",
        "position embeddings: learned, ALiBi, or RoPE (rotary)",
        choices=("learned", "alibi", "rotary"),
    )
    norm: str = option("layernorm", "normalisation", choices=("layernorm", "rmsnorm"))
    norm_bias: bool = option(
        True,
        "LayerNorms have a shift; Cohere's have none",
        needs=Needs(("norm",), ("layernorm",)),
        file_only=True,
    )
    norm_plus_one: bool = option(
        False,
        "RMSNorms multiply by 1 + weight, as Gemma's do",
        needs=Needs(("norm",), ("rmsnorm",)),
        file_only=True,
    )
    activation: str = option(
        "gelu_tanh",
        f"MLP activation; {', '.join(GATED)} have a gate",
        choices=("gelu", "gelu_tanh", "relu", "relu2", *GATED),
    )
    swiglu_alpha: float = option(
        1.702,
        "factor in the sigmoid of clamped_swiglu",
        above=0.0,
        needs=Needs(("activation",), ("clamped_swiglu",)),
        file_only=True,
    )
    swiglu_limit: float = option(
        7.0,
        "limit of clamped_swiglu's gate and input",
        above=0.0,
        needs=Needs(("activation",), ("clamped_swiglu",)),
        file_only=True,
    )
    bias: bool = option(None, "biases in the linear layers; default: yes, with experts no")
    embedding_norm: bool = option(
        False, "normalise the embedding's output, as BLOOM does", file_only=True
    )
    embedding_scaled: bool = option(
        False,
        "multiply the embedding's output by the root of hidden, as Gemma does",
        file_only=True,
    )
    embedding_multiplier: float = option(
        1.0, "multiply the embedding's output by this, as Granite does", above=0.0, file_only=True
    )
    residual_multiplier: float = option(
        None,
        "multiply what attention and MLP add to the residual stream, as Granite does; default: 1, "
        "with --mup-base-layers base layers / layers",
        above=0.0,
        file_only=True,
        example=0.5,
    )
    multipliers: str = option(
        "none",
        "factors of results and of projections, as muP has them: none, or PLACE:FACTOR for some of "
        "attention, mixer, mlp, gate, z, x, b, c, dt, with commas (docs/models.md)",
        file_only=True,
        example="attention:0.5,mlp:2",
    )
    logit_divisor: float = option(
        None,
        "divide the output logits by this, as Granite does; default: 1, with --mup hidden / base",
        above=0.0,
        file_only=True,
        example=2.0,
    )
    mup: int = option(
        0,
        "muP: hidden of the small model whose best learning rate, initial deviation and decay are "
        "given; 0: no muP",
        minimum=0,
        example=16,
    )
    mup_base_layers: int = option(
        0,
        "muP for depth: blocks of the small model whose best learning rate is given; 0: none",
        minimum=0,
        example=2,
    )
    mup_base_head_size: int = option(
        0,
        "muP: head_size of the small model, if heads grow with hidden; 0: heads keep their size",
        minimum=0,
        needs=Needs(("mup",), above=0),
        file_only=True,
        example=8,
    )
    tied: bool = option(True, "the output head shares the embedding's weights")
    norm_eps: float = option(1e-5, "epsilon of the normalisation", minimum=0.0, file_only=True)
    rotary_base: float = option(
        10000.0,
        "RoPE base (theta)",
        above=0.0,
        needs=ROTARY,
        file_only=True,
    )
    rotary_fraction: float = option(
        1.0,
        "share of each head that RoPE rotates",
        above=0.0,
        maximum=1.0,
        needs=ROTARY,
        file_only=True,
        not_latent=True,
    )
    rotary_scaling: str = option(
        "none",
        "RoPE scaling: none, linear:FACTOR, llama3:FACTOR:LOW:HIGH:POSITIONS, yarn:... or "
        "longrope:... (docs/models.md)",
        needs=ROTARY,
        file_only=True,
    )
    rotary_blocks: str = option(
        "all",
        "blocks with RoPE: all, none, N:M (N with, then M without), or a list 1,1,0,...",
        needs=ROTARY,
        file_only=True,
    )
    window: int = option(
        0,
        "sliding window, in tokens, the token itself included; 0: none",
        minimum=0,
        file_only=True,
        not_latent=True,
    )
    window_blocks: str = option(
        "all",
        "blocks with the window: all, none, N:M (N with, then M without), or a list 1,1,0,...",
        needs=Needs(("window",), above=0, is_key=True),
        file_only=True,
    )
    window_rotary_base: float = option(
        None,
        "RoPE base of the blocks with a window, default: rotary_base",
        above=0.0,
        needs=Needs(("window",), above=0, is_key=True),
        file_only=True,
    )
    window_rotary_scaling: str = option(
        None,
        "RoPE scaling of the blocks with a window, default: rotary_scaling",
        needs=Needs(("window",), above=0, is_key=True),
        file_only=True,
    )
    sinks: bool = option(
        False,
        "attention sinks: a learned logit of each head in the softmax",
        file_only=True,
        not_latent=True,
    )
    mtp_depth: int = option(
        0,
        "modules of multi-token prediction (DeepSeek-V3), each for one more token; 0: none",
        minimum=0,
    )
    attention_gate: bool = option(
        False,
        "a sigmoid gate of each column of attention's result, from the block's input",
        file_only=True,
        not_latent=True,
    )
    attention_softcap: float = option(
        0.0,
        "soft cap c of attention scores x: c tanh(x / c); 0: none",
        minimum=0.0,
        file_only=True,
        not_latent=True,
    )
    logit_softcap: float = option(
        0.0,
        "soft cap c of the output logits x: c tanh(x / c); 0: none",
        minimum=0.0,
        file_only=True,
    )
    query_scalar: float = option(
        None,
        "attention divides scores by the square root of this; default: head_size; muP: its square",
        above=0.0,
        file_only=True,
    )
    head_size: int = option(
        None, "width of a head, default: hidden / heads", minimum=1, file_only=True
    )
    qkv_bias: bool = option(
        None, "biases of queries, keys and values, default: as --bias", file_only=True
    )
    qk_norm: str = option(
        "none",
        "RMSNorm of queries and keys: per head, or over all heads",
        choices=("none", "head", "full"),
        file_only=True,
        not_latent=True,
    )
    mixer: str = option(
        "attention",
        "what mixes the tokens in the blocks of mixer_blocks; attention: nothing else does",
        choices=("attention", *MIXERS),
        file_only=True,
    )
    mixer_blocks: str = option(
        "all",
        "blocks with the mixer: all, N:M (N with, then M with attention), or a list 1,1,0,...",
        needs=MIXER,
        file_only=True,
        example="1:1",
    )
    mixer_key_heads: int = option(
        None,
        "heads of the mixer's queries and keys, default: as many as of its values",
        minimum=1,
        needs=MIXER,
        file_only=True,
        example=4,
    )
    mixer_value_heads: int = option(
        None,
        "heads of the mixer's values, default: heads",
        minimum=1,
        needs=MIXER,
        file_only=True,
        example=16,
    )
    mixer_key_size: int = option(
        None,
        "columns of a head's query and key in the mixer, default: head_size",
        minimum=1,
        needs=MIXER,
        file_only=True,
        example=6,
    )
    mixer_value_size: int = option(
        None,
        "columns of a head's value in the mixer, default: head_size",
        minimum=1,
        needs=MIXER,
        file_only=True,
        example=6,
    )
    mixer_kernel: int = option(
        4,
        "tokens that the mixer's causal convolution sees, the token itself included",
        minimum=1,
        needs=MIXER,
        file_only=True,
    )
    mixer_conv_bias: bool = option(
        False,
        "a bias of each channel of the mixer's convolution",
        needs=Needs(("mixer",), ("mamba2", "short_conv"), is_key=True),
        file_only=True,
    )
    mixer_norm_eps: float = option(
        0.0,
        "epsilon of the norm of the mixer's heads; 0: norm_eps",
        minimum=0.0,
        needs=Needs(("mixer",), ("gated_delta_net", "kda", "mamba2"), is_key=True),
        file_only=True,
        example=1e-3,
    )
    mixer_step_min: float = option(
        0.0,
        "the least step of a token in Mamba-2, as transformers' Nemotron-H has it; 0: none",
        minimum=0.0,
        needs=Needs(("mixer",), ("mamba2",), is_key=True),
        file_only=True,
        example=0.7,
    )
    mixer_norm: bool = option(
        True,
        "an RMSNorm of the mixer's results, over the values of a group",
        needs=Needs(("mixer",), ("mamba2",), is_key=True),
        file_only=True,
    )
    mixer_beside: bool = option(
        False,
        "the mixer is beside attention, not in its place: both read the block's normed input, and "
        "the sum of their results is added, as in Falcon-H1",
        needs=MIXER,
        file_only=True,
    )
    mixer_negative: bool = option(
        False,
        "beta of the delta rule up to 2, not 1: negative eigenvalues (allow_neg_eigval)",
        needs=Needs(("mixer",), ("gated_delta_net",), is_key=True),
        file_only=True,
    )
    block: str = option(
        "pre-norm",
        "norms before attention and MLP, after, or both (sandwich); parallel: before, both read "
        "the block's input; shared-norm: parallel with one norm",
        choices=("pre-norm", "post-norm", "sandwich", "parallel", "shared-norm"),
    )
    mixer_pre_norm: bool = option(
        False,
        "norms before mixer and MLP in the blocks with the mixer, beside --block post-norm",
        needs=MIXER,
        file_only=True,
    )
    hybrid_pattern: str = option(
        "none",
        "blocks of one part each, as in Nemotron-H: M the mixer, * attention, - an MLP, E experts, "
        "a letter for each block; none: each block has attention or a mixer, and an MLP",
        needs=MIXER,
        file_only=True,
        example="M-",
    )
    experts: int = option(1, "experts per MoE layer (1 = dense model)", minimum=1)
    experts_per_token: int = option(
        None, "experts per token (top-k), default: 2 in an MoE model", minimum=1
    )
    expert_ffn_hidden: int = option(
        None, "expert MLP width, default: ffn-hidden", minimum=1, needs=EXPERTS
    )
    first_dense_layers: int = option(
        0,
        "dense layers before the first MoE layer, with MLPs of ffn-hidden",
        minimum=0,
        needs=EXPERTS,
        file_only=True,
    )
    expert_interval: int = option(
        1,
        "every Nth layer is an MoE layer, after the first dense ones",
        minimum=1,
        needs=EXPERTS,
        file_only=True,
    )
    router: str = option(
        "softmax", "function from the router's logits to scores", choices=("softmax", "sigmoid")
    )
    router_normalised: bool = option(
        True, "normalise the weights of a token's top-k experts to sum to 1", file_only=True
    )
    router_scale: float = option(
        1.0, "scaling factor of the top-k weights", above=0.0, file_only=True
    )
    router_groups: int = option(
        1, "expert groups (group-limited routing)", minimum=1, file_only=True
    )
    router_bias: bool = option(
        False,
        "a learned bias of each expert's logit in the router",
        needs=EXPERTS,
        file_only=True,
    )
    router_groups_per_token: int = option(
        1, "expert groups that a token may use (top-k groups)", minimum=1, file_only=True
    )
    shared_ffn_hidden: int = option(
        0,
        "shared expert MLP width; 0: no shared expert",
        minimum=0,
        file_only=True,
    )
    shared_gate: bool = option(False, "sigmoid gate of the shared expert", file_only=True)
    kv_lora_rank: int = option(
        0,
        "width of the latent of keys and values (multi-head latent attention); 0: none",
        minimum=0,
        file_only=True,
    )
    q_lora_rank: int = option(
        0,
        "width of the latent of queries; 0: none, queries come from the hidden state",
        minimum=0,
        file_only=True,
    )
    qk_nope_head_dim: int = option(
        0,
        "columns of a head's query and key without RoPE, with kv_lora_rank",
        minimum=0,
        file_only=True,
    )
    qk_rope_head_dim: int = option(
        0,
        "columns with RoPE: of each head's query, and of one key that all heads share",
        minimum=0,
        file_only=True,
    )
    v_head_dim: int = option(
        0, "width of a head's value, with kv_lora_rank", minimum=0, file_only=True
    )

    def __post_init__(self) -> None:
        """Derive the fields that are None; UserError if layers, hidden or heads is not given."""
        missing = [n for n in ("layers", "hidden", "heads") if getattr(self, n) is None]
        if missing:
            flags = ", ".join(f"--{n}" for n in missing)
            raise UserError(f"the model has no {flags}: give them, or --model PRESET")
        for name, value in (self.derived() | {"max_positions": self.seq_length}).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def derived(self) -> dict[str, Any]:
        """Return the default values of the fields whose defaults depend on other fields."""
        head = {"head_size": self.hidden // self.heads, "kv_heads": self.heads}
        bias = self.experts == 1 if self.bias is None else self.bias
        if self.is_latent:
            head["head_size"] = self.qk_nope_head_dim + self.qk_rope_head_dim
            bias = False  # of the projections of queries, keys and values
        experts = {"bias": self.experts == 1, "experts_per_token": min(2, self.experts)}
        default = self.default_ffn()
        widths = {"ffn_hidden": default, "expert_ffn_hidden": self.ffn_hidden or default}
        size = self.head_size or head["head_size"]
        attention = {
            "query_scalar": float(size * (size / base if (base := self.mup_base_head_size) else 1)),
            "window_rotary_base": self.rotary_base,
            "window_rotary_scaling": self.rotary_scaling,
        }
        value_heads = self.mixer_value_heads or self.heads
        mixer = {
            "mixer_value_heads": self.heads,
            "mixer_key_heads": value_heads,
            "mixer_key_size": size,
            "mixer_value_size": size,
        }
        mup = {
            "logit_divisor": self.hidden / self.mup if self.mup else 1.0,
            "residual_multiplier": (self.mup_base_layers or self.layers) / self.layers,
        }
        return head | widths | experts | attention | mixer | mup | {"qkv_bias": bias}

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention (arXiv 2405.04434, section 2.1)."""
        return self.kv_lora_rank > 0

    def default_ffn(self) -> int:
        """Return the default width of an MLP: 4 h; with a gate 8/3 h, up to a multiple of 64."""
        if self.activation not in GATED:
            return 4 * self.hidden
        return -(-8 * self.hidden // (3 * 64)) * 64  # rounded up to a multiple of 64

    @property
    def rotary_width(self) -> int:
        """The number of columns of a head that rotary positions turn."""
        if self.is_latent:
            return self.qk_rope_head_dim
        return int(self.head_size * self.rotary_fraction)

    @property
    def value_size(self) -> int:
        """The columns of a head's value; with latent attention they may be fewer than the key's."""
        return self.v_head_dim if self.is_latent else self.head_size

    @property
    def kernel_head_size(self) -> int:
        """The columns of a head that attention's kernels compute with.

        Queries and keys, or values, are padded with zeros to the wider of the two.
        """
        return max(self.head_size, self.value_size)

    @property
    def query_width(self) -> int:
        """The columns of the queries of all heads."""
        return self.heads * self.head_size

    @property
    def attention_width(self) -> int:
        """The columns of the attention's output: the values of all heads."""
        return self.heads * self.value_size

    @property
    def qkv_width(self) -> int:
        """The columns of queries, keys and values together, as attention's kernels take them."""
        return (self.heads + 2 * self.kv_heads) * self.kernel_head_size

    @property
    def gate_width(self) -> int:
        """The columns of attention's gates, as many as of its result; 0 without them."""
        return self.attention_width if self.attention_gate else 0

    @property
    def up_matrices(self) -> int:
        """The number of matrices that read an MLP's input: 2 with a gate, as in SwiGLU, or 1."""
        return 2 if self.activation in GATED else 1

    @property
    def up_width(self) -> int:
        """The columns of the MLP's first matrix; SwiGLU's gates double their number."""
        return self.ffn_hidden * self.up_matrices

    @property
    def mlps(self) -> tuple[int, int]:
        """The number of experts in a block, and the number of experts that compute each token.

        (1, 1) for a model without experts, (0, 0) for one whose blocks are alike and have no MLP.
        The shared MLP does not count.
        """
        if self.hybrid_pattern != "none" and not any(map(self.has_mlp, range(self.layers))):
            return 0, 0
        return self.experts, self.experts_per_token

    def has_experts(self, block: int) -> bool:
        """Return whether the block with number `block`, from 0, has experts in place of one MLP.

        With expert_interval 2 these are the blocks 1, 3, 5, ..., without the first dense layers.
        """
        if part := self.part_of(block):
            return part == "E"
        if self.experts == 1 or block < self.first_dense_layers:
            return False
        if block >= self.layers:  # of a module of mtp_depth
            return True
        return (block + 1) % self.expert_interval == 0

    def has_window(self, block: int) -> bool:
        """Return whether the block with number `block`, from 0, has a window, however long."""
        if block >= self.layers:  # of a module of mtp_depth
            return False
        return self.window > 0 and flags_of(self.window_blocks, self.layers)[block]

    def part_of(self, block: int) -> str:
        """Return the letter of hybrid_pattern for the block with number `block`; "" without one.

        Raise UserError if the pattern has another number of blocks.
        """
        if self.hybrid_pattern == "none" or block >= self.layers:  # of a module of mtp_depth
            return ""
        if len(self.hybrid_pattern) != self.layers:
            raise UserError(
                f"hybrid_pattern has {len(self.hybrid_pattern)} blocks, but layers is {self.layers}"
            )
        return self.hybrid_pattern[block]

    def has_mlp(self, block: int) -> bool:
        """Return whether the block with number `block`, from 0, has an MLP or experts."""
        return self.part_of(block) in ("", "-", "E")

    def mixers_of(self, block: int) -> tuple[str, ...]:
        """Return what mixes the tokens in the block with number `block`: attention, a mixer, both
        side by side, or nothing in a block that is an MLP alone. The blocks of modules of
        mtp_depth, whose numbers come after the layers', have attention.
        """
        if block >= self.layers:  # of a module of mtp_depth
            return ("attention",)
        if part := self.part_of(block):
            return {"M": (self.mixer,), "*": ("attention",)}.get(part, ())
        if self.mixer == "attention" or not flags_of(self.mixer_blocks, self.layers)[block]:
            return ("attention",)
        return ("attention", self.mixer) if self.mixer_beside else (self.mixer,)

    def has_mixer(self, block: int) -> bool:
        """Return whether the block with number `block` has the mixer, beside attention or alone."""
        return self.mixer != "attention" and self.mixer in self.mixers_of(block)

    def multiplier(self, place: str) -> float:
        """Return the factor of a place of a block, as `multipliers` has it; 1 if it has none."""
        return multipliers_of(self.multipliers).get(place, 1.0)

    def block_of(self, block: int) -> str:
        """Return where the norms of the block with number `block` are, as --block says it."""
        if self.mixer_pre_norm and self.has_mixer(block):
            return "pre-norm"
        return self.block

    @property
    def attention_blocks(self) -> list[int]:
        """The numbers of the blocks with attention, ascending."""
        return [n for n in range(self.layers) if "attention" in self.mixers_of(n)]

    @property
    def copies_embedding(self) -> bool:
        """Whether the last stage needs the embedding's matrix: a tied head, or mtp_depth."""
        return self.tied or self.mtp_depth > 0

    @property
    def attends(self) -> bool:
        """Whether any block has attention, those of modules of mtp_depth too."""
        return bool(self.attention_blocks or self.mtp_depth)

    def attention_of(self, block: int) -> BlockAttention:
        """Return what attention does in the block with number `block`, which has attention.

        A window that is as long as a sample changes nothing, and is left out.
        """
        windowed = self.has_window(block)
        rotary = self.positions == "rotary"
        if block < self.layers:
            rotary = rotary and flags_of(self.rotary_blocks, self.layers)[block]
        return BlockAttention(
            window=self.window if windowed and self.window < self.seq_length else 0,
            rotary=rotary,
            rotary_base=self.window_rotary_base if windowed else self.rotary_base,
            rotary_scaling=self.window_rotary_scaling if windowed else self.rotary_scaling,
            softcap=self.attention_softcap,
            sinks=self.sinks,
        )

    @property
    def has_kinds(self) -> bool:
        """Whether blocks may differ in parameters or FLOPs: by experts, mixers, or windows."""
        is_windowed = 0 < self.window < self.seq_length
        if self.experts > 1 or self.mixer != "attention":
            return True
        return is_windowed and self.window_blocks not in ("all", "none")

    def padded_vocab(self, layout: Any) -> int:
        """Return the number of rows that the vocabulary's matrices have with their padding.

        It is vocab_size rounded up to a multiple of pad_vocab_multiple x tp.
        """
        multiple = layout.pad_vocab_multiple * layout.tp
        return -(-self.vocab_size // multiple) * multiple


# The options of the model that change nothing unless --positions is rotary.
ROTARY_OPTIONS = tuple(
    field.name for field in dataclasses.fields(ModelShape) if field.metadata["needs"] == ROTARY
)
