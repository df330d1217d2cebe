"""Answers `plan.py budget`: the largest model worth training on some GPU hours, and its tokens.

print(budget(question).text)      # a Question as in tools/planner/questions.py

A scaling law says with how many tokens a model of some size is best trained; the planner says how
fast the model trains on the GPUs. The size is the one for which the tokens take the whole budget.
"""

import math
import shlex
from argparse import Namespace
from dataclasses import asdict, dataclass, replace

from architecture import model_stats
from architecture.shape import ModelShape
from base import paths
from base.console import as_typed
from base.errors import LayoutError, UserError
from config.command_line import to_words
from tools.planner import cost, layouts, model_sizes, recipe
from tools.planner.layout_table import notes, ranked_lines
from tools.planner.questions import BILLION, Answer, Question
from tools.planner.scaling_laws import BATCH_LAWS, LAWS, Law
from tools.report.text_table import columns

DAY = 86400.0
MILLION = 1e6
DAYS = 30.0  # the length of a run if the user gives only GPU hours
START_MFU = 0.4  # with which the search for the size begins
TRIES = 6  # sizes that are tried at most
CLOSE = 0.015  # the search ends when a size changes by less than this
SHARES = {"half": 0.5, "the budget": 1.0, "twice": 2.0}  # budgets of the table


@dataclass(frozen=True)
class Found:
    """What a budget trains: a shape, its tokens, and the layout that trains it."""

    shape: ModelShape
    tokens: float
    seconds: float
    line: layouts.Ranked
    law: Law
    question: Question  # with this shape, GPUs and batch

    @property
    def parameters(self) -> int:
        """The number of parameters of the shape."""
        return model_stats.parameters(self.shape)

    @property
    def loss(self) -> float:
        """The loss by the law, in nats a token."""
        return self.law.loss(self.parameters, self.tokens, self.shape.layers)


def budget(question: Question) -> Answer:
    """Return the answer of `plan.py budget`: a model, its tokens, layout, days and cost.

    Raise UserError if no budget is given, or no model of the law fits on the GPUs.
    """
    gpus, seconds = _gpus_and_seconds(question)
    options = Namespace(**vars(question.options) | {"gpus": gpus, "nodes": None})
    question = replace(question, options=options)
    laws = _laws(question)
    found = {name: search(question, laws[0], share * seconds) for name, share in SHARES.items()}
    others = [search(question, law, seconds) for law in laws[1:]]
    best = found["the budget"]
    rates = cost.rates_of(options, question.machine)
    low, high = (
        best.seconds * end / best.line.prediction.seconds / DAY
        for end in best.line.prediction.interval
    )
    unit, name = (1, "days") if best.seconds >= DAY else (24, "hours")
    between = f"{low * unit:.1f} to {high * unit:.1f}"
    days = f"{best.seconds / DAY * unit:.1f} {name} ({between} in 9 of 10 cases)"
    where = f"{gpus} GPUs of {question.machine.name}"
    lines = [
        f"{_size(best)} for {_tokens(best)} on {where} in {days}, without stops",
        f"  {_shape(best)}; {best.question.batch}",
        f"  {rates.sentence(gpus, best.seconds)}",
        *columns([HEADS, *(_row(name, each) for name, each in found.items())], HEADS[:1]),
        f"by {best.law.name}: {best.law.source}",
    ]
    for other in others:
        lines.append(
            f"by {other.law.name}: {_size(other)} for {_tokens(other)}; {other.law.source}"
        )
    for law in dict.fromkeys(each.law for each in (best, *others)):
        if best.parameters > law.most:
            most = f"{law.most / BILLION:.0f} B parameters"
            lines.append(f"note: {law.name} has runs up to {most}: beyond them it is uncertain")
        if best.parameters < law.least:
            lines.append(
                f"note: {law.name} has runs from {law.least / MILLION:.0f} M parameters on: below "
                "them its losses say nothing, and its tokens are a guess"
            )
    lines += [*ranked_lines([best.line], best.question), *notes([best.line])]
    words = shlex.join(_words_of_shape(best))
    lines.append(f"its layouts: {as_typed(f'python plan.py layouts {words} --gpus {gpus}')}")
    if options.write:
        run, layout = best.question.config, best.line.layout
        written = recipe.make(run, layout, best.tokens, best.loss)
        paths.write_file(options.write, written.toml())
        lines += [f"wrote {options.write}:", *(f"  {line}" for line in written.lines())]
        lines += [f"  {as_typed(line)}" for line in written.commands(options.write)]
    data = {
        "gpus": gpus,
        "machine": question.machine.name,
        **rates.of(gpus, best.seconds),
        "between_days": [low, high],
        "found": {name: _data(each) for name, each in found.items()},
        "other_laws": {each.law.name: _data(each) for each in others},
    }
    return Answer("\n".join(lines), data)


