"""Finds the answer to `plan.py layouts`: enumerated, priced and sorted, as data.

    found = find(question)            # a Question as in questions.py
    found.safe[0].layout              # the layout that fits and is the best bet
    as_data(found)                    # the answer of --json; layout_table.py renders it as text

A layout is safe if its risk, the probability of running out of memory, is at most --risk, else
risky. A `line` is a layout with its prediction (layouts.Ranked).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from base.errors import UserError
from config.timeline import Timeline
from costs import hardware, networks
from costs.job import Job
from costs.networks import Network
from costs.step_time import at_other_network, predict
from tools.planner import cost, layouts
from tools.planner.layout_commands import command, flags_text, launcher, layout_flags
from tools.planner.questions import Question, prediction_data

# Without --network lines say which layout is the best bet on so many networks that are near.
SHOWN_NETWORKS = 2


@dataclass(frozen=True)
class OtherNetwork:
    """The best bet on another network, and seconds of a step there.

    first_seconds: of the layout that is the first at the rate of the question.
    """

    network: Network
    line: layouts.Ranked
    seconds: float
    first_seconds: float
    is_first: bool


@dataclass(frozen=True)
class FoundLayouts:
    """The layouts on the GPUs of a question.

    safe, risky: the least quantile first. slower: the number of further layouts that fit.
    by_median: the safe layout with the least predicted seconds, if it is not the first. elsewhere:
    where no layout is safe, sentences on what would fit. launcher: the arguments that start the
    ranks, empty if no layout fits.
    """

    question: Question
    safe: list[layouts.Ranked]
    risky: list[layouts.Ranked]
    rejected: list[layouts.Rejected]
    slower: int
    by_median: layouts.Ranked | None
    on_networks: list[OtherNetwork]
    elsewhere: list[str]
    launcher: list[str]


def find(question: Question) -> FoundLayouts:
    """Return the layouts that fit, ranked, and the rejected ones with reasons.

    All layouts are ranked only for --json and --picture, else --top layouts.
    """
    options = question.options
    most = math.inf if options.json or options.picture else options.top
    ranking = question.rank(most, median=True)
    safe = [line for line in ranking.ranked if line.prediction.risk <= options.risk]
    risky = [line for line in ranking.ranked if line.prediction.risk > options.risk]
    return FoundLayouts(
        question=question,
        safe=safe,
        risky=risky,
        rejected=ranking.rejected,
        slower=ranking.slower,
        by_median=_by_median(safe, ranking.median) if safe else None,
        on_networks=_on_networks(question, safe) if safe else [],
        elsewhere=[] if safe else where_it_fits(question, ranking),
        launcher=launcher(question) if ranking.ranked else [],
    )


def as_data(found: FoundLayouts) -> dict[str, Any]:
    """Return the answer as data: layouts with predictions (seconds, bytes), reasons, commands."""
    question = found.question
    data: dict[str, Any] = {
        "gpus": question.gpus,
        "machine": question.machine.name,
        "global_batch_size": question.config.training.global_batch_size,
        "ranked": [_as_data(line, question) for line in found.safe],
        "risky": [_as_data(line, question) for line in found.risky],
        "rejected": [entry.layout | {"reason": entry.reason} for entry in found.rejected],
        "on_networks": [
            {
                "network": other.network.name,
                "bytes_per_second": other.network.busbw,
                "step_seconds": other.seconds,
                "flags": layout_flags(other.line.layout, question),
            }
            for other in found.on_networks
        ],
    }
    if found.safe:
        data["launcher"] = found.launcher
        data["command"] = command(question, found.safe[0].layout)
        data["fastest_by_median"] = None
    if found.by_median:
        data["fastest_by_median"] = _as_data(found.by_median, question)
    return data


def has_networks(lines: list[layouts.Ranked]) -> bool:
    """Return whether lines are predicted at several rates of a network that nobody measured."""
    return any(line.prediction.at_networks for line in lines)


def _on_networks(question: Question, lines: list[layouts.Ranked]) -> list[OtherNetwork]:
    """Return which of some lines is the best bet on other networks, the nearest of them first.

    They are the SHOWN_NETWORKS of networks.toml that are nearest to the datasheet's rate and slower
    by a fifth, and the slowest. Return none if the rate is known, or does not matter here.
    """
    machine = question.machine
    if not has_networks(lines):
        return []
    run = question.config
    slower = [networks.load(name) for name in networks.names()]
    slower = [one for one in slower if one.busbw < 0.8 * machine.network.speed]
    nearest = sorted(slower, key=lambda one: -one.busbw)[:SHOWN_NETWORKS]
    found = []
    for network in dict.fromkeys([*nearest, *slower[:1]]):
        there = hardware.with_network(machine, network.busbw)

        def likely(line: layouts.Ranked, there: hardware.Machine = there) -> float:
            job = Job(run.model, line.priced, run.training, machine)
            widened = line.prediction.quantile / line.prediction.at_networks[-1]
            return at_other_network(line.prediction, job, there) * widened

        def seconds(line: layouts.Ranked, there: hardware.Machine = there) -> tuple[float, float]:
            job = Job(run.model, line.priced, run.training, there)
            prediction = predict(job, line.prediction.memory)
            return prediction.quantile, prediction.seconds

        # Two lines are simulated: the first one, and the one that is likely the best bet.
        best = min(lines[: question.options.top], key=likely)
        best = min(lines[0], best, key=seconds)
        is_first = best is lines[0]
        found.append(OtherNetwork(network, best, seconds(best)[1], seconds(lines[0])[1], is_first))
    return found


def _by_median(safe: list[layouts.Ranked], median: list[layouts.Ranked]) -> layouts.Ranked | None:
    """Return the layout with the least predicted seconds, or None if it is the first one.

    safe: the layouts by the quantile. median: the result of the search by seconds; the rates of the
    network differ between the two, so a line of the table may be faster still.
    """
    fastest = min([*safe, *median], key=lambda line: line.prediction.seconds)
    return None if fastest.layout == safe[0].layout else fastest


def where_it_fits(question: Question, answer: layouts.Ranking) -> list[str]:
    """Return a line that names a layout or a number of nodes with which the model would fit.

    Called if no layout is safe. It returns no line if memory is not the reason.
    """
    has_room = [entry.reason.startswith("out of memory") for entry in answer.rejected]
    if not answer.ranked and not any(has_room):
        return []
    if line := question.leanest(question.config.model, question.gpus):
        return [f"not as it was given, but {flags_text(line.layout, question)} fits"]
    try:
        nodes, line = question.fewest_nodes()
    except UserError as error:
        return [str(error)]
    hold = "node of {} holds" if nodes == 1 else "nodes of {} hold"
    hold = hold.format(question.machine.node)
    return [f"{nodes} {hold} it, with {flags_text(line.layout, question)}"]


def _as_data(line: layouts.Ranked, question: Question) -> dict[str, Any]:
    """Return a layout's entry in the JSON answer: options, prediction, flags, and costs."""
    more: dict[str, Any] = {
        "rampup": rampup(line, question),
        "flags": layout_flags(line.layout, question),
    }
    rates = cost.rates_of(question.options, question.machine)
    more |= rates.per_billion(question.gpus, line.prediction.tokens_per_second)
    return asdict(line.layout) | more | prediction_data(line.prediction)


def rampup(line: layouts.Ranked, question: Question) -> str:
    """Return as text whether a layout can run every batch size of the run's ramp-up.

    It is "fits", or the first batch size that does not fit, or "-" without a ramp-up.
    """
    return layouts.rampup_verdict(line.layout, Timeline(question.config).batches)
