"""A mixture of experts: a router, the exchange of tokens between ranks, and the experts' MLPs.

    tokens (T, h) --router--> k experts and k weights for each token
        sorted by expert --all-to-all--> the ranks that hold these experts
        MLP of each expert on its rows --all-to-all back--> weighted sum of the token's k rows

Every token reaches the experts that its router chooses: no token is dropped, and no expert has a
capacity. The experts of a block are split over the `ep` ranks of Mesh.experts, whole experts each;
tensor parallelism does not cut them. Without sequence parallelism the tensor ranks hold the same
tokens, so each of them sends its share of the tokens. The weighted sum is taken on the rank that
owns the token, in the order of the expert numbers. So neither the choice nor the order of any sum
depends on the layout, but for the rounding of the matrix products. If the ranks of `ep` are on
several nodes, a token with many experts is sent once to a node, and its sum is taken on each node
first (distributed/node_dispatch.py, which says when).

A row is one token at one of its k experts. Shapes: s sequence, b samples, h hidden, T = tokens of
this rank, E experts of a block, k experts for each token, f width of an expert, n rows that have
arrived at this rank's experts. Scores are the router's softmax or sigmoid of its logits.

Read parallel.py first; in model.py a Block has an `ExpertMLP` in place of its `MLP`. The balance
between the experts is in optim/balance.py. Sources: arXiv 1701.06538 (the layer),
2412.19437 (sigmoid scores, groups), 2405.04434 (shared experts), 2504.14960 (ep over dp, cp, tp).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architecture.shape import ModelShape
from distributed import gpus, node_dispatch, token_exchange
from distributed.collectives import reduce_from_tp
from distributed.token_exchange import (
    Arrive,
    Depart,
    Exchange,
    Flight,
    OwnTokens,
    Permute,
    Repeat,
    exchange_counts,
    inverse,
    occurrences,
    orders_of_arrived,
    share,
    to_device,
)
from parallel import DeferredGradients, Matrices, ParamFactory, add_product, exact_dtype


class Balance(Protocol):
    """The auxiliary losses that a step adds to a router: a class of optim/balance.py."""

    def add_penalty(self, router: "Router", weights: Tensor, choice: "RouterOutput") -> Tensor:
        """Return `weights`, (T, k), whose backward pass trains by auxiliary losses too (Router)."""


class Routing(Protocol):
    """Records or replaces a router's choices: a class of telemetry/routing_file.py."""

    def settle(self, chosen: Tensor, start: int, samples: int) -> Tensor:
        """Return the experts to take for T tokens, (T, k), after the router chose `chosen`, (T, k).

        Router.forward calls this in training, with its arguments `start` and `samples`.
        """


class RouterOutput(NamedTuple):
    """A router's results for T tokens.

    logits, scores: (T, E). experts: the numbers of each token's k experts, ascending, (T, k).
    start: the first token's position among the micro-batch's tokens, which are in the order (s, b).
    samples: b, the number of samples in the micro-batch.
    """

    logits: Tensor
    scores: Tensor
    experts: Tensor
    start: int
    samples: int


