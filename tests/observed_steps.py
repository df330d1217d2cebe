"""Steps as a run's observers see them, for tests of one observer without a run."""

from typing import Any

from checkpointing.state import Progress
from telemetry.observer import Step


def observed_step(iteration: int, batch: int = 4, is_last: bool = False, **more: Any) -> Step:
    """Step `iteration` of a run whose batches have `batch` samples of 16 tokens, when it is done.

    more: further fields of Step.
    """
    consumed = (iteration - 1) * batch
    fields: dict[str, Any] = {"consumed": consumed, "length": 16, "lr": 1e-3}
    fields["done"] = Progress(iteration, consumed + batch)
    return Step(iteration=iteration, is_last=is_last, batch=batch, **fields | more)
