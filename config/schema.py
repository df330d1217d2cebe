"""The options of a run's layout, `Config` with all options.

    config = validation.check(command_line.parse(sys.argv[1:]), ranks=8)     # fills in dp

Every option is a field of one of five dataclasses: `ModelShape` in architecture/shape.py, `Layout`
here, `Training`, `Data` and `Run` in run_options.py. command_line.py makes flags, TOML keys and
help text from these fields; validation.py checks which options go together. A `Config` has one
instance of each.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from architecture.shape import ModelShape
from base.options import Needs, option
from config.past import Past
from config.phases import PhasePlan
from config.run_options import Data, Run, Training

# The name of the average of weights (--ema) among the kinds of state in a checkpoint.
EMA = "ema"

# Names of pipeline schedules: schedules/orders.py builds them; auto stands for the fastest of them.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "auto")


# ---- The model and its layout --------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks: neighbouring ranks are in one tp group, then cp, dp, pp."""

    tp: int = option(1, "tensor-parallel ranks", minimum=1)
    pp: int = option(1, "pipeline-parallel ranks", minimum=1)
    cp: int = option(1, "context-parallel ranks, which share a sample's tokens", minimum=1)
    dp: int = option(None, "data-parallel replicas, default: ranks / (tp x pp x cp)", minimum=1)
    ep: int = option(
        None,
        "expert-parallel ranks, a divisor of dp x cp x tp; default: 1",
        minimum=1,
    )
    cp_mixer: str = option(
        "states",
        "how cp ranks share mixers without attention: they pass states on, or exchange heads",
        choices=("states", "heads"),
        needs=Needs(("cp",), above=1),
    )
    sequence_parallel: bool = option(
        None,
        "split norms and residuals along the sequence over tp; default: on GPUs, if it divides",
    )
    schedule: str = option(
        "1f1b",
        "pipeline schedule; auto: the fastest that needs at most 1.1 times 1F1B's memory",
        choices=SCHEDULES,
    )
    virtual_stages: int = option(
        None, "stages of each pipeline rank with --schedule interleaved, default: 2", minimum=2
    )
    partition: str = option(
        "balanced",
        "blocks per stage: balanced by time; blocks: embedding and head count as a block each; "
        "layers: they count as none; or a list N,N,...",
    )
    micro_batch_size: int = option(
        1,
        "samples in one forward pass of one replica; gradients accumulate over the micro-batches",
        minimum=1,
    )
    recompute: str = option(
        "none",
        "activation recomputation: of attention (selective), or of whole blocks (full)",
        choices=("none", "selective", "full"),
    )
    recompute_layers: int = option(
        None, "recompute only the first N blocks of each stage, default: all", minimum=0
    )
    recompute_blocks: str = option(
        None, "as --recompute-layers, with a number for each stage: N,N,...", file_only=True
    )
    zero: int = option(
        1, "shard over dp: 1 optimizer state, 2 gradients too, 3 weights too", choices=(0, 1, 2, 3)
    )
    overlap_param_gather: bool = option(
        None,
        "all-gather new weights during the next forward pass; default: on GPUs, at --zero 1 and 2",
        file_only=True,
    )
    sync_each_batch: bool = option(
        True,
        "--zero 3: reduce-scatter gradients in every micro-batch; false: sum them, reduce once",
        file_only=True,
    )
    reshard_after_forward: bool = option(
        True,
        "--zero 3: free gathered weights after a forward pass; false: keep them for the backward",
        file_only=True,
    )
    pad_vocab_multiple: int = option(
        128, "pad vocabulary to a multiple of this x tp", minimum=1, file_only=True
    )

    @property
    def axes(self) -> dict[str, int]:
        """The number of ranks along every axis of the mesh; dp must be filled in."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    def over_heads(self, model: ModelShape) -> int:
        """Return the number of neighbouring cp ranks that exchange tokens for heads in attention.

        It divides cp and the number of key/value heads on a tp rank. The cp ranks that then have
        the same heads gather each other's keys and values (context_parallel.py).
        """
        return math.gcd(self.cp, max(1, model.kv_heads // self.tp))

    def kv_copies(self, model: ModelShape) -> int:
        """Return the number of tensor ranks that hold the same key/value head, 1 with many heads.

        Each of them has other query heads of that head.
        """
        return max(1, self.tp // model.kv_heads) if model.attends else 1

    def key_copies(self, model: ModelShape) -> int:
        """Return the number of tensor ranks that hold the same key head of a gated delta net.

        Each of them has other value heads of that head.
        """
        return max(1, self.tp // model.mixer_key_heads) if model.mixer == "gated_delta_net" else 1

    @property
    def stages_per_rank(self) -> int:
        """The pipeline stages on each rank of pp; several are virtual stages."""
        if self.schedule == "interleaved":
            return self.virtual_stages or 2
        # With zb-v, stages go down the ranks and up: rank 0 has the first and last.
        return 2 if self.schedule.endswith("-v") else 1

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.pp * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes gradients of inputs and of weights in separate passes."""
        return self.schedule.startswith("zb")

    def automatic(self, seq_length: int, on_gpu: bool) -> "Layout":
        """Return the layout; options that are None become True on a GPU if they fit, else False."""
        fits = {"sequence_parallel": self.tp > 1 and seq_length % (self.tp * self.cp) == 0}
        fits["overlap_param_gather"] = self.zero in (1, 2) and (self.dp, self.cp) != (1, 1)
        chosen: dict[str, Any] = {}
        for name, is_possible in fits.items():
            if getattr(self, name) is None:
                chosen[name] = on_gpu and is_possible
        return dataclasses.replace(self, **chosen)

    def micro_batches(self, batch: int) -> int:
        """Return the number of micro-batches of a replica in a step on `batch` samples."""
        return batch // (self.micro_batch_size * self.dp)

    @property
    def recomputed_of_stage(self) -> tuple[int, ...] | None:
        """The recomputed blocks of each stage by recompute_blocks; None if it is not given."""
        text = self.recompute_blocks
        return None if text is None else tuple(map(int, text.split(",")))

    def recomputed_blocks(self, blocks: int, stage: int) -> int:
        """Return the number of recomputed blocks of a stage, which are the stage's first blocks.

        blocks: the number of blocks in the stage. stage: the stage's number, from 0.
        """
        if self.recompute == "none":
            return 0
        by_stage = self.recomputed_of_stage
        most = self.recompute_layers if by_stage is None else by_stage[stage]
        return blocks if most is None else min(blocks, most)


