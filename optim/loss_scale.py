"""The factor that keeps fp16 gradients above the smallest fp16 number.

The loss is multiplied by it before the backward pass, the gradients are divided by it before the
update. An overflow anywhere in the world skips the step everywhere; zero.py finds it in the
gradient norm, which every rank has anyway.
"""

from config.messages import UserError
from config.schema import Training


class LossScale:
    """The scale of a run: dynamic for fp16 unless --loss-scale fixes it, 1 for other precisions.

    As in Megatron-LM (megatron/core/optimizer/grad_scaler.py): an overflow costs one of
    --loss-scale-hysteresis; when it is used up, each further overflow halves the scale. After
    --loss-scale-window good steps in a row it doubles and the hysteresis is full again. Unlike
    there, a run that overflows at the smallest scale for --max-overflows steps in a row ends.
    """

    def __init__(self, training: Training):
        self.training = training
        fp16 = training.precision == "fp16"
        self.dynamic = fp16 and not training.loss_scale
        self.value = 1.0
        if fp16:
            self.value = training.loss_scale or 2.0**training.initial_loss_scale_power
        self.good = 0
        self.hysteresis = training.loss_scale_hysteresis
        self.stuck = 0

    def update(self, overflow: bool) -> None:
        """Take note of a step; equal on all ranks, for the overflow is. UserError ends the run."""
        t = self.training
        if not overflow:
            self.good = self.good + 1
            self.stuck = 0
            if self.dynamic and self.good == t.loss_scale_window:
                self.value = self.value * 2
                self.good = 0
                self.hysteresis = t.loss_scale_hysteresis
            return
        self.good = 0
        self.hysteresis -= 1
        if not self.dynamic or self.value <= t.min_loss_scale:
            self.stuck += 1
        elif self.hysteresis <= 0:
            self.value = max(self.value / 2, t.min_loss_scale)
        if t.precision == "fp16" and self.stuck >= t.max_overflows:
            kind = "smallest" if self.dynamic else "fixed"
            raise UserError(
                f"gradients overflowed in {self.stuck} steps in a row at the {kind} loss scale "
                f"{self.value:g}: fp16 cannot hold them; resume from the newest checkpoint with "
                f"--precision bf16, or with a lower --lr"
            )

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        counts = {"good_steps": self.good, "hysteresis": self.hysteresis, "stuck": self.stuck}
        return {"loss_scale": self.value, **counts}

    def load(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's state; what the options fix stays as they say."""
        self.good, self.stuck = int(state.get("good_steps", 0)), int(state.get("stuck", 0))
        if self.dynamic and "hysteresis" in state:
            self.hysteresis = int(state["hysteresis"])
            self.value = max(float(state["loss_scale"]), self.training.min_loss_scale)
