"""The questions how long training takes, and what a batch-size ramp-up runs on.

print(days(question).text)      # a Question as in planner/questions.py
"""

import math
from dataclasses import asdict
from typing import Any

from config import schema
from config.messages import UserError
from planner import cost, layouts
from planner.layout_table import notes, ranked_lines, where_it_fits
from planner.questions import Answer, Question, Questions


def days(question: Question) -> Answer:
    """How long so many tokens take, on the fastest layout or the given one."""
    tokens, where = question.options.tokens, f"{question.gpus} GPUs of {question.machine.name}"
    if not tokens:
        raise UserError("how many tokens? give --tokens, such as --tokens 450e9")
    ranked, rejected, *_ = question.rank(most=1)
    if not ranked:
        only = [rejected[0].reason] if len(rejected) == 1 else []
        why = "; ".join([*only, *where_it_fits(question, rejected)])
        raise UserError(
            f"no layout fits on {where}: {why}" if why else f"no layout fits on {where}"
        )
    safe = [r for r in ranked if r.prediction.risk <= question.options.risk]
    best = (safe or ranked)[0]
    seconds = tokens / best.prediction.tokens_per_second
    between = [seconds * end / best.prediction.seconds / 86400 for end in best.prediction.interval]
    data = {"days": seconds / 86400, "between": between, "tokens": tokens, "gpus": question.gpus}
    data |= {"layout": asdict(best.layout), "seconds_per_step": best.prediction.seconds}
    rates = cost.rates_of(question.options, question.machine)
    data |= rates.of(question.gpus, seconds)
    low, high = between
    head = f"{seconds / 86400:.1f} days ({low:.1f} to {high:.1f} in 9 of 10 cases) for "
    head += f"{tokens:.3g} tokens on {where}, "
    lines = [head + "without stops and ramp-up", rates.sentence(question.gpus, seconds)]
    lines += [*ranked_lines([best], question), *notes([best])]
    return Answer("\n".join(lines), data)


def rampup(question: Question) -> Answer:
    """Every batch of a ramp-up: when, how long, on how many nodes, with which micro-batches."""
    run, node = question.config, question.machine.node
    levels = schema.batch_schedule(run.training, run.model.seq_length).levels()
    if len(levels) == 1:
        raise UserError(
            "which ramp-up? give --rampup-batch-size START INCREMENT SAMPLES, such as "
            "192 16 9765625, or --batch-schedule TOKENS:SIZE ..., such as 0:192 5B:1024"
        )
    replica = run.layout.tp * run.layout.pp * run.layout.cp
    most = -(-(question.options.gpus or 0) // node) or question.options.nodes
    most = most or -(-levels[0].batch * replica // node)  # one sample for each replica at first
    divisor = math.gcd(*(level.batch for level in levels))  # what divides it divides every batch
    everywhere = layouts.allowed(run.layout, divisor, node, most)
    lines = [
        f"on 1 to {most} nodes of {node} {question.machine.name}, {replica} GPUs a replica; "
        f"nodes: micro-batch sizes",
        f"every batch runs on {_allowed_text(everywhere)}",
        " batch  first step    consumed   steps   runs on",
    ]
    found = []
    for level in levels:
        every = layouts.allowed(run.layout, level.batch, node, most)
        steps = "" if level.steps is None else level.steps
        line = f"{level.batch:6}{level.first_step:12,}{level.consumed:12,}{steps:>8}   "
        lines.append(line + _allowed_text(every))
        found.append(asdict(level) | {"allowed": every})
    return Answer("\n".join(lines), {"levels": found, "every": everywhere})


def _allowed_text(every: list[dict[str, Any]]) -> str:
    found = [f"{one['nodes']}: {' '.join(map(str, one['micro_batches']))}" for one in every]
    return "; ".join(found) or "no number of nodes"


QUESTIONS: Questions = {
    "days": (days, "how long training takes"),
    "rampup": (rampup, "a batch-size ramp-up, checked before step 1"),
}
