"""Answers `plan.py ladder`: what losses of small runs say about a large one before it runs.

    python plan.py ladder runs/ladder/* --for-run run.toml --write expected.json

Losses of runs with one recipe are fitted by E + s x, where x = A / N^alpha + B / D^beta (and a term
of depth) are the terms of a scaling law (scaling_laws.py) for N parameters and D tokens. E, what
the data leaves at least, and s are of these runs; the exponents are the law's. The interval is that
of 9 in 10 predictions by the residuals of the fit (Student's t), widened by what the other laws
predict and by LEAST.

The curve within a run is taken from the ladder too: runs of one recipe whose tokens grow with their
parameters have one curve if the loss above E is divided by its value at the end and tokens by those
of the run (S. Qiu et al., "Scaling collapse", arXiv 2507.02119). `train.py --expect` reads it.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from architecture import model_stats
from base import paths
from base.errors import RunError, UserError
from config.command_line import parse
from config.schema import Config
from config.timeline import Timeline
from tools.planner.questions import Answer
from tools.planner.run_files import config_of, facts_of, rows_of
from tools.planner.scaling_laws import LAWS, Law
from tools.report.text_table import columns

FEWEST = 3  # runs of a fit
LAST = 0.02  # the loss of a run is the mean over this share of its steps, LAST_STEPS at least
LAST_STEPS = 10
LEAST = 0.005  # half of the interval is this share of the loss at least: seeds differ so much
FARTHEST = 64.0  # parameters over those of the largest run, beyond which a prediction is a guess
SURE = 0.02  # half of an interval over the loss, up to which the answer is to go on
# Options that all runs of a ladder and the large run have alike, by their group.
RECIPE = {
    "model": ("vocab_size", "seq_length", "mup", "mup_base_layers", "mup_base_head_size"),
    "training": (
        *("optimizer", "lr", "min_lr", "lr_schedule", "weight_decay", "init_std"),
        *("adam_beta1", "adam_beta2"),
    ),
}
POINTS = 64  # of the curve that --write writes
# Student's t of 0.95, for 1, 2, ... degrees of freedom; the last for all larger ones.
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.75)


@dataclass(frozen=True)
class Rung:
    """A run of the ladder. tokens, losses: of its steps, ascending. loss: at its end."""

    path: str
    config: Config
    parameters: int
    layers: int
    tokens: tuple[int, ...]
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The mean loss of its last steps."""
        return statistics.fmean(self.losses[-max(LAST_STEPS, int(LAST * len(self.losses))) :])

    @property
    def end(self) -> int:
        """The tokens at its end."""
        return self.tokens[-1]


@dataclass(frozen=True)
class Fit:
    """Losses E + s x of runs by a law. sigma: the standard deviation of the residuals."""

    law: Law
    e: float
    s: float
    sigma: float
    x: tuple[float, ...]

    def loss(self, parameters: int, tokens: float, layers: int) -> float:
        """Return the predicted loss."""
        return self.e + self.s * terms(self.law, parameters, tokens, layers)

    def spread(self, parameters: int, tokens: float, layers: int) -> float:
        """Return half of the interval of 9 in 10 losses, by the residuals alone."""
        x = terms(self.law, parameters, tokens, layers)
        count, mean = len(self.x), statistics.fmean(self.x)
        leverage = 1 + 1 / count + (x - mean) ** 2 / sum((each - mean) ** 2 for each in self.x)
        return STUDENT[min(count - 2, len(STUDENT)) - 1] * self.sigma * math.sqrt(leverage)


@dataclass(frozen=True)
class Prediction:
    """The loss of a large run. low, high: of 9 in 10 cases. by_law: what each law predicts."""

    loss: float
    low: float
    high: float
    by_law: dict[str, float]


def terms(law: Law, parameters: float, tokens: float, layers: int) -> float:
    """Return the terms of a law that fall with size: its loss without the constant."""
    return law.loss(int(parameters), tokens, layers) - law.e


def read(path: str) -> Rung:
    """Return a run of the ladder; UserError if it has no run.json, too few steps or no end."""
    config = config_of(path)
    rows = [row for row in rows_of(Path(path) / "metrics.jsonl") if "loss" in row]
    rows = [row for row in rows if row.get("consumed_tokens") and row["loss"] is not None]
    if len(rows) < 2 * LAST_STEPS:
        raise RunError(
            f"{path} has {len(rows)} steps with a loss: a run of a ladder needs {2 * LAST_STEPS}"
        )
    tokens = tuple(int(row["consumed_tokens"]) for row in rows)
    losses = tuple(float(row["loss"]) for row in rows)
    data = facts_of(path)["config"].get("data", {}).get("data")
    if data:
        config = replace(config, data=replace(config.data, data=tuple(data)))
    planned = tokens_of(config)
    if tokens[-1] < planned:
        raise RunError(
            f"{path} ended at {tokens[-1]:,} of {planned:,} tokens: a run of a ladder is whole, "
            "since its loss falls the most when its rate does; --resume goes on"
        )
    model = config.model
    return Rung(path, config, model_stats.parameters(model), model.layers, tokens, losses)


