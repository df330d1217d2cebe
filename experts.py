"""A mixture of experts: a router, the exchange of tokens between ranks, and the experts' MLPs.

    tokens (T, h) --router--> k experts and k weights for each token
        sorted by expert --all-to-all--> the ranks that hold these experts
        MLP of each expert on its rows --all-to-all back--> weighted sum of the token's k rows

Every token reaches the experts that its router chooses: no token is dropped, and no expert has a
capacity. The experts of a block are split over the `ep` ranks of Mesh.experts, whole experts each;
tensor parallelism does not cut them. Without sequence parallelism the tensor ranks hold the same
tokens, so each of them sends its share of the tokens. The weighted sum is taken on the rank that
owns the token, in the order of the expert numbers. So neither the choice nor the order of any sum
depends on the layout, but for the rounding of the matrix products.

Shapes: s sequence, b samples, h hidden, T = tokens of this rank, E experts of a block, k experts
for each token, f width of an expert, n rows that have arrived at this rank's experts.

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

from config.schema import ModelShape
from distributed import token_exchange
from distributed.collectives import reduce_from_tp
from distributed.token_exchange import Exchange, OwnTokens, exchange_counts, order_by_expert, share
from parallel import DeferredGradients, ParamFactory, ParamSpec, add_product


class Balance(Protocol):
    """The auxiliary losses that a step adds to a router: a class of optim/balance.py."""

    def penalized(self, router: "Router", weights: Tensor, choice: "Choice") -> Tensor:
        """Return `weights`; their backward pass adds the gradient of the auxiliary losses."""


class Routing(Protocol):
    """Records or replaces a router's choices: a class of telemetry/routing_file.py."""

    def settle(self, chosen: Tensor, places: Tensor, samples: int) -> Tensor:
        """Return the experts to take for the tokens, (T, k), where the router chose `chosen`."""


class Choice(NamedTuple):
    """A router's computation for T tokens.

    logits, scores: (T, E). experts: the numbers of the chosen ones, ascending, (T, k). samples: the
    sample of each token, (T,), of samples_in_batch samples.
    """

    logits: Tensor
    scores: Tensor
    experts: Tensor
    samples: Tensor
    samples_in_batch: int


