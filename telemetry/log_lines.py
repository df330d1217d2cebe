"""Text that people read while a run trains.

    of_step(facts)         step 120/500 | loss 3.2104 | grad norm 0.812 | ... | 1:02:03 left

telemetry/log.py calls these functions.
"""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """A step's row of metrics.jsonl, and the means over the steps since the last log line.

    With --log-every N the means are over the last N steps.
    """

    row: dict[str, Any]
    total: int  # the run's last step
    loss: float  # mean
    seconds: float  # mean per step
    samples_per_second: float  # mean
    skipped: int  # number of steps so far whose update was skipped
    nan: int  # number of steps so far whose loss was not finite
    seconds_left: float  # estimate for the rest of the run

    @property
    def ratio(self) -> float:
        """The mean samples per second divided by the samples per second of the row's step."""
        return self.samples_per_second / (self.row["global_batch_size"] / self.row["seconds"])


def of_step(facts: Facts) -> str:
    """Return a step's log line; MFU is in it only where the device's peak FLOPS are known."""
    row = facts.row
    parts = [
        f" step {row['iteration']}/{facts.total}",
        f"loss {facts.loss:.4f}",
        f"grad norm {row['grad_norm']:.3f}",
        f"lr {row['learning_rate']:.2E}",
        f"{row['tokens_per_second'] * facts.ratio:,.0f} tokens/s",
        f"{row['peak_memory_bytes'] / 1e9:.1f} GB",
        f"{duration(facts.seconds_left)} left",
    ]
    if row["mfu"] is not None:
        parts.insert(5, f"MFU {row['mfu'] * facts.ratio:.1%}")
    if "expert_loads" in row:
        parts.append(f"busiest expert {max(row['expert_loads']):.2f} of the mean")
    if (epochs := _epochs(row)) is not None:
        parts.append(f"epoch {epochs:.3f}")
    parts += [f"{facts.skipped} skipped"] if facts.skipped else []
    parts += [f"{facts.nan} nan"] if facts.nan else []
    return " | ".join(parts)


def of_corpora(row: dict[str, Any]) -> str:
    """Return the line about several corpora that follows a step's log line, or "".

    The epoch of a run's only corpus is in the step's log line itself (`of_step`).
    """
    epochs = row.get("corpus_epochs", {})
    if len(epochs) < 2:
        return ""
    tokens = row["corpus_tokens"]
    parts = [f"{name}: {tokens[name]} tokens, {epochs[name]:.4f} epochs" for name in epochs]
    return "\n " + " | ".join(parts)


def _epochs(row: dict[str, Any]) -> float | None:
    """Return the epochs of the run's only corpus; None if the row has no or several corpora."""
    epochs = list(row.get("corpus_epochs", {}).values())
    return epochs[0] if len(epochs) == 1 else None


def of_evaluation(name: str, iteration: int, total: int, loss: float) -> str:
    """Return the log line of an evaluation; name: a split or a set of --eval-data.

    loss: the mean per token; its exponential is the perplexity.
    """
    perplexity = math.exp(min(loss, 100.0))
    return f" step {iteration}/{total} | {name} loss {loss:.4f} | perplexity {perplexity:.5g}"


def of_skipped_step(iteration: int, total: int, consumed: int, batch: int) -> str:
    """Return the log line of a step that was passed over: `batch` samples, up to `consumed`."""
    samples = f"{consumed - batch} to {consumed - 1}"
    return f" step {iteration}/{total} | passed over by --skip-samples: {samples}"


def duration(seconds: float) -> str:
    """Return seconds as text: `1:02:03` (hours, minutes, seconds), or `2d 1:02:03` with days."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"
