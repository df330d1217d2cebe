"""Finds the layouts of a model on some GPUs that fit, and ranks them by speed: no output.

    answer = rank(Asked(model, training, machine, 384))
    answer.ranked[0].layout, answer.rejected

Every layout is either ranked, or rejected with a reason. `Asked` is the question: the model, the
training options, the machine, the number of GPUs, and the options of the layout that are fixed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from config.batch_schedule import BatchSchedule
from config.schema import Layout, batch_schedule
from config.validation import check_shape
from planner import risk
from planner.enumeration import MICRO_BATCHES, Asked, Rejected, every_layout
from planner.ranking import Ranking
from planner.step_time import Prediction, predict
from schedules.choice import decide_layout

# The schedule of --schedule auto is searched for this number of layouts, the fastest with 1F1B.
SEARCHED = 8


@dataclass(frozen=True)
class Ranked:
    """A layout that fits, and its prediction."""

    layout: Layout
    prediction: Prediction
    rampup: str  # the result of `rampup_verdict`: "fits", "-", or a batch that does not divide


class Answer(NamedTuple):
    """The planner's answer.

    ranked: layouts that fit, the fastest first. rejected: layouts that cannot run, with reasons.
    slower: the number of places (tp, pp and micro-batch) that were not ranked because enough faster
    layouts were found. plain: the fastest layouts among `Table.plain_rows`, with risky layouts.
    """

    ranked: list[Ranked]
    rejected: list[Rejected]
    slower: int
    plain: list[Ranked]


def rank(
    asked: Asked,
    refusal: Callable[[Layout], str] = lambda layout: "",
    accepted: float = risk.DEFAULT,
    most: float = math.inf,
    plain: bool = False,
    every: bool = False,
) -> Answer:
    """Return the layouts on the GPUs of a question, the fastest first, and the rejected layouts.

    For each tp, pp and micro-batch the fastest layout without risk is ranked. Risky layouts, whose
    probability of running out of memory is above `accepted`, are ranked if they are faster.

    refusal: returns the reason why a layout that fits cannot run, or "".
    most: the number of layouts without risk to rank.
    plain: whether the answer has the fastest plain layouts too.
    every: whether to rank all layouts without risk, or if there are more than `most`, those that
    are likely the fastest; `slower` then counts the layouts that are not ranked.

    Raise UserError if the model or the ramp-up of the batch is impossible.
    """
    check_shape(asked.model)
    if asked.fixed.get("schedule") == "auto":
        fixed = asked.fixed | {"schedule": "1f1b", "vocab_pp": False}

        def refusal_of_auto(layout: Layout) -> str:
            return refusal(replace(layout, schedule="auto"))

        with_1f1b = rank(asked._replace(fixed=fixed), refusal_of_auto, accepted, most, plain)
        return with_1f1b._replace(
            ranked=_searched(with_1f1b.ranked, asked),
            plain=_searched(with_1f1b.plain, asked),
        )
    table, rejected = every_layout(asked)
    if table is None:
        return Answer([], rejected, 0, [])
    ranking = Ranking(table, accepted, refusal)
    if every:
        ranking.run_all(most)
    else:
        ranking.run(most)
    plain_layouts = []
    if plain and len(rows := table.plain_rows()):
        plain_ranking = Ranking(table.of_rows(rows), accepted, refusal)
        plain_ranking.run(most=1)
        plain_layouts = _in_order(plain_ranking)
    rejected = rejected + ranking.rejected()
    return Answer(_in_order(ranking), rejected, ranking.slower, plain_layouts)


def _in_order(ranking: Ranking) -> list[Ranked]:
    """Return the layouts of a ranking, the fastest first, with --ep filled in."""
    asked = ranking.table.asked
    schedule = batch_schedule(asked.training, asked.model.seq_length)
    layouts = []
    for line in sorted(ranking.ranked, key=lambda line: line.prediction.seconds):
        verdict = rampup_verdict(line.layout, schedule)
        job = asked.job(line.layout)
        layouts.append(Ranked(job.layout_with_ep, line.prediction, verdict))
    return layouts


def _searched(ranked: list[Ranked], asked: Asked) -> list[Ranked]:
    """Return layouts that were ranked with 1F1B as layouts with --schedule auto, in order of speed.

    The first SEARCHED layouts are predicted with the schedule that the search finds. The others
    keep the prediction of 1F1B: in simulation the searched schedule is never slower.
    """
    with_auto = []
    for number, line in enumerate(ranked):
        auto_layout = replace(line.layout, schedule="auto")
        prediction = line.prediction
        if number < SEARCHED:
            micro_batches = asked.job(line.layout).micro_batches
            layout, _ = decide_layout(asked.model, auto_layout, micro_batches)
            searched = predict(*asked.job(layout))
            if searched.fits and searched.seconds < prediction.seconds:
                prediction = searched
        with_auto.append(replace(line, layout=auto_layout, prediction=prediction))
    return sorted(with_auto, key=lambda line: line.prediction.seconds)


# ---- Batch-size ramp-up --------------------------------------------------------------------------


def rampup_verdict(layout: Layout, schedule: BatchSchedule) -> str:
    """Return "fits" if every batch of the ramp-up is a multiple of micro-batch x dp.

    Otherwise the text names the first batch that is not; without a ramp-up it is "-".
    """
    levels = schedule.levels()
    if len(levels) == 1:
        return "-"
    multiple = layout.micro_batch_size * layout.dp
    for level in levels:
        if level.batch % multiple:
            return f"batch {level.batch} does not divide by {multiple}"
    return "fits"


def allowed(layout: Layout, batch: int, node: int, most_nodes: int) -> list[dict[str, Any]]:
    """Return the numbers of nodes, up to `most_nodes`, with which a layout can run a batch.

    The keys of a row are `nodes`; `dp`, which divides the batch; and `micro_batches`, the sizes in
    MICRO_BATCHES that divide a replica's share of the batch. node: GPUs of a node.
    """
    rows = []
    gpus_of_replica = layout.tp * layout.pp * layout.cp
    for nodes in range(1, most_nodes + 1):
        dp, unused_gpus = divmod(nodes * node, gpus_of_replica)
        if unused_gpus == 0 and batch % dp == 0:
            sizes = [size for size in MICRO_BATCHES if batch // dp % size == 0]
            rows.append({"nodes": nodes, "dp": dp, "micro_batches": sizes})
    return rows
