"""The options `Training` (what is optimised, for how long), `Data` (samples) and `Run` (where a run
executes, what it checks and writes).

Every field of these dataclasses is an option: a flag, and a key of a TOML file.
`base.options.option` makes the fields here, those of the layout in schema.py and of the model in
architecture/shape.py.
"""

import os
import re
import tempfile
from dataclasses import dataclass
from typing import NamedTuple

from architecture.shape import EXPERTS
from base.errors import UserError
from base.options import Needs, option
from config import batch_schedule as batches
from config.optimizers import OPTIMIZERS

# What several options need.
LR_FALLS = Needs(("lr_schedule",), ("cosine", "linear", "wsd", "inverse-square-root"))
LR_ENDS = Needs(("lr_schedule",), ("cosine", "linear", "wsd"))
HAS_ADAM = Needs(("optimizer",), ("adamw", "apex", "adamw8bit", "muon"))
IS_MUON = Needs(("optimizer",), ("muon",))
FP16 = Needs(("precision",), ("fp16",))
SAVES = Needs(("save_every", "save_every_minutes"), reason="nothing is saved")
TOKENS = Needs(("data",), reason="now tokens are random")


class DynamicScale(NamedTuple):
    """The constants of fp16's dynamic loss scale, which were options before.

    It begins at 2 to the power of initial_loss_scale_power, as torch.amp.GradScaler does, and
    doubles after loss_scale_window steps without an overflow. It is halved, down to min_loss_scale,
    once loss_scale_hysteresis overflows have come since it last doubled: Megatron-LM's defaults
    (core 0.16). A run ends after max_overflows overflows in a row at the smallest or a fixed scale.
    """

    initial_loss_scale_power: int = 16
    loss_scale_window: int = 1000
    loss_scale_hysteresis: int = 2
    min_loss_scale: float = 1.0
    max_overflows: int = 5


LOSS_SCALE = DynamicScale()


