"""The planner's questions: each takes a Question and gives an Answer, as text and as data.

question = Question(options, request.config, request.given, hardware.load("a100-80"))
print(ranked_layouts(question).text)
"""

import math
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from config import schema, validation
from config.command_line import to_words
from config.messages import UserError
from config.schema import Config
from planner import cost, hardware, layouts, model_sizes, risk
from planner.job import Job
from planner.plan_only import PlanOnly
from planner.step_time import with_networks

STEPS = 1000  # of the command that is printed, if no length is given
BATCH = 2048  # global batch if none is given: that of every published run of a 200B model
# Models of the questions that need one only as an example.
EXAMPLES = dict.fromkeys(("largest", "shapes"), "gpt3-175b")
EXAMPLES |= dict.fromkeys(("rampup", "timeline"), "bloom-176b")
SHOWN_RISKY = 5
FULL_BATCH: dict[str, Any] = dict.fromkeys(("rampup_batch_size", "batch_schedule"))
# Of the kind that measured runs have; two layouts that are less apart the plan may well confuse: it
# is 4 % off in the mean on machines that it was fitted on (docs/planning.md).
PLAIN: dict[str, Any] = {"schedule": "1f1b", "vocab_pp": None, "cp": 1}
TOLD_APART = 1.06
SEARCHED = ("layouts", "days")  # questions for which all schedules are searched
WIDTH = 120  # of a table, in columns of a terminal
TEXTS = ("recompute", "schedule", "ramp-up")  # columns that begin at the left
LEFT_OUT = {"cp": "1", "ramp-up": "-"}  # columns that hold nothing else are left out
FIRST = "the first line is the fastest; a later one may have a faster schedule; --json: all flags"
NETWORK = (
    "note: ranked at the rate of the network's datasheet, and 90 % reaches to a quarter of it: "
    "--network GB/s gives yours, the busbw of all ranks by scripts/bench_allreduce.sh"
)
BILLION = 1e9  # of parameters, and bytes of a gigabyte