@dataclass(frozen=True)
class Config:
    """All options of a run; `validation.check` must pass before anything is built from them."""

    model: ModelShape
    layout: Layout = field(default_factory=Layout)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    run: Run = field(default_factory=Run)
    # Ranges [A, B) of samples that no step trains on, because --on-spike has decided so in an
    # earlier start of the run.
    passed_over: tuple[tuple[int, int], ...] = ()
    # The steps done before this start, on which every number of the whole run depends.
    past: Past = field(default_factory=Past)
    # The phases of --phases; None: the options hold for all of the run.
    plan: PhasePlan | None = None

    def with_precision(self, automatic: str) -> "Config":
        """Return the run with --precision auto replaced by `automatic`, a name such as bf16."""
        if self.training.precision != "auto":
            return self
        training = dataclasses.replace(self.training, precision=automatic)
        return dataclasses.replace(self, training=training)

    def as_dict(self) -> dict[str, Any]:
        """Return all options as nested dictionaries, for run.json."""
        return dataclasses.asdict(self)


GROUPS = {"model": ModelShape, "layout": Layout, "training": Training, "data": Data, "run": Run}


def all_options() -> dict[str, dataclasses.Field[Any]]:
    """Return the declaration of every option, a dataclass field, by the option's name."""
    return {field.name: field for group in GROUPS.values() for field in dataclasses.fields(group)}