@dataclass(frozen=True)
class Training:
    """Optimizer, precision, and the length of training."""

    global_batch_size: int = option(
        None,
        "samples per step, default: 8, or the last size of --batch-schedule",
        minimum=1,
        maximum=batches.LARGEST,
    )
    # batch_tokens is None in every finished Config: command_line.py turns the value that a flag or
    # a file gives into global_batch_size.
    batch_tokens: int = option(None, "global-batch-size in tokens, such as 4Mi", minimum=1)
    rampup_batch_size: tuple = option(
        None,
        "START INCREMENT SAMPLES: begin with START samples per step and grow by INCREMENT, up to "
        "--global-batch-size after SAMPLES samples",
        nargs=3,
        item=int,
    )
    batch_schedule: tuple = option(
        None, "TOKENS:SIZE ..., samples per step after so many tokens, as 0:192 5B:1024", nargs="+"
    )
    steps: int = option(None, "steps to train", minimum=1)
    train_samples: int = option(None, "samples to train, in place of --steps", minimum=1)
    precision: str = option(
        "auto",
        "arithmetic; auto: bf16 on GPUs that have it, fp16 on older GPUs, fp32 on CPUs",
        choices=("auto", "fp64", "fp32", "bf16", "fp16"),
    )
    grad_dtype: str = option(
        "fp32",
        "gradient accumulation in 16-bit runs: in fp32, or in bf16 to save memory",
        choices=("fp32", "bf16"),
    )
    optimizer: str = option(
        "adamw", "update rule; apex: AdamW by NVIDIA's FusedAdam", choices=tuple(OPTIMIZERS)
    )
    lr: float = option(3e-4, "peak learning rate", minimum=0.0)
    min_lr: float = option(
        None, "final learning rate, default: a tenth of --lr", minimum=0.0, needs=LR_FALLS
    )
    lr_schedule: str = option(
        "cosine",
        "decay after the warm-up; inverse-square-root: lr * sqrt(warm-up / samples)",
        choices=("cosine", "linear", "constant", "wsd", "inverse-square-root"),
    )
    lr_warmup_samples: int = option(0, "samples of linear warm-up", minimum=0)
    lr_decay_samples: int = option(
        None, "samples to reach --min-lr, default: all", minimum=1, needs=LR_ENDS
    )
    lr_wsd_decay_samples: int = option(
        None,
        "samples of the decay at the end of wsd, default: a tenth",
        minimum=1,
        needs=Needs(("lr_schedule",), ("wsd",)),
        file_only=True,
    )
    lr_wsd_decay_style: str = option(
        "linear",
        "curve of the decay at the end of wsd; 1-sqrt: 1 - sqrt(share of the decay done)",
        choices=("linear", "1-sqrt"),
        needs=Needs(("lr_schedule",), ("wsd",)),
    )
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", minimum=0.0)
    adam_beta1: float = option(
        0.9, "Adam's first-moment decay", minimum=0.0, below=1.0, needs=HAS_ADAM
    )
    adam_beta2: float = option(
        0.95, "Adam's second-moment decay", minimum=0.0, below=1.0, needs=HAS_ADAM
    )
    adam_eps: float = option(1e-8, "Adam's epsilon", minimum=0.0, needs=HAS_ADAM)
    ema: float = option(
        0.0,
        "decay of an exponential moving average of the weights, such as 0.999; 0: none",
        minimum=0.0,
        below=1.0,
    )
    sgd_momentum: float = option(
        0.9,
        "momentum of --optimizer sgd",
        minimum=0.0,
        below=1.0,
        needs=Needs(("optimizer",), ("sgd",)),
        file_only=True,
    )
    muon_momentum: float = option(0.95, "Muon's momentum", minimum=0.0, below=1.0, needs=IS_MUON)
    muon_qkv: str = option(
        "projection",
        "matrices that Muon updates: each projection, with latent attention kv_a and kv_b; split: "
        "these two divided; head: each head apart; joint: q, k and v as one",
        choices=("projection", "split", "joint", "head"),
        needs=IS_MUON,
        file_only=True,
    )
    muon_scale: str = option(
        "match_rms_adamw",
        "Muon's factor: 0.2 sqrt(max(rows, columns)), or the original sqrt(max(1, rows / columns))",
        choices=("match_rms_adamw", "original"),
        needs=IS_MUON,
        file_only=True,
    )
    muon_dtype: str = option(
        "auto",
        "dtype of Muon's Newton-Schulz iteration: the master weights' dtype, or bf16; auto: bf16 "
        "in 16-bit runs on GPUs, else master",
        choices=("auto", "master", "bf16"),
        needs=IS_MUON,
        file_only=True,
    )
    muon_adamw_lr: float = option(
        None,
        "peak learning rate of what AdamW updates: embedding, head, norms, biases, routers; "
        "default: --lr",
        minimum=0.0,
        needs=IS_MUON,
    )
    loss_scale: float = option(
        0.0, "fp16: a fixed loss scale, 0: dynamic", minimum=0.0, needs=FP16, file_only=True
    )
    clip_grad: float = option(1.0, "largest global gradient norm, 0: no clipping", minimum=0.0)
    init_std: float = option(0.02, "standard deviation of the initial weights", minimum=0.0)
    balance: str = option(
        "none",
        "MoE load balancing: bias (aux-loss-free), per-sequence aux loss, or global-batch aux loss",
        choices=("none", "bias", "sequence", "global"),
    )
    balance_rate: float = option(
        0.001, "update rate of --balance bias, or aux loss coefficient", minimum=0.0
    )
    router_z_loss: float = option(0.0, "router z-loss coefficient", minimum=0.0)
    z_loss: float = option(
        0.0, "z-loss coefficient of the output logits, such as 1e-5", minimum=0.0
    )
    mtp_weight: float = option(
        0.3,
        "weight of the mean loss of --mtp-depth's modules, beside the next token's",
        minimum=0.0,
        needs=Needs(("mtp_depth",)),
    )
    seed: int = option(1234, "seed of weights and sample order", minimum=0)

    def newton_schulz_dtype(self, on_gpu: bool) -> str:
        """Return the value of muon_dtype for a run on GPUs or CPUs: master or bf16.

        `auto` takes bf16 where GPUs multiply it 10 times as fast, in runs whose gradients have 16
        bits anyway. The precision must be decided already.
        """
        if self.muon_dtype != "auto":
            return self.muon_dtype
        return "bf16" if on_gpu and self.precision in ("bf16", "fp16") else "master"

    @property
    def final_lr(self) -> float:
        """The learning rate at the end of the decay: --min-lr, or a tenth of --lr."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    @property
    def has_router_losses(self) -> bool:
        """Whether routers of experts are trained by auxiliary losses beside the language loss."""
        return self.balance in ("sequence", "global") or self.router_z_loss > 0

    def __post_init__(self) -> None:
        """Derive global_batch_size if it is None: the last size of batch_schedule, or 8."""
        if self.global_batch_size is None:
            schedule = self.batch_schedule
            size = batches.parse_steps(schedule)[-1][1] if schedule else 8
            object.__setattr__(self, "global_batch_size", size)


@dataclass(frozen=True)
class Data:
    """Where samples come from."""

    data: tuple = option(
        ("synthetic",),
        "prefixes of .bin/.idx pairs ([WEIGHT] PREFIX ...), or synthetic",
        nargs="+",
        example=("a",),
    )
    phases: str = option(
        None,
        "TOML file of [[phase]] tables, which change corpora, sequence length, batch size or "
        "learning rate schedule at given numbers of tokens; see docs/data.md",
        at_each_start=True,  # what was read from it is taken over, and not its path
    )
    split: str = option(
        "95,5,0",
        "shares of train, validation and test, by document",
        needs=TOKENS,
    )
    eval_every: int = option(
        0,
        "steps between evaluations, 0: only when training ends",
        minimum=0,
        needs=Needs(("eval_samples", "eval_data", "eval_tasks"), reason="nothing is evaluated"),
        at_each_start=True,
    )
    eval_samples: int = option(
        0,
        "validation samples per evaluation, 0: no evaluation",
        minimum=0,
        at_each_start=True,
    )
    eval_data: tuple = option(
        None,
        "NAME=PREFIX[:SAMPLES] ..., evaluate on these corpora too, on all samples or this many",
        nargs="+",
        at_each_start=True,
    )
    eval_tasks: tuple = option(
        None,
        "[NAME=]FILE[:ROWS] ..., evaluate the multiple-choice tasks in these files too, on all "
        "rows or this many",
        nargs="+",
        at_each_start=True,
    )
    eval_ema: bool = option(
        False,
        "evaluate the average of --ema too, as NAME_ema",
        needs=Needs(("ema",), reason="there is no average"),
        at_each_start=True,
    )
    order: str = option(
        "megatron",
        "sample order: megatron, or stable (independent of the run's length)",
        choices=("megatron", "stable"),
        needs=TOKENS,
    )
    cache: str = option(
        None,
        "node-local folder that caches sample orders, in trine-UID (default: TMPDIR or /tmp); "
        "none: each rank builds its own",
        needs=Needs(("data", "eval_data")),
        at_each_start=True,
    )
    skip_samples: tuple = option(
        None,
        "A:B ..., skip global batches with any of the consumed samples A to B - 1",
        nargs="+",
    )
    objective: str = option(
        "causal",
        "prefix: prefix LM, full attention within a random prefix, loss on what follows",
        choices=("causal", "prefix"),
    )
    eod_token: int = option(None, "id of the token that ends a document", minimum=0)
    reset_attention: bool = option(False, "attention within a document only, in samples of several")
    reset_positions: bool = option(False, "positions count from 0 in each document")
    mask_eod_loss: bool = option(False, "no loss for the token after the end of a document")
    answers_only: bool = option(
        False,
        "loss only where PREFIX.targets.bin marks it, as scripts/prepare_chats.py writes it",
    )

    @property
    def masks_attention(self) -> bool:
        """Whether attention has another mask than the causal mask over the whole sample."""
        return self.reset_attention or self.objective == "prefix"

    @property
    def masks_loss(self) -> bool:
        """Whether the loss leaves out some tokens; their number is known once a sample is read."""
        return self.mask_eod_loss or self.answers_only or self.objective == "prefix"

    @property
    def cache_folder(self) -> str | None:
        """This user's folder inside the folder of --cache; None for --cache none.

        Several users may share --cache, but a user never reads an order of samples of another user.
        """
        if self.cache == "none":
            return None
        return os.path.join(self.cache or tempfile.gettempdir(), f"trine-{os.getuid()}")


# A word of --eval-data, NAME=PREFIX or NAME=PREFIX:SAMPLES; the groups are these three.
EVAL_SET = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+?)(?::([0-9]{1,18}))?")
# The log names losses by the split or the evaluation set, so no set may have the name of a split.
SPLIT_NAMES = ("validation", "test")


class EvalSet(NamedTuple):
    """An evaluation set of --eval-data.

    name: its name in the log. prefix: the path of the corpus, without the ending. samples: the
    number of samples of the corpus that are evaluated; None: all of them.
    """

    name: str
    prefix: str
    samples: int | None


def parse_eval_sets(words: tuple) -> list[EvalSet]:
    """Return the evaluation sets of --eval-data.

    words: texts NAME=PREFIX[:SAMPLES]. Raise UserError if a word is malformed or a name repeats.
    """
    sets: dict[str, EvalSet] = {}
    for word in map(str, words):
        match = EVAL_SET.fullmatch(word)
        if match is None or match[3] == "0":
            raise UserError(
                f"--eval-data takes NAME=PREFIX or NAME=PREFIX:SAMPLES such as books=data/books or "
                f"books=data/books:512, not {word!r}"
            )
        name, prefix, count = match.groups()
        if name in SPLIT_NAMES:
            raise UserError(f"--eval-data {word}: a split of --data is called {name}")
        if name in sets:
            raise UserError(f"--eval-data {word}: another set is called {name}")
        sets[name] = EvalSet(name, prefix, int(count) if count else None)
    return list(sets.values())


# A word of --eval-tasks, [NAME=]FILE[:ROWS]; the groups are these three.
TASK_FILE = re.compile(r"(?:([A-Za-z0-9][A-Za-z0-9_.-]*)=)?(.+?)(?::([0-9]{1,18}))?")
# The name that lm_eval gives to the file of a task's samples: samples_TASK_2026-01-31T12-....jsonl.
SAMPLES_FILE = re.compile(r"samples_(.+?)_[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9.-]+")


class TaskFile(NamedTuple):
    """A file of --eval-tasks.

    name: the task's name in the log. path: the file. rows: the number of its first rows that are
    evaluated; None: all of them.
    """

    name: str
    path: str
    rows: int | None


def parse_task_files(words: tuple) -> list[TaskFile]:
    """Return the files of --eval-tasks.

    words: texts [NAME=]FILE[:ROWS]. Without NAME the task has the name of its file up to the first
    dot. Raise UserError if a word is malformed or a name repeats.
    """
    files: dict[str, TaskFile] = {}
    for word in map(str, words):
        match = TASK_FILE.fullmatch(word)
        if match is None or match[3] == "0":
            raise UserError(
                f"--eval-tasks takes [NAME=]FILE[:ROWS] such as data/arc_easy.jsonl or "
                f"arc=data/arc_easy.jsonl:500, not {word!r}"
            )
        name, path, count = match.groups()
        if path == "-":
            raise UserError(
                f"--eval-tasks {word}: standard input is no file, which each rank reads"
            )
        if name is None:
            name = os.path.basename(path).partition(".")[0]
            # The date in the name of lm_eval's file has a dot before its fraction of a second.
            of_samples = SAMPLES_FILE.fullmatch(name)
            name = of_samples[1] if of_samples else name
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise UserError(f"--eval-tasks {word}: {name!r} is no name: give NAME={word}")
        if name in files:
            raise UserError(f"--eval-tasks {word}: another task is called {name}")
        files[name] = TaskFile(name, path, int(count) if count else None)
    return list(files.values())


TRACKED_RUNS = "trackers.json"


@dataclass(frozen=True)
class Run:
    """Where a run executes, what it checks, and what it writes."""

    out: str = option("runs/latest", "folder for run.json and metrics.jsonl")
    device: str = option("auto", "device of each rank", choices=("auto", "cpu", "cuda"))
    backend: str = option(
        "auto",
        "collectives: nccl on GPUs, gloo on CPUs",
        choices=("auto", "nccl", "gloo"),
    )
    bind_cores: bool = option(
        True, "bind each rank to cores of its own, if there are enough", file_only=True
    )
    log_every: int = option(
        None,
        "steps between log lines, default: a line when 5 seconds have passed",
        minimum=1,
    )
    sample_every: int = option(
        0,
        "steps between samples in the log, and one at the end; 0: none",
        minimum=0,
    )
    sample_prompt: tuple = option(
        None,
        "texts that --sample-every continues, or ids where there is no tokenizer",
        nargs="+",
    )
    sample_temperature: float = option(
        0.0,
        "temperature of the samples in the log; 0: the most likely tokens",
        minimum=0.0,
        needs=Needs(("sample_every",)),
    )
    check_replicas_every: int = option(
        1000,
        "steps between replica checks, also before each save; 0: never",
        minimum=0,
    )
    audit_every: int = option(
        0,
        "steps between audits: all replicas repeat a micro-batch and compare the bits; 0: never",
        minimum=0,
    )
    expect: str = option(
        None,
        "curve of losses that the run should follow: a file of plan.py ladder --write, or a run's "
        "folder; leaving its band is a line in the log",
    )
    spike_sigma: float = option(
        6.0,
        "record in spikes.jsonl a loss or gradient norm this many sigma above recent steps; 0: off",
        minimum=0.0,
    )
    on_spike: str = option(
        None,
        "record: write more about a spike; skip: also skip the update; rollback: go back to the "
        "newest checkpoint, and skip the batches since then",
        choices=("record", "skip", "rollback"),
        needs=Needs(("spike_sigma",), above=0, reason="now no step is a spike"),
    )
    spike_limit: int = option(
        4,
        "most skips or rollbacks in a run; the next spike ends it",
        minimum=0,
        needs=Needs(("on_spike",), ("skip", "rollback")),
        file_only=True,
    )
    max_nan_steps: int = option(
        5, "non-finite losses in a row that end the run", minimum=1, file_only=True
    )
    tensorboard: bool = option(False, "also write TensorBoard events")
    wandb: str = option(None, "also log to this project of Weights & Biases")
    save_every: int = option(0, "steps between checkpoints, and one at the end; 0: none", minimum=0)
    save_every_minutes: float = option(
        0.0,
        "minutes between checkpoints, and one at the end; 0: none",
        minimum=0.0,
    )
    save_weights_only: bool = option(
        False, "checkpoints without optimizer state, 4 bytes a weight", needs=SAVES
    )
    async_save: bool = option(
        True, "write checkpoints while training continues", needs=SAVES, file_only=True
    )
    keep_last: int = option(0, "newest checkpoints to keep, 0: all", minimum=0, needs=SAVES)
    keep_every: int = option(
        0,
        "with --keep-last, also keep multiples of this step",
        minimum=0,
        needs=Needs(("keep_last",), reason="now all are kept"),
    )
    after_save: str = option(
        None,
        "shell command to run in the background for each complete checkpoint, $TRINE_CHECKPOINT",
        needs=SAVES,
    )
    resume: str = option(
        None,
        "auto: the newest checkpoint of --out, if any; or the folder of one",
        example="auto",
    )
    branch_from: str = option(
        None,
        "start another run in --out from this checkpoint, or continue that run",
    )
    decay_tokens: int = option(
        None,
        "train the branch for this many tokens, while the learning rate decays to --min-lr",
        minimum=1,
        needs=Needs(("branch_from",), reason="it is a branch that decays"),
    )
    load_weights_only: bool = option(
        False,
        "take only the weights from --resume, start at step 0",
        needs=Needs(("resume",), reason="it says which weights"),
    )
    preflight: bool = option(None, "test every node before step 1, default: if there are several")
    exit_after_minutes: float = option(
        0.0,
        "save and stop with status 75 within this many minutes, 0: no limit",
        minimum=0.0,
    )
    stop_at_samples: int = option(
        0,
        "save and stop with status 75 after this many samples, 0: no limit",
        minimum=0,
    )
    begin_at_samples: int = option(
        0,
        "least samples that the resumed checkpoint has; earlier batches need not suit the layout",
        minimum=0,
        needs=Needs(("resume",), reason="a new run begins with 0"),
    )
    kill_switch: str = option(None, "save and stop with status 75 when this file appears")
    save_switch: str = option(None, "save when this file appears, remove it, and continue")
    watchdog: bool = option(
        True, "watch all ranks: name the one that hangs or dies, and end the job"
    )
    hang_timeout: float = option(
        None,
        "seconds without progress that count as a hang, default: 300, or 10 median steps if longer",
        minimum=1.0,
        needs=Needs(("watchdog",), reason="now it is off"),
    )
    check_speed_every: int = option(
        100, "steps between checks for stragglers, 0: never", minimum=0, file_only=True
    )
    slow_rank_percent: float = option(
        20.0,
        "per cent by which a straggler computes longer than its peers",
        minimum=0.0,
        needs=Needs(("check_speed_every",), above=0, is_key=True),
        file_only=True,
    )
    blocking: bool = option(
        False, "wait for each collective and CUDA kernel at once, to debug", file_only=True
    )
    compile: bool = option(
        False,
        "fuse norms, RoPE, SwiGLU and the loss by torch.compile, before step 1",
    )
    deterministic: bool = option(False, "use deterministic kernels only; on GPUs these are slower")
    record_routing: str = option(
        None, "write the experts of every token to this file", needs=EXPERTS
    )
    pin_routing: str = option(
        None,
        "take the experts of every token from this file of a run with --record-routing",
        needs=EXPERTS,
    )
    torch_profile: int = option(
        None,
        "torch.profiler's trace of this step: OUT/torch_step_N_rank_R.json",
        minimum=1,
        file_only=True,
    )
    trace_numerics: tuple = option(
        (),
        "write sums of all tensors in these steps to OUT/numerics, for runs.py diff",
        nargs="+",
        item=int,
    )

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints regularly, not only when it is stopped."""
        return bool(self.save_every or self.save_every_minutes)

    @property
    def routing_file(self) -> str | None:
        """The file with the experts of every token, which the run writes or reads; else None."""
        return self.pin_routing or self.record_routing

    @property
    def tracked_runs(self) -> str:
        """The file in --out with the id of the run in W&B, from which a resumed run gets the id."""
        return os.path.join(self.out, TRACKED_RUNS)


def unused_number(paths: list[str]) -> int:
    """Return the smallest number N, from 1 on, such that PATH.N exists for none of the paths.

    Called to set older files or folders aside under the name PATH.N.
    """
    number = 1
    while any(os.path.lexists(f"{path}.{number}") for path in paths):
        number += 1
    return number
