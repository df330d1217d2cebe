"""The factor that keeps fp16 gradients above the smallest fp16 number.

The loss is multiplied by this loss scale before the backward pass, and the gradients are divided by
it before the update. An overflow is a gradient that the scale has made too large for fp16, so that
it is infinite or NaN. An overflow on any rank skips the update on all ranks: zero.py finds it in
the gradient norm, which is not finite then, and which every rank computes in any case.
"""

from base.errors import LossError
from config.run_options import LOSS_SCALE, DynamicScale, Training


class LossScale:
    """The loss scale of a run: dynamic for fp16 unless loss_scale fixes it, 1 otherwise.

    Megatron-LM has the same rule (megatron/core/optimizer/grad_scaler.py) with the same constants,
    but for the first scale, which is torch.amp.GradScaler's. A counter starts at
    loss_scale_hysteresis, and an overflow lowers it by 1. If the counter is then 0 or less, the
    scale is halved, down to min_loss_scale. After loss_scale_window steps in a row without an
    overflow the scale doubles and the counter is reset. Unlike in Megatron-LM, a run ends with an
    error after max_overflows overflows in a row at the smallest or a fixed scale.
    """

    def __init__(self, training: Training, rule: DynamicScale | None = None):
        """Begin with the scale of the options; without fp16 the scale is always 1.

        loss_scale fixes the scale. Without it the scale is dynamic: `update` adapts it by `rule`,
        which is LOSS_SCALE unless another one is given.
        stuck: the overflows in a row at a scale that cannot fall; with too many, `update` ends the
        run.
        """
        self.training = training
        self.rule = rule = rule or LOSS_SCALE
        fp16 = training.precision == "fp16"
        self.dynamic = fp16 and not training.loss_scale
        self.value = 1.0
        if fp16:
            self.value = training.loss_scale or 2.0**rule.initial_loss_scale_power
        self.good = 0  # steps in a row without an overflow since the scale changed
        self.hysteresis = rule.loss_scale_hysteresis  # overflows until the scale is halved
        self.stuck = 0  # overflows in a row at a scale that cannot fall

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step; called on all ranks with the same `overflow`.

        Raise UserError, which ends the run, if fp16 keeps overflowing at the smallest or a fixed
        scale.
        """
        rule = self.rule
        # A step without an overflow: perhaps the scale doubles.
        if not overflow:
            self.good += 1
            self.stuck = 0
            if self.dynamic and self.good == rule.loss_scale_window:
                self.value *= 2
                self.good = 0
                self.hysteresis = rule.loss_scale_hysteresis
            return
        # An overflow: the scale is halved, or cannot fall.
        self.good = 0
        self.hysteresis -= 1
        if not self.dynamic or self.value <= rule.min_loss_scale:
            self.stuck += 1
        elif self.hysteresis <= 0:
            self.value = max(self.value / 2, rule.min_loss_scale)
        if self.training.precision == "fp16" and self.stuck >= rule.max_overflows:
            kind = "smallest" if self.dynamic else "fixed"
            raise LossError(
                f"gradients overflowed in {self.stuck} steps in a row at the {kind} loss scale "
                f"{self.value:g}: fp16 cannot hold them; resume from the newest checkpoint with "
                f"--precision bf16, or with a lower --lr"
            )

    def state(self) -> dict[str, float]:
        """Return the scale and its counters, as a checkpoint stores them."""
        counts = {"good_steps": self.good, "hysteresis": self.hysteresis, "stuck": self.stuck}
        return {"loss_scale": self.value, **counts}

    def load(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint's `state`; a scale that the options fix is not changed.

        A checkpoint may lack an entry: its value is then 0, or stays that of the options.
        """
        self.good = int(state.get("good_steps", 0))
        self.stuck = int(state.get("stuck", 0))
        if self.dynamic and "hysteresis" in state:
            self.hysteresis = int(state["hysteresis"])
            self.value = max(float(state["loss_scale"]), self.rule.min_loss_scale)