def fit(rungs: Sequence[Rung], law: Law) -> Fit:
    """Return the fit of runs by a law; UserError if there are too few, or all are alike."""
    if len(rungs) < FEWEST:
        raise UserError(f"a ladder has {FEWEST} runs or more, not {len(rungs)}")
    x = [terms(law, rung.parameters, rung.end, rung.layers) for rung in rungs]
    if max(x) / min(x) < 1.02:
        raise UserError(
            f"the {len(rungs)} runs are too alike for a fit: their terms by {law.name} are "
            f"{min(x):.4g} to {max(x):.4g}, and a ladder needs 2% between them: add a smaller or "
            "larger run"
        )
    losses = [rung.loss for rung in rungs]
    s, e = np.polyfit(x, losses, 1)
    residuals = [loss - (e + s * each) for loss, each in zip(losses, x, strict=True)]
    sigma = math.sqrt(sum(each**2 for each in residuals) / (len(x) - 2))
    return Fit(law, float(e), float(s), sigma, tuple(x))


def check_recipe(rungs: Sequence[Rung], target: str | None, large: Config | None) -> None:
    """Raise UserError if runs differ in more than their sizes, lengths and batches.

    Then their losses are not those of one law. target, large: the run file of the large run, and
    its options, which must be the same; or None.
    """
    runs = [(rung.path, rung.config) for rung in rungs]
    runs += [(target, large)] if target and large else []
    first, of_first = runs[0]
    for path, config in runs[1:]:
        for name, value in recipe_of(config).items():
            if value != (other := recipe_of(of_first)[name]):
                raise UserError(
                    f"the runs of a ladder have one recipe, but {name} is {other} in {first} and "
                    f"{value} in {path}"
                )


def recipe_of(config: Config) -> dict[str, Any]:
    """Return what all runs of a ladder have alike. Of the corpora it has the names, not folders."""
    values = {
        name: getattr(getattr(config, group), name)
        for group, names in RECIPE.items()
        for name in names
    }
    return values | {"data": " ".join(Path(str(word)).name for word in config.data.data)}


def predict(rungs: Sequence[Rung], law: Law, model_of: Config, tokens: float) -> Prediction:
    """Return the loss of a run with a model after so many tokens; law: the first one's."""
    size, layers = model_stats.parameters(model_of.model), model_of.model.layers
    first = fit(rungs, law)
    loss = first.loss(size, tokens, layers)
    by_law = {each.name: fit(rungs, each).loss(size, tokens, layers) for each in LAWS.values()}
    half = max(first.spread(size, tokens, layers), LEAST * loss)
    low = min(loss - half, *by_law.values())
    high = max(loss + half, *by_law.values())
    return Prediction(loss, low, high, by_law)


def ladder(runs: Sequence[str], target: str | None, law: str | None, write: str | None) -> Answer:
    """Return the answer of `plan.py ladder`: the fit of some runs, and the loss of a large one.

    runs: their folders. target: the run file of the large one, or None. law: a name in LAWS. write:
    the file of the curve that the large run should follow. Raise UserError if they do not fit.
    """
    if law and law not in LAWS:
        raise UserError(f"--law {law!r}: there are {', '.join(LAWS)}")
    if write and not target:
        raise UserError("--write writes the curve of the run of --for-run: give its file")
    rungs = sorted((read(path) for path in runs), key=lambda rung: rung.parameters)
    config = parse(["--config", target]) if target else None
    found = fit(rungs, LAWS[law or "chinchilla"])
    check_recipe(rungs, target, config)
    lines = columns([HEADS, *(_row(rung, found) for rung in rungs)], HEADS[:1])
    off = max(abs(rung.loss / _fitted(rung, found) - 1) for rung in rungs)
    lines.append(
        f"fit: {found.e:.4f} + {found.s:.4g} x the terms of {found.law.name} "
        f"({found.law.source}); the runs are off by up to {off:.2%}"
    )
    data: dict[str, Any] = {"e_nats": found.e, "s_factor": found.s, "sigma_nats": found.sigma}
    data["off_fraction"] = off
    if not target or not config:
        return Answer("\n".join(lines), data)
    tokens = tokens_of(config)
    said = predict(rungs, found.law, config, tokens)
    size = model_stats.parameters(config.model)
    lines.append(
        f"{target}: {size:,} parameters, {tokens:,} tokens: loss {said.loss:.4f}, in 9 of 10 cases "
        f"{said.low:.4f} to {said.high:.4f}"
    )
    others = {name: loss for name, loss in said.by_law.items() if name != found.law.name}
    lines += [f"  by {name}: {loss:.4f}" for name, loss in others.items()]
    lines.append(advice(rungs, found, said, size))
    if write:
        paths.write_file(
            write, json.dumps(expected(rungs, found, said, tokens, size), indent=1) + "\n"
        )
        lines.append(f"wrote {write}: python train.py --config {target} --expect {write}")
    data |= {"loss_nats": said.loss, "between_nats": [said.low, said.high]}
    data["by_law_nats"] = said.by_law
    data |= {"parameters": size, "tokens": tokens}
    return Answer("\n".join(lines), data)