class Router(nn.Module):
    """Chooses k of E experts for each token, and the weights of the experts' outputs.

    The logits are computed in fp32 (fp64 in an fp64 run). bias, (E,): added to the scores for the
    choice, not for the weights. load, (E,): each expert's number of rows in the last step, over the
    mean of all experts. No gradient updates these two tensors, but a checkpoint keeps them. counts,
    (E,): each expert's number of rows so far in this step.
    """

    def __init__(self, factory: ParamFactory, name: str, model: ModelShape):
        """Make a router's matrix, bias, loads, and counts of rows in a step; name: begins names."""
        super().__init__()
        self.mesh = factory.mesh
        self.model = model
        shape = (model.experts, model.hidden)
        self.weight = factory.parameter(
            f"{name}.weight", shape, std=factory.std, decay=True, partial=True, role="readout"
        )
        self.logit_bias: nn.Parameter | None = None  # (E,), learned
        if model.router_bias:
            self.logit_bias = factory.parameter(
                f"{name}.logit_bias", (model.experts,), partial=True
            )
        self.bias = factory.constant(f"{name}.bias", (model.experts,))  # added in `_choose`
        self.load = factory.constant(f"{name}.load", (model.experts,), 1.0)  # in the last step
        # counts: of this rank's tokens in this step so far. routing: of --record-, --pin-routing.
        self.counts = torch.zeros(model.experts, dtype=torch.int64, device=factory.device)
        self.balance: Balance | None = None  # auxiliary losses, set before each step of training
        self.routing: Routing | None = None  # with --record-routing or --pin-routing: set once

    def forward(
        self, x: Tensor, start: int, samples: int, chosen_experts: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the experts (T, k), ascending, and their weights (T, k) for tokens x (T, h), and
        the number of rows of each expert, (E,).

        start: the first token's position among the tokens of the tensor group, which are in the
        order (s, b). samples: b. chosen_experts: an empty list, to which this method adds its
        choice; when recomputation repeats the forward pass, the list has the choice already.
        """
        exact = exact_dtype(x.dtype)
        logits = F.linear(x.to(exact), self.weight.to(exact))
        if self.logit_bias is not None:
            logits = logits + self.logit_bias.to(exact)
        scores = logits.softmax(-1) if self.model.router == "softmax" else logits.sigmoid()
        repeated = bool(chosen_experts)  # recomputation: the choice of the first pass is used
        if not repeated:
            choice_here = self._choose(scores.detach())
            if self.routing is not None and torch.is_grad_enabled():
                choice_here = self.routing.settle(choice_here, start, samples)
            chosen_experts.append(choice_here)
        experts = chosen_experts[0]
        counts = occurrences(experts.flatten(), self.model.experts)
        weights = scores.gather(-1, experts)
        if self.model.router_normalised:
            total = weights.sum(-1, keepdim=True)
            if self.model.router != "softmax":  # sigmoids may all be 0
                total = total + 1e-20
            weights = weights / total
        if self.model.router_scale != 1.0:
            weights = weights * self.model.router_scale
        if self.balance is not None and torch.is_grad_enabled():
            if not repeated:
                self.counts += counts
            choice = RouterOutput(logits, scores, experts, start, samples)
            weights = self.balance.add_penalty(self, weights, choice)
        return experts, weights, counts

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the numbers of each token's k experts, ascending: (T, k).

        They have the largest scores with the bias added, among the experts of the best groups if
        experts form groups. scores: (T, E).
        """
        model = self.model
        biased = scores + self.bias.to(scores.dtype)
        if model.router_groups > 1:
            biased = biased.masked_fill(~self._in_best_groups(biased), -torch.inf)
        return biased.topk(model.experts_per_token, -1).indices.sort(-1).values

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        """Return whether each expert is in one of a token's best groups: (T, E), bool.

        router_groups_per_token groups are the best. A group's score is the sum of its two largest
        scores, as in DeepSeek-V3.
        """
        model = self.model
        grouped = scores.unflatten(-1, (model.router_groups, -1))  # T, groups, experts of a group
        experts_per_group = grouped.shape[-1]
        group_scores = grouped.topk(min(2, experts_per_group), -1).values.sum(-1)
        best = group_scores.topk(model.router_groups_per_token, -1).indices
        is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best, True)
        return is_best.repeat_interleave(experts_per_group, -1)


