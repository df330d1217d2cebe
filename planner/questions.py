"""A question to the planner, and its answer: text for people, and data.

question = Question(options, request.config, request.given, hardware.load("a100-80"))
question.rank().ranked[0].layout

The questions are functions from a Question to an Answer: layout_table.py, duration_questions.py,
layout_questions.py, model_questions.py, growth.py.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from config import schema, validation
from config.command_line import to_words
from config.messages import UserError
from config.schema import Config
from planner import hardware, layouts
from planner.enumeration import PLAIN, Asked
from planner.job import Job
from planner.step_time import with_networks

BATCH = 2048  # global batch if none is given: that of every published run of a 200B model
# Models of the questions that need one only as an example.
EXAMPLES = dict.fromkeys(("largest", "shapes"), "gpt3-175b")
EXAMPLES |= dict.fromkeys(("rampup", "timeline"), "bloom-176b")
FULL_BATCH: dict[str, Any] = dict.fromkeys(("rampup_batch_size", "batch_schedule"))
SEARCHED = ("layouts", "days")  # questions for which all schedules are searched
BILLION = 1e9  # of parameters, and bytes of a gigabyte


@dataclass(frozen=True)
class Answer:
    """The answer to a question: text for people, data for --json."""

    text: str
    data: object


@dataclass(frozen=True)
class Question:
    """A question's arguments."""

    options: Namespace  # the planner's own: nodes, gpus, top, rejected, tokens, size, trace
    config: Config
    given: Collection[str]  # options of `config` that a flag or the --config file gave
    machine: hardware.Machine

    @property
    def gpus(self) -> int:
        """--gpus, or --nodes full nodes."""
        return self.options.gpus or (self.options.nodes or 1) * self.machine.node

    def rank(self, most: float = math.inf, plain: bool = False) -> layouts.Answer:
        """The fastest layouts on these GPUs that agree with what was given, so many of them, and
        those that cannot run: train.py's own check has the last word. plain: whether the fastest
        of the kind that measured runs have is looked for too.
        """
        run, names = self.config, {field.name for field in fields(schema.Layout)}
        fixed = {name: getattr(run.layout, name) for name in names & set(self.given)}
        if self.options.question not in SEARCHED:  # a ramp-up ranks often
            fixed = PLAIN | {"recompute_layers": None} | fixed
        refusal = lambda layout: _refusal(replace(run, layout=layout), self.gpus)  # noqa: E731
        asked = Asked(run.model, run.training, self.machine, self.gpus, fixed)
        found = layouts.rank(asked, refusal, self.options.risk, most, plain)
        if self.options.question not in SEARCHED:
            return found
        ranked, simple = (
            [self._at_networks(one) for one in lines] for lines in (found.ranked, found.plain)
        )
        return found._replace(ranked=ranked, plain=simple)

    def _at_networks(self, one: layouts.Ranked) -> layouts.Ranked:
        """A layout with an interval for a network whose rate was not measured on this cluster."""
        run, name = self.config, one.layout.schedule
        layout = replace(one.layout, schedule="1f1b" if name == "auto" else name)
        job = Job(run.model, layout, run.training, self.machine)
        return one._replace(prediction=with_networks(one.prediction, job))

    def job(self) -> Job:
        """The given layout on the GPUs asked for; UserError if it is impossible there."""
        layout, given = self.config.layout, self.options.gpus or self.options.nodes
        ranks = self.gpus if given else layout.tp * layout.pp * layout.cp * (layout.dp or 1)
        run = validation.check_any_length(self.config, ranks)
        return Job(run.model, run.layout, run.training, self.machine)


def _refusal(run: Config, gpus: int) -> str:
    """Why train.py would not start it on so many GPUs; empty if it would. What a ramp-up of the
    batch does not divide has a column of its own.
    """
    run = replace(run, training=replace(run.training, **FULL_BATCH))
    try:
        validation.check_any_length(run, gpus)
    except UserError as error:
        return str(error)
    return ""


def flags(layout: schema.Layout) -> list[str]:
    """Return the words after train.py for a layout: what is not its default, but for dp."""
    return to_words(layout, without="dp")


def defaults(name: str, machine: hardware.Machine, given: Collection[str]) -> dict[str, Any]:
    """Values of train.py's options for the question of that name, where nothing gave them."""
    values: dict[str, Any] = {}
    if "model" not in given and not {"layers", "hidden", "heads"} <= set(given):
        values = {"model": EXAMPLES[name]} if name in EXAMPLES else {}
    if "precision" not in given:
        values["precision"] = machine.precision
    if not {"global_batch_size", "batch_schedule"} & set(given):
        values["global_batch_size"] = BATCH
    return values


# Questions by their names, each with what it answers in a few words.
Questions = dict[str, tuple[Callable[[Question], Answer], str]]
