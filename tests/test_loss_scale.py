"""The loss scale: if this failed, it would not move as Megatron's, or overflow without an end."""

import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from base.errors import UserError
from config.run_options import DynamicScale
from config.schema import Training
from optim.loss_scale import LossScale


@pytest.fixture(scope="module")
def grad_scaler():
    """Megatron's module, imported once, and not by a test run that selects other tests: 2 s."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine
        from megatron.core.optimizer import grad_scaler
    return grad_scaler


FP16 = Training(steps=1, precision="fp16")


@settings(max_examples=100)
@given(
    st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.integers(1, 5), st.integers(0, 6)
)
def test_the_scale_moves_as_megatrons(grad_scaler, overflows, hysteresis, window, power):
    ours = LossScale(FP16, DynamicScale(power, window, hysteresis, max_overflows=10**6))
    with pytest.MonkeyPatch.context() as patch:  # theirs asks for a GPU
        cpu_tensor = torch.tensor
        patch.setattr(torch, "tensor", lambda *a, device=None, **k: cpu_tensor(*a, **k))
        theirs = grad_scaler.DynamicGradScaler(2.0**power, 1.0, 2.0, 0.5, window, hysteresis)
    for overflow in overflows:
        ours.update(overflow)
        theirs.update(overflow)
        assert ours.value == theirs._scale.item()
        assert ours.good == theirs._growth_tracker
        assert ours.hysteresis == theirs._hysteresis_tracker


def test_a_run_that_overflows_at_the_smallest_scale_ends_and_says_so():
    rule = DynamicScale(initial_loss_scale_power=2, loss_scale_hysteresis=1, max_overflows=3)
    scale = LossScale(FP16, rule)
    for _ in range(2):  # 4 -> 2 -> 1
        scale.update(True)
    scale.update(True)
    scale.update(False)  # a good step between: not in a row
    scale.update(True)
    scale.update(True)
    with pytest.raises(UserError, match=r"3 steps in a row at the smallest loss scale 1: fp16"):
        scale.update(True)


def test_a_fixed_scale_stays():
    fixed = Training(steps=1, precision="fp16", loss_scale=128.0)
    scale = LossScale(fixed, DynamicScale(max_overflows=2))
    for overflow in (False, True, False):
        scale.update(overflow)
    assert scale.value == 128.0
    scale.update(True)
    with pytest.raises(UserError, match="2 steps in a row at the fixed loss scale 128"):
        scale.update(True)