class HeldExperts(nn.Module):
    """The MLPs of those experts of a block that this rank holds.

    This is a module of its own, so that --zero 3 can shard it over the ranks with the same experts.
    """

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        model: ModelShape,
        std: float,
        activation: Callable[[Tensor], Tensor],
    ):
        """Make the matrices of this rank's experts. std: for the second one. activation: MLPs'."""
        super().__init__()
        self.experts_here = model.experts // factory.mesh.experts.size  # held by this rank
        self.activation = activation
        if model.up_matrices == 2:
            # dynamic: the number of rows differs in each pass, and torch limits compiled graphs.
            self.activation = factory.compile_for_training(activation, dynamic=True)
            if factory.compile:
                self.activation = functools.partial(_with_two_rows, self.activation)
        self.deferred = factory.deferred
        matrices = (2,) if model.up_matrices == 2 else ()  # gate and up are one tensor
        f = model.expert_ffn_hidden  # the width of an expert
        h = model.hidden
        # A function that makes a parameter (experts, ...), whose experts are split over `ep` ranks.
        expert_parameter = functools.partial(
            factory.parameter,
            dim=0,
            over=factory.mesh.experts,
            replicas="expert_replicas",
            decay=True,  # weight decay
        )
        up_shape = (model.experts, *matrices, f, h)
        down_shape = (model.experts, h, f)
        each = (0, 1) if matrices else (0,)  # every expert, and of it gate and up
        self.up = expert_parameter(
            f"{name}.experts.up.weight", up_shape, std=factory.std, matrices=Matrices(each=each)
        )
        self.down = expert_parameter(
            f"{name}.experts.down.weight", down_shape, std=std, matrices=Matrices(each=(0,))
        )
        self.up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if model.bias:
            bias = functools.partial(
                factory.parameter, dim=0, over=factory.mesh.experts, replicas="expert_replicas"
            )
            self.up_bias = bias(f"{name}.experts.up.bias", (model.experts, *matrices, f))
            self.down_bias = bias(f"{name}.experts.down.bias", (model.experts, h))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Return the MLPs' outputs, (n, h), for rows (n, h) that are sorted by expert.

        counts: the number of rows of each expert on this rank.
        """
        h = rows.shape[-1]
        up = self.up.view(self.experts_here, -1, h)  # (experts, f, h), or 2 f: gate and up
        down = self.down.view(self.experts_here, h, -1)
        ends = None
        if has_grouped_product(rows, up.transpose(1, 2)):
            ends = ends_on_device(counts, rows.device)
        inner = grouped_linear(rows, self.up, up, counts, self.deferred, ends)
        inner = self.activation(self._with_bias(inner, self.up_bias, counts))
        outputs = grouped_linear(inner, self.down, down, counts, self.deferred, ends)
        return self._with_bias(outputs, self.down_bias, counts)

    def _with_bias(self, rows: Tensor, bias: nn.Parameter | None, counts: list[int]) -> Tensor:
        """Return rows, (n, out), plus the bias of each row's expert, if experts have biases.

        bias: (experts, ...) with `out` numbers for each expert.
        """
        if bias is None:
            return rows
        repeats = to_device(torch.tensor(counts), rows.device)
        of_rows = bias.view(self.experts_here, -1).repeat_interleave(
            repeats, 0, output_size=len(rows)
        )
        return rows + of_rows


def _with_two_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) for x (n, ...), computed on 2 rows at least.

    torch.compile makes one graph for all sizes of a dynamic dimension but 0 and 1, for each of
    which it compiles again, in the middle of a run.
    """
    missing = 2 - len(x)
    if missing <= 0:
        return function(x)
    return function(torch.cat([x, x.new_zeros(missing, *x.shape[1:])]))[: len(x)]


