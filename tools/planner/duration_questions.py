"""Answers two questions of plan.py: `days`, how long training takes, and `rampup`, on what it runs.

print(days(question).text)      # a Question as in tools/planner/questions.py

A question has the planner's flags (`options`), the configuration of a run and a machine. A ramp-up
increases the batch size during a run; a level is a batch size with the steps that have it.
"""

import math
from argparse import Namespace
from dataclasses import asdict, replace
from typing import Any

from base.errors import LayoutError, UserError
from config import validation
from config.batch_schedule import Level
from config.timeline import Timeline
from costs.job import Job
from costs.step_time import predict
from tools.planner import cost, layouts
from tools.planner.found_layouts import where_it_fits
from tools.planner.layout_table import notes, ranked_lines, risk_of_fitting
from tools.planner.questions import Answer, Question

DAY = 86400.0
MOST_NODES = 10_000  # `days --days` tries no more nodes than this
FACTORS = (2, 3, 5, 7)  # of the numbers of nodes that it tries
FASTER = 1.5  # a GPU may be as much faster on more nodes, because less is recomputed there


def days(question: Question) -> Answer:
    """Return the answer of `plan.py days`: how long the training on --tokens tokens takes.

    The run has the fastest layout whose risk of running out of memory is at most --risk; options of
    the layout that the user gave are fixed. Raise UserError if no layout fits.
    """
    where = f"{question.gpus} GPUs of {question.machine.name}"
    plan = question.config.plan
    tokens = question.options.tokens or (plan.train_tokens if plan else None)
    if not tokens:
        raise UserError("how many tokens? give --tokens, such as --tokens 450e9")
    if question.options.days:
        return _nodes_for(question, tokens)
    answer = question.rank(most=1)
    safe = [line for line in answer.ranked if line.prediction.risk <= question.options.risk]
    if not safe:
        rejected = answer.rejected
        reasons = [entry.reason for entry in rejected] if len(rejected) == 1 else []
        if answer.ranked:
            reasons = [risk_of_fitting(question, answer.ranked)]
        why = "; ".join([*reasons, *where_it_fits(question, answer)])
        raise LayoutError(f"no layout fits on {where}: {why}".removesuffix(": "))
    best = safe[0]
    step = best.prediction.seconds
    seconds = tokens / best.prediction.tokens_per_second
    by_phase = _phases(question, best, tokens)
    if by_phase:
        seconds = sum(row["seconds"] for row in by_phase)
    # The duration is as uncertain as the seconds of a step.
    low, high = (seconds * end / step / DAY for end in best.prediction.interval)
    rates = cost.rates_of(question.options, question.machine)
    data = {
        "days": seconds / DAY,
        "between_days": [low, high],
        "tokens": tokens,
        "gpus": question.gpus,
        "global_batch_size": question.config.training.global_batch_size,
        "risk_fraction": best.prediction.risk,
        "layout": asdict(best.layout),
        "step_seconds": step,
        "phases": by_phase,
        **rates.of(question.gpus, seconds),
    }
    lines = [
        f"{seconds / DAY:.1f} days ({low:.1f} to {high:.1f} in 9 of 10 cases) for {tokens:.3g} "
        f"tokens on {where}, without stops and ramp-up",
        f"{question.batch}; {risk_of_fitting(question, [])}",
        *(
            f"phase {row['name']}: {row['seconds'] / DAY:.2f} days for {row['tokens']:.3g} tokens, "
            f"{row['global_batch_size']} samples of {row['seq_length']} tokens in "
            f"{row['step_seconds']:.3g} s"
            for row in by_phase
        ),
        rates.sentence(question.gpus, seconds),
        *ranked_lines([best], question),
        *notes([best]),
    ]
    return Answer("\n".join(lines), data)


def _nodes_for(question: Question, tokens: float) -> Answer:
    """Return the answer of `plan.py days --days DAYS`: the fewest nodes that train within them.

    Only numbers of nodes that are products of FACTORS are tried: with others few layouts divide the
    batch. The search begins where FASTER nodes would do. Raise UserError if GPUs are given too, or
    no number of nodes up to MOST_NODES trains so fast.
    """
    options, node = question.options, question.machine.node
    if options.gpus or options.nodes:
        raise UserError("--days asks for the number of nodes: leave out --gpus and --nodes")
    limit = options.days * DAY
    least, _ = question.fewest_nodes()

    def seconds(nodes: int) -> float:
        """Return the seconds of the training on some nodes; infinite if no layout fits."""
        here = Namespace(**vars(options) | {"nodes": nodes})
        lines = replace(question, options=here).rank(most=1).ranked
        safe = [line for line in lines if line.prediction.risk <= options.risk]
        if not safe:
            return math.inf
        rows = _phases(question, safe[0], tokens)
        if rows:
            return sum(row["seconds"] for row in rows)
        return tokens / safe[0].prediction.tokens_per_second

    fastest = math.inf
    nodes = _product_from(least)
    while (now := seconds(nodes)) > limit:
        fastest = min(fastest, now)
        needed = math.ceil(nodes * now / limit / FASTER) if math.isfinite(now) else nodes + 1
        nodes = _product_from(max(nodes + 1, needed))
        if nodes > MOST_NODES:
            raise UserError(
                f"no number of {question.machine.name} nodes trains {tokens:.3g} tokens in "
                f"{options.days:g} days with this batch: at best {fastest / DAY:.1f} days"
            )
    here = Namespace(**vars(options) | {"nodes": nodes, "days": None})
    found = days(replace(question, options=here))
    text = f"{nodes} nodes of {node} {question.machine.name} for {options.days:g} days:"
    return Answer(f"{text}\n{found.text}", {"nodes": nodes, **found.data})


