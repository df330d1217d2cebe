"""Routers beside megatron-core's: if this failed, an imported recipe would train another router.

megatron-core 0.16.1 computes a softmax in fp32 also in an fp64 run; here in fp64, so that the
losses can be compared to fp64's rounding. Its sigmoids are in fp32, and with them the weights.
"""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from compare import assert_close

from architecture.shape import ModelShape
from config.run_options import Training
from distributed.mesh import Mesh
from layers.experts import Router
from optim.balance import Penalty
from parallel import ParamFactory

TOKENS, SAMPLES, HIDDEN, EXPERTS = 24, 3, 16, 8  # tokens of each sample
ROUTERS = {
    "softmax": {"router": "softmax", "router_normalised": False},
    "softmax of the chosen": {"router": "softmax", "router_normalised": True},
    "sigmoid": {"router": "sigmoid", "router_normalised": True},
    "sigmoid, scaled": {"router": "sigmoid", "router_normalised": True, "router_scale": 2.5},
    "groups": {
        "router": "sigmoid",
        "router_normalised": True,
        "router_groups": 4,
        "router_groups_per_token": 2,
        "experts_per_token": 4,  # theirs scores a group by as many experts as it then gives: 2
    },
}


class Exact:
    """The module torch, in which float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str):
        return getattr(torch, name)


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:megatron")


@pytest.fixture
def group(monkeypatch) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone, which megatron-core's router needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # optional packages of it are missing
        moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")

    monkeypatch.setattr(moe_utils, "torch", Exact())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def theirs(model: ModelShape, group: dist.ProcessGroup, balance: str, z_rate: float):
    """megatron-core's router of this model, with an auxiliary loss of rate 1 or none."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    grouped = model.router_groups > 1
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=model.experts_per_token,
        moe_router_score_function=model.router,
        moe_router_pre_softmax=model.router == "softmax" and not model.router_normalised,
        moe_router_num_groups=model.router_groups if grouped else None,
        moe_router_group_topk=model.router_groups_per_token if grouped else None,
        moe_router_topk_scaling_factor=model.router_scale,
        moe_router_load_balancing_type=balance,
        moe_aux_loss_coeff=0.0 if balance == "none" else 1.0,
        moe_z_loss_coeff=z_rate or None,
        add_bias_linear=False,
        params_dtype=torch.float64,
    )
    groups = SimpleNamespace(tp=group, cp=group, tp_cp=group, tp_dp_cp=group)
    return TopKRouter(config, groups)


def routed(kind: str, group: dist.ProcessGroup, balance: str = "none", z_rate: float = 0.0):
    """Return for both routers, Trine's and Megatron's, each token's weight of every expert, (T, E),
    and the gradient of the router's weight by the losses alone, (E, h).
    """
    shape = {"layers": 1, "hidden": HIDDEN, "heads": 2, "bias": False, "activation": "swiglu"}
    shape |= {"experts": EXPERTS, "experts_per_token": 2}
    model = ModelShape(**shape | ROUTERS[kind])
    tokens = TOKENS * SAMPLES
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ours = Router(
        ParamFactory(Mesh(), torch.float64, training=Training(init_std=0.5)), "router", model
    )
    losses = {"none": "none", "seq_aux_loss": "sequence", "aux_loss": "global"}
    if balance == "aux_loss":  # the loads of this batch, in place of those of the step before
        _, _, counts = ours(x, 0, SAMPLES, [])
        ours.load.data = counts.double() * EXPERTS / counts.sum()
    ours.balance = Penalty(losses[balance], 1.0, z_rate, 1 / tokens)
    experts, weights, _ = ours(x, 0, SAMPLES, [])
    if balance != "none" or z_rate:
        (weights * 0).sum().backward()
    dense = torch.zeros(tokens, EXPERTS, dtype=torch.float64).scatter(1, experts, weights.detach())
    weight = ours.weight.detach().clone().requires_grad_()
    router = theirs(model, group, balance, z_rate)
    probs, _ = router.routing((x @ weight.t()).view(TOKENS, SAMPLES, EXPERTS))
    (probs * 0).sum().backward()
    return (dense, ours.weight.grad), (probs.detach(), weight.grad)


@pytest.mark.parametrize("kind", ROUTERS)
def test_experts_and_their_weights(kind, group):
    (ours, _), (theirs, _) = routed(kind, group)
    assert ((ours > 0) == (theirs > 0)).all()
    assert_close(ours, theirs, 1e-12 if "softmax" in kind else 1e-6)


@pytest.mark.parametrize("balance", ["seq_aux_loss", "aux_loss"])
@pytest.mark.parametrize("kind", [kind for kind in ROUTERS if kind != "groups"])
def test_the_gradient_of_the_auxiliary_loss(kind, balance, group):
    """With the same rate. In theirs a group does not limit the choice that the loss counts."""
    (_, ours), (_, theirs) = routed(kind, group, balance)
    assert ours.abs().max() > 1e-4
    assert_close(ours, theirs, 1e-12, scale=float(theirs.abs().max()))


@pytest.mark.parametrize("kind", ROUTERS)
def test_the_gradient_of_the_z_loss(kind, group):
    (_, ours), (_, theirs) = routed(kind, group, z_rate=0.01)
    assert ours.abs().max() > 1e-4
    assert_close(ours, theirs, 1e-12, scale=float(theirs.abs().max()))


def test_the_bias_moves_by_the_sign_of_what_is_missing():
    """arXiv 2408.15664, algorithm 1: b_i + u sign(mean load - load of expert i)."""
    from optim.balance import RouterBalance

    model = ModelShape(layers=1, hidden=16, heads=2, experts=4, bias=False, activation="swiglu")
    factory = ParamFactory(Mesh(), torch.float64)
    router = Router(factory, "router", model)
    router.counts += torch.tensor([10, 4, 4, 2])
    blocks = [SimpleNamespace(has_experts=True, mlp=SimpleNamespace(router=router))]
    stage = SimpleNamespace(numbered_blocks=lambda: list(enumerate(blocks)))
    training = SimpleNamespace(balance="bias", balance_rate=0.25)
    balance = RouterBalance([stage], factory, training, model)
    balance.finish_step(skipped=False)
    assert router.bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    assert router.load.tolist() == [2.0, 0.8, 0.8, 0.4]
