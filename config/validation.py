"""Which options go together: every check across options, before torch is imported.

    config = check(command_line.parse(sys.argv[1:]), ranks=8)     # fills in dp

Messages show both values that do not fit, such as "tp(3) does not divide heads(16)".
Read schema.py, which has the options, before this file.
"""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

from architecture.block_attention import flags_of
from architecture.multipliers import OF_MIXER, multipliers_of
from architecture.mup import check_mup
from architecture.rotary_scaling import rotary_scaling
from architecture.shape import ROTARY_OPTIONS, ModelShape
from base.errors import LayoutError, UserError
from base.options import Needs, as_typed
from config.optimizers import OPTIMIZERS, WITH_MUP
from config.phases import prefixes_of
from config.run_lengths import check_rate
from config.run_options import Run, parse_eval_sets, parse_task_files
from config.schema import Config, Layout, Training
from config.timeline import Timeline


def check(config: Config, ranks: int, name: str = "ranks") -> Config:
    """Return the configuration with dp filled in; UserError if it cannot run on `ranks` ranks.

    name: the word that messages use for the ranks: "ranks" of a launcher, or "GPUs" of --gpus.
    """
    layout = with_dp(config.layout, ranks, name)
    config = dataclasses.replace(config, layout=layout)
    check_shape(config.model)
    check_split(config.model, layout)
    timeline = Timeline(config)
    check_batches(timeline)
    _check_phases(timeline)
    _ = timeline.skipped  # raises UserError if --skip-samples is malformed or its ranges overlap
    check_batch(layout, "eval-samples", config.data.eval_samples)
    parse_eval_sets(config.data.eval_data or ())
    parse_task_files(config.data.eval_tasks or ())
    _check_objective(config)
    check_sharding(layout, config.training)
    check_mup(config.model, config.training.optimizer, WITH_MUP)
    check_joint_matrices(config.model, layout, config.training)
    _check_experts(config.model, layout, config.training)
    _check_recomputed_counts(layout, config.model.layers)
    _check_auto(layout)
    _check_precision(config.training)
    _check_length(timeline)
    _check_run(config.run, timeline.total_steps)
    if config.run.audit_every:
        _check_audits(config)
    return config


def check_any_length(config: Config, ranks: int, name: str = "ranks") -> Config:
    """Return the result of `check` for a run whose length may be missing: then it is one step."""
    training = config.training
    by_plan = None if config.plan is None else config.plan.train_tokens
    if training.steps is None and training.train_samples is None and by_plan is None:
        config = dataclasses.replace(config, training=dataclasses.replace(training, steps=1))
    return check(config, ranks, name)


def refusal(config: Config, ranks: int) -> str:
    """Return why a run of any length is impossible on `ranks` ranks; empty if it is possible."""
    try:
        check_any_length(config, ranks)
    except UserError as error:
        return str(error)
    return ""


