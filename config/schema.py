"""The options of a run's layout, `Config` with all options.

    config = validation.check(command_line.parse(sys.argv[1:]), ranks=8)     # fills in dp

Every option is a field of one of five dataclasses: `ModelShape` in architecture/shape.py, `Layout`
here, `Training`, `Data` and `Run` in run_options.py. command_line.py makes flags, TOML keys and
help text from these fields; validation.py checks which options go together. A `Config` has one
instance of each.
"""

import bisect
import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from architecture.shape import ModelShape
from base.errors import UserError
from base.options import Needs, option
from config import batch_schedule as batches
from config.batch_schedule import BatchSchedule, Level
from config.past import Past
from config.phases import PhasePlan, PlacedPhase, place
from config.run_options import Data, Run, Training

# Optimizers that update each element alone, so that any rank can update any range of a parameter.
ELEMENTWISE = ("adamw", "apex", "sgd")
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
    schedule_costs: str = option(
        "planned",
        "costs of passes for --schedule auto: planned, measured when the run starts, or six "
        "numbers in microseconds: F, B, W of a block and of the head",
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
        None, "as --recompute-layers, with a number for each stage: N,N,..."
    )
    zero: int = option(
        1, "shard over dp: 1 optimizer state, 2 gradients too, 3 weights too", choices=(0, 1, 2, 3)
    )
    overlap_param_gather: bool = option(
        None,
        "all-gather new weights during the next forward pass; default: on GPUs, at --zero 1 and 2",
    )
    sync_each_batch: bool = option(
        True,
        "--zero 3: reduce-scatter gradients in every micro-batch; no: accumulate them, reduce once",
    )
    reshard_after_forward: bool = option(
        True,
        "--zero 3: free all-gathered weights after a forward pass; no: keep them for the backward",
    )
    pad_vocab_multiple: int = option(128, "pad vocabulary to a multiple of this x tp", minimum=1)

    @property
    def axes(self) -> dict[str, int]:
        """The number of ranks along every axis of the mesh; dp must be filled in."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}

    def over_heads(self, model: ModelShape) -> int:
        """Return the number of neighbouring cp ranks that exchange tokens for heads in attention.

        It divides cp and the number of key/value heads on a tp rank. The cp ranks that then have
        the same heads gather each other's keys and values (context_parallel.py).
        """
        return math.gcd(self.cp, model.kv_heads // self.tp)

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

    @property
    def recomputed_of_stage(self) -> tuple[int, ...] | None:
        """The recomputed blocks of each stage by --recompute-blocks; None if it is not given."""
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

    @cached_property
    def batches(self) -> BatchSchedule:
        """The sizes of the run's global batches; UserError if the options are inconsistent."""
        if self.plan is None:
            return batch_schedule(self.training, self.model.seq_length)
        starts = [(phase.samples, phase.batch) for phase in self.phases]
        return batches.joined(starts)

    @cached_property
    def phases(self) -> tuple[PlacedPhase, ...]:
        """The phases of the run, with their places; () without --phases.

        UserError if they contradict what is over.
        """
        if self.plan is None:
            return ()
        size = self.training.global_batch_size
        return place(self.plan, self.past, self.data.data, self.model.seq_length, size)

    def phase_at(self, samples: int) -> PlacedPhase | None:
        """Return the phase of the sample with this number in the run; None without --phases."""
        phases = self.phases
        later = bisect.bisect_right(phases, samples, key=lambda phase: phase.samples)
        return phases[later - 1] if phases else None

    def length_at(self, samples: int) -> int:
        """Return the tokens of the sample with this number in the run."""
        phase = self.phase_at(samples)
        return phase.length if phase else self.model.seq_length

    def model_at(self, samples: int) -> ModelShape:
        """Return the model with the sample length of the step that begins at this sample."""
        length = self.length_at(samples)
        if length == self.model.seq_length:
            return self.model
        return dataclasses.replace(self.model, seq_length=length)

    def tokens_at(self, samples: int) -> int:
        """Return the tokens of the run before the sample with this number."""
        phase = self.phase_at(samples)
        return phase.tokens_at(samples) if phase else samples * self.model.seq_length

    @property
    def lengths(self) -> list[int]:
        """The numbers of tokens that samples of this start and later ones have, ascending."""
        return sorted({s.length for s in self.phases_left} or {self.model.seq_length})

    @property
    def phases_left(self) -> tuple[PlacedPhase, ...]:
        """The phases that this start and later ones train; () without --phases."""
        now = self.phase_at(self.past.samples)
        return self.phases[self.phases.index(now) :] if now else ()

    @property
    def levels(self) -> list[Level]:
        """The levels (steps with one batch size) from --begin-at-samples to --stop-at-samples.

        A resumed run has those from its checkpoint on: at least the one there, even if no step is
        left to do.
        """
        run = self.run
        past = self.past
        levels = [
            dataclasses.replace(level, first_step=level.first_step + past.step)
            for level in self.batches.levels(past.samples)
        ]
        return batches.between(levels, run.begin_at_samples, run.stop_at_samples) or levels[:1]

    @cached_property
    def skipped(self) -> list[tuple[int, int]]:
        """Ranges [A, B) of samples that no step trains on; UserError if they are malformed."""
        return batches.parse_ranges(self.data.skip_samples or ()) + [*self.passed_over]

    def passes_over(self, first: int, count: int) -> bool:
        """Return whether the step on `count` samples from sample `first` on has to be skipped."""
        return any(a < first + count and first < b for a, b in self.skipped)

    def with_precision(self, automatic: str) -> "Config":
        """Return the run with --precision auto replaced by `automatic`, a name such as bf16."""
        if self.training.precision != "auto":
            return self
        training = dataclasses.replace(self.training, precision=automatic)
        return dataclasses.replace(self, training=training)

    @property
    def total_samples(self) -> int:
        """The samples of the whole run: those of the past, and those of the steps that are left.

        With --train-samples an incomplete last batch is not read.
        """
        if self.training.steps is not None:
            return self.past.consumed(self.training.steps, self.batches)
        if self._end_tokens is not None:
            last = self.phases[-1]
            steps = max(0, self._end_tokens - last.tokens) // (last.length * last.batch)
            begin = last.samples
            if last.is_begun:  # whole steps after those that are done, of whatever size they were
                begin = self.past.samples
                left = max(0, self._end_tokens - last.tokens_at(begin))
                steps = left // (last.length * last.batch)
            return begin + steps * last.batch
        return self.training.train_samples

    @property
    def total_steps(self) -> int:
        """The number of the run's last step; an incomplete last batch is no step."""
        if self.training.steps is not None:
            return self.training.steps
        return self.past.step + self.batches.steps(self.total_samples, self.past.samples)

    @property
    def _end_tokens(self) -> int | None:
        """The tokens at which a run with --phases ends; None if --train-samples says the end."""
        if self.plan is None or self.training.train_samples is not None:
            return None
        return self.plan.train_tokens

    @property
    def ordered(self) -> tuple[int, ...]:
        """For how many samples the order of training samples is made, and then continued.

        The last number or one before it is at least `total_samples` (Past.ordered).
        """
        if self.plan is not None:
            # Phases do not read in orders of a number of samples, but what a run has read before it
            # had phases is in one, and goes on in it up to the first phase.
            if not self.past.ordered:
                return ()
            ends = [phase.samples for phase in self.phases[1:2]]
            return self.past.with_order(min([self.total_samples, *ends]))
        return self.past.with_order(self.total_samples)

    def micro_batches(self, batch: int) -> int:
        """Return the number of micro-batches of a replica in a step on `batch` samples."""
        return batch // (self.layout.micro_batch_size * self.layout.dp)

    def as_dict(self) -> dict[str, Any]:
        """Return all options as nested dictionaries, for run.json."""
        return dataclasses.asdict(self)


