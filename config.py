"""What a run is: the model's shape, the layout, the options, and every check across them.

    config = check(options.parse(sys.argv[1:]), ranks=8)     # fills in dp, or says why not

Every option is a field of one of the five dataclasses below; options.py makes the command line, the
TOML keys and the help text from them. No torch here: `--help` answers in a tenth of a second.
"""

import dataclasses
import difflib
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn


class UserError(Exception):
    """A mistake the user can mend: shown as one sentence, exit status 2, never a traceback."""


def option(default: Any, help: str, *, choices=(), minimum=None, type=None, nargs=None):
    """A dataclass field that is also a command-line flag and a TOML key of the same name."""
    kind = type or (default.__class__ if default is not None else str)
    metadata = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "type": kind,
        "nargs": nargs,
    }
    return field(default=default, metadata=metadata)


# ------------------------------------------------------------------------------------------------
# The five groups of options
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """A GPT's architecture: all that its parameters and FLOPs follow from.

    Fields left at None are derived from the others, so a finished shape has none.
    """

    layers: int = option(None, "transformer blocks", type=int, minimum=1)
    hidden: int = option(None, "width of the residual stream", type=int, minimum=1)
    heads: int = option(None, "attention heads", type=int, minimum=1)
    kv_heads: int = option(None, "key/value heads, default: heads", type=int, minimum=1)
    ffn_hidden: int = option(
        None, "width of the MLP, default: 4 x hidden, SwiGLU 8/3 x hidden", type=int, minimum=1
    )
    seq_length: int = option(1024, "tokens in a sample", minimum=1)
    max_positions: int = option(
        None, "rows of the learned positions, default: seq-length", type=int, minimum=1
    )
    vocab_size: int = option(50257, "tokens in the vocabulary, before padding", minimum=1)
    positions: str = option("learned", "position kind", choices=("learned", "alibi", "rotary"))
    norm: str = option("layernorm", "normalisation", choices=("layernorm", "rmsnorm"))
    activation: str = option("gelu_tanh", "MLP activation", choices=("gelu", "gelu_tanh", "swiglu"))
    bias: bool = option(True, "biases in the linear layers")
    embedding_norm: bool = option(False, "normalise the embedding's output, as BLOOM does")
    tied: bool = option(True, "the output head shares the embedding's weights")
    norm_eps: float = option(1e-5, "epsilon of the normalisation")
    rotary_base: float = option(10000.0, "base of the rotary frequencies")

    def __post_init__(self):
        missing = [n for n in ("layers", "hidden", "heads") if getattr(self, n) is None]
        if missing:
            flags = ", ".join(f"--{n}" for n in missing)
            raise UserError(f"the model has no {flags}: give them, or --model PRESET")
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.ffn_hidden is None:
            object.__setattr__(self, "ffn_hidden", self.default_ffn())
        if self.max_positions is None:
            object.__setattr__(self, "max_positions", self.seq_length)

    def default_ffn(self) -> int:
        """Width of the MLP where none is given."""
        if self.activation != "swiglu":
            return 4 * self.hidden
        return -(-8 * self.hidden // (3 * 64)) * 64  # Llama's 8/3 rule, up to a multiple of 64

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    def padded_vocab(self, layout: "Layout") -> int:
        """Vocabulary rows as stored: the next multiple of pad_vocab_multiple x tp."""
        multiple = layout.pad_vocab_multiple * layout.tp
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks: rank = (pp_rank * dp + dp_rank) * tp + tp_rank."""

    tp: int = option(1, "tensor-parallel ranks", minimum=1)
    pp: int = option(1, "pipeline stages", minimum=1)
    dp: int = option(
        None, "data-parallel replicas, default: ranks / (tp x pp)", type=int, minimum=1
    )
    sequence_parallel: bool = option(False, "split norms and residuals along the sequence over tp")
    schedule: str = option("1f1b", "pipeline schedule", choices=("gpipe", "1f1b"))
    partition: str = option(
        "balanced", "blocks per stage: balanced by time, blocks, layers, or a list N,N,..."
    )
    micro_batch_size: int = option(1, "samples in one forward pass of one replica", minimum=1)
    recompute: str = option(
        "none",
        "run forward again in the backward: attention core, or whole blocks",
        choices=("none", "selective", "full"),
    )
    zero: int = option(1, "ZeRO stage: 1 shards optimizer state over dp", choices=(0, 1))
    pad_vocab_multiple: int = option(
        128, "pad the vocabulary to a multiple of this x tp", minimum=1
    )


@dataclass(frozen=True)
class Training:
    """What is optimised, in which precision, for how long."""

    global_batch_size: int = option(8, "samples per step, over all replicas", minimum=1)
    steps: int = option(None, "steps to train", type=int, minimum=1)
    train_samples: int = option(None, "samples to train, in place of --steps", type=int, minimum=1)
    precision: str = option("fp32", "arithmetic", choices=("fp64", "fp32", "bf16"))
    optimizer: str = option("adamw", "optimizer", choices=("adamw",))
    lr: float = option(3e-4, "peak learning rate", minimum=0.0)
    min_lr: float = option(3e-5, "final learning rate", minimum=0.0)
    lr_schedule: str = option(
        "cosine", "decay after the warm-up", choices=("cosine", "linear", "constant", "wsd")
    )
    lr_warmup_samples: int = option(0, "samples of linear warm-up", minimum=0)
    lr_decay_samples: int = option(
        None, "samples after which the rate is --min-lr, default: all", type=int, minimum=1
    )
    lr_wsd_decay_samples: int = option(
        None, "samples of the last, falling part of wsd, default: a tenth", type=int, minimum=1
    )
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", minimum=0.0)
    adam_beta1: float = option(0.9, "Adam's first-moment decay", minimum=0.0)
    adam_beta2: float = option(0.95, "Adam's second-moment decay", minimum=0.0)
    adam_eps: float = option(1e-8, "Adam's epsilon", minimum=0.0)
    clip_grad: float = option(1.0, "largest global gradient norm, 0: no clipping", minimum=0.0)
    init_std: float = option(0.02, "standard deviation of the initial weights", minimum=0.0)
    seed: int = option(1234, "seed of weights and sample order", minimum=0)


@dataclass(frozen=True)
class Data:
    """Where samples come from."""

    data: tuple = option(
        ("synthetic",), "prefixes of .bin/.idx pairs ([WEIGHT] PREFIX ...), or synthetic", nargs="+"
    )
    split: str = option("95,5,0", "shares of train, validation and test, by document")
    eval_every: int = option(0, "steps between evaluations, 0: only when training ends", minimum=0)
    eval_samples: int = option(0, "validation samples per evaluation, 0: no evaluation", minimum=0)


@dataclass(frozen=True)
class Run:
    """Where it runs and what it leaves behind."""

    out: str = option("runs/latest", "folder for run.json and metrics.jsonl")
    device: str = option("auto", "device of each rank", choices=("auto", "cpu", "cuda"))
    backend: str = option(
        "auto", "collectives: nccl on GPUs, gloo on CPUs", choices=("auto", "nccl", "gloo")
    )
    log_every: int = option(1, "steps between log lines", minimum=1)
    check_replicas_every: int = option(1000, "steps between replica checks, 0: never", minimum=0)
    tensorboard: bool = option(False, "also write TensorBoard events")
    save_every: int = option(0, "steps between checkpoints, and one at the end; 0: none", minimum=0)
    save_every_minutes: float = option(
        0.0, "minutes between checkpoints, and one at the end; 0: none", minimum=0.0
    )
    save_weights_only: bool = option(False, "checkpoints without optimizer state, 4 bytes a weight")
    async_save: bool = option(True, "write checkpoints while training goes on")
    keep_last: int = option(0, "checkpoints to keep, the newest, 0: all", minimum=0)
    keep_every: int = option(0, "with --keep-last, also keep multiples of this step", minimum=0)
    resume: str = option(
        None, "auto: the newest complete checkpoint of --out, if any; or the folder of one"
    )
    load_weights_only: bool = option(
        False, "from --resume take the weights alone, and begin at step 0"
    )
    node_mtbf_hours: float = option(
        7000.0, "hours between failures of one node, to advise how often to save", minimum=1.0
    )


@dataclass(frozen=True)
class Config:
    """A whole run. `check` must have passed before anything is built from it."""

    model: ModelShape
    layout: Layout = field(default_factory=Layout)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    run: Run = field(default_factory=Run)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each replica."""
        layout = self.layout
        return self.training.global_batch_size // (layout.micro_batch_size * layout.dp)

    @property
    def total_steps(self) -> int:
        """Steps in the whole run: whole global batches only, so --train-samples rounds down."""
        if self.training.steps is not None:
            return self.training.steps
        return self.training.train_samples // self.training.global_batch_size

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values, for run.json."""
        return dataclasses.asdict(self)


GROUPS = {"model": ModelShape, "layout": Layout, "training": Training, "data": Data, "run": Run}


# ------------------------------------------------------------------------------------------------
# Checks across options
# ------------------------------------------------------------------------------------------------


def check(config: Config, ranks: int) -> Config:
    """The configuration with dp filled in, if it can run on that many ranks; else a UserError.

    Every message shows both sides of what does not fit, with their numbers.
    """
    layout = _place(config.layout, ranks)
    config = dataclasses.replace(config, layout=layout)
    check_shape(config.model)
    check_split(config.model, layout)
    check_batch(layout, "global-batch-size", config.training.global_batch_size)
    check_batch(layout, "eval-samples", config.data.eval_samples)
    _check_length(config.training)
    _check_saving(config.run)
    return config


def _place(layout: Layout, ranks: int) -> Layout:
    tp, pp, dp = layout.tp, layout.pp, layout.dp
    if ranks % (tp * pp):
        raise UserError(f"tp({tp}) * pp({pp}) * dp(?) does not divide {ranks} ranks")
    if dp is not None and tp * pp * dp != ranks:
        raise UserError(f"tp({tp}) * pp({pp}) * dp({dp}) = {tp * pp * dp} is not {ranks} ranks")
    return dataclasses.replace(layout, dp=ranks // (tp * pp))


def check_shape(model: ModelShape) -> None:
    """Raise UserError if no such model can be built, whatever the layout."""
    if model.hidden % model.heads:
        raise UserError(f"heads({model.heads}) does not divide hidden({model.hidden})")
    if model.heads % model.kv_heads:
        raise UserError(f"kv-heads({model.kv_heads}) does not divide heads({model.heads})")
    if model.positions == "rotary" and model.head_size % 2:
        raise UserError(
            f"rotary positions need an even head size: hidden({model.hidden}) / "
            f"heads({model.heads}) = {model.head_size}"
        )
    if model.positions == "learned" and model.seq_length > model.max_positions:
        raise UserError(
            f"seq-length({model.seq_length}) is longer than the learned positions: "
            f"max-positions({model.max_positions})"
        )


def check_split(model: ModelShape, layout: Layout) -> None:
    """Raise UserError if tensor or pipeline parallelism cannot divide the model."""
    tp, pp = layout.tp, layout.pp
    parts = {"heads": model.heads, "kv-heads": model.kv_heads, "hidden": model.hidden}
    for name, size in (parts | {"ffn-hidden": model.ffn_hidden}).items():
        if size % tp:
            raise UserError(f"tp({tp}) does not divide {name}({size})")
    if layout.sequence_parallel and model.seq_length % tp:
        raise UserError(
            f"--sequence-parallel: tp({tp}) does not divide seq-length({model.seq_length})"
        )
    if pp > model.layers + 2:
        raise UserError(
            f"pp({pp}) is more stages than there are parts to place: "
            f"{model.layers} blocks + embedding + head = {model.layers + 2}"
        )
    explicit_partition(layout, model.layers)


def explicit_partition(layout: Layout, layers: int) -> list[int] | None:
    """Blocks per stage if --partition is a list, else None; UserError if the list does not fit."""
    text = layout.partition
    if text in ("balanced", "blocks", "layers"):
        return None
    try:
        blocks = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--partition is balanced, blocks, layers or a list like 3,4,4,3, not {text!r}"
        ) from None
    if len(blocks) != layout.pp:
        raise UserError(f"--partition {text} has {len(blocks)} stages, but pp is {layout.pp}")
    if min(blocks) < 0 or sum(blocks) != layers:
        raise UserError(f"--partition {text} places {sum(blocks)} blocks, but layers is {layers}")
    return blocks


def check_batch(layout: Layout, name: str, samples: int) -> None:
    """Raise UserError unless whole micro-batches on every replica make up that many samples."""
    micro, dp = layout.micro_batch_size, layout.dp
    if samples % (micro * dp):
        raise UserError(
            f"micro-batch-size({micro}) * dp({dp}) = {micro * dp} does not divide {name}({samples})"
        )


def _check_length(training: Training) -> None:
    if (training.steps is None) == (training.train_samples is None):
        given = "neither" if training.steps is None else "both"
        raise UserError(f"give one of --steps and --train-samples; {given} was given")
    if training.steps is None and training.train_samples < training.global_batch_size:
        raise UserError(
            f"train-samples({training.train_samples}) is less than one "
            f"global-batch-size({training.global_batch_size})"
        )
    if training.min_lr > training.lr:
        raise UserError(f"min-lr({training.min_lr}) is above lr({training.lr})")


def _check_saving(run: Run) -> None:
    if run.keep_every and not run.keep_last:
        raise UserError(f"--keep-every {run.keep_every} needs --keep-last: now all are kept")
    if run.load_weights_only and not run.resume:
        raise UserError("--load-weights-only needs --resume, to say which weights")
    saves = run.save_every or run.save_every_minutes
    for flag, value in (("keep-last", run.keep_last), ("save-weights-only", run.save_weights_only)):
        if value and not saves:
            raise UserError(
                f"--{flag} needs --save-every or --save-every-minutes: nothing is saved"
            )


# ------------------------------------------------------------------------------------------------
# How a mistake is told
# ------------------------------------------------------------------------------------------------


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean ...?` with the known name that is most alike, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def exit_with(error: UserError, speak: bool = True) -> NoReturn:
    """Print the sentence, if this is the rank that speaks, and leave with status 2.

    A launcher ends the whole job when one rank leaves so: the silent ones give the other time.
    """
    if speak:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(1.0)
    sys.exit(2)