def advice(rungs: Sequence[Rung], found: Fit, said: Prediction, parameters: int) -> str:
    """Return a line on whether to go on, with the reason."""
    farther = parameters / rungs[-1].parameters
    half = (said.high - said.low) / 2 / said.loss
    if found.s <= 0 or found.e <= 0:
        return (
            "stop: the losses do not fall with size as a scaling law does; look at the runs' rates"
        )
    if farther > FARTHEST:
        return (
            f"not sure: the large run has {farther:.0f} times the parameters of the largest of the "
            f"ladder, above {FARTHEST:.0f}: add a larger run"
        )
    if half > SURE:
        return f"not sure: the interval is {half:.1%} of the loss on each side: add runs or seeds"
    return f"go on: the interval is {half:.1%} of the loss on each side"


def tokens_of(config: Config) -> int:
    """Return the tokens of a run; UserError if it has no length."""
    training = config.training
    if training.steps is None and training.train_samples is None and config.plan is None:
        raise UserError("the run has no length: give its steps or train_samples")
    timeline = Timeline(config)
    return timeline.tokens_at(timeline.total_samples)


def expected(
    rungs: Sequence[Rung], found: Fit, said: Prediction, tokens: int, parameters: int
) -> dict[str, Any]:
    """Return the curve that a run of so many tokens and parameters should follow, for --expect.

    A run's loss above E over that at its end is a function of the share of its tokens; the curve is
    the mean of the ladder's, and the band has the interval of the end and how far the runs differ.
    """
    shares = [(i + 1) / POINTS for i in range(POINTS)]
    ratios = [[_ratio(rung, found, share) for rung in rungs] for share in shares]
    above = said.loss - found.e
    curve = [found.e + above * statistics.fmean(each) for each in ratios]
    # Ratios are near 1 at the end, where the interval of the prediction is all there is.
    spread = [above * statistics.pstdev(each) for each in ratios]
    low = [c - (said.loss - said.low) - 2 * s for c, s in zip(curve, spread, strict=True)]
    high = [c + (said.high - said.loss) + 2 * s for c, s in zip(curve, spread, strict=True)]
    return {
        "tokens": [round(share * tokens) for share in shares],
        "loss": curve,
        "low": low,
        "high": high,
        "source": f"plan.py ladder, {len(rungs)} runs by {found.law.name}",
        "parameters": parameters,
    }


def _ratio(rung: Rung, found: Fit, share: float) -> float:
    """Return a run's loss above E at a share of its tokens, over that at its end."""
    last = np.searchsorted(rung.tokens, share * rung.end, side="right")
    first = max(0, int(last) - LAST_STEPS)
    here = statistics.fmean(rung.losses[first : max(int(last), first + 1)])
    return (here - found.e) / (rung.loss - found.e)


HEADS = ["run", "parameters", "tokens", "loss", "fitted", "off"]


def _fitted(rung: Rung, found: Fit) -> float:
    """Return the loss of a run by the fit."""
    return found.loss(rung.parameters, rung.end, rung.layers)


def _row(rung: Rung, found: Fit) -> list[str]:
    """Return a line of the table."""
    fitted = _fitted(rung, found)
    size, tokens = f"{rung.parameters:,}", f"{rung.end:,}"
    off = f"{rung.loss / fitted - 1:+.2%}"
    return [rung.path, size, tokens, f"{rung.loss:.4f}", f"{fitted:.4f}", off]