class Router(nn.Module):
    """Chooses k of E experts for each token, and the weight of each of them.

    The logits are computed in fp32 (fp64 in an fp64 run). `bias` is added to the scores for the
    choice alone, and `load` is each expert's part of the last step's rows, relative to the mean:
    no gradient updates these two tensors, but a checkpoint keeps them.
    """

    def __init__(self, factory: ParamFactory, name: str, model: ModelShape):
        super().__init__()
        self.mesh = factory.mesh
        self.model = model
        shape = (model.experts, model.hidden)
        self.weight = factory.parameter(
            f"{name}.weight", shape, std=factory.std, decay=True, partial=True
        )
        self.bias = _constant(factory, f"{name}.bias", model.experts, 0.0)
        self.load = _constant(factory, f"{name}.load", model.experts, 1.0)
        self.counts = torch.zeros(model.experts, dtype=torch.int64, device=factory.device)
        self.balance: Balance | None = None
        self.routing: Routing | None = None

    def forward(
        self, x: Tensor, places: Tensor, samples: int, kept: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the experts (T, k), ascending, and their weights (T, k) for tokens x (T, h).

        places: of the tokens among those of the tensor group, (T,), in the order (s, b); samples:
        b. kept: empty, and then filled with the choice; in the repeated forward pass of
        recomputation it holds the choice already.
        """
        exact = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(exact), self.weight.to(exact))
        scores = logits.softmax(-1) if self.model.router == "softmax" else logits.sigmoid()
        repeated = bool(kept)
        if not repeated:
            chosen = self._choose(scores.detach())
            if self.routing is not None and torch.is_grad_enabled():
                chosen = self.routing.settle(chosen, places, samples)
            kept.append(chosen)
        experts = kept[0]
        weights = scores.gather(-1, experts)
        if self.model.router_normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * self.model.router_scale
        if self.balance is not None and torch.is_grad_enabled():
            if not repeated:
                self.counts += occurrences(experts.flatten(), self.model.experts)
            choice = Choice(logits, scores, experts, places % samples, samples)
            weights = self.balance.penalized(self, weights, choice)
        return experts, weights

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the numbers of the k experts with the largest scores, ascending: (T, k)."""
        model = self.model
        choice = scores + self.bias.to(scores.dtype)
        if model.router_groups > 1:
            choice = choice.masked_fill(~self._in_best_groups(choice), -torch.inf)
        return choice.topk(model.experts_per_token, -1).indices.sort(-1).values

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        """Return which experts are in the router_groups_per_token best groups of each token.

        A group's score is the sum of its two largest scores, as in DeepSeek-V3.
        """
        model = self.model
        grouped = choice.unflatten(-1, (model.router_groups, -1))
        summed = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        best = summed.topk(model.router_groups_per_token, -1).indices
        allowed = torch.zeros_like(summed, dtype=torch.bool).scatter_(-1, best, True)
        return allowed.repeat_interleave(grouped.shape[-1], -1)


def _constant(factory: ParamFactory, name: str, count: int, fill: float) -> nn.Parameter:
    """Return a tensor that no gradient updates, equal on all ranks of a stage, and in fp32 (fp64 in
    an fp64 run). Checkpoints have it.
    """
    exact = torch.promote_types(factory.dtype, torch.float32)
    tensor = torch.full((count,), fill, dtype=exact, device=factory.device)
    constant: Any = nn.Parameter(tensor, requires_grad=False)
    constant.spec = ParamSpec(name, (count,), None, 0, count, decay=False)
    return constant


class HeldExperts(nn.Module):
    """The MLPs of those experts of a block that this rank holds.

    --zero 3 shards them apart from the rest of the block, over the ranks that hold the same ones.
    """

    def __init__(
        self,
        factory: ParamFactory,
        name: str,
        model: ModelShape,
        std: float,
        activation: Callable[[Tensor], Tensor],
    ):
        """The arguments are those of ExpertMLP."""
        super().__init__()
        self.held = model.experts // factory.mesh.experts.size
        self.activation = factory.fused(activation)
        self.deferred = factory.deferred
        columns = (2,) if model.up_matrices == 2 else ()
        f = model.expert_ffn_hidden
        h = model.hidden
        held_here = functools.partial(
            factory.parameter,
            dim=0,
            over=factory.mesh.experts,
            replicas="expert_replicas",
            decay=True,
        )
        up = (model.experts, *columns, f, h)
        self.up = held_here(f"{name}.experts.up.weight", up, std=factory.std)
        self.down = held_here(f"{name}.experts.down.weight", (model.experts, h, f), std=std)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Return the MLPs' outputs for rows (n, h), of which each expert has `counts` in turn."""
        up = self.up.view(self.held, -1, rows.shape[-1])
        down = self.down.view(self.held, rows.shape[-1], -1)
        inner = self.activation(grouped_linear(rows, self.up, up, counts, self.deferred))
        return grouped_linear(inner, self.down, down, counts, self.deferred)


class ExpertMLP(nn.Module):
    """The MLPs of a block's experts, with their router, and perhaps an MLP that every token takes.

    (s, b, h) -> (s, b, h), as MLP; with sequence parallelism s/tp in place of s.
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
        """std: the standard deviation with which the experts' second matrices are drawn.
        activation: that of the model's MLPs. shared: the MLP that every token takes.
        """
        super().__init__()
        self.factory = factory
        self.router = Router(factory, f"{name}.router", model)
        self.experts = model.experts
        self.chosen = model.experts_per_token
        self.held_experts = HeldExperts(factory, name, model, std, activation)
        self.shared = shared
        self.gate: nn.Parameter | None = None
        if model.shared_gate:
            gate = f"{name}.shared_gate.weight"
            self.gate = factory.parameter(gate, (1, model.hidden), std=factory.std, decay=True)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        """Return the sum of the chosen experts' outputs for x. kept: as in Router.forward."""
        tp = self.factory.mesh.tp
        if tp.size == 1 or self.factory.sequence_parallel:
            y = self._of_tokens(x.flatten(0, 1), 0, x.shape[1], kept)
        else:
            tokens = x.flatten(0, 1)
            start, stop = share(len(tokens), tp)
            tokens_here = OwnTokens.apply(tokens, start, stop, tp)
            part = self._of_tokens(tokens_here, start, x.shape[1], kept)
            y = F.pad(part, (0, 0, start, len(tokens) - stop))
            y = reduce_from_tp(y, self.factory.mesh.tp, self.factory.sequence_parallel)
        y = y.view_as(x)
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.gate is not None:
            shared = shared * F.linear(x, self.gate).sigmoid()
        return y + shared

    def _of_tokens(self, x: Tensor, start: int, samples: int, kept: list[Tensor]) -> Tensor:
        """Return the experts' output for this rank's tokens x, (T, h).

        start: the first token's place among those of the tensor group, which are in the order
        (s, b); samples: b.
        """
        places = torch.arange(start, start + len(x), device=x.device)
        experts, weights = self.router(x, places, samples, kept)
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        back = _inverse(order)
        counts = occurrences(chosen, self.experts)
        rows = _Repeat.apply(x, order, back, self.chosen)
        if self.factory.mesh.experts.size == 1:
            group = self.factory.mesh.experts
            rows = self.held_experts(rows, token_exchange.counts_on_host(group, counts, len(rows)))
        else:
            rows = self._on_other_ranks(rows, counts)
        rows = _Permute.apply(rows, back, order)
        each = rows.view(len(x), self.chosen, x.shape[-1])
        return (each * weights.to(x.dtype)[..., None]).sum(1)

    def _on_other_ranks(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs for rows (T k, h), which are computed on the ranks of `ep`.

        counts: the rows of each expert, (E,), which `rows` has in this order.
        """
        group = self.factory.mesh.experts
        sent, received, counts_by_rank = exchange_counts(group, counts, len(rows))
        rows = Exchange.apply(rows, group, received, sent)
        by_expert = order_by_expert(counts_by_rank, rows.device)
        by_rank = _inverse(by_expert)
        rows = _Permute.apply(rows, by_expert, by_rank)
        rows = self.held_experts(rows, [sum(column) for column in zip(*counts_by_rank)])
        rows = _Permute.apply(rows, by_rank, by_expert)
        return Exchange.apply(rows, group, sent, received)


def occurrences(numbers: Tensor, count: int) -> Tensor:
    """Return how often each of 0, 1, ..., count - 1 is in `numbers`, (n,): (count,).

    Unlike that of torch.bincount, the result's shape does not depend on data.
    """
    return numbers.new_zeros(count).index_add_(0, numbers, torch.ones_like(numbers))


def _inverse(order: Tensor) -> Tensor:
    """Return the permutation that undoes `order`."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class _Repeat(torch.autograd.Function):
    """Rows (T k, h) in which each token of x (T, h) stands k times, in the order `order`."""

    @staticmethod
    def forward(ctx, x, order, back, k):
        ctx.save_for_backward(back)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, grad):
        (back,) = ctx.saved_tensors
        return grad[back].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """x[order]; its backward pass needs no atomic additions, since `back` undoes the order."""

    @staticmethod
    def forward(ctx, x, order, back):
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        (back,) = ctx.saved_tensors
        return grad[back], None, None


# ---- Products of each expert's rows with its matrix ----------------------------------------------


class _GroupedLinear(torch.autograd.Function):
    """The products of each expert's rows with its matrix; gradients go where `linear` adds them."""

    @staticmethod
    def forward(ctx, x, weight, counts, add, deferred):
        """x: (n, in), ordered by expert; weight: (experts, out, in); counts: rows of each expert.
        add, deferred: as in parallel.linear.
        """
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        ctx.add = add
        ctx.deferred = deferred
        return _grouped_product(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients of x and weight, given that of the product, (n, out)."""
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        dx = _grouped_product(grad, weight, ctx.counts)
        dw = None
        if ctx.deferred is not None:
            add = ctx.add
            ctx.deferred.add(lambda: add(x, grad))
        elif ctx.add is not None:
            ctx.add(x, grad)
        else:
            dw = torch.zeros_like(weight)
            _add_weight_gradients(dw, x, grad, ctx.counts)
        return dx, dw, None, None, None


# Where torch's grouped product is taken, in one kernel for all experts. One H100 computed 128 small
# experts 2.5 times as fast by it, and 8 large ones no faster (benchmarks/results/gpu-h100.md).
LEAST_GROUPED = 32  # experts
MOST_OF_GROUPED = 2**22  # elements of an expert's matrix


def has_grouped_product(x: Tensor, weight: Tensor) -> bool:
    """Return whether one kernel computes the products of all experts' rows faster than one each.

    x: (n, in), on any device. weight: (experts, in, out). The kernel is for GPUs and bf16, and
    needs rows of a multiple of 16 bytes.
    """
    experts, inputs, outputs = weight.shape
    fits = x.is_cuda and x.dtype == torch.bfloat16 and len(x) > 0
    aligned = inputs % 8 == 0 and outputs % 8 == 0
    many_and_small = experts >= LEAST_GROUPED and inputs * outputs <= MOST_OF_GROUPED
    return fits and aligned and many_and_small


def in_one_kernel(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Return what `one_by_one` does, by torch's grouped product."""
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x, weight, offs=ends.to(x.device, non_blocking=True))


def _grouped_product(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Return x[rows of expert e] weight[e] for all e, (n, out); weight: (experts, in, out)."""
    if has_grouped_product(x, weight):
        return in_one_kernel(x, weight, counts)
    return one_by_one(x, weight, counts)


def one_by_one(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Return the products of each expert's rows with its matrix, one kernel for each expert."""
    y = x.new_empty(len(x), weight.shape[-1])
    for rows, out, matrix in zip(x.split(counts), y.split(counts), weight):
        torch.mm(rows, matrix, out=out)
    return y


def _add_weight_gradients(total: Tensor, x: Tensor, grad: Tensor, counts: list[int]) -> None:
    """Add each expert's gradient to its part of `total`, (experts, out, in)."""
    for part, rows, of_rows in zip(total, x.split(counts), grad.split(counts)):
        if len(rows):
            add_product(part, of_rows.t(), rows)


def _add_gradients(
    parameter: Any, shape: torch.Size, counts: list[int], x: Tensor, grad: Tensor
) -> None:
    """Add the gradient of an expert parameter to its sum, and call the optimizer's hook."""
    if not hasattr(parameter, "main_grad"):
        gradient = grad.new_zeros(shape)
        _add_weight_gradients(gradient, x, grad, counts)
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
) -> Tensor:
    """Return the products of each expert's rows of x, (n, in), with its matrix: (n, out).

    parameter: the tensor whose gradient is added. weight: its view as (experts, out, in). counts:
    the rows of each expert, which x has in this order. deferred: as in parallel.linear.
    """
    if deferred is None and not hasattr(parameter, "main_grad"):
        return _GroupedLinear.apply(x, weight, counts, None, None)
    add: Callable = functools.partial(_add_gradients, parameter, weight.shape, counts)
    return _GroupedLinear.apply(x, weight.detach(), counts, add, deferred)