class ExpertMLP(nn.Module):
    """The MLPs of a block's experts, with their router, and perhaps an MLP that every token takes.

    (s, b, h) -> (s, b, h), or (s/tp, b, h) -> (s/tp, b, h) with sequence parallelism.
    """

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        model: ModelShape,
        std: float,
        activation: Callable[[Tensor], Tensor],
        shared: nn.Module | None = None,
    ):
        """Make a block's router and experts. std: for the experts' second matrices. activation: the
        function of the model's MLPs. shared: the MLP that every token takes, or None.
        """
        super().__init__()
        self.factory = factory
        self.router = Router(factory, f"{name}.router", model)
        self.experts_per_token = model.experts_per_token
        self.held_experts = HeldExperts(factory, name, model, std, activation)
        self.shared = shared
        self.gate: nn.Parameter | None = None  # (1, h): gives a factor for the shared MLP's output
        if model.shared_gate:
            self.gate = factory.parameter(
                f"{name}.shared_gate.weight",
                (1, model.hidden),
                std=factory.std,
                decay=True,
                role="readout",
            )

    def forward(self, x: Tensor, chosen_experts: list[Tensor]) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token, in the shape of x.

        chosen_experts: the list in which the router keeps its choice for recomputation.
        """
        factory = self.factory
        tp = factory.mesh.tp
        samples = x.shape[1]
        tokens = x.flatten(0, 1)
        start, stop = 0, len(tokens)
        divides = tp.size > 1 and not factory.sequence_parallel
        if divides:
            # All tensor ranks have all tokens: each of them sends a share to the experts.
            start, stop = share(len(tokens), tp)
            tokens = OwnTokens.apply(tokens, start, stop, tp)
        finish = self._send(tokens, start, samples, chosen_experts)
        shared = None if self.shared is None else self._shared_output(x)  # while the rows travel
        y = finish()
        if divides:
            y = F.pad(y, (0, 0, start, x.shape[0] * samples - stop))  # 0 for other ranks' tokens
            y = reduce_from_tp(y, tp, factory.sequence_parallel)
        y = y.view_as(x)
        return y if shared is None else y + shared

    def _shared_output(self, x: Tensor) -> Tensor:
        """Return the output of the MLP that every token takes, in the shape of x."""
        assert self.shared is not None
        shared = self.shared(x)
        if self.gate is None:
            return shared
        return shared * F.linear(x, self.gate).sigmoid()  # a factor of 0 to 1 for each token

    def _send(
        self, x: Tensor, start: int, samples: int, chosen_experts: list[Tensor]
    ) -> Callable[[], Tensor]:
        """Start to send this rank's tokens x, (T, h), to their experts; return a function that
        returns the experts' output, (T, h).

        start: the first token's position among the tokens of the tensor group, which are in the
        order (s, b). samples: b. chosen_experts: the list that keeps the choice for recomputation.
        """
        experts, weights, counts = self.router(x, start, samples, chosen_experts)
        mesh = self.factory.mesh
        if mesh.experts_across.size > 1:  # experts are on several nodes: one copy to each of them
            groups = mesh.experts_across, mesh.experts_within
            choice = experts, weights, counts
            return node_dispatch.send(x, choice, groups, self.held_experts, self.shared is not None)
        # Before sorting, row i is for token i // k. If experts is [[0, 2], [0, 1]], for two tokens
        # with k = 2, order is [0, 2, 3, 1]: rows 0 and 2 go to expert 0, 3 to 1, and 1 to 2.
        order = experts.flatten().argsort(stable=True)
        back = inverse(order)
        rows = Repeat.apply(x, order, back, self.experts_per_token)
        group = mesh.experts
        run: Callable[[], Tensor]
        if group.size == 1:  # this rank holds all experts
            counts_on_host = token_exchange.counts_on_host(group, counts, len(rows))
            run = functools.partial(self.held_experts, rows, counts_on_host)
        else:
            run = self._send_rows(rows, counts)

        def finish() -> Tensor:
            """Return the weighted sums of the experts' outputs."""
            rows = Permute.apply(run(), back, order)  # in the order of the tokens again
            outputs = rows.view(len(x), self.experts_per_token, x.shape[-1])
            return (outputs * weights.to(x.dtype)[..., None]).sum(1)

        return finish

    def _send_rows(self, rows: Tensor, counts: Tensor) -> Callable[[], Tensor]:
        """Start to send rows, (T k, h), sorted by expert, each to the rank of `ep` that holds its
        expert; return a function that returns the experts' outputs, (T k, h), which come back.

        counts: the number of rows of each expert, (E,).
        """
        group = self.factory.mesh.experts
        # The rows arrive by rank, are sorted by expert for the products, and go back by rank.
        sent, received, counts_here, arrived = exchange_counts(group, counts, len(rows))
        flight = Flight(group if self.shared is not None else group.at_once, received, sent)
        (coming,) = Depart.apply([flight], rows)

        def finish() -> Tensor:
            """Return the experts' outputs for this rank's rows."""
            (rows,) = Arrive.apply([flight], coming)
            by_expert, by_rank = orders_of_arrived(arrived, rows.device)
            rows = Permute.apply(rows, by_expert, by_rank)
            rows = self.held_experts(rows, counts_here)
            rows = Permute.apply(rows, by_rank, by_expert)
            return Exchange.apply(rows, group, sent, received)

        return finish