@dataclass(frozen=True)
class Answer:
    """What a question found: text for people, data for --json."""

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
        those that cannot run: train.py's own check has the last word. plain: only layouts of the
        kind that measured runs have, unless another was given.
        """
        run, names = self.config, {field.name for field in fields(schema.Layout)}
        fixed = {name: getattr(run.layout, name) for name in names & set(self.given)}
        if plain:
            fixed = PLAIN | fixed
        if self.options.question not in SEARCHED:  # a ramp-up ranks often
            fixed = PLAIN | {"recompute_layers": None} | fixed
        refusal = lambda layout: _refusal(replace(run, layout=layout), self.gpus)  # noqa: E731
        about = run.model, run.training, self.machine, self.gpus
        found = layouts.rank(*about, fixed, refusal, self.options.risk, most)
        if self.options.question not in SEARCHED:
            return found
        return found._replace(ranked=[self._at_networks(one) for one in found.ranked])

    def _at_networks(self, one: layouts.Ranked) -> layouts.Ranked:
        """A layout with an interval for a network whose rate was not measured on this cluster."""
        run, name = self.config, one.layout.schedule
        layout = replace(one.layout, schedule="1f1b" if name == "auto" else name)
        job = Job(run.model, layout, run.training, self.machine)
        return replace(one, prediction=with_networks(one.prediction, job))

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
    """What to type after train.py for a layout: what is not its default, but for dp."""
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


# ---- Layouts -------------------------------------------------------------------------------------


def ranked_layouts(question: Question) -> Answer:
    """All layouts ranked, all rejected ones with their reason."""
    training, machine, top = question.config.training, question.machine, question.options.top
    every = question.options.json or question.options.rehearse
    fitting, rejected, slower = question.rank(math.inf if every else top)
    accepted = question.options.risk
    ranked = [r for r in fitting if r.prediction.risk <= accepted]
    risky = [r for r in fitting if r.prediction.risk > accepted]
    data = {
        "gpus": question.gpus,
        "machine": machine.name,
        "global_batch_size": training.global_batch_size,
        "ranked": [_as_data(r, question) for r in ranked],
        "risky": [_as_data(r, question) for r in risky],
        "rejected": [r.layout | {"reason": r.reason} for r in rejected],
    }
    head = (
        f"{len(fitting) + slower} layouts fit on {question.gpus} GPUs of {machine.name}, "
        f"global batch {training.global_batch_size}, {training.precision}"
    )
    lines = [head, *(_ranked_lines(ranked[:top], question) if ranked else [])]
    slower += max(0, len(ranked) - top)
    lines += [f"... and {slower} slower ones"] if slower else []
    lines += [FIRST] if len(ranked) > 1 else []
    lines += _risky_lines(ranked, risky, question)
    lines += ["", f"{len(rejected)} cannot run:"] + _reasons(rejected, question.options.rejected)
    lines += [*_notes(ranked[:1]), *([] if fitting else where_it_fits(question, rejected))]
    trained = not (isinstance(question.config.model, PlanOnly) or machine.software.fp8)
    if ranked and trained:
        launcher, words = _launcher(question), _command(question, ranked[0].layout)
        data |= {"launcher": launcher, "command": words, "recommended": None}
        if simple := _recommended(question, ranked[0]):
            data["recommended"] = _as_data(simple, question)
            command = shlex.join([*launcher, *_command(question, simple.layout)])
            lines += [_given_up(simple, ranked[0]), f"recommended: {command}"]
        lines += [f"the first: {shlex.join([*launcher, *words])}", *_stand_ins(question)]
    return Answer("\n".join(lines), data)


def _recommended(question: Question, first: layouts.Ranked) -> layouts.Ranked | None:
    """The fastest layout of the kind that measured runs have, if the first is of another kind and
    too little faster for the plan to tell them apart.
    """
    found = question.rank(most=1, plain=True).ranked
    safe = [one for one in found if one.prediction.risk <= question.options.risk]
    if not safe or safe[0].prediction.seconds > first.prediction.seconds * TOLD_APART:
        return None
    return safe[0] if safe[0].layout != first.layout else None


def _given_up(simple: layouts.Ranked, first: layouts.Ranked) -> str:
    """What the recommended layout is, and what it costs."""
    seconds = simple.prediction.seconds
    more = seconds / first.prediction.seconds - 1
    return (
        f"{_words(simple.layout)}: {seconds:.2f} s, {more:.1%} more than the first, but of a kind "
        "that was measured: the plan does not tell them apart"
    )


def where_it_fits(question: Question, rejected: list[layouts.Rejected]) -> list[str]:
    """A sentence on what would hold the model, if memory is why no layout is ranked."""
    run, machine = question.config, question.machine
    if not any(one.reason.startswith("out of memory") for one in rejected):
        return []
    allowed = min(risk.safe_bytes(machine, question.options.risk), machine.memory)
    about = run.model, run.training, replace(machine, memory=allowed)
    if found := model_sizes.leanest(*about, question.gpus):
        return [f"not as it was given, but {' '.join(flags(found))} fits"]
    try:
        nodes, found = model_sizes.smallest(*about)
    except UserError as error:
        return [str(error)]
    return [f"{nodes} nodes of {machine.node} hold it, with {' '.join(flags(found))}"]


def _command(question: Question, layout: schema.Layout) -> list[str]:
    """What to type after the launcher to train on a layout, with --model as it was given.

    It starts as it is: data and length that were not given are synthetic and STEPS.
    """
    run, name = replace(question.config, layout=layout), question.options.model
    words = [word for group in schema.GROUPS for word in to_words(getattr(run, group), "dp")]
    if name:
        shape, given = to_words(run.model), question.given
        own = ["--model", name, *to_words(run.model, always=given, only=given)]
        words[: len(shape)] = own
    if run.data.data == ("synthetic",):
        words += ["--data", "synthetic"]
    if not _has_length(run):
        words += ["--steps", str(STEPS)]
    return ["python", "train.py", *words]


def _launcher(question: Question) -> list[str]:
    """What starts the ranks: mpirun on one node, srun on several."""
    if question.gpus == 1:
        return []
    if question.gpus <= question.machine.node:
        return ["mpirun", "-n", str(question.gpus)]
    return ["srun", "--mpi=pmi2", "-n", str(question.gpus)]


def _has_length(run: Config) -> bool:
    return bool(run.training.steps or run.training.train_samples)


def _stand_ins(question: Question) -> list[str]:
    """A line on what a command of `_command` has in the place of options that were not given."""
    run, missing = question.config, []
    if run.data.data == ("synthetic",):
        missing.append("--data synthetic is random tokens: give the prefix of your corpus")
    if not _has_length(run):
        missing.append(f"--steps {STEPS} is an example: give your length")
    return [f"  {'; '.join(missing)}"] if missing else []


def _as_data(found: layouts.Ranked, question: Question) -> dict[str, Any]:
    told: dict[str, Any] = {"rampup": found.rampup, "flags": flags(found.layout)}
    rates = cost.rates_of(question.options, question.machine)
    told |= rates.per_billion(question.gpus, found.prediction.tokens_per_second)
    return asdict(found.layout) | told | asdict(found.prediction)


def _risky_lines(
    safe: list[layouts.Ranked], risky: list[layouts.Ranked], question: Question
) -> list[str]:
    """The layouts that are faster than the fastest safe one, and what would make them safe."""
    best = safe[0].prediction.seconds if safe else math.inf
    faster = [r for r in risky if r.prediction.seconds < best]
    if not risky:
        return []
    accepted, machine = question.options.risk, question.machine
    lines = [
        "",
        f"{len(risky)} more fit with a risk above {accepted:.0%}, {len(faster)} of them faster:",
    ]
    allowed = risk.safe_bytes(machine, accepted)
    for one in faster[:SHOWN_RISKY]:
        at, p = one.layout, one.prediction
        over = (machine.memory - p.margin - allowed) / BILLION
        alike = [r for r in safe if _place(r.layout) == _place(at)]
        way = f"; safe with {_words(alike[0].layout)}" if alike else ""
        lines.append(
            f"  {_words(at)}: {p.seconds:.2f} s, risk {p.risk:.0%}, "
            f"safe with {over:.1f} GB less{way}"
        )
    return lines


def _place(at: schema.Layout) -> tuple[int, int, int]:
    return at.tp, at.pp, at.micro_batch_size


def _words(at: schema.Layout) -> str:
    return " ".join(flags(at)) or "(train.py's defaults)"


def _ranked_lines(ranked: list[layouts.Ranked], question: Question) -> list[str]:
    """The table of some layouts, its columns as wide as what they hold."""
    rows = [_cells(one, question) for one in ranked]
    heads = [name for name in rows[0] if {row[name] for row in rows} != {LEFT_OUT.get(name)}]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in heads}
    gap = " " * (2 if sum(widths.values()) + 2 * len(widths) <= WIDTH else 1)
    lines = []
    for row in [{name: name for name in heads}, *rows]:
        cells = [f"{row[name]:{'<' if name in TEXTS else '>'}{widths[name]}}" for name in heads]
        lines.append("".join(gap + cell for cell in cells).rstrip())
    return lines


def _cells(found: layouts.Ranked, question: Question) -> dict[str, str]:
    """A line of the table, by the heads of its columns."""
    at, p = found.layout, found.prediction
    rates = cost.rates_of(question.options, question.machine)
    axes = {"tp": at.tp, "pp": at.pp, "cp": at.cp, "dp": at.dp, "mbs": at.micro_batch_size}
    several = f" {at.stages_per_rank}" if at.schedule == "interleaved" else ""
    schedule = f"{at.schedule}{several}{' vocab' * bool(at.vocab_pp)}"
    return {name: str(size) for name, size in axes.items()} | {
        "recompute": f"{at.recompute} {at.recompute_layers or ''}".rstrip(),
        "schedule": schedule if at.pp > 1 else "-",
        "sp": "sp" if at.sequence_parallel else "-",
        "zero": str(at.zero),
        "s/step": f"{p.seconds:.2f}",
        "90 %": f"+{p.interval[1] / p.seconds - 1:.0%}",  # how far its upper end is above
        "tokens/s": f"{p.tokens_per_second:,.0f}",
        "MFU": f"{p.mfu:.1%}",
        "bubble": f"{p.bubble:.1%}",
        "GB": f"{max(stage.total for stage in p.memory) / BILLION:.1f}",
        "risk": f"{p.risk:.1%}",
        **rates.cells(question.gpus, p.tokens_per_second),
        "ramp-up": found.rampup.partition(" does")[0],  # or the first batch that does not divide
    }


def _reasons(rejected: list[layouts.Rejected], every: bool) -> list[str]:
    if every:
        values = [" ".join(f"{k}={v}" for k, v in r.layout.items()) for r in rejected]
        return [f"  {at}: {r.reason}" for at, r in zip(values, rejected, strict=True)]
    kinds: dict[str, list[str]] = {}
    for reason in (r.reason for r in rejected):
        kinds.setdefault(re.sub(r"[\d.]+", "", reason), []).append(reason)
    needed = lambda reason: [float(n) for n in re.findall(r"needs ([\d.]+) GB", reason)]  # noqa: E731
    lines = [f"  {len(reasons):4}  {min(reasons, key=needed)}" for reasons in kinds.values()]
    return [*lines, "  (one example of each kind; --rejected shows all)"]


def _notes(ranked: list[layouts.Ranked]) -> list[str]:
    told = [f"note: {text}" for r in ranked for text in r.prediction.warnings]
    return told + [NETWORK] * any(r.prediction.at_networks for r in ranked)


# ---- How long, how many samples in a step --------------------------------------------------------


def days(question: Question) -> Answer:
    """How long so many tokens take, on the fastest layout or the given one."""
    tokens, where = question.options.tokens, f"{question.gpus} GPUs of {question.machine.name}"
    if not tokens:
        raise UserError("how many tokens? give --tokens, such as --tokens 450e9")
    ranked, rejected, _ = question.rank(most=1)
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
    lines += [*_ranked_lines([best], question), *_notes([best])]
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


QUESTIONS: dict[str, tuple[Callable[[Question], Answer], str]] = {
    "layouts": (ranked_layouts, "all layouts by seconds per step, and why others cannot run"),
    "days": (days, "how long training takes"),
    "rampup": (rampup, "a batch-size ramp-up, checked before step 1"),
}