GROUPS = {"model": ModelShape, "layout": Layout, "training": Training, "data": Data, "run": Run}


def all_options() -> dict[str, dataclasses.Field[Any]]:
    """Return the declaration of every option, a dataclass field, by the option's name."""
    return {field.name: field for group in GROUPS.values() for field in dataclasses.fields(group)}


def batch_schedule(training: Training, seq_length: int) -> BatchSchedule:
    """Return the batch sizes by the options; UserError if they are inconsistent.

    seq_length: the tokens of a sample, because --batch-schedule counts tokens. Without a ramp-up
    and without --batch-schedule every step has --global-batch-size samples.
    """
    size = training.global_batch_size
    steps = training.batch_schedule
    if training.rampup_batch_size and steps:
        raise UserError("give one of --rampup-batch-size and --batch-schedule; both were given")
    if training.rampup_batch_size:
        start, increment, samples = training.rampup_batch_size
        return batches.ramp(start, increment, samples, size)
    if not steps:
        return BatchSchedule(((0, size),))
    _, last_size = batches.parse_steps(steps)[-1]
    if last_size != size:
        raise UserError(
            f"global-batch-size({size}) is not the last of --batch-schedule "
            f"{' '.join(map(str, steps))}: leave it out"
        )
    return batches.by_tokens(steps, seq_length)
