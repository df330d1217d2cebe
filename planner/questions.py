"""Defines a question to the planner, and its answer: text for people, and data for --json.

question = Question(options, request.config, request.given, hardware.load("a100-80"))
question.rank().ranked[0].layout

plan.py makes a `Question` from the command line and passes it to the function that answers it. The
functions, from a Question to an Answer, are in layout_table.py, duration_questions.py,
layout_questions.py, model_questions.py and growth.py. Options that the user gave are fixed in all
layouts that are tried; the planner chooses the others.
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

BATCH = 2048  # the global batch size if none is given: all published runs of 200B models have it
# The options of a ramp-up of the batch, as None: a run with them has the full batch in every step.
FULL_BATCH: dict[str, Any] = dict.fromkeys(("rampup_batch_size", "batch_schedule"))
SEARCHED = ("layouts", "days")  # questions for which all schedules and numbers of blocks are tried
BILLION = 1e9  # a billion parameters, and the bytes of a gigabyte


@dataclass(frozen=True)
class Answer:
    """The answer to a question: text for people, data for --json."""

    text: str
    data: Any


@dataclass(frozen=True)
class Question:
    """A question's arguments."""

    options: Namespace  # the values of the planner's own flags (flags.py), and `question`, its name
    config: Config  # model, layout and training options of train.py, with defaults filled in
    given: Collection[str]  # options of `config` that a flag or the --config file gave
    machine: hardware.Machine

    @property
    def gpus(self) -> int:
        """The number of GPUs: --gpus, or all GPUs of --nodes nodes, or of one node."""
        return self.options.gpus or (self.options.nodes or 1) * self.machine.node

    def rank(self, most: float = math.inf, plain: bool = False) -> layouts.Answer:
        """Return the fastest layouts on the question's GPUs, and the layouts that cannot run.

        Layout options that the user gave are fixed, and a layout is ranked only if train.py's own
        checks accept it. most: the number of layouts to rank. plain: whether the answer also has
        the fastest layout of the kind that real runs have measured (enumeration.PLAIN).
        """
        run = self.config
        fixed = {field.name: getattr(run.layout, field.name) for field in fields(schema.Layout)}
        fixed = {name: value for name, value in fixed.items() if name in self.given}
        searched = self.options.question in SEARCHED
        # A question that is not in SEARCHED tries only plain layouts, to be quick: a ramp-up ranks
        # for each number of nodes.
        if not searched:
            fixed = PLAIN | {"recompute_layers": None} | fixed
        # The check is for the full batch: whether a layout can run the smaller batches of a ramp-up
        # is not a reason to reject it, but a column of the table.
        full = replace(run, training=replace(run.training, **FULL_BATCH))

        def refusal(layout: schema.Layout) -> str:
            """Return the error with which train.py would refuse a layout, or "" if it accepts."""
            try:
                validation.check_any_length(replace(full, layout=layout), self.gpus)
            except UserError as error:
                return str(error)
            return ""

        def at_networks(row: layouts.Ranked) -> layouts.Ranked:
            """Return a ranked layout, its interval widened if the network was not measured."""
            # The searched schedule of `auto` is not known here; 1F1B stands for it.
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
        """Return the job of the layout that the user gave, for questions about one layout.

        Without --gpus and --nodes it has as many GPUs as the layout needs. Raise UserError if the
        layout is impossible on these GPUs.
        """
        layout, given = self.config.layout, self.options.gpus or self.options.nodes
        ranks = self.gpus if given else layout.tp * layout.pp * layout.cp * (layout.dp or 1)
        run = validation.check_any_length(self.config, ranks)
        return Job(run.model, run.layout, run.training, self.machine)


def flags(layout: schema.Layout) -> list[str]:
    """Return train.py's command-line words for a layout: the options that differ from the defaults.

    There is no option for dp, which follows from the number of ranks.
    """
    return to_words(layout, without="dp")
