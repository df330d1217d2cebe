"""Which layouts there are, which fit, and which is fastest: the planner's answer as data.

    answer = rank(Asked(model, training, machine, 384))
    answer.ranked[0].layout, answer.rejected

Every layout is either ranked or rejected with a sentence. Nothing here prints.
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

SEARCHED = 8  # layouts for which --schedule auto is searched: the fastest with 1F1B


@dataclass(frozen=True)
class Ranked:
    """A layout that fits, and its prediction."""

    layout: Layout
    prediction: Prediction
    rampup: str  # a verdict: "fits", or why some batch of the ramp-up does not divide


class Answer(NamedTuple):
    """The layouts that run, the fastest first; those that cannot; and how many places (tp, pp and
    micro-batch) have slower layouts than those asked for. plain: the fastest of the kind that
    measured runs have, those that are risky among them.
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
    """The layouts on some GPUs, fastest step first, and all that cannot run, with reasons.

    Of those that are alike in tp, pp and micro-batch the fastest is ranked, and if its risk of
    running out of memory is more than `accepted`, the fastest below that too. refusal: why else a
    layout cannot run, or "". most: how many safe layouts are ranked. plain: whether the answer has
    the fastest plain ones too. every: rank all layouts whose risk is at most `accepted`, or of more
    than `most` those that are likely the fastest; `slower` counts the others. Raises UserError if
    the model itself, or the ramp-up of the batch, is impossible.
    """
    check_shape(asked.model)
    if asked.fixed.get("schedule") == "auto":
        fixed = asked.fixed | {"schedule": "1f1b", "vocab_pp": False}
        as_auto = lambda layout: refusal(replace(layout, schedule="auto"))  # noqa: E731
        found = rank(asked._replace(fixed=fixed), as_auto, accepted, most, plain)
        return found._replace(
            ranked=_searched(found.ranked, asked),
            plain=_searched(found.plain, asked),
        )
    table, rejected = every_layout(asked)
    if table is None:
        return Answer([], rejected, 0, [])
    ranking = Ranking(table, accepted, refusal)
    if every:
        ranking.run_all(most)
    else:
        ranking.run(most)
    simple = []
    if plain and len(rows := table.plain_rows()):
        of_plain = Ranking(table.of_rows(rows), accepted, refusal)
        of_plain.run(most=1)
        simple = _in_order(of_plain)
    return Answer(_in_order(ranking), rejected + ranking.rejected(), ranking.slower, simple)


def _in_order(ranking: Ranking) -> list[Ranked]:
    """The ranked layouts, the fastest first."""
    asked = ranking.table.asked
    schedule = batch_schedule(asked.training, asked.model.seq_length)
    found = []
    for line in sorted(ranking.ranked, key=lambda line: line.prediction.seconds):
        verdict = rampup_verdict(line.layout, schedule)
        found.append(Ranked(asked.job(line.layout).layout_with_ep, line.prediction, verdict))
    return found


def _searched(ranked: list[Ranked], of: Asked) -> list[Ranked]:
    """The fastest layouts, priced with the schedule that --schedule auto finds for each.

    The others keep the price of 1F1B, of which auto is never slower in simulation.
    """
    found = []
    for number, one in enumerate(ranked):
        asked = replace(one.layout, schedule="auto")
        prediction = one.prediction
        if number < SEARCHED:
            layout, _ = decide_layout(of.model, asked, of.job(one.layout).micro_batches)
            searched = predict(*of.job(layout))
            if searched.fits and searched.seconds < prediction.seconds:
                prediction = searched
        found.append(replace(one, layout=asked, prediction=prediction))
    return sorted(found, key=lambda one: one.prediction.seconds)


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
