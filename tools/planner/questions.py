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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from architecture.shape import ModelShape
from base.errors import UserError
from config import schema, validation
from config.command_line import to_words
from config.schema import Config
from costs import hardware
from costs.job import Job
from costs.memory import OF_RUN, StageMemory
from costs.step_time import NETWORK_SHARES, Prediction, predict, with_networks
from tools.planner import layouts, model_sizes, programs
from tools.planner.enumeration import PLAIN, Asked
from tools.planner.program import Program

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
    machine: hardware.Machine  # with --for, one with that program's terms of time and memory
    # For fields of Layout, the values around which `shapes` searches; the user's come before them.
    near: Mapping[str, Any] = field(default_factory=dict)

    @property
    def program(self) -> Program | None:
        """The program of --for, or None: train.py."""
        name = getattr(self.options, "program", None)
        return programs.of(name) if name else None

    @property
    def gpus(self) -> int:
        """The number of GPUs: --gpus, or all GPUs of --nodes nodes, or of one node."""
        return self.options.gpus or (self.options.nodes or 1) * self.machine.node

    @property
    def batch(self) -> str:
        """The global batch as text, with its tokens, and whether it is only the planner's default.

        train.py has another default, since a first run on one CPU must end; so a command that the
        planner prints always names the batch.
        """
        samples = self.config.training.global_batch_size
        tokens = samples * self.config.model.seq_length
        amount = f"{tokens / 1e6:,.1f}M" if tokens >= 1e6 else f"{tokens / 1e3:,.1f}K"
        text = f"global batch {samples} ({amount} tokens a step"
        return text + ("; the planner's default)" if self.has_default_batch else ")")

    @property
    def has_default_batch(self) -> bool:
        """Whether the user gave no batch, neither as a flag nor in a file nor by a run."""
        given = {"global_batch_size", "batch_tokens", "batch_schedule"} & set(self.given)
        return not given and not self.options.config

    @property
    def compared_on(self) -> hardware.Machine:
        """The machine on which layouts are compared; they are then predicted on `machine`.

        If nobody has measured the network between nodes, it is the slowest of NETWORK_SHARES: a
        layout that is fast only on a fast network loses much on another one.
        """
        machine = self.machine
        searched = self.options.question in SEARCHED
        if not searched or machine.network_measured or self.gpus <= machine.node:
            return machine
        return hardware.at_share_of_network(machine, NETWORK_SHARES[-1])

    def rank(
        self, most: float = math.inf, median: bool = False, starts: Config | None = None
    ) -> layouts.Ranking:
        """Return the best layouts on the question's GPUs, and the layouts that cannot run.

        Layout options that the user gave are fixed, and a layout is ranked only if train.py's own
        checks accept it. most: the number of layouts to rank. median: whether the answer also has
        the layout whose predicted seconds are the least. starts: a start of the run, all of whose
        batch sizes a layout must run; None: the full batch alone.
        """
        run = self.config
        fixed = {one.name: getattr(run.layout, one.name) for one in fields(schema.Layout)}
        fixed = {name: value for name, value in fixed.items() if name in self.given}
        searched = self.options.question in SEARCHED
        fixed = self._trials | dict(self.near) | fixed
        # A question that is not in SEARCHED tries only plain layouts, to be quick.
        if not searched:
            fixed = PLAIN | {"recompute_layers": None} | fixed
        machine = self.machine
        refusal = self._refusal(run.model, self.gpus, starts)
        asked = Asked(run.model, run.training, self.compared_on, self.gpus, fixed)
        found = layouts.rank(asked, refusal, self.options.risk, most, median)
        if self.compared_on == machine:
            return found

        def at_networks(line: layouts.Ranked) -> layouts.Ranked:
            job = Job(run.model, line.priced, run.training, machine)
            prediction = predict(job, line.prediction.memory)
            return line._replace(prediction=with_networks(prediction, job, line.prediction))

        ranked = list(map(at_networks, found.ranked))
        return found._replace(ranked=ranked, median=list(map(at_networks, found.median)))

    def fewest_nodes(self) -> tuple[int, layouts.Ranked]:
        """Return the fewest full nodes that hold the question's model, and a layout for them.

        Raise UserError if no number of nodes does.
        """
        run, machine = self.config, self.machine
        job = Job(run.model, schema.Layout(dp=1), run.training, machine)
        least = model_sizes.least_nodes(job, self.options.risk)
        return model_sizes.smallest(self.leanest, run.model, machine.node, least)

    def leanest(self, model: ModelShape, gpus: int) -> layouts.Ranked | None:
        """Return a layout with which a model fits on some GPUs, or None if none does.

        Nothing that the user gave about the layout is fixed. The risk is at most --risk, and
        train.py's own checks accept the layout, so `rank` finds one too.
        """
        fixed = {name: value for name, value in self._trials.items() if name not in layouts.LEAN}
        asked = Asked(model, self.config.training, self.machine, gpus, fixed)
        return layouts.leanest(asked, self._refusal(model, gpus), self.options.risk)

    @property
    def _trials(self) -> dict[str, Any]:
        """The values of a layout's options that are tried if another program has its own."""
        return programs.trials(self.program) if self.program else {}

    def _refusal(
        self, model: ModelShape, gpus: int, starts: Config | None = None
    ) -> Callable[[schema.Layout], str]:
        """Return a function from a layout to the error with which train.py would refuse it, or "".

        With --for it is the reason of that program. starts: as in `rank`. Without it the check is
        for the full batch: whether a layout can run the smaller batches of a ramp-up is then no
        reason to reject it, but a column of the table.
        """
        training = replace(self.config.training, **FULL_BATCH)
        full = starts or replace(self.config, model=model, training=training)
        if program := self.program:
            return lambda layout: program.refusal(full, layout)

        def refusal(layout: schema.Layout) -> str:
            """Return train.py's error for a layout, or "" if it runs."""
            try:
                validation.check_any_length(replace(full, layout=layout), gpus, "GPUs")
            except UserError as error:
                return str(error)
            return ""

        return refusal

    def job(self) -> Job:
        """Return the job of the layout that the user gave, for questions about one layout.

        Without --gpus and --nodes it has as many GPUs as the layout needs. Raise UserError if the
        layout is impossible on these GPUs.
        """
        layout, given = self.config.layout, self.options.gpus or self.options.nodes
        ranks = self.gpus if given else layout.tp * layout.pp * layout.cp * (layout.dp or 1)
        run = validation.check_any_length(self.config, ranks, "GPUs")
        if self.program and (reason := self.program.refusal(run, run.layout)):
            raise UserError(reason)
        return Job(run.model, run.layout, run.training, self.machine)


