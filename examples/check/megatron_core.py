"""Megatron Core's GPTModel for `python check.py --program`: a file to copy and to change.

    python check.py --program examples/check/megatron_core.py
    python check.py --program examples/check/megatron_core.py --set experts=4
    python check.py --program examples/check/megatron_core.py --set parallel_output=False

The step is Megatron's own: its schedule, DistributedDataParallel, finalize_model_grads, clipping
and distributed optimizer. Tried with megatron-core 0.16.1 on CPU ranks. `on_cpus` has all that
stands for CUDA there: "cuda" is the CPU; doubles are what Megatron takes for floats, so that all of
it is fp64; `Norm` is in the place of apex's, since Megatron's own has no sequence parallelism; a
checkpoint's files are written by the ranks themselves, and not by processes that they start.
Nothing else of Megatron is changed. What needs a GPU or TransformerEngine is not run: flash
attention, grouped GEMM, context parallelism.
"""

import contextlib
import queue

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models import backends
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

# What --set changes.
experts = 0  # of an MoE layer in each block; 0: dense
parallel_output = True  # whether the logits stay cut over tp
tied = True  # whether the head has the weights of the embedding
gated = True  # SwiGLU
groups = 4  # KV heads
clip = 0.02  # the norm to which gradients are clipped: below all of them
options = {}  # more of TransformerConfig: --set "options={'qk_layernorm': True}"

VOCABULARY, LENGTH, BATCH, MICRO = 64, 16, 8, 1
# How a checkpoint has the optimizer's state: by parameter, so that any layout can load it.
STATE = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def layouts():
    """The first is one rank. sp: sequence parallelism; zero: the distributed optimizer."""
    found = [{}, {"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"dp": 2}, {"dp": 2, "zero": True}]
    found += [{"tp": 2, "pp": 2}, {"tp": 2, "dp": 2, "sp": True, "zero": True}]
    found += [{"pp": 2, "dp": 2, "zero": True}, {"tp": 4, "sp": True}]
    if experts:
        found = [x for x in found if x.get("tp", 1) == 1 or x.get("sp")]  # Megatron's own rule
        found += [{"dp": 2, "ep": 2}, {"dp": 2, "ep": 2, "zero": True}, {"dp": 4, "ep": 2}]
        found += [{"tp": 2, "sp": True, "ep": 2, "etp": 1}, {"pp": 2, "dp": 2, "ep": 2}]
    return found


def loads(saved_by, layout):
    """Whether a layout can load what another saved: not with the distributed optimizer.

    Without apex 0.16.1 cannot load its state into a new optimizer: torch's Adam has no step there.
    """
    return not (saved_by.get("zero") or layout.get("zero"))


def build(layout):
    """Build Megatron's model, optimizer and step on this rank."""
    on_cpus()
    sizes = {axis: layout.get(axis, 1) for axis in ("tp", "pp", "ep")}
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=layout.get("etp", sizes["tp"]),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    moe = {}
    if experts:
        moe = {"num_moe_experts": experts, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
        moe |= {
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
        }
        moe |= {"add_bias_linear": False, "moe_ffn_hidden_size": 24}
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=groups,
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=layout.get("etp", sizes["tp"]),
        sequence_parallel=layout.get("sp", False),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **(moe | options),
    )
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=experts or None, normalization="LayerNorm"),
        VOCABULARY,
        LENGTH,
        pre_process=first,
        post_process=last,
        parallel_output=parallel_output,
        share_embeddings_and_output_weights=tied,
    ).double()
    gpt = model
    shards = layout.get("zero", False)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=shards)
    model = DistributedDataParallel(config, ddp, model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.1,
            clip_grad=clip,
            use_distributed_optimizer=shards,
        ),
        [model],
    )
    replicas = parallel_state.get_data_parallel_world_size()
    own = parallel_state.get_data_parallel_rank()
    count = BATCH // replicas

    def step(number):
        """Train on the batch of this step; return its loss, on the last stage, and the norm."""
        batch = torch.randint(
            VOCABULARY, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(number)
        )
        tokens, labels = batch[:, own * count : (own + 1) * count]
        positions = torch.arange(LENGTH).expand(MICRO, LENGTH)
        mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5

        def forward(pieces, model):
            """Return the loss of each token, and how to make one number of it."""
            some_tokens, some_labels = next(pieces)
            losses = model(some_tokens, positions, mask, labels=some_labels)
            return losses, lambda losses: (losses.mean(), losses.detach().mean())

        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=zip(tokens.split(MICRO), labels.split(MICRO)),
            model=[model],
            num_microbatches=count // MICRO,
            seq_length=LENGTH,
            micro_batch_size=MICRO,
        )
        _, norm, _ = optimizer.step()
        if not last:
            return None, norm
        loss = torch.stack(found).mean()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return loss / replicas, norm

    def names(local):
        """Return the name in the whole model: layers and experts have local numbers."""
        words = local.removeprefix("module.").split(".")
        if words[:2] == ["decoder", "layers"]:
            layer = model.module.decoder.layers[int(words[2])]
            words[2] = str(layer.layer_number - 1)
        if "local_experts" in words:
            place = words.index("local_experts") + 1
            here = experts // sizes["ep"]
            words[place] = str(
                int(words[place]) + here * parallel_state.get_expert_model_parallel_rank()
            )
        name = ".".join(words)
        return (
            "embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name
        )

    def sharded(is_loading):
        """Return the state of model and optimizer with the place of each tensor in the whole."""
        state = {"model": gpt.sharded_state_dict(metadata=STATE)}
        of_model = state["model"]
        state["optimizer"] = optimizer.sharded_state_dict(of_model, is_loading, metadata=STATE)
        return state

    def save(folder):
        """Save model and optimizer with Megatron's dist_checkpointing."""
        dist_checkpointing.save(sharded(False), folder)

    def load(folder):
        """Load what any layout has saved."""
        state = dist_checkpointing.load(sharded(True), folder)
        gpt.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    parts = {"model": model, "optimizer": optimizer, "step": step, "names": names}
    return parts | {"save": save, "load": load}


