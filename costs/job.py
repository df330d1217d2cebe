"""Defines `Job`, the argument of every formula of the planner, and its simple quantities.

    job = Job(preset("bloom-176b"), Layout(tp=4, pp=12, dp=8), training, hardware.load("a100-80"))
    memory.stages(job)

The layout may be one layout, or `Columns` for many layouts: then each quantity is an array with a
number for each layout, called a column. The formulas are the same for both. Axes of a layout are
tp, pp, cp (context parallelism), dp and ep (expert parallelism).
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from architecture import block_kinds, dispatch
from architecture.mixer_stats import key_columns
from architecture.model_stats import (
    block_parameters,
    key_value_parameters,
    key_value_width,
    mean_of_blocks,
    mixer_key_parameters,
    mixes,
    mlp_parameters,
    whole_weights,
)
from architecture.shape import ModelShape
from base.errors import LayoutError
from config.schema import Layout, Training
from costs.hardware import Machine

Column = Any  # a number, or an array with a number for each layout


class Columns(Layout):
    """Many layouts: every field is an array with an entry for each layout.

    `sequence_parallel` is True or False in all layouts. In fields of numbers, -1 stands for None.
    """

    @cached_property  # formulas ask for it again and again
    def splits_backward(self) -> Any:
        """Whether the schedule of each layout splits backward passes: booleans, (layouts,)."""
        return np.char.startswith(cast(Any, self.schedule), "zb")

    @cached_property
    def stages_per_rank(self) -> Any:
        """The number of stages that a rank of each layout holds: integers, (layouts,)."""
        is_v_shaped = np.char.endswith(cast(Any, self.schedule), "-v")
        is_interleaved = cast(Any, self.schedule) == "interleaved"
        interleaved_stages = np.maximum(self.virtual_stages, 2)
        other_stages = np.where(is_v_shaped, 2, 1)
        return np.where(is_interleaved, interleaved_stages, other_stages)


class Job(NamedTuple):
    """A model, a layout, the training options and a machine. The layout's dp must be a number.

    rows_over_mean: the rows of tokens that this GPU's experts get, over the mean of all GPUs. Only
    memory depends on it.
    """

    model: ModelShape
    layout: Layout
    training: Training
    machine: Machine
    rows_over_mean: float = 1.0

    @property
    def gpus(self) -> Column:
        """The number of GPUs of all replicas."""
        return self.layout.tp * self.layout.pp * self.shards

    @property
    def cp(self) -> Column:
        """The number of ranks that share the tokens of a sample."""
        return self.layout.cp

    @property
    def shards(self) -> Column:
        """The number of ranks with the same weights, over which --zero shards: dp x cp."""
        return self.layout.dp * self.cp

    @property
    def zero(self) -> Column:
        """The ZeRO stage; 0 if a single rank has the weights, so that nothing can be sharded."""
        return self.layout.zero * (self.shards > 1)

    @property
    def reduces_once(self) -> Column:
        """Whether gradients are summed whole over a step's micro-batches, and then reduced once."""
        sums_whole = np.equal(self.layout.sync_each_batch, False) & (self.micro_batches > 1)
        return (self.zero < 2) | ((self.zero == 3) & sums_whole)

    @property
    def ep(self) -> Column:
        """The number of ranks over which a block's experts are divided; 1 without experts.

        Without --ep it is the greatest common divisor of the experts and the GPUs of a node, so
        that tokens are sent to experts within a node. If that number, or --ep, does not divide the
        ranks of a stage, dp x cp x tp, their greatest common divisor is taken.
        """
        experts = self.model.experts
        if experts == 1:
            return 1
        wanted = self.layout.ep or math.gcd(experts, self.machine.node)
        return np.gcd(wanted, self.shards * self.layout.tp)

    @property
    def nodes_with_one_copy(self) -> Column:
        """The number of nodes to each of which a token is sent once for all its experts there.

        1 if experts are on one node, or if each expert gets its own copy. distributed/mesh.py
        decides the same for a run. The ranks of a group of experts are neighbours, so they are
        equally many on each node if the GPUs of a node divide them.
        """
        ep, node = self.ep, self.machine.node
        nodes = np.where(np.equal(ep % node, 0), ep // node, 1)
        if not self.machine.software.one_copy_to_a_node:
            return np.ones_like(nodes)

        def taken(count: int) -> int:
            return count if dispatch.sends_once(self.model, count) else 1

        return for_each_count(nodes, taken)

    @property
    def copies_of_token(self) -> Column:
        """The expected number of nodes with any of a token's experts, where each gets one copy."""
        expected = partial(dispatch.nodes_of_token, dispatch.top_k_of(self.model))
        return for_each_count(self.nodes_with_one_copy, expected)

    @property
    def layout_with_ep(self) -> Layout:
        """The layout with the planned `ep` if the model has experts, else the layout as it is."""
        if self.model.experts == 1:
            return self.layout
        return replace(self.layout, ep=int(self.ep))

    @property
    def block_parameters(self) -> Column:
        """The number of parameters of a block that the tp ranks of a tensor group hold together.

        These are all parameters of the block but the experts on ranks outside the group.
        """
        return block_parameters(self.model) - self.experts_elsewhere

    @property
    def parameters_here(self) -> Column:
        """The number of parameters of a block on one tensor rank, as if tp divided the norms too.

        tp divides all matrices but those that make the latents of latent attention, and repeats
        those of key/value heads, or of a mixer's key heads, that are fewer than its ranks.
        """
        whole = mean_of_blocks(self.model, whole_weights)
        keys_and_values = mean_of_blocks(self.model, key_value_parameters)
        keys = mean_of_blocks(self.model, mixer_key_parameters)
        divided = self.block_parameters - whole
        repeated = keys_and_values * self.repeated_share + keys * self.repeated_keys
        return divided / self.layout.tp + whole + repeated

    @property
    def repeated_share(self) -> Column:
        """What a rank has of all key/value heads beyond 1 / tp of them: with g < tp 1/g - 1/tp."""
        return np.maximum(0.0, 1.0 / self.model.kv_heads - 1.0 / self.layout.tp)

    @property
    def repeated_keys(self) -> Column:
        """What a rank has of all key heads of a mixer beyond 1 / tp of them.

        Of a gated delta net it has the key head of its value heads, of Mamba-2 all of them.
        """
        heads, tp = self.model.mixer_key_heads, self.layout.tp
        if self.model.mixer == "mamba2":
            return np.where(np.equal(heads % tp, 0), 0.0, 1.0 - 1.0 / tp)
        return np.maximum(0.0, 1.0 / heads - 1.0 / tp)

    @property
    def repeated_columns(self) -> Column:
        """The columns of keys and values on a rank beyond 1 / tp of all, in blocks that are alike.

        They are none if tp divides the key/value heads, or the key heads of a mixer.
        """
        if mixes(self.model):
            return np.int64(np.rint(key_columns(self.model) * self.repeated_keys))
        return np.int64(np.rint(key_value_width(self.model) * self.repeated_share))

    @property
    def kinds(self) -> "list[tuple[float, Job]]":
        """The kinds of blocks of the model: pairs of a share and a job with blocks of this kind.

        The share is of the model's blocks. A model has at most six kinds: blocks with experts and
        dense blocks, with attention, with a window, or with another mixer. Most models have one
        kind, with the share 1.
        """
        if not self.model.has_kinds:
            return [(1.0, self)]
        layers = self.model.layers
        kinds = block_kinds.kinds(self.model)
        found = []
        for blocks, model in kinds:
            job = self._replace(model=model)
            if model.experts == 1 < self.model.experts:  # every GPU computes its own tokens
                job = job._replace(rows_over_mean=1.0)
            found.append((blocks / layers, job))
        return found

    @property
    def predictor(self) -> "Job":
        """A job whose model has one block, alike that of a module of --mtp-depth."""
        return self._replace(model=block_kinds.predictor(self.model))

    @property
    def parameters_of_all_experts(self) -> float:
        """The number of parameters of all experts of a block, as the mean over all blocks; or 0."""
        parameters = 0.0
        for share, job in self.kinds:
            if job.model.experts > 1:
                parameters += share * job.model.experts * mlp_parameters(job.model)
        return parameters

    @property
    def expert_parameters(self) -> Column:
        """The number of a block's expert parameters that the tp ranks of a group hold together.

        Each of these ranks holds 1 / ep of the experts, as whole experts; tp does not divide them.
        """
        return self.layout.tp / self.ep * self.parameters_of_all_experts

    @property
    def experts_elsewhere(self) -> Column:
        """The number of a block's expert parameters that no rank of a tensor group holds.

        A block's parameters less this number are on the ranks of the group together. It is negative
        if ranks of the group hold the same experts.
        """
        return self.parameters_of_all_experts - self.expert_parameters

    @property
    def sequence_parallel(self) -> Column:
        """Whether norms and residuals are split over the tp ranks (sequence parallelism).

        It is the layout's option, or the option's default for the machine.
        """
        if self.layout.sequence_parallel is not None:
            return self.layout.sequence_parallel
        on_gpu = self.machine.device != "CPU"
        return self.layout.automatic(self.model.seq_length, on_gpu).sequence_parallel

    @property
    def sequence_shards(self) -> Column:
        """The number of ranks over which norms and residuals are split.

        It is tp with sequence parallelism, else 1.
        """
        return np.where(self.sequence_parallel, self.layout.tp, 1)

    @property
    def over_heads(self) -> Column:
        """The number of cp ranks among which attention's heads are divided.

        It is the greatest common divisor of cp and the key heads of a tensor rank. If it is less
        than cp, the cp ranks with the same heads gather keys and values from one another.
        """
        return np.gcd(self.cp, np.maximum(1, self.model.kv_heads // self.layout.tp))

    @property
    def tokens(self) -> Column:
        """The number of a micro-batch's tokens on a rank, which are the rows of its activations."""
        return self.model.seq_length * self.layout.micro_batch_size // self.cp

    @property
    def number_bytes(self) -> int:
        """The bytes of a number in forward and backward passes; fp64 counts as fp32."""
        return 2 if self.training.precision in ("fp16", "bf16") else 4

    @property
    def activation_bytes(self) -> Column:
        """The bytes of one micro-batch's activation between two blocks, without tp."""
        return 1.0 * self.number_bytes * self.tokens * self.model.hidden

    @property
    def vocab_columns(self) -> Column:
        """The number of the vocabulary's rows on one tp rank, with padding: the logits' columns."""
        layout = self.layout
        multiple = layout.pad_vocab_multiple * layout.tp  # the whole vocabulary is padded to it
        return -(-self.model.vocab_size // multiple) * layout.pad_vocab_multiple

    @property
    def micro_batches(self) -> Column:
        """The number of micro-batches of a replica in a step.

        Raise UserError if the batch has less than one micro-batch for each replica.
        """
        samples = self.training.global_batch_size
        micro = self.layout.micro_batch_size
        dp = self.layout.dp
        if np.any(samples < micro * dp):
            product = f"micro-batch-size({micro}) * dp({dp}) = {micro * dp}"
            raise LayoutError(f"{product} is more than global-batch-size({samples})")
        return samples // (micro * dp)

    @property
    def fitted_values(self) -> dict[str, Any]:
        """The job's hidden size, sequence length, GPUs and micro-batch size, by name.

        A machine has a range of each of them (`fitted_range`): that of the measured runs on which
        its constants were fitted. Outside of the range a prediction is less sure, so `warnings` and
        risk.interval compare these values with it.
        """
        return {
            "hidden": self.model.hidden,
            "seq_length": self.model.seq_length,
            "gpus": self.gpus,
            "micro_batch_size": self.layout.micro_batch_size,
        }

    @property
    def warnings(self) -> list[str]:
        """Warnings, one for each quantity of the job in which the prediction is less sure.

        Its value is outside the range on which the machine's constants were fitted.
        """
        machine = self.machine
        values = self.fitted_values
        warnings = []
        for name, (low, high) in machine.fitted_range.items():
            if not high:
                warnings.append(
                    f"no run on {machine.name} was measured: predicted by its datasheet"
                )
            elif not low <= values[name] <= high:
                warnings.append(
                    f"{name} {values[name]} is outside what was fitted on {machine.name}: "
                    f"{low} to {high}"
                )
        return warnings


# ---- Formulas that another training program may replace ------------------------------------------

Given = ParamSpec("Given")
Result = TypeVar("Result")


def for_each_count(counts: Column, value: Callable[[int], float]) -> Column:
    """Return `value` of each number in a column of few different ones: each is asked for once."""
    different, places = np.unique(counts, return_inverse=True)
    return np.array([value(int(count)) for count in different])[places].reshape(np.shape(counts))


def term(
    formula: Callable[Concatenate[Job, Given], Result],
) -> Callable[Concatenate[Job, Given], Result]:
    """Decorate a formula of Trine that another training program may replace.

    If the machine's software has a method with the formula's name, the decorated function calls
    that method with the same arguments, else the formula.
    """

    @wraps(formula)
    def formula_of_program(job: Job, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        chosen = getattr(job.machine.software, formula.__name__, formula)
        return cast(Result, chosen(job, *args, **kwargs))

    return formula_of_program


def mean_of_kinds(
    formula: Callable[Concatenate[Job, Given], Result],
) -> Callable[Concatenate[Job, Given], Result]:
    """Decorate a formula about one block, for models that have blocks of several kinds.

    The formula sees jobs whose blocks are alike; the result is the mean over the model's blocks.
    """

    @wraps(formula)
    def mean(job: Job, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Return the formula's values for each kind of block, weighted by the kinds' shares."""
        kinds = job.kinds
        values: list[Any] = [formula(kind, *args, **kwargs) for _, kind in kinds]
        if len(values) == 1:
            return values[0]
        weighted = [value * share for value, (share, _) in zip(values, kinds, strict=True)]
        return functools.reduce(operator.add, weighted)

    return mean
