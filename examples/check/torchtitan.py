r"""torchtitan's models for check.py: llama3, and qwen3 with experts, on CPU ranks over gloo.

    pip install --target TITAN --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro torchdata einops \
        docstring_parser typeguard typing_extensions
    PYTHONPATH=TITAN python check.py --program examples/check/torchtitan.py
    PYTHONPATH=TITAN python check.py --program examples/check/torchtitan.py --set MODEL=qwen3

The step is that of torchtitan's Trainer, without its loader and its log: the loss is a sum over the
tokens, divided by those of the global batch, the norm is clipped by its own clip_grad_norm_. What
stands in for code of GPUs, here alone:

* kernels of Triton for one way to exchange tokens of experts, which is not used here
* attention without masks in place of flex_attention, which is compiled
* a grouped product of experts by a loop, because torch's has no fp64
* FSDP's sums of gradients without a factor, which gloo does not have
* `.float()` and `.bfloat16()` inside of the model make fp64, so that rounding hides nothing

Not covered: --compile, cp (its attention is of GPUs), spmd_types' checks.
"""

import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

MODEL = "llama3"  # or "qwen3", with experts
BACKEND = "partial_dtensor"  # of torchtitan's parallelism.spmd_backend
DIM, LAYERS, HEADS, KV_HEADS, VOCABULARY, LENGTH, SAMPLES = 32, 4, 4, 4, 48, 16, 8
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
CLIP = 0.5
steps = 3
dtype = torch.float64

# ---- What needs a GPU ----------------------------------------------------------------------------

_kernels = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
_kernels.__getattr__ = lambda name: None  # type: ignore[method-assign]
sys.modules.setdefault(_kernels.__name__, _kernels)


class _Trainer:
    """In the place of the Trainer, for whose type a configuration asks: it needs a loader."""

    class Config:
        """No configuration here is one of a whole run."""


_trainer = types.ModuleType("torchtitan.trainer")
_trainer.Trainer = _Trainer  # type: ignore[attr-defined]
sys.modules.setdefault(_trainer.__name__, _trainer)


def _grouped_mm(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Return the product of each expert's rows of x with its matrix, as torch's grouped_mm does."""
    starts = [0, *offs.tolist()]
    parts = [x[a:b] @ w for a, b, w in zip(starts, starts[1:], weight)]
    return torch.cat([*parts, x.new_zeros(len(x) - starts[-1], weight.shape[-1])])


def _stand_ins() -> None:
    """Replace what torch has for GPUs, or in fp32, alone."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.Tensor.bfloat16 = torch.Tensor.double  # type: ignore[method-assign]
    to = torch.Tensor.to

    def kept(x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        """Return x.to(...), and x itself where fp64 would become float32."""
        lowers = x.dtype == torch.float64 and torch.float32 in given
        return x if lowers else to(x, *given, **named)

    torch.Tensor.to = kept  # type: ignore[assignment,method-assign]
    F.grouped_mm = torch._grouped_mm = _grouped_mm  # type: ignore[assignment]
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import utils

    TORCH_DTYPE_MAP["float32"] = torch.float64  # FSDP casts weights to it
    utils.device_type, utils.device_module = "cpu", torch.cpu  # it takes CUDA for granted


# ---- The program ---------------------------------------------------------------------------------


def layouts() -> list[dict[str, Any]]:
    """Return one rank, and layouts of tp, pp, fsdp, replicas, and of experts ep."""
    dense: list[dict[str, Any]] = [
        {},
        {"tp": 2},
        {"dp_shard": 2},
        {"dp_replicate": 2},
        {"pp": 2},
        {"tp": 2, "dp_shard": 2},
        {"tp": 2, "no_sp": True},
        {"tp": 4},
        {"dp_replicate": 2, "dp_shard": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "dp_shard": 2},
        {"pp": 2, "schedule": "Interleaved1F1B"},
        {"dp_shard": 4},
    ]
    if MODEL == "llama3":
        return dense
    return [
        {},
        {"dp_shard": 2},
        {"dp_shard": 2, "ep": 2},
        {"tp": 2, "ep": 2},
        {"dp_shard": 4, "ep": 2},
        {"dp_shard": 4, "ep": 4},
        {"dp_shard": 2, "tp": 2, "ep": 4},
        {"dp_shard": 2, "tp": 2, "ep": 2},
        {"pp": 2},
        {"pp": 2, "dp_shard": 2, "ep": 2},
    ]


def _config() -> tuple[Any, Any]:
    """Return the family's functions, and the configuration of a small model of its pieces."""
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    if MODEL == "llama3":
        from torchtitan.models import llama3 as family

        layers = family._build_llama3_layers(
            n_layers=LAYERS,
            dim=DIM,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            hidden_dim=2 * DIM,
            rope=family.ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=2 * LENGTH, theta=500000),
            attn_backend="flex",
        )
        kind = family.Llama3Model.Config
    else:
        from torchtitan.models import qwen3 as family

        layers = family._build_qwen3_moe_layers(
            fuse_qkv=True,
            n_layers=LAYERS,
            dim=DIM,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            head_dim=DIM // HEADS,
            moe_hidden_dim=DIM,
            num_experts=EXPERTS,
            top_k=EXPERTS_PER_TOKEN,
            attn_backend="flex",
            rope=family.CosSinRoPE.Config(dim=DIM // HEADS, max_seq_len=2 * LENGTH, theta=1e6),
            moe_comm_backend="standard",
        )
        kind = family.Qwen3Model.Config
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    start = {"weight": torch.nn.init.normal_}
    spec = family.model_registry("debugmodel" if MODEL == "llama3" else "debugmodel_moe")
    return spec, kind(
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=start
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init={"weight": torch.nn.init.ones_}),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=start),
        layers=layers,
    )