# ---- What stands for CUDA ------------------------------------------------------------------------


class OnCpus(TorchFunctionMode):
    """Has "cuda" mean the CPU, and the type of a tensor be that of floats on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Call a function of torch with the CPU in the place of a GPU."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0].clone()  # as of 16 bits: a loss writes into its logits
        if function is torch.Tensor.type and len(args) == 1:
            return "torch.cuda.FloatTensor"
        return function(*args, **kwargs)


class Stream:
    """A stream that has always done all of its work."""

    def wait_stream(self, other):
        """Wait for nothing."""

    def record_event(self):
        """Return an event that has happened."""
        return self

    def synchronize(self):
        """Wait for nothing."""


class Norm(torch.nn.LayerNorm):
    """A norm whose weights say whether ranks of tp have parts of the tokens, as apex's do."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        """Make the norm of a layer."""
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class NoTracker:
    """In the place of GPUs' random states: dropout is 0, weights are those of one rank."""

    def fork(self, *_, **__):
        """Return a context that changes nothing."""
        return contextlib.nullcontext()

    def is_initialized(self):
        """Whether there are random states."""
        return True


def counts_on_cpu(tensor, as_numpy=False, record_stream=False):
    """Return the rows of each expert as Megatron has them after their copy from a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def write_here(transforms, use_msc, rank, buckets, results):
    """Write a rank's files of a checkpoint in the rank itself; Megatron forks processes for it."""
    found, running = queue.Queue(), queue.Queue()
    for number, bucket in enumerate(buckets):
        running.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, found, running, False
        )
    results.put(dict(found.get() for _ in buckets))


def on_cpus():
    """Have Megatron run without GPUs in this process."""
    if torch.cuda.is_available():
        return
    OnCpus().__enter__()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    tracker = NoTracker()
    for module in (tensor_parallel, tensor_parallel.random, tensor_parallel.layers):
        module.get_cuda_rng_tracker = lambda *_, **__: tracker
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *_: None
    token_dispatcher.maybe_move_tensor_to_cpu = counts_on_cpu
    moe_utils.te_general_gemm = None  # 0.16.1 looks at it without TransformerEngine too
    backends.LNImpl = gpt_layer_specs.LNImpl = transformer_block.LayerNormImpl = Norm
    filesystem_async._get_write_results_queue = queue.Queue
    writer = filesystem_async.FileSystemWriterAsync
    writer.write_preloaded_data_multiproc = staticmethod(write_here)