# ---- Products of each expert's rows with its matrix ----------------------------------------------


class _GroupedLinear(torch.autograd.Function):
    """The product of each expert's rows with its matrix: (n, in) -> (n, out)."""

    @staticmethod
    def forward(ctx, x, weight, counts, ends, add, deferred):
        """Return the products for x (n, in), sorted by expert, and weight (experts, out, in).

        counts: the number of rows of each expert. ends: see `_grouped_product`. add: a function of
        x and the products' gradient that adds the weight's gradient; None: autograd adds the
        gradient that `backward` returns. deferred: the list that puts `add` off until pass W, or
        None.
        """
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        ctx.ends = ends
        ctx.add = add
        ctx.deferred = deferred
        return _grouped_product(x, weight.transpose(1, 2), counts, ends)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of x and weight; grad: that of the products, (n, out)."""
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        dx = _grouped_product(grad, weight, ctx.counts, ctx.ends)
        dw = None
        if ctx.deferred is not None:
            ctx.deferred.add(functools.partial(ctx.add, x, grad))  # later, in pass W
        elif ctx.add is not None:
            ctx.add(x, grad)  # at once, to the optimizer's buffer
        else:
            dw = weight_gradients(x, grad, ctx.counts, ctx.ends)
        return dx, dw, None, None, None, None


# torch's grouped product is one kernel for all experts. With it 128 small experts are 2.5 times as
# fast and 8 large ones no faster (benchmarks/results/gpu-h100.md), and a step of a model with 64 or
# 128 experts is 2.0 or 1.5 times as fast (gpu-h200.md). A host that launches slowly wins with few
# experts too, which no GPU has measured yet. So it is used for all but large experts, on
# GPUs for which torch has the kernel: NVIDIA's 9.x and 10.x. Elsewhere its grouped product copies
# the numbers of rows to the host and computes one expert after the other, as this file does.
LEAST_GROUPED = 4  # the smallest number of experts for which it is used
GROUPED_ON = (9, 10)  # compute capabilities, Hopper's and Blackwell's in data centres
MOST_OF_GROUPED = 2**22  # the most elements of one expert's matrix for which it is used


def has_grouped_product(x: Tensor, weight: Tensor) -> bool:
    """Return whether one kernel for all experts is faster than a kernel for each expert.

    x: (n, in), on any device. weight: (experts, in, out). The kernel is for GPUs of GROUPED_ON and
    bf16, and needs rows of a multiple of 16 bytes.
    """
    experts, inputs, outputs = weight.shape
    fits = x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0
    aligned = inputs % 8 == 0 and outputs % 8 == 0
    many_and_small = experts >= LEAST_GROUPED and inputs * outputs <= MOST_OF_GROUPED
    if not (fits and aligned and many_and_small):
        return False
    generation, _ = gpus.nvidia_capability(x.device)
    return generation in GROUPED_ON


def _grouped_product(x: Tensor, weight: Tensor, counts: list[int], ends: Tensor | None) -> Tensor:
    """Return the product of each expert's rows of x with its matrix: (n, out).

    x: (n, in), sorted by expert. weight: (experts, in, out). counts: the rows of each expert. ends:
    their sums on the device (`ends_on_device`), with which one kernel serves all experts; or None.
    """
    if ends is not None:
        return product_in_one_kernel(x, weight, ends)
    return product_by_expert(x, weight, counts)


def product_in_one_kernel(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's rows of x times its matrix, (n, out), by one kernel for all experts."""
    return F.grouped_mm(x, weight, offs=ends)


