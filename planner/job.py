"""The subject of every formula of the planner, and what follows from it at once.

    job = Job(preset("bloom-176b"), Layout(tp=4, pp=12, dp=8), training, hardware.load("a100-80"))
    memory.stages(job)

The layout may be one, or many of them as `Columns`: then each quantity is an array with a number
for each layout. The formulas are the same for both.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from config import block_kinds
from config.messages import UserError
from config.model_stats import block_parameters, mlp_parameters
from config.schema import Layout, ModelShape, Training
from planner.hardware import Machine

Column = Any  # a number, or an array with one for each layout


class Columns(Layout):
    """Many layouts: every field is an array with an entry for each of them.

    `sequence_parallel` and `vocab_pp` are True or False in all of them; -1 is None in numbers.
    """

    @property
    def splits_backward(self) -> Any:
        """Do what the property of a Layout does, for columns."""
        return np.char.startswith(cast(Any, self.schedule), "zb")

    @property
    def stages_per_rank(self) -> Any:
        """Do what the property of a Layout does, for columns."""
        folded = np.where(np.char.endswith(cast(Any, self.schedule), "-v"), 2, 1)
        several = np.maximum(self.virtual_stages, 2)
        return np.where(cast(Any, self.schedule) == "interleaved", several, folded)


class Job(NamedTuple):
    """A model, a layout whose dp is filled in, how it is trained, and a machine."""

    model: ModelShape
    layout: Layout
    training: Training
    machine: Machine

    @property
    def gpus(self) -> Column:
        """GPUs of all replicas."""
        return self.layout.tp * self.layout.pp * self.shards

    @property
    def cp(self) -> Column:
        """Ranks that share the tokens of a sample."""
        return self.layout.cp

    @property
    def shards(self) -> Column:
        """Ranks with the same weights, over which --zero shards: those of dp, and of cp."""
        return self.layout.dp * self.cp

    @property
    def zero(self) -> Column:
        """The ZeRO stage; 0 where there is nothing to shard over."""
        return self.layout.zero * (self.shards > 1)

    @property
    def ep(self) -> Column:
        """Ranks of dp x cp x tp that divide a block's experts: as given, else those of a node."""
        experts = self.model.experts
        if experts == 1:
            return 1
        wanted = self.layout.ep or math.gcd(experts, self.machine.node)
        return np.gcd(wanted, self.shards * self.layout.tp)

    @property
    def layout_with_ep(self) -> Layout:
        """The layout of a model with experts with the `ep` that is planned, in place of None."""
        if self.model.experts == 1:
            return self.layout
        return replace(self.layout, ep=int(self.ep))

    @property
    def block_parameters(self) -> Column:
        """Parameters of a block that a tensor group holds: with `ep`, a part of the experts."""
        return block_parameters(self.model) - self.experts_elsewhere

    @property
    def kinds(self) -> "list[tuple[float, Job]]":
        """The shares of a model's blocks that are alike, each with the job of such blocks alone."""
        if self.model.experts == 1:
            return [(1.0, self)]
        layers = self.model.layers
        found = block_kinds.kinds(self.model)
        return [(blocks / layers, self._replace(model=kind)) for blocks, kind in found]

    @property
    def parameters_of_all_experts(self) -> float:
        """Parameters of all experts of a block, in the mean over the blocks; 0 without experts."""
        found = 0.0
        for share, job in self.kinds:
            if job.model.experts > 1:
                found += share * job.model.experts * mlp_parameters(job.model)
        return found

    @property
    def expert_parameters(self) -> Column:
        """The part of `block_parameters` that is the experts', if there are several: each rank of
        the tensor group holds whole experts.
        """
        return self.layout.tp / self.ep * self.parameters_of_all_experts

    @property
    def experts_elsewhere(self) -> Column:
        """Parameters of a block's experts that no rank of the tensor group holds; below 0 if the
        group's ranks hold some experts twice.
        """
        return self.parameters_of_all_experts - self.expert_parameters

    @property
    def sequence_parallel(self) -> Column:
        """Whether norms and residuals are split over tp: as given, else as on such a machine."""
        if self.layout.sequence_parallel is not None:
            return self.layout.sequence_parallel
        on_gpu = self.machine.device != "CPU"
        return self.layout.automatic(self.model.seq_length, on_gpu).sequence_parallel

    @property
    def sequence_shards(self) -> Column:
        """Ranks over which sequence parallelism splits norms and residuals: tp, or 1 without it."""
        return np.where(self.sequence_parallel, self.layout.tp, 1)

    @property
    def over_heads(self) -> Column:
        """How many of the cp ranks share attention's heads; over the others keys are gathered."""
        return np.gcd(self.cp, self.model.kv_heads // self.layout.tp)

    @property
    def tokens(self) -> Column:
        """Tokens of one micro-batch on a rank, which are the rows of its activations."""
        return self.model.seq_length * self.layout.micro_batch_size // self.cp

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in forward and backward; fp64 counts as fp32."""
        return 2 if self.training.precision in ("fp16", "bf16") else 4

    @property
    def activation_bytes(self) -> Column:
        """Bytes of one micro-batch between two blocks."""
        return 1.0 * self.number_bytes * self.tokens * self.model.hidden

    @property
    def vocab_columns(self) -> Column:
        """Rows of the vocabulary, padding included, on one rank: columns of the logits."""
        layout = self.layout
        spread = False if layout.vocab_pp is None else layout.vocab_pp
        # No numpy where there is one layout: its numbers may be too large for 64 bits.
        ranks = layout.tp * (1 + (layout.pp - 1) * spread)
        multiple = layout.pad_vocab_multiple * ranks
        return -(-self.model.vocab_size // multiple) * layout.pad_vocab_multiple

    @property
    def micro_batches(self) -> Column:
        """Micro-batches of one replica in a step; UserError if the batch is too small for one."""
        samples, micro = self.training.global_batch_size, self.layout.micro_batch_size
        dp = self.layout.dp
        if np.any(samples < micro * dp):
            product = f"micro-batch-size({micro}) * dp({dp}) = {micro * dp}"
            raise UserError(f"{product} is more than global-batch-size({samples})")
        return samples // (micro * dp)

    @property
    def fitted_values(self) -> dict[str, Any]:
        """The values that `fitted_range` of a machine limits."""
        return {
            "hidden": self.model.hidden,
            "seq_length": self.model.seq_length,
            "gpus": self.gpus,
            "micro_batch_size": self.layout.micro_batch_size,
        }

    @property
    def warnings(self) -> list[str]:
        """Return what is outside the range that the machine's constants were fitted on, in
        sentences.
        """
        values = self.fitted_values
        found = []
        for name, (low, high) in self.machine.fitted_range.items():
            if not low <= values[name] <= high:
                seen = f"{low} to {high}" if high else "nothing"
                where = f"outside what was fitted on {self.machine.name}: {seen}"
                found.append(f"{name} {values[name]} is {where}")
        return found


# ---- Terms that another program may have otherwise -----------------------------------------------

Given = ParamSpec("Given")
Found = TypeVar("Found")


def term(
    formula: Callable[Concatenate[Job, Given], Found],
) -> Callable[Concatenate[Job, Given], Found]:
    """A formula of Trine that other training programs may have otherwise: where the machine's
    software has a method of the same name, that is called, with the same arguments.
    """

    @wraps(formula)
    def of_program(job: Job, *more: Given.args, **named: Given.kwargs) -> Found:
        own = getattr(job.machine.software, formula.__name__, formula)
        return cast(Found, own(job, *more, **named))

    return of_program


def mean_of_kinds(
    formula: Callable[Concatenate[Job, Given], Found],
) -> Callable[Concatenate[Job, Given], Found]:
    """Decorate a formula about one block, for models that have blocks of two kinds.

    The formula sees jobs whose blocks are alike; the result is the mean over the model's blocks.
    """

    @wraps(formula)
    def mean(job: Job, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        found: list[Any] = [formula(kind, *args, **kwargs) for _, kind in job.kinds]
        if len(found) == 1:
            return found[0]
        shares = [share for share, _ in job.kinds]
        return found[0] * shares[0] + found[1] * shares[1]

    return mean
