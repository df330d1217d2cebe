"""Finds the answer to `plan.py layouts`: enumerated, priced and sorted, as data.

    found = find(question)            # a Question as in questions.py
    found.safe[0].layout              # the fastest layout that fits
    as_data(found)                    # the answer of --json; layout_table.py renders it as text

A layout is safe if its risk, the probability of running out of memory, is at most --risk, else
risky. A layout is plain if real runs have measured such layouts (1F1B, without cp). A `line` is a
layout with its prediction (layouts.Ranked).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from base.errors import UserError
from config.timeline import Timeline
from costs import hardware
from costs.job import Job
from costs.step_time import at_other_network, predict
from tools.planner import cost, layouts
from tools.planner.layout_commands import command, flags_text, launcher, layout_flags
from tools.planner.questions import Question

# If the predicted times of two layouts differ by less than this factor, either may be the faster:
# predictions are 4 % off in the mean on machines on which they were fitted (docs/planning.md).
TOLD_APART = 1.06
# Without --network one line says which layout is the fastest at this rate: bytes/s out of a node
# that has a single adapter of 200 Gb/s.
ONE_ADAPTER = 25e9


@dataclass(frozen=True)
class OtherNetwork:
    """The fastest layout at another rate of the network, and seconds of a step there.

    first_seconds: of the layout that is the first at the rate of the question.
    """

    line: layouts.Ranked
    seconds: float
    first_seconds: float
    is_first: bool


@dataclass(frozen=True)
class FoundLayouts:
    """The layouts on the GPUs of a question.

    safe, risky: the fastest first. slower: the number of further layouts that fit. plain: the
    fastest plain layout, or empty. recommended: the plain layout to take in place of the first.
    elsewhere: where no layout is safe, sentences on what would fit. launcher: the arguments that
    start the ranks, empty if no layout fits.
    """

    question: Question
    safe: list[layouts.Ranked]
    risky: list[layouts.Ranked]
    rejected: list[layouts.Rejected]
    slower: int
    recommended: layouts.Ranked | None
    at_one_adapter: OtherNetwork | None
    elsewhere: list[str]
    launcher: list[str]


def find(question: Question) -> FoundLayouts:
    """Return the layouts that fit, ranked, and the rejected ones with reasons.

    All layouts are ranked only for --json and --picture, else --top layouts.
    """
    options = question.options
    most = math.inf if options.json or options.picture else options.top
    ranking = question.rank(most, plain=True)
    safe = [line for line in ranking.ranked if line.prediction.risk <= options.risk]
    risky = [line for line in ranking.ranked if line.prediction.risk > options.risk]
    return FoundLayouts(
        question=question,
        safe=safe,
        risky=risky,
        rejected=ranking.rejected,
        slower=ranking.slower,
        recommended=_recommended(safe[0], ranking.plain) if safe else None,
        at_one_adapter=_at_one_adapter(question, safe) if safe else None,
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
        "at_one_adapter": None,
    }
    if other := found.at_one_adapter:
        flags = layout_flags(other.line.layout, question)
        data["at_one_adapter"] = {"seconds": other.seconds, "flags": flags}
    if found.safe:
        data["launcher"] = found.launcher
        data["command"] = command(question, found.safe[0].layout)
        data["recommended"] = None
    if found.recommended:
        data["recommended"] = _as_data(found.recommended, question)
    return data


def has_networks(lines: list[layouts.Ranked]) -> bool:
    """Return whether lines are predicted at several rates of a network that nobody measured."""
    return any(line.prediction.at_networks for line in lines)


def _at_one_adapter(question: Question, lines: list[layouts.Ranked]) -> OtherNetwork | None:
    """Return which of some lines is the fastest if a node has one network adapter (ONE_ADAPTER).

    Return None if the network's rate is known, is not above this one, or does not matter on these
    GPUs.
    """
    machine = question.machine
    if not has_networks(lines) or machine.network.bandwidth <= ONE_ADAPTER:
        return None
    slow = hardware.with_network(machine, ONE_ADAPTER)
    run = question.config

    def likely(line: layouts.Ranked) -> float:
        job = Job(run.model, line.priced, run.training, machine)
        return at_other_network(line.prediction, job, slow)

    def seconds(line: layouts.Ranked) -> float:
        job = Job(run.model, line.priced, run.training, slow)
        return predict(job, line.prediction.memory).seconds

    # Two lines are simulated: the first one, and the one that is likely the fastest.
    best = min(lines[: question.options.top], key=likely)
    best = min(lines[0], best, key=seconds)
    return OtherNetwork(best, seconds(best), seconds(lines[0]), best is lines[0])


def _recommended(first: layouts.Ranked, plain: list[layouts.Ranked]) -> layouts.Ranked | None:
    """Return the plain layout to recommend instead of the first layout, or None.

    The prediction of a plain layout is more certain, because real runs have measured its kind. It
    is recommended unless the first layout is the same, is faster by more than TOLD_APART, or is so
    much faster at the slowest network that the plain one is not within its interval there. plain:
    the fastest plain layout, or an empty list.
    """
    if not plain or plain[0].layout == first.layout:
        return None
    simple, fastest = plain[0].prediction, first.prediction
    is_near = simple.seconds <= fastest.seconds * TOLD_APART
    is_near = is_near and simple.compared <= fastest.interval[1]
    return plain[0] if is_near else None


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
    return asdict(line.layout) | more | asdict(line.prediction)


def rampup(line: layouts.Ranked, question: Question) -> str:
    """Return as text whether a layout can run every batch size of the run's ramp-up.

    It is "fits", or the first batch size that does not fit, or "-" without a ramp-up.
    """
    return layouts.rampup_verdict(line.layout, Timeline(question.config).batches)