def _gpus_and_seconds(question: Question) -> tuple[int, float]:
    """Return the GPUs and the seconds of the budget: GPU hours, days, or GPUs, two of the three.

    With GPU hours alone the run has about DAYS days, on a power of two of GPUs. With hours and days
    it has whole nodes, or a power of two of GPUs within one, and takes no longer than those days.
    Raise UserError if all three are given, or too few.
    """
    options = question.options
    hours, days = options.gpu_hours, options.days
    given = question.gpus if options.gpus or options.nodes else None
    if hours and days and given:
        raise UserError(
            "give two of --gpu-hours, --days and --gpus (or --nodes): the third follows"
        )
    if hours is None and (days is None or given is None):
        raise UserError("what is the budget? give --gpu-hours 50000, or --days 30 --gpus 64")
    if hours is None:
        return question.gpus, days * DAY
    if given:
        return given, hours * 3600 / given
    wanted = hours / (24 * (days or DAYS))
    if not days:
        gpus = 2 ** max(0, round(math.log2(wanted)))  # a number with many layouts
    elif wanted > (node := question.machine.node):
        gpus = node * math.ceil(wanted / node)
    else:
        gpus = 2 ** max(0, math.ceil(math.log2(wanted)))
    return gpus, hours * 3600 / gpus


def _laws(question: Question) -> list[Law]:
    """Return the laws of the answer, the one of the table first."""
    options = question.options
    if options.law and options.law not in LAWS:
        raise UserError(f"--law {options.law!r}: there are {', '.join(LAWS)}")
    first = LAWS[options.law or "chinchilla"]
    others = [law for law in LAWS.values() if law is not first]
    if ratio := options.tokens_per_parameter:
        text = f"--tokens-per-parameter {ratio:g}; loss by {first.source.rpartition(' ')[2]}"
        return [first._replace(name="your ratio", ratio=ratio, source=text), first, *others]
    return [first, *others]


def search(question: Question, law: Law, seconds: float) -> Found:
    """Return the model that takes so many seconds on the question's GPUs, with a law's tokens.

    Raise UserError if it does not fit on them.
    """
    like, gpus = question.config.model, question.gpus
    flops = gpus * question.machine.peak * START_MFU * seconds
    size = _size_for(law, flops)
    for _ in range(TRIES):
        shape = model_sizes.near(like, size)
        asked = _with_shape(question, shape, flops)
        ranked = [
            line
            for line in asked.rank(most=1).ranked
            if line.prediction.risk <= question.options.risk
        ]
        if not ranked:
            text = f"{model_stats.parameters(shape) / BILLION:.1f} B parameters"
            raise LayoutError(
                f"budget: {law.name} asks for {text}, of which no layout fits on {gpus} GPUs of "
                f"{question.machine.name}: more GPUs for fewer days, or --tokens-per-parameter"
            )
        rate = ranked[0].prediction.tokens_per_second
        tokens = rate * seconds
        found = Found(shape, tokens, seconds, ranked[0], law, asked)
        flops = 6.0 * found.parameters * tokens
        wanted = _size_for(law, flops)
        if abs(wanted / size - 1) < CLOSE:
            break
        size = wanted
    return found