def ends_on_device(counts: list[int], device: torch.device) -> Tensor:
    """Return the row after the last one of each expert, as the grouped product takes it: int32.

    All products of a block share it. It is copied from pinned memory, so the host does not wait.
    """
    return to_device(torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


def product_by_expert(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Return each expert's rows of x times its matrix, (n, out), by one kernel for each expert."""
    y = x.new_empty(len(x), weight.shape[-1])
    for rows, out, matrix in zip(x.split(counts), y.split(counts), weight):
        torch.mm(rows, matrix, out=out)
    return y


def _add_weight_gradients(total: Tensor, x: Tensor, grad: Tensor, counts: list[int]) -> None:
    """Add the gradient of each expert's matrix to its part of `total`, (experts, out, in).

    x: (n, in) and grad, the products' gradient: (n, out), both sorted by expert.
    """
    for expert_total, rows, row_grads in zip(total, x.split(counts), grad.split(counts)):
        if len(rows):
            add_product(expert_total, row_grads.t(), rows)


def weight_gradients(x: Tensor, grad: Tensor, counts: list[int], ends: Tensor | None) -> Tensor:
    """Return the gradient of each expert's matrix in the type of x: (experts, out, in).

    x: (n, in) and grad, the products' gradient: (n, out), both sorted by expert. ends: see
    `_grouped_product`. One kernel for all rounds its result once, as a product for each does; where
    gradients are summed in fp32 it would round before the sum, so that has a product for each.
    """
    if ends is not None:
        return F.grouped_mm(grad.t(), x, offs=ends)
    total = grad.new_zeros(len(counts), grad.shape[-1], x.shape[-1])
    _add_weight_gradients(total, x, grad, counts)
    return total


def _add_gradients(
    parameter: Any,
    shape: torch.Size,
    counts: list[int],
    ends: Tensor | None,
    x: Tensor,
    grad: Tensor,
) -> None:
    """Add the gradient of an experts' parameter to its sum, and call the optimizer's hook.

    shape: (experts, out, in). x: (n, in). grad: the products' gradient, (n, out). counts, ends: as
    in `grouped_linear`.
    """
    if not hasattr(parameter, "main_grad"):  # --zero 2, 3: autograd gives it to the hooks
        gradient = weight_gradients(x, grad, counts, ends)
        torch.autograd.backward(parameter, gradient.view(parameter.shape))
        return
    _add_weight_gradients(parameter.main_grad.view(shape), x, grad, counts)
    parameter.gradient_added(parameter)


def grouped_linear(
    x: Tensor,
    parameter: Any,
    weight: Tensor,
    counts: list[int],
    deferred: DeferredGradients | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Return the products of each expert's rows of x, (n, in), with its matrix: (n, out).

    parameter: the tensor whose gradient is added. weight: its view as (experts, out, in). counts:
    the number of rows of each expert, which x has in this order. deferred: the list that puts
    weight gradients off until pass W, or None. ends: see `_grouped_product`.
    """
    # Without a buffer for the gradient and without a pass W, autograd computes the gradient.
    if deferred is None and not hasattr(parameter, "main_grad"):
        return _GroupedLinear.apply(x, weight, counts, ends, None, None)
    add: Callable = functools.partial(_add_gradients, parameter, weight.shape, counts, ends)
    return _GroupedLinear.apply(x, weight.detach(), counts, ends, add, deferred)