def _product_from(number: int) -> int:
    """Return the smallest number that is at least `number` and a product of FACTORS alone."""
    rest = number
    for factor in FACTORS:
        while rest % factor == 0:
            rest //= factor
    return number if rest == 1 else _product_from(number + 1)


def _phases(question: Question, best: layouts.Ranked, tokens: float) -> list[dict[str, Any]]:
    """Return for each phase of --phases its tokens and seconds; [] without phases.

    best: the layout, which is chosen for the longest samples and the batch of the options. tokens:
    of the whole run. Raise UserError if the layout cannot divide a phase's batch.
    """
    run = question.config
    phases = Timeline(run).phases
    rows = []
    ends = [phase.tokens for phase in phases[1:]] + [tokens]
    for phase, end in zip(phases, ends):
        if end <= phase.tokens:
            continue
        layout = best.layout
        when = f" of phase {phase.name}"
        validation.check_batch(layout, "global-batch-size", phase.batch, when)
        validation.check_cut(layout, phase.length, when)
        training = replace(run.training, global_batch_size=phase.batch)
        model = replace(run.model, seq_length=phase.length)
        job = Job(model, best.priced, training, question.machine)
        step = predict(job, best.prediction.memory).seconds
        count = end - phase.tokens
        seconds = count / (phase.batch * phase.length) * step
        about = {"name": phase.name, "tokens": count, "seconds": seconds, "step_seconds": step}
        rows.append(about | {"global_batch_size": phase.batch, "seq_length": phase.length})
    return rows


def rampup(question: Question) -> Answer:
    """Return the answer of `plan.py rampup` without --nodes-by-batch: a line for each batch size.

    A line says when the batch size begins, for how many steps, and on how many nodes the layout can
    run it with which micro-batch sizes. Raise UserError without a ramp-up.
    """
    run, node = question.config, question.machine.node
    levels = Timeline(run).batches.levels()
    if len(levels) == 1:
        raise UserError(
            "which ramp-up? give --rampup-batch-size START INCREMENT SAMPLES, such as "
            "192 16 9765625, or --batch-schedule TOKENS:SIZE ..., such as 0:192 5B:1024"
        )
    replica = run.layout.tp * run.layout.pp * run.layout.cp
    # The most nodes that are listed: --gpus in nodes, rounded up, or --nodes. Without both it is as
    # many nodes as the first batch can use with one sample for each replica.
    most = -(-(question.options.gpus or 0) // node) or question.options.nodes
    most = most or -(-levels[0].batch * replica // node)
    data = []
    lines = []
    for level in levels:
        able = layouts.allowed(run.layout, level.batch, node, most)
        data.append(_level_data(level) | {"allowed": able})
        start = f"{level.batch:6}{level.first_step:12,}{level.consumed:12,}{level.steps or '':>8}"
        lines.append(f"{start}   {_allowed_text(able)}")
    # A number of replicas that divides this greatest common divisor can run every batch.
    divisor = math.gcd(*(level.batch for level in levels))
    every = layouts.allowed(run.layout, divisor, node, most)
    head = [
        f"on 1 to {most} nodes of {node} {question.machine.name}, {replica} GPUs a replica; "
        "nodes: micro-batch sizes",
        f"every batch runs on {_allowed_text(every)}",
        " batch  first step    consumed   steps   runs on",
    ]
    return Answer("\n".join(head + lines), {"levels": data, "every": every})


def _level_data(level: Level) -> dict[str, Any]:
    """Return a level of a ramp-up as data."""
    return {
        "global_batch_size": level.batch,
        "first_step": level.first_step,
        "consumed_samples": level.consumed,
        "steps": level.steps,
    }


def _allowed_text(rows: list[dict]) -> str:
    """Return a batch's numbers of nodes with their micro-batch sizes: "1: 1 2 4; 2: 1 2".

    rows: the result of `layouts.allowed`.
    """
    texts = [f"{row['nodes']}: {' '.join(map(str, row['micro_batches']))}" for row in rows]
    return "; ".join(texts) or "no number of nodes"