def with_dp(layout: Layout, ranks: int, name: str) -> Layout:
    """Return the layout with dp filled in; UserError if it does not fit the number of ranks.

    name: the word that messages use for the ranks, such as GPUs.
    """
    tp = layout.tp
    pp = layout.pp
    cp = layout.cp
    dp = layout.dp
    replica = tp * pp * cp
    product = f"tp({tp}) * pp({pp})" + f" * cp({cp})" * (cp > 1)
    if ranks % replica:
        start = ""
        if ranks == 1:
            how = {"ranks": f"start {replica} ranks, as with mpirun -n {replica}"}
            start = f": {how.get(name, f'give --gpus {replica}')}"
        counted = f"{ranks} {name if ranks != 1 else name.removesuffix('s')}"
        raise LayoutError(f"{product} * dp(?) does not divide {counted}{start}")
    if dp is not None and replica * dp != ranks:
        raise LayoutError(f"{product} * dp({dp}) = {replica * dp} is not {ranks} {name}")
    return dataclasses.replace(layout, dp=ranks // replica)


def check_shape(model: ModelShape) -> None:
    """Raise UserError if the model cannot be built under any layout."""
    _check_pattern(model)
    _check_latent(model)
    # Only the default head size, hidden / heads, needs a number of heads that divides hidden.
    default_size = not model.is_latent and model.head_size == model.hidden // model.heads
    if model.hidden % model.heads and default_size:
        both = f"heads({model.heads}) does not divide hidden({model.hidden})"
        numbers = range(max(1, model.heads - 1000), min(model.heads + 1000, model.hidden) + 1)
        divisors = [n for n in numbers if model.hidden % n == 0]
        below = [n for n in divisors if n < model.heads][-1:]
        above = [n for n in divisors if n > model.heads][:1]
        near = " or ".join(map(str, below + above))
        raise UserError(f"{both}: give --heads {near or model.hidden}, or a head_size")
    if model.heads % model.kv_heads:
        raise UserError(f"kv-heads({model.kv_heads}) does not divide heads({model.heads})")
    _check_experts(model)
    _check_attention(model)
    _check_mixer(model)
    if model.positions == "rotary" and (model.rotary_width % 2 or not model.rotary_width):
        part = f"head_size({model.head_size}) * rotary_fraction({model.rotary_fraction:g})"
        part = "qk_rope_head_dim" if model.is_latent else part
        raise UserError(
            f"rotary positions turn an even number of columns of a head, 2 or more: {part} is "
            f"{model.rotary_width}"
        )
    if model.mtp_depth >= model.seq_length:
        raise UserError(
            f"mtp-depth({model.mtp_depth}) predicts tokens beyond the end of every sample: "
            f"seq-length({model.seq_length})"
        )
    if model.positions == "learned" and model.seq_length > model.max_positions:
        raise UserError(
            f"seq-length({model.seq_length}) is longer than the learned positions: "
            f"max_positions({model.max_positions}); for a new model give --set max_positions="
            f"{model.seq_length}"
        )


def _check_attention(model: ModelShape) -> None:
    """Raise UserError if options of attention that may differ between blocks do not go together."""
    window_blocks = flags_of(model.window_blocks, model.layers)
    rotary_blocks = flags_of(model.rotary_blocks, model.layers)
    if model.window and not any(window_blocks):
        raise UserError(f"window({model.window}) needs blocks that have it: window_blocks is none")
    if model.norm_plus_one and model.norm != "rmsnorm":
        raise UserError(f"norm_plus_one needs --norm rmsnorm, not {model.norm}")
    scalings = [rotary_scaling(model.rotary_scaling), rotary_scaling(model.window_rotary_scaling)]
    if model.positions != "rotary":
        return
    if not any(rotary_blocks) and model.mixer == "attention":
        raise UserError("--positions rotary has no block with them: rotary_blocks is none")
    lengths = [numbers[0] for kind, numbers in scalings if kind == "longrope"]
    if model.window and len(set(lengths)) > 1:
        raise UserError(
            f"rotary_scaling and window_rotary_scaling are longrope of {lengths[0]:g} and of "
            f"{lengths[1]:g} positions: the blocks of a model have one length"
        )
    for kind, numbers in scalings:
        factors = (len(numbers) - 2) // 2
        if kind == "longrope" and 2 * factors != model.rotary_width:
            raise UserError(
                f"rotary_scaling longrope has {factors} factors of each kind, but the rotary "
                f"positions turn {model.rotary_width} columns of a head: {model.rotary_width // 2}"
            )


def _check_mixer(model: ModelShape) -> None:
    """Raise UserError if the options of a mixer in the place of attention do not go together."""
    factors = multipliers_of(model.multipliers)
    if "gate" in factors and model.activation not in ("swiglu", "geglu"):
        raise UserError(
            f"multipliers has gate, but --activation {model.activation} has none to scale"
        )
    if "mixer" in factors and model.mixer == "attention":
        raise UserError("multipliers has mixer, but mixer is attention: no block has another one")
    of_mixer = [place for place in factors if place in OF_MIXER]
    if of_mixer and model.mixer != "mamba2":
        raise UserError(
            f"multipliers has {of_mixer[0]} of mixer mamba2, but mixer is {model.mixer}"
        )
    if model.mixer == "attention":
        return
    if not any(flags_of(model.mixer_blocks, model.layers)):
        raise UserError(f"mixer({model.mixer}) needs blocks that have it: mixer_blocks is none")
    if model.mixer_pre_norm and model.block != "post-norm":
        raise UserError(
            f"mixer_pre_norm is for --block post-norm, but --block is {model.block}: leave it out"
        )
    keys, values = model.mixer_key_heads, model.mixer_value_heads
    both = f"mixer_key_heads({keys})", f"mixer_value_heads({values})"
    if values % keys:
        raise UserError(f"{both[0]} does not divide {both[1]}")
    if model.mixer == "kda" and values != keys:
        raise UserError(
            f"mixer(kda) has as many key heads as value heads, not {' and '.join(both)}"
        )


def _check_pattern(model: ModelShape) -> None:
    """Raise UserError if a pattern of blocks of one part is malformed or meets other options."""
    pattern = model.hybrid_pattern
    if pattern == "none":
        return
    if not set(pattern) <= set("M*-E"):
        raise UserError(
            f"hybrid_pattern is none, or M for the mixer, * attention, - an MLP and E experts, not "
            f"{pattern!a:.80}"
        )
    model.part_of(0)
    if "M" not in pattern:
        raise UserError(
            f"hybrid_pattern({pattern}) has no M, a block with the mixer({model.mixer}): add one, "
            "or leave out hybrid_pattern"
        )
    if "E" in pattern and model.experts == 1:
        raise UserError("hybrid_pattern has blocks with experts (E): give --experts N above 1")
    others = {
        "--block": (model.block, "pre-norm"),
        "mixer_blocks": (model.mixer_blocks, "all"),
        "mixer_beside": (model.mixer_beside, False),
        "first_dense_layers": (model.first_dense_layers, 0),
        "expert_interval": (model.expert_interval, 1),
        "kv_lora_rank": (model.kv_lora_rank, 0),
    }
    for name, (value, only) in others.items():
        if value != only:
            raise UserError(f"hybrid_pattern needs {name} {only}, not {value}")


def _check_mixer_ranks(model: ModelShape, layout: Layout) -> None:
    """Raise UserError if tp, or cp with --cp-mixer heads, cannot divide the heads of a mixer."""
    if model.mixer == "attention":
        if layout.cp_mixer == "heads":
            raise LayoutError("--cp-mixer heads is of blocks with a mixer, but mixer is attention")
        return
    tp, heads, name = layout.tp, model.mixer_key_heads, "mixer_key_heads"
    if model.mixer == "short_conv":
        heads, name = model.hidden, "hidden"
    if model.mixer in ("mamba2", "gated_delta_net"):  # tensor ranks may have key heads in common
        if model.mixer_value_heads % tp:
            raise LayoutError(
                f"tp({tp}) does not divide mixer_value_heads({model.mixer_value_heads})"
            )
        if heads % tp and tp % heads:
            raise LayoutError(f"tp({tp}) does not divide {name}({heads}), nor the other way round")
    elif heads % tp:
        raise LayoutError(f"tp({tp}) does not divide {name}({heads})")
    if layout.cp_mixer == "heads" and heads % (tp * layout.cp):
        raise LayoutError(
            f"--cp-mixer heads: tp({tp}) * cp({layout.cp}) does not divide {name}({heads}); "
            "--cp-mixer states takes any number"
        )


def _check_latent(model: ModelShape) -> None:
    """Raise UserError if the options of latent attention do not go together, or with others."""
    widths = {
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
    }
    if not model.is_latent:
        for name, width in {"q_lora_rank": model.q_lora_rank, **widths}.items():
            if width:
                raise UserError(f"{name}({width}) is of latent attention: give kv_lora_rank too")
        return
    latent = f"kv_lora_rank({model.kv_lora_rank})"
    for name, width in widths.items():
        if not width:
            raise UserError(f"{latent} needs a {name} above 0")
    head_size = model.qk_nope_head_dim + model.qk_rope_head_dim
    needed = {
        "positions": (model.positions, "rotary"),
        "kv_heads": (model.kv_heads, model.heads),
        "head_size": (model.head_size, head_size),
        "qkv_bias": (model.qkv_bias, False),
    }
    for field in dataclasses.fields(model):
        if field.metadata["not_latent"]:
            needed[field.name] = (getattr(model, field.name), field.default)
    for name, (value, only) in needed.items():
        if value != only:
            raise UserError(f"{latent} needs {name} {only}, not {value}")


def check_split(model: ModelShape, layout: Layout) -> None:
    """Raise UserError if tensor, context or pipeline parallelism cannot divide the model."""
    sizes = {"heads": model.heads, "hidden": model.hidden}
    if model.experts == 1:  # tp cuts a block's one MLP, but no experts
        sizes["ffn-hidden"] = model.ffn_hidden
    for name, size in sizes.items():
        if size % layout.tp:
            raise LayoutError(f"tp({layout.tp}) does not divide {name}({size})")
    if model.kv_heads % layout.tp and layout.tp % model.kv_heads:
        both = f"tp({layout.tp}) does not divide kv-heads({model.kv_heads})"
        raise UserError(f"{both}, nor the other way round")
    _check_mixer_ranks(model, layout)
    check_cut(layout, model.seq_length)
    _check_schedule(layout)
    _check_experts(model, layout)
    if layout.stages > model.layers + 2:
        product = f"pp({layout.pp})" + f" * {layout.stages_per_rank}" * (layout.stages_per_rank > 1)
        raise LayoutError(
            f"{product} is more stages than there are parts to place: "
            f"{model.layers} blocks + embedding + head = {model.layers + 2}"
        )
    explicit_partition(layout, model.layers)


def _check_experts(
    model: ModelShape, layout: Layout | None = None, training: Training | None = None
) -> None:
    """Raise UserError if options of experts do not go together, or were given without experts."""
    if model.experts > 1:
        _check_router(model)
        if layout is not None:
            _check_expert_ranks(model, layout)
        if training is not None:
            _check_trainable(model)
        return
    is_given = {
        "--experts-per-token": model.experts_per_token > 1,
        "router_groups": model.router_groups > 1,
        "shared_ffn_hidden": model.shared_ffn_hidden > 0,
        "shared_gate": model.shared_gate,
        "--ep": layout is not None and (layout.ep or 1) > 1,
        "--balance": training is not None and training.balance != "none",
        "--router-z-loss": training is not None and training.router_z_loss > 0,
    }
    for flag in filter(is_given.get, is_given):  # each given option that is only for experts
        raise UserError(f"{flag} needs --experts N, with N above 1")


def _check_router(model: ModelShape) -> None:
    """Raise UserError if no block has experts, or if the router cannot choose among them.

    The router divides the experts into `router_groups` groups, takes the `router_groups_per_token`
    best groups for a token, and chooses the token's experts in these.
    """
    if not any(map(model.has_experts, range(model.layers))):
        dense = model.first_dense_layers
        interval = model.expert_interval
        if model.hybrid_pattern != "none":
            raise UserError(f"experts({model.experts}): hybrid_pattern has no block with them (E)")
        raise UserError(
            f"first_dense_layers({dense}) and expert_interval({interval}) leave no block of "
            f"layers({model.layers}) with experts"
        )
    experts = model.experts
    chosen = model.experts_per_token
    groups = model.router_groups
    if chosen > experts:
        raise UserError(f"experts-per-token({chosen}) is more than experts({experts})")
    if experts % groups:
        raise UserError(f"router_groups({groups}) does not divide experts({experts})")
    best = model.router_groups_per_token
    if best > groups:
        raise UserError(f"router_groups_per_token({best}) is more than router_groups({groups})")
    if chosen > best * (experts // groups):
        within = f"{best} groups of {experts // groups} experts"
        raise UserError(f"experts-per-token({chosen}) is more than there are in {within}")
    if model.shared_gate and not model.shared_ffn_hidden:
        raise UserError("shared_gate is of the shared MLP: give shared_ffn_hidden too")


def _check_expert_ranks(model: ModelShape, layout: Layout) -> None:
    """Raise UserError if the ranks of a stage cannot divide the experts, or tp the other MLPs."""
    ep = layout.ep or 1
    ranks = (layout.dp or 1) * layout.cp * layout.tp
    if model.experts % ep:
        raise LayoutError(f"ep({ep}) does not divide experts({model.experts})")
    if layout.dp is not None and ranks % ep:
        axes = f"dp({layout.dp}) * cp({layout.cp}) * tp({layout.tp}) = {ranks}"
        raise LayoutError(f"ep({ep}) does not divide the ranks of a stage: {axes}")
    # tp does not cut experts. It cuts the MLP that all tokens share and MLPs in place of experts.
    widths = {"shared_ffn_hidden": model.shared_ffn_hidden}
    if not all(map(model.has_experts, range(model.layers))):
        widths["ffn-hidden"] = model.ffn_hidden
    for name, width in widths.items():
        if width % layout.tp:
            raise LayoutError(f"tp({layout.tp}) does not divide {name}({width})")


def _check_trainable(model: ModelShape) -> None:
    """Raise UserError if a model with experts can be planned but not trained.

    Called when all options of a run are known. A model and a layout alone are not refused for this.
    """
    if model.router_normalised and model.experts_per_token == 1:
        raise UserError(
            "experts-per-token(1) with router_normalised: the weight of a token's only expert is "
            "always 1, so that the router learns nothing; give --experts-per-token 2, or "
            "router_normalised = false for top-1 routing"
        )


def check_cut(layout: Layout, length: int, when: str = "") -> None:
    """Raise UserError if ranks cannot divide a sample of `length` tokens; when: its end."""
    if product := _uncut(layout, length):
        raise LayoutError(f"{product} does not divide seq-length({length}){when}")


def _uncut(layout: Layout, length: int) -> str:
    """Return the product that cannot divide a sample (`length` tokens) among ranks; or ""."""
    tp = layout.tp
    cp = layout.cp
    if cp > 1 and length % (2 * cp):  # each cp rank has two equal chunks of a sample
        return f"2 * cp({cp})"
    if layout.sequence_parallel and length % (cp * tp):
        return "--sequence-parallel: " + f"cp({cp}) * " * (cp > 1) + f"tp({tp})"
    return ""


def _check_schedule(layout: Layout) -> None:
    """Raise UserError if the schedule does not go with pp or with --virtual-stages."""
    name = layout.schedule
    virtual = layout.virtual_stages
    if layout.pp == 1 and (layout.splits_backward or layout.stages_per_rank > 1):
        raise LayoutError(f"--schedule {name} needs a pipeline: pp is {layout.pp}")
    if virtual is not None and name != "interleaved":
        raise LayoutError(
            f"--virtual-stages {virtual} needs --schedule interleaved, not {name}, which has "
            f"{layout.stages_per_rank} on each rank"
        )


def _check_auto(layout: Layout) -> None:
    """Raise UserError if options of --schedule auto do not go with the schedule."""
    name = layout.schedule
    if name == "auto" and layout.recompute_blocks is not None:
        raise LayoutError(
            f"recompute_blocks {layout.recompute_blocks} is about given stages, and --schedule "
            "auto chooses them: give --recompute-layers, or a schedule with a name"
        )


def _check_recomputed(layout: Layout) -> None:
    """Raise UserError if the number of blocks to recompute does not go with the layout."""
    number = layout.recompute_layers
    text = layout.recompute_blocks
    given = f"--recompute-layers {number}" if text is None else f"recompute_blocks {text}"
    if layout.recompute == "none" and (number is not None or text is not None):
        raise LayoutError(f"{given} needs --recompute selective or full")
    if text is None:
        return
    if number is not None:
        raise LayoutError(
            f"give --recompute-layers({number}) or recompute_blocks({text}), not both"
        )
    count = len(text.split(","))
    if not all(part.isdecimal() for part in text.split(",")):
        raise LayoutError(f"recompute_blocks is a list like 3,2,1,0, not {text!r}")
    if count != layout.stages:
        raise LayoutError(f"{given} has {count} stages, but the layout has {layout.stages}")


def _check_recomputed_counts(layout: Layout, layers: int) -> None:
    """Raise UserError if more blocks are to be recomputed than the model or a stage has."""
    number = layout.recompute_layers
    counts = layout.recomputed_of_stage
    if number is not None and number > layers:
        raise LayoutError(
            f"--recompute-layers {number} is more than the model has: layers({layers})"
        )
    if counts is None:
        return
    given = f"recompute_blocks {layout.recompute_blocks}"
    if sum(counts) > layers:
        raise LayoutError(f"{given} recomputes {sum(counts)} blocks, but layers is {layers}")
    for stage, blocks in enumerate(explicit_partition(layout, layers) or ()):
        if counts[stage] > blocks:
            there = f"--partition {layout.partition} places {blocks} there"
            raise LayoutError(f"{given} recomputes {counts[stage]} of stage {stage}, but {there}")


def explicit_partition(layout: Layout, layers: int) -> list[int] | None:
    """Return the number of blocks of each stage if --partition is a list; None if it is a name.

    layers: the blocks of the model. Raise UserError if the list does not fit the stages or layers.
    """
    text = layout.partition
    if text in ("balanced", "blocks", "layers"):
        return None
    try:
        blocks = [int(part) for part in text.split(",")]
    except ValueError:
        raise LayoutError(
            f"--partition is balanced, blocks, layers or a list like 3,4,4,3, not {text!r}"
        ) from None
    if len(blocks) != layout.stages:
        ranks = f"pp is {layout.pp}"
        if layout.stages_per_rank > 1:
            ranks += f", each with {layout.stages_per_rank} stages"
        raise LayoutError(f"--partition {text} has {len(blocks)} stages, but {ranks}")
    if min(blocks) < 0 or sum(blocks) != layers:
        raise LayoutError(f"--partition {text} places {sum(blocks)} blocks, but layers is {layers}")
    return blocks


def check_batch(layout: Layout, name: str, samples: int, when: str = "") -> None:
    """Raise UserError unless micro-batch-size x dp divides a number of samples.

    name: the number's name in the message. when: the end of the message.
    """
    micro = layout.micro_batch_size
    dp = layout.dp
    if samples % (micro * dp):
        raise LayoutError(
            f"micro-batch-size({micro}) * dp({dp}) = {micro * dp} does not divide "
            f"{name}({samples}){when}"
        )


def check_batches(timeline: Timeline) -> None:
    """Raise UserError for the first batch size of this start that the layout cannot divide."""
    for level in timeline.levels:
        name = "global-batch-size"
        when = ""
        if level.consumed or level.steps:  # one of several batch sizes: say when it begins
            name = "batch"
            when = f", which begins after {level.first_step} steps ({level.consumed} samples)"
        check_batch(timeline.config.layout, name, level.batch, when)


def _check_phases(timeline: Timeline) -> None:
    """Raise UserError if the phases of --phases cannot be trained as they are."""
    config = timeline.config
    for phase in timeline.phases_left:
        when = f" of phase {phase.name}"
        check_cut(config.layout, phase.length, when)
        words = " ".join(map(str, phase.data))
        if (phase.data == ("synthetic",)) != (config.data.data == ("synthetic",)):
            other = " ".join(map(str, config.data.data))
            both = f"phase {phase.name} reads {words}, --data is {other}"
            raise UserError(f"{both}: random tokens do not mix with files")
        prefixes = prefixes_of(phase.data)
        if twice := next((one for one in prefixes if prefixes.count(one) > 1), None):
            raise UserError(
                f"phase {phase.name} reads {twice} twice, in {words}: give it one weight"
            )
        if config.data.objective == "prefix" and phase.length < 2:
            raise UserError(
                f"--objective prefix needs samples of 2 tokens or more, not {phase.length}{when}"
            )
        own = phase.settings
        training = config.training
        peak = training.lr if own.lr is None else own.lr
        if own.min_lr is not None and own.min_lr > peak:
            raise UserError(f"phase {phase.name}: min_lr({own.min_lr:g}) is above lr({peak:g})")
    if len(timeline.lengths) > 1 and config.run.routing_file:
        lengths = ", ".join(map(str, timeline.lengths))
        raise UserError(
            f"--record-routing and --pin-routing take samples of one length, not of {lengths}"
        )


def check_joint_matrices(model: ModelShape, layout: Layout, training: Training) -> None:
    """Raise UserError if Muon is to update q, k and v as one matrix that tensor ranks repeat."""
    joint = training.optimizer == "muon" and training.muon_qkv == "joint"
    if joint and layout.kv_copies(model) > 1:
        raise LayoutError(
            f"muon_qkv joint updates q, k and v as one matrix, but with kv-heads({model.kv_heads}) "
            f"and tp({layout.tp}) ranks hold k and v apart from q, as copies: use muon_qkv "
            f"projection, or --tp {model.kv_heads}"
        )
    if joint and layout.key_copies(model) > 1:
        raise LayoutError(
            f"muon_qkv joint updates q, k and v as one matrix, but with mixer_key_heads"
            f"({model.mixer_key_heads}) and tp({layout.tp}) ranks hold q and k apart from v, as "
            f"copies: use muon_qkv projection, or --tp {model.mixer_key_heads}"
        )


def check_sharding(layout: Layout, training: Training) -> None:
    """Raise UserError if --zero or recomputation does not go with other options."""
    name = training.optimizer
    zero = layout.zero
    if zero == 3 and layout.pp > 1:
        raise LayoutError(
            f"--zero 3 gathers the weights for every micro-batch, so it needs pp(1), not "
            f"pp({layout.pp}); use --zero 2 with a pipeline"
        )
    if zero == 3 and name == "muon":
        raise LayoutError(
            "--zero 3 leaves the shards of weights to torch's FSDP, but --optimizer muon finds the "
            "parts of a matrix in the buffers of --zero 0, 1 and 2: use one of these"
        )
    if zero == 3 and not OPTIMIZERS[name].elementwise:
        elementwise = ", ".join(n for n, traits in OPTIMIZERS.items() if traits.elementwise)
        raise LayoutError(f"--zero 3 takes --optimizer {elementwise}, not {name}")
    whole = f"--optimizer {name} needs whole matrices"
    if name == "adafactor" and layout.tp > 1:
        raise LayoutError(f"{whole}, but tp({layout.tp}) cuts them")
    if name == "adafactor" and zero == 2:
        raise LayoutError(f"{whole}: use --zero 0 or 1, not 2")
    if training.muon_adamw_lr is not None and training.lr == 0:
        raise UserError(
            f"muon-adamw-lr({training.muon_adamw_lr:g}) follows the schedule of lr, which is 0"
        )
    if layout.overlap_param_gather and zero not in (1, 2):
        raise LayoutError(f"overlap_param_gather needs --zero 1 or 2, not {zero}")
    for name, is_default in (
        ("sync_each_batch", layout.sync_each_batch),
        ("reshard_after_forward", layout.reshard_after_forward),
    ):
        if not is_default and zero != 3:
            raise LayoutError(f"{name} false needs --zero 3, not {zero}")
    _check_recomputed(layout)


def _check_objective(config: Config) -> None:
    """Raise UserError if the objective and the masks conflict, or need a token id not given."""
    data = config.data
    model = config.model
    if data.objective == "prefix" and model.seq_length < 2:
        raise UserError(
            "--objective prefix divides each sample into a prefix and what follows it, so samples "
            f"need 2 tokens or more, not {model.seq_length}"
        )
    if data.objective == "prefix" and model.mixer != "attention":
        raise UserError(
            f"--objective prefix lets the tokens of a prefix see later ones, which mixer"
            f"({model.mixer}) cannot: it goes through the tokens in order"
        )
    needs_end = {
        "--reset-attention": data.reset_attention,
        "--mask-eod-loss": data.mask_eod_loss,
        "--reset-positions": data.reset_positions,
    }
    for flag in filter(needs_end.get, needs_end):  # each given flag that needs an --eod-token
        if data.eod_token is None:
            raise UserError(f"{flag} needs --eod-token: the id of the token that ends a document")
    if data.eod_token is not None and data.eod_token >= model.vocab_size:
        raise UserError(f"eod-token: {data.eod_token} is not below vocab-size({model.vocab_size})")
    if data.reset_positions and model.positions == "alibi":
        raise UserError("--reset-positions: --positions alibi knows distances only, no positions")
    if data.answers_only and data.objective != "causal":
        raise UserError(f"--answers-only needs --objective causal, not {data.objective}")
    if data.answers_only and data.data == ("synthetic",) and not data.eval_data:
        raise UserError("--answers-only needs the files of --data: random tokens have no answers")


def _check_precision(training: Training) -> None:
    """Raise UserError if --precision does not go with --grad-dtype or the optimizer."""
    precision = training.precision
    if training.grad_dtype == "bf16" and precision != "bf16":
        raise UserError(f"--grad-dtype bf16 needs --precision bf16, not {precision}")
    if precision == "fp64" and training.optimizer in ("adamw8bit", "apex"):
        name = training.optimizer
        raise UserError(f"--optimizer {name} keeps fp32 masters: it cannot train in fp64")


def _check_length(timeline: Timeline) -> None:
    """Raise UserError if the run has no length, or two, or if the learning rate would rise."""
    config = timeline.config
    training = config.training
    ends_by_plan = config.plan is not None and config.plan.train_tokens is not None
    if training.steps is not None and training.train_samples is not None:
        raise UserError("give one of --steps and --train-samples; both were given")
    if training.steps is None and training.train_samples is None and not ends_by_plan:
        also = ", or train_tokens in the file of --phases" if config.plan else ""
        raise UserError(f"give one of --steps and --train-samples{also}; neither was given")
    _check_end(timeline, ends_by_plan)
    if timeline.total_steps == 0:
        first = timeline.batch_at(0)
        name = "global-batch-size" if first == training.global_batch_size else "first batch"
        if ends_by_plan and config.plan:
            end = f"train_tokens({config.plan.train_tokens})"
            raise UserError(f"{end} is less than one batch of {first} samples")
        raise UserError(f"train-samples({training.train_samples}) is less than one {name}({first})")
    if training.lr_schedule != "constant" and training.final_lr > training.lr:
        raise UserError(f"min-lr({training.min_lr}) is above lr({training.lr}): give a lower one")
    check_rate(config)
    if training.lr_schedule == "inverse-square-root" and not training.lr_warmup_samples:
        raise UserError(
            "--lr-schedule inverse-square-root needs --lr-warmup-samples above 0: the rate is "
            "lr * sqrt(lr-warmup-samples / samples)"
        )


def _check_end(timeline: Timeline, ends_by_plan: bool) -> None:
    """Raise UserError if the run is to end before what the checkpoint of --resume has done already.

    A run that is at its end is no mistake: a batch file may start it once more.
    """
    config = timeline.config
    training, past, plan = config.training, config.past, config.plan
    if training.steps is not None:
        end, done, unit = training.steps, past.step, "steps"
        name = "steps"
    elif ends_by_plan and plan is not None and plan.train_tokens is not None:
        end, done, unit = plan.train_tokens, timeline.tokens_at(past.samples), "tokens"
        name = "train_tokens"
    elif training.train_samples is not None:
        end, done, unit = training.train_samples, past.samples, "samples"
        name = "train-samples"
    else:
        return
    if end < done:
        raise UserError(
            f"{name}({end}) is less than the {done} {unit} that are done in the checkpoint from "
            f"which the run goes on: it is the length of the whole run. Give more, or resume an "
            f"earlier checkpoint"
        )


def _check_run(run: Run, steps: int) -> None:
    """Raise UserError for options of Run that name steps or samples beyond the run's.

    steps: the number of steps in the run.
    """
    begin = run.begin_at_samples
    stop = run.stop_at_samples
    if stop and stop <= begin:
        raise UserError(f"stop-at-samples({stop}) is not above begin-at-samples({begin})")
    if run.on_spike == "rollback" and not run.saves:
        raise UserError(
            "--on-spike rollback needs --save-every or --save-every-minutes: nothing is saved"
        )
    if (run.sample_every > 0) != (run.sample_prompt is not None):
        raise UserError("--sample-every N and --sample-prompt TEXT need each other")
    traced = [("--trace-numerics", step) for step in run.trace_numerics]
    # Without torch_profile step 1 is tested, which every run has.
    for flag, step in [("torch_profile", run.torch_profile or 1), *traced]:
        if not 1 <= step <= steps:
            raise UserError(f"{flag} {step} is never reached: the run has {steps} steps")


def _check_audits(config: Config) -> None:
    """Raise UserError if a run has no replicas that can repeat a micro-batch and be compared."""
    layout = config.layout
    given = f"--audit-every {config.run.audit_every}"
    if layout.dp == 1:
        raise LayoutError(
            f"{given} compares data-parallel replicas, two or more: dp is {layout.dp}"
        )
    if layout.zero == 3:
        raise LayoutError(f"{given} needs whole replicas of the weights: --zero 0, 1 or 2, not 3")
    if config.run.compile:
        raise UserError(f"{given} takes no --compile: it examines each matmul that torch starts")
    if config.run.routing_file:
        raise UserError(f"{given} takes no --record-routing and no --pin-routing")
    ep = layout.ep or 1
    if layout.tp * layout.cp % ep:
        raise LayoutError(
            f"{given}: a replica must have all experts, but ep({ep}) does not divide "
            f"tp({layout.tp}) * cp({layout.cp})"
        )


# ---- Options that change nothing without another one ---------------------------------------------


def check_used(config: Config, given: Collection[str]) -> None:
    """Raise UserError if a given option has no effect in this run.

    given: the names of the options that flags or a file give. Options of a preset, or of the
    run.json of an earlier run, may have no effect, and so may options that are given at their
    defaults. Called when a command line is parsed.
    """
    for field, value in _changed(config):
        needs = field.metadata["needs"]
        if needs and field.name in given and not is_met(config, needs):
            raise UserError(f"{_with_value(field, value)} needs {needs}")


def is_met(config: Config, needs: Needs) -> bool:
    """Return whether a run has what an option needs."""
    every = {name: value for group in _groups(config) for name, value in vars(group).items()}
    return any(needs.is_met_by(every[name]) for name in needs.options)


def unused_rotary(config: Config) -> list[str]:
    """Return the rotary options that a model without rotary positions sets, with their values.

    Such options of a preset are no error: the user gets a note that they change nothing.
    """
    if config.model.positions == "rotary":
        return []
    changed = _changed(config)
    return [_with_value(field, value) for field, value in changed if field.name in ROTARY_OPTIONS]


def _groups(config: Config) -> tuple[Any, ...]:
    """Return the groups of options that may need others."""
    return config.model, config.layout, config.training, config.data, config.run


def _changed(config: Config) -> Iterator[tuple[dataclasses.Field, Any]]:
    """Yield the options that are not at their defaults, with their values."""
    for group in _groups(config):
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            # The default of max_positions is not in its declaration: it depends on seq_length.
            default = config.model.seq_length if field.name == "max_positions" else field.default
            if value != default:
                yield field, value


def _with_value(field: dataclasses.Field, value: Any) -> str:
    """Return an option with its value, as messages have it."""
    flag = as_typed(field)
    if isinstance(value, bool) and not value:
        return flag.replace("--", "--no-") if flag.startswith("--") else f"{flag} false"
    if isinstance(value, bool):
        return flag
    values = value if isinstance(value, tuple) else (value,)
    return f"{flag} {' '.join(map(_as_text, values))}"


def _as_text(value: Any) -> str:
    """Return a value as the user would write it."""
    return f"{value:g}" if isinstance(value, float) else str(value)
