"""Which layouts there are, which fit, and which is fastest: the planner's answer as data.

    answer = rank(model, training, machine, gpus=384)
    answer.ranked[0].layout, answer.rejected

Every layout is either ranked or rejected with a sentence. Nothing here prints.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from config.batch_schedule import BatchSchedule
from config.schema import Layout, ModelShape, Training, batch_schedule
from config.validation import check_shape
from planner import risk
from planner.enumeration import MICRO_BATCHES, Asked, Rejected, every_layout
from planner.hardware import Machine
from planner.job import Job
from planner.ranking import Ranking
from planner.step_time import Prediction, predict
from schedules.choice import decide_layout

SEARCHED = 8  # layouts for which --schedule auto is searched: the fastest with 1F1B


@dataclass(frozen=True)
class Ranked:
    """A layout that fits, and its prediction."""

    layout: Layout
    prediction: Prediction
    rampup: str  # a verdict: "fits", or why some batch of the ramp-up does not divide


class Answer(NamedTuple):
    """The layouts that run, the fastest first; those that cannot; and how many places (tp, pp and
    micro-batch) have slower layouts than those asked for.
    """

    ranked: list[Ranked]
    rejected: list[Rejected]
    slower: int


def rank(
    model: ModelShape,
    training: Training,
    machine: Machine,
    gpus: int,
    fixed: dict[str, Any] | None = None,
    refusal: Callable[[Layout], str] = lambda layout: "",
    accepted: float = risk.DEFAULT,
    most: float = math.inf,
) -> Answer:
    """The layouts on that many GPUs, fastest step first, and all that cannot run, with reasons.

    Of those that are alike in tp, pp and micro-batch the fastest is ranked, and if its risk of
    running out of memory is more than `accepted`, the fastest below that too. `fixed` holds Layout
    fields that are given, or lists of values to try for tp, pp and micro-batch; the rest is tried.
    refusal: why else a layout cannot run, or "". most: how many safe layouts are ranked. Raises
    UserError if the model itself, or the ramp-up of the batch, is impossible.
    """
    fixed = fixed or {}
    if fixed.get("schedule") == "auto":
        plain = fixed | {"schedule": "1f1b", "vocab_pp": False}
        asked = lambda layout: refusal(replace(layout, schedule="auto"))  # noqa: E731
        of_1f1b = rank(model, training, machine, gpus, plain, asked, accepted, most)
        return _searched(of_1f1b, model, training, machine)
    question = Asked(model, training, machine, gpus, fixed)
    return _ranked(question, refusal, accepted, most, every=False)


def rank_all(
    model: ModelShape,
    training: Training,
    machine: Machine,
    gpus: int,
    fixed: dict[str, Any],
    refusal: Callable[[Layout], str],
    accepted: float,
    most: float = math.inf,
) -> Answer:
    """Rank all layouts whose risk is at most `accepted`; of more than `most` those that are likely
    the fastest. The answer's `slower` counts the others. `--schedule auto` is not searched. The
    arguments are those of `rank`.
    """
    question = Asked(model, training, machine, gpus, fixed)
    return _ranked(question, refusal, accepted, most, every=True)


def _ranked(
    asked: Asked,
    refusal: Callable[[Layout], str],
    accepted: float,
    most: float,
    every: bool,
) -> Answer:
    """Do what `rank_all` does, or without `every` what `rank` does."""
    check_shape(asked.model)
    schedule = batch_schedule(asked.training, asked.model.seq_length)
    table, rejected = every_layout(asked)
    if table is None:
        return Answer([], rejected, 0)
    ranking = Ranking(table, accepted, refusal)
    if every:
        ranking.run_all(most)
        slower = ranking.slower
    else:
        ranking.run(most)
        slower = len(ranking.waiting)
    lines = sorted(ranking.ranked, key=lambda line: line.prediction.seconds)
    ranked = []
    for line in lines:
        job = Job(asked.model, line.layout, asked.training, asked.machine)
        verdict = rampup_verdict(line.layout, schedule)
        ranked.append(Ranked(job.layout_with_ep, line.prediction, verdict))
    return Answer(ranked, rejected + ranking.rejected(), slower)


def _searched(answer: Answer, model: ModelShape, training: Training, machine: Machine) -> Answer:
    """The fastest layouts, priced with the schedule that --schedule auto finds for each.

    The others keep the price of 1F1B, of which auto is never slower in simulation.
    """
    ranked, rejected, slower = answer
    found = []
    for one in ranked[:SEARCHED]:
        job = Job(model, one.layout, training, machine)
        asked = replace(one.layout, schedule="auto")
        layout, _ = decide_layout(model, asked, job.micro_batches)
        prediction = predict(model, layout, training, machine)
        faster = prediction.fits and prediction.seconds < one.prediction.seconds
        found.append(
            replace(one, layout=asked, prediction=prediction if faster else one.prediction)
        )
    rest = [replace(one, layout=replace(one.layout, schedule="auto")) for one in ranked[SEARCHED:]]
    return Answer(sorted(found + rest, key=lambda r: r.prediction.seconds), rejected, slower)


# ---- Batch-size ramp-up --------------------------------------------------------------------------


def rampup_verdict(layout: Layout, schedule: BatchSchedule) -> str:
    """`fits`, or the first batch of the ramp-up that the layout cannot run; `-` without one."""
    levels = schedule.levels()
    if len(levels) == 1:
        return "-"
    share = layout.micro_batch_size * layout.dp
    odd = next((level.batch for level in levels if level.batch % share), None)
    return "fits" if odd is None else f"batch {odd} does not divide by {share}"


def allowed(layout: Layout, batch: int, node: int, most_nodes: int) -> list[dict[str, Any]]:
    """The numbers of `nodes` of `node` GPUs, up to `most_nodes`, whose replicas divide a batch.

    Each with its `dp`, one replica having tp x pp x cp GPUs, and with those `micro_batches` of the
    ranking that divide the batch.
    """
    found, replica = [], layout.tp * layout.pp * layout.cp
    for nodes in range(1, most_nodes + 1):
        dp, rest = divmod(nodes * node, replica)
        if rest == 0 and batch % dp == 0:
            sizes = [size for size in MICRO_BATCHES if batch // dp % size == 0]
            found.append({"nodes": nodes, "dp": dp, "micro_batches": sizes})
    return found