class _Sources:
    """The configuration that a model is told of, without the parts that it does not ask for."""

    def __init__(self, parallelism: Any, training: Any, compile_config: Any):
        self.parallelism, self.training, self.compile = parallelism, training, compile_config


def build(layout: dict[str, Any]) -> dict[str, Any]:
    """Return torchtitan's model, AdamW, and a step as its Trainer makes one."""
    here = os.path.dirname(os.path.abspath(__file__))  # where this file would be `torchtitan`
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    _stand_ins()
    import torch.testing._internal.distributed.fake_pg  # a group of one rank is fake
    from torchtitan.components.checkpointer.base import ModelWrapper
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer.utils import (
        get_flat_optim_state_dict,
        init_optim_state,
        load_flat_optim_state_dict,
    )
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils

    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=layout.get("dp_replicate", 1),
        data_parallel_shard_degree=layout.get("dp_shard", 1),
        tensor_parallel_degree=layout.get("tp", 1),
        pipeline_parallel_degree=layout.get("pp", 1),
        expert_parallel_degree=layout.get("ep", 1),
        enable_sequence_parallel=not layout.get("no_sp", False),
        pipeline_parallel_schedule=layout.get("schedule", "1F1B"),
        spmd_backend=BACKEND,
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    dist_utils.set_spmd_backend(BACKEND)
    replicas = dims.dp_replicate * dims.dp_shard
    training = TrainingConfig(
        local_batch_size=SAMPLES // replicas,
        seq_len=LENGTH,
        mixed_precision_param="float32",
        max_norm=CLIP,
    )
    compile_config = CompileConfig(enable=False)
    spec, config = _config()
    config.update_from_config(config=_Sources(parallelism, training, compile_config))
    loss_fn = CrossEntropyLoss(CrossEntropyLoss.Config(global_vocab_size=VOCABULARY))
    with torch.device("meta"):
        model = config.build()
    options: dict[str, Any] = {
        "parallel_dims": dims,
        "training": training,
        "parallelism": parallelism,
        "compile_config": compile_config,
        "ac_config": None,
        "dump_folder": "",
    }
    schedule, is_first, is_last = None, True, True
    if dims.pp_enabled:
        schedule, parts, is_first, is_last = spec.pipelining_fn(
            model,
            **options,
            device=torch.device("cpu"),
            model_config=config,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=loss_fn,
        )
    else:
        parts = [spec.parallelize_fn(model, **options)]
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=torch.device("cpu"))
        part.train()
        for module in part.modules():
            if isinstance(module, FSDPModule):  # gloo has no sum with a factor
                module.set_force_sum_reduction_for_comms(True)
    parameters = [p for part in parts for p in part.parameters()]
    named = [pair for part in parts for pair in part.named_parameters()]
    optimizer = torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1, foreach=False)
    batch = dims.get_mesh("batch").get_local_rank() if replicas > 1 else 0
    context = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)

    def step(number: int) -> torch.Tensor:
        """Train one step on a global batch, and return its mean loss."""
        generator = torch.Generator().manual_seed(number)
        texts = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
        texts = texts.chunk(replicas)[batch]
        tokens, labels = texts[:, :-1].contiguous(), texts[:, 1:].contiguous()
        targets = torch.tensor(SAMPLES * LENGTH)
        optimizer.zero_grad()
        loss = torch.zeros(())
        with context():
            if schedule is None:
                loss, _ = loss_fn(parts[0](tokens), labels, targets)
                loss.backward()
            else:
                losses: list[torch.Tensor] = []
                schedule.step(
                    *([tokens] if is_first else []),
                    target=labels if is_last else None,
                    losses=losses if is_last else None,
                    loss_kwargs={"global_valid_tokens": targets},
                    return_outputs=False,
                )
                loss = torch.stack(losses).sum() if is_last else loss
        dist_utils.clip_grad_norm_(
            parameters,
            CLIP,
            pp_mesh=dims.get_optional_mesh("pp"),
            ep_enabled=dims.ep_enabled,
        )
        optimizer.step()
        total = loss.detach().clone()  # equal on the ranks of tp, 0 on stages but the last
        dist.all_reduce(total)
        return total / dims.tp

    def names(local: str) -> str:
        """Return the name in the whole model: without the number of a part."""
        part, _, rest = local.partition(".")
        return rest if part.isdigit() else local

    weights = ModelWrapper(parts)

    def state() -> dict[str, Any]:
        """Return the state by names of the whole model, as torchtitan's checkpoints have it."""
        init_optim_state(optimizer)
        return weights.state_dict() | get_flat_optim_state_dict(optimizer)

    def save(folder: str) -> None:
        """Save model and optimizer with torch.distributed.checkpoint."""
        dcp.save(state(), checkpoint_id=folder)

    def load(folder: str) -> None:
        """Load what any layout has saved."""
        found = state()
        dcp.load(found, checkpoint_id=folder)
        weights.load_state_dict(found)
        load_flat_optim_state_dict(optimizer, found)

    made = {"model": parts, "optimizer": optimizer, "step": step, "names": names}
    return made | {"save": save, "load": load}
