"""Public errors of Megatron Core, alive in the wheel megatron-core 0.16.1, for check.py.

    python check.py --program benchmarks/faults/public/megatron_errors.py --set ERROR=smoothing
    python benchmarks/faults/public/in_programs.py --keep RESULTS.jsonl         all of them

An error is no change of Megatron: it is a choice among its public options or functions. ERRORS has
them. The parts that stand for CUDA are those of examples/check/megatron_core.py.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "check"))
from megatron_core import on_cpus

ERROR = ""  # a name of ERRORS, or "" for none
VOCABULARY, LENGTH, BATCH, EXPERTS = 64, 16, 8, 4
SMOOTHING = 0.1  # of labels
MOE = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 0.5,
    "moe_token_dispatcher_type": "allgather",
    "add_bias_linear": False,
}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "kv_channels": 16,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}


class Error(NamedTuple):
    """A public error. layouts: that show it. options: of TransformerConfig."""

    thread: str
    layouts: list[dict[str, Any]]
    options: dict[str, Any]


ERRORS = {
    "": Error("", [{"tp": 2}, {"tp": 2, "sp": True}, {"dp": 2}], {}),
    "smoothing": Error("#7452, finding 1 (#737, #7464)", [{"tp": 2}], {}),
    "gathered": Error("#7452, finding 2", [{"tp": 2}], {}),
    "mtp": Error(
        "#7452, finding 3 (#2417)",
        [{"dp": 2}, {"micro": 2}],  # not alive in 0.16.1, nor is `padding`: docs/public_errors.md
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0, "calculate_per_token_loss": True},
    ),
    "sinks": Error("#7452, finding 8 (PR 7530)", [{"tp": 2}], {"softmax_type": "learnable"}),
    "padding": Error(
        "#7452, finding 10 (PR 7481)",
        [{"tp": 2, "sp": True}],
        MOE | {"calculate_per_token_loss": True, "moe_router_load_balancing_type": "aux_loss"},
    ),
    "latent": Error("#1699 (PR 6839)", [{"tp": 2}, {"tp": 2, "sp": True}], LATENT),
    "aux": Error(
        "#1652, PR 5047",
        [{"tp": 2, "sp": True}],
        MOE | {"calculate_per_token_loss": True, "moe_router_load_balancing_type": "aux_loss"},
    ),
    "global": Error(
        "#3672, #7213", [{"dp": 2}], MOE | {"moe_router_load_balancing_type": "global_aux_loss"}
    ),
}
steps = 2
cut = {"*.softmax_offset": 0}  # which nothing on the tensor says: it is the error of finding 8


def layouts() -> list[dict[str, Any]]:
    """Return one rank, and the layouts that show the error."""
    return [{}, *ERRORS[ERROR].layouts]


def _config(layout: dict[str, Any]) -> TransformerConfig:
    """Return the configuration of a small model with the options of the error."""
    tp = layout.get("tp", 1)
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "use_cpu_initialization": True,
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "tensor_model_parallel_size": tp,
        "expert_tensor_parallel_size": tp,
        "sequence_parallel": layout.get("sp", False),
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "attention_softmax_in_fp32": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
    }
    kind = MLATransformerConfig if ERROR == "latent" else TransformerConfig
    return kind(**(values | ERRORS[ERROR].options))


class Core(DotProductAttention):
    """Megatron's attention in plain torch, called as latent attention calls that of a GPU."""

    def __init__(self, *given: Any, k_channels: Any = None, v_channels: Any = None, **named: Any):
        """Make attention; keys and values have as many columns as the configuration says."""
        super().__init__(*given, **named)


def _model(config: TransformerConfig) -> GPTModel:
    """Return Megatron's GPT model of this configuration."""
    local = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    if config.multi_latent_attention:
        local.submodules.self_attention.submodules.core_attention = Core
    of_mtp = None
    if config.mtp_num_layers:
        of_mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, local, False)
    return GPTModel(
        config,
        local,
        VOCABULARY,
        LENGTH,
        parallel_output=ERROR != "gathered" or config.tensor_model_parallel_size == 1,
        share_embeddings_and_output_weights=False,
        mtp_block_spec=of_mtp,
        position_embedding_type="rope" if config.multi_latent_attention else "learned_absolute",
    ).double()


def build(layout: dict[str, Any]) -> SimpleNamespace:
    """Build Megatron's model, optimizer and step on this rank."""
    on_cpus()
    torch.cuda.Stream = lambda *_, **__: None  # type: ignore[misc,assignment]
    for name in ("TELinear", "TEColumnParallelLinear", "TENorm"):
        if not isinstance(getattr(multi_latent_attention, name, None), type):
            setattr(multi_latent_attention, name, Core)  # a type that nothing here has
    moe_utils.te_general_gemm = None  # it is asked for, and not there without TransformerEngine
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.get("tp", 1),
        expert_tensor_parallel_size=layout.get("tp", 1),
    )
    config = _config(layout)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), _model(config))
    config.finalize_model_grads_func = finalize_model_grads
    clip = 0.02 if ERROR == "sinks" else 0.0  # its error is in the norm
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, clip_grad=clip), [model]
    )
    replicas = parallel_state.get_data_parallel_world_size()
    own = parallel_state.get_data_parallel_rank()
    count, micro = BATCH // replicas, layout.get("micro", 1)
    positions = torch.arange(LENGTH).expand(micro, LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5

    def forward(pieces: Any, model: Any) -> tuple[torch.Tensor, Any]:
        """Return the loss of each token, and how to make one number of it."""
        tokens, labels, counts = next(pieces)
        more: dict[str, Any] = {}
        if ERROR == "mtp":
            more["loss_mask"] = counts.double()
        if ERROR == "padding":
            more["padding_mask"] = ~counts
        if ERROR == "smoothing":
            logits = model(tokens, positions, hidden).transpose(0, 1).contiguous()
            losses = vocab_parallel_cross_entropy(logits, labels.t().contiguous(), SMOOTHING)
        else:
            losses = model(tokens, positions, hidden, labels=labels, **more)
        if not config.calculate_per_token_loss:
            return losses, lambda losses: (losses.mean(), losses.detach().mean())
        kept = counts if more else torch.ones_like(counts)
        total = (losses * kept).sum()
        return losses, lambda _: (total, kept.sum(), total.detach())

    def step(number: int) -> tuple[torch.Tensor, float]:
        """Train on the batch of this step; return its loss and the norm."""
        generator = torch.Generator().manual_seed(number)
        batch = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
        lengths = torch.randint(3, LENGTH, (BATCH, 1), generator=generator)  # of what counts
        counts = torch.arange(LENGTH) < lengths
        parts = [x[own * count : (own + 1) * count].split(micro) for x in (*batch, counts)]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=zip(*parts),
            model=[model],
            num_microbatches=count // micro,
            seq_length=LENGTH,
            micro_batch_size=micro,
        )
        _, norm, _ = optimizer.step()
        loss = torch.stack([torch.as_tensor(x) for x in found]).sum()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return loss / BATCH, norm

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)