def prediction_data(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as data: the unit of every number is in its name."""
    return {
        "step_seconds": prediction.seconds,
        "interval_seconds": prediction.interval,
        "quantile_seconds": prediction.quantile,
        "part_seconds": prediction.parts,
        "at_networks_seconds": prediction.at_networks,
        "tokens_per_second": prediction.tokens_per_second,
        "model_tflops_per_gpu": prediction.model_tflops,
        "mfu_fraction": prediction.mfu,
        "bubble_fraction": prediction.bubble,
        "risk_fraction": prediction.risk,
        "fits": prediction.fits,
        "margin_bytes": prediction.margin,
        "memory": [memory_data(stage) for stage in prediction.memory],
        "warnings": prediction.warnings,
        "far": prediction.far,
    }


def memory_data(stage: StageMemory) -> dict[str, Any]:
    """Return the memory of a pipeline rank's GPU as data."""
    parts = {name: getattr(stage, name) for name in (*OF_RUN, "buffers", "context", "total")}
    of_rank = {"rank": stage.stage, "blocks": stage.blocks, "parameters": stage.parameters}
    return of_rank | {f"{name}_bytes": value for name, value in parts.items()}


def flags(layout: schema.Layout) -> list[str]:
    """Return train.py's command-line words for a layout: the options that differ from the defaults.

    There is no option for dp, which follows from the number of ranks.
    """
    return to_words(layout, without="dp")
