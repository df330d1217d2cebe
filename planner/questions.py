"""A question to the planner, and its answer: text for people, and data.

question = Question(options, request.config, request.given, hardware.load("a100-80"))
question.rank().ranked[0].layout

The questions are functions from a Question to an Answer: layout_table.py, duration_questions.py,
layout_questions.py, model_questions.py, growth.py. plan.py lists them.
"""

import math
from argparse import Namespace
from collections.abc import Collection
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
FULL_BATCH: dict[str, Any] = dict.fromkeys(("rampup_batch_size", "batch_schedule"))
SEARCHED = ("layouts", "days")  # questions for which all schedules are searched
BILLION = 1e9  # of parameters, and bytes of a gigabyte


@dataclass(frozen=True)
class Answer:
    """The answer to a question: text for people, data for --json."""

    text: str
    data: Any


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
        run = self.config
        fixed = {field.name: getattr(run.layout, field.name) for field in fields(schema.Layout)}
        fixed = {name: value for name, value in fixed.items() if name in self.given}
        searched = self.options.question in SEARCHED  # a ramp-up ranks often
        if not searched:
            fixed = PLAIN | {"recompute_layers": None} | fixed
        full = replace(run, training=replace(run.training, **FULL_BATCH))

        def refusal(layout: schema.Layout) -> str:
            """Why train.py would not start it, or "". What a ramp-up of the batch does not divide
            has a column of its own.
            """
            try:
                validation.check_any_length(replace(full, layout=layout), self.gpus)
            except UserError as error:
                return str(error)
            return ""

        def at_networks(row: layouts.Ranked) -> layouts.Ranked:
            """With an interval for a network whose rate was not measured on this cluster."""
            name = row.layout.schedule.replace("auto", "1f1b")
            job = Job(run.model, replace(row.layout, schedule=name), run.training, self.machine)
            return row._replace(prediction=with_networks(row.prediction, job))

        asked = Asked(run.model, run.training, self.machine, self.gpus, fixed)
        found = layouts.rank(asked, refusal, self.options.risk, most, plain)
        if not searched:
            return found
        ranked = list(map(at_networks, found.ranked))
        return found._replace(ranked=ranked, plain=list(map(at_networks, found.plain)))

    def job(self) -> Job:
        """The given layout on the GPUs asked for; UserError if it is impossible there."""
        layout, given = self.config.layout, self.options.gpus or self.options.nodes
        ranks = self.gpus if given else layout.tp * layout.pp * layout.cp * (layout.dp or 1)
        run = validation.check_any_length(self.config, ranks)
        return Job(run.model, run.layout, run.training, self.machine)


def flags(layout: schema.Layout) -> list[str]:
    """Return the words after train.py for a layout: what is not its default, but for dp."""
    return to_words(layout, without="dp")