def _size_for(law: Law, flops: float) -> float:
    """Return the parameters N whose tokens by a law take some FLOPs, 6 N tokens(N)."""
    low, high = 1e5, 1e14
    for _ in range(80):
        middle = math.sqrt(low * high)
        if 6 * middle * law.tokens(middle) < flops:
            low = middle
        else:
            high = middle
    return low


def _with_shape(question: Question, shape: ModelShape, flops: float) -> Question:
    """Return the question for a shape, with a batch for so many FLOPs if the user gave none."""
    training = question.config.training
    options = Namespace(**vars(question.options) | {"question": "layouts", "top": 1})
    given = question.given
    if question.has_default_batch:
        samples = BATCH_LAWS[0].tokens(flops / 6, 1.0) / shape.seq_length
        samples = max(question.gpus, 2 ** max(3, round(math.log2(samples))))
        training = replace(training, global_batch_size=2 ** math.ceil(math.log2(samples)))
        given = {*given, "global_batch_size"}
    config = replace(question.config, model=shape, training=training)
    return replace(question, options=options, config=config, given=given)


HEADS = ["budget", "parameters", "tokens", "a parameter", "loss", "layout", "MFU"]


def _row(name: str, found: Found) -> list[str]:
    """Return a line of the table of budgets."""
    layout = found.line.layout
    axes = f"tp {layout.tp} pp {layout.pp} cp {layout.cp} dp {layout.dp} zero {layout.zero}"
    return [
        name,
        _amount(found.parameters, 2),
        _amount(found.tokens, 0),
        f"{found.tokens / found.parameters:.1f}",
        f"{found.loss:.3f}",
        axes.replace(" cp 1", ""),
        f"{found.line.prediction.mfu:.1%}",
    ]


def _amount(number: float, digits: int) -> str:
    """Return parameters or tokens in billions, or in millions if the digits would be few."""
    if number >= 10 * BILLION / 10**digits:
        return f"{number / BILLION:,.{digits}f} B"
    return f"{number / MILLION:,.{digits}f} M"


def _size(found: Found) -> str:
    """Return a model's parameters as text."""
    return f"{_amount(found.parameters, 2)} parameters"


def _tokens(found: Found) -> str:
    """Return the tokens as text, also for each parameter, with the loss by the law."""
    each = found.tokens / found.parameters
    tokens = f"{_amount(found.tokens, 0)} tokens ({each:.1f} a parameter"
    return f"{tokens}, loss {found.loss:.2f} by {found.law.name})"


def _shape(found: Found) -> str:
    """Return a shape as text."""
    shape = found.shape
    sizes = f"{shape.layers} blocks of {shape.hidden}, {shape.heads} heads"
    return f"{sizes}, MLP {shape.ffn_hidden}, {shape.seq_length} tokens a sample"


def _words_of_shape(found: Found) -> list[str]:
    """Return the words that give a model, its batch and the machine to another question.

    They have all options of the model: the one that it is like may be the default of this question.
    """
    batch = str(found.question.config.training.global_batch_size)
    machine = ["--gpu", found.question.machine.name]
    return [*to_words(found.shape), "--global-batch-size", batch, *machine]


def _data(found: Found) -> dict:
    """Return a model of a budget as data."""
    return {
        "parameters": found.parameters,
        "tokens": found.tokens,
        "days": found.seconds / DAY,
        "loss_nats": found.loss,
        "law": found.law.name,
        "model": asdict(found.shape),
        "layout": asdict(found.line.layout),
        "tokens_per_second": found.line.prediction.tokens_per_second,
        "mfu_fraction": found.line.prediction.mfu,
        "global_batch_size": found.question.config.training.global_batch_size,
    }
