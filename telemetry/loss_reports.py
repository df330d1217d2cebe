"""The loss monitor's reports: the row and the line of a spike, the error of a diverged run.

A run without a spike does not load this module.
"""

import math
from typing import Any

from checkpointing.state import Progress
from config.messages import UserError
from config.run_options import Run
from data import Samples


def row(
    iteration: int, loss: float, spike: dict[str, Any], samples: Samples, numbers: range
) -> dict[str, Any]:
    """Return the row of spikes.jsonl of a step that is a spike, with the documents of its samples.

    iteration, loss: the step's; a loss that is not finite is None in the row. spike: the
    result of LossMonitor.judge, and further fields. numbers: the numbers of the step's samples.
    """
    texts = []
    for number in numbers:
        # A span is a part of a sample that comes from one document.
        spans = [span._asdict() for span in samples.spans(number)]
        texts.append({"sample": number, "text": spans})
    finite_loss = loss if math.isfinite(loss) else None
    head = {"iteration": iteration, "loss": finite_loss}
    return head | spike | {"first_sample": numbers.start, "samples": texts}


def line(row: dict[str, Any], loss: float) -> str:
    """Return the beginning of the log's line about a spike: its value, the mean, and the samples.

    The caller adds where the samples are described. row: the spike's row of spikes.jsonl. loss: the
    step's loss, also if it is not finite.
    """
    mean = row["mean"]
    sigma = row["sigma"]
    last_sample = row["first_sample"] + len(row["samples"]) - 1
    samples = f"samples {row['first_sample']} to {last_sample}"
    if row["of"] == "loss":
        usual = "" if mean is None else f" against {mean:.4f} +- {sigma:.4f} before"
        return f"loss spike at iteration {row['iteration']}: {loss:.4f}{usual}; {samples}"
    # Mean and sigma are those of the norm's logarithm: exp() gives a norm and a factor.
    text = f"spike of the gradient norm at iteration {row['iteration']}: {row['grad_norm']:.4g}"
    usual = f" against {math.exp(mean):.4g} before, times or over {math.exp(sigma):.3g}"
    return f"{text}{usual}; {samples}"


def failure(run: Run, good: Progress, now: Progress, bad: int, saved: bool) -> UserError:
    """Return the error of a run that has diverged.

    good: the progress after the last step with a finite loss. now: the progress when it ends. bad:
    the number of steps since `good`. saved: whether the state after `good` is in a checkpoint.
    """
    samples = f"--skip-samples {good.consumed_samples}:{now.consumed_samples}"
    advice = f"no state after step {good.iteration} is saved; the samples since: {samples}"
    if saved:
        advice = f"the state after step {good.iteration} is in {run.out}/checkpoints; --resume "
        advice += f"auto {samples} continues from it without the samples since"
    return UserError(
        f"the loss was not finite for {bad} steps in a row, up to step {now.iteration} "
        f"(max-nan-steps is {run.max_nan_steps}): {advice}"
    )
